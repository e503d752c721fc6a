"""Shard files (`.r3`): the traces of one model, appended one behind the other.

    magic | file header: format version, RouterSpec | frame, record | frame, record | ...

Opening a shard reads the file header and the frames, not the records. What is not a whole shard
is refused on opening, by the writer too: nothing is ever appended behind garbage.
"""

from __future__ import annotations

import fcntl
import operator
import os
import stat
import struct
import threading
import zlib
from collections.abc import Iterator
from functools import cached_property
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from r3.errors import FormatError, R3Error, SpecError, TraceError
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.codec import Buffer
from r3.storage.record import (
    Read,
    RecordHeader,
    encode_record,
    pack_header,
    read_header,
    read_packed,
    read_trace,
)
from r3.trace import RoutingTrace

# not text: a byte above 127 and both kinds of line end show what a text transfer would damage
MAGIC = b"\x89R3\r\n\x1a\n\0"
VERSION = (1, 0)
_FRAME = struct.Struct("<4sQI")  # marker, bytes of the record, CRC-32 of the two
_MARKER = b"R3rc"


class _Shard:
    """What reader and writer share: an open file, its spec and where its records lie."""

    def __init__(self, path: str | os.PathLike[str], mode: str) -> None:
        self.path = Path(path)
        try:
            # a FIFO would block on opening; a writer may create the file
            if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
                kind = "a folder" if self.path.is_dir() else "not a regular file"
                raise FormatError(f"{path}: {kind}, expected a .r3 file")
            self._file = FileIO(self.path, mode)
        except (OSError, ValueError) as e:
            if isinstance(e, FormatError):
                raise
            reason = e.strerror if isinstance(e, OSError) else e
            raise FormatError(f"{path}: cannot be opened as a .r3 file: {reason}") from None

    def close(self) -> None:
        """Close the file; doing so twice is allowed."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, offset: int, size: int) -> memoryview:
        # memory of its own, not filled first; positioned reads, so threads can share a reader
        data = np.empty(size, np.uint8).data
        done = 0
        while done < size:
            got = os.preadv(self._file.fileno(), [data[done:]], offset + done)
            if not got:
                raise FormatError(f"ends at byte {offset + done}, expected {offset + size}")
            done += got
        return data

    def _scan(self, size: int) -> tuple[RouterSpec, list[tuple[int, int]]]:
        """The spec, and (offset, size) of each record, of a file of `size` bytes."""
        try:
            spec, at = self._read_file_header(size)
            return spec, self._read_frames(at, size)
        except R3Error as e:
            raise FormatError(f"{self.path}: {e}") from None

    def _read_frames(self, at: int, size: int) -> list[tuple[int, int]]:
        records: list[tuple[int, int]] = []
        while at < size:
            where = f"record {len(records)} at byte {at}"
            whole = f"{len(records)} whole records precede it"
            if size - at < _FRAME.size:
                raise FormatError(
                    f"{where} is cut short: {size - at} bytes, expected at least {_FRAME.size}; "
                    f"{whole}"
                )
            frame = self._read(at, _FRAME.size)
            marker, length, crc32 = _FRAME.unpack(frame)
            found = zlib.crc32(frame[:-4])
            if marker != _MARKER or found != crc32:
                raise FormatError(
                    f"{where} has a corrupt frame: marker {marker!r} and checksum {found:08x}, "
                    f"expected {_MARKER!r} and {crc32:08x}; {whole}"
                )
            at += _FRAME.size
            if length > size - at:
                raise FormatError(
                    f"{where} is cut short: {size - at} bytes, expected {length}; {whole}"
                )
            records.append((at, length))
            at += length
        return records

    def _read_file_header(self, size: int) -> tuple[RouterSpec, int]:
        if not size:
            raise FormatError("empty file, expected a .r3 file")
        magic = bytes(self._read(0, min(size, len(MAGIC))))
        if magic != MAGIC[:size]:
            raise FormatError(f"not a .r3 file: starts with {magic!r}, expected {MAGIC!r}")
        if size < len(MAGIC):
            raise FormatError(f"cut short: {size} bytes, expected a magic of {len(MAGIC)}")
        values, end = read_packed(
            lambda offset, n: self._read(len(MAGIC) + offset, n), size - len(MAGIC)
        )
        version, spec = values.get("version"), values.get("spec")
        if type(version) is not list or [type(n) for n in version] != [int, int]:
            raise FormatError("file header has no version, expected two integers")
        if version[0] != VERSION[0]:
            raise FormatError(
                f"format version {version[0]}.{version[1]}, expected {VERSION[0]}.x"
                + (": a later version of r3 is needed" if version[0] > VERSION[0] else "")
            )
        if type(spec) is not dict:
            raise FormatError("file header has no spec, expected a map")
        return RouterSpec.from_dict(spec), len(MAGIC) + end

    def _part(self, offset: int) -> Read:
        return lambda at, size: self._read(offset + at, size)


class ShardReader(_Shard):
    """A shard file as a sequence of traces.

    Opening raises FormatError, naming the path, for anything but a whole shard. Records are read
    and checked when asked for, which raises FormatError, naming the record, and warns of
    suspicious routing as RoutingTrace does. What is appended later is not seen. Threads may share
    a reader.

    spec: the routers of all its traces. file_size: bytes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "r")
        try:
            self.file_size = os.fstat(self._file.fileno()).st_size
            self.spec, self._records = self._scan(self.file_size)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> RoutingTrace:
        index, offset, size = self._locate(index)
        try:
            return read_trace(self._part(offset), size, self.spec)
        except R3Error as e:
            raise FormatError(f"{self.path}: record {index} at byte {offset}: {e}") from None

    def __iter__(self) -> Iterator[RoutingTrace]:
        return (self[i] for i in range(len(self)))

    def header(self, index: int) -> RecordHeader:
        """What record `index` says of its trace; its columns are not read."""
        index, offset, size = self._locate(index)
        try:
            return read_header(self._part(offset), size)
        except R3Error as e:
            raise FormatError(f"{self.path}: record {index} at byte {offset}: {e}") from None

    def get(self, rollout_id: RolloutId | str) -> RoutingTrace:
        """The trace of that rollout, given as RolloutId or its text; KeyError if there is none."""
        index = self._by_name.get(str(rollout_id))
        if index is None:
            raise KeyError(f"{self.path} has no rollout {rollout_id}")
        return self[index]

    @property
    def rollout_ids(self) -> list[RolloutId]:
        """The rollouts, in the order in which they were appended."""
        return [RolloutId.parse(name) for name in self._by_name]

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {name: i for name, (i, _) in _names(self).items()}

    def _locate(self, index: int) -> tuple[int, int, int]:
        found = operator.index(index)
        if not -len(self) <= found < len(self):
            raise IndexError(f"{self.path}: record {found}, expected one of {len(self)} records")
        found %= len(self)
        return (found, *self._records[found])


class ShardWriter(_Shard):
    """Appends traces to a shard file; creates it, or goes on where an earlier writer ended.

    Opening raises SpecError if the file is of other routers, and FormatError, naming the path, if
    it is not a whole shard or another writer has it open. A file of no bytes counts as new.
    What `append` returned for is with the operating system; `flush` waits for the disk. Threads
    may share a writer.
    """

    def __init__(self, path: str | os.PathLike[str], spec: RouterSpec) -> None:
        self.spec, self._mutex = spec, threading.Lock()
        header = MAGIC + pack_header({"version": list(VERSION), "spec": spec.to_dict()})
        super().__init__(path, "a+")
        try:
            self._lock()
            self._end = os.fstat(self._file.fileno()).st_size
            # rollout id -> index and digest of its record
            self._stored: dict[str, tuple[int, str]] = {}
            if self._end:
                self._resume()
            else:
                self._write([header])
                self.flush()
        except BaseException:
            self.close()
            raise

    def append(self, trace: RoutingTrace) -> int:
        """Store a trace and return its index.

        One that is already there (same rollout id, same digest) is not stored again; the index is
        that of the first. Raises SpecError for other routers, TraceError for a rollout id that
        is taken by other content or a column that the format has no place for.
        """
        if trace.spec != self.spec:
            raise SpecError(
                f"rollout {trace.rollout_id} is of {trace.spec}, expected the routers of "
                f"{self.path}: {self.spec}"
            )
        with self._mutex:
            return self._append(trace)

    def _append(self, trace: RoutingTrace) -> int:
        name = str(trace.rollout_id)
        if name in self._stored:
            index, digest = self._stored[name]
            if digest != trace.digest:
                raise TraceError(
                    f"rollout {name} is record {index} of {self.path} with digest {digest}, "
                    f"found other content with digest {trace.digest}: count RolloutId.attempt up"
                )
            return index
        pieces = encode_record(trace)
        head = _MARKER + sum(map(len, pieces)).to_bytes(8, "little")
        frame = head + zlib.crc32(head).to_bytes(4, "little")
        self._write([frame + bytes(pieces[0]), *pieces[1:]])
        self._stored[name] = (len(self._stored), trace.digest)
        return self._stored[name][0]

    def __len__(self) -> int:
        return len(self._stored)

    def flush(self) -> None:
        """Return when everything appended is on the disk."""
        os.fsync(self._file.fileno())

    def _resume(self) -> None:
        with ShardReader(self.path) as reader:
            if reader.spec != self.spec:
                raise SpecError(
                    f"{self.path} is of {reader.spec}, expected the routers to write: {self.spec}"
                )
            self._stored = _names(reader)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FormatError(f"{self.path}: another ShardWriter has this file open") from None
        except OSError:  # a file system without locks: the caller's own care has to do
            pass

    def _write(self, pieces: list[Buffer]) -> None:
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    rest = rest[self._file.write(rest) :]
        except BaseException:  # a full disk, an interrupt: leave whole records only
            try:
                self._file.truncate(self._end)
            except (OSError, ValueError):
                self.close()
            raise
        self._end += sum(map(len, pieces))


def _names(reader: ShardReader) -> dict[str, tuple[int, str]]:
    """Index and digest of each record by rollout id, in file order."""
    names: dict[str, tuple[int, str]] = {}
    for i in range(len(reader)):
        header = reader.header(i)
        name = str(header.rollout_id)
        if name in names:
            raise FormatError(
                f"{reader.path}: records {names[name][0]} and {i} are both of rollout {name}"
            )
        names[name] = (i, header.digest)
    return names
