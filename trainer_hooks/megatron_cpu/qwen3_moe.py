"""A Hugging Face Qwen3-MoE as a Megatron-core GPTModel on one CPU rank, with its weights.

Shape legend: V vocabulary, H hidden size, E experts, F expert width, h query heads, g key/value
heads, d head size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from r3.errors import FormatError, UnsupportedError
from r3.spec import RouterSpec


def build_gpt_model(hf_config: Any, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A GPTModel with random weights, from a Hugging Face config (object, or mapping of its JSON).

    settings: fields of Megatron's TransformerConfig that a Hugging Face config says nothing about.
    Needs `shim.init_single_process()`. norm_topk_prob becomes softmax after top-k, its absence
    softmax before it. Raises UnsupportedError, naming the field, for what is not carried over.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    values = dict(hf_config) if isinstance(hf_config, Mapping) else hf_config.to_dict()
    rope_theta = check_config(values)
    spec = RouterSpec.from_hf_config(values)
    moe_layers = set(spec.moe_layers)
    heads = values["num_attention_heads"]
    fields: dict[str, Any] = {
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
    config = TransformerConfig(**{**fields, **settings})
    return GPTModel(
        config=config,
        transformer_layer_spec=_layer_specs(config),
        vocab_size=values["vocab_size"],
        max_sequence_length=values["max_position_embeddings"],
        share_embeddings_and_output_weights=bool(values.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=rope_theta,
    )


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


def _layer_specs(config: Any) -> Any:
    """Megatron's own layers, with norms and core attention that run on a CPU."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from r3.trainer_hooks.megatron_cpu.modules import CausalAttention, RMSNorm

    specs = []
    for is_moe in config.moe_layer_freq:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if is_moe else None,
            qk_layernorm=True,
            normalization="RMSNorm",
        )
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention = layer.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
        attention.core_attention = CausalAttention
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def load_hf_weights(model: Any, source: str | Path | Mapping[str, torch.Tensor]) -> None:
    """Copy Hugging Face weights into a model of `build_gpt_model`.

    source: a state dict, or a directory with model.safetensors or its sharded form and index.
    Experts may be named one by one or packed (`gate_up_proj` [E, 2F, H], `down_proj` [E, H, F]).
    Raises FormatError naming the first weight that is missing, left over or of another shape; the
    model is then left as it was.
    """
    weights = dict(source) if isinstance(source, Mapping) else _read_directory(Path(source))
    reader = _Reader(weights)
    parameters = dict(model.named_parameters())
    new: dict[str, torch.Tensor] = {}
    new["embedding.word_embeddings.weight"] = embedding = reader.take("model.embed_tokens.weight")
    for i, layer in enumerate(model.decoder.layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        new[ours + "self_attention.linear_qkv.weight"] = _qkv(reader, theirs, model.config)
        for a, b in (
            ("input_layernorm", "input_layernorm"),
            ("self_attention.q_layernorm", "self_attn.q_norm"),
            ("self_attention.k_layernorm", "self_attn.k_norm"),
            ("self_attention.linear_proj", "self_attn.o_proj"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
        ):
            new[f"{ours}{a}.weight"] = reader.take(f"{theirs}{b}.weight")
        if not model.config.moe_layer_freq[i]:
            new[ours + "mlp.linear_fc1.weight"] = reader.gate_up(theirs + "mlp.")
            new[ours + "mlp.linear_fc2.weight"] = reader.take(theirs + "mlp.down_proj.weight")
            continue
        new[ours + "mlp.router.weight"] = reader.take(theirs + "mlp.gate.weight")
        experts = _experts(reader, theirs + "mlp.experts.", layer.mlp.num_local_experts)
        for e, (fc1, fc2) in enumerate(experts):
            new[f"{ours}mlp.experts.local_experts.{e}.linear_fc1.weight"] = fc1
            new[f"{ours}mlp.experts.local_experts.{e}.linear_fc2.weight"] = fc2
    new["decoder.final_layernorm.weight"] = reader.take("model.norm.weight")
    head = "output_layer.weight"
    if head in parameters:
        new[head] = reader.take("lm_head.weight")
    elif "lm_head.weight" in weights and not torch.equal(reader.take("lm_head.weight"), embedding):
        raise FormatError(
            "lm_head.weight differs from model.embed_tokens.weight, expected one tensor, as "
            "tie_word_embeddings is true"
        )
    reader.check_empty()
    for name in sorted(set(parameters) ^ set(new)):
        raise FormatError(f"weight {name} is in only one of the model and the checkpoint")
    for name, tensor in new.items():
        if parameters[name].shape != tensor.shape:
            raise FormatError(
                f"weight {name} has shape {list(tensor.shape)}, expected "
                f"{list(parameters[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in new.items():
            parameters[name].copy_(tensor)


class _Reader:
    """Hands out each weight of a checkpoint once."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights, self._taken = weights, set[str]()

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def take(self, name: str) -> torch.Tensor:
        if name not in self._weights:
            raise FormatError(f"weight {name} is missing from the checkpoint")
        self._taken.add(name)
        return self._weights[name]

    def gate_up(self, prefix: str) -> torch.Tensor:
        """[2F, H]: Megatron's gated linear unit wants the gate first"""
        return torch.cat([self.take(f"{prefix}{x}_proj.weight") for x in ("gate", "up")])

    def check_empty(self) -> None:
        for name in sorted(set(self._weights) - self._taken):
            raise FormatError(f"weight {name} of the checkpoint is not one of the model's")


def _qkv(reader: _Reader, prefix: str, config: Any) -> torch.Tensor:
    """[(h + 2g) * d, H]: Megatron keeps each group's queries, key and value together"""
    groups, size = config.num_query_groups, config.kv_channels
    parts = []
    for name, heads in (
        ("q", config.num_attention_heads // groups),
        ("k", 1),
        ("v", 1),
    ):
        full = f"{prefix}self_attn.{name}_proj.weight"
        tensor = reader.take(full)
        expected = [groups * heads * size, config.hidden_size]
        if list(tensor.shape) != expected:
            raise FormatError(f"weight {full} has shape {list(tensor.shape)}, expected {expected}")
        parts.append(tensor.view(groups, heads * size, -1))
    return torch.cat(parts, dim=1).flatten(0, 1)


def _experts(reader: _Reader, prefix: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(gate and up [2F, H], down [H, F]) of each expert, from either form of names"""
    if prefix + "gate_up_proj" not in reader:
        return [
            (reader.gate_up(f"{prefix}{e}."), reader.take(f"{prefix}{e}.down_proj.weight"))
            for e in range(count)
        ]
    packed = [reader.take(prefix + name) for name in ("gate_up_proj", "down_proj")]
    for name, tensor in zip(("gate_up_proj", "down_proj"), packed, strict=True):
        if len(tensor) != count:
            raise FormatError(f"weight {prefix}{name} has {len(tensor)} experts, expected {count}")
    return list(zip(*packed, strict=True))


def _read_directory(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    index = directory / "model.safetensors.index.json"
    if not index.exists():
        single = directory / "model.safetensors"
        if not single.exists():
            raise FormatError(f"{directory} has neither {single.name} nor {index.name}")
        return load_file(single)
    where: dict[str, str] = json.loads(index.read_text())["weight_map"]
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(set(where.values())):
        if not (directory / shard).exists():
            raise FormatError(f"{directory / shard} is missing, named by {index.name}")
        weights.update(load_file(directory / shard))
    for name in sorted(set(where) - set(weights)):
        raise FormatError(f"weight {name} is missing from {where[name]}, named by {index.name}")
    return weights


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
