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
        routed = self._whole(torch.stack([witness.native[i] for i in layers], dim=1).int())
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

    def margins(self) -> np.ndarray:
        """How near the routers were to another choice: float32 [T, MoE layers of `to_batch`].

        In logits: the k-th largest minus the (k + 1)-th, at least 0. As exact as the scores that
        the router compares: a sigmoid in bfloat16 near 1 stands for many logits. NaN where
        `to_batch` has no routing, and where rounding hides the difference. Collective as
        `to_batch`. Goes with it: `own.to_traces(margins=native.margins())`.
        Raises ReplayError if the pass was not recorded with margins=True.
        """
        batch = self._microbatch.batch
        if self._microbatch.to_logits is None:
            raise ReplayError("the pass was recorded without margins, expected margins=True")
        if self._microbatch.chunks and not self._microbatch.called:
            return np.full((batch.num_tokens, len(batch.spec.moe_layers)), np.nan, np.float32)
        self._witness()
        found = self._microbatch.margins
        rows = torch.stack([found[i] for i in sorted(found)], dim=1)
        table = self._whole(rows.nan_to_num(nan=-1.0))
        table[batch.cu_seqlens[1:] - 1] = -1
        return np.where(table < 0, np.float32(np.nan), table)

    def _whole(self, rows: torch.Tensor) -> np.ndarray:
        """Values of this rank's router rows by token, [T, ...], -1 where no rank has a row.

        rows: [rows, ...], -1 or more. Collective over the ranks that the rows are split over.
        """
        index = self._microbatch.view.index
        seen = torch.from_numpy(np.flatnonzero(index >= 0)).to(rows.device)
        tokens = torch.from_numpy(index).to(rows.device)
        shape = (self._microbatch.batch.num_tokens, *rows.shape[1:])
        table = torch.full(shape, -1, dtype=rows.dtype, device=rows.device)
        table[tokens[seen]] = rows[seen]
        if self._group is not None and self._group.size() > 1:
            torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX, group=self._group)
        return table.cpu().numpy()


def alignment_of(witness: Witness, chosen: np.ndarray) -> Alignment:
    """Of some rows; chosen: bool [B, 2], prompt and rest of each sequence of the batch."""
    layers = tuple(sorted(witness.native))
    native = torch.stack([witness.native[i] for i in layers], dim=1).cpu().numpy()
    batch, tokens = witness.batch, witness.tokens
    sequence = np.searchsorted(batch.cu_seqlens[1:], tokens, side="right")
    rest = tokens - batch.cu_seqlens[sequence] >= batch.prompt_lens[sequence]
    tokens = np.where((tokens >= 0) & chosen[sequence, rest.astype(int)], tokens, -1)
    return diagnose(batch, native, tokens, layers)
