"""Quantiles: exact for few values, a DDSketch for many, and the same state for any partition."""

from __future__ import annotations

import base64
import json
import math
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import FormatError, TraceError
from r3.quantiles import Quantiles

# what log-ratios are: nothing, rounding, a tail, and beyond
SIZES = st.one_of(
    st.just(0.0),
    st.floats(1e-16, 1.0),
    st.floats(0, 1e3),
    st.sampled_from([1e-320, 1e-300, 800.0, 1e300]),
)


def state(q: Quantiles) -> str:
    return json.dumps(q.to_dict())


def order_statistic(values: list[float], q: float) -> float:
    return sorted(values)[math.floor(q * (len(values) - 1))]


@pytest.mark.slow
@settings(deadline=None)  # the first imports ddsketch
@given(
    st.lists(st.lists(SIZES, max_size=12), min_size=1, max_size=6),
    st.sampled_from([0, 1, 7, 20, 1000]),
    st.randoms(use_true_random=False),
)
def test_partition_and_order_are_not_seen(parts, exact, random):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quantiles, "EXACT", exact)
        values = [v for part in parts for v in part]
        whole = Quantiles.of(np.array(values))
        assert whole.is_exact == (len(values) <= exact)
        states = [Quantiles.of(np.array(random.sample(p, len(p)))) for p in parts]
        while len(states) > 1:  # any order, any nesting
            a = states.pop(random.randrange(len(states)))
            b = states.pop(random.randrange(len(states)))
            states.append(a + b)
        assert state(states[0]) == state(whole)
        again = Quantiles.from_dict(json.loads(state(whole)))
        assert state(again) == state(whole)
        for q in (0, 0.1, 0.5, 0.99, 1):
            assert again.quantile(q) == whole.quantile(q) or not values


@settings(deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=60), st.floats(0, 1))
def test_a_sketch_is_within_its_error_of_the_order_statistic(values, q):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quantiles, "EXACT", 0)
        sketch = Quantiles.of(np.array(values))
        true = order_statistic(values, q)
        # 1e-9: a value at the border of two buckets may fall into either
        assert sketch.quantile(q) == pytest.approx(true, rel=0.005 * (1 + 1e-9), abs=1e-307)
        assert min(values) <= sketch.quantile(q) <= max(values)
        assert (sketch.smallest, sketch.largest) == (min(values), max(values))


@settings(deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=60), st.lists(SIZES, max_size=9), st.booleans())
def test_survival(values, thresholds, exact):
    with pytest.MonkeyPatch.context() as patch:
        if not exact:
            patch.setattr(Quantiles, "EXACT", 0)
        found = Quantiles.of(np.array(values))
        thresholds = [*thresholds, -1.0, 0.0, values[0], max(values), math.inf]
        for t, share in zip(thresholds, found.survival(np.array(thresholds)), strict=True):
            most = sum(v > t for v in values) / len(values)
            # within a bucket above the threshold: a factor of 1.005 / 0.995, and its rounding
            limit = t if exact else max(t * (1.005 / 0.995) * (1 + 1e-9), 3e-308)
            least = sum(v > limit for v in values) / len(values)
            assert least - 1e-12 <= share <= most + 1e-12


def test_exact_quantiles_by_hand():
    found = Quantiles.of(np.array([3.0, 1.0, 0.0, 2.0]))
    assert found.is_exact
    assert found.count == 4
    assert [found.quantile(q) for q in (0, 0.5, 1)] == [0, 1.5, 3]
    assert found.quantile(0.9) == pytest.approx(2.7, rel=1e-15)  # 2 + 0.7 * (3 - 2)
    assert found.survival(np.array([-1, 0, 0.5, 1, 2.5, 3, 9])).tolist() == [
        *(1, 0.75, 0.75, 0.5, 0.25, 0, 0)
    ]


def test_the_border_between_exact_and_sketch():
    values = np.linspace(0, 1, Quantiles.EXACT + 1)
    below, above = Quantiles.of(values[1:]), Quantiles.of(values)
    assert (below.is_exact, above.is_exact) == (True, False)
    assert below.quantile(0.25) == np.quantile(values[1:], 0.25)
    assert above.quantile(0.25) == pytest.approx(0.25, rel=0.005)
    assert state(below + Quantiles.of(values[:1])) == state(above)
    # a hundred times as many values, in the same space
    many = above
    for _ in range(7):
        many = many + many
    assert many.count == 128 * len(values)
    assert many.quantile(0.99) == pytest.approx(0.99, rel=0.005)
    assert len(state(many)) < 20_000


def test_a_value_of_zero_of_either_sign_is_the_same():
    assert state(Quantiles.of(np.array([0.0, -0.0]))) == state(Quantiles.of(np.array([-0.0, 0.0])))


def test_none():
    none = Quantiles.of(np.zeros(0))
    assert none.count == 0
    assert none.is_exact
    assert math.isnan(none.quantile(0.5))
    assert np.isnan(none.survival(np.array([0.0, 1.0]))).all()
    some = Quantiles.of(np.array([1.0]))
    assert state(none + some) == state(some + none) == state(some)
    assert state(Quantiles.from_dict(none.to_dict())) == state(none)


def test_states_do_not_change():
    values = np.array([2.0, 1.0])
    found = Quantiles.of(values)
    before = state(found)
    values[0] = 9
    _ = found + found
    assert state(found) == before
    with pytest.raises(ValueError, match="read-only"):
        found.values[0] = 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, math.nan], "value 1 is nan, expected a finite number of at least 0"),
        ([1, math.inf], "value 1 is inf"),
        ([0, 2, -1e-9], "value 2 is -1e-09"),
        ([[1.0]], r"shape \[1, 1\], expected \[n\]"),
        (["a"], "values is not an array"),
    ],
)
def test_values_that_are_refused(values, message):
    with pytest.raises(TraceError, match=message):
        Quantiles.of(np.array(values))


def test_questions_that_are_refused():
    found = Quantiles.of(np.array([1.0]))
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(TraceError, match="expected 0 to 1"):
            found.quantile(q)
    with pytest.raises(TraceError, match="expected"):
        found.survival(np.array([math.nan]))


def floats(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}d", *values)).decode()


SKETCH = {
    **{"count": 3, "relative_error": 0.005, "smallest": 1.0, "largest": 1.01},
    **{"zeros": 0, "keys": [0, 1], "counts": [1, 2]},
}


def test_a_sketch_as_it_is_written():
    found = Quantiles.from_dict(SKETCH)
    assert found.to_dict() == SKETCH
    # gamma = 1.005 / 0.995; bucket 1 is (1, gamma], its value 2 * gamma / (1 + gamma)
    assert found.quantile(1) == pytest.approx(1.005, rel=1e-12)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (None, "expected count and values"),
        ([], "expected count and values"),
        ({"count": 1}, "expected count and values"),
        ({"count": 1, "values": 3}, "cannot be read"),
        ({"count": 1, "values": "@@"}, "cannot be read"),
        ({"count": 1, "values": "AAA="}, "cannot be read"),
        ({"count": 2, "values": floats(1.0)}, "1 values and count 2"),
        ({"count": True, "values": floats(1.0)}, "1 values and count True"),
        ({"count": 1, "values": floats(math.nan)}, "not finite"),
        ({"count": 1, "values": floats(-1.0)}, "not finite"),
        ({"count": 1, "values": floats(-0.0)}, "not finite"),
        ({"count": 2, "values": floats(2.0, 1.0)}, "not ascending"),
        ({**SKETCH, "relative_error": 0.01}, "relative_error is 0.01, expected 0.005"),
        ({**SKETCH, "keys": [1, 0]}, "ascend"),
        ({**SKETCH, "keys": [1, 1]}, "ascend"),
        ({**SKETCH, "keys": [0, 10**9]}, "keys: expected -"),
        ({**SKETCH, "keys": [0, 10**30]}, "keys: expected -"),
        ({**SKETCH, "keys": [0, 1.5]}, "keys: expected integers"),
        ({**SKETCH, "keys": "01"}, "keys: expected integers"),
        ({**SKETCH, "keys": [0]}, "ascend"),
        ({**SKETCH, "counts": [3, 0]}, "positive count"),
        ({**SKETCH, "counts": [1, True]}, "counts: expected integers"),
        ({**SKETCH, "counts": [1, 2**63 - 1], "count": 2**63}, r"expected less than 2\*\*63"),
        ({**SKETCH, "zeros": 2**63 - 3, "count": 2**63}, r"expected less than 2\*\*63"),
        ({**SKETCH, "count": 10**5000}, "cannot be read"),
        ({**SKETCH, "count": 4}, "count is 4, zeros and counts sum to 3"),
        ({**SKETCH, "zeros": -1, "count": 2}, "zeros < 0"),
        ({**SKETCH, "smallest": "1"}, "expected numbers"),
        ({**SKETCH, "smallest": 2.0}, "ascending"),
        ({**SKETCH, "largest": math.inf}, "ascending"),
        ({**SKETCH, "more": 1}, "expected count and values"),
    ],
)
def test_what_no_state_writes_is_refused(changed, message):
    with pytest.raises(FormatError, match=message):
        Quantiles.from_dict(changed)


@pytest.mark.parametrize("key", [*SKETCH, "values"])
def test_depth_takes_no_stack(key):
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    found = {"count": 1, "values": deep} if key == "values" else {**SKETCH, key: deep}
    for value in (found, deep):
        with pytest.raises(FormatError, match="quantiles cannot be read"):
            Quantiles.from_dict(value)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(SKETCH)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda x: st.lists(x, max_size=3),
    ),
)
def test_whatever_is_read_can_be_used_or_is_refused(key, value):
    try:
        found = Quantiles.from_dict({**SKETCH, key: value})
    except FormatError:
        return
    assert found.smallest <= found.quantile(0.5) <= found.largest
    assert state(found + found) == state(found + Quantiles.from_dict(found.to_dict()))


def test_the_sketch_library_is_imported_when_needed():
    code = (
        "import sys, numpy as np; from r3.quantiles import Quantiles; "
        "Quantiles.of(np.ones(9)).quantile(0.5); assert 'ddsketch' not in sys.modules; "
        "Quantiles.of(np.ones(Quantiles.EXACT + 1)); assert 'ddsketch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
