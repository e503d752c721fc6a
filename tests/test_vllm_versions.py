"""The other supported vLLM: 0.31, from a folder that `make test-full` fills."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routing_check import check_routing
from serve_tools import APIS, Server, traces_of
from tiny_models import hf_routing
from update_runs import _llm, _tokens, _traces

pytestmark = [pytest.mark.slow, pytest.mark.full]

OLD = Path(__file__).parents[1] / ".venv" / "vllm-0.31"


def old_load(report: Any, *, model: Path, compiled: bool) -> tuple[str, list[Any], float]:
    """Chunked prefill, prefix hits and preemption; vLLM's version, the traces, preemptions."""
    import random

    assert "vllm" not in sys.modules
    sys.path.insert(0, str(OLD))
    import vllm

    llm = _llm(
        model,
        enforce_eager=not compiled,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=2 << 20,
        disable_log_stats=False,
    )
    rng = random.Random(2)
    prefix = _tokens(rng, 71)
    prompts = [prefix + _tokens(rng, rng.randrange(1, 60)) for _ in range(24)]
    traces = _traces(llm, prompts, 60) + _traces(llm, prompts[:8], 60)
    preempted = next(m for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    return vllm.__version__, traces, preempted.value


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_vllm_0_31(compiled, model_dir, run_engine):
    assert (OLD / "vllm").is_dir(), "run `make test-full`, which installs vLLM 0.31 there"
    model = model_dir("qwen3_moe")
    version, traces, preempted = run_engine(old_load, model=model, compiled=compiled)
    assert version.startswith("0.31.")
    assert preempted > 0
    cells = 0
    truth = hf_routing(model, [t.token_ids for t in traces], traces[0].spec.top_k)
    for trace, (experts, gap) in zip(traces, truth, strict=True):
        assert trace.provenance.engine_version == version
        assert trace.valid.all()
        wrong = (np.sort(trace.routed_experts, -1) != experts[:-1]).any(axis=-1)
        assert not (wrong & (gap[:-1] >= 1e-4)).any()
        cells += wrong.size
    assert cells > 10_000


def test_server_of_vllm_0_31(model_dir, tmp_path, monkeypatch):
    """n is 1: its own streams of /inference/v1/generate fail with more."""
    monkeypatch.setenv("PYTHONPATH", str(OLD))
    model, prompt = model_dir("qwen3_moe"), list(range(400, 475))
    traces = []
    with Server(model, tmp_path, store=tmp_path / "store") as server:
        server.ready()
        assert server.info()["provenance"]["engine_version"].startswith("0.31.")
        for api in APIS:
            for stream in (False, True):
                for form in ("npy", "compact", "reference"):
                    reply = server.ask(api, prompt, form=form, stream=stream)
                    traces += traces_of(reply, server.spec(), store=server.store)
    assert len(traces) == 18
    counts = check_routing(traces, model)
    assert counts.shifted > 0.2 * counts.cells
