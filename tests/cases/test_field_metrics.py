"""Public questions about metrics, with the exact answer.

Rows of the project's list, and where each is tested:
  92  here
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from r3.mismatch import LogprobMismatch


def test_field_92_share_of_extreme_tokens():
    """field.md 92: of log-ratios 0, 0.8 and -1.0, two in three are beyond a ratio of 2."""
    trainer, sampler = np.array([-1.0, -1.0, -2.0]), np.array([-1.0, -1.8, -1.0])
    found = LogprobMismatch.of(trainer, sampler)
    assert found.metrics()["extreme_2"] == float(Fraction(2, 3))
    # the same over parts of any size: counts add up, shares do not
    parts = [LogprobMismatch.of(trainer[x], sampler[x]) for x in (slice(1), slice(1, 3))]
    assert [p.metrics()["extreme_2"] for p in parts] == [0, 1]
    assert (parts[0] + parts[1]).metrics()["extreme_2"] == float(Fraction(2, 3))
    # on the small side too, and not at 2 itself
    below = LogprobMismatch.of(np.full(1, -1.0), np.full(1, -0.25))
    assert (found + below).metrics()["extreme_2"] == float(Fraction(3, 4))
    at = LogprobMismatch.of(np.full(1, -np.log(2)), np.zeros(1))
    assert (found + at).metrics()["extreme_2"] == float(Fraction(2, 4))
