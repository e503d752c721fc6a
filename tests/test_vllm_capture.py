"""Capture in the real vLLM against Hugging Face float32 routing, and everything it refuses."""

from __future__ import annotations

import re
from importlib.metadata import entry_points

import numpy as np
import pytest

import engine_runs
from r3.storage import ShardReader
from routing_check import check_routing

pytestmark = pytest.mark.slow


# larger than the scenarios of test_vllm_scenarios.py, which see the same in `make test`
@pytest.mark.full
@pytest.mark.parametrize(("family", "multiprocessing"), [("qwen3_moe", "0"), ("mixtral", "1")])
def test_rows_equal_hugging_face(family, multiprocessing, model_dir, run_engine, tmp_path):
    """Chunked prefill, shared prefixes and forced preemption; a shift by one row must not pass."""
    model, file = model_dir(family), tmp_path / "routing.r3"
    load = run_engine(
        engine_runs.mixed_load, model=model, file=file, multiprocessing=multiprocessing
    )
    assert load["cached_tokens"] > 1000
    assert load["preemptions"] > 0
    with ShardReader(file) as shard:
        traces = list(shard)
    assert len(traces) == 96
    made = traces[0].provenance
    assert (made.engine, made.dtype, made.device) == ("vllm", "float32", "cpu")
    assert made.engine_version.startswith("0.32.")
    assert made.logprobs_mode == "processed_logprobs"
    assert made.sampling["n"] == 2
    counts = check_routing(traces, model)
    print(f"{family}: {load}, {counts}")  # pytest -s
    assert counts.cells >= 20_000
    assert counts.near <= 0.01 * counts.cells, "too many near-ties for this to mean anything"
    assert counts.differ <= counts.near
    assert counts.shifted > 0.2 * counts.cells, "a capture shifted by one row would have passed"


def test_nothing_is_touched_without_the_key(model_dir, run_engine):
    assert run_engine(engine_runs.without_the_key, model=model_dir("qwen3_moe")) == {
        "worker": "vllm.v1.worker.cpu_worker.CPUWorker",
        "scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
        "connector": "None",
        "rows": "None",
        "routers": 3,
        "callbacks": 0,
    }


def test_plugin_is_registered():
    (ours,) = entry_points(group="vllm.general_plugins", name="r3")
    assert ours.value == "r3.engine_hooks.vllm_plugin:register"


@pytest.mark.parametrize(
    "mode", ["processed_logprobs", pytest.param("raw_logprobs", marks=pytest.mark.full)]
)
def test_logprobs_are_those_sampled_from(mode, model_dir, run_engine):
    """Against Hugging Face logits with temperature and top-p applied by hand."""
    import torch
    from transformers import AutoModelForCausalLM

    path = model_dir("qwen3_moe")
    found = run_engine(engine_runs.sampled_logprobs, model=path, mode=mode)
    assert found["warnings"] == ({"RawLogprobsWarning"} if mode == "raw_logprobs" else set())
    assert (found["mode"], found["sampling"]["top_p"]) == (mode, 0.8)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for tokens, prompt_len, logprobs in found["traces"]:
        assert np.isnan(logprobs[:prompt_len]).all()
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double()
        for t in range(prompt_len, len(tokens)):
            scores = logits[t - 1]
            if mode == "processed_logprobs":
                scores = scores / 0.7
                p, order = scores.softmax(-1).sort(descending=True)
                scores[order[p.cumsum(-1) - p >= 0.8]] = -torch.inf
            expected = scores.log_softmax(-1)[ids[t]].item()
            assert logprobs[t] == pytest.approx(expected, abs=2e-3)


def test_unsupported_settings_are_refused_by_name(model_dir, run_engine):
    found = run_engine(
        engine_runs.refusals, model=model_dir("qwen3_moe"), mixed={"dense": model_dir("qwen3")}
    )
    for name in (
        *("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"),
        *("speculative method", "scheduler_cls", "lora_config", "enable_prompt_embeds"),
        *("worker class", "dense"),
    ):
        assert name in found[name], (name, found[name])
        assert "accepted" not in found[name]
    for name in ("unknown key", "not a bool", "not a dict", "bad source"):
        assert found[name].startswith('additional_config["r3"]'), found[name]
    for name in ("compiled", "tensor parallel", "ngram", "draft model", "kv offloading"):
        assert found[name] == "accepted", (name, found[name])
    assert found["worker_cls"] == "r3.engine_hooks.vllm_worker.CaptureCPUWorker"
    assert found["off"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    expected = {  # of a vLLM that looks different from the one that capture was written for
        "as installed": "accepted",
        "later version": r"capture knows vLLM 0\.31\.x, 0\.32\.x, found 0\.33\.0",
        "earlier version": r"capture knows vLLM .*, found 0\.30\.1",
        "other source": r".*get_new_blocks does not contain 'free_block_queue\.popleft_n\('",
        "other parameters": r".*update_from_output takes \(self, outputs\), expected \(self, sched",
        "other order": r".*select_experts does not contain '_apply_eplb_mapping'",
        "other front end": r".*_output does not contain 'np\.concatenate\(self\.routed_exp",
        "other worker": r".*takes \(self\), expected \(self, grammar_output",
    }
    for name, pattern in expected.items():
        assert re.match(pattern, found[name]), (name, found[name])


def test_damaged_results_are_refused(model_dir, run_engine):
    found = run_engine(engine_runs.hostile_outputs, model=model_dir("qwen3_moe"))
    for name in ("good", "packed", "native shape"):
        assert found[name] == "accepted, 0 missing", (name, found[name])
    assert found["missing row"] == found["packed unwritten"] == "accepted, 1 missing"
    expected = {
        "packed short": "TraceError: rollout .*44 rows, expected 45",
        "packed without versions": r"TraceError: packed rows have shape \[45, 1, 3, 4\]",
        "packed wide": "TraceError: packed rows .* and dtype int32, expected .* and uint8",
        "short": "TraceError: rollout .*44 rows, expected 45",
        "long": "TraceError: rollout .*46 rows, expected 45",
        "out of range": r"TraceError: rollout .*row 3, layer 2: expert id 16, expected 0..15",
        "duplicate": r"TraceError: rollout .*row 4, layer 3: experts \[7, 7, 7, 7\]",
        "zeros": "TraceError: rollout .*row 0, layer 2.*45 of 45 rows of this layer are all zero",
        "partial -1": "TraceError: rollout .*row 2, layer 1: expert id -1",
        "absent": "CaptureError: .*returned no routed_experts",
        "unfinished": "CaptureError: .*has not finished",
        "embeddings": "CaptureError: .*no token ids",
        "few logprobs": "CaptureError: .*5 log-probabilities for 6 tokens",
        "no completion": "CaptureError: .*completion 1 asked for, found \\[0\\]",
    }
    for name, pattern in expected.items():
        assert re.match(pattern, found[name], re.DOTALL), (name, found[name])
    (ids, versions), (written, _) = found["copied"], found["written"]
    assert np.array_equal(ids[[0, 1, 2, 14]], written)  # where they were written, and copied to
    assert versions.tolist() == [0, 0, 0] + [-1] * 11 + [0]
    assert (ids[3:14] == -1).all()
    ids, versions = found["given out"]  # a block given out anew has only what came since
    assert np.array_equal(ids[[1, 14]], written[[3, 3]])
    assert versions.tolist() == [-1, 7] + [-1] * 12 + [0]
    assert "layer 2: the router did not report" in found["dumb router"]
