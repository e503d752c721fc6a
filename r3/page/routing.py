"""Where the two routings differ: by layer, position and margin, and outside the top-k."""

# ruff: noqa: RUF001 (dashes, minus and times signs are meant)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.page.charts import Series, bar_chart, line_chart
from r3.page.heatmap import shares_of
from r3.page.numbers import edge, known, number, share, word
from r3.page.reach import aligned, at, items, mapping, records
from r3.page.tables import Column, Figure, Table, figure, table

_SIDES = ("native", "replay")
_FEW = 10  # cells: a share of fewer says nothing


def by_layer(data: Mapping[str, Any]) -> Figure | None:
    """Cells that differ, by layer."""
    layers = {s: aligned(data, "routing", s, "layers") for s in _SIDES}
    most = max(layers.values(), key=len)
    names = [r.get("layer") for r in most]
    series = [
        Series(s, s, [r.get("cell_disagreement") for r in layers[s]], names)
        for s in _SIDES
        if layers[s]
    ]
    rows = [
        {"layer": layer}
        | {f"{key}_{s}": at(layers[s], k, key) for s in _SIDES for key in _LAYER_KEYS}
        for k, layer in enumerate(names)
    ]
    columns = [Column("layer", "layer")] + [
        Column(f"{word}, {s}", f"{key}_{s}", form)
        for key, (word, form) in _LAYER_KEYS.items()
        for s in _SIDES
    ]
    numbers = table("By layer", columns, rows, sortable=True)
    if len(names) < 13:
        svg = bar_chart(
            "layers", [word(n) for n in names], series, x="layer", y=_CELLS, percent="y"
        )
    else:
        svg = line_chart(
            "layers", series, x="layer", y=_CELLS, percent="y", integer_x=True, markers=True
        )
    worst = max(
        (r for r in layers["native"] if known(r.get("cell_disagreement")) is not None),
        key=lambda r: r["cell_disagreement"],
        default=None,
    )
    said = ""
    if worst:
        most_in, cells = word(worst.get("layer")), share(worst["cell_disagreement"])
        said = f"Most in layer {most_in}: {cells} of its cells."
    return figure(svg, f"Share of cells routed differently, by layer. {said}", said, numbers)


_CELLS = "cells routed differently"
_LAYER_KEYS = {
    "cell_disagreement": ("cells", share),
    "expert_disagreement": ("experts", share),
    "top1_changed": ("first expert changed", share),
}


def by_position(data: Mapping[str, Any]) -> Figure | None:
    """Cells that differ, by position in the sequence, all layers together."""
    series: list[Series] = []
    rows: dict[int, dict[str, Any]] = {}
    for side in _SIDES:
        shares = shares_of(data, side)
        width = known(at(data, "routing", side, "positions", "width")) or 1
        means = []
        for i, column in enumerate(shares):
            finite = [x for x in map(known, column) if x is not None]
            means.append(sum(finite) / len(finite) if finite else None)
            row = rows.setdefault(i, {"position": f"{int(i * width):,}"})
            row["rows"] = at(data, "routing", side, "positions", "rows", i)
            row[side] = means[-1]
        if shares:
            series.append(Series(side, side, means, [i * width for i in range(len(means))]))
    svg = line_chart("positions", series, x="position in the rollout", y=_CELLS, percent="y")
    numbers = table(
        "By position",
        [
            Column("from position", "position"),
            Column("rows", "rows", number),
            Column("cells, native", "native", share),
            Column("cells, replay", "replay", share),
        ],
        list(rows.values()),
    )
    return figure(
        svg,
        "Share of cells routed differently, by position in the rollout.",
        "All layers together. The last bins hold few rows where few rollouts are that long.",
        numbers,
    )


def depth(data: Mapping[str, Any]) -> Figure | None:
    """How many layers differ in a token."""
    counts: dict[str, list[float]] = {}
    for side in _SIDES:
        found = [known(c) or 0.0 for c in items(data, "routing", side, "layers_per_token")]
        if any(found):
            counts[side] = found
    # the picture ends with the last token; the table does not
    used = max((k + 1 for c in counts.values() for k, n in enumerate(c) if n), default=0)
    svg = bar_chart(
        "depth",
        [str(k) for k in range(used)],
        [Series(s, s, v[:used]) for s, v in counts.items()],
        x="differing layers of a token",
        y="tokens, logarithmic",
        counts=True,
    )
    numbers = table(
        "Tokens by number of differing layers",
        [
            Column("differing layers", "layers"),
            *(
                column
                for s in _SIDES
                for column in (
                    Column(f"tokens, {s}", s, _count),
                    Column(f"of all, {s}", f"share_{s}", share),
                )
            ),
        ],
        [
            {"layers": k}
            | {s: v[k] for s, v in counts.items() if k < len(v)}
            | {f"share_{s}": v[k] / sum(v) for s, v in counts.items() if k < len(v)}
            for k in range(max(map(len, counts.values()), default=0))
        ],
    )
    return figure(
        svg,
        "Tokens by the number of layers that differ.",
        "Layers that differ tend to come together in the same tokens.",
        numbers,
    )


def _count(value: Any) -> str:
    return number(None if known(value) is None else int(value))


def sequences(data: Mapping[str, Any]) -> Table | None:
    """Differing layers per token, as a mean of each rollout."""
    return table(
        "Differing layers per token, mean of each rollout",
        [
            Column("", "side"),
            *(
                Column(label, key, number)
                for label, key in (
                    ("mean", "mean"),
                    ("median", "p50"),
                    ("90th percentile", "p90"),
                    ("99th percentile", "p99"),
                    ("largest", "max"),
                )
            ),
        ],
        [
            {"side": s} | mapping(data, "routing", s, "sequence_level")
            for s in _SIDES
            if mapping(data, "routing", s, "sequence_level")
        ],
    )


def margins(data: Mapping[str, Any]) -> list[Figure]:
    """Cells, and those that differ, by flip margin: their numbers, then their share."""
    block = mapping(data, "routing", "native", "margins")
    edges = items(block, "edges")
    rows: list[dict[str, Any]] = []
    for i, (cells, differing) in enumerate(
        zip(items(block, "cells"), items(block, "differing"), strict=False)
    ):
        n, d = known(cells) or 0.0, known(differing)
        low, high = at(edges, i), at(edges, i + 1)
        label = f"{edge(low)}–{edge(high)}" if known(high) is not None else f"over {edge(low)}"
        part = d / n if n and d is not None else None
        rows.append({"margin": label, "low": edge(low), "cells": n, "differing": d, "share": part})
    while rows and not rows[-1]["cells"]:
        rows.pop()
    while rows and not rows[0]["cells"]:
        rows.pop(0)
    names = [str(r["low"]) for r in rows]
    sizes = bar_chart(
        "margincells",
        names,
        [
            Series("all cells", "ink", [r["cells"] for r in rows]),
            Series("routed differently", "native", [r["differing"] for r in rows]),
        ],
        x="flip margin, from",
        y="cells with this margin, logarithmic",
        counts=True,
    )
    shown = [r["share"] if r["cells"] >= _FEW else None for r in rows]
    shares = bar_chart(
        "margins",
        names,
        [Series("native", "native", shown)],
        x="flip margin, from",
        y="of these routed differently",
        percent="y",
    )
    numbers = table(
        "Cells by flip margin",
        [
            Column("margin", "margin"),
            Column("cells", "cells", _count),
            Column("routed differently", "differing", _count),
            Column("share", "share", share),
        ],
        [r for r in rows if r["cells"]],
    )
    few = sum(0 < r["cells"] < _FEW for r in rows)
    said = f" Left out: {few} {'margin' if few == 1 else 'margins'} of fewer than {_FEW} cells."
    made = [
        figure(sizes, "Cells, and those routed differently, by flip margin.", "", numbers),
        figure(
            shares,
            "Share of cells routed differently, by flip margin.",
            "Ties and near ties flip; a set that flips with a wide margin has another cause than "
            f"rounding.{said if few else ''}",
            None,
        ),
    ]
    return [f for f in made if f]


def swaps(data: Mapping[str, Any]) -> Table | None:
    """The most frequent exchanges of one expert for another."""
    cells = known(at(data, "routing", "native", "swapped_cells"))
    return table(
        "Most frequent swaps of one expert for another, native",
        [
            Column("layer", "layer"),
            Column("engine's expert", "from", word),
            Column("trainer's expert", "to", word),
            Column("cells", "cells", number),
            Column("of all one-expert swaps", "share", share),
        ],
        [
            s | {"share": n / cells if cells and (n := known(s.get("cells"))) else None}
            for s in records(data, "routing", "native", "swaps")
        ],
        sortable=True,
    )


def outside(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """How often the routing used is not the trainer's own top-k, forced and free."""
    parts = {k: mapping(data, "outside_topk", k) for k in ("forced", "free")}
    parts = {k: p for k, p in parts.items() if p}
    if not parts:
        return None
    colors = {"forced": "replay", "free": "native"}
    layers = {k: aligned(p, "layers") for k, p in parts.items()}
    names = [r.get("layer") for r in max(layers.values(), key=len)]
    total = table(
        "Outside the trainer's own top-k",
        [Column("", "pass"), Column("cells", "cells", share), Column("experts", "experts", share)],
        [{"pass": k} | p for k, p in parts.items()],
    )
    numbers = table(
        "Outside the trainer's own top-k, by layer",
        [Column("layer", "layer")]
        + [Column(f"{w}, {k}", f"{w}_{k}", share) for k in parts for w in ("cells", "experts")],
        [
            {"layer": layer}
            | {f"{w}_{k}": at(layers[k], i, w) for k in parts for w in ("cells", "experts")}
            for i, layer in enumerate(names)
        ],
    )
    series = [Series(k, colors[k], [r.get("cells") for r in layers[k]], names) for k in parts]
    svg = line_chart(
        "outside",
        series,
        x="layer",
        y="cells outside the top-k",
        percent="y",
        integer_x=True,
        markers=True,
    )
    label = "Share of cells whose routing is not the trainer's own top-k, by layer."
    return {"total": total, "figure": figure(svg, label, "", numbers)}
