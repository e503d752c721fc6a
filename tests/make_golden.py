"""Writes tests/data/golden_v2: small files of every kind, which later versions have to read.

    .venv/bin/python tests/make_golden.py

Only for a new format version: a change of these files is a change of the format, and files that
were written before have to be read all the same. tests/test_golden.py reads them. Their content is
made from counters and a little arithmetic, so that it depends on no version of numpy.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import storage_tools as tools
from r3 import Column, Provenance, RolloutId, RouterSpec, RoutingBatch, RoutingTrace
from r3.columns import text_column
from r3.storage import ShardWriter
from r3.storage.batch_file import save_batch

FOLDER = tools.ROOT / "tests" / "data" / "golden_v2"


def numbers(shape: tuple[int, ...], limit: int, seed: int) -> np.ndarray:
    """int64 [shape] below limit, by multiplication and shifts."""
    x = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64) + np.uint64(seed * 1_000_003 + 1)
    for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9):
        x = (x * np.uint64(factor)) ^ (x >> np.uint64(29))
    return ((x >> np.uint64(11)) % np.uint64(limit)).astype(np.int64).reshape(shape)


def expert_ids(spec: RouterSpec, rows: int, seed: int) -> np.ndarray:
    """[rows, MoE layers, top_k], different in each row and layer, in no order."""
    shape = (rows, len(spec.moe_layers), spec.top_k)
    ids = np.sort(numbers(shape, spec.num_experts - spec.top_k + 1, seed), axis=-1)
    ids += np.arange(spec.top_k)
    order = numbers(shape, 1 << 30, seed + 1).argsort(axis=-1, kind="stable")
    return np.take_along_axis(ids, order, axis=-1)


def make(spec: RouterSpec, n: int, seed: int, **changes: Any) -> RoutingTrace:
    values = {
        "spec": spec,
        "token_ids": numbers((n,), 32_000, seed + 2),
        "routed_experts": expert_ids(spec, n - 1, seed),
        "prompt_len": n // 2,
        "rollout_id": RolloutId("golden", str(seed)),
        "provenance": Provenance(engine="vllm", engine_version="0.32.0"),
    }
    return RoutingTrace.build(**(values | changes))


def everything(spec: RouterSpec, n: int, seed: int) -> RoutingTrace:
    """A trace with all known columns and two unknown ones."""
    prompt = n // 2
    valid = numbers((n - 1,), 5, seed + 3) > 0
    tokens = numbers((n,), 32_000, seed + 2)
    segments = np.where(np.arange(n) < prompt, 0, 1 + (numbers((n,), 4, seed + 4) == 0))
    sampled = segments == 1
    counts = np.where(sampled, numbers((n,), 3, seed + 5), 0)
    kept = np.concatenate([t + np.arange(c) for t, c in zip(tokens, counts, strict=True)])
    quarter = numbers((n,), 40, seed + 6) / 4
    columns = {
        "segments": Column(segments.astype(np.uint8), "token"),
        "turns": Column((np.arange(n) // 9).astype(np.uint16), "token"),
        "rewards": Column(np.where(np.arange(n) < n - 1, np.nan, 1.5).astype(np.float32), "token"),
        "kept_counts": Column(counts.astype(np.uint32), "token"),
        "kept_ids": Column(kept.astype(np.int32), "rollout"),
        "tags": text_column(["math", "größe"]),
        "later": Column(quarter.astype(np.float16).reshape(n, 1), "token", 3),
        "names": Column(np.arange(6, dtype=np.int64).reshape(2, 3), "rollout", 9),
    }
    return make(
        spec,
        n,
        seed,
        token_ids=tokens,
        prompt_len=prompt,
        valid=valid,
        logprobs=np.where(sampled, -quarter, np.nan),
        weight_versions=2**40 + np.arange(n - 1) // 7,
        provenance=Provenance(engine="vllm", sampling={"top_p": 0.5}, extra={"k": [1, None, "é"]}),
        extra=columns,
    )


def family(spec: RouterSpec, seed: int) -> list[RoutingTrace]:
    """A prompt that three rollouts share, the third with other experts here and there, and a
    request that goes on with the first."""
    base = make(spec, 150, seed)
    traces = [base]
    for i, n in ((1, 140), (2, 150), (3, 230)):
        rows = 149 if i == 3 else 100
        tokens = numbers((n,), 32_000, seed + 10 * i)
        tokens[: rows + 1] = base.token_ids[: rows + 1]
        ids = expert_ids(spec, n - 1, seed + 10 * i)
        changed = ids[:rows].copy()
        ids[:rows] = base.routed_experts[:rows]
        if i == 2:
            cells = numbers(ids[:rows].shape[:2], 20, seed + 7) == 0
            ids[:rows][cells] = changed[cells]
        name = RolloutId("golden", str(seed), sample=i)
        traces.append(make(spec, n, seed, token_ids=tokens, routed_experts=ids, rollout_id=name))
    return traces


def shards() -> Iterator[tuple[str, list[RoutingTrace], bool, bool]]:
    """Name, traces, keep_order, and whether an index is written after each trace."""
    small = RouterSpec(64, 8, (1, 2, 3), 4)
    yield "enum", [make(small, n, n) for n in (1, 2, 30)], False, False
    narrow = RouterSpec(64, 8, (1,), 2)
    yield "enum_ordered", [make(narrow, 30, 1), *family(narrow, 2)], True, False
    yield "wide_ids", [make(RouterSpec(300, 4, (0, 2), 3, "sigmoid", 4, 2), 40, 1)], False, False
    yield "wide_ranks", [make(RouterSpec(512, 22, (0, 1), 2), 20, 1)], False, False
    yield "many_experts", [make(RouterSpec(20_000, 6, (0,), 1), 20, 1)], False, False
    runs = np.arange(4200) // 100
    yield "two_chunks", [make(RouterSpec(8, 2, (0,), 1), 4200, 1, token_ids=runs)], False, False
    missing = numbers((59,), 4, 8) > 0
    masked = [make(small, 60, 1, valid=missing), make(small, 9, 2, valid=np.zeros(8, bool))]
    yield "masks", masked, False, False
    yield "columns", [everything(small, 40, 1), everything(small, 41, 2)], False, False
    yield "shared", family(RouterSpec(64, 8, (1, 2), 3), 1), False, False
    yield "indexes", [make(RouterSpec(8, 2, (0,), 1), 5, i) for i in range(12)], False, True


def batch() -> RoutingBatch:
    small = RouterSpec(64, 8, (1, 2, 3), 4)
    return RoutingBatch.from_traces([make(small, n, n) for n in (5, 12)])


def write(folder: Path) -> None:
    """All files, and what they hold: expected.json, and expected.npz with the ids of short traces
    as they are read, in the order that is kept (a digest does not tell that)."""
    expected: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, traces, keep_order, flush in shards():
        salt = zlib.crc32(name.encode()).to_bytes(4, "little") * 2
        path = folder / f"{name}.r3"
        with tools.salted(salt), mock.patch("r3.storage.writer.os.fsync"):  # for speed
            writer = ShardWriter(path, traces[0].spec, durable=flush, keep_order=keep_order)
        with writer, mock.patch("r3.storage.writer.os.fsync"):
            for i, trace in enumerate(traces):
                writer.append(trace)
                writer.flush()
                if trace.num_rows < 60:
                    arrays[f"{name}.{i}"] = tools.as_stored(trace, keep_order)
        expected[name] = [
            {
                "rollout_id": str(trace.rollout_id),
                "digest": trace.digest,
                "ids": hashlib.sha256(tools.as_stored(trace, keep_order).tobytes()).hexdigest(),
                "prompt_len": trace.prompt_len,
                "provenance": trace.provenance.to_dict(),
                "columns": {
                    c: [column.align, column.version, column.data.dtype.str, column.data.shape]
                    for c, column in trace.columns.items()
                },
            }
            for trace in traces
        ]
    save_batch(batch(), folder / "batch.safetensors")
    lines = [
        f"{json.dumps(name)}: [\n  " + ",\n  ".join(map(json.dumps, traces)) + "]"
        for name, traces in expected.items()
    ]
    (folder / "expected.json").write_text("{" + ",\n".join(lines) + "}\n")
    np.savez_compressed(folder / "expected.npz", **arrays)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write(FOLDER)
    for path in sorted(FOLDER.iterdir()):
        print(f"{path.stat().st_size:7} {path.name}")
