"""Stages of the demo in Ray actors: results, progress, errors by kind, and deaths."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from r3.cli.demo_ray import Progress, Worker, connected, follow
from r3.cli.isolate import StageError
from r3.errors import TraceError
from ray_tools import environment

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def double(report: Any, *, number: int) -> tuple[int, str]:
    report("doubling", 1, 2)
    print("to the log", flush=True)
    return 2 * number, os.environ.get("OMP_NUM_THREADS", "")


def refuse(report: Any) -> None:
    try:
        raise TraceError("row 3: wrong")
    except TraceError as e:
        raise RuntimeError("engine died") from e


def break_down(report: Any) -> None:
    raise OSError(28, "No space left on device")


def die(report: Any) -> None:
    os._exit(7)


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    with environment(), connected() as ray:
        yield ray
    assert not ray.is_initialized()


def run(ray: Any, folder: Path, stage: Any, **kwargs: Any) -> tuple[Any, list]:
    seen: list = []
    progress = ray.remote(num_cpus=0)(Progress).remote()
    worker = ray.remote(num_cpus=0)(Worker).remote(progress, "3")
    try:
        found = follow(worker, stage, kwargs, folder / "log", progress, lambda *p: seen.append(p))
    finally:
        ray.kill(worker)
        ray.kill(progress)
    return found, seen


def test_result_progress_and_log(running, tmp_path):
    assert run(running, tmp_path, double, number=21) == ((42, "3"), [("doubling", 1, 2)])
    assert "to the log" in (tmp_path / "log").read_text()


def test_an_error_of_ours_keeps_its_class_through_an_engine(running, tmp_path):
    with pytest.raises(TraceError, match="row 3: wrong"):
        run(running, tmp_path, refuse)


def test_other_errors_and_deaths_name_the_stage_and_the_log(running, tmp_path):
    with pytest.raises(StageError, match=r"'break_down' failed: .*No space left.*log"):
        run(running, tmp_path, break_down)
    assert "Traceback" in (tmp_path / "log").read_text()
    with pytest.raises(StageError, match=r"'die' ended: ActorDiedError; see .*log"):
        run(running, tmp_path, die)


def test_without_ray_the_demo_does_not_start(r3_here, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "ray" else find(n))
    done = r3_here("demo", "--ray", "--out", tmp_path / "demo")
    assert done.returncode == 2
    assert "rollout-routing-replay[ray]" in done.stderr
    assert not (tmp_path / "demo").exists()
