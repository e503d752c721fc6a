"""What only a vLLM worker knows of how its rows are made; see Provenance."""

from __future__ import annotations

from typing import Any


def worker_facts(runner: Any, config: Any) -> dict[str, str]:
    """Provenance fields read off the loaded model: attention backend and MoE kernel."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    model = runner.get_model()
    kernels = {
        f"{type(method).__name__}/{type(kernel).__name__}"
        if (kernel := _experts(method)) is not None
        else type(method).__name__
        for module in model.modules()
        if isinstance(module, MoERunner)
        for method in [module._quant_method]
    }
    backends = {
        group.backend.get_name()
        for groups in getattr(runner, "attn_groups", ())
        for group in (groups if isinstance(groups, list) else [groups])
    }
    return {
        "moe_kernel": ", ".join(sorted(kernels)),
        "attention_backend": ", ".join(sorted(backends)),
    }


def _experts(method: Any) -> Any:
    """The experts implementation inside a quantization method's kernel, if there is one."""
    implementation = getattr(getattr(method, "moe_kernel", None), "impl", None)
    return getattr(implementation, "fused_experts", None)
