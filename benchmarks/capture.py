"""Time of vLLM with capture against the same engine without it.

One engine, capture switched on and off between interleaved runs of the same load (64-token
prompts, 192 sampled tokens, 16 at a time, float32, a tiny Qwen3-MoE). The model is so small that
the engine's own Python dominates: the share shown is an upper bound for a real model, the
microseconds per token are what carries over.

    python benchmarks/capture.py [--json] [--rounds N]
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click


def _switches(llm: Any) -> tuple[Any, Any]:
    """Functions that turn capture on and off in a running in-process engine."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    core = llm.llm_engine.engine_core.engine_core
    worker, scheduler = core.model_executor.driver_worker.worker, core.scheduler
    routers = [m.router for m in worker.model_runner.get_model().modules() if hasattr(m, "router")]
    callbacks = [r.capture_fn for r in routers]
    connector, ours = scheduler.aux_output_connector, type(worker)

    def on() -> None:
        worker.__class__, scheduler.aux_output_connector = ours, connector
        for router, callback in zip(routers, callbacks, strict=True):
            router.set_capture_fn(callback)

    def off() -> None:
        worker.__class__, scheduler.aux_output_connector = CPUWorker, None
        for router in routers:
            router.set_capture_fn(None)

    return on, off


def measure(rounds: int) -> dict[str, float]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from r3.cli.tiny_model import make_tiny_qwen3_moe

    with tempfile.TemporaryDirectory() as folder:
        make_tiny_qwen3_moe(Path(folder), seed=0)
        llm = LLM(
            model=folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            block_size=32,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=64 << 20,
            skip_tokenizer_init=True,
            additional_config={"r3": {"capture": True}},
        )
    switches = dict(zip(("on", "off"), _switches(llm), strict=True))
    rng = random.Random(0)
    sampling = SamplingParams(temperature=1.0, max_tokens=192, ignore_eos=True)
    times: dict[str, list[float]] = {"on": [], "off": []}
    for i in range(-1, rounds):
        for mode in ("on", "off") if i % 2 else ("off", "on"):
            switches[mode]()
            prompts = [
                {"prompt_token_ids": [rng.randrange(4, 512) for _ in range(64)]} for _ in range(16)
            ]
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            spent = time.perf_counter() - start
            assert (outputs[0].outputs[0].routed_experts is not None) == (mode == "on")
            if i >= 0:  # the first round warms up
                times[mode].append(1e6 * spent / (16 * (64 + 192)))
    on, off = median(times["on"]), median(times["off"])
    return {
        "us_per_token_without": round(off, 2),
        "us_per_token_with": round(on, 2),
        "capture_us_per_token": round(on - off, 2),
        "ratio": round(on / off, 4),
    }


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True)
@click.option("--rounds", default=8, show_default=True)
def main(as_json: bool, rounds: int) -> None:
    result = measure(rounds)
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo("vLLM on the CPU, time per forwarded token (median of rounds):")
    click.echo(f"  without capture  {result['us_per_token_without']:8.1f} us")
    click.echo(f"  with capture     {result['us_per_token_with']:8.1f} us")
    click.echo(f"  ratio            {result['ratio']:8.3f}")


if __name__ == "__main__":
    main()
