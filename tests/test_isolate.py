"""Stages in processes of their own: results, errors by kind, and deaths."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import pytest

from r3.cli.isolate import StageError, run_isolated
from r3.errors import TraceError


def double(report: Any, *, number: int) -> int:
    report("doubling", 1, 2)
    print("to the log", flush=True)
    return 2 * number


def refuse(report: Any) -> None:
    try:
        raise TraceError("row 3: wrong")
    except TraceError as e:
        raise RuntimeError("engine died") from e


def break_down(report: Any) -> None:
    raise OSError(28, "No space left on device")


def die(report: Any) -> None:
    os._exit(7)


def leave_a_child(report: Any) -> str:
    multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)).start()
    return "done"


def unpicklable(report: Any) -> Any:
    return lambda: None


def run(tmp_path: Any, stage: Any, **kwargs: Any) -> tuple[Any, list]:
    seen: list = []
    return run_isolated(stage, kwargs, tmp_path / "log", lambda *p: seen.append(p)), seen


def test_result_progress_and_log(tmp_path):
    assert run(tmp_path, double, number=21) == (42, [("doubling", 1, 2)])
    assert "to the log" in (tmp_path / "log").read_text()


def test_an_error_of_ours_keeps_its_class_through_an_engine(tmp_path):
    with pytest.raises(TraceError, match="row 3: wrong"):
        run(tmp_path, refuse)


def test_other_errors_and_deaths_name_the_stage_and_the_log(tmp_path):
    with pytest.raises(StageError, match=r"'break_down' failed: .*No space left.*log"):
        run(tmp_path, break_down)
    assert "Traceback" in (tmp_path / "log").read_text()
    with pytest.raises(StageError, match=r"'die' ended with exit code 7; see .*log"):
        run(tmp_path, die)
    with pytest.raises(StageError, match="'unpicklable'"):
        run(tmp_path, unpicklable)


def test_processes_left_behind_end_with_the_stage(tmp_path):
    start = time.monotonic()
    assert run(tmp_path, leave_a_child) == ("done", [])
    assert time.monotonic() - start < 60
