"""Appending to a row of shard files, each up to a size: routing-00000.r3, routing-00001.r3, ..."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import numpy as np

from r3.errors import SpecError, TraceError
from r3.files import Closing
from r3.spec import RouterSpec
from r3.storage.frames import rollout_key
from r3.storage.reader import ShardReader
from r3.storage.writer import ShardWriter
from r3.trace import RoutingTrace


def shard_paths(path: str | os.PathLike[str]) -> list[Path]:
    """The files that a RotatingWriter of this path has written, in their order.

    One that has just been made and holds nothing yet is left out.
    """
    place = Path(path)
    name = re.compile(re.escape(place.stem) + r"-(\d{5,})" + re.escape(place.suffix))
    found = [(m, p) for p in place.parent.glob("*") if (m := name.fullmatch(p.name))]
    ordered = sorted(found, key=lambda item: int(item[0][1]))
    return [p for _, p in ordered if p.stat().st_size]


class RotatingWriter(Closing):
    """ShardWriters in a row: a new file begins when the last has reached max_bytes, or gone beyond
    it with its last record.

    For path `routing.r3` the files are routing-00000.r3 and so on; a later RotatingWriter goes on
    with the last. A rollout is stored once in all of them. Rows are shared within a file. durable,
    keep_order: as ShardWriter has them. Threads may share a writer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: RouterSpec,
        *,
        max_bytes: int,
        durable: bool = False,
        keep_order: bool = False,
    ) -> None:
        self.path, self.spec, self.max_bytes = Path(path).absolute(), spec, max_bytes
        self._options = {"durable": durable, "keep_order": keep_order}
        self._mutex = threading.Lock()
        self._closed = False
        self._earlier: dict[bytes, tuple[Path, int, bytes]] = {}
        paths = shard_paths(path)
        for earlier in paths[:-1]:
            with ShardReader(earlier) as reader:
                if reader.spec != spec:
                    raise SpecError(
                        f"{earlier} is of {reader.spec}, expected the routers to write: {spec}"
                    )
                self._remember(earlier, reader.entries)
        # by its name: files before it may have been taken away
        self._number = int(paths[-1].stem.rpartition("-")[2]) if paths else 0
        self._writer = self._open(self._number)

    def append(self, trace: RoutingTrace) -> tuple[Path, int]:
        """Store a trace; returns the file and the number of the record in it.

        What is stored already, in whichever file, is not stored again. Raises as
        ShardWriter.append does.
        """
        key = rollout_key(str(trace.rollout_id))
        with self._mutex:
            if key in self._earlier:
                path, index, digest = self._earlier[key]
                if digest.hex() != trace.digest:
                    raise TraceError(
                        f"rollout {trace.rollout_id} is record {index} of {path} with digest "
                        f"{digest.hex()}, found other content with digest {trace.digest}: count "
                        "RolloutId.attempt up"
                    )
                return path, index
            if len(self._writer) and self._writer.file_size >= self.max_bytes and not self._closed:
                self._remember(self._writer.path, self._writer.entries)
                writer = self._open(self._number + 1)
                self._writer.close()
                self._writer, self._number = writer, self._number + 1
            return self._writer.path, self._writer.append(trace)

    def flush(self) -> None:
        """As ShardWriter.flush, for all that was appended."""
        with self._mutex:
            self._writer.flush()

    def close(self) -> None:
        """Close the last file; doing so twice is allowed."""
        with self._mutex:
            self._closed = True
            self._writer.close()

    def _open(self, number: int) -> ShardWriter:
        name = f"{self.path.stem}-{number:05}{self.path.suffix}"
        return ShardWriter(self.path.with_name(name), self.spec, **self._options)

    def _remember(self, path: Path, entries: np.ndarray) -> None:
        for i, entry in enumerate(entries):
            self._earlier[entry["key"].tobytes()] = (path, i, entry["digest"].tobytes())
