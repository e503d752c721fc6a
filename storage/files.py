"""A file as bytes that are asked for by their place: what readers and writers of shards share.

Positioned reads, not a memory map: what was not found to be whole yet may be cut off meanwhile.
"""

from __future__ import annotations

import os
from io import FileIO

import numpy as np

from r3.errors import FormatError
from r3.files import open_regular

_WINDOW = 1 << 20  # bytes searched at a time


def open_file(path: str | os.PathLike[str], mode: str) -> FileIO:
    """The regular file at `path`. Raises FormatError for what cannot be one."""
    return open_regular(path, mode, "a .r3 file")


class FileBytes:
    """Bytes of an open file. Threads may share it."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, size: int) -> memoryview:
        """Bytes offset .. offset + size, in memory of their own.

        Raises FormatError if they are not there, before memory is taken.
        """
        if size > max(0, self.size - offset):
            raise FormatError(f"ends at byte {self.size}, expected {offset + size}")
        data = np.empty(size, np.uint8).data  # not filled first
        done = 0
        while done < size:
            got = os.preadv(self._file.fileno(), [data[done:]], offset + done)
            if not got:
                raise FormatError(f"ends at byte {offset + done}, expected {offset + size}")
            done += got
        return data

    def find(self, marker: bytes, start: int, end: int) -> int:
        """The first place of a marker that lies in start .. end; -1 if there is none."""
        for low in range(start, end, _WINDOW):
            window = bytes(self.read(low, min(_WINDOW + len(marker) - 1, end - low)))
            if (at := window.find(marker)) >= 0:
                return low + at
        return -1

    def rfind(self, marker: bytes, start: int, end: int) -> int:
        """The last place of a marker that lies in start .. end; -1 if there is none."""
        high = end
        while high > start:
            low = max(start, high - _WINDOW)
            window = bytes(self.read(low, min(high + len(marker) - 1, end) - low))
            if (at := window.rfind(marker)) >= 0:
                return low + at
            high = low
        return -1
