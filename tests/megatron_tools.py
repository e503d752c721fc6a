"""A tiny Megatron-core MoE on one CPU rank, random routing for it, and what it natively chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from r3 import RolloutId, RouterSpec, RoutingBatch, RoutingTrace
from r3.trainer_hooks import MegatronReplay
from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_gpt_model

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SPEC = RouterSpec(num_experts=8, top_k=2, moe_layers=(0, 2), num_layers=3)
FOUR_LAYERS = {**CONFIG, "num_hidden_layers": 4}
# of a test module that runs Megatron-core
MARKS = [
    pytest.mark.slow,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def make_model(seed: int = 0, config: dict[str, Any] | None = None, **settings: Any) -> Any:
    model = build_gpt_model({**CONFIG, **(config or {})}, **settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # large weights, so that routing depends on the token
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.3, generator=generator)
    return model


def random_replay(model: Any, **options: Any) -> MegatronReplay:
    """Replay of routing that has nothing to do with the model, which a witness would refuse."""
    return MegatronReplay(model, **{"max_outside_fraction": None, **options})


def routers_of(model: Any) -> list[Any]:
    return [layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")]


def random_batch(
    lengths: list[int], spec: RouterSpec = SPEC, seed: int = 0, missing: float = 0.2
) -> RoutingBatch:
    """Random tokens and random expert sets: any other order of rows or layers would be seen."""
    rng = np.random.default_rng(seed)
    traces = []
    for i, n in enumerate(lengths):
        noise = rng.random((n - 1, len(spec.moe_layers), spec.num_experts))
        traces.append(
            RoutingTrace.build(
                spec=spec,
                token_ids=rng.integers(1, 64, n),
                routed_experts=noise.argsort(axis=-1)[..., : spec.top_k],
                prompt_len=1,
                valid=rng.random(n - 1) >= missing,
                rollout_id=RolloutId("run", sample=i),
            )
        )
    return RoutingBatch.from_traces(traces)


def padded(batch: RoutingBatch, extra: int = 0) -> Any:
    sequences = np.split(batch.token_ids, batch.cu_seqlens[1:-1])
    width = max(map(len, sequences)) + extra
    return torch.tensor([s.tolist() + [0] * (width - len(s)) for s in sequences])


def packed_params(ends: list[int]) -> Any:
    """Megatron's description of packed sequences with these offsets, the first of which is 0."""
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor(ends, dtype=torch.int32)
    longest = int(cu.diff().max())
    return PackedSeqParams("thd", cu, cu, max_seqlen_q=longest, max_seqlen_kv=longest)


def forward(model: Any, input_ids: Any, packed: Any = None) -> Any:
    b, s = input_ids.shape
    positions = torch.arange(s).expand(b, s)
    return model(input_ids, positions, None, packed_seq_params=packed)


@contextmanager
def native_topk(model: Any) -> Iterator[list[np.ndarray]]:
    """Per call of a router: the sets that its own logits favour, worked out here in float64."""
    found: list[np.ndarray] = []

    def hook(router: Any, inputs: Any, _output: Any) -> None:
        x = inputs[0].detach().double().flatten(0, -2)
        logits = x @ router.weight.detach().double().T
        found.append(logits.topk(router.topk).indices.sort().values.numpy())

    handles = [r.register_forward_hook(hook) for r in routers_of(model)]
    yield found
    for handle in handles:
        handle.remove()


def expected_rows(batch: RoutingBatch, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted ids [rows, layers, top_k] and which are to be replayed; rows: packed tokens or -1"""
    ids = np.sort(batch.routed_experts[rows].astype(int), axis=-1)
    replayed = np.array([r >= 0 and bool(batch.valid[r]) for r in rows])
    return ids, replayed
