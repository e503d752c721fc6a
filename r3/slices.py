"""Counts by what may explain a mismatch: length, weight lag, turn, segment, tag, whatever is asked.

Means hide where a mismatch sits: long rollouts, later turns, the first token behind a tool's reply,
stale weights, one environment. Each dimension gives a label to every row of routing and to every
log-probability; the two differ where the label is of the pass, since row t produces token t + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from r3.mismatch import LogprobMismatch

SEGMENTS = ("prompt", "answer", "reply")
OTHER = "other"  # label of what has too many labels
_EXACT = 8  # numbers below it are labels of their own, those above share one with their octave
_DIGITS = 18  # at most, of a label that is sorted as a number
UNKNOWN = -2  # a number that has no label


@dataclass(frozen=True, eq=False)
class Labels:
    """One dimension: of T packed tokens, rows and tokens are int64 [T], the label of each row of
    routing and of each log-probability, as an index into `texts`; -1 for none."""

    dimension: str
    rows: np.ndarray
    tokens: np.ndarray
    texts: list[str]


@dataclass(frozen=True, eq=False)
class Sides:
    """What is cut: T packed tokens in sequences that begin at cu_seqlens int64 [B + 1].

    sampler: float [T]; trainer: float [T] or None; counted: bool [T], log-probabilities that count.
    compared: bool [T], rows compared; layers_per_row: int64 [T], how many of `layers` layers differ
    in a row. clip: as of LogprobMismatch.
    """

    cu_seqlens: np.ndarray
    sampler: np.ndarray
    trainer: np.ndarray | None
    counted: np.ndarray
    compared: np.ndarray
    layers_per_row: np.ndarray
    layers: int
    clip: tuple[float, float]


@dataclass(frozen=True, eq=False)
class SliceCounts:
    """Sums of one slice. mismatch: its sampled tokens. rows: those compared; differing: of these,
    with a differing layer; cells, differing_cells: in all layers."""

    mismatch: LogprobMismatch
    rows: int = 0
    differing: int = 0
    cells: int = 0
    differing_cells: int = 0

    def __add__(self, other: SliceCounts) -> SliceCounts:
        return SliceCounts(
            self.mismatch + other.mismatch,
            self.rows + other.rows,
            self.differing + other.differing,
            self.cells + other.cells,
            self.differing_cells + other.differing_cells,
        )


Slices = Mapping[str, Mapping[str, SliceCounts]]


def cut(sides: Sides, dimensions: Iterable[Labels]) -> dict[str, dict[str, SliceCounts]]:
    """Counts by dimension and label; those of neither a token nor a row are left out."""
    owner = np.repeat(np.arange(len(sides.cu_seqlens) - 1), np.diff(sides.cu_seqlens))
    found: dict[str, dict[str, SliceCounts]] = {}
    for given in dimensions:
        count = len(given.texts)
        at = sides.compared & (given.rows >= 0)
        per_row = sides.layers_per_row[at]
        rows, differing, cells = (
            np.bincount(given.rows[at], weights=weights, minlength=count).astype(int).tolist()
            for weights in (None, per_row > 0, per_row)
        )
        parts = _mismatches(sides, given.tokens, count, owner)
        found.setdefault(given.dimension, {}).update(
            {
                text: SliceCounts(
                    parts.get(i, LogprobMismatch.zero(clip=sides.clip)),
                    *(rows[i], differing[i], rows[i] * sides.layers, cells[i]),
                )
                for i, text in enumerate(given.texts)
                if i in parts or rows[i]
            }
        )
    return found


def _mismatches(
    sides: Sides, codes: np.ndarray, labels: int, owner: np.ndarray
) -> dict[int, LogprobMismatch]:
    """By code, of the counted tokens; each token is looked at once."""
    if sides.trainer is None:
        return {}
    tokens = np.flatnonzero(sides.counted & (codes >= 0))
    tokens = tokens[np.argsort(codes[tokens], kind="stable")]
    ends = np.cumsum(np.bincount(codes[tokens], minlength=labels))
    found = {}
    for i, part in enumerate(np.split(tokens, ends[:-1])):
        if len(part):
            lengths = np.unique(owner[part], return_counts=True)[1]
            found[i] = LogprobMismatch.of(
                sides.trainer[part],
                sides.sampler[part],
                cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
                clip=sides.clip,
            )
    return found


def merge_slices(a: Slices, b: Slices) -> dict[str, dict[str, SliceCounts]]:
    """The sums of both."""
    found = {dimension: dict(parts) for dimension, parts in a.items()}
    for dimension, parts in b.items():
        mine = found.setdefault(dimension, {})
        for label, counts in parts.items():
            mine[label] = mine[label] + counts if label in mine else counts
    return found


def length_labels(cu_seqlens: np.ndarray) -> Labels:
    """By the tokens of the rollout."""
    lengths = np.diff(cu_seqlens)
    codes, texts = octaves(np.repeat(lengths, lengths))
    return Labels("length", codes, codes, texts)


def lag_labels(lag: np.ndarray, known: np.ndarray, cu_seqlens: np.ndarray) -> Labels:
    """By int64 [T] `lag`, the trainer's weight version minus that of the row, where bool [T]
    `known`; "newer" where the row's is above."""
    codes, texts = octaves(np.where(known, np.maximum(lag, -1), UNKNOWN))
    return Labels("weight_lag", codes, of_pass(codes, cu_seqlens), texts)


def of_pass(rows: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """int64 [T]: what `rows` [T] says of the pass that produced each token; -1 for the first of a
    sequence, which none did."""
    tokens = np.concatenate([[-1], rows[:-1]])
    tokens[cu_seqlens[:-1]] = -1
    return tokens


def octaves(numbers: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Codes [T] and their texts for int64 numbers [T] from -2: 0 to 7 have a label each, from 8 on
    powers of two share one; -1 is "newer", and UNKNOWN has the code -1."""
    octave = np.frexp(np.maximum(numbers, 1).astype(float))[1] - 1
    values, codes = np.unique(
        np.where(numbers < _EXACT, numbers, _EXACT + octave), return_inverse=True
    )
    texts = []
    for value in values[values != UNKNOWN].tolist():
        low = 1 << max(value - _EXACT, 0)
        exact = "newer" if value < 0 else str(value)
        texts.append(exact if value < _EXACT else f"{low:,}-{2 * low - 1:,}")
    return codes.astype(np.int64) - int((values == UNKNOWN).any()), texts


def label_order(label: str) -> tuple[int, int, str]:
    """Sorts labels as a reader expects them: segments, numbers and ranges by where they begin,
    text, and what is left."""
    if label in SEGMENTS:
        return 0, SEGMENTS.index(label), label
    number = label.split("-")[0].replace(",", "")
    # longer ones are names, and int() takes no text of any length
    is_number = number.isascii() and number.isdigit() and len(number) <= _DIGITS
    if label == "newer" or is_number:
        return 1, -1 if label == "newer" else int(number), label
    return (3 if label == OTHER else 2), 0, label
