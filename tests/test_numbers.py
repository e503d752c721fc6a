"""Disagreement and mismatch figures against counting by hand and exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3 import RouterSpec, TraceError
from r3.disagreement import RoutingDisagreement
from r3.mismatch import LogprobMismatch

SPEC = RouterSpec(num_experts=8, top_k=2, moe_layers=(0, 2, 3), num_layers=4)


def random_ids(rng: np.random.Generator, rows: int, spec: RouterSpec = SPEC) -> np.ndarray:
    noise = rng.random((rows, len(spec.moe_layers), spec.num_experts))
    return noise.argsort(axis=-1)[..., : spec.top_k].astype(np.uint8)


@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.floats(0, 1))
def test_counts_equal_counting_by_hand(seed, rows, share):
    rng = np.random.default_rng(seed)
    a, b = random_ids(rng, rows), random_ids(rng, rows)
    keep = rng.random(rows) < share
    b[keep] = a[keep][..., ::-1]  # the same sets in another order
    valid = rng.random(rows) < 0.8
    found = RoutingDisagreement.between(a, b, valid, SPEC)
    sets = [
        [len(set(map(int, x)) - set(map(int, y))) for x, y in zip(a[r], b[r], strict=True)]
        for r in range(rows)
        if valid[r]
    ]
    assert found.tokens == len(sets)
    assert found.experts.tolist() == [sum(row[i] for row in sets) for i in range(3)]
    assert found.cells.tolist() == [sum(row[i] > 0 for row in sets) for i in range(3)]
    layers = [sum(x > 0 for x in row) for row in sets]
    assert found.layers_per_token.tolist() == [layers.count(i) for i in range(4)]
    if sets:
        assert found.cell_disagreement == pytest.approx(sum(layers) / (3 * len(sets)))
        assert found.token_disagreement == pytest.approx(sum(x > 0 for x in layers) / len(sets))
        assert found.expert_disagreement == pytest.approx(sum(map(sum, sets)) / (6 * len(sets)))
    half = rows // 2
    parts = [
        RoutingDisagreement.between(a[x], b[x], valid[x], SPEC)
        for x in (slice(half), slice(half, None))
    ]
    assert np.array_equal((parts[0] + parts[1]).cells, found.cells)


def test_more_rows_than_one_chunk():
    rng = np.random.default_rng(0)
    a = random_ids(rng, 9000)
    b = a.copy()
    b[[0, 4095, 4096, 8999], 1] = [[6, 7]]
    a[[0, 4095, 4096, 8999], 1] = [[0, 6]]
    found = RoutingDisagreement.between(a, b, np.ones(9000, bool), SPEC)
    assert found.cells.tolist() == found.experts.tolist() == [0, 4, 0]


def test_field_90_one_changed_id():
    """field.md 90: the rate of one changed id in [T, L, K] is 1 / (T * L * K), per layer."""
    a = np.tile(np.array([0, 1], np.uint8), (5, 3, 1))
    b = a.copy()
    b[2, 1, 0] = 7
    found = RoutingDisagreement.between(a, b, np.ones(5, bool), SPEC)
    assert found.expert_disagreement == pytest.approx(1 / (5 * 3 * 2))
    assert found.cell_disagreement_per_layer == [0, 1 / 5, 0]


def test_shapes_that_do_not_fit_are_refused():
    a = random_ids(np.random.default_rng(0), 4)
    with pytest.raises(TraceError, match="second routing: routed_experts has 3 rows, expected 4"):
        RoutingDisagreement.between(a, a[1:], np.ones(4, bool), SPEC)
    other = RouterSpec(8, 2, (0, 1, 2), 4)
    d = RoutingDisagreement.between(a, a, np.ones(4, bool), SPEC)
    with pytest.raises(TraceError, match="cannot add"):
        _ = d + RoutingDisagreement.between(a, a, np.ones(4, bool), other)


@given(st.lists(st.floats(-8, 0, width=32), min_size=1, max_size=30), st.integers(0, 2**32 - 1))
def test_mismatch_equals_the_formula(sampler, seed):
    sampler = np.array(sampler, np.float32)
    trainer = sampler + np.random.default_rng(seed).normal(0, 0.1, len(sampler))
    ratios = [float(t) - float(s) for t, s in zip(trainer, sampler, strict=True)]
    # summed exactly; exp itself is the only rounding
    k3 = sum(Fraction(exp(x)) - 1 - Fraction(x) for x in ratios) / len(ratios)
    found = LogprobMismatch.of(trainer, sampler)
    assert found.kl_k3 == pytest.approx(float(k3), rel=1e-9, abs=1e-15)
    assert found.abs_logratio_max == max(map(abs, ratios))
    ordered = sorted(map(abs, ratios))
    at = 0.99 * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    expected = ordered[low] + (at - low) * (ordered[high] - ordered[low])
    assert found.abs_logratio_p99 == pytest.approx(expected)


def test_k3_does_not_cancel_for_equal_models():
    """float32 log-probabilities 1e-4 apart: k3 is 5e-9, which 1 + x - 1 loses in float32."""
    sampler = np.full(3, -1, np.float32)
    found = LogprobMismatch.of(sampler.astype(np.float64) + 1e-4, sampler)
    assert found.kl_k3 == pytest.approx(5.0001666708e-09, rel=1e-6)


def test_a_ratio_beyond_float64_is_shown():
    assert LogprobMismatch.of(np.array([0.0]), np.array([-800.0])).kl_k3 == np.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(TraceError, match="the first at sampled token 1: trainer"):
        LogprobMismatch.of(np.array([-1.0, bad]), np.array([-1.0, -1.0]))
    with pytest.raises(TraceError, match="at least one"):
        LogprobMismatch.of(np.zeros(0), np.zeros(0))
