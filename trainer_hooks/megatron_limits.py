"""Whether the rows of a step can belong to their tokens and layers: the second witness.

What a record says can be wrong in ways that no rule over the array sees: shifted by a token or a
layer, or of another rollout. The native top-k of the trainer's router agrees with the right rows
more than with any others. Shares of experts outside it are looked at over all rows, by layer, and
by the prompt and the rest of each rollout, so that a few wrong rows do not hide among right ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from r3.errors import ReplayError
from r3.identity import RolloutId
from r3.trainer_hooks.megatron_microbatch import PassCounts
from r3.trainer_hooks.megatron_native import alignment_of
from r3.trainer_hooks.megatron_report import ReplayReport

# Replayed cells from which on their share of experts outside the top-k is judged.
_ENOUGH_CELLS = 100
# Above this share, the places of rows are looked at: of right rows a tenth of the cells is said to
# differ (Qwen3-30B-A3B, on-policy), and shifted rows have only 0.35 where neighbours are alike.
_SUSPICIOUS = 0.15
_PARTS = ("the prompt of ", "the answer of ", "")
# Enough to name a fault; the first layers of a stage have seen least of what was replayed below.
WITNESS_LAYERS, WITNESS_MICROBATCHES = 4, 8


@dataclass(frozen=True)
class _Suspect:
    """Rows of a rollout and the share of their experts outside the native top-k"""

    share: float
    rollout: RolloutId
    part: str

    def __str__(self) -> str:
        return f"{self.share:.1%} in {self.part}rollout {self.rollout}"


def check_outside(report: ReplayReport, limit: float, passes: Sequence[PassCounts]) -> None:
    """Raise ReplayError if rows do not belong to their tokens and layers.

    That is if more than `limit` of the replayed experts were outside the native top-k, of all, of
    one layer, or of one rollout, its prompt or what follows, where these have enough cells; or if
    a suspicious share of them was and a witness names a fault.
    """
    suspicious = min(limit, _SUSPICIOUS)
    share = report.outside_fraction
    layers = {
        layer: c.outside_topk_experts_forced / (c.rows_replayed * report.top_k)
        for layer, c in report.layers.items()
        if c.rows_replayed >= _ENOUGH_CELLS
    }
    worst_layer = max(layers, key=layers.__getitem__, default=None)
    suspects, chosen = _suspects(passes, report.top_k, suspicious)
    wrong_layer = worst_layer is not None and layers[worst_layer] > limit
    if share <= suspicious and not suspects and not wrong_layer:
        return
    fault, reason = _explained(passes, chosen, everything=not suspects)
    beyond = share > limit or wrong_layer or any(s.share > limit for s in suspects)
    if not fault and not beyond:
        return
    text = f"{share:.1%} of the replayed experts are outside the trainer's native top-k"
    if wrong_layer:
        assert worst_layer is not None
        text += f", {layers[worst_layer]:.1%} in layer {worst_layer}"
    if suspects:
        worst = max(suspects, key=lambda s: s.share)
        others = len({s.rollout for s in suspects}) - 1
        text += f", {worst}" + (f" and much in {others} more rollouts" if others else "")
    if beyond:
        text += f", expected at most max_outside_fraction = {limit:.1%}"
    raise ReplayError(f"{text}: {fault or reason}")


def fetched(passes: Sequence[PassCounts]) -> list[np.ndarray]:
    """int64 [B, 2] of each pass, the experts outside. Waits for the device once."""
    if not passes:
        return []
    values = torch.cat([p.experts for p in passes]).cpu().numpy()
    ends = np.cumsum([p.cells.size for p in passes])[:-1]
    return [x.reshape(-1, 2) for x in np.split(values, ends)]


def _suspects(
    passes: Sequence[PassCounts], top_k: int, suspicious: float
) -> tuple[list[_Suspect], list[np.ndarray]]:
    """And, by pass, which rows these are: bool [B, 2]"""
    suspects: list[_Suspect] = []
    chosen = []
    for p, experts in zip(passes, fetched(passes), strict=True):
        # [B, 3]: prompt, answer, both
        cells, outside = (np.c_[x, x.sum(axis=1)] for x in (p.cells, experts))
        shares = outside / np.maximum(cells * top_k, 1)
        wrong = (cells >= _ENOUGH_CELLS) & (shares > suspicious)
        # a part alone if it is alone, as right rows would speak for wrong ones in the whole
        parts = wrong[:, :2]
        wrong[:, 2] = parts.all(axis=1) | (wrong[:, 2] & ~parts.any(axis=1))
        parts &= ~wrong[:, 2:]
        for i, part in np.argwhere(wrong):
            suspects.append(_Suspect(float(shares[i, part]), p.names[i], _PARTS[part]))
        rows = parts | wrong[:, 2:]
        chosen.append(rows)
    return suspects, chosen


def _explained(
    passes: Sequence[PassCounts], chosen: list[np.ndarray], everything: bool
) -> tuple[str | None, str]:
    """The fault that witnesses name, of the chosen rows or of all, and else why none is."""
    found = [
        alignment_of(p.witness, rows | everything)
        for p, rows in zip(passes, chosen, strict=True)
        if p.witness is not None and (everything or rows.any())
    ]
    fault = next((str(a) for a in found if a.fault), None)
    others = (
        "; other weights, another model or another rollout look like this too (compare with "
        "record() and alignment())"
    )
    if not found:
        return fault, f"not among the first {WITNESS_MICROBATCHES} microbatches, which are examined"
    if any(a.enough for a in found):
        return fault, "no shift explains it" + others
    return fault, "too few rows to name a shift" + others
