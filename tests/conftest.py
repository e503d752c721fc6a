"""Shared by all tests: checkpoints and engine runs that are made once."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture
def r3_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess]:
    """Run the console script in this process: quicker, and for many short runs."""
    from r3.cli import main

    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() replaces it

    def run(*args: object) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["r3", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as e:
            code = int(e.code or 0)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(args, code, out, err)

    return run


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


@pytest.fixture(autouse=True)
def no_native_replay_is_left() -> Iterator[None]:
    """Megatron registers what it replays itself in a list of the class: empty before each test,
    whatever ran before it"""
    yield
    if module := sys.modules.get("megatron.core.transformer.moe.router_replay"):
        module.RouterReplay.clear_global_router_replay_instances()


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Megatron-core on one CPU rank."""
    import torch

    from r3.trainer_hooks.megatron_cpu import shim

    shim.init_single_process()
    shim.init_single_process()  # repeating it is safe
    yield
    shim.destroy()
    assert torch.cuda.current_device.__module__ == "torch.cuda"


@pytest.fixture(scope="module")
def shared_model(megatron: None) -> Any:
    """A model that tests only read; each test attaches and detaches."""
    from megatron_tools import make_model

    return make_model()


@pytest.fixture
def model(shared_model: Any) -> Iterator[Any]:
    from megatron_tools import routers_of

    yield shared_model
    assert all(r.router_replay is None for r in routers_of(shared_model))
    shared_model.zero_grad()
