"""One call per training step: what is recorded, by hand; files that are torn, full or foreign."""

from __future__ import annotations

import json
import math
import os
import re
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import (
    FormatError,
    Provenance,
    R3Error,
    RolloutId,
    RouterSpec,
    RoutingBatch,
    RoutingTrace,
    TornShardWarning,
    TraceError,
)
from r3.alerts import find_alerts
from r3.alignment import diagnose
from r3.disagreement import RoutingDisagreement
from r3.mismatch import LogprobMismatch
from r3.monitor import NAMES, StepMonitor, StepState, environment_of, read_metrics
from r3.slices import label_order
from r3.step_figures import MOST_LABELS, OTHER, figures, layer_figures, slice_figures
from r3.trainer_hooks.megatron_report import LayerCounts, ReplayReport

SPEC = RouterSpec(num_experts=8, top_k=2, moe_layers=(1, 2, 4), num_layers=5)
LENGTHS = (6, 1, 12, 9)
DEEP = json.loads("[" * 900 + "]" * 900)


def random_ids(rng: np.random.Generator, rows: int, spec: RouterSpec = SPEC) -> np.ndarray:
    noise = rng.random((rows, len(spec.moe_layers), spec.num_experts))
    return noise.argsort(axis=-1)[..., : spec.top_k].astype(spec.dtype)


def make_batch(seed: int = 0, lengths: tuple[int, ...] = LENGTHS, run: str = "run") -> RoutingBatch:
    rng = np.random.default_rng(seed)
    traces = []
    for i, n in enumerate(lengths):
        logprobs = np.full(n, np.nan, np.float32)
        prompt = min(3, n)
        logprobs[prompt:] = -rng.exponential(1, n - prompt)
        traces.append(
            RoutingTrace.build(
                spec=SPEC,
                token_ids=rng.integers(0, 50, n),
                routed_experts=random_ids(rng, n - 1),
                prompt_len=prompt,
                logprobs=logprobs,
                weight_versions=rng.integers(3, 6, n - 1),
                rollout_id=RolloutId(run, sample=i),
            )
        )
    return RoutingBatch.from_traces(traces)


def trainer_of(batch: RoutingBatch, seed: int = 1, size: float = 0.1) -> np.ndarray:
    """Log-probs near the engine's; anything where no token was sampled."""
    noise = np.random.default_rng(seed).normal(0, size, batch.num_tokens)
    found = np.minimum(batch.logprobs.astype(np.float64) + noise, 0)
    return np.where(np.isnan(found), np.inf, found)


def native_of(batch: RoutingBatch, seed: int = 2, share: float = 0.2) -> RoutingBatch:
    """Another choice in some cells, and no route in one row."""
    rng = np.random.default_rng(seed)
    other = rng.random(batch.routed_experts.shape[:2]) < share
    ids = np.where(other[..., None], random_ids(rng, batch.num_tokens), batch.routed_experts)
    valid = batch.valid.copy()
    valid[0] = False
    ids[~valid] = 0
    return replace(batch, routed_experts=ids.astype(SPEC.dtype), valid=valid)


def report_of(k: int = 1) -> ReplayReport:
    layers = {
        1: LayerCounts(90 * k, 6 * k, 4 * k, 2, 0, 9 * k, 12 * k, 50, 5, 5),
        4: LayerCounts(90 * k, 6 * k, 4 * k, 2, 1, 0, 0, 50, 0, 0),
    }
    return ReplayReport(layers, {}, top_k=2)


def strict(text: str) -> dict:
    def no_constant(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=no_constant)


def lines_of(path: Path) -> list[dict]:
    return [strict(line) for line in path.read_text().splitlines()]


def same(a: object, b: object) -> bool:
    """Equal, with NaN equal to itself; sums of floats to the last but a few bits."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == pytest.approx(b, rel=1e-12, abs=1e-15, nan_ok=True)
    return a == b


# --- what is recorded


def test_a_line_equals_the_figures_by_themselves(tmp_path):
    batch = make_batch()
    trainer, native = trainer_of(batch), native_of(batch)
    counted = ~np.isnan(batch.logprobs)
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        monitor.record(
            17,
            batch=batch,
            trainer_logprobs=trainer,
            native=native,
            report=report_of(),
            weight_version=7,
        )
    (line,) = lines_of(tmp_path / "m.jsonl")
    assert line["step"] == 17
    metrics = line["metrics"]
    expected = LogprobMismatch.of(
        trainer, batch.logprobs, cu_seqlens=batch.cu_seqlens, mask=counted
    ).metrics()
    for key, value in expected.items():
        assert metrics[NAMES[key]] == (value if math.isfinite(value) else None), key
    lr = (trainer - batch.logprobs.astype(np.float64))[counted]
    k3 = math.fsum(math.exp(x) - 1 - x for x in lr) / len(lr)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(k3, rel=1e-9)
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.fsum(lr) / len(lr), rel=1e-9)
    assert metrics["routing/abs_logratio_max"] == pytest.approx(max(map(abs, lr)))
    assert metrics["routing/tokens"] == 3 + 0 + 9 + 6

    valid = batch.valid & native.valid
    sets = [
        [len(set(map(int, x)) - set(map(int, y))) for x, y in zip(a, b, strict=True)]
        for a, b in zip(batch.routed_experts[valid], native.routed_experts[valid], strict=True)
    ]
    layers = [sum(x > 0 for x in row) for row in sets]
    n = len(sets)
    assert n == 5 + 11 + 8 - 1
    assert metrics["routing/cell_disagreement_free"] == pytest.approx(sum(layers) / (3 * n))
    experts = sum(map(sum, sets)) / (6 * n)
    assert metrics["routing/expert_disagreement_free"] == pytest.approx(experts)
    share = sum(x > 0 for x in layers) / n
    assert metrics["routing/token_disagreement_free"] == pytest.approx(share)
    assert metrics["routing/layers_per_token_free"] == pytest.approx(sum(layers) / n)
    for name, ids in (("engine", batch), ("trainer_free", native)):
        loads = [np.bincount(ids.routed_experts[valid][:, i].ravel()) for i in range(3)]
        vio = [max(x) / (2 * n / 8) - 1 for x in loads]
        assert metrics[f"routing/max_vio_{name}"] == pytest.approx(sum(vio) / 3)

    assert metrics["routing/rows"] == 5 + 0 + 11 + 8
    assert metrics["routing/rollouts"] == 4
    assert metrics["routing/rows_without_route_fraction"] == 0
    lags = 7 - batch.weight_versions[batch.valid]
    assert metrics["routing/weight_lag_mean"] == pytest.approx(lags.mean())
    assert metrics["routing/weight_lag_max"] == lags.max() == 4

    assert metrics["routing/cells_replayed"] == 180
    assert metrics["routing/cells_missing"] == 12
    assert metrics["routing/cells_stale"] == 8
    assert metrics["routing/cells_padding"] == 4
    assert metrics["routing/cells_not_enclosed"] == 1
    assert metrics["routing/cells_native_fraction"] == pytest.approx(20 / 200)
    assert metrics["routing/outside_topk_cells_forced"] == pytest.approx(9 / 180)
    assert metrics["routing/outside_topk_experts_forced"] == pytest.approx(12 / 360)
    assert metrics["routing/outside_topk_cells_free"] == pytest.approx(5 / 100)
    assert metrics["routing/outside_topk_experts_free"] == pytest.approx(5 / 200)
    assert [x["layer"] for x in line["layers"]] == [1, 2, 4]
    assert line["layers"][0]["outside_topk_experts_forced"] == pytest.approx(12 / 180)
    assert "outside_topk_cells_forced" not in line["layers"][1]
    cells = [sum(row[i] > 0 for row in sets) / n for i in range(3)]
    assert [x["cell_disagreement_free"] for x in line["layers"]] == pytest.approx(cells)
    assert set(metrics) == set(NAMES.values())


def test_what_is_not_given_is_not_recorded(tmp_path):
    batch = make_batch()
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        found = monitor.record(0, batch=batch)["metrics"]
    assert found["routing/rows"] == 24
    assert found["routing/max_vio_engine"] > 0
    for name in (
        "rollout_corr/kl",
        "routing/tokens",
        "routing/cell_disagreement_free",
        "routing/weight_lag_mean",
    ):
        assert name not in found
    assert not any("forced" in name or "cells" in name for name in found)
    assert lines_of(tmp_path / "m.jsonl")[0]["slices"] == {"length": {}}


def test_an_engine_without_log_probs_is_noticed(tmp_path):
    batch = make_batch()
    batch = replace(batch, logprobs=np.full_like(batch.logprobs, np.nan))
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        record = monitor.record(0, batch=batch, trainer_logprobs=np.zeros(28))
    assert record["metrics"]["routing/tokens"] == 0
    assert "rollout_corr/kl" not in record["metrics"]
    assert [a["name"] for a in record["alerts"]] == ["no_tokens"]


def test_torch_log_probs_with_a_gradient(tmp_path):
    torch = pytest.importorskip("torch")
    batch = make_batch()
    trainer = torch.tensor(trainer_of(batch), dtype=torch.bfloat16, requires_grad=True)
    mask = torch.from_numpy(~np.isnan(batch.logprobs)).int()
    state = StepState.of(batch, trainer, mask=mask, labels={"env": torch.tensor([4, 5, 4, 5])})
    assert set(state.slices["env"]) == {"4", "5"}
    found = figures(state)
    expected = trainer.detach().double().numpy()
    lr = (expected - batch.logprobs.astype(np.float64))[~np.isnan(batch.logprobs)]
    assert found["kl_k1"] == pytest.approx(-lr.mean())


def test_a_mask_chooses_and_shows_what_it_chose_wrongly():
    batch = make_batch()
    mask = ~np.isnan(batch.logprobs)
    first = np.flatnonzero(mask)[0]
    mask[first] = False
    found = figures(StepState.of(batch, trainer_of(batch), mask=mask))
    assert (found["tokens"], found["left_out"]) == (17, 0)
    mask[0] = True  # a prompt token has no log-prob
    found = figures(StepState.of(batch, trainer_of(batch), mask=mask))
    assert (found["tokens"], found["left_out"]) == (17, 1)


def test_slices_by_hand():
    batch = make_batch()
    trainer, native = trainer_of(batch), native_of(batch)
    turn = np.arange(batch.num_tokens) % 2
    env = ["math", "code", "code", "math"]
    state = StepState.of(
        batch,
        trainer,
        native=native,
        weight_version=5,
        labels={"turn": turn, "env": env},
    )
    assert list(state.slices) == ["length", "weight_lag", "turn", "env"]
    assert {k: v.rows for k, v in state.slices["length"].items()} == {"6": 4, "8-15": 19}
    owner = np.repeat(np.arange(4), np.diff(batch.cu_seqlens))
    compared = batch.valid & native.valid
    sampled = ~np.isnan(batch.logprobs)
    differs = (np.sort(batch.routed_experts) != np.sort(native.routed_experts)).any(axis=-1)
    # the log-prob of a token comes of the row before it
    before = np.concatenate([[-1], batch.weight_versions[:-1]])
    for dimension, label, rows, tokens in (
        ("turn", "1", turn == 1, turn == 1),
        ("env", "code", np.isin(owner, [1, 2]), np.isin(owner, [1, 2])),
        ("weight_lag", "2", batch.weight_versions == 3, before == 3),
    ):
        part = state.slices[dimension][label]
        assert part.rows == (compared & rows).sum()
        assert part.differing == differs[compared & rows].any(axis=1).sum()
        assert part.differing_cells == differs[compared & rows].sum()
        assert part.cells == 3 * part.rows
        lr = (trainer - batch.logprobs)[sampled & tokens]
        assert part.mismatch.metrics()["kl_k1"] == pytest.approx(-lr.mean(), rel=1e-6)
        assert part.mismatch.metrics()["tokens"] == len(lr)


def test_octaves_of_lengths_and_lags(tmp_path):
    batch = make_batch(lengths=(5, 8, 15, 16, 1100))
    versions = batch.weight_versions.copy()
    versions[0], versions[1] = -1, 9
    batch = replace(batch, weight_versions=versions)
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        found = monitor.record(0, batch=batch, trainer_logprobs=trainer_of(batch), weight_version=8)
    assert list(found["slices"]["length"]) == ["5", "8-15", "16-31", "1,024-2,047"]
    # 0 .. 5 - 3 below 8; the row that is newer than the trainer gives a prompt token
    assert list(found["slices"]["weight_lag"]) == ["3", "4", "5"]
    state = StepState.of(batch, trainer_of(batch), native=native_of(batch), weight_version=8)
    assert set(state.slices["weight_lag"]) == {"3", "4", "5", "newer"}
    assert state.slices["weight_lag"]["newer"].rows == 1


def test_many_labels_share_the_last(tmp_path):
    batch = make_batch(lengths=(4,) * 70)
    labels = {"prompt": [f"p{i}" for i in range(70)]}
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        found = monitor.record(0, batch=batch, trainer_logprobs=trainer_of(batch), labels=labels)[
            "slices"
        ]["prompt"]
    assert len(found) == MOST_LABELS + 1
    assert list(found)[-1] == OTHER
    assert found[OTHER]["tokens"] == 70 - MOST_LABELS
    assert sum(x["tokens"] for x in found.values()) == 70


# --- ranks


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


# --- names


def test_names_cover_every_figure_once():
    batch = make_batch()
    every = set(LogprobMismatch.of(np.zeros(1), np.zeros(1)).metrics())
    assert every <= set(NAMES)
    assert len(set(NAMES.values())) == len(NAMES)
    assert len({re.sub("[^a-z0-9]", "_", name) for name in NAMES.values()}) == len(NAMES)
    state = StepState.of(
        batch,
        trainer_of(batch),
        native=native_of(batch),
        report=report_of(),
        weight_version=9,
    )
    assert set(figures(state)) | {"alerts_notice", "alerts_bad"} == set(NAMES)


def test_the_documented_names_are_these():
    text = (Path(__file__).parent.parent / "docs" / "monitoring.md").read_text()
    table = text.split("<!-- names -->")[1]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    assert {a.strip(" `"): b.strip(" `") for a, b in rows} == NAMES
    assert len(rows) == len(NAMES)


# --- environment and alerts


def test_a_changed_environment_is_recorded_once(tmp_path):
    batch, path = make_batch(), tmp_path / "m.jsonl"
    engine = Provenance(
        engine="vllm",
        engine_version="0.32",
        dtype="bfloat16",
        parallel={"tensor": 2},
        sampling={"temperature": 1.0, "seed": 1, "engine_seed": 3, "max_tokens": 10},
        extra={"torch": {"version": "2.13"}, "weight_versions": [["a", 0, 1]], "draft": None},
    )
    with StepMonitor(path) as monitor:
        first = monitor.record(0, batch=batch, engine=engine)
        assert first["changes"] == {}
        assert first["environment"] == {
            "engine.engine": "vllm",
            "engine.engine_version": "0.32",
            "engine.dtype": "bfloat16",
            "engine.parallel.tensor": 2,
            "engine.sampling.temperature": 1.0,
            "engine.extra.torch.version": "2.13",
            "engine.extra.draft": None,
        }
        quiet = replace(engine, sampling={"temperature": 1.0, "seed": 2, "max_tokens": 20})
        for step, made in ((1, quiet), (2, None)):
            record = monitor.record(step, batch=batch, engine=made)
            assert record["changes"] == {}
            assert record["environment"] == first["environment"]
    with StepMonitor(path) as monitor:
        record = monitor.record(
            3,
            batch=batch,
            engine=replace(engine, dtype="float8", device="cuda", parallel={}),
            trainer=Provenance(engine="megatron"),
        )
        assert record["changes"] == {
            "engine.device": [None, "cuda"],
            "engine.dtype": ["bfloat16", "float8"],
            "engine.parallel.tensor": [2, None],
        }
        (alert,) = [a for a in record["alerts"] if a["name"] == "environment"]
        assert alert["level"] == "notice"
        assert "engine.dtype: 'bfloat16' -> 'float8'" in alert["message"]
        assert monitor.record(4, batch=batch)["changes"] == {}
    assert read_metrics(path)[3]["environment"]["trainer.engine"] == "megatron"


def test_values_of_an_environment_are_plain():
    made = Provenance(extra={"stop": ["a", "b"], "path": Path("x"), "ratio": math.nan, "id": 2**64})
    found = environment_of(made, "trainer")
    assert found["trainer.extra.stop"] == "['a', 'b']"
    assert found["trainer.extra.path"] == "x"
    assert found["trainer.extra.id"] == "0x10000000000000000"


def test_rollouts_without_a_route_are_named(tmp_path):
    """field.md 88: a sequence whose rows are all missing."""
    batch = make_batch()
    valid, ids = batch.valid.copy(), batch.routed_experts.copy()
    valid[7:19] = False
    ids[~valid] = 0
    batch = replace(batch, valid=valid, routed_experts=ids)
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        record = monitor.record(0, batch=batch)
    assert record["rollouts_without_route"] == ["run/0/2/0/0"]
    assert record["metrics"]["routing/rollouts_without_route"] == 1
    assert record["metrics"]["routing/rows_without_route_fraction"] == pytest.approx(11 / 24)
    names = [a["name"] for a in record["alerts"]]
    assert names == ["rollout_without_route", "rows_without_route"]
    assert "run/0/2/0/0" in record["alerts"][0]["message"]
    assert record["metrics"]["routing/alerts_bad"] == 1
    assert record["metrics"]["routing/alerts_notice"] == 1


def test_tokens_left_out_are_recorded_with_their_kind(tmp_path):
    batch = make_batch()
    trainer = trainer_of(batch)
    at = np.flatnonzero(~np.isnan(batch.logprobs))[:2]
    trainer[at] = np.nan, 0.5
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        record = monitor.record(0, batch=batch, trainer_logprobs=trainer)
    assert record["left_out"] == {"trainer_nan": 1, "trainer_positive": 1}
    assert record["metrics"]["routing/left_out"] == 2
    assert "run/0/0/0/0" in record["examples"][0]
    assert "left_out" in [a["name"] for a in record["alerts"]]


def test_an_alignment_is_recorded(tmp_path):
    batch = make_batch(lengths=(400, 400))
    ids = np.concatenate([batch.routed_experts[1:], batch.routed_experts[:1]])
    ids[~ids.any(axis=(1, 2))] = [0, 1]
    shifted = diagnose(batch, ids)
    assert shifted.fault == "row shift"
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        record = monitor.record(0, batch=batch, alignment=shifted)
        assert record["alignment"] == {"fault": "row shift", "text": str(shifted)}
        assert [a["name"] for a in record["alerts"]] == ["alignment"]
        right = diagnose(batch, batch.routed_experts)
        assert monitor.record(1, batch=batch, alignment=right)["alerts"] == []


def test_trends_go_on_after_a_restart(tmp_path):
    batch, path = make_batch(lengths=(30,) * 8), tmp_path / "m.jsonl"
    native = native_of(batch, share=0.1)
    with StepMonitor(path) as monitor:
        for step in range(30):
            monitor.record(step, batch=batch, native=native)
    worse = native_of(batch, share=0.9)
    with StepMonitor(path) as monitor:  # from a checkpoint at step 20
        record = monitor.record(20, batch=batch, native=worse)
        assert [a["name"] for a in record["alerts"]] == ["disagreement_jump"]
    with StepMonitor(path) as monitor:  # what the first run had after step 20 is left behind
        assert [step for step, _ in monitor._past] == list(range(21))
    with StepMonitor(tmp_path / "new.jsonl") as monitor:
        assert monitor.record(20, batch=batch, native=worse)["alerts"] == []
    found = read_metrics(path)
    assert [r["step"] for r in found] == list(range(30))
    assert found[20] == strict(json.dumps(found[20]))
    assert found[20]["alerts"][0]["name"] == "disagreement_jump"
    again = find_alerts([r["metrics"] for r in found[:20]], found[20])
    assert [a.to_dict() for a in again] == found[20]["alerts"]


# --- callback


def test_a_callback_gets_the_same_names(tmp_path):
    batch, seen = make_batch(), []
    with StepMonitor(tmp_path / "m.jsonl", lambda *x: seen.append(x)) as monitor:
        record = monitor.record(5, batch=batch, trainer_logprobs=trainer_of(batch))
    ((step, flat),) = seen
    assert step == 5
    assert all(type(x) is float for x in flat.values())
    assert flat == {k: v for k, v in record["metrics"].items() if not math.isnan(v)}


def test_a_callback_that_fails_loses_no_line(tmp_path):
    def fail(step: int, flat: dict) -> None:
        raise RuntimeError("no connection")

    with StepMonitor(tmp_path / "m.jsonl", fail) as monitor:
        for step in (0, 1):
            with pytest.raises(RuntimeError, match="no connection"):
                monitor.record(step, batch=make_batch())
        assert [r["step"] for r in read_metrics(tmp_path / "m.jsonl")] == [0, 1]


# --- the file


def test_nan_and_infinity_are_null(tmp_path):
    batch = make_batch(lengths=(5,))
    trainer = np.full(5, -1.0)
    logprobs = batch.logprobs.copy()
    logprobs[3:] = -2000, -1
    batch = replace(batch, logprobs=logprobs)
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        record = monitor.record(0, batch=batch, trainer_logprobs=trainer)
    assert record["metrics"]["rollout_corr/k3_kl"] == math.inf
    (line,) = lines_of(tmp_path / "m.jsonl")
    assert line["metrics"]["rollout_corr/k3_kl"] is None
    assert line["metrics"]["routing/abs_logratio_max"] == 1999
    assert {"kl", "wrong_token"} <= {a["name"] for a in line["alerts"]}


def test_a_torn_last_line_is_cut_off(tmp_path):
    path, batch = tmp_path / "m.jsonl", make_batch()
    with StepMonitor(path) as monitor:
        for step in range(3):
            monitor.record(step, batch=batch)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in (last + 1, last + 9, last + 200, len(whole) - 2):
        path.write_bytes(whole[:end])
        assert [r["step"] for r in read_metrics(path)] == [0, 1]
        with pytest.warns(TornShardWarning, match=rf"{end - last} bytes are cut off") as caught:
            monitor = StepMonitor(path)
        assert caught[0].filename == __file__
        with monitor:
            monitor.record(2, batch=batch)
        assert [r["step"] for r in read_metrics(path)] == [0, 1, 2]
    path.write_bytes(whole[:-1])  # a whole record without its newline is kept
    with StepMonitor(path) as monitor:
        monitor.record(3, batch=batch)
    assert [r["step"] for r in read_metrics(path)] == [0, 1, 2, 3]
    path.write_bytes(whole[:30])  # nothing but a torn line
    with pytest.warns(TornShardWarning), StepMonitor(path) as monitor:
        monitor.record(0, batch=batch)
    assert len(lines_of(path)) == 1


RECORD = b'{"step":1,"time":1.5,"metrics":{"a":1}}'


@pytest.mark.parametrize(
    "content",
    [
        *(b"abc", b"R3SHARD\x00\x01\x02", b'{"a": 1}\n', b"[1]\n{", b'{"step": 1}\nxyz', b"\n"),
        # whole JSON values without a newline
        *(b'{"step": 1, "loss": 2.5}', b'{"step":1,"metrics":{"a":"str"}}', b"17", b'"text"'),
        *(b'{"step":1,"time":2,"loss":2.5}', b'{"step":1,"time":2} and more'),
        b'{"step":1,"time":2,"metrics":{"a":' + b"1" * 5000 + b"}}",
        b'{"step":1,"time":NaN}',
        b'{"step":1,"time":2,"text":"\xff"}',
        # beginnings, but not surely of a line of ours
        *(
            b"{",
            b'{"step',
            b'{"step":',
            b'{"step":1',
            b'{"step":1,"time"',
            b'{"step": 1, "time": 2',
        ),
        *(b'{"step":"1","time":', b'{"step":1,"loss":2.', b'{"step":1,"time":2,"loss":'),
        *(b'{"step":1,"time":noon', b'{"step":1,"time":' + b"[" * 5000),
        # behind records of ours
        *(RECORD + b'\n{"step": 1, "loss": 2.5}', RECORD + b"\n[1]", RECORD + b"\n" + b"[" * 5000),
    ],
)
def test_another_kind_of_file_stays_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    for act in (StepMonitor, read_metrics):
        with pytest.raises(FormatError, match=r"notes\.txt"):
            act(path)
        assert path.read_bytes() == content


def test_a_last_line_is_kept_or_cut_off_but_never_lost(tmp_path):
    """Any beginning of a line, alone and behind a record"""
    path = tmp_path / "m.jsonl"
    surely = len(b'{"step":1,"time":')
    for before in (b"", RECORD + b"\n"):
        for end in range(1, len(RECORD) + 1):
            rest = RECORD[:end]
            path.write_bytes(before + rest)
            if rest == RECORD:
                StepMonitor(path).close()
                assert path.read_bytes() == before + rest + b"\n"
                assert read_metrics(path) == [json.loads(RECORD)]
            elif before or end >= surely:
                assert len(read_metrics(path)) == bool(before)
                with pytest.warns(TornShardWarning, match=f"{end} bytes are cut off"):
                    StepMonitor(path).close()
                assert path.read_bytes() == before
            else:
                with pytest.raises(FormatError, match="expected JSON lines of a StepMonitor"):
                    StepMonitor(path)
                assert path.read_bytes() == before + rest


def test_a_line_beyond_all_size_is_no_torn_one(tmp_path, monkeypatch):
    monkeypatch.setattr("r3.metrics_file.MAX_LINE", 100_000)
    path = tmp_path / "m.jsonl"
    content = RECORD[:-2] * 5000
    path.write_bytes(content)
    for act in (StepMonitor, read_metrics):
        with pytest.raises(FormatError, match="more than 100000 bytes"):
            act(path)
    assert path.read_bytes() == content


def test_no_steps_are_none(tmp_path):
    path = tmp_path / "m.jsonl"
    with StepMonitor(path):
        assert read_metrics(path) == read_metrics(path, last=1) == []
    assert read_metrics(path) == []


def test_only_the_end_of_a_long_file_is_read(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    line = json.dumps({"step": 0, "metrics": {"routing/rows": 1}, "pad": "x" * 5000})
    lines = [line.replace('"step": 0', f'"step": {i}') for i in range(1000)]
    path.write_text("not JSON\n" + "\n".join(lines) + "\n")
    with StepMonitor(path) as monitor:
        assert [step for step, _ in monitor._past] == list(range(900, 1000))
    with pytest.raises(FormatError, match="line 1: not strict JSON"):
        read_metrics(path)
    path.write_text("\n".join(lines) + "\n")
    assert [r["step"] for r in read_metrics(path)] == list(range(1000))
    monkeypatch.setattr("r3.metrics_file.MAX_LINE", 5000)
    with pytest.raises(FormatError, match="line 1: more than 5000 bytes"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "metrics": {"a": NaN}}', "NaN is no JSON"),
        ('{"step": 1, "metrics": {"a": true}}', "a is True, expected a number or null"),
        ('{"step": 1, "metrics": {"a": "1"}}', "a is '1', expected a number or null"),
        ('{"step": 1}', 'expected an object with "metrics"'),
        ('{"metrics": {}}', 'expected an object with "step"'),
        ('{"step": 1, "metrics": []}', r"metrics is \[\], expected an object"),
        ('{"step": 1.0, "metrics": {}}', "step is 1.0, expected an integer"),
        ('{"step": true, "metrics": {}}', "step is True, expected an integer"),
        (f'{{"step": {2**63}, "metrics": {{}}}}', "step is 9223372036854775808, expected"),
        ("[]", r"it is \[\], expected an object"),
        ("[" * 100_000, "not strict JSON"),
        ("", "not strict JSON"),
    ],
)
def test_a_line_that_no_monitor_writes_is_named(tmp_path, line, message):
    path = tmp_path / "m.jsonl"
    good = '{"step": 0, "metrics": {}}'
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(FormatError, match=rf"m\.jsonl: line 2: .*{message}"):
        read_metrics(path)


ALERT = {"name": "kl", "level": "bad", "message": "m", "look_at": "l", "figure": None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metrics": {"a": 10**400}}, r"metrics\.a is 10000.*0000, expected a number or null"),
        ({"metrics": {"a": math.inf}}, r"metrics\.a is inf"),  # as 1e999 is read
        (
            {"metrics": {"a": DEEP}},
            r"metrics\.a is \[\[\[\[\[\[\[...\]+, expected a number or null",
        ),
        ({"time": "now"}, "time is 'now', expected a number"),
        ({"alerts": {}}, "alerts is {}, expected a list"),
        ({"alerts": None}, "alerts is None, expected a list"),
        ({"alerts": ["kl"]}, r"alerts\.0 is 'kl', expected an object"),
        (
            {"alerts": [ALERT, {**ALERT, "level": "good"}]},
            r"alerts\.1\.level is 'good', expected one",
        ),
        ({"alerts": [{**ALERT, "level": []}]}, r"alerts\.0\.level is \[\]"),
        ({"alerts": [{**ALERT, "figure": 1}]}, r"alerts\.0\.figure is 1, expected text or null"),
        (
            {"alerts": [{**ALERT, "value": "1"}]},
            r"alerts\.0\.value is '1', expected a number or null",
        ),
        ({"alerts": [{**ALERT, "more": DEEP}]}, r"alerts\.0\.more is .*levels of lists"),
        *(
            ({"alerts": [{**ALERT, name: 1}]}, rf"alerts\.0\.{name} is 1, expected text")
            for name in ("name", "message", "look_at")
        ),
        *(
            (
                {"alerts": [{k: v for k, v in ALERT.items() if k != name}]},
                rf'alerts\.0 is .*, expected an object with "{name}"',
            )
            for name in ("name", "message", "look_at", "level")
        ),
        ({"layers": {"1": {}}}, "layers is .*, expected a list"),
        ({"layers": [1]}, r"layers\.0 is 1, expected an object"),
        ({"layers": [{}]}, r'layers\.0 is {}, expected an object with "layer"'),
        ({"layers": [{"layer": 1.0}]}, r"layers\.0\.layer is 1\.0, expected a layer"),
        ({"layers": [{"layer": -1}]}, r"layers\.0\.layer is -1"),
        ({"layers": [{"layer": 2**31 + 1}]}, r"layers\.0\.layer is 2147483649"),
        ({"layers": [{"layer": 1, "max_vio_engine": "1"}]}, r"layers\.0\.max_vio_engine is '1'"),
        ({"slices": []}, r"slices is \[\], expected an object"),
        ({"slices": {"length": {"8-15": 1}}}, r"slices\.length\.8-15 is 1, expected an object"),
        ({"slices": {"length": {"8-15": {"rows": []}}}}, r"slices\.length\.8-15\.rows is \[\]"),
        ({"changes": []}, "changes is"),
        (
            {"changes": {"engine.dtype": "x"}},
            r"changes\.engine\.dtype is 'x', expected a list of 2",
        ),
        ({"changes": {"a": [1, 2, 3]}}, r"changes\.a is \[1, 2, 3\], expected a list of 2"),
        ({"changes": {"a": [1, [2]]}}, r"changes\.a\.1 is \[2\], expected text, a number"),
        ({"environment": 1}, "environment is 1, expected an object"),
        ({"environment": {"a": {}}}, r"environment\.a is {}"),
        (
            {"left_out": {"trainer_nan": -1}},
            r"left_out\.trainer_nan is -1, expected an integer of 0",
        ),
        ({"left_out": {"trainer_nan": 2**63}}, r"left_out\.trainer_nan is"),
        ({"examples": "text"}, "examples is 'text', expected a list"),
        ({"examples": [1]}, r"examples\.0 is 1, expected text"),
        ({"rollouts_without_route": [None]}, r"rollouts_without_route\.0 is None, expected text"),
        ({"alignment": []}, r"alignment is \[\], expected an object"),
        ({"alignment": {"fault": 1, "text": ""}}, r"alignment\.fault is 1, expected text or null"),
        ({"alignment": {"fault": "row shift"}}, 'alignment is .*, expected an object with "text"'),
        ({"pad": DEEP}, "pad is .*, expected at most 15 levels of lists and objects"),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path, fields, message):
    path = tmp_path / "m.jsonl"
    good = json.dumps({"step": 0, "metrics": {}})
    bad = json.dumps({"step": 1, "metrics": {}, **fields}).replace("Infinity", "1e999")
    path.write_text(f"{good}\n{bad}\n{good}\n")
    with pytest.raises(FormatError, match=rf"m\.jsonl: line 2: {message}") as caught:
        read_metrics(path)
    assert len(str(caught.value)) < 500
    with pytest.raises(FormatError, match=rf"m\.jsonl: line 2 from the end: {message}"):
        StepMonitor(path)


def test_lines_of_other_versions_are_read(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = [
        {"step": 0, "metrics": {}},
        {"step": 1, "metrics": {"a": None, "b": 1, "c": -1e300}, "alignment": None, "pad": [[1]]},
        {
            "step": 2,
            "metrics": {},
            "alerts": [{**ALERT, "more": {"a": 1}}],
            "layers": [{"layer": 0}],
        },
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_metrics(path) == lines
    with StepMonitor(path) as monitor:
        monitor.record(3, batch=make_batch())
    assert len(read_metrics(path)) == 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=40), st.integers(1, 25))
def test_the_highest_steps_are_kept(tmp_path_factory, steps, last):
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    lines = [{"step": step, "metrics": {"at": i}} for i, step in enumerate(steps)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_metrics(path, last=last) == read_metrics(path)[-last:]


def test_a_number_of_steps_that_is_none(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"")
    for last in (0, -1, True, 1.0, "1"):
        with pytest.raises(TraceError, match="expected None or an integer of at least 1"):
            read_metrics(path, last=last)


def test_files_that_are_none(tmp_path):
    for act in (StepMonitor, read_metrics):
        with pytest.raises(FormatError, match="a folder, expected a metrics file"):
            act(tmp_path)
        with pytest.raises(FormatError, match=r"none/m\.jsonl: cannot be opened"):
            act(tmp_path / "none" / "m.jsonl")
    with pytest.raises(FormatError, match="No such file"):
        read_metrics(tmp_path / "m.jsonl")


def test_one_monitor_at_a_time(tmp_path):
    path = tmp_path / "m.jsonl"
    with StepMonitor(path), pytest.raises(FormatError, match="another monitor has this file"):
        StepMonitor(path)
    with StepMonitor(path) as monitor:
        monitor.record(0, batch=make_batch())
        shared = os.dup(monitor._file._file.fileno())  # as a forked process has it
    StepMonitor(path).close()
    os.close(shared)
    with pytest.raises(R3Error, match=r"m\.jsonl: is closed"):
        monitor.record(1, batch=make_batch())
    monitor.close()


def test_a_full_disk_leaves_no_half_line(tmp_path):
    path, batch = tmp_path / "m.jsonl", make_batch()
    with StepMonitor(path) as monitor:
        monitor.record(0, batch=batch)
        size = path.stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            for room in (100, 0):
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
                with pytest.raises(R3Error, match=r"m\.jsonl: .*(disk full|cannot be written)"):
                    monitor.record(1, batch=batch)
                assert path.stat().st_size == size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        monitor.record(1, batch=batch)
    assert [r["step"] for r in lines_of(path)] == [0, 1]
