"""Interrupts, forks, threads, other writers: what was acknowledged is there, or it is an error."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from r3 import FormatError, SpecError, TornShardWarning, TraceError
from r3.storage import ShardReader, ShardWriter, codec, loops, verify
from storage_tools import SPEC, make_trace, write

INTERRUPTED = KeyboardInterrupt("here")


class Interrupt(bytearray):
    """Entries that an interrupt keeps from being noted."""

    def __iadd__(self, _: object) -> Interrupt:
        raise INTERRUPTED


def test_interrupt_behind_the_write(tmp_path):
    path, traces = tmp_path / "a.r3", [make_trace(seed=i) for i in range(4)]
    with ShardWriter(path, SPEC) as writer:
        writer.append(traces[0])
        noted, writer._entries = writer._entries, Interrupt(writer._entries)
        with pytest.raises(KeyboardInterrupt):
            writer.append(traces[1])
        writer._entries = noted
        for again in (writer.append, lambda _: writer.flush()):
            with pytest.raises(FormatError, match="an append was interrupted; open the file again"):
                again(traces[2])
    with ShardWriter(path, SPEC) as writer:  # the record was whole, and is found
        assert [writer.append(t) for t in traces] == [0, 1, 2, 3]
    assert verify(path).records == 4


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupt_in_the_write(tmp_path, monkeypatch, when):
    path, traces = tmp_path / "a.r3", [make_trace(seed=i) for i in range(3)]
    real = os.writev

    def writev(file: int, pieces: list) -> int:
        real(file, pieces[:1] if when == "before" else pieces)
        raise INTERRUPTED

    with ShardWriter(path, SPEC) as writer:
        writer.append(traces[0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", writev)
            with pytest.raises(KeyboardInterrupt):
                writer.append(traces[1])
        if when == "before":  # cut off again
            assert writer.append(traces[1]) == 1
        else:  # whole, so that a reader may have seen it
            with pytest.raises(FormatError, match="a write was interrupted"):
                writer.append(traces[1])
    with ShardWriter(path, SPEC) as writer:
        assert [writer.append(t) for t in traces] == [0, 1, 2]
    assert verify(path).records == 3


def test_a_forked_process_leaves_the_file_alone(tmp_path):
    path, traces = tmp_path / "a.r3", [make_trace(seed=i) for i in range(3)]
    writer = ShardWriter(path, SPEC, durable=True)
    writer.append(traces[0])
    child = os.fork()
    if not child:  # nothing of pytest's may run here
        code = 1
        try:
            writer.append(traces[1])
        except FormatError as e:
            code = 0 if "opened by process" in str(e) else 2
        writer.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.append(traces[2])
    writer.close()
    with ShardReader(path) as reader:
        assert [t.digest for t in reader] == [traces[0].digest, traces[2].digest]


def test_lock_goes_with_close_though_a_child_has_the_file(tmp_path):
    writer = ShardWriter(tmp_path / "a.r3", SPEC)
    child = subprocess.Popen(["sleep", "60"], pass_fds=[writer._file.fileno()])
    try:
        writer.close()
        ShardWriter(tmp_path / "a.r3", SPEC).close()
    finally:
        child.kill()
        child.wait()


def test_lock_and_file_go_with_the_last_reference(tmp_path):
    gc.disable()
    try:
        writer = ShardWriter(tmp_path / "a.r3", SPEC)
        for i in range(2):
            writer.append(make_trace(n=100, seed=0, rollout_id=f"a/{i}/0/0/0"))
        del writer
        ShardWriter(tmp_path / "a.r3", SPEC).close()
    finally:
        gc.enable()


def test_another_hand_on_the_file_is_noticed(tmp_path):
    path = tmp_path / "a.r3"
    with ShardWriter(path, SPEC) as writer:
        writer.append(make_trace())
        with path.open("ab") as other:
            other.write(b"x")
        with pytest.raises(FormatError, match="something else writes to this file"):
            writer.append(make_trace(seed=1))
        os.truncate(path, path.stat().st_size - 1)
        assert writer.append(make_trace(seed=1)) == 1
    assert verify(path).records == 2


def test_failed_sync_is_not_forgotten(tmp_path, monkeypatch):
    def fsync(_: int) -> None:
        raise OSError(5, "Input/output error")

    with ShardWriter(tmp_path / "a.r3", SPEC, durable=True) as writer:
        writer.append(make_trace())
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(OSError, match="Input/output error"):
                writer.flush()
        for use in (writer.flush, lambda: writer.append(make_trace(seed=1))):
            with pytest.raises(FormatError, match="the disk did not take it"):
                use()
    with ShardWriter(tmp_path / "a.r3", SPEC, durable=True) as writer:
        assert len(writer) == 1


def test_used_after_close(tmp_path):
    writer = ShardWriter(tmp_path / "a.r3", SPEC)
    writer.append(make_trace())
    writer.close()
    for use in (writer.flush, lambda: writer.append(make_trace())):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_spec_that_cannot_be_stored_leaves_no_file(tmp_path):
    import dataclasses

    spec = dataclasses.replace(SPEC, moe_layers=tuple(range(20_000)), num_layers=20_000)
    with pytest.raises(SpecError, match=r"a\.r3: .*cannot be stored"):
        ShardWriter(tmp_path / "a.r3", spec)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_at_the_start_leaves_no_file(tmp_path, monkeypatch):
    def writev(_: int, __: list) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(OSError, match="No space left"):
        ShardWriter(tmp_path / "a.r3", SPEC)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_base_does_not_keep_new_traces_out(tmp_path):
    path, traces = tmp_path / "a.r3", [make_trace(n=300, seed=0)]
    tokens, rows = traces[0].token_ids, traces[0].routed_experts
    for i in range(2):
        traces.append(make_trace(n=300, seed=9 + i, token_ids=tokens, routed_experts=rows))
    with ShardWriter(path, SPEC) as writer:
        writer.append(traces[0])
        with path.open("r+b") as file:
            file.seek(-20, os.SEEK_END)
            byte = file.read(1)
            file.seek(-20, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        assert [writer.append(t) for t in traces[1:]] == [1, 2]
    with ShardReader(path) as reader:
        assert [reader[i].digest for i in (1, 2)] == [t.digest for t in traces[1:]]
        assert reader.header(2).column("routed_experts").layout.shared == 299


# --- readers


def test_threads_refresh_one_reader(tmp_path):
    path, count = tmp_path / "a.r3", 300
    traces = [make_trace(seed=i) for i in range(count)]
    done, wrong = threading.Event(), []
    with ShardWriter(path, SPEC) as writer, ShardReader(path) as reader:

        def follow() -> None:
            while not done.is_set():
                reader.refresh()
                n = len(reader)
                for i in {0, n // 2, n - 1} if n else ():
                    name = traces[i].rollout_id
                    if reader[i].rollout_id != name or reader.find(name) != i:
                        wrong.append(i)

        threads = [threading.Thread(target=follow) for _ in range(4)]
        for thread in threads:
            thread.start()
        for trace in traces:
            writer.append(trace)
        reader.refresh()
        done.set()
        for thread in threads:
            thread.join()
        assert (len(reader), wrong) == (count, [])
        assert [int(reader.find(t.rollout_id)) for t in traces] == list(range(count))


def test_refresh_knows_new_names(tmp_path):
    with ShardWriter(tmp_path / "a.r3", SPEC) as writer, ShardReader(tmp_path / "a.r3") as reader:
        for i in range(5):
            name = writer.entries  # of the state before
            assert len(name) == i
            writer.append(make_trace(seed=i))
            assert f"run/{i}/0/0/0" not in reader
            assert f"run/{i}/0/0/0" in writer
            assert reader.refresh() == 1
            assert f"run/{i}/0/0/0" in reader
        assert 3 not in reader
        with pytest.raises(TraceError, match="run/group/sample"):
            reader.get("run/3")


def test_a_tail_that_is_cut_off_does_not_end_the_reader(tmp_path):
    """It was not whole, so it is not mapped: no SIGBUS when it goes."""
    path = write(tmp_path / "a.r3", [make_trace()])
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"R3rc" + bytes(40_000))
    with pytest.warns(TornShardWarning):
        reader = ShardReader(path)
    os.truncate(path, whole)
    assert len(reader._known.view) == whole
    with pytest.raises(FormatError, match="ends at byte"):
        reader.read(whole + 8192, 10)
    assert reader.refresh() == 0
    assert reader.torn is None
    assert len(list(reader)) == 1
    reader.close()


def test_a_reader_travels_to_a_worker(tmp_path):
    path = write(tmp_path / "a.r3", [make_trace()])
    with ShardReader(path) as reader:
        with pickle.loads(pickle.dumps(reader)) as other:
            assert other[0].digest == reader[0].digest
        assert [t.digest for t in reader[:5]] == [reader[0].digest]


# --- numba that is there and does not work


def test_numba_that_cannot_be_imported(tmp_path, monkeypatch):
    real = codec.importlib.import_module

    def import_module(name: str) -> object:
        if name == "r3.storage.kernels":
            raise ImportError("Numba needs NumPy 2.0 or less")
        return real(name)

    monkeypatch.setattr(codec, "_loaded", None)
    monkeypatch.setattr(codec, "_coded", 1 << 40)
    monkeypatch.setattr(codec, "_unusable", False)
    monkeypatch.setattr(codec.importlib, "import_module", import_module)
    trace = make_trace()
    with pytest.warns(UserWarning, match=r"numba cannot be used.*NumPy 2\.0"):
        path = write(tmp_path / "a.r3", [trace])
    with ShardReader(path) as reader:  # once is enough
        assert reader[0].digest == trace.digest


@pytest.mark.slow
@pytest.mark.full
def test_a_broken_cache_of_compiled_code(tmp_path):
    script = (
        "import numpy as np; from r3.storage import kernels; from r3.storage.enumeration import "
        "SetCode; c = SetCode.of(8, 2); out = np.zeros(c.packing.size(3), np.uint8); "
        "kernels.encode_sets(c, np.array([[0, 1], [2, 3], [4, 5]], np.uint8), out); print(out)"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    expected = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    broken = [p for p in Path(tmp_path).rglob("*") if p.suffix in (".nbi", ".nbc")]
    assert broken
    for file in broken:
        file.write_bytes(b"")
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == expected.stdout


def test_loops_are_compiled_without_a_cache_if_need_be(monkeypatch):
    import numba

    real = numba.njit

    def njit(*arguments: object, **options: object) -> object:
        if options.get("cache"):
            raise EOFError("Ran out of input")
        return real(*arguments, **options)

    monkeypatch.setattr(loops.numba, "njit", njit)
    double = loops.compile_kernel(lambda x: x + x, numba.int64(numba.int64))
    assert double(np.int64(4)) == 8
