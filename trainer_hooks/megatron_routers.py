"""Finds the routers of a live Megatron-core model, and refuses those in which replay cannot work.

Several Megatron settings make a router ignore what it is told, silently. Each is refused by name
when replay is attached, with its value and what to set. Routers are found in the model itself and
not in a registry: a registry also holds routers of other models and of layers that were built
and thrown away. Routers of MTP layers are left out: no engine captures routing for them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from r3.errors import MissingDependencyError, UnsupportedError
from r3.trainer_hooks.layout import RankPlace

# Load balancing types whose routing is the top-k of scores and passes through `router_replay`
# (transformer/moe/router.py, TopKRouter.routing). Others, "sinkhorn" in all versions and
# "quantile_balancing" in 0.19, choose experts elsewhere.
_ROUTING_TYPES = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}
# (topk_routing_with_score_function); all of them gather what they weigh from the scores
_SCORE_FUNCTIONS = {"softmax", "sigmoid", "sqrtsoftplus"}

_GRAPHS = "a CUDA graph repeats the routing it was captured with"
_DROPPED = "tokens are dropped from experts after replay"

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
        "moe_router_force_biased",
        lambda v: v is None,
        "logits get a random bias, so gate weights would be wrong",
        "None",
    ),
    (
        "moe_input_jitter_eps",
        lambda v: v is None,
        "the routers' input is random, and so are the gate weights",
        "None",
    ),
    ("moe_expert_capacity_factor", lambda v: v is None, _DROPPED, "None"),
    ("moe_expert_rank_capacity_factor", lambda v: v is None, _DROPPED, "None"),
    ("enable_cuda_graph", lambda v: not v, _GRAPHS, "False"),
    ("external_cuda_graph", lambda v: not v, _GRAPHS, "False"),
    (
        "overlap_moe_expert_parallel_comm",
        lambda v: not v,
        "layers of two microbatches run interleaved, outside of what microbatch() encloses",
        "False",
    ),
)


@dataclass(frozen=True, eq=False)
class Chunk:
    """One model chunk of this rank: a pipeline stage, or one of its virtual stages.

    routers: TopKRouter by 0-based decoder layer, ascending; none where all layers are dense.
    owned: all its decoder layers, dense ones too. bodies: what runs once per forward pass.
    embeddings: what is given `input_ids`; none on inner stages. config: its TransformerConfig.
    """

    config: Any
    routers: dict[int, Any]
    owned: frozenset[int]
    bodies: tuple[Any, ...]
    embeddings: tuple[Any, ...]


def find_chunks(model_chunks: Any) -> list[Chunk]:
    """The chunks of a module or a list of modules, fit for replay.

    Wrappers (DDP, Float16Module) are looked through. Raises MissingDependencyError without
    Megatron-core; UnsupportedError for versions and routers that are not known here, for two
    routers of one layer, for a setting under which replay would be ignored or wrong, and for a
    router that is under replay already.
    """
    _check_megatron()
    chunks = [_chunk(name, module) for name, module in named_chunks(model_chunks)]
    routers = merged_routers(chunks)
    if not routers and not _is_moe_stage(model_chunks):
        raise UnsupportedError(
            "the model has no TopKRouter: expected a Megatron-core model with num_moe_experts set"
        )
    for layer, router in routers.items():
        if getattr(router.router_replay, "belongs_to_r3", False):
            raise UnsupportedError(
                f"router of decoder layer {layer} is already under replay: detach() the other one "
                "first"
            )
    check_settings(routers)
    return chunks


def merged_routers(chunks: list[Chunk]) -> dict[int, Any]:
    """The routers of all chunks by decoder layer, ascending; UnsupportedError for a layer twice."""
    routers: dict[int, Any] = {}
    for chunk in chunks:
        for layer, router in chunk.routers.items():
            if layer in routers:
                raise UnsupportedError(
                    f"two routers of decoder layer {layer}: expected the chunks of one model"
                )
            routers[layer] = router
    return dict(sorted(routers.items()))


def named_routers(model_chunks: Any) -> dict[int, Any]:
    """The TopKRouter modules of a module or a list of modules, by 0-based decoder layer, ascending.

    Without those of MTP layers. Raises as `find_chunks`, except for settings.
    """
    _check_megatron()
    routers = merged_routers([_chunk(name, module) for name, module in named_chunks(model_chunks)])
    if not routers:
        raise UnsupportedError(
            "the model has no TopKRouter: expected a Megatron-core model with num_moe_experts set"
        )
    return routers


def named_chunks(model_chunks: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of each chunk; one that is given twice, wrapped or not, is one chunk"""
    from torch.nn import Module

    modules = list(model_chunks) if isinstance(model_chunks, list | tuple) else [model_chunks]
    seen: set[int] = set()
    for i, module in enumerate(modules):
        inner = module
        while isinstance(getattr(inner, "module", None), Module):
            inner = inner.module
        if id(inner) not in seen:
            seen.add(id(inner))
            yield (f"model[{i}]" if len(modules) > 1 else "model"), inner


def _chunk(name: str, module: Any) -> Chunk:
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    modules = dict(module.named_modules(prefix=name))
    mtp = tuple(f"{n}." for n, m in modules.items() if isinstance(m, MultiTokenPredictionLayer))
    modules = {n: m for n, m in modules.items() if not f"{n}.".startswith(mtp)}
    in_decoder = re.compile(r"\.decoder\.layers\.\d+$")
    bodies = tuple(m for n, m in modules.items() if n.endswith(".decoder"))
    embeddings = tuple(m for m in modules.values() if isinstance(m, LanguageModelEmbedding))
    routers = _routers(modules)
    return Chunk(
        config=next((r.config for r in routers.values()), getattr(module, "config", None)),
        routers=routers,
        owned=frozenset(m.layer_number - 1 for n, m in modules.items() if in_decoder.search(n)),
        bodies=bodies or (module,),
        # the last stage of a model with MTP has one that is fed shifted ids
        embeddings=embeddings if getattr(module, "pre_process", True) else (),
    )


def _routers(modules: dict[str, Any]) -> dict[int, Any]:
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer
    from megatron.core.transformer.moe.router import Router, TopKRouter

    routers: dict[int, Any] = {}
    names: dict[int, str] = {}
    for name, module in modules.items():
        if isinstance(module, BaseMoELayer):
            name, module = f"{name}.router", module.router
        elif not isinstance(module, Router):
            continue
        if type(module) is not TopKRouter:
            raise UnsupportedError(
                f"{name} is a {type(module).__name__}, expected Megatron-core's TopKRouter: a "
                "router that this version does not know might ignore replay"
            )
        if getattr(module, "is_mtp_layer", False):
            continue
        if module.layer_number is None:
            raise UnsupportedError(f"{name}.layer_number is None, expected a number from 1")
        layer = module.layer_number - 1  # Megatron counts from 1
        if routers.get(layer, module) is not module:
            raise UnsupportedError(
                f"{name} and {names[layer]} are both routers of decoder layer {layer}: expected "
                "the chunks of one model"
            )
        routers[layer], names[layer] = module, name
    return dict(sorted(routers.items()))


def _is_moe_stage(model_chunks: Any) -> bool:
    """Whether a stage without routers belongs to a pipeline that has them elsewhere"""
    configs = [getattr(module, "config", None) for _, module in named_chunks(model_chunks)]
    return any(
        getattr(c, "num_moe_experts", None) and (c.pipeline_model_parallel_size or 1) > 1
        for c in configs
        if c is not None
    )


def place_of(chunk: Chunk) -> RankPlace:
    """Where the rank of a chunk stands in the splits that change which rows its routers see."""
    router = next(iter(chunk.routers.values()), None)
    if router is None:  # dense layers only, whose tokens are checked all the same
        from megatron.core import parallel_state as ps

        tp, cp = ps.get_tensor_model_parallel_group(), ps.get_context_parallel_group()
    else:
        tp, cp = router.tp_group, router.cp_group
    return RankPlace(
        tp_size=tp.size(),
        tp_rank=tp.rank(),
        sequence_parallel=bool(chunk.config.sequence_parallel),
        cp_size=cp.size(),
        cp_rank=cp.rank(),
    )


def pipeline_group(chunk: Chunk) -> Any:
    """The ranks that hold the other stages of its model; None without pipeline parallelism."""
    if (chunk.config.pipeline_model_parallel_size or 1) == 1:
        return None
    from megatron.core import parallel_state as ps

    return ps.get_pipeline_model_parallel_group()


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
    from megatron.core.transformer.moe import router, router_replay

    function = router.topk_routing_with_score_function
    if "router_replay" not in inspect.signature(function).parameters:
        raise UnsupportedError(
            f"topk_routing_with_score_function of megatron-core {version} has no parameter "
            "router_replay, expected one: it was replaced, and routing would not be replayed"
        )
    # what sits in `router.router_replay` is called as Megatron's own would be
    native = inspect.signature(router_replay.RouterReplay.get_replay_topk)
    expected = ["self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"]
    if list(native.parameters) != expected:
        raise UnsupportedError(
            f"RouterReplay.get_replay_topk of megatron-core {version} has parameters "
            f"{list(native.parameters)}, expected {expected}"
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
    if router.score_function not in _SCORE_FUNCTIONS:
        raise UnsupportedError(
            f"moe_router_score_function is {router.score_function!r}, expected one of "
            f"{sorted(_SCORE_FUNCTIONS)} ({name})"
        )
    config = router.config
    for setting, harmless, why, advice in _RULES:
        value = getattr(config, setting, None)
        if not harmless(value):
            raise UnsupportedError(f"{setting} is {value!r}: {why}; set it to {advice} ({name})")
    _check_graphs(name, config)
    _check_recompute(name, config)


def _check_graphs(name: str, config: Any) -> None:
    """Graphs of attention alone do not hold the router; all others do, or may"""
    implementation = getattr(config, "cuda_graph_impl", "none")
    if implementation in (None, "none"):
        return
    # 0.19 names what 0.16 called scope modules
    scope = getattr(config, "cuda_graph_modules", None) or config.cuda_graph_scope or []
    names = {getattr(x, "name", x) for x in ([scope] if isinstance(scope, str) else scope)}
    if implementation != "transformer_engine" or not names or not names <= {"attn", "mamba"}:
        raise UnsupportedError(
            f"cuda_graph_impl is {implementation!r} and captures {sorted(names) or 'all'}: "
            f"{_GRAPHS}; set it to 'none', or to 'transformer_engine' with 'attn' alone ({name})"
        )


def _check_recompute(name: str, config: Any) -> None:
    """With fp8 and fp4 Megatron recomputes through TransformerEngine, which is not known here"""
    low = getattr(config, "fp8", None) or getattr(config, "fp4", None)
    modules = set(getattr(config, "recompute_modules", None) or ())
    full = config.recompute_granularity == "full"
    if low and (full or (config.recompute_granularity and modules & {"moe", "mlp"})):
        raise UnsupportedError(
            f"recompute_granularity is {config.recompute_granularity!r} with {low!r}: the routers "
            "would be recomputed by TransformerEngine, outside of what replay can follow; set it "
            f"to None, or recompute_modules without 'moe' and 'mlp' ({name})"
        )
