"""What the vLLM tests do inside vLLM; each function runs in a process of its own."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np

CAPTURE = {"r3": {"capture": True}}


def _llm(model: Path, **settings: Any) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = settings.pop("multiprocessing", "0")
    from vllm import LLM

    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "block_size": 32,
        "kv_cache_memory_bytes": 2 << 20,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "logprobs_mode": "processed_logprobs",
        "additional_config": CAPTURE,
    }
    return LLM(model=str(model), **(defaults | settings))


def mixed_load(report: Any, *, model: Path, file: Path, multiprocessing: str) -> dict[str, Any]:
    """Chunked prefill, shared prefixes, repeats and preemption; traces go to `file`."""
    from vllm import SamplingParams

    from r3.engine_hooks.vllm_trace import trace_from_output
    from r3.identity import RolloutId
    from r3.spec import RouterSpec
    from r3.storage import ShardWriter

    llm = _llm(model, multiprocessing=multiprocessing)
    rng = random.Random(3)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(4, 512) for _ in range(n)]

    prefix, cached = tokens(71), 0
    kinds = (
        lambda: prefix + tokens(rng.randrange(1, 60)),
        lambda: prefix[:40] + tokens(rng.randrange(1, 90)),
        lambda: tokens(rng.randrange(1, 150)),
    )
    spec = RouterSpec.from_hf_config(llm.model_config.hf_text_config)
    with ShardWriter(file, spec) as shard:
        previous: list = []
        for turn in range(2):
            prompts = previous[:8] + [kinds[i % 3]() for i in range(24 - len(previous[:8]))]
            previous = prompts
            sampling = [
                SamplingParams(n=2, temperature=1.0, max_tokens=48 - i % 5, logprobs=0)
                for i in range(len(prompts))
            ]
            requests = [{"prompt_token_ids": p} for p in prompts]
            for group, output in enumerate(llm.generate(requests, sampling, use_tqdm=False)):
                cached += output.num_cached_tokens or 0
                for sample in range(2):
                    name = RolloutId("test", str(group), sample, turn)
                    shard.append(
                        trace_from_output(
                            output,
                            llm,
                            sampling_params=sampling[group],
                            rollout_id=name,
                            completion=sample,
                        )
                    )
    preempted = next(m for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    return {"cached_tokens": cached, "preemptions": preempted.value}


def without_the_key(report: Any, *, model: Path) -> dict[str, Any]:
    """What is left of us in vLLM when the key is absent."""
    from vllm import SamplingParams

    llm = _llm(model, additional_config={})
    output = llm.generate(
        [{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=3), use_tqdm=False
    )
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    routers = [m.router for m in worker.model_runner.get_model().modules() if hasattr(m, "router")]
    return {
        "worker": f"{type(worker).__module__}.{type(worker).__qualname__}",
        "scheduler": f"{type(core.scheduler).__module__}.{type(core.scheduler).__qualname__}",
        "connector": repr(core.scheduler.aux_output_connector),
        "rows": repr(output[0].outputs[0].routed_experts),
        "routers": len(routers),
        "callbacks": sum(r.capture_fn is not None for r in routers),
    }


def sampled_logprobs(report: Any, *, model: Path, mode: str) -> dict[str, Any]:
    """Traces sampled at temperature 0.7 and top-p 0.8 under the given logprobs_mode."""
    from vllm import SamplingParams

    from r3.engine_hooks.vllm_trace import trace_from_output

    llm = _llm(model, logprobs_mode=mode)
    sampling = SamplingParams(temperature=0.7, top_p=0.8, max_tokens=24, logprobs=0)
    outputs = llm.generate(
        [{"prompt_token_ids": [5 + i, 6, 7 + i]} for i in range(8)], sampling, use_tqdm=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traces = [trace_from_output(o, llm, sampling_params=sampling) for o in outputs]
    return {
        "traces": [(t.token_ids, t.prompt_len, t.logprobs) for t in traces],
        "warnings": {type(w.message).__name__ for w in caught},
        "mode": traces[0].provenance.logprobs_mode,
        "sampling": dict(traces[0].provenance.sampling),
    }


def refusals(report: Any, *, model: Path, mixed: dict[str, Path]) -> dict[str, str]:
    """What is said of each configuration before an engine starts: a refusal or "accepted"."""
    from vllm.engine.arg_utils import EngineArgs

    from r3.errors import R3Error

    def speculative(method: str, **more: Any) -> dict[str, Any]:
        settings = {"method": method, "num_speculative_tokens": 2, **more}
        return {"speculative_config": settings}

    cases: dict[str, dict[str, Any]] = {
        "pipeline_parallel_size": {"pipeline_parallel_size": 2},
        "data_parallel_size": {"data_parallel_size": 2},
        "decode_context_parallel_size": {
            "tensor_parallel_size": 4,
            "decode_context_parallel_size": 2,
        },
        "speculative method": speculative("ngram_gpu", prompt_lookup_max=2),
        "scheduler_cls": {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        "lora_config": {"enable_lora": True},
        "enable_prompt_embeds": {"enable_prompt_embeds": True},
        "worker class": {"worker_cls": "some.other.Worker"},
        "dense": {"model": str(mixed["dense"])},
        "unknown key": {"additional_config": {"r3": {"capture": True, "speed": 9}}},
        "not a bool": {"additional_config": {"r3": {"capture": "yes"}}},
        "not a dict": {"additional_config": {"r3": True}},
        "bad source": {"additional_config": {"r3": {"capture": True, "source": "hooks"}}},
        "compiled": {"enforce_eager": False},
        "tensor parallel": {"tensor_parallel_size": 2},
        "ngram": speculative("ngram", prompt_lookup_max=2),
        "draft model": speculative("draft_model", model=str(model)),
        "kv offloading": {"kv_offloading_size": 0.1},
    }
    base = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "additional_config": CAPTURE,
    }
    found = {}
    for name, settings in cases.items():
        try:
            EngineArgs(**(base | settings)).create_engine_config()
            found[name] = "accepted"
        except R3Error as e:
            found[name] = str(e)
        except Exception as e:  # vLLM's own refusal
            found[name] = f"{type(e).__name__}: {e}"
    ours = EngineArgs(**base).create_engine_config()
    found["worker_cls"] = ours.parallel_config.worker_cls
    off = EngineArgs(**(base | {"additional_config": {"r3": {"capture": False}}}))
    found["off"] = off.create_engine_config().parallel_config.worker_cls
    return found | _strange_vllm()


def _strange_vllm() -> dict[str, str]:
    """What `check_vllm` says of a vLLM that is not the one it was written for."""
    import vllm
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.worker.gpu_worker import Worker

    from r3.engine_hooks.vllm_patches import check_front_end, check_vllm
    from r3.errors import UnsupportedError

    def get_new_blocks(self: Any, num_blocks: int) -> list[Any]:
        return self.cheaper_queue.take(num_blocks)

    def update_from_output(self: Any, outputs: Any) -> Any:
        return self.original(outputs)

    def select_experts(self: Any, topk_ids: Any) -> Any:
        topk_ids = self._apply_eplb_mapping(topk_ids)  # logical ids are gone by the next line
        self.capture_fn(topk_ids)
        return topk_ids

    def make_request_output(self: Any, token_ids: Any, finish_reason: Any) -> Any:
        return self.rows.pop()

    found = {}
    for name, owner, attribute, value in (
        ("as installed", vllm, "__version__", vllm.__version__),
        ("later version", vllm, "__version__", "0.33.0"),
        ("earlier version", vllm, "__version__", "0.30.1"),
        ("other source", BlockPool, "get_new_blocks", get_new_blocks),
        ("other parameters", Scheduler, "update_from_output", update_from_output),
        ("other order", BaseRouter, "_select_experts", select_experts),
        ("other worker", Worker, "sample_tokens", lambda self: None),
        ("other front end", RequestState, "_new_completion_output", make_request_output),
    ):
        before = getattr(owner, attribute)
        setattr(owner, attribute, value)
        try:
            check_vllm()
            check_front_end()
            found[name] = "accepted"
        except UnsupportedError as e:
            found[name] = str(e)
        finally:
            setattr(owner, attribute, before)
    return found


def hostile_outputs(report: Any, *, model: Path) -> dict[str, str]:
    """What is said of damaged results of a real engine, and of a router that stays silent."""
    import copy

    from vllm import SamplingParams

    from r3.engine_hooks.rows import SlotStore, pack, unpack
    from r3.engine_hooks.vllm_trace import trace_from_output

    llm = _llm(model)
    prompt = [{"prompt_token_ids": list(range(5, 45))}]
    sampling = SamplingParams(max_tokens=6, logprobs=0, ignore_eos=True)
    good = llm.generate(prompt, sampling, use_tqdm=False)[0]
    spec = trace_from_output(good, llm).spec
    found: dict[str, Any] = {}

    def attempt(name: str, change: Any, **kwargs: Any) -> None:
        output = copy.deepcopy(good)
        change(output, output.outputs[0])
        try:
            trace = trace_from_output(output, llm, **kwargs)
            found[name] = f"accepted, {int((~trace.valid).sum())} missing"
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"

    def rows(change: Any) -> Any:
        """A change to plain ids, such as vLLM's own capture returns."""

        def apply(output: Any, completion: Any) -> None:
            ids, _ = unpack(completion.routed_experts, spec)
            completion.routed_experts = change(ids.astype(np.int32))

        return apply

    def packed(change: Any) -> Any:
        def apply(output: Any, completion: Any) -> None:
            completion.routed_experts = change(completion.routed_experts.copy())

        return apply

    def unwritten(rows: np.ndarray) -> np.ndarray:
        rows[2] = 0
        return rows

    def put(at: tuple, value: Any) -> Any:
        def change(ids: np.ndarray) -> np.ndarray:
            ids[at] = value
            return ids

        return rows(change)

    def all_layers(ids: np.ndarray) -> np.ndarray:
        wide = np.zeros((len(ids), spec.num_layers, spec.top_k), np.uint8)
        wide[:, list(spec.moe_layers)] = ids
        return wide

    attempt("good", rows(lambda ids: ids))
    attempt("native shape", rows(all_layers))
    attempt("short", rows(lambda ids: ids[:-1]))
    attempt("long", rows(lambda ids: np.concatenate([ids, ids[:1]])))
    attempt("out of range", put((3, 1, 0), spec.num_experts))
    attempt("duplicate", put((4, 2), 7))
    attempt("zeros", put((slice(None), 1), 0))
    attempt("missing row", put(2, -1))
    attempt("partial -1", put((2, 0), -1))
    attempt("absent", rows(lambda ids: None))
    attempt("unfinished", lambda o, c: setattr(c, "finish_reason", None))
    attempt("embeddings", lambda o, c: setattr(o, "prompt_token_ids", None))
    attempt("few logprobs", lambda o, c: c.logprobs.pop())
    attempt("no completion", lambda o, c: None, completion=1)

    attempt("packed", packed(lambda rows: rows))
    attempt("packed short", packed(lambda rows: rows[:-1]))
    attempt("packed unwritten", packed(unwritten))
    attempt("packed without versions", packed(lambda rows: rows[:, :, : len(spec.moe_layers)]))
    attempt("packed wide", packed(lambda rows: rows.astype(np.int32)))

    store = SlotStore(num_blocks=4, block_size=8, spec=spec)
    written = good.outputs[0].routed_experts[:4].copy()
    store.write(np.array([8, 9, 10, 30]), written)
    found["written"] = unpack(written, spec)
    store.next_pass((), [(1, 2)])
    found["copied"] = unpack(store.read(np.array([2, 3]), 0, 15), spec)
    store.next_pass([1], ())
    store.write(np.array([9]), pack(unpack(written[3:], spec)[0], 7, spec))
    found["given out"] = unpack(store.read(np.array([1, 3]), 0, 15), spec)

    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    routers = [m.router for m in runner.get_model().modules() if hasattr(m, "router")]
    routers[1].set_capture_fn(lambda ids: None)
    try:
        llm.generate([{"prompt_token_ids": list(range(60, 70))}], sampling, use_tqdm=False)
        found["dumb router"] = "accepted"
    except Exception as e:
        found["dumb router"] = f"{type(e).__name__}: {e}"
    return found
