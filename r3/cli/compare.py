"""`r3 compare`: two captures of the same rollouts, or three, as one document; and as text.

Goes through the files rollout by rollout, so their size does not matter. What is compared is said
in r3.comparison, what it means in r3.verdict.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from r3.cli.text import printable
from r3.cli.versions import installed_versions
from r3.comparison import Comparison
from r3.errors import R3Error, SpecError, SuspiciousRoutingWarning, TraceError
from r3.identity import RolloutId
from r3.plain import plain
from r3.storage import ShardReader
from r3.trace import RoutingTrace
from r3.verdict import judge
from r3.worst import Texts

FORMAT = "r3-comparison/1"
_VALUES_KEPT = 10  # of one provenance field: seeds may differ in every trace
_EXAMPLES = 3

Progress = Callable[[int, int], None]  # rollouts read, of how many


def compare_files(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    c: str | os.PathLike[str] | None = None,
    *,
    ordered: bool = False,
    texts: Texts | None = None,
    on_progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """The comparison document of `.r3` files: plain values, None for what is not known.

    a: the engine's capture. b: the trainer's, routing natively, or whatever is compared with a.
    c: the trainer's under replay. Rollouts are matched by their id; those that are not in all
    files are counted. ordered, texts: see Comparison.

    Raises FormatError for files that cannot be read, SpecError for other routers, TraceError for
    other tokens and where there is nothing to compare.
    """
    with ShardReader(a) as first, ShardReader(b) as second:
        if c is None:
            return _compare([first, second], ordered, texts, on_progress)
        with ShardReader(c) as third:
            return _compare([first, second, third], ordered, texts, on_progress)


def _compare(
    shards: list[ShardReader], ordered: bool, texts: Texts | None, on_progress: Progress
) -> dict[str, Any]:
    a = shards[0]
    for shard in shards:
        if shard.spec != a.spec:
            raise SpecError(f"{shard.path}: {shard.spec}, expected {a.spec}, as in {a.path}")
        if not len(shard):
            raise TraceError(f"{shard.path}: no rollouts in the file, so nothing to compare")
        if ordered and not _keeps_order(shard):
            raise R3Error(
                f"--ordered: {shard.path} does not keep the order of experts; write it with "
                "ShardWriter(..., keep_order=True)"
            )
    comparison = Comparison(a.spec, ordered=ordered)
    files = [_FileCounts(shard) for shard in shards]
    lacking: dict[ShardReader, list[RolloutId]] = {shard: [] for shard in shards[1:]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SuspiciousRoutingWarning)  # `r3 inspect` tells of them
        for i, found in enumerate(_matched(shards)):
            on_progress(i, len(a))
            if isinstance(found, _Lacking):
                lacking[found.shard].append(found.rollout)
                continue
            for counts, trace in zip(files, found, strict=True):
                counts.add(trace)
            comparison.add(*found)
        on_progress(len(a), len(a))
        if not comparison.rollouts:
            other = next(shard for shard in shards[1:] if lacking[shard])
            raise TraceError(
                f"no rollout of {a.path} is in {other.path}: the first one is {lacking[other][0]} "
                f"here and {other.header(0).rollout_id} there; rollouts are matched by their id"
            )
        document = comparison.to_dict(texts)
    described = [*(f.describe() for f in files), None]
    document |= {
        "format": FORMAT,
        "files": dict(zip("abc", described, strict=False)),
        "pairs": {
            "rollouts": comparison.rollouts,
            "only_a": len(lacking[shards[1]]),
            "only_b": len(shards[1]) + len(lacking[shards[1]]) - len(a),
            "not_in_c": len(lacking[shards[2]]) if len(shards) > 2 else 0,
            "examples_only_a": [str(x) for x in lacking[shards[1]][:_EXAMPLES]],
            "tokens": comparison.tokens,
            "sampled_tokens": comparison.sampled_tokens,
        },
        "outside_topk": None,
        "steps": [],
        "alerts": [],
        "environment": installed_versions(),
        "created": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    document = plain(document)
    return document | {"verdict": judge(document)}


def _matched(shards: list[ShardReader]) -> Iterator[list[RoutingTrace] | _Lacking]:
    """For each rollout of the first file its trace in all of them, or which file lacks it."""
    a, others = shards[0], shards[1:]
    for i in range(len(a)):
        name = a.header(i).rollout_id
        # the first one refuses a rollout that it has twice
        without = next((shard for shard in shards if name not in shard), None)
        if without is not None:
            yield _Lacking(name, without)
        else:
            yield [a[i], *(shard.get(name) for shard in others)]


class _Lacking(NamedTuple):
    rollout: RolloutId
    shard: ShardReader


def _keeps_order(shard: ShardReader) -> bool:
    """Whether all its records say in which order ids were appended"""
    experts = (shard.header(i).column("routed_experts") for i in range(len(shard)))
    return all(x and x.layout and x.layout.codec.keeps_order for x in experts)


class _FileCounts:
    """Which traces of a file were compared, and what produced them."""

    def __init__(self, shard: ShardReader) -> None:
        self._path = shard.path
        self._rollouts = self._tokens = self._with_logprobs = 0
        self._fields: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, trace: RoutingTrace) -> None:
        self._rollouts += 1
        self._tokens += trace.num_tokens
        self._with_logprobs += trace.logprobs is not None
        for name, value in trace.provenance.flat().items():
            self._fields[name][json.dumps(value, sort_keys=True)] += 1

    def describe(self) -> dict[str, Any]:
        provenance = {
            name: [[json.loads(text), n] for text, n in values.most_common(_VALUES_KEPT)]
            for name, values in self._fields.items()
        }
        known = [str(provenance[k][0][0]) for k in _LABEL if k in provenance]
        return {
            "name": self._path.name,
            "label": " ".join(known) or self._path.stem,
            "rollouts": self._rollouts,
            "tokens": self._tokens,
            "with_logprobs": self._with_logprobs,
            "provenance": provenance,
        }


_LABEL = ("engine", "engine_version", "dtype", "device")


def token_texts(folder: Path) -> Texts:
    """What tokens say, by the tokenizer.json in `folder`. Raises R3Error."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        from r3.errors import MissingDependencyError

        raise MissingDependencyError(
            "--tokenizer needs tokenizers: pip install tokenizers"
        ) from None
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise R3Error(f"--tokenizer {folder}: no tokenizer.json there")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as e:  # tokenizers raises plain Exception
        raise R3Error(f"--tokenizer {file}: cannot be read: {e}") from None
    size = tokenizer.get_vocab_size()

    def texts(ids: Any) -> list[str]:
        known = [[i] if i < size else [] for i in ids]
        return list(tokenizer.decode_batch(known, skip_special_tokens=False))

    return texts


def render_verdict(document: dict[str, Any], console: Console) -> None:
    """Print what a document means."""
    colours = {"good": "green", "notice": "yellow", "bad": "bold red"}
    for finding in document["verdict"]["findings"]:
        level = finding["level"]
        look_at = f". Look at: {printable(finding['look_at'])}" if finding["look_at"] else ""
        console.print(
            f"[{colours[level]}]{level:>6}[/]  [bold]{printable(finding['title'])}[/]: "
            f"{printable(finding['text'])}{look_at}"
        )


def render(document: dict[str, Any], console: Console) -> None:
    """Print what matters of a document: the verdict, the figures, where they are high."""
    d = document
    render_verdict(document, console)
    console.print()
    sides = [s for s in ("native", "replay") if d["routing"][s]]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    pairs = d["pairs"]
    table.add_column(f"{pairs['rollouts']:,} rollouts, {pairs['tokens']:,} tokens")
    for side in sides:
        label = d["files"]["b" if side == "native" else "c"]["label"]
        table.add_column(side if len(sides) > 1 else printable(label), justify="right")
    for row in _rows(d, sides):
        table.add_row(*row)
    console.print(table)
    for line in _places(d):
        console.print(line)


_ROUTING_ROWS = {
    "cells (token, layer) routed differently": "cell_disagreement",
    "experts that differ": "expert_disagreement",
    "tokens with such a layer": "token_disagreement",
    "cells whose first expert differs": "top1_changed",
}
_MISMATCH_ROWS = {
    "KL k3, sampled tokens": ("kl_k3", "{:.3e}"),
    "|log-ratio| 0.99 quantile": ("abs_logratio_p99", "{:.5f}"),
    "|log-ratio| maximum": ("abs_logratio_max", "{:.5f}"),
    "tokens with a ratio beyond 2": ("extreme_2", "{:.4%}"),
    "effective sample size, tokens": ("ess", "{:.4f}"),
}


def _rows(d: dict[str, Any], sides: list[str]) -> Iterator[list[str]]:
    for text, key in _ROUTING_ROWS.items():
        if key == "top1_changed" and d["routing"]["native"][key] is None:
            continue
        yield [text, *(_shown(d["routing"][s][key], "{:.3%}") for s in sides)]
    if not d["mismatch"]["native"]:
        return
    for text, (key, form) in _MISMATCH_ROWS.items():
        blocks = [d["mismatch"][s] for s in sides]
        yield [text, *(_shown(b and b["metrics"][key], form) for b in blocks)]


def _places(d: dict[str, Any]) -> Iterator[str]:
    layers = d["routing"]["native"]["layers"]
    worst = sorted(layers, key=lambda x: -(x["cell_disagreement"] or 0))[:5]
    shown = ", ".join(f"{x['layer']} {_shown(x['cell_disagreement'], '{:.2%}')}" for x in worst)
    yield f"\nlayers that differ most: {shown}"
    for entry in d["worst"]["rollouts"][:3]:
        figures = (
            f"cells {_shown(entry['cell_disagreement'], '{:.2%}')}",
            f"KL k3 {_shown(entry['kl_k3_native'], '{:.2e}')}",
            f"largest |log-ratio| {_shown(entry['abs_logratio_max_native'], '{:.4f}')}",
        )
        yield f"rollout {printable(entry['id'])}: {', '.join(figures)}"
    for entry in d["worst"]["tokens"][:5]:
        said = f" {entry['text']!r}" if entry["text"] else ""
        yield printable(
            f"token {entry['position']} of {entry['id']}: {entry['token_id']}{said}, log p "
            f"{entry['sampler_logprob']:.4f} and {entry['trainer_logprob']:.4f}, "
            f"{entry['layers_differing']} layers differ in its pass"
        )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
