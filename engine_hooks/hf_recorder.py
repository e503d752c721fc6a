"""Records which experts the routers of a Hugging Face model choose.

    with record_routing(model) as rec:
        model(input_ids=ids, attention_mask=mask)  # or model.generate(...)
    rec.routed_experts  # [rows, MoE layers, top_k]
    rec.traces(ids, mask, prompt_lens=[...])  # one RoutingTrace per sequence

Reads what the router modules of transformers 5 hand to their experts and computes no top-k of its
own. Knows nothing about families beyond what RouterSpec says of the model: in each MoE layer it
looks for the one module that calls itself a router.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from r3.checks import check_distinct, check_shape_and_range
from r3.errors import CaptureError, TraceError, UnsupportedError
from r3.identity import Provenance, RolloutId
from r3.spec import RouterSpec
from r3.trace import RoutingTrace

# routers that return no indices but scores [rows, num_experts], zero for what they did not choose
# (transformers, modeling_llama4.py, Llama4Router)
_SCORES_ONLY = ("Llama4Router",)


@contextmanager
def record_routing(model: Any, spec: RouterSpec | None = None) -> Iterator[RoutingRecorder]:
    """Record every forward pass of `model` inside the with block; hooks go when it ends.

    model: a transformers model; spec: its routers, by default read from its config.

    A forward pass is one through the stack of decoder layers. Layers that activation
    checkpointing runs again in the backward pass repeat rows that are recorded already and are
    not recorded twice. Recorders do not disturb each other, nor gradients: only integers are kept.

    Raises UnsupportedError for a model without routers, for routers that cannot be found or
    read, and for expert parallelism (its ids are local to a rank). The forward pass raises
    CaptureError if a router did not report (a fused kernel, a compiled graph), TraceError if a
    row is impossible.
    """
    recorder = RoutingRecorder(model, spec)
    handles = recorder._attach()
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


class RoutingRecorder:
    """What `record_routing` yields.

    spec: the routers. provenance: what ran them, for traces.
    forwards: one array per forward pass, [rows, MoE layers, top_k] in `spec.dtype`; rows in the
    order the routers saw them, which is [batch * sequence], padding included.
    """

    def __init__(self, model: Any, spec: RouterSpec | None) -> None:
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
            raise UnsupportedError(
                f"{type(model).__name__} is not a transformers model: no module with a config"
            )
        if hasattr(model, "_orig_mod"):  # of torch.compile; its class is slow to import
            raise UnsupportedError(
                "a compiled model does not run its hooks: record the model that was compiled"
            )
        self.spec = spec or RouterSpec.from_hf_config(model.config)
        self.provenance = _provenance(model)
        self._stack, self._routers = _find_routers(model, self.spec)
        self.forwards: list[np.ndarray] = []
        # of each forward pass: [batch, sequence] token ids, or only its shape, or neither
        self._fed: list[np.ndarray | tuple[int, int] | None] = []
        self._seen: dict[int, torch.Tensor] | None = None  # None between forward passes

    @property
    def routed_experts(self) -> np.ndarray:
        """All forward passes one after another: [rows, MoE layers, top_k]."""
        none = np.zeros((0, len(self.spec.moe_layers), self.spec.top_k), self.spec.dtype)
        return np.concatenate([none, *self.forwards])

    def clear(self) -> None:
        """Forget what was recorded."""
        self.forwards.clear()
        self._fed.clear()

    def traces(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        prompt_lens: Sequence[int] | None = None,
        rollout_ids: Sequence[RolloutId] | None = None,
    ) -> list[RoutingTrace]:
        """One trace for each sequence of a batch that the recorded forward passes were fed.

        They are one pass over [batch, sequence], or those of one `generate` with a KV cache,
        which together fed every position of `input_ids` (what it returned) but the last.
        attention_mask: [batch, sequence], 1 for the tokens of a sequence, 0 for padding on its
        left or right; default: no padding. For the result of `generate` it covers what was
        generated too.
        prompt_lens: per sequence, without padding; default: all of its tokens are prompt.

        The row of a last token is dropped. Raises CaptureError if the passes do not add up to
        `input_ids`, TraceError if they were fed other tokens.
        """
        tokens, mask = _batch(input_ids, attention_mask)
        rows, fed = self._per_sequence(tokens)
        if fed is not None:
            wrong = (fed != tokens[:, : fed.shape[1]]) & mask[:, : fed.shape[1]]
            if wrong.any():
                b, s = np.argwhere(wrong)[0].tolist()
                raise TraceError(
                    f"sequence {b}, position {s}: the model was fed token {fed[b, s]}, "
                    f"input_ids says {tokens[b, s]}"
                )
        for name, value in (("prompt_lens", prompt_lens), ("rollout_ids", rollout_ids)):
            if value is not None and len(value) != len(tokens):
                raise TraceError(f"{len(value)} {name} for {len(tokens)} sequences")
        traces = []
        for b in range(len(tokens)):
            at = np.flatnonzero(mask[b])
            if not len(at) or at[-1] - at[0] + 1 != len(at):
                raise TraceError(
                    f"sequence {b}: attention_mask has {len(at)} tokens with padding between "
                    "them, expected at least one token and padding on the left or right only"
                )
            traces.append(
                RoutingTrace.build(
                    spec=self.spec,
                    token_ids=tokens[b, at],
                    routed_experts=rows[b, at[:-1]],
                    prompt_len=len(at) if prompt_lens is None else int(prompt_lens[b]),
                    rollout_id=None if rollout_ids is None else rollout_ids[b],
                    provenance=self.provenance,
                )
            )
        return traces

    def _per_sequence(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Recorded rows [batch, fed, layers, top_k], and the token ids fed [batch, fed] where
        the model was given ids and not embeddings."""
        # a pass whose shape is not known is of no batch
        shapes = [x.shape if isinstance(x, np.ndarray) else x or (0, 0) for x in self._fed]
        batch, length = tokens.shape
        total = sum(s for _, s in shapes)
        if {b for b, _ in shapes} != {batch} or total not in (length, length - 1):
            raise CaptureError(
                f"recorded forward passes of shapes {[list(s) for s in shapes]} do not add up to "
                f"input_ids {list(tokens.shape)}, or to all of it but the last position: give the "
                "batch that was fed, and clear() between batches"
            )
        parts = [f.reshape(batch, -1, *f.shape[1:]) for f in self.forwards]
        rows = np.concatenate(parts, axis=1)
        fed = [x for x in self._fed if isinstance(x, np.ndarray)]
        return rows, np.concatenate(fed, axis=1) if len(fed) == len(self._fed) else None

    # --- hooks

    def _attach(self) -> list[Any]:
        return [
            self._stack.register_forward_pre_hook(self._begin, with_kwargs=True),
            *(m.register_forward_hook(self._hook_of(i)) for i, m in self._routers.items()),
            self._stack.register_forward_hook(self._end, with_kwargs=True),
        ]

    def _begin(self, _stack: Any, _args: Any, _kwargs: Any) -> None:
        self._seen = {}  # what a pass that raised has left behind is dropped

    def _hook_of(self, layer: int) -> Any:
        def hook(router: Any, _args: Any, output: Any) -> None:
            if self._seen is None:
                return  # recomputed in the backward pass
            if layer in self._seen:
                raise CaptureError(f"layer {layer}: its router ran twice in one forward pass")
            self._seen[layer] = _chosen(router, output, self.spec, layer)

        return hook

    def _end(self, _stack: Any, args: tuple, kwargs: dict, _output: Any) -> None:
        seen, self._seen = self._seen or {}, None
        where = f"forward pass {len(self.forwards)}"
        silent = [i for i in self._routers if i not in seen]
        if silent:
            raise CaptureError(
                f"{where}: the routers of layers {silent} did not report. Were they bypassed "
                "(a fused MoE kernel, a compiled or skipped layer)?"
            )
        layers = [_indices(seen[i], self.spec.top_k, f"{where}: layer {i}") for i in self._routers]
        fed = _fed(args, kwargs)
        shape = fed.shape if isinstance(fed, np.ndarray) else fed
        counts = {i: len(x) for i, x in zip(self._routers, layers, strict=True)}
        expected = layers[0].shape[0] if shape is None else shape[0] * shape[1]
        if set(counts.values()) != {expected}:
            raise CaptureError(f"{where}: rows per layer {counts}, expected {expected} in each")
        ids = np.stack(layers, axis=1)
        everywhere = np.ones(len(ids), bool)
        check_shape_and_range(ids, everywhere, self.spec, where)
        check_distinct(ids, everywhere, self.spec, where)
        self.forwards.append(ids.astype(self.spec.dtype))
        self._fed.append(fed)


def _find_routers(
    model: torch.nn.Module, spec: RouterSpec
) -> tuple[torch.nn.Module, dict[int, torch.nn.Module]]:
    """The module that runs the decoder layers, and the router of each MoE layer."""
    name = type(model).__name__
    found, looked = [], []
    for path, layers in model.named_modules():
        if not isinstance(layers, torch.nn.ModuleList) or path.split(".")[-1] != "layers":
            continue
        routers = {i: m for i, x in enumerate(layers) for m in x.modules() if _is_router(m)}
        looked.append(f"{path} ({len(layers)} layers, routers in {list(routers)})")
        if len(layers) == spec.num_layers and tuple(routers) == spec.moe_layers:
            found.append((model.get_submodule(path.rpartition(".")[0]), routers))
    if len(found) != 1:
        raise UnsupportedError(
            f"{name}: {len(found) or 'no'} stacks of {spec.num_layers} decoder layers with a "
            f"router module in layers {list(spec.moe_layers)}; found: {'; '.join(looked) or '-'}. "
            "Routers must be modules of their own, as in transformers 5"
        )
    stack, routers = found[0]
    for i, router in routers.items():
        for field in ("top_k", "num_experts"):
            value = getattr(router, field, getattr(spec, field))
            if value != getattr(spec, field):
                raise UnsupportedError(
                    f"{name}, layer {i}: {type(router).__name__}.{field} is {value!r}, the "
                    f"RouterSpec says {getattr(spec, field)}"
                )
    if any(getattr(m, "_is_expert_parallel", False) for m in stack.modules()):
        raise UnsupportedError(f"{name} is expert parallel: its expert ids may be local to a rank")
    return stack, routers


def _is_router(module: torch.nn.Module) -> bool:
    return "Router" in type(module).__name__ and hasattr(module, "top_k")


def _chosen(router: Any, output: Any, spec: RouterSpec, layer: int) -> torch.Tensor:
    """From what a router returns: indices [rows, top_k], or a bool map [rows, num_experts]."""
    parts = output if isinstance(output, tuple | list) else (output,)
    tensors = [x for x in parts if isinstance(x, torch.Tensor)]
    indices = [x for x in tensors if x.dtype in (torch.int64, torch.int32)]
    if len(indices) == 1 and indices[0].ndim == 2 and indices[0].shape[1] == spec.top_k:
        return indices[0].detach().clone()  # what comes after may write into it
    if not indices and type(router).__name__ in _SCORES_ONLY:
        return tensors[0].detach() != 0
    raise UnsupportedError(
        f"layer {layer}: {type(router).__name__} returns "
        f"{[(str(x.dtype), list(x.shape)) for x in tensors]}, expected one tensor of expert "
        f"indices [rows, {spec.top_k}]"
    )


def _indices(chosen: torch.Tensor, top_k: int, where: str) -> np.ndarray:
    """[rows, top_k] on the host; ascending where only a map was given."""
    values = chosen.cpu().numpy()
    if values.dtype != bool:
        return values
    counts = values.sum(axis=1)
    if (counts != top_k).any():
        row = int((counts != top_k).argmax())
        raise CaptureError(f"{where}: row {row} uses {counts[row]} experts, expected {top_k}")
    return np.nonzero(values)[1].reshape(len(values), top_k)


def _fed(args: tuple, kwargs: dict) -> np.ndarray | tuple[int, int] | None:
    """Token ids [batch, sequence] that the stack was called with, or the shape of embeddings."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(ids, torch.Tensor) and ids.ndim == 2 and not ids.is_floating_point():
        return ids.detach().cpu().numpy().copy()
    embeds = kwargs.get("inputs_embeds")
    if isinstance(embeds, torch.Tensor) and embeds.ndim == 3:
        return embeds.shape[0], embeds.shape[1]
    return None


def _batch(input_ids: Any, attention_mask: Any) -> tuple[np.ndarray, np.ndarray]:
    tokens = _host(input_ids)
    mask = np.ones(tokens.shape, bool) if attention_mask is None else _host(attention_mask)
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise TraceError(
            f"input_ids has shape {list(tokens.shape)} and dtype {tokens.dtype}, expected "
            "integers [batch, sequence]"
        )
    if mask.shape != tokens.shape or not np.isin(mask, (0, 1)).all():
        raise TraceError(
            f"attention_mask has shape {list(mask.shape)}, expected {list(tokens.shape)} of 0 and 1"
        )
    return tokens, mask.astype(bool)


def _host(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _provenance(model: Any) -> Provenance:
    import transformers

    config = model.config
    quantization = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    method = quantization.get("quant_method") or ""
    parameter = next(model.parameters(), None)
    return Provenance(
        engine="transformers",
        engine_version=transformers.__version__,
        model=str(getattr(config, "_name_or_path", "") or ""),
        dtype="" if parameter is None else str(parameter.dtype).removeprefix("torch."),
        quantization=str(getattr(method, "value", method)),
        attention_backend=str(getattr(config, "_attn_implementation", "") or ""),
        moe_kernel=str(getattr(config, "_experts_implementation", "") or ""),
        device="" if parameter is None else parameter.device.type,
    )
