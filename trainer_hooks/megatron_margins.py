"""How near a router was to another choice: its k-th largest logit minus the (k + 1)-th.

A cell whose margin is below the error of a forward pass may be routed differently by any other
program that computes the same model. Routers are asked for a top-k of their scores, so margins are
worked out from these: logits themselves, or a rising function of them that is inverted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from r3.errors import UnsupportedError

ToLogits = Callable[[torch.Tensor], torch.Tensor]


def _of_sqrtsoftplus(scores: torch.Tensor) -> torch.Tensor:
    squares = scores * scores  # log(1 + exp(logit))
    return squares + torch.log(-torch.expm1(-squares))


# softmax scores give logits up to a number that is the same for all experts of a row
_INVERSE: dict[str, ToLogits] = {
    "softmax": torch.log,
    "sigmoid": torch.logit,
    "sqrtsoftplus": _of_sqrtsoftplus,
}


def to_logits(routers: Mapping[int, Any]) -> dict[int, ToLogits]:
    """By decoder layer: from what a router takes the top-k of to its logits.

    Raises UnsupportedError, naming layer and setting, for a router whose choice is not the top-k of
    its logits, and for one that always chooses all experts.
    """
    found: dict[int, ToLogits] = {}
    for layer, router in routers.items():
        config = router.config
        for is_so, what in (
            (router.expert_bias is not None, "moe_router_enable_expert_bias is True: a bias"),
            (
                bool(config.moe_router_group_topk),
                f"moe_router_group_topk is {config.moe_router_group_topk}: a choice of groups",
            ),
        ):
            if is_so:
                raise UnsupportedError(
                    f"router of decoder layer {layer}: {what} decides besides the logits, expected "
                    "logits alone for margins: record without margins=True"
                )
        if router.topk == router.num_experts:
            raise UnsupportedError(
                f"router of decoder layer {layer}: moe_router_topk is {router.topk}, all of its "
                "experts, expected fewer for margins: record without margins=True"
            )
        kind = router.score_function
        after = kind == "softmax" and not config.moe_router_pre_softmax
        found[layer] = (lambda scores: scores) if after else _INVERSE[kind]
    return found


def margins_of(
    scores: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, logits_of: ToLogits
) -> torch.Tensor:
    """float32 [rows], at least 0; NaN where rounding of the scores hides it (a sigmoid of 1).

    scores [rows, experts] and their top-k, values and ids [rows, top_k]; logits_of: of `to_logits`.
    """
    chosen = values.amin(dim=1)
    other = scores.scatter(1, ids, -torch.inf).amax(dim=1)
    wide = torch.float64 if scores.dtype is torch.float64 else torch.float32
    found = logits_of(chosen.to(wide)) - logits_of(other.to(wide))
    # equal scores may stand for infinite logits, whose difference is not a number
    found = torch.where(chosen == other, 0.0, found.clamp_min(0))
    return torch.where(found.isfinite(), found, torch.nan).float()
