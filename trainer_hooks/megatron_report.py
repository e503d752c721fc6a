"""What replay did in a step, counted per layer: the numbers of `MegatronReplay.report()`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerCounts:
    """What replay did in one decoder layer during a step, in router rows.

    rows_replayed: rows sent to the recorded experts. rows_missing: rows routed natively because
    the engine delivered no routing for them; neither padding nor the last token of a sequence,
    which no engine forwards. The two `outside_topk` counts are over replayed rows and compare with
    the trainer's native top-k of the same layer, `forced`: with the layers below replayed.
    outside_topk_cells_forced: rows with at least one expert outside it.
    outside_topk_experts_forced: such experts. Experts tied with the k-th score count as inside.
    """

    rows_replayed: int = 0
    rows_missing: int = 0
    outside_topk_cells_forced: int = 0
    outside_topk_experts_forced: int = 0

    def __add__(self, other: LayerCounts) -> LayerCounts:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return LayerCounts(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class ReplayReport:
    """Counts of one step by 0-based decoder layer."""

    layers: dict[int, LayerCounts]

    @property
    def total(self) -> LayerCounts:
        """The sum over layers: rows become cells."""
        return sum(self.layers.values(), LayerCounts())

    def __str__(self) -> str:
        names = [f.name for f in dataclasses.fields(LayerCounts)]
        lines = ["layer  " + "  ".join(names)]
        for layer, counts in [*self.layers.items(), ("total", self.total)]:
            values = dataclasses.astuple(counts)
            cells = (f"{v:>{len(n)}}" for n, v in zip(names, values, strict=True))
            lines.append(f"{layer:>5}  " + "  ".join(cells))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: {"total": {...}, "layers": {layer: {...}}}."""
        return {
            "total": dataclasses.asdict(self.total),
            "layers": {layer: dataclasses.asdict(c) for layer, c in self.layers.items()},
        }
