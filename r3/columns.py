"""Columns of a trace: what one is, and the forms of those that this package reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r3.errors import TraceError

ALIGNMENTS = ("token", "row")

# a probability of 1 may come out of float32 or bfloat16 arithmetic as slightly more
_ROUNDING = 1e-2

# known columns: alignment, dtypes, number of axes
_KNOWN: dict[str, tuple[str, tuple[str, ...], int]] = {
    "token_ids": ("token", ("int32",), 1),
    "routed_experts": ("row", ("uint8", "uint16"), 3),
    "valid": ("row", ("bool",), 1),
    "logprobs": ("token", ("float32",), 1),
    "weight_versions": ("row", ("int64",), 1),
}


@dataclass(frozen=True, eq=False)
class Column:
    """A named array of a trace, aligned to its tokens or to its rows along the first axis."""

    data: np.ndarray
    align: str
    version: int = 1


def check_column(name: str, column: Column, tokens: int, where: str) -> None:
    """Raise TraceError unless the column fits a rollout of so many tokens and has its form.

    The shape of routed_experts is left to r3.checks, which knows the routers.
    """
    if column.align not in ALIGNMENTS:
        raise TraceError(
            f"{where}: column {name!r} is aligned to {column.align!r}, expected one of {ALIGNMENTS}"
        )
    if name in _KNOWN:
        if column.version != 1:
            raise TraceError(f"{where}: column {name!r} has version {column.version}, expected 1")
        align, kinds, ndim = _KNOWN[name]
        found = (column.align, column.data.dtype.name, column.data.ndim)
        if found[0] != align or found[1] not in kinds or found[2] != ndim:
            raise TraceError(
                f"{where}: column {name!r} is (aligned to {found[0]}, {found[1]}, "
                f"{found[2]} axes), expected ({align}, {' or '.join(kinds)}, {ndim} axes)"
            )
    rows = tokens if column.align == "token" else tokens - 1
    if name != "routed_experts" and (
        column.data.ndim < 1 or column.data.shape[0] != rows or column.data.dtype.hasobject
    ):
        raise TraceError(
            f"{where}: column {name!r} has shape {list(column.data.shape)} and dtype "
            f"{column.data.dtype}, expected {rows} plain values ({column.align}-aligned, "
            f"{tokens} tokens)"
        )


def check_logprobs(values: np.ndarray, prompt_len: int, where: str) -> None:
    """Raise TraceError unless `values` [tokens] are NaN in the prompt and at most 0 behind it."""
    sampled = np.arange(len(values)) >= prompt_len
    with np.errstate(invalid="ignore"):
        good = np.where(sampled, np.isfinite(values) & (values <= _ROUNDING), np.isnan(values))
    if not good.all():
        at = int((~good).argmax())
        expected = "a finite number of at most 0" if sampled[at] else "NaN in the prompt"
        raise TraceError(f"{where}: token {at}: log-probability {values[at]}, expected {expected}")


def as_array(values: object, what: str, dtype: type | None = None) -> np.ndarray:
    """A copy of `values` as an array; TraceError for what is none (ragged lists, text)."""
    try:
        return np.array(values, dtype=dtype)
    except (ValueError, TypeError) as e:
        raise TraceError(f"{what} is not an array: {e}") from None


def as_weight_versions(versions: object, valid: np.ndarray, where: str) -> np.ndarray:
    """int64 [rows] from one version for all rows or one per row; -1 where a row is not valid."""
    values = as_array(versions, f"{where}: weight_versions")
    if values.dtype.kind not in "iu" or values.shape not in ((), valid.shape):
        raise TraceError(
            f"{where}: weight_versions has shape {list(values.shape)} and dtype {values.dtype}, "
            f"expected one integer or {len(valid)}, one less than tokens"
        )
    if values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise TraceError(f"{where}: weight version {values.max()}, expected less than 2**63")
    return np.where(valid, values.astype(np.int64), -1)


def check_weight_versions(values: np.ndarray, valid: np.ndarray, where: str) -> None:
    """Raise TraceError unless `values` [rows] are 0 or more on valid rows and -1 on the others."""
    bad = np.where(valid, values < 0, values != -1)
    if bad.any():
        row = int(bad.argmax())
        expected = "0 or more" if valid[row] else "-1, as the row is missing"
        raise TraceError(f"{where}: row {row}: weight version {values[row]}, expected {expected}")


def read_only(data: np.ndarray) -> np.ndarray:
    """A view of `data` that cannot be written through."""
    view = data.view()
    view.flags.writeable = False
    return view
