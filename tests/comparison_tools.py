"""Small captures of two or three sides, drawn at random, for tests of comparisons."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from r3 import Column, Provenance, RolloutId, RouterSpec, RoutingTrace
from r3.columns import text_column
from r3.storage import ShardWriter

SPEC = RouterSpec(num_experts=8, top_k=2, moe_layers=(1, 2, 4), num_layers=5)


def draw_sets(rng: np.random.Generator, rows: int, spec: RouterSpec = SPEC) -> np.ndarray:
    noise = rng.random((rows, len(spec.moe_layers), spec.num_experts))
    return noise.argsort(axis=-1)[..., : spec.top_k].astype(spec.dtype)


def draw_rollout(
    rng: np.random.Generator,
    number: int,
    *,
    spec: RouterSpec = SPEC,
    sides: int = 3,
    logprobs: bool = True,
    run: str = "run",
) -> list[RoutingTrace]:
    """Traces of one rollout: engine, trainer and, if `sides` is 3, trainer under replay.

    Some have a tool's reply and a second turn, tags and missing rows.
    """
    n = int(rng.integers(6, 60))
    prompt = int(rng.integers(1, n - 2))
    tokens = rng.integers(0, 50, n)
    segments = np.where(np.arange(n) < prompt, 0, 1).astype(np.uint8)
    turns = np.zeros(n, np.uint16)
    if number % 3 == 1 and n - prompt > 5:
        segments[prompt + 2 : prompt + 4] = 2
        turns[prompt + 2 :] = 1
    extra = {"segments": Column(segments, "token"), "turns": Column(turns, "token")}
    tags = ["math"] if number % 2 else ["math", "code"]
    sampled = segments == 1
    ids = draw_sets(rng, n - 1, spec)
    others = np.where(rng.random(ids.shape[:2])[..., None] < 0.2, draw_sets(rng, n - 1, spec), ids)
    engine = np.where(sampled, -rng.exponential(1, n), np.nan).astype(np.float32)
    traces = []
    for side in range(sides):
        noise = rng.normal(0, (0, 0.3, 0.02)[side], n)
        values = np.minimum(engine + noise, 0).astype(np.float32)
        trace_extra = dict(extra)
        if side == 0:
            trace_extra["tags"] = text_column(tags)
        if side == 1:
            margins = rng.exponential(1, (n - 1, len(spec.moe_layers))).astype(np.float32)
            trace_extra["router_margins"] = Column(margins, "row")
        valid = rng.random(n - 1) < (0.9 if side < 2 and number % 4 == 0 else 1)
        if side == 1:
            trace_extra["router_margins"].data[~valid] = np.nan
        if not valid.any():
            valid[0] = True
        traces.append(
            RoutingTrace.build(
                spec=spec,
                token_ids=tokens,
                routed_experts=ids if side != 1 else others,
                prompt_len=prompt,
                valid=valid,
                logprobs=values if logprobs else None,
                weight_versions=number % 3 if side == 0 else 9,
                rollout_id=RolloutId(run, str(number)),
                provenance=Provenance(
                    engine=("vllm", "megatron-core", "megatron-core")[side],
                    dtype=("bfloat16", "float32", "float32")[side],
                ),
                extra=trace_extra,
            )
        )
    return traces


def write_shard(path: Path, traces: list[RoutingTrace]) -> Path:
    with ShardWriter(path, traces[0].spec) as shard:
        for trace in traces:
            shard.append(trace)
    return path
