"""Batches through two nodes of a real Ray: what goes over, and what is left when one side dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from r3.errors import TransportError
from r3.storage.ray_store import BatchHandle
from ray_tools import (
    EIGHTHS,
    Rollouts,
    Trainer,
    assert_equal,
    environment,
    large_batch,
    part_of,
    refused,
    settles,
    shard_of,
    store_stats,
    stored_batch,
)

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
MiB = 1 << 20


class Nodes(NamedTuple):
    """here: of the driver and the trainer. there: where rollouts are made"""

    cluster: Any
    here: dict[str, Any]
    there: dict[str, Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    with environment():
        made = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "object_store_memory": 200 * MiB,
                "include_dashboard": False,
            },
        )
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def nodes(cluster: Any) -> Iterator[Nodes]:
    """One that is there for a test, beside that of the driver"""
    node = cluster.add_node(
        num_cpus=1, object_store_memory=200 * MiB, resources={"there": 10}, include_dashboard=False
    )
    alive = [n for n in ray.nodes() if n["Alive"]]
    there = next(n for n in alive if "there" in n["Resources"])
    here = next(n for n in alive if "there" not in n["Resources"])
    yield Nodes(cluster, here, there)
    if node in cluster.list_all_nodes():
        cluster.remove_node(node, allow_graceful=True)


@pytest.fixture
def rollouts(nodes: Nodes) -> Any:
    return ray.remote(num_cpus=0, resources={"there": 1})(Rollouts).remote()


@pytest.fixture
def trainer(nodes: Nodes) -> Iterator[Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(nodes.here["NodeID"], soft=False)
    actor = ray.remote(num_cpus=0, scheduling_strategy=place)(Trainer).remote()
    yield actor
    ray.kill(actor)


def pulled(node: dict[str, Any]) -> int:
    """Bytes of all objects that were ever made or pulled there"""
    return store_stats(node).cumulative_created_bytes


def test_another_node_pulls_its_part_only(nodes: Nodes, rollouts: Any, trainer: Any) -> None:
    batch, halves = large_batch(40_000, 8), [slice(0, 4), slice(4, 8)]
    for groups, layers, sequences, logprobs, most in (
        ({"layer_groups": EIGHTHS}, EIGHTHS[3], slice(0, 8), False, 0.135),
        ({"layer_groups": EIGHTHS}, EIGHTHS[7], slice(0, 8), True, 0.145),
        ({}, EIGHTHS[3], slice(0, 8), False, 0.136),
        ({"layer_groups": EIGHTHS, "sequence_groups": halves}, EIGHTHS[0], halves[1], False, 0.068),
    ):
        there, here = pulled(nodes.there), pulled(nodes.here)
        put = rollouts.put.remote(large_batch, 40_000, 8, **groups)
        handle = ray.get(put)
        total = pulled(nodes.there) - there
        assert pulled(nodes.here) - here < 1000  # the driver has references only
        here = pulled(nodes.here)
        part = {"layers": layers, "sequences": sequences, "logprobs": logprobs}
        count, _ = ray.get(trainer.sums.remote(handle, **part))
        assert count == (20_000 if sequences == halves[1] else 40_000)
        assert 0.9 * most * total < pulled(nodes.here) - here <= most * total
        found = ray.get(trainer.fetch.remote(handle, **part))
        expected = part_of(batch, list(layers), range(*sequences.indices(8)), logprobs)
        assert_equal(found, expected)
        del put, found
        handle.free()


def raised(call: Any) -> str:
    try:
        call()
    except Exception as e:
        return type(e).__name__
    return ""


def test_a_batch_whose_owner_was_killed_is_read_again(
    rollouts: Any, trainer: Any, tmp_path: Path
) -> None:
    batch, path = shard_of(tmp_path)
    put = rollouts.put.remote(stored_batch, path, layer_groups=[[1, 2], [4]], shard=path)
    handle: BatchHandle = ray.get(put)
    assert_equal(handle.fetch(logprobs=True), batch, sets=True)
    index = ray.get(handle._ref)
    os.kill(ray.get(rollouts.pid.remote()), signal.SIGKILL)
    assert settles(lambda: raised(handle.fetch), "TransportError") == "TransportError"
    # each object that is lost has a name
    with pytest.raises(
        TransportError, match=r"layers \[1, 2\], sequences 0\.\.1 cannot be fetched"
    ):
        handle._get(index, [2])
    del index
    words = ("run/0/1/0/0 on: ", "cannot be fetched", "OwnerDiedError", "read_shard()", str(path))
    refused(handle.fetch, *words)
    refused(lambda: ray.get(trainer.fetch.remote(handle, layers=[4])), *words)
    found = handle.read_shard(layers=[4], sequences=slice(1, 2))
    assert_equal(found, part_of(batch, [4], range(1, 2)), sets=True)


@pytest.mark.full  # Ray takes 15 s to believe it
def test_a_batch_whose_node_died_is_read_again(
    nodes: Nodes, rollouts: Any, trainer: Any, tmp_path: Path
) -> None:
    batch, path = shard_of(tmp_path)
    handle = ray.get(rollouts.put.remote(stored_batch, path, shard=path))
    node = nodes.cluster.list_all_nodes()[-1]
    nodes.cluster.remove_node(node, allow_graceful=False)
    refused(lambda: ray.get(trainer.fetch.remote(handle)), "cannot be fetched", str(path))
    assert_equal(handle.read_shard(), batch, sets=True)
