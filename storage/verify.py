"""Reading everything that a shard file holds, damaged or not: `r3 verify` and `r3 merge`.

A reader stops at damage. Here the file is gone through frame by frame from its beginning, whatever
its indexes say, and each record is read in full, so that what is lost can be named and the rest
saved.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from r3.errors import (
    FormatError,
    SpecError,
    SuspiciousRoutingWarning,
    TornShardWarning,
    TraceError,
)
from r3.spec import RouterSpec
from r3.storage.frames import ENTRY, FRAME, find_indexes, make_entry, read_file_header, scan
from r3.storage.reader import ShardReader
from r3.storage.record import EXPERTS
from r3.storage.stored import StoredRecord
from r3.storage.writer import ShardWriter
from r3.trace import RoutingTrace


@dataclass(frozen=True)
class Loss:
    """Bytes start .. stop of a file that cannot be read, the rollout if it is known, and why."""

    start: int
    stop: int
    rollout_id: str | None
    reason: str


@dataclass
class Verification:
    """What `verify` found. records, tokens: of what is whole. dropped: records that were not whole
    when a writer went on after a crash; they are no loss, since nobody was told that they were
    there. closed: whether the file ends as its writer leaves it when it closes; if not, records
    may be missing that were never written."""

    path: str
    file_bytes: int
    records: int = 0
    tokens: int = 0
    dropped: int = 0
    losses: list[Loss] = field(default_factory=list)
    closed: bool = False

    @property
    def ok(self) -> bool:
        """Whether everything in the file can be read."""
        return not self.losses


def verify(path: str | os.PathLike[str]) -> Verification:
    """Read all of a shard file and say what of it is lost.

    Raises FormatError if there is no header to begin with.
    """
    with _Walk(path) as walk:
        found = Verification(os.fspath(path), walk.file_size)
        for item in walk.traces():
            if isinstance(item, Loss):
                found.losses.append(item)
            else:
                found.records += 1
                found.tokens += item.num_tokens
        found.losses += walk.index_losses()
        found.closed, found.dropped = walk.closed, walk.dropped
    return found


@dataclass
class Merged:
    """What `merge` did. repeats: records that were there already. losses: by file, with salvage."""

    records: int = 0
    repeats: int = 0
    losses: list[tuple[str, Loss]] = field(default_factory=list)


def merge(
    out: str | os.PathLike[str], paths: Iterable[str | os.PathLike[str]], *, salvage: bool = False
) -> Merged:
    """Write the traces of shard files of the same routers into one new file.

    A rollout that is there twice with the same content is stored once. salvage: leave out what is
    damaged, and say so, instead of raising FormatError. Raises SpecError for other routers,
    TraceError for a rollout with different content in two files, FormatError if `out` exists. The
    file appears under its name when it is whole.
    """
    target, merged = Path(out), Merged()
    if target.exists() or not target.name:
        raise FormatError(f"{target}: exists, expected the name of a new file")
    if not target.parent.is_dir():
        raise FormatError(f"{target}: no such folder as {target.parent}")
    opener = _Walk if salvage else _Whole
    sound: list[Path] = []
    first: tuple[Path, RouterSpec] | None = None
    keep_order = False
    for path in paths:
        try:
            with opener(path) as file:
                first = first or (file.path, file.spec)
                keep_order = keep_order or _keeps_order(file)
                if file.spec != first[1]:
                    raise SpecError(
                        f"{file.path} is of {file.spec}, expected the routers of {first[0]}: "
                        f"{first[1]}"
                    )
                sound.append(file.path)
        except FormatError as e:
            if not salvage:
                raise
            merged.losses.append((str(path), Loss(0, 0, None, str(e))))
    if first is None:
        raise FormatError(f"{target}: nothing to merge, expected at least one sound file")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with ShardWriter(temporary, first[1], keep_order=keep_order) as writer:
            for path in sound:
                with opener(path) as file:
                    _append_all(writer, file, merged, target)
            merged.records = len(writer)
        os.link(temporary, target)  # unlike a rename, never over another file
    except FileExistsError:
        raise FormatError(f"{target}: exists, expected the name of a new file") from None
    finally:
        temporary.unlink(missing_ok=True)
    return merged


def _append_all(writer: ShardWriter, file: ShardReader, merged: Merged, target: Path) -> None:
    for item in file.traces() if isinstance(file, _Walk) else file:
        if isinstance(item, Loss):
            merged.losses.append((str(file.path), item))
            continue
        before = len(writer)
        try:
            writer.append(item)
        except TraceError as e:
            text = str(e).replace(str(writer.path), str(target))
            raise TraceError(f"{file.path}: {text}") from None
        merged.repeats += len(writer) == before


def _keeps_order(file: ShardReader) -> bool:
    for i in range(len(file)):
        try:
            experts = file.header(i).column(EXPERTS)
        except FormatError:
            continue
        if experts and experts.layout and experts.layout.codec.keeps_order:
            return True
    return False


class _Whole(ShardReader):
    """A reader that does not open a file with a torn tail."""

    def _open(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TornShardWarning)
            super()._open()
        if self.torn:
            raise FormatError(f"{self.path}: {self.torn}; with --salvage they are left out")


class _Walk(ShardReader):
    """A reader that opens any file with a header and knows what it could not read."""

    closed = False

    def _open(self) -> None:
        self.file_size = self._bytes.size
        try:
            self.file_header = read_file_header(self.read, self.file_size)
        except FormatError as e:
            raise FormatError(f"{self.path}: {e}") from None
        self.spec = self.file_header.spec
        found = scan(
            self.file_header, self.read, self._bytes.find, self.file_header.end, self.file_size
        )
        self._indexes = find_indexes(self.file_header, self.read, self._bytes.rfind, self.file_size)
        # what an index passes over was not whole when a writer went on after a crash
        named = {int(f) for index in self._indexes for f in index.entries["frame"]}
        covered = self._indexes[-1].end if self._indexes else 0
        records = [(f, size) for f, size in found.records if f in named or f >= covered]
        self.dropped = len(found.records) - len(records)
        self._sizes, self._gaps = dict(records), found.gaps
        self._unreadable: set[int] = set()
        entries = []
        for frame, size in records:
            record = StoredRecord(self, frame, frame + FRAME.size, size)
            try:
                header = record.header
                entries.append(make_entry(frame, str(header.rollout_id), header.digest))
            except FormatError:  # `traces` says why
                self._unreadable.add(frame)
        self._learn(np.frombuffer(b"".join(entries), ENTRY), found.end)

    def traces(self) -> Iterator[RoutingTrace | Loss]:
        """Every record, in order, or what is lost with it; then what is no record at all."""
        names: dict[str, int] = {}
        for frame, size in self._sizes.items():
            name = None
            try:
                record = self.record_at(frame)
                name = str(record.header.rollout_id)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", SuspiciousRoutingWarning)
                    trace = record.trace()
                if names.setdefault(name, frame) != frame:
                    raise FormatError(
                        f"rollout {name}: the record at byte {names[name]} is of it too"
                    )
                yield trace
            except FormatError as e:
                yield Loss(frame, frame + FRAME.size + size, name, str(e))
        for start, stop, why in self._gaps:
            yield Loss(start, stop, None, why)

    def index_losses(self) -> list[Loss]:
        """What the indexes name and the file does not have."""
        named = {e.tobytes() for index in self._indexes for e in index.entries}
        there = {e.tobytes() for e in self.entries}
        end = self._indexes[-1].end if self._indexes else 0
        self.closed = (end == self.file_size and there <= named) or not len(self)
        gaps = [range(start, stop) for start, stop, _ in self._gaps]
        losses = []
        for entry in named - there:
            frame = int(np.frombuffer(entry, ENTRY)["frame"][0])
            if frame not in self._unreadable and not any(frame in gap for gap in gaps):
                losses.append(Loss(frame, frame, None, "an index names another record here"))
        return losses
