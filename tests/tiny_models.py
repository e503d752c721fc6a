"""Tiny random checkpoints and the outside witness for them: Hugging Face routers in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np

COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 3,
}


def make_model(family: str, path: Path, seed: int = 0) -> Path:
    """family: "qwen3_moe" (its first layer is dense), "mixtral" or "qwen3" (dense)."""
    import torch
    import transformers as t

    torch.manual_seed(seed)
    if family == "qwen3_moe":
        config = t.Qwen3MoeConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=32,
            num_experts=16,
            num_experts_per_tok=4,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[0],
        )
        model = t.Qwen3MoeForCausalLM(config)
    elif family == "mixtral":
        config = t.MixtralConfig(
            **COMMON,
            intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
        )
        model = t.MixtralForCausalLM(config)
    else:
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**COMMON, intermediate_size=128))
    model.to(torch.float32).save_pretrained(path)
    return path


def hf_routing(path: Path, sequences: list[np.ndarray], top_k: int) -> list[tuple]:
    """Per sequence of n tokens: expert sets [n, MoE layers, top_k] and the gap between the k-th
    and the next router logit [n, MoE layers], from Hugging Face in float32, without a cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for tokens in sequences:
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids, output_router_logits=True).router_logits
        stacked = torch.stack([x.reshape(len(tokens), -1).float() for x in logits], 1)
        values, experts = stacked.topk(top_k + 1, dim=-1)
        gap = values[..., top_k - 1] - values[..., top_k]
        found.append((np.sort(experts[..., :top_k].numpy(), -1), gap.numpy()))
    return found
