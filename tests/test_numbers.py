"""Disagreement figures against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3 import RouterSpec, TraceError
from r3.disagreement import RoutingDisagreement

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
