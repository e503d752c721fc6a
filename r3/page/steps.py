"""How a training run went: trends of the recorded metrics, alerts, changes of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.page.charts import LEGEND, Series, line_chart
from r3.page.glossary import meaning
from r3.page.numbers import known, number
from r3.page.overview import look_at
from r3.page.reach import at, mapping, records
from r3.page.tables import Column, Figure, Table, figure, table

# a panel: title, its lines as (recorded name, what it is called, colour), whether these are shares
_PANELS: list[tuple[str, list[tuple[str, str, str]], bool]] = [
    ("KL divergence (k3)", [("rollout_corr/k3_kl", "", "native")], False),
    ("F(2), extreme tokens", [("routing/extreme_2", "", "native")], False),
    (
        "|log-ratio|, 0.99 and 0.999 quantile",
        [
            ("routing/abs_logratio_p99", "0.99", "native"),
            ("routing/abs_logratio_p999", "0.999", "extra"),
        ],
        False,
    ),
    ("|log-ratio|, largest", [("routing/abs_logratio_max", "", "native")], False),
    (
        "Effective sample size",
        [("routing/ess", "tokens", "native"), ("routing/ess_sequence", "sequences", "extra")],
        False,
    ),
    (
        "Correlation of probabilities",
        [("training/rollout_actor_probs_pearson_corr", "", "native")],
        False,
    ),
    ("Cells routed differently", [("routing/cell_disagreement_free", "", "native")], True),
    ("Tokens routed differently", [("routing/token_disagreement_free", "", "native")], True),
    (
        "Experts outside the trainer's top-k",
        [
            ("routing/outside_topk_experts_forced", "forced", "replay"),
            ("routing/outside_topk_experts_free", "free", "native"),
        ],
        True,
    ),
    (
        "MaxVio",
        [
            ("routing/max_vio_engine", "engine", "ink"),
            ("routing/max_vio_trainer_free", "trainer", "native"),
        ],
        False,
    ),
    ("Rows without a route", [("routing/rows_without_route_fraction", "", "native")], True),
    (
        "Lag of the weights",
        [
            ("routing/weight_lag_mean", "mean", "native"),
            ("routing/weight_lag_max", "largest", "extra"),
        ],
        False,
    ),
]
_SMALL = (3.4, 1.85)


def steps(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Trends of the recorded steps, their alerts and changes of environment."""
    run = [r for r in records(data, "steps") if known(r.get("step")) is not None]
    alerts = records(data, "alerts") or [
        {**a, "step": r["step"]} for r in run for a in records(r, "alerts")
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
        "alert_count": len(alerts),
        "alerts": folded_alerts(alerts, [r["step"] for r in run]),
        "changes": changes,
        "panels": _panels(run, alerts, changes),
        "table": _step_table(run),
    }


def folded_alerts(alerts: list[dict[str, Any]], run: list[Any]) -> list[dict[str, Any]]:
    """Rows of the table of alerts, by the step at which they begin: those of one name and level at
    recorded steps that follow each other are one row, which says what the last one says."""
    place = {step: i for i, step in enumerate(run)}
    rows: list[dict[str, Any]] = []
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for a in sorted(alerts, key=lambda a: place.get(_step(a), len(place))):
        key, i = (str(a.get("name")), str(a.get("level"))), place.get(_step(a))
        row = latest.get(key)
        if row is not None and i is not None and row["place"] == i - 1:
            row["count"] += 1
        else:
            row = {"begin": a.get("step"), "first": a.get("value"), "count": 1}
            rows.append(row)
            latest[key] = row
        row |= {
            "place": i,
            "end": a.get("step"),
            "level": a.get("level"),
            "name": a.get("name"),
            "last": a.get("value"),
            "limit": a.get("limit"),
            "message": a.get("message"),
            **look_at(a.get("look_at")),
        }
    return rows


def _step(alert: Mapping[str, Any]) -> float | None:
    return known(alert.get("step"))


def _panels(
    run: list[dict[str, Any]], alerts: list[dict[str, Any]], changes: list[Any]
) -> list[Figure]:
    if len(run) < 2:
        return []
    names = list(dict.fromkeys(n for r in run for n in mapping(r, "metrics")))
    lines = [(float(s), "") for s in dict.fromkeys(c["step"] for c in changes)]
    wanted = _PANELS
    if not any(name in names for _, found, _ in wanted for name, _, _ in found):
        wanted = [(name, [(name, "", "native")], False) for name in names[:8]]
    x = [r["step"] for r in run]
    panels: list[Figure] = []
    for title, found, percent in wanted:
        series, said = [], []
        for name, label, color in found:
            y = [at(r, "metrics", name) for r in run]
            if not any(known(v) is not None for v in y):
                continue
            told = [s for a in alerts if a.get("figure") == name and (s := _step(a)) is not None]
            series.append(Series(label, color, y, x, alerts=told))
            said.append(f"{label} {number(y[0])} to {number(y[-1])}".strip())
            if told:
                said[-1] += f", alerts at {len(set(told))} of the steps"
        if len(series) == 1 and series[0].label:  # one line has no legend
            title = f"{title}: {series[0].label}"
        svg = line_chart(
            f"trend{len(panels)}",
            series,
            x="step",
            y=title,
            percent="y" if percent else "",
            lines=lines,
            integer_x=True,
            size=_SMALL if len(series) > 1 else (_SMALL[0], _SMALL[1] + LEGEND),  # all alike
        )
        words = f"{title} over steps {x[0]} to {x[-1]}: {'; '.join(said)}."
        made = figure(svg, words, "", None)
        panels += [made] if made else []
    return panels


def _step_table(run: list[dict[str, Any]]) -> Table | None:
    rows = []
    for name in dict.fromkeys(n for r in run for n in mapping(r, "metrics")):
        values = [at(r, "metrics", name) for r in run]
        finite = [v for v in values if known(v) is not None]
        rows.append(
            {
                "name": name,
                "first": values[0],
                "last": values[-1],
                "low": min(finite, default=None),
                "high": max(finite, default=None),
                "what": meaning(name),
            }
        )
    several = len(run) > 1
    return table(
        "Every recorded metric",
        [
            Column("metric", "name"),
            Column("first step" if several else "value", "first", number, always=True),
            *(
                (
                    Column("last step", "last", number, always=True),
                    Column("smallest", "low", number),
                    Column("largest", "high", number),
                )
                if several
                else ()
            ),
            Column("what it is", "what"),
        ],
        rows,
        sortable=True,
    )
