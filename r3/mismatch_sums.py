"""Sums whose parts can be added in any order and grouping, to the same last bit.

For `LogprobMismatch`: of plain floats without rounding, and of importance weights of any size.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


def exact_sum(values: Iterable[float]) -> tuple[float, ...]:
    """The sum of `values` without rounding: floats that add up to it, the nearest to it first.

    They depend on the sum alone, and () stands for 0. A sum beyond float64 is (inf,) or (-inf,).
    """
    rest = list(values)
    parts: list[float] = []
    while True:
        try:
            nearest = math.fsum(rest)
        except OverflowError:  # of a sum, or of one underway
            total = sum(map(Fraction, rest))
            try:
                nearest = float(total)
            except OverflowError:
                return (math.inf if total > 0 else -math.inf,)
        except ValueError:  # inf - inf
            return (math.nan,)
        if not math.isfinite(nearest):
            return (nearest,)
        if not nearest:
            return tuple(parts)
        parts.append(nearest)
        rest.append(-nearest)


@dataclass(frozen=True)
class Weights:
    """Sums of weights w and of w * w, whatever their size, given as log w.

    levels: (level, sum, sum of squares) of the highest levels, highest first; the sums are those
    of exact_sum, in units of 2**(256 * level) and its square. Each segment (sequence) is summed in
    the level of its largest weight. Only the two highest levels are kept: what is below them is
    less than 2**-256 of the whole, for every token there.
    """

    levels: tuple[tuple[int, tuple[float, ...], tuple[float, ...]], ...] = ()

    @classmethod
    def of(cls, logs: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Weights:
        """logs: float64 [n], finite, n > 0. starts, lengths: int64 [segments], of logs."""
        top = np.maximum.reduceat(logs, starts)
        unit = _STEP * math.log(2)
        level = np.clip(np.floor(top / unit + 0.5), -_HIGHEST, _HIGHEST)
        if level.any():  # some log w of 88 or more
            # log of the largest weight, in units of its level
            inside = np.clip(top - level * unit, -unit / 2, unit / 2)
            logs = logs - np.repeat(top - inside, lengths)
        weights = np.exp(logs)
        sums = np.add.reduceat(weights, starts)
        squares = np.add.reduceat(weights * weights, starts)
        found: list[tuple[int, tuple[float, ...], tuple[float, ...]]] = []
        for high in (level.max(), level.max() - 1):
            here = level == high
            if here.any():
                of = exact_sum(sums[here].tolist()), exact_sum(squares[here].tolist())
                found.append((int(high), *of))
        return cls(tuple(found))

    def __add__(self, other: Weights) -> Weights:
        both = self.levels + other.levels
        merged = []
        if both:
            highest = max(level for level, *_ in both)
            for high in (highest, highest - 1):
                here = [x for x in both if x[0] == high]
                if here:
                    sums = exact_sum(v for _, found, _ in here for v in found)
                    squares = exact_sum(v for _, _, found in here for v in found)
                    merged.append((high, sums, squares))
        return Weights(tuple(merged))

    def mean(self, n: int) -> float:
        """Mean weight of n; inf beyond float64, nan for none."""
        if not n:
            return math.nan
        try:
            return math.ldexp(self._total(1) / n, _STEP * self.levels[0][0])
        except OverflowError:
            return math.inf

    def effective_share(self, n: int) -> float:
        """(sum w)**2 / (n * sum w**2) of n weights: 1 if all are equal, 1 / n if one outweighs
        all others (Kish 1965); nan for none."""
        if not n:
            return math.nan
        total = self._total(1)
        return min(1.0, total * total / (n * self._total(2)))

    def _total(self, power: int) -> float:
        """Sum of w (1) or w * w (2), in the units of the highest level."""
        highest = self.levels[0][0]
        return math.fsum(
            math.ldexp(x, (level - highest) * _STEP * power)
            for level, plain_sum, squares in self.levels
            for x in (plain_sum if power == 1 else squares)
        )


_HIGHEST = 10**15  # level
_STEP = 256  # a level spans weights of 2**-128 to 2**128 of its unit, and their squares


def plain(x: float) -> float | str:
    """What JSON has no number for, as text."""
    return x if math.isfinite(x) else str(x)


def read_numbers(found: object, where: str) -> list[float]:
    """A list of what `plain` gives. Raises ValueError for anything else."""
    if type(found) is not list:
        raise ValueError(f"{where}: found {reprlib.repr(found)}, expected a list")
    for x in found:
        number = type(x) in (int, float) and math.isfinite(x)
        if not number and x not in ("inf", "-inf", "nan"):
            raise ValueError(f"{where}: found {reprlib.repr(x)}, expected a number")
    return [float(x) for x in found]


def read_weights(found: object, where: str) -> Weights:
    """From [level, parts of the sum, parts of the squares] each. Raises ValueError."""
    if type(found) is not list or len(found) > 2:
        raise ValueError(
            f"weights: {where}: found {reprlib.repr(found)}, expected at most two levels"
        )
    levels = []
    for level in found:
        if type(level) is not list or len(level) != 3 or type(level[0]) is not int:
            raise ValueError(
                f"weights: {where}: found {reprlib.repr(level)}, expected [integer, list, list]"
            )
        if abs(level[0]) > _HIGHEST:
            raise ValueError(f"weights: {where}: level {level[0]}, expected at most {_HIGHEST}")
        parts = [exact_sum(read_numbers(x, where)) for x in level[1:]]
        if not all(x and 0 < x[0] < math.inf for x in parts):
            raise ValueError(
                f"weights: {where}: found sums {reprlib.repr(level[1:])}, expected more than 0"
            )
        levels.append((level[0], parts[0], parts[1]))
    if len(levels) == 2 and levels[0][0] != levels[1][0] + 1:
        raise ValueError(
            f"weights: {where}: levels {levels[0][0]}, {levels[1][0]}, expected n, n - 1"
        )
    return Weights(tuple(levels))
