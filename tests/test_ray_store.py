"""Batches through a real Ray: what is fetched, what is copied, what stays, what is lost."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3 import FormatError, MissingDependencyError, SpecError, TraceError
from r3.errors import TransportError
from r3.storage.ray_store import put_batch
from r3.trainer_hooks.binding import Limits, bind
from r3.trainer_hooks.layout import check_batch, view_of
from ray_tools import (
    EIGHTHS,
    WIDE,
    Rollouts,
    Trainer,
    assert_equal,
    environment,
    large_batch,
    make_batch,
    part_of,
    private_bytes,
    references,
    refused,
    settles,
    shard_of,
    store_stats,
)

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
MiB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    with environment():
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=300 * MiB,
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def rollouts(running: None) -> Any:
    return ray.remote(num_cpus=0)(Rollouts).remote()


@pytest.fixture(scope="module")
def trainer(running: None) -> Any:
    return ray.remote(num_cpus=0)(Trainer).remote()


@pytest.fixture(autouse=True)
def nothing_stays(rollouts: Any, trainer: Any) -> Iterator[None]:
    """Every test leaves the store and the references of all processes as they were."""

    def state() -> Any:
        stats = store_stats()
        return (
            stats.object_store_bytes_used,
            stats.num_local_objects,
            references(),
            *ray.get([rollouts.references.remote(), trainer.references.remote()]),
        )

    before = state()
    yield
    assert settles(state, before) == before


# --- what is fetched


def test_each_rank_gets_its_layers_and_rows(rollouts: Any, trainer: Any) -> None:
    make = partial(make_batch, spec=WIDE, missing=0.2)
    batch = make(9, 4, 7, 1)
    stages, shares = [[0, 4], [3, 7]], [slice(0, 1), slice(1, 4)]
    for groups in ({}, {"layer_groups": stages, "sequence_groups": shares}):
        put = rollouts.put.remote(make, 9, 4, 7, 1, **groups)
        with ray.get(put) as handle:
            del put
            assert (handle.sequences, handle.tokens) == (4, 21)
            assert_equal(handle.fetch(logprobs=True), batch)
            for layers in stages:
                for share in shares:
                    found = ray.get(trainer.fetch.remote(handle, layers=layers, sequences=share))
                    expected = part_of(batch, layers, range(*share.indices(4)), logprobs=False)
                    assert_equal(found, expected)
            del found


def test_what_is_fetched_is_not_copied(trainer: Any) -> None:
    tokens = 65_536
    with put_batch(
        large_batch(tokens, 16), layer_groups=EIGHTHS, sequence_groups=[slice(0, 8), slice(8, 16)]
    ) as handle:
        batch = handle.fetch(layers=EIGHTHS[2], sequences=slice(8, 16), logprobs=True)
        for array in (batch.routed_experts, batch.token_ids, batch.logprobs):
            assert not array.flags.owndata
            assert not array.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
        assert batch.routed_experts.flags.c_contiguous
        part = {"layers": EIGHTHS[2], "sequences": slice(8, 16)}
        grown, size = ray.get(trainer.peak_growth.remote(handle, **part))
        assert size == tokens // 2 * 6 * 8
        # bool, NaN and int64 for each token, 13 bytes, are made; the 52 of ids and tokens are not
        assert grown < tokens // 2 * 13 + 256 * 1024
        again = handle.fetch(layers=EIGHTHS[2], sequences=slice(8, 16))
        # the same bytes of the same mapping
        assert np.shares_memory(again.routed_experts, batch.routed_experts)
        # and from several objects it is copied, once
        several = handle.fetch(layers=range(12), sequences=slice(8, 16))
        assert several.routed_experts.flags.owndata


def test_arrays_outlive_their_references(rollouts: Any, trainer: Any) -> None:
    batch = large_batch(20_000, 4)
    with put_batch(batch, layer_groups=[range(48)]) as handle:
        ray.get(trainer.keep.remote(handle))
        found = handle.fetch()
    # other objects go through all of the store meanwhile
    other = large_batch(80_000, 1, seed=1)
    for _ in range(10):
        with put_batch(other, layer_groups=[range(48)]):
            pass
    assert_equal(found, part_of(batch, list(range(48)), range(4), logprobs=False))
    kept = ray.get(trainer.kept_batch.remote())
    assert_equal(kept, batch)
    ray.get(trainer.drop.remote())


def test_a_fetched_batch_is_bound_as_the_batch_is() -> None:
    batch = make_batch(9, 4, 7, missing=0.2, versions=1)
    width = 12
    fed = np.zeros((3, width), np.int64)
    for i, tokens in enumerate(np.split(batch.token_ids, batch.cu_seqlens[1:-1])):
        fed[i, : len(tokens)] = tokens
    limits = Limits(max_weight_lag=2)
    with put_batch(batch, layer_groups=[[1, 2], [4]]) as handle:
        for layers in ([1, 2], [2], [4], [1, 4]):
            found = handle.fetch(layers=layers)
            check_batch(found)
            view = view_of(found, input_ids=fed)
            bound = bind(found, view, layers, limits, weight_version=2**40 + 1)
            expected = bind(batch, view, layers, limits, weight_version=2**40 + 1)
            for field in dataclasses.fields(bound):
                a, b = getattr(bound, field.name), getattr(expected, field.name)
                assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, field.name


def test_arguments_that_ask_for_what_is_not_there() -> None:
    with put_batch(make_batch(4, 2)) as handle:
        with pytest.raises(SpecError, match=r"\[0\].*\[1, 2, 4\]"):
            handle.fetch(layers=[0])
        with pytest.raises(IndexError, match=r"0\.\.1"):
            handle.fetch(sequences=range(0, 3))
        with pytest.raises(TypeError, match="a slice or a range"):
            handle.fetch(sequences=[0])  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="layer_groups"):
        put_batch(make_batch(4), layer_groups=[[1, 2]])
    batch = make_batch(4)
    zeros = np.zeros_like(batch.routed_experts)
    with pytest.raises(TraceError, match="name one expert twice"):
        put_batch(dataclasses.replace(batch, routed_experts=zeros))


# --- what stays


def test_the_driver_holds_one_reference_whatever_the_length(rollouts: Any) -> None:
    sizes, before = [], references()
    for tokens in (1_000, 100_000):
        memory = private_bytes()
        put = rollouts.put.remote(large_batch, tokens, 8, layer_groups=EIGHTHS)
        handle = ray.get(put)
        del put
        assert references() == before + 1
        assert handle.tokens == tokens
        # 39 MB of routing stand behind it in the second case
        assert private_bytes() - memory < MiB
        sizes.append(len(ray.cloudpickle.dumps(dataclasses.replace(handle, _ref=None))))
        handle.free()
    assert abs(sizes[1] - sizes[0]) < 16


def one_step(rollouts: Any, trainers: list[Any], tokens: int = 300) -> None:
    put = rollouts.put.remote(large_batch, tokens, 4, layer_groups=[EIGHTHS[0], range(6, 48)])
    with ray.get(put) as handle:
        del put
        parts = [EIGHTHS[0], range(6, 48)]
        found = ray.get(
            [t.sums.remote(handle, layers=p) for t, p in zip(trainers, parts, strict=False)]
        )
        assert all(n == tokens and total > 0 for n, total in found)


@pytest.mark.parametrize("steps", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_steps_leave_nothing(rollouts: Any, trainer: Any, steps: int) -> None:
    """Together with `nothing_stays`, which looks before and after."""
    one_step(rollouts, [trainer, trainer])
    memory = private_bytes()
    most = 0
    for step in range(steps):
        one_step(rollouts, [trainer, trainer])
        if step % 10 == 0:
            most = max(most, store_stats().num_local_objects)
    # Ray frees every second, or a hundred objects at once; a step has 5
    assert most <= 200
    assert private_bytes() - memory < 4 * MiB


def test_a_put_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with `nothing_stays`. The store of this Ray spills, so it never is full by itself"""
    put, calls = ray.put, []

    def full(item: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise ray.exceptions.ObjectStoreFullError("no room")
        return put(item)

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(TransportError, match="run/0/0/0/0 on: cannot be put: ObjectStoreFullError"):
        put_batch(make_batch(9, 4, spec=WIDE))
    assert len(calls) == 5


# --- freed, lost, changed


def test_a_freed_handle_says_so_and_what_to_do(trainer: Any, tmp_path: Path) -> None:
    batch, path = shard_of(tmp_path)
    handle = put_batch(batch)
    handle.free()
    handle.free()
    refused(handle.fetch, "batch of 2 sequences and 11 tokens", "was freed", "put it again")
    with put_batch(batch, shard=path) as handle:
        pass
    refused(handle.fetch, "was freed", "read_shard()", str(path))
    refused(lambda: ray.get(trainer.fetch.remote(handle)), "was freed", str(path))
    assert_equal(handle.read_shard(), batch, sets=True)
    refused(put_batch(batch).read_shard, "without `shard`")


def test_content_that_was_changed_is_an_error() -> None:
    handle = put_batch(make_batch(5, 4))
    other = dataclasses.replace(handle, crc32=handle.crc32 ^ 1)
    refused(other.fetch, f"index with checksum {handle.crc32:08x}, expected", error=FormatError)
    index = dict(ray.get(handle._ref))
    index["refs"] = [*index["refs"][:2], ray.put(np.ones((9, 1, 2), np.uint8)), *index["refs"][3:]]
    other = dataclasses.replace(handle, _ref=ray.put(index))
    refused(
        other.fetch,
        "batch of 2 sequences",
        "routed_experts of layers [1], sequences 0..1: routed_experts: rollout run/0/0/0/0",
        error=FormatError,
    )


# --- without Ray


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    with put_batch(make_batch(4)) as handle:
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        refused(lambda: put_batch(make_batch(4)), r"call ray.init() first")
        refused(handle.fetch, r"call ray.init() first")
        monkeypatch.setitem(sys.modules, "ray", None)
        for call in (handle.fetch, lambda: put_batch(make_batch(4))):
            refused(call, "rollout-routing-replay[ray]", error=MissingDependencyError)
