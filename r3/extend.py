"""A conversation's trace from its requests: what the earlier turns recorded, and the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from r3.columns import ANSWER, REPLY, Column, margins_or_nan
from r3.errors import SpecError, TraceError

if TYPE_CHECKING:
    from r3.trace import RoutingTrace

# token columns that one of the two may lack, and what then stands for its new tokens
_UNKNOWN = {"logprobs": np.nan, "rewards": np.nan, "kept_counts": 0}


def extended_columns(trace: RoutingTrace, turn: RoutingTrace) -> dict[str, Column]:
    """The columns of `trace.extend(turn)`; see RoutingTrace.extend."""
    where = f"rollout {trace.rollout_id}, extended by {turn.rollout_id}"
    n = trace.num_tokens
    if turn.spec != trace.spec:
        raise SpecError(f"{where}: the turn has {turn.spec}, expected {trace.spec}")
    both = min(n, turn.num_tokens)
    found, expected = turn.token_ids[:both], trace.token_ids[:both]
    if (found != expected).any():
        at = int((found != expected).argmax())
        raise TraceError(
            f"{where}: token {at}: the turn has id {found[at]}, expected {expected[at]}: its "
            "prompt begins with all tokens so far"
        )
    if turn.prompt_len < n:
        raise TraceError(
            f"{where}: token {turn.prompt_len}: the turn has a prompt of {turn.prompt_len} of its "
            f"{turn.num_tokens} tokens, expected at least the {n} tokens so far"
        )
    _check_names(trace, turn, where)

    # [turn's rows], True where the row is one that `trace` captured. Its last token has none: what
    # followed it was only sampled then, and is forwarded by the turn.
    kept = np.zeros(turn.num_rows, bool)
    kept[: trace.num_rows] = trace.valid

    def rows(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        joined = theirs.copy()
        joined[kept] = mine[trace.valid]
        return joined

    columns = dict(turn.columns)
    for name, column in turn.columns.items():
        if column.align == "row" and name in trace.columns:
            data = rows(trace.columns[name].data, column.data)
            columns[name] = Column(data, "row", column.version)
        elif column.align == "token" and name in trace.columns:
            data = np.concatenate([trace.columns[name].data, column.data[n:]])
            columns[name] = Column(data, "token", column.version)
    for name, unknown in _UNKNOWN.items():
        if name in trace.columns and name not in turn.columns:
            mine = trace.columns[name].data
            theirs = np.full(turn.num_tokens - n, unknown, mine.dtype)
            columns[name] = Column(np.concatenate([mine, theirs]), "token")
    if "router_margins" in trace.columns.keys() | turn.columns.keys():
        margins = rows(margins_or_nan(trace.columns), margins_or_nan(turn.columns))
        columns["router_margins"] = Column(margins, "row")

    columns.pop("valid", None)
    if not (valid := turn.valid | kept).all():
        columns["valid"] = Column(valid, "row")
    if trace.weight_versions is None:
        columns.pop("weight_versions", None)
    columns["segments"] = Column(_segments(trace, turn), "token")
    columns["turns"] = Column(_turns(trace, turn, where), "token")
    # nothing of the history was sampled by the turn, so its ids are all of later tokens
    ids = [t.columns["kept_ids"].data for t in (trace, turn) if "kept_ids" in t.columns]
    if ids:
        columns["kept_ids"] = Column(np.concatenate(ids), "rollout")
    return columns


def _check_names(trace: RoutingTrace, turn: RoutingTrace, where: str) -> None:
    """Raise TraceError for columns of the one that do not go together with those of the other."""
    for name in sorted(trace.columns.keys() & turn.columns.keys()):
        mine, theirs = (
            (c.align, c.version, c.data.dtype.name, list(c.data.shape[1:]))
            for c in (trace.columns[name], turn.columns[name])
        )
        if mine != theirs and not mine[0] == theirs[0] == "rollout":
            raise TraceError(
                f"{where}: the turn's column {name!r} is (align, version, dtype, shape behind the "
                f"first axis) {theirs}, expected {mine}"
            )
    # made here, or joined by rules that do not need both
    free = {"valid", "weight_versions", "router_margins", "segments", "turns"}
    free |= {"rewards", "kept_counts", "kept_ids"}
    for name in sorted((trace.columns.keys() ^ turn.columns.keys()) - free):
        one, other = (trace, turn) if name in trace.columns else (turn, trace)
        from_turn = one is turn and one.columns[name].align == "rollout"
        needless = name == "logprobs" and not other.sampled.any()
        if not from_turn and not needless:
            raise TraceError(
                f"{where}: column {name!r} is only in rollout {one.rollout_id}, expected it in "
                f"rollout {other.rollout_id} too"
            )


def _segments(trace: RoutingTrace, turn: RoutingTrace) -> np.ndarray:
    segments = np.full(turn.num_tokens, REPLY, np.uint8)
    # a prompt and its answer, where nothing else is said
    segments[: trace.num_tokens] = trace.sampled if trace.segments is None else trace.segments
    new = slice(turn.prompt_len, None)
    segments[new] = ANSWER if turn.segments is None else turn.segments[new]
    return segments


def _turns(trace: RoutingTrace, turn: RoutingTrace, where: str) -> np.ndarray:
    def numbers(t: RoutingTrace) -> np.ndarray:
        column = t.columns.get("turns")
        return np.zeros(t.num_tokens, np.int64) if column is None else column.data.astype(np.int64)

    mine, theirs = numbers(trace), numbers(turn)[trace.num_tokens :]
    if len(theirs):
        theirs += mine[-1] + 1 - theirs[0]
        if theirs[-1] > np.iinfo(np.uint16).max:
            raise TraceError(f"{where}: turn {theirs[-1]}, expected less than 2**16")
    return np.concatenate([mine, theirs]).astype(np.uint16)
