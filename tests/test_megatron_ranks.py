"""Every parallel layout and recomputation of Megatron-core on CPUs equals one plain rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ranks import random_hf_weights, router_gradients, run_ranks, run_schedule
from r3.trainer_hooks.megatron_cpu import shim
from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_model_chunks, load_hf_weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
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
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
# sizes of the layout, settings of the model, kind of microbatches
Case = tuple[dict[str, Any], dict[str, Any], str]
TWO_RANKS: dict[str, Case] = {
    "dp": ({}, {}, "padded"),
    "tp": ({"tp": 2}, {}, "padded"),
    "tp-etp": ({"tp": 2, "etp": 2}, ALLTOALL, "padded"),
    "tp-ep": ({"tp": 2, "ep": 2}, ALLTOALL, "padded"),
    "ep": ({"ep": 2}, {}, "padded"),
    "ep-alltoall": ({"ep": 2}, ALLTOALL, "padded"),
    "pp": ({"pp": 2}, {}, "padded"),
    "pp-uneven": ({"pp": 2}, {"num_layers_in_first_pipeline_stage": 1}, "padded"),
    "pp-layout": ({"pp": 2}, {"pipeline_model_parallel_layout": "Et|tttL"}, "padded"),
    "vpp": ({"pp": 2, "vpp": 2}, {}, "padded"),
    "cp": ({"cp": 2}, {}, "padded"),
    "packed-cp": ({"cp": 2}, {}, "packed"),
    "packed-tp": ({"tp": 2}, {}, "packed"),
    "packed-pp": ({"pp": 2}, {}, "packed"),
}
FOUR_RANKS: dict[str, Case] = {
    "tp-pp": ({"tp": 2, "pp": 2}, ALLTOALL, "padded"),
    "ep-cp": ({"ep": 2, "cp": 2}, ALLTOALL, "padded"),
    "packed-cp-vpp": ({"cp": 2, "pp": 2, "vpp": 2}, {}, "packed"),
}
ONE_RANK: dict[str, Case] = {"padded": ({}, {}, "padded"), "packed": ({}, {}, "packed")}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def full(method: str) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": 1,
    }


RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "uniform": full("uniform"),
    "moe": selective("moe"),
    "block": full("block"),
    "layernorm": selective("layernorm"),
    "mlp": selective("mlp"),
    "core_attn": selective("core_attn"),
}
FEW = ("none", "uniform", "moe")


def make_microbatches(kind: str) -> list[dict[str, Any]]:
    """4 of 32 tokens: 2 sequences, or 3 packed ones of different lengths"""
    generator = torch.Generator().manual_seed(1)
    shape = (2, 16) if kind == "padded" else (1, 32)
    extra = {} if kind == "padded" else {"cu_seqlens": [0, 8, 20, 32]}
    return [
        {
            "input_ids": torch.randint(1, 64, shape, generator=generator),
            "labels": torch.randint(1, 64, shape, generator=generator),
            **extra,
        }
        for _ in range(4)
    ]


def run_case(case: Case, recompute: dict[str, Any], config: dict[str, Any] = CONFIG) -> Any:
    """Losses by microbatch (on the last stage) and router gradients by layer, of this rank"""
    sizes, settings, kind = case
    shim.set_parallel(**sizes)
    chunks = build_model_chunks(config, **settings, **recompute)
    load_hf_weights(chunks, random_hf_weights(config))
    losses = run_schedule(chunks, make_microbatches(kind))
    return losses, router_gradients(chunks)


Key = tuple[str, str]  # case and recompute


def run_cases(rank: int, world_size: int, store: Path, *, keys: list[Key]) -> dict[Key, Any]:
    shim.init_ranks(store, rank, world_size)
    cases = {1: ONE_RANK, 2: TWO_RANKS, 4: FOUR_RANKS}[world_size]
    found = {}
    for key in keys:
        try:
            found[key] = run_case(cases[key[0]], RECOMPUTE[key[1]])
        except Exception as e:
            e.add_note(f"in case {key}")
            raise
    return found


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    shim.init_single_process()
    yield
    shim.destroy()


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Any]:
    """By kind of microbatches: one rank that recomputes nothing"""
    found: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in found:
            found[kind] = run_case(ONE_RANK[kind], {})
        return found[kind]

    return get


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> list[dict[Key, Any]]:
    """All chosen cases in one job"""
    chosen = [i.callspec.params for i in request.session.items if hasattr(i, "callspec")]
    keys = [p["two"] for p in chosen if "two" in p]
    return run_ranks(2, run_cases, keys=keys)


def check(found: list[Any], reference: Any) -> None:
    """found: what `run_case` returned on each rank"""
    losses, gradients = reference
    last = [x for x, _ in found if x]
    assert last
    for x in last:
        assert x == pytest.approx(losses, rel=1e-5)
    assert set().union(*(g for _, g in found)) == set(gradients) == {0, 2, 3}
    for _, some in found:
        for layer, gradient in some.items():
            error = (gradient - gradients[layer]).norm() / gradients[layer].norm()
            assert error < 1e-5, layer


@pytest.mark.parametrize(
    "two",
    [
        pytest.param(
            (case, name),
            id=f"{case}-{name}",
            marks=[] if name in FEW else pytest.mark.full,
        )
        for case in TWO_RANKS
        for name in RECOMPUTE
    ],
)
def test_two_ranks_equal_one(
    two: Key, two_ranks: list[dict[Key, Any]], reference: Callable[[str], Any]
) -> None:
    check([r[two] for r in two_ranks], reference(TWO_RANKS[two[0]][2]))


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", ONE_RANK)
def test_one_rank_may_recompute(kind: str, recompute: str, reference: Callable[[str], Any]) -> None:
    check([run_case(ONE_RANK[kind], RECOMPUTE[recompute])], reference(kind))


@pytest.mark.full
def test_four_ranks_equal_one(reference: Callable[[str], Any]) -> None:
    keys = [(case, name) for case in FOUR_RANKS for name in FEW]
    found = run_ranks(4, run_cases, keys=keys)
    for key in keys:
        check([r[key] for r in found], reference(FOUR_RANKS[key[0]][2]))
