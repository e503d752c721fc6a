"""What `MegatronReplay` puts into a model: both are idle in a copy or a pickle of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from r3.trainer_hooks.megatron_microbatch import Ask, Counters, TopK

if TYPE_CHECKING:
    from r3.trainer_hooks.megatron import MegatronReplay


class LayerReplay:
    """What sits in `router.router_replay`; Megatron only ever calls `get_replay_topk`.

    A deep copy or a pickle of it is None: a copied model (a reference model, a checkpoint) routes
    natively and shares no state with this one.
    """

    belongs_to_r3 = True

    def __init__(self, owner: MegatronReplay, layer: int) -> None:
        self._owner, self._layer = owner, layer
        self.counters = Counters()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [rows, topk] and expert ids int64 [rows, topk] for `scores` [rows, experts]."""
        ask = Ask(scores, topk, num_groups, group_topk, default_compute_topk)
        return self._owner.answer(self._layer, ask, self.counters)


class Hook:
    """A forward hook that is idle in a copy of its module, where it would reach this model."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if self._function is not None:
            self._function(*args)

    def __deepcopy__(self, _memo: object) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()
