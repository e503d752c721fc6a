"""What ranks and microbatches know of a training step: sums that add up, and how they travel."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import (
    RoutingBatch,
    TraceError,
)
from r3.disagreement import RoutingDisagreement
from r3.monitor import StepMonitor, StepState
from r3.slices import label_order
from r3.step_figures import figures, layer_figures, slice_figures
from r3.trainer_hooks.megatron_report import LayerCounts, ReplayReport
from step_tools import (
    DEEP,
    SPEC,
    lines_of,
    make_batch,
    native_of,
    report_of,
    same,
    trainer_of,
)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.booleans())
def test_ranks_add_up_to_one(seed, cut_at, through_json):
    batch = make_batch(seed)
    trainer, native = trainer_of(batch, seed), native_of(batch, seed)
    labels = np.arange(batch.num_tokens) // 4
    at = int(batch.cu_seqlens[cut_at])
    parts = []
    for sequences, tokens in (
        (slice(0, cut_at), slice(0, at)),
        (slice(cut_at, None), slice(at, None)),
    ):
        a, b = (_part(x, sequences, tokens) for x in (batch, native))
        part = StepState.of(
            a,
            trainer[tokens],
            native=b,
            report=report_of(),
            weight_version=6,
            labels={"turn": labels[tokens]},
        )
        parts.append(StepState.from_json(part.to_json()) if through_json else part)
    whole = StepState.of(
        batch,
        trainer,
        native=native,
        report=report_of(2),
        weight_version=6,
        labels={"turn": labels},
    )
    merged = parts[0] + parts[1]
    found, expected = figures(merged), figures(whole)
    for key in ("cells_padding", "cells_not_enclosed"):
        expected[key] = found[key]  # not doubled by report_of
    for key in ("outside_topk_cells_free", "outside_topk_experts_free"):
        assert found[key] == expected[key]
    assert same(dict(sorted(found.items())), dict(sorted(expected.items())))
    for dimension, of_whole in whole.slices.items():
        assert set(merged.slices[dimension]) == set(of_whole)
        for label, part in of_whole.items():
            other = merged.slices[dimension][label]
            assert same(part.mismatch.metrics(), other.mismatch.metrics())
            for name in ("rows", "differing", "cells", "differing_cells"):
                assert getattr(part, name) == getattr(other, name)


def _part(batch: RoutingBatch, sequences: slice, tokens: slice) -> RoutingBatch:
    start, stop, _ = sequences.indices(len(batch))
    per_token = ("token_ids", "routed_experts", "valid", "logprobs", "weight_versions")
    return replace(
        batch,
        rollout_ids=batch.rollout_ids[sequences],
        prompt_lens=batch.prompt_lens[sequences],
        cu_seqlens=batch.cu_seqlens[start : stop + 1] - batch.cu_seqlens[start],
        **{name: getattr(batch, name)[tokens] for name in per_token},
    )


def test_stages_of_a_pipeline():
    """Each knows its own layers: cells add up, and which tokens differ anywhere is not known."""
    batch = make_batch()
    native = native_of(batch)
    states = []
    for columns in ([0, 1], [2]):
        layers = tuple(SPEC.moe_layers[i] for i in columns)
        part = replace(
            native,
            spec=replace(SPEC, moe_layers=layers),
            routed_experts=native.routed_experts[:, columns],
        )
        states.append(StepState.of(batch, native=part))
    found, whole = figures(states[0] + states[1]), figures(StepState.of(batch, native=native))
    d = RoutingDisagreement.between(
        batch.routed_experts, native.routed_experts, batch.valid & native.valid, SPEC
    )
    assert found["cell_disagreement_free"] == pytest.approx(d.cell_disagreement)
    assert found["layers_per_token_free"] == pytest.approx(d.layers_per_token_mean)
    assert found["max_vio_engine"] == pytest.approx(whole["max_vio_engine"])
    assert "token_disagreement_free" not in found
    assert whole["token_disagreement_free"] == d.token_disagreement


def test_states_that_do_not_fit_are_refused():
    batch = make_batch()
    with pytest.raises(TraceError, match="clip"):
        _ = StepState.of(batch, clip=(0.5, 5)) + StepState.of(batch)
    a = StepState.of(batch, report=report_of())
    b = StepState.of(batch, report=replace(report_of(), top_k=4))
    with pytest.raises(TraceError, match="top 4 to one of top 2"):
        _ = a + b
    spec = replace(SPEC, num_experts=9)
    with pytest.raises(TraceError, match="top 2 of 9 experts to counts of top 2 of 8"):
        _ = a + StepState.of(replace(batch, spec=spec))
    with pytest.raises(TypeError):
        _ = a + 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"format": "r3-step/2"}', "nothing", '{"format": "r3-step/1"}', "null"),
        *("[" * 100_000, b"\xff"),
    ],
)
def test_what_is_no_state_is_refused(text):
    with pytest.raises(TraceError, match=r"not the text of StepState.to_json"):
        StepState.from_json(text)


def full_state() -> StepState:
    batch = make_batch()
    return StepState.of(
        batch,
        trainer_of(batch),
        native=native_of(batch),
        report=report_of(),
        weight_version=6,
        labels={"env": ["a", "b", "a", "b"]},
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "r3-step/2", "format is 'r3-step/2', expected 'r3-step/1'"),
        (["more"], 1, "more is 1, expected no such field"),
        (["has_logprobs"], 1, "has_logprobs is 1, expected true or false"),
        (["mismatch"], None, "a mismatch cannot be read"),
        (["mismatch", "counts", "left_out"], 2**63, "counts: left_out is 9223372036854775808"),
        (["mismatch", "sums", "lr"], DEEP, r"lr: found \[\[\["),
        (["slices"], [], "slices is"),
        (["slices", "env", "a", "rows"], "x", r"slices\.env\.a\.rows is 'x', expected an integer"),
        (["slices", "env", "a", "rows"], 0, "slices: differing is"),
        (["slices", "env", "a", "mismatch"], {}, "a mismatch cannot be read"),
        (["slices", "env", "a", "more"], 1, r"slices\.env\.a\.more"),
        (["rollouts"], "x", "rollouts is 'x', expected an integer of 0"),
        (["rollouts"], 2**63, "rollouts is 9223372036854775808"),
        (["rows"], -1, "rows is -1"),
        (["rows"], 10**400, "rows is 1000"),
        (["rows"], 24.0, r"rows is 24\.0"),
        (["rows_without_route"], 25, "rows_without_route is 25, expected at most 24"),
        (["rollouts_without_route"], 5, "rollouts_without_route is 5, expected at most 4"),
        (["without_route"], ["x"] * 9, "without_route is 9, expected at most 8"),
        (["without_route"], [1], r"without_route\.0 is 1, expected text"),
        (["lag_rows"], 0, "lag_rows is 0, lag_sum"),
        (["lag_max"], None, "lag_max None"),
        (["lag_max"], 2**63, "lag_max is 9223372036854775808"),
        (["lag_sum"], 10**40, "lag_sum is 1"),
        (["lag_sum"], 24 * 3 + 1, "lag_sum 73 and lag_max 3"),
        (["lag_sum"], math.nan, "lag_sum is nan"),
        (["replay_top_k"], 0, "replay_top_k is 0, of 2 layers"),
        (["replay"], [], "replay_top_k is 2, of 0 layers"),
        (["replay", 0], [1], r"replay\.0 is \[1\], expected a list of 2"),
        (["replay", 0, 0], "1", r"replay\.0\.0 is '1', expected a layer"),
        (["replay", 0, 0], 4, "the same layers twice"),
        (["replay", 0, 1, "rows_stale"], -1, r"replay\.0\.1\.rows_stale is -1"),
        (["routing", 0, 0], [], "one or more, ascending"),
        (["routing", 0, 0], [1, 2], "expected those of 2 layers"),
        (["routing", 0, 0], [1, 4, 2], "ascending"),
        (["routing", 0, 0, 0], -1, "expected a layer"),
        (["routing", 0, 1, "cells"], None, r"cells is None, expected a list"),
        (["routing", 0, 1, "cells"], [1, 2], "counts of shapes"),
        (["routing", 0, 1, "cells", 0], 24, "more that differ than the 23 tokens"),
        (["routing", 0, 1, "differing"], 24, "more that differ than the 23 tokens"),
        (["routing", 0, 1, "experts", 0], 2**63, r"experts\.0 is"),
        (["routing", 0, 1, "load_a"], [], "counts of shapes"),
        (["routing", 0, 1, "load_a"], [[1], [1, 2], [3]], "inhomogeneous"),
        (["routing", 0, 1, "load_b"], [[1], [2], [3]], "counts of shapes"),
        (["routing", 0, 1, "load_b", 0], DEEP, r"load_b\.0\.0 is \[\["),
        (["routing", 0, 1, "top_k"], 9, "top 9 of 8 experts"),
        (["routing", 0, 1, "top_k"], 0, "top 0 of 8 experts"),
    ],
)
def test_a_state_that_no_rank_writes_is_refused(path, value, message):
    found = json.loads(full_state().to_json())
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(TraceError, match=rf"not the text of StepState.to_json\(\): .*{message}"):
        StepState.from_json(json.dumps(found))


def test_a_state_is_what_it_was_behind_text():
    state = full_state() + full_state()
    for one in (state, StepState.of(make_batch())):
        again = StepState.from_json(one.to_json())
        assert again.to_json() == one.to_json()
        assert same(figures(again), figures(one))


def test_lags_of_any_size_are_summed():
    batch = make_batch()
    versions = batch.weight_versions[batch.valid].tolist()
    for version in (0, 5, 2**63 - 1, np.int64(7)):
        state = StepState.of(batch, weight_version=version)
        assert state.lag_sum == sum(int(version) - x for x in versions)
        assert state.lag_max == int(version) - min(versions)
        assert StepState.from_json(state.to_json()).lag_sum == state.lag_sum


def test_load_of_batches_with_and_without_native():
    """What is documented: the engine's of the rows compared, and of all rows of the others."""
    batch = make_batch()
    native = native_of(batch)
    found = layer_figures(StepState.of(batch, native=native) + StepState.of(batch))
    compared = batch.valid & native.valid
    for i, layer in enumerate(found):
        ids = [batch.routed_experts[rows][:, i].ravel() for rows in (compared, batch.valid)]
        load = np.bincount(np.concatenate(ids), minlength=8)
        assert layer["max_vio_engine"] == pytest.approx(load.max() / load.mean() - 1)
        load = np.bincount(native.routed_experts[compared][:, i].ravel(), minlength=8)
        assert layer["max_vio_trainer_free"] == pytest.approx(load.max() / load.mean() - 1)


def test_labels_of_many_digits_are_text():
    labels = ["9" * 5000, "10", "b", "7", "1" * 18, "2" * 19, "other", "8-15", "newer"]
    found = sorted(labels, key=label_order)
    expected = ["newer", "7", "8-15", "10", "1" * 18, "2" * 19, "9" * 5000, "b", "other"]
    assert found == expected
    batch = make_batch()
    state = StepState.of(
        batch, native=native_of(batch), labels={"turn": ["9" * 5000, "1", "1", "2"]}
    )
    assert list(slice_figures(state)["turn"]) == ["1", "2", "9" * 5000]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"trainer_logprobs": np.zeros((4, 12))},
            r"trainer_logprobs has shape \[4, 12\], expected \[28\]: one for each token",
        ),
        ({"trainer_logprobs": np.zeros(27)}, r"shape \[27\], expected \[28\]"),
        ({"mask": np.ones(3, bool)}, r"mask has shape \[3\]"),
        *(
            ({"mask": np.full(28, x)}, rf"mask is {x} at \[0\], expected bool, or 0 and 1")
            for x in (0.5, math.nan, -1, 2)
        ),
        ({"mask": ["yes"] * 28}, "mask is <U3, expected bool, or 0 and 1"),
        ({"labels": ["a"] * 28}, "labels is of type list, expected a dictionary by dimension"),
        ({"labels": {("a", "b"): [1] * 4}}, r"labels: \('a', 'b'\) is a dimension, expected text"),
        ({"labels": {"turn": [[1], [1, 2], 3, 4]}}, "labels: 'turn' is not an array"),
        (
            {"labels": {"turn": np.array([[1], [1, 2], 3, 4], object)}},
            r"labels: 'turn': entry 0 is \[1\], expected text or an integer",
        ),
        ({"labels": {"turn": ["a", None, "b", "c"]}}, "entry 1 is None, expected text"),
        ({"labels": {"turn": [10**5000, 1, 2, 3]}}, "labels: 'turn': .* limit"),
        *(
            (
                {"weight_version": x},
                r"weight_version is .*, expected an integer of 0 to 2\*\*63 - 1",
            )
            for x in ("7", math.nan, 1.5, 2**63, -1, True, [1], 10**5000, np.float32(1))
        ),
        ({"native": "native"}, "native is of type str, expected a RoutingBatch"),
        ({"report": report_of}, "report is of type function, expected what MegatronReplay.report"),
        ({"report": {"layers": {}}}, "report is of type dict"),
        ({"report": replace(report_of(), top_k=0)}, "no top_k"),
        ({"report": ReplayReport({1: LayerCounts(-1)})}, "negative counts"),
        ({"trainer_logprobs": "logprobs"}, r"trainer_logprobs has shape \[\]"),
        ({"alignment": "row shift"}, "alignment is of type str, expected Alignment"),
        ({"engine": {"dtype": "x"}}, "engine is of type dict, expected Provenance"),
        ({"trainer": "megatron"}, "trainer is of type str, expected Provenance"),
        ({"labels": {"turn": np.zeros(5, int)}}, r"'turn' is int64 of shape \[5\], expected text"),
        ({"labels": {"turn": np.zeros(28)}}, "'turn' is float64"),
        ({"labels": {"length": np.zeros(28, int)}}, "'length' comes by itself"),
        ({"native": make_batch(9)}, "native is of other tokens"),
        ({"native": replace(make_batch(), spec=replace(SPEC, top_k=3))}, "native has routing of"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, kwargs, message):
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        with pytest.raises(TraceError, match=message):
            monitor.record(0, batch=make_batch(), **kwargs)
        assert (tmp_path / "m.jsonl").read_bytes() == b""
        monitor.record(0, batch=make_batch())


def test_a_state_or_a_batch(tmp_path):
    batch = make_batch()
    state = StepState.of(batch, trainer_of(batch))
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        with pytest.raises(TraceError, match="got neither"):
            monitor.record(0)
        with pytest.raises(TraceError, match="a state or a batch"):
            monitor.record(0, state, batch=batch)
        with pytest.raises(TraceError, match="a state or a batch"):
            monitor.record(0, state, weight_version=1)
        with pytest.raises(
            TraceError,
            match="state is of type RoutingBatch, expected StepState, a batch is given as batch=",
        ):
            monitor.record(0, batch)
        with pytest.raises(TraceError, match="state is of type str, expected StepState"):
            monitor.record(0, state.to_json())
        with pytest.raises(TraceError, match="batch is of type StepState, expected a RoutingBatch"):
            monitor.record(0, batch=state)
        for step in (2**63, -(2**63), 10**5000):
            with pytest.raises(TraceError, match=r"expected an integer below 2\*\*63"):
                monitor.record(step, state)
        for step in (1.0, "1", True, None, np.ones(2)):
            with pytest.raises(TraceError, match="expected an integer"):
                monitor.record(step, state)
        monitor.record(np.int64(3), state)
        monitor.record(4, batch=batch, trainer_logprobs=trainer_of(batch))
    a, b = lines_of(tmp_path / "m.jsonl")
    assert (a["step"], a["metrics"]) == (3, b["metrics"])
