"""A file of one JSON object per training step: appended to by one process, read by any.

A line is written whole, so a reader never sees half a record other than the last line of a run that
died while writing it. Strict JSON: NaN and infinity are null.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import io
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r3 import json_fields as of
from r3.errors import FormatError, R3Error, TornShardWarning, TraceError
from r3.files import open_regular
from r3.plain import plain

MAX_LINE = 1 << 24  # bytes
_BLOCK = 1 << 16
_WHAT = "a metrics file"
# how each line begins, as `append` writes what StepMonitor records
_BEGIN = re.compile(rb'\{"step":-?\d+,"time":[\d.e+-]*')
_NEXT = b',"metrics":{'

_LEVELS = ("notice", "bad")
_FIGURES = of.mapped(of.number_or_null)
_ALERT = of.fields(
    {
        **dict.fromkeys(("name", "message", "look_at"), of.text),
        "level": of.leaf(lambda x: x in _LEVELS, f"one of {_LEVELS}"),
    },
    of.shallow,
    **{"figure": of.text_or_null, "value": of.number_or_null, "limit": of.number_or_null},
)
_ALIGNMENT = of.fields({"fault": of.text_or_null, "text": of.text}, of.shallow)
# what a record holds; a line of another version may lack all but two and have others
check_record = of.fields(
    {"step": of.int64, "metrics": _FIGURES},
    of.shallow,
    time=of.number,
    slices=of.mapped(of.mapped(_FIGURES)),
    layers=of.listed(of.fields({"layer": of.layer}, of.number_or_null)),
    left_out=of.mapped(of.count),
    examples=of.listed(of.text),
    rollouts_without_route=of.listed(of.text),
    alignment=lambda x: None if x is None else _ALIGNMENT(x),
    environment=of.mapped(of.scalar),
    changes=of.mapped(of.pair(of.scalar, of.scalar)),
    alerts=of.listed(_ALERT),
)


class MetricsFile:
    """The file at `path`, opened for appending by this process alone, and made if need be.

    tail: its last `last` records, oldest first. What a run that died has left of a line is cut off,
    with a TornShardWarning, where that is surely what it is: no whole JSON value, behind lines that
    are records or with the beginning of one. Raises FormatError for another kind of file, which
    stays as it is, and if another process has it open.
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
            if not lines:
                raise FormatError(f"{self.path}: the last line has more than {MAX_LINE} bytes")
            lines = lines[1:]
        number = len(lines) + bool(rest)
        records = [
            _parsed(line, f"{self.path}: line {number - i} from the end")
            for i, line in enumerate(lines)
        ]
        if rest:
            records += self._mend(rest, known=bool(records))
        return records[-last:] if last else []

    def _mend(self, rest: bytes, known: bool) -> list[dict[str, Any]]:
        """End the last line, or cut it off; known: that the lines before it are records."""
        records = _last_line(rest, known, f"{self.path}: line 1 from the end")
        try:
            if records:  # whole but for its end
                self._end += self._file.write(b"\n") or 0
                return records
            self._end -= len(rest)
            self._file.truncate(self._end)
        except OSError as e:
            raise R3Error(f"{self.path}: cannot be written: {e.strerror}") from None
        warnings.warn(
            f"{self.path}: the last line is not whole, {len(rest)} bytes are cut off",
            TornShardWarning,
            stacklevel=5,  # where the monitor is made
        )
        return []


def read_metrics(path: str | os.PathLike[str], last: int | None = None) -> list[dict[str, Any]]:
    """The records of a metrics file by ascending step; of a step that repeats, the last one.

    last: only those of so many highest steps, of which no more are in memory; None: all.

    A last line that is not whole is left out: its writer is at work, or died. Raises FormatError,
    naming the line and the field, for what no monitor writes.
    """
    if last is not None and (type(last) is not int or last < 1):
        raise TraceError(f"last is {of.brief(last)}, expected None or an integer of at least 1")
    found: dict[int, dict[str, Any]] = {}
    lowest: list[int] = []  # a heap of the steps that are kept
    with open_regular(path, "r", _WHAT) as raw, io.BufferedReader(raw) as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            where = f"{path}: line {number}"
            if line.endswith(b"\n"):
                records = [_parsed(line, where)]
            elif len(line) > MAX_LINE:
                raise FormatError(f"{where}: more than {MAX_LINE} bytes")
            else:
                records = _last_line(line, number > 1, where)
            for record in records:
                if last is not None and record["step"] not in found:
                    heapq.heappush(lowest, record["step"])
                found[record["step"]] = record
                if last is not None and len(found) > last:
                    del found[heapq.heappop(lowest)]
    return [found[step] for step in sorted(found)]


def _last_line(rest: bytes, known: bool, where: str) -> list[dict[str, Any]]:
    """The record of a last line without its end, none if it is the beginning of one; known: that
    there are lines before it, which are records. Raises FormatError for anything else."""
    if _is_whole(rest):
        return [_parsed(rest, where)]
    begin = _BEGIN.match(rest)
    if not known and not (begin and _NEXT.startswith(rest[begin.end() :][: len(_NEXT)])):
        raise FormatError(f"{where}: not a step record, expected JSON lines of a StepMonitor")
    return []


def _is_whole(line: bytes) -> bool:
    """Whether a JSON value ends in the line."""
    try:  # numbers as text: those of any length
        json.JSONDecoder(parse_int=str, parse_float=str).raw_decode(
            line.decode(errors="replace").lstrip()
        )
    except RecursionError:  # no beginning of a record, at any rate
        return True
    except ValueError:
        return False
    return True


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{where}: not strict JSON: {e}") from None
    try:
        check_record(record)
    except of.Wrong as e:
        raise FormatError(f"{where}: {e}") from None
    return record


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
