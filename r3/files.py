"""Opening what must be a regular file, and closing it at the end of a `with` block."""

from __future__ import annotations

import os
import stat
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from r3.errors import FormatError


def open_regular(path: str | os.PathLike[str], mode: str, what: str) -> FileIO:
    """The regular file at `path`, which a writer may create; what: it should be, "a .r3 file" say.

    Raises FormatError for what cannot be one.
    """
    try:
        place = Path(path)
        # a FIFO would block on opening
        if place.exists() and not stat.S_ISREG(place.stat().st_mode):
            kind = "a folder" if place.is_dir() else "not a regular file"
            raise FormatError(f"{path}: {kind}, expected {what}")
        return FileIO(place, mode)
    except (OSError, ValueError) as e:
        if isinstance(e, FormatError):
            raise
        reason = e.strerror if isinstance(e, OSError) else e
        raise FormatError(f"{path}: cannot be opened as {what}: {reason}") from None


class Closing:
    """Closes at the end of a `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
