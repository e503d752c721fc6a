"""Every parallel layout and recomputation of Megatron-core on CPUs equals one plain rank."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ranks import (
    optimizer_on_cpu,
    random_hf_weights,
    router_gradients,
    run_ranks,
    run_schedule,
    wrap,
)
from megatron_tools import FOUR_LAYERS as CONFIG
from r3 import FormatError, UnsupportedError
from r3.trainer_hooks.megatron_cpu import shim
from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_model_chunks, load_hf_weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

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
    "masked-cp": ({"cp": 2}, {}, "masked"),
    "packed-cp": ({"cp": 2}, {}, "packed"),
    "packed-padded-cp": ({"cp": 2}, {}, "packed-padded"),
    "packed-tp": ({"tp": 2}, {}, "packed"),
    "packed-pp": ({"pp": 2}, {}, "packed"),
}
FOUR_RANKS: dict[str, Case] = {
    "tp-pp": ({"tp": 2, "pp": 2}, ALLTOALL, "padded"),
    "ep-cp": ({"ep": 2, "cp": 2}, ALLTOALL, "padded"),
    "packed-cp-vpp": ({"cp": 2, "pp": 2, "vpp": 2}, {}, "packed"),
}
ONE_RANK: dict[str, Case] = {
    kind: ({}, {}, kind) for kind in ("padded", "masked", "packed", "packed-padded")
}


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
TIED = {**CONFIG, "tie_word_embeddings": True}


def make_microbatches(kind: str) -> list[dict[str, Any]]:
    """4 of 32 tokens: 2 sequences, or 3 packed ones of different lengths"""
    generator = torch.Generator().manual_seed(1)
    shape = (1, 32) if kind.startswith("packed") else (2, 16)
    extra: dict[str, Any] = {}
    if kind == "masked":  # 0 and 5 slots of padding on the left
        mask = torch.ones(2, 1, 16, 16, dtype=torch.bool).triu(1)
        mask[1, ..., :5] = True
        extra["attention_mask"] = mask
    elif kind == "packed":
        extra["cu_seqlens"] = [0, 8, 20, 32]
    elif kind == "packed-padded":
        extra.update(cu_seqlens=[0, 5, 15, 27], cu_seqlens_padded=[0, 8, 20, 32])
    return [
        {
            "input_ids": torch.randint(1, 64, shape, generator=generator),
            "labels": torch.randint(1, 64, shape, generator=generator),
            **extra,
        }
        for _ in range(4)
    ]


def make_chunks(
    sizes: dict[str, Any], settings: dict[str, Any], config: dict[str, Any] = CONFIG
) -> list[Any]:
    shim.set_parallel(**sizes)
    chunks = build_model_chunks(config, **settings)
    load_hf_weights(chunks, random_hf_weights(config))
    return chunks


def run_case(case: Case, recompute: dict[str, Any], config: dict[str, Any] = CONFIG) -> Any:
    """Losses by microbatch (on the last stage) and router gradients by layer, of this rank"""
    sizes, settings, kind = case
    chunks = make_chunks(sizes, {**settings, **recompute}, config)
    losses = run_schedule(chunks, make_microbatches(kind))
    return losses, router_gradients(chunks)


def train(case: Case, distributed_optimizer: bool) -> Any:
    """Losses (on the last stage) of two steps, and the norm of all gradients of both"""
    sizes, settings, kind = case
    chunks = make_chunks(sizes, settings)
    losses, norms = [], []
    with optimizer_on_cpu():
        chunks, optimizer = wrap(chunks, distributed_optimizer=distributed_optimizer)
        for _ in range(2):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses += run_schedule(chunks, make_microbatches(kind))
            norms.append(optimizer.step()[1])
    return losses, norms


def load_without_one(case: Case) -> str:
    """What is said about a checkpoint that lacks a weight of the last stage"""
    chunks = make_chunks(case[0], case[1])
    weights = random_hf_weights(CONFIG)
    del weights["model.layers.3.mlp.gate.weight"]
    with pytest.raises(FormatError) as e:
        load_hf_weights(chunks, weights)
    return str(e.value)


HOWS: dict[str, Callable[[Case], Any]] = {
    **{name: functools.partial(run_case, recompute=some) for name, some in RECOMPUTE.items()},
    "tied": functools.partial(run_case, recompute={}, config=TIED),
    "replicated": functools.partial(train, distributed_optimizer=False),
    "distributed": functools.partial(train, distributed_optimizer=True),
    "damaged": load_without_one,
}
Key = tuple[str, str]  # case and how


def run_cases(rank: int, world_size: int, store: Path, *, keys: list[Key]) -> dict[Key, Any]:
    shim.init_ranks(store, rank, world_size)
    cases = {1: ONE_RANK, 2: TWO_RANKS, 4: FOUR_RANKS}[world_size]
    found = {}
    for name, how in keys:
        try:
            found[name, how] = HOWS[how](cases[name])
        except Exception as e:
            e.add_note(f"in case {name} {how}")
            raise
    return found


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other with tensors this small
    shim.init_single_process()
    yield
    shim.destroy()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Any]:
    """By kind of microbatches: one rank that recomputes nothing"""
    return functools.cache(lambda kind: run_case(ONE_RANK[kind], {}))


@pytest.fixture(scope="module")
def trained() -> Callable[[str], Any]:
    """By kind of microbatches: one rank's steps"""
    return functools.cache(lambda kind: train(ONE_RANK[kind], False))


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> list[dict[Key, Any]]:
    """All chosen cases in one job"""
    items: list[Any] = [i for i in request.session.items if i.path == request.path]
    chosen = [i.callspec.params for i in items if hasattr(i, "callspec")]
    return run_ranks(2, run_cases, keys=[p["two"] for p in chosen if "two" in p])


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


def keys_of(
    hows: Collection[str], cases: Collection[str], some: Collection[Key] | None = None
) -> list[Any]:
    """some: what runs by default"""
    return [
        pytest.param(
            (case, how),
            id=f"{case}-{how}",
            marks=[] if some is None or (case, how) in some else pytest.mark.full,
        )
        for case in cases
        for how in hows
    ]


# what runs by default: what test_megatron_parallel.py, which needs all of this, does not run
SOME = {
    ("dp", "none"),
    ("tp-etp", "none"),
    ("tp-ep", "uniform"),
    ("pp-layout", "layernorm"),
    ("masked-cp", "mlp"),
    ("packed-padded-cp", "moe"),
}


@pytest.mark.parametrize("two", keys_of(RECOMPUTE, TWO_RANKS, SOME))
def test_two_ranks_equal_one(
    two: Key, two_ranks: list[dict[Key, Any]], reference: Callable[[str], Any]
) -> None:
    check([r[two] for r in two_ranks], reference(TWO_RANKS[two[0]][2]))


# not tp alone: Megatron reduces no gradients of experts then that are split less than the rest
@pytest.mark.parametrize(
    "two",
    keys_of(
        ("distributed", "replicated"),
        ("dp", "tp-etp", "tp-ep", "ep", "ep-alltoall", "pp", "vpp", "cp", "packed-cp"),
        {("tp-ep", "distributed"), ("packed-cp", "distributed")},
    ),
)
def test_training_on_two_ranks_equals_one(
    two: Key, two_ranks: list[dict[Key, Any]], trained: Callable[[str], Any]
) -> None:
    """every gradient is right: their norm, and the loss after a step"""
    losses, norms = trained(TWO_RANKS[two[0]][2])
    for found, found_norms in (r[two] for r in two_ranks):
        assert found_norms == pytest.approx(norms, rel=1e-4)
        assert not found or found == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("two", keys_of(["tied"], ["tp-etp", "pp", "vpp"], {("vpp", "tied")}))
def test_tied_embeddings_on_two_ranks(two: Key, two_ranks: list[dict[Key, Any]]) -> None:
    check([r[two] for r in two_ranks], run_case(ONE_RANK["padded"], {}, TIED))


@pytest.mark.parametrize("two", keys_of(["damaged"], ["pp", "ep"]))
def test_all_ranks_refuse_a_damaged_checkpoint(two: Key, two_ranks: list[dict[Key, Any]]) -> None:
    said = {r[two] for r in two_ranks}
    assert said == {"weight model.layers.3.mlp.gate.weight is missing from the checkpoint"}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_one_rank_may_recompute(kind: str, recompute: str, reference: Callable[[str], Any]) -> None:
    check([run_case(ONE_RANK[kind], RECOMPUTE[recompute])], reference(kind))


def test_padding_between_packed_sequences_is_a_layout_only(
    reference: Callable[[str], Any],
) -> None:
    check([reference("packed-padded")], reference("packed"))


def test_padding_on_the_left_is_hidden() -> None:
    (model,) = make_chunks({}, {})
    ids = make_microbatches("padded")[0]["input_ids"][:1]
    padded = torch.cat([torch.full((1, 5), 7), ids], dim=1)
    mask = torch.ones(1, 1, 21, 21, dtype=torch.bool).triu(1)
    mask[..., :5] = True
    with torch.no_grad():
        expected = model(ids, torch.arange(16)[None], None)
        found = model(padded, torch.arange(21)[None], mask)
    assert found.isfinite().all()
    assert (found[:, 5:] - expected).abs().max() < 1e-4


@pytest.mark.full
def test_four_ranks_equal_one(reference: Callable[[str], Any]) -> None:
    keys = [(case, name) for case in FOUR_RANKS for name in ("none", "uniform", "moe")]
    found = run_ranks(4, run_cases, keys=keys)
    for key in keys:
        check([r[key] for r in found], reference(FOUR_RANKS[key[0]][2]))


def fail_on_one(rank: int, world_size: int, store: Path) -> None:
    if rank == 1:
        raise ValueError("in the middle")
    time.sleep(200)


def test_an_exception_in_one_rank_ends_all() -> None:
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of 2: (?s:.*)ValueError: in the mid"):
        run_ranks(2, fail_on_one)
    assert time.monotonic() - start < 100


def test_destroy_takes_back_every_patch() -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def state() -> list[Any]:
        owners = (torch.cuda, torch.Tensor, schedules, random, MoEAlltoAllTokenDispatcher)
        defaults = random.CheckpointWithoutOutput.__init__.__defaults__
        return [*(dict(vars(owner)) for owner in owners), defaults]

    with pytest.raises(UnsupportedError, match="already initialized"):
        shim.init_ranks(Path("unused"), 0, 1)
    patched = state()
    shim.destroy()
    try:
        assert schedules.torch is torch
        assert "cuda" not in vars(torch.Tensor)  # inherited, as before
        functions = {k: v for k, v in vars(torch.cuda).items() if callable(v)}
        assert [k for k, v in functions.items() if "megatron_cpu" in str(v)] == []
        clean = state()
        shim.init_single_process()
        assert state() != clean
        shim.destroy()
        now = state()
        assert [
            {k: v for k, v in a.items() if b[k] is not v}
            for a, b in zip(now[:-1], clean[:-1], strict=True)
        ] == [{}] * 5
        assert now[-1] == clean[-1] != patched[-1]
    finally:
        shim.init_single_process()
