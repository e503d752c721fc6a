"""Slices: what an average hides, by length, turn, segment, weight lag or tag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from r3.page.numbers import number, share, tiny
from r3.page.reach import mapping, records
from r3.page.tables import Column, Format, Table, table

_SIDES = ("native", "replay")
_LOGPROBS: tuple[tuple[str, str, Format], ...] = (
    ("KL k3", "kl_k3", tiny),
    ("|lr| p99", "abs_logratio_p99", number),
    ("F(2)", "extreme_2", tiny),
    ("ESS", "ess", number),
)
_NOTES = {
    "segment": "A log-probability counts with the pass that produced it, so the first token of an "
    "answer counts under prompt: its pass fed the last token of the prompt.",
}


@dataclass(frozen=True)
class Slice:
    """The table of one dimension, and a sentence to read below it."""

    table: Table
    note: str | None


def slices(data: Mapping[str, Any]) -> list[Slice]:
    """One table for each dimension: of the comparison, else of the last recorded step."""
    made = []
    compared = mapping(data, "slices")
    found = compared or _last_step(data)
    ends, sides = ("", "_free")[not compared], _SIDES if compared else ()
    for dimension in found:
        name = str(dimension).replace("_", " ")
        columns = [
            Column(name, "label"),
            Column("rows", "rows", number),
            Column("cells differ", f"cell_disagreement{ends}", share),
            Column("tokens differ", f"token_disagreement{ends}", share),
            Column("sampled tokens", "tokens", number),
        ]
        for word, key, form in _LOGPROBS:
            columns += [Column(f"{word}, {s}", f"{key}_{s}", form) for s in sides]
            columns += [] if sides else [Column(word, key, form)]
        one = table(f"By {name}", columns, records(found, dimension), sortable=True)
        made += [Slice(one, _NOTES.get(str(dimension)))] if one else []
    return made


def _last_step(data: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The slices of the last record, as a comparison writes them: a list of labelled figures."""
    found = mapping((records(data, "steps") or [{}])[-1], "slices")
    return {
        str(dimension): [
            {"label": label, **figures}
            for label, figures in mapping(found, dimension).items()
            if isinstance(figures, dict)
        ]
        for dimension in found
    }
