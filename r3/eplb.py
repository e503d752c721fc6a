"""Physical expert ids, as an expert-parallel load balancer (EPLB) deals them, to logical ones.

Such an engine keeps copies of busy experts in further slots, so a kernel's ids number slots and
go beyond the experts of the model. The trainer knows only the model's own, the logical ids.
"""

from __future__ import annotations

import numpy as np

from r3.columns import as_array
from r3.errors import TraceError
from r3.spec import RouterSpec


def to_logical(
    ids: np.ndarray, valid: np.ndarray, physical_to_logical: object, spec: RouterSpec, where: str
) -> np.ndarray:
    """The experts of the slots `ids` [rows, MoE layers, top_k].

    physical_to_logical: integers [slots] or [MoE layers, slots], the expert in each slot.
    Rows that are not valid [rows] come back as they are, and so does -1, which is no slot. Ids
    of another shape or kind, too: the checks that follow refuse them. Raises TraceError.
    """
    slots = as_array(physical_to_logical, f"{where}: physical_to_logical")
    layers = len(spec.moe_layers)
    if (
        slots.dtype.kind not in "iu"
        or slots.ndim not in (1, 2)
        or not slots.size
        or (slots.ndim == 2 and len(slots) != layers)
    ):
        raise TraceError(
            f"{where}: physical_to_logical has shape {list(slots.shape)} and dtype {slots.dtype}, "
            f"expected integers [physical slots] or [MoE layers={layers}, physical slots]"
        )
    per_layer = np.broadcast_to(slots, (layers, slots.shape[-1]))
    bad = (per_layer < 0) | (per_layer >= spec.num_experts)
    if bad.any():
        layer, slot = (int(x) for x in np.argwhere(bad)[0])
        raise TraceError(
            f"{where}: physical_to_logical, layer {spec.moe_layers[layer]}: slot {slot} holds "
            f"expert {per_layer[layer, slot]}, expected 0..{spec.num_experts - 1}"
        )
    if ids.dtype.kind not in "iu" or ids.shape != (len(valid), layers, spec.top_k):
        return ids
    ids = ids.astype(np.int64)
    inside = (ids >= 0) & (ids < per_layer.shape[1])
    outside = ~inside & (ids != -1) & valid[:, None, None]
    if outside.any():
        row, layer, k = (int(x) for x in np.argwhere(outside)[0])
        raise TraceError(
            f"{where}: row {row}, layer {spec.moe_layers[layer]}: physical id "
            f"{ids[row, layer, k]}, expected 0..{per_layer.shape[1] - 1} by physical_to_logical"
        )
    mapped = per_layer[np.arange(layers)[:, None], np.where(inside, ids, 0)]
    return np.where(inside & valid[:, None, None], mapped, ids)
