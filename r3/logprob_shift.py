"""Whether log-probabilities of the trainer stand at another token than the engine's.

The commonest fault of a new training loop is an offset by one. All figures then look like a run
that collapses, and nothing in either array shows it; together they do, as the trainer's values
follow the engine's of a neighbour and not those of their own token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from r3.batch import RoutingBatch

_LEAST_TOKENS = 100
# What a neighbour must win over the token itself. Right values correlate by 0.9 or more even with
# stale weights, and those of neighbours by what text has in common, 0.1 to 0.3.
_WINS, _BY = 0.6, 0.3


def find_logprob_shift(engine: RoutingBatch, trainer: RoutingBatch) -> dict[str, Any] | None:
    """None where values stand at their tokens, or where there are too few to tell.

    engine, trainer: batches of the same tokens. Else "shift", -1 or 1: the trainer's value at token
    t is that of the engine's token t + shift; "correlation" there, and "correlation_at_0".
    """
    found = {}
    for shift in (-1, 0, 1):
        a, b = _pairs(engine, trainer.logprobs, shift)
        if len(a) < _LEAST_TOKENS or np.ptp(a) == 0 or np.ptp(b) == 0:
            return None
        found[shift] = float(np.corrcoef(a, b)[0, 1])
    best = max(found, key=lambda shift: found[shift])
    if best == 0 or found[best] < _WINS or found[best] - found[0] < _BY:
        return None
    return {"shift": best, "correlation": found[best], "correlation_at_0": found[0]}


def _pairs(engine: RoutingBatch, trainer: np.ndarray, shift: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of the engine's token t + shift and of the trainer's t, where both are known
    and of one sequence."""
    owner = np.repeat(np.arange(len(engine)), np.diff(engine.cu_seqlens))
    at = np.arange(max(0, -shift), len(owner) - max(0, shift))
    at = at[owner[at] == owner[at + shift]]
    a, b = engine.logprobs[at + shift].astype(np.float64), trainer[at].astype(np.float64)
    known = ~np.isnan(a) & ~np.isnan(b)
    return np.exp(a[known]), np.exp(b[known])
