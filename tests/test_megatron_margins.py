"""How near the trainer's routers were to another choice, and what a model says of itself.

Oracle: logits in float64 from each router's weight and input, and the words of the definition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ranks import forward_tokens, random_hf_weights, run_ranks
from megatron_replay_runs import CONFIG as FOUR
from megatron_replay_runs import LAYOUTS, arguments, make_microbatches
from megatron_tools import (
    MARKS,
    SPEC,
    forward,
    make_model,
    packed_params,
    padded,
    random_batch,
    random_replay,
    routers_of,
)
from r3 import Provenance, ReplayError, RoutingBatch, UnsupportedError
from r3.trainer_hooks.megatron import trainer_provenance
from r3.trainer_hooks.megatron_cpu import shim
from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_model_chunks, load_hf_weights
from r3.trainer_hooks.megatron_margins import margins_of, to_logits

pytestmark = MARKS


@contextmanager
def logits_of(model: Any) -> Iterator[list[np.ndarray]]:
    """Per call of a router: float64 [rows, experts]"""
    found: list[np.ndarray] = []

    def hook(router: Any, inputs: Any, _output: Any) -> None:
        x = inputs[0].detach().double().flatten(0, -2)
        found.append((x @ router.weight.detach().double().T).numpy())

    handles = [r.register_forward_hook(hook) for r in routers_of(model)]
    yield found
    for handle in handles:
        handle.remove()


def recorded(model: Any, batch: RoutingBatch, ids: Any) -> tuple[Any, list[np.ndarray]]:
    """What was recorded in a padded pass, and the logits of its routers"""
    with (
        torch.no_grad(),
        random_replay(model) as replay,
        replay.step(),
        logits_of(model) as logits,
        replay.record(batch, input_ids=ids, margins=True) as native,
    ):
        forward(model, ids)
    return native, logits


def expected_margins(logits: list[np.ndarray], top_k: int) -> np.ndarray:
    """[rows, layers] of [rows, experts] by layer"""
    ranked = np.sort(np.stack(logits, axis=1))[..., ::-1]
    return ranked[..., top_k - 1] - ranked[..., top_k]


def check_margins(found: np.ndarray, own: RoutingBatch, expected: np.ndarray) -> None:
    """expected: float64 [T, layers]"""
    assert found.dtype == np.float32
    assert np.array_equal(~np.isnan(found), np.broadcast_to(own.valid[:, None], found.shape))
    assert np.abs(found - expected)[own.valid].max() < 2e-5
    for trace in own.to_traces(margins=found):
        assert trace.columns["router_margins"].data.shape == (trace.num_rows, found.shape[1])


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax": ({}, {}),
    "pre-softmax": ({"norm_topk_prob": False}, {}),
    "top 1": ({"norm_topk_prob": False, "num_experts_per_tok": 1}, {}),
    "sigmoid": ({}, {"moe_router_score_function": "sigmoid"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_margins_are_differences_of_logits(kind: str, megatron: None) -> None:
    config, settings = KINDS[kind]
    model = make_model(1, config, **settings)
    top_k = routers_of(model)[0].topk
    batch = random_batch([9, 5, 12], dataclasses.replace(SPEC, top_k=top_k))
    ids = padded(batch, extra=2)
    native, logits = recorded(model, batch, ids)
    expected = np.empty((batch.num_tokens, 2))
    rows = expected_margins(logits, top_k).reshape(ids.shape[1], 3, 2)  # s-major
    for i, (start, stop) in enumerate(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
        expected[start:stop] = rows[: stop - start, i]
    check_margins(native.margins(), native.to_batch(), expected)


def test_packed_with_gradients_and_not_asked_for(model: Any) -> None:
    """The pass is the same with margins, and costs nothing without"""
    batch = random_batch([7, 11])
    ids = torch.tensor([[*batch.token_ids.tolist(), 0, 0]])
    packed = packed_params([0, 7, 20])
    given = {"input_ids": ids, "packed_seq_params": packed}
    with random_replay(model) as replay, replay.step(), logits_of(model) as logits:
        with replay.record(batch, **given, margins=True) as native:
            first = forward(model, ids, packed)
        expected = expected_margins(logits, 2)[:18]
        with replay.record(batch, **given) as without:
            assert torch.equal(forward(model, ids, packed), first)
        assert first.requires_grad
        with replay.record(batch, **given, margins=True) as unused:
            with pytest.raises(ReplayError, match="no forward pass was recorded"):
                unused.margins()
            forward(model, ids, packed)
    check_margins(native.margins(), native.to_batch(), expected)
    with pytest.raises(ReplayError, match="recorded without margins, expected margins=True"):
        without.margins()


def test_a_step_over_the_margin_changes_the_choice(model: Any) -> None:
    """What a margin is for: logits moved by less than half of it choose the same experts"""
    batch = random_batch([20], missing=0)
    ids = padded(batch)
    native, logits = recorded(model, batch, ids)
    margins, own = native.margins()[:-1], native.to_batch()
    for i in range(2):
        order = np.argsort(-logits[i][:-1])
        for scale, same in ((0.49, True), (0.51, False)):
            moved = logits[i][:-1].copy()
            rows = np.arange(len(moved))
            moved[rows, order[:, 1]] -= scale * margins[:, i]
            moved[rows, order[:, 2]] += scale * margins[:, i]
            chosen = np.sort(np.argsort(-moved)[:, :2])
            natively = np.sort(own.routed_experts[:-1, i])
            assert ((chosen == natively).all(axis=1) == same).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
            "moe_router_enable_expert_bias is True",
        ),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 2}, "moe_router_group_topk is 2"),
        ({"moe_router_topk": 8}, "moe_router_topk is 8, all of its experts"),
    ],
    ids=["bias", "groups", "all"],
)
def test_what_has_no_margin_is_refused(
    settings: dict[str, Any], words: str, megatron: None
) -> None:
    model = make_model(0, **settings)
    batch = random_batch([6], dataclasses.replace(SPEC, top_k=routers_of(model)[0].topk))
    ids = padded(batch)
    message = f"router of decoder layer 0: {words}.*record without margins=True"
    with torch.no_grad(), random_replay(model) as replay, replay.step():
        with (
            pytest.raises(UnsupportedError, match=message),
            replay.record(batch, input_ids=ids, margins=True),
        ):
            pytest.fail("entered")
        with replay.record(batch, input_ids=ids) as native:  # and the step goes on
            forward(model, ids)
    assert native.to_batch().valid.sum() == 5


class _Router:
    """As much of a TopKRouter as is looked at"""

    expert_bias = None
    topk, num_experts = 2, 8

    def __init__(self, score_function: str) -> None:
        self.score_function = score_function
        self.config = type("Config", (), {"moe_router_group_topk": None})()
        self.config.moe_router_pre_softmax = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_inverted(dtype: torch.dtype) -> None:
    """Also sqrtsoftplus, which megatron-core 0.16 lacks; scores whose rounding hides the margin"""
    forms = {
        "softmax": lambda x: torch.softmax(x, dim=1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: torch.sqrt(torch.nn.functional.softplus(x)),
    }
    logits = torch.linspace(-9, 7, 400, dtype=torch.float64).reshape(50, 8)
    logits = logits[:, torch.randperm(8, generator=torch.Generator().manual_seed(0))]
    exact = logits.sort(descending=True).values
    for kind, form in forms.items():
        scores = form(logits).to(dtype)
        values, ids = scores.topk(2)
        found = margins_of(scores, values, ids, to_logits({0: _Router(kind)})[0])
        assert found.dtype is torch.float32
        error = (found - (exact[:, 1] - exact[:, 2])).abs()
        near = scores.double().amax(dim=1) < 0.9 if kind == "sigmoid" else error > -1
        assert error[near].max() < (1e-3 if dtype is torch.float32 else 0.2), kind
    of_sigmoid = to_logits({0: _Router("sigmoid")})[0]
    scores = torch.tensor([[1, 1, 1, 0.5], [1, 1, 0.5, 0.2], [0.5, 0.2, 0, 0], [0, 0, 0, 0]])
    scores = torch.cat([scores, torch.full((1, 4), torch.nan)]).to(dtype)
    found = margins_of(scores, *scores.topk(2), of_sigmoid)
    # equal is 0; a logit that the score cannot say is not known
    assert np.array_equal(found.numpy(), [0, np.nan, np.nan, 0, np.nan], equal_nan=True)


# --------------------------------------------------------------------------- several ranks


def record_case(layout: str) -> tuple[np.ndarray, np.ndarray]:
    """(margins, routing) of one microbatch, by token"""
    sizes, settings, kind, _ = LAYOUTS[layout]
    shim.set_parallel(**sizes)
    (chunk,) = build_model_chunks(FOUR, **settings)
    load_hf_weights(chunk, random_hf_weights(FOUR))
    (m,) = make_microbatches(kind, 1)
    with (
        torch.no_grad(),
        random_replay(chunk) as replay,
        replay.step(),
        replay.record(m["batch"], **arguments(chunk, m), margins=True) as native,
    ):
        forward_tokens(chunk, m)
    return native.margins(), native.to_batch().routed_experts


def record_cases(rank: int, world_size: int, store: Path, *, layouts: list[str]) -> Any:
    shim.init_ranks(store, rank, world_size)
    return [record_case(layout) for layout in layouts]


def test_margins_of_rows_that_are_split_over_ranks(megatron: None) -> None:
    layouts = {"tp": "none", "cp-packed": "packed"}
    ranks = run_ranks(2, record_cases, layouts=list(layouts))
    for i, alone in enumerate(layouts.values()):
        margins, routed = record_case(alone)
        assert np.nanstd(margins) > 0.1
        for found in ranks:
            np.testing.assert_allclose(found[i][0], margins, atol=1e-4)
            assert np.array_equal(np.sort(found[i][1]), np.sort(routed))


# ------------------------------------------------------------------------------ provenance


def test_a_model_says_how_it_computes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import __version__

    found = trainer_provenance(model)
    assert found == Provenance(
        engine="megatron-core",
        engine_version=__version__,
        dtype="float32",
        head_dtype="float32",
        attention_backend="CausalAttention",
        moe_kernel="SequentialMLP/allgather",
        batch_invariant=False,
        device="cpu",
        parallel={"tensor": 1, "pipeline": 1, "expert": 1},
        extra={"torch": torch.__version__, "router_dtype": "fp32"},
    )
    assert Provenance.from_dict(found.to_dict()) == found
    with random_replay(model):  # under replay too
        assert trainer_provenance([model]) == found
    for name, value in (
        ("moe_token_dispatcher_type", "alltoall"),
        ("context_parallel_size", 2),
        ("expert_tensor_parallel_size", 4),
        ("virtual_pipeline_model_parallel_size", 3),
        ("batch_invariant_mode", True),
        ("moe_router_dtype", None),
        ("fp8", "hybrid"),
    ):
        monkeypatch.setattr(model.config, name, value)
    changed = trainer_provenance(model)
    assert changed.moe_kernel == "SequentialMLP/alltoall"
    sizes = {"context": 2, "expert_tensor": 4, "virtual_pipeline": 3}
    assert changed.parallel == found.parallel | sizes
    assert changed.batch_invariant is True
    assert changed.quantization == "fp8 hybrid"
    assert changed.extra == {"torch": torch.__version__}


def test_a_tied_head_in_bfloat16(megatron: None) -> None:
    model = build_model_chunks({**FOUR, "tie_word_embeddings": True}, dtype=torch.bfloat16)
    found = trainer_provenance(model)
    assert (found.dtype, found.head_dtype) == ("bfloat16", "bfloat16")
    model[0].output_layer = torch.nn.Linear(4, 64, bias=False)
    assert trainer_provenance(model).head_dtype == "float32"
