"""Steps that are not one forward and one backward pass: other orders, evaluation, several models,
errors, wrappers, R2. On the real routers, with activations recomputed."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from megatron_replay_runs import (
    CONFIG,
    RECOMPUTE,
    SPEC,
    arguments,
    make_microbatches,
    matching,
    witness,
)
from megatron_tools import (
    MARKS,
    forward,
    make_model,
    native_topk,
    padded,
    random_batch,
    random_replay,
    routers_of,
)
from r3 import ReplayError, RoutingBatch, SpecError
from r3.trainer_hooks import MegatronReplay
from r3.trainer_hooks.megatron_recorder import record_routing

pytestmark = MARKS


@pytest.fixture(scope="module")
def recomputing(megatron: None) -> Any:
    """Four layers, one of them dense, each recomputed in the backward pass."""
    return make_model(0, CONFIG, **RECOMPUTE["full"]).train()


@pytest.fixture(autouse=True)
def no_gradients_left(recomputing: Any) -> None:
    recomputing.zero_grad()


def gradients(model: Any) -> list[torch.Tensor]:
    found = [r.weight.grad.clone() for r in routers_of(model)]
    model.zero_grad()
    return found


def loss_of(model: Any, microbatch: Any) -> torch.Tensor:
    """Of the real tokens; padding has no part in it"""
    logits = forward(model, microbatch["input_ids"])
    chosen = logits.log_softmax(-1).gather(-1, microbatch["labels"][..., None])[..., 0]
    return -(chosen * (microbatch["grid"] >= 0)).sum()


def accumulate(model: Any, microbatches: list[Any], order: list[int] | None = None) -> Any:
    """Router gradients of forward passes in order and backward passes in `order`"""
    with random_replay(model) as replay, replay.step():
        losses = []
        for m in microbatches:
            with replay.microbatch(m["batch"], input_ids=m["input_ids"]):
                losses.append(loss_of(model, m))
            if order is None:
                losses[-1].backward()
        for i in order or []:
            losses[i].backward()
    return gradients(model)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_backward_in_any_order(recomputing: Any, order: list[int]) -> None:
    microbatches = make_microbatches("padded")
    expected = accumulate(recomputing, microbatches)
    with witness([recomputing]) as maps:
        found = accumulate(recomputing, microbatches, order)
    assert_same(found, expected)
    for layer, used in maps.items():
        assert matching(used, microbatches, layer) == Counter(dict.fromkeys(range(4), 2))
        for at, i in enumerate(order):  # in which order they were recomputed
            assert matching([used[4 + at]], microbatches, layer) == {i: 1}


def test_evaluation_in_between_leaves_nothing(recomputing: Any) -> None:
    """Passes without gradients, under replay and not, between the forward passes of a step"""
    microbatches = make_microbatches("padded")
    expected = accumulate(recomputing, microbatches)
    evaluated = make_microbatches("padded", 6)[4:]
    with random_replay(recomputing) as replay, replay.step():
        losses = []
        for m in microbatches:
            with (
                torch.no_grad(),
                replay.microbatch(evaluated[0]["batch"], input_ids=evaluated[0]["input_ids"]),
            ):
                forward(recomputing, evaluated[0]["input_ids"])
            with torch.no_grad():
                forward(recomputing, evaluated[1]["input_ids"])
            with replay.microbatch(m["batch"], input_ids=m["input_ids"]):
                losses.append(loss_of(recomputing, m))
            if len(losses) == 2:
                losses[0].backward()
        for x in losses[1:]:
            x.backward()
    assert_same(gradients(recomputing), expected)


def test_megatrons_own_replay_is_wrong_after_an_evaluation() -> None:
    """The reason for wrapping what is checkpointed: a queue keeps the entry of a pass that is
    never recomputed"""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    microbatches = make_microbatches("padded", 2, complete=True)
    model = make_model(0, CONFIG, moe_enable_routing_replay=True, **RECOMPUTE["full"]).train()

    def told(m: Any) -> None:
        table = torch.from_numpy(m["batch"].routed_experts[m["grid"].T.reshape(-1)]).long()
        table[m["grid"].T.reshape(-1) < 0] = torch.tensor([0, 1])
        RouterReplay.set_replay_data(list(table.unbind(1)))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def step(evaluate: bool) -> list[torch.Tensor]:
        RouterReplay.clear_global_indices()
        if evaluate:
            told(microbatches[1])
            with torch.no_grad():
                forward(model, microbatches[1]["input_ids"])
        told(microbatches[0])
        loss = loss_of(model, microbatches[0])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        loss.backward()
        return gradients(model)

    alone = step(evaluate=False)
    found = step(evaluate=True)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, alone, strict=True)]
    assert max(errors) > 0.1
    RouterReplay.clear_global_router_replay_instances()
    for r in routers_of(model):
        r.router_replay = None
    assert_same(accumulate(model, microbatches[:1]), alone)


def test_native_passes_are_recomputed_natively(recomputing: Any) -> None:
    """Attached, in a step or not: what ran natively runs natively again"""
    m = make_microbatches("padded", 1)[0]
    loss_of(recomputing, m).backward()
    expected = gradients(recomputing)
    with random_replay(recomputing) as replay:
        loss_of(recomputing, m).backward()
        assert_same(gradients(recomputing), expected)
        with replay.step():
            native = loss_of(recomputing, m)
            with replay.microbatch(m["batch"], input_ids=m["input_ids"]):
                replayed = loss_of(recomputing, m)
                native.backward()  # inside of another microbatch
            assert_same(gradients(recomputing), expected)
            replayed.backward()
    assert_same(gradients(recomputing), accumulate(recomputing, [m]))


def test_two_models_recompute_each_their_own(recomputing: Any) -> None:
    """field.md 78, with recomputation: a policy and a value model, forward and backward mixed"""
    other = make_model(1, CONFIG, **RECOMPUTE["moe"]).train()
    a, b = make_microbatches("padded", 2)
    expected = accumulate(recomputing, [a]), accumulate(other, [b])
    with (
        random_replay(recomputing) as first,
        random_replay(other) as second,
        first.step(),
        second.step(),
    ):
        with (
            first.microbatch(a["batch"], input_ids=a["input_ids"]),
            second.microbatch(b["batch"], input_ids=b["input_ids"]),
        ):
            losses = loss_of(recomputing, a), loss_of(other, b)
        with torch.no_grad():
            forward(other, a["input_ids"])  # a native pass of one
        losses[0].backward()
        losses[1].backward()
    assert_same(gradients(recomputing), expected[0])
    assert_same(gradients(other), expected[1])


def test_an_error_in_the_middle_of_a_step(recomputing: Any) -> None:
    """In a layer that is checkpointed, forward and backward; later steps are right"""
    a, b = make_microbatches("padded", 2)
    expected = accumulate(recomputing, [a, b])
    experts = recomputing.decoder.layers[2].mlp.experts

    def train(microbatches: list[Any], replay: MegatronReplay) -> None:
        with replay.step():
            for m in microbatches:
                with replay.microbatch(m["batch"], input_ids=m["input_ids"]):
                    loss = loss_of(recomputing, m)
                loss.backward()

    with random_replay(recomputing) as replay:
        for calls in (1, 2):  # the second is the recomputation
            seen = []

            def fail(*_: Any, seen: list[int] = seen, calls: int = calls) -> None:
                seen.append(1)
                if len(seen) == calls:
                    raise RuntimeError("out of memory")

            handle = experts.register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                train([a], replay)
            handle.remove()
            recomputing.zero_grad()
            with torch.no_grad(), native_topk(recomputing) as native:
                with record_routing(recomputing) as used:
                    forward(recomputing, b["input_ids"])
                assert np.array_equal(used[0], np.stack(native, axis=1))
        train([a, b], replay)
    assert_same(gradients(recomputing), expected)


def test_detach_and_attach_again(recomputing: Any) -> None:
    from megatron.core.tensor_parallel import random

    door = random.CheckpointFunction
    m = make_microbatches("padded", 1)[0]
    expected = accumulate(recomputing, [m])
    assert random.CheckpointFunction is door
    replay = random_replay(recomputing)
    with replay.step(), replay.microbatch(m["batch"], input_ids=m["input_ids"]):
        loss = loss_of(recomputing, m)
    replay.detach()
    with pytest.raises(ReplayError, match=r"recomputed after detach\(\)"):
        loss.backward()
    recomputing.zero_grad()
    # a graph that is older than its replay
    with random_replay(recomputing) as again:
        with again.step(), again.microbatch(m["batch"], input_ids=m["input_ids"]):
            loss = loss_of(recomputing, m)
        loss.backward()  # behind the step, but attached
    assert_same(gradients(recomputing), expected)
    assert random.CheckpointFunction is door


def test_nothing_is_kept_longer_than_needed(recomputing: Any) -> None:
    """Without recomputation until the microbatch ends, with it until its graph is gone"""
    m = make_microbatches("padded", 1)[0]

    def bound(replay: MegatronReplay) -> Any:
        return weakref.ref(replay.state.current)

    plain = make_model(0, CONFIG)
    with random_replay(plain) as replay, replay.step():
        with replay.microbatch(m["batch"], input_ids=m["input_ids"]):
            loss, held = loss_of(plain, m), bound(replay)
        assert held() is None
        loss.backward()
    with random_replay(recomputing) as replay, replay.step():
        with torch.no_grad(), replay.microbatch(m["batch"], input_ids=m["input_ids"]):
            forward(recomputing, m["input_ids"])
            held = bound(replay)
        assert held() is None
        with replay.microbatch(m["batch"], input_ids=m["input_ids"]):
            loss, held = loss_of(recomputing, m), bound(replay)
        assert held() is not None
        loss.backward()
        del loss
        gc.collect()
        assert held() is None


def test_a_natively_routed_row_is_recomputed_as_it_was(recomputing: Any) -> None:
    """field.md 76: the router changes a little between forward and backward, as on a GPU"""
    m = make_microbatches("padded", 1)[0]
    batch: RoutingBatch = m["batch"]
    m["batch"] = dataclasses.replace(batch, valid=batch.valid & (np.arange(27) % 3 == 0))
    options = {"max_missing_fraction": None}
    for count in (True, False):
        with (
            random_replay(recomputing, count_outside=count, **options) as replay,
            replay.step(),
            witness([recomputing]) as maps,
        ):
            with replay.microbatch(m["batch"], input_ids=m["input_ids"]):
                loss = loss_of(recomputing, m)
            before = [r.weight.detach().clone() for r in routers_of(recomputing)]
            with torch.no_grad():
                for router in routers_of(recomputing):
                    router.weight.copy_(-router.weight)
            loss.backward()
            with torch.no_grad():
                for router, weight in zip(routers_of(recomputing), before, strict=True):
                    router.weight.copy_(weight)
        for first, again in maps.values():
            assert torch.equal(first, again)


# ------------------------------------------------------------------------------------ R2, off


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_r2_replays_what_was_recorded(recomputing: Any, kind: str) -> None:
    """The old-log-prob pass records, the update replays after the weights have changed"""
    m = make_microbatches(kind, 1)[0]
    given = arguments(recomputing, m)
    packed = given.get("packed_seq_params")
    with random_replay(recomputing) as replay:
        with torch.no_grad(), replay.step(weight_version=7), record_routing(recomputing) as used:
            with replay.record(m["batch"], **given) as own:
                forward(recomputing, m["input_ids"], packed)
            report = replay.report()
        recorded = own.to_batch()
        recorded.check()
        rows = m["grid"].T.reshape(-1).numpy()
        real = rows >= 0
        last = np.isin(rows, m["batch"].cu_seqlens[1:] - 1)
        assert np.array_equal(recorded.valid[rows[real]], ~last[real])
        kept = real & ~last
        assert np.array_equal(np.sort(recorded.routed_experts)[rows[kept]], used[0][kept])
        assert set(recorded.weight_versions[recorded.valid]) == {7}
        # it was compared with the engine's: by brute force
        replayed = real & m["batch"].valid[rows]
        for i, layer in enumerate(SPEC.moe_layers):
            outside = [
                len(set(a.tolist()) - set(b.tolist()))
                for a, b in zip(
                    m["batch"].routed_experts[rows[replayed], i],
                    used[0][replayed, i],
                    strict=True,
                )
            ]
            counts = report.layers[layer]
            assert counts.rows_compared == len(outside)
            assert counts.rows_replayed == counts.outside_topk_cells_forced == 0
            assert counts.outside_topk_experts_free == sum(outside) > 0
            assert counts.outside_topk_cells_free == sum(o > 0 for o in outside)
        with torch.no_grad():
            for router in routers_of(recomputing):
                router.weight.neg_()  # an update that would route all else
        try:
            with replay.step(weight_version=7), witness([recomputing]) as again:
                with replay.microbatch(recorded, **given):
                    out = forward(recomputing, m["input_ids"], packed)
                out.sum().backward()
        finally:
            with torch.no_grad():
                for router in routers_of(recomputing):
                    router.weight.neg_()
    for i, layer in enumerate(SPEC.moe_layers):
        assert len(again[layer]) == 2  # forward and recomputed
        for maps in again[layer]:
            assert np.array_equal(
                np.nonzero(maps.numpy()[kept])[1].reshape(-1, 2), used[0][kept, i]
            )


def test_recording_with_gradients_recomputes_what_it_recorded(recomputing: Any) -> None:
    """Off, with the same objects: native routing that is compared; a native step's gradients"""
    m = make_microbatches("padded", 1)[0]
    loss_of(recomputing, m).backward()
    expected = gradients(recomputing)
    with random_replay(recomputing) as replay, replay.step(), witness([recomputing]) as maps:
        with replay.record(m["batch"], input_ids=m["input_ids"]):
            loss = loss_of(recomputing, m)
        loss.backward()
        assert replay.report().total.rows_compared > 0
    assert_same(gradients(recomputing), expected)
    for first, again in maps.values():
        assert torch.equal(first, again)


def test_recording_nothing_is_an_error(recomputing: Any) -> None:
    m = make_microbatches("padded", 1)[0]
    with random_replay(recomputing) as replay, replay.step():
        with replay.record(m["batch"], input_ids=m["input_ids"]) as own:
            with pytest.raises(ReplayError, match="no forward pass was recorded"):
                own.to_batch()
            forward(recomputing, m["input_ids"])
        assert own.to_batch().valid.any()
        with (
            pytest.raises(ReplayError, match=r"record\(\) inside another microbatch\(\)"),
            replay.microbatch(m["batch"], input_ids=m["input_ids"]),
            replay.record(m["batch"], input_ids=m["input_ids"]),
        ):
            pass
    with (
        random_replay(recomputing) as replay,
        pytest.raises(ReplayError, match=r"record\(\) outside step\(\)"),
        replay.record(m["batch"], input_ids=m["input_ids"]),
    ):
        pass


# ------------------------------------------------------------------------------- the witness


def engine_batch(model: Any, lengths: list[int], seed: int = 0) -> tuple[RoutingBatch, Any]:
    """Routing that the model itself chooses, as a healthy engine would have delivered it"""
    batch = random_batch(lengths, SPEC, seed=seed, missing=0)
    ids = padded(batch)
    replay = MegatronReplay(model)
    with torch.no_grad(), replay, replay.step(), replay.record(batch, input_ids=ids) as own:
        forward(model, ids)
    return own.to_batch(), ids


def shifted_rows(batch: RoutingBatch) -> RoutingBatch:
    """Row t of each sequence holds what belongs to row t + 1"""
    routed = batch.routed_experts.copy()
    for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        routed[a : b - 2] = batch.routed_experts[a + 1 : b - 1]
    return dataclasses.replace(batch, routed_experts=routed)


def test_a_step_of_shifted_rows_is_an_error_that_names_the_shift(recomputing: Any) -> None:
    batch, ids = engine_batch(recomputing, [60, 50, 40])
    with MegatronReplay(recomputing) as replay:
        with replay.step(), replay.microbatch(batch, input_ids=ids):
            forward(recomputing, ids)
        assert replay.report().total.outside_topk_experts_forced == 0
        message = r"of the replayed experts are outside .* max_outside_fraction = 40.0%: .*shifted"
        with (
            pytest.raises(ReplayError, match=message),
            replay.step(),
            replay.microbatch(shifted_rows(batch), input_ids=ids),
        ):
            forward(recomputing, ids)

        def broken() -> None:
            with replay.step(), replay.microbatch(shifted_rows(batch), input_ids=ids):
                forward(recomputing, ids)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):  # an error of the step itself comes first
            broken()
    with (
        MegatronReplay(recomputing, max_outside_fraction=None) as replay,
        replay.step(),
        replay.microbatch(shifted_rows(batch), input_ids=ids),
    ):
        forward(recomputing, ids)


def test_diagnosis_on_demand(recomputing: Any) -> None:
    batch, ids = engine_batch(recomputing, [60, 50, 40])
    swapped = dataclasses.replace(
        batch, routed_experts=np.ascontiguousarray(np.roll(batch.routed_experts, 1, axis=1))
    )
    found = {}
    with torch.no_grad(), MegatronReplay(recomputing) as replay, replay.step():
        for name, b in (("right", batch), ("rows", shifted_rows(batch)), ("layers", swapped)):
            with replay.record(b, input_ids=ids) as own:
                forward(recomputing, ids)
            found[name] = own.alignment()
    assert found["right"].fault is None
    assert found["right"].agreement == 1
    assert "row" in str(found["rows"].fault)
    assert "layer" in str(found["layers"].fault)


# --------------------------------------------------------------------------------- wrappers


def test_covers_the_layers_of_the_chunk_that_runs(recomputing: Any) -> None:
    batch = random_batch([6], SPEC)
    some = dataclasses.replace(
        batch,
        spec=dataclasses.replace(SPEC, moe_layers=(2, 3)),
        routed_experts=batch.routed_experts[:, 1:],
    )
    with (
        random_replay(recomputing) as replay,
        replay.step(),
        pytest.raises(SpecError, match=r"layers \[2, 3\], .*no routing for \[0\]"),
        replay.microbatch(some, input_ids=padded(batch)),
    ):
        pass
