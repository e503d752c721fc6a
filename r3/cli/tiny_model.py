"""Makes a tiny random Qwen3-MoE checkpoint, for a demo and tests that need no download.

Its weights are larger than a fresh initialisation, so that routing depends on the token and
bfloat16 flips some of it, as it does in a trained model.
"""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 512


def make_tiny_qwen3_moe(path: Path, seed: int, num_layers: int = 4) -> None:
    """Write config.json and model.safetensors (0.6 M parameters for 4 layers) into `path`.

    head_dim is 32 because vLLM's CPU attention needs at least that.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        initializer_range=0.08,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=3,
    )
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(path)
