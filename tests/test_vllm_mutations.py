"""Would the checks of this suite notice? Capture is broken on purpose, one way at a time.

Each mutation replaces something of ours inside the engine's process before the engine starts. What
must notice is what guards the unbroken capture: the self-test at start, the check after each pass,
or the comparison with Hugging Face (routing_check.check_routing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3.cli.isolate import run_isolated
from r3.errors import CaptureError, R3Error
from routing_check import check_routing, read_traces
from scenario_play import play
from scenarios import scenario
from tiny_models import make_draft

pytestmark = pytest.mark.slow


def split_by_the_schedulers_order() -> None:
    """A pass is split by the order and counts of `num_scheduled_tokens`, not by the batch's own."""
    from r3.engine_hooks.vllm_scheduler import RowConnector

    absorb = RowConnector.absorb

    def mutated(self: Any, scheduler_output: Any, output: Any) -> None:
        absorb(self, scheduler_output, output)
        if self._now is not None:
            index, positions, _, *rest = self._now
            counts = scheduler_output.num_scheduled_tokens
            order = {request_id: i for i, request_id in enumerate(counts)}
            positions = [positions[index[request_id]] for request_id in counts]
            self._now = order, positions, [0, *accumulate(counts.values())], *rest

    RowConnector.absorb = mutated


def shift_rows() -> None:
    """Each row of a pass is given to the token behind its own."""
    from r3.engine_hooks.vllm_worker import RouterTap

    read = RouterTap.read
    RouterTap.read = lambda self, tokens: np.roll(read(self, tokens), 1, axis=0)


def emit_from_the_end() -> None:
    """A request is handed the last rows of its pass, of rejected drafts too, not those of its
    accepted tokens."""
    from r3.engine_hooks.vllm_scheduler import RowConnector

    take_output = RowConnector.take_output

    def mutated(self: Any, request: Any, output: Any) -> Any:
        rows = take_output(self, request, output)
        if rows is None or output is None:
            return rows
        i = self._now[0][request.request_id]
        start, end = output.starts[i], output.starts[i + 1]
        return output.rows[end - len(rows) : end] if len(rows) <= end - start else rows

    RowConnector.take_output = mutated


def bind_after_compilation() -> None:
    """Routers hear of the callback only when the model has been compiled and warmed up."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.v1.worker.cpu_worker import CPUWorker

    bound: list[tuple[Any, Any]] = []
    BaseRouter.set_capture_fn = lambda self, capture_fn: bound.append((self, capture_fn))
    compile_or_warm_up_model = CPUWorker.compile_or_warm_up_model

    def mutated(self: Any) -> Any:
        times = compile_or_warm_up_model(self)
        for router, capture_fn in bound:
            router.capture_fn = capture_fn
        return times

    CPUWorker.compile_or_warm_up_model = mutated


def bind_after_compilation_untested() -> None:
    """The same, and nobody runs the self-test."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    from r3.engine_hooks.vllm_worker import CaptureCPUWorker

    bind_after_compilation()
    CaptureCPUWorker.compile_or_warm_up_model = CPUWorker.compile_or_warm_up_model


def bind_the_draft() -> None:
    """The routers of the draft model report to the same tap."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    from r3.engine_hooks.vllm_worker import CaptureCPUWorker

    load_model = CaptureCPUWorker.load_model

    def mutated(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        target, draft = (
            sorted(
                (m for m in model.modules() if isinstance(m, MoERunner)), key=lambda m: m.layer_id
            )
            for model in (self.model_runner.get_model(), self.model_runner.drafter.model)
        )
        assert len(target) == len(draft)
        for ours, theirs in zip(target, draft, strict=True):
            theirs.router.set_capture_fn(ours.router.capture_fn)

    CaptureCPUWorker.load_model = mutated


def bind_the_draft_and_read_late() -> None:
    """The same, and rows are read when the draft has run too."""
    from r3.engine_hooks.vllm_worker import CaptureCPUWorker

    bind_the_draft()
    attach = CaptureCPUWorker._attach

    def mutated(self: Any, output: Any) -> None:
        self._step = replace(self._step, rows=self._tap.read(len(self._step.rows)))
        attach(self, output)

    CaptureCPUWorker._attach = mutated


def load(
    kinds: set[str], mutate: Callable[[], None] | None, model_dir: Callable, folder: Path
) -> list[Any]:
    """Traces of a small scenario under a mutation; raises what the engine raises."""
    model, draft, file = model_dir("qwen3_moe"), None, folder / "routing.r3"
    if "draft" in kinds:
        draft = make_draft(model, folder / "draft")
    kwargs = {
        "scenario": scenario(2, kinds, "qwen3_moe", requests=10, turns=1),
        "model": model,
        "file": file,
        "draft": draft,
        "mutate": mutate,
    }
    run_isolated(play, kwargs, folder / "log", lambda *progress: None)
    return read_traces(file)


@pytest.mark.parametrize(
    ("mutate", "kinds"),
    [
        (shift_rows, {"chunked"}),
        pytest.param(
            split_by_the_schedulers_order, {"chunked", "preemption"}, marks=pytest.mark.full
        ),
        pytest.param(emit_from_the_end, {"ngram"}, marks=pytest.mark.full),
        # compiles two models
        pytest.param(bind_the_draft_and_read_late, {"draft", "compiled"}, marks=pytest.mark.full),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_wrong_rows_are_seen_by_the_comparison(mutate, kinds, model_dir, tmp_path):
    """These rows are well formed and of the right number; only an outside witness can tell."""
    traces = load(kinds, mutate, model_dir, tmp_path)
    with pytest.raises(AssertionError, match="cells differ from Hugging Face"):
        check_routing(traces, model_dir("qwen3_moe"))


@pytest.mark.parametrize(
    ("mutate", "kinds", "error", "message"),
    [
        (bind_after_compilation, {"compiled"}, R3Error, "layer 1"),
        pytest.param(
            *(bind_after_compilation_untested, {"compiled"}, CaptureError),
            "layer 1: .*did not report",
            marks=pytest.mark.full,
        ),
        pytest.param(bind_the_draft, {"draft"}, R3Error, "layer 1", marks=pytest.mark.full),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_broken_hooks_stop_the_engine(mutate, kinds, error, message, model_dir, tmp_path):
    """At start if the self-test runs, and in the first pass if it does not."""
    with pytest.raises(error, match=message):
        load(kinds, mutate, model_dir, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kinds", [{"chunked", "preemption"}, {"ngram"}, {"draft", "compiled"}])
def test_unbroken_capture_passes_the_same_checks(kinds, model_dir, tmp_path):
    """The loads above, without a mutation: it was the mutation that was noticed."""
    check_routing(load(kinds, None, model_dir, tmp_path), model_dir("qwen3_moe"))
