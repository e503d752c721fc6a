"""All campaigns, and running one in processes of its own.

A process that dies, by a segmentation fault or for want of memory, is a finding like any other.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from . import chunks, crafted, cuts, flips, kills, power
from .campaign import Report

CHECKED = "checked-chunks"
SECONDS = 900  # for a job, whatever hangs in it


@dataclass(frozen=True)
class Campaign:
    """inputs: how many there are at full scale; each job has `step` of them. whole: they are all
    that there are, so a larger scale has no more."""

    run: Callable[[int, range], Report]
    inputs: int
    step: int
    whole: bool = False

    def jobs(self, scale: float) -> Iterator[range]:
        count = max(1, round(self.inputs * (min(scale, 1) if self.whole else scale)))
        if self.whole:  # spread over all of them
            stride = -(-self.inputs // count)
            for first in range(0, self.inputs, self.step * stride):
                yield range(first, min(first + self.step * stride, self.inputs), stride)
            return
        for first in range(0, count, self.step):
            yield range(first, min(first + self.step, count))


def campaigns() -> dict[str, Campaign]:
    return {
        "kills": Campaign(kills.run, 200, 10),
        "cuts": Campaign(cuts.run, cuts.cuts(), 500, whole=True),
        "power": Campaign(power.run, 10_000, 500),
        "bits": Campaign(flips.run_bits, 100_000, 5_000),
        "bytes": Campaign(flips.run_bytes, 10_000, 1_000),
        "records": Campaign(crafted.run_records, 640_000, 10_000),
        "headers": Campaign(crafted.run_headers, 100_000, 10_000),
        "indexes": Campaign(crafted.run_indexes, 100_000, 10_000),
        "chunks": Campaign(chunks.run, 140_000, 10_000),
        "files": Campaign(crafted.run_files, 25_000, 1_000),
    }


def run_campaign(campaign: Campaign, seed: int, scale: float, processes: int) -> Report:
    """Run all jobs of a campaign in processes of their own."""
    report = Report()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        jobs = {pool.submit(campaign.run, seed, job): job for job in campaign.jobs(scale)}
        try:
            for done in as_completed(jobs, timeout=SECONDS * max(1, len(jobs) // processes)):
                try:
                    report.add(done.result())
                except BrokenProcessPool:
                    report.findings.append(f"a process died; among {jobs[done]}")
                except Exception as e:
                    report.findings.append(f"{jobs[done]}: {e!r}")
        except TimeoutError:
            report.findings.append("jobs that do not end")
            for process in multiprocessing.active_children():
                process.kill()
    return report


def run_checked(seed: int, scale: float) -> Report:
    """The chunk decoders once more, with kernels that check bounds, in a process of their own."""
    with tempfile.TemporaryDirectory() as cache:
        # such code must not come from the cache of the other, nor get into it
        checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": cache}
        command = [sys.executable, "-m", "tests.fuzz", "chunks", "--processes=1"]
        command += [f"--seed={seed}", f"--scale={scale / 7}"]
        root = Path(__file__).resolve().parent.parent.parent
        done = subprocess.run(
            command, cwd=root, env=os.environ | checked, capture_output=True, text=True
        )
    report = Report()
    report.outcomes["refused or accepted" if done.returncode == 0 else "finding"] = round(
        20_000 * scale
    )
    if done.returncode:
        report.findings.append(done.stdout + done.stderr)
    return report
