"""What the routers of one rank do during one forward pass, and again when it is recomputed.

Holds a `Binding` on the device and answers each router. It is kept alive by whoever may still need
it: `MegatronReplay` while the microbatch is entered, and the graph where activations are to be
recomputed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from r3.batch import RoutingBatch
from r3.identity import RolloutId
from r3.trainer_hooks.binding import Binding
from r3.trainer_hooks.layout import RankView
from r3.trainer_hooks.megatron_margins import ToLogits, margins_of
from r3.trainer_hooks.megatron_report import LayerCounts

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# Up to this top-k, comparing the replayed scores with all others is faster than a native top-k.
_FEW = 12
# Comparisons at a time, of a byte each.
_AT_A_TIME = 1 << 24


@dataclass(frozen=True)
class Ask:
    """A router's question: scores [rows, experts], and how Megatron would answer it.

    scores are logits, softmax or sigmoid scores, or biased sigmoid scores, of which Megatron then
    uses only the ids; whichever it is, gathering them does what its own top-k does.
    """

    scores: torch.Tensor
    top_k: int
    num_groups: int | None
    group_topk: int | None
    default: TopK

    def native(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.default(scores, self.top_k, self.num_groups, self.group_topk)


class Counters:
    """What one layer did in a step. On the device once counted, so that counting never waits."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._passes: list[LayerCounts] = []
        # int64 [2, top_k + 1]: rows with so many experts outside, forced and free
        self._rows_by_outside: torch.Tensor | None = None

    def add_rows(self, rows: LayerCounts) -> None:
        self._passes.append(rows)  # adding them up here would hold up the forward pass

    def add_outside(
        self, outside: torch.Tensor, rows: torch.Tensor, top_k: int, free: bool
    ) -> None:
        """outside: int64 [rows], experts; rows: int64 [rows], 1 for those that count, else 0"""
        if self._rows_by_outside is None:
            size = (2, top_k + 1)
            with torch.inference_mode(False):  # or later passes could not add to it
                self._rows_by_outside = torch.zeros(size, dtype=torch.int64, device=outside.device)
        self._rows_by_outside[int(free)].index_add_(0, outside, rows)

    @property
    def rows(self) -> LayerCounts:
        return sum(self._passes, LayerCounts())

    @property
    def outside(self) -> torch.Tensor | None:
        """int64 [forced cells, forced experts, free cells, free experts]; None if not counted"""
        rows = self._rows_by_outside
        if rows is None:
            return None
        experts = rows * torch.arange(rows.shape[1], device=rows.device)
        return torch.stack([rows[:, 1:].sum(dim=1), experts.sum(dim=1)], dim=1).flatten()


@dataclass(frozen=True, eq=False)
class Witness:
    """The native choice in some layers of a pass: int16 or int32 [rows, top_k] by layer.

    tokens: int64 [rows], as of `RankView.index`.
    """

    batch: RoutingBatch
    tokens: np.ndarray
    native: dict[int, torch.Tensor]


@dataclass(frozen=True, eq=False)
class PassCounts:
    """What was replayed in one pass, by sequence of the batch, prompt [:, 0] and rest [:, 1] apart.

    names: B. cells: int64 [B, 2], on the host. experts: int64 [2 * B], those outside the native
    top-k, on the device. witness: None behind the first passes of a step.
    """

    names: tuple[RolloutId, ...]
    cells: np.ndarray
    experts: torch.Tensor
    witness: Witness | None


class Microbatch:
    """One batch bound to this rank, for one forward pass through one model chunk.

    input_ids: what the chunk is fed, None where it is fed hidden states. record: the pass is native
    and its choice is remembered; to_logits: and its margins, see `megatron_margins`. witnesses:
    layers whose native choice is remembered while replaying. step: the step that it was made in.
    """

    def __init__(
        self,
        batch: RoutingBatch,
        view: RankView,
        binding: Binding,
        layers: tuple[int, ...],
        *,
        input_ids: torch.Tensor | None,
        record: bool,
        count: bool,
        to_logits: Mapping[int, ToLogits] | None = None,
        witnesses: Collection[int] = (),
        step: object = None,
    ) -> None:
        self.batch, self.view, self.binding = batch, view, binding
        self.input_ids, self.record, self.count = input_ids, record, count
        self.step = step
        self.called: set[int] = set()
        self.chunks: set[int] = set()  # of which a router has asked, or whose body ran
        self.bodies: set[int] = set()
        self.fed = False
        # a copy, and what tells whether the tensor is still what was copied
        self.ids = None if input_ids is None else input_ids.detach().cpu().numpy().copy()
        self._version = _version(input_ids)
        # of each router row, 0 for padding: which sequence, and whether behind its prompt
        sequence = np.searchsorted(batch.cu_seqlens[1:], view.index, side="right")
        position = view.index - batch.cu_seqlens[sequence]
        self.sequence = sequence
        self.behind_prompt = (position >= batch.prompt_lens[sequence]).astype(np.int64)
        self._witnesses = witnesses
        self.native: dict[int, torch.Tensor] = {}  # int16 or int32 [rows, top_k] by layer
        self.to_logits = to_logits
        self.margins: dict[int, torch.Tensor] = {}  # float32 [rows] by layer
        self._small = torch.int16 if batch.spec.num_experts <= 1 << 15 else torch.int32
        self._row_of = {layer: i for i, layer in enumerate(layers)}
        self._experts = torch.from_numpy(binding.experts)
        rows = len(view.index)
        self._native_rows = torch.from_numpy(binding.native) if len(binding.native) else None
        self._replayed = torch.from_numpy(binding.replayed.astype(np.int64)) if count else None
        self._outside: torch.Tensor | None = None  # int64 [rows], experts of all layers
        self._chosen: dict[int, torch.Tensor] = {}  # of native rows, where they may be asked again
        self.rows = LayerCounts(
            rows_padding=int((view.index < 0).sum()),
            rows_replayed=0 if record else int(binding.replayed.sum()),
            rows_missing=binding.rows_missing,
            rows_stale=binding.rows_stale,
            rows_compared=int(binding.replayed.sum()) if record and count else 0,
        )
        self.num_rows = rows

    def is_fed(self, fed: torch.Tensor) -> bool:
        """Whether `fed` is the declared tensor, and that nobody wrote into it since"""
        unchanged = self._version is not None and self._version == _version(fed)
        return fed is self.input_ids and unchanged

    def digest(self) -> bytes:
        """Of tokens and slots: the same on all stages of a pipeline for the same microbatch"""
        found = hashlib.blake2b(digest_size=8)
        for array in (self.batch.token_ids, self.batch.cu_seqlens, self.view.slots):
            found.update(array.astype(np.int64).tobytes())
        return found.digest()

    def covers(self, layer: int) -> bool:
        return layer in self._row_of

    def answer(
        self, layer: int, ask: Ask, counters: Counters, *, checkpointed: bool, again: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and expert ids int64, both [rows, top_k].

        checkpointed: this pass may be recomputed. again: this is the recomputation, which counts
        nothing and gives just what was given before.
        """
        if ask.scores.device != self._experts.device:
            self._move(ask.scores.device)
        if not again:
            counters.add_rows(self.rows)
        if self.record:
            return self._record(layer, ask, counters, again)
        ids = self._experts[self._row_of[layer]].long()
        native = None
        # groups count by the choice itself, a large top-k by its least score
        counts_by_it = self.count and (ask.group_topk or ask.top_k > _FEW)
        witness = layer in self._witnesses
        if not again and (witness or counts_by_it):
            with torch.no_grad():
                native = ask.native(ask.scores.detach())
        if self._native_rows is not None:
            ids[self._native_rows] = self._native_choice(layer, ask, native, checkpointed, again)
        values = ask.scores.gather(1, ids)
        if native is not None and witness:
            self.native[layer] = native[1].to(self._small)
        if self.count and not again:
            with torch.no_grad():
                self._count(values.detach(), ids, native, ask, counters)
        return values, ids

    def _native_choice(
        self,
        layer: int,
        ask: Ask,
        native: tuple[torch.Tensor, torch.Tensor] | None,
        checkpointed: bool,
        again: bool,
    ) -> torch.Tensor:
        """int64 [native rows, top_k]; the first choice stands, a recomputation could tip over"""
        if again and layer in self._chosen:
            return self._chosen[layer].long()
        rows = self._native_rows
        assert rows is not None
        if native is not None:
            chosen = native[1][rows]
        else:
            with torch.no_grad():
                scores = ask.scores.detach()
                # group-limited top-k knows the number of rows beforehand
                if ask.group_topk:
                    chosen = ask.native(scores)[1][rows]
                else:
                    chosen = ask.native(scores[rows])[1]
        if checkpointed:
            self._chosen[layer] = chosen.to(self._small)
        return chosen

    def _record(
        self, layer: int, ask: Ask, counters: Counters, again: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if again and layer in self.native:
            ids = self.native[layer].long()
            return ask.scores.gather(1, ids), ids
        values, ids = ask.native(ask.scores)
        self.native[layer] = ids.detach().to(self._small)
        if self.to_logits is not None:
            with torch.no_grad():
                scores = ask.scores.detach()
                to_logits = self.to_logits[layer]
                self.margins[layer] = margins_of(scores, values.detach(), ids, to_logits)
        if self.count:
            with torch.no_grad():
                recorded = self._experts[self._row_of[layer]].long()
                if self._native_rows is not None:
                    recorded[self._native_rows] = ids[self._native_rows]
                at_recorded = ask.scores.detach().gather(1, recorded)
                self._count(at_recorded, recorded, (values.detach(), ids), ask, counters)
        return values, ids

    def _count(
        self,
        values: torch.Tensor,
        ids: torch.Tensor,
        native: tuple[torch.Tensor, torch.Tensor] | None,
        ask: Ask,
        counters: Counters,
    ) -> None:
        """values, ids: [rows, top_k], what is compared; native: needed with groups"""
        if native is None:
            ranks = _ranks(ask.scores.detach(), values, self._experts.dtype)
            outside = ranks >= ask.top_k
        elif ask.group_topk:  # an expert of a group not chosen can have a high score
            outside = (ids[:, :, None] != native[1][:, None, :]).all(dim=2)
        else:
            outside = values < native[0].amin(dim=1, keepdim=True)
        assert self._replayed is not None
        experts = outside.sum(dim=1)
        counters.add_outside(experts, self._replayed, ask.top_k, free=self.record)
        self._outside = experts if self._outside is None else self._outside + experts

    def witness(self) -> Witness | None:
        """What was remembered of the native choice, if anything"""
        return Witness(self.batch, self.view.index, self.native) if self.native else None

    def counts(self) -> PassCounts | None:
        """What was counted in this pass, on the device still; None if nothing was."""
        if self._outside is None or self._replayed is None:
            return None
        where = 2 * self.sequence + self.behind_prompt
        size = 2 * len(self.batch)
        cells = np.bincount(where[self.binding.replayed], minlength=size) * len(self.called)
        with torch.inference_mode(False), torch.no_grad():
            experts = torch.zeros(size, dtype=torch.int64, device=self._outside.device)
            where_there = _moved(torch.from_numpy(where), experts.device)
            experts.index_add_(0, where_there, self._outside * self._replayed)
        names = self.batch.rollout_ids
        return PassCounts(names, cells.reshape(-1, 2), experts, self.witness())

    def _move(self, device: torch.device) -> None:
        self._experts = _moved(self._experts, device)
        if self._native_rows is not None:
            self._native_rows = _moved(self._native_rows, device)
        if self._replayed is not None:
            self._replayed = _moved(self._replayed, device)


def _version(tensor: torch.Tensor | None) -> int | None:
    """Counts writes in place; None where torch does not"""
    if tensor is None or tensor.is_inference():
        return None
    return tensor._version


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # or copying waits for all that the device has to do
    return tensor.to(device, non_blocking=True)


def _ranks(scores: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How many of a row's `scores` [rows, experts] are above each of its `values` [rows, top_k].

    dtype: of the result, one that expert ids fit in.
    """
    step = max(1, _AT_A_TIME // (scores.shape[1] * values.shape[1]))
    found = []
    for some, of in zip(scores.split(step), values.split(step), strict=True):
        above = some[:, None, :] > of[:, :, None]  # [rows, top_k, experts]
        # bools would be copied to `dtype` before they are added up
        found.append(above.view(torch.uint8).sum(dim=2, dtype=dtype))
    return torch.cat(found)
