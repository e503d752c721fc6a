"""Public bugs of capture and alignment, as far as a trace can see them.

Each test is named by the number of the bug in the project's list. Arrays only: the bugs are
rebuilt from their symptoms, no engine runs here.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

import r3
from r3 import RolloutId, RouterSpec, RoutingBatch, RoutingTrace
from r3.cli.inspect import render, summarize
from r3.storage import ShardReader, ShardWriter

TOY = RouterSpec(num_experts=8, top_k=2, moe_layers=(0, 1, 2, 3), num_layers=4)
QWEN = RouterSpec(num_experts=128, top_k=8, moe_layers=tuple(range(48)), num_layers=48)


def random_ids(rows: int, spec: RouterSpec = TOY, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scores = rng.random((rows, len(spec.moe_layers), spec.num_experts))
    return scores.argsort(axis=-1)[..., : spec.top_k]


def build(ids: np.ndarray, tokens: int, spec: RouterSpec = TOY, **more: object) -> RoutingTrace:
    return RoutingTrace.build(
        spec=spec,
        token_ids=np.arange(tokens),
        routed_experts=ids,
        prompt_len=2,
        rollout_id=RolloutId("case"),
        **more,
    )


def test_1_one_row_less_than_tokens():
    """Arrays only. The engine's n - 1 rows are taken; the last token is masked for the trainer."""
    ids = random_ids(11)
    batch = RoutingBatch.from_traces([build(ids, 12), build(ids, 12)])
    assert batch.valid.tolist() == [*[True] * 11, False] * 2
    assert (batch.routed_experts[12:23] == ids).all()


def test_2_padded_rows_are_not_routing():
    """Arrays only. A zero row for the last token is refused; as a masked row it is no routing."""
    padded = np.concatenate([random_ids(11), np.zeros((1, 4, 2), int)])
    with pytest.raises(r3.TraceError, match=r"case/.*12 rows, expected 11"):
        build(padded, 12)
    with pytest.raises(r3.TraceError, match=r"row 11, layer 0: experts \[0, 0\]"):
        build(padded, 13)
    trace = build(padded, 13, valid=np.arange(12) < 11)
    assert not RoutingBatch.from_traces([trace]).valid[11:].any()


def test_26_all_zero_or_physical_ids():
    """Arrays only. A buffer bound too early is all zero; replicas have physical ids."""
    with pytest.raises(r3.TraceError, match=r"row 0, layer 0.*all zero.*never written"):
        build(np.zeros((5, 48, 8), np.uint8), 6, QWEN)
    ids = random_ids(11)
    ids[4, 2] = [9, 0]
    with pytest.raises(r3.TraceError, match=r"row 4, layer 2: expert id 9.*0\.\.7.*logical ids"):
        build(ids, 12)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_27_kernels_that_route_inside(rows):
    """Arrays only. Minimum and maximum are 0 over all rows and layers."""
    with pytest.raises(r3.TraceError, match=rf"{rows} of {rows} rows of this layer are all zero"):
        build(np.zeros((rows, 48, 8), np.int32), rows + 1, QWEN)


def test_32_layers_of_another_pipeline_stage():
    """Arrays only. Layers 0 and 1 of 4 are zero, the rest is routing."""
    ids = random_ids(11)
    ids[:, :2] = 0
    with pytest.raises(r3.TraceError, match=r"layer 0.*11 of 11 rows of this layer"):
        build(ids, 12)


def test_32_layers_of_another_pipeline_stage_top_1():
    """Arrays only. With top-1 zeros are legal ids, so it is a warning, one finding per layer."""
    spec = RouterSpec(16, 1, (0, 1, 2, 3), 4)
    ids = random_ids(11, spec)
    ids[:, :2] = 0
    with pytest.warns(r3.SuspiciousRoutingWarning, match="layer 0: 11 rows, all of them expert 0"):
        trace = build(ids, 12, spec)
    assert [s.layer for s in trace.suspicions] == [0, 1]


def test_42_duplicate_experts():
    """Arrays only. K = 8, all 0, in the rows whose transfer was missed."""
    ids = random_ids(20, QWEN)
    ids[7:9] = 0
    with pytest.raises(r3.TraceError, match=r"row 7, layer 0.*one expert twice, expected 8 diff"):
        build(ids, 21, QWEN)


@pytest.mark.parametrize(("experts", "width"), [(128, 1), (256, 1), (300, 2)])
def test_59_and_60_width_of_ids(experts, width, tmp_path):
    """Arrays only. As narrow as the experts allow, never narrower: 300 must not become 44."""
    spec = RouterSpec(experts, 2, (0, 1, 2, 3), 4)
    ids = random_ids(11, spec)
    ids[:, :, 0] = experts - 1
    ids[:, :, 1] = np.arange(44).reshape(11, 4)
    path = tmp_path / "a.r3"
    with ShardWriter(path, spec) as writer:
        writer.append(build(ids.astype(np.int32), 12, spec))
    with ShardReader(path) as reader:
        assert reader[0].routed_experts.dtype.itemsize == width
        assert (reader[0].routed_experts == ids).all()
        (column,) = [c for c in reader.header(0).columns if c.name == "routed_experts"]
        assert column.size == ids.size * width


def test_85_negative_rows(tmp_path):
    """Arrays only. One row of -1 becomes a mask and never reaches a gather."""
    ids = random_ids(11)
    ids[5] = -1
    trace = build(ids, 12)
    path = tmp_path / "a.r3"
    with ShardWriter(path, TOY) as writer:
        writer.append(trace)
    with ShardReader(path) as reader:
        batch = RoutingBatch.from_traces([reader[0]])
    assert np.flatnonzero(~batch.valid).tolist() == [5, 11]
    assert batch.routed_experts.max() < 8
    ids[6, 1, 0] = -1
    with pytest.raises(r3.TraceError, match=r"row 6, layer 1: expert id -1"):
        build(ids, 12)


def test_87_filler_is_not_expert_0s_load(tmp_path):
    """Arrays only. One all-zero filler row among 12 is in no statistic."""
    ids = np.zeros((12, 4, 2), int)  # nobody chose expert 0 in rows 0 to 10
    ids[:11, :, 0], ids[:11, :, 1] = 1 + np.arange(11)[:, None] % 3, 4 + np.arange(4)
    path = tmp_path / "a.r3"
    with ShardWriter(path, TOY) as writer:
        writer.append(build(ids, 13, valid=np.arange(12) < 11))
    summary = summarize(path)
    assert (summary["rows"], summary["missing_rows"]) == (12, 1)
    for layer in summary["expert_load"]:
        assert layer["load"][0] == 0
        assert sum(layer["load"]) == 11 * 2
    render(summary, Console(file=io.StringIO()))
