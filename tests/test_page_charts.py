"""Charts of the page: every value is drawn, marks stand where they belong, all can be read."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from page_data import SMALL, charts_unwritten, comparison, only_steps
from r3.page import render_page
from r3.page.charts import Series, bar_chart, line_chart
from r3.page.experts import _ticks
from r3.page.svg import VARIABLES

pytestmark = pytest.mark.slow
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


@pytest.fixture
def charts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return charts_unwritten(monkeypatch)


def _panels(charts: dict[str, Any]) -> dict[str, Any]:
    return {axes.get_title(loc="left"): axes for name, axes in charts.items() if "trend" in name}


def _marks(axes: Any) -> list[tuple[float, float]]:
    """Points marked as alerts."""
    lines = [x for x in axes.lines if x.get_color() == VARIABLES["bad"]]
    return [(float(u), float(v)) for x in lines for u, v in zip(*x.get_data(), strict=True)]


def test_an_alert_marks_its_own_line_and_no_other(charts: dict[str, Any]) -> None:
    data = only_steps(30)
    render_page(data)
    expected = {"F(2), extreme tokens": "extreme_2", "Effective sample size": "ess_sequence"}
    panels = _panels(charts)
    assert set(expected) < set(panels)
    for title, axes in panels.items():
        name = expected.get(title)
        assert _marks(axes) == [
            (r["step"], r["metrics"][f"routing/{name}"])
            for r in data["steps"]
            if any(a["figure"] == f"routing/{name}" for a in r["alerts"])
        ]
    assert len(_marks(panels["F(2), extreme tokens"])) > 2
    assert len(_marks(panels["Effective sample size"])) > 2


def test_alerts_of_no_figure_or_one_that_no_panel_shows_mark_nothing(
    charts: dict[str, Any],
) -> None:
    data = only_steps(6)
    for r in data["steps"]:
        r["alerts"] = [
            {"name": "alignment", "level": "bad", "figure": None},
            {"name": "ess_token"},  # of a file from before alerts named their figure
            {"name": "left_out", "level": "notice", "figure": "routing/left_out"},
        ]
    render_page(data)
    assert _panels(charts)
    for axes in _panels(charts).values():
        assert _marks(axes) == []
        dotted = [x for x in axes.lines if x.get_color() == VARIABLES["muted"]]
        assert [x.get_xdata()[0] for x in dotted] == [3]  # the change of dtype


def test_figures_that_alerts_are_about_have_a_line(charts: dict[str, Any]) -> None:
    from r3.alerts import _ABOVE, _BELOW, _JUMPS, _RISES

    figures = {str(x[1]) for x in (*_ABOVE, *_BELOW, *_JUMPS, *_RISES)} - {"routing/left_out"}
    figures.add("routing/weight_lag_mean")
    data = only_steps(3)
    for k, r in enumerate(data["steps"]):
        r["metrics"] = dict.fromkeys(sorted(figures), 0.1 * (k + 1))
        r["alerts"] = [{"name": "x", "level": "bad", "figure": name} for name in sorted(figures)]
    render_page(data)
    marks = [_marks(axes) for axes in _panels(charts).values()]
    assert sum(map(len, marks)) == 3 * len(figures)
    titles = " / ".join(_panels(charts))
    assert "Effective sample size / " in titles  # two lines, with a legend
    assert "|log-ratio|, 0.99 and 0.999 quantile: 0.999" in titles  # one of two, so it is named


def _documents() -> dict[str, dict[str, Any]]:
    many = comparison(**SMALL | {"layers": 94})
    fine = comparison(**SMALL)
    edges = [0.0, *(2.0**k for k in range(-20, 6)), None]
    fine["routing"]["native"]["margins"] = {
        "edges": edges,
        "cells": [3 + 7**5 // (1 + abs(k - 15) ** 3) for k in range(len(edges) - 1)],
        "differing": [1] * (len(edges) - 1),
    }
    small = comparison(**SMALL)
    for side in ("native", "replay"):
        block = small["mismatch"][side]
        block["survival"] = {"thresholds": [0.011, 0.012, 0.013], "share": [0.5, 0.4, 0.3]}
        block["metrics"] |= {"abs_logratio_max": 0.014, "tokens": 5}
    return {"many layers": many, "fine margins": fine, "one decade": small, "steps": only_steps(9)}


@pytest.mark.parametrize("name", ["many layers", "fine margins", "one decade", "steps"])
def test_axes_can_be_read_and_legends_cover_nothing(charts: dict[str, Any], name: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    render_page(_documents()[name])
    assert len(charts) > 4
    for chart, axes in charts.items():
        canvas = FigureCanvasAgg(axes.figure)
        canvas.draw()
        box = axes.get_window_extent()
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = [
                t
                for t in axis.get_major_ticks()
                if t.label1.get_text() and low <= t.get_loc() <= high
            ]
            single = axis is axes.xaxis and len(axes.patches) == 1
            assert len(ticks) >= (1 if single else 2), (chart, axis)
            if axis is axes.xaxis:
                boxes = [t.label1.get_window_extent() for t in ticks]
                assert all(a.x1 < b.x0 for a, b in pairwise(boxes)), chart
        title = axes._left_title.get_window_extent()  # type: ignore[attr-defined]
        legend = axes.get_legend()
        if legend is not None:
            around = legend.get_window_extent()
            assert around.y0 >= box.y1 - 1, chart
            assert title.y0 >= around.y1 - 1, chart
        assert title.y1 <= axes.figure.bbox.y1, chart


def test_tails_end_at_the_largest_log_ratio(charts: dict[str, Any]) -> None:
    data = comparison(**SMALL)
    render_page(data)
    curves = {x.get_label(): x.get_data() for x in charts["tails"].lines}
    for side in ("native", "replay"):
        metrics = data["mismatch"][side]["metrics"]
        x, y = curves[side]
        assert (x[-1], y[-1]) == (metrics["abs_logratio_max"], 1 / metrics["tokens"])
        assert all(a >= b for a, b in pairwise(y))
        dots = [p.get_data() for p in charts["tails"].lines if len(p.get_xdata()) == 1]
        assert ([x[-1]], [y[-1]]) in [(list(u), list(v)) for u, v in dots]


def test_rare_numbers_of_layers_are_drawn(charts: dict[str, Any]) -> None:
    data = comparison(**SMALL, replay=False)
    data["routing"]["native"]["layers_per_token"] = [1188, 5, 1, 0]
    html = render_page(data)
    axes = charts["depth"]
    assert axes.get_yscale() == "log"
    tops = [b.get_y() + b.get_height() for b in axes.patches]
    assert tops == [1188, 5, 1]
    assert axes.get_ylim()[0] < 1
    assert [t.get_text() for t in axes.texts] == ["1188", "5", "1"]
    assert "0.084\u00a0%" in html  # 1 of 1194, in the table


def test_shares_of_few_cells_are_left_out_of_the_margins(charts: dict[str, Any]) -> None:
    data = comparison(**SMALL)
    data["routing"]["native"]["margins"] = {
        "edges": [0, 1e-6, 1e-5, 1e-4, 1e-3, None],
        "cells": [0, 1, 9, 10, 400, 0],
        "differing": [0, 1, 9, 3, 2, 0],
    }
    html = render_page(data)
    shares = [b.get_height() for b in charts["margins"].patches]
    assert [None if math.isnan(x) else x for x in shares] == [None, None, 30, 0.5]
    counts = [b.get_y() + b.get_height() for b in charts["margincells"].patches]
    assert counts == [1, 9, 10, 400, 1, 9, 3, 2]
    ticks = [t.get_text() for t in charts["margincells"].get_xticklabels()]
    assert ticks == ["1e-6", "1e-5", "1e-4", "1e-3"]
    assert "Left out: 2 margins of fewer than 10 cells." in html


def test_nothing_to_draw_is_no_chart(charts: dict[str, Any]) -> None:
    nothing = [Series("a", "native", [None, math.nan], [1, 2])]
    assert line_chart("a", nothing, x="x", y="y") is None
    assert line_chart("b", [Series("a", "native", [0, -1], [1, 2])], x="", y="", log="y") is None
    assert bar_chart("c", ["1", "2"], nothing, x="x", y="y") is None
    assert bar_chart("d", ["1"], [Series("", "native", [0])], x="", y="", counts=True)
    assert set(charts) == {"d"}


@pytest.mark.parametrize("top", [1.0, 1 / 3, 0.1118, 1 / 128, 0.0499, 3.5e-4])
def test_ticks_of_the_load_are_round(top: float) -> None:
    ticks = _ticks(top)
    step = ticks[1]
    assert ticks == pytest.approx([i * step for i in range(len(ticks))])
    assert f"{step:.0e}"[0] in "125"
    assert step == pytest.approx(float(f"{step:.0e}"))
    assert 3 <= len(ticks) <= 6
    assert top - step < ticks[-1] <= top
