"""What must hold between a batch, what the caller says of it, and what the model is really given.

Each function raises an error by name; none of them changes anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
    """A tensor, array or list on the host, None for None"""
    if value is None:
        return None
    try:
        return torch.as_tensor(value).detach().cpu().numpy()
    except (TypeError, ValueError, RuntimeError) as e:
        raise ReplayError(f"{name} is a {type(value).__name__}, expected a tensor: {e}") from e


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
    if microbatch.is_fed(fed):
        return
    declared = microbatch.ids
    if declared is None:
        raise ReplayError(
            "this stage is fed input_ids, expected them in microbatch(input_ids=...): only stages "
            "that are fed hidden states may leave them out"
        )
    found = fed.detach().cpu().numpy()
    if found.shape != declared.shape:
        raise ReplayError(
            f"the model is fed input_ids of shape {list(found.shape)}, expected those that were "
            f"given to microbatch(), of shape {list(declared.shape)}"
        )
    differs = np.argwhere(found != declared)
    if len(differs):
        i, j = differs[0].tolist()
        raise ReplayError(
            f"the model is fed input_ids[{i}, {j}] = {found[i, j]}, expected {declared[i, j]} as "
            "in those that were given to microbatch()"
        )


def check_layout(microbatch: Microbatch, layer: int, hidden: torch.Tensor) -> None:
    """Rows are right only if the router sees [s, b, hidden] of the declared slots."""
    found, expected = list(hidden.shape[:2]), list(microbatch.view.shape)
    if found != expected:
        raise ReplayError(
            f"layer {layer}: the router sees {found} positions and sequences, expected {expected} "
            "for what was given to microbatch()"
        )


def check_ran(microbatch: Microbatch, chunks: Sequence[Chunk]) -> None:
    """Every router of the chunks that ran has asked, and what they were fed was looked at."""
    ran = {x for i in microbatch.chunks for x in chunks[i].routers}
    everything = {x for chunk in chunks for x in chunk.routers}
    silent = sorted((ran if microbatch.chunks else everything) - microbatch.called)
    if silent:
        raise ReplayError(
            f"decoder layers {silent}: the router never asked for its routing during the "
            "microbatch, expected one forward pass through all MoE layers; nothing was replayed "
            "there"
        )
    if microbatch.ids is None or microbatch.fed:
        return
    if any(chunks[i].embeddings for i in microbatch.bodies):
        raise ReplayError(
            "the model ran without embedding input_ids (decoder_input?), expected those that were "
            "given to microbatch()"
        )


def check_stages(passes: Sequence[Sequence[bytes]], group: Any, device: torch.device) -> None:
    """All stages of a pipeline were given the same microbatches in the same order.

    passes: digests by chunk of this rank. Collective over the pipeline's `group`. Stages that are
    fed hidden states see no tokens, so nothing else would show that their data is out of step.
    """
    same = all(p == passes[0] for p in passes)
    found = hashlib.blake2b(b"".join(passes[0]), digest_size=7).digest()
    mine = [len(passes[0]), int.from_bytes(found, "little") if same else -1]
    ours = torch.tensor(mine, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(ours) for _ in range(group.size())]
    torch.distributed.all_gather(gathered, ours, group=group)
    stages = [x.tolist() for x in gathered]
    if any(s != stages[0] or s[1] < 0 for s in stages):
        equal = [s == stages[0] and s[1] >= 0 for s in stages]
        raise ReplayError(
            "the stages of the pipeline were given different microbatches (tokens, slots or "
            f"order): {[s[0] for s in stages]} passes by stage, as in the first one {equal}; their "
            "data is out of step, or starts and seq_length differ"
        )
