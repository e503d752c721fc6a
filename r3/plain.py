"""Values as strict JSON has them, which knows neither NaN nor infinity nor numpy's numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """`value`, its mappings and sequences with None for NaN and infinity, Python's numbers for
    numpy's, and text for keys."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
