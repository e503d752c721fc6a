"""The trainer's own choice beside the recorded one: routing for R2, and a second witness.

What a record says can be wrong in ways that no rule over the array sees: shifted by a token or a
layer, or of another rollout. The native top-k of the trainer's router agrees with the right rows
more than with any others (`r3.alignment`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from r3.alignment import Alignment, diagnose
from r3.batch import RoutingBatch
from r3.errors import ReplayError
from r3.trainer_hooks.megatron_microbatch import Microbatch
from r3.trainer_hooks.megatron_report import ReplayReport


class NativeRouting:
    """What the routers of this rank chose in a pass under `MegatronReplay.record`."""

    def __init__(self, microbatch: Microbatch, group: Any, weight_version: int | None) -> None:
        self._microbatch, self._group, self._version = microbatch, group, weight_version

    def alignment(self) -> Alignment:
        """Whether the recorded rows are of these tokens and layers, judged by the native choice.

        Of this rank's rows and layers; synchronises with the device.
        """
        return _diagnose(self._microbatch)

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
        layers, native = _native(self._microbatch)
        tokens = self._microbatch.view.index
        table = torch.full((batch.num_tokens, *native.shape[1:]), -1, dtype=torch.int32)
        seen = tokens >= 0
        table[torch.from_numpy(tokens[seen])] = torch.from_numpy(native[seen].astype(np.int32))
        if self._group is not None and self._group.size() > 1:
            device = next(iter(_kept(self._microbatch).values())).device
            table = table.to(device)
            torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX, group=self._group)
        routed = table.cpu().numpy()
        valid = (routed >= 0).all(axis=(1, 2))
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


def check_outside(
    report: ReplayReport, top_k: int, limit: float, witnesses: Mapping[int, Microbatch]
) -> None:
    """Raise ReplayError, with a diagnosis, if more than `limit` of the replayed experts were
    outside the native top-k."""
    total = report.total
    experts = total.rows_replayed * top_k
    share = total.outside_topk_experts_forced / max(experts, 1)
    if share <= limit:
        return
    text = (
        f"{share:.1%} of the replayed experts are outside the trainer's native top-k, expected at "
        f"most max_outside_fraction = {limit:.1%}: "
    )
    found = [_diagnose(m) for m in witnesses.values()]
    named = next((str(a) for a in found if a.fault), None)
    raise ReplayError(
        text + (named or "no shift explains it; other weights, another model or other rollouts")
    )


def _diagnose(microbatch: Microbatch) -> Alignment:
    layers, native = _native(microbatch)
    return diagnose(microbatch.batch, native, microbatch.view.index, layers)


def _kept(microbatch: Microbatch) -> dict[int, torch.Tensor]:
    if not microbatch.native:
        raise ReplayError("no forward pass was recorded, expected one inside record()")
    return microbatch.native


def _native(microbatch: Microbatch) -> tuple[tuple[int, ...], np.ndarray]:
    """Decoder layers, and integers [rows, layers, top_k]"""
    kept = _kept(microbatch)
    layers = tuple(sorted(kept))
    return layers, torch.stack([kept[i] for i in layers], dim=1).cpu().numpy()
