"""Quantiles of values that arrive in parts: exact for few, within 0.5 % for any number.

A quantile of the whole cannot be had from quantiles of the parts. So a state keeps the values
themselves up to `EXACT` of them, and from there on a DDSketch (Masson, Rim and Lee 2019,
arXiv 1908.10693): counts of values in buckets whose bounds grow by the factor
(1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR). Either depends on the multiset of values only, never
on how it was cut into parts or in which order these were added.
"""

from __future__ import annotations

import base64
import binascii
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from r3.columns import as_array, read_only
from r3.errors import FormatError, TraceError

if TYPE_CHECKING:
    from ddsketch.ddsketch import BaseDDSketch
    from ddsketch.mapping import LogarithmicMapping

_SKETCH = ("count", "relative_error", "smallest", "largest", "zeros", "keys", "counts")


@dataclass(frozen=True, eq=False)
class Quantiles:
    """A multiset of finite values >= 0; `+` unites two. States are never changed.

    count: values. smallest, largest: exact, nan if there are none. values: float64 [count],
    ascending, while exact, else None. As a sketch: zeros, values too small for a bucket; keys,
    counts: int64 [buckets], buckets by ascending key, and how many values each holds.
    """

    EXACT: ClassVar[int] = 65_536
    RELATIVE_ERROR: ClassVar[float] = 0.005

    count: int
    smallest: float
    largest: float
    values: np.ndarray | None
    zeros: int
    keys: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Quantiles:
        """values: [n], finite and >= 0, taken as float64. Raises TraceError for anything else."""
        given = as_array(values, "values", np.float64, copy=False)
        if given.ndim != 1:
            raise TraceError(f"values have shape {list(given.shape)}, expected [n]")
        if len(given) and not (given.min() >= 0 and given.max() < np.inf):  # NaN is neither
            at = int((~((given >= 0) & (given < np.inf))).argmax())
            raise TraceError(f"value {at} is {given[at]}, expected a finite number of at least 0")
        given = given + 0.0  # -0.0 becomes 0.0: equal values have equal bits
        return cls._kept(np.sort(given)) if len(given) <= cls.EXACT else cls._sketched(given)

    @classmethod
    def _kept(cls, ascending: np.ndarray) -> Quantiles:
        none, nan = np.zeros(0, np.int64), math.nan
        ends = (float(ascending[0]), float(ascending[-1])) if len(ascending) else (nan, nan)
        return cls(len(ascending), *ends, read_only(ascending), 0, none, none)

    @classmethod
    def _sketched(cls, values: np.ndarray) -> Quantiles:
        mapping = _mapping()
        large = values
        if values.min() <= mapping.min_possible:
            large = values[values > mapping.min_possible]
        # as mapping.key does, for all at once; value by value takes a second for a million
        keys = _keys(large, mapping)
        base = int(keys.min()) if len(keys) else 0
        counts = np.bincount(keys - base)
        filled = np.flatnonzero(counts)
        zeros = len(values) - len(large)
        ends = float(values.min()), float(values.max())
        return cls(
            len(values), *ends, None, zeros, read_only(filled + base), read_only(counts[filled])
        )

    def __add__(self, other: Quantiles) -> Quantiles:
        if not isinstance(other, Quantiles):
            return NotImplemented
        if not other.count or not self.count:
            return self if self.count else other
        if self.values is not None and other.values is not None:
            both = np.concatenate([self.values, other.values])
            # two ascending runs: what a stable sort is fast at
            kept = len(both) <= self.EXACT
            return self._kept(np.sort(both, kind="stable")) if kept else self._sketched(both)
        a, b = (x if x.values is None else self._sketched(x.values) for x in (self, other))
        keys = np.union1d(a.keys, b.keys)
        counts = np.zeros(len(keys), np.int64)
        for x in (a, b):
            counts[np.searchsorted(keys, x.keys)] += x.counts
        smallest, largest = min(a.smallest, b.smallest), max(a.largest, b.largest)
        count, zeros = a.count + b.count, a.zeros + b.zeros
        return Quantiles(count, smallest, largest, None, zeros, read_only(keys), read_only(counts))

    @property
    def is_exact(self) -> bool:
        return self.values is not None

    def quantile(self, q: float) -> float:
        """The q-quantile, 0 <= q <= 1; nan if there are no values.

        Exact: with linear interpolation, as numpy.quantile. Else within RELATIVE_ERROR of the
        order statistic number floor(q * (count - 1)), counted from 0, where that is between 1e-307
        and 1e308. Raises TraceError for another q.
        """
        if not 0 <= q <= 1:
            raise TraceError(f"quantile {q} is asked for, expected 0 to 1")
        if not self.count:
            return math.nan
        if self.values is not None:
            return float(np.quantile(self.values, q))
        found = self._sketch.get_quantile_value(q)
        assert found is not None  # None is for no values
        return min(max(float(found), self.smallest), self.largest)

    @cached_property
    def _sketch(self) -> BaseDDSketch:
        from ddsketch.ddsketch import BaseDDSketch
        from ddsketch.store import DenseStore

        store = DenseStore()
        for key, count in zip(self.keys.tolist(), self.counts.tolist(), strict=True):
            store.add(key, count)
        return BaseDDSketch(_mapping(), store, DenseStore(), self.zeros)

    def survival(self, thresholds: np.ndarray) -> np.ndarray:
        """float64 [m]: share of values above each of `thresholds` [m]; nan if there are no values.

        Exact, or that of a threshold at most 2 * RELATIVE_ERROR / (1 - RELATIVE_ERROR) higher: a
        value in the bucket of its threshold does not count as above. Raises TraceError for
        thresholds that are not numbers.
        """
        limits = as_array(thresholds, "thresholds", np.float64, copy=False)
        if limits.ndim != 1 or np.isnan(limits).any():
            raise TraceError(f"thresholds are {limits.tolist()}, expected [m] numbers")
        if not self.count:
            return np.full(len(limits), np.nan)
        if self.values is not None:
            return 1 - np.searchsorted(self.values, limits, side="right") / self.count
        mapping = _mapping()
        inside = np.maximum(limits, mapping.min_possible)
        up_to = np.concatenate([[0], np.cumsum(self.counts)])
        not_above = (
            self.zeros + up_to[np.searchsorted(self.keys, _keys(inside, mapping), side="right")]
        )
        not_above[limits <= mapping.min_possible] = self.zeros
        not_above[limits < self.smallest] = 0
        not_above[limits >= self.largest] = self.count
        return 1 - not_above / self.count

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `from_dict` makes the same state.

        Values that are kept are base64 of little-endian float64: eleven bytes each.
        """
        if self.values is not None:
            data = self.values.astype("<f8").tobytes()
            return {"count": self.count, "values": base64.b64encode(data).decode()}
        found = (self.smallest, self.largest, self.zeros, self.keys.tolist(), self.counts.tolist())
        return dict(zip(_SKETCH, (self.count, self.RELATIVE_ERROR, *found), strict=True))

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Quantiles:
        """The state that `to_dict` wrote. Raises FormatError for what no state gives."""
        try:
            return cls._read(found)
        except (ValueError, TypeError, OverflowError, binascii.Error) as e:
            raise FormatError(f"quantiles cannot be read: {e}") from None

    @classmethod
    def _read(cls, found: Mapping[str, Any]) -> Quantiles:
        names = set(found) if isinstance(found, Mapping) else found
        if names == {"count", "values"}:
            data = base64.b64decode(found["values"], validate=True)
            values = np.frombuffer(data, "<f8").astype(np.float64)
            good = (values >= 0) & (values < np.inf) & ~np.signbit(values)
            if not good.all() or (values[1:] < values[:-1]).any():
                raise ValueError("values are not finite, not >= 0 or not ascending")
            if type(found["count"]) is not int or not len(values) == found["count"] <= cls.EXACT:
                raise ValueError(
                    f"{len(values)} values and count {reprlib.repr(found['count'])}, expected as "
                    f"many, and at most {cls.EXACT}"
                )
            return cls._kept(values)
        if names != set(_SKETCH):
            raise ValueError(
                f"found {reprlib.repr(names)}, expected count and values, or {_SKETCH}"
            )
        count, error, smallest, largest, zeros, keys, counts = (found[name] for name in _SKETCH)
        if error != cls.RELATIVE_ERROR:
            raise ValueError(
                f"relative_error is {reprlib.repr(error)}, expected {cls.RELATIVE_ERROR}"
            )
        for name, numbers in (("keys", keys), ("counts", counts), ("count, zeros", [count, zeros])):
            if type(numbers) is not list or not all(type(x) is int for x in numbers):
                raise ValueError(f"{name}: expected integers, found another value")
        ends = [smallest, largest]
        if not all(type(x) in (int, float) for x in ends):
            raise ValueError(f"smallest, largest are {reprlib.repr(ends)}, expected numbers")
        if not 0 <= smallest <= largest < math.inf:
            raise ValueError(f"values of {smallest} to {largest}, expected 0 or more, ascending")
        rising = all(a < b for a, b in pairwise(keys))
        mapping = _mapping()
        least, most = _keys(np.array([mapping.min_possible, np.inf]), mapping).tolist()
        if not all(least <= key <= most for key in keys):
            raise ValueError(f"keys: expected {least} to {most}")
        if len(keys) != len(counts) or not rising or min(counts, default=1) < 1 or zeros < 0:
            raise ValueError("keys do not ascend, or have no positive count each, or zeros < 0")
        if count >= 2**63:  # and so none of the others is
            raise ValueError(f"count is {count}, expected less than 2**63")
        if count < 1 or zeros + sum(counts) != count:
            raise ValueError(f"count is {count}, zeros and counts sum to {zeros + sum(counts)}")
        arrays = (read_only(np.array(x, np.int64)) for x in (keys, counts))
        return cls(count, float(smallest), float(largest), None, zeros, *arrays)


def _mapping() -> LogarithmicMapping:
    from ddsketch.mapping import LogarithmicMapping

    return LogarithmicMapping(Quantiles.RELATIVE_ERROR)


def _keys(values: np.ndarray, mapping: LogarithmicMapping) -> np.ndarray:
    """int64 [n]: the bucket of each of `values` [n]; bucket k holds (gamma**(k - 1), gamma**k]."""
    # what the sketch gives back for a higher key is beyond float64
    keys = np.log2(np.minimum(values, mapping.max_possible / mapping.gamma))
    keys /= math.log2(mapping.gamma)
    return np.ceil(keys, out=keys).astype(np.int64)
