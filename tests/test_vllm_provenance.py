"""What a trace says of how it was made, against the objects of the engine that made it."""

from __future__ import annotations

import pytest

import provenance_runs

pytestmark = pytest.mark.slow


def test_fields_are_those_of_the_engine(model_dir, run_engine):
    found = run_engine(provenance_runs.in_process, model=model_dir("qwen3_moe"))
    made, own = found["made"], found["own"]
    assert made["moe_kernel"] == "/".join(own["kernel"])
    assert made["attention_backend"] == own["attention"]
    assert f"torch.{made['kv_cache_dtype']}" == own["kv"] == "torch.bfloat16"
    assert f"torch.{made['dtype']}" == own["parameters"] == "torch.bfloat16"
    assert f"torch.{made['head_dtype']}" == own["logits"]
    assert made["engine_version"].startswith("0.3")
    assert made["batch_invariant"] is False
    assert made["logprobs_mode"] == "processed_logprobs"
    assert made["device"] == "cpu"
    assert made["parallel"] == {"tensor": 1, "pipeline": 1, "data": 1, "expert": 1}
    assert made["sampling"]["temperature"] == 0.5
    assert made["extra"] == {
        "rows": "hook",
        "compilation": "none",
        "cudagraphs": "none",
        "async_scheduling": False,
        "speculative": "ngram",
        "speculative_tokens": 2,
    }
    # a config alone knows nothing of the workers, until they were asked, which happens once
    assert "moe_kernel" not in found["before"]
    assert found["before"]["kv_cache_dtype"] == "auto"
    assert found["after"] == {k: v for k, v in made.items() if k != "sampling"}
    assert found["calls"] == [("r3_facts",)]
    print(f"provenance(): {found['seconds'] * 1e6:.0f} us")  # pytest -s
    assert found["seconds"] < 1e-3, "it is made for every trace"


@pytest.mark.full
def test_an_engine_process_and_a_dead_one(model_dir, run_engine):
    found = run_engine(provenance_runs.multiprocess, model=model_dir("qwen3_moe"))
    alive = found["alive"]
    assert alive["moe_kernel"]
    assert alive["attention_backend"]
    assert (alive["dtype"], alive["kv_cache_dtype"]) == ("float32", "float32")
    assert found["kept"] == alive
    assert "moe_kernel" not in found["dead"]
    assert found["dead"]["extra"]["rows"] == "hook"


@pytest.mark.full
def test_asynchronous_and_without_capture(model_dir, run_engine):
    found = run_engine(provenance_runs.without_capture, model=model_dir("qwen3_moe"))
    assert "moe_kernel" not in found["not asked"]
    assert found["nobody"] == {}
    assert found["facts"] == found["again"]
    assert found["asked"]["moe_kernel"] == found["facts"]["moe_kernel"]
    assert found["asked"]["extra"]["cudagraphs"] == found["facts"]["cudagraphs"]
    assert found["off facts"] == {}
    assert "rows" not in found["off"]["extra"]
    assert found["off"]["dtype"] == "float32"
