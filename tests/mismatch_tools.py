"""States of log-ratios, and how they are compared."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from r3.mismatch import LogprobMismatch


def of_ratios(logratios, **kwargs):
    """A state of tokens with these log-ratios: one of the two probabilities is 1"""
    lr = np.array(logratios, np.float64)
    return LogprobMismatch.of(np.minimum(lr, 0), -np.maximum(lr, 0), **kwargs)


def state(m: LogprobMismatch) -> str:
    return json.dumps(m.to_dict(), allow_nan=False)


def near(x: float, rel: float = 1e-12, absolute: float = 1e-15) -> object:
    return pytest.approx(x, rel=rel, abs=absolute, nan_ok=True)


def no_figures(m: LogprobMismatch) -> None:
    found = m.metrics()
    assert found.pop("tokens") == found.pop("sequences") == 0
    assert found.pop("left_out") == sum(m.left_out.values())
    assert all(math.isnan(x) for x in found.values())
    assert np.isnan(m.survival(np.array([0.1]))).all()
    assert all(b["tokens"] == 0 for side in m.buckets().values() for b in side)
