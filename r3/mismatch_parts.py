"""What `LogprobMismatch` is made of: counts, largest values and sums of a batch, by name.

Sums are taken within a sequence by numpy, and over sequences and states without rounding. So how a
batch was cut into parts, and in which order these are added, changes no bit of the result.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from r3.mismatch_input import KINDS, CountedTokens
from r3.mismatch_sums import Weights, exact_sum, plain, read_numbers, read_weights

EXTREMES = (1.1, 1.5, 2.0, 5.0, 10.0)
EDGES = (0.0, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
SIDES = ("sampler", "trainer")
_CELLS = [f"{side}_{i}" for side in SIDES for i in range(len(EDGES) - 1)]

_CHUNK = 16_384  # tokens, and the rest of a sequence

# names of what a state holds
COUNTS = (
    *("tokens", "sequences", "left_out", "high", "low"),
    *(f"extreme_{tau:g}" for tau in EXTREMES),
    *KINDS,
    *(f"{cell}_{what}" for cell in _CELLS for what in ("tokens", "extreme")),
)
SUMS = (
    *("lr", "abs", "k3", "chi2", "diff", "diff2", "p", "q", "pp", "qq", "pq"),
    *("seq_abs", "seq_chi2", "mean", "mean_abs", "geometric", "ppl_ratio"),
    *(f"{side}_{what}" for side in SIDES for what in ("log_ppl", "ppl")),
    *(f"{cell}_{what}" for cell in _CELLS for what in ("abs", "k3")),
)
# a least value is kept as the largest of the negative
MAXIMA = (
    *("lr", "-lr", "seq", "-seq", "seq_sum_abs", "mean", "-mean"),
    *(f"{sign}{x}" for x in ("diff", "p", "q") for sign in ("", "-")),
)
WEIGHTS = ("token", "token_truncated", "sequence", "sequence_truncated")


@dataclass(frozen=True)
class Measured:
    """Counts, exact sums, largest values and weights by name: COUNTS, SUMS, MAXIMA, WEIGHTS."""

    counts: dict[str, int]
    sums: dict[str, tuple[float, ...]]
    maxima: dict[str, float]
    weights: dict[str, Weights]

    def __add__(self, other: Measured) -> Measured:
        return Measured(
            {k: n + other.counts[k] for k, n in self.counts.items()},
            {k: exact_sum(x + other.sums[k]) for k, x in self.sums.items()},
            {k: max(x, other.maxima[k]) for k, x in self.maxima.items()},
            {k: w + other.weights[k] for k, w in self.weights.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts),
            "sums": {k: [plain(v) for v in x] for k, x in self.sums.items()},
            "maxima": {k: plain(x) for k, x in self.maxima.items()},
            "weights": {
                k: [[n, list(x), list(y)] for n, x, y in w.levels] for k, w in self.weights.items()
            },
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Measured:
        """Raises ValueError for what `to_dict` does not write."""
        names = {"counts": COUNTS, "sums": SUMS, "maxima": MAXIMA, "weights": WEIGHTS}
        for name, keys in names.items():
            if type(found[name]) is not dict or set(found[name]) != set(keys):
                raise ValueError(f"{name}: expected a dictionary of {', '.join(keys)}")
        counts, sums, maxima, weights = (found[k] for k in names)
        for name, n in counts.items():
            if type(n) is not int or not 0 <= n < 2**63:
                raise ValueError(
                    f"counts: {name} is {reprlib.repr(n)}, expected an integer of 0 to 2**63 - 1"
                )
        measured = cls(
            {k: counts[k] for k in COUNTS},
            {k: exact_sum(read_numbers(sums[k], k)) for k in SUMS},
            dict(zip(MAXIMA, read_numbers([maxima[k] for k in MAXIMA], "maxima"), strict=True)),
            {k: read_weights(weights[k], k) for k in WEIGHTS},
        )
        tokens, sequences = counts["tokens"], counts["sequences"]
        if sequences > tokens or bool(sequences) != bool(tokens):
            raise ValueError(f"{sequences} sequences of {tokens} tokens")
        for name, w in measured.weights.items():
            if bool(w.levels) != bool(tokens):
                raise ValueError(f"weights: {name}: {len(w.levels)} levels, {tokens} tokens")
        return measured


def measure(tokens: CountedTokens, clip: tuple[float, float]) -> Measured:
    """All that a state holds, but for the quantiles.

    Some sequences at a time, as arrays that fit the processor's caches take half the time.
    """
    total = Measured(
        {**dict.fromkeys(COUNTS, 0), **tokens.kinds, "left_out": tokens.left_out},
        dict.fromkeys(SUMS, ()),
        dict.fromkeys(MAXIMA, -math.inf),
        dict.fromkeys(WEIGHTS, Weights()),
    )
    starts, ends = tokens.starts, tokens.starts + tokens.lengths
    cuts = np.flatnonzero(np.diff(starts // _CHUNK)) + 1
    for first, last in pairwise([0, *cuts.tolist(), len(starts)] if len(starts) else []):
        here = slice(starts[first], ends[last - 1])
        with np.errstate(over="ignore", under="ignore"):  # beyond float64 is inf, and is shown
            total += _measure(
                tokens.trainer[here],
                tokens.sampler[here],
                starts[first:last] - starts[first],
                tokens.lengths[first:last],
                clip,
            )
    return total


def _measure(
    t: np.ndarray,
    s: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    clip: tuple[float, float],
) -> Measured:
    """t, s are the log-probabilities of trainer and sampler, p, q the probabilities, lr = t - s,
    each [n], n > 0; sum_*, mean_* are of a sequence, [sequences].
    """
    low, high = (math.log(x) if x else -math.inf for x in clip)

    def by_sequence(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, starts)

    lr = t - s
    size, p, q = np.abs(lr), np.exp(t), np.exp(s)
    k3 = np.expm1(lr) - lr  # expm1: r - 1 without cancellation near r = 1
    diff = np.abs(p - q)
    of_tokens = {
        **{"lr": lr, "abs": size, "k3": k3, "chi2": np.expm1(2 * lr)},
        **{"diff": diff, "diff2": diff * diff},
        **{"p": p, "q": q, "pp": p * p, "qq": q * q, "pq": p * q},
    }
    sums = {name: by_sequence(values) for name, values in of_tokens.items()}
    sum_lr, sum_abs, mean_lr = sums["lr"], sums["abs"], sums["lr"] / lengths
    sums |= {
        **{"seq_abs": np.abs(sum_lr), "seq_chi2": np.expm1(2 * sum_lr)},
        **{"mean": mean_lr, "mean_abs": np.abs(mean_lr)},
        **{"geometric": np.exp(mean_lr), "ppl_ratio": np.exp(-mean_lr)},
    }
    counts = dict.fromkeys(COUNTS, 0) | {
        **{"tokens": len(lr), "sequences": len(starts)},
        **{"high": _count(lr > high), "low": _count(lr < low)},
        **{f"extreme_{tau:g}": _count(size > math.log(tau)) for tau in EXTREMES},
    }
    listed = {name: values.tolist() for name, values in sums.items()}
    extreme, width = size > math.log(2), len(EDGES) - 1
    row = np.repeat(np.arange(len(starts)) * width, lengths)
    for side, logs in zip(SIDES, (s, t), strict=True):
        log_ppl = -by_sequence(logs) / lengths
        listed[f"{side}_log_ppl"] = log_ppl.tolist()
        listed[f"{side}_ppl"] = np.exp(log_ppl).tolist()
        cell = _cells(logs)
        for what, of in (("tokens", cell), ("extreme", cell[extreme])):
            found = np.bincount(of, minlength=width).tolist()
            counts |= {f"{side}_{i}_{what}": n for i, n in enumerate(found)}
        cell += row
        for what, values in (("abs", size), ("k3", k3)):
            table = np.bincount(cell, values, width * len(starts)).reshape(-1, width)
            listed |= {f"{side}_{i}_{what}": column for i, column in enumerate(table.T.tolist())}
    weights = {}
    alone = np.arange(len(lengths)), np.ones_like(lengths)  # each value a segment
    for what, logs, segments in (("token", lr, (starts, lengths)), ("sequence", sum_lr, alone)):
        weights[what] = weights[f"{what}_truncated"] = Weights.of(logs, *segments)
        if logs.max() > high:
            weights[f"{what}_truncated"] = Weights.of(np.minimum(logs, high), *segments)
    return Measured(
        counts,
        {name: exact_sum(values) for name, values in listed.items()},
        {
            **_ends("lr", lr),
            **_ends("seq", sum_lr),
            **{"seq_sum_abs": float(sum_abs.max())},
            **_ends("mean", mean_lr),
            **_ends("diff", diff),
            **_ends("p", p),
            **_ends("q", q),
        },
        weights,
    )


_LOG_EDGES = [math.log(edge) for edge in EDGES[1:-1]]


def _cells(logs: np.ndarray) -> np.ndarray:
    """int64 [n]: which of the intervals between EDGES; for so few faster than a search."""
    cells = np.zeros(len(logs), np.int8)
    for edge in _LOG_EDGES:
        cells += logs >= edge
    return cells.astype(np.int64)


def _count(flags: np.ndarray) -> int:
    return int(np.count_nonzero(flags))


def _ends(name: str, values: np.ndarray) -> dict[str, float]:
    # 0.0 where that is -0.0, of which max would keep either
    return {name: float(values.max()) + 0.0, f"-{name}": 0.0 - float(values.min())}
