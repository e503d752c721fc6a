"""What the tests of provenance do inside vLLM; each function runs in a process of its own."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "kv_cache_memory_bytes": 2 << 20,
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "additional_config": {"r3": {"capture": True}},
}
PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}


def _llm(model: Path, multiprocessing: str, **settings: Any) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = multiprocessing
    from vllm import LLM

    return LLM(model=str(model), **(SETTINGS | settings))


def in_process(report: Any, *, model: Path) -> dict[str, Any]:
    """The provenance of a bfloat16 engine, and the same read off its own objects."""
    from vllm import SamplingParams

    from r3.engine_hooks.vllm_trace import provenance, trace_from_output

    draft = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    llm = _llm(model, "0", dtype="bfloat16", speculative_config=draft)
    sampling = SamplingParams(max_tokens=4, temperature=0.5, ignore_eos=True)
    output = llm.generate([PROMPT], sampling, use_tqdm=False)[0]
    config = llm.llm_engine.vllm_config
    before = provenance(config).to_dict()
    calls = []
    ask = llm.collective_rpc
    llm.collective_rpc = lambda *a, **k: calls.append(a) or ask(*a, **k)
    made = trace_from_output(output, llm, sampling_params=sampling).provenance.to_dict()
    for _ in range(3):
        provenance(llm)
    start = time.perf_counter()
    for _ in range(1000):
        provenance(llm, sampling)
    seconds = (time.perf_counter() - start) / 1000
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    layer = next(m for m in runner.get_model().modules() if hasattr(m, "routed_experts"))
    method = layer.routed_experts.quant_method
    attention = next(iter(runner.compilation_config.static_forward_context.values()))
    return {
        "before": before,
        "made": made,
        "after": provenance(config).to_dict(),  # the config has the answer by now
        "calls": calls,
        "seconds": seconds,
        "own": {
            "kernel": (type(method).__name__, type(method.moe_kernel.impl.fused_experts).__name__),
            "attention": attention.get_attn_backend().get_name(),
            "kv": str(runner.kv_caches[0].dtype),
            "logits": str(runner.get_model().lm_head.weight.dtype),
            "parameters": str(next(runner.get_model().parameters()).dtype),
        },
    }


def multiprocess(report: Any, *, model: Path) -> dict[str, Any]:
    """Provenance through an engine process: while it lives, and when it was killed before."""
    from r3.engine_hooks.vllm_trace import provenance

    llm = _llm(model, "1", dtype="float32")
    alive = provenance(llm).to_dict()
    client = llm.llm_engine.engine_core
    for process in client.resources.engine_manager.processes:
        process.kill()
    while not client.resources.engine_dead:
        time.sleep(0.05)
    kept = provenance(llm).to_dict()
    del llm.llm_engine.vllm_config._r3_facts
    return {"alive": alive, "kept": kept, "dead": provenance(llm).to_dict()}


def without_capture(report: Any, *, model: Path) -> dict[str, Any]:
    """AsyncLLM with capture, asked and not asked; and a synchronous engine without capture."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from r3.engine_hooks.vllm_trace import fetch_facts, provenance

    async def run() -> dict[str, Any]:
        args = AsyncEngineArgs(model=str(model), dtype="float32", **SETTINGS)
        engine = AsyncLLM.from_engine_args(args)
        try:
            found: dict[str, Any] = {"not asked": provenance(engine).to_dict()}
            found["nobody"] = await fetch_facts(engine.vllm_config)
            found["facts"] = await fetch_facts(engine)
            found["again"] = await fetch_facts(engine.vllm_config)
            found["asked"] = provenance(engine).to_dict()
        finally:
            engine.shutdown()
        return found

    found = asyncio.run(run())
    llm = _llm(model, "0", dtype="float32", additional_config={})
    found["off"] = provenance(llm).to_dict()
    found["off facts"] = asyncio.run(fetch_facts(llm))
    return found
