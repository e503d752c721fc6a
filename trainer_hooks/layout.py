"""Which packed token of a RoutingBatch each row of one trainer rank's routers is.

Pure numpy; imports no trainer, but follows Megatron-core. Replay is only as good as its alignment,
so the rows are not derived from lengths alone: the token ids that the rank is about to forward are
compared with those stored beside the routing, and the first difference is an error that names
rollout and position.

Two layouts are known, both before the splits between ranks:
  padded  [b, s]: one sequence per row in batch order. Where in its row it starts is given by
          `starts`; padded on the right if it is not.
  packed  [1, T]: sequence i in the slots cu_seqlens[i] : cu_seqlens[i + 1], from the first on.

What the splits leave to a rank:
  context parallel   a padded row, or each packed segment by itself, is cut into 2 * cp_size equal
                     chunks; rank r has chunk r and, behind it, chunk 2 * cp_size - 1 - r.
  sequence parallel  the routers of tp_rank see the tp_rank-th of tp_size blocks of what is left.
A router flattens its [s, b, hidden] input, so its row j * b + i is slot j of row i. Tensor
parallelism by itself and expert parallelism change nothing; pipeline parallelism is in `stages`.

The last token of a sequence is never forwarded by an engine, so no routing belongs to it, and
trainers often leave it out (`tokens[:-1]`). Both forms are accepted; nothing else may be missing.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from r3.batch import RoutingBatch
from r3.checks import check_distinct, check_shape_and_range
from r3.errors import ReplayError, TraceError

# of one row of ids; Megatron's own offsets are int32
_MAX_SLOTS = 2**31 - 1


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in the splits that change what its routers see.

    Raises ReplayError for a size below 1 and for a rank outside its size.
    """

    tp_size: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False
    cp_size: int = 1
    cp_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("tp", "cp"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if not _is_int(size) or size < 1:
                raise ReplayError(f"{kind}_size is {size!r}, expected a positive integer")
            if not _is_int(rank) or not 0 <= rank < size:
                raise ReplayError(
                    f"{kind}_rank is {rank!r}, expected 0..{size - 1} with {kind}_size={size}"
                )
        if not isinstance(self.sequence_parallel, bool):
            raise ReplayError(f"sequence_parallel is {self.sequence_parallel!r}, expected a bool")


@dataclass(frozen=True, eq=False)
class RankView:
    """What one rank sees of a batch.

    slots: int64 [b, s_cp], the packed token (index into batch.token_ids) at each slot of the
        input_ids that the rank's model is fed: after the context-parallel split, before the
        sequence-parallel one. -1 for padding.
    index: int64 [rows], the packed token of each router row, -1 for padding.
    shape: (s_router, b), the first two sizes of the routers' input; rows == s_router * b.
    """

    slots: np.ndarray
    index: np.ndarray
    shape: tuple[int, int]

    def to_tokens(self, rows: np.ndarray, num_tokens: int) -> np.ndarray:
        """What the routers saw or chose, [rows, ...], in the order of the batch: [num_tokens, ...].

        Zeros for tokens that this rank's routers did not see.
        """
        if len(rows) != len(self.index):
            raise ReplayError(f"{len(rows)} router rows, expected {len(self.index)}")
        tokens = np.zeros((num_tokens, *rows.shape[1:]), rows.dtype)
        seen = self.index >= 0
        tokens[self.index[seen]] = rows[seen]
        return tokens


_WHOLE = RankPlace()


def view_of(
    batch: RoutingBatch,
    *,
    input_ids: np.ndarray | None = None,
    cu_seqlens: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    seq_length: int | None = None,
    place: RankPlace = _WHOLE,
) -> RankView:
    """Align what a rank's model is fed with `batch`, which is consistent (see `check_batch`).

    input_ids: integers [b, s / cp_size], or [1, T / cp_size] with cu_seqlens, what THIS rank's
        model is fed, cut for context parallelism already. None on a pipeline stage that has no
        ids: rows are then counted without looking at tokens, and a last token is taken as fed
        where there is a slot for it.
    cu_seqlens: integers [B + 1], the slots of packed sequences: Megatron's cu_seqlens_q_padded if
        there is one, else its cu_seqlens_q. Segments behind the len(batch)-th hold padding. Slots
        behind the last segment are padding and need input_ids and cp_size == 1.
    starts: integers [b], padded layout only: the slot, before the context-parallel split, of each
        sequence's first token; s - lengths for padding on the left, P - prompt_lens for prompts
        that end at slot P. None: zeros.
    seq_length: s, before the context-parallel split, padded layout only; needed without input_ids.

    Every id fed must equal the stored one, and all padding on the rank must be one and the same id:
    others are tokens that the batch has no routing for. With one exception: where the slot of a
    sequence's last token and all slots behind it, of its row or segment and on this rank, hold the
    id of padding, the sequence is taken to have been fed without its last token.

    Raises ReplayError, naming found and expected, for shapes that are not those of the layout, for
    lengths that the splits do not divide, and for the first token that differs.
    """
    if cu_seqlens is None:
        shape, segments = _padded(batch, input_ids, starts, seq_length, place.cp_size)
    elif starts is not None or seq_length is not None:
        given = "starts" if starts is not None else "seq_length"
        raise ReplayError(f"{given} and cu_seqlens are given, expected one: packed slots need none")
    else:
        shape, segments = _packed(batch, input_ids, cu_seqlens, place.cp_size)
    b, width = shape
    tp_size = place.tp_size if place.sequence_parallel else 1
    if width % tp_size:
        raise ReplayError(
            f"the model is fed {width} positions, expected a multiple of tp_size={tp_size} for "
            "sequence parallelism"
        )
    try:
        slots = _slots(batch, input_ids, shape, segments, place)
    except ReplayError as e:
        if input_ids is None or cu_seqlens is not None:
            raise
        raise ReplayError(f"{e}{_hint(batch, input_ids, starts, place)}") from None
    block = width // tp_size
    first = block * place.tp_rank if tp_size > 1 else 0
    index = slots.T[first : first + block].reshape(-1)
    return RankView(slots, index, (block, b))


def check_batch(batch: RoutingBatch) -> None:
    """Raise TraceError if `batch` is not consistent in itself, naming the rollout and row.

    A batch made of traces has passed these checks already, but it is a plain dataclass that can
    be built by hand, and a trainer scatters its ids into memory without looking.
    """
    for field in ("token_ids", "cu_seqlens", "prompt_lens", "routed_experts", "valid"):
        if not isinstance(getattr(batch, field), np.ndarray):
            kind = type(getattr(batch, field)).__name__
            raise TraceError(f"{field} is a {kind}, expected a numpy array")
    total = len(batch.token_ids)
    cu, ids, valid = batch.cu_seqlens, batch.routed_experts, batch.valid
    if batch.prompt_lens.shape != (len(batch),) or batch.prompt_lens.dtype.kind != "i":
        raise TraceError(
            f"prompt_lens has shape {list(batch.prompt_lens.shape)} and dtype "
            f"{batch.prompt_lens.dtype}, expected integers [{len(batch)}]"
        )
    if (
        cu.shape != (len(batch) + 1,)
        or cu.dtype.kind != "i"
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
    versions = batch.weight_versions
    if versions.shape != (total,) or versions.dtype.kind != "i":
        raise TraceError(
            f"weight_versions has shape {list(versions.shape)} and dtype {versions.dtype}, "
            f"expected integers [{total}]"
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


class _Segment(NamedTuple):
    """The slots that belong to one sequence, or to padding.

    row, first: where they begin in the rank's ids; width: how many there are before the
    context-parallel split; start: at which of these the sequence starts.
    """

    row: int
    first: int
    width: int
    start: int

    def of(self, rows: np.ndarray, cp_size: int) -> np.ndarray:
        """This segment's part of `rows` [b, s_cp], a view: [width / cp_size]"""
        return rows[self.row, self.first : self.first + self.width // cp_size]


def _padded(
    batch: RoutingBatch,
    input_ids: np.ndarray | None,
    starts: np.ndarray | None,
    seq_length: int | None,
    cp_size: int,
) -> tuple[tuple[int, int], list[_Segment]]:
    """The shape of the rank's ids, [b, s / cp_size], and one segment for each row"""
    b = len(batch)
    if seq_length is not None and not (_is_int(seq_length) and 0 <= seq_length <= _MAX_SLOTS):
        raise ReplayError(f"seq_length is {seq_length!r}, expected an integer 0..{_MAX_SLOTS}")
    if input_ids is not None:
        layout = f"[{b}, s{_split(cp_size)}], one row per sequence"
        _check_integers("input_ids", input_ids, 2, layout)
        if input_ids.shape[0] != b:
            packed = "; packed sequences, [1, T], need cu_seqlens (packed_seq_params)"
            hint = packed if len(input_ids) == 1 else ""
            raise ReplayError(
                f"input_ids has shape {list(input_ids.shape)}, expected {layout}{hint}"
            )
        s = input_ids.shape[1] * cp_size
        found = f"input_ids has shape {list(input_ids.shape)}"
        if seq_length is not None and seq_length != s:
            hint = "; the rank is fed whole sequences" if seq_length * cp_size == s else ""
            raise ReplayError(
                f"{found}, expected [{b}, s{_split(cp_size)}] with seq_length s={seq_length}{hint}"
            )
        if cp_size > 1:
            found += f", which are {s} slots before the context-parallel split"
    elif seq_length is None:
        raise ReplayError(
            "found none of input_ids, seq_length and cu_seqlens (packed_seq_params), expected one"
        )
    else:
        s, found = int(seq_length), f"seq_length is {seq_length}"
    if cp_size > 1 and s % (2 * cp_size):
        raise ReplayError(
            f"{found}, expected a multiple of {2 * cp_size}, twice the cp_size={cp_size}"
        )
    if starts is None:
        starts = np.zeros(b, np.int64)
    _check_integers("starts", starts, 1, f"[{b}], one for each sequence")
    if len(starts) != b:
        raise ReplayError(f"starts has {len(starts)} entries, expected {b}, one for each sequence")
    lengths = np.diff(batch.cu_seqlens)
    for i, (start, n) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if start < 0 or start + n - 1 > s:
            raise ReplayError(
                f"rollout {batch.rollout_ids[i]}: {n} tokens, of which only the last may be left "
                f"out, from slot {start} of {s} on: {found}, expected at least "
                f"{max(start, 0) + n - 1} slots and a start of 0 or more"
            )
    return (b, s // cp_size), [_Segment(i, 0, s, start) for i, start in enumerate(starts.tolist())]


def _packed(
    batch: RoutingBatch, input_ids: np.ndarray | None, cu_seqlens: np.ndarray, cp_size: int
) -> tuple[tuple[int, int], list[_Segment]]:
    """The shape of the rank's ids, [1, T / cp_size], and its segments, surplus ones included"""
    b = len(batch)
    _check_integers("cu_seqlens", cu_seqlens, 1, f"[{b + 1}], the offsets of {b} sequences")
    cu: list[int] = cu_seqlens.tolist()
    if len(cu) < b + 1:
        raise ReplayError(
            f"cu_seqlens has {len(cu)} entries, expected {b + 1} or more for {b} sequences"
        )
    if cu[0] != 0 or (cu_seqlens[1:] < cu_seqlens[:-1]).any() or cu[-1] > _MAX_SLOTS:
        raise ReplayError(
            f"cu_seqlens is {reprlib.repr(cu)}, expected ascending integers from 0 to at most "
            f"{_MAX_SLOTS}"
        )
    segments = []
    for i, first in enumerate(cu[:-1]):
        slots = cu[i + 1] - first
        owner = f"rollout {batch.rollout_ids[i]}: " if i < b else ""
        where = f"{owner}segment {i} of cu_seqlens, {first} to {cu[i + 1]}, has {slots} slots"
        if i < b:
            n = int(batch.cu_seqlens[i + 1] - batch.cu_seqlens[i])
            if slots < n - 1:
                raise ReplayError(
                    f"{where}, expected at least {n - 1} for {n} tokens, of which only the last "
                    "may be left out"
                )
        if cp_size > 1 and slots % (2 * cp_size):
            raise ReplayError(
                f"{where}, expected a multiple of {2 * cp_size}, twice the cp_size={cp_size}: "
                "give the offsets of the padded sequences"
            )
        segments.append(_Segment(0, first // cp_size, slots, 0))
    width = cu[-1] // cp_size
    if input_ids is None:
        return (1, width), segments
    layout = f"[1, {width}]" if cp_size > 1 else f"[1, T >= {width}]"
    layout += f" with cu_seqlens up to {cu[-1]} and cp_size={cp_size}"
    _check_integers("input_ids", input_ids, 2, layout)
    found = input_ids.shape[1]
    if len(input_ids) != 1 or found < width or (found > width and cp_size > 1):
        whole = len(input_ids) == 1 and found == cu[-1]
        hint = "; the rank is fed whole sequences" if whole else ""
        raise ReplayError(
            f"input_ids has shape {list(input_ids.shape)}, expected {layout}, all sequences "
            f"behind one another{hint}"
        )
    return (1, found), segments


def _slots(
    batch: RoutingBatch,
    input_ids: np.ndarray | None,
    shape: tuple[int, int],
    segments: list[_Segment],
    place: RankPlace,
) -> np.ndarray:
    """RankView.slots. Raises ReplayError for the first of `input_ids` that is another token."""
    slots = np.full(shape, -1, np.int64)
    cu = batch.cu_seqlens.tolist()
    for i, segment in enumerate(segments[: len(batch)]):
        tokens = segment.of(slots, place.cp_size)
        position = _positions(segment.width, place) - segment.start
        inside = (position >= 0) & (position < cu[i + 1] - cu[i])
        tokens[inside] = cu[i] + position[inside]
        if input_ids is None:
            continue
        ids = segment.of(input_ids, place.cp_size)
        differs = inside & (ids != batch.token_ids[tokens])
        if not differs.any():
            continue
        j = int(differs.argmax())
        if tokens[j] == cu[i + 1] - 1 and (ids[j:] == ids[j]).all():
            tokens[j] = -1  # fed without its last token
            continue
        rollout, at = batch.locate(int(tokens[j]))
        raise ReplayError(
            f"rollout {rollout}: token {at} (input_ids[{segment.row}, {segment.first + j}]): found "
            f"{ids[j]}, expected {batch.token_ids[tokens[j]]}; the trainer's tokens are not those "
            "of this routing"
        )
    if input_ids is not None:
        _check_padding(input_ids, slots)
    return slots


def _positions(width: int, place: RankPlace) -> np.ndarray:
    """int64 [width / cp_size]: which of `width` slots context parallelism leaves to the rank"""
    if place.cp_size == 1:
        return np.arange(width)
    chunk = width // (2 * place.cp_size)
    chunks = (place.cp_rank, 2 * place.cp_size - 1 - place.cp_rank)
    return np.concatenate([np.arange(c * chunk, (c + 1) * chunk) for c in chunks])


def _check_padding(input_ids: np.ndarray, slots: np.ndarray) -> None:
    """Padding is one and the same id on the whole rank; others are tokens without any routing."""
    places = np.argwhere(slots < 0)
    if not len(places):
        return
    padding = input_ids[slots < 0]
    values, counts = np.unique(padding, return_counts=True)
    if len(values) == 1:
        return
    usual = values[counts.argmax()]
    i, j = places[int((padding != usual).argmax())].tolist()
    raise ReplayError(
        f"input_ids[{i}, {j}] is {input_ids[i, j]} and belongs to no token of the batch, expected "
        f"padding, which is {usual} elsewhere: the trainer feeds tokens that this routing does not "
        "have"
    )


def _hint(
    batch: RoutingBatch, input_ids: np.ndarray, starts: np.ndarray | None, place: RankPlace
) -> str:
    """Why the ids of a padded layout differ, if they are right in another one; else nothing"""
    if place.cp_size > 1 and _read(batch, input_ids, starts, _WHOLE) is not None:
        return f"; the rank is fed whole sequences, expected its share of cp_size={place.cp_size}"
    if starts is not None:
        right = _read(batch, input_ids, None, place) is not None
        return "; the sequences are padded on the right: leave out starts" if right else ""
    left = input_ids.shape[1] * place.cp_size - np.diff(batch.cu_seqlens)
    # with and without last tokens
    if any(_read(batch, input_ids, left + n, place) is not None for n in (0, 1)):
        return "; the sequences are padded on the left: give starts"
    return ""


def _read(
    batch: RoutingBatch, input_ids: np.ndarray, starts: np.ndarray | None, place: RankPlace
) -> np.ndarray | None:
    """RankView.slots of a padded layout; None if the ids are others or no token at all is there"""
    try:
        shape, segments = _padded(batch, input_ids, starts, None, place.cp_size)
        slots = _slots(batch, input_ids, shape, segments, place)
    except ReplayError:
        return None
    return slots if (slots >= 0).any() else None


def _split(cp_size: int) -> str:
    return f" / {cp_size}" if cp_size > 1 else ""


def _check_integers(name: str, array: np.ndarray, ndim: int, layout: str) -> None:
    if not isinstance(array, np.ndarray):
        raise ReplayError(f"{name} is a {type(array).__name__}, expected a numpy array {layout}")
    if array.ndim != ndim or array.dtype.kind not in "iu":
        raise ReplayError(
            f"{name} has shape {list(array.shape)} and dtype {array.dtype}, expected integers "
            f"{layout}"
        )
