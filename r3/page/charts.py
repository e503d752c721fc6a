"""Line and bar charts as SVG that takes its colours and its font from the page.

Matplotlib draws with stand-in colours, which are then replaced by CSS variables: one picture fits
the light and the dark theme. Ids are made unique over the page; nothing refers outside it.
"""

# ruff: noqa: RUF001 (dashes, minus and times signs are meant)

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from r3.errors import MissingDependencyError
from r3.page.numbers import known

# stand-ins: colours that nothing else is drawn in
_VARIABLES = {
    name: f"#0102{i:02x}"
    for i, name in enumerate(("ink", "muted", "line", "native", "replay", "bad", "extra"))
}
_STYLES: dict[str, dict[str, Any]] = {
    "native": {"ls": "-", "marker": "o"},
    "replay": {"ls": "--", "marker": "s"},
    "ink": {"ls": ":", "marker": "D"},
    "extra": {"ls": "-.", "marker": "^"},
}
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SIZE = (4.9, 3.0)  # inches


@dataclass(frozen=True)
class Series:
    """One line or one set of bars. color: native, replay, ink (the engine) or extra."""

    label: str
    color: str
    y: Sequence[Any]
    x: Sequence[Any] = ()


@dataclass(frozen=True)
class Marks:
    """Vertical lines at x, each with a word (or none), and points to mark as alerts."""

    lines: Sequence[tuple[float, str]] = ()
    alerts: Sequence[float] = field(default=())


def line_chart(
    name: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    log: str = "",
    percent: str = "",
    marks: Marks | None = None,
    markers: bool = False,
    integer_x: bool = False,
    size: tuple[float, float] = _SIZE,
) -> str | None:
    """SVG, or None where there is nothing to draw. log, percent: which of "xy" are log or shares.

    name: unique on the page, a prefix of ids. Values that are not known, and on a logarithmic axis
    those not above 0, leave gaps. Raises MissingDependencyError without matplotlib.
    """
    drawn = [(s, *_points(s, log, percent)) for s in series]
    drawn = [d for d in drawn if any(math.isfinite(v) for v in d[2])]
    if not drawn:
        return None

    def paint(axes: Any) -> None:
        for one, xs, ys in drawn:
            lonely = markers or sum(map(math.isfinite, ys)) < 3
            style = _STYLES[one.color]
            axes.plot(
                xs,
                ys,
                label=_plain(one.label),
                color=_VARIABLES[one.color],
                ls=style["ls"],
                marker=style["marker"] if lonely else "",
                ms=3.5,
                lw=1.6,
            )
        if "x" in log:
            axes.set_xscale("log")
        if "y" in log:
            axes.set_yscale("log")
        _from_zero(axes, [v for _, _, ys in drawn for v in ys], log)
        for at, word in marks.lines if marks else ():
            axes.axvline(at, color=_VARIABLES["muted"], lw=0.8, ls=(0, (2, 2)), zorder=0)
            if word:
                axes.annotate(
                    word,
                    (at, 1.0),
                    xycoords=("data", "axes fraction"),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8.5,
                    color=_VARIABLES["muted"],
                )
        _mark_alerts(axes, drawn[0][1], drawn[0][2], marks)
        _label(axes, x, y, log, percent, integer_x)
        if len(drawn) > 1:
            axes.legend()

    return _svg(name, paint, size)


def bar_chart(
    name: str,
    categories: Sequence[str],
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    percent: str = "",
    size: tuple[float, float] = _SIZE,
) -> str | None:
    """Bars side by side, one group per category; see `line_chart`."""
    drawn = [(s, _points(Series("", "", s.y, range(len(s.y))), "", percent)[1]) for s in series]
    drawn = [d for d in drawn if any(math.isfinite(v) for v in d[1])]
    if not drawn or not categories:
        return None

    def paint(axes: Any) -> None:
        width = 0.8 / len(drawn)
        for i, (one, ys) in enumerate(drawn):
            left = [k + (i - (len(drawn) - 1) / 2) * width for k in range(len(ys))]
            color = _VARIABLES[one.color]
            hollow = one.color != "native" and len(drawn) > 1
            axes.bar(
                left,
                ys,
                width=width * 0.86,
                label=_plain(one.label),
                facecolor="none" if hollow else color,
                edgecolor=color,
                lw=1.1,
            )
        _from_zero(axes, [v for _, ys in drawn for v in ys], "")
        _label(axes, x, y, "", percent, False)
        every = max(1, math.ceil(len(categories) / 12))
        axes.set_xticks(range(0, len(categories), every), [_plain(c) for c in categories[::every]])
        axes.grid(visible=False, axis="x")
        if len(drawn) > 1:  # beside the title: bars leave no room of their own
            axes.legend(
                loc="lower right", bbox_to_anchor=(1.01, 1), ncols=2, borderaxespad=0, fontsize=9
            )

    return _svg(name, paint, size)


def _from_zero(axes: Any, values: list[float], log: str) -> None:
    """Start the y axis at zero, a little below it so that a line of zeros can be seen."""
    finite = [v for v in values if math.isfinite(v)]
    if "y" not in log and min(finite) >= 0:
        top = 1.06 * max(finite) or 1.0
        axes.set_ylim(-0.015 * top, top)


def _points(one: Series, log: str, percent: str) -> tuple[list[float], list[float]]:
    xs, ys = [], []
    for a, b in zip(one.x, one.y, strict=False):
        u, v = known(a), known(b)
        if u is None or ("x" in log and u <= 0):
            continue
        if v is None or ("y" in log and v <= 0):
            v = math.nan
        xs.append(100 * u if "x" in percent else u)
        ys.append(100 * v if "y" in percent else v)
    return xs, ys


def _mark_alerts(axes: Any, xs: list[float], ys: list[float], marks: Marks | None) -> None:
    at = set(marks.alerts) if marks else set()
    points = [(u, v) for u, v in zip(xs, ys, strict=True) if u in at and math.isfinite(v)]
    if points:
        axes.plot(
            [u for u, _ in points],
            [v for _, v in points],
            ls="",
            marker="v",
            ms=7,
            mfc="none",
            mew=1.4,
            color=_VARIABLES["bad"],
            label="alert",
        )


def _label(axes: Any, x: str, y: str, log: str, percent: str, integer_x: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xlabel(x + (" (%)" if "x" in percent else ""))
    # over the axis, level: read without turning the head
    axes.set_title(_plain(y) + (" (%)" if "y" in percent else ""), loc="left", pad=14, fontsize=10)
    for letter, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if letter in log:
            axis.set_major_locator(LogLocator(base=10, numticks=7))
            axis.set_major_formatter(FuncFormatter(_power))
            axis.set_minor_formatter(NullFormatter())
        elif letter == "y" or not integer_x:
            axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}".replace("-", "−")))
    if integer_x and "x" not in log:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))


def _plain(text: str) -> str:
    """Text that matplotlib's font can set: names of metrics and slices come from the document."""
    return "".join(c if c.isprintable() and ord(c) < 0x3000 else "?" for c in text[:60])


def _power(value: float, _: Any) -> str:
    exponent = round(math.log10(value)) if value > 0 else 0
    if -2 <= exponent <= 3:
        return f"{10.0**exponent:,g}"
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def _svg(name: str, paint: Callable[[Any], None], size: tuple[float, float]) -> str:
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "the page needs matplotlib: pip install 'rollout-routing-replay[report]'"
        ) from None
    colors = _VARIABLES
    style: dict[str, Any] = {
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
        "axes.linewidth": 0.8,
        "legend.frameon": False,
        "legend.labelcolor": colors["ink"],
        "legend.handlelength": 2.4,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "text.color": colors["ink"],
        "axes.titlecolor": colors["ink"],
        "axes.labelcolor": colors["ink"],
        "xtick.color": colors["muted"],
        "ytick.color": colors["muted"],
        "axes.edgecolor": colors["muted"],
        "grid.color": colors["line"],
    }
    text = io.StringIO()
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size)
        paint(figure.subplots())
        # fixed, as the fonts of the reader are not known here; and three times as fast as a layout
        wide, high = size
        figure.subplots_adjust(0.62 / wide, 0.5 / high, 1 - 0.12 / wide, 1 - 0.42 / high)
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
    return _for_page(text.getvalue(), name)


def _for_page(svg: str, name: str) -> str:
    """Inline SVG: no XML head, no metadata, own ids, the page's colours, size and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.S)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href").replace(' type="text/css"', "")
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.S)  # only line joins, set in page.css
    svg = re.sub(r"<defs>\s*</defs>\s*", "", svg)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))

    def own(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in used else ""

    svg = re.sub(r' id="([^"]*)"', own, svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{name}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]+; ", "", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)
    for variable, color in _VARIABLES.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg
