"""A table as the page shows it: cells with a text for the eye and a number to sort by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r3.page.numbers import NOTHING, known

Format = Callable[[Any], str]


@dataclass(frozen=True)
class Column:
    """A column of records: what it is called, its key, and how its values are written.

    format None: text as it is. always: keep it even where no record has a value.
    """

    label: str
    key: str
    format: Format | None = None
    hint: str = ""
    always: bool = False


@dataclass(frozen=True)
class Cell:
    text: str
    sort: float | str | None = None  # None sorts last
    css: str = ""


@dataclass(frozen=True)
class Table:
    """caption, columns and rows; the first cell of a row is its header."""

    caption: str
    columns: list[Column]
    rows: list[list[Cell]]
    sortable: bool = False


def table(
    caption: str,
    columns: Sequence[Column],
    records: Sequence[Mapping[str, Any]],
    *,
    sortable: bool = False,
) -> Table | None:
    """Records as rows. Columns without any value are left out; no rows or no values is None."""
    kept = [
        c
        for i, c in enumerate(columns)
        if i == 0 or c.always or any(r.get(c.key) is not None for r in records)
    ]
    if not records or len(kept) < 2:
        return None
    return Table(caption, kept, [[_cell(r.get(c.key), c) for c in kept] for r in records], sortable)


def _cell(value: Any, column: Column) -> Cell:
    if column.format is not None:
        return Cell(column.format(value), known(value), "n")
    if value is None:
        return Cell(NOTHING)
    if known(value) is not None:  # a number without a format is a name: a layer, a position
        return Cell(str(value), known(value))
    return Cell(str(value), str(value))


@dataclass(frozen=True)
class Figure:
    """A chart with what it says in words (label), a caption, and its numbers as a table."""

    svg: str
    label: str
    caption: str
    numbers: Table | None = None


def figure(svg: str | None, label: str, caption: str, numbers: Table | None) -> Figure | None:
    """None where there was nothing to draw."""
    return None if svg is None else Figure(svg, label, caption, numbers)
