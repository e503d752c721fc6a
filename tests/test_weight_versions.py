"""The weights behind each row: the column, what is refused, and that it comes back from a file."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import r3
from r3 import Column, RolloutId, RouterSpec, RoutingTrace
from r3.cli.inspect import render, summarize
from r3.storage import ShardReader, ShardWriter

SPEC = RouterSpec(num_experts=16, top_k=2, moe_layers=(1, 2), num_layers=3)


def build(n: int = 12, name: str = "run", **changes: object) -> RoutingTrace:
    scores = np.random.default_rng(0).random((n - 1, 2, 16))
    values = {
        "spec": SPEC,
        "token_ids": np.arange(n),
        "routed_experts": scores.argsort(axis=-1)[..., :2],
        "prompt_len": min(3, n),
        "rollout_id": RolloutId(name),
    }
    return RoutingTrace.build(**(values | changes))


def test_one_version_or_one_per_row():
    assert build().weight_versions is None
    assert not build().mixes_weights
    assert build().version_range is None
    trace = build(weight_versions=7)
    assert trace.weight_versions.dtype == np.int64
    assert trace.weight_versions.tolist() == [7] * 11
    assert not trace.mixes_weights
    assert "mixes" not in repr(trace)
    versions = np.array([3] * 5 + [4] * 6, np.uint8)
    trace = build(weight_versions=versions)
    versions[:] = 0
    assert trace.version_range == (3, 4)
    assert trace.mixes_weights
    assert "mixes weight versions 3 to 4" in repr(trace)
    assert build(1, weight_versions=7).weight_versions.tolist() == []


def test_missing_rows_have_no_version():
    valid = np.ones(11, bool)
    valid[[0, 4]] = False
    trace = build(valid=valid, weight_versions=[9, 1, 1, 1, 9] + [1] * 6)
    assert trace.weight_versions.tolist() == [-1, 1, 1, 1, -1] + [1] * 6
    assert not trace.mixes_weights  # what a missing row was given is no version
    lost = build(valid=np.zeros(11, bool), weight_versions=2)
    assert lost.version_range is None


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ([1] * 12, r"shape \[12\].*expected one integer or 11"),
        ([1.0] * 11, "float64"),
        (True, "bool"),
        ("v1", "dtype <U2"),
        (2**63, r"version 9223372036854775808, expected less than 2\*\*63"),
        (-1, "row 0: weight version -1, expected 0 or more"),
        ([1] * 6 + [-3] + [1] * 4, "row 6: weight version -3, expected 0 or more"),
    ],
)
def test_what_is_refused(versions, words):
    with pytest.raises(r3.TraceError, match=f"rollout run/0/0/0/0.*{words}"):
        build(weight_versions=versions)


def test_columns_given_directly_are_checked():
    valid = np.ones(11, bool)
    valid[4] = False
    columns = dict(build(valid=valid).columns)
    for values, words in (
        (np.ones(11, np.int64), "row 4: weight version 1, expected -1, as the row is missing"),
        (np.ones(11, np.int32), r"int32, 1 axes\), expected \(row, int64, 1 axes"),
        (np.ones(10, np.int64), r"shape \[10\].*expected 11 plain values"),
    ):
        with pytest.raises(r3.TraceError, match=words):
            RoutingTrace(SPEC, 3, columns | {"weight_versions": Column(values, "row")})
    wrong = Column(np.ones(12, np.int64), "token")
    with pytest.raises(r3.TraceError, match="aligned to token"):
        RoutingTrace(SPEC, 3, columns | {"weight_versions": wrong})


def test_digest_depends_on_versions():
    made = [None, 1, 2, [1] * 6 + [2] * 5]
    assert len({build(weight_versions=v).digest for v in made}) == 4


@given(data=st.data(), n=st.integers(1, 12))
@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_versions_come_back_from_a_file(tmp_path, data, n):
    rows = {"min_size": n - 1, "max_size": n - 1}
    versions = data.draw(st.lists(st.integers(0, 2**63 - 1), **rows))
    valid = np.array(data.draw(st.lists(st.booleans(), **rows)), bool)
    trace = build(n, valid=valid, weight_versions=np.array(versions, np.int64))
    path = tmp_path / "a.r3"
    path.unlink(missing_ok=True)
    with ShardWriter(path, SPEC) as writer:
        writer.append(trace)
    with ShardReader(path) as reader:
        found = reader[0]
    assert found.digest == trace.digest
    assert found.weight_versions.dtype == np.int64
    expected = [v if ok else -1 for v, ok in zip(versions, valid, strict=True)]
    assert found.weight_versions.tolist() == expected
    assert found.mixes_weights == (len(set(expected) - {-1}) > 1)


def test_inspect_counts_traces_that_mix(tmp_path):
    path = tmp_path / "a.r3"
    changes = [{}, {"weight_versions": 3}, {"weight_versions": [5] * 4 + [8] * 7}]
    with ShardWriter(path, SPEC) as writer:
        for i, change in enumerate(changes):
            writer.append(build(name=str(i), **change))
    summary = summarize(path)
    assert summary["weight_versions"] == {"traces": 2, "mixed": 1, "lowest": 3, "highest": 8}
    console = Console(width=80, file=io.StringIO())
    render(summary, console)
    assert "versions 3 to 8 in 2 traces; 1 mix versions" in console.file.getvalue()


def test_inspect_without_versions(tmp_path):
    with ShardWriter(tmp_path / "a.r3", SPEC) as writer:
        writer.append(build())
    summary = summarize(tmp_path / "a.r3")
    nothing = {"traces": 0, "mixed": 0, "lowest": None, "highest": None}
    assert summary["weight_versions"] == nothing
    with ShardWriter(tmp_path / "b.r3", SPEC) as writer:
        writer.append(build(valid=np.zeros(11, bool), weight_versions=2))
    summary = summarize(tmp_path / "b.r3")
    assert summary["weight_versions"] == nothing | {"traces": 1}
    console = Console(width=80, file=io.StringIO())
    render(summary, console)
    assert "no captured row in 1 traces" in console.file.getvalue()


def test_a_trace_can_be_pickled():
    """Ray and multiprocessing do; what arrives is checked and has the same content."""
    import pickle

    trace = RoutingTrace.build(
        spec=SPEC,
        token_ids=range(5),
        routed_experts=np.tile(np.arange(SPEC.top_k), (4, len(SPEC.moe_layers), 1)),
        prompt_len=2,
        weight_versions=[0, 0, 1, 1],
        valid=np.array([True, True, False, True]),
    )
    copy = pickle.loads(pickle.dumps(trace))
    assert (copy.digest, copy.rollout_id) == (trace.digest, trace.rollout_id)
    assert copy.weight_versions.tolist() == [0, 0, -1, 1]


@pytest.mark.parametrize("name", ["token_ids", "routed_experts", "logprobs", "weight_versions"])
def test_what_is_no_array_is_refused_by_name(name):
    good = {"token_ids": [1, 2, 3], "routed_experts": np.zeros((2, 2, 2), int), "prompt_len": 1}
    with pytest.raises(r3.TraceError, match=f"{name} is not an array"):
        RoutingTrace.build(spec=SPEC, **(good | {name: [[1], [2, 3]]}))
