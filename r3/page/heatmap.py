"""The map of layers and positions: shares of differing cells as shades of one colour."""

# ruff: noqa: RUF001 (dashes, minus and times signs are meant)

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from r3.page.numbers import known
from r3.page.reach import aligned, at, items

_SIDES = ("native", "replay")
LEVELS = 8  # shades of the heat map above "none differ"


@dataclass(frozen=True)
class HeatMap:
    """Share of differing cells, layers down and position bins across.

    side: whose (native, else replay). breaks: LEVELS - 1 upper bounds of the shades. bins: first
    and last position of each, with a label on every tick-th. rows: (layer, [(shade, percent)]),
    shade "x" where there are no rows. legend: (shade, range). row_height: CSS pixels.
    """

    side: str
    both: bool
    breaks: list[float]
    bins: list[tuple[int, int]]
    rows: list[tuple[Any, list[tuple[str, str]]]]
    legend: list[tuple[str, str]]
    row_height: int
    tick: int


def heat_map(data: Mapping[str, Any]) -> HeatMap | None:
    """None where no side has positions."""
    usable = [s for s in _SIDES if shares_of(data, s)]
    if not usable:
        return None
    side = usable[0]
    shares = shares_of(data, side)
    layers = [r.get("layer") for r in aligned(data, "routing", side, "layers")]
    width = known(at(data, "routing", side, "positions", "width")) or 1
    counts = items(data, "routing", side, "positions", "rows")
    breaks = _breaks(shares, counts)
    deep = max((len(column) for column in shares), default=0)
    layers += list(range(len(layers), deep))
    bins = [(int(i * width), int((i + 1) * width) - 1) for i in range(len(shares))]
    rows = [
        (layers[k], [_shade(column[k] if k < len(column) else None, breaks) for column in shares])
        for k in range(deep)
    ]
    edges = [0.0, *breaks]
    legend = [("0", "none")]
    legend += [
        (str(i + 1), f"{_bound(a)}–{_bound(b)}\u00a0%") for i, (a, b) in enumerate(pairwise(edges))
    ]
    legend.append((str(LEVELS), f"over {_bound(edges[-1])}\u00a0%"))
    height = max(10, min(26, 480 // max(deep, 1)))
    return HeatMap(side, len(usable) > 1, breaks, bins, rows, legend, height, -(-len(bins) // 8))


def shares_of(data: Mapping[str, Any], side: str) -> list[list[Any]]:
    """Shares of differing cells [bins][layers]; empty where none is known."""
    columns = items(data, "routing", side, "positions", "cell_disagreement")
    columns = [c if isinstance(c, list) else [] for c in columns]
    return columns if any(known(v) is not None for c in columns for v in c) else []


def _bound(value: float) -> str:
    return f"{100 * value:.3g}"


def _shade(value: Any, breaks: Sequence[float]) -> tuple[str, str]:
    x = known(value)
    if x is None:
        return "x", ""
    return str(0 if x <= 0 else 1 + bisect.bisect_left(breaks, x)), f"{100 * x:.3g}"


def _breaks(shares: list[list[Any]], counts: list[Any]) -> list[float]:
    """Equal steps up to nearly the largest share: bins of few rows do not stretch the scale."""
    found = sorted(
        (x, known(counts[i]) or 0.0 if i < len(counts) else 1.0)
        for i, column in enumerate(shares)
        for x in map(known, column)
        if x is not None and x > 0
    )
    left = 0.005 * sum(n for _, n in found)
    top = found[-1][0] if found else 0.08
    for x, n in reversed(found):
        top = x
        left -= n
        if left < 0:
            break
    step = top / LEVELS
    unit = 10.0 ** math.floor(math.log10(step))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= step * 0.999)
    return [round(step * i, 12) for i in range(1, LEVELS)]
