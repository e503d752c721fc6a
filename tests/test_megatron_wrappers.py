"""Replay in models as Megatron trains them: wrapped, with its optimizers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ranks import (
    optimizer_on_cpu,
    random_hf_weights,
    router_gradients,
    run_schedule,
    unwrapped,
    wrap,
)
from megatron_replay_runs import (
    CONFIG,
    RECOMPUTE,
    enter_replay,
    forward_tokens,
    make_microbatches,
    masked_loss,
    matching,
    witness,
)
from megatron_tools import MARKS, random_replay, routers_of
from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_model_chunks, load_hf_weights

pytestmark = MARKS


def build(dtype: torch.dtype = torch.float32, **settings: Any) -> list[Any]:
    chunks = build_model_chunks(CONFIG, dtype=dtype, **RECOMPUTE["full"], **settings)
    load_hf_weights(chunks, random_hf_weights(CONFIG))
    return chunks


def train(chunks: list[Any], replay: Any, microbatches: list[Any]) -> list[float]:
    enter = enter_replay(replay)

    def forward(chunk: Any, m: Any) -> torch.Tensor:
        with enter(chunk, m):
            return forward_tokens(chunk, m)

    with replay.step():
        return run_schedule(chunks, microbatches, forward, loss=masked_loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["optimizer", "distributed optimizer"])
def test_training_steps(dtype: torch.dtype, distributed: bool) -> None:
    """DistributedDataParallel, Float16Module, both optimizers: two steps, recomputed in full"""
    microbatches = make_microbatches("padded")
    with optimizer_on_cpu():
        chunks, optimizer = wrap(build(dtype), distributed_optimizer=distributed)
        (model,) = chunks
        before = [r.weight.detach().clone() for r in routers_of(unwrapped(model))]
        with random_replay(chunks) as replay:
            losses = []
            for _ in range(2):
                model.zero_grad_buffer()
                optimizer.zero_grad()
                with witness([model]) as maps:
                    losses.append(np.mean(train(chunks, replay, microbatches)))
                for layer, used in maps.items():
                    assert matching(used, microbatches, layer) == Counter(
                        dict.fromkeys(range(4), 2)
                    )
                ok, norm, _ = optimizer.step()
                assert ok
                assert norm > 0
        assert losses[1] < losses[0]
        after = [r.weight.detach() for r in routers_of(unwrapped(model))]
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(r.router_replay is None for r in routers_of(unwrapped(model)))


def test_gradients_in_the_buffers_of_ddp_are_those_of_the_bare_model() -> None:
    microbatches = make_microbatches("padded")
    bare = build()
    with random_replay(bare) as replay:
        train(bare, replay, microbatches)
    expected = router_gradients(bare)
    with optimizer_on_cpu():
        chunks, _ = wrap(build(), overlap_grad_reduce=True)
        with random_replay(chunks) as replay:
            train(chunks, replay, microbatches)
    for layer in unwrapped(chunks[0]).decoder.layers:
        if layer.layer_number - 1 in expected:
            found = layer.mlp.router.weight.main_grad
            error = (found - expected[layer.layer_number - 1]).norm() / found.norm()
            assert error < 1e-5
