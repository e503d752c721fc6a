"""What can be said of an array of expert ids without a second witness.

Two verdicts, kept apart. Impossible content (`check_*`) is an error: no engine chose
it. Suspicious content (`find_suspicious`) is possible, but is what filler, a profiling run or a
layer that was never written looks like; it is counted and reported, and the caller warns.
What neither can see (rows shifted by a token, rows of another request or of older weights) needs
token ids, weight versions or the trainer's own router.

A long rollout has ten million ids and is checked whenever it is made or read, so every check goes
over them in pieces that stay in the processor's cache, and rows that are ascending already (as
files have them) are never sorted again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from r3.errors import TraceError
from r3.spec import RouterSpec

# So many consecutive rows that are equal in every layer, over tokens that differ, are not the
# work of routers: even where neighbours share 43 % of their experts, whole rows repeat only over
# repeated tokens.
_REPEATED_ROWS = 16
# A rollout that loops over a few tokens repeats its rows honestly.
_DISTINCT_TOKENS = 8
# A single layer may well send a stretch of tokens to the same experts, more so with few experts;
# it is reported when it did nothing else in a whole sequence of at least so many rows.
_CONSTANT_ROWS = 32
# Nothing is reported that routing at random would produce with more than this probability.
_BY_CHANCE = 1e-3
# Bytes of ids looked at together.
_PIECE = 1 << 18


@dataclass(frozen=True)
class Suspicion:
    """One suspicious finding: `rows` rows, the first at `first_row`, in decoder layer `layer`.

    kind: "repeated_rows" and "filler_rows" (layer is None: they hold in all layers together),
    "constant_layer" or "all_zero_layer".
    """

    kind: str
    layer: int | None
    rows: int
    first_row: int

    def __str__(self) -> str:
        where = "all layers" if self.layer is None else f"layer {self.layer}"
        what = {
            "repeated_rows": "consecutive rows that are equal over different tokens (a profiling "
            "run, stale rows or a filler?)",
            "constant_layer": "rows, all of them the same experts (a layer that was written once?)",
            "all_zero_layer": "rows, all of them expert 0 (a layer that was never written?)",
            "filler_rows": "rows of consecutive expert ids, which routers do not choose "
            "(padding filled with arange?)",
        }[self.kind]
        return f"{where}: {self.rows} {what}, the first at row {self.first_row}"


def check_shape_and_range(ids: np.ndarray, valid: np.ndarray, spec: RouterSpec, where: str) -> None:
    """Raise TraceError unless `ids` is [rows, MoE layers, top_k] of ids of existing experts.

    ids: integers; valid: bool [rows], rows to look at; where: names the sequence.
    """
    expected = (len(valid), len(spec.moe_layers), spec.top_k)
    if ids.dtype.kind not in "iu":
        raise TraceError(f"{where}: routed_experts has dtype {ids.dtype}, expected integers")
    if ids.ndim != 3 or ids.shape[1:] != expected[1:]:
        raise TraceError(
            f"{where}: routed_experts has shape {list(ids.shape)}, expected "
            f"[rows={expected[0]}, MoE layers={expected[1]}, top_k={expected[2]}]"
        )
    if ids.shape[0] != expected[0]:
        raise TraceError(
            f"{where}: routed_experts has {ids.shape[0]} rows, expected {expected[0]}, one less "
            "than tokens (the last token is never forwarded)"
        )
    for rows in _pieces(ids):
        piece = ids[rows]
        if piece.max() < spec.num_experts and (ids.dtype.kind == "u" or piece.min() >= 0):
            continue
        bad = (piece < 0) | (piece >= spec.num_experts)
        bad[~valid[rows]] = False
        if bad.any():
            row, layer, k = (int(x) for x in np.argwhere(bad)[0])
            found, layer_no = int(piece[row, layer, k]), spec.moe_layers[layer]
            hint = (
                "a row is missing as a whole (all -1) or not at all"
                if found == -1
                else "physical ids of an expert-parallel load balancer are brought to logical ids "
                "by physical_to_logical=, of RoutingTrace.build and from_wire"
            )
            raise TraceError(
                f"{where}: row {rows.start + row}, layer {layer_no}: expert id {found}, expected "
                f"0..{spec.num_experts - 1} ({hint})"
            )


def check_distinct(
    ids: np.ndarray,
    valid: np.ndarray,
    spec: RouterSpec,
    where: str,
    ordered: np.ndarray | None = None,
) -> None:
    """Raise TraceError if a valid row of `ids` [rows, layers, top_k] names an expert twice.

    ordered: what `sort_rows` returns for them, if it is there already.
    """
    ordered = sort_rows(ids, valid) if ordered is None else ordered
    if ordered is ids:
        return
    for rows in _pieces(ordered):
        piece = ordered[rows]
        flat = piece.reshape(-1)
        same = np.zeros(piece.shape, bool)
        np.equal(flat[1:], flat[:-1], out=same.reshape(-1)[1:])
        same[..., 0] = False  # compared with the last expert of the row before
        if (same.reshape(len(piece), -1).any(axis=1) & valid[rows]).any():
            break
    else:
        return
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    twice[~valid] = False
    row, layer = (int(x) for x in np.argwhere(twice)[0])
    zeros = int((twice[:, layer] & ~ids[:, layer].any(axis=-1)).sum())
    hint = (
        f"; {zeros} of {int(valid.sum())} rows of this layer are all zero: a dense layer, a "
        "layer that was never written, or zeros that stand for missing rows"
        if zeros
        else ""
    )
    raise TraceError(
        f"{where}: row {row}, layer {spec.moe_layers[layer]}: experts {ids[row, layer].tolist()} "
        f"name one expert twice, expected {spec.top_k} different ones{hint}"
    )


def find_suspicious(
    ids: np.ndarray,
    spec: RouterSpec,
    valid: np.ndarray | None = None,
    token_ids: np.ndarray | None = None,
    ordered: np.ndarray | None = None,
) -> list[Suspicion]:
    """Content of `ids` [rows, layers, top_k] that passed the checks and still looks wrong.

    valid: bool [rows], rows to look at (default: all). token_ids: [rows] or longer, the token of
    each row; a run of rows over a few repeated tokens is not held against them. ordered: what
    `sort_rows` returns for `ids` and `valid`, if it is there already.
    """
    rows = ids.shape[0]
    valid = np.ones(rows, bool) if valid is None else valid
    choices = math.comb(spec.num_experts, spec.top_k)
    if rows == 0 or choices == 1 or not valid.any():
        return []
    ordered = sort_rows(ids, valid) if ordered is None else ordered
    found = []

    everywhere, first = _longest_run(_equals_next(ordered) & valid[1:] & valid[:-1])
    if everywhere + 1 >= _REPEATED_ROWS:
        # how common the row is elsewhere: a skewed router with few experts has long runs too
        common = sum(
            int((ordered[piece] == ordered[first]).all(axis=(1, 2)).sum())
            for piece in _pieces(ordered)
        )
        elsewhere = max(common - everywhere - 1, 0) / max(rows - everywhere - 1, 1)
        if (rows - 1) * elsewhere**everywhere < _BY_CHANCE and _distinct(
            token_ids, slice(first, first + everywhere + 1)
        ) >= _DISTINCT_TOKENS:
            found.append(Suspicion("repeated_rows", None, everywhere + 1, first))

    count, start = int(valid.sum()), int(valid.argmax())
    constant = np.ones(ordered.shape[1], bool)  # [layers]
    for piece in _pieces(ordered):
        if not constant.any():
            break
        constant &= (ordered[piece][valid[piece]] == ordered[start]).all(axis=(0, 2))
    if everywhere + 1 < count or not found:  # otherwise said already
        for layer in np.flatnonzero(constant):
            kind = "constant_layer"
            zeros = spec.top_k == 1 and not ids[start, layer].any()
            if zeros and len(constant) * float(spec.num_experts) ** -count < _BY_CHANCE:
                kind = "all_zero_layer"
            elif count < _CONSTANT_ROWS or _distinct(token_ids, valid) < _DISTINCT_TOKENS:
                continue
            found.append(Suspicion(kind, spec.moe_layers[layer], count, start))

    filler = _filler_rows(ordered, valid, spec.num_experts, choices)
    if filler.any():
        found.append(Suspicion("filler_rows", None, int(filler.sum()), int(filler.argmax())))
    return found


def sort_rows(ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """`ids` [rows, layers, top_k] with the experts of each row and layer in ascending order.

    It is `ids` itself, not a copy, if they are so already, with no expert twice in a row, except
    in zeros in rows that are not valid (bool [rows]); and only then.
    """
    ordered = None
    for rows in _pieces(ids):
        piece = np.ascontiguousarray(ids[rows])
        if not _is_ascending(piece, valid[rows]):
            if ordered is None:
                ordered = np.array(ids, order="C")
            ordered[rows] = _sort(piece)
    return ids if ordered is None else ordered


def _pieces(ids: np.ndarray) -> Iterator[slice]:
    """Slices of rows, one behind the other, of about _PIECE bytes each."""
    step = max(1, _PIECE * len(ids) // max(ids.nbytes, 1))
    return (slice(start, start + step) for start in range(0, len(ids), step))


def _is_ascending(ids: np.ndarray, valid: np.ndarray) -> bool:
    """Whether `ids`, C-contiguous, are what `sort_rows` need not copy."""
    # One comparison of everything with its neighbour: an axis of top_k numbers is too short for
    # numpy to be fast on. The last expert of a row has no neighbour in it.
    flat = ids.reshape(-1)
    rises = np.empty(ids.shape, bool)
    np.greater(flat[1:], flat[:-1], out=rises.reshape(-1)[:-1])
    rises[..., -1] = True
    if rises.all():
        return True
    others = ~rises.reshape(len(ids), -1).all(axis=1)
    return not valid[others].any() and not ids[others].any()


def _sort(ids: np.ndarray) -> np.ndarray:
    """`ids` [rows, layers, top_k] sorted along the last axis."""
    # numpy sorts one short stretch after the other; a network of comparisons sorts all of them at
    # a time, several times faster as long as many ids fit into a register
    if ids.dtype.itemsize > 2:
        return np.sort(ids, axis=-1)
    planes = np.array(ids.reshape(-1, ids.shape[-1]).T, order="C")  # never a view
    for a, b in sorting_network(ids.shape[-1]):
        low = np.minimum(planes[a], planes[b])
        np.maximum(planes[a], planes[b], out=planes[b])
        planes[a] = low
    return planes.T.reshape(ids.shape)


@lru_cache
def sorting_network(n: int) -> tuple[tuple[int, int], ...]:
    """Pairs to compare, in order, so that n numbers are sorted (Batcher's odd-even merge)."""
    powers = [1 << i for i in range((n - 1).bit_length())]
    return tuple(
        (i, i + gap)
        for size in powers
        for gap in (p for p in reversed(powers) if p <= size)
        for start in range(gap % size, n - gap, 2 * gap)
        for i in range(start, min(start + gap, n - gap))
        if i // (2 * size) == (i + gap) // (2 * size)
    )


def _equals_next(ordered: np.ndarray) -> np.ndarray:
    """bool [rows - 1]: the row is equal to the next one in every layer."""
    equal = np.empty(len(ordered) - 1, bool)
    for rows in _pieces(ordered[:-1]):
        piece, behind = ordered[:-1][rows], ordered[1:][rows]
        # neighbours mostly differ in the first layer; look on only where they do not
        same = (piece[:, 0] == behind[:, 0]).all(axis=-1)
        if same.any():
            same[same] = (piece[same] == behind[same]).all(axis=(1, 2))
        equal[rows] = same
    return equal


def _filler_rows(
    ordered: np.ndarray, valid: np.ndarray, num_experts: int, choices: int
) -> np.ndarray:
    """bool [rows]: consecutive ids modulo num_experts in every layer, as arange fillers have.

    Empty where a router may do that by chance: in each layer as often as among the other rows of
    the sequence, or as at random among `choices` sets.
    """
    least = min(1.0, num_experts / choices)
    filler = np.zeros(len(ordered), bool)
    if len(ordered) * np.full(ordered.shape[1], least).prod() >= _BY_CHANCE:
        return filler
    for rows in _pieces(ordered):
        piece = ordered[rows]
        # the other layers are looked at only where the first one is of that kind
        some = _consecutive(piece[:, :1], num_experts)[:, 0] & valid[rows]
        if some.any():
            some[some] = _consecutive(piece[some], num_experts).all(axis=-1)
        filler[rows] = some
    if not filler.any():
        return filler
    others = valid & ~filler
    observed = np.zeros(ordered.shape[1])
    if others.sum() >= _CONSTANT_ROWS:
        times = sum(
            _consecutive(ordered[rows][others[rows]], num_experts).sum(axis=0)
            for rows in _pieces(ordered)
        )
        observed = (times + 1) / (others.sum() + 1)
    chance = np.maximum(observed, least).prod()
    return filler if len(valid) * chance < _BY_CHANCE else np.zeros_like(filler)


def _consecutive(ordered: np.ndarray, num_experts: int) -> np.ndarray:
    """bool [rows, layers]: the experts of a row are consecutive modulo num_experts."""
    steps = np.diff(ordered.astype(np.int32), axis=-1)
    wraps = (num_experts - 1) == ordered[..., -1].astype(np.int32) - ordered[..., 0]
    gaps = (steps != 1).sum(axis=-1)
    return (gaps == 0) | ((gaps == 1) & wraps)


def _distinct(token_ids: np.ndarray | None, rows: np.ndarray | slice) -> int:
    """Different tokens among `rows`; many where the tokens are not known."""
    if token_ids is None:
        return _DISTINCT_TOKENS
    if not isinstance(rows, slice):
        token_ids = token_ids[: len(rows)]
    return len(np.unique(token_ids[rows]))


def _longest_run(flags: np.ndarray) -> tuple[int, int]:
    """Length and start of the longest run of True in a 1-D array."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    best = int((ends - starts).argmax())
    return int(ends[best] - starts[best]), int(starts[best])
