"""Public questions about metrics, with the exact answer.

Rows of the project's list, and where each is tested:
  87, 88, 92  here
  90          tests/test_disagreement.py
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np

from r3 import RolloutId, RouterSpec, RoutingBatch, RoutingTrace
from r3.cli.inspect import summarize
from r3.comparison import Comparison
from r3.disagreement import RoutingDisagreement
from r3.mismatch import LogprobMismatch
from r3.monitor import StepMonitor
from r3.storage import ShardWriter

SPEC = RouterSpec(num_experts=4, top_k=2, moe_layers=(0, 1), num_layers=2)


def test_field_87_a_filler_row_counts_nowhere(tmp_path: Path):
    """field.md 87: 12 rows, one of them a filler of zeros; expert 0 is credited with none of it."""
    rng = np.random.default_rng(87)
    ids = rng.random((12, 2, 4)).argsort(axis=-1)[..., :2].astype(np.uint8)
    other = rng.random((12, 2, 4)).argsort(axis=-1)[..., :2].astype(np.uint8)
    valid = np.arange(12) != 11
    ids[11] = 0
    found = RoutingDisagreement.between(ids, other, valid, SPEC)
    expected = [[int((ids[:11, i] == e).sum()) for e in range(4)] for i in range(2)]
    assert found.load_a.tolist() == expected
    assert found.load_b.sum() == found.load_a.sum() == 11 * 2 * 2
    assert (found.tokens, found.left_out) == (11, 1)
    assert found.positions.rows.sum() == found.layers_per_token.sum() == 11
    differing = [set(ids[t, i]) != set(other[t, i]) for t in range(11) for i in range(2)]
    assert found.cell_disagreement == sum(differing) / 22
    # and so wherever else load is counted: in files, and in the record of a training step
    trace = RoutingTrace.build(
        spec=SPEC, token_ids=np.arange(13), routed_experts=ids, valid=valid, prompt_len=4
    )
    with ShardWriter(tmp_path / "a.r3", SPEC) as shard:
        shard.append(trace)
    assert [x["load"] for x in summarize(tmp_path / "a.r3")["expert_load"]] == expected
    with StepMonitor(tmp_path / "metrics.jsonl") as monitor:
        record = monitor.record(0, batch=RoutingBatch.from_traces([trace]))
    violations = [max(x) / (sum(x) / 4) - 1 for x in expected]
    assert record["metrics"]["routing/max_vio_engine"] == sum(violations) / 2


def test_field_88_a_sequence_without_any_route(tmp_path: Path):
    """field.md 88: a rollout whose rows are all -1 is counted, its share is logged, and it raises
    an alert. (That training stops at a limit:
    tests/test_megatron_steps.py.)"""
    ids = np.zeros((9, 2, 2), np.int32)
    ids[..., 1] = np.arange(9)[:, None] % 3 + 1
    traces = [
        RoutingTrace.build(
            spec=SPEC,
            token_ids=np.arange(10),
            routed_experts=rows,
            prompt_len=2,
            logprobs=np.full(8, -1.0),
            rollout_id=RolloutId("run", str(i)),
        )
        for i, rows in enumerate((ids, np.full_like(ids, -1), ids))
    ]
    batch = RoutingBatch.from_traces(traces)
    with StepMonitor(tmp_path / "metrics.jsonl") as monitor:
        record = monitor.record(3, batch=batch, trainer_logprobs=batch.logprobs, native=batch)
    logged = json.loads((tmp_path / "metrics.jsonl").read_text())
    for found in (record, logged):
        assert found["metrics"]["routing/rows_without_route_fraction"] == 9 / 27
        assert found["metrics"]["routing/rollouts_without_route"] == 1
        assert found["rollouts_without_route"] == ["run/1/0/0/0"]
        alerts = {a["name"]: a for a in found["alerts"]}
        assert "run/1/0/0/0" in alerts["rollout_without_route"]["message"]
        assert "rows_without_route" in alerts
    comparison = Comparison(SPEC)
    for trace in traces:
        comparison.add(trace, trace)
    found = comparison.to_dict()
    routing = found["routing"]["native"]
    assert (routing["rows"], routing["rows_left_out"]) == (18, 9)
    assert sum(map(sum, routing["load_a"])) == 18 * 2 * 2
    # its log-probabilities are known, and count; which layers differ is not, and does not
    assert found["mismatch"]["native"]["metrics"]["tokens"] == 24
    assert found["attribution"]["by_layers"][0]["tokens"] == 16


def test_field_92_share_of_extreme_tokens():
    """field.md 92: of log-ratios 0, 0.8 and -1.0, two in three are beyond a ratio of 2."""
    trainer, sampler = np.array([-1.0, -1.0, -2.0]), np.array([-1.0, -1.8, -1.0])
    found = LogprobMismatch.of(trainer, sampler)
    assert found.metrics()["extreme_2"] == float(Fraction(2, 3))
    # the same over parts of any size: counts add up, shares do not
    parts = [LogprobMismatch.of(trainer[x], sampler[x]) for x in (slice(1), slice(1, 3))]
    assert [p.metrics()["extreme_2"] for p in parts] == [0, 1]
    assert (parts[0] + parts[1]).metrics()["extreme_2"] == float(Fraction(2, 3))
    # on the small side too, and not at 2 itself
    below = LogprobMismatch.of(np.full(1, -1.0), np.full(1, -0.25))
    assert (found + below).metrics()["extreme_2"] == float(Fraction(3, 4))
    at = LogprobMismatch.of(np.full(1, -np.log(2)), np.zeros(1))
    assert (found + at).metrics()["extreme_2"] == float(Fraction(2, 4))
