"""The weight version of each row in the real vLLM, over in-place updates."""

from __future__ import annotations

import numpy as np
import pytest

import update_runs
from r3 import merge_prefill_decode
from tiny_models import hf_routing

pytestmark = pytest.mark.slow

NEAR_TIE = 1e-4


def wrong_cells(traces, truth):
    """Cells of valid rows that differ from Hugging Face and are no near-ties; cells in all."""
    wrong = cells = 0
    for trace, (experts, gap) in zip(traces, truth, strict=True):
        rows = np.sort(trace.routed_experts, axis=-1)
        differ = (rows != experts[:-1]).any(axis=-1) & (gap[:-1] >= NEAR_TIE)
        wrong, cells = wrong + differ[trace.valid].sum(), cells + differ[trace.valid].size
    return wrong, cells


@pytest.fixture(scope="module")
def updated_model(model_dir, tmp_path_factory):
    """The tiny model with another embedding table, and a file of that table alone."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("updated")
    model = AutoModelForCausalLM.from_pretrained(model_dir("qwen3_moe"), dtype=torch.float32)
    table = model.get_input_embeddings().weight.data
    table.copy_(torch.randn(table.shape, generator=torch.Generator().manual_seed(1)) * 0.08)
    model.save_pretrained(folder / "model")
    save_file({"model.embed_tokens.weight": table.clone()}, folder / "embeddings.safetensors")
    return folder


def check_updates(found, old, new):
    """What must hold of `update_runs.updates`; `old` and `new` are the two checkpoints."""
    top_k = found["before"][0].spec.top_k

    def truth(path, name):
        return hf_routing(path, [t.token_ids for t in found[name]], top_k)

    assert {v for t in found["before"] for v in t.weight_versions} == {0}
    assert wrong_cells(found["before"], truth(old, "before"))[0] == 0
    assert found["version"] == [1]
    cached = 2 * update_runs.BLOCK
    for trace in found["mixed"]:
        assert trace.weight_versions[:cached].tolist() == [0] * cached
        assert set(trace.weight_versions[cached:].tolist()) == {1}
        assert trace.mixes_weights
    for trace in found["after"]:
        assert set(trace.weight_versions.tolist()) == {1}
        assert not trace.mixes_weights
    wrong, cells = wrong_cells(found["after"], truth(new, "after"))
    assert (wrong, cells > 1500) == (0, True)
    assert wrong_cells(found["after"], truth(old, "after"))[0] > cells / 2
    versions = found["set"][0].weight_versions.tolist()
    assert versions == [1] * cached + [40] * (len(versions) - cached)
    assert found["same weights, same number"] == "accepted"
    assert found["fallen"].startswith("CaptureError: weight version 39, expected")
    assert found["no number"].startswith("CaptureError: weight version '41', expected")
    assert found["too high"].startswith("CaptureError: weight version 4294967294, expected")
    assert found["new weights, same number"].startswith("CaptureError: weight version 40, expected")


def test_rows_carry_the_version_of_their_weights(model_dir, updated_model, run_engine):
    """An update raises the version once; cached rows keep theirs; a reset leaves only new ones."""
    old, new = model_dir("qwen3_moe"), updated_model / "model"
    found = run_engine(
        update_runs.updates, model=old, embeddings=updated_model / "embeddings.safetensors"
    )
    check_updates(found, old, new)


@pytest.mark.full
def test_mutation_version_not_raised(model_dir, updated_model, run_engine):
    """A hook that misses updates does not pass the test above."""
    found = run_engine(
        update_runs.updates,
        model=model_dir("qwen3_moe"),
        embeddings=updated_model / "embeddings.safetensors",
        mutate="version not raised",
    )
    with pytest.raises(AssertionError):
        check_updates(found, model_dir("qwen3_moe"), updated_model / "model")


@pytest.mark.parametrize("multiprocessing", ["0", pytest.param("1", marks=pytest.mark.full)])
def test_reload_weights_raises_the_version(multiprocessing, model_dir, run_engine):
    found = run_engine(
        update_runs.reloads, model=model_dir("qwen3_moe"), multiprocessing=multiprocessing
    )
    assert found == [0, 1, 2, 2]


def check_transfer(prefill, decode, truth):
    """What must hold of the two halves of `update_runs.transfer`."""
    loaded = 0
    for before, after, (experts, gap) in zip(prefill, decode, truth, strict=True):
        # ExampleConnector loads whole blocks, and leaves at least one token to compute
        cached = (after.prompt_len - 2) // update_runs.BLOCK * update_runs.BLOCK
        assert np.flatnonzero(~after.valid).tolist() == list(range(cached))
        assert before.valid.all()
        assert (after.weight_versions[:cached] == -1).all()
        whole = merge_prefill_decode(before, after)
        assert whole.valid.all()
        assert wrong_cells([after, whole], [(experts, gap)] * 2)[0] == 0
        assert (whole.weight_versions == 0).all()
        loaded += cached
    assert loaded > 300


@pytest.fixture(scope="module")
def prefilled(model_dir, run_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv")
    model = model_dir("qwen3_moe")
    return folder, run_engine(update_runs.transfer, model=model, folder=folder, role="prefill")


def decode(prefilled, model_dir, run_engine, **more):
    folder, prefill = prefilled
    model = model_dir("qwen3_moe")
    found = run_engine(update_runs.transfer, model=model, folder=folder, role="decode", **more)
    return prefill, found, hf_routing(model, [t.token_ids for t in found], found[0].spec.top_k)


def test_41_rows_of_transferred_kv_are_missing(prefilled, model_dir, run_engine):
    """Prefill and decode in two engines: loaded rows are masked, and merging makes them whole."""
    check_transfer(*decode(prefilled, model_dir, run_engine))


@pytest.mark.full
def test_mutation_slots_not_invalidated(prefilled, model_dir, run_engine):
    """A slot store that keeps the rows of a block's former owner does not pass."""
    parts = decode(prefilled, model_dir, run_engine, mutate="slots not invalidated")
    with pytest.raises(AssertionError):
        check_transfer(*parts)
