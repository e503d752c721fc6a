"""Appending traces to a shard file, and going on after a writer that died."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import warnings
from pathlib import Path

import numpy as np

from r3.errors import FormatError, SpecError, TornShardWarning, TraceError
from r3.files import Closing
from r3.spec import RouterSpec
from r3.storage.codec import CODECS, Buffer
from r3.storage.files import FileBytes, open_file
from r3.storage.frames import (
    ENTRY,
    RECORD,
    SALT,
    make_entry,
    pack_file_header,
    read_file_header,
    rollout_key,
)
from r3.storage.record import encode_record
from r3.storage.recovery import recover
from r3.storage.sharing import SharedPrefixes
from r3.storage.stored import RecentRecords, StoredRecord
from r3.trace import RoutingTrace

# an index is written after so many records or bytes, so that readers find records fast
_INDEX_RECORDS, _INDEX_BYTES = 4096, 64 << 20
_MAX_ENTRIES = 1 << 16  # of one index


class ShardWriter(Closing):
    """Appends traces to a shard file; creates it, or goes on where an earlier writer ended.

    durable: `flush` waits for the disk, so that what it returned for survives a loss of power;
    without it, what `append` returned for survives the end of this process, however it ends.
    keep_order: store the order of the experts within a row too, at log2(top_k!) bits more; of what
    this writer appends.

    The rows that a trace has in common with the beginning of one appended before are stored once.
    Opening raises SpecError if the file is of other routers, and FormatError, naming the path, if
    it is damaged or another writer has it open. A torn tail, left by a writer that died, is cut off
    with a TornShardWarning. A file of no bytes counts as new. Threads may share a writer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: RouterSpec,
        *,
        durable: bool = False,
        keep_order: bool = False,
    ) -> None:
        try:
            header = pack_file_header(spec, os.urandom(SALT))
        except FormatError as e:
            raise SpecError(f"{path}: {spec} cannot be stored: {e}") from None
        self.path, self.spec, self.durable = Path(path).absolute(), spec, durable
        self._codec = CODECS["enum-ordered" if keep_order else "enum"]
        self._prefixes = SharedPrefixes(self._codec)
        self._mutex = threading.Lock()
        self._recent = RecentRecords(self)
        self._entries = bytearray()  # ENTRY of every record
        self._by_key: dict[bytes, int] = {}
        self._indexes: list[tuple[int, int]] = []  # frame and first record of each in the chain
        self._indexed = 0  # records that are in an index
        self._durable = 0  # records that were on the disk at the last commit
        self._synced = True  # whether that is all, and an index at the end says so
        self._since_index = 0  # bytes
        self._pid = os.getpid()
        self._broken = ""  # why nothing can be appended any more
        existed, fresh = self.path.exists(), False
        self._file = open_file(path, "a+")
        self._bytes = FileBytes(self._file)
        try:
            self._lock()
            self._end = self._bytes.size
            fresh = not existed and not self._end  # and locked: nobody else's
            if self._end:
                self._resume()
            else:
                self._write([header])
                self._sync()
                _sync_folder(self.path.parent)
                self._header = read_file_header(lambda at, n: header[at : at + n], len(header))
        except BaseException:
            if fresh:
                self.path.unlink(missing_ok=True)
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._entries) // ENTRY.itemsize

    def __contains__(self, rollout_id: object) -> bool:
        """Whether there is a trace of that rollout, given as RolloutId or its text."""
        return rollout_key(str(rollout_id)) in self._by_key

    @property
    def file_size(self) -> int:
        """Bytes of the file."""
        return self._end

    @property
    def entries(self) -> np.ndarray:
        """ENTRY [records]: where each record is, and of which rollout and content."""
        return np.frombuffer(bytes(self._entries), ENTRY)

    def append(self, trace: RoutingTrace) -> int:
        """Store a trace and return its record's number.

        One that is already there (same rollout id, same digest) is not stored again; the number is
        that of the first. Raises SpecError for other routers, TraceError for a rollout id that
        is taken by other content or a column that the format has no place for.
        """
        if trace.spec != self.spec:
            raise SpecError(
                f"rollout {trace.rollout_id} is of {trace.spec}, expected the routers of "
                f"{self.path}: {self.spec}"
            )
        trace.digest  # noqa: B018  # computed and kept, before other threads have to wait
        with self._mutex:
            self._check_usable()
            return self._append(trace)

    def _append(self, trace: RoutingTrace) -> int:
        name = str(trace.rollout_id)
        key = rollout_key(name)
        if key in self._by_key:
            index = self._by_key[key]
            digest = self._entry(index)["digest"].tobytes().hex()
            if digest != trace.digest:
                raise TraceError(
                    f"rollout {name} is record {index} of {self.path} with digest {digest}, "
                    f"found other content with digest {trace.digest}: count RolloutId.attempt up"
                )
            return index
        shared = self._prefixes.find(trace, self)
        pieces = encode_record(trace, self._codec.name, shared)
        frame, size, number = self._end, sum(map(len, pieces)), len(self)
        entry = make_entry(frame, name, trace.digest)
        self._synced = False
        self._write([self._header.frame(RECORD, frame, size), *pieces])
        # whoever interrupts this finds the record in the file when it is opened again
        self._broken = "an append was interrupted"
        self._entries += entry
        self._by_key[key] = number
        self._since_index += size
        self._broken = ""
        self._prefixes.add(trace, frame, shared)
        if self._since_index > _INDEX_BYTES or number + 1 - self._indexed >= _INDEX_RECORDS:
            self._write_index()
        return number

    def flush(self) -> None:
        """Return when what was appended survives this process; if durable, a loss of power too."""
        with self._mutex:
            self._check_usable()
            if self.durable and not self._synced:
                self._commit()

    def close(self) -> None:
        """Write the last index and close the file; doing so twice is allowed."""
        with self._mutex:
            if self._file.closed:
                return
            mine = self._pid == os.getpid()  # a forked process has neither data nor lock to give up
            try:
                if mine and not self._synced and not self._broken:
                    self._commit()
            finally:
                if mine:
                    with contextlib.suppress(OSError):
                        fcntl.flock(self._file, fcntl.LOCK_UN)
                self._file.close()

    # --- what records that share rows ask for

    def read(self, offset: int, size: int) -> Buffer:
        """Bytes of the file. Raises FormatError if they are not there."""
        return self._bytes.read(offset, size)

    def record_at(self, frame: int) -> StoredRecord:
        """The record whose frame is at that byte. Raises FormatError if there is none."""
        return self._recent.at(frame, self._header, self._end)

    # --- indexes

    def _commit(self) -> None:
        # an index that says "synced" must not be on the disk before what it speaks of
        self._sync()
        self._durable = len(self)
        self._write_index()
        self._sync()
        self._synced = True

    def _write_index(self) -> None:
        # small indexes are written again as part of the next, so that the chain stays short
        first, indexes = self._indexed, list(self._indexes)
        while indexes and first - indexes[-1][1] <= len(self) - first:
            if len(self) - indexes[-1][1] > _MAX_ENTRIES:
                break
            first = indexes.pop()[1]
        entries = bytes(self._entries[first * ENTRY.itemsize :])
        before = indexes[-1][0] if indexes else 0
        frame = self._end
        self._write([self._header.index(frame, before, first, self._durable, entries)])
        self._indexes = [*indexes, (frame, first)]
        self._indexed, self._since_index = len(self), 0

    def _entry(self, index: int) -> np.ndarray:
        return np.frombuffer(self._entries, ENTRY, count=1, offset=index * ENTRY.itemsize)[0]

    # --- the file

    def _resume(self) -> None:
        """Go on behind the last whole record; see r3.storage.recovery."""
        size = self._end
        try:
            self._header = read_file_header(self.read, size)
            if self._header.spec != self.spec:
                raise SpecError(
                    f"{self.path} is of {self._header.spec}, expected the routers to write: "
                    f"{self.spec}"
                )
            found = recover(self, self._header, self._bytes)
        except FormatError as e:
            raise FormatError(f"{self.path}: {e}") from None
        self._entries, self._indexes = found.entries, found.indexes
        self._indexed, self._durable, self._end = found.indexed, found.synced, found.end
        for i, key in enumerate(np.frombuffer(self._entries, ENTRY)["key"].tolist()):
            self._by_key.setdefault(key, i)
        if found.lost:
            more = f"; and {len(found.lost) - 5} more" if len(found.lost) > 5 else ""
            warnings.warn(
                f"{self.path}: {size - found.end} bytes cut off from byte {found.end} on; "
                f"{len(self)} whole records are there; lost: {'; '.join(found.lost[:5])}{more}",
                TornShardWarning,
                stacklevel=4,
            )
            self._file.truncate(self._end)
            self._recent.clear()
        self._synced = found.synced == len(self) and not found.lost
        if found.lost:  # so that no index names what is lost
            self._commit()

    def _check_usable(self) -> None:
        if self._file.closed:
            raise ValueError(f"{self.path}: the writer is closed")
        if self._pid != os.getpid():
            raise FormatError(
                f"{self.path}: opened by process {self._pid}, expected a writer of this process"
            )
        if self._broken:
            raise FormatError(f"{self.path}: {self._broken}; open the file again to go on")

    def _sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as e:  # what it lost, a second call would not report
            self._broken = f"the disk did not take it: {e.strerror}"
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FormatError(f"{self.path}: another ShardWriter has this file open") from None
        except OSError:  # a file system without locks: the caller's own care has to do
            pass

    def _write(self, pieces: list[Buffer]) -> None:
        end = self._end + sum(map(len, pieces))
        if self._bytes.size != self._end:
            raise FormatError(
                f"{self.path}: {self._bytes.size} bytes, expected {self._end}: something else "
                "writes to this file, or cut it"
            )
        self._broken = "a write was interrupted"
        try:
            rest = [memoryview(piece) for piece in pieces if len(piece)]
            while rest:
                done = os.writev(self._file.fileno(), rest[:64])
                while rest and done >= len(rest[0]):
                    done -= len(rest.pop(0))
                if done:
                    rest[0] = rest[0][done:]
        except BaseException:  # a full disk, an interrupt: leave whole records only
            # what is whole stays, since a reader may have seen it
            if self._bytes.size < end:
                self._file.truncate(self._end)
                self._broken = ""
            raise
        self._end, self._broken = end, ""


def _sync_folder(path: Path) -> None:
    """Wait until the names of the files in a folder are on the disk, where that can be asked."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
