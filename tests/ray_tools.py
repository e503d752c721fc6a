"""Batches to send through Ray, actors that send and fetch them, and what Ray says of its objects.

The actors' methods return plain values that say what they saw: the arrays stay where they are.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3 import RolloutId, RouterSpec, RoutingBatch, RoutingTrace
from r3.errors import R3Error, TransportError
from r3.storage import ShardReader, ShardWriter
from r3.storage.ray_store import BatchHandle, put_batch

SMALL = RouterSpec(num_experts=8, top_k=2, moe_layers=(1, 2, 4), num_layers=5)
WIDE = RouterSpec(num_experts=300, top_k=5, moe_layers=(0, 3, 4, 7), num_layers=8)
LARGE = RouterSpec(num_experts=128, top_k=8, moe_layers=tuple(range(48)), num_layers=48)
EIGHTHS = [range(first, first + 6) for first in range(0, 48, 6)]  # of the layers of LARGE
COLUMNS = [
    f.name for f in dataclasses.fields(RoutingBatch) if f.name not in ("spec", "rollout_ids")
]


def make_trace(
    n: int,
    spec: RouterSpec = SMALL,
    *,
    seed: int = 0,
    missing: float = 0.0,
    logprobs: bool = True,
    versions: int = 3,
    name: RolloutId | None = None,
) -> RoutingTrace:
    """Random tokens, sets and columns; versions: so many different ones, 0 for none."""
    rng = np.random.default_rng(seed)
    scores = rng.random((n - 1, len(spec.moe_layers), spec.num_experts))
    prompt_len = int(rng.integers(0, n + 1))
    return RoutingTrace.build(
        spec=spec,
        token_ids=rng.integers(0, 2**31, n),
        routed_experts=scores.argsort(axis=-1)[..., : spec.top_k],
        prompt_len=prompt_len,
        valid=rng.random(n - 1) >= missing,
        logprobs=-rng.random(n - prompt_len) if logprobs else None,
        weight_versions=2**40 + rng.integers(0, versions, n - 1) if versions else None,
        rollout_id=name or RolloutId("run", sample=seed),
    )


def make_batch(*lengths: int, spec: RouterSpec = SMALL, **options: Any) -> RoutingBatch:
    return RoutingBatch.from_traces(
        make_trace(n, spec, seed=i, **options) for i, n in enumerate(lengths)
    )


def large_batch(tokens: int, sequences: int, seed: int = 0) -> RoutingBatch:
    """8 of 128 experts in 48 layers, of one weight version; 2,048 random rows, again and again."""
    rng = np.random.default_rng(seed)
    scores = rng.random((min(tokens, 2048), 48, 128), np.float32)
    rows = scores.argpartition(7, axis=-1)[..., :8].astype(np.uint8)
    ids = np.tile(rows, (-(-tokens // len(rows)), 1, 1))[:tokens]
    cu_seqlens = np.linspace(0, tokens, sequences + 1).astype(np.int64)
    valid = np.ones(tokens, bool)
    valid[cu_seqlens[1:] - 1] = False
    ids[~valid] = 0
    return RoutingBatch(
        spec=LARGE,
        rollout_ids=tuple(RolloutId("run", sample=i) for i in range(sequences)),
        cu_seqlens=cu_seqlens,
        prompt_lens=np.zeros(sequences, np.int64),
        token_ids=rng.integers(0, 150_000, tokens).astype(np.int32),
        routed_experts=ids,
        valid=valid,
        logprobs=-rng.random(tokens, np.float32),
        weight_versions=np.where(valid, 17, -1),
    )


def stored_batch(path: Path) -> RoutingBatch:
    with ShardReader(path) as shard:
        return RoutingBatch.from_traces(shard)


def shard_of(folder: Path) -> tuple[RoutingBatch, Path]:
    """Two rollouts, 11 tokens, and the file that they are in"""
    traces = [make_trace(6, seed=1), make_trace(5, seed=2)]
    with ShardWriter(folder / "routing.r3", SMALL) as writer:
        for trace in traces:
            writer.append(trace)
    return RoutingBatch.from_traces(traces), folder / "routing.r3"


def part_of(
    batch: RoutingBatch, layers: list[int], sequences: range, logprobs: bool = True
) -> RoutingBatch:
    """By numpy: those layers of those sequences."""
    start, stop = batch.cu_seqlens[sequences.start], batch.cu_seqlens[sequences.stop]
    axis = [batch.spec.moe_layers.index(layer) for layer in sorted(layers)]
    per_token = {
        name: getattr(batch, name)[start:stop]
        for name in ("token_ids", "valid", "logprobs", "weight_versions")
    }
    if not logprobs:
        per_token["logprobs"] = np.full(stop - start, np.nan, np.float32)
    return RoutingBatch(
        spec=dataclasses.replace(batch.spec, moe_layers=tuple(sorted(layers))),
        rollout_ids=batch.rollout_ids[sequences.start : sequences.stop],
        cu_seqlens=batch.cu_seqlens[sequences.start : sequences.stop + 1] - start,
        prompt_lens=batch.prompt_lens[sequences.start : sequences.stop],
        routed_experts=batch.routed_experts[start:stop][:, axis],
        **per_token,
    )


def assert_equal(found: RoutingBatch, expected: RoutingBatch, sets: bool = False) -> None:
    """The same, bit for bit; sets: in any order of the experts of a row."""
    assert (found.spec, found.rollout_ids) == (expected.spec, expected.rollout_ids)
    for name in COLUMNS:
        a, b = getattr(found, name), getattr(expected, name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if sets and name == "routed_experts":
            a, b = np.sort(a), np.sort(b)
        assert a.tobytes() == b.tobytes(), name


def refused(call: Any, *words: str, error: type[R3Error] = TransportError) -> None:
    """The call fails with one message that says all the words, in another process too."""
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


# --- what Ray says


@contextmanager
def environment() -> Iterator[None]:
    """In which a Ray of one's own is started: its actors find the modules beside this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


def references() -> int:
    """Of this process, to objects of its own and of others."""
    from ray._private.worker import global_worker

    gc.collect()
    return len(global_worker.core_worker.get_all_reference_counts())


def store_stats(node: dict[str, Any] | None = None) -> Any:
    """Of a node's object store: object_store_bytes_used, num_local_objects,
    cumulative_created_bytes, which counts what is pulled from other nodes, too."""
    import ray
    from ray._private.internal_api import node_stats

    node = node or ray.nodes()[0]
    reply = node_stats(
        node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
    )
    return reply.store_stats


def settles(value: Callable[[], Any], expected: Any, seconds: float = 20) -> Any:
    """What `value()` is when it is `expected`, or at last: Ray frees objects in the background."""
    end = time.monotonic() + seconds
    while (found := value()) != expected and time.monotonic() < end:
        time.sleep(0.05)
    return found


# --- actors


class Rollouts:
    """Where rollouts are made: puts batches and keeps nothing."""

    def put(self, make: Callable[..., RoutingBatch], *args: Any, **options: Any) -> BatchHandle:
        return put_batch(make(*args), **options)

    def references(self) -> int:
        return references()

    def pid(self) -> int:
        return os.getpid()


class Trainer:
    """A rank: fetches its part and says what it is."""

    def fetch(self, handle: BatchHandle, **part: Any) -> RoutingBatch:
        return handle.fetch(**part)

    def sums(self, handle: BatchHandle, **part: Any) -> tuple[int, int]:
        batch = handle.fetch(**part)
        return batch.num_tokens, int(batch.routed_experts.sum(dtype=np.int64))

    def keep(self, handle: BatchHandle) -> None:
        self.kept = handle.fetch(logprobs=True)

    def kept_batch(self) -> RoutingBatch:
        return self.kept

    def drop(self) -> None:
        del self.kept

    def references(self) -> int:
        return references()

    def peak_growth(self, handle: BatchHandle, **part: Any) -> tuple[int, int]:
        """Private memory that a fetch adds while its result is held, and the result's bytes."""
        handle.fetch(**part)  # what is loaded the first time
        before = private_bytes()
        batch = handle.fetch(**part)
        grown = private_bytes() - before
        return grown, batch.routed_experts.nbytes


def private_bytes() -> int:
    """Memory of this process that is its own, without mapped files and shared memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident, shared = file.read().split()[1:3]
    return (int(resident) - int(shared)) * resource.getpagesize()
