"""What the tests of Model Runner V2 do inside vLLM; each function runs in a process of its own."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import triton_cpu


def _use_v2() -> None:
    """Before vLLM is imported."""
    triton_cpu.interpret()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # interpret() is for this process


def _llm(model: Path, **settings: Any) -> Any:
    from vllm import LLM

    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 20,  # 512 tokens: requests are preempted
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "logprobs_mode": "processed_logprobs",
    }
    return LLM(model=str(model), **(defaults | settings))


def mixed_load(report: Any, *, model: Path, file: Path, key: dict[str, Any]) -> dict[str, Any]:
    """Chunked prefill, shared prefixes, repeats and preemption; traces go to `file`.

    key: the value of "r3" in additional_config. Between the two turns the engine is given a
    weight version of the user's, and another one in the midst of a last request.
    """
    _use_v2()
    from vllm import SamplingParams

    from r3.engine_hooks.vllm_trace import trace_from_output
    from r3.identity import RolloutId
    from r3.spec import RouterSpec
    from r3.storage import ShardWriter

    llm = _llm(model, additional_config={"r3": key})
    engine = llm.llm_engine
    rng = random.Random(3)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(4, 512) for _ in range(n)]

    prefix, cached = tokens(71), 0
    kinds = (
        lambda: prefix + tokens(rng.randrange(1, 40)),
        lambda: prefix[:40] + tokens(rng.randrange(1, 60)),
        lambda: tokens(rng.randrange(1, 110)),
    )
    spec = RouterSpec.from_hf_config(llm.model_config.hf_text_config)
    with ShardWriter(file, spec) as shard:

        def keep(output: Any, turn: int, group: int, sample: int = 0) -> None:
            name = RolloutId("test", str(group), sample, turn)
            shard.append(trace_from_output(output, llm, rollout_id=name, completion=sample))

        prompts: list[list[int]] = []
        for turn in range(2):
            prompts = prompts[:3] + [kinds[i % 3]() for i in range(6 - len(prompts[:3]))]
            sampling = [
                SamplingParams(n=2, max_tokens=16 - i % 5, ignore_eos=True)
                for i in range(len(prompts))
            ]
            requests = [{"prompt_token_ids": p} for p in prompts]
            for group, output in enumerate(llm.generate(requests, sampling, use_tqdm=False)):
                cached += output.num_cached_tokens or 0
                for sample in range(2):
                    keep(output, turn, group, sample)
            engine.set_weight_version("step-7")
        last = SamplingParams(max_tokens=6, ignore_eos=True)
        engine.add_request("last", {"prompt_token_ids": tokens(20)}, last)
        steps, done = 0, []
        while not done:
            done = [output for output in engine.step() if output.finished]
            steps += 1
            if steps == 3:
                engine.set_weight_version("step-8")
        keep(done[0], 2, 0)
    preempted = next(m for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    return {
        "worker": type(worker).__name__,
        "runner": type(worker.model_runner).__module__,
        "cached_tokens": cached,
        "preemptions": preempted.value,
    }


def compiled(report: Any, *, model: Path, cache: Path, backend: str) -> dict[str, Any]:
    """A compiled engine with native capture, and the same with the self-test's verdict unheard."""
    _use_v2()
    os.environ["VLLM_CACHE_ROOT"] = str(cache)
    from vllm import SamplingParams

    from r3.engine_hooks import vllm_native
    from r3.engine_hooks.vllm_trace import trace_from_output

    settings = {
        "enforce_eager": False,
        "compilation_config": {} if backend == "inductor" else {"mode": 2, "backend": backend},
        "additional_config": {"r3": {"capture": True}},
    }
    found: dict[str, Any] = {}
    try:
        _llm(model, **settings)
        found["start"] = "accepted"
    except Exception as e:
        found["start"] = f"{type(e).__name__}: {e}"

    vllm_native.check_self_test = lambda ids, spec: None
    llm = _llm(model, **settings)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(5, 25))}
    output = llm.generate([prompt], sampling, use_tqdm=False)[0]
    found["rows"] = output.outputs[0].routed_experts
    try:
        trace_from_output(output, llm)
        found["trace"] = "accepted"
    except Exception as e:
        found["trace"] = f"{type(e).__name__}: {e}"
    return found


def native_on_v1(report: Any, *, model: Path) -> dict[str, Any]:
    """What a config says with PyPI's triton as it is installed: which runner, which source."""
    from vllm.engine.arg_utils import EngineArgs

    base = {"model": str(model), "enforce_eager": True, "skip_tokenizer_init": True}

    def config(**key: Any) -> Any:
        return EngineArgs(**base, additional_config={"r3": key}).create_engine_config()

    made = config(capture=True)
    found = {
        "v2": made.use_v2_model_runner,
        "worker": made.parallel_config.worker_cls.rpartition(".")[2],
    }
    try:
        config(capture=True, source="native")
        found["native"] = "accepted"
    except Exception as e:
        found["native"] = f"{type(e).__name__}: {e}"
    return found
