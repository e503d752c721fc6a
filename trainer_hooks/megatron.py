"""Replay of recorded expert routing in the routers of a live Megatron-core model (R3).

Each TopKRouter asks an object in `router.router_replay` for its top-k. `MegatronReplay` puts its
own there, so that no state is shared between models. Experts come from the record; their gate
weights come from the trainer's own scores, gathered before Megatron normalises them:
g_i = I_i exp(s_i) / sum_j I_j exp(s_j) for softmax after top-k, with s the trainer's logits and I
the recorded set (Ma et al. 2025, arXiv 2510.11370, section 3). So the router keeps its gradient,
also where a recorded expert is outside the native top-k.

One model-parallel rank, without recomputation, so far; `megatron_routers` refuses the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import MissingDependencyError, ReplayError, SpecError
from r3.trainer_hooks.layout import check_batch, view_of
from r3.trainer_hooks.megatron_report import LayerCounts, ReplayReport
from r3.trainer_hooks.megatron_routers import check_settings, find_embeddings, find_routers

try:
    import torch
except ImportError as e:
    raise MissingDependencyError(
        "torch is not installed: pip install 'rollout-routing-replay[megatron]'"
    ) from e


class _Microbatch:
    """The routing that the routers are to use during one forward pass.

    experts: [MoE layers, rows, top_k], uint8 or int32, zeros where not replayed; widened layer by
    layer when used, as int64 for all layers would take eight times the memory. replayed: bool
    [rows], None when all are. Both move to the scores' device on first use.
    """

    def __init__(self, batch: RoutingBatch, index: np.ndarray, input_ids: torch.Tensor) -> None:
        replayed = (index >= 0) & batch.valid[index]
        is_last = np.zeros(batch.num_tokens, bool)
        is_last[batch.cu_seqlens[1:] - 1] = True
        self.rows, self.input_ids = len(index), input_ids
        self.rows_replayed = int(replayed.sum())
        self.rows_missing = int(((index >= 0) & ~replayed & ~is_last[index]).sum())
        experts = np.where(replayed[:, None, None], batch.routed_experts[index], 0)
        # torch lacks most operations for uint16
        dtype = np.uint8 if batch.spec.num_experts <= 256 else np.int32
        self._experts = torch.from_numpy(
            np.ascontiguousarray(experts.transpose(1, 0, 2), dtype=dtype)
        )
        self._replayed = None if replayed.all() else torch.from_numpy(replayed)
        self._row_of = {layer: i for i, layer in enumerate(batch.spec.moe_layers)}
        self.called: set[int] = set()

    def table(self, layer: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Expert ids int64 [rows, top_k] of a decoder layer, and bool [rows, 1] or None."""
        if self._experts.device != device:
            self._experts = self._experts.to(device)
            self._replayed = None if self._replayed is None else self._replayed.to(device)
        mask = None if self._replayed is None else self._replayed[:, None]
        return self._experts[self._row_of[layer]].long(), mask


class _LayerReplay:
    """What sits in `router.router_replay`; Megatron only ever calls `get_replay_topk`.

    A deep copy or a pickle of it is None: a copied model (a reference model, a checkpoint) routes
    natively and shares no state with this one.
    """

    belongs_to_r3 = True

    def __init__(self, owner: MegatronReplay, layer: int) -> None:
        self._owner, self._layer = owner, layer
        self.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def clear(self) -> None:
        self._rows_replayed = self._rows_missing = 0
        # tensors on the device once something was counted, so that counting never synchronises
        self._cells: torch.Tensor | int = 0
        self._experts: torch.Tensor | int = 0

    def counts(self) -> LayerCounts:
        return LayerCounts(
            self._rows_replayed, self._rows_missing, int(self._cells), int(self._experts)
        )

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [rows, topk] and expert ids int64 [rows, topk] for `scores` [rows, experts].

        scores are logits, softmax or sigmoid scores, or biased sigmoid scores, of which Megatron
        then uses only the ids; whichever it is, gathering them does what its own top-k does.
        """
        if torch._C._current_graph_task_id() != -1:
            raise ReplayError(
                f"layer {self._layer}: the router ran during the backward pass, expected forward "
                "passes only: recomputing activations under replay is not supported yet"
            )
        current = self._owner._current
        if current is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        if self._layer in current.called:
            raise ReplayError(
                f"layer {self._layer}: second forward pass in one microbatch(), expected one"
            )
        if scores.shape[0] != current.rows:
            raise ReplayError(
                f"layer {self._layer}: the router sees {scores.shape[0]} rows, expected "
                f"{current.rows}, one for each of the input_ids given to microbatch()"
            )
        ids, replayed = current.table(self._layer, scores.device)
        with torch.no_grad():
            native_values, native_ids = default_compute_topk(
                scores.detach(), topk, num_groups, group_topk
            )
        if replayed is not None:
            ids = torch.where(replayed, ids, native_ids)
        values = scores.gather(1, ids)
        with torch.no_grad():
            if group_topk:  # an expert of a group not chosen can have a high score
                outside = (ids[:, :, None] != native_ids[:, None, :]).all(dim=2)
            else:
                outside = values < native_values.amin(dim=1, keepdim=True)
            self._experts = self._experts + outside.sum()
            self._cells = self._cells + outside.any(dim=1).sum()
        self._rows_replayed += current.rows_replayed
        self._rows_missing += current.rows_missing
        current.called.add(self._layer)
        return values, ids


class MegatronReplay:
    """Attaches to the routers of a Megatron-core model and replays recorded routing in them.

        with MegatronReplay(model) as replay:
            with replay.step():                                      # one optimizer step
                for batch, input_ids in microbatches:
                    with replay.microbatch(batch, input_ids=input_ids):
                        loss = ...                                   # forward
                    loss.backward()
            print(replay.report().total)

    Outside `microbatch` the model routes natively. model_chunks: a module or a list of modules.
    Raises MissingDependencyError and UnsupportedError, see `megatron_routers`; a model that was
    refused is left as it was.
    """

    def __init__(self, model_chunks: Any) -> None:
        self._routers = find_routers(model_chunks)
        self._layers = {layer: _LayerReplay(self, layer) for layer in self._routers}
        self._before = {layer: r.router_replay for layer, r in self._routers.items()}
        self._attached, self._in_step = True, False
        self._current: _Microbatch | None = None
        self._hooks = []
        for layer, router in self._routers.items():
            router.router_replay = self._layers[layer]
            self._hooks.append(router.register_forward_pre_hook(self._check_layout))
        for embedding in find_embeddings(model_chunks):
            hook = embedding.register_forward_pre_hook(self._check_fed, with_kwargs=True)
            self._hooks.append(hook)

    def __enter__(self) -> MegatronReplay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Put back what each router had before. Detaching twice does nothing.

        Raises ReplayError inside a step.
        """
        if self._in_step:
            raise ReplayError("detach() inside step(), expected it after the step")
        for layer, router in self._routers.items():
            if router.router_replay is self._layers[layer]:  # else somebody else's by now
                router.router_replay = self._before[layer]
        for hook in self._hooks:
            hook.remove()
        self._attached = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step: counts start at zero, and stay readable until the next one."""
        if not self._attached or self._in_step:
            state = "inside step()" if self._in_step else "after detach()"
            raise ReplayError(f"step() {state}, expected one step at a time on an attached model")
        check_settings(self._routers)  # they may have been changed since
        for layer in self._layers.values():
            layer.clear()
        self._in_step = True
        try:
            yield
        finally:
            self._in_step, self._current = False, None

    @contextmanager
    def microbatch(self, batch: RoutingBatch, *, input_ids: torch.Tensor) -> Iterator[None]:
        """Replay `batch` in the forward pass inside; `input_ids` are the ids that it is given.

        input_ids: integers [b, s] or [1, T] on any device, copied to the host once; see `layout`.
        Rows without routing, and padding, are routed natively.

        Raises ReplayError for tokens other than those of the batch, for use outside `step` or
        inside another microbatch, in the forward pass if the model is fed something else than
        `input_ids` or runs twice, and on leaving if a router was never asked; SpecError for routing
        of another model; TraceError for impossible expert ids.
        """
        if not self._in_step or self._current is not None:
            state = "outside step()" if not self._in_step else "inside another microbatch()"
            raise ReplayError(f"microbatch() {state}, expected one at a time inside step()")
        if not isinstance(input_ids, torch.Tensor):
            raise ReplayError(
                f"input_ids is a {type(input_ids).__name__}, expected the tensor that the model "
                "is fed"
            )
        self._check_spec(batch)
        check_batch(batch)
        view = view_of(batch, input_ids.detach().cpu().numpy())
        self._current = current = _Microbatch(batch, view.index, input_ids)
        try:
            yield
        finally:
            self._current = None
        silent = sorted(set(self._layers) - current.called)
        if silent:
            raise ReplayError(
                f"decoder layers {silent}: the router never asked for its routing during the "
                "microbatch, expected one forward pass through all MoE layers; nothing was "
                "replayed there"
            )

    def report(self) -> ReplayReport:
        """The counts of the current or last step. Synchronises with the device."""
        return ReplayReport({layer: r.counts() for layer, r in self._layers.items()})

    def _check_fed(self, _embedding: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The ids that the model is really given are those whose rows were worked out."""
        if self._current is None:
            return
        fed, declared = args[0] if args else kwargs["input_ids"], self._current.input_ids
        if fed is declared:
            return
        if fed.shape != declared.shape or not torch.equal(fed, declared.to(fed)):
            raise ReplayError(
                f"the model is fed input_ids of shape {list(fed.shape)}, expected those that were "
                f"given to microbatch(), of shape {list(declared.shape)}, with the same values"
            )

    def _check_layout(self, router: Any, args: tuple[Any, ...]) -> None:
        """Rows are right only if the router sees [s, b, hidden] of the declared [b, s]."""
        if self._current is None:
            return
        b, s = self._current.input_ids.shape
        found = list(args[0].shape[:2])
        if found != [s, b]:
            raise ReplayError(
                f"layer {router.layer_number - 1}: the router sees {found} positions and "
                f"sequences, expected {[s, b]} for the input_ids given to microbatch()"
            )

    def _check_spec(self, batch: RoutingBatch) -> None:
        spec = batch.spec
        if tuple(self._layers) != spec.moe_layers:
            raise SpecError(
                f"the routing is of decoder layers {list(spec.moe_layers)}, expected those of the "
                f"model's routers, {list(self._layers)}"
            )
        for layer, router in self._routers.items():
            for name, found, expected in (
                ("num_experts", spec.num_experts, router.num_experts),
                ("top_k", spec.top_k, router.topk),
            ):
                if found != expected:
                    raise SpecError(
                        f"the routing has {name}={found}, expected {expected} as in the model's "
                        f"router of decoder layer {layer}"
                    )
