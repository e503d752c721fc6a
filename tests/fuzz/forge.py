"""Shards taken apart and put together again with whatever checksums they need.

A checksum stops damage, but whoever means harm computes it anew: behind them stand the checks of
what a file says, and those are what `r3.storage` has to rely on with files from elsewhere.
"""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np

from r3 import FormatError, RouterSpec
from r3.storage import record
from r3.storage.codec import CHUNK_ROWS, Buffer
from r3.storage.experts import ExpertsLayout
from r3.storage.frames import (
    ENTRY,
    FRAME,
    MAGIC,
    RECORD,
    FileHeader,
    make_entry,
    read_file_header,
    read_index,
)
from r3.storage.header import read_packed
from r3.storage.stored import StoredRecord

from .traces import Shard

Values = dict[str, Any]


class MemoryFile:
    """The bytes of a shard as what `StoredRecord` and the functions of r3.storage.frames ask for;
    checks what ShardReader checks."""

    def __init__(self, header: FileHeader, data: bytes) -> None:
        self.header, self.spec, self.data = header, header.spec, data

    def read(self, offset: int, size: int) -> Buffer:
        if not 0 <= offset <= offset + size <= len(self.data):
            raise FormatError("not there")
        return memoryview(self.data)[offset : offset + size]

    def record_at(self, frame: int) -> StoredRecord:
        marker, size = self.header.parse_frame(bytes(self.read(frame, FRAME.size)), frame)
        if marker != RECORD or size > len(self.data) - frame - FRAME.size:
            raise FormatError("not a record")
        return StoredRecord(self, frame, frame + FRAME.size, size)


@dataclass
class Record:
    """A record taken apart. values: its header, and payloads: the bytes of the columns, in order.
    packed: bytes to write for the header instead. seal: whether the checksums within the columns
    are made to fit. extra: added to the size in its frame. frame: where it was."""

    values: Values
    payloads: list[bytes]
    packed: bytes | None = None
    seal: bool = True
    extra: int = 0
    frame: int = 0

    def build(self, spec: RouterSpec) -> bytes:
        """The bytes of the record behind its frame."""
        columns = self.values.get("columns")
        pairs = zip(columns if type(columns) is list else [], self.payloads, strict=False)
        for i, (item, payload) in enumerate(list(pairs) if self.seal else []):
            if type(item) is dict and item.get("name") == record.EXPERTS:
                if (layout := experts_layout(item, spec)) is not None:
                    self.payloads[i] = seal_experts(layout, payload)
            elif type(item) is dict and type(item.get("crc32")) is int:
                item["crc32"] = zlib.crc32(payload)
        packed = pack(self.values) if self.packed is None else prefix(self.packed)
        return packed + b"".join(self.payloads)


@dataclass
class Index:
    """An index taken apart. frame: where it was."""

    before: int
    first: int
    synced: int
    entries: np.ndarray
    frame: int = 0
    extra: int = 0


@dataclass
class Image:
    """A shard taken apart."""

    spec: RouterSpec
    header: Values
    parts: list[Record | Index]
    tail: bytes = b""
    moved: dict[int, int] = field(default_factory=dict)

    def build(self, rng: random.Random | None = None) -> bytes:
        """Put it together; whatever names the place of a record or index follows it."""
        out = bytearray(MAGIC + pack(self.header))
        try:
            salt = bytes.fromhex(self.header["salt"])
        except (KeyError, TypeError, ValueError):
            salt = bytes(8)
        files = FileHeader(self.spec, salt, len(out))
        names: dict[int, bytes] = {}
        for part in self.parts:
            at = self.moved[part.frame] = len(out)
            if isinstance(part, Record):
                self._move_spans(part)
                body = part.build(self.spec)
                out += files.frame(RECORD, at, max(0, len(body) + part.extra)) + body
                try:
                    texts = part.values["rollout_id"], part.values["digest"]
                    names[at] = make_entry(at, *texts)
                except (KeyError, TypeError, AttributeError, ValueError):
                    pass
                continue
            entries = part.entries.copy()
            for i, frame in enumerate(entries["frame"].tolist()):
                entries["frame"][i] = self.moved.get(frame, frame)
                if (new := names.get(self.moved.get(frame, frame))) is not None:
                    entries[i] = np.frombuffer(new, ENTRY)[0]
            numbers = self.moved.get(part.before, part.before), part.first, part.synced
            content = entries.tobytes() + bytes(max(0, part.extra))
            if part.extra < 0:
                content = content[: part.extra]
            out += files.index(at, *(n % (1 << 64) for n in numbers), content)
        return bytes(out) + self.tail

    def _move_spans(self, part: Record) -> None:
        columns = part.values.get("columns")
        for item in columns if type(columns) is list else []:
            if type(item) is dict and type(item.get("spans")) is list:
                for span in item["spans"]:
                    if type(span) is list and span and type(span[0]) is int:
                        span[0] = self.moved.get(span[0], span[0])


def take_apart(shard: Shard) -> Image:
    data = shard.data

    def read(offset: int, size: int) -> bytes:
        return data[offset : offset + size]

    header = read_file_header(read, len(data))
    values, _ = read_packed(lambda at, n: read(len(MAGIC) + at, n), len(data) - len(MAGIC))
    parts: list[Record | Index] = []
    at = header.end
    while at < len(data):
        marker, size = header.parse_frame(read(at, FRAME.size), at)
        if marker == RECORD:
            parts.append(take_record(data[at + FRAME.size : at + FRAME.size + size]))
        else:
            index = read_index(header, read, at, len(data))
            parts.append(Index(index.before, index.first, index.synced, index.entries))
        parts[-1].frame = at
        at += FRAME.size + size
    return Image(shard.spec, values, parts)


def take_record(data: bytes) -> Record:
    values, at = read_packed(lambda offset, size: data[offset : offset + size], len(data))
    payloads = []
    for item in values["columns"]:
        payloads.append(data[at : at + item["bytes"]])
        at += item["bytes"]
    return Record(values, payloads)


def pack(values: Any) -> bytes:
    """Like `pack_header`, and nothing checked."""
    return prefix(msgpack.packb(values))


def prefix(packed: bytes) -> bytes:
    length = len(packed).to_bytes(4, "little")
    return struct.pack("<II", len(packed), zlib.crc32(packed, zlib.crc32(length))) + packed


def experts_layout(item: Values, spec: RouterSpec) -> ExpertsLayout | None:
    """The layout that the header of routed_experts stands for, if it stands for one."""
    try:
        shape = tuple(item["shape"])
        return record._experts(item, item["codec"], item["dtype"], shape, spec)[0]
    except (FormatError, KeyError, TypeError, ValueError):
        return None


def seal_experts(layout: ExpertsLayout, payload: bytes) -> bytes:
    """The column with all its checksums made to fit."""
    data = bytearray(payload)
    bounds = []
    for layer in range(len(layout.spec.moe_layers)):
        at = layer * layout._layer
        for first in range(0, layout.stored, CHUNK_ROWS):
            if at > len(data):
                break
            rows = min(CHUNK_ROWS, layout.stored - first)
            bounds.append((at, at + layout.codec.size(rows, layout.spec) + 4))
            at = bounds[-1][1]
    ends = layout._exception_ends
    bounds += [(a, b) for a, b in pairwise(ends) if a < b]
    for start, stop in bounds:
        if stop <= len(data):
            data[stop - 4 : stop] = zlib.crc32(data[start : stop - 4]).to_bytes(4, "little")
    return bytes(data)
