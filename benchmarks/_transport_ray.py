"""What a batch costs on its way through Ray's object store, as figures of their own.

- slice: bytes that another node pulls for 1 of 8 ranks with an eighth of the layers, over all bytes
  of the batch (`ray_slice_fraction`); the same with the log-probabilities, which the last stage
  wants, and with nothing said about the groups of layers. Counted by the object store of the second
  node of a Ray of two.
- driver: private memory and references that a handle adds to the driver, at two lengths of
  rollouts.
- steps: what is left, in the driver, the owner, the trainer and the store, after that many steps of
  putting, fetching in an actor and freeing.
- time: milliseconds to put a batch and to fetch an eighth of its layers, checksums and checks
  included; of the fetch, what Ray takes; and to put the whole batch as one object and get it, as is
  done otherwise, without any check.

    python benchmarks/_transport_ray.py

prints one line of JSON. 48 layers of 8 of 128 experts.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from r3 import RolloutId, RouterSpec, RoutingBatch
from r3.storage.ray_store import BatchHandle, put_batch

SPEC = RouterSpec(num_experts=128, top_k=8, moe_layers=tuple(range(48)), num_layers=48)
EIGHTHS = [range(first, first + 6) for first in range(0, 48, 6)]
_STORE = 512 << 20


def make_batch(tokens: int, sequences: int) -> RoutingBatch:
    """2,048 random rows, again and again; one weight version."""
    rng = np.random.default_rng(0)
    scores = rng.random((min(tokens, 2048), 48, 128), np.float32)
    rows = np.argpartition(scores, 7, axis=-1)[..., :8].astype(np.uint8)
    ids = np.tile(rows, (-(-tokens // len(rows)), 1, 1))[:tokens]
    cu_seqlens = np.linspace(0, tokens, sequences + 1).astype(np.int64)
    valid = np.ones(tokens, bool)
    valid[cu_seqlens[1:] - 1] = False
    ids[~valid] = 0
    return RoutingBatch(
        spec=SPEC,
        rollout_ids=tuple(RolloutId("bench", sample=i) for i in range(sequences)),
        cu_seqlens=cu_seqlens,
        prompt_lens=np.zeros(sequences, np.int64),
        token_ids=rng.integers(0, 150_000, tokens).astype(np.int32),
        routed_experts=ids,
        valid=valid,
        logprobs=-rng.random(tokens, np.float32),
        weight_versions=np.where(valid, 1, -1),
    )


class Actor:
    """Puts or fetches, and keeps nothing."""

    def put(self, tokens: int, sequences: int, **groups: Any) -> BatchHandle:
        return put_batch(make_batch(tokens, sequences), **groups)

    def fetch(self, handle: BatchHandle, **part: Any) -> int:
        return handle.fetch(**part).num_tokens

    def references(self) -> int:
        return references()


def references() -> int:
    """Of this process, to objects of its own and of others."""
    from ray._private.worker import global_worker

    gc.collect()
    return len(global_worker.core_worker.get_all_reference_counts())


def private_bytes() -> int:
    """Memory of this process that is its own, without files and shared memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident, shared = file.read().split()[1:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


def store_stats(node: dict[str, Any]) -> Any:
    """Of the object store of a node."""
    from ray._private.internal_api import node_stats

    place = node["NodeManagerAddress"], node["NodeManagerPort"]
    return node_stats(*place, include_memory_info=False).store_stats


@contextmanager
def cluster(nodes: int) -> Iterator[list[dict[str, Any]]]:
    """A Ray of so many nodes on this machine; the driver is on the first."""
    import logging

    import ray
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        for i in range(nodes):
            made.add_node(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=_STORE,
                resources={f"node{i}": 10},
            )
        ray.init(address=made.address, log_to_driver=False, logging_level=logging.ERROR)
        yield sorted(ray.nodes(), key=lambda node: min(r for r in node["Resources"] if "node" in r))
    finally:
        ray.shutdown()
        made.shutdown()


def actor(node: int = 0) -> Any:
    import ray

    return ray.remote(num_cpus=0, resources={f"node{node}": 1})(Actor).remote()


def slice_fractions(tokens: int = 65_536, sequences: int = 16) -> dict[str, Any]:
    """See `slice` above."""
    import ray

    found: dict[str, Any] = {"ray_tokens": tokens}
    with cluster(2) as (near, far):
        rollouts, trainer = actor(0), actor(1)
        for name, groups, logprobs in (
            ("ray_slice_fraction", {"layer_groups": EIGHTHS}, False),
            ("ray_slice_fraction_logprobs", {"layer_groups": EIGHTHS}, True),
            ("ray_slice_fraction_no_groups", {}, False),
        ):
            before = [store_stats(node).cumulative_created_bytes for node in (near, far)]
            handle = ray.get(rollouts.put.remote(tokens, sequences, **groups))
            count = ray.get(trainer.fetch.remote(handle, layers=EIGHTHS[7], logprobs=logprobs))
            after = [store_stats(node).cumulative_created_bytes for node in (near, far)]
            put, pulled = (b - a for a, b in zip(before, after, strict=True))
            assert count == tokens
            found[name] = round(pulled / put, 4)
            if name == "ray_slice_fraction":
                found |= {"ray_batch_bytes": put, "ray_slice_bytes": pulled}
            handle.free()
    return found


def driver_growth(lengths: tuple[int, int] = (1_000, 100_000)) -> dict[str, Any]:
    """See `driver` above; each length in tokens of a rollout, 8 of them."""
    import ray

    found: dict[str, Any] = {"ray_driver_lengths": list(lengths)}
    grown, held, sizes = [], [], []
    with cluster(1):
        rollouts = actor()
        ray.get(rollouts.put.remote(100, 8)).free()
        for length in lengths:
            before = private_bytes(), references()
            handle = ray.get(rollouts.put.remote(8 * length, 8, layer_groups=EIGHTHS))
            grown.append(private_bytes() - before[0])
            held.append(references() - before[1])
            handle.free()
            sizes.append(handle.tokens * 48 * 8)
    return found | {
        "ray_driver_bytes": grown,
        "ray_driver_references": held,
        "ray_driver_routing_bytes": sizes,
    }


def leaks(steps: int = 1000, tokens: int = 512) -> dict[str, Any]:
    """See `steps` above."""
    import ray

    with cluster(1) as (node,):
        rollouts, trainer = actor(), actor()

        def state() -> list[int]:
            stats = store_stats(node)
            others = ray.get([a.references.remote() for a in (rollouts, trainer)])
            return [references(), *others, stats.num_local_objects, stats.object_store_bytes_used]

        def step() -> None:
            handle = ray.get(rollouts.put.remote(tokens, 4, layer_groups=EIGHTHS))
            with handle:
                ray.get(trainer.fetch.remote(handle, layers=EIGHTHS[0]))

        step()
        before, memory, start = _settled(state), private_bytes(), time.perf_counter()
        for _ in range(steps):
            step()
        took = time.perf_counter() - start
        after = _settled(state)
        names = ("driver", "owner", "trainer", "store_objects", "store_bytes")
        left = {f"ray_left_{n}": b - a for n, a, b in zip(names, before, after, strict=True)}
        return left | {
            "ray_steps": steps,
            "ray_left_driver_bytes": private_bytes() - memory,
            "ray_step_ms": round(took / steps * 1e3, 1),
        }


def _settled(state: Callable[[], list[int]]) -> list[int]:
    """Ray frees in the background, every second: what is there when that is over"""
    found = state()
    for _ in range(20):
        time.sleep(1.5)
        if (now := state()) == found:
            break
        found = now
    return found


def times(tokens: int = 100_000, sequences: int = 16, repeats: int = 7) -> dict[str, Any]:
    """See `time` above."""
    import ray

    batch = make_batch(tokens, sequences)
    spent: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = call()
        spent.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
        return found

    def round_trips() -> None:
        groups = {"layer_groups": EIGHTHS, "sequence_groups": [slice(None)]}
        with timed("put", lambda: put_batch(batch, **groups)) as handle:
            timed("fetch", lambda: handle.fetch(layers=EIGHTHS[2]))
            index = ray.get(handle._ref)
            timed("fetch_ray", lambda: handle._get(index, [0, 4]))
        with timed("put_by_layer", lambda: put_batch(batch)) as handle:
            timed("fetch_by_layer", lambda: handle.fetch(layers=EIGHTHS[2]))
        whole = timed("put_whole", lambda: ray.put(batch))
        timed("get_whole", lambda: ray.get(whole))

    with cluster(1):
        for _ in range(repeats):
            round_trips()
            time.sleep(1.5)  # Ray frees every second
    return {f"ray_{name}_ms": round(statistics.median(ms), 2) for name, ms in spent.items()} | {
        "ray_time_tokens": tokens
    }


def measure() -> dict[str, Any]:
    """All of it; about two minutes."""
    return slice_fractions() | driver_growth() | leaks() | times()


if __name__ == "__main__":
    print(json.dumps(measure()))
