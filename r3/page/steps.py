"""How a training run went: trends of the recorded metrics, alerts, changes of the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from r3.page.charts import Marks, Series, line_chart
from r3.page.numbers import known, number
from r3.page.overview import look_at
from r3.page.reach import at, mapping, records
from r3.page.tables import Column, Figure, Table, figure, table

# a panel: title, how the last part of its metrics' names begins, which alerts' names tell of it
# (by a part of them), whether the values are shares
_TRENDS: list[tuple[str, str, tuple[str, ...], bool]] = [
    ("KL divergence (k3)", "k3_kl", ("kl", "clipped"), False),
    ("F(2), extreme tokens", "extreme_2", ("extreme",), False),
    ("|log-ratio|, 99th percentile and on", "abs_logratio_p99", ("tail", "p99"), False),
    ("|log-ratio|, largest", "abs_logratio_max", ("wrong_token", "logratio_max"), False),
    ("Effective sample size", "ess", ("ess_", "sample_size"), False),
    ("Cells routed differently", "cell_disagreement", ("disagreement",), True),
    ("Tokens routed differently", "token_disagreement", ("token_dis",), True),
    ("Experts outside the trainer's top-k", "outside_topk_experts", ("outside",), True),
    ("MaxVio", "max_vio", ("max_vio",), False),
    ("Rows without a route", "rows_without_route", ("without_route",), True),
    ("Lag of the weights", "weight_lag", ("lag",), False),
]
_SMALL = (3.4, 2.1)


def steps(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Trends of the recorded steps, their alerts and changes of environment."""
    run = [r for r in records(data, "steps") if known(r.get("step")) is not None]
    alerts = [
        {"step": a.get("step"), **a, **look_at(a.get("look_at"))}
        for a in records(data, "alerts")
        or [{"step": r["step"], **a} for r in run for a in records(r, "alerts")]
    ]
    if not run and not alerts:
        return None
    changes = [
        {
            "step": r["step"],
            "key": key,
            "before": at(pair, 0) if isinstance(pair, list) else None,
            "after": at(pair, 1) if isinstance(pair, list) else pair,
        }
        for r in run
        for key, pair in mapping(r, "changes").items()
    ]
    return {
        "count": len(run),
        "first": run[0]["step"] if run else None,
        "last": run[-1]["step"] if run else None,
        "alerts": alerts,
        "changes": changes,
        "panels": _panels(run, changes),
        "table": _step_table(run),
    }


def _panels(run: list[dict[str, Any]], changes: list[Any]) -> list[Figure]:
    if len(run) < 2:
        return []
    names = list(dict.fromkeys(n for r in run for n in mapping(r, "metrics")))
    lines = [(float(s), "") for s in dict.fromkeys(c["step"] for c in changes)]
    wanted = [
        (title, [n for n in names if n.rsplit("/", 1)[-1].startswith(begin)][:4], told, percent)
        for title, begin, told, percent in _TRENDS
    ]
    if not any(found for _, found, _, _ in wanted):
        wanted = [(name, [name], (name,), False) for name in names[:8]]
    keys = [word for _, found, told, _ in wanted if found for word in told]
    x = [r["step"] for r in run]
    panels: list[Figure] = []
    for title, found, told, percent in wanted:
        common = _common_beginning(found)
        spare = ["native", "extra", "replay", "ink"]
        series = []
        for name in found:
            color = "replay" if ("forced" in name or "replay" in name) else spare[0]
            color = "ink" if "engine" in name else color
            spare = [c for c in spare if c != color] or ["ink"]
            label = name[len(common) :] or name
            series.append(Series(label, color, [at(r, "metrics", name) for r in run], x))
        last = ", ".join(f"{s.label} {number(s.y[0])} to {number(s.y[-1])}" for s in series)
        svg = line_chart(
            f"trend{len(panels)}",
            series,
            x="step",
            y=title,
            percent="y" if percent else "",
            marks=Marks(lines, [float(r["step"]) for r in run if _alerted(r, told, keys)]),
            integer_x=True,
            size=_SMALL,
        )
        made = figure(svg, f"{title} over steps {x[0]} to {x[-1]}: {last}.", "", None)
        panels += [made] if made else []
    return panels


def _alerted(record: Mapping[str, Any], told: Sequence[str], keys: Sequence[str]) -> bool:
    """Whether an alert of this step is about a panel: it is told of there, or in no panel."""
    names = [str(a.get("name")) for a in records(record, "alerts")]
    return any(
        any(word in n for word in told) or not any(word in n for word in keys) for n in names
    )


def _common_beginning(names: list[str]) -> str:
    """What all names begin with, up to a word's end: left out of the legend."""
    if len(names) < 2:
        return ""
    low, high = min(names), max(names)
    same = next((i for i, c in enumerate(low) if high[i] != c), len(low))
    return low[: max(low.rfind("_", 0, same), low.rfind("/", 0, same)) + 1]


def _step_table(run: list[dict[str, Any]]) -> Table | None:
    rows = []
    for name in dict.fromkeys(n for r in run for n in mapping(r, "metrics")):
        values = [at(r, "metrics", name) for r in run]
        finite = [v for v in map(known, values) if v is not None]
        rows.append(
            {
                "name": name,
                "first": values[0],
                "last": values[-1],
                "low": min(finite, default=None),
                "high": max(finite, default=None),
            }
        )
    return table(
        "Every recorded metric",
        [
            Column("metric", "name"),
            Column("first step", "first", number, always=True),
            Column("last step", "last", number, always=True),
            Column("smallest", "low", number),
            Column("largest", "high", number),
        ],
        rows,
        sortable=True,
    )
