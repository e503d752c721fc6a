"""What every format has in common when it is written: a RoutingBatch, sequence by sequence.

Here missing rows get the value that stands for them in the format, or are refused, and dense layers
are put in. Nothing here knows a framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import UnsupportedError
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.wire.reading import is_arange


@dataclass(frozen=True, eq=False)
class Part:
    """One sequence of n tokens of a batch, to be written as the format `target`.

    token_ids int32 [n]; ids [n - 1, MoE layers, top_k] of spec.dtype, zeros where not valid
    [n - 1]; response_logprobs: float32 [n - prompt_len], NaN where not sampled, or None; versions:
    int64 [n - 1], -1 where not valid, or None.
    """

    target: str
    spec: RouterSpec
    rollout_id: RolloutId
    token_ids: np.ndarray
    prompt_len: int
    ids: np.ndarray
    valid: np.ndarray
    response_logprobs: np.ndarray | None
    versions: np.ndarray | None

    @property
    def prompt(self) -> list[int]:
        return self.token_ids[: self.prompt_len].tolist()

    @property
    def response(self) -> list[int]:
        return self.token_ids[self.prompt_len :].tolist()

    @cached_property
    def start(self) -> int:
        """The first row that is there, if all before it lie in the prompt; else 0."""
        first = len(self.valid) if not self.valid.any() else int(self.valid.argmax())
        return first if first <= self.prompt_len else 0

    def logprobs_and_mask(self) -> tuple[list[float], list[int]] | None:
        """Of the response: log-probabilities, 0.0 where none, and 1 where there is one."""
        if self.response_logprobs is None:
            return None
        known = ~np.isnan(self.response_logprobs)
        return np.where(known, self.response_logprobs, 0).tolist(), known.astype(int).tolist()

    def rows(
        self,
        dtype: Any,
        *,
        start: int = 0,
        missing: int | None = None,
        all_layers: bool = True,
        arange: bool = False,
    ) -> np.ndarray:
        """Rows from `start` on, [rows, layers, top_k] of `dtype`, zeros in dense layers.

        missing: what a missing row holds in all layers; None if the format has nothing for it.
        arange: rows of 0..top_k - 1 may be a filler of the format. Raises UnsupportedError, naming
        the row, for what the format's reader would not take or take for something else.
        """
        ids, valid = self.ids[start:], self.valid[start:]
        if missing is None and not valid.all():
            raise self._refusal(start + int(valid.argmin()), "is missing, and there is no value")
        if arange or (missing == 0 and self.spec.top_k == 1):
            unclear = valid & is_arange(ids)
            if unclear.any():
                raise self._refusal(start + int(unclear.argmax()), "holds what may be filled in")
        if np.iinfo(dtype).max < self.spec.num_experts - 1:
            raise UnsupportedError(
                f"{self.target}: {self.spec.num_experts} experts, expected at most "
                f"{np.iinfo(dtype).max + 1}, as ids are {np.dtype(dtype).name}"
            )
        layers = self.spec.num_layers if all_layers else len(self.spec.moe_layers)
        places = list(self.spec.moe_layers) if all_layers else slice(None)
        out = np.zeros((len(ids), layers, self.spec.top_k), dtype)
        out[:, places] = ids
        if missing:
            out[~valid] = missing
        return out

    def _refusal(self, row: int, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.target}: rollout {self.rollout_id}: row {row} {what} for missing rows in this "
            "format, so a reader would take it for something else"
        )


def parts_of(batch: RoutingBatch, target: str) -> Iterator[Part]:
    """The sequences of a batch, one after the other. Raises TraceError for an impossible batch."""
    batch.check()
    for i, (a, b) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        prompt_len, valid = int(batch.prompt_lens[i]), batch.valid[a : b - 1]
        versions = batch.weight_versions[a : b - 1]
        logprobs = batch.logprobs[a + prompt_len : b]
        yield Part(
            target=target,
            spec=batch.spec,
            rollout_id=batch.rollout_ids[i],
            token_ids=batch.token_ids[a:b],
            prompt_len=prompt_len,
            ids=batch.routed_experts[a : b - 1],
            valid=valid,
            response_logprobs=None if np.isnan(logprobs).all() else logprobs,
            versions=versions if valid.any() and (versions[valid] >= 0).all() else None,
        )
