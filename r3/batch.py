"""Many traces packed one behind the other, ready to be cut for a trainer rank.

Everything is aligned to tokens: the last token of each sequence, and each row the engine did not
deliver, is `valid == False` and is routed natively by the trainer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from r3.checks import check_distinct, check_shape_and_range
from r3.columns import ANSWER, PROMPT, REPLY, ROUNDING, Column, as_array, on_host
from r3.errors import TraceError
from r3.identity import Provenance, RolloutId
from r3.spec import RouterSpec
from r3.trace import RoutingTrace


@dataclass(frozen=True, eq=False)
class RoutingBatch:
    """Sequences i of tokens cu_seqlens[i] : cu_seqlens[i + 1], T tokens in all.

    token_ids int32 [T]; routed_experts uint8 or uint16 [T, MoE layers, top_k], zeros where not
    valid; valid bool [T]; logprobs float32 [T], NaN where not sampled or not known;
    weight_versions int64 [T], -1 where not valid or not known; prompt_lens int64 [B];
    cu_seqlens int64 [B + 1]; rollout_ids: B names.
    """

    spec: RouterSpec
    rollout_ids: tuple[RolloutId, ...]
    cu_seqlens: np.ndarray
    prompt_lens: np.ndarray
    token_ids: np.ndarray
    routed_experts: np.ndarray
    valid: np.ndarray
    logprobs: np.ndarray
    weight_versions: np.ndarray

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
        weight_versions = np.full(total, -1, np.int64)
        for start, trace in zip(cu_seqlens, traces, strict=False):
            rows = slice(start, start + trace.num_rows)
            routed_experts[rows], valid[rows] = trace.routed_experts, trace.valid
            if trace.logprobs is not None:
                logprobs[start : start + trace.num_tokens] = trace.logprobs
            if trace.weight_versions is not None:
                weight_versions[rows] = trace.weight_versions
        return cls(
            spec=spec,
            rollout_ids=tuple(t.rollout_id for t in traces),
            cu_seqlens=cu_seqlens,
            prompt_lens=np.array([t.prompt_len for t in traces], np.int64),
            token_ids=np.concatenate([t.token_ids for t in traces]),
            routed_experts=routed_experts,
            valid=valid,
            logprobs=logprobs,
            weight_versions=weight_versions,
        )

    def to_traces(
        self,
        *,
        logprobs: Any = None,
        provenance: Provenance | None = None,
        margins: np.ndarray | None = None,
    ) -> list[RoutingTrace]:
        """One trace per sequence, to be stored: what `from_traces` packed, as far as it packed it.

        logprobs: float [T], numpy or torch, in place of the batch's, at the tokens where the batch
        has one; a trainer's may hold anything elsewhere. provenance: of all traces. margins:
        float32 [T, MoE layers], aligned to tokens, see the column `router_margins`; those of last
        tokens have no row and are left out, as is anything else that is said of them.

        A sequence whose log-probabilities are all NaN gets no column `logprobs`. In any other, NaN
        behind the prompt means a token that was not sampled, a reply in the column `segments`,
        which is there only where there is such a token. Weight versions are known of all valid
        rows of a sequence or left out.

        Raises TraceError, naming the rollout, for content that no trace can have.
        """
        if margins is not None:
            margins = as_array(margins, "margins", np.float32, copy=False)
            if margins.shape != (self.num_tokens, len(self.spec.moe_layers)):
                raise TraceError(
                    f"margins have shape {list(margins.shape)}, expected one for each token and "
                    f"MoE layer, {[self.num_tokens, len(self.spec.moe_layers)]}"
                )
        all_logprobs = self.logprobs
        if logprobs is not None:
            given = on_host(logprobs, "logprobs")
            if given.shape != (self.num_tokens,) or given.dtype.kind != "f":
                raise TraceError(
                    f"logprobs are {given.dtype} of shape {list(given.shape)}, expected floats "
                    f"[{self.num_tokens}], one for each token of the batch"
                )
            all_logprobs = np.where(np.isnan(self.logprobs), np.nan, given).astype(np.float32)
        traces = []
        for i, (start, stop) in enumerate(pairwise(self.cu_seqlens.tolist())):
            tokens, rows = slice(start, stop), slice(start, stop - 1)
            prompt_len, valid = int(self.prompt_lens[i]), self.valid[rows]
            own, versions = all_logprobs[tokens], self.weight_versions[rows]
            known = valid.any() and (versions[valid] >= 0).all()
            extra: dict[str, Column] = {}
            if margins is not None:
                extra["router_margins"] = Column(margins[rows], "row")
            has_logprobs = not np.isnan(self.logprobs[tokens]).all()
            fed = np.isnan(self.logprobs[tokens][prompt_len:])
            if has_logprobs and fed.any():
                segments = np.full(stop - start, PROMPT, np.uint8)
                segments[prompt_len:] = np.where(fed, REPLY, ANSWER)
                extra["segments"] = Column(segments, "token")
            trace = RoutingTrace.build(
                spec=self.spec,
                token_ids=self.token_ids[tokens],
                routed_experts=self.routed_experts[rows],
                prompt_len=prompt_len,
                valid=valid,
                logprobs=own if has_logprobs else None,
                weight_versions=versions if known else None,
                rollout_id=self.rollout_ids[i],
                provenance=provenance,
                extra=extra,
            )
            traces.append(trace)
        return traces

    def __len__(self) -> int:
        return len(self.rollout_ids)

    def __repr__(self) -> str:
        return (
            f"RoutingBatch of {len(self)} sequences and {self.num_tokens} tokens, MoE layers "
            f"{reprlib.repr(self.spec.moe_layers)}, top {self.spec.top_k} of "
            f"{self.spec.num_experts}"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def locate(self, token: int) -> tuple[RolloutId, int]:
        """The rollout that packed token index `token` belongs to, and its position in it."""
        i = int(np.searchsorted(self.cu_seqlens, token, side="right")) - 1
        return self.rollout_ids[i], token - int(self.cu_seqlens[i])

    def check(self) -> None:
        """Raise TraceError, naming field and rollout, for what no batch made of traces has.

        For batches built by hand or read from somewhere.
        """
        b, t, spec = len(self), self.num_tokens, self.spec
        for name, dtype, shape in (
            ("cu_seqlens", np.dtype(np.int64), (b + 1,)),
            ("prompt_lens", np.dtype(np.int64), (b,)),
            ("token_ids", np.dtype(np.int32), (t,)),
            ("routed_experts", spec.dtype, (t, len(spec.moe_layers), spec.top_k)),
            ("valid", np.dtype(bool), (t,)),
            ("logprobs", np.dtype(np.float32), (t,)),
            ("weight_versions", np.dtype(np.int64), (t,)),
        ):
            field = getattr(self, name)
            if (field.dtype, field.shape) != (dtype, shape):
                raise TraceError(
                    f"{name} is {field.dtype} of shape {list(field.shape)}, expected {dtype} of "
                    f"shape {list(shape)}"
                )
        check_cu_seqlens(self.cu_seqlens, t)
        for i, (start, stop) in enumerate(pairwise(self.cu_seqlens.tolist())):
            self._check_sequence(i, slice(start, stop))

    def _check_sequence(self, i: int, rows: slice) -> None:
        where, prompt_len = f"rollout {self.rollout_ids[i]}", int(self.prompt_lens[i])
        tokens, valid, ids = self.token_ids[rows], self.valid[rows], self.routed_experts[rows]
        if not 0 <= prompt_len <= len(tokens):
            raise TraceError(f"prompt_lens: {where}: {prompt_len}, expected 0..{len(tokens)}")
        if tokens.min() < 0:
            at = int((tokens < 0).argmax())
            raise TraceError(f"token_ids: {where}: token {at}: {tokens[at]}, expected 0 or more")
        if valid[-1]:
            raise TraceError(
                f"valid: {where}: True at the last token, expected False: it is never forwarded"
            )
        check_shape_and_range(ids, valid, self.spec, f"routed_experts: {where}")
        check_distinct(ids, valid, self.spec, f"routed_experts: {where}")
        filled = np.argwhere(ids.any(axis=-1) & ~valid[:, None])
        if len(filled):
            row, layer = filled[0]
            raise TraceError(
                f"routed_experts: {where}: row {row} is missing (valid is False) but names experts "
                f"{ids[row, layer].tolist()} in layer {self.spec.moe_layers[layer]}, expected zeros"
            )
        self._check_columns(where, rows, prompt_len)

    def _check_columns(self, where: str, rows: slice, prompt_len: int) -> None:
        logprobs, versions = self.logprobs[rows], self.weight_versions[rows]
        # which tokens behind the prompt were sampled is not known here: replies are not
        sampled = (np.arange(len(logprobs)) >= prompt_len) & np.isfinite(logprobs)
        wrong = ~np.isnan(logprobs) & ~(sampled & (logprobs <= ROUNDING))
        if wrong.any():
            at = int(wrong.argmax())
            expected = "NaN or a finite number of at most 0" if at >= prompt_len else "NaN"
            raise TraceError(f"logprobs: {where}: token {at}: {logprobs[at]}, expected {expected}")
        wrong = np.where(self.valid[rows], versions < -1, versions != -1)
        if wrong.any():
            at = int(wrong.argmax())
            expected = "-1 or more" if self.valid[rows][at] else "-1, as the row is missing"
            raise TraceError(
                f"weight_versions: {where}: row {at}: {versions[at]}, expected {expected}"
            )


def check_cu_seqlens(cu_seqlens: np.ndarray, tokens: int) -> None:
    """Raise TraceError unless int64 [B + 1] `cu_seqlens` ascends from 0 to the number of tokens."""
    rising = len(cu_seqlens) > 1 and (cu_seqlens[1:] > cu_seqlens[:-1]).all()
    if not rising or (cu_seqlens[0], cu_seqlens[-1]) != (0, tokens):
        raise TraceError(
            f"cu_seqlens is {reprlib.repr(cu_seqlens.tolist())} and ends at {cu_seqlens[-1]}, "
            f"expected at least two ascending integers from 0 to the number of tokens, {tokens}"
        )
