"""Batches, trainers and reports of a training step, for tests of what is recorded of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from r3 import (
    RolloutId,
    RouterSpec,
    RoutingBatch,
    RoutingTrace,
)
from r3.trainer_hooks.megatron_report import LayerCounts, ReplayReport

SPEC = RouterSpec(num_experts=8, top_k=2, moe_layers=(1, 2, 4), num_layers=5)
LENGTHS = (6, 1, 12, 9)
DEEP = json.loads("[" * 900 + "]" * 900)


def random_ids(rng: np.random.Generator, rows: int, spec: RouterSpec = SPEC) -> np.ndarray:
    noise = rng.random((rows, len(spec.moe_layers), spec.num_experts))
    return noise.argsort(axis=-1)[..., : spec.top_k].astype(spec.dtype)


def make_batch(seed: int = 0, lengths: tuple[int, ...] = LENGTHS, run: str = "run") -> RoutingBatch:
    rng = np.random.default_rng(seed)
    traces = []
    for i, n in enumerate(lengths):
        logprobs = np.full(n, np.nan, np.float32)
        prompt = min(3, n)
        logprobs[prompt:] = -rng.exponential(1, n - prompt)
        traces.append(
            RoutingTrace.build(
                spec=SPEC,
                token_ids=rng.integers(0, 50, n),
                routed_experts=random_ids(rng, n - 1),
                prompt_len=prompt,
                logprobs=logprobs,
                weight_versions=rng.integers(3, 6, n - 1),
                rollout_id=RolloutId(run, sample=i),
            )
        )
    return RoutingBatch.from_traces(traces)


def trainer_of(batch: RoutingBatch, seed: int = 1, size: float = 0.1) -> np.ndarray:
    """Log-probs near the engine's; anything where no token was sampled."""
    noise = np.random.default_rng(seed).normal(0, size, batch.num_tokens)
    found = np.minimum(batch.logprobs.astype(np.float64) + noise, 0)
    return np.where(np.isnan(found), np.inf, found)


def native_of(batch: RoutingBatch, seed: int = 2, share: float = 0.2) -> RoutingBatch:
    """Another choice in some cells, and no route in one row."""
    rng = np.random.default_rng(seed)
    other = rng.random(batch.routed_experts.shape[:2]) < share
    ids = np.where(other[..., None], random_ids(rng, batch.num_tokens), batch.routed_experts)
    valid = batch.valid.copy()
    valid[0] = False
    ids[~valid] = 0
    return replace(batch, routed_experts=ids.astype(SPEC.dtype), valid=valid)


def report_of(k: int = 1) -> ReplayReport:
    layers = {
        1: LayerCounts(90 * k, 6 * k, 4 * k, 2, 0, 9 * k, 12 * k, 50, 5, 5),
        4: LayerCounts(90 * k, 6 * k, 4 * k, 2, 1, 0, 0, 50, 0, 0),
    }
    return ReplayReport(layers, {}, top_k=2)


def strict(text: str) -> dict:
    def no_constant(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=no_constant)


def lines_of(path: Path) -> list[dict]:
    return [strict(line) for line in path.read_text().splitlines()]


def same(a: object, b: object) -> bool:
    """Equal, with NaN equal to itself; sums of floats to the last but a few bits."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == pytest.approx(b, rel=1e-12, abs=1e-15, nan_ok=True)
    return a == b
