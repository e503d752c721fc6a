"""What is refused when an engine starts, tried on the model and worker of one that has started."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from update_runs import _llm


@contextmanager
def _replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    before = target.__dict__[name]
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def start_refusals(report: Any, *, model: Path) -> dict[str, str]:
    """The message of each fault that binding or the self-test must find, by its name."""
    import torch
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    from r3.engine_hooks.vllm_groups import full_attention_group
    from r3.engine_hooks.vllm_worker import RouterTap

    llm = _llm(model)
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    loaded, config = worker.model_runner.get_model(), llm.llm_engine.vllm_config
    spec = worker._tap.spec
    found: dict[str, str] = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            found[name] = "accepted"
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"

    def bind(spec: Any = spec, config: Any = config) -> None:
        worker._tap = RouterTap(loaded, spec, config)

    attempt("good", bind)
    attempt("good self-test", worker.compile_or_warm_up_model)
    with _replaced(MoERunner, "is_monolithic", property(lambda self: True)):
        attempt("monolithic", bind)
    runners = [m for m in loaded.modules() if isinstance(m, MoERunner)]
    router, runners[1].router = runners[1].router, object()
    attempt("unknown router", bind)
    runners[1].router = router
    attempt("other layers", lambda: bind(dataclasses.replace(spec, moe_layers=(0, 1, 2))))
    attempt("other top_k", lambda: bind(dataclasses.replace(spec, top_k=spec.top_k - 1)))
    bind()

    kind = type(router)
    original = kind._compute_routing

    def routing(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
        def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
            weights, ids = original(self, *args, **kwargs)
            return weights, change(self, ids)

        return _replaced(kind, "_compute_routing", compute)

    def constant(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return ids[:1].expand_as(ids).contiguous() if self is router else ids

    with routing(constant):
        attempt("constant layer", worker.compile_or_warm_up_model)
    router.set_capture_fn(None)
    attempt("silent layer", worker.compile_or_warm_up_model)
    bind()
    # what a kernel that works in chunks would do
    keep = router.capture_fn
    router.set_capture_fn(lambda ids: [keep(part) for part in ids.chunk(2)])
    attempt("layer in two chunks", worker.compile_or_warm_up_model)
    router.set_capture_fn(lambda ids: keep(ids[:-1]))
    attempt("layer one row short", worker.compile_or_warm_up_model)

    window = dataclasses.replace(core.scheduler.kv_cache_config, kv_cache_groups=[])
    attempt("no full attention", lambda: full_attention_group(window))
    return found


def sampled(report: Any, *, model: Path, capture: bool) -> list[list[int]]:
    """Tokens sampled at temperature 1 by an engine with the default seed."""
    from vllm import SamplingParams

    llm = _llm(model, additional_config={"r3": {"capture": capture}})
    prompts = [{"prompt_token_ids": list(range(5 + i, 35 + i))} for i in range(8)]
    sampling = SamplingParams(max_tokens=30, temperature=1.0)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]
