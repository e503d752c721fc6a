"""What one rank or microbatch knows of a training step, as sums that add up over ranks.

The monitor (r3.monitor) writes one line per step; this is what the line is made of before it is
whole. Means of ranks have no right mean, so ranks hand over sums.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from r3 import json_fields as of_json
from r3.batch import RoutingBatch
from r3.errors import TraceError
from r3.mismatch import CLIP, LogprobMismatch
from r3.mismatch_input import flags
from r3.slices import Sides, SliceCounts, Slices, cut, merge_slices
from r3.step_input import (
    REPLAY_COUNTS,
    check_batch,
    checked_version,
    per_token,
    replay_counts,
)
from r3.step_layers import CHECK, LayerCounts, compare
from r3.step_slices import step_labels

_FORMAT = "r3-step/1"
_MOST_NAMES = 8  # rollouts named in a record


@dataclass(frozen=True, eq=False)
class StepState:
    """Sums of one step over what was given to `of`; `+` adds those of ranks and microbatches.

    has_logprobs: whether trainer_logprobs were given. mismatch: log-ratios of sampled tokens.
    slices: by dimension and label. routing: by the decoder layers that were compared, one entry
    unless states of several pipeline stages were added. rollouts; rows: rows that should have a
    route; rows_without_route: those that have none. rollouts_without_route: rollouts without any
    route, of which without_route names some. lag_rows, lag_sum, lag_max: rows of known weight
    version, and by how many versions the trainer is ahead. replay: counts of ReplayReport by
    decoder layer, for routers that choose replay_top_k.
    """

    has_logprobs: bool
    mismatch: LogprobMismatch
    slices: Slices
    routing: Mapping[tuple[int, ...], LayerCounts]
    rollouts: int
    rows: int
    rows_without_route: int
    rollouts_without_route: int
    without_route: tuple[str, ...]
    lag_rows: int
    lag_sum: int
    lag_max: int | None
    replay: Mapping[int, Mapping[str, int]]
    replay_top_k: int

    @classmethod
    def of(
        cls,
        batch: RoutingBatch,
        trainer_logprobs: Any = None,
        *,
        native: RoutingBatch | None = None,
        report: Any = None,
        weight_version: int | None = None,
        mask: Any = None,
        labels: Mapping[str, Any] | None = None,
        clip: tuple[float, float] = CLIP,
    ) -> StepState:
        """What a trainer has in hand after a step; all but the batch may be left out.

        batch: the engine's T tokens in B sequences, with its log-probs. trainer_logprobs: numpy or
        torch, float [T], packed like the batch: i is the natural log of the probability of token i,
        in the pass that is trained with, so under replay where there is replay. native: the
        trainer's own routing of the same tokens (NativeRouting.to_batch), of all or some layers.
        report: MegatronReplay.report(). weight_version: of the weights in that pass. mask: bool or
        0/1 [T], tokens that count; None: those that have an engine's log-prob. labels: by dimension
        ("turn", "env", ...), text or integers for each token [T] or each sequence [B]; slices by
        length, and by weight lag, come by themselves. clip: bounds of the ratio for clipped shares
        and truncated weights.

        Raises TraceError for arguments of other types, and arrays that do not fit the batch.
        """
        check_batch(batch, "batch")
        if native is not None:
            check_batch(native, "native")
        version = None if weight_version is None else checked_version(weight_version)
        replay, replay_top_k = replay_counts(report)
        total, lengths = batch.num_tokens, np.diff(batch.cu_seqlens)
        counted = ~np.isnan(batch.logprobs) if mask is None else flags(mask, (total,))
        trainer, mismatch = None, LogprobMismatch.zero(clip=clip)
        if trainer_logprobs is not None:
            trainer = per_token(trainer_logprobs, "trainer_logprobs", total)
            mismatch = LogprobMismatch.of(
                trainer,
                batch.logprobs,
                cu_seqlens=batch.cu_seqlens,
                mask=counted,
                clip=clip,
                names=[str(i) for i in batch.rollout_ids],
            )
        routing, compared, layers_per_row = compare(batch, native)
        known = batch.valid & (batch.weight_versions >= 0)
        lag = None if version is None else version - batch.weight_versions
        lags = np.zeros(0, np.int64) if lag is None else lag[known]
        sides = Sides(
            cu_seqlens=batch.cu_seqlens,
            sampler=batch.logprobs,
            trainer=trainer,
            counted=counted,
            compared=compared,
            layers_per_row=layers_per_row,
            layers=len((native or batch).spec.moe_layers),
            clip=clip,
        )
        routes = np.add.reduceat(batch.valid.astype(int), batch.cu_seqlens[:-1])
        without = np.flatnonzero((routes == 0) & (lengths > 1))
        return cls(
            has_logprobs=trainer is not None,
            mismatch=mismatch,
            slices=cut(sides, step_labels(batch, lag, known, {} if labels is None else labels)),
            routing=routing,
            rollouts=len(batch),
            rows=total - len(batch),  # nothing is expected of the last token
            rows_without_route=total - len(batch) - int(batch.valid.sum()),
            rollouts_without_route=len(without),
            without_route=tuple(str(batch.rollout_ids[i]) for i in without[:_MOST_NAMES]),
            lag_rows=len(lags),
            lag_sum=(int((lags >> 32).sum()) << 32) + int((lags & 0xFFFFFFFF).sum()),  # of any size
            lag_max=int(lags.max()) if len(lags) else None,
            replay=replay,
            replay_top_k=replay_top_k,
        )

    def __add__(self, other: StepState) -> StepState:
        """Raises TraceError if clip bounds or routers differ."""
        if not isinstance(other, StepState):
            return NotImplemented
        if self.replay and other.replay and self.replay_top_k != other.replay_top_k:
            raise TraceError(
                f"cannot add a report of top {other.replay_top_k} to one of top {self.replay_top_k}"
            )
        lags = [x.lag_max for x in (self, other) if x.lag_max is not None]
        return StepState(
            has_logprobs=self.has_logprobs or other.has_logprobs,
            mismatch=self.mismatch + other.mismatch,
            slices=merge_slices(self.slices, other.slices),
            routing=_joined(self.routing, other.routing),
            rollouts=self.rollouts + other.rollouts,
            rows=self.rows + other.rows,
            rows_without_route=self.rows_without_route + other.rows_without_route,
            rollouts_without_route=self.rollouts_without_route + other.rollouts_without_route,
            without_route=(self.without_route + other.without_route)[:_MOST_NAMES],
            lag_rows=self.lag_rows + other.lag_rows,
            lag_sum=self.lag_sum + other.lag_sum,
            lag_max=max(lags) if lags else None,
            replay={
                i: _joined(self.replay.get(i, {}), other.replay.get(i, {}))
                for i in {**self.replay, **other.replay}
            },
            replay_top_k=max(self.replay_top_k, other.replay_top_k),
        )

    def to_json(self) -> str:
        """The state as text, for a collective; numbers come back just as they were."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["mismatch"] = self.mismatch.to_dict()
        values["slices"] = {
            name: {
                label: {**vars(part), "mismatch": part.mismatch.to_dict()}
                for label, part in parts.items()
            }
            for name, parts in self.slices.items()
        }
        values["routing"] = [[layers, counts.to_dict()] for layers, counts in self.routing.items()]
        values["replay"] = list(self.replay.items())
        return json.dumps({"format": _FORMAT, **values})

    @classmethod
    def from_json(cls, text: str | bytes) -> StepState:
        """Inverse of `to_json`. Raises TraceError for anything else."""
        try:
            values = json.loads(text)
            _CHECK(values)
            del values["format"]
            values["mismatch"] = LogprobMismatch.from_dict(values["mismatch"])
            values["slices"] = {
                name: {
                    label: SliceCounts(
                        **{**part, "mismatch": LogprobMismatch.from_dict(part["mismatch"])}
                    )
                    for label, part in parts.items()
                }
                for name, parts in values["slices"].items()
            }
            routing, replay = values["routing"], values["replay"]
            values["routing"] = {tuple(i): LayerCounts.from_dict(x, i) for i, x in routing}
            values["replay"] = dict(replay)
            values["without_route"] = tuple(values["without_route"])
            state = cls(**values)
            if (len(state.routing), len(state.replay)) != (len(routing), len(replay)):
                raise ValueError("routing or replay: the same layers twice")
            state._check_sums()
        except (TypeError, ValueError, RecursionError) as e:  # our own errors are ValueErrors
            raise TraceError(f"not the text of StepState.to_json(): {e}") from None
        return state

    def _check_sums(self) -> None:
        """Raise ValueError for numbers that cannot be of one state."""
        slices = [part for parts in self.slices.values() for part in parts.values()]
        for name, part, whole in (
            ("rows_without_route", self.rows_without_route, self.rows),
            ("rollouts_without_route", self.rollouts_without_route, self.rollouts),
            ("without_route", len(self.without_route), _MOST_NAMES),
            *(("slices: differing", x.differing, x.rows) for x in slices),
            *(("slices: differing_cells", x.differing_cells, x.cells) for x in slices),
        ):
            if part > whole:
                raise ValueError(f"{name} is {part}, expected at most {whole}")
        if self.lag_max is not None and self.lag_rows:
            fits = self.lag_sum <= self.lag_rows * self.lag_max
        else:
            fits = (self.lag_rows, self.lag_sum, self.lag_max) == (0, 0, None)
        if not fits:
            raise ValueError(
                f"lag_rows is {self.lag_rows}, lag_sum {self.lag_sum} and lag_max {self.lag_max}, "
                "expected the sum of so many lags up to the largest, or 0, 0 and null"
            )
        if bool(self.replay) != bool(self.replay_top_k):
            raise ValueError(f"replay_top_k is {self.replay_top_k}, of {len(self.replay)} layers")


_CHECK = of_json.fields(  # of what `to_json` writes; LogprobMismatch checks its own
    {
        "format": of_json.leaf(lambda x: x == _FORMAT, repr(_FORMAT)),
        "has_logprobs": of_json.flag,
        "mismatch": of_json.anything,
        "slices": of_json.mapped(
            of_json.mapped(
                of_json.fields(
                    {
                        "mismatch": of_json.anything,
                        **dict.fromkeys(
                            ("rows", "differing", "cells", "differing_cells"), of_json.count
                        ),
                    },
                    of_json.nothing,
                )
            )
        ),
        "routing": of_json.listed(of_json.pair(of_json.listed(of_json.layer), CHECK)),
        **dict.fromkeys(
            ("rollouts", "rows", "rows_without_route", "rollouts_without_route", "lag_rows"),
            of_json.count,
        ),
        "without_route": of_json.listed(of_json.text),
        # a sum of lags of 64 bits
        "lag_sum": of_json.integer(-(2**126), 2**126, "an integer"),
        "lag_max": lambda x: None if x is None else of_json.int64(x),
        "replay": of_json.listed(
            of_json.pair(
                of_json.layer,
                of_json.fields(dict.fromkeys(REPLAY_COUNTS, of_json.count), of_json.nothing),
            )
        ),
        "replay_top_k": of_json.count,
    },
    of_json.nothing,
)


_Key = TypeVar("_Key")
_Value = TypeVar("_Value", int, LayerCounts)


def _joined(a: Mapping[_Key, _Value], b: Mapping[_Key, _Value]) -> dict[_Key, _Value]:
    """Both, with the values of a key that both have added."""
    return {**a, **{k: a[k] + v if k in a else v for k, v in b.items()}}
