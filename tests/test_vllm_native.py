"""Capture on vLLM's Model Runner V2: its own ("native") rows and ours, and the self-test.

V2 runs on a CPU through Triton's interpreter (triton_cpu), in the engine's process only.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import native_runs
import triton_cpu
from r3 import RouterSpec
from r3.engine_hooks.vllm_plugin import capture_settings, choose_source
from r3.errors import UnsupportedError
from r3.storage import ShardReader
from tiny_models import hf_routing

needs_triton = pytest.mark.skipif(not triton_cpu.HAS_TRITON, reason=triton_cpu.WHY_SKIPPED)

NEAR_TIE = 1e-4  # gap of the k-th and the next router logit below which float32 may flip a set
NATIVE, HOOK = {"capture": True}, {"capture": True, "source": "hook"}


@needs_triton
@pytest.mark.parametrize(
    ("key", "family"),
    [
        pytest.param(NATIVE, "qwen3_moe", marks=pytest.mark.slow, id="native"),
        pytest.param(NATIVE, "mixtral", marks=pytest.mark.full, id="native-mixtral"),
        pytest.param(HOOK, "qwen3_moe", marks=pytest.mark.full, id="hook"),
    ],
)
def test_rows_equal_hugging_face(key, family, model_dir, run_engine, tmp_path):
    """Chunked prefill, prefix hits and preemption on V2, either source; that native rows pass
    also says that dense layers (zeros in vLLM's rows) were dropped and the self-test was passed.
    The user's weight versions go with each trace."""
    model, file = model_dir(family), tmp_path / "routing.r3"
    load = run_engine(native_runs.mixed_load, model=model, file=file, key=key)
    native = "source" not in key
    assert load["worker"] == ("NativeCPUWorker" if native else "CaptureCPUWorker")
    assert load["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert load["cached_tokens"] > 400
    assert load["preemptions"] > 0
    with ShardReader(file) as shard:
        traces, spec = list(shard), shard.spec
    assert len(traces) == 25
    truth = hf_routing(model, [t.token_ids for t in traces], spec.top_k)
    cells = differ = near = shifted_differ = 0
    for trace, (experts, gap) in zip(traces, truth, strict=True):
        assert trace.valid.all()
        assert (trace.weight_versions is None) == native
        rows = np.sort(trace.routed_experts, axis=-1)
        wrong = (rows != experts[:-1]).any(axis=-1)
        tie = gap[:-1] < NEAR_TIE
        assert not (wrong & ~tie).any(), f"{trace.rollout_id}: {np.argwhere(wrong & ~tie)[0]}"
        cells, differ, near = cells + wrong.size, differ + wrong.sum(), near + tie.sum()
        shifted = (rows[:-1] != experts[1:-1]).any(axis=-1) & ~tie[1:]
        shifted_differ += shifted.sum()
    print(f"{family}: {load}, {cells} cells, {differ} differ, {near} near-ties")  # pytest -s
    assert cells > 6000
    assert differ <= near <= 0.01 * cells
    assert shifted_differ > 0.2 * cells, "a capture shifted by one row would have passed"

    for trace in traces:
        spans = trace.provenance.extra.get("weight_versions")
        sampled = trace.num_tokens - trace.prompt_len
        if trace.rollout_id.turn == 0:  # nothing was set: vLLM says "default"
            assert spans is None
        elif trace.rollout_id.turn == 1:
            assert spans == [["step-7", 0, sampled]]
        else:
            (*before, start, end), (*after, begin, stop) = spans
            assert (before, after) == (["step-7"], ["step-8"])
            assert start == 0 < end == begin < stop == sampled


@needs_triton
# Dynamo's trace is what drops the callbacks; the C++ that follows takes half a minute
@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_native_capture_is_refused(backend, model_dir, run_engine, tmp_path):
    """vLLM 0.32 compiles on a CPU before it binds its capture, so that rows would be zeros."""
    found = run_engine(
        native_runs.compiled, model=model_dir("qwen3_moe"), cache=tmp_path, backend=backend
    )
    assert found["start"].startswith("UnsupportedError: self-test of capture over 48 random tokens")
    assert "layer 1: ids from -1 to -1, expected 0..15" in found["start"]
    # what the self-test saved us from
    assert found["rows"].shape == (22, 4, 4)
    assert (found["rows"] == 0).all()
    assert found["trace"].startswith("TraceError: "), found["trace"]


@pytest.mark.full
def test_an_installed_triton_leaves_v1(model_dir, run_engine):
    """PyPI's triton knows no CPU: vLLM takes Model Runner V1 and we our hook; native rows, asked
    for, are refused."""
    found = run_engine(native_runs.native_on_v1, model=model_dir("qwen3_moe"))
    assert (found["v2"], found["worker"]) == (False, "CaptureCPUWorker")
    assert found["native"].startswith("UnsupportedError: vLLM's own capture refuses")
    assert "requires Model Runner V2" in found["native"]


@pytest.mark.parametrize(
    ("v2", "wanted", "source", "why"),
    [
        (False, None, "hook", "V1 has no capture of its own"),
        (False, "hook", "hook", "asked for"),
        (False, "native", "native", "asked for"),
        (True, None, "native", "V2 has capture of its own"),
        (True, "native", "native", "asked for"),
        (True, "hook", "hook", "asked for"),
    ],
)
def test_choice_of_source(v2, wanted, source, why):

    found, reason = choose_source(SimpleNamespace(use_v2_model_runner=v2), wanted)
    assert found == source
    assert why in reason


class TestSelfTest:
    """check_self_test on arrays: what must pass and what must be refused, naming the layer."""

    SPEC = RouterSpec(num_experts=16, top_k=4, moe_layers=(1, 2, 3), num_layers=4)

    def ids(self, tokens: int = 48) -> np.ndarray:
        rng = np.random.default_rng(0)
        rows = rng.permuted(np.tile(np.arange(16), (tokens, 3, 1)), axis=-1)
        return rows[..., :4].astype(np.int32)

    def check(self, ids: np.ndarray, spec: RouterSpec = SPEC) -> None:
        from r3.engine_hooks.vllm_selftest import check_self_test

        check_self_test(ids, spec)

    def test_what_passes(self):
        self.check(self.ids())
        self.check(self.ids().astype(np.uint8))
        self.check(self.ids(0))
        # too few tokens to call a constant layer strange
        few = self.ids(15)
        few[:, 2] = few[0, 2]
        self.check(few)

    def test_all_experts_of_every_token(self):
        """With top_k == num_experts every row is the same set, in any order."""
        spec = RouterSpec(num_experts=4, top_k=4, moe_layers=(0,), num_layers=1)
        rows = np.random.default_rng(0).permuted(np.tile(np.arange(4), (48, 1, 1)), axis=-1)
        self.check(rows, spec)

    @pytest.mark.parametrize(
        ("at", "value", "message"),
        [
            ((slice(None), 1), -1, "layer 2: ids from -1 to -1, expected 0..15; -1 is what the"),
            ((47, 2), -1, "layer 3: ids from -1 to 15"),
            ((7, 0, 3), 16, "layer 1: ids from 0 to 16, expected 0..15"),
            ((slice(None), 2), [9, 2, 4, 7], r"layer 3: all rows are \[2, 4, 7, 9\]"),
            ((slice(None), 0), 0, r"layer 1: row 0 is \[0, 0, 0, 0\], expected 4 experts"),
            ((5, 1), [3, 8, 3, 1], r"layer 2: row 5 is \[1, 3, 3, 8\], expected 4 experts"),
        ],
        ids=["unwritten", "last token unwritten", "range", "constant", "zeros", "twice"],
    )
    def test_what_is_refused(self, at, value, message):
        ids = self.ids()
        ids[at] = value
        with pytest.raises(UnsupportedError, match=message):
            self.check(ids)


@pytest.mark.parametrize(
    "ours",
    [
        {},
        {"source": "hook"},
        {"capture": 1},
        {"capture": True, "source": "gpu"},
        {"x": 1},
        [],
        True,
    ],
)
def test_a_malformed_key_is_refused(ours):
    with pytest.raises(UnsupportedError, match=r'additional_config\["r3"\]'):
        capture_settings({"r3": ours})


def test_without_the_key_nothing_is_asked_for():
    assert capture_settings({}) == capture_settings(None) == {"capture": False}
