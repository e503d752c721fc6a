"""Reading a document in which anything may be null or missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def at(data: Any, *path: str | int) -> Any:
    """What lies at `path`, or None where a step is missing, null or of another kind."""
    for step in path:
        if isinstance(data, Mapping):
            data = data.get(str(step))
        elif isinstance(data, list) and isinstance(step, int) and -len(data) <= step < len(data):
            data = data[step]
        else:
            return None
    return data


def items(data: Any, *path: str | int) -> list[Any]:
    """The list at `path`, or an empty one."""
    found = at(data, *path)
    return found if isinstance(found, list) else []


def records(data: Any, *path: str | int) -> list[dict[str, Any]]:
    """The objects in the list at `path`."""
    return [x for x in items(data, *path) if isinstance(x, dict)]


def aligned(data: Any, *path: str | int) -> list[dict[str, Any]]:
    """As `records`, with an empty object for what is none: entry k stays entry k."""
    return [x if isinstance(x, dict) else {} for x in items(data, *path)]


def mapping(data: Any, *path: str | int) -> dict[str, Any]:
    """The object at `path`, or an empty one."""
    found = at(data, *path)
    return found if isinstance(found, dict) else {}
