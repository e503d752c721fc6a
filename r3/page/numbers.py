"""How the page writes numbers: few digits, thousands apart, a dash for what is not known."""

# ruff: noqa: RUF001, RUF002 (dashes, minus and times signs are meant)

from __future__ import annotations

import math
from typing import Any

NOTHING = "–"
_MINUS = "−"


def known(value: Any) -> float | None:
    """`value` as a finite float, or None: null, not a number, NaN and infinity are not known."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def number(value: Any) -> str:
    """4,096 / 0.0449 / 2.90 / 8.4e-05 / –"""
    x = known(value)
    if x is None:
        return NOTHING
    size = abs(x)
    if isinstance(value, int) or x in (0, 1):
        text = f"{size:,.0f}"
    elif size >= 1e9 or size < 1e-3:
        text = f"{size:.1e}"
    elif size >= 100:
        text = f"{size:,.0f}"
    else:
        text = f"{size:#.3g}".removesuffix(".")
    return (_MINUS if x < 0 else "") + text


def tiny(value: Any) -> str:
    """What spans orders of magnitude, a divergence or the share of a tail: 1.5e-03 / 0.214"""
    x = known(value)
    return f"{x:.1e}".replace("-", _MINUS, x < 0) if x and abs(x) < 0.1 else number(value)


def share(value: Any) -> str:
    """A share in percent: 3.78 % / 12.3 % / 0.0025 % / –"""
    x = known(value)
    if x is None:
        return NOTHING
    percent = abs(100 * x)
    if percent == 0:
        text = "0"
    elif percent >= 1000:
        text = f"{percent:,.0f}"
    elif percent >= 10:
        text = "100" if percent == 100 else f"{percent:.1f}"
    elif percent >= 0.1:
        text = f"{percent:.2f}"
    elif percent >= 1e-3:
        text = f"{percent:.{1 - math.floor(math.log10(percent))}f}"
    else:
        text = f"{percent:.1e}"
    return (_MINUS if x < 0 else "") + text + "\u00a0%"


def signed(value: Any) -> str:
    """A log-ratio, always with its sign: +0.412 / −1.30"""
    x = known(value)
    return NOTHING if x is None else ("+" if x > 0 else "") + number(float(x))


def change(before: Any, after: Any) -> str:
    """From `before` to `after` in percent of `before`; empty where that says nothing."""
    x, y = known(before), known(after)
    if x is None or y is None or x == 0:
        return NOTHING
    ratio = y / x - 1
    if not math.isfinite(ratio):
        return NOTHING
    if abs(ratio) < 5e-4:
        return "±0\u00a0%"
    sign = "+" if ratio > 0 else _MINUS
    return f"{sign}{100 * abs(ratio):,.{0 if abs(ratio) >= 0.1 else 1}f}\u00a0%"


def word(value: Any) -> str:
    """A name, a layer, a setting: as it is"""
    return NOTHING if value is None else str(value)


def edge(value: Any) -> str:
    """The bound of a range, short: 0 / 1e-4 / 0.25"""
    x = known(value)
    if x is None:
        return "?"
    if x == 0 or abs(x) >= 0.01:
        return f"{x:.3g}"
    mantissa, exponent = f"{x:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def visible(text: Any) -> str:
    """Token text with what cannot be seen made visible: line ends, tabs, control characters."""
    marks = {"\n": "⏎", "\r": "␍", "\t": "⇥"}
    return "".join(
        marks.get(c) or (chr(0x2400 + ord(c)) if ord(c) < 32 else "\ufffd" if c == "\x7f" else c)
        for c in str(text)
    )
