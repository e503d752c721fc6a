"""Which packed token of a RoutingBatch each row of a trainer's routers is.

Pure numpy; knows no trainer. Replay is only as good as its alignment, so the rows are not derived
from lengths alone: the token ids that the trainer is about to forward are compared with those
stored beside the routing, and the first difference is an error that names rollout and position.

Two layouts are known, told apart by the shape of `input_ids`:
  padded  [b, s] with b == len(batch): one sequence per row in batch order, padded on the right.
          Megatron's router flattens its [s, b, hidden] input, so router row j * b + i is
          position j of sequence i.
  packed  [1, T] for a batch of several sequences: one behind the other in batch order, padding
          only at the end. Router row t is packed position t.

The last token of a sequence is never forwarded by an engine, so no routing belongs to it, and
trainers often leave it out (`tokens[:-1]`). Both forms are accepted; nothing else may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r3.batch import RoutingBatch
from r3.checks import check_distinct, check_shape_and_range
from r3.errors import ReplayError, TraceError


@dataclass(frozen=True, eq=False)
class RankView:
    """The router rows of one rank. index: int64 [rows], the packed token of each, -1 for padding"""

    index: np.ndarray

    def to_tokens(self, rows: np.ndarray, num_tokens: int) -> np.ndarray:
        """What the routers saw or chose, [rows, ...], in the order of the batch: [num_tokens, ...].

        Zeros for tokens that were not forwarded.
        """
        if len(rows) != len(self.index):
            raise ReplayError(f"{len(rows)} router rows, expected {len(self.index)}")
        tokens = np.zeros((num_tokens, *rows.shape[1:]), rows.dtype)
        seen = self.index >= 0
        tokens[self.index[seen]] = rows[seen]
        return tokens


def view_of(batch: RoutingBatch, input_ids: np.ndarray) -> RankView:
    """Align `input_ids`, integers [b, s] or [1, T], with `batch`.

    Every token must equal the stored one, with one exception in the padded layout: where the slot
    of a sequence's last token and all slots behind it hold one and the same other id, they are
    taken for padding, the sequence having been fed without its last token.

    Raises ReplayError, naming found and expected, for shapes of neither layout, for the first
    token that differs, and for packed ids that can be read with and without last tokens.
    """
    if input_ids.ndim != 2 or input_ids.dtype.kind not in "iu":
        raise ReplayError(
            f"input_ids has shape {list(input_ids.shape)} and dtype {input_ids.dtype}, expected "
            f"integers {_expected_shapes(batch)}"
        )
    rows = input_ids.shape[0]
    if rows == len(batch):
        return RankView(_padded_index(batch, input_ids).T.reshape(-1))
    if rows == 1:
        return RankView(_packed_index(batch, input_ids[0]))
    raise ReplayError(
        f"input_ids has shape {list(input_ids.shape)}, expected {_expected_shapes(batch)}"
    )


def check_batch(batch: RoutingBatch) -> None:
    """Raise TraceError if `batch` is not consistent in itself, naming the rollout and row.

    A batch made of traces has passed these checks already, but it is a plain dataclass that can
    be built by hand, and a trainer scatters its ids into memory without looking.
    """
    total = len(batch.token_ids)
    cu, ids, valid = batch.cu_seqlens, batch.routed_experts, batch.valid
    if (
        cu.shape != (len(batch) + 1,)
        or cu.dtype.kind not in "iu"
        or (cu[0], cu[-1]) != (0, total)
        or (cu[1:] <= cu[:-1]).any()
    ):
        raise TraceError(
            f"cu_seqlens is {cu.tolist()}, expected {len(batch) + 1} ascending integers from 0 to "
            f"the number of tokens, {total}"
        )
    if valid.shape != (total,) or valid.dtype != bool:
        raise TraceError(
            f"valid has shape {list(valid.shape)} and dtype {valid.dtype}, expected bool [{total}]"
        )
    if ids.shape[:1] != (total,) or ids.dtype.kind not in "iu":
        raise TraceError(
            f"routed_experts has shape {list(ids.shape)} and dtype {ids.dtype}, expected integers "
            f"[{total} tokens, {len(batch.spec.moe_layers)} MoE layers, {batch.spec.top_k}]"
        )
    for i, rollout in enumerate(batch.rollout_ids):
        rows = slice(int(cu[i]), int(cu[i + 1]))
        check_shape_and_range(ids[rows], valid[rows], batch.spec, f"rollout {rollout}")
        check_distinct(ids[rows], valid[rows], batch.spec, f"rollout {rollout}")


def _expected_shapes(batch: RoutingBatch) -> str:
    longest, total = int(np.diff(batch.cu_seqlens).max()), batch.num_tokens
    padded = f"[{len(batch)}, s >= {longest - 1}] (one row per sequence, padded on the right)"
    if len(batch) == 1:
        return padded
    return f"{padded} or [1, T >= {total - len(batch)}] (all sequences behind one another)"


def _padded_index(batch: RoutingBatch, input_ids: np.ndarray) -> np.ndarray:
    """int64 [b, s], the packed token of each slot of `input_ids` [b, s]"""
    b, s = input_ids.shape
    starts, lengths = batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens)
    if s < lengths.max() - 1:
        i = int((lengths - 1 > s).argmax())
        raise ReplayError(
            f"input_ids has shape {[b, s]}, expected {_expected_shapes(batch)}: rollout "
            f"{batch.rollout_ids[i]} has {int(lengths[i])} tokens, of which only the last may be "
            "left out"
        )
    slots = np.arange(s)
    index = np.where(slots < lengths[:, None], starts[:, None] + slots, -1)
    expected = np.where(index >= 0, batch.token_ids[index], input_ids)
    differs = input_ids != expected
    for i in np.flatnonzero(differs.any(axis=1)):
        last = int(lengths[i]) - 1
        tail = input_ids[i, last:]
        j = int(differs[i].argmax())
        if j < last or (tail != tail[0]).any():
            raise _token_error(batch, int(index[i, j]), int(input_ids[i, j]), f"[{i}, {j}]")
        index[i, last:] = -1
    return index


def _packed_index(batch: RoutingBatch, ids: np.ndarray) -> np.ndarray:
    """int64 [T], the packed token of each of `ids` [T], several sequences behind one another"""
    is_last = np.zeros(batch.num_tokens, bool)
    is_last[batch.cu_seqlens[1:] - 1] = True
    whole = np.arange(batch.num_tokens)
    readings = [tokens for tokens in (whole, whole[~is_last]) if len(tokens) <= len(ids)]
    candidates = [np.pad(t, (0, len(ids) - len(t)), constant_values=-1) for t in readings]
    if not candidates:
        raise ReplayError(
            f"input_ids has shape {[1, len(ids)]}, expected {_expected_shapes(batch)}: only the "
            "last token of each sequence may be left out"
        )
    first = [_first_difference(batch, index, ids) for index in candidates]
    matching = [c for c, at in zip(candidates, first, strict=True) if at == len(ids)]
    if not matching:
        best = int(np.argmax(first))
        at = first[best]
        raise _token_error(batch, int(candidates[best][at]), int(ids[at]), f"[0, {at}]")
    if len(matching) == 2:
        # harmless where both put the rows that can have routing into the same places
        with_last, without = matching
        if not np.array_equal(np.where(is_last[with_last], -1, with_last), without):
            raise ReplayError(
                f"input_ids of shape {[1, len(ids)]} can be read as the {len(whole)} tokens of "
                f"the batch and as its sequences without their last tokens ({int((~is_last).sum())}"
                " tokens): feed one row per sequence, or other padding"
            )
    return matching[0]


def _first_difference(batch: RoutingBatch, index: np.ndarray, ids: np.ndarray) -> int:
    """The first position at which `ids` [T] are not the tokens of `index` [T]; T if they are"""
    differs = (index >= 0) & (batch.token_ids[index] != ids)
    return int(differs.argmax()) if differs.any() else len(ids)


def _token_error(batch: RoutingBatch, token: int, found: int, where: str) -> ReplayError:
    rollout, position = batch.locate(token)
    return ReplayError(
        f"rollout {rollout}: token {position} (input_ids{where}): found {found}, expected "
        f"{int(batch.token_ids[token])}; the trainer's tokens are not those of this routing"
    )
