"""Many traces packed one behind the other, ready to be cut for a trainer rank.

Everything is aligned to tokens: the last token of each sequence, and each row the engine did not
deliver, is `valid == False` and is routed natively by the trainer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from r3.errors import TraceError
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.trace import RoutingTrace


@dataclass(frozen=True, eq=False)
class RoutingBatch:
    """Sequences i of tokens cu_seqlens[i] : cu_seqlens[i + 1], T tokens in all.

    token_ids int32 [T]; routed_experts uint8 or uint16 [T, MoE layers, top_k], zeros where not
    valid; valid bool [T]; logprobs float32 [T], NaN where not sampled or not known;
    prompt_lens int64 [B]; cu_seqlens int64 [B + 1]; rollout_ids: B names.
    """

    spec: RouterSpec
    rollout_ids: tuple[RolloutId, ...]
    cu_seqlens: np.ndarray
    prompt_lens: np.ndarray
    token_ids: np.ndarray
    routed_experts: np.ndarray
    valid: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def from_traces(cls, traces: Iterable[RoutingTrace]) -> RoutingBatch:
        """Pack traces in the given order. Raises TraceError if there are none or specs differ."""
        traces = list(traces)
        if not traces:
            raise TraceError("a batch needs at least one trace, got none")
        for i, trace in enumerate(traces):
            if not isinstance(trace, RoutingTrace):  # an engine's None for a sample without rows
                raise TraceError(
                    f"trace {i} of {len(traces)} is {reprlib.repr(trace)}, expected a "
                    "RoutingTrace; a sample without rows is one whose rows are all -1, or is left "
                    "out"
                )
        spec = traces[0].spec
        for trace in traces:
            if trace.spec != spec:
                raise TraceError(
                    f"rollout {trace.rollout_id}: {trace.spec}, expected the routers of rollout "
                    f"{traces[0].rollout_id}: {spec}"
                )
        lengths = [t.num_tokens for t in traces]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        total = int(cu_seqlens[-1])
        routed_experts = np.zeros((total, len(spec.moe_layers), spec.top_k), spec.dtype)
        valid = np.zeros(total, bool)
        logprobs = np.full(total, np.nan, np.float32)
        for start, trace in zip(cu_seqlens, traces, strict=False):
            rows = slice(start, start + trace.num_rows)
            routed_experts[rows], valid[rows] = trace.routed_experts, trace.valid
            if trace.logprobs is not None:
                logprobs[start : start + trace.num_tokens] = trace.logprobs
        return cls(
            spec=spec,
            rollout_ids=tuple(t.rollout_id for t in traces),
            cu_seqlens=cu_seqlens,
            prompt_lens=np.array([t.prompt_len for t in traces], np.int64),
            token_ids=np.concatenate([t.token_ids for t in traces]),
            routed_experts=routed_experts,
            valid=valid,
            logprobs=logprobs,
        )

    def __len__(self) -> int:
        return len(self.rollout_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def locate(self, token: int) -> tuple[RolloutId, int]:
        """The rollout that packed token index `token` belongs to, and its position in it."""
        i = int(np.searchsorted(self.cu_seqlens, token, side="right")) - 1
        return self.rollout_ids[i], token - int(self.cu_seqlens[i])
