"""Public bugs of conversations with several turns, as far as traces can see them.

Each test is named by the number of the bug in the project's list. Arrays only: the bugs are
rebuilt from their symptoms, no engine runs here.
"""

from __future__ import annotations

import numpy as np
import pytest

import r3
from r3 import RolloutId, RouterSpec, RoutingTrace

TOY = RouterSpec(num_experts=8, top_k=2, moe_layers=(0, 1, 2, 3), num_layers=4)


def random_ids(rows: int, seed: int) -> np.ndarray:
    scores = np.random.default_rng(seed).random((rows, 4, 8))
    return scores.argsort(axis=-1)[..., :2]


def request(ids: np.ndarray, tokens: int, prompt_len: int, **more: object) -> RoutingTrace:
    return RoutingTrace.build(
        spec=TOY,
        token_ids=np.arange(tokens),
        routed_experts=ids,
        prompt_len=prompt_len,
        rollout_id=RolloutId("case"),
        **more,
    )


def test_4_row_at_the_boundary_of_two_turns():
    """Arrays only. Turn 1: 5 tokens, 4 rows; turn 2: 9 tokens, 8 rows; only it has row 4."""
    first, second = random_ids(4, 1), random_ids(8, 2)
    trace = request(first, 5, 3).extend(request(second, 9, 7))
    assert trace.valid.all()
    assert (trace.routed_experts[:4] == first).all()
    assert (trace.routed_experts[4:] == second[4:]).all()
    # the zeros that stood for it are refused as content, and replaced if they are masked
    padded = np.concatenate([first, np.zeros((1, 4, 2), int)])
    with pytest.raises(r3.TraceError, match=r"row 4, layer 0: experts \[0, 0\]"):
        request(padded, 6, 3)
    masked = request(padded, 6, 3, valid=np.arange(5) < 4)
    trace = masked.extend(request(second, 9, 7))
    assert trace.valid.all()
    assert (trace.routed_experts[4:] == second[4:]).all()


def test_47_history_computed_again_by_the_next_turn():
    """Arrays only. Two versions of rows 0 to 5: the first go with the log-probabilities."""
    first, again = random_ids(6, 1), random_ids(11, 2)
    one = request(first, 7, 2, logprobs=[-1.0] * 5, weight_versions=1)
    two = request(again, 12, 9, logprobs=[-2.0] * 3, weight_versions=2)
    trace = one.extend(two)
    assert (trace.routed_experts == np.concatenate([first, again[6:]])).all()
    assert trace.weight_versions.tolist() == [1] * 6 + [2] * 5
    assert trace.mixes_weights
    nan = np.nan
    expected = [nan] * 2 + [-1] * 5 + [nan] * 2 + [-2] * 3
    assert np.array_equal(trace.logprobs, np.array(expected, np.float32), equal_nan=True)


def test_51_resumed_with_overlapping_rows():
    """Arrays only. 4 + 7 rows for 8 tokens: 3 are appended, none doubled or overwritten."""
    first, resumed = random_ids(4, 1), random_ids(7, 2)
    before, after = request(first, 5, 2), request(resumed, 8, 5)
    trace = before.extend(after)
    assert (trace.routed_experts == np.concatenate([first, resumed[4:]])).all()
    assert trace.segments.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]  # resumed: nothing was fed
    # the wrong way round is refused
    with pytest.raises(r3.TraceError, match="prompt of 2 of its 5 tokens, expected at least the 8"):
        after.extend(before)


def test_63_rows_of_new_tokens_only():
    """Arrays only. 12 tokens, the caller has 10 rows: the turn sends row 10, the others as -1."""
    whole = random_ids(11, 1)
    delta = whole.copy()
    delta[:10] = -1
    trace = request(whole[:10], 11, 4).extend(request(delta, 12, 11))
    assert trace.valid.all()
    assert (trace.routed_experts == whole).all()
