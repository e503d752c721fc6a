"""In which cells two routings of the same tokens differ: the sparse core of every comparison.

Engine and trainer agree in most cells, so these are found by comparing whole expert sets, as
words of memory, and only the few that differ are looked into.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r3.checks import sort_rows
from r3.spec import RouterSpec

# Bytes of differing cells looked into at a time: [cells, top_k, top_k] comparisons of a byte.
_AT_A_TIME = 1 << 22


@dataclass(frozen=True, eq=False)
class Differences:
    """The n cells of `rows` rows whose expert sets differ, by row, then layer.

    valid: bool [rows], rows that were compared. row, layer: int64 [n], layer among the MoE layers.
    missing: int64 [n], experts of the first side that the second lacks, 1..top_k.
    lost_cell, lost: int64 [m], these experts, and which of the n cells each is in; gained: int64
    [m], what the second has in their place. Where `missing` is 1 the pair is a swap; where it is
    more, lost and gained are both ascending, and which came for which is not known.
    """

    spec: RouterSpec
    valid: np.ndarray
    row: np.ndarray
    layer: np.ndarray
    missing: np.ndarray
    lost_cell: np.ndarray
    lost: np.ndarray
    gained: np.ndarray

    @classmethod
    def between(
        cls, a: np.ndarray, b: np.ndarray, valid: np.ndarray, spec: RouterSpec
    ) -> Differences:
        """a, b: ids [rows, MoE layers, top_k] of `spec.dtype`, checked by the caller; valid: bool
        [rows], rows that both sides have."""
        a, b = sort_rows(a, valid), sort_rows(b, valid)
        differs = _words_differ(a, b)
        if not valid.all():
            differs[~valid] = False
        row, layer = np.divmod(np.flatnonzero(differs), len(spec.moe_layers))
        parts = []
        step = max(1, _AT_A_TIME // spec.top_k**2)
        for start in range(0, len(row), step):
            cells = slice(start, start + step)
            parts.append(_look_into(a[row[cells], layer[cells]], b[row[cells], layer[cells]]))
        missing, lost, gained = (
            np.concatenate([p[i] for p in parts]) if parts else np.zeros(0, np.int64)
            for i in range(3)
        )
        cell = np.repeat(np.arange(len(row)), missing)
        return cls(spec, valid, row, layer, missing, cell, lost, gained)

    @property
    def layers_per_row(self) -> np.ndarray:
        """int64 [rows]: in how many layers each row differs; 0 for rows that were not compared."""
        return np.bincount(self.row, minlength=len(self.valid))


def _words_differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool [rows, layers]: whether sets [rows, layers, top_k], both ascending, differ."""
    size = a.shape[-1] * a.dtype.itemsize
    word = next(w for w in (8, 4, 2, 1) if size % w == 0)
    x, y = (np.ascontiguousarray(ids).view(f"u{word}") for ids in (a, b))
    found = x[..., 0] != y[..., 0]
    for i in range(1, size // word):
        found |= x[..., i] != y[..., i]
    return found


def _look_into(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """missing [n], lost [m], gained [m] of differing cells a, b [n, top_k]."""
    equal = a[:, :, None] == b[:, None, :]
    lost, gained = ~equal.any(axis=2), ~equal.any(axis=1)
    return lost.sum(axis=1), a[lost].astype(np.int64), b[gained].astype(np.int64)
