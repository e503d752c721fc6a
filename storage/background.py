"""Writing records from an event loop: off its thread, in bounded memory, acknowledged one by one.

A server that hands out references to records may answer only when the record is in the file.
Encoding takes milliseconds for a long rollout, and a loop with hundreds of streams must not stand
still for that.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3.errors import FormatError
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.reader import ShardReader
from r3.storage.rotation import RotatingWriter
from r3.trace import RoutingTrace

_FILE_BYTES = 1 << 30  # of one file, about
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class RecordHandle:
    """Where a record is: the file in its folder, the rollout's id, the digest of its content."""

    rollout_id: str
    digest: str
    file: str

    def to_dict(self) -> dict[str, str]:
        return {"rollout_id": self.rollout_id, "digest": self.digest, "file": self.file}

    @classmethod
    def from_dict(cls, values: Any) -> RecordHandle:
        """Inverse of `to_dict`, for values from elsewhere. Raises FormatError or TraceError."""
        fields = ("rollout_id", "digest", "file")
        if not isinstance(values, dict) or set(values) != set(fields):
            raise FormatError(f"{values!r:.200}, expected a handle with {', '.join(fields)}")
        if not all(isinstance(values[name], str) for name in fields):
            raise FormatError(f"{values!r:.200}, expected a handle of three texts")
        RolloutId.parse(values["rollout_id"])
        if not _DIGEST.fullmatch(values["digest"]):
            raise FormatError(f"digest {values['digest']!r:.100}, expected 32 hex digits")
        if Path(values["file"]).name != values["file"] or values["file"] in ("", ".", ".."):
            raise FormatError(f"file {values['file']!r:.200}, expected a name without folders")
        return cls(**values)

    def read(self, folder: str | os.PathLike[str]) -> RoutingTrace:
        """The trace, from the folder that its writer was given.

        Raises FormatError if the file or the record is not there, damaged, or of other content.
        """
        path = Path(folder) / self.file
        with ShardReader(path) as shard:
            try:
                trace = shard.get(self.rollout_id)
            except KeyError:
                raise FormatError(f"{path}: rollout {self.rollout_id} is not in it") from None
        if trace.digest != self.digest:
            raise FormatError(
                f"{path}: rollout {self.rollout_id} has digest {trace.digest}, expected "
                f"{self.digest}"
            )
        return trace


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Make a folder for records if it is not there. Raises OSError if nothing can be put there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


class BackgroundWriter:
    """Appends traces to files of its own in a folder, from one event loop, in a thread.

    max_pending: bytes of work that may wait; `room` waits until there is less. Several processes
    may write to a folder: names of files have host, process and time in them. What `append`
    returned for survives the end of the process, however it ends.

    Raises OSError if the folder cannot be made or written to.
    """

    def __init__(
        self, folder: str | os.PathLike[str], spec: RouterSpec, *, max_pending: int = 256 << 20
    ) -> None:
        self.folder, self.max_pending, self.pending = Path(folder), max_pending, 0
        check_folder(self.folder)
        host = re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())
        name = f"routing-{host}-{os.getpid()}-{time.time_ns():x}.r3"
        self._writer = RotatingWriter(self.folder / name, spec, max_bytes=_FILE_BYTES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="r3-store")
        self._freed = asyncio.Event()
        self._files: dict[Path, int] = {}  # inodes

    async def room(self) -> None:
        """Wait until less than `max_pending` bytes of work wait: call it before more is begun."""
        while self.pending >= self.max_pending:
            self._freed.clear()
            await self._freed.wait()

    async def append(self, make: Callable[[], RoutingTrace], size: int) -> RecordHandle:
        """Store the trace that `make` returns, which is called in the thread; size: bytes it holds.

        Returns when the record is in the file. Raises what `make` and RotatingWriter.append do, and
        OSError if the file is no longer where it was.
        """
        loop = asyncio.get_running_loop()

        def done(_: Any) -> None:
            loop.call_soon_threadsafe(self._free, size)

        # one that is cancelled while it waits its turn is not written, nobody was told of it
        job = self._thread.submit(self._append, make)
        self.pending += size
        job.add_done_callback(done)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Write what waits and close the file."""
        self._thread.shutdown(wait=True)
        self._writer.close()

    def _append(self, make: Callable[[], RoutingTrace]) -> RecordHandle:
        trace = make()
        path, _ = self._writer.append(trace)
        # a file that was removed or replaced takes records as before, and nobody finds them
        found = os.stat(path)
        if self._files.setdefault(path, found.st_ino) != found.st_ino:
            raise FileNotFoundError(errno.ENOENT, "replaced while it was written", str(path))
        return RecordHandle(str(trace.rollout_id), trace.digest, path.name)

    def _free(self, size: int) -> None:
        self.pending -= size
        self._freed.set()
