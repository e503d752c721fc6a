"""A batch back into traces, and the column of router margins that a trainer's traces have."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import (
    Column,
    Provenance,
    RolloutId,
    RouterSpec,
    RoutingBatch,
    RoutingTrace,
    TraceError,
    merge_prefill_decode,
)
from r3.storage import ShardReader, ShardWriter

SPEC = RouterSpec(num_experts=300, top_k=2, moe_layers=(1, 3), num_layers=4)
NAN = float("nan")


def margins_of(rows: int, valid: np.ndarray | None = None, seed: int = 0) -> np.ndarray:
    found = np.random.default_rng(seed).random((rows, 2)).astype(np.float32)
    if valid is not None:
        found[~valid] = NAN
    return found


def build(n: int, seed: int = 0, **changes: object) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    values = {
        "spec": SPEC,
        "token_ids": np.arange(n),
        "routed_experts": rng.random((n - 1, 2, 300)).argsort(axis=-1)[..., :2],
        "prompt_len": 2,
        "rollout_id": RolloutId("run", sample=seed),
    }
    return RoutingTrace.build(**(values | changes))


def with_margins(n: int, margins: np.ndarray, seed: int = 0, **changes: object) -> RoutingTrace:
    return build(n, seed, extra={"router_margins": Column(margins, "row")}, **changes)


# ------------------------------------------------------------------------------- to_traces


@st.composite
def traces(draw: st.DrawFn, number: int) -> RoutingTrace:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, 7))
    prompt_len = draw(st.integers(0, n))
    segments = np.where(np.arange(n) < prompt_len, 0, rng.integers(1, 3, n)).astype(np.uint8)
    segmented = draw(st.booleans())
    sampled = segments == 1 if segmented else np.arange(n) >= prompt_len
    logprobs = np.where(sampled, -rng.random(n), NAN).astype(np.float32)
    valid = rng.random(n - 1) < draw(st.sampled_from([0, 0.5, 1]))
    return build(
        n,
        number,
        token_ids=rng.integers(0, 1 << 31, n),
        prompt_len=prompt_len,
        valid=valid,
        logprobs=logprobs if draw(st.booleans()) else None,
        weight_versions=rng.integers(0, 1 << 62, n - 1) if draw(st.booleans()) else None,
        extra={"segments": Column(segments, "token")} if segmented else {},
    )


@given(data=st.data(), count=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_traces_come_back(data: st.DataObject, count: int) -> None:
    packed = [data.draw(traces(i)) for i in range(count)]
    batch = RoutingBatch.from_traces(packed)
    made = Provenance(engine="megatron-core", dtype="float32")
    margins = np.random.default_rng(count).random((batch.num_tokens, 2)).astype(np.float32)
    margins[~batch.valid] = NAN
    back = batch.to_traces(provenance=made, margins=margins)
    start = 0
    for trace, found in zip(packed, back, strict=True):
        assert (found.rollout_id, found.prompt_len) == (trace.rollout_id, trace.prompt_len)
        assert found.spec == trace.spec
        assert found.provenance == made
        assert np.array_equal(found.token_ids, trace.token_ids)
        assert np.array_equal(found.routed_experts, trace.routed_experts)
        assert np.array_equal(found.valid, trace.valid)
        own = margins[start : start + trace.num_rows]
        assert np.array_equal(found.columns["router_margins"].data, own, equal_nan=True)
        start += trace.num_tokens
        if trace.logprobs is None or np.isnan(trace.logprobs).all():
            assert found.logprobs is None
        else:
            assert np.array_equal(found.logprobs, trace.logprobs, equal_nan=True)
            assert np.array_equal(found.sampled, trace.sampled)
            assert (found.segments is None) == trace.sampled[trace.prompt_len :].all()
        if trace.weight_versions is None or not trace.valid.any():
            assert found.weight_versions is None
        else:
            assert np.array_equal(found.weight_versions, trace.weight_versions)
    again = RoutingBatch.from_traces(back)
    for field in dataclasses.fields(RoutingBatch):
        a, b = getattr(batch, field.name), getattr(again, field.name)
        np.testing.assert_array_equal(a, b, err_msg=field.name)
    again.check()


def test_what_is_known_of_some_rows_only() -> None:
    """A batch that was put together by hand"""
    batch = RoutingBatch.from_traces([build(5, weight_versions=7, logprobs=[-1.0, -2.0, -3.0])])
    batch.weight_versions[1] = -1
    batch.logprobs[3] = NAN
    batch.valid[4] = True  # of the last token, which has no row
    (trace,) = batch.to_traces()
    assert trace.weight_versions is None
    assert trace.segments is not None
    assert trace.segments.tolist() == [0, 0, 1, 2, 1]
    assert trace.provenance == Provenance()
    assert trace.columns.keys() == {"token_ids", "routed_experts", "logprobs", "segments"}
    batch.logprobs[1] = -1
    with pytest.raises(TraceError, match=r"rollout run/.* token 1: .* expected NaN in the prompt"):
        batch.to_traces()
    for wrong in (np.zeros((4, 2)), np.zeros((5, 3)), np.zeros(5)):
        with pytest.raises(TraceError, match=r"margins have shape .* expected .* \[5, 2\]"):
            batch.to_traces(margins=wrong)


# ---------------------------------------------------------------------------- router_margins


def test_margins_are_checked() -> None:
    good = margins_of(4)
    assert np.array_equal(with_margins(5, good).columns["router_margins"].data, good)
    with_margins(5, np.full((4, 2), NAN, np.float32))
    with_margins(1, np.zeros((0, 2), np.float32), prompt_len=1)
    for value in (-0.5, np.inf, -np.inf):
        bad = good.copy()
        bad[2, 1] = bad[3, 0] = value
        words = f"rollout run/.*: row 2, layer 3: router margin {value}, expected a finite number"
        with pytest.raises(TraceError, match=words):
            with_margins(5, bad)
    hidden = np.array([True, False, True, True])
    with pytest.raises(TraceError, match=r"row 1, layer 1: .* expected NaN, as the row is missing"):
        with_margins(5, good, valid=hidden)
    with_margins(5, margins_of(4, hidden), valid=hidden)
    with pytest.raises(TraceError, match=r"shape \[4, 3\], expected \[4, 2\], one for each row"):
        with_margins(5, np.zeros((4, 3), np.float32))
    for wrong in (np.zeros((4, 2)), np.zeros(4, np.float32)):
        with pytest.raises(TraceError, match=r"'router_margins' is .*expected .row, float32, 2"):
            with_margins(5, wrong)
    with pytest.raises(TraceError, match=r"'router_margins' has shape \[5, 2\].*expected 4"):
        with_margins(5, margins_of(5))


def test_margins_come_back_from_a_file(tmp_path: Path) -> None:
    trace = with_margins(5, margins_of(4))
    with ShardWriter(tmp_path / "a.r3", SPEC) as shard:
        shard.append(trace)
    with ShardReader(tmp_path / "a.r3") as reader:
        assert reader[0].digest == trace.digest
        found = reader[0].columns["router_margins"].data
    assert np.array_equal(found, trace.columns["router_margins"].data)


def maybe(
    n: int, has: bool, seed: int, valid: np.ndarray, **changes: object
) -> tuple[RoutingTrace, np.ndarray]:
    """A trace with margins or without, and float32 [n - 1, 2]: them, or NaN"""
    margins = margins_of(n - 1, valid, seed)
    if has:
        return with_margins(n, margins, seed, valid=valid, **changes), margins
    return build(n, seed, valid=valid, **changes), np.full((n - 1, 2), NAN, np.float32)


@given(seed=st.integers(0, 2**32 - 1), mine=st.booleans(), theirs=st.booleans())
@settings(max_examples=100, deadline=None)
def test_margins_go_with_their_rows(seed: int, mine: bool, theirs: bool) -> None:
    """Against a loop over rows, NaN where a side lacks the column"""
    rng = np.random.default_rng(seed)
    masks = [rng.random(n) < 0.6 for n in (5, 8)]
    a, of_a = maybe(6, mine, 1, masks[0])
    b, of_b = maybe(9, theirs, 2, masks[1], prompt_len=7)
    extended = a.extend(b)
    prefill, of_prefill = maybe(6, mine, 1, masks[0], prompt_len=4)
    decode, of_decode = maybe(9, theirs, 2, masks[1], prompt_len=4)
    merged = merge_prefill_decode(prefill, decode)
    for found in (extended, merged):
        assert ("router_margins" in found.columns) == (mine or theirs)
    if not (mine or theirs):
        return
    believed = not masks[1][:4].all()
    for row in range(8):
        kept = row < 5 and masks[0][row]
        assert np.array_equal(
            extended.columns["router_margins"].data[row],
            of_a[row] if kept else of_b[row],
            equal_nan=True,
        )
        taken = row < 4 and masks[0][row] and not (believed and masks[1][row])
        assert np.array_equal(
            merged.columns["router_margins"].data[row],
            of_prefill[row] if taken else of_decode[row],
            equal_nan=True,
        )


@pytest.mark.parametrize("as_given", ["numpy", "torch"])
def test_log_probabilities_of_a_trainer_take_the_place_of_sampled_ones(as_given):
    rng = np.random.default_rng(11)
    spec = RouterSpec(8, 2, (0, 1), 2)
    engine = np.where(np.arange(12) % 5 == 4, np.nan, -rng.exponential(1, 12))
    engine[:3] = np.nan
    ids = rng.random((11, 2, 8)).argsort(axis=-1)[..., :2]
    segments = np.where(np.arange(12) < 3, 0, np.where(np.isnan(engine), 2, 1)).astype(np.uint8)
    trace = RoutingTrace.build(
        spec=spec,
        token_ids=np.arange(12),
        routed_experts=ids,
        prompt_len=3,
        logprobs=engine,
        extra={"segments": Column(segments, "token")},
    )
    batch = RoutingBatch.from_traces([trace])
    trainer = -rng.exponential(1, 12)  # the trainer knows of all tokens
    trainer[0] = np.nan
    given = trainer
    if as_given == "torch":
        given = pytest.importorskip("torch").tensor(trainer, requires_grad=True)
    (own,) = batch.to_traces(logprobs=given)
    expected = np.where(np.isnan(engine), np.nan, trainer).astype(np.float32)
    assert np.array_equal(own.logprobs, expected, equal_nan=True)
    assert np.array_equal(own.segments, segments)
    with pytest.raises(TraceError, match=r"logprobs are float64 of shape \[11\], expected floats"):
        batch.to_traces(logprobs=trainer[1:])
    trainer[5] = np.nan
    with pytest.raises(TraceError, match="token 5: log-probability nan"):
        batch.to_traces(logprobs=trainer)
