"""Losses of power: of what a durable writer wrote since its last fsync, any part may be missing.

Writes and fsyncs of a writer are recorded. Then files are made as a disk might have them after a
crash at any of these moments: all that was synced is there, and of the blocks written after it
some are missing (zeros, other bytes, or what stood there before), at any length of the file.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from io import FileIO
from pathlib import Path
from unittest import mock

from r3 import FormatError, RouterSpec, RoutingTrace, TornShardWarning
from r3.storage import ShardReader, ShardWriter
from r3.storage import writer as writer_module

from .campaign import Report, run_inputs, scratch
from .traces import SPECS, expect, make_trace, make_traces, read_all

Content = dict[str, str]  # rollout ids and digests


@dataclass(frozen=True)
class Disk:
    """A file as programs see it, and as the disk has it for sure; what was appended, and what was
    acknowledged as being on the disk."""

    spec: RouterSpec
    seen: bytes = b""
    synced: bytes = b""
    appended: Content = field(default_factory=dict)
    acknowledged: Content = field(default_factory=dict)


def run(seed: int, inputs: range) -> Report:
    return run_inputs(seed, inputs, check, seconds=10)


def record(
    path: Path, disk: Disk, traces: Sequence[RoutingTrace], rng: random.Random
) -> list[Disk]:
    """Append traces to the file as it is on `disk`; the states of the disk after each event."""
    path.write_bytes(disk.seen)
    states, writev, fstat = [disk], os.writev, os.fstat

    def changed(**changes: bytes | Content) -> None:
        states.append(replace(states[-1], **{"seen": path.read_bytes()} | changes))

    def on_writev(file: int, pieces: Sequence[memoryview]) -> int:
        done = writev(file, pieces)
        changed()
        return done

    def on_fsync(file: int) -> None:
        if os.path.samestat(fstat(file), path.stat()):
            changed(synced=path.read_bytes())

    class File(FileIO):
        def truncate(self, size: int | None = None) -> int:
            done = super().truncate(size)
            changed()
            return done

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", TornShardWarning)
        often = {"_INDEX_RECORDS": rng.choice([2, 3, 4096])}
        stack.enter_context(mock.patch.multiple(writer_module, open_file=File, **often))
        stack.enter_context(mock.patch.object(os, "writev", on_writev))
        stack.enter_context(mock.patch.object(os, "fsync", on_fsync))
        every = rng.choice([1, 3, 8])
        with ShardWriter(path, disk.spec, durable=True) as writer:
            there = dict(read_all(path)) if disk.seen else {}
            for trace in traces:
                one = {str(trace.rollout_id): trace.digest}
                # from the first byte on it may be found
                states.append(replace(states[-1], appended=states[-1].appended | one))
                writer.append(trace)
                there |= one
                if rng.randrange(every) == 0:
                    writer.flush()
                    changed(acknowledged=dict(there))
        changed(acknowledged=dict(there))
    return states


@cache
def first_writer(number: int) -> list[Disk]:
    """States of the disk under a writer of a new file."""
    rng = random.Random(number)
    spec = rng.choice(SPECS)
    traces = make_traces(spec, 100 + number)
    rng.shuffle(traces)
    return record(scratch() / "first.r3", Disk(spec), traces, rng)


def crash(disk: Disk, rng: random.Random) -> bytes:
    """What the disk may have after a loss of power."""
    least, most = sorted((len(disk.synced), len(disk.seen)))
    length = rng.choice([least, most, rng.randint(least, most)])
    block = rng.choice([512, 4096])
    image = bytearray(disk.seen[:length].ljust(length, b"\0"))
    keep = rng.choice([0.0, 0.2, 0.5, 0.8, 1.0])
    old = disk.synced.ljust(length, b"\0")
    # what was synced and not cut off since is not written again
    both = zip(disk.seen, disk.synced, strict=False)
    stays = next((i for i, (x, y) in enumerate(both) if x != y), least)
    for start in range(stays // block * block, length, block):
        safe, stop = max(start, stays), min(start + block, length)
        if rng.random() >= keep:
            place = rng.randrange(0, max(1, len(disk.seen)), block)
            image[safe:stop] = rng.choice(
                [
                    old[safe:stop],
                    old[safe:stop],
                    bytes(stop - safe),
                    rng.randbytes(stop - safe),
                    disk.seen[place : place + stop - safe].ljust(stop - safe, b"\0"),
                ]
            )
    return bytes(image)


def check(rng: random.Random) -> str:
    path = scratch() / "power.r3"
    disk = rng.choice(first_writer(rng.randrange(24)))
    image = crash(disk, rng)
    words = [_check_crash(path, disk, image)]
    if words[0] != "no-header" and rng.random() < 0.3:  # the next writer has bad luck too
        traces = [make_trace(disk.spec, 7000 + i, rng.randint(1, 200)) for i in range(4)]
        after = replace(disk, seen=image, synced=image)
        again = rng.choice(record(path, after, traces, rng)[1:])
        _check_crash(path, again, crash(again, rng))
        words.append("+second-crashes")
    return " ".join(words)


def _check_crash(path: Path, disk: Disk, image: bytes) -> str:
    """A reader finds nothing that was not appended; a writer goes on, and loses nothing that was
    acknowledged."""
    path.write_bytes(image)
    state = _read_damaged(path, disk)
    if not disk.synced:  # not even the header is there for sure, and nothing was acknowledged
        expect(not disk.acknowledged, "acknowledged before anything was synced")
        return "no-header"
    lost = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer = ShardWriter(path, disk.spec, durable=True)
        lost = any(w.category is TornShardWarning for w in caught)
    expect(lost or state == "whole", f"{state} for a reader, and the writer said nothing")
    with writer:
        writer.append(make_trace(disk.spec, 9999, 90))
    found = read_all(path)
    names = dict(found)
    expect(len(names) == len(found), "a rollout is there twice")
    for name, digest in disk.acknowledged.items():
        expect(names.get(name) == digest, f"{name} was acknowledged and is {names.get(name)}")
    expect(dict(found[:-1]).items() <= disk.appended.items(), "a record that nobody appended")
    return state


def _read_damaged(path: Path, disk: Disk) -> str:
    """What a reader says of the file; each record that it reads is one that was appended."""
    state = "whole"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornShardWarning)
        try:
            reader = ShardReader(path)
        except FormatError:
            return "refused"
    with reader:
        found = {}
        for i in range(len(reader)):
            try:
                trace = reader[i]
            except FormatError:
                state = "part-refused"
                continue
            found[str(trace.rollout_id)] = trace.digest
        expect(found.items() <= disk.appended.items(), "a record that nobody appended")
        expect(disk.acknowledged.items() <= found.items(), "an acknowledged record is not read")
        return "torn" if reader.torn is not None and state == "whole" else state
