"""Varied configs of all MoE families, small enough to build their models on the meta device.

Runs without torch and under any transformers release, so that an older one can write what it
saves: `python tests/family_configs.py FILE` writes configs of all families that it knows into one
JSON file. tests/data/configs_transformers_4.57.json was made so, by transformers 4.57.1:

    python -m venv /tmp/old
    /tmp/old/bin/pip install 'transformers==4.57.1' 'huggingface_hub<1.0'
    /tmp/old/bin/python tests/family_configs.py tests/data/configs_transformers_4.57.json
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

SPARSE_STEP = ("qwen2_moe", "qwen3_moe", "qwen3_next")
EVERY = ("mixtral", "olmoe", "flex_olmo", "gpt_oss", "minimax", "minimax_m2")
DEEPSEEK = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")
DENSE_FIRST = (*DEEPSEEK, "glm4_moe", "dots1", "mimo_v2_flash", "kimi_linear")
FLAT = (*SPARSE_STEP, *EVERY, *DENSE_FIRST, "llama4_text", "nemotron_h")
# multimodal: the model type of the language model in text_config
NESTED = {
    "llama4": "llama4_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "glm4v_moe": "glm4v_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
}
ALL = (*FLAT, *NESTED)
SEEDS = range(4)

# those that the transformers classes read by the second name
_EXPERTS = {
    **dict.fromkeys(("mixtral", "gpt_oss", "minimax", "minimax_m2"), "num_local_experts"),
    **dict.fromkeys(("llama4_text", "kimi_linear"), "num_local_experts"),
    **dict.fromkeys((*DEEPSEEK, "glm4_moe", "glm4v_moe_text", "dots1"), "n_routed_experts"),
    **dict.fromkeys(("mimo_v2_flash", "nemotron_h"), "n_routed_experts"),
}


def varied(family: str, seed: int) -> dict[str, Any]:
    """Keyword arguments for the config class of `family`, which is also their model_type."""
    rng = random.Random(f"{family} {seed}")
    if family in NESTED:
        text = language_model(NESTED[family], rng)
        vision = {"num_hidden_layers": 1} if family == "llama4" else {"depth": 1}
        if family == "qwen3_omni_moe":
            thinker = {"text_config": text, "vision_config": vision}
            return {"thinker_config": thinker | {"audio_config": {"encoder_layers": 1}}}
        return {"text_config": text, "vision_config": vision}
    return language_model(family, rng)


def language_model(family: str, rng: random.Random) -> dict[str, Any]:
    num_layers, experts = rng.randint(3, 9), rng.choice([8, 12, 16, 24])
    top_k = rng.randint(1, 4)
    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if family in (*DEEPSEEK, "kimi_linear", "minimax") else 2,
        "max_position_embeddings": 64,
        "moe_intermediate_size": 16,
        "pad_token_id": 0,
        "num_experts_per_tok": top_k,
        _EXPERTS.get(family, "num_experts"): experts,
    }
    if family in SPARSE_STEP or family.startswith(("qwen3_vl", "qwen3_omni")):
        values["decoder_sparse_step"] = rng.choice([1, 1, 2, 3])
        values["mlp_only_layers"] = rng.choice([[], [0], sorted(rng.sample(range(num_layers), 2))])
    if family in DENSE_FIRST or family == "glm4v_moe_text":
        first = rng.randint(0, 3)
        values["first_k_dense_replace"] = first
        if family in ("glm4_moe_lite", "mimo_v2_flash"):  # whose classes read only this
            values["mlp_layer_types"] = ["dense"] * first + ["sparse"] * (num_layers - first)
        groups = rng.choice([1, 2, 4])
        values["n_group"] = groups
        values["topk_group"] = rng.randint(min(groups, 2), groups)
        values["num_nextn_predict_layers"] = rng.randint(0, 2)
        values["n_shared_experts"] = 1
    if family == "deepseek_v2":
        values["topk_method"] = rng.choice(["greedy", "group_limited_greedy"])
    if family in DEEPSEEK or family == "kimi_linear":
        values |= {"kv_lora_rank": 8, "q_lora_rank": 16, "v_head_dim": 8}
        values |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    if family == "llama4_text":
        values["intermediate_size_mlp"] = 48
        listed = sorted(rng.sample(range(num_layers), 2))
        values |= rng.choice([{"interleave_moe_layer_step": 2}, {"moe_layers": listed}, {}])
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        values |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
        values |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        values["mtp_num_hidden_layers"] = rng.randint(0, 1)
    if family == "nemotron_h":
        letters = rng.choices("ME*-", k=num_layers)
        letters[rng.randrange(num_layers)] = "E"
        values["hybrid_override_pattern"] = "".join(letters)
        values |= {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
        values |= {"head_dim": 8, "moe_shared_expert_intermediate_size": 16}
        values |= {"n_group": rng.choice([1, 2]), "topk_group": 1, "num_nextn_predict_layers": 1}
        values["num_experts_per_tok"] = min(top_k, experts // values["n_group"])
    return values


def written(family: str, values: dict[str, Any]) -> dict[str, Any]:
    """What this transformers release writes as the config.json of these values."""
    from transformers import CONFIG_MAPPING

    with tempfile.TemporaryDirectory() as folder:
        CONFIG_MAPPING[family](**values).save_pretrained(folder)
        return json.loads((Path(folder) / "config.json").read_text())


if __name__ == "__main__":
    from transformers import CONFIG_MAPPING

    configs = {
        f"{family} {seed}": written(family, varied(family, seed))
        for family in ALL
        for seed in SEEDS[:3]
        if family in CONFIG_MAPPING
    }
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in configs.items()]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")
