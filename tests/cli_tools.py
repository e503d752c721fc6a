"""The command line as tests call it: as a process, or in this one where there are many calls."""

from __future__ import annotations

import os
import subprocess
import sys


def r3_command(*args: object, timeout: int = 500) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "r3.cli", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
    )


def assert_one_line_and_exit_2(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("r3: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr
