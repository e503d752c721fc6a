"""The other supported Megatron-core: 0.19, from a folder that `make test-full` fills.

It asks for a newer Python than 3.11, and runs on it all the same. The tests of replay run once
more, in a process that finds this version first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.full]

NEW = Path(__file__).parents[1] / ".venv" / "megatron-0.19"
FILES = [
    "test_megatron_cpu.py",
    "test_megatron_ranks.py",
    "test_megatron_replay.py",
    "test_megatron_margins.py",
    "test_megatron_misuse.py",
    "test_megatron_steps.py",
    "test_megatron_tables.py",
    "test_megatron_gate.py",
    "test_megatron_wrappers.py",
    "test_megatron_parallel.py",
    "cases/test_field_alignment.py",
    "cases/test_field_trainer.py",
]


def test_megatron_0_19(tmp_path: Path) -> None:
    assert (NEW / "megatron").is_dir(), "run `make test-full`, which installs megatron-core there"
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": str(NEW)}
    code = "import megatron.core as m; print(m.__version__)"
    version = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert version.stdout.startswith("0.19."), version.stderr
    files = [str(here / f) for f in FILES]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not full", "-p", "no:cacheprovider", *files],
        env=env,
        cwd=here.parent,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, run.stdout[-6000:]
