"""Runs one stage of the demo in a process of its own.

vLLM and a CPU Megatron-core both change the process they live in (threads, patches, process
groups); apart, neither sees the other and their memory is returned. Their talk goes to a log
file, progress and the result come back through a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from r3 import errors

Report = Callable[[str, int, int], None]  # what is being done, steps done, steps in all


class StageError(Exception):
    """A stage broke for a reason that is not the user's input; the log has its traceback."""


def run_isolated(
    stage: Callable[..., Any], kwargs: dict[str, Any], log: Path, on_progress: Report
) -> Any:
    """Call `stage(report, **kwargs)` in a spawned process and return its (picklable) result.

    An R3Error of the stage is raised here as the same class; anything else is a StageError.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(stage, kwargs, str(log), theirs))
    process.start()
    theirs.close()
    name, kind = stage.__name__.strip("_"), ""
    value: Any = None
    try:
        while kind not in ("result", "error"):
            try:
                kind, value = ours.recv()
            except EOFError:
                process.join()
                raise StageError(
                    f"stage {name!r} ended with exit code {process.exitcode}; see {log}"
                ) from None
            if kind == "progress":
                on_progress(*value)
        process.join()
    finally:
        if process.is_alive():
            process.terminate()
            process.join()
    return outcome(name, kind, value, log)


def outcome(name: str, kind: str, value: Any, log: Path) -> Any:
    """The result of stage `name`, or its error raised, from the last message of `run_stage`."""
    if kind == "error":
        error_class, text = value
        cls = getattr(errors, error_class, StageError)
        if issubclass(cls, errors.R3Error):
            raise cls(text)
        raise StageError(f"stage {name!r} failed: {text}; see {log}")
    return value


def _child(stage: Callable[..., Any], kwargs: dict[str, Any], log: str, pipe: Connection) -> None:
    run_stage(stage, kwargs, log, pipe.send)


def run_stage(
    stage: Callable[..., Any],
    kwargs: dict[str, Any],
    log: str,
    send: Callable[[tuple[str, Any]], None],
) -> None:
    """Call `stage(report, **kwargs)` in this process, which is for it alone; it talks to `log`.

    send: gets ("progress", a report) and at last ("result", what it returned) or ("error", class
    and text).
    """
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    try:
        result = stage(lambda *progress: send(("progress", progress)), **kwargs)
    except BaseException as e:
        traceback.print_exc()
        ours = next((c for c in _causes(e) if isinstance(c, errors.R3Error)), None)
        text = str(ours) if ours else f"{type(e).__name__}: {e}"
        send(("error", (type(ours or e).__name__, " ".join(text.split())[:500])))
    else:
        send(("result", result))
    finally:
        # an engine's own processes would be waited for, and they wait for a word from the engine
        for process in multiprocessing.active_children():
            process.terminate()


def _causes(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__
