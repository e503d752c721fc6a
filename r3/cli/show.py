"""`r3 show`: one rollout of a file, token by token: its experts, and where another file differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from r3.cli.text import printable
from r3.comparison import check_same_tokens
from r3.differences import Differences
from r3.errors import SpecError, TraceError
from r3.plain import plain
from r3.slices import SEGMENTS
from r3.storage import ShardReader
from r3.trace import RoutingTrace
from r3.worst import Texts

_TOKENS = 64  # shown unless others are asked for
_LAYERS = 3


def show_rollout(
    file: Path,
    rollout: str,
    *,
    against: Path | None = None,
    tokens: slice | None = None,
    layers: Sequence[int] | None = None,
    texts: Texts | None = None,
) -> dict[str, Any]:
    """What a `.r3` file has of one rollout, plain values; see `render` for what is shown.

    Of each token, "differs" is of its own row, "pass_differs" of the row before, which produced it
    and its log-probability.

    rollout: its id, or the number of its record. against: a file with the same rollout. tokens:
    positions; None: 64, the first ones, or those around the token that is furthest off. layers:
    decoder layers of which experts are given; None: the first three, none beside differences.
    Raises TraceError or SpecError for what is not there, FormatError for what cannot be read.
    """
    with ShardReader(file) as shard:
        trace = _find(shard, rollout)
    other = None
    if against is not None:
        with ShardReader(against) as shard:
            if shard.spec != trace.spec:
                raise SpecError(f"{against}: {shard.spec}, expected {trace.spec}, as in {file}")
            other = _find(shard, str(trace.rollout_id))
        check_same_tokens("other", other, trace)
    found = None if other is None else _differences(trace, other)
    log_ratio = _log_ratio(trace, other)
    window = _window(trace, tokens, log_ratio, found)
    chosen = _layers(trace, layers, found)
    said = texts(trace.token_ids[window].tolist()) if texts else None
    return plain(
        {
            "file": str(file),
            "against": None if against is None else str(against),
            "id": str(trace.rollout_id),
            "tokens": trace.num_tokens,
            "prompt_len": trace.prompt_len,
            "missing_rows": int((~trace.valid).sum()),
            "weight_versions": trace.version_range,
            "tags": trace.tags,
            "provenance": trace.provenance.flat(),
            "cell_disagreement": None if found is None else _cells(trace, found),
            "layers": [trace.spec.moe_layers[i] for i in chosen],
            "shown": [
                _describe(trace, other, found, log_ratio, said[i] if said else None, at, chosen)
                for i, at in enumerate(range(window.start, window.stop))
            ],
        }
    )


def render(document: dict[str, Any], console: Console) -> None:
    """Print a rollout: a token a line, with the layers in which the pass that produced it, that of
    the token before, was routed differently. Experts of a layer are those of its own pass."""
    d = document
    versions = d["weight_versions"]
    facts = [
        f"{d['tokens']:,} tokens, {d['prompt_len']:,} of them prompt",
        f"{d['missing_rows']:,} rows missing" if d["missing_rows"] else "",
        f"weights {versions[0]} to {versions[1]}" if versions else "",
        f"tags {', '.join(d['tags'])}" if d["tags"] else "",
    ]
    console.print(f"[bold]{printable(d['id'])}[/]  {printable('; '.join(x for x in facts if x))}")
    if d["cell_disagreement"] is not None:
        console.print(
            f"{d['cell_disagreement']:.3%} of its cells differ in {printable(d['against'])}"
        )
    compared = d["against"] is not None
    names = ["token", "id", "text", "part", "logprob"]
    names += ["other", "log-ratio", "its pass differs in layers"] if compared else []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names + [f"layer {x}" for x in d["layers"]]:
        right = name in ("token", "id", "logprob", "other", "log-ratio")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for t in d["shown"]:
        row = [str(t["position"]), str(t["token_id"]), printable(t["text"] or ""), t["segment"]]
        row.append(_number(t["logprob"]))
        if compared:
            row += [_number(t["other_logprob"]), _number(t["logratio"]), _changes(t)]
        row += [_experts(t, i) for i in range(len(d["layers"]))]
        table.add_row(*row)
    console.print(table)
    if d["shown"] and len(d["shown"]) < d["tokens"]:
        first, last = d["shown"][0]["position"], d["shown"][-1]["position"]
        console.print(f"tokens {first} to {last}; others with --tokens FROM:TO")


def _find(shard: ShardReader, rollout: str) -> RoutingTrace:
    if rollout.isascii() and rollout.isdigit() and len(rollout) < 19:
        if int(rollout) >= len(shard):
            raise TraceError(
                f"{shard.path}: record {rollout}, expected one of {len(shard)} records"
            )
        return shard[int(rollout)]
    if rollout not in shard:
        first = f"; its first one is {shard.header(0).rollout_id}" if len(shard) else ""
        raise TraceError(f"{shard.path}: no rollout {rollout}{first}")
    return shard.get(rollout)


def _differences(trace: RoutingTrace, other: RoutingTrace) -> Differences:
    return Differences.between(
        trace.routed_experts, other.routed_experts, trace.valid & other.valid, trace.spec
    )


def _cells(trace: RoutingTrace, found: Differences) -> float:
    cells = int(found.valid.sum()) * len(trace.spec.moe_layers)
    return len(found.row) / cells if cells else math.nan


def _log_ratio(trace: RoutingTrace, other: RoutingTrace | None) -> np.ndarray:
    """float64 [n]; NaN for what is not known"""
    if other is None or trace.logprobs is None or other.logprobs is None:
        return np.full(trace.num_tokens, np.nan)
    return other.logprobs.astype(np.float64) - trace.logprobs


def _window(
    trace: RoutingTrace,
    tokens: slice | None,
    log_ratio: np.ndarray,
    found: Differences | None,
) -> slice:
    n = trace.num_tokens
    if tokens is not None:
        start, stop, _ = tokens.indices(n)
        return slice(start, max(start, stop))
    far = np.nan_to_num(np.abs(log_ratio), nan=0.0)
    if not far.any() and found is not None:
        far[:-1] = found.layers_per_row
    first = max(0, min(int(far.argmax()) - _TOKENS // 2, n - _TOKENS)) if far.any() else 0
    return slice(first, min(first + _TOKENS, n))


def _layers(
    trace: RoutingTrace, layers: Sequence[int] | None, found: Differences | None
) -> list[int]:
    """Places among the MoE layers"""
    known = trace.spec.moe_layers
    if layers is not None:
        for layer in layers:
            if layer not in known:
                raise SpecError(f"layer {layer}, expected one of the MoE layers {known}")
        return [known.index(x) for x in layers]
    return list(range(min(_LAYERS, len(known)))) if found is None else []


def _describe(
    trace: RoutingTrace,
    other: RoutingTrace | None,
    found: Differences | None,
    log_ratio: np.ndarray,
    text: str | None,
    at: int,
    chosen: list[int],
) -> dict[str, Any]:
    segments = trace.segments
    kind = segments[at] if segments is not None else int(at >= trace.prompt_len)
    there = at < trace.num_rows and bool(trace.valid[at])
    compared = found is not None and at < trace.num_rows and bool(found.valid[at])
    return {
        "position": at,
        "token_id": int(trace.token_ids[at]),
        "text": text,
        "segment": SEGMENTS[kind],
        "logprob": None if trace.logprobs is None else float(trace.logprobs[at]),
        "other_logprob": None
        if other is None or other.logprobs is None
        else float(other.logprobs[at]),
        "logratio": float(log_ratio[at]),
        "experts": [sorted(trace.routed_experts[at, i].tolist()) for i in chosen]
        if there
        else None,
        "other_experts": [sorted(other.routed_experts[at, i].tolist()) for i in chosen]
        if other is not None and compared
        else None,
        "differs": _changed(trace, found, at),
        "pass_differs": _changed(trace, found, at - 1),
    }


def _changed(
    trace: RoutingTrace, found: Differences | None, at: int
) -> list[dict[str, Any]] | None:
    """The layers in which row `at` differs, with the experts that one side lacks; None where it was
    not compared."""
    if found is None or not 0 <= at < len(found.valid) or not found.valid[at]:
        return None
    low, high = np.searchsorted(found.row, [at, at + 1])
    changes = []
    for cell in range(low, high):
        experts = slice(*np.searchsorted(found.lost_cell, [cell, cell + 1]))
        changes.append(
            {
                "layer": trace.spec.moe_layers[found.layer[cell]],
                "from": found.lost[experts].tolist(),
                "to": found.gained[experts].tolist(),
            }
        )
    return changes


def _changes(token: dict[str, Any]) -> str:
    if token["pass_differs"] is None:
        return "" if token["position"] == 0 else "not compared"
    shown = [
        f"{c['layer']}: {','.join(map(str, c['from']))} > {','.join(map(str, c['to']))}"
        for c in token["pass_differs"][:4]
    ]
    more = len(token["pass_differs"]) - len(shown)
    return "; ".join(shown) + (f" and {more} more" if more > 0 else "")


def _experts(token: dict[str, Any], i: int) -> str:
    if token["experts"] is None:
        return "no route"
    mine, theirs = token["experts"][i], token["other_experts"]
    if theirs is None:
        return " ".join(map(str, mine))
    return " ".join(f"[bold red]{x}[/]" if x not in theirs[i] else str(x) for x in mine)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
