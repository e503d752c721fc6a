"""What all campaigns share: running inputs one by one, and counting what became of them.

An input ends in an outcome that its campaign expects, or it is a finding: an exception that no
caller should see, a wrong answer, more time or more memory than its size can justify.
"""

from __future__ import annotations

import random
import resource
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

from r3 import SuspiciousRoutingWarning, TornShardWarning

INPUT_SECONDS = 2.0  # of processor time
MEMORY = 256 << 20  # bytes that a process may take beyond what it has when its inputs begin


class Finding(AssertionError):
    """The code under test gave a wrong answer."""


class Hang(BaseException):
    """An input took too long; no handler of the code under test catches it."""


@dataclass
class Report:
    """outcomes: how many inputs ended how. findings: text, with which a finding can be repeated."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.outcomes += other.outcomes
        self.findings += other.findings

    @property
    def inputs(self) -> int:
        return sum(n for outcome, n in self.outcomes.items() if not outcome.startswith("+"))


# what a campaign does with one input: returns its outcome, or several words of which those after
# the first begin with "+" and count what else is worth knowing
Check = Callable[[random.Random], str]


def run_inputs(
    seed: int, inputs: range, check: Check, seconds: float | None = INPUT_SECONDS
) -> Report:
    """Call `check` for each input and collect outcomes and findings."""
    report = Report()
    strict_warnings()
    before = signal.signal(signal.SIGPROF, _hang)
    try:
        for i in inputs:
            try:
                if seconds is not None:
                    signal.setitimer(signal.ITIMER_PROF, seconds)
                report.outcomes.update(check(random.Random(f"{seed} {i}")).split())
            except (Exception, Hang):
                report.outcomes["finding"] += 1
                report.findings.append(f"seed {seed}, input {i}: {traceback.format_exc()}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        signal.signal(signal.SIGPROF, before)
    return report


def _hang(signum: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {INPUT_SECONDS} s")


def strict_warnings() -> None:
    """A torn shard is an error unless a campaign asks for the warning; hostile content may well
    be suspicious."""
    warnings.simplefilter("error", TornShardWarning)
    warnings.simplefilter("ignore", SuspiciousRoutingWarning)


def limit_memory() -> None:
    """From here on, taking more than MEMORY is a MemoryError, which is a finding."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


@cache
def scratch() -> Path:
    """A folder of this process, in memory where the machine has such a place."""
    memory = Path("/dev/shm")
    folder = tempfile.TemporaryDirectory(
        prefix="r3-fuzz-", dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True
    )
    _folders.append(folder)
    return Path(folder.name)


_folders: list[tempfile.TemporaryDirectory[str]] = []
