"""Shared by all tests: checkpoints and engine runs that are made once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny checkpoint by family name (tests.tiny_models.make_model)."""
    from tiny_models import make_model

    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_model(family, tmp_path_factory.mktemp("model") / family)
        return made[family]

    return get


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Call a function of tests.engine_runs in a process of its own."""
    from r3.cli.isolate import StageError, run_isolated

    def run(stage: Callable[..., Any], **kwargs: Any) -> Any:
        log = tmp_path_factory.mktemp("engine") / "log"
        try:
            return run_isolated(stage, kwargs, log, lambda *progress: None)
        except StageError as e:
            pytest.fail(f"{e}\n{log.read_text(errors='replace')[-4000:]}", pytrace=False)

    return run
