"""Comparison documents for the tests of the page, as a made-up run would give them.

Everything follows from a few arrays (which layers differ in which token, the log-ratio of each
token), so that the figures of one document agree with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

TEXT = (
    "the sum of two odd numbers is even so we write n = 2 k + 1 and then it follows that every "
    "term in the series must be divisible by three which gives us the answer \\boxed { 42 } wait "
    "let me check again"
)
WORDS = TEXT.split()
EDGES = [0, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 1]

# sizes of a small document
SMALL: dict[str, Any] = {
    "layers": 3,
    "experts": 8,
    "top_k": 2,
    "rollouts": 4,
    "length": 40,
    "bins": 5,
    "excerpt": 30,
    "rate": 0.2,
}


def comparison(
    *,
    layers: int = 48,
    experts: int = 128,
    top_k: int = 8,
    rollouts: int = 32,
    length: int = 256,
    bins: int = 16,
    rate: float = 0.06,
    replay: bool = True,
    logprobs: bool = True,
    text: bool = True,
    margins: bool = True,
    outside: bool = True,
    steps: int = 0,
    excerpt: int = 200,
    seed: int = 0,
) -> dict[str, Any]:
    """A document of `rollouts` rollouts of `length` tokens, the first quarter of each a prompt."""
    rng = np.random.default_rng(seed)
    rows = length - 1  # the last token has no row that predicts anything
    depth = np.linspace(0.4, 1.6, layers) if layers > 1 else np.ones(1)
    hard = rng.gamma(0.7, 1 / 0.7, (rollouts, rows, 1))  # differing layers come together
    differs = rng.random((rollouts, rows, layers)) < np.minimum(0.9, rate * depth * hard)
    count = differs.sum(axis=2)
    prompt = length // 4
    noise = rng.standard_t(4, (rollouts, rows)) * 0.012
    native = noise + rng.standard_t(3, (rollouts, rows)) * 0.022 * np.sqrt(count)
    sampler = -rng.exponential(0.5, (rollouts, rows))
    native, after = (np.minimum(x, -sampler) for x in (native, noise))
    sampled = slice(prompt - 1, None)
    moe = list(range(layers))
    load = rng.dirichlet(np.full(experts, 4.0), layers) * rollouts * rows * top_k
    routing_native = _routing(differs, load, rng, moe, top_k, bins, length, margins)
    routing_replay = _routing(np.zeros_like(differs), load, rng, moe, top_k, bins, length, False)
    data: dict[str, Any] = {
        "format": "r3-comparison/1",
        "spec": {
            "num_experts": experts,
            "top_k": top_k,
            "moe_layers": moe,
            "num_layers": layers,
            "score_function": "softmax",
        },
        "files": {
            "a": _file("routing.r3", "vllm 0.32.0 bfloat16 cuda", rollouts, length, "bfloat16"),
            "b": _file("native.r3", "megatron-core 0.16.1 float32", rollouts, length, "float32"),
            "c": _file("replay.r3", "megatron-core 0.16.1 float32", rollouts, length, "float32")
            if replay
            else None,
        },
        "pairs": {
            "rollouts": rollouts,
            "only_a": 0,
            "only_b": 0,
            "tokens": rollouts * length,
            "sampled_tokens": rollouts * (length - prompt),
        },
        "clip": [0.5, 2.0],
        "routing": {"native": routing_native, "replay": routing_replay if replay else None},
        "mismatch": {
            "native": _mismatch(native[:, sampled], sampler[:, sampled]) if logprobs else None,
            "replay": _mismatch(after[:, sampled], sampler[:, sampled])
            if logprobs and replay
            else None,
        },
        "attribution": None,
        "slices": {},
        "worst": {"rollouts": [], "tokens": []},
        "outside_topk": _outside(differs, moe) if outside and replay else None,
        "alignment": None,
        "verdict": _verdict(replay, logprobs),
        "steps": step_records(steps, seed) if steps else [],
        "alerts": [],
        "environment": {"rollout-routing-replay": "0.1.0", "python": "3.11.2", "numpy": "2.3.1"},
    }
    if logprobs:
        data["attribution"] = _attribution(
            count[:, sampled], native[:, sampled], after[:, sampled] if replay else None
        )
    second = after if replay else None
    data["slices"] = _slices(count, native, second, sampler, prompt, layers, logprobs)
    ids = rng.integers(4, 50_000, (rollouts, length))
    pieces = [[" " + WORDS[t % len(WORDS)] for t in one] for one in ids] if text else None
    data["worst"] = _worst(
        count, native, second, sampler, prompt, layers, ids, pieces, logprobs, excerpt
    )
    return data


def _file(name: str, label: str, rollouts: int, length: int, dtype: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "rollouts": rollouts,
        "tokens": rollouts * length,
        "provenance": {
            "engine": [[label.split()[0], rollouts]],
            "engine_version": [[label.split()[1], rollouts]],
            "dtype": [[dtype, rollouts]],
            "sampling.temperature": [[1.0, rollouts]],
            "tensor_parallel_size": [[2, rollouts]],
        },
    }


def _routing(
    differs: np.ndarray,
    load: np.ndarray,
    rng: np.random.Generator,
    moe: list[int],
    top_k: int,
    bins: int,
    length: int,
    margins: bool,
) -> dict[str, Any]:
    rollouts, rows, layers = differs.shape
    count = differs.sum(axis=2)
    width = max(1, -(-length // bins))
    bin_of = np.arange(rows) // width
    inside = [bin_of == k for k in range(bins) if (bin_of == k).any()]
    total = int(differs.sum())
    load_b = load * rng.uniform(0.97, 1.03, load.shape) if total else load
    vio = [x.max(axis=1) / x.mean(axis=1) - 1 for x in (load, load_b)]
    share = differs.mean(axis=(0, 1))
    per_rollout = count.mean(axis=1)
    edges = [0, 1e-4, 1e-3, 1e-2, 1e-1, None]
    cells = [int(differs.size * p) for p in (0.004, 0.03, 0.25, 0.5, 0.216)]
    flips = [int(total * p) for p in (0.05, 0.4, 0.5, 0.05, 0.0)]
    experts = load.shape[1]
    swaps = [
        {
            "layer": moe[int(rng.integers(layers))],
            "from": int(rng.integers(experts)),
            "to": int(rng.integers(experts)),
            "cells": 60 - k,
        }
        for k in range(50 if total and experts > 1 else 0)
    ]
    return {
        "rows": rollouts * rows,
        "rows_left_out": 3,
        "cell_disagreement": float(share.mean()),
        "expert_disagreement": float(share.mean() * 1.08 / top_k),
        "token_disagreement": float((count > 0).mean()),
        "layers_per_token_mean": float(count.mean()),
        "layers_per_token": np.bincount(count.ravel(), minlength=layers + 1).tolist(),
        "sequence_level": {
            "mean": float(per_rollout.mean()),
            "p50": float(np.quantile(per_rollout, 0.5)),
            "p90": float(np.quantile(per_rollout, 0.9)),
            "p99": float(np.quantile(per_rollout, 0.99)),
            "max": float(per_rollout.max()),
        },
        "top1_changed": float(share.mean() * 0.1),
        "max_vio_a": float(vio[0].mean()),
        "max_vio_b": float(vio[1].mean()),
        "layers": [
            {
                "layer": moe[k],
                "cell_disagreement": float(share[k]),
                "expert_disagreement": float(share[k] * 1.08 / top_k),
                "top1_changed": float(share[k] * 0.1),
                "max_vio_a": float(vio[0][k]),
                "max_vio_b": float(vio[1][k]),
            }
            for k in range(layers)
        ],
        "positions": {
            "width": width,
            "rows": [int(where.sum()) * rollouts for where in inside],
            "cell_disagreement": [differs[:, where].mean(axis=(0, 1)).tolist() for where in inside],
        },
        "margins": {"edges": edges, "cells": cells, "differing": flips} if margins else None,
        "load_a": np.rint(load).astype(int).tolist(),
        "load_b": np.rint(load_b).astype(int).tolist(),
        "swaps": swaps,
        "swapped_cells": int(total * 0.9),
    }


def _mismatch(lr: np.ndarray, sampler: np.ndarray) -> dict[str, Any]:
    size, r = np.abs(lr), np.exp(lr)
    n, sums = lr.size, lr.sum(axis=1)
    metrics = {
        "tokens": n,
        "sequences": len(lr),
        "left_out": 2,
        "kl_k1": float(-lr.mean()),
        "kl_k3": float((np.expm1(lr) - lr).mean()),
        "chi2_token": float((r**2).mean() - 1),
        "logratio_min": float(lr.min()),
        "logratio_max": float(lr.max()),
        "abs_logratio_mean": float(size.mean()),
        **{
            f"abs_logratio_p{k}": float(np.quantile(size, q))
            for k, q in (("50", 0.5), ("90", 0.9), ("99", 0.99), ("999", 0.999))
        },
        "abs_logratio_max": float(size.max()),
        **{f"extreme_{f:g}": float((size > math.log(f)).mean()) for f in (1.1, 1.5, 2, 5, 10)},
        "ratio_fraction_high": float((r > 2).mean()),
        "ratio_fraction_low": float((r < 0.5).mean()),
        "ratio_mean": float(r.mean()),
        "ess": float(r.sum() ** 2 / (n * (r**2).sum())),
        "ess_sequence": float(np.exp(sums).sum() ** 2 / (len(sums) * np.exp(2 * sums).sum())),
        "seq_logratio_abs_max": float(np.abs(sums).max()),
        "probs_pearson": None,
    }
    thresholds = np.geomspace(1e-4, 10, 80)
    p = {"sampler": np.exp(sampler), "trainer": np.exp(sampler + lr)}
    return {
        "metrics": metrics,
        "survival": {
            "thresholds": thresholds.tolist(),
            "share": [float((size > t).mean()) for t in thresholds],
        },
        "buckets": {
            who: [
                _bucket(low, high, lr[(x >= low) & (x < high + (high == 1))])
                for low, high in pairwise(EDGES)
            ]
            for who, x in p.items()
        },
        "left_out": {
            "trainer_nan": 1,
            "trainer_inf": 0,
            "trainer_positive": 0,
            "sampler_nan": 0,
            "sampler_inf": 1,
            "sampler_positive": 0,
        },
        "examples": ["rollout run-1/3/0, token 17: trainer nan"],
    }


def _bucket(low: float, high: float, lr: np.ndarray) -> dict[str, Any]:
    return {"low": low, "high": high, "tokens": len(lr)} | _short(lr)


def _short(lr: np.ndarray | None) -> dict[str, Any]:
    if lr is None or not lr.size:
        return dict.fromkeys(
            (
                "abs_logratio_mean",
                "abs_logratio_max",
                "abs_logratio_p99",
                "kl_k3",
                "extreme_2",
                "ess",
            )
        )
    size, r = np.abs(lr), np.exp(lr)
    return {
        "abs_logratio_mean": float(size.mean()),
        "abs_logratio_max": float(size.max()),
        "abs_logratio_p99": float(np.quantile(size, 0.99)),
        "kl_k3": float((np.expm1(lr) - lr).mean()),
        "extreme_2": float((size > math.log(2)).mean()),
        "ess": float(r.sum() ** 2 / (r.size * (r**2).sum())),
    }


def _attribution(count: np.ndarray, native: np.ndarray, after: np.ndarray | None) -> dict[str, Any]:
    k3 = np.expm1(native) - native
    groups = [("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3-4", 3, 4), ("5-8", 5, 8), ("9-16", 9, 16)]
    by_layers = []
    for name, low, high in groups:
        where = (count >= low) & (count <= high)
        if not where.any():
            continue
        one, two = _short(native[where]), _short(None if after is None else after[where])
        keys = ("kl_k3", "abs_logratio_mean", "abs_logratio_max", "extreme_2")
        by_layers.append(
            {
                "layers": name,
                "tokens": int(where.sum()),
                "token_share": float(where.mean()),
                "kl_share_native": float(k3[where].sum() / k3.sum()),
            }
            | {f"{k}_native": one[k] for k in keys}
            | {f"{k}_replay": two[k] for k in keys}
        )
    differing = count > 0
    removed = None if after is None else float(1 - (np.expm1(after) - after).sum() / k3.sum())
    return {
        "by_layers": by_layers,
        "token_share_differing": float(differing.mean()),
        "kl_share_differing": float(k3[differing].sum() / k3.sum()),
        "kl_removed_by_replay": removed,
    }


def _slices(
    count: np.ndarray,
    native: np.ndarray,
    after: np.ndarray | None,
    sampler: np.ndarray,
    prompt: int,
    layers: int,
    logprobs: bool,
) -> dict[str, Any]:
    rollouts, rows = count.shape
    position = np.broadcast_to(np.arange(rows), count.shape)
    which = np.broadcast_to(np.arange(rollouts)[:, None], count.shape)
    dimensions = {
        "segment": {"prompt": position < prompt - 1, "response": position >= prompt - 1},
        "turn": {"0": position < rows // 2, "1": position >= rows // 2},
        "weight_lag": {"0": which % 2 == 0, "1": which % 2 == 1, "not known": which < 0},
    }
    return {
        name: [
            _slice(
                label,
                where,
                where & (position >= prompt - 1),
                count,
                native,
                after,
                layers,
                logprobs,
            )
            for label, where in labels.items()
        ]
        for name, labels in dimensions.items()
    }


def _slice(
    label: str,
    where: np.ndarray,
    sampled: np.ndarray,
    count: np.ndarray,
    native: np.ndarray,
    after: np.ndarray | None,
    layers: int,
    logprobs: bool,
) -> dict[str, Any]:
    some = bool(where.any())
    one = _short(native[sampled] if logprobs else None)
    two = _short(after[sampled] if logprobs and after is not None else None)
    keys = ("kl_k3", "abs_logratio_p99", "extreme_2", "ess")
    return (
        {
            "label": label,
            "rows": int(where.sum()),
            "cell_disagreement": float(count[where].mean() / layers) if some else None,
            "token_disagreement": float((count[where] > 0).mean()) if some else None,
            "tokens": int(sampled.sum()),
        }
        | {f"{k}_native": one[k] for k in keys}
        | {f"{k}_replay": two[k] for k in keys}
    )


def _worst(
    count: np.ndarray,
    native: np.ndarray,
    after: np.ndarray | None,
    sampler: np.ndarray,
    prompt: int,
    layers: int,
    ids: np.ndarray,
    pieces: list[list[str]] | None,
    logprobs: bool,
    excerpt: int,
) -> dict[str, Any]:
    length = ids.shape[1]
    size = np.abs(native).copy()
    size[:, : prompt - 1] = 0
    found = []
    for b in np.argsort(-(size.max(axis=1) if logprobs else count.mean(axis=1)))[:20].tolist():
        peak = int(size[b].argmax())
        start = max(0, min(prompt - 8, peak - excerpt // 2, length - excerpt))
        stop = min(length, start + excerpt)
        one = native[b, prompt - 1 :]
        two = None if after is None else after[b, prompt - 1 :]
        a, c = _short(one if logprobs else None), _short(two if logprobs else None)
        found.append(
            {
                "id": f"run-1/{b // 4}/{b % 4}",
                "tokens": length,
                "sampled_tokens": length - prompt,
                "cell_disagreement": float(count[b].mean() / layers),
                "token_disagreement": float((count[b] > 0).mean()),
                "kl_k3_native": a["kl_k3"],
                "kl_k3_replay": c["kl_k3"],
                "abs_logratio_max_native": a["abs_logratio_max"],
                "abs_logratio_max_replay": c["abs_logratio_max"],
                "seq_logratio_native": float(one.sum()) if logprobs else None,
                "seq_logratio_replay": float(two.sum()) if logprobs and two is not None else None,
                "excerpt": {
                    "start": start,
                    "prompt_len": prompt,
                    "token_ids": ids[b, start:stop].tolist(),
                    "text": None if pieces is None else pieces[b][start:stop],
                    "layers": [
                        int(count[b, t]) if t < length - 1 else None for t in range(start, stop)
                    ],
                    "logratio_native": _per_token(native[b], start, stop, prompt, logprobs),
                    "logratio_replay": None
                    if after is None
                    else _per_token(after[b], start, stop, prompt, logprobs),
                },
            }
        )
    tokens = []
    flat = np.argsort(-size, axis=None)[: 50 if logprobs else 0]
    for b, row in zip(*np.unravel_index(flat, size.shape), strict=True):
        t = int(row) + 1
        near = slice(max(0, t - 6), min(length, t + 5))
        tokens.append(
            {
                "id": f"run-1/{b // 4}/{b % 4}",
                "position": t,
                "token_id": int(ids[b, t]),
                "text": None if pieces is None else pieces[b][t],
                "sampler_logprob": float(sampler[b, row]),
                "trainer_logprob": float(sampler[b, row] + native[b, row]),
                "logratio_native": float(native[b, row]),
                "logratio_replay": None if after is None else float(after[b, row]),
                "layers_differing": int(count[b, row]),
                "context": {
                    "start": near.start,
                    "token_ids": ids[b, near].tolist(),
                    "text": None if pieces is None else pieces[b][near],
                },
            }
        )
    return {"rollouts": found, "tokens": tokens}


def _per_token(lr: np.ndarray, start: int, stop: int, prompt: int, known: bool) -> list[Any]:
    """Log-ratio of each token: that of the row before it; None for the prompt."""
    return [
        round(float(lr[t - 1]), 5) if known and t >= prompt else None for t in range(start, stop)
    ]


def _outside(differs: np.ndarray, moe: list[int]) -> dict[str, Any]:
    share = differs.mean(axis=(0, 1))
    return {
        name: {
            "cells": float(share.mean()) * factor,
            "experts": float(share.mean()) * factor / 8,
            "layers": [
                {"layer": moe[k], "cells": float(x) * factor, "experts": float(x) * factor / 8}
                for k, x in enumerate(share)
            ],
        }
        for name, factor in (("forced", 0.9), ("free", 0.0))
    }


def _verdict(replay: bool, logprobs: bool) -> dict[str, Any]:
    findings = [
        {
            "level": "bad",
            "title": "Routing differs in more cells than arithmetic alone explains",
            "text": "Layers near the output differ most. This is what routing replay is for.",
            "look_at": "where",
        }
    ]
    if replay:
        findings.append(
            {
                "level": "good",
                "title": "Replay works: every cell used the sampler's experts",
                "text": "What remains of the mismatch is arithmetic.",
                "look_at": "tails" if logprobs else "figures",
            }
        )
    if logprobs:
        findings.append(
            {
                "level": "notice",
                "title": "A few tokens carry the weight",
                "text": "Single tokens differ by more than a factor of 2.",
                "look_at": "rollouts",
            }
        )
    return {"level": "bad", "findings": findings}


def step_records(steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records of the monitor: a run whose mismatch grows, with a change of dtype half way.

    Alerts: F(2) from where it passes 0.03, sequences' ESS from where it is below 0.5, and one
    about the change, of no figure.
    """
    rng = np.random.default_rng(seed)
    records = []
    for k in range(steps):
        grow = math.exp(3 * k / max(steps, 1)) * (1 + 0.1 * rng.standard_normal())
        extreme, ess = 2e-4 * grow**2, 1 / (1 + 0.1 * grow**2)
        changed = steps > 1 and k == steps // 2
        alerts = []
        if extreme > 0.03:
            text = f"F(2) is {extreme:.3g}, above 0.03"
            alerts.append(_alert("extreme_2", "bad", "routing/extreme_2", extreme, 0.03, text))
        if ess < 0.5:
            text = f"effective sample size is {ess:.3g}, below 0.5"
            alerts.append(_alert("ess_sequence", "notice", "routing/ess_sequence", ess, 0.5, text))
        if changed:
            text = "changed: engine.dtype: 'bfloat16' -> 'float8'"
            alerts.append(_alert("environment", "notice", None, None, None, text))
        records.append(
            {
                "step": k,
                "time": 1_760_000_000 + 90 * k,
                "metrics": {
                    "routing/tokens": 3000,
                    "rollout_corr/k3_kl": 1.5e-3 * grow,
                    "routing/cell_disagreement_free": min(0.9, 0.06 * grow**0.2),
                    "routing/token_disagreement_free": min(0.99, 0.4 * grow**0.2),
                    "routing/abs_logratio_p99": 0.1 * grow,
                    "routing/abs_logratio_p999": 0.3 * grow,
                    "routing/abs_logratio_max": 0.9 * grow,
                    "routing/extreme_2": extreme,
                    "routing/ess": 1 / (1 + 0.01 * grow**2),
                    "routing/ess_sequence": ess,
                    "routing/outside_topk_experts_forced": 0.004 * grow**0.2,
                    "routing/outside_topk_experts_free": 0.006 * grow**0.2,
                    "routing/weight_lag_mean": 0.5 + k / max(steps, 1),
                    "routing/weight_lag_max": 1 + k // 10,
                },
                "slices": {
                    "length": {
                        "64-127": _step_slice(1000, 1e-3 * grow),
                        "128-255": _step_slice(2000, 1.75e-3 * grow),
                    },
                    "turn": {"0": _step_slice(3000, 1.5e-3 * grow), "1": _step_slice(0, None)},
                },
                "alerts": alerts,
                "environment": {"engine.dtype": "bfloat16"},
                "changes": {"engine.dtype": ["bfloat16", "float8"]} if changed else {},
            }
        )
    return records


def _alert(
    name: str, level: str, figure: str | None, value: float | None, limit: float | None, text: str
) -> dict[str, Any]:
    found = {"name": name, "level": level, "figure": figure, "value": value, "limit": limit}
    return found | {"message": text, "look_at": "the same figure by slice; the worst tokens"}


def _step_slice(tokens: int, kl: float | None) -> dict[str, Any]:
    known = tokens > 0
    return {
        "tokens": tokens,
        "kl_k3": kl,
        "abs_logratio_p99": 0.1 if known else None,
        "extreme_2": 2e-4 if known else None,
        "ess": 0.97 if known else None,
        "rows": tokens + 40,
        "cell_disagreement_free": 0.0625,
        "token_disagreement_free": 0.4,
    }


def only_steps(steps: int = 40) -> dict[str, Any]:
    """What the monitor alone can show."""
    return {
        "format": "r3-comparison/1",
        "spec": None,
        "files": {"a": None, "b": None, "c": None},
        "pairs": None,
        "clip": [0.5, 2.0],
        "routing": {"native": None, "replay": None},
        "mismatch": {"native": None, "replay": None},
        "attribution": None,
        "slices": {},
        "worst": {"rollouts": [], "tokens": []},
        "outside_topk": None,
        "alignment": None,
        "verdict": None,
        "steps": step_records(steps),
        "alerts": [],
        "environment": {"rollout-routing-replay": "0.1.0"},
    }


def no_rows() -> dict[str, Any]:
    """A comparison in which nothing could be compared: counts are 0 and shares null."""
    data = comparison(layers=2, experts=4, top_k=2, rollouts=2, length=12, bins=2)
    for side in ("native", "replay"):
        block = data["routing"][side]
        for key, value in block.items():
            if isinstance(value, float):
                block[key] = None
        block |= {"rows": 0, "rows_left_out": 22, "layers_per_token": [0, 0, 0], "swaps": []}
        block["sequence_level"] = dict.fromkeys(block["sequence_level"])
        block["positions"] = {"width": 6, "rows": [], "cell_disagreement": []}
        block["load_a"] = block["load_b"] = [[0] * 4] * 2
        block["margins"] = None
        for layer in block["layers"]:
            layer |= {k: None for k in layer if k != "layer"}
        m = data["mismatch"][side]
        m["metrics"] = {k: 0 if isinstance(v, int) else None for k, v in m["metrics"].items()}
        m["survival"] = {"thresholds": [], "share": []}
    data["attribution"] = None
    data["slices"], data["worst"] = {}, {"rollouts": [], "tokens": []}
    data["verdict"] = {"level": "notice", "findings": []}
    return data


def charts_unwritten(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Leave out the slow writing of charts; their matplotlib axes by name, once they are drawn."""
    from matplotlib.figure import Figure

    found: dict[str, Any] = {}

    def keep(name: str, paint: Callable[[Any], None], size: tuple[float, float], top: float) -> str:
        wide, high = size[0], size[1] + top
        axes = Figure(figsize=(wide, high)).subplots()
        axes.figure.subplots_adjust(0.62 / wide, 0.5 / high, 1 - 0.12 / wide, 1 - top / high)
        paint(axes)
        found[name] = axes
        return "<svg></svg>"

    monkeypatch.setattr("r3.page.charts.write_svg", keep)
    return found
