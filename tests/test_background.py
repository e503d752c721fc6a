"""Records written from an event loop: in order, acknowledged, bounded; and their handles."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from r3 import FormatError, RolloutId, RoutingTrace, SpecError, TraceError
from r3.storage import ShardReader, verify
from r3.storage.background import BackgroundWriter, RecordHandle
from storage_tools import SPECS, full_trace, make_trace

SPEC = SPECS[0]


def with_writer(folder: Path, body: Callable[[BackgroundWriter], Awaitable[Any]], **options: Any):
    """What `body` returns, in an event loop with a writer; nothing is pending at its end."""

    async def main() -> Any:
        writer = BackgroundWriter(folder, SPEC, **options)
        try:
            result = await body(writer)
            await settled(writer)
        finally:
            writer.close()
        return result

    return asyncio.run(main())


async def settled(writer: BackgroundWriter) -> None:
    for _ in range(500):
        if not writer.pending:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{writer.pending} bytes are pending")


class Gate:
    """A `make` that says when it runs and waits until it may go on."""

    def __init__(self, trace: RoutingTrace | None = None, error: Exception | None = None) -> None:
        self.trace, self.error = trace, error
        self.running, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> RoutingTrace:
        self.running.set()
        assert self.go_on.wait(10)
        if self.error:
            raise self.error
        assert self.trace is not None
        return self.trace

    async def runs(self) -> None:
        while not self.running.is_set():
            await asyncio.sleep(0.001)


def test_records_are_in_the_file_when_append_returns(tmp_path):
    traces = [full_trace(SPEC, 20 + i, seed=i, rollout_id=RolloutId("r", str(i))) for i in range(8)]
    threads = set()

    def maker(trace: RoutingTrace) -> Callable[[], RoutingTrace]:
        def make() -> RoutingTrace:
            threads.add(threading.current_thread())
            return trace

        return make

    async def body(writer: BackgroundWriter) -> list[RecordHandle]:
        first = await writer.append(maker(traces[0]), 100)
        assert first.read(tmp_path).digest == traces[0].digest  # while the writer is at work
        rest = await asyncio.gather(*(writer.append(maker(t), 100) for t in traces[1:]))
        return [first, *rest]

    handles = with_writer(tmp_path / ".", body)
    assert len(threads) == 1
    assert threading.main_thread() not in threads
    for trace, handle in zip(traces, handles, strict=True):
        assert handle.rollout_id == str(trace.rollout_id)
        assert handle.digest == trace.digest
        found = handle.read(tmp_path)
        assert found.digest == trace.digest
        assert found.provenance == trace.provenance
    paths = {handle.file for handle in handles}
    assert paths == {p.name for p in tmp_path.iterdir()}
    with ShardReader(tmp_path / handles[0].file) as shard:
        assert [str(t.rollout_id) for t in shard] == [h.rollout_id for h in handles]  # in order
    assert not verify(tmp_path / handles[0].file).losses


def test_the_loop_runs_while_a_record_is_made(tmp_path):
    gate = Gate(make_trace(SPEC))

    async def body(writer: BackgroundWriter) -> None:
        job = asyncio.ensure_future(writer.append(gate, 5))
        await gate.runs()
        await asyncio.sleep(0.01)
        assert not job.done()
        assert writer.pending == 5
        gate.go_on.set()
        assert (await job).digest == gate.trace.digest

    with_writer(tmp_path, body)


def test_room_waits_until_there_is_less_than_max_pending(tmp_path):
    gates = [Gate(make_trace(SPEC, seed=i)) for i in range(3)]

    async def body(writer: BackgroundWriter) -> None:
        await asyncio.wait_for(writer.room(), 1)
        jobs = [
            asyncio.ensure_future(writer.append(gates[i], size)) for i, size in enumerate((40, 60))
        ]
        await gates[0].runs()
        assert writer.pending == 100
        waiting = [asyncio.ensure_future(writer.room()) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert not any(w.done() for w in waiting)
        gates[0].go_on.set()
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
        assert writer.pending == 60
        # again: an event of the time before does not let anybody in
        jobs.append(asyncio.ensure_future(writer.append(gates[2], 1000)))
        await asyncio.sleep(0)
        again = asyncio.ensure_future(writer.room())
        gates[1].go_on.set()
        await jobs[1]
        await asyncio.sleep(0.02)
        assert not again.done()
        assert writer.pending == 1000
        gates[2].go_on.set()
        await asyncio.wait_for(again, 5)
        await asyncio.gather(*jobs)

    with_writer(tmp_path, body, max_pending=100)


def test_a_failure_reaches_the_caller_and_nobody_else(tmp_path):
    class Odd(Exception):
        pass

    other = make_trace(SPECS[1], rollout_id="run/other/0/0/0")

    async def body(writer: BackgroundWriter) -> None:
        def odd() -> RoutingTrace:
            raise Odd("made wrongly")

        jobs = [
            writer.append(lambda: make_trace(SPEC, seed=1), 10),
            writer.append(odd, 10),
            writer.append(lambda: make_trace(SPEC, token_ids=[-1] * 9), 10),
            writer.append(lambda: other, 10),
            writer.append(lambda: make_trace(SPEC, seed=2), 10),
        ]
        first, *failed, last = await asyncio.gather(*jobs, return_exceptions=True)
        assert [type(f) for f in failed] == [Odd, TraceError, SpecError]
        await settled(writer)
        assert first.read(tmp_path).digest == make_trace(SPEC, seed=1).digest
        assert last.read(tmp_path).digest == make_trace(SPEC, seed=2).digest

    with_writer(tmp_path, body)


def test_one_id_with_the_same_content_is_one_record_and_with_other_content_an_error(tmp_path):
    async def body(writer: BackgroundWriter) -> None:
        name = "run/group/0/0/0"
        one = await writer.append(lambda: make_trace(SPEC, seed=1, rollout_id=name), 10)
        assert await writer.append(lambda: make_trace(SPEC, seed=1, rollout_id=name), 10) == one
        with pytest.raises(TraceError, match=r"run/group/0/0/0 .* other content .*attempt up"):
            await writer.append(lambda: make_trace(SPEC, seed=2, rollout_id=name), 10)
        with ShardReader(tmp_path / one.file) as shard:
            assert len(shard) == 1
        assert one.read(tmp_path).digest == make_trace(SPEC, seed=1).digest

    with_writer(tmp_path, body)


@pytest.mark.parametrize("again", [False, True])
def test_nothing_is_acknowledged_once_the_folder_is_gone(again, tmp_path):
    folder = tmp_path / "store"

    async def body(writer: BackgroundWriter) -> RecordHandle:
        first = await writer.append(lambda: make_trace(SPEC, seed=0), 1)
        assert first.read(folder).digest == first.digest
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        if again:
            folder.mkdir()
            (folder / first.file).touch()
        for seed in (1, 2):
            with pytest.raises(FileNotFoundError, match=first.file):
                await writer.append(lambda seed=seed: make_trace(SPEC, seed=seed), 1)
        return first

    with_writer(folder, body)


def test_what_is_cancelled_before_its_turn_is_not_written(tmp_path):
    gate = Gate(make_trace(SPEC, seed=1))
    made = []

    async def body(writer: BackgroundWriter) -> None:
        running = asyncio.ensure_future(writer.append(gate, 10))
        waiting = asyncio.ensure_future(writer.append(lambda: made.append(1), 20))
        last = asyncio.ensure_future(writer.append(lambda: make_trace(SPEC, seed=3), 30))
        await gate.runs()
        assert writer.pending == 60
        for job in (running, waiting):
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
        await asyncio.sleep(0.01)
        assert writer.pending == 40  # the one that runs still holds its rows
        gate.go_on.set()
        await last
        assert not made

    with_writer(tmp_path, body)
    (path,) = tmp_path.iterdir()
    with ShardReader(path) as shard:
        assert [t.rollout_id.group for t in shard] == ["1", "3"]


def test_close_writes_what_waits_and_ends_it(tmp_path):
    async def body() -> list[RecordHandle]:
        writer = BackgroundWriter(tmp_path, SPEC)

        def slow(seed: int) -> RoutingTrace:
            time.sleep(0.01)
            return make_trace(SPEC, seed=seed)

        jobs = [asyncio.ensure_future(writer.append(lambda i=i: slow(i), 10)) for i in range(4)]
        await asyncio.sleep(0)
        writer.close()
        (path,) = tmp_path.iterdir()
        with ShardReader(path) as shard:
            assert len(shard) == 4
        handles = await asyncio.gather(*jobs)
        await settled(writer)
        with pytest.raises(RuntimeError):
            await writer.append(lambda: slow(9), 10)
        assert writer.pending == 0  # nor does what was refused count
        writer.close()
        return handles

    handles = asyncio.run(body())
    assert [h.read(tmp_path).rollout_id.group for h in handles] == ["0", "1", "2", "3"]


def test_files_are_of_one_writer_each(tmp_path):
    """Two writers in a folder, as of two server processes; it is made, with its parents."""
    folder = tmp_path / "a" / "b"

    async def body() -> list[RecordHandle]:
        writers = [BackgroundWriter(folder, SPEC) for _ in range(2)]
        handles = [await w.append(lambda: make_trace(SPEC), 10) for w in writers]
        for writer in writers:
            writer.close()
        return handles

    one, two = asyncio.run(body())
    assert one.file != two.file
    assert {p.name for p in folder.iterdir()} == {one.file, two.file}
    assert one.read(folder).digest == two.read(folder).digest
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        BackgroundWriter(tmp_path / "file", SPEC)


# handles


def stored(folder: Path, trace: RoutingTrace) -> RecordHandle:
    async def body(writer: BackgroundWriter) -> RecordHandle:
        return await writer.append(lambda: trace, 10)

    return with_writer(folder, body)


def test_handles_travel_as_json(tmp_path):
    handle = stored(tmp_path, make_trace(SPEC))
    values = json.loads(json.dumps(handle.to_dict()))
    assert set(values) == {"rollout_id", "digest", "file"}
    assert RecordHandle.from_dict(values) == handle
    assert RecordHandle.from_dict(values).read(str(tmp_path)).digest == handle.digest


GOOD = {"rollout_id": "run/g/0/0/0", "digest": "0123456789abcdef" * 2, "file": "routing-00000.r3"}
WRONG = [
    *({"file": name} for name in ("", ".", "..", "/", "/etc/passwd", "../x", "a/b", "a/", "./a")),
    *({"file": value} for value in (None, 5, b"a.r3", ["a.r3"], {}, "x/../y", "a//b", "\0/a")),
    *({"digest": value} for value in ("", "0" * 31, "0" * 33, "0" * 32 + "\n", "G" * 32, "A" * 32)),
    *(
        {"digest": value}
        for value in (None, 0, b"0" * 32, ["0" * 32], " " + "0" * 31, "\u0660" * 32)
    ),
    *({"rollout_id": value} for value in ("", "a", "a/b/0/0", "a/b/0/0/0/0", "a/b/-1/0/0")),
    *({"rollout_id": value} for value in (None, 5, b"a/b/0/0/0", "a/b/x/0/0", "\ud800/b/0/0/0")),
    {"more": 1},
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_handles_that_are_none_are_refused(number):
    assert RecordHandle.from_dict(GOOD).to_dict() == GOOD
    with pytest.raises((FormatError, TraceError)) as info:
        RecordHandle.from_dict({**GOOD, **WRONG[number]})
    assert len(str(info.value)) < 500


@pytest.mark.parametrize("odd", [None, [], "x", 5, {}, [GOOD], {"file": "a"}, tuple(GOOD.items())])
def test_what_is_no_handle_is_refused(odd):
    with pytest.raises(FormatError, match="expected a handle with rollout_id, digest, file"):
        RecordHandle.from_dict(odd)
    with pytest.raises(FormatError, match="expected a handle"):
        RecordHandle.from_dict({1: 2, "big": "x" * 10**6})


def test_a_record_that_is_not_there_or_another_is_refused(tmp_path):
    handle = stored(tmp_path, make_trace(SPEC))
    values = handle.to_dict()

    def read(**changes: str) -> Any:
        return RecordHandle.from_dict(values | changes).read(tmp_path)

    with pytest.raises(FormatError, match="rollout run/9/0/0/0 is not in it"):
        read(rollout_id="run/9/0/0/0")
    with pytest.raises(FormatError, match=f"has digest {handle.digest}, expected {'0' * 32}"):
        read(digest="0" * 32)
    for name in ("other.r3", "a\0b", "x" * 300, "..\\x"):
        with pytest.raises(FormatError, match=r"cannot be opened as a \.r3 file"):
            read(file=name)
    (tmp_path / "folder").mkdir()
    with pytest.raises(FormatError, match=r"a folder, expected a \.r3 file"):
        read(file="folder")
    with pytest.raises(FormatError, match="cannot be opened"):
        handle.read(tmp_path / "elsewhere")


@pytest.mark.filterwarnings("ignore::r3.TornShardWarning")
def test_damage_is_refused_by_name(tmp_path):
    trace = make_trace(SPEC, 60)
    handle = stored(tmp_path, trace)
    path = tmp_path / handle.file
    data = path.read_bytes()
    refusals = []
    for at in range(0, len(data), 14):
        path.write_bytes(data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :])
        try:
            found = handle.read(tmp_path)
        except FormatError as e:
            refusals.append(str(e))
        else:
            assert found.digest == trace.digest
    assert len(refusals) > len(data) / 14 / 2
    assert all(str(path) in said for said in refusals)
    for end in (0, 1, len(data) // 3):
        path.write_bytes(data[:end])
        with pytest.raises(FormatError):
            handle.read(tmp_path)
