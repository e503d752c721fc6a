"""Files that are no shards, or damaged ones: what is found, and what is still read."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r3 import FormatError, TornShardWarning
from r3.storage import ShardReader, ShardWriter
from storage_tools import (
    MAGIC,
    SPEC,
    assert_same,
    file_bytes,
    file_header,
    full_trace,
    make_trace,
    packed,
    read_all,
    refused,
    split_file,
    write,
)

ONE_FILE = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=200,
    deadline=None,
)


def test_what_is_not_a_file(tmp_path):
    refused(tmp_path, "a folder")
    refused(tmp_path / "absent.r3", "No such file")
    with pytest.raises(FormatError):
        ShardReader(str(tmp_path) + "/\0.r3")
    with pytest.raises(FormatError, match="not a regular file"):
        ShardReader("/dev/null")
    with pytest.raises(FormatError, match="a folder"):
        ShardWriter(tmp_path, SPEC)
    with pytest.raises(FormatError, match="No such file"):
        ShardWriter(tmp_path / "absent" / "a.r3", SPEC)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty file"]),
        (b"PK\x03\x04" + bytes(99), ["not a .r3 file", "PK", "expected"]),
        (b"hi\n", ["not a .r3 file", "hi"]),
        (MAGIC[:3], ["cut short", "3 bytes"]),
        (MAGIC, ["header cut short", "0 bytes"]),
        (MAGIC + b"\xff" * 30, ["header of 4294967295 bytes", "1048576"]),
        (MAGIC + b"\xff\xff\0\0" + bytes(30), ["header cut short or corrupt"]),
        (MAGIC + packed([1]), ["expected a map"]),
        (MAGIC + packed({}), ["no version"]),
        (file_bytes(version=[1, 0]), ["version 1.0", "expected 2.x"]),
        (file_bytes(version=[3, 0]), ["version 3.0", "expected 2.x", "later version of r3"]),
        (file_bytes(version=[0, 3]), ["version 0.3"]),
        (file_bytes(version=[2, "0"]), ["no version"]),
        (file_bytes(version=[True, 0]), ["no version"]),
        (file_bytes(salt="00"), ["salt of 1 bytes, expected 8"]),
        (file_bytes(salt="x" * 16), ["file header"]),
        (file_bytes(salt=5), ["salt is 5"]),
        (file_bytes(spec=[1]), ["no spec"]),
        (file_bytes(spec={}), ["moe_layers"]),
        (file_bytes(spec=SPEC.to_dict() | {"top_k": 2**63}), ["top_k"]),
        (file_bytes(spec=SPEC.to_dict() | {"num_groups": {}, "topk_groups": 1}), ["num_groups"]),
        (file_bytes(spec=SPEC.to_dict() | {"moe_layers": "abc"}), ["integers"]),
        (file_bytes(spec=SPEC.to_dict() | {"later": 1}), ["'later'"]),
        (file_bytes(b""), ["record 0", "header cut short"]),
        (file_bytes(packed(b"\xc1")), ["record 0", "not msgpack"]),
    ],
)
def test_broken_files(content, words, tmp_path):
    path = tmp_path / "a.r3"
    path.write_bytes(content)
    refused(path, *words)
    if content and "record 0" not in words:  # a file of no bytes is a new one
        with pytest.raises(FormatError, match=re.escape(str(path))):
            ShardWriter(path, SPEC)
        assert path.read_bytes() == content


@given(st.binary(max_size=300), st.sampled_from(["", "magic", "header", "record", "columns"]))
@ONE_FILE
def test_random_bytes(tmp_path, data, where):
    path = tmp_path / "a.r3"
    content = {
        "": data,
        "magic": MAGIC + data,
        "header": MAGIC + packed(data),
        "record": file_bytes(data),
        "columns": file_bytes(packed(data)),
    }[where]
    path.write_bytes(content)
    with pytest.raises(FormatError, match=re.escape(str(path))):
        read_all(path)


@given(st.binary(min_size=1, max_size=300))
@ONE_FILE
def test_random_tail(tmp_path, data):
    path = tmp_path / "a.r3"
    path.write_bytes(file_header() + data)
    with pytest.warns(TornShardWarning, match="0 whole records"):
        assert read_all(path) == []
    with pytest.warns(TornShardWarning, match=f"{len(data)} bytes cut off"):
        ShardWriter(path, SPEC).close()
    assert read_all(path) == []


@pytest.mark.slow
def test_a_flip_in_any_byte(tmp_path):
    """It is found, or it is in an index, without which the traces are there as well."""
    path = tmp_path / "a.r3"
    traces = [full_trace(n=8, seed=i) for i in range(2)]
    data = write(path, traces).read_bytes()
    index = data.index(b"R3ix")
    rng = np.random.default_rng()
    for whole, content in ((True, data), (False, data[:index])):
        for at in range(rng.integers(5), len(content), 5):
            flipped = bytearray(content)
            flipped[at] ^= 1 << rng.integers(8)
            path.write_bytes(flipped)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    found = read_all(path)
                except FormatError:
                    refused(path)
                    assert at < index
                    continue
            assert [w.category for w in caught] == [TornShardWarning]
            # only the frame of the last record can be damaged so that it looks cut off
            assert len(found) == 2 if whole else len(found) == 1
            for one, trace in zip(found, traces, strict=False):
                assert_same(one, trace)


@pytest.mark.slow
def test_a_cut_at_any_byte(tmp_path):
    """What is whole in front of it is read, and a writer goes on there."""
    path = tmp_path / "a.r3"
    traces = [make_trace(seed=i, n=4) for i in range(2)]
    data = write(path, traces).read_bytes()
    frames = [at for at, _, _ in split_file(data)[1]]
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        if cut < frames[0]:
            refused(path)
            continue
        whole = sum(cut >= end for end in frames[1:])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with ShardReader(path) as reader:
                torn, found = reader.torn, list(reader)
        assert [w.category for w in caught] == [TornShardWarning] * (cut not in frames)
        assert bool(torn) == (cut not in frames)
        assert len(found) == whole
        for one, trace in zip(found, traces, strict=False):
            assert_same(one, trace)
        if cut % 11:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TornShardWarning)
            writer = ShardWriter(path, SPEC)
        with writer:
            assert len(writer) == whole
            assert [writer.append(t) for t in traces] == [0, 1]
        for one, trace in zip(read_all(path), traces, strict=True):
            assert_same(one, trace)


def test_a_torn_tail_is_described(tmp_path):
    path = tmp_path / "a.r3"
    data = write(path, [make_trace(seed=i) for i in range(3)]).read_bytes()
    (_, _, (end, _, content), _) = split_file(data)[1]
    for cut, words in (
        (end + 15 + len(content), f"cut short: {len(content) - 1} bytes, expected {len(content)}"),
        (end + 16, f"cut short: 0 bytes, expected {len(content)}"),
        (end + 5, "5 bytes, expected at least 16"),
    ):
        path.write_bytes(data[:cut])
        expected = [
            f"{path}: {cut - end} bytes from byte {end} on are no whole record",
            words,
            "2 whole records precede them",
        ]
        with pytest.warns(TornShardWarning) as caught:
            assert len(read_all(path)) == 2
        for word in expected:
            assert word in str(caught[0].message)
        with pytest.warns(TornShardWarning) as caught, ShardWriter(path, SPEC) as writer:
            assert len(writer) == 2
        for word in (f"{path}: {cut - end} bytes cut off from byte {end} on", words):
            assert word in str(caught[0].message)
        path.unlink()


def test_damage_in_the_middle(tmp_path):
    """Behind a frame that is lost, with whole records behind it, nothing is taken for granted."""
    path = tmp_path / "a.r3"
    traces = [make_trace(seed=i) for i in range(4)]
    data = bytearray(write(path, traces).read_bytes())
    frames = [at for at, _, _ in split_file(bytes(data))[1]]
    data[frames[1] + 3] ^= 1
    path.write_bytes(data)
    with ShardReader(path) as reader:  # the index says where the others are
        assert len(reader) == 4
        for i in (0, 2, 3):
            assert_same(reader[i], traces[i])
        with pytest.raises(FormatError, match=f"{path}: record 1 at byte {frames[1]}: marker"):
            reader[1]
    path.write_bytes(data[: frames[4]])
    words = f"{path}: bytes {frames[1]} to {frames[2] - 1} are neither record nor index"
    with pytest.raises(FormatError, match=words):
        ShardReader(path)
