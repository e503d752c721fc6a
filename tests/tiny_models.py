"""Tiny random checkpoints and the outside witness for them: Hugging Face routers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

# with a router in every layer, except: "qwen3_moe" and "glm4_moe" (sigmoid scores, a correction
# bias, a shared expert) begin with a dense layer; "gpt_oss" has sliding windows and sinks;
# "wide" is a Qwen3-MoE with 300 experts, ids of two bytes
MOE_FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "wide")

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
    """family: one of MOE_FAMILIES, or "qwen3" (dense)."""
    import torch

    torch.manual_seed(seed)
    model = _new_model(family).to(torch.float32)
    with torch.no_grad():  # what Hugging Face starts at zero would not show in any choice
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("router.bias", "e_score_correction_bias")):
                value.normal_(std=0.1)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def _new_model(family: str) -> Any:
    import transformers as t

    if family in ("qwen3_moe", "wide"):
        wide = family == "wide"
        config = t.Qwen3MoeConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=16 if wide else 32,
            num_experts=300 if wide else 16,
            num_experts_per_tok=8 if wide else 4,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[] if wide else [0],
        )
        return t.Qwen3MoeForCausalLM(config)
    if family == "mixtral":
        config = t.MixtralConfig(
            **COMMON,
            intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
        )
        return t.MixtralForCausalLM(config)
    if family == "gpt_oss":
        config = t.GptOssConfig(
            **COMMON,
            intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=48,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
        return t.GptOssForCausalLM(config)
    if family == "glm4_moe":
        config = t.Glm4MoeConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=32,
            n_routed_experts=16,
            num_experts_per_tok=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        )
        return t.Glm4MoeForCausalLM(config)
    return t.Qwen3ForCausalLM(t.Qwen3Config(**COMMON, intermediate_size=128))


def make_draft(target: Path, path: Path, noise: float = 0.02, seed: int = 0) -> Path:
    """The target with noise on every weight: often accepted, and with routers that choose
    otherwise in some per cent of cells."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value += noise * value.std() * torch.randn_like(value)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path) -> None:
    """One word, "t<id>", per token, so that stop strings can be looked for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{i}": i for i in range(COMMON["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1").save_pretrained(path)


def hf_routing(path: Path, sequences: list[np.ndarray], top_k: int) -> list[tuple]:
    """Per sequence of n tokens: the expert sets that the routers chose [n, MoE layers, top_k],
    ascending, and the gap between the scores of the last chosen and the first unchosen expert
    [n, MoE layers], from Hugging Face in float32, one sequence at a time, without a cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    chosen: list[np.ndarray] = []
    gaps: list[np.ndarray] = []

    def record(router: Any, _: Any, output: tuple) -> None:
        logits, _, indices = output
        bias = getattr(router, "e_score_correction_bias", None)
        scores = logits if bias is None else logits.sigmoid() + bias
        best = scores.float().topk(top_k + 1, dim=-1)
        own = indices.sort(dim=-1).values
        assert (
            torch.equal(own, best.indices[:, :top_k].sort(dim=-1).values)
            or (best.values[:, top_k - 1] - best.values[:, top_k]).min() == 0
        ), "the gaps are not those of what this router chooses by"
        chosen.append(own.numpy())
        gaps.append((best.values[:, top_k - 1] - best.values[:, top_k]).numpy())

    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(record)
    found = []
    for tokens in sequences:
        chosen.clear(), gaps.clear()
        with torch.no_grad():
            model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
        found.append((np.stack(chosen, 1), np.stack(gaps, 1)))
    return found
