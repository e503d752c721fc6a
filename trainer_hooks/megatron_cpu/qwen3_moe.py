"""A Hugging Face Qwen3-MoE as Megatron-core GPTModels on CPU ranks.

The weights come from `hf_weights`. Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from r3.errors import UnsupportedError
from r3.spec import RouterSpec
from r3.trainer_hooks.megatron_cpu.hf_weights import load_hf_weights

__all__ = [
    "build_gpt_model",
    "build_model_chunks",
    "check_config",
    "load_hf_weights",
    "token_logprobs",
]


def build_gpt_model(hf_config: Any, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """The only chunk of `build_model_chunks`, which see, where the pipeline is not interleaved."""
    (model,) = build_model_chunks(hf_config, dtype=dtype, **settings)
    return model


def build_model_chunks(
    hf_config: Any, *, dtype: torch.dtype = torch.float32, **settings: Any
) -> list[Any]:
    """This rank's GPTModels with random weights: one, or under an interleaved pipeline several.

    hf_config: a Hugging Face config (object, or mapping of its JSON). settings: fields of
    Megatron's TransformerConfig that it says nothing about; those of parallelism follow from the
    current layout (`shim.set_parallel`, which is needed before) and seldom have to be given.
    norm_topk_prob becomes softmax after top-k, its absence softmax before it. Raises
    UnsupportedError, naming the field, for what is not carried over.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    values = dict(hf_config) if isinstance(hf_config, Mapping) else hf_config.to_dict()
    rope_theta = check_config(values)
    fields = {**_model_fields(values, dtype), **_parallel_fields()}
    config = TransformerConfig(**{**fields, **settings})
    interleaved = config.virtual_pipeline_model_parallel_size
    return [
        GPTModel(
            config=config,
            transformer_layer_spec=_layer_specs(config, vp_stage),
            vocab_size=values["vocab_size"],
            max_sequence_length=values["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            share_embeddings_and_output_weights=bool(values.get("tie_word_embeddings", False)),
            position_embedding_type="rope",
            rotary_base=rope_theta,
            vp_stage=vp_stage,
        )
        for vp_stage in (range(interleaved) if interleaved else [None])
    ]


def check_config(values: Mapping[str, Any]) -> float:
    """The base of the rotary embedding; raises UnsupportedError for what is not carried over."""
    if values.get("model_type") != "qwen3_moe":
        raise UnsupportedError(f"model_type is {values.get('model_type')!r}, expected 'qwen3_moe'")
    # transformers 5 has rope_parameters; 4 has rope_theta, and rope_scaling unless plain
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    for name, found, expected in (
        ("hidden_act", values.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(values.get("attention_bias", False)), False),
        ("use_sliding_window", bool(values.get("use_sliding_window", False)), False),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0),
    ):
        if found != expected:
            raise UnsupportedError(f"{name} is {found!r}, expected {expected!r}")
    theta = rope.get("rope_theta") or values.get("rope_theta")
    if theta is None:
        raise UnsupportedError("rope_theta is missing, expected it or rope_parameters.rope_theta")
    return float(theta)


def _model_fields(values: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Fields of TransformerConfig: the model's size, and no kernels that need CUDA"""
    spec = RouterSpec.from_hf_config(values)
    moe_layers = set(spec.moe_layers)
    heads = values["num_attention_heads"]
    return {
        "num_layers": spec.num_layers,
        "hidden_size": values["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": values["num_key_value_heads"],
        "kv_channels": values.get("head_dim") or values["hidden_size"] // heads,
        "ffn_hidden_size": values["intermediate_size"],
        "moe_ffn_hidden_size": values["moe_intermediate_size"],
        "num_moe_experts": spec.num_experts,
        "moe_layer_freq": [int(i in moe_layers) for i in range(spec.num_layers)],
        "moe_router_topk": spec.top_k,
        "moe_router_pre_softmax": not values.get("norm_topk_prob", False),
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "allgather",
        "layernorm_epsilon": values["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # CUDA kernels, without which Megatron computes the same in plain torch
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }


def _parallel_fields() -> dict[str, Any]:
    """Fields of TransformerConfig that follow from the layout of the ranks"""
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_world_size()
    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return {
        "tensor_model_parallel_size": tp,
        # Megatron trains no MoE model under tensor parallelism without it
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": vpp,
        # batched by the interleaved schedule, messages between two stages that are each other's
        # next and previous get mixed up with gloo: no error, wrong losses
        "overlap_p2p_comm": vpp is not None,
        "batch_p2p_comm": vpp is None,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _layer_specs(config: Any, vp_stage: int | None) -> Any:
    """Megatron's own layers of this stage, with norms and core attention that run on a CPU."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from r3.trainer_hooks.megatron_cpu.modules import CausalAttention, RMSNorm

    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    block.layer_norm = RMSNorm
    for spec in block.layer_specs:
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention = layer.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
        attention.core_attention = CausalAttention
    return block


def token_logprobs(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of each next token, natural log, float32 [b, s - 1] for int64 ids [b, s].

    Entry [i, j] is of token j + 1 of sequence i given those before it; behind a sequence's end it
    is of padding and means nothing. Keeps the graph, and may run under MegatronReplay.
    """
    b, s = input_ids.shape
    positions = torch.arange(s, device=input_ids.device).expand(b, s)
    # CausalAttention needs no mask
    logits = model(input_ids, positions, None)  # [b, s, V]
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    return logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
