"""One rollout's record: which experts the engine used for each token, and what rides along.

Nouns used everywhere: a rollout of n tokens has n - 1 rows, because the last sampled token is
never forwarded. Row t holds the experts that token t was sent to, in every MoE layer; from the
same forward pass comes token t + 1. Rows are sets: order within the top_k carries nothing.
Missing is a mask (`valid`), never a number.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np

from r3.checks import Suspicion, check_distinct, check_shape_and_range, find_suspicious, sort_rows
from r3.columns import (
    ALIGNMENTS,
    Column,
    as_array,
    as_token_ids,
    as_weight_versions,
    check_column,
    check_prompt_len,
    check_values,
    read_only,
    read_tags,
    sampled_tokens,
)
from r3.digest import content_digest
from r3.eplb import to_logical
from r3.errors import SuspiciousRoutingWarning, TraceError
from r3.extend import extended_columns
from r3.identity import Provenance, RolloutId
from r3.spec import RouterSpec

__all__ = ["ALIGNMENTS", "Column", "RoutingTrace"]

MAX_TOKENS = 1 << 31


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """One rollout: token ids, the experts chosen for each row, and further columns.

    Columns that this package reads and checks (others are carried through), each aligned to the
    tokens [n], to the rows [n - 1] or to the rollout as a whole:
      token_ids       token   int32 [n]; the prompt, then what was sampled and fed; 0 or more
      routed_experts  row     uint8 or uint16 [n - 1, MoE layers, top_k]; different experts of the
                              model in each row and layer; zeros where not valid
      valid           row     bool [n - 1]; absent when every row was captured
      logprobs        token   float32 [n]; natural log of the probability the token was sampled
                              with, at most 0; NaN where a token was not sampled
      weight_versions row     int64 [n - 1]; the weights of the pass that computed the row, a
                              number that rises with each weight update of the engine; -1 where
                              not valid; absent when not known. After a preemption the KV behind
                              later rows may be newer than earlier rows say
      router_margins  row     float32 [n - 1, MoE layers]; how near the router was to another
                              choice: its k-th largest logit minus the (k + 1)-th, at least 0 and
                              finite; NaN where not valid or not known. Of a trainer's own routing,
                              see r3.trainer_hooks.megatron
      segments        token   uint8 [n]; 0 prompt, 1 answer (sampled by the engine), 2 reply (of a
                              tool or environment: fed, not sampled). 0 or 2 in the first
                              `prompt_len` tokens, 1 or 2 behind them; absent when all tokens
                              behind the prompt were sampled
      turns           token   uint16 [n]; turn of the conversation, never falls
      rewards         token   float32 [n]; finite, NaN for none; a reward of the whole sequence
                              stands at its last token
      kept_counts     token   uint32 [n]; how many ids the sampler kept (top-p, top-k) when it
                              chose the token; 0 where not known or not sampled
      kept_ids        rollout int32 [sum of kept_counts]; those ids, in token order, the sampled
                              one among them; there with kept_counts only
      tags            rollout uint8 [bytes]; JSON list of text in UTF-8; see r3.columns.text_column

    `suspicions` is what looks wrong without being impossible; see r3.checks.

    Use `RoutingTrace.build`; it brings arrays to these forms. Content is checked on construction:
    TraceError for the impossible, one SuspiciousRoutingWarning for the suspicious (turn it into
    an error with `warnings.simplefilter`).
    """

    spec: RouterSpec
    prompt_len: int
    columns: Mapping[str, Column]
    rollout_id: RolloutId = field(default_factory=RolloutId.unique)
    provenance: Provenance = field(default_factory=Provenance)
    suspicions: list[Suspicion] = field(init=False)

    @classmethod
    def build(
        cls,
        *,
        spec: RouterSpec,
        token_ids: np.ndarray | list[int],
        routed_experts: np.ndarray,
        prompt_len: int,
        valid: np.ndarray | None = None,
        logprobs: np.ndarray | None = None,
        weight_versions: np.ndarray | int | None = None,
        physical_to_logical: np.ndarray | None = None,
        rollout_id: RolloutId | str | None = None,
        provenance: Provenance | None = None,
        extra: Mapping[str, Column] | None = None,
    ) -> RoutingTrace:
        """Make a trace from what an engine returned.

        routed_experts: integers [n - 1, layers, top_k] of any width; layers may be the MoE layers
        or all decoder layers. Rows that are -1 throughout count as missing.
        logprobs: [n], or [n - prompt_len] for the sampled tokens only.
        weight_versions: integers [n - 1], or one for all rows.
        physical_to_logical: integers [physical slots] or [MoE layers, physical slots], the expert
        in each slot, for a source whose ids are those of a load balancer (EPLB).
        extra: columns by name, in the forms that RoutingTrace lists for those it knows.
        All arrays are copied.
        """
        if isinstance(rollout_id, str):
            rollout_id = RolloutId.parse(rollout_id)
        rollout_id = rollout_id or RolloutId.unique()
        where = f"rollout {rollout_id}"
        tokens = as_array(token_ids, f"{where}: token_ids")
        if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
            raise TraceError(
                f"{where}: token_ids has shape {list(tokens.shape)} and dtype {tokens.dtype}, "
                "expected at least one integer in one dimension"
            )
        check_prompt_len(prompt_len, len(tokens), where)
        ids = spec.select_moe_layers(
            as_array(routed_experts, f"{where}: routed_experts", copy=False)
        )
        mask = np.ones(len(tokens) - 1, bool) if valid is None else np.asarray(valid)
        if mask.shape != (len(tokens) - 1,) or mask.dtype != bool:
            raise TraceError(
                f"{where}: valid has shape {list(mask.shape)} and dtype {mask.dtype}, "
                f"expected bool [{len(tokens) - 1}], one less than tokens"
            )
        if ids.dtype.kind == "i" and ids.ndim == 3 and len(ids) == len(mask) and ids.size:
            lost = ids[:, 0, 0] == -1
            lost[lost] = (ids[lost] == -1).all(axis=(1, 2))
            mask = mask & ~lost
        if physical_to_logical is not None:
            ids = to_logical(ids, mask, physical_to_logical, spec, where)
        check_shape_and_range(ids, mask, spec, where)
        ids = np.where(mask[:, None, None], ids, 0) if not mask.all() else ids
        columns = {
            "token_ids": Column(as_token_ids(tokens, where), "token"),
            "routed_experts": Column(np.array(ids, dtype=spec.dtype, order="C"), "row"),
        }
        if not mask.all():
            columns["valid"] = Column(mask.copy(), "row")
        if logprobs is not None:
            values = as_array(logprobs, f"{where}: logprobs", np.float32)
            if values.shape == (len(tokens) - prompt_len,):
                values = np.concatenate([np.full(prompt_len, np.nan, np.float32), values])
            columns["logprobs"] = Column(values, "token")
        if weight_versions is not None:
            versions = as_weight_versions(weight_versions, mask, where)
            columns["weight_versions"] = Column(versions, "row")
        for name, column in (extra or {}).items():
            if name in columns:
                raise TraceError(f"{where}: extra column {name!r} is one that has its own argument")
            if not isinstance(column, Column) or not isinstance(name, str):
                raise TraceError(
                    f"{where}: extra column {name!r} is a {type(column).__name__}, expected a "
                    "Column(array, align) under a text"
                )
            columns[name] = Column(np.array(column.data), column.align, column.version)
        return cls(spec, prompt_len, columns, rollout_id, provenance or Provenance())

    def __post_init__(self) -> None:
        # read-only views: what was checked, and digested, stays as it is
        columns = {
            name: Column(read_only(column.data), column.align, column.version)
            for name, column in self.columns.items()
        }
        object.__setattr__(self, "columns", MappingProxyType(columns))
        ordered = self._check()
        object.__setattr__(self, "prompt_len", int(self.prompt_len))
        suspicions = find_suspicious(
            self.routed_experts, self.spec, self.valid, self.token_ids, ordered
        )
        object.__setattr__(self, "suspicions", suspicions)
        if suspicions:
            findings = "; ".join(map(str, suspicions))
            warnings.warn(
                f"rollout {self.rollout_id}: suspicious routing: {findings}",
                SuspiciousRoutingWarning,
                stacklevel=3,
            )

    def _check(self) -> np.ndarray:
        """Raise TraceError for impossible content; return `routed_experts` in ascending order."""
        where = f"rollout {self.rollout_id}"
        for name in ("token_ids", "routed_experts"):
            if name not in self.columns:
                raise TraceError(f"{where}: column {name!r} is missing")
        n = len(self.columns["token_ids"].data)
        if not 1 <= n < MAX_TOKENS:
            raise TraceError(f"{where}: {n} tokens, expected 1 to {MAX_TOKENS - 1}")
        check_prompt_len(self.prompt_len, n, where)
        for name, column in self.columns.items():
            check_column(name, column, n, where)
        if int(self.token_ids.min()) < 0:
            at = int((self.token_ids < 0).argmax())
            raise TraceError(f"{where}: token {at}: id {self.token_ids[at]}, expected 0 or more")
        if self.routed_experts.dtype != self.spec.dtype:
            raise TraceError(
                f"{where}: routed_experts has dtype {self.routed_experts.dtype}, expected "
                f"{self.spec.dtype} for {self.spec.num_experts} experts"
            )
        check_shape_and_range(self.routed_experts, self.valid, self.spec, where)
        ordered = sort_rows(self.routed_experts, self.valid)
        check_distinct(self.routed_experts, self.valid, self.spec, where, ordered)
        check_values(self.columns, self.prompt_len, self.valid, self.spec.moe_layers, where)
        missing = np.flatnonzero(~self.valid)
        filled = missing[self.routed_experts[missing].any(axis=(1, 2))]
        if len(filled):
            raise TraceError(
                f"{where}: row {filled[0]} is missing (valid is False) but names experts "
                f"{self.routed_experts[filled[0], 0].tolist()} in layer {self.spec.moe_layers[0]}, "
                "expected zeros"
            )
        return ordered

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [n]"""
        return self.columns["token_ids"].data

    @property
    def routed_experts(self) -> np.ndarray:
        """uint8 or uint16 [n - 1, MoE layers, top_k]; read it together with `valid`."""
        return self.columns["routed_experts"].data

    @cached_property
    def valid(self) -> np.ndarray:
        """bool [n - 1], True where the row was captured."""
        if "valid" in self.columns:
            return self.columns["valid"].data
        return np.ones(self.num_rows, bool)

    @property
    def logprobs(self) -> np.ndarray | None:
        """float32 [n] with NaN for tokens that were not sampled, or None."""
        return self.columns["logprobs"].data if "logprobs" in self.columns else None

    @property
    def weight_versions(self) -> np.ndarray | None:
        """int64 [n - 1], the weights behind each row, -1 where not valid; None when not known."""
        return self.columns["weight_versions"].data if "weight_versions" in self.columns else None

    @property
    def segments(self) -> np.ndarray | None:
        """uint8 [n]: 0 prompt, 1 answer, 2 reply; None when all behind the prompt is answer."""
        return self.columns["segments"].data if "segments" in self.columns else None

    @property
    def sampled(self) -> np.ndarray:
        """bool [n], True where the engine sampled the token."""
        return sampled_tokens(self.columns, self.prompt_len)

    @property
    def tags(self) -> tuple[str, ...]:
        """The text in the column `tags`; empty without it."""
        if "tags" not in self.columns:
            return ()
        return read_tags(self.columns["tags"].data, f"rollout {self.rollout_id}")

    @property
    def version_range(self) -> tuple[int, int] | None:
        """Lowest and highest weight version of the valid rows; None when there is none."""
        if self.weight_versions is None or not self.valid.any():
            return None
        versions = self.weight_versions[self.valid]
        return int(versions.min()), int(versions.max())

    @property
    def mixes_weights(self) -> bool:
        """Whether the valid rows were computed with more than one version of the weights."""
        return self.version_range is not None and self.version_range[0] != self.version_range[1]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) - 1

    @cached_property
    def digest(self) -> str:
        """Hex digest (BLAKE2b, 128 bits) of the content: routers, prompt length and all columns.

        Rows are sets, so it does not depend on the order of experts within a row; the rollout id
        and the provenance are not part of it.
        """
        return content_digest(self.spec, self.prompt_len, self.columns, self.valid)

    def extend(self, turn: RoutingTrace) -> RoutingTrace:
        """The trace of the conversation so far: this one, and the request that came next.

        turn: the trace of a request whose prompt begins with all tokens of this one; in it may
        follow replies (of a tool or environment), behind it stands what the request sampled.
        Both stay as they are. May be repeated, with traces that were extended themselves.

        Rows that this trace captured stay: they are what its tokens were sampled with. All others
        are `turn`'s: those that are missing here, that of the last token here (it was never
        forwarded before) and those of new tokens; a row that neither has stays missing. Weight
        versions and other row columns go with their rows. The prompt is this trace's, rollout id
        and provenance are `turn`'s.

        Token columns are this trace's on its tokens and `turn`'s on the new ones; log-probabilities
        are NaN on the replies. `segments` and `turns` are always set: the tokens between this trace
        and the end of `turn`'s prompt are replies; the first new token has the turn behind this
        trace's last (0 without the column), and `turn`'s own numbers go on from there. `kept_ids`
        are put together, other rollout columns are `turn`'s.

        Columns that only one of the two has: without weight versions in both there are none (-1
        means a missing row, another number would be a guess); rewards and router_margins are NaN
        and kept_counts 0 where not known; log-probabilities may be missing where nothing was
        sampled; a rollout column may be `turn`'s alone. Any other is refused.

        Raises SpecError for other routers, TraceError for other tokens or columns that do not go
        together; both name the two rollouts.
        """
        columns = extended_columns(self, turn)
        return RoutingTrace(turn.spec, self.prompt_len, columns, turn.rollout_id, turn.provenance)

    def __reduce__(self) -> tuple:
        # for Ray and multiprocessing; content is checked again where it arrives
        return type(self), (
            self.spec,
            self.prompt_len,
            dict(self.columns),
            self.rollout_id,
            self.provenance,
        )

    def __repr__(self) -> str:
        low, high = self.version_range or (0, 0)
        mixed = f", mixes weight versions {low} to {high}" if self.mixes_weights else ""
        return (
            f"RoutingTrace({self.rollout_id}, {self.num_tokens} tokens, "
            f"{len(self.spec.moe_layers)} MoE layers, {self.spec.top_k} of "
            f"{self.spec.num_experts} experts, {int((~self.valid).sum())} rows missing{mixed})"
        )
