"""Known columns: forms, what is refused and by what name, and that they come back from a file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import r3
from r3 import Column, RolloutId, RouterSpec, RoutingTrace
from r3.columns import text_column
from r3.storage import ShardReader, ShardWriter

SPEC = RouterSpec(num_experts=16, top_k=2, moe_layers=(1, 2), num_layers=3)
N = 8  # a prompt of 3 tokens, an answer of 2, a reply of 1, an answer of 2
SEGMENTS = [0, 0, 0, 1, 1, 2, 1, 1]
DTYPES = {
    "segments": np.uint8,
    "turns": np.uint16,
    "rewards": np.float32,
    "kept_counts": np.uint32,
    "kept_ids": np.int32,
    "tags": np.uint8,
}


def build(n: int = N, logprobs: object = None, **columns: object) -> RoutingTrace:
    """A trace with known columns, given as lists."""
    scores = np.random.default_rng(0).random((n - 1, 2, 16))
    extra = {
        name: values
        if isinstance(values, Column)
        else Column(
            np.array(values, DTYPES[name]), "rollout" if name in ("kept_ids", "tags") else "token"
        )
        for name, values in columns.items()
    }
    return RoutingTrace.build(
        spec=SPEC,
        token_ids=10 + np.arange(n),
        routed_experts=scores.argsort(axis=-1)[..., :2],
        prompt_len=3,
        logprobs=logprobs,
        rollout_id=RolloutId("run"),
        extra=extra,
    )


def refused(words: str, **columns: object) -> None:
    with pytest.raises(r3.TraceError, match=f"rollout run/0/0/0/0: .*{words}"):
        build(**columns)


def test_a_column_of_the_rollout_has_any_length():
    for shape in ((0,), (1,), (3, 5), (100,)):
        column = build(any=Column(np.ones(shape), "rollout")).columns["any"]
        assert (column.align, column.data.shape) == ("rollout", shape)
    refused("'any' has shape .* at least one dimension", any=Column(np.array(3.0), "rollout"))
    refused("'any' has .* dtype object", any=Column(np.array([None]), "rollout"))


@pytest.mark.parametrize("name", DTYPES)
def test_forms_are_checked(name):
    right = "rollout" if name in ("kept_ids", "tags") else "token"
    for wrong in ("token", "row", "rollout"):
        if wrong != right:
            data = np.zeros(N - (wrong == "row"), DTYPES[name])
            refused(f"'{name}' is .*expected .{right}", **{name: Column(data, wrong)})
    refused(f"'{name}' is .*int64", **{name: Column(np.zeros(N, np.int64), right)})
    refused(f"'{name}' is .*2 axes", **{name: Column(np.zeros((N, 1), DTYPES[name]), right)})
    refused(f"'{name}' has version 2", **{name: Column(np.zeros(N, DTYPES[name]), right, 2)})
    if right == "token":
        data = np.zeros(N + 1, DTYPES[name])
        refused(f"'{name}' has shape .*expected 8 plain values", **{name: Column(data, right)})


def test_segments_say_what_was_sampled():
    trace = build()
    assert trace.segments is None
    assert trace.sampled.tolist() == [False] * 3 + [True] * 5
    trace = build(segments=SEGMENTS)
    assert trace.segments.tolist() == SEGMENTS
    assert trace.sampled.tolist() == [s == 1 for s in SEGMENTS]
    assert build(segments=[0, 2, 0, 2, 2, 1, 1, 2]).sampled.sum() == 2


@pytest.mark.parametrize(
    ("token", "segment", "words"),
    [
        (4, 3, r"token 4: segment 3, expected 1 \(answer\) or 2 \(reply\) behind the prompt of 3"),
        (1, 255, r"token 1: segment 255, expected 0 \(prompt\) or 2 \(reply\) in the prompt of 3"),
        (2, 1, "token 2: segment 1, expected 0"),
        (3, 0, "token 3: segment 0, expected 1"),
        (7, 0, "token 7: segment 0, expected 1"),
    ],
)
def test_segments_that_are_refused(token, segment, words):
    refused(words, segments=[*SEGMENTS[:token], segment, *SEGMENTS[token + 1 :]])


def test_log_probabilities_go_with_segments():
    nan = np.nan
    values = [nan, nan, nan, -1, -2, nan, -3, 0]
    trace = build(segments=SEGMENTS, logprobs=values)
    assert np.array_equal(trace.logprobs, np.array(values, np.float32), equal_nan=True)
    refused("token 5: log-probability nan, expected a finite number", logprobs=values)
    fed = [*values[:5], -1, -3, 0]
    refused("token 5: .*-1.0, expected NaN in a reply", segments=SEGMENTS, logprobs=fed)
    lost = [*values[:6], nan, 0]
    refused("token 6: .*nan, expected a finite", segments=SEGMENTS, logprobs=lost)
    early = [-1, *values[1:]]
    refused("token 0: .*-1.0, expected NaN in the prompt", segments=SEGMENTS, logprobs=early)


def test_turns_never_fall():
    assert build(turns=[0, 0, 0, 0, 0, 3, 3, 65535]).columns["turns"].data[-1] == 65535
    refused("token 6: turn 1, expected at least the 2", turns=[0, 0, 1, 1, 1, 2, 1, 1])


def test_rewards_are_finite_or_none():
    nan = np.nan
    build(rewards=[nan] * 7 + [-2.5])
    for value in (np.inf, -np.inf):
        refused(f"token 7: reward {value}, expected a finite", rewards=[nan] * 7 + [value])


# --- what the sampler kept


def test_kept_ids_hold_the_sampled_one():
    counts = [0, 0, 0, 2, 1, 0, 0, 3]
    ids = [9, 13, 14, 17, 0, 99]
    trace = build(segments=SEGMENTS, kept_counts=counts, kept_ids=ids)
    assert trace.columns["kept_ids"].data.tolist() == ids
    build(kept_counts=[0] * 8, kept_ids=[])
    wrong = {
        r"'kept_ids' is missing, expected with 'kept_counts'": (counts, None),
        r"'kept_counts' is missing, expected with 'kept_ids'": (None, ids),
        r"kept_ids has 5 ids, expected 6, the sum of kept_counts": (counts, ids[:5]),
        r"kept_ids has 6 ids, expected 4294967300": ([0, 0, 0, 2, 1, 0, 2, 2**32 - 1], ids),
        r"token 2: kept_counts 1, expected 0": ([0, 0, 1, 1, 1, 0, 0, 3], ids),
        r"token 5: kept_counts 1, expected 0": ([0, 0, 0, 1, 1, 1, 0, 3], ids),
        r"token 7: kept id -1, expected 0 or more": (counts, [9, 13, 14, 17, -1, 99]),
        r"token 4: kept id -9, expected 0 or more": (counts, [9, 13, -9, 17, 0, 99]),
        r"token 3: kept id -1, expected 0 or more": (counts, [-1, 13, 14, 17, 0, 99]),
        r"token 3: id 13 is not among the 2 ": (counts, [9, 14, 14, 17, 0, 99]),
        r"token 4: id 14 is not among the 1 ": (counts, [9, 13, 17, 17, 0, 99]),
        r"token 7: id 17 is not among the 3 ": (counts, [9, 13, 14, 14, 0, 99]),
    }
    for words, (c, i) in wrong.items():
        given_ = {"kept_counts": c, "kept_ids": i}
        refused(words, segments=SEGMENTS, **{k: v for k, v in given_.items() if v is not None})


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(3, 40))
@settings(max_examples=200, deadline=None)
def test_kept_ids_against_a_loop(seed, n):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, n)
    counts[:3] = 0
    ids = 10 + rng.integers(0, n, counts.sum())
    # each sampled id is put among its own in most of the examples
    starts = np.cumsum(counts) - counts
    for t in np.flatnonzero(counts):
        if rng.random() < 0.98:
            ids[starts[t] + rng.integers(counts[t])] = 10 + t
    lacking = [
        t for t in range(n) if counts[t] and 10 + t not in ids[starts[t] : starts[t] + counts[t]]
    ]
    if lacking:
        with pytest.raises(r3.TraceError, match=f"token {lacking[0]}: id {10 + lacking[0]} is not"):
            build(n, kept_counts=counts, kept_ids=ids)
    else:
        build(n, kept_counts=counts, kept_ids=ids)


# --- tags


@given(tags=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_tags_are_text(tags):
    assert build(tags=text_column(tags)).tags == tuple(tags)


def test_tags_that_are_refused():
    assert build().tags == ()
    for values in ("text", [1], [b"x"], [None], ["\ud800"]):
        with pytest.raises(r3.TraceError, match=r"tags are .*expected"):
            text_column(values)
    for data in (
        b"",
        b"[1]",
        b'{"a": 1}',
        b'"a"',
        b'["a", ["b"]]',
        b'["\xff"]',
        b'["a"',
        b'["\\ud800"]',
        b"[" * 100_000,
        json.dumps(["a"]).encode("utf-16"),
    ):
        column = Column(np.frombuffer(data, np.uint8), "rollout")
        refused("tags cannot be read .*expected a JSON list of text in UTF-8", tags=column)


# --- files


@given(
    segments=st.lists(st.sampled_from([1, 2]), min_size=5, max_size=5),
    turns=st.lists(st.integers(0, 2**16 - 1), min_size=N, max_size=N).map(sorted),
    rewards=st.lists(st.floats(width=32, allow_infinity=False), min_size=N, max_size=N),
    kept=st.lists(st.integers(0, 2**31 - 1), max_size=4),
    tags=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=3),
)
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_all_columns_come_back_from_a_file(tmp_path, segments, turns, rewards, kept, tags, shape):
    where = [3 + i for i, s in enumerate(segments) if s == 1][:1]
    counts = np.zeros(N)
    counts[where] = len(kept) + 1
    trace = build(
        segments=[0, 0, 0, *segments],
        turns=turns,
        rewards=rewards,
        kept_counts=counts,
        kept_ids=[*kept, 10 + where[0]] if where else [],
        tags=text_column(tags),
        other=Column(np.zeros(shape), "rollout", 7),
        logprobs=[np.nan] * 3 + [-1 if s == 1 else np.nan for s in segments],
    )
    path = tmp_path / "a.r3"
    path.unlink(missing_ok=True)
    with ShardWriter(path, SPEC) as writer:
        writer.append(trace)
    with ShardReader(path) as reader:
        found = reader[0]
    assert found.digest == trace.digest
    assert found.tags == tuple(tags)
    assert found.columns.keys() == trace.columns.keys()
    for name, column in trace.columns.items():
        other = found.columns[name]
        assert (other.align, other.version) == (column.align, column.version)
        assert other.data.dtype == column.data.dtype
        data = np.sort(column.data) if name == "routed_experts" else column.data
        assert np.array_equal(other.data, data, equal_nan=column.data.dtype.kind == "f")
