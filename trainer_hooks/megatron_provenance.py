"""How a Megatron-core model computes, as the provenance of what a trainer's traces hold.

Read off the modules that run where they can say it, since a setting may be "auto". Nothing is
guessed: what neither the modules nor the config say stays empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from r3.identity import Provenance
from r3.trainer_hooks.megatron_routers import megatron_version, named_chunks

# by the names that an engine's provenance has: fields of TransformerConfig
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}
_ALWAYS = ("tensor", "pipeline", "expert")


def trainer_provenance(model_chunks: Any) -> Provenance:
    """What a live Megatron-core model says of itself: a module, or this rank's model chunks.

    dtype: of most of its parameters. head_dtype: of the LM head, on the last pipeline stage.
    device: its kind, with the GPU's name in `extra["device_name"]`. moe_kernel: class of the
    experts and the token dispatcher. attention_backend: class of the core attention, and what the
    config asks TransformerEngine for if not "auto". parallel: sizes by name; virtual_pipeline is
    chunks per rank. extra: versions of torch and TransformerEngine, router_dtype where set.

    Raises MissingDependencyError without Megatron-core.
    """
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    roots = [module for _, module in named_chunks(model_chunks)]
    modules = [module for root in roots for module in root.modules()]
    config = next((c for m in modules if (c := getattr(m, "config", None)) is not None), None)
    parameters = [p for root in roots for p in root.parameters()]
    devices = {p.device for p in parameters}
    sizes: Counter[Any] = Counter()
    for p in parameters:
        sizes[p.dtype] += p.numel()
    moe = [m for m in modules if isinstance(m, BaseMoELayer)]
    kernels = {type(m.experts).__name__ for m in moe if getattr(m, "experts", None) is not None}
    attention = (m.core_attention for m in modules if isinstance(m, Attention))
    invariant = getattr(config, "batch_invariant_mode", None)
    return Provenance(
        engine="megatron-core",
        engine_version=megatron_version(),
        dtype=_name(sizes.most_common(1)[0][0]) if sizes else "",
        head_dtype=_joined(_name(d) for d in _head_dtypes(roots)),
        quantization=_quantization(config),
        attention_backend=_joined(_attention(core, config) for core in attention),
        moe_kernel=_joined(f"{k}/{_setting(config, 'moe_token_dispatcher_type')}" for k in kernels),
        batch_invariant=None if invariant is None else bool(invariant),
        device=_joined(d.type for d in devices),
        parallel=_parallel(config),
        extra=_extra(config, devices),
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def _setting(config: Any, name: str) -> str:
    """As text; empty where there is none. Enums by their name."""
    value = getattr(config, name, None)
    return "" if value is None else str(getattr(value, "name", value))


def _head_dtypes(roots: list[Any]) -> Iterator[Any]:
    for root in roots:
        head = getattr(root, "output_layer", None)
        if head is None:
            continue
        weight = getattr(head, "weight", None)
        if weight is None:  # tied: it is given the embedding's in every pass
            weight = root.shared_embedding_or_output_weight()
        yield weight.dtype


def _quantization(config: Any) -> str:
    return _joined(f"{kind} {form}" for kind in ("fp8", "fp4") if (form := _setting(config, kind)))


def _attention(core: Any, config: Any) -> str:
    name, wanted = type(core).__name__, _setting(config, "attention_backend")
    # only TransformerEngine reads that setting
    return f"{name}/{wanted}" if name.startswith("TE") and wanted not in ("", "auto") else name


def _parallel(config: Any) -> dict[str, int]:
    sizes = {k: getattr(config, field, None) or 1 for k, field in _SIZES.items()}
    return {} if config is None else {k: v for k, v in sizes.items() if v != 1 or k in _ALWAYS}


def _extra(config: Any, devices: set[Any]) -> dict[str, str]:
    import torch

    found = {"torch": torch.__version__, "router_dtype": _setting(config, "moe_router_dtype")}
    with suppress(PackageNotFoundError):
        found["transformer_engine"] = version("transformer-engine")
    found["device_name"] = _joined(
        torch.cuda.get_device_name(d) for d in devices if d.type == "cuda"
    )
    return {k: v for k, v in found.items() if v}
