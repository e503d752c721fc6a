"""Reads model configs: where the routers of each model family are, and how they choose.

One row of `FAMILIES` per model_type, over a few rules that families share. Each rule names the
class in transformers that it follows. Fields that a published config.json may leave out get the
default of the family's config class; the numbers of layers, of experts and of experts per token
do not: every release writes them, so a config without them has lost something.

Layers of multi-token prediction (`num_nextn_predict_layers`, `num_mtp_layers`,
`mtp_num_hidden_layers`) lie behind `num_hidden_layers` and are never among the layers here.

Knows nothing about RouterSpec, which is built from what `router_fields` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from r3.errors import SpecError, UnsupportedError

MAX_LAYERS = 65536  # far above any model: bounds the work on a config that is not to be trusted

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
_LAYERS = ("num_hidden_layers",)
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_MAX_DEPTH = 4  # thinker_config.text_config is two


class _Fields:
    """The fields of one config, checked as they are read; errors name the field."""

    def __init__(self, values: Mapping[str, Any], family: str) -> None:
        self.values, self.family = values, family

    def error(self, name: str, expected: str) -> SpecError:
        return SpecError(
            f"config of model_type {self.family!r}: {name} is {self.get(name)!r:.200}, "
            f"expected {expected}"
        )

    def get(self, name: str) -> Any:
        """None where it is absent: the config classes do not tell null from absent either."""
        return self.values.get(name)

    def integer(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """The one integer that these names stand for: transformers 5 renamed some of them."""
        given = [n for n in names if self.get(n) is not None]
        for name in given:
            value = self.values[name]
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise self.error(name, f"an integer of at least {least}")
            if value != self.values[given[0]]:
                raise self.error(name, f"{given[0]}={self.values[given[0]]!r}, which it repeats")
        if given:
            return int(self.values[given[0]])
        if default is None:
            other = f" (nor {', '.join(names[1:])})" if names[1:] else ""
            raise SpecError(
                f"config of model_type {self.family!r} has no field {names[0]!r}{other}"
            )
        return default

    def layer_set(self, name: str) -> set[int]:
        """Layer indices. Those beyond the last layer are allowed, as in transformers: a model is
        often shortened by setting num_hidden_layers alone."""
        value = self.get(name)
        if value is None:
            return set()
        if not isinstance(value, list | tuple) or any(
            isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 0 for x in value
        ):
            raise self.error(name, "a list of layer indices")
        return {int(x) for x in value}

    def per_layer(self, name: str, num_layers: int, kinds: Mapping[object, bool]) -> list[int]:
        """Indices of the layers whose entry in a list of one entry per layer is a router's."""
        value = self.values[name]
        if not isinstance(value, list | tuple | str) or len(value) != num_layers:
            raise self.error(name, f"one entry for each of {num_layers} layers")
        for x in value:
            if not isinstance(x, str | int) or x not in kinds:
                raise self.error(name, f"entries out of {', '.join(map(repr, kinds))}")
        return [i for i, x in enumerate(value) if kinds[x]]


# --- which layers have a router: (fields, num_layers) -> ascending indices


def _every(c: _Fields, num_layers: int) -> list[int]:
    """Mixtral, OLMoE, gpt-oss, MiniMax, Qwen3.5: each DecoderLayer builds a MoE block."""
    return list(range(num_layers))


def _sparse_step(c: _Fields, num_layers: int) -> list[int]:
    """transformers, modeling_qwen3_moe.py, Qwen3MoeDecoderLayer: every decoder_sparse_step-th
    layer, counted from 1, unless mlp_only_layers lists it."""
    step = c.integer("decoder_sparse_step", default=1, least=1)
    dense = c.layer_set("mlp_only_layers")
    return [i for i in range(step - 1, num_layers, step) if i not in dense]


def _dense_first(c: _Fields, num_layers: int, default: int) -> list[int]:
    """transformers, modeling_deepseek_v3.py, DeepseekV3DecoderLayer: the first
    first_k_dense_replace layers are dense. configuration_deepseek_v32.py, glm4_moe_lite and
    others spell it out as mlp_layer_types, which then decides.

    moe_layer_freq is not read by transformers' DeepSeek classes, but by the code published with
    the weights and by vLLM (deepseek_v2.py, DeepseekV2DecoderLayer), so by what the weights are:
    one layer in so many, or, in MiMo-V2, a list of 0 and 1.
    """
    if c.get("mlp_layer_types") is not None:
        return c.per_layer("mlp_layer_types", num_layers, {"sparse": True, "dense": False})
    freq = c.get("moe_layer_freq")
    if isinstance(freq, list | tuple):
        return c.per_layer("moe_layer_freq", num_layers, {1: True, 0: False})
    every = c.integer("moe_layer_freq", default=1, least=1)
    first = c.integer("first_k_dense_replace", default=default)
    return [i for i in range(first, num_layers) if i % every == 0]


def _interleaved(c: _Fields, num_layers: int) -> list[int]:
    """transformers, configuration_llama4.py, Llama4TextConfig: moe_layers, or else every
    interleave_moe_layer_step-th layer, counted from 1."""
    if c.get("moe_layers") is not None:
        return sorted(i for i in c.layer_set("moe_layers") if i < num_layers)
    step = c.integer("interleave_moe_layer_step", default=1, least=1)
    return list(range(step - 1, num_layers, step))


_HYBRID: Mapping[object, bool] = {
    **{"moe": True, "E": True, "mlp": False, "-": False},
    **{"mamba": False, "linear_attention": False, "M": False},
    **{"attention": False, "full_attention": False, "*": False},
}


def _hybrid_lists(c: _Fields) -> str | None:
    # the second is what attribute_map calls the first, the third is what is published
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    return next((n for n in names if c.get(n) is not None), None)


def _hybrid(c: _Fields, num_layers: int) -> list[int]:
    """transformers, configuration_nemotron_h.py, NemotronHConfig: a layer is one block, and
    layers_block_type or the letters of hybrid_override_pattern say which."""
    name = _hybrid_lists(c)
    if name is None:
        raise SpecError(
            f"config of model_type {c.family!r} has no field 'hybrid_override_pattern' "
            "(nor layers_block_type)"
        )
    return c.per_layer(name, num_layers, _HYBRID)


@dataclass(frozen=True)
class _Family:
    """layers: the rule. score: of the router, where scoring_func does not say otherwise.
    groups: defaults of n_group and topk_group, None for a router without groups.
    topk_method: its default, where the router reads it (modeling_deepseek_v2.py)."""

    layers: Callable[[_Fields, int], list[int]]
    score: str = "softmax"
    groups: tuple[int, int | None] | None = None
    topk_method: str | None = None


_SPARSE_STEP = _Family(_sparse_step)
_EVERY = _Family(_every)
_DEEPSEEK_V3 = _Family(partial(_dense_first, default=3), "sigmoid", (8, 4))
_GLM = _Family(partial(_dense_first, default=1), "sigmoid", (1, 1))

FAMILIES: Mapping[str, _Family] = {
    "mixtral": _EVERY,
    "qwen3_moe": _SPARSE_STEP,
    "qwen2_moe": _SPARSE_STEP,
    "qwen3_next": _SPARSE_STEP,
    "qwen3_vl_moe_text": _SPARSE_STEP,
    "qwen3_omni_moe_text": _SPARSE_STEP,
    "qwen3_5_moe_text": _EVERY,
    "olmoe": _EVERY,
    "flex_olmo": _EVERY,
    "gpt_oss": _EVERY,
    "minimax": _EVERY,
    "minimax_m2": _Family(_every, "sigmoid"),
    "deepseek_v2": _Family(partial(_dense_first, default=0), "softmax", (1, None), "greedy"),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,  # its published code is DeepSeek-V3's under another name
    "kimi_linear": _GLM,
    "glm4_moe": _GLM,
    "glm4v_moe_text": _GLM,
    "Glm4vMoe_text": _GLM,  # as transformers 4.57 wrote it
    "glm4_moe_lite": _GLM,
    "glm_moe_dsa": _Family(partial(_dense_first, default=3), "sigmoid", (1, 1)),
    "mimo_v2_flash": _GLM,
    "dots1": _Family(partial(_dense_first, default=0), "sigmoid", (1, 1)),
    "llama4_text": _Family(_interleaved, "sigmoid"),
    "nemotron_h": _Family(_hybrid, "sigmoid", (1, 1)),
}


def router_fields(config: object) -> dict[str, Any]:
    """The fields of a RouterSpec, from a transformers config or a config.json as a mapping.

    A model_type that is not a family is searched for its language model (text_config, llm_config,
    language_config, thinker_config.text_config). Raises UnsupportedError for a dense model, a
    family that is not known here and a router that a RouterSpec cannot describe; SpecError for a
    missing or malformed field.
    """
    name, values = _language_model(_mapping(config, "config"))
    family = FAMILIES.get(name)
    if family is None:
        raise _not_known(name, values)
    c = _Fields(values, name)
    # NemotronHConfig counts its list and leaves num_hidden_layers out when it is written
    hybrid = _hybrid_lists(c) if family.layers is _hybrid else None
    blocks = c.get(hybrid) if hybrid else None
    counted = len(blocks) if isinstance(blocks, list | tuple | str) else None
    num_layers = c.integer(*_LAYERS, default=counted, least=1)
    if num_layers > MAX_LAYERS:
        raise c.error("num_hidden_layers", f"at most {MAX_LAYERS}")
    layers = family.layers(c, num_layers)
    # a model without sparse layers need not have a number of experts
    num_experts = c.integer(*_EXPERTS, default=None if layers else 0)
    if not layers or not num_experts:
        raise UnsupportedError(f"this {name} config has no sparse layer: nothing to capture")
    top_k = c.integer(*_TOP_K, least=1)
    groups = _groups(c, family, num_experts, top_k)
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "moe_layers": tuple(layers),
        "num_layers": num_layers,
        "score_function": _score(c, family),
        "num_groups": groups[0] if groups else None,
        "topk_groups": groups[1] if groups else None,
    }


def _score(c: _Fields, family: _Family) -> str:
    # written by DeepSeek, Kimi and MiniMax-M2; the classes in transformers fix it instead
    score = c.get("scoring_func")
    if score is None:
        return family.score
    if not isinstance(score, str):
        raise c.error("scoring_func", "'softmax' or 'sigmoid'")
    if score not in ("softmax", "sigmoid"):
        raise UnsupportedError(
            f"config of model_type {c.family!r}: scoring_func {score!r} is not one that a "
            "RouterSpec describes ('softmax', 'sigmoid')"
        )
    return score


def _groups(c: _Fields, family: _Family, num_experts: int, top_k: int) -> tuple[int, int] | None:
    """n_group and topk_group where they limit the choice; they are checked as the routers use
    them (transformers, modeling_deepseek_v3.py, DeepseekV3TopkRouter)."""
    if family.groups is None:
        return None
    if family.topk_method is not None:
        method = c.get("topk_method") or family.topk_method
        if method in ("greedy", "gready"):  # the second is the default of the published code
            return None
        if method not in ("group_limited_greedy", "noaux_tc"):
            raise c.error("topk_method", "'greedy', 'group_limited_greedy' or 'noaux_tc'")
    default, default_topk = family.groups
    names = ("n_group", "num_expert_group")  # the second: kimi_linear
    if any(n in c.values for n in names) and all(c.get(n) is None for n in names):
        return None  # null is how a config says that there are none
    groups = c.integer(*names, default=default, least=1)
    if groups == 1:
        return None
    kept = c.integer("topk_group", default=default_topk, least=1)
    if num_experts % groups or kept > groups or top_k > kept * (num_experts // groups):
        raise SpecError(
            f"config of model_type {c.family!r}: n_group={groups} and topk_group={kept} do not fit "
            f"{num_experts} experts and top-{top_k}: groups must be equal and those kept hold top_k"
        )
    return groups, kept


def _language_model(values: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The config of the language model inside another one, and its model_type."""
    name = str(values.get("model_type"))
    for _ in range(_MAX_DEPTH):
        key = next((k for k in _NESTED if values.get(k) is not None), None)
        if name in FAMILIES or key is None:
            break
        values = _mapping(values[key], f"{key} of model_type {name!r}")
        # a part without a name of its own is named after the whole
        name = str(values["model_type"]) if values.get("model_type") else f"{name}_text"
    return name, values


def _mapping(config: object, what: str) -> Mapping[str, Any]:
    to_dict = None if isinstance(config, type) else getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else config
    if not isinstance(values, Mapping):
        raise SpecError(
            f"{what} is {config!r:.200}, expected a transformers config or config.json as a mapping"
        )
    return values


def _not_known(name: str, values: Mapping[str, Any]) -> UnsupportedError | SpecError:
    if f"{name}_text" in FAMILIES:
        return SpecError(f"config of model_type {name!r} has no field 'text_config'")
    if not any(values.get(k) for k in _EXPERTS):
        return UnsupportedError(
            f"model_type {name!r} has no routed experts in its config: "
            "a dense model has no routing to capture or replay"
        )
    return UnsupportedError(
        f"model_type {name!r} is not a family that this version knows "
        f"(known: {', '.join(FAMILIES)}). Give its routers by hand: "
        "RouterSpec(num_experts=..., top_k=..., moe_layers=(0-based decoder layers with a "
        "router), num_layers=(all decoder layers), score_function='softmax' or 'sigmoid')"
    )
