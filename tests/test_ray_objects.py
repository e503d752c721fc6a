"""A batch cut into objects and put together again: the layout that goes into Ray, without Ray."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r3 import FormatError, RouterSpec, RoutingBatch, SpecError
from r3.errors import TraceError, TransportError
from r3.storage import ShardWriter
from r3.storage.batch_objects import assemble, index_crc, make_index, make_objects, plan_of
from r3.storage.batch_plan import make_plan
from r3.storage.batch_shard import BatchRecords
from ray_tools import SMALL, WIDE, assert_equal, make_batch, make_trace, part_of


class Store:
    """Objects that cannot be changed, and which of them were asked for."""

    def __init__(self, batch: RoutingBatch, **groups: Any) -> None:
        self.plan = make_plan(batch, **groups)
        self.index = make_index(batch, self.plan)
        self.objects = list(make_objects(batch, self.plan))
        self.asked: list[int] = []
        for item in self.objects:
            for array in item.values() if isinstance(item, dict) else [item]:
                array.flags.writeable = False

    def get(self, numbers: list[int]) -> Sequence[Any]:
        self.asked = numbers
        return [self.objects[number] for number in numbers]

    def fetch(self, **part: Any) -> RoutingBatch:
        return assemble(self.index, self.get, **part)


def cuts(data: st.DataObject, items: list[int]) -> list[list[int]]:
    """`items` in groups of neighbours"""
    edges = data.draw(st.sets(st.integers(1, len(items) - 1))) if len(items) > 1 else set()
    ends = [0, *sorted(edges), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


@settings(deadline=None)
@given(st.data())
def test_any_part_of_any_cut_is_the_part(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from([SMALL, WIDE]))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    batch = RoutingBatch.from_traces(
        make_trace(
            n,
            spec,
            seed=data.draw(st.integers(0, 999)),
            missing=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
            logprobs=data.draw(st.booleans()),
            versions=data.draw(st.sampled_from([0, 1, 3])),
        )
        for n in lengths
    )
    groups: dict[str, Any] = {}
    if data.draw(st.booleans()):
        groups["layer_groups"] = cuts(data, data.draw(st.permutations(spec.moe_layers)))
    if data.draw(st.booleans()):
        blocks = cuts(data, list(range(len(batch))))
        groups["sequence_groups"] = [range(b[0], b[-1] + 1) for b in blocks]
    store = Store(batch, **groups)
    assert plan_of(store.index) == store.plan
    assert_equal(store.fetch(logprobs=True), batch)
    first = data.draw(st.integers(0, len(batch) - 1))
    last = data.draw(st.integers(first + 1, len(batch)))
    layers = data.draw(st.lists(st.sampled_from(spec.moe_layers), min_size=1, unique=True))
    with_logprobs = data.draw(st.booleans())
    part = part_of(batch, layers, range(first, last), with_logprobs)
    for sequences in (slice(first, last), range(first, last)):
        found = store.fetch(layers=iter(layers), sequences=sequences, logprobs=with_logprobs)
        assert_equal(found, part)
    # no object without something of it
    for number in store.asked:
        block, kind = divmod(number, store.plan.per_block)
        assert set(store.plan.blocks[block]) & set(range(first, last))
        assert kind != 1 or with_logprobs
        assert kind < 2 or set(store.plan.groups[kind - 2]) & set(layers)
    # what was fetched can be put again
    assert_equal(Store(part).fetch(logprobs=True), part)


def test_the_layout_is_what_the_docstring_says() -> None:
    batch = make_batch(4, 1, 7, missing=0.3, versions=2)
    store = Store(batch, layer_groups=[[4, 1], [2]], sequence_groups=[slice(0, 1), slice(1, 3)])
    assert len(store.objects) == 8
    assert store.plan.groups == ((1, 4), (2,))
    columns, logprobs, outer, inner = store.objects[4:]
    assert (columns["token_ids"] == batch.token_ids[4:]).all()
    bits = [columns["valid"][j // 8] >> (j % 8) & 1 for j in range(8)]
    assert bits == batch.valid[4:].tolist()
    rows = batch.weight_versions[4:][batch.valid[4:]]
    assert np.repeat(columns["versions"], columns["lengths"]).tolist() == rows.tolist()
    assert (np.diff(columns["versions"]) != 0).all()
    assert logprobs.tobytes() == batch.logprobs[4:].tobytes()
    assert (outer == batch.routed_experts[4:, [0, 2]]).all()
    assert (inner == batch.routed_experts[4:, [1]]).all()
    assert outer.flags.c_contiguous
    crc32 = store.index["crc32"]
    assert crc32.shape == (4 + 2, 3)
    assert crc32[0, 2] == zlib.crc32(batch.token_ids[5:])
    assert crc32[4, 2] == zlib.crc32(batch.routed_experts[5:, [0, 2]].tobytes())


def test_what_lies_in_one_object_is_a_view_of_it() -> None:
    batch = make_batch(4, 6, 3, spec=WIDE)
    store = Store(batch, layer_groups=[[0, 3, 4], [7]], sequence_groups=[slice(0, 2), slice(2, 3)])
    for part in ({"sequences": slice(0, 2)}, {"sequences": slice(1, 2)}):
        for layers in ([0, 3, 4], [3, 4], [4]):
            found = store.fetch(layers=layers, logprobs=True, **part)
            assert np.shares_memory(found.routed_experts, store.objects[2])
            assert np.shares_memory(found.token_ids, store.objects[0]["token_ids"])
            assert np.shares_memory(found.logprobs, store.objects[1])
            for array in (found.routed_experts, found.token_ids, found.logprobs):
                assert not array.flags.owndata
                assert not array.flags.writeable
            found.check()  # accepts views that are not contiguous
    both = store.fetch(layers=[4, 7], sequences=slice(0, 2))
    assert both.routed_experts.flags.owndata
    # so is a group of a stage whose layers are not neighbours, as a whole
    store = Store(batch, layer_groups=[[0, 4], [3, 7]])
    assert np.shares_memory(store.fetch(layers=[7, 3]).routed_experts, store.objects[3])


def test_blocks_are_whole_sequences_of_a_certain_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r3.storage.batch_plan._BLOCK", 10)
    for lengths, blocks in (
        ([3], [range(0, 1)]),
        ([9, 9], [range(0, 2)]),
        ([10, 10], [range(0, 1), range(1, 2)]),
        ([4, 4, 4, 25, 9], [range(0, 3), range(3, 5)]),
        ([30, 1, 1, 1], [range(0, 4)]),
    ):
        assert list(make_plan(make_batch(*lengths)).blocks) == blocks


def test_arguments_that_ask_for_what_is_not_there() -> None:
    batch = make_batch(4, 2, 3)
    for groups in ([[1, 2]], [[1, 2], [2, 4]], [[1, 2], []], [[1, 2], [4, 5]], []):
        with pytest.raises(SpecError, match=r"\[1, 2, 4\]"):
            make_plan(batch, layer_groups=groups)
    for blocks in ([range(0, 2)], [range(0, 2), range(1, 3)], [range(1, 3), range(0, 1)], []):
        with pytest.raises(IndexError, match=r"0\.\.2"):
            make_plan(batch, sequence_groups=blocks)
    store = Store(batch)
    with pytest.raises(SpecError, match=r"\[0, 3\].*\[1, 2, 4\]"):
        store.fetch(layers=[0, 1, 3])
    for sequences in (range(0, 4), range(2, 2), slice(3, 9), slice(0, 3, 2)):
        with pytest.raises(IndexError, match=r"0\.\.2"):
            store.fetch(sequences=sequences)


def change(item: Any, at: int) -> Any:
    """A copy of an object with a bit of its bytes flipped"""
    if isinstance(item, dict):
        sizes = [(name, array.nbytes) for name, array in item.items()]
        for name, size in sizes:
            if at < size:
                return item | {name: change(item[name], at)}
            at -= size
    data = bytearray(item.tobytes())
    data[at % len(data)] ^= 1
    return np.frombuffer(data, item.dtype).reshape(item.shape)


def test_every_changed_byte_is_found_and_named() -> None:
    batch = make_batch(5, 4, missing=0.3)
    store = Store(batch, layer_groups=[[1, 2], [4]], sequence_groups=[slice(0, 1), slice(1, 2)])
    names = ("token_ids and valid", "logprobs", "layers [1, 2]", "layers [4]")
    for number, item in enumerate(store.objects):
        arrays = item.values() if isinstance(item, dict) else [item]
        for at in range(sum(array.nbytes for array in arrays)):
            store.objects[number] = change(item, at)
            with pytest.raises(FormatError) as caught:
                store.fetch(logprobs=True)
            block, kind = divmod(number, 4)
            assert names[kind] in str(caught.value)
            assert f"sequences {block}..{block}" in str(caught.value)
        store.objects[number] = item
    for hostile in (None, {}, b"", np.zeros(3), np.zeros((5, 2, 2), np.int64)):
        store.objects[2] = hostile
        with pytest.raises(FormatError, match=r"layers \[1, 2\], sequences 0\.\.0: routed_experts"):
            store.fetch()
    crc = index_crc(store.index)
    for name, value in store.index.items():
        other = np.array(value) + 1 if isinstance(value, np.ndarray) else [*value, 7]
        assert index_crc({**store.index, name: other}) != crc


# --- reading a batch again from shard files


def write_shard(path: Path, *traces: Any, spec: RouterSpec = SMALL) -> Path:
    with ShardWriter(path, spec) as writer:
        for trace in traces:
            writer.append(trace)
    return path


@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_the_same_is_read_again_from_files(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("shards")
    traces = [
        make_trace(n, WIDE, seed=i, missing=data.draw(st.sampled_from([0.0, 0.4])))
        for i, n in enumerate(data.draw(st.lists(st.integers(1, 8), min_size=2, max_size=5)))
    ]
    cut = data.draw(st.integers(1, len(traces) - 1))
    paths = [
        write_shard(folder / "a.r3", *traces[:cut], spec=WIDE),
        write_shard(folder / "b.r3", *traces[cut:], spec=WIDE),
    ]
    order = data.draw(st.permutations(traces))
    batch = RoutingBatch.from_traces(order)
    records = BatchRecords.find(batch, paths)
    assert_equal(records.read(), batch, sets=True)
    first = data.draw(st.integers(0, len(batch) - 1))
    found = records.read([7, 0], slice(first, len(batch)))
    assert_equal(found, part_of(batch, [0, 7], range(first, len(batch))), sets=True)
    found.check()
    assert found.routed_experts.flags.c_contiguous


def test_files_of_other_rollouts_are_refused_when_and_after_a_batch_is_put(tmp_path: Path) -> None:
    a, b = make_trace(6, seed=1), make_trace(5, seed=2)
    path = write_shard(tmp_path / "a.r3", a, b)
    batch = RoutingBatch.from_traces([a, b])
    records = BatchRecords.find(batch, path)
    assert records.digests == (a.digest, b.digest)
    with pytest.raises(TransportError, match=r"rollout run/0/0/0/0 is not in .*a\.r3"):
        BatchRecords.find(make_batch(3, 3, 3, 3), path)
    with pytest.raises(TransportError, match="no shard file"):
        BatchRecords.find(batch, [])
    with pytest.raises(SpecError, match="expected the routers of the batch"):
        BatchRecords.find(make_batch(3, spec=WIDE), path)
    with pytest.raises(FormatError, match="none"):
        BatchRecords.find(batch, tmp_path / "none.r3")
    tokens, ids = batch.token_ids.copy(), batch.routed_experts.copy()
    tokens[7] += 1
    ids[0] = np.roll(ids[0], 1, axis=0)
    for word, changes in (
        ("run/0/2/0/0: token_ids", {"token_ids": tokens}),
        ("run/0/1/0/0: the experts of layer 1", {"routed_experts": ids}),
        ("run/0/1/0/0: prompt_len", {"prompt_lens": np.array([a.prompt_len + 1, b.prompt_len])}),
    ):
        with pytest.raises(TransportError, match=word):
            BatchRecords.find(dataclasses.replace(batch, **changes), path)
    path.unlink()
    with pytest.raises(FormatError, match=r"a\.r3"):
        records.read()
    write_shard(path, a, make_trace(5, seed=3, name=b.rollout_id))
    assert_equal(records.read(sequences=slice(0, 1)), RoutingBatch.from_traces([a]), sets=True)
    with pytest.raises(TransportError, match=f"run/0/2/0/0: .* expected {b.digest}"):
        records.read()
    path.unlink()
    write_shard(path, a)
    with pytest.raises(TransportError, match="rollout run/0/2/0/0 is not in"):
        records.read()
    with pytest.raises(IndexError):
        records.read(sequences=range(2, 3))
    with pytest.raises(SpecError):
        records.read(layers=[3])


def test_batches_built_by_hand_are_checked_where_they_arrive() -> None:
    batch = make_batch(4)
    twice = np.zeros_like(batch.routed_experts)
    store = Store(dataclasses.replace(batch, routed_experts=twice))
    with pytest.raises(TraceError, match="name one expert twice"):
        store.fetch()
