"""How often each expert was chosen, and how uneven that is. Rows without a route do not count."""

from __future__ import annotations

import numpy as np

from r3.spec import RouterSpec

_CHUNK = 1 << 14  # rows counted together


def expert_load(ids: np.ndarray, valid: np.ndarray, spec: RouterSpec) -> np.ndarray:
    """int64 [MoE layers, experts]: how many of the valid rows (bool [rows]) of `ids` [rows, MoE
    layers, top_k] chose each expert."""
    load = np.zeros((len(spec.moe_layers), spec.num_experts), np.int64)
    for start in range(0, len(ids), _CHUNK):
        rows = slice(start, start + _CHUNK)
        part = ids[rows] if valid[rows].all() else ids[rows][valid[rows]]
        for i, counts in enumerate(load):
            counts += np.bincount(part[:, i].ravel(), minlength=len(counts))
    return load


def max_violation(load: np.ndarray) -> np.ndarray:
    """float64 [layers]: largest / mean load - 1 of each layer of counts [layers, experts], NaN for
    a layer without any.

    MaxVio of Wang et al. 2024, arXiv 2408.15664.
    """
    with np.errstate(invalid="ignore"):
        return load.max(axis=1) / load.mean(axis=1) - 1
