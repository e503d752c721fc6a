"""Replay of recorded expert routing in the routers of a live Megatron-core model (R3).

Each TopKRouter asks an object in `router.router_replay` for its top-k. `MegatronReplay` puts its
own there, so that no state is shared between models. Experts come from the record; their gate
weights come from the trainer's own scores, gathered before Megatron normalises them:
g_i = I_i exp(s_i) / sum_j I_j exp(s_j) for softmax after top-k, with s the trainer's logits and I
the recorded set (Ma et al. 2025, arXiv 2510.11370, section 3). So the router keeps its gradient,
also where a recorded expert is outside the native top-k.

What happens to which row is decided in `binding`, which rows a rank sees in `layout`, how
recomputation finds its microbatch in `megatron_recompute`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from r3.batch import RoutingBatch
from r3.errors import MissingDependencyError, ReplayError
from r3.identity import RolloutId
from r3.trainer_hooks import megatron_recompute
from r3.trainer_hooks.binding import Limits, bind, check_fraction, check_version
from r3.trainer_hooks.layout import RankPlace, check_batch, view_of
from r3.trainer_hooks.megatron_recompute import Again, State
from r3.trainer_hooks.megatron_report import LayerCounts, ReplayReport, RolloutCounts
from r3.trainer_hooks.megatron_routers import (
    check_settings,
    find_chunks,
    merged_routers,
    pipeline_group,
    place_of,
)

try:
    import torch
except ImportError as e:
    raise MissingDependencyError(
        "torch is not installed: pip install 'rollout-routing-replay[megatron]'"
    ) from e

from r3.trainer_hooks import megatron_checks as checks
from r3.trainer_hooks.megatron_hooks import Hook, LayerReplay
from r3.trainer_hooks.megatron_limits import (
    WITNESS_LAYERS,
    WITNESS_MICROBATCHES,
    check_outside,
    fetched,
)
from r3.trainer_hooks.megatron_margins import ToLogits, to_logits
from r3.trainer_hooks.megatron_microbatch import Ask, Counters, Microbatch, PassCounts
from r3.trainer_hooks.megatron_native import NativeRouting
from r3.trainer_hooks.megatron_provenance import trainer_provenance

__all__ = ["MegatronReplay", "NativeRouting", "trainer_provenance"]


class MegatronReplay:
    """Attaches to the routers of a Megatron-core model and replays recorded routing in them.

        replay = MegatronReplay(model_chunks)
        with replay.step():                                          # one optimizer step
            for batch, input_ids in microbatches:                    # or Megatron's schedule
                with replay.microbatch(batch, input_ids=input_ids):
                    loss = ...                                       # forward
                loss.backward()
        print(replay.report())

    Outside `microbatch` the model routes natively. Forward passes may be enclosed in any order and
    number, with or without gradients; backward passes need not be enclosed, and recompute each in
    its own microbatch.

    model_chunks: a module, or the list of this rank's model chunks, wrapped or not.
    max_missing_fraction, max_weight_lag, on_stale: see `binding.Limits`.
    max_outside_fraction: leaving a step is an error if a larger share of the replayed experts was
    outside the trainer's native top-k (for rows shifted by one token 0.57 on Qwen3-30B-A3B and 0.62
    on Mixtral, by what neighbouring tokens share), or if 0.15 was and rows are found to be shifted
    or of another rollout; in all, or in a layer or a rollout. Costs one synchronisation per step.
    None for no such check, which count_outside=False needs.
    count_outside: count these experts, without synchronisation.

    Raises MissingDependencyError and UnsupportedError, see `megatron_routers`; a model that was
    refused is left as it was.
    """

    def __init__(
        self,
        model_chunks: Any,
        *,
        max_missing_fraction: float | None = 0.5,
        max_outside_fraction: float | None = 0.4,
        max_weight_lag: int | None = None,
        on_stale: Literal["stop", "native", "warn"] = "stop",
        count_outside: bool = True,
    ) -> None:
        self._limits = Limits(max_missing_fraction, max_weight_lag, on_stale)
        check_fraction("max_outside_fraction", max_outside_fraction)
        if not count_outside and max_outside_fraction is not None:
            raise ReplayError(
                f"max_outside_fraction is {max_outside_fraction} without count_outside, expected "
                "None: it is a limit on what is counted"
            )
        self._count, self._max_outside = count_outside, max_outside_fraction
        self._chunks = find_chunks(model_chunks)
        self._routers = merged_routers(self._chunks)
        self._chunk_of = {x: i for i, chunk in enumerate(self._chunks) for x in chunk.routers}
        megatron_recompute.attach(self)
        self._layers = {layer: LayerReplay(self, layer) for layer in self._routers}
        self._before = {layer: r.router_replay for layer, r in self._routers.items()}
        self._hooks: list[Any] = []
        for layer, router in self._routers.items():
            router.router_replay = self._layers[layer]
            hook = Hook(self._check_layout)
            self._hooks.append(router.register_forward_pre_hook(hook, with_kwargs=True))
        for i, chunk in enumerate(self._chunks):
            for body in chunk.bodies:
                self._hooks.append(body.register_forward_pre_hook(Hook(self._note_run(i))))
            for embedding in chunk.embeddings:
                hook = Hook(self._check_fed)
                self._hooks.append(embedding.register_forward_pre_hook(hook, with_kwargs=True))
        # for `megatron_recompute`
        self.attached, self.state = True, State()
        self._step: object | None = None  # the one that is open
        self._weight_version: int | None = None
        self._rollouts: dict[RolloutId, RolloutCounts] = {}
        self._passes: list[PassCounts] = []  # of the step
        self._digests: list[list[bytes]] = []  # of the step, by chunk and pass

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The 0-based decoder layers whose routers this rank has: what it needs to load."""
        return tuple(self._routers)

    @property
    def place(self) -> RankPlace:
        """Where this rank stands in the tensor, sequence and context parallel splits."""
        return place_of(self._chunks[0])

    def __enter__(self) -> MegatronReplay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Put back what each router had before. Detaching twice does nothing.

        Backward passes that would recompute under replay are an error afterwards.
        Raises ReplayError inside a step.
        """
        if self._step is not None:
            raise ReplayError("detach() inside step(), expected it after the step")
        for layer, router in self._routers.items():
            if router.router_replay is self._layers[layer]:  # else somebody else's by now
                router.router_replay = self._before[layer]
        for hook in self._hooks:
            hook.remove()
        megatron_recompute.detach(self)
        self.attached = False

    @contextmanager
    def step(self, *, weight_version: int | None = None) -> Iterator[None]:
        """One optimizer step: counts start at zero, and stay readable until the next one.

        weight_version: the trainer's, in the numbering of the batches' weight_versions.

        Raises ReplayError on leaving if too many of the replayed experts were outside the native
        top-k (max_outside_fraction), with a diagnosis, and if the stages of a pipeline were given
        different microbatches: all of its ranks must enter and leave steps together. Call the
        optimizer after the step.
        """
        if not self.attached or self._step is not None:
            state = "inside step()" if self.attached else "after detach()"
            raise ReplayError(f"step() {state}, expected one step at a time on an attached model")
        check_version(weight_version)
        check_settings(self._routers)  # they may have been changed since
        for layer in self._layers.values():
            layer.counters.clear()
        self._rollouts, self._passes, self._weight_version = {}, [], weight_version
        self._digests = [[] for _ in self._chunks]
        self._step = object()
        try:
            yield
            group = pipeline_group(self._chunks[0])
            if group is not None:
                checks.check_stages(self._digests, group, self._device())
            if self._max_outside is not None:
                check_outside(self.report(), self._max_outside, self._passes)
        finally:
            self._step = self.state.current = None
            self._passes = [dataclasses.replace(p, witness=None) for p in self._passes]

    def microbatch(
        self,
        batch: RoutingBatch,
        *,
        input_ids: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        starts: Any = None,
        seq_length: int | None = None,
    ) -> AbstractContextManager[None]:
        """Replay `batch` in the forward pass of one model chunk inside.

        input_ids: the integers that the model is fed on this rank, [b, s] or packed [1, T], after
        the context-parallel split; copied to the host once. Inner pipeline stages may leave them
        out, and then need seq_length, the s before that split, unless packed.
        packed_seq_params: Megatron's, as the model is given it, for packed sequences.
        starts: [b], the slot of each sequence's first token, for padding that is not on the right;
        on the left it is s - lengths.

        Rows without routing are routed natively, padding is spread over the experts.

        Raises ReplayError for tokens other than those of the batch, beyond a limit, for use
        outside `step` or inside another microbatch, in the forward pass if the model is fed
        something else or runs twice, and on leaving if a router of the chunk was never asked;
        SpecError for routing of another model; TraceError for impossible expert ids.
        """
        return self._run(
            self._bound(False, batch, input_ids, packed_seq_params, starts, seq_length)
        )

    @contextmanager
    def record(
        self,
        batch: RoutingBatch,
        *,
        input_ids: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        starts: Any = None,
        seq_length: int | None = None,
        margins: bool = False,
    ) -> Iterator[NativeRouting]:
        """Route natively in the forward pass inside, and remember and compare what was chosen.

        What it yields gives a batch that replays the trainer's own routing (R2), and a diagnosis
        of the alignment of `batch`. Its rows count as `free`. Arguments as for `microbatch`.

        margins: also remember how near each router was to another choice; UnsupportedError, before
        the pass, for routers that do not choose by their logits alone (expert bias, groups) or have
        no other choice.
        """
        logits = to_logits(self._routers) if margins else None
        bound = self._bound(
            True, batch, input_ids, packed_seq_params, starts, seq_length, to_logits=logits
        )
        native = NativeRouting(bound, self._group(), self._weight_version)
        with self._run(bound):
            yield native

    def report(self) -> ReplayReport:
        """The counts of the current or last step. Synchronises with the device."""
        outside = {
            layer: r.counters.outside
            for layer, r in self._layers.items()
            if r.counters.outside is not None
        }
        values = torch.stack(list(outside.values())).tolist() if outside else []
        found = dict(zip(outside, values, strict=True))
        layers = {}
        for layer, r in self._layers.items():
            forced_cells, forced, free_cells, free = found.get(layer, (0, 0, 0, 0))
            layers[layer] = r.counters.rows + LayerCounts(
                outside_topk_cells_forced=forced_cells,
                outside_topk_experts_forced=forced,
                outside_topk_cells_free=free_cells,
                outside_topk_experts_free=free,
            )
        rollouts = dict(self._rollouts)
        for p, found_outside in zip(self._passes, fetched(self._passes), strict=True):
            counted = zip(p.names, p.cells.sum(axis=1), found_outside.sum(axis=1), strict=True)
            for name, cells, experts in counted:
                counts = RolloutCounts(
                    cells_replayed=int(cells), outside_topk_experts_forced=int(experts)
                )
                rollouts[name] = rollouts.get(name, RolloutCounts()) + counts
        return ReplayReport(layers, rollouts, next((r.topk for r in self._routers.values()), 1))

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        """For `megatron_recompute`: enters the microbatch of now, as often as asked."""
        if checks.in_backward() and not self.state.entered:
            return nullcontext  # somebody else recomputes, and routers in it are refused
        return Again(self, self.state.current)

    def _bound(
        self,
        record: bool,
        batch: RoutingBatch,
        input_ids: torch.Tensor | None,
        packed_seq_params: Any,
        starts: Any,
        seq_length: int | None,
        to_logits: dict[int, ToLogits] | None = None,
    ) -> Microbatch:
        self._check_state("record()" if record else "microbatch()")
        if not isinstance(batch, RoutingBatch):
            raise ReplayError(f"batch is a {type(batch).__name__}, expected a RoutingBatch")
        if input_ids is not None and not isinstance(input_ids, torch.Tensor):
            raise ReplayError(
                f"input_ids is a {type(input_ids).__name__}, expected the tensor that the model "
                "is fed"
            )
        layers = checks.covered_layers(batch, self._chunks)
        check_batch(batch)
        # what is recorded replays nothing, so nothing can be missing or too old
        limits = (Limits(None), None) if record else (self._limits, self._weight_version)
        view = view_of(
            batch,
            input_ids=checks.as_numpy("input_ids", input_ids),
            cu_seqlens=checks.slot_offsets(packed_seq_params),
            starts=checks.as_numpy("starts", starts),
            seq_length=seq_length,
            place=self.place,
        )
        return Microbatch(
            batch,
            view,
            bind(batch, view, layers, *limits),
            layers,
            input_ids=input_ids,
            record=record,
            count=self._count,
            to_logits=to_logits,
            witnesses=() if record else self._witness_layers(),
            step=self._step,
        )

    def _witness_layers(self) -> set[int]:
        if self._max_outside is None:
            return set()
        if len(self._passes) >= WITNESS_MICROBATCHES * len(self._chunks):
            return set()
        return {x for chunk in self._chunks for x in list(chunk.routers)[:WITNESS_LAYERS]}

    @contextmanager
    def _run(self, microbatch: Microbatch) -> Iterator[None]:
        self._check_state("microbatch()")
        if microbatch.step is not self._step:
            raise ReplayError("microbatch() of another step, expected one made in this step()")
        state = self.state
        state.current = microbatch
        try:
            yield
        finally:
            if state.current is microbatch:  # else it was left open, and its step is over
                state.current = None
        if microbatch.step is not self._step:
            return
        checks.check_ran(microbatch, self._chunks)
        for i in microbatch.chunks:
            self._digests[i].append(microbatch.digest())
        if microbatch.record:
            return
        if 0 in microbatch.chunks:  # chunks of one rank are given the same rollouts
            for name, rows in microbatch.binding.rollouts.items():
                self._rollouts[name] = self._rollouts.get(name, RolloutCounts()) + rows
        counts = microbatch.counts()
        if counts is not None:
            self._passes.append(counts)

    def _check_state(self, name: str) -> None:
        if self._step is None or self.state.current is not None:
            state = "outside step()" if self._step is None else "inside another microbatch()"
            raise ReplayError(f"{name} {state}, expected one at a time inside step()")

    def answer(self, layer: int, ask: Ask, counters: Counters) -> tuple[torch.Tensor, torch.Tensor]:
        """For `megatron_hooks`: what a router is told, values and ids [rows, top_k]."""
        again, state = checks.in_backward(), self.state
        if again and not state.entered:
            raise ReplayError(
                f"layer {layer}: the router ran during the backward pass, and not from one of "
                "Megatron's own checkpoints (recompute_granularity) made since replay was "
                "attached, which alone are known to it: expected no other recomputation around MoE "
                "layers"
            )
        if ask.scores.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ReplayError(
                f"layer {layer}: the router is captured into a CUDA graph, expected it to run: a "
                "graph would repeat this routing"
            )
        if state.asked is not None:
            state.asked.add(layer)
        current = state.current
        if current is None:
            if self._step is not None and not again:
                counters.add_rows(LayerCounts(rows_not_enclosed=len(ask.scores)))
            return ask.native(ask.scores)
        if not current.covers(layer):
            raise ReplayError(
                f"layer {layer}: the batch has routing of decoder layers "
                f"{list(current.batch.spec.moe_layers)}, expected those of the chunk that runs"
            )
        if not again:
            if layer in current.called:
                raise ReplayError(
                    f"layer {layer}: second forward pass in one microbatch(), expected one"
                )
            current.called.add(layer)
            current.chunks.add(self._chunk_of[layer])
        if ask.scores.shape[0] != current.num_rows:
            raise ReplayError(
                f"layer {layer}: the router sees {ask.scores.shape[0]} rows, expected "
                f"{current.num_rows}, one for each of the slots given to microbatch()"
            )
        return current.answer(layer, ask, counters, checkpointed=state.entered, again=again)

    def _note_run(self, chunk: int) -> Callable[..., None]:
        def hook(_body: Any, _args: Any) -> None:
            current = self.state.current
            if current is not None and not checks.in_backward():
                current.chunks.add(chunk)
                current.bodies.add(chunk)

        return hook

    def _check_fed(self, _embedding: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current = self.state.current
        # behind the first router MTP layers embed shifted ids
        if current is not None and not current.called and not checks.in_backward():
            checks.check_fed(current, args[0] if args else kwargs["input_ids"])
            current.fed = True

    def _check_layout(self, router: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current = self.state.current
        if current is not None:
            hidden = args[0] if args else kwargs["input"]
            checks.check_layout(current, router.layer_number - 1, hidden)

    def _device(self) -> torch.device:
        """Where the stage computes"""
        on_cuda = torch.cuda.is_available() and torch.distributed.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")

    def _group(self) -> Any:
        return next((r.tp_cp_group for r in self._routers.values()), None)
