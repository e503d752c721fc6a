"""Text as terminals and files take it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from rich.markup import escape

from r3.errors import R3Error


def printable(value: str) -> str:
    """Text from a file for rich: neither markup nor control codes."""
    return escape("".join(c if c.isprintable() else "\ufffd" for c in value))


def write_text(path: Path, text: str) -> None:
    """Write the whole file or none of it; R3Error if it cannot be written.

    A link stays one. What is no regular file, such as /dev/stdout, is written to as it is.
    """
    try:
        place = path.resolve()
        if place.exists() and not place.is_file():
            with place.open("w", encoding="utf-8") as stream:
                stream.write(text)
            return
        if not path.name:
            raise R3Error(f"cannot write {str(path)!r}: expected the name of a file")
        part = place.with_name(f".{uuid.uuid4().hex}.part")
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, place)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, RuntimeError, ValueError) as e:  # also a loop of links, or a NUL in the name
        reason = e.strerror if isinstance(e, OSError) else e
        raise R3Error(f"cannot write {path}: {reason}") from None


def is_one_of(path: Path, others: Iterable[Path | None]) -> bool:
    """Whether writing to `path` would write to one of the others."""
    return any(o is not None and path.exists() and o.exists() and path.samefile(o) for o in others)
