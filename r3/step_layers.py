"""Routing of a training step by layer, as sums: engine against trainer, and expert load.

What r3.step_state knows of routing, and how it travels between ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3 import json_fields as of
from r3.batch import RoutingBatch
from r3.differences import Differences
from r3.disagreement import RoutingDisagreement
from r3.errors import TraceError
from r3.json_fields import brief
from r3.load import expert_load


@dataclass(frozen=True, eq=False)
class LayerCounts:
    """Sums over the rows that both sides have, in the L MoE layers of a stage with E experts.

    tokens: rows compared. differing: of these, with a differing layer. cells, experts: int64 [L],
    as in RoutingDisagreement. load_a, load_b: int64 [L, E], how often engine and trainer chose each
    expert. Without the trainer's routing nothing is compared, and load_a has all the engine's rows;
    so a sum of batches with and without it has load_a of more rows than load_b.
    """

    top_k: int
    tokens: int
    differing: int
    cells: np.ndarray
    experts: np.ndarray
    load_a: np.ndarray
    load_b: np.ndarray

    def __add__(self, other: LayerCounts) -> LayerCounts:
        if (self.top_k, self.load_a.shape) != (other.top_k, other.load_a.shape):
            raise TraceError(
                f"cannot add counts of top {other.top_k} of {other.load_a.shape[1]} experts to "
                f"counts of top {self.top_k} of {self.load_a.shape[1]}"
            )
        names = [f.name for f in dataclasses.fields(self) if f.name != "top_k"]
        return LayerCounts(self.top_k, *(getattr(self, n) + getattr(other, n) for n in names))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `from_dict` makes the same counts."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(self).items()}

    @classmethod
    def from_dict(cls, found: dict[str, Any], layers: Sequence[int]) -> LayerCounts:
        """Of what has passed CHECK. Raises ValueError for counts that do not fit each other or the
        `layers`."""
        arrays = {k: np.array(v, np.int64) for k, v in found.items() if type(v) is list}
        made = cls(**{**found, **arrays})
        if not len(layers) or (np.diff(layers) <= 0).any():
            raise ValueError(f"layers {brief(layers)}, expected one or more, ascending")
        shapes = [x.shape for x in (made.cells, made.experts, made.load_a, made.load_b)]
        experts = shapes[2][-1]
        if shapes != [(len(layers),)] * 2 + [(len(layers), experts)] * 2:
            raise ValueError(f"counts of shapes {shapes}, expected those of {len(layers)} layers")
        if not 1 <= made.top_k <= experts:
            raise ValueError(f"top {made.top_k} of {experts} experts")
        if made.differing > made.tokens or (made.cells > made.tokens).any():
            raise ValueError(f"more that differ than the {made.tokens} tokens compared")
        return made


# of LayerCounts.to_dict()
CHECK = of.fields(
    {
        **dict.fromkeys(("top_k", "tokens", "differing"), of.count),
        **dict.fromkeys(("cells", "experts"), of.listed(of.count)),
        **dict.fromkeys(("load_a", "load_b"), of.listed(of.listed(of.count))),
    },
    of.nothing,
)


def compare(
    batch: RoutingBatch, native: RoutingBatch | None
) -> tuple[dict[tuple[int, ...], LayerCounts], np.ndarray, np.ndarray]:
    """Counts by layers; bool [T], rows compared; int64 [T], in how many layers each differs."""
    if native is None:
        nothing = np.zeros(batch.num_tokens, np.int64)
        return {batch.spec.moe_layers: _load_only(batch)}, nothing.astype(bool), nothing
    spec, layers = native.spec, native.spec.moe_layers
    missing = set(layers) - set(batch.spec.moe_layers)
    expected = dataclasses.replace(batch.spec, moe_layers=layers) if not missing else batch.spec
    if spec != expected:
        raise TraceError(f"native has routing of {spec}, expected layers of {batch.spec}")
    if not (
        np.array_equal(native.token_ids, batch.token_ids)
        and np.array_equal(native.cu_seqlens, batch.cu_seqlens)
    ):
        raise TraceError("native is of other tokens than the batch, expected the same sequences")
    a, b = batch.routed_experts, native.routed_experts
    if layers != batch.spec.moe_layers:
        a = a[:, [batch.spec.moe_layers.index(i) for i in layers]]
    valid = batch.valid & native.valid
    differences = Differences.between(a, b, valid, spec)
    found = RoutingDisagreement.of(differences, a, b, batch.cu_seqlens)
    counts = LayerCounts(
        top_k=spec.top_k,
        tokens=found.tokens,
        differing=found.tokens - int(found.layers_per_token[0]),
        cells=found.cells,
        experts=found.experts,
        load_a=found.load_a,
        load_b=found.load_b,
    )
    return {layers: counts}, valid, differences.layers_per_row


def _load_only(batch: RoutingBatch) -> LayerCounts:
    load = expert_load(batch.routed_experts, batch.valid, batch.spec)
    none = np.zeros(len(load), np.int64)
    return LayerCounts(batch.spec.top_k, 0, 0, none, none, load, np.zeros_like(load))
