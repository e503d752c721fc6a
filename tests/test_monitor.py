"""One call per training step: what is recorded, by hand; files that are torn, full or foreign."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from r3 import (
    Provenance,
)
from r3.alerts import find_alerts
from r3.alignment import diagnose
from r3.mismatch import LogprobMismatch
from r3.monitor import NAMES, StepMonitor, StepState, environment_of, read_metrics
from r3.step_figures import MOST_LABELS, OTHER, figures
from step_tools import (
    lines_of,
    make_batch,
    native_of,
    report_of,
    strict,
    trainer_of,
)

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
