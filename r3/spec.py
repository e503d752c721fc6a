"""What a model's routers look like: RouterSpec. Model configs are read in r3.families.

Every array of expert ids in this project has its layer axis in the order of
`RouterSpec.moe_layers`, so dense layers never appear as rows of zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3.errors import SpecError
from r3.families import router_fields

MAX_EXPERTS = 65536
MAX_TOP_K = 64
MAX_PAIRS = 1 << 24  # of a layer and an expert: what is counted per pair stays small


@dataclass(frozen=True)
class RouterSpec:
    """The routers of one model.

    num_experts: routed experts per MoE layer (shared experts are not routed and do not count).
    top_k: experts chosen per token and layer.
    moe_layers: 0-based decoder layer indices that have a router, ascending.
    num_layers: decoder layers in all, dense ones included.
    score_function: "softmax" or "sigmoid".
    num_groups, topk_groups: group-limited routing; None where there is none.

    Raises SpecError for values that describe no model.
    """

    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]
    num_layers: int
    score_function: str = "softmax"
    num_groups: int | None = None
    topk_groups: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_layers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise SpecError(f"RouterSpec.{name} is {value!r}, expected a positive integer")
            object.__setattr__(self, name, int(value))
        try:
            layers = tuple(self.moe_layers)
        except TypeError:
            raise SpecError(
                f"RouterSpec.moe_layers is {self.moe_layers!r}, expected layer indices"
            ) from None
        if any(isinstance(x, bool) or not isinstance(x, int | np.integer) for x in layers):
            raise SpecError(f"RouterSpec.moe_layers holds {layers!r}, expected integers")
        layers = tuple(int(x) for x in layers)
        object.__setattr__(self, "moe_layers", layers)
        if self.num_experts > MAX_EXPERTS:
            raise SpecError(f"num_experts is {self.num_experts}, expected at most {MAX_EXPERTS}")
        if self.top_k > min(self.num_experts, MAX_TOP_K):
            raise SpecError(
                f"top_k is {self.top_k}, expected at most num_experts={self.num_experts} "
                f"and at most {MAX_TOP_K}"
            )
        if len(layers) * self.num_experts > MAX_PAIRS:
            raise SpecError(
                f"{len(layers)} MoE layers of {self.num_experts} experts, expected at most "
                f"{MAX_PAIRS} pairs of a layer and an expert"
            )
        if not layers:
            raise SpecError(
                "RouterSpec.moe_layers is empty: a model without routers has no routing"
            )
        if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.num_layers:
            raise SpecError(
                f"RouterSpec.moe_layers is {layers}, expected ascending layer indices without "
                f"repeats in 0..{self.num_layers - 1}"
            )
        if self.score_function not in ("softmax", "sigmoid"):
            raise SpecError(
                f"score_function is {self.score_function!r}, expected 'softmax' or 'sigmoid'"
            )
        if (self.num_groups is None) != (self.topk_groups is None):
            raise SpecError("num_groups and topk_groups must be given together")
        for name in ("num_groups", "topk_groups") if self.num_groups is not None else ():
            value = getattr(self, name)
            most = self.num_experts if name == "num_groups" else self.num_groups or 0
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise SpecError(f"RouterSpec.{name} is {value!r}, expected an integer or None")
            if not 1 <= value <= most:
                raise SpecError(f"RouterSpec.{name} is {value}, expected 1..{most}")
            object.__setattr__(self, name, int(value))

    @property
    def dtype(self) -> np.dtype:
        """The narrowest unsigned type for an expert id: uint8 to 256 experts, else uint16."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    def select_moe_layers(self, ids: np.ndarray) -> np.ndarray:
        """Bring the layer axis of `ids` [rows, layers, top_k] to the MoE layers.

        Engines return either the MoE layers only or all `num_layers`, with dense layers as zeros.
        Any other shape is returned as it is, for the checks of RoutingTrace to refuse.
        """
        if ids.ndim == 3 and ids.shape[1] == self.num_layers != len(self.moe_layers):
            return ids[:, list(self.moe_layers)]
        return ids

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for headers; `RouterSpec.from_dict` reads them back.

        Fields that are None are left out, so that a field added later does not change the headers
        and digests of models that do not have it.
        """
        values = dataclasses.asdict(self) | {"moe_layers": list(self.moe_layers)}
        return {k: v for k, v in values.items() if v is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RouterSpec:
        """Inverse of `to_dict`. Raises SpecError for missing, unknown or impossible fields."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = set(values) - known
        if unknown:
            raise SpecError(f"RouterSpec has no field {sorted(unknown)[0]!r}")
        try:
            return cls(**{**values, "moe_layers": tuple(values["moe_layers"])})
        except (KeyError, TypeError) as e:
            raise SpecError(f"not a RouterSpec: {e}") from None

    @classmethod
    def from_hf_config(cls, config: Any) -> RouterSpec:
        """The routers of a Hugging Face model, from its config object or config.json as a mapping.

        `r3.families` says which families are known; the language model of a multimodal config is
        found. Raises UnsupportedError for a dense model and for a family that is not known; the
        message says which fields to give by hand. Raises SpecError for a missing or malformed
        field.
        """
        return cls(**router_fields(config))
