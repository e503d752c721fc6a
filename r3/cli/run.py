"""`r3 report`: what a run left behind, files and recorded steps, as one document for the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from r3.cli.compare import FORMAT, Progress, compare_files
from r3.cli.versions import installed_versions
from r3.errors import R3Error
from r3.monitor import read_metrics
from r3.plain import plain
from r3.verdict import judge
from r3.worst import Texts

ENGINE, NATIVE, REPLAY, METRICS = "routing.r3", "native.r3", "replay.r3", "metrics.jsonl"
RUN_FILES = (ENGINE, NATIVE, REPLAY, METRICS)
_STEPS = 500  # the last ones are shown


def read_run(
    path: Path,
    *,
    texts: Texts | None = None,
    on_progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """The document of a run: a folder with ENGINE and NATIVE, REPLAY and METRICS if there are
    such, or METRICS alone; or a file of the step monitor.

    Raises R3Error where there is neither, and what `compare_files` and `read_metrics` raise.
    """
    metrics = path / METRICS if path.is_dir() else path
    if path.is_dir() and (path / NATIVE).exists() and (path / ENGINE).exists():
        replay = path / REPLAY
        document = compare_files(
            path / ENGINE,
            path / NATIVE,
            replay if replay.exists() else None,
            texts=texts,
            on_progress=on_progress,
        )
    elif path.is_dir() and not metrics.exists():
        raise R3Error(
            f"{path}: neither {ENGINE} with {NATIVE} nor {METRICS} in the folder; of other names "
            "`r3 compare A B -o report.html` makes the page"
        )
    else:
        document = _no_comparison()
    steps = read_metrics(metrics, last=_STEPS) if metrics.exists() or not path.is_dir() else []
    if steps:
        document |= plain(_of_steps(steps))
    elif not document["routing"]["native"]:
        raise R3Error(f"{metrics}: no step is recorded in it")
    return document | {"verdict": judge(document)}


def _no_comparison() -> dict[str, Any]:
    sides: dict[str, Any] = {"native": None, "replay": None}
    return {
        "format": FORMAT,
        "spec": None,
        "files": {"a": None, "b": None, "c": None},
        "pairs": None,
        "clip": None,
        "routing": sides,
        "mismatch": dict(sides),
        "attribution": None,
        "alignment": None,
        "slices": {},
        "worst": {"rollouts": [], "tokens": []},
        "outside_topk": None,
        "environment": installed_versions(),
        "created": None,
    }


def _of_steps(steps: list[dict[str, Any]]) -> dict[str, Any]:
    few = ("step", "time", "metrics", "alerts", "changes")  # of all but the last
    return {
        "steps": [*({k: s[k] for k in few if k in s} for s in steps[:-1]), steps[-1]],
        "alerts": [a | {"step": s["step"]} for s in steps for a in s.get("alerts") or ()],
        "outside_topk": _outside_topk(steps),
    }


def _outside_topk(steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of the last step that has them."""
    for step in reversed(steps):
        sides = {}
        for side in ("forced", "free"):
            names = {kind: f"outside_topk_{kind}_{side}" for kind in ("cells", "experts")}
            found = {k: step["metrics"].get(f"routing/{name}") for k, name in names.items()}
            layers = [
                {"layer": x["layer"]} | {k: x.get(name) for k, name in names.items()}
                for x in step.get("layers") or ()
                if names["cells"] in x
            ]
            sides[side] = None if found["cells"] is None else found | {"layers": layers}
        if any(sides.values()):
            return sides
    return None
