"""Restarts of writers, and readers that follow them."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import r3
from r3 import RolloutId, TornShardWarning
from r3.storage import ShardReader, ShardWriter
from r3.storage.stored import StoredRecord
from storage_tools import (
    ROOT,
    SPEC,
    assert_same,
    make_trace,
    read_all,
    split_file,
    write,
)


def test_append_goes_on_where_the_last_writer_ended(tmp_path):
    path = tmp_path / "a.r3"
    write(path, [make_trace(seed=0)])
    for i in range(1, 5):
        before = path.read_bytes()
        with ShardWriter(path, SPEC) as writer:
            assert len(writer) == i
            assert writer.append(make_trace(seed=i - 1)) == i - 1
            with pytest.raises(r3.TraceError, match="run/0/0/0/0 is record 0"):
                writer.append(make_trace(seed=9, rollout_id=RolloutId("run", "0")))
            assert writer.append(make_trace(seed=i)) == i
        assert path.read_bytes().startswith(before)
        assert len(read_all(path)) == i + 1
    before = path.read_bytes()
    ShardWriter(path, SPEC).close()  # nothing to add
    assert path.read_bytes() == before


def test_no_records(tmp_path):
    path = tmp_path / "a.r3"
    path.write_bytes(b"")  # nothing to lose
    for _ in range(2):
        ShardWriter(path, SPEC).close()
        assert read_all(path) == []
        with ShardReader(path) as reader, pytest.raises(IndexError):
            reader[-1]
    first, second = tmp_path / "b.r3", tmp_path / "c.r3"
    write(first, [make_trace()])
    write(second, [make_trace()])
    assert first.read_bytes() != second.read_bytes()  # by their salt


def test_closing_twice_and_appending_after(tmp_path):
    writer = ShardWriter(tmp_path / "a.r3", SPEC)
    writer.append(make_trace())
    writer.close()
    writer.close()
    size = writer.file_size
    with pytest.raises(ValueError, match="closed"):
        writer.append(make_trace(seed=1))
    assert size == (tmp_path / "a.r3").stat().st_size


def test_synced_records_are_not_read_again(tmp_path, monkeypatch):
    path = tmp_path / "a.r3"
    traces = [make_trace(seed=i) for i in range(4)]
    writer = ShardWriter(path, SPEC, durable=True)
    for i, trace in enumerate(traces):
        writer.append(trace)
        if i == 2:
            writer.flush()
    left = path.read_bytes()  # as a process leaves it that is killed here
    writer.close()
    path.write_bytes(left)
    read, trace_of = [], StoredRecord.trace

    def count(self: StoredRecord) -> r3.RoutingTrace:
        read.append(str(self.header.rollout_id))
        return trace_of(self)

    monkeypatch.setattr(StoredRecord, "trace", count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is lost
        resumed = ShardWriter(path, SPEC)
    assert read == ["run/3/0/0/0"]
    assert [resumed.append(t) for t in traces] == [0, 1, 2, 3]
    resumed.close()
    assert path.read_bytes().startswith(left)


def test_what_the_disk_lost_in_the_middle(tmp_path):
    """After a loss of power, blocks that were not synced may be zeros; what is whole stays."""
    path = tmp_path / "a.r3"
    traces = [make_trace(seed=i, n=30) for i in range(6)]
    writer = ShardWriter(path, SPEC, durable=True)
    for i, trace in enumerate(traces):
        writer.append(trace)
        if i == 1:
            writer.flush()
    data = bytearray(path.read_bytes())
    writer.close()
    frames = [at for at, marker, _ in split_file(bytes(data))[1] if marker == b"R3rc"]
    data[frames[3] : frames[3] + 40] = bytes(40)
    data[frames[4] + 100] ^= 1
    path.write_bytes(data)
    with pytest.warns(TornShardWarning) as caught:
        writer = ShardWriter(path, SPEC)
    words = str(caught[0].message)
    for word in (str(path), f"from byte {frames[3]} on", f"record at byte {frames[4]}"):
        assert word in words
    assert len(writer) == 4
    with ShardReader(path) as reader:
        assert [t.digest for t in reader] == [traces[i].digest for i in (0, 1, 2, 5)]
    assert [writer.append(t) for t in traces] == [0, 1, 2, 4, 5, 3]
    writer.close()
    with ShardReader(path) as reader:
        for trace in traces:
            assert_same(reader.get(trace.rollout_id), trace)


# --- processes


SCRIPT = """
import os, sys, warnings
sys.path.insert(0, sys.argv[2])
from storage_tools import SPEC, make_trace
from r3.storage import ShardWriter
writer = ShardWriter(sys.argv[1], SPEC)
for i in range(int(sys.argv[3])):
    writer.append(make_trace(seed=i, n=40))
    print(i, flush=True)
if sys.argv[4] == "close":
    writer.close()
os._exit(0)
"""


def start(path: Path, count: int, end: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", SCRIPT, str(path), str(ROOT / "tests"), str(count), end]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_writer_that_is_killed(tmp_path):
    path = tmp_path / "a.r3"
    with start(path, 100_000, "") as process:
        for _ in range(random.randrange(1, 200)):
            last = int(process.stdout.readline())
        process.kill()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornShardWarning)  # it may have been in the middle
        found = read_all(path)
        assert len(found) > last
        with ShardWriter(path, SPEC) as writer:
            assert len(writer) == len(found)
            assert writer.append(make_trace(seed=last, n=40)) == last
    for i, trace in enumerate(read_all(path)):
        assert_same(trace, make_trace(seed=i, n=40))


@pytest.mark.parametrize("end", ["close", "exit"])
def test_following_another_process(end, tmp_path):
    path, n, seen = tmp_path / "a.r3", 200, 0
    with start(path, n, end) as process:
        process.stdout.readline()
        with ShardReader(path) as reader, warnings.catch_warnings():
            warnings.simplefilter("ignore", TornShardWarning)
            deadline = time.monotonic() + 60
            while len(reader) < n and time.monotonic() < deadline:
                for i in range(seen, len(reader)):
                    assert_same(reader[i], make_trace(seed=i, n=40))
                seen = len(reader)
                assert reader.refresh() == len(reader) - seen
            assert reader.get(RolloutId("run", str(n - 1))).num_tokens == 40
    assert process.wait() == 0
    assert len(read_all(path)) == n


def test_following_a_thread(tmp_path):
    path, n = tmp_path / "a.r3", 150
    tokens = np.random.default_rng(0).integers(0, 99, 300)
    ids = make_trace(n=300).routed_experts
    traces = [
        make_trace(seed=i, n=200 + i % 100, token_ids=tokens[: 200 + i % 100])
        if i % 3
        else make_trace(seed=i, n=300, token_ids=tokens, routed_experts=ids)
        for i in range(n)
    ]
    with ShardWriter(path, SPEC, durable=True) as writer, ShardReader(path) as reader:
        found = reader.refresh()

        def append() -> None:
            for i, trace in enumerate(traces):
                writer.append(trace)
                if i % 40 == 0:
                    writer.flush()

        thread = threading.Thread(target=append)
        thread.start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TornShardWarning)
            while found < n:
                more = reader.refresh()
                for i in range(found, found + more):
                    assert_same(reader[i], traces[i])
                    assert reader.find(traces[i].rollout_id) == i
                found += more
        thread.join()
        assert reader.refresh() == 0
        assert reader.torn is None
