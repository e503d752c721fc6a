"""Traces from more than one source: prefill and decode engines, and physical expert ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import r3
from r3 import Column, Provenance, RolloutId, RouterSpec, RoutingTrace, merge_prefill_decode

SPEC = RouterSpec(num_experts=16, top_k=2, moe_layers=(1, 3), num_layers=4)


def random_ids(rows: int, seed: int = 0) -> np.ndarray:
    scores = np.random.default_rng(seed).random((rows, 2, 16))
    return scores.argsort(axis=-1)[..., :2]


def build(n: int, name: str = "d", seed: int = 0, **changes: object) -> RoutingTrace:
    values = {
        "spec": SPEC,
        "token_ids": np.arange(n),
        "routed_experts": random_ids(n - 1, seed),
        "prompt_len": 4,
        "rollout_id": RolloutId(name),
    }
    return RoutingTrace.build(**(values | changes))


# --- prefill and decode


@given(
    prompt=st.integers(0, 6),
    sampled=st.integers(1, 5),
    prefilled=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_each_row_comes_from_where_it_should(prompt, sampled, prefilled, data):
    """Against a loop over rows."""
    n, p = prompt + sampled, prompt + min(prefilled, sampled)
    if n == 0:
        n = 1
    masks = [
        np.array(data.draw(st.lists(st.booleans(), min_size=k - 1, max_size=k - 1)), bool)
        for k in (p, n)
    ]
    versions = data.draw(st.tuples(st.booleans(), st.booleans()))
    prefill, decode = (
        build(
            k,
            str(i),
            seed=i,
            prompt_len=prompt,
            valid=masks[i],
            weight_versions=5 + i if versions[i] else None,
        )
        for i, k in enumerate((p, n))
    )
    merged = merge_prefill_decode(prefill, decode)
    assert merged.rollout_id == decode.rollout_id
    assert (merged.weight_versions is not None) == all(versions)
    believed = not decode.valid[:prompt].all()
    for row in range(n - 1):
        own = row >= prompt or not prefill.valid[row] or (believed and decode.valid[row])
        source = decode if own else prefill
        assert merged.valid[row] == source.valid[row]
        assert (merged.routed_experts[row] == source.routed_experts[row]).all()
        if all(versions):
            assert merged.weight_versions[row] == source.weight_versions[row]


def test_the_rest_is_that_of_decode():
    prefill = build(
        5, "p", 1, logprobs=[-9.0], provenance=Provenance(engine="x", parallel={"tensor": 4})
    )
    decode = build(
        8,
        logprobs=-np.arange(4),
        extra={"reward": Column(np.arange(8), "token")},
        provenance=Provenance(engine="y", extra={"node": 3}),
    )
    merged = merge_prefill_decode(prefill, decode)
    assert merged.prompt_len == 4
    assert (merged.token_ids == decode.token_ids).all()
    assert np.array_equal(merged.logprobs, decode.logprobs, equal_nan=True)
    assert (merged.columns["reward"].data == np.arange(8)).all()
    prefill_made = {"engine": "x", "parallel": {"tensor": 4}}
    expected = Provenance(engine="y", extra={"node": 3, "prefill": prefill_made})
    assert merged.provenance == expected
    assert Provenance.from_dict(merged.provenance.to_dict()) == expected
    assert "valid" not in merged.columns


def test_rows_that_nobody_has_stay_missing():
    prefill = build(5, "p", 1, valid=np.array([True, False, True, True]))
    decode = build(8, valid=np.array([False] * 4 + [True, False, True]))
    merged = merge_prefill_decode(prefill, decode)
    assert np.flatnonzero(~merged.valid).tolist() == [1, 5]
    assert not merged.routed_experts[[1, 5]].any()


def test_a_sampled_token_may_differ():
    """The decode engine samples the first token again; the prompt's rows do not depend on it."""
    prefill = build(5, "p", 1, token_ids=[0, 1, 2, 3, 77])
    assert merge_prefill_decode(prefill, build(8)).token_ids[4] == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": 5, "prompt_len": 5}, r"a prompt of 5 tokens, expected decode's 4"),
        ({"n": 5, "token_ids": [0, 1, 9, 3, 4]}, "token 2: prefill has id 9, expected decode's 2"),
        ({"n": 4}, "token 3: prefill has 3 rows, expected 4 for the prompt"),
        ({"n": 5, "spec": RouterSpec(16, 2, (1, 2), 4)}, r"\(1, 2\).*expected.*\(1, 3\)"),
    ],
    ids=["prompt_len", "tokens", "rows", "spec"],
)
def test_what_is_refused(changes, words):
    prefill = build(name="p", **changes)
    message = rf"decode rollout d/0/0/0/0, prefill rollout p/0/0/0/0: .*{words}"
    with pytest.raises(r3.TraceError, match=message):
        merge_prefill_decode(prefill, build(8))


# --- physical ids


SLOTS = np.array([*range(16), 3, 5, 3, 0])  # four slots for copies


@given(seed=st.integers(0, 99), shared=st.booleans(), lost=st.sets(st.integers(0, 6)))
@settings(max_examples=50, deadline=None)
def test_physical_ids_are_mapped(seed, shared, lost):
    """Logical ids, put into any of their slots, come back; missing rows stay missing."""
    rng = np.random.default_rng(seed)
    maps = np.stack([SLOTS, SLOTS] if shared else [rng.permutation(SLOTS) for _ in range(2)])
    logical = random_ids(7, seed)
    physical = np.empty_like(logical)
    for (row, layer, k), expert in np.ndenumerate(logical):
        physical[row, layer, k] = rng.choice(np.flatnonzero(maps[layer] == expert))
    physical[list(lost)] = -1
    trace = build(8, routed_experts=physical, physical_to_logical=SLOTS if shared else maps)
    assert (~trace.valid).nonzero()[0].tolist() == sorted(lost)
    assert (trace.routed_experts[trace.valid] == logical[trace.valid]).all()


def test_physical_ids_of_all_decoder_layers_and_of_missing_rows():
    wide = np.zeros((7, 4, 2), np.uint8)
    wide[:, [1, 3]] = 16, 17
    valid = np.arange(7) != 2
    wide[2] = 200  # whatever stands in a missing row
    trace = build(8, routed_experts=wide, valid=valid, physical_to_logical=SLOTS)
    assert (trace.routed_experts[valid] == [3, 5]).all()


def test_ids_and_maps_that_are_refused():
    def refused(words: str, ids: np.ndarray, table: object = SLOTS) -> None:
        with pytest.raises(r3.TraceError, match=f"rollout d/0/0/0/0: {words}"):
            build(8, routed_experts=ids, physical_to_logical=table)

    ids = random_ids(7)
    outside = ids.copy()
    outside[4, 1, 0] = 20
    refused(r"row 4, layer 3: physical id 20, expected 0\.\.19", outside)
    outside[4, 1, 0] = -2
    refused(r"row 4, layer 3: physical id -2", outside)
    outside[4, 1, 0] = -1
    refused(r"row 4, layer 3: expert id -1.*missing as a whole", outside)
    twice = ids.copy()
    twice[5, 0] = [16, 18]
    refused(r"row 5, layer 1: experts \[3, 3\] name one expert twice", twice)
    wrong = np.stack([SLOTS, SLOTS])
    wrong[1, 7] = 16
    refused(r"physical_to_logical, layer 3: slot 7 holds expert 16, expected 0\.\.15", ids, wrong)
    refused(r"physical_to_logical has shape \[3, 20\]", ids, np.stack([SLOTS] * 3))
    refused(r"physical_to_logical has shape \[20\] and dtype float64", ids, SLOTS.astype(float))
    refused(r"physical_to_logical has shape \[0\]", ids, np.array([], int))
    refused(r"routed_experts has 6 rows, expected 7", ids[:6])
    refused(r"routed_experts has dtype float64", ids.astype(float))
