"""Reading shard files: a file as a sequence of traces, or only some layers and tokens of them."""

from __future__ import annotations

import mmap
import operator
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, overload

import numpy as np

from r3.errors import FormatError, TornShardWarning
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.codec import Buffer
from r3.storage.frames import (
    ENTRY,
    FRAME,
    RECORD,
    FileHeader,
    find_indexes,
    make_entry,
    read_file_header,
    rollout_key,
    scan,
)
from r3.storage.record import RecordHeader
from r3.storage.stored import RoutingSlice, StoredRecord
from r3.trace import RoutingTrace

T = TypeVar("T")
RECENT = 512  # records whose headers are kept; more than one record can share rows of


def open_file(path: str | os.PathLike[str], mode: str) -> FileIO:
    """The regular file at `path`. Raises FormatError for what cannot be one."""
    try:
        place = Path(path)
        # a FIFO would block on opening; a writer may create the file
        if place.exists() and not stat.S_ISREG(place.stat().st_mode):
            kind = "a folder" if place.is_dir() else "not a regular file"
            raise FormatError(f"{path}: {kind}, expected a .r3 file")
        return FileIO(place, mode)
    except (OSError, ValueError) as e:
        if isinstance(e, FormatError):
            raise
        reason = e.strerror if isinstance(e, OSError) else e
        raise FormatError(f"{path}: cannot be opened as a .r3 file: {reason}") from None


class ShardReader:
    """A shard file as a sequence of traces.

    Opening reads the file header, the indexes and what was appended behind the last of them; it
    raises FormatError, naming the path, if one of these is damaged. Records are read and checked
    when asked for, which raises FormatError, naming the record, and warns of suspicious routing as
    RoutingTrace does. A file may be read while it is written: the reader sees what was appended
    before it was opened or `refresh` was called. The file is mapped into memory and must not be
    cut by others meanwhile. Threads may share a reader.

    spec: the routers of all traces. file_size: bytes of the file that are read. torn: what stands
    behind the last whole record, if anything does, as text; a writer that is just appending, or
    one that died. There is a TornShardWarning of it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.torn: str | None = None
        self._file = open_file(path, "r")
        self._map: mmap.mmap | None = None
        self.record_at = lru_cache(RECENT)(self._record_at)
        self._entries = np.empty(0, ENTRY)
        self._by_key: tuple[np.ndarray, np.ndarray] | None = None  # keys ascending, their records
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._remap()
        try:
            self.file_header: FileHeader = read_file_header(self.read, self.file_size)
            self.spec: RouterSpec = self.file_header.spec
            self._end = self.file_header.end
            indexes = find_indexes(self.file_header, self.read, self._rfind, self.file_size)
            if indexes:
                self._entries = np.concatenate([i.entries for i in indexes])
                self._end = indexes[-1].end
        except FormatError as e:
            raise FormatError(f"{self.path}: {e}") from None
        self._read_tail()

    def refresh(self) -> int:
        """See what was appended meanwhile; returns how many records that is."""
        before = len(self)
        self._remap()
        self._read_tail()
        return len(self) - before

    def _remap(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        # views of the old map keep it alive until they are gone
        self._map = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) if size else None
        self.file_size = size

    def _read_tail(self) -> None:
        found = scan(self.file_header, self.read, self._find, self._end, self.file_size)
        entries = []
        try:
            for gap in found.gaps:
                if gap[1] < self.file_size:
                    raise FormatError(
                        f"bytes {gap[0]} to {gap[1] - 1} are neither record nor index: {gap[2]}; "
                        "`r3 verify` says what is lost, `r3 merge --salvage` saves the rest"
                    )
            for i, (frame, size) in enumerate(found.records, len(self)):
                try:
                    header = StoredRecord(self, frame, frame + FRAME.size, size).header
                    entries.append(make_entry(frame, str(header.rollout_id), header.digest))
                except FormatError as e:
                    raise FormatError(
                        f"record {i} at byte {frame}: {e}; a ShardWriter that opens the file drops "
                        "what was not yet on the disk when its writer died"
                    ) from None
        except FormatError as e:
            raise FormatError(f"{self.path}: {e}") from None
        if entries:
            self._entries = np.concatenate([self._entries, np.frombuffer(b"".join(entries), ENTRY)])
            self._by_key = None
        self._end = found.end
        self.torn = None
        if found.gaps:
            start, end, why = found.gaps[-1]
            self.torn = f"{end - start} bytes from byte {start} on are no whole record: {why}"
            warnings.warn(
                f"{self.path}: {self.torn}; {len(self)} whole records precede them",
                TornShardWarning,
                stacklevel=4,
            )

    # --- access

    @property
    def entries(self) -> np.ndarray:
        """ENTRY [records]: where each record is, and of which rollout and content."""
        return self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> RoutingTrace: ...

    @overload
    def __getitem__(self, index: slice) -> list[RoutingTrace]: ...

    def __getitem__(self, index: int | slice) -> RoutingTrace | list[RoutingTrace]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._of(self._locate(index), StoredRecord.trace)

    def __iter__(self) -> Iterator[RoutingTrace]:
        return (self[i] for i in range(len(self)))

    def get(self, rollout_id: RolloutId | str) -> RoutingTrace:
        """The trace of that rollout, given as RolloutId or its text; KeyError if there is none."""
        return self[self.find(rollout_id)]

    def find(self, rollout_id: RolloutId | str) -> int:
        """The number of the record of that rollout; KeyError if there is none."""
        if self._by_key is None:
            keys = np.ascontiguousarray(self._entries["key"]).view("<u8").reshape(-1, 2)[:, 0]
            order = np.argsort(keys, kind="stable")
            self._by_key = keys[order], order
        keys, order = self._by_key
        key = rollout_key(str(rollout_id))
        first = np.frombuffer(key, "<u8")[0]
        low, high = (int(np.searchsorted(keys, first, side)) for side in ("left", "right"))
        found = [int(i) for i in order[low:high] if self._entries[i]["key"].tobytes() == key]
        if not found:
            raise KeyError(f"{self.path} has no rollout {rollout_id}")
        if len(found) > 1:
            raise FormatError(
                f"{self.path}: records {found[0]} and {found[1]} are both of rollout {rollout_id}"
            )
        return found[0]

    @property
    def rollout_ids(self) -> list[RolloutId]:
        """The rollouts, in the order in which they were appended; reads every record's header."""
        names: dict[RolloutId, int] = {}
        for i in range(len(self)):
            name = self.header(i).rollout_id
            if names.setdefault(name, i) != i:
                raise FormatError(
                    f"{self.path}: records {names[name]} and {i} are both of rollout {name}"
                )
        return list(names)

    def header(self, index: int) -> RecordHeader:
        """What record `index` says of its trace; its columns are not read."""
        return self._of(self._locate(index), lambda record: record.header)

    def slice(
        self,
        rollout: RolloutId | str | int,
        *,
        layers: Sequence[int] | None = None,
        tokens: slice = slice(None),
    ) -> RoutingSlice:
        """Some layers and tokens of a rollout, given by its id or its record's number.

        layers: decoder layer indices; None for all. Only the chunks that these lie in are read.
        Raises TraceError for layers or tokens that cannot be, KeyError, IndexError or FormatError
        as the other methods do.
        """
        index = self.find(rollout) if isinstance(rollout, RolloutId | str) else rollout
        return self._of(self._locate(index), lambda record: record.slice(layers, tokens))

    def close(self) -> None:
        """Close the file; doing so twice is allowed."""
        self._file.close()
        self.record_at.cache_clear()
        self._map = None  # goes when the last array that looks into it does

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- what records ask for

    def read(self, offset: int, size: int) -> Buffer:
        """Bytes of the file, as a view. Raises FormatError if they are not there."""
        if self._file.closed:
            raise ValueError(f"{self.path}: the reader is closed")
        if self._map is None or not 0 <= offset <= offset + size <= self.file_size:
            raise FormatError(f"ends at byte {self.file_size}, expected {offset + size}")
        return memoryview(self._map)[offset : offset + size]

    def _record_at(self, frame: int) -> StoredRecord:
        """The record whose frame is at that byte. Raises FormatError if there is none."""
        marker, size = self.file_header.parse_frame(bytes(self.read(frame, FRAME.size)), frame)
        if marker != RECORD or size > self.file_size - frame - FRAME.size:
            raise FormatError(f"{size} bytes of {marker!r}, expected a whole record")
        return StoredRecord(self, frame, frame + FRAME.size, size)

    def _find(self, marker: bytes, start: int, end: int) -> int:
        return -1 if self._map is None else self._map.find(marker, start, end)

    def _rfind(self, marker: bytes, start: int, end: int) -> int:
        return -1 if self._map is None else self._map.rfind(marker, start, end)

    def _locate(self, index: int) -> int:
        found = operator.index(index)
        if not -len(self) <= found < len(self):
            raise IndexError(f"{self.path}: record {found}, expected one of {len(self)} records")
        return found % len(self)

    def _of(self, index: int, ask: Callable[[StoredRecord], T]) -> T:
        """What the record says; it must be the one that the index has there."""
        entry = self._entries[index]
        frame = int(entry["frame"])
        try:
            record = self.record_at(frame)
            name, digest = str(record.header.rollout_id), record.header.digest
            if make_entry(frame, name, digest) != entry.tobytes():
                raise FormatError(f"rollout {name} with digest {digest} is not what the index has")
            return ask(record)
        except FormatError as e:
            raise FormatError(f"{self.path}: record {index} at byte {frame}: {e}") from None
