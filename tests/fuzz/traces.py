"""Traces and shards for the campaigns: every feature of the format in few bytes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from r3 import Column, FormatError, Provenance, RolloutId, RouterSpec, RoutingTrace
from r3.columns import text_column
from r3.storage import ShardReader, ShardWriter

from .campaign import Finding, scratch

SPECS = (
    RouterSpec(8, 2, (0, 1), 2),
    RouterSpec(60, 4, (1, 2, 3), 4),
    RouterSpec(300, 5, (0, 2, 3), 4, "sigmoid", 4, 2),
    RouterSpec(512, 22, (0, 1), 2),
)


def make_ids(spec: RouterSpec, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Random expert ids [rows, MoE layers, top_k]."""
    scores = rng.random((rows, len(spec.moe_layers), spec.num_experts))
    return scores.argsort(axis=-1)[..., : spec.top_k]


def make_trace(
    spec: RouterSpec,
    seed: int,
    tokens: int,
    *,
    prompt: tuple[np.ndarray, np.ndarray] | None = None,
    missing: float = 0.0,
    more: bool = False,
    payload: int = 0,
) -> RoutingTrace:
    """A random trace, all of it by its seed.

    prompt: tokens and ids to begin with; a few cells of the ids are changed. missing: share of the
    rows behind the prompt that were not captured. more: with further columns. payload: bytes of a
    column that does not compress.
    """
    rng = np.random.default_rng(seed)
    token_ids, ids = rng.integers(0, 99999, tokens), make_ids(spec, tokens - 1, rng)
    valid = rng.random(tokens - 1) >= missing
    if prompt is not None:
        n = min(len(prompt[0]), tokens - 1)
        other = ids[:n].copy()
        token_ids[:n], ids[:n], valid[:n] = prompt[0][:n], prompt[1][:n], True
        changed = rng.random(ids[:n].shape[:2]) < 0.01
        ids[:n][changed] = other[changed]
    prompt_len = min(tokens, 3 if prompt is None else len(prompt[0]))
    extra = {}
    if more:
        counts = np.where(np.arange(tokens) >= prompt_len, 1, 0).astype(np.uint32)
        rewards = np.full(tokens, np.nan, np.float32)
        rewards[-1] = 0.5
        extra = {
            "rewards": Column(rewards, "token"),
            "kept_counts": Column(counts, "token"),
            "kept_ids": Column(token_ids[prompt_len:].astype(np.int32), "rollout"),
            "tags": text_column(["a", "b\u00e9"]),
            "hidden": Column(rng.random((tokens - 1, 2)).astype(np.float16), "row", 3),
            "flags": Column(rng.random(tokens) < 0.1, "token"),
            "nothing": Column(np.empty((0, 3), np.int64), "rollout"),
        }
    if payload:
        extra["payload"] = Column(rng.integers(0, 256, payload).astype(np.uint8), "rollout")
    return RoutingTrace.build(
        spec=spec,
        token_ids=token_ids,
        routed_experts=ids,
        prompt_len=prompt_len,
        valid=valid,
        logprobs=-rng.random(tokens - prompt_len) if more else None,
        weight_versions=7 if more else None,
        rollout_id=RolloutId("fuzz", str(seed)),
        provenance=Provenance(engine="vllm", sampling={"top_p": 0.9}) if more else None,
        extra=extra,
    )


def make_traces(spec: RouterSpec, seed: int, prompt_len: int = 150) -> list[RoutingTrace]:
    """Seven traces: plain, one token only, with gaps, with further columns, and a group of three
    whose rows are shared."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 99999, prompt_len), make_ids(spec, prompt_len, rng)
    first = seed * 1000
    return [
        make_trace(spec, first, 12),
        make_trace(spec, first + 1, prompt_len + 8, prompt=prompt),
        make_trace(spec, first + 2, 1),
        make_trace(spec, first + 3, 20, missing=0.3),
        make_trace(spec, first + 4, prompt_len + 6, prompt=prompt, missing=0.3),
        make_trace(spec, first + 5, 15, more=True),
        make_trace(spec, first + 6, prompt_len + 3, prompt=prompt, more=True),
    ]


@dataclass(frozen=True)
class Shard:
    """A whole closed shard. ends: where its header and each record and index in it ends; records:
    the end of each record."""

    spec: RouterSpec
    keep_order: bool
    traces: tuple[RoutingTrace, ...]
    data: bytes
    ends: tuple[int, ...]
    records: tuple[int, ...]

    @property
    def content(self) -> list[tuple[str, str]]:
        return [(str(t.rollout_id), t.digest) for t in self.traces]


@cache
def make_shard(
    spec: RouterSpec, seed: int, keep_order: bool = False, flushes: tuple[int, ...] = (2, 3, 5)
) -> Shard:
    """Seven records, and an index behind each of those in `flushes` and at the end."""
    path = scratch() / f"made-{seed}.r3"
    path.unlink(missing_ok=True)
    traces, ends, records = make_traces(spec, seed), [], []
    with ShardWriter(path, spec, durable=True, keep_order=keep_order) as writer:
        ends.append(writer.file_size)
        for i, trace in enumerate(traces):
            writer.append(trace)
            ends.append(writer.file_size)
            records.append(writer.file_size)
            if i in flushes:
                writer.flush()
                ends.append(writer.file_size)
    data = path.read_bytes()
    path.unlink()
    ends.append(len(data))
    return Shard(spec, keep_order, tuple(traces), data, tuple(ends), tuple(records))


def all_shards() -> list[Shard]:
    """A shard for each of the SPECS, with and without the order of ids."""
    return [make_shard(s, 2 * i + k, bool(k)) for i, s in enumerate(SPECS) for k in (0, 1)]


def read_all(path: Path) -> list[tuple[str, str]]:
    """Rollout id and digest of every record, all of it read; under `strict_warnings`, a torn tail
    raises."""
    with ShardReader(path) as reader:
        names = [str(name) for name in reader.rollout_ids]
        traces = list(reader)
    expect([str(t.rollout_id) for t in traces] == names, "records and headers have other names")
    return [(str(t.rollout_id), t.digest) for t in traces]


def read_torn(path: Path) -> tuple[list[tuple[str, str]], str | None]:
    """The same of a file that may be torn, and what `ShardReader.torn` says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ShardReader(path) as reader:
            found = [(str(t.rollout_id), t.digest) for t in reader]
            torn = reader.torn
    warned = any("no whole record" in str(w.message) for w in caught)
    expect(warned == (torn is not None), f"torn is {torn!r}, and warned is {warned}")
    return found, torn


def refused(path: Path) -> bool:
    """Whether a reader says that the file is damaged."""
    try:
        read_torn(path)
    except FormatError:
        return True
    return False


def expect(condition: bool, text: str) -> None:
    if not condition:
        raise Finding(text)
