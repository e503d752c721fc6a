"""First things on the page, the verdict and the headline figures, and the last: the sources."""

# ruff: noqa: RUF001, RUF002 (dashes, minus and times signs are meant)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.page.numbers import NOTHING, change, known, number, share, tiny, word
from r3.page.reach import at, items, mapping, records
from r3.page.tables import Column, Table, table
from r3.page.words import METRICS, SECTIONS, TERMS

SIDES = ("native", "replay")
_LEVELS = {"good": ("✓", "Good"), "notice": ("!", "Take notice"), "bad": ("✕", "Bad")}
_FIGURES = [  # headline: key of TERMS, where it is, how it is written
    ("cell_disagreement", "routing", share),
    ("expert_disagreement", "routing", share),
    ("token_disagreement", "routing", share),
    ("layers_per_token_mean", "routing", number),
    ("kl_k3", "mismatch", tiny),
    ("abs_logratio_p99", "mismatch", number),
    ("abs_logratio_max", "mismatch", number),
    ("extreme_2", "mismatch", tiny),
    ("ess", "mismatch", number),
]
_SIDE_NAMES = {
    "a": "a: engine",
    "b": "b: trainer, own routing (native)",
    "c": "c: trainer under replay",
}


def verdict(data: Mapping[str, Any]) -> dict[str, Any]:
    """level, its sign and word, and findings, each with a link to the section it points at."""
    level = at(data, "verdict", "level")
    sign, word = _LEVELS.get(str(level), (NOTHING, "No verdict"))
    findings = [
        {
            "level": str(f.get("level")) if f.get("level") in _LEVELS else "none",
            "word": _LEVELS.get(str(f.get("level")), ("", ""))[1],
            "title": f.get("title") or "",
            "text": f.get("text") or "",
            **look_at(f.get("look_at")),
        }
        for f in records(data, "verdict", "findings")
    ]
    return {"level": level if level in _LEVELS else "none", "sign": sign, "word": word} | {
        "findings": findings
    }


def look_at(target: Any) -> dict[str, Any]:
    """anchor and text of a link if `target` is a section's id, text alone otherwise."""
    if not target:
        return {"anchor": None, "look_at": None}
    name = str(target).removeprefix("#")
    return {"anchor": name if name in SECTIONS else None, "look_at": target}


def figures(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the headline table: those with a number on at least one side."""
    rows: list[dict[str, Any]] = []
    for key, block, form in _FIGURES:
        native, replay = (_figure(data, block, side, key) for side in SIDES)
        if native is None and replay is None:
            continue
        rows.append(
            {
                "key": key,
                "name": TERMS[key][0],
                "definition": TERMS[key][1],
                "native": form(native),
                "replay": form(replay),
                "change": change(native, replay),
                "first_of_block": block == "mismatch" and bool(rows) and rows[-1]["block"] != block,
                "block": block,
            }
        )
    return rows


def _figure(data: Mapping[str, Any], block: str, side: str, key: str) -> float | None:
    path = (block, side, key) if block == "routing" else (block, side, "metrics", key)
    return known(at(data, *path))


def all_metrics(data: Mapping[str, Any]) -> Table | None:
    """Every figure of both log-prob comparisons."""
    both = {side: mapping(data, "mismatch", side, "metrics") for side in SIDES}
    keys = list(dict.fromkeys([*both["native"], *both["replay"]]))
    return table(
        "All figures of the log-probabilities",
        [
            Column("figure", "key"),
            Column("native", "native", number, always=True),
            Column("replay", "replay", number),
            Column("what it is", "what"),
        ],
        [
            {
                "key": key,
                "native": both["native"].get(key),
                "replay": both["replay"].get(key),
                "what": METRICS.get(key) or TERMS.get(key, ("", ""))[0],
            }
            for key in keys
        ],
    )


def sources(data: Mapping[str, Any]) -> dict[str, Any]:
    """The files, what is known of how each was made, what was left out."""
    files = {k: mapping(data, "files", k) for k in ("a", "b", "c")}
    files = {k: f for k, f in files.items() if f}
    values = {k: mapping(f, "provenance") for k, f in files.items()}
    keys = list(dict.fromkeys(key for v in values.values() for key in v))
    provenance = []
    for key in keys:
        cells = {k: _values(v.get(key)) for k, v in values.items()}
        there = {frozenset(c) for c in cells.values() if c}
        provenance.append(
            {
                "key": key,
                "cells": [", ".join(_with_count(c)) or NOTHING for c in cells.values()],
                "differs": len(there) > 1,
            }
        )
    return {
        "files": [
            {
                "side": _SIDE_NAMES[k],
                "name": f.get("name") or NOTHING,
                "label": f.get("label") or NOTHING,
                "rollouts": number(f.get("rollouts")),
                "tokens": number(f.get("tokens")),
            }
            for k, f in files.items()
        ],
        "sides": list(files),
        "provenance": provenance,
        "differences": sum(p["differs"] for p in provenance),
        "environment": [(k, word(v)) for k, v in _flat(data, "environment")],
        "spec": [(k, word(v)) for k, v in _flat(data, "spec")],
        "left_out": _left_out(data),
        "alignment": at(data, "alignment", "text") or _sentence(at(data, "alignment")),
        "only": [
            (f"only in {k}", _count(at(data, "pairs", f"only_{k}")))
            for k in ("a", "b")
            if _count(at(data, "pairs", f"only_{k}")) != "0"
        ],
    }


def _sentence(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _flat(data: Mapping[str, Any], block: str) -> list[tuple[str, Any]]:
    return [(k, _ranges(v) if isinstance(v, list) else v) for k, v in mapping(data, block).items()]


def _ranges(values: list[Any]) -> str:
    """0–2, 5 of [0, 1, 2, 5]; other lists as they are"""
    runs: list[list[Any]] = []
    for v in values:
        if runs and isinstance(v, int) and isinstance(runs[-1][1], int) and v == runs[-1][1] + 1:
            runs[-1][1] = v
        else:
            runs.append([v, v])
    return ", ".join(word(a) if a == b else f"{a}–{b}" for a, b in runs)


def _values(pairs: Any) -> dict[str, int | None]:
    """{"bfloat16": 32} of [["bfloat16", 32]]; a bare value counts as one."""
    found: dict[str, int | None] = {}
    for pair in pairs if isinstance(pairs, list) else [] if pairs is None else [pairs]:
        if isinstance(pair, list) and len(pair) == 2:
            found[word(pair[0])] = pair[1] if isinstance(pair[1], int) else None
        else:
            found[word(pair)] = None
    return found


def _with_count(values: dict[str, int | None]) -> list[str]:
    if len(values) < 2:
        return list(values)
    return [f"{v} ({number(n)})" for v, n in values.items()]


def _count(found: Any) -> str:
    """Rollouts on one side only: a number of them, or their names."""
    if isinstance(found, list):
        names = ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")
        return f"{len(found):,}: {names}" if found else "0"
    return number(found) if known(found) is not None else "0"


def _left_out(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    out = []
    for side in SIDES:
        kinds = {
            kind.replace("_", ", "): n
            for kind, n in mapping(data, "mismatch", side, "left_out").items()
            if known(n)
        }
        if kinds:
            text = ", ".join(f"{number(n)} × {kind}" for kind, n in kinds.items())
            examples = [str(e) for e in items(data, "mismatch", side, "examples") if e]
            out.append({"side": side, "text": text, "examples": examples})
    return out
