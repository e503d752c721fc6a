"""The weights of a Hugging Face Qwen3-MoE, cut to what this rank's Megatron-core chunks hold.

Shape legend: V vocabulary, H hidden size, E experts, F expert width, h query heads, g key/value
heads, d head size. Shapes are those of the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from r3.errors import FormatError

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
MLP = ("gate", "up", "down")
_Split = Callable[[torch.Tensor, int], torch.Tensor]  # a weight's part on this rank, along a dim


def load_hf_weights(model: Any, source: str | Path | Mapping[str, torch.Tensor]) -> None:
    """Copy Hugging Face weights into a model, or list of chunks, of `build_model_chunks`.

    source: a state dict of the whole model, or a directory with model.safetensors or its sharded
    form and index. Experts may be named one by one or packed (`gate_up_proj` [E, 2F, H],
    `down_proj` [E, H, F]). Raises FormatError naming the first weight that is missing, left over or
    of another shape; the model is then left as it was. Names are checked for the whole model, so
    that all ranks agree; shapes only of what this rank holds.
    """
    weights = dict(source) if isinstance(source, Mapping) else _read_directory(Path(source))
    chunks = list(model) if isinstance(model, Sequence) else [model]
    _check_names(weights, chunks[0])
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for chunk in chunks:
        parameters, new = dict(chunk.named_parameters()), _chunk_weights(chunk, weights)
        for name in sorted(set(parameters) ^ set(new)):
            raise FormatError(f"weight {name} is in only one of the model and the checkpoint")
        for name, tensor in new.items():
            if parameters[name].shape != tensor.shape:
                raise FormatError(
                    f"weight {name} has shape {list(tensor.shape)}, expected "
                    f"{list(parameters[name].shape)}"
                )
            copies.append((parameters[name], tensor))
    with torch.no_grad():
        for parameter, tensor in copies:
            parameter.copy_(tensor)


def _check_names(weights: Mapping[str, torch.Tensor], chunk: Any) -> None:
    """Are they those of the whole model?"""
    expected = [EMBEDDING]
    for i in range(chunk.config.num_layers):
        expected += [f"model.layers.{i}.{name}.weight" for name in _LAYER.values()]
        expected += [f"model.layers.{i}.self_attn.{x}_proj.weight" for x in "qkv"]
        mlp = f"model.layers.{i}.mlp."
        if not chunk.config.moe_layer_freq[i]:
            expected += [f"{mlp}{x}_proj.weight" for x in MLP]
            continue
        expected.append(mlp + "gate.weight")
        if mlp + "experts.gate_up_proj" in weights:
            expected += [mlp + "experts.gate_up_proj", mlp + "experts.down_proj"]
            continue
        for e in range(chunk.config.num_moe_experts):
            expected += [f"{mlp}experts.{e}.{x}_proj.weight" for x in MLP]
    expected.append(NORM)
    tied = chunk.share_embeddings_and_output_weights
    if not tied or HEAD in weights:
        expected.append(HEAD)
    for name in expected:
        if name not in weights:
            raise FormatError(f"weight {name} is missing from the checkpoint")
    for name in sorted(set(weights) - set(expected)):
        raise FormatError(f"weight {name} of the checkpoint is not one of the model's")
    if tied and HEAD in weights and not torch.equal(weights[HEAD], weights[EMBEDDING]):
        raise FormatError(
            f"{HEAD} differs from {EMBEDDING}, expected one tensor, as tie_word_embeddings is true"
        )


# a layer's weights that are taken over as they are, or cut along the input: ours to theirs
_LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
}


def _chunk_weights(chunk: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of the chunk's parameters, what each of them is to be"""
    from megatron.core import parallel_state as ps

    split = _splitter(
        ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    )
    expert_split = _splitter(
        ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
    )
    new: dict[str, torch.Tensor] = {}
    tied = chunk.share_embeddings_and_output_weights
    if chunk.pre_process:
        new["embedding.word_embeddings.weight"] = split(weights[EMBEDDING], 0)
    for j, layer in enumerate(chunk.decoder.layers):
        i = layer.layer_number - 1  # counts through all stages
        ours, theirs = f"decoder.layers.{j}.", f"model.layers.{i}."
        for a, b in _LAYER.items():
            new[f"{ours}{a}.weight"] = weights[f"{theirs}{b}.weight"]
        new[ours + "self_attention.linear_qkv.weight"] = split(
            _qkv(weights, theirs + "self_attn.", chunk.config), 0
        )
        proj = ours + "self_attention.linear_proj.weight"
        new[proj] = split(new[proj], 1)
        if not chunk.config.moe_layer_freq[i]:
            gate, up, down = (weights[f"{theirs}mlp.{x}_proj.weight"] for x in MLP)
            fc1, fc2 = _mlp(gate, up, down, split)
            new[ours + "mlp.linear_fc1.weight"], new[ours + "mlp.linear_fc2.weight"] = fc1, fc2
            continue
        new[ours + "mlp.router.weight"] = weights[theirs + "mlp.gate.weight"]
        for local, e in enumerate(layer.mlp.local_expert_indices):
            expert = _expert(weights, theirs + "mlp.experts.", e, chunk.config.num_moe_experts)
            fc1, fc2 = _mlp(*expert, expert_split)
            name = f"{ours}mlp.experts.local_experts.{local}."
            new[name + "linear_fc1.weight"], new[name + "linear_fc2.weight"] = fc1, fc2
    if chunk.post_process:
        new["decoder.final_layernorm.weight"] = weights[NORM]
        # tied weights are one parameter only where both ends are on the same stage
        if not tied or not chunk.pre_process:
            new["output_layer.weight"] = split(weights[EMBEDDING if tied else HEAD], 0)
    return new


def _splitter(rank: int, size: int) -> _Split:
    return lambda tensor, dim: tensor.tensor_split(size, dim)[rank]


def _mlp(
    gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, split: _Split
) -> tuple[torch.Tensor, torch.Tensor]:
    """[2F, H] and [H, F]: Megatron's gated linear unit wants each rank's gate before its up"""
    return torch.cat([split(gate, 0), split(up, 0)]), split(down, 1)


def _expert(
    weights: Mapping[str, torch.Tensor], prefix: str, expert: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate [F, H], up [F, H] and down [H, F] of one expert of `count`, from either form of names"""
    if prefix + "gate_up_proj" not in weights:
        gate, up, down = (weights[f"{prefix}{expert}.{x}_proj.weight"] for x in MLP)
        return gate, up, down
    for name in ("gate_up_proj", "down_proj"):
        found = len(weights[prefix + name])
        if found != count:
            raise FormatError(f"weight {prefix}{name} has {found} experts, expected {count}")
    gate, up = weights[prefix + "gate_up_proj"][expert].tensor_split(2)
    return gate, up, weights[prefix + "down_proj"][expert]


def _qkv(weights: Mapping[str, torch.Tensor], prefix: str, config: Any) -> torch.Tensor:
    """[(h + 2g) * d, H]: Megatron keeps each group's queries, key and value together"""
    groups, size = config.num_query_groups, config.kv_channels
    parts = []
    for name, heads in (
        ("q", config.num_attention_heads // groups),
        ("k", 1),
        ("v", 1),
    ):
        full = f"{prefix}{name}_proj.weight"
        tensor = weights[full]
        expected = [groups * heads * size, config.hidden_size]
        if list(tensor.shape) != expected:
            raise FormatError(f"weight {full} has shape {list(tensor.shape)}, expected {expected}")
        parts.append(tensor.view(groups, heads * size, -1))
    return torch.cat(parts, dim=1).flatten(0, 1)


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
