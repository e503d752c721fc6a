"""Turns capture on inside vLLM: the plugin entry point, the choice of source, what is refused.

vLLM calls `register` in each of its processes. Where a finished config carries

    additional_config={"r3": {"capture": true}}

classes of ours are put where vLLM has a setting for one: `parallel_config.worker_cls` and
`scheduler_config.scheduler_cls`. They reach every process with the config. Without the key the
config goes through as it came.

There are two sources of rows. "hook" is ours: worker and scheduler of this package. "native" is
vLLM's (`enable_return_routed_experts`), which needs Model Runner V2; we turn it on, try it at
start and convert what it returns. `choose_source` says which and why; add `"source": "hook"` to
the key for our own hook on Model Runner V2, where it is tested on a CPU only (eager mode, through
Triton's interpreter).
"""

from __future__ import annotations

from typing import Any

from r3.engine_hooks.vllm_patches import check_vllm, wrap_create_engine_config
from r3.errors import UnsupportedError
from r3.spec import RouterSpec

_HERE = "r3.engine_hooks"
_WORKERS = {
    ("hook", "vllm.v1.worker.cpu_worker.CPUWorker"): f"{_HERE}.vllm_worker.CaptureCPUWorker",
    ("hook", "vllm.v1.worker.gpu_worker.Worker"): f"{_HERE}.vllm_worker.CaptureGPUWorker",
    ("native", "vllm.v1.worker.cpu_worker.CPUWorker"): f"{_HERE}.vllm_native.NativeCPUWorker",
    ("native", "vllm.v1.worker.gpu_worker.Worker"): f"{_HERE}.vllm_native.NativeGPUWorker",
}
_SCHEDULER = f"{_HERE}.vllm_scheduler.CaptureScheduler"
_ASYNC_SCHEDULER = f"{_HERE}.vllm_scheduler.CaptureAsyncScheduler"
# drafts that run as a model or lookup of their own; others share modules with the target
_DRAFTS = ("ngram", "draft_model")


def register() -> None:
    """Entry point `vllm.general_plugins`; may be called any number of times."""
    wrap_create_engine_config(_finish)


def _finish(config: Any) -> None:
    settings = capture_settings(config.additional_config)
    if "store" in settings:  # for the server alone; vLLM names its compiled code by this dict
        ours = {k: v for k, v in settings.items() if k != "store"}
        config.additional_config = {**config.additional_config, "r3": ours}
    if settings["capture"]:
        enable_capture(config, settings.get("source"))


def capture_settings(additional_config: Any) -> dict[str, Any]:
    """The value of the key "r3"; UnsupportedError for anything that it cannot hold."""
    if not isinstance(additional_config, dict) or "r3" not in additional_config:
        return {"capture": False}
    ours = additional_config["r3"]
    known = {"capture", "source", "store"}
    if not isinstance(ours, dict) or "capture" not in ours or set(ours) - known:
        raise UnsupportedError(
            f'additional_config["r3"] is {ours!r}, expected {{"capture": true}}, '
            '{"capture": false} or {"capture": true, "source": "hook"}, and for a server '
            '"store": FOLDER'
        )
    if not isinstance(ours["capture"], bool):
        raise UnsupportedError(
            f'additional_config["r3"]["capture"] is {ours["capture"]!r}, expected true or false'
        )
    if "source" in ours and ours["source"] not in ("hook", "native"):
        raise UnsupportedError(
            f'additional_config["r3"]["source"] is {ours["source"]!r}, expected "hook" or "native"'
        )
    if "store" in ours and (not isinstance(ours["store"], str) or not ours["store"]):
        raise UnsupportedError(
            f'additional_config["r3"]["store"] is {ours["store"]!r}, expected a folder'
        )
    return ours


def choose_source(config: Any, wanted: str | None = None) -> tuple[str, str]:
    """Which source of rows a VllmConfig gets, "hook" or "native", and why."""
    v2 = config.use_v2_model_runner
    if wanted == "hook":
        return "hook", "asked for" + (
            "; on Model Runner V2 this is tested on a CPU only" if v2 else ", and the default on V1"
        )
    if wanted == "native" or v2:
        return "native", "asked for" if wanted else (
            "Model Runner V2 has capture of its own, on the device and without a pause"
        )
    return "hook", "Model Runner V1 has no capture of its own (vLLM's needs V2 since 0.31)"


def enable_capture(config: Any, wanted: str | None = None) -> None:
    """Put the capturing classes into a VllmConfig.

    Raises UnsupportedError, naming the setting, wherever the rows could not be trusted.
    """
    source, _ = choose_source(config, wanted)
    check_supported(config, source)
    parallel, scheduler = config.parallel_config, config.scheduler_config
    parallel.worker_cls = _WORKERS[source, parallel.worker_cls]
    if source == "hook":
        scheduler.scheduler_cls = _ASYNC_SCHEDULER if scheduler.async_scheduling else _SCHEDULER
        return
    config.aux_output_config.enable_return_routed_experts = True
    try:
        config._verify_aux_output_compatibility()
    except ValueError as e:
        raise UnsupportedError(f"vLLM's own capture refuses this configuration: {e}") from None


def check_supported(config: Any, source: str) -> None:
    """Raise UnsupportedError for the first setting of a VllmConfig that capture does not cover."""
    check_vllm()
    model, parallel = config.model_config, config.parallel_config
    if model.runner_type != "generate":
        raise UnsupportedError(f"capture is for generation, found runner {model.runner_type!r}")
    # raises UnsupportedError itself for dense models and unknown families
    RouterSpec.from_hf_config(model.hf_text_config)
    for name, why in (
        ("pipeline_parallel_size", "only the last stage returns rows"),
        ("decode_context_parallel_size", "a rank holds only part of the KV slots"),
        ("prefill_context_parallel_size", "a rank forwards only part of the tokens"),
    ):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedError(
                f"capture does not support {name}={getattr(parallel, name)}, expected 1: {why}"
            )
    if source == "hook" and parallel.data_parallel_size != 1:
        raise UnsupportedError(
            "capture by the hook does not support data_parallel_size="
            f"{parallel.data_parallel_size}, expected 1: a router then may see the tokens of all "
            "ranks, and vLLM's CPU build does not run MoE models so: this was never tried; start "
            "one engine per replica"
        )
    draft = config.speculative_config
    unsupported = {
        # vLLM then reports zeros for the prompt's token ids
        "enable_prompt_embeds": model.enable_prompt_embeds,
        "lora_config": config.lora_config,
        "diffusion_config": getattr(config, "diffusion_config", None),
    }
    if source == "hook":
        unsupported |= {
            "enable_return_routed_experts (vLLM's own capture)": config.aux_output_config.enabled,
            "scheduler_cls": config.scheduler_config.scheduler_cls,
            "ec_transfer_config": config.ec_transfer_config,
            # ids are logical before the balancer maps them, but its replicas were never tried
            "enable_eplb": parallel.enable_eplb,
            "enable_dbo (a pass in two halves)": parallel.use_ubatching,
            "sequence-parallel MoE": parallel.use_sequence_parallel_moe,
            "speculative method": draft and draft.method not in _DRAFTS and draft.method,
        }
    for name, value in unsupported.items():
        if value:
            raise UnsupportedError(f"capture does not support {name} yet, found {value!r:.80}")
    if (source, parallel.worker_cls) not in _WORKERS:
        raise UnsupportedError(
            f"capture does not know the worker class {parallel.worker_cls!r}, expected one of "
            f"{', '.join(w for s, w in _WORKERS if s == source)}"
        )
