"""The package as users get it: editable, as a wheel, in the clone, and in a spawned worker."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
from importlib.resources import files
import r3, r3.storage, r3.engine_hooks, r3.trainer_hooks, r3.cli, r3.page
for kind in ("html", "css", "js"):
    files("r3.page").joinpath(f"page.{kind}").read_text()
print(r3.storage.__file__)
"""


def _python(code: str, cwd: Path, python: str = sys.executable, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    done = subprocess.run(
        [python, "-c", code], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _storage_file(queue: multiprocessing.Queue) -> None:
    import r3.storage

    queue.put(r3.storage.__file__)


def test_editable_from_anywhere_and_from_the_clone(tmp_path):
    expected = str(ROOT / "storage" / "__init__.py")
    assert _python(PROBE, tmp_path) == expected
    assert _python(PROBE, ROOT) == expected


def test_in_a_spawned_worker():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=_storage_file, args=(queue,))
    worker.start()
    assert queue.get(timeout=60) == str(ROOT / "storage" / "__init__.py")
    worker.join()


@pytest.mark.slow
def test_wheel(tmp_path):
    """Installed apart from the clone; and with the clone as working directory, which shadows it."""
    source = tmp_path / "source"  # a build leaves things behind that must not get into the next
    skip = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "r3-demo")
    shutil.copytree(ROOT, source, ignore=skip)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "-w", str(tmp_path), str(source)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
    # the light dependencies, from this environment; nothing else of it is visible
    light = tmp_path / "light"
    light.mkdir()
    for name in ("numpy", "numpy.libs", "msgpack", "click", "rich", "pygments", "markdown_it"):
        import_root = Path(
            subprocess.check_output([sys.executable, "-c", _SITE], text=True).strip()
        )
        if (import_root / name).exists():
            (light / name).symlink_to(import_root / name)
    installed = _python(PROBE, tmp_path, python, PYTHONPATH=str(light))
    assert installed.startswith(str(venv))
    assert _python(PROBE, ROOT, python, PYTHONPATH=str(light)) == str(
        ROOT / "storage" / "__init__.py"
    )


_SITE = "import numpy, pathlib; print(pathlib.Path(numpy.__file__).parent.parent)"
