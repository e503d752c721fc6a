"""`r3 convert`: between .r3 files and JSON lines, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import r3
from cli_tools import assert_one_line_and_exit_2
from r3.cli.convert import read_routers
from r3.storage.wire import JSON_FORMATS, from_wire
from storage_tools import make_trace, read_all, write
from wire_tools import TOY


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "routers.json"
    path.write_text(json.dumps(TOY.to_dict()))
    return path


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write(tmp_path / "a.r3", [make_trace(TOY, n, n) for n in (1, 2, 12, 40)])


def only(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_to_json_lines_and_back(name, r3_here, shard, model, tmp_path):
    lines, again = tmp_path / "b.jsonl", tmp_path / "c.r3"
    done = r3_here("convert", shard, lines, "--to", name)
    assert (done.returncode, done.stdout.split(": ")[1]) == (0, "rollouts 4\n"), done.stderr
    assert len(lines.read_text().splitlines()) == 4
    batch = from_wire(json.loads(lines.read_text().splitlines()[2]), name, spec=TOY)
    assert batch.num_tokens == 12
    done = r3_here("convert", lines, again, "--from", name, "--model", model)
    assert done.returncode == 0, done.stderr
    found, expected = read_all(again), read_all(shard)
    own = [str(t.rollout_id) for t in expected]  # that only our format has a place for
    named = own if name == "r3" else [f"b/{i}/0/0/0" for i in range(1, 5)]
    assert [str(t.rollout_id) for t in found] == named
    assert [t.digest for t in found] == [t.digest for t in expected]
    assert only(tmp_path) == {"routers.json", "a.r3", "b.jsonl", "c.r3"}


def test_from_one_framework_to_another(r3_here, shard, model, tmp_path):
    a, b, c = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    assert r3_here("convert", shard, a, "--to", "sglang").returncode == 0
    done = r3_here("convert", a, b, "--from", "sglang", "--to", "nemo-rl", "--model", model)
    assert done.returncode == 0
    assert r3_here("convert", shard, c, "--to", "nemo-rl").returncode == 0
    assert b.read_bytes() == c.read_bytes()


def test_weight_versions_stay_in_our_own_format(r3_here, model, tmp_path):
    trace = make_trace(TOY, 12, 1, 2, weight_versions=np.arange(11))
    shard = write(tmp_path / "a.r3", [trace])
    lines, again = tmp_path / "b.jsonl", tmp_path / "c.r3"
    assert r3_here("convert", shard, lines, "--to", "r3").returncode == 0
    done = r3_here("convert", lines, again, "--from", "r3", "--model", model)
    assert done.returncode == 0
    (found,) = read_all(again)
    assert found.digest == trace.digest
    assert found.weight_versions.tolist() == [-1, -1, *range(2, 11)]


def test_errors_name_the_line_and_leave_nothing(r3_here, shard, model, tmp_path):
    lines, out = tmp_path / "b.jsonl", tmp_path / "c.r3"
    assert r3_here("convert", shard, lines, "--to", "vllm").returncode == 0
    good = lines.read_text().splitlines()
    reply = json.loads(good[3])
    reply["choices"][0]["token_ids"] += [7, 8]
    cases = {
        "{": ["not strict JSON"],
        '{"choices": NaN}': ["NaN is no JSON"],
        '{"choices": [], "choices": []}': ["a key twice"],
        "[" * 100_000: ["not strict JSON"],
        "\udcff": ["not strict JSON"],
        "{}": ["vllm: reply 0", "choices is None"],
        "7": ["vllm: the payload is 7"],
        json.dumps(reply): ["vllm: sequence 0", "39 rows", "expected 41 for 42 tokens"],
    }
    before = only(tmp_path)
    for text, words in cases.items():
        lines.write_bytes("\n".join([*good, text]).encode(errors="surrogateescape"))
        done = r3_here("convert", lines, out, "--from", "vllm", "--model", model)
        assert_one_line_and_exit_2(done, f"{lines}: line 5", *words)
        assert only(tmp_path) == before


def test_rollouts_that_a_format_cannot_hold(r3_here, tmp_path):
    valid = np.ones(11, bool)
    valid[5] = False
    trace = make_trace(TOY, 12, 1, valid=valid)
    shard = write(tmp_path / "a.r3", [make_trace(TOY, 12, 0), trace])
    done = r3_here("convert", shard, tmp_path / "b.jsonl", "--to", "skyrl")
    assert_one_line_and_exit_2(done, "skyrl", f"rollout {trace.rollout_id}", "row 5 is missing")
    assert only(tmp_path) == {"a.r3"}


def test_usage(r3_here, shard, model, tmp_path):
    lines, out = tmp_path / "b.jsonl", tmp_path / "c.r3"
    lines.write_text("")
    cases = (
        ((shard, lines), "--to is missing"),
        ((shard, out, "--from", "vllm"), "--from vllm"),
        ((shard, out), "use r3 merge"),
        ((lines, out, "--from", "vllm"), "--model is missing"),
        ((shard, tmp_path / "d.jsonl", "--to", "vllm", "--model", model), "tells its routers"),
        ((shard, tmp_path / "d.jsonl", "--to", "verl"), "--to verl: its objects hold arrays"),
        ((shard, tmp_path / "d.jsonl", "--to", "x"), "--to x: not known"),
        ((shard, lines, "--to", "vllm"), "b.jsonl: exists"),
        ((lines, out, "--from", "vllm", "--model", model), "there is no rollout"),
        ((lines, out, "--from", "vllm", "--model", tmp_path), "config.json"),
        ((tmp_path, out, "--from", "vllm", "--model", model), "a folder"),
        ((shard, tmp_path / "no" / "d.jsonl", "--to", "vllm"), "no such folder"),
    )
    for args, word in cases:
        done = r3_here("convert", *args)
        assert word in done.stderr, done.stderr
        assert done.returncode in (1, 2)
        assert done.stderr.count("\n") == 1
    assert only(tmp_path) == {"routers.json", "a.r3", "b.jsonl"}


def test_routers_of_a_model(tmp_path, model):
    assert read_routers(model) == TOY
    config = {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_routers(tmp_path).moe_layers == (1, 2, 3)
    assert read_routers(tmp_path / "config.json") == read_routers(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(r3.FormatError, match=r"config\.json: not strict JSON"):
        read_routers(tmp_path)


def test_fifo_is_refused(r3_here, model, tmp_path):
    os.mkfifo(tmp_path / "b.jsonl")
    done = r3_here(
        *("convert", tmp_path / "b.jsonl", tmp_path / "c.r3"),
        *("--from", "vllm", "--model", model),
    )
    assert_one_line_and_exit_2(done, "not a regular file")
