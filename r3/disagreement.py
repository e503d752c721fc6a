"""How often two routings of the same tokens differ, with the words kept apart.

A cell is one token in one layer; sets are compared, order within the top_k carries nothing.
  cell_disagreement    share of cells whose expert set differs (the router level of Ma et al. 2025,
                       arXiv 2510.11370)
  expert_disagreement  experts of one side that the other lacks / (cells * top_k)
  token_disagreement   share of tokens with at least one differing layer; layers_per_token is how
                       many tokens have 0, 1, 2, ... (their token level)
  sequence_level       mean over the tokens of a sequence of the number of differing layers
Only rows that both sides have count, in every figure: a filler is not a choice.

Counts add up (`+`) over batches, ranks and steps, and do not show how they were split.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3.batch import check_cu_seqlens
from r3.checks import check_distinct, check_shape_and_range
from r3.differences import Differences
from r3.disagreement_parts import MARGIN_EDGES, Positions, Swaps, by_margin, sequence_means
from r3.errors import TraceError
from r3.load import expert_load, max_violation
from r3.quantiles import Quantiles
from r3.shares import share
from r3.spec import RouterSpec

_MOST_SWAPS = 50  # shown
_MOST_LOADS = 1 << 17  # layers times experts of which each one's load is shown


@dataclass(frozen=True, eq=False)
class RoutingDisagreement:
    """Counts of a comparison of side a with side b; shares are derived.

    tokens: rows compared. left_out: rows that have no route on one side, or on both. Of the MoE
    layers L and experts E:
    cells, experts: int64 [L], differing cells and experts. layers_per_token: int64 [L + 1], tokens
    with 0, 1, 2, ... differing layers. top1: int64 [L], cells whose first expert differs; None
    where the order of experts is not known. load_a, load_b: int64 [L, E], how often each expert was
    chosen. swaps: cells that differ in just one expert. positions: rows and differing cells by
    position in the sequence. margins: int64 [2, bins], all cells and differing cells by margin
    between MARGIN_EDGES; None where it is not known.
    sequences: the mean number of differing layers of each sequence; sequences_sum: their sum.
    """

    spec: RouterSpec
    tokens: int
    left_out: int
    cells: np.ndarray
    experts: np.ndarray
    layers_per_token: np.ndarray
    top1: np.ndarray | None
    load_a: np.ndarray
    load_b: np.ndarray
    swaps: Swaps
    positions: Positions
    margins: np.ndarray | None
    sequences: Quantiles
    sequences_sum: float

    @classmethod
    def between(
        cls,
        a: np.ndarray,
        b: np.ndarray,
        valid: np.ndarray,
        spec: RouterSpec,
        *,
        cu_seqlens: np.ndarray | None = None,
        margins: np.ndarray | None = None,
        ordered: bool = False,
    ) -> RoutingDisagreement:
        """Compare ids `a` and `b` [rows, MoE layers, top_k] on the rows where bool `valid` [rows].

        cu_seqlens: int64 [sequences + 1], for rows that are the packed tokens of a RoutingBatch,
        where the last token of each sequence has no route and is not missed; None: the rows of one
        trace. margins: float [rows, MoE layers], how far the k-th router logit of a side is above
        the next, NaN where not known. ordered: the first expert of each cell is the one with the
        largest weight, on both sides.

        Raises TraceError for shapes that do not fit the spec and each other, and for rows that
        are no sets of experts.
        """
        if not isinstance(valid, np.ndarray) or valid.ndim != 1 or valid.dtype != bool:
            raise TraceError(f"valid is {reprlib.repr(valid)}, expected a bool array [rows]")
        for name, ids in (("first routing", a), ("second routing", b)):
            if not isinstance(ids, np.ndarray):
                raise TraceError(f"{name} is a {type(ids).__name__}, expected a numpy array")
            check_shape_and_range(ids, valid, spec, name)
            check_distinct(ids, valid, spec, name)
        if cu_seqlens is not None:
            cu_seqlens = np.asarray(cu_seqlens)
            check_cu_seqlens(cu_seqlens, len(valid))
        if margins is not None:
            if margins.shape != (len(valid), len(spec.moe_layers)):
                raise TraceError(
                    f"margins have shape {list(margins.shape)}, expected [rows={len(valid)}, "
                    f"MoE layers={len(spec.moe_layers)}]"
                )
            if (margins < 0).any():
                raise TraceError(f"a margin is {np.nanmin(margins)}, expected 0 or more, or NaN")
        a, b = (ids.astype(spec.dtype, copy=False) for ids in (a, b))
        found = Differences.between(a, b, valid, spec)
        return cls.of(found, a, b, cu_seqlens, margins, ordered)

    @classmethod
    def of(
        cls,
        found: Differences,
        a: np.ndarray,
        b: np.ndarray,
        cu_seqlens: np.ndarray | None,
        margins: np.ndarray | None = None,
        ordered: bool = False,
    ) -> RoutingDisagreement:
        """Count differences that were found already; arguments as of `between`, not checked."""
        spec, valid = found.spec, found.valid
        layers, experts = len(spec.moe_layers), spec.num_experts
        per_row = found.layers_per_row
        load_a = expert_load(a, valid, spec)
        owner = found.layer[found.lost_cell] * experts
        size = layers * experts
        change = np.bincount(owner + found.gained, minlength=size)
        change -= np.bincount(owner + found.lost, minlength=size)
        compared = np.flatnonzero(valid)
        missed = ~valid
        if cu_seqlens is None:
            cu_seqlens = np.array([0, len(valid)])
        else:
            missed[cu_seqlens[1:] - 1] = False
        means = sequence_means(per_row, valid, cu_seqlens)
        return cls(
            spec=spec,
            tokens=len(compared),
            left_out=int(missed.sum()),
            cells=np.bincount(found.layer, minlength=layers),
            experts=np.bincount(found.layer, weights=found.missing, minlength=layers).astype(int),
            layers_per_token=np.bincount(per_row[valid], minlength=layers + 1),
            top1=(a[valid, :, 0] != b[valid, :, 0]).sum(axis=0) if ordered else None,
            load_a=load_a,
            load_b=load_a + change.reshape(layers, experts),
            swaps=Swaps.of(found),
            positions=Positions.of(found, compared, cu_seqlens),
            margins=None if margins is None else by_margin(found, margins),
            sequences=Quantiles.of(means),
            sequences_sum=float(means.sum()),
        )

    @classmethod
    def zero(cls, spec: RouterSpec) -> RoutingDisagreement:
        """Nothing compared yet: where a sum starts."""
        nothing = np.zeros((0, len(spec.moe_layers), spec.top_k), spec.dtype)
        return cls.between(nothing, nothing, np.zeros(0, bool), spec)

    def __add__(self, other: RoutingDisagreement) -> RoutingDisagreement:
        if other.spec != self.spec:
            raise TraceError(f"cannot add counts of {other.spec} to counts of {self.spec}")
        pair = (self, other)
        # top1 is of all cells or not known; margins are of the cells where they are
        unknown = any(x.top1 is None and x.tokens for x in pair)
        top1 = None if unknown else _sum(x.top1 for x in pair)
        margins = _sum(x.margins for x in pair)
        return RoutingDisagreement(
            self.spec,
            self.tokens + other.tokens,
            self.left_out + other.left_out,
            self.cells + other.cells,
            self.experts + other.experts,
            self.layers_per_token + other.layers_per_token,
            top1,
            self.load_a + other.load_a,
            self.load_b + other.load_b,
            self.swaps + other.swaps,
            self.positions + other.positions,
            margins,
            self.sequences + other.sequences,
            self.sequences_sum + other.sequences_sum,
        )

    @property
    def cell_disagreement(self) -> float:
        return share(self.cells.sum(), self.tokens * len(self.cells))

    @property
    def cell_disagreement_per_layer(self) -> list[float]:
        return [share(x, self.tokens) for x in self.cells]

    @property
    def expert_disagreement(self) -> float:
        return share(self.experts.sum(), self.tokens * len(self.cells) * self.spec.top_k)

    @property
    def token_disagreement(self) -> float:
        return share(self.layers_per_token[1:].sum(), self.tokens)

    @property
    def layers_per_token_mean(self) -> float:
        """Differing layers of a token, on average."""
        return share(self.cells.sum(), self.tokens)

    @property
    def sequence_level(self) -> dict[str, float]:
        """Over sequences: mean number of differing layers per token, its mean and quantiles."""
        q = self.sequences
        return {
            "mean": share(self.sequences_sum, q.count),
            "p50": q.quantile(0.5),
            "p90": q.quantile(0.9),
            "p99": q.quantile(0.99),
            "max": q.quantile(1.0),
        }

    def to_dict(self) -> dict[str, Any]:
        """Shares and counts as plain values, NaN for shares of nothing; see docs/metrics.md."""
        k, cells = self.spec.top_k, self.tokens * len(self.cells)
        vio_a, vio_b = max_violation(self.load_a), max_violation(self.load_b)
        return {
            "rows": self.tokens,
            "rows_left_out": self.left_out,
            "cell_disagreement": self.cell_disagreement,
            "expert_disagreement": self.expert_disagreement,
            "token_disagreement": self.token_disagreement,
            "layers_per_token_mean": self.layers_per_token_mean,
            "layers_per_token": self.layers_per_token.tolist(),
            "sequence_level": self.sequence_level,
            "top1_changed": None if self.top1 is None else share(self.top1.sum(), cells),
            "max_vio_a": float(vio_a.mean()),
            "max_vio_b": float(vio_b.mean()),
            "layers": [
                {
                    "layer": layer,
                    "cell_disagreement": share(self.cells[i], self.tokens),
                    "expert_disagreement": share(self.experts[i], self.tokens * k),
                    "top1_changed": None if self.top1 is None else share(self.top1[i], self.tokens),
                    "max_vio_a": float(vio_a[i]),
                    "max_vio_b": float(vio_b[i]),
                }
                for i, layer in enumerate(self.spec.moe_layers)
            ],
            "positions": {
                "width": self.positions.width,
                "rows": self.positions.rows.tolist(),
                "cell_disagreement": [
                    [share(x, rows) for x in row]
                    for rows, row in zip(self.positions.rows, self.positions.cells, strict=True)
                ],
            },
            "margins": None
            if self.margins is None
            else {
                "edges": list(MARGIN_EDGES),
                "cells": self.margins[0].tolist(),
                "differing": self.margins[1].tolist(),
            },
            "load_a": self.load_a.tolist() if self.load_a.size <= _MOST_LOADS else None,
            "load_b": self.load_b.tolist() if self.load_b.size <= _MOST_LOADS else None,
            "swaps": [
                {"layer": self.spec.moe_layers[i], "from": x, "to": y, "cells": n}
                for i, x, y, n in self.swaps.most_frequent(_MOST_SWAPS)
            ],
            "swapped_cells": self.swaps.total,
        }


def _sum(counts: Iterable[np.ndarray | None]) -> np.ndarray | None:
    known = [x for x in counts if x is not None]
    return sum(known[1:], known[0]) if known else None
