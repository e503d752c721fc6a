"""Shared rows whose record is damaged, lost or a lie: an error that names who needs it."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import numpy as np
import pytest

from r3 import FormatError, TornShardWarning
from r3.storage import ShardReader, ShardWriter
from r3.storage.experts import MAX_SPANS
from storage_tools import (
    SPEC,
    assert_same,
    assert_slice,
    continued,
    expected_slice,
    file_bytes,
    make_trace,
    packed,
    read_all,
    record_parts,
    refused,
    split_file,
    write,
)


def test_damage_is_named_by_all_who_share_it(tmp_path):
    base = make_trace(n=400, seed=100)
    traces = [base, continued(base, 399, 450, 1), make_trace(n=50, seed=2)]
    traces += [continued(traces[1], 449, 500, 3, 0.02), continued(base, 399, 400, 4)]
    data = write(tmp_path / "a.r3", traces).read_bytes()
    frames = [at for at, _, _ in split_file(data)[1]]
    with ShardReader(tmp_path / "a.r3") as reader:
        header = reader.header(0).column("routed_experts")
    chunk = frames[0] + 16 + header.offset
    for place in (chunk + 5, chunk + header.size - 1, frames[0] + 13, frames[0] + 30):
        damaged = bytearray(data)
        damaged[place] ^= 4
        path = tmp_path / "b.r3"
        path.write_bytes(damaged)
        with ShardReader(path) as reader:
            assert_same(reader[2], traces[2])
            for i in (0, 1, 3, 4):
                with pytest.raises(FormatError) as caught:
                    reader[i]
                words = str(caught.value)
                assert f"{path}: record {i} at byte {frames[i]}" in words
                if i:
                    assert f"rollout {traces[i].rollout_id}: column 'routed_experts'" in words
            part = reader.slice(1, tokens=slice(399, 450))  # its own rows
            assert_slice(part, expected_slice(traces[1], SPEC.moe_layers, slice(399, 450)))
        with ShardWriter(path, SPEC) as writer, warnings.catch_warnings():
            warnings.simplefilter("error")
            writer.append(continued(base, 399, 420, 9))


def test_what_shares_lost_rows_is_lost(tmp_path):
    """A loss of power took a record that later ones need; a writer drops them and says so."""
    base = make_trace(n=400, seed=100)
    traces = [
        make_trace(n=50, seed=2),
        base,
        continued(base, 399, 450, 1),
        make_trace(n=60, seed=3),
    ]
    path = tmp_path / "a.r3"
    data = bytearray(write(path, traces).read_bytes())
    frames = [at for at, _, _ in split_file(bytes(data))[1]]
    del data[frames[4] :]  # the index
    data[frames[1] + 50 : frames[1] + 60] = bytes(10)
    path.write_bytes(data)
    with pytest.warns(TornShardWarning) as caught:
        writer = ShardWriter(path, SPEC)
    with writer:
        assert len(writer) == 2
        assert [writer.append(t) for t in traces] == [0, 2, 3, 1]
    for word in (f"record at byte {frames[1]}", f"record at byte {frames[2]}: rollout run/1/0/0/0"):
        assert word in str(caught[0].message)
    for found, i in zip(read_all(path), (0, 3, 1, 2), strict=True):
        assert_same(found, traces[i])


# --- spans and exceptions that lie, with right checksums


FRAMES = 126  # where the first record of a file of SPEC is


def family() -> tuple[Any, ...]:
    """Headers and payloads of a base, another trace, and one that has the base's 199 rows with
    exceptions; the places of these records."""
    base = make_trace(n=200, seed=100)
    parts = record_parts(base, make_trace(n=100, seed=2), continued(base, 199, 210, 3, 0.05))
    frames = [FRAMES]
    for header, payload in parts:
        frames.append(frames[-1] + 16 + len(packed(header)) + len(payload))
    return parts, frames


def build(parts: Any) -> bytes:
    return file_bytes(*[packed(header) + payload for header, payload in parts])


def test_the_family_is_read_as_it_is(tmp_path):
    path = tmp_path / "a.r3"
    parts, frames = family()
    path.write_bytes(build(parts))
    assert [at for at, _, _ in split_file(path.read_bytes())[1]] == frames[:3]
    entry = parts[2][0]["columns"][1]
    assert entry["spans"] == [[frames[0], 0, 199]]
    assert min(entry["exceptions"]) > 0
    assert len(read_all(path)) == 3


SPANS = {
    "itself": (lambda f: [[f[2], 0, 199]], "shares rows of byte {2}, expected earlier ones"),
    "later": (lambda f: [[f[3], 0, 199]], "expected earlier ones"),
    "far": (lambda f: [[2**62, 0, 199]], "expected earlier ones"),
    "no frame": (lambda f: [[f[0] + 1, 0, 199]], "marker"),
    "magic": (lambda f: [[0, 0, 199]], "marker"),
    "start": (lambda f: [[f[0], 1, 199]], "rows 1 to 199 of what rollout run/100/0/0/0 stores"),
    "far start": (lambda f: [[f[0], 2**62, 199]], "run/100/0/0/0 stores, expected less than its"),
    "too short": (lambda f: [[f[1], 0, 199]], "run/2/0/0/0 stores, expected less than its 99"),
    "in two": (lambda f: [[f[0], 0, 100], [f[1], 0, 99]], "has digest"),
    "gap": (lambda f: [[f[0], 0, 100], [f[0], 99, 99]], "has digest"),
    "fewer rows": (lambda f: [[f[0], 0, 198]], "198 shared and 10 stored rows, expected the 209"),
}


@pytest.mark.parametrize("name", SPANS)
def test_spans_that_lie(name, tmp_path):
    path = tmp_path / "a.r3"
    parts, frames = family()
    change, words = SPANS[name]
    parts[2][0]["columns"][1]["spans"] = change(frames)
    path.write_bytes(build(parts))
    refused(path, words.format(*frames), "rollout run/3/0/0/0", "record 2 at byte")
    with ShardReader(path) as reader:
        assert len(reader[0].token_ids) + len(reader[1].token_ids) == 300


def test_as_many_spans_as_there_can_be(tmp_path):
    """Rows of one span, named one by one."""
    path, rows = tmp_path / "a.r3", 3 * MAX_SPANS
    base = make_trace(n=rows + 1, seed=100)
    trace = continued(base, rows, rows + 10, 3, 0.05)
    parts = record_parts(base, trace)
    entry = parts[1][0]["columns"][1]
    assert entry["spans"] == [[FRAMES, 0, rows]]
    for each, count in ((3, MAX_SPANS), (2, MAX_SPANS * 3 // 2)):
        entry["spans"] = [[FRAMES, at, each] for at in range(0, rows, each)]
        path.write_bytes(build(parts))
        if count <= MAX_SPANS:
            assert_same(read_all(path)[1], trace)
        else:
            refused(path, f"{count} spans with {rows} rows")


def test_spans_of_another_codec(tmp_path):
    path = tmp_path / "a.r3"
    parts, _ = family()
    ordered = record_parts(make_trace(n=200, seed=100), keep_order=True)[0]
    path.write_bytes(build([ordered, *parts[1:]]))
    refused(path, "shares rows in codec 'enum-ordered'", "rollout run/3/0/0/0")


def test_spans_of_another_trace(tmp_path):
    """A record of the right shape in the place of the base: the digest tells."""
    path = tmp_path / "a.r3"
    parts, _ = family()
    path.write_bytes(build([record_parts(make_trace(n=200, seed=5))[0], *parts[1:]]))
    refused(path, "rollout run/3/0/0/0: its content has digest")


@pytest.mark.parametrize("way", ["twice", "falling", "outside", "count", "no layer", "valid"])
def test_exceptions_that_lie(way, tmp_path):
    path = tmp_path / "a.r3"
    parts, _ = family()
    header, payload = parts[2]
    tokens, experts = header["columns"]
    counts = experts["exceptions"]
    payload = bytearray(payload)
    # behind the tokens and three layers of ten rows; positions are of 8 bits, as 199 rows need
    chunk = 10 * 2 + 4 + 4
    at = tokens["bytes"] + 3 * chunk
    assert list(payload[at : at + counts[0]]) == sorted(set(payload[at : at + counts[0]]))
    words = "column 'routed_experts': layer 1, exceptions: rows that are not ascending below 199"
    if way == "twice":
        payload[at + 1] = payload[at]
    elif way == "falling":
        payload[at], payload[at + 1] = payload[at + 1], payload[at]
    elif way == "outside":
        payload[at + counts[0] - 1] = 199
    elif way == "count":
        counts[0], words = 200, "exceptions are [200"
    elif way == "no layer":
        counts.pop()
        words = "or 3 numbers"
    else:
        valid = np.ones(209, bool)
        valid[5] = False
        header["columns"].append(
            {"name": "valid", "align": "row", "version": 1, "dtype": "bool", "shape": [209]}
            | {"codec": "raw", "bytes": 209, "crc32": zlib.crc32(valid.tobytes())}
        )
        payload += valid.tobytes()
        words = "199 shared and 10 stored rows, expected the first captured ones"
    if way in ("twice", "falling", "outside"):
        size = counts[0] + 2 * counts[0] + -(-3 * counts[0] // 8)  # positions, planes, digits
        crc32 = zlib.crc32(payload[at : at + size])
        payload[at + size : at + size + 4] = crc32.to_bytes(4, "little")
    path.write_bytes(build([*parts[:2], (header, bytes(payload))]))
    refused(path, words, "record 2 at byte")
