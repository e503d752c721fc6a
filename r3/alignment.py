"""Whether recorded rows stand at the right token and layer, by the trainer's own router.

Rows that are shifted by a token or a layer, or that belong to another rollout, are rows that an
engine did choose: nothing in the array gives them away (r3.checks). The trainer's router is a
second witness. Its native top_k agrees with the record more at the right place than at any other.

How much agreement is enough cannot be said in advance, and chance (top_k / experts) is the wrong
measure: neighbouring tokens share 43 % of their experts on Qwen3-30B-A3B. So places are compared
with each other, on the same cells. What one place can win over another is its room, 1 - likeness,
with likeness the agreement of the recorded rows at the two places with each other. Where a share c
of the record disagrees with the trainer, the right place wins (1 - c) of the room over a wrong
one, and two wrong places win nothing from each other. Where all rows are alike there is no room,
and nothing can be said.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.checks import check_distinct, check_shape_and_range
from r3.errors import TraceError
from r3.spec import RouterSpec

_ROW_SHIFTS = (-2, -1, 1, 2)
_LAYER_SHIFTS = (-3, -2, -1, 1, 2, 3)
# A place is better when it wins this share of the room. Right records win 0.7 or more even where a
# quarter of the cells differ. Rows of another rollout win up to 0.1: both begin with the same
# template, and both like the popular experts.
_SHARE = 0.2
# ... and this much agreement, so that a place that hardly differs is never named.
_MARGIN = 0.02
# Rows that are more alike than 0.8 across rollouts are those of a router that hardly chooses: what
# differs in them may be rounding, which agrees with nothing.
_ROOM = 0.2
# Rows that agree this well are not accused: what little is wrong with them is not their place, and
# in periodic text another place may agree just a little better.
_FINE = 0.9
# Standard errors that a mean must be away from its limit. Ten places are tried, and with 8 blocks
# the error itself is known badly, so this is more than the usual 2 or 3.
_ERRORS = 4.0
# Rows that follow each other resemble each other. In real traces the error of a mean over rows is
# up to twice what independent rows would have; over blocks of this many it shows.
_BLOCK = 16
_LEAST_BLOCKS, _LEAST_ROWS = 8, 64
# Rows looked at. More of them change no verdict and only take time.
_MOST_ROWS = 8192
# Rollouts tried for one that has a row at the same position.
_OTHERS = 8
# Rows of the same sequence are this far off, at least, where no other rollout can be had.
_FAR = 8
_CELLS = 1 << 14  # compared at a time, so that the [top_k, top_k, cells] table stays in the cache

_WORDS = {1: "one", 2: "two", 3: "three"}


@dataclass(frozen=True, eq=False)
class Alignment:
    """What `diagnose` found. Agreement is |recorded and native| / top_k, mean over cells, 0..1.

    layers: decoder layers compared. rows: rows compared at shift 0, after sub-sampling; cells:
    rows * layers. agreement, agreement_per_layer (float64 [layers]): at shift 0, NaN without rows.
    row_shifts: by shift s, agreement of the recorded row of token t + s with the native row of
    token t. layer_shifts: by shift s, agreement of recorded MoE layer l + s with native MoE layer
    l, both counted among the MoE layers. Shifts for which there are no cells are left out.
    other_rollout: agreement with recorded rows of another rollout, or far away in the same
    sequence; None where there are neither.

    enough: the rows sufficed for a verdict. Where it is False no fault is named, and the record is
    not shown to be right either. fault: None or
      "row shift"    the recorded rows come `shift` tokens late (shift > 0: the row of token t is
                     recorded at token t + shift) or early (shift < 0)
      "layer shift"  the same of MoE layers
      "other rows"   the record agrees no better than another rollout's: rows of other rollouts,
                     in another order, or of other weights; shift is 0
    gain: what the place that the fault names wins over shift 0, over the cells that exist at both;
    0.0 where none is named.
    """

    spec: RouterSpec
    layers: tuple[int, ...]
    rows: int
    cells: int
    agreement: float
    agreement_per_layer: np.ndarray
    row_shifts: dict[int, float]
    layer_shifts: dict[int, float]
    other_rollout: float | None
    enough: bool
    fault: str | None = None
    shift: int = 0
    gain: float = 0.0

    def __str__(self) -> str:
        if self.fault == "row shift":
            return self._shifted("row", "t", "token", self.row_shifts[self.shift])
        if self.fault == "layer shift":
            dense = self.spec.moe_layers[0]
            hint = (
                f"; dense first layers? The model has {dense} in front of its first MoE layer"
                if dense
                else ""
            )
            found = self.layer_shifts[self.shift]
            return self._shifted("layer", "l", "layer", found) + hint
        if self.fault == "other rows":
            assert self.other_rollout is not None
            return (
                "recorded rows agree with the trainer's router no better than those of another "
                f"rollout do ({self.other_rollout - self.gain:.2f} against "
                f"{self.other_rollout:.2f}, at any shift)\n"
                "rows of other rollouts, in another order, or of other weights?"
            )
        if not self.enough:
            reason = "too few" if self.rows < _LEAST_ROWS else "too few or too much alike"
            return (
                "whether the record stands at the right tokens and layers cannot be judged: "
                f"{self.rows} rows are {reason}"
            )
        places = {f"{s:+d} row": self.row_shifts[s] for s in (-1, 1) if s in self.row_shifts}
        places |= {f"{s:+d} layer": self.layer_shifts[s] for s in (-1, 1) if s in self.layer_shifts}
        if self.other_rollout is not None:
            places["another rollout"] = self.other_rollout
        others = ", ".join(f"{name} {value:.2f}" for name, value in places.items())
        return (
            f"recorded rows agree best with the trainer's router where they stand: "
            f"{self.agreement:.2f} ({others})"
        )

    def _shifted(self, what: str, index: str, where: str, found: float) -> str:
        number = _WORDS[abs(self.shift)]
        distance = f"{number} {where}" + "s" * (abs(self.shift) > 1)
        return (
            f"{what}s are shifted by {number}: recorded {what} {index}{self.shift:+d} agrees with "
            f"{where} {index} of the trainer ({found:.2f} against {found - self.gain:.2f} at shift "
            f"0)\nthe recorded {what}s come {distance} "
            f"{'late' if self.shift > 0 else 'early'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: shifts are text ("-1"), an agreement without rows is None."""
        return {
            "layers": list(self.layers),
            "rows": self.rows,
            "cells": self.cells,
            "agreement": self.agreement if self.rows else None,
            "agreement_per_layer": self.agreement_per_layer.tolist() if self.rows else None,
            "row_shifts": {str(s): x for s, x in self.row_shifts.items()},
            "layer_shifts": {str(s): x for s, x in self.layer_shifts.items()},
            "other_rollout": self.other_rollout,
            "enough": self.enough,
            "fault": self.fault,
            "shift": self.shift,
            "gain": self.gain,
        }


@dataclass(frozen=True)
class _Place:
    """A place other than shift 0: means over its cells, and what is beyond doubt.

    gain: over shift 0. surpasses, trails: it wins _SHARE of the room from shift 0, or loses it.
    matches: it does not lose _SHARE of the room, so shift 0 is no better. dismissed: it does not
    win it. Neither of a pair (surpasses, dismissed), (trails, matches) holds where rows are too few
    to tell.
    """

    kind: str
    shift: int
    agreement: float
    gain: float
    cells: int
    room: float
    surpasses: bool
    dismissed: bool
    trails: bool
    matches: bool

    @classmethod
    def of(
        cls,
        kind: str,
        shift: int,
        here: np.ndarray,
        zero: np.ndarray,
        likeness: np.ndarray,
        blocks: np.ndarray,
    ) -> _Place:
        """here, zero, likeness: [rows, layers], agreement of the same native cells at this place
        and at shift 0, and of the two recorded rows. blocks: int [rows], which rows are related.
        """
        gain, room = (here - zero).mean(axis=1), (1 - likeness).mean(axis=1)
        win, lose = (_clear_sign(gain + x * room, blocks) for x in (-_SHARE, _SHARE))
        return cls(
            kind,
            shift,
            agreement=float(here.mean()),
            gain=float(gain.mean()),
            cells=here.size,
            room=float(room.mean()),
            surpasses=win > 0,
            dismissed=win < 0,
            trails=lose < 0,
            matches=lose > 0,
        )


def diagnose(
    batch: RoutingBatch,
    native: np.ndarray,
    tokens: np.ndarray | None = None,
    layers: Sequence[int] | None = None,
) -> Alignment:
    """Compare the record of a batch with the trainer's native routing of some of its tokens.

    native: integers [N, layers, top_k], the top_k that the trainer's router chose, in any order.
    tokens: int64 [N], the packed token of each row of `native`, in any order, -1 for padding, which
    is ignored; None: all tokens of the batch. layers: decoder layers of `native`, ascending, some
    of `batch.spec.moe_layers`; None: all of them. A rank that holds some tokens and some layers
    passes these; shifted rows and layers are looked up in the batch, which has them all.

    A token without a recorded row (`valid` False), and a token named a second time, is not looked
    at. Nor are all rows where there are many: blocks of 16 neighbours, spread evenly, make about
    8,192 rows. Rows of different rollouts that begin with the same tokens are the same rows, so a
    token is compared with another rollout only if the token there is another one. The verdict is
    one for all tokens: a fault of one rollout among many is seen if the tokens are its own.

    Places are compared by the mean over layers of each row. A shift is named if it wins a fifth of
    the room (see the module's text) and 0.02 of agreement from shift 0, by 4 standard errors over
    blocks of neighbouring rows, of 64 rows and 8 blocks at least; the one that wins most, if it is
    more than one. "other rows" are named if shift 0 does not win a fifth of the room from another
    rollout, by the same measure. A shift beyond 2 rows or 3 layers is seen as the one nearest to
    it or as other rows.

    Raises TraceError for shapes, tokens, layers and expert ids that do not fit the batch; ids only
    of the rows looked at.
    """
    spec = batch.spec
    layers, ordinals = _find_layers(layers, spec)
    tokens, native, blocks = _select_rows(batch, native, tokens, layers)
    recorded = batch.routed_experts[tokens]
    mine = recorded[:, ordinals]
    zero = _agreement(mine, native)

    def elsewhere(kind: str, shift: int, there: np.ndarray) -> list[_Place]:
        """The recorded rows of tokens `there` [rows] (-1: none), if there are any."""
        at = np.flatnonzero(there >= 0)
        if not len(at):
            return []
        theirs = batch.routed_experts[there[at]][:, ordinals]
        here, likeness = _agreement(theirs, native[at]), _agreement(theirs, mine[at])
        return [_Place.of(kind, shift, here, zero[at], likeness, blocks[at])]

    places = []
    for shift in _ROW_SHIFTS:
        places += elsewhere("row shift", shift, _shift_rows(batch, tokens, shift))
    for shift in _LAYER_SHIFTS:
        at = np.flatnonzero((ordinals + shift >= 0) & (ordinals + shift < len(spec.moe_layers)))
        if len(at) and len(tokens):
            theirs = recorded[:, ordinals[at] + shift]
            here, likeness = _agreement(theirs, native[:, at]), _agreement(theirs, mine[:, at])
            places.append(_Place.of("layer shift", shift, here, zero[:, at], likeness, blocks))
    other = next(iter(elsewhere("other rows", 0, _other_rollouts(batch, tokens))), None)

    named = None if len(tokens) and zero.mean() >= _FINE else _fault(places, other)
    enough = named is not None or _is_right(places, other)
    return Alignment(
        spec=spec,
        layers=layers,
        rows=len(tokens),
        cells=zero.size,
        agreement=float(zero.mean()) if len(tokens) else float("nan"),
        agreement_per_layer=zero.mean(axis=0) if len(tokens) else np.full(len(layers), np.nan),
        row_shifts={p.shift: p.agreement for p in places if p.kind == "row shift"},
        layer_shifts={p.shift: p.agreement for p in places if p.kind == "layer shift"},
        other_rollout=other.agreement if other else None,
        enough=enough,
        fault=named.kind if named else None,
        shift=named.shift if named else 0,
        gain=named.gain if named else 0.0,
    )


def _fault(places: list[_Place], other: _Place | None) -> _Place | None:
    better = [p for p in places if p.surpasses and p.gain >= _MARGIN]
    if better:  # the one that explains most, and not one cell the best
        return max(better, key=lambda p: p.gain * p.cells)
    return other if other and other.matches and other.room >= _ROOM else None


def _is_right(places: list[_Place], other: _Place | None) -> bool:
    """Whether no shift is better and shift 0 is better than what is surely wrong."""
    wrong = [other] if other else [p for p in places if p.kind == "row shift"]
    return bool(wrong) and all(p.trails for p in wrong) and all(p.dismissed for p in places)


def _clear_sign(values: np.ndarray, blocks: np.ndarray) -> int:
    """The sign of the mean of `values` [rows], 0 where it is not beyond doubt.

    The standard error is that of a mean over clusters: rows of a block count as one observation.
    """
    _, block = np.unique(blocks, return_inverse=True)
    count = int(block.max()) + 1
    if count < _LEAST_BLOCKS or len(values) < _LEAST_ROWS:
        return 0
    mean = values.mean()
    sums = np.bincount(block, weights=values - mean)
    error = np.sqrt((sums**2).sum() * count / (count - 1)) / len(values)
    return int(np.sign(mean)) if abs(mean) > _ERRORS * error else 0


def _agreement(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64 [rows, layers]: share of the top_k that `a` and `b` [rows, layers, top_k] share."""
    rows, layers, top_k = a.shape
    a, b = a.reshape(-1, top_k), b.reshape(-1, top_k)
    shared = np.empty(len(a), np.uint8)  # top_k is 64 at most
    step = max(1, _CELLS * 64 // top_k**2)
    for i in range(0, len(a), step):
        # experts first: numpy is fast along the long last axis, not along one of top_k
        x, y = (np.ascontiguousarray(ids[i : i + step].T) for ids in (a, b))
        equal = x[:, None] == y[None]  # an expert is in a set once, so that matches add up
        shared[i : i + step] = equal.view(np.uint8).sum(axis=(0, 1), dtype=np.uint8)
    return shared.reshape(rows, layers) / top_k


def _find_layers(
    layers: Sequence[int] | None, spec: RouterSpec
) -> tuple[tuple[int, ...], np.ndarray]:
    """The decoder layers compared, and their places among the MoE layers."""
    chosen = spec.moe_layers if layers is None else tuple(layers)
    ascending = list(chosen) == sorted(set(chosen))
    if not chosen or not ascending or not set(chosen) <= set(spec.moe_layers):
        raise TraceError(
            f"layers is {reprlib.repr(list(chosen))}, expected ascending decoder layers out of the "
            f"MoE layers {reprlib.repr(list(spec.moe_layers))}"
        )
    return tuple(int(x) for x in chosen), np.searchsorted(spec.moe_layers, chosen)


def _select_rows(
    batch: RoutingBatch, native: np.ndarray, tokens: np.ndarray | None, layers: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows looked at: packed tokens, ascending; their native ids; their blocks (numbers)."""
    spec, total = batch.spec, batch.num_tokens
    if tokens is None:
        tokens = np.arange(total)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TraceError(
            f"tokens is {tokens.dtype} of shape {list(tokens.shape)}, expected int64 [N]"
        )
    if native.dtype.kind not in "iu" or native.shape != (len(tokens), len(layers), spec.top_k):
        raise TraceError(
            f"native is {native.dtype} of shape {list(native.shape)}, expected integers "
            f"[tokens={len(tokens)}, layers={len(layers)}, top_k={spec.top_k}]"
        )
    tokens = tokens.astype(np.int64)
    wrong = (tokens < -1) | (tokens >= total)
    if wrong.any():
        at = int(wrong.argmax())
        raise TraceError(
            f"tokens: row {at}: {tokens[at]}, expected 0..{total - 1}, or -1 for padding"
        )
    tokens, first = np.unique(tokens, return_index=True)  # a shuffled rank has no neighbours
    there = tokens >= 0
    there[there] = batch.valid[tokens[there]]
    tokens, first = tokens[there], first[there]

    sequence, position = _locate(batch, tokens)
    _, blocks = np.unique(sequence * total + position // _BLOCK, return_inverse=True)
    if len(tokens) > _MOST_ROWS:
        count = int(blocks[-1]) + 1
        some = np.linspace(0, count - 1, max(1, count * _MOST_ROWS // len(tokens))).astype(int)
        kept = np.isin(blocks, some)
        tokens, first, blocks = tokens[kept], first[kept], blocks[kept]
    native = native[first]
    part = dataclasses.replace(spec, moe_layers=layers)
    all_rows = np.ones(len(native), bool)
    if len(native):
        check_shape_and_range(native, all_rows, part, "native routing")
        check_distinct(native, all_rows, part, "native routing")
    return tokens, native.astype(spec.dtype), blocks


def _locate(batch: RoutingBatch, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sequence of each packed token, and its position in it."""
    sequence = np.searchsorted(batch.cu_seqlens, tokens, side="right") - 1
    return sequence, tokens - batch.cu_seqlens[sequence]


def _shift_rows(batch: RoutingBatch, tokens: np.ndarray, shift: int) -> np.ndarray:
    """Packed tokens `shift` behind `tokens`, -1 where the sequence has no recorded row there."""
    sequence, _ = _locate(batch, tokens)
    there = tokens + shift
    inside = (there >= batch.cu_seqlens[sequence]) & (there < batch.cu_seqlens[sequence + 1])
    there = np.where(inside, there, -1)
    return np.where(batch.valid[there] & inside, there, -1)


def _other_rollouts(batch: RoutingBatch, tokens: np.ndarray) -> np.ndarray:
    """A packed token of another rollout at the same position as each of `tokens`, -1 for none.

    Where no other rollout is long enough it is a token of the same one, half a sequence away, and
    so it is for all of them if other rollouts give too few.
    """
    sequence, position = _locate(batch, tokens)
    starts, lengths = batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens)
    far = (position + lengths[sequence] // 2) % np.maximum(lengths[sequence], 1)
    apart = np.abs(far - position) >= _FAR
    far = _usable(batch, tokens, np.where(apart, starts[sequence] + far, -1))

    others = np.full(len(tokens), -1)
    seeking = np.ones(len(tokens), bool)
    for step in range(1, min(len(batch), _OTHERS + 1)):
        next_one = (sequence + step) % len(batch)
        there = np.where(position < lengths[next_one], starts[next_one] + position, -1)
        found = seeking & (there >= 0) & batch.valid[there]
        # Only the first rollout found counts. Where its token is the same one the two may share
        # the prompt; of a third rollout the row would differ, and would make the rows of a prompt
        # speak for a record whose answer belongs to another sample of the same prompt.
        others[found] = _usable(batch, tokens[found], there[found])
        seeking &= ~found
    others[seeking] = far[seeking]
    return others if (others >= 0).sum() >= _LEAST_ROWS else far


def _usable(batch: RoutingBatch, tokens: np.ndarray, there: np.ndarray) -> np.ndarray:
    """`there` where it is a recorded row over a token that differs from that of `tokens`, else -1.

    `there` may hold -1 itself.
    """
    differs = batch.token_ids[there] != batch.token_ids[tokens]
    return np.where((there >= 0) & batch.valid[there] & differs, there, -1)
