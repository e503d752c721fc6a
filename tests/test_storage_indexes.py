"""Indexes: a file of many records opens at its end, and what an index says holds."""

from __future__ import annotations

import os
import random
import struct
import warnings
from pathlib import Path

import pytest

import r3
from r3 import FormatError, RouterSpec, TornShardWarning
from r3.storage import ShardReader, ShardWriter
from storage_tools import (
    assert_same,
    file_bytes,
    framed,
    index_bytes,
    make_trace,
    packed,
    read_all,
    record_parts,
    refused,
    split_file,
    write,
)

TINY = RouterSpec(4, 1, (0,), 1)


def tiny(i: int) -> r3.RoutingTrace:
    return make_trace(TINY, 2, i)


def indexes(path: Path) -> list[tuple[int, int, int, int]]:
    """(frame, first record, records, records on the disk) of the chain from the last index on."""
    data = path.read_bytes()
    found = {at: body for at, marker, body in split_file(data)[1] if marker == b"R3ix"}
    chain, at = [], max(found)
    while at:
        before, first, synced = struct.unpack_from("<QQQ", found[at])
        chain.append((at, first, (len(found[at]) - 40) // 40, synced))
        at = before
    return chain[::-1]


@pytest.mark.parametrize("durable", [False, True])
def test_many_flushes(durable, tmp_path, monkeypatch):
    path, n = tmp_path / "a.r3", 300
    monkeypatch.setattr("r3.storage.writer.os.fsync", lambda file: None)
    with ShardWriter(path, TINY, durable=durable) as writer:
        for i in range(n):
            assert writer.append(tiny(i)) == i
            size = writer.file_size
            writer.flush()
            writer.flush()
            assert (writer.file_size > size) == durable
            assert writer.file_size == path.stat().st_size
            if i % 50 == 0:
                with ShardReader(path) as reader:
                    assert reader.rollout_ids == [tiny(j).rollout_id for j in range(i + 1)]
    chain = indexes(path)
    assert chain[0][1] == 0
    assert [first + count for _, first, count, _ in chain] == [*(c[1] for c in chain[1:]), n]
    assert len(chain) <= 10
    assert chain[-1][3] == n
    for i, found in enumerate(read_all(path)):
        assert_same(found, tiny(i))
    sizes = [len(body) for _, marker, body in split_file(path.read_bytes())[1] if marker == b"R3ix"]
    assert len(sizes) == (n if durable else 1)
    assert sum(sizes) <= 40 * n * 10 + 40 * len(sizes)


def test_an_index_says_on_disk_only_after_it_is(tmp_path, monkeypatch):
    calls = []
    fsync, writev = os.fsync, os.writev
    with ShardWriter(tmp_path / "a.r3", TINY, durable=True) as writer:
        monkeypatch.setattr("r3.storage.writer.os.fsync", lambda f: (calls.append("s"), fsync(f)))

        def write(file: int, pieces: list[memoryview]) -> int:
            calls.append(bytes(pieces[0][:4]).decode())
            return writev(file, pieces)

        monkeypatch.setattr("r3.storage.writer.os.writev", write)
        writer.append(tiny(0))
        writer.append(tiny(1))
        writer.flush()
        writer.flush()
        writer.append(tiny(1))
        writer.flush()
    assert calls == ["R3rc", "R3rc", "s", "R3ix", "s"]


@pytest.mark.slow
def test_thousands_of_records(tmp_path):
    path, n = tmp_path / "a.r3", 5200
    traces = [tiny(i) for i in range(n)]
    with ShardWriter(path, TINY) as writer:
        assert [writer.append(t) for t in traces] == list(range(n))
        for close in (False, True):
            if close:
                writer.close()
            with ShardReader(path) as reader:
                assert len(reader) == n
                for i in random.sample(range(n), 50):
                    assert reader.find(traces[i].rollout_id) == i
                    assert_same(reader[i], traces[i])
    chain = indexes(path)
    assert [count for _, _, count, _ in chain] in ([4096, n - 4096], [n])
    with ShardWriter(path, TINY) as writer:
        assert writer.append(traces[4321]) == 4321
        assert writer.append(tiny(n)) == n
    with ShardReader(path) as reader:
        assert reader.rollout_ids == [t.rollout_id for t in [*traces, tiny(n)]]


def test_indexes_that_lie(tmp_path):
    """Whole by their checksums, but not of this file's records."""
    path = tmp_path / "a.r3"
    records = [packed(h) + p for h, p in record_parts(make_trace(seed=0), make_trace(seed=1))]
    data = file_bytes(*records)
    real = write(tmp_path / "b.r3", [make_trace(seed=0), make_trace(seed=1)]).read_bytes()
    *frames, (_, _, body) = split_file(real)[1]
    entries = [struct.unpack_from("<Q16s16s", body, 24 + 40 * i) for i in range(2)]
    assert [e[0] for e in entries] == [at for at, _, _ in frames]
    end = len(data)
    good = index_bytes(end, entries, synced=2)
    assert good[16:-16] == body[:-16]
    path.write_bytes(data + good)
    assert len(read_all(path)) == 2
    (first, second), (one, other) = entries, [f[0] for f in frames]
    for lie, words in (
        ([first, (other, *first[1:])], "is not what the index has"),
        ([first, (other, second[1], first[2])], "is not what the index has"),
        ([first, (one + 1, *second[1:])], "record 1 at byte"),
        ([first, (end - 5, *second[1:])], "record 1 at byte"),
    ):
        path.write_bytes(data + index_bytes(end, lie, synced=2))
        refused(path, words)
    # indexes that cannot be are as if there were none
    for lie in (
        index_bytes(end, [second, first]),
        index_bytes(end, [first, (end, *second[1:])]),
        index_bytes(end, [(0, *first[1:])]),
        index_bytes(end, entries, before=one, first=1),
        index_bytes(end, entries, before=end, first=1),
        index_bytes(end, entries, before=2**63, first=2**60),
        framed(b"x" * 100, end, marker=b"R3ix"),
    ):
        path.write_bytes(data + lie)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TornShardWarning)
            try:
                found = read_all(path)
            except FormatError:
                refused(path, "index")
            else:
                assert [t.digest for t in found] == [make_trace(seed=i).digest for i in range(2)]
