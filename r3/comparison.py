"""Everything that two captures of the same rollouts say of each other, gathered trace by trace.

Side a is what the tokens were sampled with (the engine), b what it is compared with (the trainer,
routing natively), c, where there is one, the trainer under replay. `Comparison.to_dict` is what
`r3 compare --json` prints and the page shows; docs/metrics.md says what each figure means.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from r3.alignment import diagnose
from r3.attribution import Attribution
from r3.batch import RoutingBatch
from r3.differences import Differences
from r3.disagreement import RoutingDisagreement
from r3.errors import TraceError
from r3.logprob_shift import find_logprob_shift
from r3.mismatch import CLIP, LogprobMismatch
from r3.shares import share
from r3.slices import Labels, Sides, SliceCounts, cut, label_order, merge_slices
from r3.spec import RouterSpec
from r3.trace import RoutingTrace
from r3.trace_labels import TraceLabels
from r3.worst import Texts, TokenView, Worst

# Traces are counted together once they have so many tokens, or so many bytes of routing a side:
# enough for numpy to be fast, few enough to stay small.
_TOKENS, _BYTES = 1 << 16, 1 << 25
# |log-ratios| at which the share of tokens beyond is given, for the picture of the tails
_THRESHOLDS = np.geomspace(1e-4, 20.0, 107)
# Rows that agree this badly are looked at for a shift, in the first rollouts, of so many tokens.
_DOUBTFUL, _LOOKED_AT = 0.1, 1 << 14

Traces = tuple[RoutingTrace, RoutingTrace, RoutingTrace | None]


class Comparison:
    """Counts over the traces added so far.

    clip: bounds of the probability ratio for clipped shares, see LogprobMismatch. ordered: the
    first expert of each cell has the largest weight on both sides, so that its change is counted.
    """

    def __init__(
        self,
        spec: RouterSpec,
        *,
        clip: tuple[float, float] = CLIP,
        ordered: bool = False,
    ) -> None:
        self.spec, self._clip, self._ordered = spec, clip, ordered
        self.rollouts = self.tokens = self.sampled_tokens = 0
        self._waiting: list[Traces] = []
        self._waiting_tokens = 0
        self._has_replay: bool | None = None
        self._native, self._replay = (_Side(spec, clip) for _ in range(2))
        self._labels = TraceLabels()
        self._attribution: Attribution | None = None
        self._worst = Worst()
        self._first: tuple[RoutingBatch, RoutingBatch] | None = None

    def add(self, a: RoutingTrace, b: RoutingTrace, c: RoutingTrace | None = None) -> None:
        """Compare the traces of one rollout; c in all calls or in none.

        Raises TraceError, naming rollout and token, if they are not of the same tokens, and for
        other routers.
        """
        for side, trace in (("first", a), ("second", b), ("third", c)):
            if trace is None and side == "third":
                continue
            if not isinstance(trace, RoutingTrace):
                raise TraceError(
                    f"the {side} side is {reprlib.repr(trace)}, expected a RoutingTrace"
                )
            if trace.spec != self.spec:
                raise TraceError(
                    f"rollout {trace.rollout_id}: the {side} side has the routers {trace.spec}, "
                    f"expected {self.spec}"
                )
            check_same_tokens(side, trace, a)
        if self._has_replay not in (None, c is not None):
            raise TraceError(
                f"rollout {a.rollout_id}: a third side in some rollouts, expected it in all or none"
            )
        self._has_replay = c is not None
        self._waiting.append((a, b, c))
        self._waiting_tokens += a.num_tokens
        self.rollouts += 1
        self.tokens += a.num_tokens
        row_bytes = len(self.spec.moe_layers) * self.spec.top_k * self.spec.dtype.itemsize
        if self._waiting_tokens >= min(_TOKENS, max(1, _BYTES // row_bytes)):
            self._count()

    def _count(self) -> None:
        """Count the traces that wait."""
        waiting, self._waiting, self._waiting_tokens = self._waiting, [], 0
        if not waiting:
            return
        a = RoutingBatch.from_traces([x[0] for x in waiting])
        b = RoutingBatch.from_traces([x[1] for x in waiting])
        replayed = [x[2] for x in waiting if x[2] is not None]
        c = RoutingBatch.from_traces(replayed) if replayed else None
        margins = _margins([x[1] for x in waiting], b)
        if self._first is None:
            some = max(2, int(np.searchsorted(a.cu_seqlens, _LOOKED_AT)))
            self._first = (
                RoutingBatch.from_traces([x[0] for x in waiting[:some]]),
                RoutingBatch.from_traces([x[1] for x in waiting[:some]]),
            )

        sampler, native = a.logprobs.astype(np.float64), _log_ratio(a, b)
        sampled = ~np.isnan(native)
        self.sampled_tokens += int(sampled.sum())
        labels = list(self._labels.of([x[0] for x in waiting], a, b))
        found = Differences.between(
            a.routed_experts, b.routed_experts, a.valid & b.valid, self.spec
        )
        self._native.add(found, a, b, sampled, labels, margins, self._ordered)
        replay = None
        if c is not None:
            replay = _log_ratio(a, c) if not np.isnan(c.logprobs).all() else None
            used = Differences.between(
                a.routed_experts, c.routed_experts, a.valid & c.valid, self.spec
            )
            known = sampled & ~np.isnan(c.logprobs)
            self._replay.add(used, a, c, known, labels, None, self._ordered)
        per_row = found.layers_per_row
        self._attribute(a, found, per_row, native, replay)
        layers = np.where(found.valid, per_row.astype(np.float64), np.nan)
        self._worst.add(TokenView(a, sampler, native, replay, layers))

    def _attribute(
        self,
        a: RoutingBatch,
        found: Differences,
        per_row: np.ndarray,
        native: np.ndarray,
        replay: np.ndarray | None,
    ) -> None:
        known = np.isfinite(native) if replay is None else np.isfinite(native + replay)
        known[a.cu_seqlens[:-1]] = False  # no pass of this sequence produced its first token
        at = np.flatnonzero(known)
        at = at[found.valid[at - 1]]
        part = Attribution.of(
            per_row[at - 1],
            native[at],
            None if replay is None else replay[at],
            len(self.spec.moe_layers),
        )
        self._attribution = part if self._attribution is None else self._attribution + part

    def to_dict(self, texts: Texts | None = None) -> dict[str, Any]:
        """The parts of the document that traces determine; NaN and infinity as they are.

        texts: gives the text of each of some token ids, for the worst rollouts and tokens.
        """
        self._count()
        sides = {"native": self._native, "replay": self._replay if self._has_replay else None}
        return {
            "spec": self.spec.to_dict(),
            "clip": list(self._clip),
            "routing": {k: side and side.routing.to_dict() for k, side in sides.items()},
            "mismatch": {
                k: _mismatch_block(side.mismatch) if side and side.sampled else None
                for k, side in sides.items()
            },
            "attribution": self._attribution.to_dict() if self._attribution else None,
            "alignment": self._alignment(),
            "logprob_shift": find_logprob_shift(*self._first) if self._first else None,
            "slices": self._slices(),
            "worst": self._worst.to_dict(texts),
        }

    def _slices(self) -> dict[str, list[dict[str, Any]]]:
        found = {}
        for dimension, parts in sorted(self._native.slices.items()):
            replayed = self._replay.slices.get(dimension, {})
            found[dimension] = [
                {
                    "label": label,
                    "rows": parts[label].rows,
                    "cell_disagreement": share(parts[label].differing_cells, parts[label].cells),
                    "token_disagreement": share(parts[label].differing, parts[label].rows),
                    "tokens": parts[label].mismatch.metrics()["tokens"],
                    **_short_metrics(parts[label], "native"),
                    **_short_metrics(replayed.get(label), "replay"),
                }
                for label in sorted(parts, key=label_order)
            ]
        return found

    def _alignment(self) -> dict[str, Any] | None:
        """What `diagnose` says of the first rollouts, where the sides agree badly."""
        if self._first is None or not self._native.routing.expert_disagreement > _DOUBTFUL:
            return None
        a, b = self._first
        tokens = np.flatnonzero(a.valid & b.valid)
        found = diagnose(a, b.routed_experts[tokens], tokens)
        return {"fault": found.fault, "text": "; ".join(str(found).splitlines())}


class _Side:
    """What is counted of one trainer side against the engine's."""

    def __init__(self, spec: RouterSpec, clip: tuple[float, float]) -> None:
        self.routing = RoutingDisagreement.zero(spec)
        self.mismatch = LogprobMismatch.zero(clip=clip)
        self.slices: dict[str, dict[str, SliceCounts]] = {}
        self.sampled = False  # whether there was any token that counts
        self._clip = clip

    def add(
        self,
        found: Differences,
        a: RoutingBatch,
        b: RoutingBatch,
        sampled: np.ndarray,
        labels: Sequence[Labels],
        margins: np.ndarray | None,
        ordered: bool,
    ) -> None:
        """found: between the batches a and b; sampled: bool [T], tokens that count."""
        self.routing += RoutingDisagreement.of(
            found, a.routed_experts, b.routed_experts, a.cu_seqlens, margins, ordered
        )
        self.sampled |= bool(sampled.any())
        self.mismatch += LogprobMismatch.of(
            b.logprobs,
            a.logprobs,
            cu_seqlens=a.cu_seqlens,
            mask=sampled,
            clip=self._clip,
            names=a.rollout_ids,
        )
        sides = Sides(
            cu_seqlens=a.cu_seqlens,
            sampler=a.logprobs,
            trainer=b.logprobs,
            counted=sampled,
            compared=found.valid,
            layers_per_row=found.layers_per_row,
            layers=len(found.spec.moe_layers),
            clip=self._clip,
        )
        self.slices = merge_slices(self.slices, cut(sides, labels))


def _short_metrics(counts: SliceCounts | None, side: str) -> dict[str, float]:
    metrics = counts.mismatch.metrics() if counts else {}
    names = ("kl_k3", "abs_logratio_p99", "extreme_2", "ess")
    return {f"{name}_{side}": metrics.get(name, math.nan) for name in names}


def check_same_tokens(side: str, trace: RoutingTrace, first: RoutingTrace) -> None:
    """Raise TraceError, naming rollout and token, unless `trace` has the token ids of `first`.

    side: what `trace` is called, such as "second".
    """
    found, expected = trace.token_ids, first.token_ids
    both = min(len(found), len(expected))
    differs = found[:both] != expected[:both]
    if differs.any():
        at = int(differs.argmax())
        raise TraceError(
            f"rollout {first.rollout_id}: token {at}: the {side} side has id {found[at]}, expected "
            f"{expected[at]} as on the first side: only rollouts of the same tokens can be compared"
        )
    if len(found) != len(expected):
        raise TraceError(
            f"rollout {first.rollout_id}: the {side} side has {len(found)} tokens, expected "
            f"{len(expected)} as on the first side"
        )


def _log_ratio(a: RoutingBatch, b: RoutingBatch) -> np.ndarray:
    """float64 [T], of what both sides know; else NaN"""
    return b.logprobs.astype(np.float64) - a.logprobs


def _margins(traces: Sequence[RoutingTrace], batch: RoutingBatch) -> np.ndarray | None:
    """float32 [T, MoE layers] of the column `router_margins`; None where no trace has it"""
    if not any("router_margins" in t.columns for t in traces):
        return None
    margins = np.full((batch.num_tokens, len(batch.spec.moe_layers)), np.nan, np.float32)
    for start, trace in zip(batch.cu_seqlens, traces, strict=False):
        if "router_margins" in trace.columns:
            margins[start : start + trace.num_rows] = trace.columns["router_margins"].data
    return margins


def _mismatch_block(mismatch: LogprobMismatch) -> dict[str, Any]:
    return {
        "metrics": mismatch.metrics(),
        "survival": {
            "thresholds": _THRESHOLDS.tolist(),
            "share": mismatch.survival(_THRESHOLDS).tolist(),
        },
        "buckets": mismatch.buckets(),
        "left_out": dict(mismatch.left_out),
        "examples": list(mismatch.examples),
    }
