"""Shard files: what is written comes back, and anything damaged or hostile is one FormatError."""

from __future__ import annotations

import contextlib
import json
import re
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import r3
from r3 import Column, FormatError, Provenance, RolloutId, RouterSpec, RoutingTrace
from r3.storage import ShardReader, ShardWriter, codec, record, shard

ROOT = Path(__file__).resolve().parent.parent
SPECS = (
    RouterSpec(60, 4, (1, 2, 3), 4),
    RouterSpec(8, 2, (0, 1), 2),
    RouterSpec(300, 5, (0, 2, 3), 4, "sigmoid", 4, 2),
)
SPEC = SPECS[0]
ONE_FILE = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None
)


def make_trace(
    spec: RouterSpec = SPEC, n: int = 9, seed: int = 0, missing: int = 0, **changes: Any
) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    scores = rng.random((n - 1, len(spec.moe_layers), spec.num_experts))
    valid = np.ones(n - 1, bool)
    valid[:missing] = False
    values = {
        "spec": spec,
        "token_ids": rng.integers(0, 999, n),
        "routed_experts": scores.argsort(axis=-1)[..., : spec.top_k],
        "prompt_len": min(3, n),
        "valid": valid,
        "rollout_id": RolloutId("run", str(seed)),
    }
    return RoutingTrace.build(**(values | changes))


def assert_same(found: RoutingTrace, expected: RoutingTrace) -> None:
    assert (found.spec, found.prompt_len) == (expected.spec, expected.prompt_len)
    assert (found.rollout_id, found.digest) == (expected.rollout_id, expected.digest)
    assert found.provenance == expected.provenance
    assert list(found.columns) == list(expected.columns)
    for name, column in expected.columns.items():
        other = found.columns[name]
        assert (other.align, other.version) == (column.align, column.version)
        assert other.data.dtype == column.data.dtype.newbyteorder("=")
        np.testing.assert_array_equal(other.data, column.data)
        assert not other.data.flags.writeable
        assert other.data.flags.aligned


def read_all(path: Path) -> list[RoutingTrace]:
    with warnings.catch_warnings():  # hostile content may well be suspicious
        warnings.simplefilter("ignore", r3.SuspiciousRoutingWarning)
        with ShardReader(path) as reader:
            assert len(reader.rollout_ids) == len(reader)
            return list(reader)


def refused(path: Path, *words: str) -> None:
    """Reading fails with one FormatError that names the path and says all the words."""
    with pytest.raises(FormatError) as caught:
        read_all(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


# --- files built by hand


def packed(values: Any) -> bytes:
    """A header with a right length and checksum, whatever is in it."""
    data = values if isinstance(values, bytes) else msgpack.packb(values)
    length = len(data).to_bytes(4, "little")
    return length + zlib.crc32(length + data).to_bytes(4, "little") + data


def framed(content: bytes, size: int | None = None) -> bytes:
    head = b"R3rc" + (len(content) if size is None else size).to_bytes(8, "little")
    return head + zlib.crc32(head).to_bytes(4, "little") + content


def file_bytes(*records: bytes, **header: Any) -> bytes:
    values = {"version": [1, 0], "spec": SPEC.to_dict()} | header
    return shard.MAGIC + packed(values) + b"".join(map(framed, records))


def header_and_payload(trace: RoutingTrace) -> tuple[dict[str, Any], bytes]:
    pieces = record.encode_record(trace)
    return msgpack.unpackb(bytes(pieces[0])[8:]), b"".join(pieces[1:])


# --- codecs


@pytest.mark.parametrize(("experts", "width"), [(128, 1), (256, 1), (257, 2), (300, 2)])
def test_plain_codec(experts, width):
    spec = RouterSpec(experts, 3, (0, 1), 2)
    ids = np.random.default_rng(0).integers(0, experts, (7, 2, 3)).astype(spec.dtype)
    ids[0, 0, 0] = experts - 1
    data = codec.find_codec("plain").encode(ids, spec)
    assert bytes(data) == ids.astype(f"<u{width}").tobytes()
    assert (codec.find_codec("plain").decode(data, 7, spec) == ids).all()
    assert codec.find_codec("plain").encode(ids[::-1], spec).tobytes() == ids[::-1].tobytes()
    for rows in (0, 6, 8, 2**60):
        with pytest.raises(FormatError, match=r"84 bytes|42 bytes|larger"):
            codec.find_codec("plain").decode(data, rows, spec)


@given(st.sampled_from(list(codec.DTYPES)), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_raw_round_trip(dtype, shape):
    rng = np.random.default_rng(len(shape))
    values = rng.integers(0, 2, shape).astype(codec.DTYPES[dtype].newbyteorder(">"))
    assert codec.dtype_name(values.dtype) == dtype
    found = codec.decode_raw(bytes(codec.encode_raw(values)), dtype, shape)
    np.testing.assert_array_equal(found, values)
    assert found.dtype.isnative


@pytest.mark.parametrize("dtype", ["U3", "S2", "c8", "O", "M8[s]", "f8,i4"])
def test_other_dtypes_are_not_stored(dtype):
    def encode() -> None:
        values = np.zeros(9, np.dtype(dtype))
        record.encode_record(make_trace(extra={"tag": Column(values, "token")}))

    with pytest.raises(
        r3.TraceError, match=r"run/0/0/0/0.*(expected one of bool, u1|plain values)"
    ):
        encode()


# --- round trips


@given(
    spec=st.sampled_from(SPECS),
    n=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    missing=st.integers(0, 12),
    logprobs=st.booleans(),
    extra=st.dictionaries(
        st.text(min_size=1, max_size=9).map("x{}".format),
        st.tuples(
            st.sampled_from(["token", "row"]),
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
def test_what_is_appended_is_read(tmp_path, spec, n, seed, missing, logprobs, extra, sampling):
    columns = {}
    for name, (align, dtype, shape, version) in extra.items():
        rows = n if align == "token" else n - 1
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
    with ShardWriter(path, spec) as writer:
        assert writer.append(trace) == 0
    with ShardReader(path) as reader:
        assert reader.spec == spec
        assert_same(reader[0], trace)
        assert reader.header(0).digest == trace.digest


def test_reader_is_a_sequence_with_names(tmp_path):
    path = tmp_path / "a.r3"
    traces = [make_trace(seed=i, n=5 + i) for i in range(4)]
    with ShardWriter(path, SPEC) as writer:
        assert [writer.append(t) for t in traces] == [0, 1, 2, 3]
        assert len(writer) == 4
        writer.flush()
    with ShardReader(path) as reader:
        assert (len(reader), reader.file_size) == (4, path.stat().st_size)
        assert reader.rollout_ids == [t.rollout_id for t in traces]
        for found, expected in zip(reader, traces, strict=True):
            assert_same(found, expected)
        assert_same(reader[-1], traces[3])
        assert_same(reader[np.int64(1)], traces[1])
        assert_same(reader.get("run/2/0/0/0"), traces[2])
        assert_same(reader.get(RolloutId("run", "1")), traces[1])
        with pytest.raises(KeyError, match="run/9/0/0/0"):
            reader.get("run/9/0/0/0")
        for index in (4, -5):
            with pytest.raises(IndexError):
                reader[index]
    with pytest.raises(ValueError, match="closed"):
        reader[0]


def test_read_arrays_can_be_packed(tmp_path):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer:
        writer.append(make_trace(seed=1, missing=2))
    with ShardReader(path) as reader:
        batch = r3.RoutingBatch.from_traces(list(reader))
    assert batch.valid.sum() == 6


def test_append_goes_on_where_the_last_writer_ended(tmp_path):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer:
        writer.append(make_trace(seed=0))
    before = path.read_bytes()
    with ShardWriter(path, SPEC) as writer:
        assert len(writer) == 1
        assert writer.append(make_trace(seed=0)) == 0
        assert writer.append(make_trace(seed=1)) == 1
    assert path.read_bytes().startswith(before)
    assert len(read_all(path)) == 2


def test_no_records(tmp_path):
    path = tmp_path / "a.r3"
    ShardWriter(path, SPEC).close()
    assert read_all(path) == []
    with ShardReader(path) as reader, pytest.raises(IndexError):
        reader[-1]


# --- what a writer refuses


def test_writer_tells_repeats_from_conflicts(tmp_path):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer:
        first, second = make_trace(seed=0), make_trace(seed=1)
        assert [writer.append(t) for t in (first, second, first)] == [0, 1, 0]
        clash = make_trace(seed=2, rollout_id=first.rollout_id)
        with pytest.raises(r3.TraceError) as caught:
            writer.append(clash)
        for word in ("run/0/0/0/0", first.digest, clash.digest, str(path)):
            assert word in str(caught.value)
        assert writer.append(make_trace(seed=0, rollout_id=RolloutId("again"))) == 2
    assert len(read_all(path)) == 3


def test_writer_refuses_other_routers(tmp_path):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer, pytest.raises(r3.SpecError) as caught:
        writer.append(make_trace(SPECS[1]))
    for word in (str(SPEC), str(SPECS[1]), "run/0/0/0/0"):
        assert word in str(caught.value)
    before = path.read_bytes()
    with pytest.raises(r3.SpecError) as caught:
        ShardWriter(path, SPECS[1])
    for word in (str(SPEC), str(SPECS[1]), str(path)):
        assert word in str(caught.value)
    assert path.read_bytes() == before


def test_writer_appends_to_whole_shards_only(tmp_path):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer:
        writer.append(make_trace())
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"x", b"foreign file", whole[:5]):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=re.escape(str(path))):
            ShardWriter(path, SPEC)
        assert path.read_bytes() == content
    path.write_bytes(b"")  # nothing to lose
    with ShardWriter(path, SPEC) as writer:
        writer.append(make_trace())
    assert path.read_bytes() == whole
    with pytest.raises(FormatError, match="a folder"):
        ShardWriter(tmp_path, SPEC)
    with pytest.raises(FormatError, match="No such file"):
        ShardWriter(tmp_path / "absent" / "a.r3", SPEC)


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC), pytest.raises(FormatError, match="another ShardWriter"):
        ShardWriter(path, SPEC)
    ShardWriter(path, SPEC).close()


def test_failed_write_leaves_whole_records(tmp_path, monkeypatch):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer:
        writer.append(make_trace(seed=0))
        before = path.read_bytes()
        real, calls = writer._file, []

        class FullDisk:
            def write(self, data: memoryview) -> int:
                calls.append(1)
                if len(calls) == 2:
                    raise OSError(28, "No space left on device")
                return real.write(data[:10])

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        monkeypatch.setattr(writer, "_file", FullDisk())
        with pytest.raises(OSError, match="No space"):
            writer.append(make_trace(seed=1))
        monkeypatch.setattr(writer, "_file", real)
        assert path.read_bytes() == before
        assert writer.append(make_trace(seed=1)) == 1
    assert len(read_all(path)) == 2


@pytest.mark.parametrize(
    "value",
    [b"bytes", 2**70, {1: 2}, object(), "\ud800", np.int64(3)],
    ids=lambda v: type(v).__name__,
)
def test_provenance_that_cannot_be_read_is_not_written(value, tmp_path):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer:
        trace = make_trace(provenance=Provenance(sampling={"a": value}))
        with pytest.raises(r3.TraceError, match="run/0/0/0/0 cannot be stored"):
            writer.append(trace)
        nested: list[Any] = []
        for _ in range(2000):
            nested = [nested]
        with pytest.raises(r3.TraceError, match="cannot be stored"):
            writer.append(make_trace(provenance=Provenance(extra={"a": nested})))
    assert read_all(path) == []


# --- files that are not shards


def test_what_is_not_a_file(tmp_path):
    refused(tmp_path, "a folder")
    refused(tmp_path / "absent.r3", "No such file")
    with pytest.raises(FormatError):
        ShardReader(str(tmp_path) + "/\0.r3")
    with pytest.raises(FormatError, match="not a regular file"):
        ShardReader("/dev/null")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty file"]),
        (b"PK\x03\x04" + bytes(99), ["not a .r3 file", "PK", "expected"]),
        (b"hi\n", ["not a .r3 file", "hi"]),
        (shard.MAGIC[:3], ["cut short", "3 bytes"]),
        (shard.MAGIC, ["header cut short", "0 bytes"]),
        (shard.MAGIC + b"\xff" * 30, ["header of 4294967295 bytes", "1048576"]),
        (shard.MAGIC + b"\xff\xff\0\0" + bytes(30), ["header cut short or corrupt"]),
        (shard.MAGIC + packed([1]), ["expected a map"]),
        (shard.MAGIC + packed({}), ["no version"]),
        (file_bytes(version=[2, 0]), ["version 2.0", "expected 1.x", "later version of r3"]),
        (file_bytes(version=[0, 3]), ["version 0.3"]),
        (file_bytes(version=[1, "0"]), ["no version"]),
        (file_bytes(version=[True, 0]), ["no version"]),
        (file_bytes(spec=[1]), ["no spec"]),
        (file_bytes(spec={}), ["moe_layers"]),
        (file_bytes(spec=SPEC.to_dict() | {"top_k": 2**63}), ["top_k"]),
        (file_bytes(spec=SPEC.to_dict() | {"num_groups": {}, "topk_groups": 1}), ["num_groups"]),
        (file_bytes(spec=SPEC.to_dict() | {"moe_layers": "abc"}), ["integers"]),
        (file_bytes(spec=SPEC.to_dict() | {"later": 1}), ["'later'"]),
        (file_bytes() + b"R3rc" + bytes(12), ["record 0", "corrupt frame"]),
        (file_bytes() + framed(b"", 2**63), ["cut short: 0 bytes, expected 9223372036854775808"]),
        (file_bytes(b""), ["record 0", "header cut short"]),
        (file_bytes(packed(b"\xc1")), ["record 0", "not msgpack"]),
    ],
)
def test_broken_files(content, words, tmp_path):
    path = tmp_path / "a.r3"
    path.write_bytes(content)
    refused(path, *words)


def test_torn_tail_says_what_is_whole(tmp_path):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer:
        for i in range(3):
            writer.append(make_trace(seed=i))
            if i == 1:
                end = path.stat().st_size
    data = path.read_bytes()
    for cut, words in (
        (len(data) - 1, f"expected {len(data) - end - 16}"),
        (end + 16, "cut short: 0 bytes"),
        (end + 5, "5 bytes, expected at least 16"),
    ):
        path.write_bytes(data[:cut])
        refused(path, f"record 2 at byte {end}", words, "2 whole records precede it")


def test_cut_at_every_byte(tmp_path):
    """A file cut between two records is a whole shard; every other cut is refused."""
    path, ends = tmp_path / "a.r3", {}
    with ShardWriter(path, SPEC) as writer:
        ends[path.stat().st_size] = 0
        for i in range(2):
            writer.append(make_trace(seed=i, n=4))
            ends[path.stat().st_size] = i + 1
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        if cut in ends:
            assert len(read_all(path)) == ends[cut]
        else:
            refused(path)


def test_every_flipped_bit_is_found(tmp_path):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer:
        for i in range(2):
            writer.append(make_trace(seed=i, n=4, missing=1, provenance=Provenance(engine="x")))
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(FormatError, match=re.escape(str(path))):
            read_all(path)


@given(st.binary(max_size=300), st.sampled_from(["", "magic", "header", "frame", "record"]))
@ONE_FILE
def test_random_bytes(tmp_path, data, where):
    path = tmp_path / "a.r3"
    content = {
        "": data,
        "magic": shard.MAGIC + data,
        "header": shard.MAGIC + packed(data),
        "frame": file_bytes(data),
        "record": file_bytes(packed(data)),
    }[where]
    path.write_bytes(content)
    with pytest.raises(FormatError, match=re.escape(str(path))):
        read_all(path)


# --- hostile records: whole by their checksums


def mutations(trace: RoutingTrace) -> dict[str, tuple[Any, str]]:
    """Header changes by name: (function of the header, words of the error)."""

    def top(**changes: Any) -> Any:
        return lambda h: h.update(changes)

    def column(i: int, **changes: Any) -> Any:
        return lambda h: h["columns"][i].update(changes)

    def drop(key: str) -> Any:
        return lambda h: h.pop(key)

    return {
        "codec": (column(1, codec="zip9"), "codec 'zip9'"),
        "raw codec": (column(0, codec="plain"), "codec 'plain', expected 'raw'"),
        "dtype": (column(0, dtype="O"), "dtype 'O'"),
        "ids dtype": (column(1, dtype="u2"), "column 'routed_experts': u2"),
        "negative shape": (column(0, shape=[-9]), "shape [-9]"),
        "huge shape": (column(1, shape=[2**60, 3, 4]), "larger than any file"),
        "huge rows": (column(1, shape=[2**40, 3, 4]), f"expected {12 * 2**40}"),
        "huge product": (column(0, shape=[2**40] * 8), "larger than any file"),
        "huge nothing": (column(0, shape=[0, 2**62, 2**62]), "larger than any file"),
        "many axes": (column(0, shape=[1] * 9), "1 to 8 axes"),
        "no axes": (column(0, shape=[]), "1 to 8 axes"),
        "shape of text": (column(0, shape=["9"]), "expected integers"),
        "shape of bool": (column(0, shape=[True]), "expected integers"),
        "size": (column(0, bytes=2**62), f"{2**62} bytes, expected 36"),
        "negative size": (column(0, bytes=-1), "bytes is -1"),
        "checksum": (column(0, crc32=7), "'token_ids': checksum"),
        "align": (column(0, align="page"), "align is 'page'"),
        "version": (column(0, version=2), "version 2"),
        "name": (column(1, name="token_ids", codec="raw"), "two columns"),
        "raw ids": (column(1, codec="raw"), "codec 'raw' for routed_experts"),
        "no name": (column(0, name=None), "name is None"),
        "lost column": (lambda h: h["columns"].pop(), "by its header"),
        "no columns": (top(columns=[]), "by its header"),
        "columns of text": (top(columns=["a"]), "expected a map"),
        "digest": (top(digest="0" * 32), f"digest {trace.digest}, expected"),
        "prompt_len": (top(prompt_len=4), "digest"),
        "huge prompt_len": (top(prompt_len=2**63), "prompt_len"),
        "rollout id": (top(rollout_id="x"), "run/group/sample/turn/attempt"),
        "long rollout id": (top(rollout_id="r/g/0/0/" + "9" * 5000), "rollout id"),
        "odd rollout id": (top(rollout_id="r/g/00/0/0"), "written 'r/g/0/0/0'"),
        "provenance": (top(provenance={"engine": 5}), "Provenance.engine"),
        "provenance list": (top(provenance=[1]), "expected dict"),
        "no digest": (drop("digest"), "no 'digest'"),
        "bytes": (top(digest=b"0" * 32), "not msgpack of plain values"),
        "extension": (top(later=msgpack.ExtType(5, b"x")), "not msgpack of plain values"),
        "empty extension": (top(later=msgpack.ExtType(5, b"")), "not msgpack of plain values"),
        "timestamp": (top(later=msgpack.Timestamp(1)), "not msgpack of plain values"),
        "integer key": (top(provenance={5: 5}), "not msgpack of plain values"),
        "bytes key": (top(provenance={b"k": 5}), "not msgpack of plain values"),
        "nested": (top(later=[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]), "nested more than 16"),
    }


@pytest.mark.parametrize("name", mutations(make_trace()))
def test_hostile_record(name, tmp_path):
    path, trace = tmp_path / "a.r3", make_trace()
    header, payload = header_and_payload(trace)
    change, words = mutations(trace)[name]
    change(header)
    path.write_bytes(file_bytes(packed(header) + payload))
    tracemalloc.start()
    try:
        refused(path, words, "record 0 at byte")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",  # a list, then a map, of 2^32 - 1 items
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",  # text of as many bytes
        b"\xdc\xff\xff" * 1023 + b"\xc0",  # lists of 65,535 in each other
        b"\x91" * 5000 + b"\xc0",
        b"\x91" * 900 + b"\xc0",
        b"\x81\xa1\xff\xc0",  # a key that is not UTF-8
        b"\x82\xa1a\xc0\xa1a\xc0",  # a key twice
        b"\x81\x90\xc0",  # a key that is a list
        b"\xc0\xc0",
        b"",
    ],
    ids=lambda d: d[:8].hex(),
)
def test_hostile_msgpack(data, tmp_path):
    path = tmp_path / "a.r3"
    for content in (shard.MAGIC + packed(data), file_bytes(packed(data))):
        path.write_bytes(content)
        refused(path, "header")


def test_checked_content(tmp_path):
    """Payloads that no engine wrote are refused although every checksum is right."""
    path, trace = tmp_path / "a.r3", make_trace(missing=1)
    header, payload = header_and_payload(trace)
    tokens, ids, valid = header["columns"]
    start = tokens["bytes"]
    for at, value, words in (
        (start + 12, 60, "layer 1: expert id 60"),
        (start, 1, "row 0 is missing"),
        (len(payload) - 1, 2, "a bool stored as 2"),
        (3, 0x80, "token 0: id -"),
    ):
        changed = bytearray(payload)
        changed[at] = value
        tokens["crc32"] = zlib.crc32(changed[:start])
        ids["crc32"] = zlib.crc32(changed[start : start + ids["bytes"]])
        valid["crc32"] = zlib.crc32(changed[start + ids["bytes"] :])
        path.write_bytes(file_bytes(packed(header) + bytes(changed)))
        refused(path, words, "run/0/0/0/0")


def test_one_rollout_twice_in_a_file(tmp_path):
    path = tmp_path / "a.r3"
    header, payload = header_and_payload(make_trace())
    path.write_bytes(file_bytes(*[packed(header) + payload] * 2))
    refused(path, "records 0 and 1 are both of rollout run/0/0/0/0")
    with pytest.raises(FormatError, match="are both of rollout"):
        ShardWriter(path, SPEC)


def test_later_minor_versions_are_read(tmp_path):
    """Map keys that this version does not know are skipped, columns are carried through."""
    path, trace = tmp_path / "a.r3", make_trace(extra={"later": Column(np.arange(9), "token", 7)})
    header, payload = header_and_payload(trace)
    header["new"] = {"a": [1, 2.5, None, True]}
    header["columns"][0]["new"] = "x"
    path.write_bytes(file_bytes(packed(header) + payload, version=[1, 9], new=[1]))
    (found,) = read_all(path)
    assert_same(found, trace)
    other = tmp_path / "b.r3"
    with ShardWriter(other, SPEC) as writer:
        writer.append(found)
    assert_same(read_all(other)[0], trace)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from([2**31, 2**32, 2**60, "plain", "raw", "u1", "bool"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(data=st.data())
@ONE_FILE
def test_mutated_fields(tmp_path, data):
    """Any value in any field, checksums made right: FormatError, or a trace that passes."""
    path = tmp_path / "a.r3"
    values = {"version": [1, 0], "spec": SPEC.to_dict()}
    header, payload = header_and_payload(make_trace())
    places: list[Any] = [values, values["spec"], header, header["provenance"], *header["columns"]]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places))
        key = data.draw(st.sampled_from([*place, "engine", "sampling", "num_groups"]))
        place[key] = data.draw(ANYTHING)
    content = packed(header) + payload
    path.write_bytes(shard.MAGIC + packed(values) + framed(content))
    with contextlib.suppress(FormatError):
        read_all(path)


# --- the page that describes the format


def example() -> tuple[RoutingTrace, bytes]:
    spec = RouterSpec(num_experts=8, top_k=2, moe_layers=(1, 2), num_layers=3)
    trace = RoutingTrace.build(
        spec=spec,
        token_ids=[5, 6, 7],
        routed_experts=np.array([[[0, 1], [2, 7]], [[3, 1], [4, 5]]]),
        prompt_len=1,
        rollout_id=RolloutId("run"),
        provenance=Provenance(engine="vllm"),
    )
    pieces = record.encode_record(trace)
    header = shard.MAGIC + packed({"version": [1, 0], "spec": spec.to_dict()})
    return trace, header + framed(b"".join(map(bytes, pieces)))


def annotated(data: bytes) -> str:
    """Hex of a shard of one record, its parts named."""
    lines, at = [], 0

    def part(size: int, what: str) -> None:
        nonlocal at
        for i in range(at, at + size, 16):
            row = data[i : min(i + 16, at + size)]
            lines.append(f"{i:04x}  {row.hex(' '):47}  {what if i == at else ''}".rstrip())
        at += size

    def number(size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    def header(what: str) -> None:
        size = number(4)
        part(4, f"{size} bytes of {what}")
        part(4, "CRC-32 of the length and these bytes")
        part(size, f"{what}, msgpack")

    part(8, "magic")
    header("file header")
    part(4, "marker of a record")
    part(8, f"{number(8)} bytes of record")
    part(4, "CRC-32 of marker and length")
    start = at
    header("record header")
    for column in msgpack.unpackb(data[start + 8 : at])["columns"]:
        part(column["bytes"], column["name"])
    assert at == len(data)
    return "\n".join(lines) + "\n"


def test_the_example_on_the_page(tmp_path):
    """docs/format.md shows the bytes that are written today, and they read back."""
    trace, data = example()
    path = tmp_path / "a.r3"
    with ShardWriter(path, trace.spec) as writer:
        writer.append(trace)
    assert path.read_bytes() == data
    page = (ROOT / "docs" / "format.md").read_text()
    block = re.search(r"```hex\n(.*?)```", page, re.DOTALL).group(1)
    assert block == annotated(data)
    headers = re.search(r"```json\n(.*?)\n\n(.*?)```", page, re.DOTALL)
    assert json.loads(headers.group(1)) == {"version": [1, 0], "spec": trace.spec.to_dict()}
    assert json.loads(headers.group(2)) == header_and_payload(trace)[0]
    path.write_bytes(b"".join(bytes.fromhex(line[6:53]) for line in block.splitlines()))
    assert_same(read_all(path)[0], trace)


def test_threads_share_a_writer(tmp_path):
    spec = RouterSpec(64, 8, tuple(range(24)), 24)
    traces = [make_trace(spec, 200, seed) for seed in range(24)]
    with ShardWriter(tmp_path / "a.r3", spec) as writer:
        with ThreadPoolExecutor(4) as pool:
            places = list(pool.map(writer.append, [*traces, *traces]))
        assert len(writer) == 24
    assert places[:24] == places[24:]
    with ShardReader(tmp_path / "a.r3") as reader:
        for trace, place in zip(traces, places, strict=False):
            assert_same(reader[place], trace)
