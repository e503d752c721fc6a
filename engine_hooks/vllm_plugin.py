"""Turns capture on inside vLLM: the plugin entry point, and everything that is refused.

vLLM calls `register` in each of its processes. The only function of vLLM that is wrapped is
`EngineArgs.create_engine_config`. Where the finished config carries

    additional_config={"r3": {"capture": true}}

the wrapper puts classes of ours where vLLM has a setting for one: `parallel_config.worker_cls`
and `scheduler_config.scheduler_cls`. They reach every process with the config. Without the key
the config goes through as it came.
"""

from __future__ import annotations

import functools
from typing import Any

from r3.errors import UnsupportedError
from r3.spec import RouterSpec

# vLLM minor versions whose worker, scheduler and router were read and tested
TESTED_VERSIONS = ("0.32.",)

_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "r3.engine_hooks.vllm_worker.CaptureCPUWorker",
}
_SCHEDULER = "r3.engine_hooks.vllm_scheduler.CaptureScheduler"
_ASYNC_SCHEDULER = "r3.engine_hooks.vllm_scheduler.CaptureAsyncScheduler"


def register() -> None:
    """Entry point `vllm.general_plugins`; may be called any number of times."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "__r3__", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        if capture_requested(config.additional_config):
            enable_capture(config)
        return config

    create_engine_config.__r3__ = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def capture_requested(additional_config: Any) -> bool:
    """Whether `additional_config` asks for capture. Raises UnsupportedError for a malformed key."""
    if not isinstance(additional_config, dict) or "r3" not in additional_config:
        return False
    ours = additional_config["r3"]
    if not isinstance(ours, dict) or set(ours) - {"capture"}:
        raise UnsupportedError(
            f'additional_config["r3"] is {ours!r}, expected {{"capture": true}} or '
            '{"capture": false}'
        )
    capture = ours.get("capture", False)
    if not isinstance(capture, bool):
        raise UnsupportedError(
            f'additional_config["r3"]["capture"] is {capture!r}, expected true or false'
        )
    return capture


def enable_capture(config: Any) -> None:
    """Put the capturing worker and scheduler into a VllmConfig.

    Raises UnsupportedError, naming the setting, wherever the rows could not be trusted.
    """
    check_supported(config)
    scheduler = config.scheduler_config
    config.parallel_config.worker_cls = _WORKERS[config.parallel_config.worker_cls]
    scheduler.scheduler_cls = _ASYNC_SCHEDULER if scheduler.async_scheduling else _SCHEDULER


def check_supported(config: Any) -> None:
    """Raise UnsupportedError for the first setting of a VllmConfig that capture does not cover."""
    import vllm

    if not vllm.__version__.startswith(TESTED_VERSIONS):
        raise UnsupportedError(
            f"capture is tested with vLLM {', '.join(v + 'x' for v in TESTED_VERSIONS)}, "
            f"found {vllm.__version__}"
        )
    parallel, device = config.parallel_config, config.device_config.device_type
    if device != "cpu":
        raise UnsupportedError(
            f"capture by this hook is tested on vLLM's CPU runner, found device {device!r}; "
            "on GPUs use vLLM's own enable_return_routed_experts, whose rows "
            "r3.engine_hooks.vllm_trace.trace_from_output reads as well (untested on a GPU)"
        )
    if config.use_v2_model_runner:
        raise UnsupportedError(
            "capture by this hook needs Model Runner V1, found V2; unset VLLM_USE_V2_MODEL_RUNNER"
        )
    if config.model_config.runner_type != "generate":
        raise UnsupportedError(
            f"capture is for generation, found runner {config.model_config.runner_type!r}"
        )
    # raises UnsupportedError itself for dense models and unknown families
    RouterSpec.from_hf_config(config.model_config.hf_text_config)
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedError(
                f"capture does not support {name}={getattr(parallel, name)} yet, expected 1"
            )
    unsupported = {
        "enable_eplb": parallel.enable_eplb,
        "speculative_config": config.speculative_config,
        "kv_transfer_config": config.kv_transfer_config,
        "ec_transfer_config": config.ec_transfer_config,
        "diffusion_config": getattr(config, "diffusion_config", None),
        "enable_return_routed_experts (vLLM's own capture)": config.aux_output_config.enabled,
        "scheduler_cls": config.scheduler_config.scheduler_cls,
        "lora_config": config.lora_config,
        # vLLM then reports zeros for the prompt's token ids
        "enable_prompt_embeds": config.model_config.enable_prompt_embeds,
    }
    for name, value in unsupported.items():
        if value:
            raise UnsupportedError(f"capture does not support {name} yet, found {value!r:.80}")
    if not config.model_config.enforce_eager:
        raise UnsupportedError("capture does not support compiled models yet: set enforce_eager")
    if parallel.worker_cls not in _WORKERS:
        raise UnsupportedError(
            f"capture does not know the worker class {parallel.worker_cls!r}, expected one of "
            f"{', '.join(_WORKERS)}"
        )
