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

from r3.batch import RoutingBatch
from r3.columns import on_host
from r3.differences import Differences
from r3.disagreement import RoutingDisagreement
from r3.errors import TraceError
from r3.load import expert_load
from r3.mismatch import LogprobMismatch
from r3.slices import Sides, SliceCounts, Slices, cut, merge_slices
from r3.step_slices import step_labels

CLIP = (0.5, 2.0)
_FORMAT = "r3-step/1"
_MOST_NAMES = 8  # rollouts named in a record
REPLAY_COUNTS = (  # of ReplayReport, by layer
    *("rows_replayed", "rows_missing", "rows_stale", "rows_padding", "rows_not_enclosed"),
    *("outside_topk_cells_forced", "outside_topk_experts_forced"),
    *("rows_compared", "outside_topk_cells_free", "outside_topk_experts_free"),
)


@dataclass(frozen=True, eq=False)
class LayerCounts:
    """Sums over the rows that both sides have, in the L MoE layers of a stage with E experts.

    tokens: rows compared. differing: of these, with a differing layer. cells, experts: int64 [L],
    as in RoutingDisagreement. load_a, load_b: int64 [L, E], how often engine and trainer chose each
    expert. Without the trainer's routing nothing is compared, and load_a has all the engine's rows.
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

        Raises TraceError for arrays that do not fit the batch.
        """
        total, lengths = batch.num_tokens, np.diff(batch.cu_seqlens)
        counted = ~np.isnan(batch.logprobs)
        if mask is not None:
            counted = _per_token(mask, "mask", total).astype(bool)
        trainer, mismatch = None, LogprobMismatch.zero(clip=clip)
        if trainer_logprobs is not None:
            trainer = _per_token(trainer_logprobs, "trainer_logprobs", total)
            mismatch = LogprobMismatch.of(
                trainer,
                batch.logprobs,
                cu_seqlens=batch.cu_seqlens,
                mask=counted,
                clip=clip,
                names=[str(i) for i in batch.rollout_ids],
            )
        routing, compared, layers_per_row = _compare(batch, native)
        known = batch.valid & (batch.weight_versions >= 0)
        lag = None if weight_version is None else weight_version - batch.weight_versions
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
        layers = {} if report is None else report.layers
        return cls(
            has_logprobs=trainer is not None,
            mismatch=mismatch,
            slices=cut(sides, step_labels(batch, lag, known, labels or {})),
            routing=routing,
            rollouts=len(batch),
            rows=total - len(batch),  # nothing is expected of the last token
            rows_without_route=total - len(batch) - int(batch.valid.sum()),
            rollouts_without_route=len(without),
            without_route=tuple(str(batch.rollout_ids[i]) for i in without[:_MOST_NAMES]),
            lag_rows=len(lags),
            lag_sum=int(lags.sum()),
            lag_max=int(lags.max()) if len(lags) else None,
            replay={i: {k: getattr(c, k) for k in REPLAY_COUNTS} for i, c in layers.items()},
            replay_top_k=report.top_k if layers else 0,
        )

    def __add__(self, other: StepState) -> StepState:
        """Raises TraceError if clip bounds or routers differ."""
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
        values["routing"] = [
            [layers, dict(map(_as_list, vars(counts).items()))]
            for layers, counts in self.routing.items()
        ]
        values["replay"] = list(self.replay.items())
        return json.dumps({"format": _FORMAT, **values})

    @classmethod
    def from_json(cls, text: str | bytes) -> StepState:
        """Inverse of `to_json`. Raises TraceError for anything else."""
        try:
            values = json.loads(text)
            if values.pop("format") != _FORMAT:
                raise ValueError(f"expected the format {_FORMAT!r}")
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
            values["routing"] = {
                tuple(layers): LayerCounts(**dict(map(_as_array, counts.items())))
                for layers, counts in values["routing"]
            }
            values["replay"] = dict(values["replay"])
            values["without_route"] = tuple(values["without_route"])
            return cls(**values)
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise TraceError(f"not the text of StepState.to_json(): {e!r}") from None


def _compare(
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


def _per_token(values: Any, name: str, tokens: int) -> np.ndarray:
    values = on_host(values, name)
    if values.shape != (tokens,):
        raise TraceError(
            f"{name} has shape {list(values.shape)}, expected [{tokens}]: one for each token of "
            "the batch, packed like it, prompts included"
        )
    return values


_Key = TypeVar("_Key")
_Value = TypeVar("_Value", int, LayerCounts)


def _joined(a: Mapping[_Key, _Value], b: Mapping[_Key, _Value]) -> dict[_Key, _Value]:
    """Both, with the values of a key that both have added."""
    return {**a, **{k: a[k] + v if k in a else v for k, v in b.items()}}


def _as_list(item: tuple[str, Any]) -> tuple[str, Any]:
    name, value = item
    return name, value.tolist() if isinstance(value, np.ndarray) else value


def _as_array(item: tuple[str, Any]) -> tuple[str, Any]:
    name, value = item
    return name, np.array(value, np.int64) if isinstance(value, list) else value
