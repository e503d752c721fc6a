"""What only a vLLM worker knows of how its rows are made; see Provenance.

Imported in workers; the engine's side is in vllm_trace (`provenance`, `fetch_facts`).
"""

from __future__ import annotations

from typing import Any


def worker_facts(runner: Any, config: Any) -> dict[str, str]:
    """Facts of a loaded model, by name: fields of Provenance, and others for its `extra`.

    Read off the objects that run, not off settings: a setting may be "auto", or give way to what
    the machine has. All values are text, and what is not known is left out.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.platforms import current_platform

    kernels = {
        _kernel_name(module._quant_method)
        for module in runner.get_model().modules()
        if isinstance(module, MoERunner)
    }
    backends = {
        group.backend.get_name()
        for groups in getattr(runner, "attn_groups", ())
        for group in (groups if isinstance(groups, list) else [groups])
    }
    compilation = config.compilation_config
    facts = {
        "moe_kernel": ", ".join(sorted(kernels)),
        "attention_backend": ", ".join(sorted(backends)),
        "kv_cache_dtype": _kv_cache_dtype(runner, config),
        # settled only in the worker, from what the attention backend can do
        "compilation": mode_name(compilation.mode),
        "cudagraphs": mode_name(compilation.cudagraph_mode),
    }
    if config.device_config.device_type != "cpu":  # vLLM's name for a CPU is "cpu"
        facts["device_name"] = str(current_platform.get_device_name())
    return {name: value for name, value in facts.items() if value}


def _kernel_name(method: Any) -> str:
    """The quantization method's class, and where it has one its experts' implementation."""
    implementation = getattr(getattr(method, "moe_kernel", None), "impl", None)
    experts = getattr(implementation, "fused_experts", None)
    name = type(method).__name__
    return name if experts is None else f"{name}/{type(experts).__name__}"


def _kv_cache_dtype(runner: Any, config: Any) -> str:
    """What "auto" became; any other setting says more than the type of its storage."""
    setting = str(config.cache_config.cache_dtype)
    found = getattr(runner, "kv_cache_dtype", None)
    return str(found).removeprefix("torch.") if setting == "auto" and found else setting


def mode_name(mode: Any) -> str:
    """Text of an enum of vLLM's settings; empty for None."""
    return "" if mode is None else str(getattr(mode, "name", mode)).lower()
