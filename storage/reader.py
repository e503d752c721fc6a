"""Reading shard files: a file as a sequence of traces, or only some layers and tokens of them."""

from __future__ import annotations

import mmap
import operator
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar, overload

import numpy as np

from r3.errors import FormatError, TornShardWarning
from r3.files import Closing
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.codec import Buffer
from r3.storage.files import FileBytes, open_file
from r3.storage.frames import (
    ENTRY,
    FRAME,
    FileHeader,
    find_indexes,
    make_entry,
    read_file_header,
    rollout_key,
    scan,
)
from r3.storage.record import RecordHeader
from r3.storage.stored import RecentRecords, RoutingSlice, StoredRecord
from r3.trace import RoutingTrace

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Known:
    """What a reader knows of its file at one time; replaced as a whole, so that threads see one
    state. end: behind the last whole record or index. view: the bytes to there."""

    entries: np.ndarray
    end: int
    view: memoryview

    @cached_property
    def by_key(self) -> tuple[np.ndarray, np.ndarray]:
        """The first 8 bytes of all keys as numbers, ascending, and the records that have them."""
        keys = np.ascontiguousarray(self.entries["key"]).view("<u8").reshape(-1, 2)[:, 0]
        order = np.argsort(keys, kind="stable")
        return keys[order], order


class ShardReader(Closing):
    """A shard file as a sequence of traces.

    Opening reads the file header, the indexes and what was appended behind the last of them; it
    raises FormatError, naming the path, if one of these is damaged. Records are read and checked
    when asked for, which raises FormatError, naming the record, and warns of suspicious routing as
    RoutingTrace does. A file may be read while it is written: the reader sees what was appended
    before it was opened or `refresh` was called. What is whole is mapped into memory and must not
    be cut off meanwhile. Threads may share a reader.

    spec: the routers of all traces. file_size: bytes of the file that are read. torn: what stands
    behind the last whole record, if anything does, as text; a writer that is just appending, or
    one that died. Opening gives a TornShardWarning of it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.torn: str | None = None
        self._file = open_file(path, "r")
        self._bytes = FileBytes(self._file)
        self._recent = RecentRecords(self)
        self._mutex = threading.Lock()
        self._known = _Known(np.empty(0, ENTRY), 0, memoryview(b""))
        self._room = self._known.entries  # what the entries are the beginning of
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self.file_size = self._bytes.size
        try:
            self.file_header: FileHeader = read_file_header(self.read, self.file_size)
            self.spec: RouterSpec = self.file_header.spec
            end = self.file_header.end
            indexes = find_indexes(self.file_header, self.read, self._bytes.rfind, self.file_size)
            if indexes:
                self._learn(np.concatenate([i.entries for i in indexes]), end)
                end = indexes[-1].end
        except FormatError as e:
            raise FormatError(f"{self.path}: {e}") from None
        self._read_tail(end)
        if self.torn:
            warnings.warn(
                f"{self.path}: {self.torn}; {len(self)} whole records precede them",
                TornShardWarning,
                stacklevel=4,
            )

    def refresh(self) -> int:
        """See what was appended meanwhile; returns how many records that is."""
        with self._mutex:
            before = len(self)
            self.file_size = self._bytes.size
            self._read_tail(self._known.end)
            return len(self) - before

    def _read_tail(self, start: int) -> None:
        size = self.file_size
        found = scan(self.file_header, self.read, self._bytes.find, start, size)
        entries = []
        try:
            for gap in found.gaps:
                if gap[1] < size:
                    raise FormatError(
                        f"bytes {gap[0]} to {gap[1] - 1} are neither record nor index: {gap[2]}; "
                        "`r3 verify` says what is lost, `r3 merge --salvage` saves the rest"
                    )
            for i, (frame, length) in enumerate(found.records, len(self)):
                try:
                    header = StoredRecord(self, frame, frame + FRAME.size, length).header
                    entries.append(make_entry(frame, str(header.rollout_id), header.digest))
                except FormatError as e:
                    raise FormatError(
                        f"record {i} at byte {frame}: {e}; a ShardWriter that opens the file drops "
                        "what was not yet on the disk when its writer died"
                    ) from None
        except FormatError as e:
            raise FormatError(f"{self.path}: {e}") from None
        self._learn(np.frombuffer(b"".join(entries), ENTRY), found.end)
        self.torn = None
        if found.gaps:
            begin, end, why = found.gaps[-1]
            self.torn = f"{end - begin} bytes from byte {begin} on are no whole record: {why}"

    def _learn(self, more: np.ndarray, end: int) -> None:
        """Know of further records, and of all bytes to `end`."""
        known, n = self._known, len(self._known.entries)
        total = n + len(more)
        if total > len(self._room):  # grows by doubling; what is known already stays where it is
            self._room = np.concatenate([known.entries, np.empty(max(len(more), n), ENTRY)])
        self._room[n:total] = more
        view = known.view
        if end != known.end:
            try:
                view = memoryview(mmap.mmap(self._file.fileno(), end, access=mmap.ACCESS_READ))
            except (OSError, ValueError) as e:
                raise FormatError(f"{self.path}: cannot be mapped into memory: {e}") from None
        self._known = _Known(self._room[:total], end, view)

    # --- access

    @property
    def entries(self) -> np.ndarray:
        """ENTRY [records]: where each record is, and of which rollout and content."""
        return self._known.entries

    def __len__(self) -> int:
        return len(self._known.entries)

    @overload
    def __getitem__(self, index: int) -> RoutingTrace: ...

    @overload
    def __getitem__(self, index: slice) -> list[RoutingTrace]: ...

    def __getitem__(self, index: int | slice) -> RoutingTrace | list[RoutingTrace]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._of(self._locate(index), StoredRecord.trace)

    def __contains__(self, rollout_id: object) -> bool:
        """Whether there is a trace of that rollout, given as RolloutId or its text."""
        if not isinstance(rollout_id, RolloutId | str):
            return False
        try:
            self.find(rollout_id)
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[RoutingTrace]:
        return (self[i] for i in range(len(self)))

    def get(self, rollout_id: RolloutId | str) -> RoutingTrace:
        """The trace of that rollout, given as RolloutId or its text; KeyError if there is none."""
        return self[self.find(rollout_id)]

    def find(self, rollout_id: RolloutId | str) -> int:
        """The number of the record of that rollout; KeyError if there is none.

        TraceError for text that is no rollout id.
        """
        if isinstance(rollout_id, str):
            RolloutId.parse(rollout_id)
        known, key = self._known, rollout_key(str(rollout_id))
        keys, order = known.by_key
        first = np.frombuffer(key, "<u8")[0]
        low, high = (int(np.searchsorted(keys, first, side)) for side in ("left", "right"))
        found = [int(i) for i in order[low:high] if known.entries[i]["key"].tobytes() == key]
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
        Raises SpecError for layers that there are not, TraceError for tokens that are no slice of
        step 1, KeyError, IndexError or FormatError as the other methods do.
        """
        index = self.find(rollout) if isinstance(rollout, RolloutId | str) else rollout
        return self._of(self._locate(index), lambda record: record.slice(layers, tokens))

    def close(self) -> None:
        """Close the file; doing so twice is allowed."""
        self._file.close()
        self._recent.clear()
        # the map goes when the last array that looks into it does
        self._known = _Known(self._known.entries, self._known.end, memoryview(b""))

    def __reduce__(self) -> tuple:
        # for the workers of a data loader: the file is opened again where it arrives
        return type(self), (self.path.absolute(),)

    # --- what records ask for

    def read(self, offset: int, size: int) -> Buffer:
        """Bytes of the file. Raises FormatError if they are not there."""
        if self._file.closed:
            raise ValueError(f"{self.path}: the reader is closed")
        view = self._known.view
        if 0 <= offset <= offset + size <= len(view):
            return view[offset : offset + size]
        return self._bytes.read(offset, size)

    def record_at(self, frame: int) -> StoredRecord:
        """The record whose frame is at that byte. Raises FormatError if there is none."""
        return self._recent.at(frame, self.file_header, self.file_size)

    def _locate(self, index: int) -> int:
        found = operator.index(index)
        if not -len(self) <= found < len(self):
            raise IndexError(f"{self.path}: record {found}, expected one of {len(self)} records")
        return found % len(self)

    def _of(self, index: int, ask: Callable[[StoredRecord], T]) -> T:
        """What the record says; it must be the one that the index has there."""
        entry = self._known.entries[index]
        frame = int(entry["frame"])
        try:
            record = self.record_at(frame)
            name, digest = str(record.header.rollout_id), record.header.digest
            if make_entry(frame, name, digest) != entry.tobytes():
                raise FormatError(f"rollout {name} with digest {digest} is not what the index has")
            return ask(record)
        except FormatError as e:
            raise FormatError(f"{self.path}: record {index} at byte {frame}: {e}") from None
