"""Reads which experts the MoE layers of a live Megatron-core model really use.

An independent witness of replay: it looks at the map that each router hands to its layer, and
shares nothing with the code that chose it. Also records a trainer's own routing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from r3.errors import ReplayError
from r3.trainer_hooks.megatron_routers import named_routers


@contextmanager
def record_routing(model_chunks: Any) -> Iterator[list[np.ndarray]]:
    """Yield a list that receives one array per forward pass through all MoE layers.

    Arrays are int64 [rows, MoE layers, top_k], ids ascending, rows in router order (s-major for
    [b, s] input), layers in ascending decoder order. What is recomputed is left out. Copies to the
    host, so it synchronises.
    Raises ReplayError if a row has not exactly top_k experts (tokens were dropped), or if a layer
    runs twice before the others have run.
    """
    routers = named_routers(model_chunks)
    from r3.trainer_hooks.megatron_checks import in_backward

    forwards: list[np.ndarray] = []
    seen: dict[int, np.ndarray] = {}

    def hook_of(layer: int) -> Any:
        def hook(router: Any, _inputs: Any, output: Any) -> None:
            if in_backward():  # recomputed
                return
            used = output[1].detach().cpu().numpy().astype(bool)  # [rows, num_experts]
            per_row = used.sum(axis=1)
            if (per_row != router.topk).any():
                row = int((per_row != router.topk).argmax())
                raise ReplayError(
                    f"layer {layer}: row {row} is sent to {int(per_row[row])} experts, expected "
                    f"{router.topk}"
                )
            if layer in seen:
                raise ReplayError(
                    f"layer {layer}: second forward pass before layers "
                    f"{sorted(set(routers) - set(seen))} had their first"
                )
            seen[layer] = np.nonzero(used)[1].reshape(len(used), -1)
            if len(seen) == len(routers):
                forwards.append(np.stack([seen[i] for i in sorted(seen)], axis=1))
                seen.clear()

        return hook

    handles = [router.register_forward_hook(hook_of(i)) for i, router in routers.items()]
    try:
        yield forwards
    finally:
        for handle in handles:
            handle.remove()
