"""RouterSpec.from_hf_config against the routers that transformers itself builds, on the meta
device, from the same config: as an object, as a dict, as the config.json it writes and as the one
that transformers 4.57 wrote (tests/data). What is malformed gives an error of this project."""

from __future__ import annotations

import inspect
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import r3
from family_configs import ALL, FLAT, NESTED, SEEDS, language_model, varied, written
from r3 import RouterSpec
from r3.families import FAMILIES

os.environ.setdefault("HF_HUB_OFFLINE", "1")
OLD = json.loads((Path(__file__).parent / "data/configs_transformers_4.57.json").read_text())


def built_routers(config: Any) -> dict[str, Any] | None:
    """Fields of a RouterSpec, read off the modules of the model, not off the config; None if it
    has no router.

    A router is a module in a decoder layer whose class calls itself one; its weight has a row of
    the hidden size for each expert.
    """
    import torch
    from transformers import AutoModel, Qwen3OmniMoeThinkerForConditionalGeneration

    with torch.device("meta"):
        if config.model_type == "qwen3_omni_moe":  # has no AutoModel; the talker is another model
            thinker = Qwen3OmniMoeThinkerForConditionalGeneration._from_config
            model = thinker(config.thinker_config)
        else:
            model = AutoModel.from_config(config)
    model = getattr(model, "language_model", getattr(model, "model", model))
    (layers,) = (m for n, m in model.named_modules() if n in ("layers", "model.layers"))
    hidden = model.get_input_embeddings().weight.shape[1]
    routers = {
        i: module
        for i, layer in enumerate(layers)
        for module in layer.modules()
        if type(module).__name__.endswith("Router")
    }
    if not routers:
        return None
    assert all(m.weight.shape[1] == hidden for m in routers.values())
    (shape,) = {
        (
            m.weight.shape[0],
            m.top_k,
            getattr(m, "num_group", None) or 1,
            getattr(m, "topk_group", None) or 1,
            getattr(m, "topk_method", "not greedy"),
        )
        for m in routers.values()
    }
    experts, top_k, groups, topk_groups, method = shape
    (kind,) = {type(m) for m in routers.values()}
    limited = groups > 1 and method != "greedy"
    return {
        "num_experts": experts,
        "top_k": top_k,
        "moe_layers": tuple(routers),
        "num_layers": len(layers),
        "score_function": "sigmoid" if "sigmoid" in inspect.getsource(kind) else "softmax",
        "num_groups": groups if limited else None,
        "topk_groups": topk_groups if limited else None,
    }


def agrees(given: Any, expected: dict[str, Any] | None) -> None:
    if expected is None:
        with pytest.raises(r3.UnsupportedError, match="no sparse layer"):
            RouterSpec.from_hf_config(given)
    else:
        assert RouterSpec.from_hf_config(given) == RouterSpec(**expected)


def loaded(values: dict[str, Any], folder: Path) -> Any:
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(values))
    return AutoConfig.from_pretrained(folder)


# --- against transformers


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", ALL)
def test_against_the_routers_that_transformers_builds(family, seed):
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family](**varied(family, seed))
    expected = built_routers(config)
    agrees(config, expected)
    agrees(config.to_dict(), expected)
    agrees(config.get_text_config(), expected)
    agrees(written(family, varied(family, seed)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD)
def test_configs_written_by_an_older_release(name, tmp_path):
    config = loaded(OLD[name], tmp_path)
    expected = built_routers(config)
    agrees(OLD[name], expected)
    agrees(config, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FLAT)
def test_fields_left_out_have_the_defaults_of_the_config_class(family, tmp_path):
    sizes = {
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
        "hybrid_override_pattern",
        *("moe_intermediate_size", "intermediate_size", "pad_token_id", "n_shared_experts"),
    }
    values = {k: v for k, v in varied(family, 0).items() if k in sizes}
    values |= {"model_type": family, "num_experts_per_tok": 2}
    if "hybrid_override_pattern" not in values:
        values["num_hidden_layers"] = 6
    agrees(values, built_routers(loaded(values, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_kimi_k2_is_deepseek_v3_by_another_name(seed):
    from transformers import DeepseekV3Config

    values = varied("deepseek_v3", seed)
    expected = built_routers(DeepseekV3Config(**values))
    published = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    kimi = {"model_type": "kimi_k2", **values, **published}
    agrees(kimi, expected)
    agrees({"model_type": "kimi_k25", "text_config": kimi, "vision_config": {}}, expected)
    agrees({"model_type": "kimi_vl", "text_config": kimi | {"model_type": "deepseek_v3"}}, expected)


def test_every_family_is_compared():
    old_text = {v["text_config"]["model_type"] for v in OLD.values() if "text_config" in v}
    assert set(FAMILIES) == {*FLAT, *NESTED.values(), *old_text, "kimi_k2"}


# --- what transformers does not build


V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
}


def test_moe_layer_freq_is_that_of_the_published_code():
    def layers(**changes: object) -> tuple[int, ...]:
        return RouterSpec.from_hf_config(V3 | changes).moe_layers

    assert layers(moe_layer_freq=1) == (3, 4, 5, 6, 7)
    assert layers(moe_layer_freq=2) == (4, 6)
    assert layers(moe_layer_freq=[0, 1, 1, 0, 1, 0, 0, 1]) == (1, 2, 4, 7)
    sparse = ["dense"] * 7 + ["sparse"]
    assert layers(mlp_layer_types=sparse, moe_layer_freq=2) == (7,)  # the newer name decides


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_nested_language_models(name):
    spec = RouterSpec.from_hf_config(V3)
    assert RouterSpec.from_hf_config({"model_type": "some_vl", name: V3, "x": 1}) == spec
    # a thinker, and a part that is named only by the whole
    omni = {"model_type": "an_omni", "thinker_config": {"model_type": "thinker", name: V3}}
    assert RouterSpec.from_hf_config(omni) == spec
    part = {k: v for k, v in V3.items() if k != "model_type"}
    assert RouterSpec.from_hf_config({"model_type": "glm4v_moe", name: part}) == spec


def test_hybrid_layers_by_all_their_names():
    base = {"model_type": "nemotron_h", "n_routed_experts": 8, "num_experts_per_tok": 2}
    expected = RouterSpec(8, 2, (1, 4), 6, "sigmoid")
    old = ["mamba", "moe", "attention", "mlp", "moe", "mamba"]
    new = ["linear_attention", "moe", "full_attention", "mlp", "moe", "linear_attention"]
    for fields in (
        {"hybrid_override_pattern": "ME*-EM", "num_hidden_layers": 6},
        {"hybrid_override_pattern": "ME*-EM"},
        {"layers_block_type": old},
        {"layers_block_type": new, "mtp_layers_block_type": ["full_attention", "moe"]},
        {"layer_types": new},
    ):
        assert RouterSpec.from_hf_config(base | fields) == expected
    with pytest.raises(r3.UnsupportedError, match="no sparse layer"):
        RouterSpec.from_hf_config({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*-"})


def test_groups_only_where_they_limit():
    def groups(**changes: object) -> tuple[int | None, int | None]:
        spec = RouterSpec.from_hf_config(V3 | changes)
        return spec.num_groups, spec.topk_groups

    v2 = {"model_type": "deepseek_v2", "n_group": 4, "topk_group": 2}
    assert groups() == (None, None)
    assert groups(n_group=None, topk_group=None) == (None, None)
    assert groups(n_group=4, topk_group=2) == (4, 2)
    assert groups(**v2) == (None, None)  # greedy is the default of its class
    assert groups(**v2, topk_method="greedy") == (None, None)
    assert groups(**v2, topk_method="group_limited_greedy") == (4, 2)
    assert groups(**v2, topk_method="noaux_tc") == (4, 2)


def test_score_function_as_written():
    def score(**changes: object) -> str:
        return RouterSpec.from_hf_config(V3 | changes).score_function

    assert (score(), score(model_type="deepseek_v2")) == ("sigmoid", "softmax")
    assert score(model_type="deepseek_v2", scoring_func="sigmoid") == "sigmoid"
    assert score(scoring_func=None) == "sigmoid"
    with pytest.raises(r3.UnsupportedError, match="scoring_func 'sqrtsoftplus'"):
        score(scoring_func="sqrtsoftplus")


# --- errors


QWEN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
NEMOTRON = {"model_type": "nemotron_h", "n_routed_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (QWEN | {"decoder_sparse_step": -1}, "decoder_sparse_step is -1"),
        (QWEN | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN | {"decoder_sparse_step": "2"}, "decoder_sparse_step is '2'"),
        (QWEN | {"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        (QWEN | {"mlp_only_layers": [-1]}, r"mlp_only_layers is \[-1\]"),
        (QWEN | {"num_hidden_layers": None}, "no field 'num_hidden_layers'"),
        (QWEN | {"num_hidden_layers": 10**12}, "at most 65536"),
        (QWEN | {"num_hidden_layers": 4.0}, "num_hidden_layers is 4.0"),
        (QWEN | {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (QWEN | {"num_experts": None}, r"no field 'num_experts' \(nor .*n_routed_experts"),
        (QWEN | {"num_experts": -8}, "num_experts is -8"),
        (QWEN | {"num_local_experts": 16}, "num_local_experts is 16.*num_experts=8"),
        (QWEN | {"num_experts_per_tok": None}, "no field 'num_experts_per_tok'"),
        (QWEN | {"num_experts_per_tok": 9}, "top_k is 9"),
        (V3 | {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (V3 | {"moe_layer_freq": [1, 0]}, "moe_layer_freq is .*each of 8 layers"),
        (V3 | {"moe_layer_freq": [2] * 8}, "moe_layer_freq is .*entries out of 1, 0"),
        (V3 | {"mlp_layer_types": ["sparse"] * 7}, "mlp_layer_types is .*each of 8"),
        (V3 | {"mlp_layer_types": ["other"] * 8}, "mlp_layer_types is .*'sparse', 'dense'"),
        (V3 | {"n_group": 3, "topk_group": 1}, "n_group=3 and topk_group=1 do not fit 16"),
        (V3 | {"n_group": 4, "topk_group": 5}, "topk_group=5 do not fit"),
        (V3 | {"n_group": 16, "topk_group": 1}, "do not fit 16 experts and top-2"),
        (V3 | {"n_group": "4"}, "n_group is '4'"),
        (V3 | {"scoring_func": 3}, "scoring_func is 3"),
        (V3 | {"model_type": "deepseek_v2", "topk_method": "x"}, "topk_method is 'x'"),
        (
            V3
            | {"model_type": "deepseek_v2", "topk_method": "noaux_tc"}
            | {"n_group": 4, "topk_group": None},
            "no field 'topk_group'",
        ),
        (QWEN | {"model_type": "llama4_text", "moe_layers": "0"}, "moe_layers is '0'"),
        (QWEN | {"model_type": "llama4_text", "interleave_moe_layer_step": 0}, "step is 0"),
        (NEMOTRON | {"hybrid_override_pattern": "MEX"}, "entries out of 'moe', 'E'"),
        (
            NEMOTRON | {"hybrid_override_pattern": "ME", "num_hidden_layers": 3},
            "hybrid_override_pattern is 'ME', expected one entry for each of 3 layers",
        ),
        (NEMOTRON | {"num_hidden_layers": 3}, "no field 'hybrid_override_pattern'"),
        ({"model_type": "llama4"}, "'llama4' has no field 'text_config'"),
        ({"model_type": "llama4", "text_config": 3}, "text_config of model_type 'llama4' is 3"),
        (17, "config is 17"),
        (RouterSpec, "config is <class"),
    ],
    ids=str,
)
def test_malformed_configs_name_the_field(values, words):
    with pytest.raises(r3.SpecError, match=words):
        RouterSpec.from_hf_config(values)


def test_dense_and_unknown_models():
    def refused(words: str, **values: object) -> None:
        with pytest.raises(r3.UnsupportedError, match=words):
            RouterSpec.from_hf_config(values)

    refused("no sparse layer", **QWEN | {"num_experts": 0})
    refused("no sparse layer", **V3 | {"first_k_dense_replace": 8})
    refused("no sparse layer", **V3 | {"first_k_dense_replace": 8, "n_routed_experts": None})
    refused("'qwen3_vl_text' has no routed experts", model_type="qwen3_vl", text_config={"a": 1})
    refused(
        "'new_moe' is not a family", model_type="new", text_config=V3 | {"model_type": "new_moe"}
    )
    refused("'None' has no routed experts")


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["greedy", "sigmoid", "dense", "MEME"]),
    st.lists(st.one_of(st.integers(-2, 9), st.text(max_size=3), st.none()), max_size=9),
    st.lists(st.sampled_from(["sparse", "dense", "moe", "mlp"]), max_size=9),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
NAMES = [
    *sorted({k for f in FLAT for s in SEEDS for k in varied(f, s)} - {"vocab_size"}),
    *("moe_layer_freq", "mlp_layer_types", "layers_block_type", "scoring_func", "layer_types"),
    *("text_config", "llm_config", "thinker_config", "model_type", "num_expert_group"),
]


@settings(max_examples=400, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    seed=st.integers(0, 50),
    changes=st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=3),
    nested=st.booleans(),
)
@example(family="qwen3_moe", seed=0, changes={"decoder_sparse_step": 10**30}, nested=False)
def test_malformed_configs_give_errors_of_this_project(family, seed, changes, nested):
    values = language_model(family, random.Random(seed)) | {"model_type": family} | changes
    given_values = {"model_type": "outer", "text_config": values} if nested else values
    try:
        spec = RouterSpec.from_hf_config(given_values)
    except r3.R3Error:
        return
    assert RouterSpec.from_dict(spec.to_dict()) == spec
    layers = values["num_hidden_layers"] if family != "nemotron_h" else spec.num_layers
    assert spec.num_layers == layers
    if spec.num_groups is not None:
        assert spec.num_experts % spec.num_groups == 0


JSON = st.recursive(
    JUNK,
    lambda inner: st.dictionaries(st.sampled_from([*NAMES, "num_experts"]), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(family=st.sampled_from([*sorted(FAMILIES), "llama4", "other"]), rest=JSON)
def test_any_json_gives_errors_of_this_project(family, rest):
    for config in (rest, {"model_type": family, "text_config": rest}):
        try:
            RouterSpec.from_hf_config(config)
        except r3.R3Error:
            continue
