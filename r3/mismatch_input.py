"""Log-probabilities as trainers hold them, read as plain float64 for `LogprobMismatch`.

Either library, any float dtype and layout give the same numbers, and what is masked out is never
looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3.batch import check_cu_seqlens
from r3.columns import ROUNDING, on_host
from r3.errors import TraceError

KINDS = tuple(
    f"{side}_{what}" for side in ("trainer", "sampler") for what in ("nan", "inf", "positive")
)
EXAMPLES = 8  # tokens left out that are named
_LEAST = -1e300  # taken as -inf from here on, so that no sum over tokens leaves float64


@dataclass(frozen=True, eq=False)
class CountedTokens:
    """The tokens of a batch that count, behind each other, and those that cannot.

    trainer, sampler: float64 [n], log-probabilities, finite and at most ROUNDING. starts,
    lengths: int64 [sequences], of sequences that have a token that counts. left_out: tokens that
    should count and have no such log-probability; kinds: how many by what is wrong, KINDS.
    examples: the first EXAMPLES of them as text.
    """

    trainer: np.ndarray
    sampler: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    left_out: int
    kinds: dict[str, int]
    examples: tuple[str, ...]


def counted_tokens(
    trainer: Any,
    sampler: Any,
    cu_seqlens: Any = None,
    mask: Any = None,
    names: Sequence[object] | None = None,
    strict: bool = False,
) -> CountedTokens:
    """Arguments and errors are those of LogprobMismatch.of."""
    p, q = _logprobs(trainer, "trainer"), _logprobs(sampler, "sampler")
    if p.shape != q.shape or p.ndim not in (1, 2):
        raise TraceError(
            f"log-probabilities have shapes {list(p.shape)} (trainer) and {list(q.shape)} "
            "(sampler), expected the same [tokens] or [sequences, tokens]"
        )
    bounds = _bounds(cu_seqlens, p.shape)
    if names is not None:
        try:
            names = list(names)
        except TypeError:
            raise TraceError(
                f"names is of type {type(names).__name__}, expected one for each sequence"
            ) from None
        if len(names) != len(bounds) - 1:
            raise TraceError(
                f"{len(names)} names, expected one for each of {len(bounds) - 1} sequences"
            )
    counts = np.ones(p.size, bool) if mask is None else flags(mask, p.shape).reshape(-1)
    p, q = p.reshape(-1), q.reshape(-1)
    # comparisons with NaN are False
    good = (p <= ROUNDING) & (p > _LEAST) & (q <= ROUNDING) & (q > _LEAST)
    wrong = np.flatnonzero(counts & ~good)
    kinds, examples = dict.fromkeys(KINDS, 0), []
    if len(wrong):
        for side, values in (("trainer", p[wrong]), ("sampler", q[wrong])):
            kinds[f"{side}_nan"] = int(np.isnan(values).sum())
            kinds[f"{side}_inf"] = int(((values <= _LEAST) | (values == np.inf)).sum())
            kinds[f"{side}_positive"] = int(((values > ROUNDING) & (values < np.inf)).sum())
        for at in wrong[:EXAMPLES].tolist():
            i = int(np.searchsorted(bounds, at, side="right")) - 1
            name = i if names is None else names[i]
            examples.append(
                f"sequence {name}: token {at - bounds[i]}: log-probability {p[at]} (trainer), "
                f"{q[at]} (sampler)"
            )
        if strict:
            raise TraceError(
                f"{examples[0]}, expected finite numbers of at most 0; {len(wrong)} tokens like it"
            )
    counts = counts & good
    if not counts.all():
        p, q = p[counts], q[counts]
    before = np.concatenate([[0], np.cumsum(counts)])[bounds]  # tokens that count before a sequence
    lengths = np.diff(before)
    some = lengths > 0
    return CountedTokens(p, q, before[:-1][some], lengths[some], len(wrong), kinds, tuple(examples))


def _logprobs(values: Any, side: str) -> np.ndarray:
    found = on_host(values, f"log-probabilities ({side})")
    if found.dtype.kind != "f":
        raise TraceError(f"log-probabilities ({side}) are {found.dtype}, expected floats")
    return np.ascontiguousarray(found, np.float64) if found.ndim else found


def flags(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """bool of `shape`: which tokens count. Raises TraceError for a mask of another shape, or of
    anything but bool, or 0 and 1."""
    found = on_host(mask, "mask")
    if found.shape != shape:
        raise TraceError(f"mask has shape {list(found.shape)}, expected {list(shape)}")
    if found.dtype == bool:
        return found
    if found.dtype.kind not in "iuf":
        raise TraceError(f"mask is {found.dtype}, expected bool, or 0 and 1")
    wrong = (found != 0) & (found != 1)
    if wrong.any():
        at = np.unravel_index(int(wrong.argmax()), shape)
        raise TraceError(
            f"mask is {found[at]} at {[int(i) for i in at]}, expected bool, or 0 and 1"
        )
    return found == 1


def _bounds(cu_seqlens: Any, shape: tuple[int, ...]) -> np.ndarray:
    """int64 [sequences + 1]: where sequences begin and end among the tokens, row by row."""
    if len(shape) == 2:
        if cu_seqlens is not None:
            raise TraceError(
                f"log-probabilities of shape {list(shape)} and cu_seqlens, expected none: each row "
                "is a sequence"
            )
        return np.arange(shape[0] + 1) * shape[1]
    if cu_seqlens is None:
        return np.array([0, shape[0]])
    found = on_host(cu_seqlens, "cu_seqlens")
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu":
        raise TraceError(
            f"cu_seqlens is {found.dtype} of shape {list(found.shape)}, expected integers "
            "[sequences + 1]"
        )
    if found.tolist() != [0] or shape[0]:  # no sequence and no token
        check_cu_seqlens(found, shape[0])
    return found.astype(np.int64)
