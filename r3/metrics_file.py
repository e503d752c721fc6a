"""A file of one JSON object per training step: appended to by one process, read by any.

A line is written whole, so a reader never sees half a record other than the last line of a run that
died while writing it. Strict JSON: NaN and infinity are null.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import reprlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r3.errors import FormatError, R3Error, TornShardWarning
from r3.files import open_regular
from r3.plain import plain

MAX_LINE = 1 << 24  # bytes
_BLOCK = 1 << 16
_WHAT = "a metrics file"
_BEGIN = b'{"step":'  # of each line


class MetricsFile:
    """The file at `path`, opened for appending by this process alone, and made if need be.

    tail: its last `last` records, oldest first. What a run that died has left of a line is cut off,
    with a TornShardWarning. Raises FormatError for another kind of file, which stays as it is, and
    if another process has it open.
    """

    def __init__(self, path: str | os.PathLike[str], last: int) -> None:
        self.path = Path(path)
        self._file, self._owner = open_regular(self.path, "a+", _WHAT), os.getpid()
        try:
            self._lock()
            self._end = self._file.seek(0, os.SEEK_END)
            self.tail = self._recover(last)
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. Raises R3Error if the file is closed or the disk does not take it."""
        line = json.dumps(plain(record), allow_nan=False, separators=(",", ":")).encode()
        line += b"\n"
        if len(line) > MAX_LINE:
            raise R3Error(
                f"{self.path}: a record of {len(line)} bytes, expected at most {MAX_LINE}"
            )
        try:
            written = self._file.write(line)  # straight to the system: a FileIO has no buffer
        except ValueError:
            raise R3Error(f"{self.path}: is closed, expected an open monitor") from None
        except OSError as e:
            raise R3Error(f"{self.path}: cannot be written: {e.strerror}") from None
        if written != len(line):
            with contextlib.suppress(OSError):  # leave no half line behind
                self._file.truncate(self._end)
            raise R3Error(
                f"{self.path}: {written} of {len(line)} bytes were written, is the disk full?"
            )
        self._end += written

    def close(self) -> None:
        """May be called again."""
        if not self._file.closed and self._owner == os.getpid():
            with contextlib.suppress(OSError):  # a forked process has the lock, too
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FormatError(
                f"{self.path}: another monitor has this file open; one rank records, the others "
                "hand their StepState to it"
            ) from None
        except OSError:  # a file system without locks: the caller's own care has to do
            pass

    def _recover(self, last: int) -> list[dict[str, Any]]:
        data, start = b"", self._end
        while start and data.count(b"\n") < last + 2 and len(data) < MAX_LINE:
            size = min(_BLOCK, start)
            start -= size
            self._file.seek(start)
            data = (self._file.read(size) or b"") + data
        *lines, rest = data.split(b"\n")
        if start:  # within a line
            lines = lines[1:]
        records = [
            _parsed(line, f"{self.path}: line {len(lines) - i} from the end")
            for i, line in enumerate(lines)
        ]
        if rest:
            records += self._mend(rest, known=bool(records))
        return records[-last:] if last else []

    def _mend(self, rest: bytes, known: bool) -> list[dict[str, Any]]:
        """End the last line, or cut it off; known: that the lines before it are records."""
        with contextlib.suppress(FormatError):
            record = _parsed(rest, "")
            self._end += self._file.write(b"\n") or 0
            return [record]
        if not known and rest[: len(_BEGIN)] != _BEGIN[: len(rest)]:
            raise FormatError(f"{self.path}: not a file of step records, expected JSON lines")
        self._end -= len(rest)
        self._file.truncate(self._end)
        warnings.warn(
            f"{self.path}: the last line is not whole, {len(rest)} bytes are cut off",
            TornShardWarning,
            stacklevel=5,  # where the monitor is made
        )
        return []


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a metrics file by ascending step; of a step that repeats, the last one.

    A last line that is not whole is left out: its writer is at work, or died. Raises FormatError,
    naming the line, for what no monitor writes.
    """
    found = {}
    with open_regular(path, "r", _WHAT) as raw, io.BufferedReader(raw) as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            where = f"{path}: line {number}"
            if line.endswith(b"\n"):
                record = _parsed(line, where)
            elif len(line) > MAX_LINE:
                raise FormatError(f"{where}: more than {MAX_LINE} bytes")
            else:
                try:
                    record = _parsed(line, where)
                except FormatError:
                    break
            found[record["step"]] = record
    return [found[step] for step in sorted(found)]


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{where}: not strict JSON: {e}") from None
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
        raise FormatError(f'{where}: expected an object with an integer "step"')
    metrics = record.get("metrics")
    if not isinstance(metrics, dict):
        raise FormatError(f'{where}: expected an object with "metrics"')
    for name, value in metrics.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise FormatError(
                f"{where}: {name} is {reprlib.repr(value)}, expected a number or null"
            )
    return record


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
