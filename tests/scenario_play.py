"""Runs a scenario in the real vLLM, in a process of its own, and writes the traces down."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scenarios import Request, Scenario, turn_requests

TENSOR_PARALLEL_CORES = "0|1"
SAMPLED_FROM = "processed_logprobs"
_TOO_LONG = 400  # seconds
_CAPTURE = {"r3": {"capture": True}}


def play(
    report: Any,
    *,
    scenario: Scenario,
    model: Path,
    file: Path,
    draft: Path | None = None,
    mutate: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Traces go to `file`. Returns what was asked for each of them, by rollout id, and counts of
    what happened. mutate: called before the engine starts; in-process engines only."""
    faulthandler.dump_traceback_later(_TOO_LONG, exit=True)  # a test that hangs says where
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(scenario.multiprocess))
    # a model compiled with one way to capture must not come back in a test of another
    os.environ.setdefault("VLLM_DISABLE_COMPILE_CACHE", "1")
    if "tensor_parallel" in scenario.kinds:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = TENSOR_PARALLEL_CORES
    from vllm.engine.arg_utils import EngineArgs

    if mutate:
        assert not scenario.multiprocess
        mutate()
    settings = {
        "model": str(model),
        "dtype": "float32",
        "disable_log_stats": False,
        "logprobs_mode": SAMPLED_FROM,
        "additional_config": _CAPTURE,
    } | scenario.engine_settings(str(draft))
    if "async" in scenario.kinds:
        return asyncio.run(_play_async(scenario, settings, file))
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**settings))
    with _Collector(scenario, engine, file) as collector:
        before: list[Request] = []
        for turn in range(scenario.turns):
            before = turn_requests(scenario, turn, before)
            _play_turn(scenario, engine, before, collector, turn)
            if "sleep" in scenario.kinds:
                engine.sleep(level=1)
                engine.wake_up()
                collector.counts["sleep"] += 1
            if "resets" in scenario.kinds and turn % 2:
                assert engine.reset_prefix_cache()
    return collector.result()


def _play_turn(
    s: Scenario, engine: Any, requests: list[Request], collector: _Collector, turn: int
) -> None:
    rng = random.Random(f"{s.seed} resets {turn}")
    resets = {rng.randrange(8, 80) for _ in range(2)} if "resets" in s.kinds else set()
    waiting, given_up = list(requests), {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0].arrives <= step:
            r = waiting.pop(0)
            collector.asked(r)
            prompt = {"prompt_token_ids": r.prompt}
            engine.add_request(r.name, prompt, _sampling(r), priority=r.priority)
            if r.abort_after is not None:
                given_up[r.name] = step + r.abort_after
        for name in [n for n, at in given_up.items() if at <= step]:
            del given_up[name]
            if not collector.finished(name):
                engine.abort_request([name])
                collector.counts["aborts"] += 1
        if step in resets and engine.reset_prefix_cache(reset_running_requests=True):
            collector.counts["resets"] += 1
        # without a request, an engine in a process of its own would wait for one
        for output in engine.step() if engine.has_unfinished_requests() else ():
            collector.take(output)
        step += 1


async def _play_async(s: Scenario, settings: dict[str, Any], file: Path) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

    async def give_up(r: Request) -> None:
        await asyncio.sleep(0.02 * (r.abort_after or 0))
        if not collector.finished(r.name):
            await engine.abort(r.name)
            collector.counts["aborts"] += 1

    async def ask(r: Request) -> None:
        await asyncio.sleep(0.02 * r.arrives)
        collector.asked(r)
        waiter = None if r.abort_after is None else asyncio.create_task(give_up(r))
        prompt = {"prompt_token_ids": r.prompt}
        async for output in engine.generate(prompt, _sampling(r), r.name, priority=r.priority):
            collector.take(output)
        if waiter is not None:
            await waiter

    async def reset() -> None:
        await asyncio.sleep(0.5)
        if await engine.reset_prefix_cache(reset_running_requests=True):
            collector.counts["resets"] += 1

    try:
        with _Collector(s, engine, file) as collector:
            before: list[Request] = []
            for turn in range(s.turns):
                before = turn_requests(s, turn, before)
                tasks = [ask(r) for r in before] + ([reset()] if "resets" in s.kinds else [])
                await asyncio.gather(*tasks)
                if "sleep" in s.kinds:
                    await engine.sleep(level=1)
                    await engine.wake_up()
                    collector.counts["sleep"] += 1
            return collector.result()
    finally:
        engine.shutdown()


def _sampling(r: Request) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=r.n,
        max_tokens=r.max_tokens,
        temperature=r.temperature,
        logprobs=0 if r.logprobs else None,
        stop=r.stop or None,
        stop_token_ids=r.stop_token_ids or None,
        ignore_eos=not r.stop_token_ids,
        output_kind=RequestOutputKind[r.output_kind],
    )


class _Collector:
    """Puts the pieces of outputs together and makes traces of finished ones."""

    def __init__(self, s: Scenario, engine: Any, file: Path) -> None:
        from r3.spec import RouterSpec
        from r3.storage import ShardWriter

        self._s, self._engine = s, engine
        config = engine.vllm_config
        self._writer = ShardWriter(file, RouterSpec.from_hf_config(config.model_config.hf_config))
        self._requests: dict[str, Request] = {}
        self._outputs: dict[str, Any] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.counts["compiled"] = int(config.compilation_config.mode != 0)
        self.counts["multiprocess"] = int(s.multiprocess)
        self.counts["tensor_parallel"] = config.parallel_config.tensor_parallel_size - 1
        self.counts["async"] = int(type(engine).__name__ == "AsyncLLM")

    def __enter__(self) -> _Collector:
        self._writer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(*error)

    def asked(self, r: Request) -> None:
        self._requests[r.name] = r

    def finished(self, name: str) -> bool:
        output = self._outputs.get(name)
        return output is not None and output.finished

    def take(self, output: Any) -> None:
        name = output.request_id
        kind = self._requests[name].output_kind
        seen = self._outputs.get(name)
        if seen is None or kind == "FINAL_ONLY":
            self._outputs[name] = output
        else:
            seen.add(output, aggregate=kind == "DELTA")
        if output.finished:
            self._finish(self._requests[name], self._outputs[name])

    def _finish(self, r: Request, output: Any) -> None:
        from r3.engine_hooks.vllm_trace import trace_from_output
        from r3.identity import RolloutId

        counts, cached = self.counts, output.num_cached_tokens or 0
        counts["prefix"] += cached
        counts["chunked"] += len(r.prompt) - cached > self._s.max_num_batched_tokens
        counts["priority"] += r.priority > 0
        assert sorted(c.index for c in output.outputs) == list(range(r.n))
        for c in output.outputs:
            counts["samples"] += c.index > 0
            counts["stops"] += c.finish_reason == "stop"
            if c.finish_reason == "abort":
                if not c.token_ids:  # nothing was delivered
                    assert c.routed_experts is None
                    continue
                counts["traces of aborted"] += 1
            name = RolloutId("test", r.name, c.index)
            self._facts[str(name)] = {
                "prompt": list(output.prompt_token_ids),
                "asked": r,
                "sampled": list(c.token_ids),
                "finish": c.finish_reason,
            }
            self._writer.append(
                trace_from_output(
                    output,
                    self._engine,
                    sampling_params=_sampling(r),
                    rollout_id=name,
                    completion=c.index,
                )
            )

    def result(self) -> dict[str, Any]:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        values = {m.name: m.value for m in get_metrics_snapshot() if hasattr(m, "value")}
        self.counts["preemption"] = int(values["vllm:num_preemptions"])
        for kind in {"ngram", "draft"} & self._s.kinds:
            self.counts[kind] = accepted = int(values["vllm:spec_decode_num_accepted_tokens"])
            drafted = int(values["vllm:spec_decode_num_draft_tokens"])
            self.counts["rejected drafts"] = drafted - accepted
        return {"facts": self._facts, "counts": dict(self.counts)}
