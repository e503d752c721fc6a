"""Whether the mismatch of log-probabilities sits in the tokens that were routed differently.

Tokens are told apart by the number of layers in which the forward pass that produced them was
routed differently: row t of a sequence produces token t + 1. A token's own pass is not all that it
depends on, since attention carries what happened to earlier ones; so tokens without a differing
layer have a mismatch too, and replay can lower it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3.shares import share

_TAU = 2.0  # of the extreme tokens counted here


@dataclass(frozen=True, eq=False)
class Attribution:
    """Sums by number of differing layers, float64 [layers + 1]; `+` adds those of other tokens.

    tokens; k3, size: sums of r - 1 - log r and of |log r|; largest: the largest |log r|; extreme:
    tokens with max(r, 1/r) > 2. Each [2, layers + 1]: without replay, with it; the second is NaN
    where replay is not known.
    """

    tokens: np.ndarray
    k3: np.ndarray
    size: np.ndarray
    largest: np.ndarray
    extreme: np.ndarray

    @classmethod
    def of(
        cls, layers: np.ndarray, native: np.ndarray, replay: np.ndarray | None, num_layers: int
    ) -> Attribution:
        """layers: int [n], differing layers; native, replay: log-ratios, finite float64 [n]."""
        size = num_layers + 1
        sums = np.full((4, 2, size), np.nan)
        for side, log_ratio in enumerate((native, replay)):
            if log_ratio is None:
                continue
            far = np.abs(log_ratio)
            with np.errstate(over="ignore"):
                k3 = np.expm1(log_ratio) - log_ratio
            for i, values in enumerate((k3, far, far > math.log(_TAU))):
                sums[i, side] = np.bincount(layers, weights=values, minlength=size)
            sums[3, side] = 0
            np.maximum.at(sums[3, side], layers, far)
        tokens = np.bincount(layers, minlength=size)
        return cls(tokens, sums[0], sums[1], sums[3], sums[2])

    def __add__(self, other: Attribution) -> Attribution:
        return Attribution(
            self.tokens + other.tokens,
            self.k3 + other.k3,
            self.size + other.size,
            np.maximum(self.largest, other.largest),
            self.extreme + other.extreme,
        )

    def to_dict(self) -> dict[str, Any] | None:
        """The block "attribution" of a comparison; None without tokens."""
        total, kl = int(self.tokens.sum()), self.k3.sum(axis=1)
        if not total:
            return None
        groups = []
        for low, high in _octaves(len(self.tokens)):
            part = slice(low, high + 1)
            n = int(self.tokens[part].sum())
            if not n:
                continue
            group: dict[str, Any] = {
                "layers": str(low) if low == high else f"{low}-{high}",
                "tokens": n,
                "token_share": n / total,
                "kl_share_native": share(self.k3[0, part].sum(), kl[0]),
            }
            for side, name in enumerate(("native", "replay")):
                group |= {
                    f"kl_k3_{name}": self.k3[side, part].sum() / n,
                    f"abs_logratio_mean_{name}": self.size[side, part].sum() / n,
                    f"abs_logratio_max_{name}": self.largest[side, part].max(),
                    f"extreme_2_{name}": self.extreme[side, part].sum() / n,
                }
            groups.append(group)
        return {
            "by_layers": groups,
            "token_share_differing": self.tokens[1:].sum() / total,
            "kl_share_differing": share(self.k3[0, 1:].sum(), kl[0]),
            "kl_removed_by_replay": 1 - share(kl[1], kl[0]),
        }


def _octaves(size: int) -> list[tuple[int, int]]:
    """0, 1, 2, 3-4, 5-8, ... to size - 1"""
    found, low = [(0, 0)], 1
    while low < size:
        high = 1 << (low - 1).bit_length()
        found.append((low, min(high, size - 1)))
        low = high + 1
    return found
