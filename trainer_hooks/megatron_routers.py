"""Finds the routers of a live Megatron-core model, and refuses those in which replay cannot work.

Several Megatron settings make a router ignore what it is told, silently. Each is refused by name
when replay is attached, with its value and what to set. Routers are found in the model itself and
not in a registry: a registry also holds routers of other models and of layers that were built
and thrown away.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from r3.errors import MissingDependencyError, UnsupportedError

# Load balancing types whose routing is the top-k of scores and passes through `router_replay`
# (transformer/moe/router.py, TopKRouter.routing). Others, "sinkhorn" in all versions and
# "quantile_balancing" in 0.19, choose experts elsewhere.
_ROUTING_TYPES = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}

_GRAPHS = "a CUDA graph repeats the routing it was captured with"
_RECOMPUTE = "recomputing activations under replay is not supported yet"
_ONE_RANK = "replay is supported on one model-parallel rank only so far"

# A setting of TransformerConfig (None where a version lacks it), whether its value is harmless, why
# another one is refused, what to set.
_Rule = tuple[str, Callable[[Any], bool], str, str]
_RULES: tuple[_Rule, ...] = (
    ("moe_router_fusion", lambda v: not v, "the fused router never asks for replay", "False"),
    (
        "moe_router_force_load_balancing",
        lambda v: not v,
        "logits are random, so gate weights would be too",
        "False",
    ),
    (
        "moe_input_jitter_eps",
        lambda v: v is None,
        "the routers' input is random, and so are the gate weights",
        "None",
    ),
    (
        "moe_expert_capacity_factor",
        lambda v: v is None,
        "tokens are dropped from experts after replay",
        "None",
    ),
    ("cuda_graph_impl", lambda v: v in (None, "none"), _GRAPHS, "'none'"),
    ("enable_cuda_graph", lambda v: not v, _GRAPHS, "False"),
    ("external_cuda_graph", lambda v: not v, _GRAPHS, "False"),
    ("recompute_granularity", lambda v: v is None, _RECOMPUTE, "None"),
    ("moe_layer_recompute", lambda v: not v, _RECOMPUTE, "False"),
    ("mtp_num_layers", lambda v: not v, "no routing is captured for MTP layers", "None"),
    ("tensor_model_parallel_size", lambda v: v in (None, 1), _ONE_RANK, "1"),
    ("pipeline_model_parallel_size", lambda v: v in (None, 1), _ONE_RANK, "1"),
    ("virtual_pipeline_model_parallel_size", lambda v: v is None, _ONE_RANK, "None"),
    ("context_parallel_size", lambda v: v in (None, 1), _ONE_RANK, "1"),
    ("expert_model_parallel_size", lambda v: v in (None, 1), _ONE_RANK, "1"),
    ("expert_tensor_parallel_size", lambda v: v in (None, 1), _ONE_RANK, "1"),
    ("sequence_parallel", lambda v: not v, _ONE_RANK, "False"),
)


def find_routers(model_chunks: Any) -> dict[int, Any]:
    """The routers of a module or a list of modules, fit for replay, by 0-based decoder layer.

    Raises what `named_routers` raises, and UnsupportedError for a setting under which replay would
    be ignored or wrong and for a router that is under replay already.
    """
    routers = named_routers(model_chunks)
    for layer, router in routers.items():
        if getattr(router.router_replay, "belongs_to_r3", False):
            raise UnsupportedError(
                f"router of decoder layer {layer} is already under replay: detach() the other one "
                "first"
            )
    check_settings(routers)
    return routers


def named_routers(model_chunks: Any) -> dict[int, Any]:
    """The TopKRouter modules of a module or a list of modules, by 0-based decoder layer, ascending.

    Wrappers (DDP, Float16Module) are looked through. Raises MissingDependencyError without
    Megatron-core, UnsupportedError for versions and routers that are not known here, and for two
    routers of one layer.
    """
    _check_megatron()
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer
    from megatron.core.transformer.moe.router import Router, TopKRouter

    routers: dict[int, Any] = {}
    names: dict[int, str] = {}
    for name, module in _named_modules(model_chunks):
        if isinstance(module, BaseMoELayer):
            name, module = f"{name}.router", module.router
        elif not isinstance(module, Router):
            continue
        if type(module) is not TopKRouter:
            raise UnsupportedError(
                f"{name} is a {type(module).__name__}, expected Megatron-core's TopKRouter: a "
                "router that this version does not know might ignore replay"
            )
        if module.layer_number is None:
            raise UnsupportedError(f"{name}.layer_number is None, expected a number from 1")
        layer = module.layer_number - 1  # Megatron counts from 1
        if routers.get(layer, module) is not module:
            raise UnsupportedError(
                f"{name} and {names[layer]} are both routers of decoder layer {layer}: expected "
                "the chunks of one model, without MTP layers (mtp_num_layers=None)"
            )
        routers[layer], names[layer] = module, name
    if not routers:
        raise UnsupportedError(
            "the model has no TopKRouter: expected a Megatron-core model with num_moe_experts set"
        )
    return dict(sorted(routers.items()))


def find_embeddings(model_chunks: Any) -> list[Any]:
    """The modules that are given `input_ids`; none on inner pipeline stages."""
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )

    return [m for _, m in _named_modules(model_chunks) if isinstance(m, LanguageModelEmbedding)]


def _named_modules(model_chunks: Any) -> Iterator[tuple[str, Any]]:
    chunks = list(model_chunks) if isinstance(model_chunks, list | tuple) else [model_chunks]
    for i, chunk in enumerate(chunks):
        yield from chunk.named_modules(prefix=f"model[{i}]" if len(chunks) > 1 else "model")


def megatron_version() -> str:
    """Its version. Raises MissingDependencyError where Megatron-core is not installed."""
    try:
        import megatron.core
    except ImportError as e:
        raise MissingDependencyError(
            "megatron-core is not installed: pip install 'rollout-routing-replay[megatron]'"
        ) from e
    return megatron.core.__version__


def _check_megatron() -> None:
    version = megatron_version()
    if tuple(int(x) for x in version.split(".")[:2]) < (0, 16):
        raise UnsupportedError(
            f"megatron-core is version {version}, expected 0.16 or later: earlier routers do not "
            "ask for replay"
        )
    from megatron.core.transformer.moe import router

    function = router.topk_routing_with_score_function
    if "router_replay" not in inspect.signature(function).parameters:
        raise UnsupportedError(
            f"topk_routing_with_score_function of megatron-core {version} has no parameter "
            "router_replay, expected one: it was replaced, and routing would not be replayed"
        )


def check_settings(routers: dict[int, Any]) -> None:
    """Raise UnsupportedError for the first setting under which replay would be ignored or wrong."""
    for layer, router in routers.items():
        _check_settings(f"router of decoder layer {layer}", router)


def _check_settings(name: str, router: Any) -> None:
    kinds = router.routing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in _ROUTING_TYPES:
            raise UnsupportedError(
                f"moe_router_load_balancing_type is {kind!r}: it does not choose the top-k of the "
                f"scores, so replay is ignored; set one of {sorted(_ROUTING_TYPES)} ({name})"
            )
    for setting, harmless, why, advice in _RULES:
        value = getattr(router.config, setting, None)
        if not harmless(value):
            raise UnsupportedError(f"{setting} is {value!r}: {why}; set it to {advice} ({name})")
