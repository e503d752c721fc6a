"""What is whole in a shard file whose writer died.

What an index calls "on the disk" was there before the index was written. All the rest is read
through: a process that was killed leaves at most a record cut short, but after a loss of power any
part of what was not synced may be missing, be it in the middle.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from r3.errors import FormatError, SuspiciousRoutingWarning
from r3.storage.files import FileBytes
from r3.storage.frames import FileHeader, find_indexes, make_entry, scan
from r3.storage.stored import Records


@dataclass
class Recovered:
    """entries: ENTRY of each whole record. indexes: frame and first record of those that hold.
    indexed: records in these. synced: records known to be on the disk. end: behind the last whole
    thing. lost: what is not whole, in words."""

    entries: bytearray
    indexes: list[tuple[int, int]]
    indexed: int
    synced: int
    end: int
    lost: list[str]


def recover(file: Records, header: FileHeader, data: FileBytes) -> Recovered:
    """Find all whole records of a file; `data` is all of it."""
    size = data.size
    indexes = find_indexes(header, data.read, data.rfind, size)
    end = indexes[-1].end if indexes else header.end
    tail = scan(header, data.read, data.find, end, size)
    synced = indexes[-1].synced if indexes else 0
    entries = bytearray(b"".join(index.entries.tobytes() for index in indexes))
    frames = [int(frame) for index in indexes for frame in index.entries["frame"]]
    if synced > len(frames):
        raise FormatError(f"{synced} records on the disk, expected at most the {len(frames)} there")
    kept = entries[: synced * (len(entries) // max(len(frames), 1))]
    lost, first_lost = [], len(frames)
    for number, frame in enumerate([*frames, *(frame for frame, _ in tail.records)]):
        if number < synced:
            continue
        try:
            record = file.record_at(frame)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SuspiciousRoutingWarning)
                record.trace()
            kept += make_entry(frame, str(record.header.rollout_id), record.header.digest)
            end = max(end, record.offset + record.size)
        except FormatError as e:
            first_lost = min(first_lost, number)
            lost.append(f"record at byte {frame}: {e}")
    for start, stop, why in tail.gaps:
        lost.append(f"{stop - start} bytes from byte {start} on: {why}")
    if end < size and not lost:  # an index whose chain is broken
        lost.append(f"{size - end} bytes from byte {end} on belong to no record")
    holding = [i for i in indexes if i.first + len(i.entries) <= first_lost]
    return Recovered(
        entries=kept,
        indexes=[(i.frame, i.first) for i in holding],
        indexed=holding[-1].first + len(holding[-1].entries) if holding else 0,
        synced=synced,
        end=end,
        lost=lost,
    )
