"""Routing disagreement against counting by hand with Python's sets."""

from __future__ import annotations

import itertools
import json
import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import RouterSpec, TraceError
from r3.disagreement import RoutingDisagreement
from r3.disagreement_parts import MARGIN_EDGES
from r3.load import max_violation

SPEC = RouterSpec(num_experts=8, top_k=2, moe_layers=(0, 2, 3), num_layers=4)


def random_ids(rng: np.random.Generator, rows: int, spec: RouterSpec = SPEC) -> np.ndarray:
    noise = rng.random((rows, len(spec.moe_layers), spec.num_experts))
    return noise.argsort(axis=-1)[..., : spec.top_k].astype(spec.dtype)


def nudged(rng: np.random.Generator, ids: np.ndarray, share: float, spec: RouterSpec) -> np.ndarray:
    """`ids` with other sets in about that share of the cells, and others in another order."""
    other = random_ids(rng, len(ids), spec)
    change = rng.random(ids.shape[:2]) < share
    return np.where(change[..., None], other, ids[..., ::-1])


def same(a: Any, b: Any) -> None:
    for name, x in vars(a).items():
        y = getattr(b, name)
        if name in ("swaps", "positions"):
            same(x, y)
        elif name == "sequences":
            assert x.to_dict() == y.to_dict()
        elif name == "sequences_sum":
            assert x == pytest.approx(y, rel=1e-12, abs=1e-12)
        elif isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, name
            assert np.array_equal(x, y), name
        else:
            assert x == y, name


@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.floats(0, 1), st.booleans())
def test_counts_equal_counting_by_hand(seed, rows, share, wide):
    rng = np.random.default_rng(seed)
    spec = RouterSpec(300, 3, (0, 2, 3), 4) if wide else SPEC
    a = random_ids(rng, rows, spec)
    b = nudged(rng, a, share, spec)
    valid = rng.random(rows) < 0.8
    found = RoutingDisagreement.between(a, b, valid, spec)
    sets = [
        [(set(map(int, x)), set(map(int, y))) for x, y in zip(a[r], b[r], strict=True)]
        for r in range(rows)
        if valid[r]
    ]
    lost = [[len(x - y) for x, y in row] for row in sets]
    layers = [sum(n > 0 for n in row) for row in lost]
    k = spec.top_k
    assert (found.tokens, found.left_out) == (len(sets), rows - len(sets))
    assert found.experts.tolist() == [sum(row[i] for row in lost) for i in range(3)]
    assert found.cells.tolist() == [sum(row[i] > 0 for row in lost) for i in range(3)]
    assert found.layers_per_token.tolist() == [layers.count(i) for i in range(4)]
    for side, load in enumerate((found.load_a, found.load_b)):
        for i in range(3):
            chosen = [e for row in sets for e in row[i][side]]
            assert load[i].tolist() == [chosen.count(e) for e in range(spec.num_experts)]
    swaps: dict[tuple[int, int, int], int] = {}
    for row in sets:
        for i, (x, y) in enumerate(row):
            if len(x - y) == 1:
                key = (i, *(x - y), *(y - x))
                swaps[key] = swaps.get(key, 0) + 1
    assert sorted(found.swaps.most_frequent()) == [(*key, n) for key, n in sorted(swaps.items())]
    assert found.swaps.total == sum(swaps.values())
    if sets:
        assert found.cell_disagreement == pytest.approx(sum(layers) / (3 * len(sets)))
        assert found.token_disagreement == pytest.approx(sum(n > 0 for n in layers) / len(sets))
        assert found.expert_disagreement == pytest.approx(sum(map(sum, lost)) / (3 * k * len(sets)))
        assert found.sequence_level["max"] == pytest.approx(sum(layers) / len(sets))


def packed(lengths: list[int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """cu_seqlens and valid of a batch: last tokens have no row, and some others have none."""
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    valid = rng.random(cu_seqlens[-1]) < 0.9
    valid[cu_seqlens[1:] - 1] = False
    return cu_seqlens, valid


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3000),
)
def test_merged_parts_equal_the_whole(lengths, seed, longest):
    """Any partition by sequence, in any order and nesting: everything to the bit but the sum."""
    rng = np.random.default_rng(seed)
    lengths = [*lengths, longest]  # position bins get wider with it
    cu_seqlens, valid = packed(lengths, rng)
    spec = RouterSpec(8, 2, (0,), 1)
    a = random_ids(rng, len(valid), spec)
    b = nudged(rng, a, 0.2, spec)
    margins = rng.exponential(1, (len(valid), 1)).astype(np.float32)
    margins[rng.random(len(valid)) < 0.2] = np.nan
    whole = RoutingDisagreement.between(
        a, b, valid, spec, cu_seqlens=cu_seqlens, margins=margins, ordered=True
    )
    parts = []
    for start, stop in itertools.pairwise(cu_seqlens.tolist()):
        rows = slice(start, stop)
        parts.append(
            RoutingDisagreement.between(
                a[rows],
                b[rows],
                valid[rows],
                spec,
                cu_seqlens=np.array([0, stop - start]),
                margins=margins[rows],
                ordered=True,
            )
        )
    order = random.Random(seed)
    order.shuffle(parts)
    while len(parts) > 1:
        i = order.randrange(len(parts) - 1)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    same(parts[0], whole)
    same(RoutingDisagreement.zero(spec) + whole, whole)
    same(whole + RoutingDisagreement.zero(spec), whole)


def test_positions_count_every_cell_where_it_is():
    rng = np.random.default_rng(3)
    for longest in (5, 16, 2048, 2049, 5000):
        cu_seqlens, valid = packed([7, longest, 300], rng)
        a = random_ids(rng, len(valid))
        b = nudged(rng, a, 0.1, SPEC)
        found = RoutingDisagreement.between(a, b, valid, SPEC, cu_seqlens=cu_seqlens)
        positions = found.to_dict()["positions"]
        width = positions["width"]
        assert len(positions["rows"]) <= 128
        assert width == max(16, 2 ** math.ceil(math.log2(max(longest - 1, 300) / 128)))
        rows = [0] * len(positions["rows"])
        cells = [[0, 0, 0] for _ in rows]
        for start, stop in itertools.pairwise(cu_seqlens.tolist()):
            for t in range(start, stop):
                if valid[t]:
                    rows[(t - start) // width] += 1
                    for i in range(3):
                        cells[(t - start) // width][i] += set(a[t, i]) != set(b[t, i])
        assert positions["rows"] == rows
        for n, counts, shares in zip(rows, cells, positions["cell_disagreement"], strict=True):
            assert shares == pytest.approx([x / n if n else math.nan for x in counts], nan_ok=True)


def test_field_90_one_changed_id():
    """field.md 90: one changed id in [T, L, K] is a rate of exactly 1 / (T * L * K), per layer."""
    rng = random.Random(90)
    for _ in range(20):
        t, n, k = rng.randint(1, 30), rng.randint(1, 6), rng.randint(1, 8)
        spec = RouterSpec(num_experts=k + 1, top_k=k, moe_layers=tuple(range(n)), num_layers=n)
        a = np.tile(np.arange(k, dtype=np.uint8), (t, n, 1))
        b = a.copy()
        row, layer = rng.randrange(t), rng.randrange(n)
        b[row, layer, rng.randrange(k)] = k
        found = RoutingDisagreement.between(a, b, np.ones(t, bool), spec)
        assert Fraction(found.expert_disagreement) == Fraction(float(Fraction(1, t * n * k)))
        shares = found.to_dict()["layers"]
        assert [x["expert_disagreement"] for x in shares] == [
            1 / (t * k) if i == layer else 0 for i in range(n)
        ]
        assert found.cell_disagreement == 1 / (t * n)
        assert found.token_disagreement == 1 / t


def test_levels_of_the_r3_paper():
    """Router, token and sequence level of arXiv 2510.11370, counted by hand."""
    spec = RouterSpec(num_experts=4, top_k=1, moe_layers=(0, 1), num_layers=2)
    # two sequences of 3 and 2 rows; the last token of each has no row
    cu_seqlens = np.array([0, 4, 7])
    a = np.zeros((7, 2, 1), np.uint8)
    b = a.copy()
    b[0] = 1  # both layers
    b[2, 1] = 1
    b[4, 0] = 1
    b[3] = b[6] = 3  # no rows: must not count
    valid = np.array([1, 1, 1, 0, 1, 1, 0], bool)
    found = RoutingDisagreement.between(a, b, valid, spec, cu_seqlens=cu_seqlens)
    assert found.left_out == 0
    assert found.cell_disagreement == 4 / 10
    assert found.layers_per_token.tolist() == [2, 2, 1]
    assert found.layers_per_token_mean == 4 / 5
    assert found.token_disagreement == 3 / 5
    # sequence level: (2 + 0 + 1) / 3 = 1 and (1 + 0) / 2 = 0.5
    assert found.sequence_level["mean"] == 0.75
    assert (found.sequence_level["p50"], found.sequence_level["max"]) == (0.75, 1.0)


def test_expert_load_and_its_violation():
    spec = RouterSpec(num_experts=4, top_k=2, moe_layers=(5,), num_layers=6)
    a = np.array([[[0, 1]], [[0, 2]], [[0, 1]]], np.uint8)
    b = np.array([[[0, 1]], [[3, 2]], [[0, 1]]], np.uint8)
    found = RoutingDisagreement.between(a, b, np.ones(3, bool), spec)
    assert found.load_a.tolist() == [[3, 2, 1, 0]]
    assert found.load_b.tolist() == [[2, 2, 1, 1]]
    # mean load 6 / 4 = 1.5
    assert max_violation(found.load_a).tolist() == [1.0]
    assert max_violation(found.load_b) == pytest.approx([2 / 1.5 - 1])
    assert found.to_dict()["swaps"] == [{"layer": 5, "from": 0, "to": 3, "cells": 1}]


def test_margins_of_cells_that_flip():
    """Bins are [2**i, 2**(i+1)), the lowest from 0 and the highest without end; NaN is left out."""
    spec = RouterSpec(num_experts=4, top_k=1, moe_layers=(0, 1), num_layers=2)
    margins = np.array(
        [[0.0, 2.0**-21], [2.0**-20, 0.75], [1.0, np.nan], [31.9, 32.0], [1e9, np.inf], [5, 5]],
        np.float32,
    )
    a = np.zeros((6, 2, 1), np.uint8)
    b = a.copy()
    b[0] = b[1, 1] = b[2, 1] = b[5] = 1
    valid = np.array([1, 1, 1, 1, 1, 0], bool)
    found = RoutingDisagreement.between(a, b, valid, spec, margins=margins).to_dict()["margins"]
    expected = {"cells": [0] * 27, "differing": [0] * 27}
    for row, layer in itertools.product(range(5), range(2)):
        m = float(margins[row, layer])
        if math.isnan(m):
            continue
        bins = [i for i, (x, y) in enumerate(itertools.pairwise(MARGIN_EDGES)) if x <= m < y]
        place = bins[0] if bins else 26
        expected["cells"][place] += 1
        expected["differing"][place] += int(a[row, layer, 0] != b[row, layer, 0])
    assert found["edges"] == list(MARGIN_EDGES)
    assert {k: found[k] for k in expected} == expected
    assert sum(expected["cells"]) == 9
    assert sum(expected["differing"]) == 3


def test_first_expert_where_the_order_is_known():
    spec = RouterSpec(num_experts=4, top_k=2, moe_layers=(0, 1), num_layers=2)
    a = np.array([[[0, 1], [0, 1]], [[2, 3], [2, 3]]], np.uint8)
    b = np.array([[[1, 0], [0, 1]], [[2, 3], [2, 0]]], np.uint8)
    every = np.ones(2, bool)
    found = RoutingDisagreement.between(a, b, every, spec, ordered=True).to_dict()
    assert (found["top1_changed"], found["cell_disagreement"]) == (1 / 4, 1 / 4)
    assert [x["top1_changed"] for x in found["layers"]] == [1 / 2, 0]
    unknown: dict[str, Any] = RoutingDisagreement.between(a, b, every, spec).to_dict()
    assert unknown["top1_changed"] is None


def test_nothing_compared_says_nothing():
    found = RoutingDisagreement.zero(SPEC).to_dict()
    assert found["rows"] == 0
    assert math.isnan(found["cell_disagreement"])
    assert math.isnan(found["max_vio_a"])
    assert found["positions"]["rows"] == []
    json.dumps(found)


def test_inputs_that_do_not_fit_are_refused():
    a = random_ids(np.random.default_rng(0), 4)
    every = np.ones(4, bool)
    with pytest.raises(TraceError, match="second routing: routed_experts has 3 rows, expected 4"):
        RoutingDisagreement.between(a, a[1:], every, SPEC)
    twice = a.copy()
    twice[2, 1] = 5
    with pytest.raises(TraceError, match=r"row 2, layer 2: experts \[5, 5\] name one expert twice"):
        RoutingDisagreement.between(a, twice, every, SPEC)
    with pytest.raises(TraceError, match=r"margins have shape \[4, 2\], expected \[rows=4"):
        RoutingDisagreement.between(a, a, every, SPEC, margins=np.zeros((4, 2)))
    with pytest.raises(TraceError, match="cu_seqlens"):
        RoutingDisagreement.between(a, a, every, SPEC, cu_seqlens=np.array([0, 3]))
    for wrong in (np.ones(4, np.int64), [True] * 4, np.ones((4, 1), bool)):
        with pytest.raises(TraceError, match="expected a bool array"):
            RoutingDisagreement.between(a, a, wrong, SPEC)
    with pytest.raises(TraceError, match="second routing is a list, expected a numpy array"):
        RoutingDisagreement.between(a, a.tolist(), every, SPEC)
    with pytest.raises(TraceError, match=r"a margin is -1.0, expected 0 or more"):
        RoutingDisagreement.between(a, a, every, SPEC, margins=np.full((4, 3), -1.0))
    other = RouterSpec(8, 2, (0, 1, 2), 4)
    d = RoutingDisagreement.between(a, a, every, SPEC)
    with pytest.raises(TraceError, match="cannot add"):
        _ = d + RoutingDisagreement.between(a, a, every, other)
