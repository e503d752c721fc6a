"""Multi-turn conversations: a trace extended by the requests that followed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import r3
from r3 import Column, Provenance, RolloutId, RouterSpec, RoutingTrace
from r3.columns import text_column

SPEC = RouterSpec(num_experts=64, top_k=2, moe_layers=(1, 3), num_layers=4)


def request(n: int, prompt_len: int, turn: int = 0, **changes: object) -> RoutingTrace:
    """What an engine returned for one request. Token t has id t, so that turns fit together."""
    scores = np.random.default_rng(turn).random((n - 1, 2, 64))
    values = {
        "spec": SPEC,
        "token_ids": np.arange(n),
        "routed_experts": scores.argsort(axis=-1)[..., :2],
        "prompt_len": prompt_len,
        "rollout_id": RolloutId("talk", turn=turn),
    }
    return RoutingTrace.build(**(values | changes))


def same(a: RoutingTrace, b: RoutingTrace) -> bool:
    return (a.digest, a.rollout_id, a.provenance) == (b.digest, b.rollout_id, b.provenance)


@st.composite
def conversations(draw: st.DrawFn) -> list[RoutingTrace]:
    """Three requests, each with the whole history as its prompt; all of them have some columns."""
    names = draw(st.sets(st.sampled_from(["logprobs", "versions", "rewards", "kept", "own"])))
    requests, n = [], 0
    for turn in range(3):
        prompt = n + draw(st.integers(0, 3))
        n = max(prompt + draw(st.integers(0, 3)), 1)
        rows = {"min_size": n - 1, "max_size": n - 1}
        sampled = np.arange(n) >= prompt
        valid = draw(st.just([True] * (n - 1)) | st.lists(st.booleans(), **rows))
        more: dict[str, object] = {"valid": np.array(valid, bool)}
        extra = {}
        if "logprobs" in names:
            more["logprobs"] = -1.0 - turn - np.arange(n - prompt)
        if "versions" in names:
            more["weight_versions"] = np.array(draw(st.lists(st.integers(0, 9), **rows)), int)
        if "rewards" in names:
            extra["rewards"] = Column(np.full(n, turn, np.float32), "token")
        if "kept" in names:
            ids = np.stack([np.arange(n), np.full(n, 900 + turn)], axis=-1)[sampled]
            extra["kept_counts"] = Column(2 * sampled.astype(np.uint32), "token")
            extra["kept_ids"] = Column(ids.reshape(-1).astype(np.int32), "rollout")
        if "own" in names:
            extra["of_tokens"] = Column(turn * 1000 + np.arange(3 * n).reshape(n, 3), "token", 4)
            extra["of_rows"] = Column(turn * 1000 + np.arange(n - 1), "row", 5)
            extra["of_all"] = Column(np.full(turn, turn), "rollout", 6)
        if draw(st.booleans()):  # a request may say what its tokens are; its last one was fed here
            segments = sampled.astype(np.uint8)
            if "logprobs" not in names and "kept" not in names and sampled.any():
                segments[-1] = 2
            extra["segments"] = Column(segments, "token")
        requests.append(request(n, prompt, turn, extra=extra, **more))
    return requests


@pytest.mark.slow
@given(requests=conversations())
@settings(max_examples=300, deadline=None)
def test_each_value_comes_from_where_it_should(requests):
    """Against a loop over tokens and rows, and put together in either order."""
    before = [(t.digest, t.columns.keys()) for t in requests]
    first, second, third = requests
    made = first.extend(second).extend(third)
    assert same(made, first.extend(second.extend(third)))
    assert [(t.digest, t.columns.keys()) for t in requests] == before

    assert made.prompt_len == first.prompt_len
    assert made.rollout_id == third.rollout_id
    assert (made.token_ids == third.token_ids).all()
    kept_ids: list[int] = []
    for token in range(made.num_tokens):
        turn = next(i for i, t in enumerate(requests) if token < t.num_tokens)
        source = requests[turn]
        # one that adds no token is not the turn of any
        lengths = [0] + [t.num_tokens for t in requests]
        real = [i for i in range(3) if i == 0 or lengths[i + 1] > lengths[i]]
        assert made.columns["turns"].data[token] == real.index(turn)
        assert made.sampled[token] == source.sampled[token]
        if token < first.prompt_len:
            assert made.segments[token] == 0
        elif not source.sampled[token]:
            assert made.segments[token] == 2
        for name in ("logprobs", "rewards", "kept_counts", "of_tokens"):
            assert (name in made.columns) == (name in source.columns)
            if name in made.columns:
                data = (t.columns[name].data[token] for t in (made, source))
                assert np.array_equal(*data, equal_nan=True)
        if "kept_counts" in made.columns and made.columns["kept_counts"].data[token]:
            kept_ids += [token, 900 + turn]
    if "kept_ids" in made.columns:
        assert made.columns["kept_ids"].data.tolist() == kept_ids
    for row in range(made.num_rows):
        having = [t for t in requests if row < t.num_rows and t.valid[row]]
        assert made.valid[row] == bool(having)
        source = having[0] if having else third
        assert (made.routed_experts[row] == source.routed_experts[row]).all()
        for name in ("weight_versions", "of_rows"):
            if name in third.columns:
                assert made.columns[name].data[row] == source.columns[name].data[row]
    if "of_all" in made.columns:
        assert made.columns["of_all"].data.tolist() == [2, 2]
        assert [made.columns[c].version for c in ("of_tokens", "of_rows", "of_all")] == [4, 5, 6]


def test_three_turns_with_a_tool():
    first = request(5, 3, 0, logprobs=[-1, -2], weight_versions=1)
    second = request(9, 7, 1, logprobs=[-3, -4], weight_versions=2)
    third = request(11, 10, 2, logprobs=[-5], weight_versions=2, provenance=Provenance("vllm"))
    trace = first.extend(second).extend(third)
    nan = np.nan
    expected = np.array([nan, nan, nan, -1, -2, nan, nan, -3, -4, nan, -5], np.float32)
    assert np.array_equal(trace.logprobs, expected, equal_nan=True)
    assert trace.segments.tolist() == [0, 0, 0, 1, 1, 2, 2, 1, 1, 2, 1]
    assert trace.columns["turns"].data.tolist() == [0] * 5 + [1] * 4 + [2] * 2
    assert trace.weight_versions.tolist() == [1] * 4 + [2] * 6
    assert trace.provenance == third.provenance
    for rows, source in ((slice(0, 4), first), (slice(4, 8), second), (slice(8, 10), third)):
        assert (trace.routed_experts[rows] == source.routed_experts[rows]).all()
    assert trace.extend(request(11, 11, 3, logprobs=[])).digest != trace.digest  # no versions
    again = request(11, 11, 3, logprobs=[], weight_versions=9)
    assert trace.extend(again).digest == trace.digest  # it adds nothing


def test_turn_numbers_go_on():
    def numbered(trace: RoutingTrace, numbers: list[int]) -> RoutingTrace:
        columns = {**trace.columns, "turns": Column(np.array(numbers, np.uint16), "token")}
        return RoutingTrace(SPEC, trace.prompt_len, columns, trace.rollout_id)

    def turns(trace: RoutingTrace) -> list[int]:
        return trace.columns["turns"].data.tolist()

    first, second = request(3, 2), request(6, 4, 1)
    assert turns(numbered(first, [3, 3, 4]).extend(second)) == [3, 3, 4, 5, 5, 5]
    assert turns(first.extend(numbered(second, [0, 0, 0, 7, 7, 9]))) == [0, 0, 0, 1, 1, 3]
    with pytest.raises(r3.TraceError, match=r"turn 65536, expected less than 2\*\*16"):
        numbered(first, [0, 0, 65535]).extend(second)


def test_columns_that_only_one_has():
    plain, nan = [request(3, 2), request(6, 4, 1)], np.nan
    with_rewards = [
        request(n, p, i, extra={"rewards": Column(np.full(n, i, np.float32), "token")})
        for i, (n, p) in enumerate([(3, 2), (6, 4)])
    ]
    found = with_rewards[0].extend(plain[1]).columns["rewards"].data
    assert np.array_equal(found, [0, 0, 0, nan, nan, nan], equal_nan=True)
    found = plain[0].extend(with_rewards[1]).columns["rewards"].data
    assert found.tolist() == [1] * 6
    for versions in ((1, None), (None, 1)):
        pair = [request(3, 2, weight_versions=versions[0])]
        pair.append(request(6, 4, 1, weight_versions=versions[1]))
        assert pair[0].extend(pair[1]).weight_versions is None
    # log-probabilities of nothing need not be there
    only_prompt = request(3, 3).extend(request(6, 4, 1, logprobs=[-1, -2]))
    assert np.array_equal(only_prompt.logprobs, [nan] * 4 + [-1, -2], equal_nan=True)
    no_answer = request(3, 2, logprobs=[-1]).extend(request(6, 6, 1))
    assert np.array_equal(no_answer.logprobs, [nan, nan, -1, nan, nan, nan], equal_nan=True)
    # what was kept is not known for the others
    counts, ids = Column(np.array([0, 0, 2], np.uint32), "token"), np.array([2, 9], np.int32)
    kept = {"kept_counts": counts, "kept_ids": Column(ids, "rollout")}
    trace = request(3, 2, extra=kept).extend(plain[1])
    assert trace.columns["kept_counts"].data.tolist() == [0, 0, 2, 0, 0, 0]
    assert trace.columns["kept_ids"].data.tolist() == [2, 9]
    tagged = request(6, 4, 1, extra={"tags": text_column(["a"])})
    assert plain[0].extend(tagged).tags == ("a",)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {"token_ids": [0, 1, 7, 3, 4, 5]}, "token 2: the turn has id 7, expected 2"),
        ({}, {"prompt_len": 2}, "token 2: the turn has a prompt of 2 of its 6 tokens, .* least"),
        ({}, {"n": 2, "prompt_len": 2}, "the turn has a prompt of 2 of its 2 tokens, .* the 3 "),
        ({"logprobs": [-1]}, {}, "'logprobs' is only in rollout talk/0/0/0/0, expected it in "),
        ({}, {"logprobs": [-1, -1]}, "'logprobs' is only in rollout talk/0/0/1/0, expected it in"),
        ({"extra": {"a": Column(np.ones(3), "token")}}, {}, "'a' is only in rollout talk/0/0/0/0"),
        ({"extra": {"a": Column(np.ones(2), "row")}}, {}, "'a' is only in rollout talk/0/0/0/0"),
        ({}, {"extra": {"a": Column(np.ones(6), "token")}}, "'a' is only in rollout talk/0/0/1/0"),
        ({"extra": {"tags": text_column([])}}, {}, "'tags' is only in rollout talk/0/0/0/0"),
        *(
            (
                {"extra": {"a": Column(np.ones(3, "f4"), "token")}},
                {"extra": {"a": other}},
                r"the turn's column 'a' is .*, expected \('token', 1, 'float32', \[\]\)",
            )
            for other in (
                Column(np.ones(6, "f8"), "token"),
                Column(np.ones((6, 2), "f4"), "token"),
                Column(np.ones(5, "f4"), "row"),
                Column(np.ones(6, "f4"), "rollout"),
                Column(np.ones(6, "f4"), "token", 2),
            )
        ),
    ],
)
def test_what_is_refused(first, second, words):
    trace = request(**({"n": 3, "prompt_len": 2, "turn": 0} | first))
    turn = request(**({"n": 6, "prompt_len": 4, "turn": 1} | second))
    names = "rollout talk/0/0/0/0, extended by talk/0/0/1/0: "
    with pytest.raises(r3.TraceError, match=f"{names}.*{words}"):
        trace.extend(turn)


def test_other_routers_are_refused():
    other = RouterSpec(num_experts=64, top_k=2, moe_layers=(1, 2), num_layers=4)
    with pytest.raises(r3.SpecError, match=r"extended by .*\(1, 2\).*expected.*\(1, 3\)"):
        request(3, 2).extend(request(6, 4, 1, spec=other))
