"""The rollouts and tokens in which engine and trainer are furthest apart, with their context.

Means and tails say that a run is in danger, these say where. A rollout ranks by its part of the
whole KL, the sum of r - 1 - log r over its tokens, as that is what would have to be removed; those
without any, for lack of log-probabilities say, behind them by their differing cells. Tokens rank by
|log r|. Equals rank by name and position, so that the order of rollouts does not matter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3.batch import RoutingBatch

MOST_ROLLOUTS, MOST_TOKENS = 20, 50
_EXCERPT, _CONTEXT = 400, 12  # tokens of a rollout that are shown; tokens on each side of a token

Texts = Callable[[Sequence[int]], list[str]]  # token ids to one text each


@dataclass(frozen=True, eq=False)
class TokenView:
    """What is known of each packed token of a batch, float64 [T], NaN for nothing.

    native, replay: log-ratios of tokens; layers: differing layers of the row of the token.
    """

    batch: RoutingBatch
    sampler: np.ndarray
    native: np.ndarray
    replay: np.ndarray | None
    layers: np.ndarray

    def sequence(self, i: int) -> TokenView:
        """The tokens of one rollout; its `batch` stays the whole one."""
        part = slice(int(self.batch.cu_seqlens[i]), int(self.batch.cu_seqlens[i + 1]))
        replay = None if self.replay is None else self.replay[part]
        return TokenView(
            self.batch, self.sampler[part], self.native[part], replay, self.layers[part]
        )


class Worst:
    """The worst rollouts and tokens of all batches that were added; bounded."""

    def __init__(self) -> None:
        self._rollouts: list[tuple[tuple[float, float, str], dict[str, Any]]] = []
        self._tokens: list[tuple[tuple[float, str, int], dict[str, Any]]] = []

    def add(self, view: TokenView) -> None:
        batch = view.batch
        starts = batch.cu_seqlens[:-1]
        with np.errstate(over="ignore"):
            k3 = np.nan_to_num(np.expm1(view.native) - view.native, nan=0.0, posinf=np.inf)
        kl, layers = (np.add.reduceat(x, starts) for x in (k3, np.nan_to_num(view.layers)))
        ranks = [
            ((-k, -n, str(batch.rollout_ids[i])), i)
            for i, (k, n) in enumerate(zip(kl.tolist(), layers.tolist(), strict=True))
            if k > 0 or n > 0
        ]
        for rank, i in heapq.nsmallest(MOST_ROLLOUTS, ranks):
            self._rollouts.append((rank, describe_rollout(view, i)))
        self._rollouts = sorted(self._rollouts, key=lambda x: x[0])[:MOST_ROLLOUTS]

        far = np.nan_to_num(np.abs(view.native), nan=0.0)
        least = np.partition(far, -MOST_TOKENS)[-MOST_TOKENS] if len(far) > MOST_TOKENS else 0.0
        places = []
        for at in np.flatnonzero((far >= least) & (far > 0)).tolist():
            name, position = batch.locate(at)
            places.append(((-float(far[at]), str(name), position), at))
        for place, at in heapq.nsmallest(MOST_TOKENS, places):
            self._tokens.append((place, _token(view, at)))
        self._tokens = sorted(self._tokens, key=lambda x: x[0])[:MOST_TOKENS]

    def to_dict(self, texts: Texts | None = None) -> dict[str, Any]:
        """The block "worst" of a comparison. texts: what tokens say, None where not known."""
        rollouts = [dict(entry) for _, entry in self._rollouts]
        tokens = [dict(entry) for _, entry in self._tokens]
        for entry in rollouts:
            ids = entry["excerpt"]["token_ids"]
            entry["excerpt"] = entry["excerpt"] | {"text": texts(ids) if texts else None}
        for entry in tokens:
            context = entry["context"]
            said = texts(context["token_ids"]) if texts else None
            entry["text"] = said[entry["position"] - context["start"]] if said else None
            entry["context"] = context | {"text": said}
        return {"rollouts": rollouts, "tokens": tokens}


def describe_rollout(view: TokenView, i: int, most: int = _EXCERPT) -> dict[str, Any]:
    """Figures of rollout `i`, and the `most` tokens around the worst of it."""
    batch, part = view.batch, view.sequence(i)
    start, stop = int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])
    prompt_len, n = int(batch.prompt_lens[i]), stop - start
    compared = ~np.isnan(part.layers)
    far = np.nan_to_num(np.abs(part.native), nan=-1.0)
    worst = int(far.argmax()) if far.max() >= 0 else int(np.nan_to_num(part.layers).argmax())
    first = max(0, min(worst - most // 2, n - most))
    shown = slice(first, min(first + most, n))
    entry: dict[str, Any] = {
        "id": str(batch.rollout_ids[i]),
        "tokens": n,
        "sampled_tokens": int(np.isfinite(part.sampler).sum()),
        "cell_disagreement": _mean(part.layers[compared] / len(batch.spec.moe_layers)),
        "token_disagreement": _mean(part.layers[compared] > 0),
    }
    for name, log_ratio in (("native", part.native), ("replay", part.replay)):
        there = np.zeros(0) if log_ratio is None else log_ratio[np.isfinite(log_ratio)]
        with np.errstate(over="ignore"):
            entry[f"kl_k3_{name}"] = _mean(np.expm1(there) - there)
        entry[f"abs_logratio_max_{name}"] = float(np.abs(there).max()) if len(there) else math.nan
        entry[f"seq_logratio_{name}"] = float(there.sum()) if len(there) else math.nan
    entry["excerpt"] = {
        "start": first,
        "prompt_len": prompt_len,
        "token_ids": batch.token_ids[start:stop][shown].tolist(),
        "layers": _counts(part.layers[shown]),
        "logratio_native": _numbers(part.native[shown]),
        "logratio_replay": None if part.replay is None else _numbers(part.replay[shown]),
    }
    return entry


def _token(view: TokenView, at: int) -> dict[str, Any]:
    batch = view.batch
    rollout, position = batch.locate(at)
    start = at - position
    stop = int(batch.cu_seqlens[np.searchsorted(batch.cu_seqlens, at, side="right")])
    low, high = max(start, at - _CONTEXT), min(stop, at + _CONTEXT + 1)
    fed = view.layers[at - 1] if position else math.nan  # of the pass that produced the token
    return {
        "id": str(rollout),
        "position": position,
        "token_id": int(batch.token_ids[at]),
        "sampler_logprob": float(view.sampler[at]),
        "trainer_logprob": float(view.sampler[at] + view.native[at]),
        "logratio_native": float(view.native[at]),
        "logratio_replay": None if view.replay is None else float(view.replay[at]),
        "layers_differing": None if math.isnan(fed) else int(fed),
        "context": {"start": low - start, "token_ids": batch.token_ids[low:high].tolist()},
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _counts(values: np.ndarray) -> list[int | None]:
    return [None if math.isnan(x) else int(x) for x in values.tolist()]


def _numbers(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(x) else round(x, 6) for x in values.tolist()]
