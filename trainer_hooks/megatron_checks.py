"""What must hold between a batch, what the caller says of it, and what the model is really given.

Each function raises an error by name; none of them changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from r3.batch import RoutingBatch
from r3.errors import ReplayError, SpecError
from r3.trainer_hooks.megatron_microbatch import Microbatch
from r3.trainer_hooks.megatron_routers import Chunk


def in_backward() -> bool:
    """Whether this thread works for a backward pass: a forward function is then recomputed"""
    return torch._C._current_graph_task_id() != -1


def covered_layers(batch: RoutingBatch, chunks: list[Chunk]) -> tuple[int, ...]:
    """The layers of this rank that the batch has routing for: those of whole chunks, at least one.

    The batch may have other layers, of other pipeline stages. Raises SpecError if it is of another
    model, or lacks a layer.
    """
    spec = batch.spec
    routers = {layer: r for chunk in chunks for layer, r in chunk.routers.items()}
    covered: list[int] = []
    for chunk in chunks:
        has, needs = chunk.owned.intersection(spec.moe_layers), set(chunk.routers)
        if has != needs and (has or len(chunks) == 1):
            raise SpecError(
                f"the routing is of decoder layers {list(spec.moe_layers)}, expected those of the "
                f"model's routers, {sorted(routers)}; the model has no router in "
                f"{sorted(has - needs)}, the batch no routing for {sorted(needs - has)}"
            )
        covered += sorted(has)
    for layer, router in routers.items():
        for name, found, expected in (
            ("num_experts", spec.num_experts, router.num_experts),
            ("top_k", spec.top_k, router.topk),
            ("num_layers", spec.num_layers, router.config.num_layers),
        ):
            if found != expected:
                raise SpecError(
                    f"the routing has {name}={found}, expected {expected} as in the model's "
                    f"router of decoder layer {layer}"
                )
    if routers and not covered:
        raise SpecError(
            f"the routing is of decoder layers {list(spec.moe_layers)}, expected some of this "
            f"rank's, {sorted(routers)}"
        )
    return tuple(sorted(covered))


def as_numpy(name: str, value: Any) -> np.ndarray | None:
    """A tensor or array on the host, None for None"""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor | np.ndarray):
        raise ReplayError(f"{name} is a {type(value).__name__}, expected a tensor")
    return torch.as_tensor(value).detach().cpu().numpy()


def slot_offsets(packed_seq_params: Any) -> np.ndarray | None:
    """Integers [B + 1], where packed sequences start, from Megatron's PackedSeqParams"""
    if packed_seq_params is None:
        return None
    if getattr(packed_seq_params, "local_cp_size", None) is not None:
        raise ReplayError(
            "packed_seq_params.local_cp_size is set, expected None: context parallelism that "
            "changes from batch to batch is not supported"
        )
    padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
    name = "cu_seqlens_q" if padded is None else "cu_seqlens_q_padded"
    offsets = getattr(packed_seq_params, name, None)
    if offsets is None:
        raise ReplayError("packed_seq_params has no cu_seqlens_q, expected the sequences' offsets")
    return as_numpy(f"packed_seq_params.{name}", offsets)


def check_fed(microbatch: Microbatch, fed: torch.Tensor) -> None:
    """The ids that the model is really given are those whose rows were worked out."""
    declared = microbatch.input_ids
    if fed is declared:
        return
    if declared is None:
        raise ReplayError(
            "this stage is fed input_ids, expected them in microbatch(input_ids=...): only stages "
            "that are fed hidden states may leave them out"
        )
    if fed.shape != declared.shape or not torch.equal(fed, declared.to(fed)):
        raise ReplayError(
            f"the model is fed input_ids of shape {list(fed.shape)}, expected those that were "
            f"given to microbatch(), of shape {list(declared.shape)}, with the same values"
        )


def check_layout(microbatch: Microbatch, layer: int, hidden: torch.Tensor) -> None:
    """Rows are right only if the router sees [s, b, hidden] of the declared slots."""
    found, expected = list(hidden.shape[:2]), list(microbatch.view.shape)
    if found != expected:
        raise ReplayError(
            f"layer {layer}: the router sees {found} positions and sequences, expected {expected} "
            "for what was given to microbatch()"
        )


def check_ran(microbatch: Microbatch, chunk_of: Mapping[int, int]) -> None:
    """Every router of the chunks that ran has asked; chunk_of: by decoder layer."""
    ran = {layer for layer, chunk in chunk_of.items() if chunk in microbatch.chunks}
    expected = ran if microbatch.chunks else set(chunk_of)
    silent = sorted(expected - microbatch.called)
    if silent:
        raise ReplayError(
            f"decoder layers {silent}: the router never asked for its routing during the "
            "microbatch, expected one forward pass through all MoE layers; nothing was replayed "
            "there"
        )
