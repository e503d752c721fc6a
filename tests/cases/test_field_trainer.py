"""Public bugs of replay in a trainer, on Megatron-core's own routers.

Rows of the project's list, and where each is tested:
  74  here; test_megatron_parallel, in all layouts
  75  here; test_megatron_parallel, in the pipeline's own schedules
  76  here
  77  test_megatron_replay
  78  test_megatron_misuse
  80  test_megatron_misuse, here
  82  test_megatron_misuse
  85  test_field_capture (arrays); test_megatron_misuse, here

The witness is the map that each router hands to its MoE layer; losses and gradients are compared
with those of a model that recomputes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from megatron_replay_runs import RECOMPUTE, witness
from megatron_tools import (
    CONFIG,
    MARKS,
    SPEC,
    expected_rows,
    forward,
    make_model,
    native_topk,
    padded,
    random_batch,
    random_replay,
    routers_of,
)
from r3 import RouterSpec, RoutingBatch, RoutingTrace, TraceError
from r3.trainer_hooks.megatron_recorder import record_routing

pytestmark = MARKS
AGAIN = ("full", "moe")  # these recompute every router


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """In which every logit has another weight"""
    logits = forward(model, ids).float()
    generator = torch.Generator().manual_seed(ids.numel())
    return (logits * torch.randn(logits.shape, generator=generator)).mean()


def gradients(model: Any) -> list[torch.Tensor]:
    found = [r.weight.grad.clone() for r in routers_of(model)]
    model.zero_grad()
    return found


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], error: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert b.norm() > 0
        assert (a - b).norm() <= error * b.norm()


def assert_replays(used: torch.Tensor, batch: RoutingBatch, layer: int) -> None:
    """`used` [rows, experts] has the recorded experts in every row that has routing"""
    starts, lengths = batch.cu_seqlens[:-1].tolist(), np.diff(batch.cu_seqlens).tolist()
    rows = [
        start + j if j < n else -1
        for j in range(max(lengths))
        for start, n in zip(starts, lengths, strict=True)
    ]
    ids, replayed = expected_rows(batch, rows)
    assert used.sum(1).eq(batch.spec.top_k).all()
    found = used.nonzero()[:, 1].reshape(len(used), -1).numpy()
    column = batch.spec.moe_layers.index(layer)
    assert np.array_equal(found[replayed], ids[replayed, column])


def plain_gradients(batches: list[RoutingBatch]) -> list[torch.Tensor]:
    """Of one model that recomputes nothing and sees one microbatch after the other"""
    model = make_model()
    with random_replay(model) as replay, replay.step():
        for batch in batches:
            with replay.microbatch(batch, input_ids=padded(batch)):
                loss = loss_of(model, padded(batch))
            loss.backward()
    return gradients(model)


# -------------------------------------------------------------------------- 74: consumed twice


LENGTHS = {"alike": ([9, 6], [9, 6]), "other": ([9, 6], [13])}


def selected(cases: Iterable[Any], some: list[Any]) -> list[Any]:
    """All cases, those that are not in `some` for `make test-full` only"""
    return [pytest.param(*c, marks=[] if c in some else pytest.mark.full) for c in cases]


@pytest.mark.parametrize("recompute", AGAIN)
def test_field_74_one_microbatch_is_forwarded_twice(recompute: str) -> None:
    """Once in the forward pass and once in the backward one, with the same rows; counted once"""
    batch = random_batch([9, 6])
    ids = padded(batch)
    model = make_model(**RECOMPUTE[recompute])
    with random_replay(model) as replay, witness([model]) as maps, replay.step():
        with replay.microbatch(batch, input_ids=ids):
            loss = loss_of(model, ids)
        counted = replay.report().to_dict()
        loss.backward()
        assert replay.report().to_dict() == counted
    for layer in SPEC.moe_layers:
        first, again = maps[layer]
        assert torch.equal(first, again)
        assert_replays(first, batch, layer)
        assert counted["layers"][layer]["rows_replayed"] == int(batch.valid.sum())
    assert_close(gradients(model), plain_gradients([batch]), 1e-5)


@pytest.mark.parametrize("both_first", [False, True])
@pytest.mark.parametrize("recompute", ["none", *AGAIN])
def test_field_74_one_batch_in_two_microbatches(recompute: str, both_first: bool) -> None:
    """The same object, one behind the other or both forward passes first"""
    batch = random_batch([9, 6])
    ids = padded(batch)
    model = make_model(**RECOMPUTE[recompute])
    with random_replay(model) as replay, witness([model]) as maps:
        with replay.step():
            losses = []
            for _ in range(2):
                with replay.microbatch(batch, input_ids=ids):
                    losses.append(loss_of(model, ids))
                if not both_first:
                    losses[-1].backward()
            report = replay.report()
        if both_first:  # of the step before, which has ended
            losses[0].backward()
            losses[1].backward()
    for layer in SPEC.moe_layers:
        assert len(maps[layer]) == (2 if recompute == "none" else 4)
        assert all(torch.equal(m, maps[layer][0]) for m in maps[layer])
        assert report.layers[layer].rows_replayed == 2 * int(batch.valid.sum())
    assert_replays(maps[0][0], batch, 0)
    assert_close(gradients(model), plain_gradients([batch, batch]), 1e-5)


# ------------------------------------------------------------------- 75: of another microbatch


@pytest.mark.parametrize(
    ("recompute", "shapes", "between"),
    selected(
        itertools.product(AGAIN, LENGTHS, ["nothing", "evaluation", "within"]),
        [("full", "alike", "nothing"), ("full", "other", "evaluation"), ("moe", "alike", "within")],
    ),
)
def test_field_75_the_last_microbatch_is_recomputed_first(
    recompute: str, shapes: str, between: str
) -> None:
    """Forward 0, forward 1, recompute 1, recompute 0.

    Microbatches of one shape would be confused silently. Behind forward 1 there may be an
    evaluation, whose rows nobody recomputes; and a backward pass may lie within a microbatch.
    """
    lengths = LENGTHS[shapes]
    batches = [random_batch(n, seed=i) for i, n in enumerate(lengths)]
    evaluated = random_batch(lengths[0], seed=2)
    model = make_model(**RECOMPUTE[recompute])
    with random_replay(model) as replay, witness([model]) as maps, replay.step():
        losses = []
        for batch in batches:
            with replay.microbatch(batch, input_ids=padded(batch)):
                losses.append(loss_of(model, padded(batch)))
                if between == "within" and len(losses) == 2:
                    losses[1].backward()
                    losses[0].backward()
        order = [*batches, *reversed(batches)]
        if between == "evaluation":
            with torch.no_grad(), replay.microbatch(evaluated, input_ids=padded(evaluated)):
                forward(model, padded(evaluated))
            order.insert(2, evaluated)
        if between != "within":
            losses[1].backward()
            losses[0].backward()
    for layer in SPEC.moe_layers:
        assert len(maps[layer]) == len(order)
        for used, batch in zip(maps[layer], order, strict=True):
            assert_replays(used, batch, layer)
        assert torch.equal(maps[layer][0], maps[layer][-1])  # native rows and padding, too
        assert torch.equal(maps[layer][1], maps[layer][-2])
    assert_close(gradients(model), plain_gradients(batches), 1e-5)


# ----------------------------------------------------------------------- 76: recompute flips

TIES = RouterSpec(num_experts=8, top_k=3, moe_layers=(0, 2), num_layers=3)


def nudge(model: Any, sign: int) -> None:
    """Experts in pairs whose logits differ by 1e-6 or so, for any token, the one way or the other.

    Of top-3 the third is one half of the second best pair.
    """
    for router in routers_of(model):
        step = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)) * 1e-6 / 32**0.5
        with torch.no_grad():
            router.weight[1::2] = router.weight[0::2] + sign * step


def tied_model(**settings: Any) -> Any:
    model = make_model(config={**CONFIG, "num_experts_per_tok": 3}, **settings)
    nudge(model, 1)
    return model


def own_routing(model: Any, missing: float) -> RoutingBatch:
    """Of this model; a part of it was not delivered"""
    batch = random_batch([16, 16], TIES, missing=missing)
    with torch.no_grad(), record_routing(model) as used:
        forward(model, padded(batch))
    own = used[0].reshape(16, 2, 2, 3).transpose(1, 0, 2, 3).reshape(32, 2, 3)
    routed = np.where(batch.valid[:, None, None], own, 0).astype(np.uint8)
    return RoutingBatch(**{**batch.__dict__, "routed_experts": routed})


SETTINGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "groups": {
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
    },
    "sigmoid": {"moe_router_score_function": "sigmoid"},
}


@pytest.mark.parametrize(
    ("how", "recompute", "name"),
    selected(
        itertools.product(["replay", "replay without counting", "record"], AGAIN, SETTINGS),
        [
            ("replay", "full", "softmax"),
            ("replay without counting", "moe", "softmax"),
            ("record", "full", "groups"),
        ],
    ),
)
def test_field_76_a_recomputation_that_tips_over_keeps_its_experts(
    how: str, recompute: str, name: str
) -> None:
    """Logits +-1e-6 at the k-th tie: rows replayed, missing, and all of a recorded pass"""
    model = tied_model(**RECOMPUTE[recompute], **SETTINGS[name])
    batch = own_routing(model, missing=0.4)
    ids = padded(batch)

    def run(model: Any, replayed: bool = True, tip_over: bool = True) -> Any:
        nudge(model, 1)
        with (
            random_replay(model, count_outside=how != "replay without counting") as replay,
            witness([model]) as maps,
            replay.step(),
        ):
            enter = replay.record if how == "record" else replay.microbatch
            with enter(batch, input_ids=ids) if replayed else nullcontext():
                loss = loss_of(model, ids)
            if tip_over:
                nudge(model, -1)
            loss.backward()
        return maps, gradients(model)

    flipped, _ = run(model, replayed=False)
    valid = batch.valid.reshape(2, 16).T.ravel()  # by router row
    for first, again in flipped.values():  # so there is something to see, in rows of either kind
        rows = (first != again).any(dim=1).numpy()
        assert rows[valid].mean() > 0.5
        assert rows[~valid].mean() > 0.5

    maps, found = run(model)
    for layer, (first, again) in maps.items():
        assert torch.equal(first, again), layer
        assert first.sum(1).eq(3).all()
    # the same pass without recomputation; weights are 1e-6 off while the gradient is taken
    _, expected = run(tied_model(**SETTINGS[name]), tip_over=False)
    assert_close(found, expected, 1e-3)


# --------------------------------------------------------------- 80, 85: impossible and missing


def trace_with(row: list[int]) -> RoutingTrace:
    """12 tokens, of which token 4 has this row in all layers"""
    ids = random_batch([12], missing=0).routed_experts[:-1].astype(np.int64)
    ids[4] = row
    return RoutingTrace.build(
        spec=SPEC, token_ids=np.arange(1, 13), routed_experts=ids, prompt_len=2
    )


def test_field_80_duplicates_are_no_trace() -> None:
    """On arrays. Row [5, 5]: a token would be dispatched to one expert less"""
    with pytest.raises(TraceError, match=r"row 4, layer 0: experts \[5, 5\] name one expert twice"):
        trace_with([5, 5])


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_field_80_85_every_row_reaches_top_k_experts(dispatcher: str) -> None:
    """One row of -1 among valid rows goes to its native experts; nothing is cut or invented"""
    model = make_model(moe_token_dispatcher_type=dispatcher)
    batch = RoutingBatch.from_traces([trace_with([-1, -1])])
    assert np.flatnonzero(~batch.valid).tolist() == [4, 11]
    ids = padded(batch)
    with (
        random_replay(model) as replay,
        record_routing(model) as used,
        native_topk(model) as native,
        replay.step(),
    ):
        with replay.microbatch(batch, input_ids=ids):
            loss = loss_of(model, ids)
        loss.backward()
        report = replay.report()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in gradients(model))
    for column, layer in enumerate(SPEC.moe_layers):
        expected = np.sort(batch.routed_experts[:, column].astype(np.int64), axis=-1)
        expected[[4, 11]] = native[column][[4, 11]]
        assert np.array_equal(used[0][:, column], expected)
        assert report.layers[layer].rows_replayed == 10
        assert report.layers[layer].rows_missing == 1
