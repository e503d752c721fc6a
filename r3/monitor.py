"""Records a run: one call per training step, one JSON line per call, and what to look at.

    with StepMonitor("metrics.jsonl") as monitor:
        record = monitor.record(step, batch=batch, trainer_logprobs=logprobs)

See docs/monitoring.md for the names, the alerts, several ranks, and loggers.
"""

from __future__ import annotations

import operator
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from r3.alerts import AlertLimits, Metrics, find_alerts
from r3.alignment import Alignment
from r3.batch import RoutingBatch
from r3.errors import TraceError
from r3.files import Closing
from r3.identity import Provenance
from r3.json_fields import INT64, brief
from r3.metrics_file import MetricsFile, read_metrics
from r3.mismatch import CLIP
from r3.step_figures import NAMES, figures, layer_figures, slice_figures
from r3.step_state import StepState

__all__ = ["NAMES", "StepMonitor", "StepState", "environment_of", "read_metrics"]

_KEPT = 4  # times the steps that trends look at

Callback = Callable[[int, dict[str, float]], object]
# What may differ from one request to the next without anything being wrong. Seeds, too, by name.
_PER_REQUEST = ("sampling.max_tokens", "sampling.n", "extra.weight_versions")


class StepMonitor(Closing):
    """Writes one line per step to a file, which it goes on with if it is there.

    path: JSON lines. One process records; another monitor with the same path is refused. callback:
    called with the step and the figures by recorded name, NaN left out, after the line is
    written; what it raises is raised. clip: bounds of the ratio for clipped shares and truncated
    weights. limits: of alerts.

    Raises FormatError for another kind of file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        callback: Callback | None = None,
        *,
        clip: tuple[float, float] = CLIP,
        limits: AlertLimits | None = None,
    ) -> None:
        self._limits = limits or AlertLimits()
        self._callback, self._clip = callback, clip
        # more than is looked at: a restart from a checkpoint leaves steps behind
        kept = _KEPT * self._limits.steps
        self._file = MetricsFile(path, last=kept)
        self._past: deque[tuple[int, Metrics]] = deque(maxlen=kept)
        self._environment: dict[str, Any] = {}
        for record in self._file.tail:
            self._remember(record)

    def close(self) -> None:
        """Let another monitor have the file. May be called again."""
        self._file.close()

    def record(
        self,
        step: int,
        state: StepState | None = None,
        *,
        batch: RoutingBatch | None = None,
        trainer_logprobs: Any = None,
        native: RoutingBatch | None = None,
        report: Any = None,
        weight_version: int | None = None,
        mask: Any = None,
        labels: Mapping[str, Any] | None = None,
        alignment: Alignment | None = None,
        engine: Provenance | None = None,
        trainer: Provenance | None = None,
    ) -> dict[str, Any]:
        """Write the line of one step and return the record, in which NaN may stand for null.

        Either `state`, the sum of StepState.of over ranks or microbatches; or what StepState.of
        takes: `batch`, and as much of `trainer_logprobs`, `native`, `report`, `weight_version`,
        `mask`, `labels` as there is. alignment: native.alignment(). engine, trainer: what ran;
        None: as before.

        A step that was recorded before, by a run that was restarted since, is recorded again.
        Raises TraceError for what does not fit, before anything is written; R3Error if the file
        cannot be written.
        """
        step = _checked_step(step)
        for name, value, kind, hint in (
            ("state", state, StepState, ", a batch is given as batch="),
            ("alignment", alignment, Alignment, ""),
            ("engine", engine, Provenance, ""),
            ("trainer", trainer, Provenance, ""),
        ):
            if not isinstance(value, kind | None):
                raise TraceError(
                    f"step {step}: {name} is of type {type(value).__name__}, expected "
                    f"{kind.__name__}{hint}"
                )
        arrays = (trainer_logprobs, native, report, weight_version, mask, labels)
        if state is None:
            if batch is None:
                raise TraceError(f"step {step}: expected a batch or a state, got neither")
            state = StepState.of(
                batch,
                trainer_logprobs,
                native=native,
                report=report,
                weight_version=weight_version,
                mask=mask,
                labels=labels,
                clip=self._clip,
            )
        elif batch is not None or any(x is not None for x in arrays):
            raise TraceError(f"step {step}: expected a state or a batch and what goes with it")
        past = [metrics for at, metrics in self._past if at < step]
        record = self._record(step, state, past, alignment, engine, trainer)
        self._file.append(record)
        self._remember(record)
        if self._callback is not None:
            flat = {k: float(x) for k, x in record["metrics"].items() if x == x}
            self._callback(step, flat)
        return record

    def _remember(self, record: Mapping[str, Any]) -> None:
        # a run that starts again at an earlier step leaves what came after it behind
        while self._past and self._past[-1][0] >= record["step"]:
            self._past.pop()
        self._past.append((record["step"], record["metrics"]))
        environment = record.get("environment")
        self._environment = environment if isinstance(environment, dict) else {}

    def _record(
        self,
        step: int,
        state: StepState,
        past: list[Metrics],
        alignment: Alignment | None,
        engine: Provenance | None,
        trainer: Provenance | None,
    ) -> dict[str, Any]:
        environment, changes = dict(self._environment), {}
        for side, made in (("engine", engine), ("trainer", trainer)):
            if made is None:
                continue
            before = {k: v for k, v in environment.items() if k.startswith(f"{side}.")}
            now = environment_of(made, side)
            if before:  # there is nothing to compare a first step with
                for key in sorted({*before, *now}):
                    if before.get(key) != now.get(key):
                        changes[key] = [before.get(key), now.get(key)]
            environment = {k: v for k, v in environment.items() if k not in before} | now
        metrics = {NAMES[key]: value for key, value in figures(state).items()}
        record: dict[str, Any] = {
            "step": step,
            "time": time.time(),
            "metrics": metrics,
            "slices": slice_figures(state),
            "layers": layer_figures(state),
            "left_out": {kind: n for kind, n in state.mismatch.left_out.items() if n},
            "examples": list(state.mismatch.examples),
            "rollouts_without_route": list(state.without_route),
            "alignment": None
            if alignment is None
            else {"fault": alignment.fault, "text": str(alignment)},
            "environment": environment,
            "changes": changes,
        }
        alerts = find_alerts(past, record, self._limits)
        for level in ("notice", "bad"):
            metrics[NAMES[f"alerts_{level}"]] = sum(a.level == level for a in alerts)
        return record | {"alerts": [alert.to_dict() for alert in alerts]}


def _checked_step(step: object) -> int:
    try:
        if isinstance(step, bool):
            raise TypeError
        found = operator.index(step)  # type: ignore[arg-type]  # numpy's and torch's too
    except (TypeError, ValueError):
        raise TraceError(f"step is {brief(step)}, expected an integer") from None
    if not -INT64 <= found <= INT64:
        raise TraceError(f"step is {brief(found)}, expected an integer below 2**63")
    return found


def environment_of(made: Provenance, side: str) -> dict[str, Any]:
    """Fields of a provenance by dotted name, "engine.parallel.tensor" for the side "engine".

    All that is known, but for what differs between requests without anything being wrong: seeds
    (any field with "seed" in its name), sampling.max_tokens, sampling.n, extra.weight_versions.
    """
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                add(f"{name}.{key}" if name else str(key), part)
        elif "seed" not in name.rpartition(".")[2] and name not in _PER_REQUEST:
            plain = isinstance(value, str | int | float | None)
            if isinstance(value, int) and abs(value) > INT64:  # which JSON's readers may not have
                plain, value = True, hex(value)
            found[f"{side}.{name}"] = value if plain else str(value)

    add("", made.to_dict())
    return found
