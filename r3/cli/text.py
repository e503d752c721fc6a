"""Text as terminals and files take it."""

from __future__ import annotations

import os
from pathlib import Path

from rich.markup import escape

from r3.errors import R3Error


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
