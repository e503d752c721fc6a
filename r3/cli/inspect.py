"""What a shard file holds, in numbers (`summarize`) and as tables (`render`).

Goes through the file trace by trace, so its size does not matter. Only captured rows count: a
missing row is counted as missing and left out of every load.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter, defaultdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from r3.cli.text import printable
from r3.errors import SuspiciousRoutingWarning
from r3.identity import Provenance
from r3.load import expert_load, max_violation
from r3.spec import RouterSpec
from r3.storage import ShardReader

_VALUES_KEPT = 10  # of one provenance field: seeds may differ in every trace


def summarize(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Counts over all traces of a shard file; plain values that json can write.

    bytes_per_token_per_layer: file bytes / (tokens * MoE layers). bound_bits_per_cell:
    log2 C(num_experts, top_k), what one row of one layer needs if all expert sets are equally
    likely; experts_bits_per_cell: what routed_experts takes; shared_rows are stored with an
    earlier trace. expert_load: per layer, how many captured rows chose each expert;
    max_vio = largest / mean load - 1 (Wang et al. 2024,
    arXiv 2408.15664). suspicious: findings by kind, with the first of each kind in
    suspicious_first. weight_versions: traces that have them, traces that mix several, and the
    lowest and highest version of all. Shares of nothing are None. Raises FormatError.
    """
    counts: Counter[str] = Counter()
    columns: dict[str, dict[str, Any]] = {}
    provenance: dict[str, Counter[str]] = defaultdict(Counter)
    suspicious: Counter[str] = Counter()
    first: dict[str, str] = {}
    versions: list[int] = []
    with ShardReader(path) as shard:
        spec = shard.spec
        load = np.zeros((len(spec.moe_layers), spec.num_experts), np.int64)
        shard.rollout_ids  # noqa: B018  # refuses a rollout that is there twice
        for i in range(len(shard)):
            header = shard.header(i)
            for c in header.columns:
                kind = f"{c.align} {c.dtype}"
                column = columns.setdefault(c.name, {"kind": kind, "codecs": {}, "bytes": 0})
                column["codecs"][c.codec] = column["codecs"].get(c.codec, 0) + 1
                column["bytes"] += c.size
                counts["shared_rows"] += c.layout.shared if c.layout else 0
            _count_provenance(provenance, header.provenance)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SuspiciousRoutingWarning)
                trace = shard[i]
            counts["tokens"] += trace.num_tokens
            counts["prompt_tokens"] += int(trace.prompt_len)
            counts["rows"] += trace.num_rows
            counts["missing_rows"] += int((~trace.valid).sum())
            counts["versioned"] += trace.weight_versions is not None
            counts["mixed"] += trace.mixes_weights
            versions = _extremes([*versions, *(trace.version_range or ())])
            for finding in trace.suspicions:
                suspicious[finding.kind] += 1
                first.setdefault(finding.kind, f"rollout {trace.rollout_id}: {finding}")
            load += expert_load(trace.routed_experts, trace.valid, spec)
        traces, file_bytes = len(shard), shard.file_size
    layers = len(spec.moe_layers)
    cells, experts = counts["rows"] * layers, columns.get("routed_experts", {"bytes": 0})
    return {
        "file": os.fspath(path),
        "file_bytes": file_bytes,
        "traces": traces,
        "tokens": counts["tokens"],
        "prompt_tokens": counts["prompt_tokens"],
        "response_tokens": counts["tokens"] - counts["prompt_tokens"],
        "rows": counts["rows"],
        "missing_rows": counts["missing_rows"],
        "shared_rows": counts["shared_rows"],
        "moe_layers": layers,
        "num_layers": spec.num_layers,
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
        "bytes_per_token_per_layer": _share(file_bytes, counts["tokens"] * layers),
        "experts_bits_per_cell": _share(8 * experts["bytes"], cells),
        "bound_bits_per_cell": math.log2(math.comb(spec.num_experts, spec.top_k)),
        "codecs": sorted(experts.get("codecs", {})),
        "columns": columns,
        "weight_versions": {
            "traces": counts["versioned"],
            "mixed": counts["mixed"],
            "lowest": versions[0] if versions else None,
            "highest": versions[-1] if versions else None,
        },
        "suspicious": dict(suspicious),
        "suspicious_first": first,
        "provenance": {
            name: {
                "distinct": len(values),
                "values": [
                    {"value": json.loads(value), "traces": n}
                    for value, n in values.most_common(_VALUES_KEPT)
                ],
            }
            for name, values in provenance.items()
        },
        "expert_load": _load_by_layer(load, spec),
    }


def render(summary: dict[str, Any], console: Console) -> None:
    """Print a summary as tables that fit 80 columns."""
    s = summary
    table = _table("", "")
    table.show_header = False
    table.add_row("file", f"{printable(s['file'])}, {s['file_bytes']:,} bytes")
    table.add_row("traces", f"{s['traces']:,}")
    table.add_row(
        "tokens",
        f"{s['tokens']:,} = {s['prompt_tokens']:,} prompt + {s['response_tokens']:,} response",
    )
    shared = f", {s['shared_rows']:,} stored with an earlier trace" if s["shared_rows"] else ""
    table.add_row("rows", f"{s['rows']:,}, {_alert(s['missing_rows'])} missing{shared}")
    table.add_row(
        "routers",
        f"{s['moe_layers']} MoE layers of {s['num_layers']}, "
        f"top {s['top_k']} of {s['num_experts']} experts",
    )
    if s["bytes_per_token_per_layer"] is not None:
        table.add_row(
            "size", f"{s['bytes_per_token_per_layer']:.2f} bytes per token and MoE layer, all told"
        )
    if s["experts_bits_per_cell"] is not None:
        table.add_row(
            "experts",
            f"{s['experts_bits_per_cell']:.1f} bits per row and layer ({', '.join(s['codecs'])}); "
            f"{s['bound_bits_per_cell']:.1f} if all sets were equally likely",
        )
    weights = s["weight_versions"]
    if weights["traces"]:
        span = "no captured row"
        if weights["lowest"] is not None:
            span = f"versions {weights['lowest']} to {weights['highest']}"
        table.add_row(
            "weights",
            f"{span} in {weights['traces']:,} traces; {_alert(weights['mixed'])} mix versions",
        )
    table.add_row("suspicious", _alert(sum(s["suspicious"].values())) + " findings")
    for kind, text in s["suspicious_first"].items():
        table.add_row("", f"{s['suspicious'][kind]} {kind}; first: {printable(text)}")
    console.print(table)

    console.print("\n[bold]Columns[/]")
    table = _table("column", "of each", "codec", "traces", "bytes")
    for name, c in s["columns"].items():
        traces = sum(c["codecs"].values())
        codecs = ", ".join(sorted(c["codecs"]))
        cells = (printable(name), printable(c["kind"]), printable(codecs), f"{traces:,}")
        table.add_row(*cells, f"{c['bytes']:,}")
    console.print(table)

    table = _table("field", "value", "traces")
    for name, field in s["provenance"].items():
        shown = field["values"][:3]
        for i, item in enumerate(shown):
            value = item["value"] if isinstance(item["value"], str) else json.dumps(item["value"])
            table.add_row("" if i else printable(name), printable(value), f"{item['traces']:,}")
        if field["distinct"] > len(shown):
            table.add_row("", f"and {field['distinct'] - len(shown):,} other values", "")
    if table.row_count:
        console.print("\n[bold]Provenance[/]")
        console.print(table)

    table = _table("layer", "least used", "most used", "unused", "MaxVio")
    for layer in s["expert_load"]:
        load = layer["load"]
        total = sum(load)
        if not total:
            continue
        least, most = load.index(min(load)), load.index(max(load))
        table.add_row(
            str(layer["layer"]),
            f"{least}: {load[least] / total:.2%}",
            f"{most}: {load[most] / total:.2%}",
            str(layer["unused"]),
            f"{layer['max_vio']:.2f}",
        )
    if table.row_count:
        console.print("\n[bold]Expert load[/] (expert: its share of the layer's choices)")
        console.print(table)


def _count_provenance(counts: dict[str, Counter[str]], provenance: Provenance) -> None:
    for name, value in provenance.flat().items():
        counts[name][json.dumps(value, sort_keys=True)] += 1


def _load_by_layer(load: np.ndarray, spec: RouterSpec) -> list[dict[str, Any]]:
    layers = []
    for number, counts, vio in zip(spec.moe_layers, load, max_violation(load), strict=True):
        layers.append(
            {
                "layer": number,
                "max_vio": None if np.isnan(vio) else float(vio),
                "unused": int((counts == 0).sum()),
                "load": counts.tolist(),
            }
        )
    return layers


def _extremes(values: list[int]) -> list[int]:
    return [min(values), max(values)] if values else []


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _alert(count: int) -> str:
    return f"[bold red]{count:,}[/]" if count else "0"


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        right = name in ("traces", "bytes", "layer", "unused", "MaxVio")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table
