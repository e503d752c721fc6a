"""`summarize` counts what is in a shard file; `render` shows it within 80 columns."""

from __future__ import annotations

import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import r3
from r3 import Column, Provenance, RolloutId, RouterSpec, RoutingTrace
from r3.cli.inspect import render, summarize
from r3.storage import ShardWriter
from r3.storage.codec import CODECS

SPEC = RouterSpec(num_experts=64, top_k=4, moe_layers=(1, 2, 4), num_layers=5)


def random_ids(rows: int, spec: RouterSpec = SPEC, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scores = rng.random((rows, len(spec.moe_layers), spec.num_experts))
    return scores.argsort(axis=-1)[..., : spec.top_k]


def write(path: Path, *changes: dict[str, Any], spec: RouterSpec = SPEC, n: int = 12) -> Path:
    """One trace of n tokens per dict of changes."""
    with ShardWriter(path, spec) as writer:
        for i, change in enumerate(changes):
            values = {
                "spec": spec,
                "token_ids": np.arange(n),
                "routed_experts": random_ids(n - 1, spec, i),
                "prompt_len": 5,
                "rollout_id": RolloutId("run", str(i)),
            }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", r3.SuspiciousRoutingWarning)
                writer.append(RoutingTrace.build(**(values | change)))
    return path


def shown(summary: dict[str, Any]) -> str:
    console = Console(width=80, file=io.StringIO())
    render(summary, console)
    text = console.file.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 80
    return text


def test_counts(tmp_path):
    missing = np.ones(11, bool)
    missing[[3, 10]] = False
    made = Provenance(engine="vllm", sampling={"temperature": 1.0, "seed": 7})
    path = write(
        tmp_path / "a.r3",
        {"provenance": made, "valid": missing},
        {"provenance": made, "logprobs": np.zeros(8), "prompt_len": 4},
        {"provenance": Provenance(engine="vllm", sampling={"temperature": 0.7})},
    )
    s = summarize(path)
    assert json.loads(json.dumps(s)) == s
    assert (s["file"], s["file_bytes"]) == (str(path), path.stat().st_size)
    assert (s["traces"], s["tokens"], s["rows"], s["missing_rows"]) == (3, 36, 33, 2)
    assert (s["prompt_tokens"], s["response_tokens"]) == (14, 22)
    assert (s["moe_layers"], s["num_layers"], s["num_experts"], s["top_k"]) == (3, 5, 64, 4)
    assert s["bytes_per_token_per_layer"] == path.stat().st_size / (36 * 3)
    # three layers of 9, 11 and 11 captured rows, each chunk with its checksum
    size = 3 * sum(CODECS["enum"].size(rows, SPEC) + 4 for rows in (9, 11, 11))
    assert s["experts_bits_per_cell"] == 8 * size / 99
    assert s["bound_bits_per_cell"] == math.log2(math.comb(64, 4))
    assert s["codecs"] == ["enum"]
    assert s["columns"]["valid"] == {"kind": "row bool", "codecs": {"raw": 1}, "bytes": 11}
    assert s["columns"]["routed_experts"]["bytes"] == size
    assert s["suspicious"] == {}
    assert s["provenance"]["engine"]["values"] == [{"value": "vllm", "traces": 3}]
    assert s["provenance"]["sampling.temperature"] == {
        "distinct": 2,
        "values": [{"value": 1.0, "traces": 2}, {"value": 0.7, "traces": 1}],
    }
    text = shown(s)
    for word in ("36 = 14 prompt + 22 response", "33, 2 missing", "top 4 of 64", "enum", "vllm"):
        assert word in text


def test_expert_load_is_that_of_the_valid_rows(tmp_path):
    ids = np.stack([random_ids(5000, seed=1), random_ids(5000, seed=2)])
    valid = np.random.default_rng(0).random((2, 5000)) < 0.8
    changes = [{"routed_experts": i, "valid": v} for i, v in zip(ids, valid, strict=True)]
    s = summarize(write(tmp_path / "a.r3", *changes, n=5001))
    for layer, found in enumerate(s["expert_load"]):
        load = np.zeros(64, int)
        np.add.at(load, ids[valid][:, layer], 1)
        assert found["layer"] == SPEC.moe_layers[layer]
        assert found["load"] == load.tolist()
        assert found["max_vio"] == pytest.approx(load.max() / load.mean() - 1)
        assert found["unused"] == 0


def test_imbalance(tmp_path):
    """One expert gets every row: load 11 against a mean of 11 * 4 / 64."""
    ids = random_ids(11)
    ids[:, 1] = [0, 5, 6, 7]
    s = summarize(write(tmp_path / "a.r3", {"routed_experts": ids, "token_ids": [1] * 12}))
    assert s["expert_load"][1]["max_vio"] == pytest.approx(64 / 4 - 1)
    assert s["expert_load"][1]["unused"] == 60
    assert "15.00" in shown(s)


def test_suspicious_content_is_counted_and_not_warned_of(tmp_path):
    same, filler = random_ids(99), random_ids(99)
    same[:20] = same[0]
    filler[98] = np.arange(4)
    both = same.copy()
    both[98] = np.arange(4)
    changes = [{"routed_experts": ids} for ids in (same, filler, both, random_ids(99))]
    path = write(tmp_path / "a.r3", *changes, n=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s = summarize(path)
    assert s["suspicious"] == {"repeated_rows": 2, "filler_rows": 2}
    assert s["suspicious_first"]["filler_rows"].startswith("rollout run/1/0/0/0: all layers: 1")
    text = shown(s)
    assert "4 findings" in text
    assert "2 filler_rows" in text


def test_nothing_to_divide_by(tmp_path):
    empty = summarize(write(tmp_path / "a.r3"))
    assert (empty["traces"], empty["bytes_per_token_per_layer"]) == (0, None)
    assert empty["expert_load"][0]["max_vio"] is None
    assert "traces      0" in shown(empty)
    missing = summarize(write(tmp_path / "b.r3", {"routed_experts": np.full((11, 3, 4), -1)}))
    assert missing["missing_rows"] == missing["rows"] == 11
    assert missing["expert_load"][2]["max_vio"] is None
    assert "Expert load" not in shown(missing)
    one = {"routed_experts": random_ids(0), "token_ids": [3], "prompt_len": 1}
    assert summarize(write(tmp_path / "c.r3", one))["experts_bits_per_cell"] is None


def test_many_layers_and_values_stay_readable(tmp_path):
    spec = RouterSpec(512, 10, tuple(range(3, 61)), 61)
    changes = [
        {
            "provenance": Provenance(model="org/a-name-of-some-length " * 4, sampling={"seed": i}),
            "extra": {"x": Column(np.zeros((12, 5), np.float16), "token", 3)},
        }
        for i in range(30)
    ]
    s = summarize(write(tmp_path / "a.r3", *changes, spec=spec))
    assert s["provenance"]["sampling.seed"]["distinct"] == 30
    assert len(s["provenance"]["sampling.seed"]["values"]) == 10
    text = shown(s)
    assert "and 27 other values" in text
    assert "token f2" in text


def test_text_of_a_file_is_neither_markup_nor_control_codes(tmp_path):
    made = Provenance(model="[bold]x[/]\x1b[31m", extra={"[/]": "[/nonsense]"})
    text = shown(summarize(write(tmp_path / "a.r3", {"provenance": made})))
    assert "[bold]x[/]" in text
    assert "extra.[/]" in text
    assert "\x1b" not in text
