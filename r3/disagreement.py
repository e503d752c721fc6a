"""How often two routings of the same tokens differ, with the words kept apart.

A cell is one token in one layer; sets are compared, order within the top_k carries nothing.
  cell_disagreement    share of cells whose expert set differs
  expert_disagreement  experts of one side that the other lacks / (cells * top_k)
  token_disagreement   share of tokens with at least one differing layer
Only rows that both sides have count; the caller says which (`valid`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r3.checks import check_distinct, check_shape_and_range
from r3.errors import TraceError
from r3.spec import RouterSpec

_CHUNK = 4096  # rows compared at a time, so that the [rows, layers, k, k] table stays small


@dataclass(frozen=True, eq=False)
class RoutingDisagreement:
    """Counts that add up over batches (`+`); shares are derived.

    tokens: rows compared. cells, experts: int64 [MoE layers], differing cells and experts per
    layer. layers_per_token: int64 [MoE layers + 1], tokens with 0, 1, 2, ... differing layers.
    """

    spec: RouterSpec
    tokens: int
    cells: np.ndarray
    experts: np.ndarray
    layers_per_token: np.ndarray

    @classmethod
    def zero(cls, spec: RouterSpec) -> RoutingDisagreement:
        """Nothing compared yet: where a sum starts."""
        n = len(spec.moe_layers)
        return cls(spec, 0, np.zeros(n, int), np.zeros(n, int), np.zeros(n + 1, int))

    @classmethod
    def between(
        cls, a: np.ndarray, b: np.ndarray, valid: np.ndarray, spec: RouterSpec
    ) -> RoutingDisagreement:
        """Compare ids `a` and `b` [rows, MoE layers, top_k] on the rows where bool `valid` [rows].

        Raises TraceError for shapes that do not fit the spec and each other, and for rows that
        are no sets of experts.
        """
        for name, ids in (("first routing", a), ("second routing", b)):
            check_shape_and_range(ids, valid, spec, name)
            check_distinct(ids, valid, spec, name)
        total = cls.zero(spec)
        rows = np.flatnonzero(valid)
        for i in range(0, len(rows), _CHUNK):
            part = rows[i : i + _CHUNK]
            shared = (a[part][..., :, None] == b[part][..., None, :]).any(axis=-1).sum(axis=-1)
            missing = spec.top_k - shared  # [rows, layers]
            differs = missing > 0
            total += cls(
                spec,
                len(part),
                differs.sum(axis=0),
                missing.sum(axis=0),
                np.bincount(differs.sum(axis=1), minlength=len(spec.moe_layers) + 1),
            )
        return total

    def __add__(self, other: RoutingDisagreement) -> RoutingDisagreement:
        if other.spec != self.spec:
            raise TraceError(f"cannot add counts of {other.spec} to counts of {self.spec}")
        return RoutingDisagreement(
            self.spec,
            self.tokens + other.tokens,
            self.cells + other.cells,
            self.experts + other.experts,
            self.layers_per_token + other.layers_per_token,
        )

    @property
    def cell_disagreement(self) -> float:
        return _share(self.cells.sum(), self.tokens * len(self.cells))

    @property
    def cell_disagreement_per_layer(self) -> list[float]:
        return [_share(x, self.tokens) for x in self.cells]

    @property
    def expert_disagreement(self) -> float:
        return _share(self.experts.sum(), self.tokens * len(self.cells) * self.spec.top_k)

    @property
    def token_disagreement(self) -> float:
        return _share(self.layers_per_token[1:].sum(), self.tokens)


def _share(part: int, whole: int) -> float:
    return float(part) / whole if whole else float("nan")
