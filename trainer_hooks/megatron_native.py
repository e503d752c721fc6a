"""The trainer's own choice, recorded: routing for R2, and what the engine's rows are judged by."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from r3.alignment import Alignment, diagnose
from r3.batch import RoutingBatch
from r3.errors import ReplayError
from r3.identity import RolloutId
from r3.trainer_hooks.megatron_microbatch import Microbatch, Witness


class NativeRouting:
    """What the routers of this rank chose in a pass under `MegatronReplay.record`."""

    def __init__(self, microbatch: Microbatch, group: Any, weight_version: int | None) -> None:
        self._microbatch, self._group, self._version = microbatch, group, weight_version

    def _witness(self) -> Witness:
        found = self._microbatch.witness()
        if found is None:
            raise ReplayError("no forward pass was recorded, expected one inside record()")
        return found

    def alignment(self, rollout: RolloutId | None = None) -> Alignment:
        """Whether the recorded rows are of these tokens and layers, judged by the native choice.

        Of this rank's rows and layers; synchronises with the device. One verdict over all rows, in
        which a fault of one rollout among many is averaged away, or over those of one rollout.
        """
        names = self._microbatch.batch.rollout_ids
        if rollout is not None and rollout not in names:
            raise ReplayError(f"rollout {rollout} is not in the batch")
        chosen = np.array([[rollout is None or name == rollout] * 2 for name in names])
        return alignment_of(self._witness(), chosen)

    def to_batch(self) -> RoutingBatch:
        """The batch with the trainer's own routing in place of the engine's, for this chunk.

        Its spec has the layers of the chunk that ran. Tokens that were not forwarded have no
        routing; nor has the last of each sequence, on which nothing depends. Rows have the weight
        version that `step` was given. Where rows are split over tensor and context parallel ranks,
        all of them must call this together. A chunk without MoE layers replays nothing: it gets the
        batch as it is.
        """
        batch = self._microbatch.batch
        if self._microbatch.chunks and not self._microbatch.called:
            return batch
        witness = self._witness()
        layers = tuple(sorted(witness.native))
        chosen = torch.stack([witness.native[i] for i in layers], dim=1).int()
        seen = torch.from_numpy(np.flatnonzero(witness.tokens >= 0)).to(chosen.device)
        tokens = torch.from_numpy(witness.tokens).to(chosen.device)
        shape = (batch.num_tokens, *chosen.shape[1:])
        table = torch.full(shape, -1, dtype=torch.int32, device=chosen.device)
        table[tokens[seen]] = chosen[seen]
        if self._group is not None and self._group.size() > 1:
            torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX, group=self._group)
        routed = table.cpu().numpy()
        valid = routed.min(axis=(1, 2)) >= 0
        valid[batch.cu_seqlens[1:] - 1] = False
        version = -1 if self._version is None else self._version
        spec = dataclasses.replace(batch.spec, moe_layers=layers)
        return dataclasses.replace(
            batch,
            spec=spec,
            routed_experts=np.where(valid[:, None, None], routed, 0).astype(spec.dtype),
            valid=valid,
            weight_versions=np.where(valid, version, -1).astype(np.int64),
        )


def alignment_of(witness: Witness, chosen: np.ndarray) -> Alignment:
    """Of some rows; chosen: bool [B, 2], prompt and rest of each sequence of the batch."""
    layers = tuple(sorted(witness.native))
    native = torch.stack([witness.native[i] for i in layers], dim=1).cpu().numpy()
    batch, tokens = witness.batch, witness.tokens
    sequence = np.searchsorted(batch.cu_seqlens[1:], tokens, side="right")
    rest = tokens - batch.cu_seqlens[sequence] >= batch.prompt_lens[sequence]
    tokens = np.where((tokens >= 0) & chosen[sequence, rest.astype(int)], tokens, -1)
    return diagnose(batch, native, tokens, layers)
