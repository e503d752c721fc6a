"""Writing shard files: repeats, conflicts, other routers, full disks, threads."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import r3
from r3 import FormatError, Provenance, RolloutId, RouterSpec
from r3.storage import ShardReader, ShardWriter
from storage_tools import SPEC, SPECS, assert_same, full_trace, make_trace, read_all, write


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
        reordered = make_trace(routed_experts=first.routed_experts[..., ::-1])
        assert writer.append(reordered) == 0  # rows are sets
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


@pytest.mark.parametrize(
    "value",
    [b"bytes", 2**70, {1: 2}, object(), "\ud800", np.int64(3)],
    ids=lambda v: type(v).__name__,
)
def test_provenance_that_cannot_be_read_is_not_written(value, tmp_path):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer:
        size = writer.file_size
        trace = make_trace(provenance=Provenance(sampling={"a": value}))
        with pytest.raises(r3.TraceError, match="run/0/0/0/0 cannot be stored"):
            writer.append(trace)
        nested: list[Any] = []
        for _ in range(2000):
            nested = [nested]
        with pytest.raises(r3.TraceError, match="cannot be stored"):
            writer.append(make_trace(provenance=Provenance(extra={"a": nested})))
        assert (len(writer), writer.file_size) == (0, size)
    assert read_all(path) == []


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "a.r3"
    script = f"""
from r3 import RouterSpec
from r3.storage import ShardWriter
ShardWriter({str(path)!r}, {SPEC!r})
"""
    with ShardWriter(path, SPEC):
        with pytest.raises(FormatError, match="another ShardWriter"):
            ShardWriter(path, SPEC)
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert f"{path}: another ShardWriter" in other.stderr
    ShardWriter(path, SPEC).close()


@pytest.mark.parametrize("failing", ["append", "flush"])
def test_failed_write_leaves_whole_records(failing, tmp_path, monkeypatch):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC, durable=True) as writer:
        writer.append(make_trace(seed=0))
        before = path.read_bytes()
        writev, calls = os.writev, []

        def full_disk(file: int, pieces: list[memoryview]) -> int:
            calls.append(1)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")
            return writev(file, [pieces[0][:10]])

        with monkeypatch.context() as patch:
            patch.setattr("r3.storage.writer.os.writev", full_disk)
            with pytest.raises(OSError, match="No space"):
                writer.append(make_trace(seed=1)) if failing == "append" else writer.flush()
        assert path.read_bytes() == before
        assert writer.append(make_trace(seed=1)) == 1
    assert len(read_all(path)) == 2


def test_writes_that_the_system_cuts_up(tmp_path, monkeypatch):
    writev = os.writev
    monkeypatch.setattr(
        "r3.storage.writer.os.writev", lambda file, pieces: writev(file, [pieces[0][:7]])
    )
    trace = full_trace()
    assert_same(read_all(write(tmp_path / "a.r3", [trace]))[0], trace)


def test_threads_share_a_writer_and_a_reader(tmp_path):
    spec = RouterSpec(64, 8, tuple(range(24)), 24)
    traces = [make_trace(spec, 200, seed) for seed in range(24)]
    with ThreadPoolExecutor(4) as pool:
        with ShardWriter(tmp_path / "a.r3", spec) as writer:
            places = list(pool.map(writer.append, [*traces, *traces]))
            assert len(writer) == 24
        assert places[:24] == places[24:]
        with ShardReader(tmp_path / "a.r3") as reader:
            found = list(pool.map(reader.__getitem__, places))
    for trace, other in zip([*traces, *traces], found, strict=True):
        assert_same(other, trace)
