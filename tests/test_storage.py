"""Shard files: what is appended is read, what cannot be is refused before it is written."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import r3
import storage_tools as tools
from r3 import Column, FormatError, Provenance, RolloutId, RouterSpec
from r3.storage import ShardReader, ShardWriter, codec
from storage_tools import (
    SPEC,
    SPECS,
    assert_same,
    full_trace,
    make_trace,
    read_all,
    write,
)

ONE_FILE = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=150,
    deadline=None,
)


# --- columns


@given(
    st.sampled_from(list(codec.DTYPES)),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.sampled_from(["<", ">"]),
    st.integers(0, 2**32),
)
@ONE_FILE
def test_columns_of_any_form(dtype, shape, order, seed):
    values = np.random.default_rng(seed).integers(0, 2, shape)
    values = values.astype(codec.DTYPES[dtype].newbyteorder(order))
    assert codec.dtype_name(values.dtype) == dtype
    name, data = codec.encode_column(values)
    raw = bytes(codec.encode_raw(values))
    assert raw == values.astype(codec.DTYPES[dtype]).tobytes()
    assert name == "deflate" or bytes(data) == raw
    assert len(data) <= len(raw)
    for stored in ((name, bytes(data)), (name, memoryview(data)), ("raw", raw)):
        found = codec.decode_column(*stored, dtype, shape)
        np.testing.assert_array_equal(found, values)
        assert found.dtype.isnative
        assert found.flags.writeable  # of its own: no view of the file
        with pytest.raises(FormatError):
            codec.decode_column(stored[0], bytes(stored[1]) + b"x", dtype, shape)
        with pytest.raises(FormatError):
            codec.decode_column(*stored, dtype, [*shape, 2**70])


@pytest.mark.parametrize("dtype", ["U3", "S2", "c8", "O", "M8[s]", "f8,i4"])
def test_other_dtypes_are_not_stored(dtype, tmp_path):
    def store() -> None:
        column = Column(np.zeros(9, np.dtype(dtype)), "token")
        write(tmp_path / "a.r3", [make_trace(extra={"tag": column})])

    with pytest.raises(
        r3.TraceError, match=r"run/0/0/0/0.*(expected one of bool, u1|plain values)"
    ):
        store()


# --- round trips


@given(
    spec=st.sampled_from(SPECS),
    n=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    missing=st.integers(0, 12),
    logprobs=st.booleans(),
    keep_order=st.booleans(),
    extra=st.dictionaries(
        st.text(min_size=1, max_size=9).map("x{}".format),
        st.tuples(
            st.sampled_from(["token", "row", "rollout"]),
            st.sampled_from(list(codec.DTYPES)),
            st.lists(st.integers(0, 3), max_size=2),
            st.integers(0, 9),
        ),
        max_size=3,
    ),
    sampling=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
        max_size=3,
    ),
)
@ONE_FILE
def test_what_is_appended_is_read(
    tmp_path, spec, n, seed, missing, logprobs, keep_order, extra, sampling
):
    columns = {}
    for name, (align, dtype, shape, version) in extra.items():
        rows = {"token": n, "row": n - 1, "rollout": 5}[align]
        values = np.random.default_rng(seed).integers(0, 2, (rows, *shape))
        columns[name] = Column(values.astype(codec.DTYPES[dtype]), align, version)
    trace = make_trace(
        spec,
        n,
        seed,
        missing,
        logprobs=-np.arange(n - min(3, n)) if logprobs else None,
        extra=columns,
        provenance=Provenance(engine="x", sampling=sampling),
    )
    path = tmp_path / "a.r3"
    path.unlink(missing_ok=True)
    with ShardWriter(path, spec, keep_order=keep_order) as writer:
        assert writer.append(trace) == 0
    with ShardReader(path) as reader:
        assert reader.spec == spec
        assert_same(reader[0], trace, keep_order)
        assert reader.header(0).digest == trace.digest


@pytest.mark.parametrize("keep_order", [False, True])
def test_known_and_unknown_columns(keep_order, tmp_path):
    traces = [full_trace(spec, seed=i, n=30 + i) for i in range(4) for spec in SPECS[:1]]
    path = write(tmp_path / "a.r3", traces, keep_order=keep_order)
    for found, trace in zip(read_all(path), traces, strict=True):
        assert_same(found, trace, keep_order)
        assert found.tags == ("math", "größe", "")
        np.testing.assert_array_equal(found.sampled, trace.sampled)
    again = write(tmp_path / "b.r3", read_all(path), keep_order=keep_order)
    assert again.stat().st_size == path.stat().st_size
    for found, trace in zip(read_all(again), traces, strict=True):
        assert_same(found, trace, keep_order)


@pytest.mark.parametrize("experts", [1, 8, 256, 257, 4096, 5000, 65536])
def test_any_number_of_experts(experts, tmp_path):
    k = min(experts, 7)
    trace = make_trace(RouterSpec(experts, k, (0, 2), 3), 300, experts, missing=5)
    for keep_order in (False, True):
        path = write(tmp_path / f"{keep_order}.r3", [trace], keep_order=keep_order)
        assert_same(read_all(path)[0], trace, keep_order)


@pytest.mark.parametrize("n", [1, 2, 4096, 4097, 4098, 8193, 20000])
def test_long_and_short_traces(n, tmp_path):
    valid = np.random.default_rng(n).random(n - 1) < 0.9
    for trace in (make_trace(n=n, seed=n), make_trace(n=n, seed=n, valid=valid)):
        path = write(tmp_path / f"{trace.digest}.r3", [trace])
        assert_same(read_all(path)[0], trace)


def test_a_trace_of_long_runs(tmp_path):
    """One token 3 million times: deflate would shrink it more than a reader lets a record be."""
    spec, n = RouterSpec(1, 1, (0,), 1), 3_000_000
    ids = np.zeros((n - 1, 1, 1), np.uint8)
    trace = make_trace(spec, n, token_ids=np.zeros(n, int), routed_experts=ids)
    assert_same(read_all(write(tmp_path / "a.r3", [trace]))[0], trace)


def test_reader_is_a_sequence_with_names(tmp_path):
    traces = [make_trace(seed=i, n=5 + i) for i in range(4)]
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer:
        assert [writer.append(t) for t in traces] == [0, 1, 2, 3]
        assert len(writer) == 4
        writer.flush()
    assert writer.file_size == path.stat().st_size
    with ShardReader(path) as reader:
        assert (len(reader), reader.file_size, reader.torn) == (4, path.stat().st_size, None)
        assert reader.rollout_ids == [t.rollout_id for t in traces]
        for found, expected in zip(reader, traces, strict=True):
            assert_same(found, expected)
        assert_same(reader[-1], traces[3])
        assert_same(reader[np.int64(1)], traces[1])
        assert_same(reader.get("run/2/0/0/0"), traces[2])
        assert_same(reader.get(RolloutId("run", "1")), traces[1])
        assert reader.find("run/3/0/0/0") == 3
        with pytest.raises(KeyError, match="run/9/0/0/0"):
            reader.get("run/9/0/0/0")
        for index in (4, -5):
            with pytest.raises(IndexError, match="4 records"):
                reader[index]
    for ask in (lambda: reader[0], lambda: reader.slice(0), lambda: reader.header(0)):
        with pytest.raises(ValueError, match="closed"):
            ask()
    reader.close()


def test_read_arrays_can_be_packed(tmp_path):
    with ShardReader(write(tmp_path / "a.r3", [make_trace(seed=1, missing=2)])) as reader:
        batch = r3.RoutingBatch.from_traces(list(reader))
    assert batch.valid.sum() == 6


def test_what_was_read_outlives_the_reader(tmp_path):
    path, trace = tmp_path / "a.r3", full_trace(n=300)
    write(path, [trace])
    with ShardReader(path) as reader:
        found, part = reader[0], reader.slice(0)
    path.write_bytes(b"")  # other bytes in the same place
    assert_same(found, trace)
    np.testing.assert_array_equal(part.token_ids, trace.token_ids)


# --- the page that describes the format


def test_the_example_on_the_page(tmp_path):
    """docs/format.md shows the bytes that are written today, and they read back."""
    page = (tools.ROOT / "docs" / "format.md").read_text()
    block = re.search(r"```hex\n(.*?)```", page, re.DOTALL).group(1)
    assert block == tools.annotated(tools.example_file())
    headers = re.search(r"```json\n(.*?)\n\n(.*?)```", page, re.DOTALL)
    assert [json.loads(headers.group(i)) for i in (1, 2)] == list(tools.example_headers())
    path = tmp_path / "a.r3"
    path.write_bytes(b"".join(bytes.fromhex(line[6:53]) for line in block.splitlines()))
    assert_same(read_all(path)[0], tools.example_trace())
