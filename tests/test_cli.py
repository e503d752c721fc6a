"""The command line as a user meets it: exit codes, one clear line, and the demo's promises."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import r3
from cli_tools import assert_one_line_and_exit_2, r3_command
from r3.storage import ShardReader, ShardWriter


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    spec = r3.RouterSpec(num_experts=60, top_k=4, moe_layers=(1, 2, 3), num_layers=4)
    path = tmp_path / "good.r3"
    with ShardWriter(path, spec) as writer:
        for i in range(3):
            ids = rng.random((19, 3, 60)).argsort(-1)[..., :4]
            writer.append(
                r3.RoutingTrace.build(
                    spec=spec,
                    token_ids=rng.integers(0, 99, 20),
                    routed_experts=ids,
                    prompt_len=5,
                    rollout_id=r3.RolloutId("run", str(i)),
                )
            )
    return path


def test_inspect_prints_a_table_and_json(shard):
    shown = r3_command("inspect", shard)
    assert shown.returncode == 0, shown.stderr
    assert "60" in shown.stdout
    done = r3_command("inspect", shard, "--json")
    summary = json.loads(done.stdout)
    assert (summary["traces"], summary["tokens"], summary["num_experts"]) == (3, 60, 60)


def test_inspect_refuses_what_is_not_a_shard(r3_here, shard, tmp_path):
    data = shard.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    for name, content in {
        "empty.r3": b"",
        "truncated.r3": data[:70],
        "corrupt.r3": flipped,
        "foreign.r3": b"PK\x03\x04" + bytes(500),
        "text.r3": b"hello\n",
    }.items():
        (tmp_path / name).write_bytes(content)
        assert_one_line_and_exit_2(r3_here("inspect", tmp_path / name), name)
    assert_one_line_and_exit_2(r3_here("inspect", tmp_path / "absent.r3"), "absent.r3")
    assert_one_line_and_exit_2(r3_here("inspect", tmp_path), str(tmp_path))
    assert_one_line_and_exit_2(r3_here("inspect"), "FILE")


def test_inspect_reads_what_is_whole(r3_here, shard, tmp_path):
    torn = tmp_path / "torn.r3"
    torn.write_bytes(shard.read_bytes()[:-7])
    done = r3_here("inspect", torn, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["traces"] == 3
    assert "3 whole records precede" in done.stderr


def test_demo_refuses_models_it_cannot_run(r3_here, tmp_path):
    def model(name: str, config: object, weights: bool = True) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text)
        if weights:
            (folder / "model.safetensors").write_bytes(b"")
        return folder

    sizes = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "vocab_size": 9}
    out = tmp_path / "out"
    cases = {
        tmp_path / "absent": "no such folder",
        tmp_path: "no config.json",
        model("dense", {"model_type": "qwen3", **sizes}): "dense",
        model("unknown", {"model_type": "newmoe", "num_experts": 8, **sizes}): "RouterSpec(",
        model("mixtral", {"model_type": "mixtral", "num_local_experts": 8, **sizes}): "qwen3_moe",
        model("broken", "{"): "config.json cannot be read",
        model("list", []): "not a JSON object",
        model("short", {"model_type": "qwen3_moe", "num_experts": 8}): "num_hidden_layers",
        model(
            "types", {"model_type": "qwen3_moe", "num_experts": 8, **sizes, "mlp_only_layers": 5}
        ): "mlp_only_layers is 5",
        model("deep", "[" * 100_000): "config.json cannot be read",
        model("small", {"model_type": "qwen3_moe", "num_experts": 8, **sizes, "vocab_size": 3}): (
            "vocab_size is 3"
        ),
        model("bare", {"model_type": "qwen3_moe", "num_experts": 8, **sizes}, False): "weights",
    }
    for path, words in cases.items():
        done = r3_here("demo", "--out", out, "--model", path)
        assert_one_line_and_exit_2(done, str(path), words)
    assert not out.exists()


def test_demo_refuses_bad_prompts_and_folders(r3_here, tmp_path):
    out, prompts = tmp_path / "out", tmp_path / "prompts.jsonl"
    for content, words in {
        "": "no prompts",
        "{": "line 1: not JSON",
        '{"prompt": "a"}\n{"text": "b"}\n': "line 2: expected",
        '{"prompt_token_ids": [1, 512]}': "token ids 1..512, expected 0..511",
        '{"prompt_token_ids": []}': "line 1: expected",
    }.items():
        prompts.write_text(content)
        done = r3_here("demo", "--out", out, "--prompts", prompts)
        assert_one_line_and_exit_2(done, "prompts.jsonl", words)
    prompts.write_bytes(b"\xff\xfe")
    assert_one_line_and_exit_2(r3_here("demo", "--out", out, "--prompts", prompts), "UTF-8")
    assert not out.exists()
    prompts.write_text('{"prompt": "text"}')
    done = r3_here("demo", "--out", out, "--prompts", prompts)
    assert_one_line_and_exit_2(done, "text needs a tokenizer")
    out.write_text("a file")
    assert_one_line_and_exit_2(r3_here("demo", "--out", out), str(out))


def test_demo_leaves_a_folder_of_somebody_else_alone(r3_here, tmp_path):
    (tmp_path / "routing.r3").write_text("precious")
    done = r3_here("demo", "--out", tmp_path)
    assert_one_line_and_exit_2(done, str(tmp_path), "not empty")
    assert (tmp_path / "routing.r3").read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_demo_refuses_checkpoints_before_sampling(tmp_path):
    from tiny_models import make_model

    model = make_model("qwen3_moe", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    weights = (model / "model.safetensors").read_bytes()
    for change, content, words in (
        ({"hidden_act": "gelu"}, weights, "hidden_act is 'gelu'"),
        ({"num_hidden_layers": "4"}, weights, "num_hidden_layers is '4'"),
        ({}, weights[:-100], "model.safetensors cannot be read"),
    ):
        (model / "config.json").write_text(json.dumps(config | change))
        (model / "model.safetensors").write_bytes(content)
        done = r3_command("demo", "--out", tmp_path / "out", "--model", model)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "out" / "routing.r3").exists()


@pytest.mark.full
def test_demo_with_a_model_and_text_prompts(tmp_path):
    """A checkpoint with a dense first layer and a tokenizer; fewer prompts than usual."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tiny_models import make_model

    model = make_model("qwen3_moe", tmp_path / "model", seed=5)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1").save_pretrained(model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "t7 t8 t9 t25"}\n\n{"prompt_token_ids": [11, 12, 13]}\n')
    out = tmp_path / "out"
    done = r3_command(
        "demo", "--out", out, "--model", model, "--prompts", prompts, "--max-tokens", 16
    )
    assert done.returncode == 0, done.stderr + (out / "demo.log").read_text()[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["rollouts"], summary["moe_layers"]) == (32, 3)
    assert summary["cell_disagreement_replay"] == 0
    with ShardReader(out / "routing.r3") as shard:
        assert shard[0].token_ids[:4].tolist() == [7, 8, 9, 25]
        assert shard.spec.moe_layers == (1, 2, 3)
