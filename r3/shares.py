"""A part of a whole, where the whole may be nothing."""

from __future__ import annotations

import math


def share(part: float, whole: float) -> float:
    """part / whole; NaN for a share of nothing."""
    return float(part) / float(whole) if whole else math.nan
