"""How records and indexes stand in a shard file: the file header, frames, and where each record is.

    magic | file header | frame, record or index | frame, record or index | ...

An index says where the records before it begin and which rollouts they are, so that a file of a
million records opens without reading them; the last one is found from the end of the file. What
stands behind the last index is gone through frame by frame. Checksums of frames and indexes begin
with a random number of the file and cover where they stand, so that neither bytes of an older
file nor content that looks like a frame is taken for one.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from r3.errors import FormatError, R3Error
from r3.spec import RouterSpec
from r3.storage.header import Read, get, pack_header, read_packed

# not text: a byte above 127 and both kinds of line end show what a text transfer would damage
MAGIC = b"\x89R3\r\n\x1a\n\0"
VERSION = (2, 0)
SALT = 8  # bytes
RECORD, INDEX, _INDEX_END = b"R3rc", b"R3ix", b"R3ie"

FRAME = struct.Struct("<4sQI")  # marker, bytes of what follows, checksum
# frame of the index before, number of records before, number of records known to be on the disk
_INDEX_HEAD = struct.Struct("<QQQ")
_INDEX_TAIL = struct.Struct("<IQ4s")  # checksum, where the frame of this index is, marker
_TRIES = 16  # damaged indexes, from the end of the file, before giving up

# one record in an index: its frame, the key of its rollout id, the digest of its content
ENTRY = np.dtype([("frame", "<u8"), ("key", "V16"), ("digest", "V16")])

# `find(marker, start, end)`: the last place of a marker between two offsets, or -1
Find = Callable[[bytes, int, int], int]


def rollout_key(rollout_id: str) -> bytes:
    """16 bytes (BLAKE2b) by which an index names a rollout."""
    return hashlib.blake2b(rollout_id.encode(), digest_size=16).digest()


def make_entry(frame: int, rollout_id: str, digest: str) -> bytes:
    """The bytes of an ENTRY. Raises FormatError for a digest that is not one."""
    try:
        number = bytes.fromhex(digest)
    except ValueError:
        number = b""
    if len(number) != 16:
        raise FormatError(f"digest {digest[:40]!r}, expected 32 hexadecimal digits")
    return struct.pack("<Q16s16s", frame, rollout_key(rollout_id), number)


@dataclass(frozen=True)
class FileHeader:
    """spec: the routers. salt: what checksums begin with. end: where the first frame is."""

    spec: RouterSpec
    salt: bytes
    end: int

    def frame(self, marker: bytes, offset: int, size: int) -> bytes:
        """The frame, to stand at `offset`, of `size` bytes that follow it."""
        head = marker + size.to_bytes(8, "little")
        return head + self._checksum(head, offset).to_bytes(4, "little")

    def parse_frame(self, data: bytes, offset: int) -> tuple[bytes, int]:
        """Marker and size of the frame at `offset`; FormatError if it is none."""
        marker, size, crc32 = FRAME.unpack(data)
        found = self._checksum(data[:12], offset)
        if marker not in (RECORD, INDEX) or crc32 != found:
            raise FormatError(
                f"marker {marker!r} and checksum {crc32:08x}, expected {RECORD!r} or {INDEX!r} and "
                f"{found:08x}"
            )
        return marker, size

    def _checksum(self, head: bytes, offset: int) -> int:
        return zlib.crc32(head, zlib.crc32(offset.to_bytes(8, "little"), zlib.crc32(self.salt)))

    def index(self, offset: int, before: int, first: int, synced: int, entries: bytes) -> bytes:
        """Frame and index, to stand at `offset`, of `entries` (ENTRY, of records from number
        `first` on); `before` is the frame of the index before, or 0; the first `synced` records
        of the file were on the disk before this was written."""
        size = _INDEX_HEAD.size + len(entries) + _INDEX_TAIL.size
        body = self.frame(INDEX, offset, size)
        body += _INDEX_HEAD.pack(before, first, synced) + entries
        crc32 = zlib.crc32(body, zlib.crc32(self.salt))
        return body + _INDEX_TAIL.pack(crc32, offset, _INDEX_END)


def pack_file_header(spec: RouterSpec, salt: bytes) -> bytes:
    values = {"version": list(VERSION), "spec": spec.to_dict(), "salt": salt.hex()}
    return MAGIC + pack_header(values)


def read_file_header(read: Read, size: int) -> FileHeader:
    """Raises FormatError if a file of `size` bytes does not begin with a header of this version."""
    if not size:
        raise FormatError("empty file, expected a .r3 file")
    magic = bytes(read(0, min(size, len(MAGIC))))
    if magic != MAGIC[:size]:
        raise FormatError(f"not a .r3 file: starts with {magic!r}, expected {MAGIC!r}")
    if size < len(MAGIC):
        raise FormatError(f"cut short: {size} bytes, expected a magic of {len(MAGIC)}")
    values, end = read_packed(lambda offset, n: read(len(MAGIC) + offset, n), size - len(MAGIC))
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
    try:
        salt = bytes.fromhex(get(values, "salt", str))
        if len(salt) != SALT:
            raise FormatError(f"salt of {len(salt)} bytes, expected {SALT}")
        return FileHeader(RouterSpec.from_dict(spec), salt, len(MAGIC) + end)
    except (R3Error, ValueError) as e:
        raise FormatError(f"file header: {e}") from None


@dataclass(frozen=True)
class Index:
    """A whole index; see FileHeader.index. end: the offset behind it."""

    frame: int
    before: int
    first: int
    synced: int
    entries: np.ndarray
    end: int


def read_index(header: FileHeader, read: Read, offset: int, limit: int) -> Index:
    """The index whose frame is at `offset` and that ends at `limit` at the latest."""
    try:
        if not header.end <= offset <= limit - FRAME.size:
            raise FormatError(f"expected between {header.end} and {limit}")
        frame = bytes(read(offset, FRAME.size))
        marker, size = header.parse_frame(frame, offset)
        rest = size - _INDEX_HEAD.size - _INDEX_TAIL.size
        if marker != INDEX or rest < 0 or rest % ENTRY.itemsize:
            raise FormatError(f"marker {marker!r} with {size} bytes, which is no index")
        if size > limit - offset - FRAME.size:
            raise FormatError(f"{size} bytes, expected at most {limit - offset - FRAME.size}")
        body = read(offset + FRAME.size, size)
        crc32, at, end = _INDEX_TAIL.unpack(body[-_INDEX_TAIL.size :])
        content = body[: -_INDEX_TAIL.size]
        found = zlib.crc32(content, zlib.crc32(frame, zlib.crc32(header.salt)))
        if (crc32, at, end) != (found, offset, _INDEX_END):
            raise FormatError(f"checksum {crc32:08x}, expected {found:08x}")
        before, first, synced = _INDEX_HEAD.unpack(content[: _INDEX_HEAD.size])
        entries = np.frombuffer(content, ENTRY, offset=_INDEX_HEAD.size).copy()
        frames = entries["frame"]
        if len(frames) and (
            frames[0] < header.end or frames[-1] >= offset or (frames[1:] <= frames[:-1]).any()
        ):
            raise FormatError("records that are not in ascending order before it")
    except FormatError as e:
        raise FormatError(f"index at byte {offset}: {e}") from None
    return Index(offset, before, first, synced, entries, offset + FRAME.size + size)


def find_indexes(header: FileHeader, read: Read, rfind: Find, size: int) -> list[Index]:
    """The last whole index of a file of `size` bytes and all that lead to it, the first first.

    If one of those is missing (it was never on the disk), the same from an earlier index; an empty
    list if there is none.
    """
    end, tries = size, 0
    while tries < _TRIES and (at := rfind(_INDEX_END, header.end, end)) >= 0:
        end = at + len(_INDEX_END)
        tail = bytes(read(end - _INDEX_TAIL.size, _INDEX_TAIL.size))
        offset = _INDEX_TAIL.unpack(tail)[1]
        try:
            if header.end <= offset <= at and _frame(header, read, offset, end) == (INDEX, end):
                tries += 1  # what comes now takes time
                return _chain(header, read, read_index(header, read, offset, end))
        except FormatError:
            pass
        end -= 1
    return []


def _chain(header: FileHeader, read: Read, index: Index) -> list[Index]:
    indexes = [index]
    while (last := indexes[-1]).first:
        before = read_index(header, read, last.before, last.frame)
        if before.first + len(before.entries) != last.first:
            raise FormatError(
                f"index at byte {last.frame} does not go on where the one before ends"
            )
        indexes.append(before)
    return indexes[::-1]


@dataclass
class Scan:
    """What stands between two offsets: records (frame, size), bytes that are neither record nor
    index (start, end, why), and where the last whole thing ends."""

    records: list[tuple[int, int]] = field(default_factory=list)
    gaps: list[tuple[int, int, str]] = field(default_factory=list)
    end: int = 0


def scan(header: FileHeader, read: Read, find_next: Find, start: int, size: int) -> Scan:
    """Go through frames from `start` on, and behind damage from the next frame that is whole.

    `find_next(marker, start, end)`: the first place of a marker. Records' contents are not read.
    Takes time in proportion to the bytes gone through, whatever is in them.
    """
    result, at = Scan(end=start), start
    places = dict.fromkeys((RECORD, INDEX), -1)
    while at < size:
        why = None
        try:
            marker, end = _frame(header, read, at, size)
        except FormatError as e:
            why, end = str(e), _resync(header, read, find_next, at + 1, size, places)
        else:
            if marker == RECORD:
                result.records.append((at, end - at - FRAME.size))
            else:
                why = _index_error(header, read, at, end)
        if why is None:
            result.end = end
        elif result.gaps and result.gaps[-1][1] == at:
            first, _, before = result.gaps.pop()
            result.gaps.append((first, end, before))
        else:
            result.gaps.append((at, end, why))
        at = end
    return result


def _frame(header: FileHeader, read: Read, at: int, size: int) -> tuple[bytes, int]:
    """Marker and end of the record or index whose frame is at `at`; FormatError if there is none
    that ends in the file."""
    if size - at < FRAME.size:
        raise FormatError(f"cut short: {size - at} bytes, expected at least {FRAME.size}")
    marker, length = header.parse_frame(bytes(read(at, FRAME.size)), at)
    if length > size - at - FRAME.size:
        raise FormatError(f"cut short: {size - at - FRAME.size} bytes, expected {length}")
    return marker, at + FRAME.size + length


def _index_error(header: FileHeader, read: Read, at: int, end: int) -> str | None:
    try:
        read_index(header, read, at, end)
    except FormatError as e:
        return str(e)
    return None


def _resync(
    header: FileHeader, read: Read, find_next: Find, at: int, size: int, places: dict[bytes, int]
) -> int:
    """Where the next whole frame is; `size` if there is none.

    places: where each marker was found next, `size` if nowhere; kept from call to call, so that
    nothing is searched twice.
    """
    while True:
        for marker, place in places.items():
            if place < at:
                found = find_next(marker, at, size)
                places[marker] = found if found >= 0 else size
        at = min(places.values())
        if at == size:
            return size
        try:
            _frame(header, read, at, size)
            return at
        except FormatError:
            at += 1
