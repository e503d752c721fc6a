"""Decides for each router row of a rank what happens to it: replay, native routing, or spreading.

Pure numpy. A batch is bound to a `RankView` once per microbatch, on the host, where every limit
can be checked without waiting for a device.

  a token with routing      is replayed
  missing, too old, or the  is routed natively; the first two are counted, per rollout too
  last of a sequence
  padding                   gets distinct experts in turn: routed natively, equal padding tokens
                            would all go to the same few experts and overload their ranks
Limits are of the whole batch and not of a rank's share of it, so that all ranks that are given the
batch stop together instead of leaving each other waiting.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import ReplayError, StaleRoutingWarning
from r3.identity import RolloutId
from r3.trainer_hooks.layout import RankView
from r3.trainer_hooks.megatron_report import RolloutCounts

# Rows that are turned from token-major to layer-major together, within the processor's cache.
_ROWS = 512


@dataclass(frozen=True)
class Limits:
    """How much may be missing or old, and what is done about old rows.

    max_missing_fraction: 0..1, of the rows of a microbatch that should have routing; None for any.
    max_weight_lag: how far a row's weight version may lie behind the trainer's; None for any.
    on_stale: what becomes of a microbatch with older rows, or rows of unknown version.
    """

    max_missing_fraction: float | None = 0.5
    max_weight_lag: int | None = None
    on_stale: Literal["stop", "native", "warn"] = "stop"

    def __post_init__(self) -> None:
        check_fraction("max_missing_fraction", self.max_missing_fraction)
        lag = self.max_weight_lag
        if lag is not None and (not isinstance(lag, Integral) or isinstance(lag, bool) or lag < 0):
            raise ReplayError(f"max_weight_lag is {lag!r}, expected an integer from 0, or None")
        if self.on_stale not in ("stop", "native", "warn"):
            raise ReplayError(f"on_stale is {self.on_stale!r}, expected 'stop', 'native' or 'warn'")


def check_fraction(name: str, value: float | None) -> None:
    """Raise ReplayError unless `value` is a number from 0 to 1, or None."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (real and 0 <= value <= 1):
        raise ReplayError(f"{name} is {value!r}, expected a number from 0 to 1, or None")


def check_version(value: int | None) -> None:
    """Raise ReplayError unless `value` is a weight version, an int64 from 0, or None."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (whole and 0 <= value < 1 << 63):
        raise ReplayError(f"weight_version is {value!r}, expected an integer from 0, or None")


@dataclass(frozen=True, eq=False)
class Binding:
    """What the routers of a rank are to do with each of their rows.

    experts: [layers, rows, top_k], uint8 or int16 or int32, what to replay; meaningless in native
    rows. native: int64, ascending, the rows to route natively. replayed: bool [rows], tokens that
    are replayed, which is neither native rows nor padding. rows_missing, rows_stale: of this rank.
    rollouts: of the whole batch.
    """

    experts: np.ndarray
    native: np.ndarray
    replayed: np.ndarray
    rows_missing: int
    rows_stale: int
    rollouts: dict[RolloutId, RolloutCounts]


def bind(
    batch: RoutingBatch,
    view: RankView,
    layers: Iterable[int],
    limits: Limits,
    weight_version: int | None = None,
) -> Binding:
    """Bind `batch` to the rows of `view`, for the given decoder layers of batch.spec.moe_layers.

    weight_version: the trainer's, needed if max_weight_lag is set.
    Raises ReplayError, naming the rollouts, beyond a limit and for versions newer than the
    trainer's; warns with StaleRoutingWarning where on_stale says so.
    """
    is_last = np.zeros(batch.num_tokens, bool)
    is_last[batch.cu_seqlens[1:] - 1] = True
    # an engine that forwards last tokens too is odd, not wrong
    expected = batch.valid | ~is_last
    missing = expected & ~batch.valid
    stale = _stale(batch, limits, weight_version)
    rollouts = _count(batch, expected, missing, stale)
    _check_missing(rollouts, int(expected.sum()), limits)
    valid = batch.valid & ~stale

    padding = view.index < 0
    replayed = ~padding & valid[view.index]
    return Binding(
        experts=_table(batch, view, list(layers), padding),
        native=np.flatnonzero(~padding & ~replayed),
        replayed=replayed,
        rows_missing=int((~padding & missing[view.index]).sum()),
        rows_stale=int((~padding & stale[view.index]).sum()),
        rollouts=rollouts,
    )


def _table(
    batch: RoutingBatch, view: RankView, layers: list[int], padding: np.ndarray
) -> np.ndarray:
    spec = batch.spec
    # torch lacks most operations for uint16
    dtype = np.dtype(np.uint8 if spec.num_experts <= 256 else np.int16)
    if spec.num_experts > 1 << 15:
        dtype = np.dtype(np.int32)
    wanted = [spec.moe_layers.index(layer) for layer in layers]
    # numpy is slow on an axis of top_k numbers, so the experts of a row and layer move as one item
    cell = np.dtype((np.void, spec.top_k * dtype.itemsize))
    cells = np.empty((len(layers), len(view.index)), cell)
    for start in range(0, len(view.index), _ROWS):
        rows = slice(start, start + _ROWS)
        part = np.ascontiguousarray(batch.routed_experts[view.index[rows]], dtype)
        cells[:, rows] = part.view(cell)[..., 0].T[wanted]
    table = cells.view(dtype).reshape(*cells.shape, spec.top_k)
    turn = np.arange(int(padding.sum()) * spec.top_k) % spec.num_experts
    table[:, padding] = turn.reshape(-1, spec.top_k).astype(dtype)
    return table


def _stale(batch: RoutingBatch, limits: Limits, weight_version: int | None) -> np.ndarray:
    """bool [tokens]: rows to be routed natively for their age"""
    none = np.zeros(batch.num_tokens, bool)
    versions = batch.weight_versions
    known = batch.valid & (versions >= 0)
    if weight_version is not None and (known & (versions > weight_version)).any():
        token = int((known & (versions > weight_version)).argmax())
        rollout, row = batch.locate(token)
        raise ReplayError(
            f"rollout {rollout}: row {row}: weight version {versions[token]}, expected at most the "
            f"trainer's, {weight_version}"
        )
    if limits.max_weight_lag is None:
        return none
    if weight_version is None:
        raise ReplayError(
            "max_weight_lag is set and the trainer's version is not known: expected "
            "step(weight_version=...)"
        )
    stale = batch.valid & ~(known & (weight_version - versions <= limits.max_weight_lag))
    if not stale.any() or limits.on_stale == "native":
        return stale
    token = int(stale.argmax())
    rollout, row = batch.locate(token)
    found = f"weight version {versions[token]}" if known[token] else "no weight version"
    text = (
        f"rollout {rollout}: row {row}: {found}, expected at least "
        f"{weight_version - limits.max_weight_lag} (the trainer has {weight_version}, "
        f"max_weight_lag is {limits.max_weight_lag}); {int(stale.sum())} of "
        f"{int(batch.valid.sum())} rows are like that"
    )
    if limits.on_stale == "stop":
        raise ReplayError(text)
    warnings.warn(StaleRoutingWarning(text), stacklevel=2)
    return none


def _count(
    batch: RoutingBatch, expected: np.ndarray, missing: np.ndarray, stale: np.ndarray
) -> dict[RolloutId, RolloutCounts]:
    starts = batch.cu_seqlens[:-1]
    sums = [np.add.reduceat(x.astype(np.int64), starts) for x in (expected, missing, stale)]
    rollouts: dict[RolloutId, RolloutCounts] = {}
    for name, *counts in zip(batch.rollout_ids, *(x.tolist() for x in sums), strict=True):
        # one that is in the batch twice counts twice
        rollouts[name] = rollouts.get(name, RolloutCounts()) + RolloutCounts(*counts)
    return rollouts


def _check_missing(rollouts: dict[RolloutId, RolloutCounts], expected: int, limits: Limits) -> None:
    native = sum(r.rows_missing + r.rows_stale for r in rollouts.values())
    limit = limits.max_missing_fraction
    if limit is None or not native or native / expected <= limit:
        return
    worst = [item for item in rollouts.items() if item[1].native_fraction]
    worst.sort(key=lambda item: -item[1].native_fraction)
    names = ", ".join(f"{name} ({r.native_fraction:.0%})" for name, r in worst[:5])
    more = f" and {len(worst) - 5} more" if len(worst) > 5 else ""
    raise ReplayError(
        f"{native} of {expected} rows have no routing that may be replayed: "
        f"{sum(r.rows_missing for r in rollouts.values())} missing, "
        f"{sum(r.rows_stale for r in rollouts.values())} stale "
        f"({native / expected:.1%}), expected at most max_missing_fraction = "
        f"{limit:.1%}; by share of their rows: {names}{more}"
    )
