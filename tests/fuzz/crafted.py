"""Shards that say what is not so, with checksums that fit: see `hostile` for what is changed.

Each must be refused with FormatError, or be a whole trace whose digest is the one it names. Most
inputs are read from memory, which is fast; a share goes through files, ShardReader and ShardWriter.
"""

from __future__ import annotations

import contextlib
import os
import random
import tracemalloc
import warnings
from dataclasses import dataclass
from functools import cache, partial
from unittest import mock

import msgpack
import numpy as np

from r3 import FormatError, RoutingTrace, SpecError, TornShardWarning, TraceError
from r3.storage import ShardReader, ShardWriter, verify
from r3.storage.enumeration import SetCode
from r3.storage.frames import (
    INDEX,
    MAGIC,
    RECORD,
    FileHeader,
    find_indexes,
    read_file_header,
    read_index,
    scan,
)
from r3.storage.stored import StoredRecord

from . import hostile
from .campaign import Report, limit_memory, run_inputs, scratch
from .forge import Image, Index, MemoryFile, Record, prefix, take_apart
from .traces import Shard, all_shards, expect, make_trace

# what reading a file of a few kilobytes may take at most; arrays can be 4,096 times as large
PEAK = 64 << 20


def run_records(seed: int, inputs: range) -> Report:
    bases()
    limit_memory()
    return run_inputs(seed, inputs, check_record)


def run_headers(seed: int, inputs: range) -> Report:
    bases()
    limit_memory()
    return run_inputs(seed, inputs, check_header)


def run_indexes(seed: int, inputs: range) -> Report:
    bases()
    limit_memory()
    return run_inputs(seed, inputs, check_index)


def run_files(seed: int, inputs: range) -> Report:
    bases()
    limit_memory()
    with mock.patch.object(os, "fsync"):
        return run_inputs(seed, inputs, check_file)


@dataclass(frozen=True)
class Base:
    """A shard to change. data: its header and records, without indexes, to put a changed record
    behind; records: their headers, packed, and columns; frames: where they are."""

    shard: Shard
    header: FileHeader
    data: bytes
    records: tuple[tuple[bytes, tuple[bytes, ...]], ...]
    frames: tuple[int, ...]

    def image(self) -> Image:
        return take_apart(self.shard)


@cache
def bases() -> list[Base]:
    return [make_base(shard) for shard in all_shards()]


def make_base(shard: Shard) -> Base:
    image = take_apart(shard)
    image.parts = [part for part in image.parts if isinstance(part, Record)]
    records = [p for p in image.parts if isinstance(p, Record)]
    data = image.build()
    header = read_file_header(lambda at, n: data[at : at + n], len(data))
    # built once, so that spans say where records are in `data`
    packed = tuple((msgpack.packb(r.values), tuple(r.payloads)) for r in records)
    return Base(shard, header, data, packed, tuple(image.moved[r.frame] for r in records))


def check_record(rng: random.Random) -> str:
    """A changed record behind those that it may share rows with."""
    base = rng.choice(bases())
    packed, payloads = rng.choice(base.records)
    record = Record(msgpack.unpackb(packed), list(payloads))
    frame = len(base.data)
    try:
        hostile.change_record(record, base.shard.spec, [*base.frames, frame], rng)
        body = record.build(base.shard.spec)
    except (OverflowError, ValueError):  # no such values in msgpack
        return "not-packed"
    outcome = _read_record(base, body, record.extra, rng)
    if outcome.startswith("digest ") and record.packed is None:
        # all else is sound; make that sound too
        record.values["digest"] = outcome.removeprefix("digest ")
        outcome = _read_record(base, record.build(base.shard.spec), record.extra, rng)
        expect(outcome == "accepted", f"{outcome} with the digest that its content has")
        return "accepted +digest-mended"
    return outcome.split()[0].replace("digest", "refused")


def _read_record(base: Base, body: bytes, extra: int, rng: random.Random) -> str:
    frame = len(base.data)
    size = max(0, len(body) + extra)
    data = base.data + base.header.frame(RECORD, frame, size) + body
    file = MemoryFile(base.header, data)
    measured = rng.random() < 0.01
    if measured:
        tracemalloc.start()
    try:
        record = file.record_at(frame)
        trace = record.trace()
    except FormatError as e:
        what, _, digest = str(e).partition("its content has digest ")
        if digest and what.startswith("rollout ") and rng.random() < 0.7:
            return "digest " + digest.split(",")[0]
        return "refused"
    finally:
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            expect(peak <= PEAK, f"{peak} bytes for a record of {len(body)}")
    check_trace(record, trace, rng)
    return "accepted"


def check_trace(record: StoredRecord, trace: RoutingTrace, rng: random.Random) -> None:
    """What was accepted is sound, and parts of it are parts of the whole."""
    expect(trace.digest == record.header.digest, "another digest than the header has")
    again = RoutingTrace(trace.spec, trace.prompt_len, trace.columns, trace.rollout_id)
    expect(again.digest == trace.digest, "another digest when made again")
    if rng.random() < 0.2:
        start, stop = sorted(rng.randrange(trace.num_tokens + 2) for _ in range(2))
        layers = rng.sample(trace.spec.moe_layers, rng.randint(1, len(trace.spec.moe_layers)))
        part = record.slice(layers, slice(start, stop))
        rows = slice(part.start, min(part.start + len(part.valid), trace.num_rows))
        ids = trace.routed_experts[rows][:, [trace.spec.moe_layers.index(x) for x in layers]]
        same = np.array_equal(part.routed_experts[: len(ids)], ids)
        same &= np.array_equal(part.valid[: len(ids)], trace.valid[rows])
        expect(same, f"layers {layers} of tokens {start} to {stop} are other than in the trace")


def check_header(rng: random.Random) -> str:
    """A changed file header; what it stands for is tried on the records behind it."""
    base = rng.choice(bases())
    image = base.image()
    values = image.header
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.7 and type(values.get("spec")) is dict:
            hostile.change_map(values["spec"], rng)
        else:
            hostile.change_map(values, rng)
    try:
        packed = msgpack.packb(values)
    except (OverflowError, ValueError):
        return "not-packed"
    if rng.random() < 0.1:
        packed = hostile.change_bytes(packed, rng)
    head = MAGIC + prefix(packed)
    if rng.random() < 0.05:
        head = hostile.change_bytes(head, rng)
    data = head + rng.randbytes(rng.choice((0, 50)))
    try:
        header = read_file_header(lambda at, n: data[at : at + n], len(data))
    except FormatError:
        return "refused"
    spec = header.spec
    if len(spec.moe_layers) * spec.num_experts * spec.top_k < 1 << 14:
        body = Record(msgpack.unpackb(base.records[0][0]), list(base.records[0][1])).build(spec)
        data = data[: header.end]
        data += header.frame(RECORD, header.end, len(body)) + body
        with contextlib.suppress(FormatError):
            check_trace(
                record := MemoryFile(header, data).record_at(header.end), record.trace(), rng
            )
    return "accepted"


def check_index(rng: random.Random) -> str:
    """Changed indexes and frames, gone through as reader and writer do."""
    base = rng.choice(bases())
    data = _changed_image(base, rng)
    if data is None:
        return "not-packed"
    read = partial(_read_bytes, data)
    try:
        header = read_file_header(read, len(data))
    except FormatError:
        return "refused"
    found = 0
    for at in range(data.find(INDEX), len(data)) if rng.random() < 0.02 else [data.rfind(INDEX)]:
        try:
            index = read_index(header, read, at, len(data))
        except FormatError:
            continue
        found += 1
        expect(header.end <= index.frame < index.end <= len(data), "an index out of the file")
    indexes = find_indexes(header, read, data.rfind, len(data))
    start = indexes[-1].end if indexes else header.end
    expect([i.first for i in indexes[:1]] in ([], [0]), "a chain that does not begin at 0")
    result = scan(header, read, data.find, start, len(data))
    places = [start, *(f for f, _ in result.records), len(data)]
    expect(places == sorted(places), "records out of order")
    return "accepted" if found and indexes else "refused"


def _read_bytes(data: bytes, offset: int, size: int) -> memoryview:
    if not 0 <= offset <= offset + size <= len(data):
        raise FormatError("not there")
    return memoryview(data)[offset : offset + size]


def _changed_image(base: Base, rng: random.Random) -> bytes | None:
    image = base.image()
    try:
        hostile.change_image(image, rng)
        return image.build()
    except (OverflowError, ValueError):
        return None


def check_file(rng: random.Random) -> str:
    """Changed records, indexes and headers in a file, for a reader and for a writer."""
    base, path = rng.choice(bases()), scratch() / "crafted.r3"
    image = base.image()
    try:
        if rng.random() < 0.6:
            records = [p for p in image.parts if isinstance(p, Record)]
            frames = [p.frame for p in records]
            hostile.change_record(rng.choice(records), image.spec, frames, rng)
        if rng.random() < 0.5:
            hostile.change_image(image, rng)
        if rng.random() < 0.2:  # no index at the end: what a writer left that died
            while image.parts and isinstance(image.parts[-1], Index):
                image.parts.pop()
        path.write_bytes(image.build())
    except (OverflowError, ValueError):
        return "not-packed"
    measured = rng.random() < 0.02
    if measured:
        tracemalloc.start()
    try:
        words = [_read_file(base)]
        with contextlib.suppress(FormatError):
            verify(path)
        words.append(_write_file(base, rng))
    finally:
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            expect(peak <= PEAK, f"{peak} bytes for a file of {path.stat().st_size}")
    SetCode.of.cache_clear()
    return " ".join(words)


def _read_file(base: Base) -> str:
    outcome = "accepted"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornShardWarning)
        try:
            reader = ShardReader(scratch() / "crafted.r3")
        except FormatError:
            return "refused"
    with reader:
        for i in range(len(reader)):
            try:
                trace = reader[i]
                expect(trace.digest == reader.header(i).digest, "another digest")
                reader.slice(i, tokens=slice(0, 3))
            except FormatError:
                outcome = "part-refused"
        try:
            expect(len(reader.rollout_ids) == len(reader), "a rollout is there twice")
        except FormatError:
            outcome = "part-refused"
    return outcome


def _write_file(base: Base, rng: random.Random) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornShardWarning)
        try:
            writer = ShardWriter(scratch() / "crafted.r3", base.shard.spec)
        except (FormatError, SpecError):
            return "+writer-refused"
    with writer:
        for trace in (base.shard.traces[1], base.shard.traces[5], _new_trace(base.shard)):
            # taken by other content: the name is in a record that was changed
            with contextlib.suppress(TraceError):
                writer.append(trace)
    return "+writer-went-on"


@cache
def _new_trace(shard: Shard) -> RoutingTrace:
    return make_trace(shard.spec, 999_999, 20)
