"""Rows that traces have in common are stored once, and every trace comes back as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r3 import Column, RolloutId, RouterSpec, RoutingTrace
from r3.storage import ShardReader, ShardWriter
from storage_tools import (
    SPEC,
    assert_same,
    assert_slice,
    continued,
    expected_slice,
    make_trace,
    random_ids,
    read_all,
    write,
)

LARGE = RouterSpec(128, 8, tuple(range(48)), 48)


def shared_rows(path: Path) -> list[int]:
    with ShardReader(path) as reader:
        headers = [reader.header(i).column("routed_experts") for i in range(len(reader))]
    return [header.layout.shared for header in headers]


def assert_all(path: Path, traces: list[RoutingTrace], keep_order: bool = False) -> None:
    for found, trace in zip(read_all(path), traces, strict=True):
        assert_same(found, trace, keep_order)


# --- what it saves


@pytest.mark.slow
@pytest.mark.parametrize(("differ", "most"), [(0.0, 0.55), (0.02, 0.62)])
def test_a_group_of_rollouts(differ, most, tmp_path):
    """16 answers of 1,000 tokens to a prompt of 1,000, against 16 files."""
    base = make_trace(LARGE, 2000, 99)
    traces = [continued(base, 1000, 2000, i, differ, prompt_len=1000) for i in range(16)]
    together = write(tmp_path / "a.r3", traces)
    alone = [write(tmp_path / f"{i}.r3", [t]).stat().st_size for i, t in enumerate(traces)]
    assert together.stat().st_size <= most * sum(alone)
    assert_all(together, traces)


def test_a_conversation(tmp_path):
    """Requests with the whole history, and the conversation put together after each."""
    spec = RouterSpec(64, 8, tuple(range(12)), 12)
    requests = [make_trace(spec, 200, 0, prompt_len=150)]
    for i in range(1, 8):
        last = requests[-1]
        n = last.num_tokens + 130
        turn = continued(last, last.num_rows, n, i, 0.01, prompt_len=last.num_tokens + 80)
        requests.append(turn)
    whole = [requests[0]]
    for i, turn in enumerate(requests[1:]):
        name = turn.rollout_id.__class__("whole", str(i))
        renamed = make_trace(
            spec,
            turn.num_tokens,
            token_ids=turn.token_ids,
            routed_experts=turn.routed_experts,
            prompt_len=turn.prompt_len,
            rollout_id=name,
        )
        whole.append(whole[-1].extend(renamed))
    traces = [*requests, *whole[1:]]
    path = write(tmp_path / "a.r3", traces)
    assert_all(path, traces)
    # all rows of a history but those that are not there yet
    assert shared_rows(path)[1:8] == [t.num_rows for t in requests[:-1]]
    assert [(s >= 200) for s in shared_rows(path)[8:]] == [True] * 7
    rows = sum(t.num_rows for t in traces)
    assert path.stat().st_size < 0.35 * rows * 12 * 32 / 8


def test_a_repeat_under_another_name(tmp_path):
    spec = RouterSpec(128, 8, tuple(range(8)), 8)
    base = make_trace(spec, 5000, 0)
    again = [continued(base, 4999, 5000, i) for i in range(1, 4)]
    sizes = []
    with ShardWriter(tmp_path / "a.r3", spec) as writer:
        for trace in (base, *again):
            before = writer.file_size
            writer.append(trace)
            sizes.append(writer.file_size - before)
    assert max(sizes[1:]) < 5000 * 2 + 1000  # the tokens
    assert_all(tmp_path / "a.r3", [base, *again])
    assert shared_rows(tmp_path / "a.r3") == [0, 4999, 4999, 4999]


@pytest.mark.parametrize("rows", [0, 5, 63, 64, 100, 127, 128, 129, 200, 298, 299])
def test_a_part_of_the_beginning(rows, tmp_path):
    base = make_trace(n=300, seed=100)
    traces = [base, continued(base, rows, 300, 1), continued(base, rows, rows + 1, 2)]
    path = write(tmp_path / "a.r3", traces)
    assert_all(path, traces)
    # found by blocks of 64 tokens, then compared row by row
    found = rows if rows < 299 else 299
    assert shared_rows(path)[1] == (found if rows + 1 >= 64 else 0)


@pytest.mark.parametrize("keep_order", [False, True])
def test_exceptions_in_every_layer(keep_order, tmp_path):
    base = make_trace(n=6000, seed=100)
    traces = [base, *(continued(base, 5500, 6000, i, 0.05) for i in range(1, 4))]
    path = write(tmp_path / "a.r3", traces, keep_order=keep_order)
    assert_all(path, traces, keep_order)
    with ShardReader(path) as reader:
        for i in range(1, 4):
            layout = reader.header(i).column("routed_experts").layout
            assert layout.shared >= 5490
            assert min(layout.exceptions) > 200
            for layer in SPEC.moe_layers:
                for tokens in (slice(0, 9), slice(4000, 5800), slice(5400, None)):
                    found = reader.slice(i, layers=[layer], tokens=tokens)
                    assert_slice(found, expected_slice(traces[i], (layer,), tokens, keep_order))


def test_every_cell_is_another(tmp_path):
    """The same tokens, routed otherwise: nothing to share."""
    base = make_trace(n=500, seed=100)
    other = make_trace(n=500, seed=1, token_ids=base.token_ids)
    path = write(tmp_path / "a.r3", [base, other])
    assert shared_rows(path) == [0, 0]
    assert_all(path, [base, other])


def test_order_counts_where_it_is_kept(tmp_path):
    base = make_trace(n=400, seed=100)
    rng = np.random.default_rng(0)
    ids = base.routed_experts.copy()
    turned = rng.random(ids.shape[:2]) < 0.1
    ids[turned] = ids[turned][:, ::-1]
    other = make_trace(n=400, seed=1, token_ids=base.token_ids, routed_experts=ids)
    for keep_order in (False, True):
        path = write(tmp_path / f"{keep_order}.r3", [base, other], keep_order=keep_order)
        assert_all(path, [base, other], keep_order)
        assert shared_rows(path) == [0, 399]
        with ShardReader(path) as reader:
            layout = reader.header(1).column("routed_experts").layout
        assert sum(layout.exceptions) == (turned.sum() if keep_order else 0)


@pytest.mark.parametrize("keep_order", [False, True])
def test_masks(keep_order, tmp_path):
    n = 500
    base = make_trace(n=n, seed=100)
    gone = np.arange(n - 1)
    masks = [gone < 300, gone >= 0, gone != 250, (gone < 100) | (gone > 350), gone > 0, gone > 900]
    traces = [base]
    for i, valid in enumerate(masks):
        traces.append(continued(base, 450, n, i, 0.01, valid=valid))
    # of each, the rows before the first that is missing, in it or in all that came before it; the
    # last may have too many exceptions to be worth it
    for order, expected in (
        (traces, [0, 300, 450, 250, 100, 0, 0]),
        (traces[::-1], [0, 0, 0, 100, 250, 300, 450]),
    ):
        path = write(tmp_path / f"{order[0].rollout_id.group}.r3", order, keep_order=keep_order)
        assert_all(path, order, keep_order)
        assert np.abs(np.subtract(shared_rows(path), expected)).max() <= 2
        with ShardReader(path) as reader:
            for i, trace in enumerate(order):
                for tokens in (slice(240, 360), slice(290, 310), slice(None)):
                    found = reader.slice(i, tokens=tokens)
                    assert_slice(found, expected_slice(trace, SPEC.moe_layers, tokens, keep_order))


def test_more_turns_than_a_record_can_name(tmp_path, monkeypatch):
    monkeypatch.setattr("r3.storage.sharing.MAX_SPANS", 8)  # less than there are, to be quick
    traces = [make_trace(n=64, seed=100)]
    for i in range(12):
        last = traces[-1]
        traces.append(continued(last, last.num_rows, last.num_tokens + 64, i))
    path = write(tmp_path / "a.r3", traces)
    with ShardReader(path) as reader:
        spans = [len(reader.header(i).column("routed_experts").spans) for i in range(13)]
    # before a record would need too many, one is whole again, for the next to share in one piece
    assert spans == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4]
    assert shared_rows(path)[-1] == traces[-2].num_rows
    assert_all(path, traces)


# --- random families


@st.composite
def families(draw: st.DrawFn) -> tuple[list[RoutingTrace], bool]:
    spec = draw(st.sampled_from([SPEC, RouterSpec(300, 3, (0, 5), 6), RouterSpec(8, 2, (1,), 2)]))
    traces = [make_trace(spec, draw(st.integers(1, 500)), 1000)]
    for i in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from(traces))
        n, rows = draw(st.integers(1, 600)), draw(st.integers(0, 500))
        missing = draw(st.sampled_from([0, 0, 0.001, 0.02, 0.6]))
        valid = np.random.default_rng(i).random(n - 1) >= missing
        extra = {"turns": Column(np.zeros(n, np.uint16), "token")} if draw(st.booleans()) else {}
        differ = draw(st.sampled_from([0, 0, 0.002, 0.03, 0.3]))
        traces.append(continued(base, rows, n, i, differ, valid=valid, extra=extra))
    return traces, draw(st.booleans())


@pytest.mark.slow
@given(families(), st.data())
@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_families(tmp_path, family, data):
    traces, keep_order = family
    path = tmp_path / "a.r3"
    path.unlink(missing_ok=True)
    restart = data.draw(st.integers(0, len(traces)))
    for part in (traces[:restart], traces[restart:]):
        with ShardWriter(path, traces[0].spec, keep_order=keep_order) as writer:
            for trace in part:
                writer.append(trace)
    assert_all(path, traces, keep_order)
    layers = traces[0].spec.moe_layers
    with ShardReader(path) as reader:
        for i, trace in enumerate(traces):
            start = data.draw(st.integers(0, trace.num_tokens))
            tokens = slice(start, data.draw(st.integers(start, trace.num_tokens)))
            chosen = data.draw(st.sampled_from([layers, layers[-1:], layers[::-1]]))
            found = reader.slice(i, layers=chosen, tokens=tokens)
            assert_slice(found, expected_slice(trace, chosen, tokens, keep_order))


def test_rows_of_two_codecs_do_not_mix(tmp_path):
    """A file that is gone on with in the other codec: each shares with its own kind."""
    base = make_trace(n=400, seed=100)
    traces = [base, *(continued(base, 399, 400, i) for i in range(4))]
    path = tmp_path / "a.r3"
    for i in range(0, 4, 2):
        with ShardWriter(path, SPEC, keep_order=i > 0) as writer:
            for trace in traces[i : i + 2]:
                writer.append(trace)
    found = read_all(path)
    for i in range(4):
        assert_same(found[i], traces[i], keep_order=i >= 2)
    assert shared_rows(path) == [0, 399, 0, 399]


def test_a_group_whose_first_rollout_is_an_outlier(tmp_path):
    rng = np.random.default_rng()
    tokens, ids = rng.integers(0, 999, 501), random_ids(rng, SPEC, 500)
    traces = []
    for i in range(8):
        rows = ids.copy()
        if not i:  # say of other weights: 30 % of its cells differ
            other = rng.random(rows.shape[:2]) < 0.3
            rows[other] = random_ids(rng, SPEC, 500)[other]
        name = RolloutId("group", str(i))
        traces.append(make_trace(n=501, token_ids=tokens, routed_experts=rows, rollout_id=name))
    path = write(tmp_path / "a.r3", traces)
    with ShardReader(path) as reader:
        assert [t.digest for t in reader] == [t.digest for t in traces]
        stored = [reader.header(i).column("routed_experts").layout.stored for i in range(8)]
        size = reader.header(2).column("routed_experts").size
    assert stored == [500, 500, 0, 0, 0, 0, 0, 0]
    assert size == 0
