"""Values as JSON, terminals and files take them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from rich.markup import escape

from r3.errors import R3Error


def plain(value: Any) -> Any:
    """`value` as strict JSON has it: numpy numbers as Python's, NaN and infinity as None."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(value: str) -> str:
    """Text from a file for rich: neither markup nor control codes."""
    return escape("".join(c if c.isprintable() else "\ufffd" for c in value))


def write_text(path: Path, text: str) -> None:
    """Write the whole file or none of it; R3Error if it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as e:
        raise R3Error(f"cannot write {path}: {e.strerror}") from None
