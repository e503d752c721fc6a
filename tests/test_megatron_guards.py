"""What once went wrong without an error, each found by somebody who tried to break replay."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_replay_runs import CONFIG, RECOMPUTE, SPEC, make_microbatches, matching, witness
from megatron_tools import (
    MARKS,
    forward,
    make_model,
    padded,
    random_batch,
    random_replay,
    routers_of,
)
from r3 import ReplayError, RolloutId, RoutingBatch, TraceError
from r3.trainer_hooks import MegatronReplay

pytestmark = MARKS


@pytest.fixture(scope="module", params=["full", "moe"])
def recomputing(request: pytest.FixtureRequest, megatron: None) -> Any:
    return make_model(0, CONFIG, **RECOMPUTE[request.param]).train()


@pytest.fixture
def model(recomputing: Any) -> Iterator[Any]:
    recomputing.zero_grad()
    yield recomputing
    assert all(r.router_replay is None for r in routers_of(recomputing))


def enclosed(replay: MegatronReplay, m: Any) -> Any:
    return replay.microbatch(m["batch"], input_ids=m["input_ids"])


# ------------------------------------------------------------------------------- recomputation


@pytest.mark.parametrize("reentrant", [True, False])
def test_foreign_recomputation_around_megatrons_own(
    model: Any, monkeypatch: pytest.MonkeyPatch, reentrant: bool
) -> None:
    """Megatron's checkpoint runs anew inside a recomputed function: with no microbatch at hand"""
    m = make_microbatches("padded", 1)[0]
    decoder = model.decoder
    original = decoder.forward

    def checkpointed(hidden_states: Any, **options: Any) -> Any:
        def run(hidden: Any) -> Any:
            return original(hidden_states=hidden, **options)

        return torch.utils.checkpoint.checkpoint(run, hidden_states, use_reentrant=reentrant)

    monkeypatch.setattr(decoder, "forward", checkpointed)
    with random_replay(model) as replay, replay.step():
        with enclosed(replay, m):
            loss = forward(model, m["input_ids"]).sum()
        with pytest.raises(ReplayError, match="the router ran during the backward pass"):
            loss.backward()


def test_a_context_that_is_dropped_during_a_recomputation(model: Any) -> None:
    m = make_microbatches("padded", 1)[0]
    with random_replay(model) as replay:

        def held() -> Iterator[None]:
            with enclosed(replay, m):
                yield

        with replay.step():
            abandoned = held()
            next(abandoned)
        garbage = [abandoned]
        del abandoned
        experts = model.decoder.layers[0].mlp.experts

        def drop(*_: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                garbage.clear()
                gc.collect()

        handle = experts.register_forward_pre_hook(drop)
        with replay.step(), witness([model]) as maps:
            with enclosed(replay, m):
                loss = forward(model, m["input_ids"]).sum()
            loss.backward()
        handle.remove()
        assert not garbage
    assert all(matching(used, [m], layer) == {0: 2} for layer, used in maps.items())


def test_a_backward_pass_in_another_thread(model: Any) -> None:
    """As on a GPU; the main thread leaves and enters microbatches meanwhile"""
    a, b = make_microbatches("padded", 2)
    errors: list[BaseException] = []
    with random_replay(model) as replay, replay.step(), witness([model]) as maps:
        with enclosed(replay, a):
            loss = forward(model, a["input_ids"]).sum()
        half, go_on = threading.Event(), threading.Event()

        def wait(*_: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                half.set()
                go_on.wait(60)

        def work() -> None:
            try:
                loss.backward()
            except BaseException as e:
                errors.append(e)

        handle = model.decoder.layers[3].mlp.experts.register_forward_pre_hook(wait)
        thread = threading.Thread(target=work)
        with enclosed(replay, b):
            thread.start()
            assert half.wait(60)
            forward(model, b["input_ids"])
        go_on.set()
        thread.join()
        handle.remove()
    assert not errors
    for layer, used in maps.items():
        assert matching(used, [a, b], layer) == Counter({0: 2, 1: 1})


def test_a_router_that_lost_its_replay_before_it_is_recomputed(model: Any) -> None:
    m = make_microbatches("padded", 1)[0]
    router = routers_of(model)[1]
    with random_replay(model) as replay, replay.step():
        with enclosed(replay, m):
            loss = forward(model, m["input_ids"]).sum()
        router.router_replay = None
        with pytest.raises(ReplayError, match=r"layers \[2\]: .* was replaced in between"):
            loss.backward()


def test_detaching_one_model_leaves_the_graphs_of_another(model: Any) -> None:
    other = make_model(1, CONFIG, **RECOMPUTE["full"]).train()
    m = make_microbatches("padded", 1)[0]
    replay = random_replay(model)
    with replay.step(), enclosed(replay, m):
        forward(model, m["input_ids"])
        loss = forward(other, m["input_ids"]).sum()
    replay.detach()
    loss.backward()
    assert all(r.weight.grad.abs().sum() > 0 for r in routers_of(other))


# ----------------------------------------------------------------- what the model is really fed


def test_ids_that_are_written_into_after_they_were_declared(model: Any) -> None:
    m = make_microbatches("padded", 1)[0]
    ids = m["input_ids"].clone()
    with random_replay(model) as replay, replay.step():
        declared = replay.microbatch(m["batch"], input_ids=ids)
        ids.copy_(ids.flip(0))
        with pytest.raises(ReplayError, match=r"is fed input_ids\[0, 0\] = "), declared:
            forward(model, ids)


def test_a_second_attempt_is_looked_at_too(model: Any) -> None:
    m = make_microbatches("padded", 1)[0]
    wrong = m["input_ids"].flip(0)
    with random_replay(model) as replay, replay.step():
        attempt = enclosed(replay, m)
        attempt.__enter__()
        for _ in range(2):
            with pytest.raises(ReplayError, match="is fed input_ids"):
                forward(model, wrong)
        forward(model, m["input_ids"])
        attempt.__exit__(None, None, None)


def test_a_model_that_is_given_embeddings(model: Any) -> None:
    m = make_microbatches("padded", 1)[0]
    places = torch.arange(16).expand(2, 16)
    embedded = model.embedding(input_ids=m["input_ids"].flip(0), position_ids=places)
    with (
        random_replay(model) as replay,
        replay.step(),
        pytest.raises(ReplayError, match="ran without embedding input_ids"),
        enclosed(replay, m),
    ):
        model(m["input_ids"], places, None, decoder_input=embedded)


def test_tokens_that_the_routing_does_not_have(model: Any) -> None:
    """A reply that the trainer appended: once routed like padding, and counted nowhere"""
    batch = random_batch([6, 6], SPEC)
    reply = torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([padded(batch), reply], 1)
    with (
        random_replay(model) as replay,
        replay.step(),
        pytest.raises(ReplayError, match="belongs to no token of the batch"),
    ):
        replay.microbatch(batch, input_ids=ids)
    ids = padded(batch, extra=6)
    with random_replay(model) as replay:
        with replay.step(), replay.microbatch(batch, input_ids=ids):
            forward(model, ids)
        assert {c.rows_padding for c in replay.report().layers.values()} == {12}


# ------------------------------------------------------------------------------------- steps


def test_a_microbatch_belongs_to_its_step(model: Any) -> None:
    m = make_microbatches("padded", 1)[0]
    with random_replay(model) as replay:
        with replay.step(weight_version=5):
            made_early = enclosed(replay, m)
        with (
            replay.step(weight_version=100),
            pytest.raises(ReplayError, match="of another step"),
            made_early,
        ):
            pytest.fail("entered")
        with replay.step():
            left_open = enclosed(replay, m)
            left_open.__enter__()
            forward(model, m["input_ids"])
        with replay.step():
            left_open.__exit__(None, None, None)
            assert replay.report().total.rows_replayed == 0
            assert not replay.report().rollouts
            with enclosed(replay, m):
                forward(model, m["input_ids"])


@pytest.mark.parametrize("version", ["5", 5.0, float("nan"), -1, 1 << 70, True])
def test_wrong_weight_versions(model: Any, version: Any) -> None:
    with (
        random_replay(model) as replay,
        pytest.raises(ReplayError, match=r"weight_version is .*, expected an integer from 0"),
        replay.step(weight_version=version),
    ):
        pass


def test_a_limit_on_what_is_not_counted(model: Any) -> None:
    with pytest.raises(ReplayError, match=r"max_outside_fraction is 0\.4 without count_outside"):
        MegatronReplay(model, count_outside=False)
    MegatronReplay(model, count_outside=False, max_outside_fraction=None).detach()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cu_seqlens", [0, 6, 12], "cu_seqlens is a list, expected a numpy array"),
        ("cu_seqlens", np.array([0, 6, 12], np.uint64), "cu_seqlens is .*expected 3 ascending"),
        ("routed_experts", torch.zeros(12, 3, 2), "routed_experts is a Tensor"),
        ("prompt_lens", np.array([1]), r"prompt_lens has shape \[1\]"),
    ],
)
def test_batches_made_by_hand(model: Any, field: str, value: Any, message: str) -> None:
    batch = random_batch([6, 6], SPEC)
    wrong = RoutingBatch(**{**batch.__dict__, field: value})
    with (
        random_replay(model) as replay,
        replay.step(),
        pytest.raises(TraceError, match=message),
    ):
        replay.microbatch(wrong, input_ids=padded(batch))


# ------------------------------------------------------------------- the witness, few wrong rows


LENGTHS = [120, 100, 110, 130]


@pytest.fixture(scope="module")
def right() -> tuple[Any, RoutingBatch, Any]:
    """A model, routing that it chose itself, and the ids"""
    model = make_model(0, CONFIG)
    blank = random_batch(LENGTHS, SPEC, missing=0)
    blank = dataclasses.replace(blank, prompt_lens=np.array([60, 50, 55, 65]))
    ids = padded(blank)
    with torch.no_grad(), MegatronReplay(model) as replay, replay.step():
        with replay.record(blank, input_ids=ids) as own:
            forward(model, ids)
        return model, own.to_batch(), ids


def changed(batch: RoutingBatch, rows: slice, by: int, **fields: Any) -> RoutingBatch:
    """Some packed rows are those `by` further on"""
    routed = batch.routed_experts.copy()
    routed[rows] = batch.routed_experts[rows.start + by : rows.stop + by]
    return dataclasses.replace(batch, routed_experts=routed, **fields)


def run(model: Any, batch: RoutingBatch, ids: Any) -> None:
    with (
        torch.no_grad(),
        MegatronReplay(model) as replay,
        replay.step(),
        replay.microbatch(batch, input_ids=ids),
    ):
        forward(model, ids)


def test_the_answer_of_a_rollout_shifted(right: Any) -> None:
    """Its prompt is right, as after a prefill elsewhere"""
    model, batch, ids = right
    wrong = changed(batch, slice(220 + 55, 220 + 108), 1)
    with pytest.raises(ReplayError, match="in the answer of rollout run/0/2/0/0"):
        run(model, wrong, ids)


def test_all_answers_shifted_are_named(right: Any) -> None:
    model, batch, ids = right
    wrong = batch
    for start, n, prompt in zip(batch.cu_seqlens, LENGTHS, batch.prompt_lens, strict=False):
        rows = slice(int(start + prompt), int(start + n - 2))
        wrong = dataclasses.replace(wrong, routed_experts=wrong.routed_experts.copy())
        wrong.routed_experts[rows] = batch.routed_experts[rows.start + 1 : rows.stop + 1]
    with pytest.raises(ReplayError, match="rows are shifted by one: recorded row t-1"):
        run(model, wrong, ids)


def test_a_wrong_rollout_among_others_of_the_same_name(right: Any) -> None:
    model, batch, ids = right
    same = (RolloutId("run"),) * 4
    run(model, dataclasses.replace(batch, rollout_ids=same), ids)
    wrong = changed(batch, slice(120, 120 + 98), 101, rollout_ids=same)
    with pytest.raises(ReplayError, match="in rollout run/0/0/0/0"):
        run(model, wrong, ids)


def test_a_wrong_layer(right: Any) -> None:
    model, batch, ids = right
    routed = batch.routed_experts.copy()
    routed[:, 1] = np.roll(routed[:, 1], 40, axis=0)
    last = batch.cu_seqlens[1:] - 1
    routed[:, 1] = np.where((routed[:, 1, :1] == routed[:, 1, 1:]), [0, 1], routed[:, 1])
    routed[last] = 0
    with pytest.raises(ReplayError, match=r"% in layer 2"):
        run(model, dataclasses.replace(batch, routed_experts=routed), ids)


def test_a_suspicious_share_below_the_limit_is_looked_into(right: Any) -> None:
    """Shifted rows of a model whose neighbours are alike stay below any limit on the share"""
    model, batch, ids = right
    wrong = changed(batch, slice(0, 118), 1)
    for start, n in zip(batch.cu_seqlens[1:-1], LENGTHS[1:], strict=True):
        rows = slice(int(start), int(start) + n - 2)
        wrong.routed_experts[rows] = batch.routed_experts[rows.start + 1 : rows.stop + 1]
    with (
        pytest.raises(ReplayError, match=r"top-k, .* rollouts: rows are shifted by one"),
        torch.no_grad(),
        MegatronReplay(model, max_outside_fraction=0.95) as replay,
        replay.step(),
        replay.microbatch(wrong, input_ids=ids),
    ):
        forward(model, ids)
