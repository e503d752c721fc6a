"""Columns of a trace: what one is, and the forms of those that this package reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3.errors import TraceError

ALIGNMENTS = ("token", "row", "rollout")

# values of the column `segments`
PROMPT, ANSWER, REPLY = 0, 1, 2

# a probability of 1 may come out of float32 or bfloat16 arithmetic as slightly more
ROUNDING = 1e-2

# known columns: alignment, dtypes, number of axes
_KNOWN: dict[str, tuple[str, tuple[str, ...], int]] = {
    "token_ids": ("token", ("int32",), 1),
    "routed_experts": ("row", ("uint8", "uint16"), 3),
    "valid": ("row", ("bool",), 1),
    "logprobs": ("token", ("float32",), 1),
    "weight_versions": ("row", ("int64",), 1),
    "router_margins": ("row", ("float32",), 2),
    "segments": ("token", ("uint8",), 1),
    "turns": ("token", ("uint16",), 1),
    "rewards": ("token", ("float32",), 1),
    "kept_counts": ("token", ("uint32",), 1),
    "kept_ids": ("rollout", ("int32",), 1),
    "tags": ("rollout", ("uint8",), 1),
}


@dataclass(frozen=True, eq=False)
class Column:
    """A named array of a trace.

    align: "token" or "row" if its first axis is that of the tokens [n] or the rows [n - 1];
    "rollout" if it belongs to the rollout as a whole: at least one axis, of any length.
    """

    data: np.ndarray
    align: str
    version: int = 1


def text_column(texts: Iterable[str]) -> Column:
    """The column `tags` from a list of text. Raises TraceError for anything else."""
    values = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [None]
    if not all(isinstance(v, str) for v in values):
        raise TraceError(f"tags are {texts!r}, expected a list of text")
    try:
        data = json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise TraceError(f"tags are {texts!r}, expected text that has a UTF-8 form: {e}") from None
    return Column(np.frombuffer(data, np.uint8), "rollout")


def read_tags(data: np.ndarray, where: str) -> tuple[str, ...]:
    """The text in the column `tags`, uint8 [bytes]. Raises TraceError if it is not that."""
    expected = "expected a JSON list of text in UTF-8"
    try:
        tags = json.loads(data.tobytes().decode())
        if type(tags) is not list or not all(type(tag) is str for tag in tags):
            raise ValueError("other values")
        "".join(tags).encode()  # an escape in JSON can stand for half of a character
    except (ValueError, RecursionError) as e:
        raise TraceError(f"{where}: tags cannot be read ({e}), {expected}") from None
    return tuple(tags)


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
    if column.align == "rollout":
        if column.data.ndim < 1 or column.data.dtype.hasobject:
            raise TraceError(
                f"{where}: column {name!r} has shape {list(column.data.shape)} and dtype "
                f"{column.data.dtype}, expected plain values in at least one dimension"
            )
        return
    rows = tokens if column.align == "token" else tokens - 1
    if name != "routed_experts" and (
        column.data.ndim < 1 or column.data.shape[0] != rows or column.data.dtype.hasobject
    ):
        raise TraceError(
            f"{where}: column {name!r} has shape {list(column.data.shape)} and dtype "
            f"{column.data.dtype}, expected {rows} plain values ({column.align}-aligned, "
            f"{tokens} tokens)"
        )


def check_prompt_len(prompt_len: object, tokens: int, where: str) -> None:
    """Raise TraceError unless `prompt_len` is an integer of 0 to `tokens`."""
    if isinstance(prompt_len, bool) or not isinstance(prompt_len, int | np.integer):
        raise TraceError(f"{where}: prompt_len is {prompt_len!r}, expected an integer")
    if not 0 <= prompt_len <= tokens:
        raise TraceError(f"{where}: prompt_len is {prompt_len}, expected 0..{tokens} tokens")


def check_values(
    columns: Mapping[str, Column],
    prompt_len: int,
    valid: np.ndarray,
    moe_layers: Sequence[int],
    where: str,
) -> None:
    """Raise TraceError for content that the known columns of a trace can not have.

    The forms have passed `check_column`. What they mean: see RoutingTrace. valid: bool [rows].
    moe_layers: decoder layers of the routers, for messages. Expert ids are left to r3.checks.
    """
    given = {name: column.data for name, column in columns.items() if name in _KNOWN}
    if "segments" in given:
        _check_segments(given["segments"], prompt_len, where)
    sampled = sampled_tokens(columns, prompt_len)
    if "logprobs" in given:
        _check_logprobs(given["logprobs"], sampled, prompt_len, where)
    if "weight_versions" in given:
        _check_weight_versions(given["weight_versions"], valid, where)
    if "router_margins" in given:
        _check_router_margins(given["router_margins"], valid, moe_layers, where)
    if "turns" in given:
        turns = given["turns"]
        if (turns[1:] < turns[:-1]).any():
            at = int((turns[1:] < turns[:-1]).argmax()) + 1
            raise TraceError(
                f"{where}: token {at}: turn {turns[at]}, expected at least the {turns[at - 1]} of "
                "the token before"
            )
    if "rewards" in given and (infinite := np.isinf(given["rewards"])).any():
        at = int(infinite.argmax())
        raise TraceError(
            f"{where}: token {at}: reward {given['rewards'][at]}, expected a finite number, or NaN "
            "for none"
        )
    if "kept_counts" in given or "kept_ids" in given:
        for name, other in (("kept_counts", "kept_ids"), ("kept_ids", "kept_counts")):
            if name not in given:
                raise TraceError(f"{where}: column {name!r} is missing, expected with {other!r}")
        tokens, counts, ids = (given[k] for k in ("token_ids", "kept_counts", "kept_ids"))
        _check_kept(tokens, counts, ids, sampled, where)
    if "tags" in given:
        read_tags(given["tags"], where)


def sampled_tokens(columns: Mapping[str, Column], prompt_len: int) -> np.ndarray:
    """bool [n]: the token was sampled. By `segments`, else all that follow the prompt."""
    if "segments" in columns:
        return columns["segments"].data == ANSWER
    return np.arange(len(columns["token_ids"].data)) >= prompt_len


def _check_segments(values: np.ndarray, prompt_len: int, where: str) -> None:
    inside = np.arange(len(values)) < prompt_len
    good = (values == REPLY) | (values == np.where(inside, PROMPT, ANSWER))
    if not good.all():
        at = int((~good).argmax())
        expected = "0 (prompt) or 2 (reply)" if inside[at] else "1 (answer) or 2 (reply)"
        side = "in" if inside[at] else "behind"
        raise TraceError(
            f"{where}: token {at}: segment {values[at]}, expected {expected} {side} the prompt of "
            f"{prompt_len} tokens"
        )


def _check_logprobs(values: np.ndarray, sampled: np.ndarray, prompt_len: int, where: str) -> None:
    with np.errstate(invalid="ignore"):
        good = np.where(sampled, np.isfinite(values) & (values <= ROUNDING), np.isnan(values))
    if not good.all():
        at = int((~good).argmax())
        expected = f"NaN in {'the prompt' if at < prompt_len else 'a reply'}"
        if sampled[at]:
            expected = "a finite number of at most 0"
        raise TraceError(f"{where}: token {at}: log-probability {values[at]}, expected {expected}")


def _check_weight_versions(values: np.ndarray, valid: np.ndarray, where: str) -> None:
    bad = np.where(valid, values < 0, values != -1)
    if bad.any():
        row = int(bad.argmax())
        expected = "0 or more" if valid[row] else "-1, as the row is missing"
        raise TraceError(f"{where}: row {row}: weight version {values[row]}, expected {expected}")


def _check_router_margins(
    values: np.ndarray, valid: np.ndarray, moe_layers: Sequence[int], where: str
) -> None:
    if values.shape[1] != len(moe_layers):
        raise TraceError(
            f"{where}: router_margins has shape {list(values.shape)}, expected "
            f"{[len(valid), len(moe_layers)]}, one for each row and MoE layer"
        )
    good = np.isnan(values) | (valid[:, None] & (values >= 0) & np.isfinite(values))
    if not good.all():
        row, i = (int(x) for x in np.argwhere(~good)[0])
        expected = "a finite number of at least 0, or NaN where it is not known"
        raise TraceError(
            f"{where}: row {row}, layer {moe_layers[i]}: router margin {values[row, i]}, expected "
            f"{expected if valid[row] else 'NaN, as the row is missing'}"
        )


def margins_or_nan(columns: Mapping[str, Column]) -> np.ndarray:
    """The column `router_margins`, float32 [rows, MoE layers]; NaN throughout if there is none."""
    if "router_margins" in columns:
        return columns["router_margins"].data
    return np.full(columns["routed_experts"].data.shape[:2], np.nan, np.float32)


def _check_kept(
    tokens: np.ndarray, counts: np.ndarray, ids: np.ndarray, sampled: np.ndarray, where: str
) -> None:
    total = int(counts.sum(dtype=np.uint64))
    if total != len(ids):
        raise TraceError(
            f"{where}: kept_ids has {len(ids)} ids, expected {total}, the sum of kept_counts"
        )
    wrong = (counts > 0) & ~sampled
    if wrong.any():
        at = int(wrong.argmax())
        raise TraceError(
            f"{where}: token {at}: kept_counts {counts[at]}, expected 0, as it was not sampled"
        )
    if not total:
        return
    owners = np.flatnonzero(counts)
    ends = np.cumsum(counts[owners], dtype=np.int64)
    if int(ids.min()) < 0:
        i = int((ids < 0).argmax())
        at = owners[np.searchsorted(ends, i, side="right")]
        raise TraceError(f"{where}: token {at}: kept id {ids[i]}, expected 0 or more")
    hits = ids == np.repeat(tokens[owners], counts[owners])
    there = np.logical_or.reduceat(hits, ends - counts[owners])
    if not there.all():
        at = owners[there.argmin()]
        raise TraceError(
            f"{where}: token {at}: id {tokens[at]} is not among the {counts[at]} that its sampler "
            "kept, expected it there, as it was sampled"
        )


def as_array(values: object, what: str, dtype: type | None = None, copy: bool = True) -> np.ndarray:
    """`values` as an array, a copy of its own unless `copy` is False.

    Raises TraceError for what is none (ragged lists, text).
    """
    try:
        return np.array(values, dtype=dtype) if copy else np.asarray(values, dtype=dtype)
    except (ValueError, TypeError) as e:
        raise TraceError(f"{what} is not an array: {e}") from None


def on_host(values: Any, what: str) -> np.ndarray:
    """numpy, torch (any device, with a gradient or without) or a sequence as numpy; floats of torch
    as float64. Raises TraceError for a tensor whose values cannot be read."""
    if hasattr(values, "detach"):  # torch, which is not imported for this
        try:
            values = values.detach().cpu()  # first: not every device has float64
            return (values.double() if values.is_floating_point() else values).numpy()
        except (RuntimeError, TypeError) as e:  # one without values, or whose values are elsewhere
            raise TraceError(f"{what}: a tensor whose values cannot be read: {e}") from None
    return as_array(values, what, copy=False)


def as_token_ids(tokens: np.ndarray, where: str) -> np.ndarray:
    """int32 [n], a copy of integers `tokens` [n]. Raises TraceError for 2**31 and above."""
    if int(tokens.max()) > np.iinfo(np.int32).max:
        at = int(tokens.argmax())
        raise TraceError(f"{where}: token {at}: id {tokens[at]}, expected less than 2**31")
    return np.array(tokens, dtype=np.int32)


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


def read_only(data: np.ndarray) -> np.ndarray:
    """A view of `data` that cannot be written through."""
    view = data.view()
    view.flags.writeable = False
    return view
