"""Line and bar charts of the page: what is drawn, and axes on which it can be read."""

# ruff: noqa: RUF001 (dashes, minus and times signs are meant)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from r3.page.numbers import known
from r3.page.svg import VARIABLES, write_svg

_STYLES: dict[str, dict[str, Any]] = {
    "native": {"ls": "-", "marker": "o"},
    "replay": {"ls": "--", "marker": "s"},
    "ink": {"ls": ":", "marker": "D"},
    "extra": {"ls": "-.", "marker": "^"},
}
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SIZE = (4.9, 2.55)  # inches, without title and legend
LEGEND = 11 / 72  # inches that a legend takes
_LETTER = 0.088  # inches, as wide as letters of ticks are in most fonts
_LEAST_COUNT = 0.5  # where bars of counts begin on a logarithmic axis: 1 has to be seen


@dataclass(frozen=True)
class Series:
    """One line or one set of bars. color: native, replay, ink (the engine) or extra.

    alerts: x of points of a line to mark as alerts. dots: those to mark as the line's own.
    """

    label: str
    color: str
    y: Sequence[Any]
    x: Sequence[Any] = ()
    alerts: Sequence[float] = ()
    dots: Sequence[float] = ()


def line_chart(
    name: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    log: str = "",
    percent: str = "",
    lines: Sequence[tuple[float, str]] = (),
    markers: bool = False,
    integer_x: bool = False,
    size: tuple[float, float] = _SIZE,
) -> str | None:
    """SVG, or None where there is nothing to draw. log, percent: which of "xy" are log or shares.

    name: unique on the page, a prefix of ids. Values that are not known, and on a logarithmic axis
    those not above 0, leave gaps. lines: vertical ones at x, each with a word or none. Raises
    MissingDependencyError without matplotlib.
    """
    drawn = [(s, *_points(s, log, percent)) for s in series]
    drawn = [d for d in drawn if any(math.isfinite(v) for v in d[2])]
    if not drawn:
        return None
    words = 12 if any(word for _, word in lines) else 0  # points

    def paint(axes: Any) -> None:
        for one, xs, ys in drawn:
            _line(axes, one, xs, ys, markers)
        for letter, axis, values in (
            ("x", axes.xaxis, [u for _, xs, _ in drawn for u in xs] + [u for u, _ in lines]),
            ("y", axes.yaxis, [v for _, _, ys in drawn for v in ys]),
        ):
            if letter in log:
                _logarithmic(axes, letter, axis, [v for v in values if math.isfinite(v)])
        if "y" not in log:
            _from_zero(axes, [v for _, _, ys in drawn for v in ys])
        for at, word in lines:
            axes.axvline(at, color=VARIABLES["muted"], lw=0.8, ls=(0, (2, 2)), zorder=0)
            if word:
                axes.annotate(
                    word,
                    (at, 1.0),
                    xycoords=("data", "axes fraction"),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8.5,
                    color=VARIABLES["muted"],
                )
        _label(axes, x, log, percent, integer_x)
        _head(axes, y + (" (%)" if "y" in percent else ""), len(drawn), words)

    return write_svg(name, paint, size, _room(len(drawn), words))


def _line(axes: Any, one: Series, xs: list[float], ys: list[float], markers: bool) -> None:
    lonely = markers or sum(map(math.isfinite, ys)) < 3
    style, color = _STYLES[one.color], VARIABLES[one.color]
    axes.plot(
        xs,
        ys,
        label=_plain(one.label),
        color=color,
        ls=style["ls"],
        marker=style["marker"] if lonely else "",
        ms=3.5,
        lw=1.6,
    )
    for chosen, look in (
        (one.dots, {"marker": style["marker"], "ms": 5, "color": color}),
        (
            one.alerts,
            {"marker": "v", "ms": 6, "mfc": "none", "mew": 1.2, "color": VARIABLES["bad"]},
        ),
    ):
        at = set(chosen)
        points = [(u, v) for u, v in zip(xs, ys, strict=True) if u in at and math.isfinite(v)]
        if points:
            axes.plot([u for u, _ in points], [v for _, v in points], ls="", zorder=3, **look)


def bar_chart(
    name: str,
    categories: Sequence[str],
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    percent: str = "",
    counts: bool = False,
    size: tuple[float, float] = _SIZE,
) -> str | None:
    """Bars side by side, one group per category; see `line_chart`.

    counts: on a logarithmic axis on which 1 is seen, with the numbers where they fit.
    """
    drawn = [(s, _points(Series("", "", s.y, range(len(s.y))), "", percent)[1]) for s in series]
    drawn = [d for d in drawn if any(math.isfinite(v) for v in d[1])]
    if not drawn or not categories:
        return None
    slot = (size[0] - 0.74) / len(categories)  # inches

    def paint(axes: Any) -> None:
        width = 0.8 / len(drawn)
        top = max(v for _, ys in drawn for v in ys if math.isfinite(v))
        floor = _LEAST_COUNT if counts else 0.0
        for i, (one, ys) in enumerate(drawn):
            at = [k + (i - (len(drawn) - 1) / 2) * width for k in range(len(ys))]
            color = VARIABLES[one.color]
            hollow = one.color != "native" and len(drawn) > 1
            axes.bar(
                at,
                [v - floor if v > floor else math.nan for v in ys] if counts else ys,
                bottom=floor,
                width=width * 0.86,
                label=_plain(one.label),
                facecolor="none" if hollow else color,
                edgecolor=color,
                lw=1.1,
            )
            if counts and len(f"{top:.0f}") * _LETTER * 0.85 < slot * width:
                for u, v in zip(at, ys, strict=True):
                    if v > floor:
                        axes.annotate(
                            f"{v:.0f}",
                            (u, v),
                            xytext=(0, 2),
                            textcoords="offset points",
                            ha="center",
                            fontsize=8.5,
                        )
        if counts:
            axes.set_yscale("log")
            axes.set_ylim(floor, max(10.0, 3 * top))  # room for the numbers
        else:
            _from_zero(axes, [v for _, ys in drawn for v in ys])
        _label(axes, x, "y" if counts else "", percent, False)
        # as many as can be read
        every = math.ceil((max(map(len, categories)) + 1.5) * _LETTER / slot)
        every = max(every, math.ceil(len(categories) / 16))
        axes.set_xticks(range(0, len(categories), every), [_plain(c) for c in categories[::every]])
        axes.set_xlim(-0.6, len(categories) - 0.4)
        axes.grid(visible=False, axis="x")
        _head(axes, y + (" (%)" if "y" in percent else ""), len(drawn), 0)

    return write_svg(name, paint, size, _room(len(drawn), 0))


def _from_zero(axes: Any, values: list[float]) -> None:
    """Start the y axis at zero, a little below it so that a line of zeros can be seen."""
    finite = [v for v in values if math.isfinite(v)]
    if min(finite) >= 0:
        top = 1.06 * max(finite) or 1.0
        axes.set_ylim(-0.015 * top, top)


def _logarithmic(axes: Any, letter: str, axis: Any, values: list[float]) -> None:
    """A logarithmic axis with two ticks at least, also where values lie within one decade."""
    from matplotlib.ticker import LogLocator

    low, high = min(values), max(values)
    if high < 10 * low:
        low, high = _round(low * 0.999, math.floor), _round(high * 1.001, math.ceil)
    else:
        low, high = low / 1.3, min(high * 1.3, 1e300)
    (axes.set_xscale if letter == "x" else axes.set_yscale)("log")
    (axes.set_xlim if letter == "x" else axes.set_ylim)(low, high)
    near = high < 100 * low
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if near else (1,), numticks=7))


def _round(value: float, to: Any) -> float:
    """The next of 1, 2, 5 times a power of ten below (to: math.floor) or above (math.ceil)."""
    unit = 10.0 ** math.floor(math.log10(value))
    steps = [m * unit for m in (1, 2, 5, 10)]
    if to is math.floor:
        return max(s for s in steps if s <= value or s == unit)
    return min(s for s in steps if s >= value or s == 10 * unit)


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


def _label(axes: Any, x: str, log: str, percent: str, integer_x: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    axes.set_xlabel(x + (" (%)" if "x" in percent else ""))
    for letter, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if letter in log:
            axis.set_major_formatter(FuncFormatter(_power))
            axis.set_minor_formatter(NullFormatter())
        elif letter == "y" or not integer_x:
            axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}".replace("-", "−")))
    if integer_x and "x" not in log:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))


def _head(axes: Any, title: str, drawn: int, words: int) -> None:
    """From the plot upwards: words of lines, the legend, the title; nothing over the lines."""
    # the y axis's name, level: read without turning the head
    axes.set_title(_plain(title), loc="left", pad=_pad(drawn, words), fontsize=10)
    if drawn > 1:
        high = axes.get_position().height * axes.figure.get_figheight() * 72  # points
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1 + (words + 1) / high),
            ncols=drawn,
            borderaxespad=0,
            borderpad=0.1,
            columnspacing=1.4,
            fontsize=9,
        )


def _pad(drawn: int, words: int) -> int:
    return words + 6 + (round(72 * LEGEND) if drawn > 1 else 0)  # points


def _room(drawn: int, words: int) -> float:
    return (_pad(drawn, words) + 14) / 72  # inches


def _plain(text: str) -> str:
    """Text that matplotlib's font can set: names of metrics and slices come from the document."""
    return "".join(c if c.isprintable() and ord(c) < 0x3000 else "?" for c in text[:60])


def _power(value: float, _: Any) -> str:
    """0.02 / 1 / 500 / 10⁻⁵ / 2·10⁻⁵"""
    if value <= 0:
        return ""
    exponent = math.floor(math.log10(value) + 1e-9)
    if -2 <= exponent <= 3:
        return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
    times = round(value / 10.0**exponent)
    return ("" if times == 1 else f"{times}·") + "10" + str(exponent).translate(_SUPERSCRIPT)
