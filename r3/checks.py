"""What can be said of an array of expert ids without a second witness.

Two verdicts, kept apart. Impossible content (`check_*`) is an error: no engine chose
it. Suspicious content (`find_suspicious`) is possible, but is what filler, a profiling run or a
layer that was never written looks like; it is counted and reported, and the caller warns.
What neither can see (rows shifted by a token, rows of another request or of older weights) needs
token ids, weight versions or the trainer's own router.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    bad = (ids < 0) | (ids >= spec.num_experts)
    bad[~valid] = False
    if bad.any():
        row, layer, k = (int(x) for x in np.argwhere(bad)[0])
        found, layer_no = int(ids[row, layer, k]), spec.moe_layers[layer]
        hint = (
            "a row is missing as a whole (all -1) or not at all"
            if found == -1
            else "physical ids of an expert-parallel load balancer are brought to logical ids by "
            "RoutingTrace.build(physical_to_logical=...)"
        )
        raise TraceError(
            f"{where}: row {row}, layer {layer_no}: expert id {found}, expected "
            f"0..{spec.num_experts - 1} ({hint})"
        )


def check_distinct(ids: np.ndarray, valid: np.ndarray, spec: RouterSpec, where: str) -> None:
    """Raise TraceError if a valid row of `ids` [rows, layers, top_k] names an expert twice."""
    ordered = np.sort(ids, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    twice[~valid] = False
    if twice.any():
        row, layer = (int(x) for x in np.argwhere(twice)[0])
        layer_no = spec.moe_layers[layer]
        zeros = int((twice[:, layer] & ~ids[:, layer].any(axis=-1)).sum())
        hint = (
            f"; {zeros} of {int(valid.sum())} rows of this layer are all zero: a dense layer, a "
            "layer that was never written, or zeros that stand for missing rows"
            if zeros
            else ""
        )
        raise TraceError(
            f"{where}: row {row}, layer {layer_no}: experts {ids[row, layer].tolist()} name one "
            f"expert twice, expected {spec.top_k} different ones{hint}"
        )


def find_suspicious(
    ids: np.ndarray,
    spec: RouterSpec,
    valid: np.ndarray | None = None,
    token_ids: np.ndarray | None = None,
) -> list[Suspicion]:
    """Content of `ids` [rows, layers, top_k] that passed the checks and still looks wrong.

    valid: bool [rows], rows to look at (default: all). token_ids: [rows] or longer, the token of
    each row; a run of rows over a few repeated tokens is not held against them.
    """
    rows = ids.shape[0]
    valid = np.ones(rows, bool) if valid is None else valid
    choices = math.comb(spec.num_experts, spec.top_k)
    if rows == 0 or choices == 1 or not valid.any():
        return []
    ordered = np.sort(ids, axis=-1)
    found = []

    same = (ordered[1:] == ordered[:-1]).all(axis=-1)  # [rows - 1, layers]
    same &= (valid[1:] & valid[:-1])[:, None]
    equal = same.all(axis=-1)
    everywhere, first = _longest_run(equal)
    # how common the repeated row is elsewhere: a skewed router with few experts has long runs too
    common = int((ordered == ordered[first]).all(axis=(1, 2)).sum()) - everywhere - 1
    elsewhere = max(common, 0) / max(rows - everywhere - 1, 1)
    if (
        everywhere + 1 >= _REPEATED_ROWS
        and len(equal) * elsewhere**everywhere < _BY_CHANCE
        and _distinct(token_ids, slice(first, first + everywhere + 1)) >= _DISTINCT_TOKENS
    ):
        found.append(Suspicion("repeated_rows", None, everywhere + 1, first))

    count, start = int(valid.sum()), int(valid.argmax())
    constant = (ordered[valid] == ordered[start]).all(axis=(0, 2))  # [layers]
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


def _filler_rows(
    ordered: np.ndarray, valid: np.ndarray, num_experts: int, choices: int
) -> np.ndarray:
    """bool [rows]: consecutive ids modulo num_experts in every layer, as arange fillers have.

    Empty where a router may do that by chance: in each layer as often as among the other rows of
    the sequence, or as at random among `choices` sets.
    """
    steps = np.diff(ordered.astype(np.int32), axis=-1)
    wraps = (num_experts - 1) == ordered[..., -1].astype(np.int32) - ordered[..., 0]
    gaps = (steps != 1).sum(axis=-1)
    consecutive = (gaps == 0) | ((gaps == 1) & wraps)  # [rows, layers]
    filler = consecutive.all(axis=-1) & valid
    others = valid & ~filler
    observed = (consecutive[others].sum(axis=0) + 1) / (others.sum() + 1)
    if others.sum() < _CONSTANT_ROWS:
        observed = np.zeros(ordered.shape[1])
    chance = np.maximum(observed, min(1.0, num_experts / choices)).prod()
    return filler if len(valid) * chance < _BY_CHANCE else np.zeros_like(filler)


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
