"""`r3 compare`, `r3 show` and `r3 report` as a user and a script meet them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import r3
from cli_tools import assert_one_line_and_exit_2
from comparison_tools import SPEC, draw_rollout, write_shard
from r3.cli.compare import compare_files
from r3.comparison import Comparison
from r3.monitor import StepMonitor
from r3.storage import ShardReader, ShardWriter


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `r3 report` takes it, of 12 rollouts, in another order on each side."""
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    rollouts = [draw_rollout(rng, i) for i in range(12)]
    for side, name in enumerate(("routing.r3", "native.r3", "replay.r3")):
        order = rng.permutation(12)
        write_shard(folder / name, [rollouts[i][side] for i in order])
    return folder


def test_the_document_is_what_comparing_traces_gives(r3_here, captures):
    names = ("routing.r3", "native.r3", "replay.r3")
    done = r3_here(
        "compare", *(captures / n for n in names[:2]), "--replay", captures / names[2], "--json"
    )
    document = strict_json(done.stdout)
    comparison = Comparison(SPEC)
    with ShardReader(captures / names[0]) as a:
        shards = [ShardReader(captures / n) for n in names[1:]]
        for trace in a:
            comparison.add(trace, *(s.get(trace.rollout_id) for s in shards))
    expected = comparison.to_dict()
    assert (
        document["routing"]["native"]["cell_disagreement"]
        == (expected["routing"]["native"]["cell_disagreement"])
    )
    assert (
        document["mismatch"]["replay"]["metrics"]["kl_k3"]
        == (expected["mismatch"]["replay"]["metrics"]["kl_k3"])
    )
    assert document["format"] == "r3-comparison/1"
    assert document["files"]["a"]["label"] == "vllm bfloat16"
    assert document["files"]["b"]["provenance"]["dtype"] == [["float32", 12]]
    assert document["pairs"]["rollouts"] == document["files"]["c"]["rollouts"] == 12
    assert document["environment"]["numpy"] == np.__version__
    # the drawn log-ratios are far too large for the tails of a healthy run
    assert done.returncode == {"bad": 1}.get(document["verdict"]["level"], 0)


def test_exit_code_says_whether_the_verdict_is_bad(r3_here, captures):
    well = r3_here("compare", captures / "routing.r3", captures / "replay.r3")
    assert well.returncode == 0, well.stderr
    assert "Routing is not the problem" in well.stdout
    badly = r3_here("compare", captures / "routing.r3", captures / "native.r3")
    assert badly.returncode == 1, badly.stdout
    assert "   bad  " in badly.stdout
    assert badly.stderr == ""


def test_rollouts_on_one_side_only_are_counted(captures, tmp_path):
    with ShardReader(captures / "native.r3") as shard:
        some = write_shard(tmp_path / "some.r3", [shard[i] for i in range(1, 5)])
    document = compare_files(captures / "routing.r3", some)
    assert (document["pairs"]["rollouts"], document["pairs"]["only_a"]) == (4, 8)
    assert len(document["pairs"]["examples_only_a"]) == 3
    back = compare_files(some, captures / "routing.r3")
    assert (back["pairs"]["only_a"], back["pairs"]["only_b"]) == (0, 8)
    # log-ratios are of the second side against the first
    one, other = (d["mismatch"]["native"]["metrics"] for d in (document, back))
    assert one["kl_k1"] == pytest.approx(-other["kl_k1"])


@pytest.mark.slow
def test_bad_input_is_one_clear_line(r3_here, captures, tmp_path):
    rng = np.random.default_rng(1)
    a = captures / "routing.r3"
    other = write_shard(tmp_path / "other.r3", [draw_rollout(rng, 0, run="elsewhere")[0]])
    assert_one_line_and_exit_2(
        r3_here("compare", a, other), "no rollout of", "elsewhere/0/0/0/0", "by their id"
    )
    tokens = write_shard(tmp_path / "tokens.r3", [draw_rollout(rng, i)[0] for i in range(12)])
    assert_one_line_and_exit_2(r3_here("compare", a, tokens), "rollout run/", "token")
    spec = r3.RouterSpec(16, 2, (1, 2, 4), 5)
    models = write_shard(tmp_path / "models.r3", [draw_rollout(rng, 0, spec=spec)[0]])
    assert_one_line_and_exit_2(
        r3_here("compare", a, models), "models.r3", "num_experts=16", "expected"
    )
    ShardWriter(tmp_path / "none.r3", SPEC).close()
    assert_one_line_and_exit_2(r3_here("compare", a, tmp_path / "none.r3"), "no rollouts")
    (tmp_path / "empty.r3").write_bytes(b"")
    assert_one_line_and_exit_2(r3_here("compare", a, tmp_path / "empty.r3"), "empty.r3")
    assert_one_line_and_exit_2(r3_here("compare", a, tmp_path / "absent.r3"), "absent.r3")
    assert_one_line_and_exit_2(r3_here("compare", a, tmp_path), str(tmp_path))
    damaged = bytearray(a.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged.r3").write_bytes(damaged)
    assert_one_line_and_exit_2(r3_here("compare", a, tmp_path / "damaged.r3"), "damaged.r3")
    assert_one_line_and_exit_2(
        r3_here("compare", a, a, "--tokenizer", tmp_path), "no tokenizer.json"
    )
    done = r3_here("compare", a, a, "-o", tmp_path / "no" / "folder.html")
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    for out in (a, ".", "/", ""):
        done = r3_here("compare", a, captures / "replay.r3", "-o", out)
        assert done.returncode == 2, out
        assert done.stderr.count("\n") == 1
    (tmp_path / "metrics.jsonl").touch()
    assert_one_line_and_exit_2(r3_here("report", tmp_path), "metrics.jsonl", "no step")
    (tmp_path / "metrics.jsonl").unlink()
    for args in (
        (a, "9" * 5000),
        (a, "0", "--layers", "9" * 5000),
        (a, "0", "--tokens", "9" * 5000),
    ):
        assert r3_here("show", *args).returncode == 2
    assert_one_line_and_exit_2(r3_here("report", tmp_path / "nowhere"), "nowhere")
    assert_one_line_and_exit_2(r3_here("report", tmp_path), "neither routing.r3 with native.r3")
    assert_one_line_and_exit_2(r3_here("show", a, "run/99/0/0/0"), "no rollout run/99/0/0/0")
    assert_one_line_and_exit_2(r3_here("show", a, "12"), "record 12, expected one of 12")
    assert_one_line_and_exit_2(r3_here("show", a, "0", "--layers", "3"), "layer 3, expected")
    assert_one_line_and_exit_2(r3_here("show", a, "0", "--layers", "x"), "--layers x")
    assert_one_line_and_exit_2(r3_here("show", a, "0", "--tokens", "5"), "--tokens 5")
    assert_one_line_and_exit_2(r3_here("show", a, "nonsense"), "nonsense")


@pytest.mark.slow
def test_the_page_goes_where_it_is_told(r3_here, captures, tmp_path):
    """Not in place of a link or of what is no file."""
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text("old")
    link.symlink_to(target)
    (tmp_path / "link.html.part").write_text("mine")
    a, c = captures / "routing.r3", captures / "replay.r3"
    assert r3_here("compare", a, c, "-o", link).returncode == 0
    assert link.is_symlink()
    assert target.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("link.html", "link.html.part", "target.html")
    ]
    assert (tmp_path / "link.html.part").read_text() == "mine"
    assert r3_here("compare", a, c, "-o", "/dev/null").returncode == 0
    assert Path("/dev/null").is_char_device()


def test_text_of_files_is_shown_as_it_is(r3_here, tmp_path):
    traces = draw_rollout(np.random.default_rng(4), 0, sides=2, run="[bold]:warning:\x1b[31m")
    for side in (0, 1):
        write_shard(tmp_path / f"{side}.r3", [traces[side]])
    done = r3_here("compare", tmp_path / "0.r3", tmp_path / "1.r3")
    assert "[bold]:warning:\ufffd[31m/0/0/0/0" in done.stdout.replace("\n", "")


def test_rollouts_that_only_the_third_file_lacks(captures, tmp_path):
    with ShardReader(captures / "replay.r3") as shard:
        some = write_shard(tmp_path / "some.r3", [shard[i] for i in range(4)])
    pairs = compare_files(captures / "routing.r3", captures / "native.r3", some)["pairs"]
    assert (pairs["rollouts"], pairs["only_a"], pairs["only_b"], pairs["not_in_c"]) == (4, 0, 0, 8)


def test_the_first_expert_needs_files_that_keep_the_order(r3_here, captures, tmp_path):
    a = captures / "routing.r3"
    done = r3_here("compare", a, a, "--ordered")
    assert_one_line_and_exit_2(done, "routing.r3 does not keep the order", "keep_order=True")
    rng = np.random.default_rng(3)
    traces = [draw_rollout(rng, i, sides=2) for i in (1, 2)]
    changed = 0
    for side in (0, 1):
        with ShardWriter(tmp_path / f"{side}.r3", SPEC, keep_order=True) as shard:
            for pair in traces:
                shard.append(pair[side])
    for x, y in traces:
        changed += int((x.routed_experts[..., 0] != y.routed_experts[..., 0]).sum())
    done = r3_here("compare", tmp_path / "0.r3", tmp_path / "1.r3", "--ordered", "--json")
    found = strict_json(done.stdout)["routing"]["native"]
    cells = 3 * sum(x.num_rows for x, _ in traces)
    assert found["top1_changed"] == changed / cells
    done = r3_here("compare", tmp_path / "0.r3", tmp_path / "1.r3", "--ordered")
    assert f"{changed / cells:.3%}" in done.stdout


def test_files_without_logprobs_are_compared_and_named(r3_here, tmp_path):
    rng = np.random.default_rng(2)
    rollouts = [draw_rollout(rng, i, logprobs=False, sides=2) for i in range(3)]
    for side in (0, 1):
        write_shard(tmp_path / f"{side}.r3", [t[side] for t in rollouts])
    done = r3_here("compare", tmp_path / "0.r3", tmp_path / "1.r3")
    assert done.returncode == 0, done.stderr
    assert "3 of 0.r3, 3 of 1.r3; of these only routing was compared" in " ".join(
        done.stdout.split()
    )


@pytest.mark.slow
def test_report_of_a_folder_and_of_steps_alone(r3_here, captures, tmp_path):
    page = tmp_path / "page.html"
    done = r3_here("report", captures, "-o", page)
    assert "Replay works" in done.stdout
    assert f"wrote {page}" in done.stdout.replace("\n", "")
    done = r3_here("report", captures, "-o", page, "--json")
    document = strict_json(done.stdout)
    assert page.read_text().startswith("<!doctype html>")
    assert document["routing"]["replay"]["cell_disagreement"] == 0
    with ShardReader(captures / "routing.r3") as a, ShardReader(captures / "native.r3") as b:
        ours = [a[i] for i in range(4)]
        theirs = [b.get(t.rollout_id) for t in ours]
    batch, trainer = (r3.RoutingBatch.from_traces(x) for x in (ours, theirs))
    with StepMonitor(tmp_path / "metrics.jsonl") as monitor:
        for step in range(3):
            monitor.record(step, batch=batch, trainer_logprobs=trainer.logprobs, native=trainer)
    for run in (tmp_path / "metrics.jsonl", tmp_path):
        done = r3_here("report", run, "-o", page, "--json")
        document = strict_json(done.stdout)
        assert [s["step"] for s in document["steps"]] == [0, 1, 2]
        assert document["routing"] == {"native": None, "replay": None}
        assert "<h1" in page.read_text()


def test_show_lists_where_a_rollout_differs(r3_here, captures):
    a, b = captures / "routing.r3", captures / "native.r3"
    with ShardReader(a) as first, ShardReader(b) as second:
        trace = first.get("run/1/0/0/0")
        other = second.get("run/1/0/0/0")
    done = r3_here("show", a, "run/1/0/0/0", "--against", b, "--json", "--tokens", "0:1000")
    found = strict_json(done.stdout)
    assert found["tokens"] == len(found["shown"]) == trace.num_tokens
    for t in found["shown"]:
        i = t["position"]
        assert t["token_id"] == trace.token_ids[i]
        assert t["segment"] == ("prompt", "answer", "reply")[trace.segments[i]]
        # its log-probability is of the pass before
        assert t["pass_differs"] == (found["shown"][i - 1]["differs"] if i else None)
        if i == trace.num_rows:
            assert t["differs"] is t["experts"] is None
            continue
        changes = {c["layer"]: (c["from"], c["to"]) for c in t["differs"]}
        for n, layer in enumerate(SPEC.moe_layers):
            mine, theirs = (set(x.routed_experts[i, n].tolist()) for x in (trace, other))
            lost, gained = changes.get(layer, ([], []))
            assert (set(lost), set(gained)) == (mine - theirs, theirs - mine)
    text = r3_here("show", a, "run/1/0/0/0", "--against", b)
    assert "of its cells differ" in text.stdout
    shown = r3_here("show", a, "run/1/0/0/0", "--layers", "2", "--json", "--tokens", ":3")
    tokens = strict_json(shown.stdout)["shown"]
    assert [t["experts"] for t in tokens] == [
        [sorted(trace.routed_experts[i, 1].tolist())] for i in range(3)
    ]


def test_tokens_as_text(r3_here, captures, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    done = r3_here("show", captures / "routing.r3", "0", "--tokenizer", tmp_path, "--json")
    tokens = strict_json(done.stdout)["shown"]
    assert any(t["token_id"] >= 40 for t in tokens)
    for t in tokens:
        assert t["text"] == (f"w{t['token_id']}" if t["token_id"] < 40 else "")
    document = compare_files(
        captures / "routing.r3",
        captures / "native.r3",
        texts=lambda ids: [f"<{i}>" for i in ids],
    )
    for entry in document["worst"]["rollouts"]:
        excerpt = entry["excerpt"]
        assert excerpt["text"] == [f"<{i}>" for i in excerpt["token_ids"]]
    for entry in document["worst"]["tokens"]:
        assert entry["text"] == f"<{entry['token_id']}>"
