"""Some layers of some tokens: the same as numpy slices, and only their part of the file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r3 import RolloutId, RouterSpec, RoutingTrace, SpecError, TraceError
from r3.storage import ShardReader
from storage_tools import SPEC, assert_slice, expected_slice, full_trace, make_trace, write

LAYERS = (1, 2, 4, 7)
WIDE = RouterSpec(40, 3, LAYERS, 8)


class Counting(ShardReader):
    """Counts the bytes that are asked for."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        super().__init__(path)

    def read(self, offset: int, size: int) -> Any:
        self.count += size
        return super().read(offset, size)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RoutingTrace]]:
    """Traces of several blocks of 4,096 rows, with and without missing rows, shared and not."""
    rng = np.random.default_rng()
    base = make_trace(WIDE, 9000, 0)
    ids, other = base.routed_experts.copy(), make_trace(WIDE, 9000, 1).routed_experts
    cells = rng.random(ids.shape[:2]) < 0.01
    ids[cells] = other[cells]
    same = base.token_ids
    tail = np.where(np.arange(9000) < 5000, same, same + 1)
    traces = [
        base,
        make_trace(WIDE, 9000, 2, valid=rng.random(8999) < 0.7),
        make_trace(WIDE, 9000, 3, token_ids=same, routed_experts=ids),
        make_trace(
            WIDE, 9000, 4, token_ids=tail, routed_experts=ids, valid=np.arange(8999) != 6000
        ),
        full_trace(WIDE, 4098, 5),
        make_trace(WIDE, 1, 6),
    ]
    path = write(tmp_path_factory.mktemp("shard") / "a.r3", traces)
    with ShardReader(path) as reader:
        columns = [reader.header(i).column("routed_experts") for i in range(len(reader))]
    assert [c.layout.shared for c in columns] == [0, 0, 8999, 5000, 0, 0]
    return path, traces


bounds = st.none() | st.integers(-9100, 9100) | st.sampled_from([0, 4095, 4096, 4097, 8192, 8998])


@given(
    number=st.integers(0, 5),
    layers=st.none() | st.lists(st.sampled_from(LAYERS), max_size=4, unique=True).map(tuple),
    start=bounds,
    stop=bounds,
    by=st.sampled_from(["number", "id", "text"]),
)
@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_slices_are_those_of_the_trace(shard, number, layers, start, stop, by):
    path, traces = shard
    trace, tokens = traces[number], slice(start, stop)
    name = {"number": number, "id": trace.rollout_id, "text": str(trace.rollout_id)}[by]
    with ShardReader(path) as reader:
        found = reader.slice(name, layers=layers, tokens=tokens)
    expected = expected_slice(trace, LAYERS if layers is None else layers, tokens)
    assert_slice(found, expected)
    for array in (found.token_ids, found.routed_experts, found.valid):
        assert array.flags.writeable


@pytest.mark.parametrize("keep_order", [False, True])
def test_every_range_of_a_short_trace(keep_order, tmp_path):
    trace = full_trace(n=9)
    with ShardReader(write(tmp_path / "a.r3", [trace], keep_order=keep_order)) as reader:
        assert_slice(
            reader.slice(0), expected_slice(trace, SPEC.moe_layers, slice(None), keep_order)
        )
        for start in range(10):
            for stop in range(10):
                tokens = slice(start, stop)
                found = reader.slice(0, layers=[3, 1], tokens=tokens)
                assert_slice(found, expected_slice(trace, (3, 1), tokens, keep_order))
                # what a caller does to it is not in the next one
                found.valid[:] = False
                found.token_ids[:] = 7


def test_what_cannot_be_sliced(tmp_path):
    with ShardReader(write(tmp_path / "a.r3", [make_trace()])) as reader:
        with pytest.raises(SpecError, match=r"layer 0, expected one of the MoE layers \(1, 2, 3\)"):
            reader.slice(0, layers=[1, 0])
        for tokens in (slice(0, 4, 2), 3, range(4)):
            with pytest.raises(TraceError, match="expected a slice with a step of 1"):
                reader.slice(0, tokens=tokens)
        with pytest.raises(TraceError, match="run/group/sample/turn/attempt"):
            reader.slice("run/7")
        with pytest.raises(KeyError, match="run/7/0/0/0"):
            reader.slice("run/7/0/0/0")
        with pytest.raises(KeyError, match="run/7/0/0/0"):
            reader.slice(RolloutId("run", "7"))
        with pytest.raises(IndexError, match="record 1, expected one of 1 records"):
            reader.slice(1)


def test_a_layer_named_twice(tmp_path):
    trace = make_trace()
    with ShardReader(write(tmp_path / "a.r3", [trace])) as reader:
        found = reader.slice(0, layers=[2, 1, 2])
    assert_slice(found, expected_slice(trace, (2, 1, 2), slice(None)))


def test_only_the_layers_asked_for_are_read(tmp_path):
    """Each of 8 pipeline stages reads its eighth of the routing."""
    spec = RouterSpec(128, 8, tuple(range(48)), 48)
    trace = make_trace(spec, 4096)
    path = write(tmp_path / "a.r3", [trace])
    with ShardReader(path) as reader:
        column = reader.header(0).column("routed_experts")
        rest = sum(c.size for c in reader.header(0).columns) - column.size
    for stage in range(8):
        layers = tuple(range(6 * stage, 6 * stage + 6))
        with Counting(path) as reader:
            reader.header(0)
            opened, reader.count = reader.count, 0
            found = reader.slice(0, layers=layers)
            assert reader.count <= column.size * (1 / 8 + 0.02) + rest
            assert reader.count - rest <= column.size / 8 + 1
        assert opened < 20_000
        assert_slice(found, expected_slice(trace, layers, slice(None)))


def test_only_the_rows_asked_for_are_read(tmp_path):
    spec = RouterSpec(128, 8, tuple(range(8)), 8)
    trace = make_trace(spec, 8 * 4096 + 1)
    path = write(tmp_path / "a.r3", [trace])
    with Counting(path) as reader:
        column = reader.header(0).column("routed_experts")
        tokens = reader.header(0).column("token_ids").size
        for start, stop, chunks in ((5000, 6000, 1), (4000, 5000, 2), (0, 4096, 1), (9, 9, 0)):
            reader.count = 0
            found = reader.slice(0, layers=[3], tokens=slice(start, stop))
            assert reader.count <= column.size / 64 * chunks + tokens
            assert_slice(found, expected_slice(trace, (3,), slice(start, stop)))
