"""What capture costs inside vLLM on the CPU.

Two measures, on tiny Qwen3-MoE models in float32 (64-token prompts, 192 sampled tokens each):

- the time inside the hook by the clock of the thread's own CPU time, per sampled token: the
  routers' callbacks, the worker's collection, the scheduler's store and the hand-out. The cost of
  the stopwatch itself is measured and taken off.
- the CPU time of the whole process with capture on against off, in one engine that is switched
  between interleaved runs of the same load, with a 95 % interval of the mean difference. What
  vLLM spends on carrying rows to its output is in this one.

    python benchmarks/capture.py [--json] [--rounds N]
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

PROMPT, SAMPLED = 64, 192
CASES = {
    "hook_us_per_token": (4, 16),  # MoE layers, running requests
    "hook_us_per_token_48_layers": (48, 16),
    "hook_us_per_token_1_running": (4, 1),
    "hook_us_per_token_64_running": (4, 64),
}


class Stopwatch:
    """Adds up the thread's CPU time inside wrapped functions, less its own cost."""

    def __init__(self) -> None:
        self.ns = self.calls = 0
        noop = self.wrap(lambda: None)
        costs = []
        for _ in range(20):
            self.ns = self.calls = 0
            for _ in range(2000):
                noop()
            costs.append(self.ns / self.calls)
        self.own = statistics.median(costs)
        self.ns = self.calls = 0

    def wrap(self, function: Callable) -> Callable:
        clock = time.thread_time_ns

        def nothing(*args: Any, **kwargs: Any) -> None: ...

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            # once for nothing: after a layer of the model the stopwatch's own code is cold
            clock()
            nothing(*args, **kwargs)
            start = clock()
            result = function(*args, **kwargs)
            self.ns += clock() - start
            self.calls += 1
            return result

        return timed

    @property
    def us(self) -> float:
        return (self.ns - self.calls * self.own) / 1e3


def _engine(folder: str, layers: int, running: int) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from r3.cli.tiny_model import make_tiny_qwen3_moe

    make_tiny_qwen3_moe(Path(folder), seed=0, num_layers=layers)
    return LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=running,
        max_num_batched_tokens=512,
        block_size=32,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=(16 << 20) * max(layers, running) // 4,
        skip_tokenizer_init=True,
        additional_config={"r3": {"capture": True}},
    )


def _parts(llm: Any) -> tuple[Any, Any, list[Any]]:
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    modules = worker.model_runner.get_model().modules()
    return worker, core.scheduler, [m.router for m in modules if hasattr(m, "router")]


def _generate(llm: Any, rng: random.Random, running: int) -> None:
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [rng.randrange(4, 512) for _ in range(PROMPT)]} for _ in range(running)
    ]
    sampling = SamplingParams(temperature=1.0, max_tokens=SAMPLED, ignore_eos=True)
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        assert len(output.outputs[0].token_ids) == SAMPLED


@contextmanager
def _watched(llm: Any) -> Iterator[Stopwatch]:
    """Every function of the hook that runs in a step, under one stopwatch."""
    worker, scheduler, routers = _parts(llm)
    watch = Stopwatch()
    connector = scheduler.aux_output_connector
    for target, names in (
        (worker._tap, ("clear",)),
        (worker._weights, ("settle",)),
        (worker, ("_collect", "_attach")),
        (
            connector,
            ("build_connector_meta", "absorb", "take_output", "request_finished"),
        ),
    ):
        for name in names:
            setattr(target, name, watch.wrap(getattr(target, name)))
    for router in routers:
        router.set_capture_fn(watch.wrap(router.capture_fn))
    yield watch


def hook_time(layers: int, running: int, rounds: int) -> float:
    """Microseconds inside the hook per sampled token, median of rounds."""
    rng, found = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        llm = _engine(folder, layers, running)
        _generate(llm, rng, running)
        with _watched(llm) as watch:
            for _ in range(rounds):
                watch.ns = watch.calls = 0
                _generate(llm, rng, running)
                found.append(watch.us / (running * SAMPLED))
    return round(statistics.median(found), 2)


def on_off(rounds: int) -> dict[str, Any]:
    """CPU time of the process per sampled token with capture and without, and the difference."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu_worker import CPUWorker

    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        llm = _engine(folder, 4, 16)
        worker, scheduler, routers = _parts(llm)
        connector, callbacks = scheduler.aux_output_connector, [r.capture_fn for r in routers]
        classes = {"on": type(worker), "off": CPUWorker}
        updates = {
            "on": scheduler.update_from_output,
            "off": Scheduler.update_from_output.__get__(scheduler),
        }
        spent: dict[str, list[float]] = {"on": [], "off": []}
        for i in range(-1, rounds):
            for mode in ("on", "off") if i % 2 else ("off", "on"):
                worker.__class__, scheduler.update_from_output = classes[mode], updates[mode]
                scheduler.aux_output_connector = connector if mode == "on" else None
                for router, callback in zip(routers, callbacks, strict=True):
                    router.set_capture_fn(callback if mode == "on" else None)
                start = time.process_time()
                _generate(llm, rng, 16)
                if i >= 0:  # the first round warms up
                    spent[mode].append(1e6 * (time.process_time() - start) / (16 * SAMPLED))
    differences = [a - b for a, b in zip(spent["on"], spent["off"], strict=True)]
    mean = statistics.mean(differences)
    half = 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
    off = statistics.median(spent["off"])
    return {
        "off_us_per_token": round(off, 1),
        "on_off_us_per_token": round(mean, 1),
        "on_off_interval": [round(mean - half, 1), round(mean + half, 1)],
        "on_off_ratio": round(statistics.median(spent["on"]) / off, 3),
    }


def _in_process(case: str, rounds: int) -> Any:
    """One engine per process: two in one process do not work."""
    code = [sys.executable, __file__, "--case", case, "--rounds", str(rounds)]
    done = subprocess.run(code, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"case {case} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True)
@click.option("--rounds", default=10, show_default=True)
@click.option("--case", hidden=True)
def main(as_json: bool, rounds: int, case: str | None) -> None:
    if case is not None:
        value = on_off(rounds) if case == "on_off" else hook_time(*CASES[case], rounds)
        click.echo("\n" + json.dumps(value))
        return
    result: dict[str, Any] = {name: _in_process(name, max(rounds // 2, 3)) for name in CASES}
    result |= _in_process("on_off", rounds)
    # vLLM's own capture needs Model Runner V2, which does not start on a CPU
    result["native_us_per_token"] = None
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo("capture in vLLM on the CPU, microseconds per sampled token:")
    for name, value in result.items():
        click.echo(f"  {name:30s} {value}")


if __name__ == "__main__":
    main()
