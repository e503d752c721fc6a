"""`r3 demo --ray`: the two halves of the demo as Ray actors, and a driver that hands on handles.

    rollout actor (vLLM)  ->  routing.r3, and batches in the object store
    driver                    handles of the batches, nothing else
    trainer actor (Megatron-core)  <-  fetches the batches by their handles

Both run on the driver's node, since the demo's files are there. The rollout actor owns the batches,
so it stays until the trainer is done.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from r3.cli.demo_stages import microbatches, recompute_batches, sample
from r3.cli.isolate import Report, StageError, outcome, run_stage
from r3.identity import Provenance
from r3.storage.ray_store import BatchHandle, put_batch


def run_in_actors(sampling: dict[str, Any], log: Path, show: Report) -> None:
    """Sample and recompute; sampling: the arguments of r3.cli.demo_stages.sample.

    Errors are those of r3.cli.isolate.run_isolated.
    """
    # an actor has a working directory of its own
    paths = {name: sampling[name].absolute() for name in ("model", "file")}
    sampling, log = sampling | paths, log.absolute()
    with connected() as ray, ExitStack() as stack:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)

        def start(actor: type, *args: Any) -> Any:
            started = ray.remote(num_cpus=0, scheduling_strategy=here)(actor).remote(*args)
            stack.callback(ray.kill, started)
            return started

        progress = start(Progress)
        rollout, trainer = (start(Worker, progress, os.environ.get(_THREADS)) for _ in range(2))
        handles, engine = follow(rollout, _sample_and_put, sampling, log, progress, show)
        with ExitStack() as step:
            for handle in handles:
                step.enter_context(handle)
            training = {
                "model": paths["model"],
                "folder": paths["file"].parent,
                "handles": handles,
                "engine": engine,
            }
            follow(trainer, _fetch_and_recompute, training, log, progress, show)


def _sample_and_put(report: Report, **sampling: Any) -> tuple[list[BatchHandle], Provenance]:
    sample(report, **sampling)
    batches, engine = microbatches(sampling["file"])
    # the trainer is a single rank: all layers and rows of a microbatch in one object, not copied
    return [
        put_batch(
            batch,
            layer_groups=[batch.spec.moe_layers],
            sequence_groups=[slice(None)],
            shard=sampling["file"],
        )
        for batch in batches
    ], engine


def _fetch_and_recompute(report: Report, *, handles: list[BatchHandle], **training: Any) -> None:
    batches = [handle.fetch(logprobs=True) for handle in handles]
    recompute_batches(report, batches=batches, **training)


@contextmanager
def connected() -> Iterator[Any]:
    """Ray as the environment says, else one that ends with the demo"""
    # a Ray of the demo's own tells nobody that it was used
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    address = os.environ.get("RAY_ADDRESS")
    own: dict[str, Any] = {} if address else {"num_cpus": 2, "include_dashboard": False}
    starting = nullcontext() if address else _interrupted_later()
    try:
        with starting:
            ray.init(
                address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **own
            )
        yield ray
    except (ConnectionError, ray.exceptions.RayError) as e:
        raise StageError(f"Ray: {type(e).__name__}: {' '.join(str(e).split())[:500]}") from e
    finally:
        ray.shutdown()


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Interrupts wait until the end: in the midst of starting, Ray would leave processes behind"""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


class Progress:
    """What the workers report until the driver asks for it"""

    def __init__(self) -> None:
        self._reports: list[tuple[str, int, int]] = []

    def add(self, report: tuple[str, int, int]) -> None:
        self._reports.append(report)

    def take(self) -> list[tuple[str, int, int]]:
        reports, self._reports = self._reports, []
        return reports


# Ray sets it to 1 in its workers, and then engine and trainer would not compute as without Ray
_THREADS = "OMP_NUM_THREADS"


class Worker:
    """A process that runs one stage"""

    def __init__(self, progress: Any, threads: str | None) -> None:
        self._progress = progress
        os.environ.pop(_THREADS, None)
        if threads is not None:
            os.environ[_THREADS] = threads

    def run(self, stage: Any, kwargs: dict[str, Any], log: str) -> tuple[str, Any]:
        """("result", what it returned) or ("error", (class, text))"""
        import ray

        messages: list[tuple[str, Any]] = []
        reports: list[Any] = []

        def send(message: tuple[str, Any]) -> None:
            kind, value = message
            if kind == "progress":
                reports[:] = [self._progress.add.remote(value)]
            else:
                messages.append(message)

        run_stage(stage, kwargs, log, send)
        ray.get(reports)  # the last one is there, so all are: the driver looks once more
        return messages[-1]


def follow(
    worker: Any, stage: Any, kwargs: dict[str, Any], log: Path, progress: Any, show: Report
) -> Any:
    """The result of a stage, with its progress shown meanwhile"""
    import ray

    running = worker.run.remote(stage, kwargs, str(log))
    done: list[Any] = []
    while not done:
        done, _ = ray.wait([running], timeout=0.2)
        for report in ray.get(progress.take.remote()):
            show(*report)
    name = stage.__name__.strip("_")
    try:
        kind, value = ray.get(running)
    except ray.exceptions.RayError as e:
        raise StageError(f"stage {name!r} ended: {type(e).__name__}; see {log}") from e
    return outcome(name, kind, value, log)
