"""How evenly both sides use their experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from r3.page.charts import Series, bar_chart, line_chart
from r3.page.numbers import known, number, share, word
from r3.page.reach import aligned, at, items
from r3.page.tables import Column, Figure, Table, figure, table

_SIDES = (("load_a", "engine", "ink"), ("load_b", "trainer, native", "native"))


@dataclass(frozen=True)
class Load:
    """Load of each expert in one layer, for the chart that the script redraws for other layers.

    index: of the layer in the document. paths: SVG path of each side in a box of experts x 100.
    ticks: (height in the box, share of the layer's choices). even: height and share of a uniform
    load.
    """

    index: int
    layers: list[Any]
    experts: int
    paths: dict[str, str]
    ticks: list[tuple[str, str]]
    even: tuple[str, str]
    summary: str


def max_vio(data: Mapping[str, Any]) -> Figure | None:
    """Imbalance by layer, engine and trainer."""
    rows = aligned(data, "routing", "native", "layers")
    names = [r.get("layer") for r in rows]
    series = [
        Series("engine", "ink", [r.get("max_vio_a") for r in rows], names),
        Series("trainer, native", "native", [r.get("max_vio_b") for r in rows], names),
    ]
    if len(rows) < 13:
        svg = bar_chart("maxvio", [word(n) for n in names], series, x="layer", y="MaxVio")
    else:
        svg = line_chart("maxvio", series, x="layer", y="MaxVio", integer_x=True, markers=True)
    a, b = (number(at(data, "routing", "native", f"max_vio_{s}")) for s in "ab")
    said = f"Mean over layers: engine {a}, trainer {b}."
    return figure(
        svg, f"MaxVio by layer. {said}", said + " 0 is perfect balance.", layer_table(data)
    )


def layer_table(data: Mapping[str, Any]) -> Table | None:
    """MaxVio, the busiest experts, idle ones, and how far apart the loads are, by layer."""
    out = []
    for k, row in enumerate(aligned(data, "routing", "native", "layers")):
        a, b = _load(data, "load_a", k), _load(data, "load_b", k)
        out.append(
            {
                "layer": row.get("layer"),
                "max_vio_a": row.get("max_vio_a"),
                "max_vio_b": row.get("max_vio_b"),
                "busiest_a": _busiest(a),
                "busiest_b": _busiest(b),
                "idle_a": a.count(0.0) if a else None,
                "idle_b": b.count(0.0) if b else None,
                "apart": _apart(a, b),
            }
        )
    return table(
        "Expert load by layer",
        [
            Column("layer", "layer"),
            Column("MaxVio, engine", "max_vio_a", number),
            Column("MaxVio, trainer", "max_vio_b", number),
            Column("busiest expert, engine", "busiest_a", number),
            Column("busiest expert, trainer", "busiest_b", number),
            Column("idle experts, engine", "idle_a", number),
            Column("idle experts, trainer", "idle_b", number),
            Column("load that moved", "apart", share),
        ],
        out,
        sortable=True,
    )


def load(data: Mapping[str, Any]) -> Load | None:
    """The layer whose loads differ most, drawn."""
    layers = [r.get("layer") for r in aligned(data, "routing", "native", "layers")]
    both = [(_load(data, "load_a", k), _load(data, "load_b", k)) for k in range(len(layers))]
    usable = [
        k
        for k, (a, b) in enumerate(both)
        if len(a) == len(b) and all(0 < sum(x) * len(x) < math.inf for x in (a, b))
    ]
    if not usable:
        return None
    k = max(usable, key=lambda i: _apart(*both[i]) or 0.0)
    top = max(max(x) * len(x) / sum(x) for x in both[k])
    paths = {key: _path(_of_mean(x), top) for (key, _, _), x in zip(_SIDES, both[k], strict=True)}
    said = (
        f"Layer {word(layers[k])}: busiest expert {_busiest(both[k][0])} (engine) and "
        f"{_busiest(both[k][1])} (trainer), up to {number(top)} times the mean; "
        f"{share(_apart(*both[k]))} of the load moved."
    )
    experts = len(both[k][0])
    ticks = [(_height(t * experts, top), f"{100 * t:.6g}\u00a0%") for t in _ticks(top / experts)]
    even = (_height(1, top), share(1 / experts))
    return Load(k, layers, experts, paths, ticks, even, said)


def _load(data: Mapping[str, Any], key: str, k: int) -> list[float]:
    return [known(v) or 0.0 for v in items(data, "routing", "native", key, k)]


def _of_mean(load: list[float]) -> list[float]:
    """Each as a multiple of the mean, which is not 0"""
    mean = sum(load) / len(load)
    return [v / mean for v in load]


def _busiest(load: list[float]) -> int | None:
    return max(range(len(load)), key=load.__getitem__) if any(load) else None


def _apart(a: list[float], b: list[float]) -> float | None:
    """Total variation distance of the two loads: the share that would have to move."""
    if not sum(a) or not sum(b) or len(a) != len(b):
        return None
    x, y = sum(a), sum(b)
    return sum(abs(u / x - v / y) for u, v in zip(a, b, strict=True)) / 2


def _path(load: list[float], top: float) -> str:
    """A step line over experts; the script draws the same for other layers."""
    return "M0 100" + "".join(f"V{_height(v, top)}h1" for v in load) + "V100"


def _height(load: float, top: float) -> str:
    """Where in the box a load over the mean stands, from above; `top` is the largest."""
    return f"{100 - 96 * load / top:.1f}"


def _ticks(top: float) -> list[float]:
    """Round numbers from 0 to `top`, three to six; the script finds the same."""
    unit = 10.0 ** math.floor(math.log10(top / 5))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= top / 5)
    return [i * step for i in range(int(top / step) + 1)]
