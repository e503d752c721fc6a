"""What r3.disagreement counts beside layers and tokens: positions, margins, sequences, swaps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r3.differences import Differences

# Position bins: narrow ones until so many are needed, then twice as wide.
_BINS, _NARROWEST = 128, 16
# Margins are binned by powers of two: [0, 2**-20), [2**-20, 2**-19), ..., [2**5, inf).
_LOWEST, _HIGHEST = -20, 5
MARGIN_EDGES = (0.0, *(2.0**i for i in range(_LOWEST, _HIGHEST + 1)), float("inf"))
_BITS = 21  # of a layer or an expert in a key; there are at most 65,536 of either


@dataclass(frozen=True, eq=False)
class Swaps:
    """Cells that differ in just one expert, by layer, expert of side a and expert of side b.

    keys: int64 [n], ascending, the three as one number; counts: int64 [n], cells.
    """

    keys: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, found: Differences) -> Swaps:
        alone = found.missing[found.lost_cell] == 1
        layer = found.layer[found.lost_cell[alone]]
        pairs = found.lost[alone] << _BITS | found.gained[alone]
        return cls(*np.unique(layer << 2 * _BITS | pairs, return_counts=True))

    def __add__(self, other: Swaps) -> Swaps:
        both = np.concatenate([self.keys, other.keys])
        counts = np.concatenate([self.counts, other.counts])
        order = np.argsort(both, kind="stable")  # quick on two ascending runs
        both, counts = both[order], counts[order]
        first = np.flatnonzero(np.diff(both, prepend=-1))
        return Swaps(both[first], np.add.reduceat(counts, first) if len(first) else counts)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def most_frequent(self, most: int | None = None) -> list[tuple[int, int, int, int]]:
        """(ordinal of the layer, expert of a, expert of b, cells), the most frequent first."""
        chosen = np.argsort(-self.counts, kind="stable")[:most]
        mask = (1 << _BITS) - 1
        keys = self.keys[chosen]
        parts = (keys >> 2 * _BITS, keys >> _BITS & mask, keys & mask, self.counts[chosen])
        return list(zip(*(p.tolist() for p in parts), strict=True))


@dataclass(frozen=True, eq=False)
class Positions:
    """rows: int64 [bins], rows compared, and cells: int64 [bins, L], cells that differ, by position
    in the sequence, in at most 128 bins `width` tokens wide."""

    width: int
    rows: np.ndarray
    cells: np.ndarray

    @classmethod
    def of(cls, found: Differences, compared: np.ndarray, cu_seqlens: np.ndarray) -> Positions:
        """compared: rows, ascending; cu_seqlens: int64 [sequences + 1], of all rows."""
        layers = len(found.spec.moe_layers)
        if not len(compared):
            return cls(_NARROWEST, np.zeros(0, np.int64), np.zeros((0, layers), np.int64))
        starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
        position = np.arange(len(found.valid)) - starts
        longest = int(position[compared].max()) + 1
        width = _NARROWEST
        while longest > _BINS * width:
            width *= 2
        bins = -(-longest // width)
        rows = np.bincount(position[compared] // width, minlength=bins)
        at = position[found.row] // width * layers + found.layer
        cells = np.bincount(at, minlength=bins * layers)
        return cls(width, rows, cells.reshape(bins, layers))

    def __add__(self, other: Positions) -> Positions:
        width = max(self.width, other.width)
        pair = [x._at_width(width) for x in (self, other)]
        bins = max(len(x.rows) for x in pair)
        rows, cells = ([_longer(getattr(x, k), bins) for x in pair] for k in ("rows", "cells"))
        return Positions(width, rows[0] + rows[1], cells[0] + cells[1])

    def _at_width(self, width: int) -> Positions:
        """In bins `width` tokens wide, a multiple of what they are"""
        starts = np.arange(0, len(self.rows), width // self.width)
        if not len(starts):
            return self
        rows, cells = (np.add.reduceat(x, starts) for x in (self.rows, self.cells))
        return Positions(width, rows, cells)


def _longer(counts: np.ndarray, bins: int) -> np.ndarray:
    return np.concatenate([counts, np.zeros((bins - len(counts), *counts.shape[1:]), np.int64)])


def by_margin(found: Differences, margins: np.ndarray) -> np.ndarray:
    """int64 [2, bins]: all cells, and those that differ, between MARGIN_EDGES; NaN left out."""
    counts = []
    for values in (margins[found.valid], margins[found.row, found.layer]):
        values = values[~np.isnan(values)]
        power = np.frexp(values)[1] - 1  # 2**power <= value < 2**(power + 1)
        place = np.where(values == 0, 0, np.clip(power - _LOWEST + 1, 0, _HIGHEST - _LOWEST + 1))
        place[np.isinf(values)] = _HIGHEST - _LOWEST + 1
        counts.append(np.bincount(place, minlength=len(MARGIN_EDGES) - 1))
    return np.stack(counts)


def sequence_means(per_row: np.ndarray, valid: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """float64: mean of per_row over the valid rows of each sequence that has any."""
    sums, rows = (
        np.diff(np.concatenate([[0], np.cumsum(x)])[cu_seqlens]) for x in (per_row, valid)
    )
    return sums[rows > 0] / rows[rows > 0]
