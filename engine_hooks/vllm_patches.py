"""Everything of vLLM that is replaced at run time, and what must still be true of it.

Four functions are wrapped, each where vLLM offers no object or class to put in its place:

    EngineArgs.create_engine_config  once per process, to read the configuration key
    block_pool.get_new_blocks        of our own scheduler's pool, to see blocks change hands
    model.load_weights               of the worker's own model, to see new weights arrive
    engine.generate                  of a server's own AsyncLLM, to see what its requests return

The rest of the hook are subclasses and one object that vLLM asks for by itself
(`scheduler.aux_output_connector`). They lean on private behaviour too; `check_vllm`, and for a
server `check_front_end`, compare what they lean on with the installed source and refuse by name
when it moved.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from r3.errors import UnsupportedError

# vLLM versions whose scheduler, workers, runners and routers were read and tested
TESTED_VERSIONS = ("0.31.", "0.32.")


def check_vllm() -> None:
    """Raise UnsupportedError unless the installed vLLM is one that the hook knows."""
    import vllm

    if not vllm.__version__.startswith(TESTED_VERSIONS):
        raise UnsupportedError(
            f"capture knows vLLM {', '.join(v + 'x' for v in TESTED_VERSIONS)}, found "
            f"{vllm.__version__}; before 0.31 the scheduler has no aux_output_connector, later "
            "versions were not tested"
        )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_worker import Worker

    original = getattr(EngineArgs.create_engine_config, "__wrapped__", None)
    _expect(original or EngineArgs.create_engine_config, "self", "VllmConfig(")
    _expect(BlockPool.get_new_blocks, "self num_blocks", "free_block_queue.popleft_n(")
    _expect(BaseRouter._select_experts, "self", "self.capture_fn(topk_ids)", "_apply_eplb_mapping")
    _expect(
        Scheduler.schedule,
        "self",
        "self.aux_output_connector.build_connector_meta(",
        "self._update_after_schedule(",
    )
    _expect(
        Scheduler._preempt_request,
        "self request",
        "self.aux_output_connector.request_finished(request)",
        "self._free_request_blocks(request)",
    )
    _expect(
        Scheduler.update_from_output,
        "self scheduler_output model_runner_output",
        "_update_request_with_output(",
        "self.aux_output_connector.take_output(",
        "EngineCoreOutput(",
        "routed_experts=routed_experts",
    )
    for name in ("load_model", "initialize_from_config", "compile_or_warm_up_model"):
        _expect(getattr(Worker, name), "self")
    for name in ("reload_weights", "update_weights", "finish_weight_update"):
        _expect(getattr(Worker, name), "self")
    _expect(Worker.execute_model, "self scheduler_output", "self.model_runner.execute_model(")
    _expect(Worker.sample_tokens, "self grammar_output", "self.model_runner.sample_tokens(")


def check_front_end() -> None:
    """Raise UnsupportedError unless rows of running requests are where a server looks for them."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    _expect(AsyncLLM.generate, "self prompt sampling_params request_id", "self.add_request(")
    _expect(
        OutputProcessor.process_outputs,
        "self engine_core_outputs",
        "self.request_states.get(req_id)",
        "req_state.routed_experts_chunks.append(",
        "req_state.make_request_output(",
        "req_state.queue.put(request_output)",
    )
    _expect(
        OutputProcessor.add_request,
        "self request",
        "self.external_req_ids[req_state.external_req_id].append(request_id)",
    )
    _expect(
        RequestState._new_completion_output,
        "self token_ids finish_reason",
        "np.concatenate(self.routed_experts_chunks",
        "index=self.request_index",
    )


def _expect(function: Any, parameters: str, *texts: str) -> None:
    """The function's first parameters and, in this order, pieces of its source."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    found = list(inspect.signature(function).parameters)
    expected = parameters.split()
    if found[: len(expected)] != expected:
        raise UnsupportedError(
            f"{name} takes ({', '.join(found)}), expected ({', '.join(expected)}, ...): this vLLM "
            "is not the one that capture was written for"
        )
    source, at = inspect.getsource(inspect.unwrap(function)), 0
    for text in texts:
        at = source.find(text, at)
        if at < 0:
            raise UnsupportedError(
                f"{name} does not contain {text!r} where it is expected: this vLLM is not the one "
                "that capture was written for, or something else has patched it"
            )


def wrap_create_engine_config(finish: Callable[[Any], None]) -> None:
    """Let `finish` see every VllmConfig that is made; may be called any number of times."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "__r3__", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        finish(config)
        return config

    create_engine_config.__r3__ = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def wrap_generate(engine: Any, follow: Callable[[Any, str], Callable[[Any], Any] | None]) -> None:
    """Let `follow` have the outputs of every request to an AsyncLLM.

    follow: called with sampling parameters and request id before the request begins; returns a
    function from its outputs to those that the caller gets, or None to leave them.
    """
    generate = engine.generate

    @functools.wraps(generate)
    def followed(prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
        change = follow(sampling_params, request_id)
        outputs = generate(prompt, sampling_params, request_id, **kwargs)
        return outputs if change is None else change(outputs)

    engine.generate = followed


def watch_new_blocks(block_pool: Any, seen: Callable[[list[Any]], None]) -> None:
    """Let `seen` have every list of KV blocks that leaves the free list of this pool."""
    give_out = block_pool.get_new_blocks

    def get_new_blocks(num_blocks: int) -> list[Any]:
        blocks = give_out(num_blocks)
        seen(blocks)
        return blocks

    block_pool.get_new_blocks = get_new_blocks


def watch_load_weights(model: Any, touched: Callable[[], None]) -> None:
    """Call `touched` before every `load_weights` of this model, however it comes about."""
    load = model.load_weights

    @functools.wraps(load)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        touched()
        return load(*args, **kwargs)

    model.load_weights = load_weights
