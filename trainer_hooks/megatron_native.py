"""The trainer's own choice beside the recorded one: routing for R2, and a second witness.

What a record says can be wrong in ways that no rule over the array sees: shifted by a token or a
layer, or of another rollout. The native top-k of the trainer's router agrees with the right rows
more than with any others (`r3.alignment`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from r3.alignment import Alignment, diagnose
from r3.batch import RoutingBatch
from r3.errors import ReplayError
from r3.identity import RolloutId
from r3.trainer_hooks.megatron_microbatch import Microbatch
from r3.trainer_hooks.megatron_report import ReplayReport


class NativeRouting:
    """What the routers of this rank chose in a pass under `MegatronReplay.record`."""

    def __init__(self, microbatch: Microbatch, group: Any, weight_version: int | None) -> None:
        self._microbatch, self._group, self._version = microbatch, group, weight_version

    def alignment(self, rollout: RolloutId | None = None) -> Alignment:
        """Whether the recorded rows are of these tokens and layers, judged by the native choice.

        Of this rank's rows and layers, all or those of one rollout; synchronises with the device.
        """
        names = self._microbatch.batch.rollout_ids
        if rollout is not None and rollout not in names:
            raise ReplayError(f"rollout {rollout} is not in the batch")
        return _diagnose(self._microbatch, None if rollout is None else names.index(rollout))

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


# Replayed cells of a rollout from which on its share of experts outside the top-k is judged alone.
_ENOUGH_CELLS = 100


def check_outside(
    report: ReplayReport, top_k: int, limit: float, witnesses: Iterable[Microbatch]
) -> None:
    """Raise ReplayError, with a diagnosis, if more than `limit` of the replayed experts were
    outside the native top-k: of all, or of one rollout with enough cells."""
    witnesses = list(witnesses)
    total = report.total
    share = total.outside_topk_experts_forced / max(total.rows_replayed * top_k, 1)
    expected = f"expected at most max_outside_fraction = {limit:.1%}"
    if share > limit:
        raise ReplayError(
            f"{share:.1%} of the replayed experts are outside the trainer's native top-k, "
            f"{expected}: {_explained(witnesses)}"
        )
    shares = {
        name: r.outside_topk_experts_forced / (r.cells_replayed * top_k)
        for name, r in report.rollouts.items()
        if r.cells_replayed >= _ENOUGH_CELLS
    }
    worst = sorted((name for name, x in shares.items() if x > limit), key=lambda n: -shares[n])
    if worst:
        name = worst[0]
        more = f" (and {len(worst) - 1} more rollouts)" if len(worst) > 1 else ""
        raise ReplayError(
            f"rollout {name}: {shares[name]:.1%} of its replayed experts are outside the trainer's "
            f"native top-k, {expected}, and {share:.1%} in all{more}: "
            f"{_explained(witnesses, name)}"
        )


def _explained(witnesses: list[Microbatch], rollout: RolloutId | None = None) -> str:
    """What the first microbatches of the step say of all their rows, or of those of a rollout"""
    few = False
    for microbatch in witnesses:
        names = microbatch.batch.rollout_ids
        if rollout is None or rollout in names:
            found = _diagnose(microbatch, None if rollout is None else names.index(rollout))
            if found.fault:
                return str(found)
            few = few or not found.enough
    reason = "too few rows to name a shift" if few else "no shift explains it"
    return (
        f"{reason}; other weights, another model or another rollout look like this too (compare "
        "with record() and alignment())"
    )


def _diagnose(microbatch: Microbatch, sequence: int | None = None) -> Alignment:
    batch, tokens = microbatch.batch, microbatch.view.index
    layers, native = _native(microbatch)
    if sequence is not None:
        start, stop = batch.cu_seqlens[sequence : sequence + 2]
        tokens = np.where((tokens >= start) & (tokens < stop), tokens, -1)
    return diagnose(batch, native, tokens, layers)


def _kept(microbatch: Microbatch) -> dict[int, torch.Tensor]:
    if not microbatch.native:
        raise ReplayError("no forward pass was recorded, expected one inside record()")
    return microbatch.native


def _native(microbatch: Microbatch) -> tuple[tuple[int, ...], np.ndarray]:
    """Decoder layers, and integers [rows, layers, top_k]"""
    kept = _kept(microbatch)
    layers = tuple(sorted(kept))
    return layers, torch.stack([kept[i] for i in layers], dim=1).cpu().numpy()
