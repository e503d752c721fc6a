"""What replay did in a step: the numbers of `MegatronReplay.report()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from r3.identity import RolloutId


@dataclass(frozen=True)
class LayerCounts:
    """What happened in one decoder layer during a step, in router rows of this rank.

    rows_replayed: rows sent to the recorded experts. rows_missing: rows routed natively because
    the engine delivered no routing for them; neither padding nor the last token of a sequence,
    which no engine forwards. rows_stale: rows routed natively because their weights were too old.
    rows_padding: rows that belong to no token, spread over the experts. A pass that failed counts
    as far as it went.

    rows_not_enclosed: rows of passes within the step, evaluation say, that no microbatch() or
    record() enclosed, and that were native therefore.

    The `forced` counts are over replayed rows and compare with the trainer's native top-k of the
    same layer, with the layers below replayed. outside_topk_cells_forced: rows with at least one
    expert outside it. outside_topk_experts_forced: such experts.
    The `free` counts are the same over rows_compared, in passes under `record()`, which are native
    in all layers. Experts tied with the k-th score count as inside. All are 0 without counting.
    """

    rows_replayed: int = 0
    rows_missing: int = 0
    rows_stale: int = 0
    rows_padding: int = 0
    rows_not_enclosed: int = 0
    outside_topk_cells_forced: int = 0
    outside_topk_experts_forced: int = 0
    rows_compared: int = 0
    outside_topk_cells_free: int = 0
    outside_topk_experts_free: int = 0

    def __add__(self, other: LayerCounts) -> LayerCounts:
        return _added(self, other)


@dataclass(frozen=True)
class RolloutCounts:
    """What happened to one rollout; each forward pass counts.

    rows: those that should have had routing; rows_missing, rows_stale: of these, routed natively.
    Of the whole rollout, whatever part of it this rank sees.
    cells_replayed: tokens times layers replayed on this rank. outside_topk_experts_forced: experts
    of these that were outside the trainer's native top-k. Both 0 without counting.
    """

    rows: int = 0
    rows_missing: int = 0
    rows_stale: int = 0
    cells_replayed: int = 0
    outside_topk_experts_forced: int = 0

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        return _added(self, other)

    @property
    def native_fraction(self) -> float:
        """Share of the rows that were routed natively; 0 for a rollout of one token"""
        return (self.rows_missing + self.rows_stale) / max(self.rows, 1)


_Counts = TypeVar("_Counts", LayerCounts, RolloutCounts)


def _added(a: _Counts, b: _Counts) -> _Counts:
    pairs = zip(vars(a).values(), vars(b).values(), strict=True)
    return type(a)(*(x + y for x, y in pairs))


@dataclass(frozen=True)
class ReplayReport:
    """Counts of one step by 0-based decoder layer, and by rollout; top_k of the routers."""

    layers: Mapping[int, LayerCounts]
    rollouts: Mapping[RolloutId, RolloutCounts] = field(default_factory=dict)
    top_k: int = 1

    @property
    def total(self) -> LayerCounts:
        """The sum over layers: rows become cells."""
        return sum(self.layers.values(), LayerCounts())

    @property
    def outside_fraction(self) -> float:
        """Share of the replayed experts that were outside the native top-k, 0..1, 0 for none"""
        total = self.total
        return total.outside_topk_experts_forced / max(total.rows_replayed * self.top_k, 1)

    def __str__(self) -> str:
        counts = {**{str(i): c for i, c in self.layers.items()}, "total": self.total}
        used = [
            f.name
            for f in dataclasses.fields(LayerCounts)
            if f.name in ("rows_replayed", "rows_missing") or getattr(self.total, f.name)
        ]
        lines = ["layer  " + "  ".join(used)]
        for layer, c in counts.items():
            cells = (f"{getattr(c, name):>{len(name)}}" for name in used)
            lines.append(f"{layer:>5}  " + "  ".join(cells))
        lines.append(
            f"{self.outside_fraction:.2%} of the replayed experts outside the native top-k"
        )
        for rollout, r in self.rollouts.items():
            if r.native_fraction == 0:
                continue
            lines.append(
                f"rollout {rollout}: {r.rows_missing} missing and {r.rows_stale} stale of "
                f"{r.rows} rows"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by the names above: numbers, or such by layer and by rollout."""
        return {
            "total": dataclasses.asdict(self.total),
            "outside_fraction": self.outside_fraction,
            "layers": {layer: dataclasses.asdict(c) for layer, c in self.layers.items()},
            "rollouts": {str(i): dataclasses.asdict(c) for i, c in self.rollouts.items()},
        }
