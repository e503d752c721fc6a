"""Replay in real Megatron-core routers: misuse, damage and refusals, each an error by name."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

from megatron_tools import (
    MARKS,
    forward,
    make_model,
    packed_params,
    padded,
    random_batch,
    random_replay,
    routers_of,
)
from r3 import (
    MissingDependencyError,
    ReplayError,
    RouterSpec,
    RoutingBatch,
    SpecError,
    TraceError,
    UnsupportedError,
)
from r3.trainer_hooks import MegatronReplay
from r3.trainer_hooks.megatron_recorder import record_routing

pytestmark = MARKS


def test_tokens_of_another_rollout(model: Any) -> None:
    batch = random_batch([6, 8])
    ids = padded(batch)
    expected = int(ids[1, 3])
    ids[1, 3] = 63 if expected != 63 else 62
    with random_replay(model) as replay, replay.step():
        with (
            pytest.raises(
                ReplayError, match=rf"rollout run/0/1/0/0: token 3 .*expected {expected}"
            ),
            replay.microbatch(batch, input_ids=ids),
        ):
            pytest.fail("entered")
        with replay.microbatch(batch, input_ids=padded(batch)):  # the step goes on
            forward(model, padded(batch))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RouterSpec(16, 2, (0, 2), 3), "num_experts=16, expected 8"),
        (RouterSpec(8, 3, (0, 2), 3), "top_k=3, expected 2"),
        (RouterSpec(8, 2, (0, 1, 2), 3), r"layers \[0, 1, 2\], expected .*no router in \[1\]"),
        (RouterSpec(8, 2, (0, 1), 3), r"layers \[0, 1\], .*no routing for \[2\]"),
        (RouterSpec(8, 2, (0, 2), 4), "num_layers=4, expected 3"),
    ],
)
def test_routing_of_another_model(model: Any, spec: RouterSpec, message: str) -> None:
    batch = random_batch([6], spec)
    with (
        random_replay(model) as replay,
        replay.step(),
        pytest.raises(SpecError, match=message),
        replay.microbatch(batch, input_ids=padded(batch)),
    ):
        pytest.fail("entered")


@pytest.mark.parametrize(
    ("row", "message"), [([5, 5], "one expert twice"), ([-1, 3], "expert id -1"), ([3, 8], "id 8")]
)
def test_field_80_85_impossible_ids(model: Any, row: list[int], message: str) -> None:
    batch = random_batch([6], missing=0)
    ids = batch.routed_experts.astype(np.int64)
    ids[2, 1] = row
    batch = RoutingBatch(**{**batch.__dict__, "routed_experts": ids})
    with (
        random_replay(model) as replay,
        replay.step(),
        pytest.raises(TraceError, match=f"rollout run/0/0/0/0: row 2, layer 2: .*{message}"),
        replay.microbatch(batch, input_ids=padded(batch)),
    ):
        pytest.fail("entered")


def test_field_85_a_row_of_minus_one_is_masked(model: Any) -> None:
    batch = random_batch([6], missing=0)
    ids, valid = batch.routed_experts.astype(np.int64), batch.valid.copy()
    ids[2], valid[2] = -1, False
    batch = RoutingBatch(**{**batch.__dict__, "routed_experts": ids, "valid": valid})
    with random_replay(model) as replay, replay.step():
        with replay.microbatch(batch, input_ids=padded(batch)):
            forward(model, padded(batch))
        assert replay.report().layers[0].rows_missing == 1


def test_steps_and_microbatches_do_not_nest(model: Any) -> None:
    batch = random_batch([6])
    ids = padded(batch)
    with random_replay(model) as replay:
        with (
            pytest.raises(ReplayError, match=r"outside step\(\)"),
            replay.microbatch(batch, input_ids=ids),
        ):
            pytest.fail("entered")
        with replay.step():
            with pytest.raises(ReplayError, match=r"step\(\) inside step\(\)"), replay.step():
                pytest.fail("entered")
            with pytest.raises(ReplayError, match=r"detach\(\) inside step"):
                replay.detach()
            with replay.microbatch(batch, input_ids=ids):
                with (
                    pytest.raises(ReplayError, match=r"inside another microbatch"),
                    replay.microbatch(batch, input_ids=ids),
                ):
                    pytest.fail("entered")
                forward(model, ids)
    with pytest.raises(ReplayError, match=r"after detach\(\)"), replay.step():
        pytest.fail("entered")
    replay.detach()


@pytest.mark.parametrize("case", ["other length", "packed", "other tokens", "twice", "router"])
def test_the_model_must_be_fed_what_was_declared(model: Any, case: str) -> None:
    """Same number of rows or not: rows in another order would be replayed into wrong tokens."""
    batch = random_batch([6, 6])
    ids = padded(batch)
    run, message = {
        "other length": (
            lambda: forward(model, padded(batch, extra=2)),
            r"shape \[2, 8\].*\[2, 6\]",
        ),
        "packed": (
            lambda: forward(model, ids.reshape(1, 12), packed_params([0, 6, 12])),
            r"shape \[1, 12\].*\[2, 6\]",
        ),
        "other tokens": (
            lambda: forward(model, ids.flip(0)),
            r"is fed input_ids\[0, 0\] = \d+, expected \d+ as in",
        ),
        "twice": (
            lambda: (forward(model, ids), forward(model, ids.clone())),
            r"layer 0: second forward pass in one microbatch\(\)",
        ),
        "router": (
            lambda: routers_of(model)[1](torch.zeros(2, 6, 32)),
            r"layer 2: the router sees \[2, 6\].*expected \[6, 2\]",
        ),
    }[case]
    with (
        random_replay(model) as replay,
        replay.step(),
        pytest.raises(ReplayError, match=message),
        replay.microbatch(batch, input_ids=ids),
    ):
        run()
    with (
        random_replay(model) as replay,
        replay.step(),
        pytest.raises(ReplayError, match="input_ids is a ndarray"),
        replay.microbatch(batch, input_ids=ids.numpy()),
    ):
        pass


def test_settings_are_looked_at_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with random_replay(model) as replay:
        monkeypatch.setattr(model.config, "moe_expert_capacity_factor", 0.5)
        with pytest.raises(UnsupportedError, match=r"moe_expert_capacity_factor is 0\.5"):
            replay.step().__enter__()
        monkeypatch.undo()
        with replay.step():
            pass


def test_field_82_a_bypassed_router_is_an_error(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch([6])
    ids = padded(batch)
    router = routers_of(model)[1]
    original = type(router).forward

    def ignores_replay(x: Any, padding_mask: Any = None) -> Any:
        hook, router.router_replay = router.router_replay, None
        out = original(router, x, padding_mask)
        router.router_replay = hook
        return out

    monkeypatch.setattr(router, "forward", ignores_replay, raising=False)
    with random_replay(model) as replay, replay.step():
        with (
            pytest.raises(ReplayError, match=r"decoder layers \[2\]: the router never asked"),
            replay.microbatch(batch, input_ids=ids),
        ):
            forward(model, ids)
        with (
            pytest.raises(ReplayError, match=r"decoder layers \[0, 2\]"),
            replay.microbatch(batch, input_ids=ids),
        ):
            pass


def test_recomputation_by_others_is_refused(model: Any) -> None:
    """a router forwarded again in the backward pass, outside of Megatron's own checkpoints"""
    batch = random_batch([6])
    ids = padded(batch)
    with random_replay(model) as replay, replay.step():
        with replay.microbatch(batch, input_ids=ids):
            out = torch.utils.checkpoint.checkpoint(forward, model, ids, use_reentrant=False)
        with pytest.raises(ReplayError, match="layer 0: the router ran during the backward pass"):
            out.sum().backward()


def test_an_exception_in_the_middle_leaves_native_routing(model: Any) -> None:
    batch = random_batch([6], missing=0)
    ids = padded(batch)
    with torch.no_grad():
        native = forward(model, ids)
        with random_replay(model) as replay:
            forced = []

            def broken_step() -> None:
                with replay.step(), replay.microbatch(batch, input_ids=ids):
                    forced.append(forward(model, ids))
                    raise RuntimeError("stop")

            with pytest.raises(RuntimeError, match="stop"):
                broken_step()
            assert not torch.equal(forced[0], native)
            assert torch.equal(forward(model, ids), native)
            with replay.step():  # and the next step works
                with replay.microbatch(batch, input_ids=ids):
                    assert torch.equal(forward(model, ids), forced[0])
                assert torch.equal(forward(model, ids), native)  # between microbatches
                assert replay.report().total.rows_replayed == 10


def test_a_step_ends_a_microbatch_left_open(model: Any) -> None:
    batch = random_batch([6], missing=0)
    ids = padded(batch)
    with torch.no_grad(), random_replay(model) as replay:
        native = forward(model, ids)
        with replay.step():
            left_open = replay.microbatch(batch, input_ids=ids)
            left_open.__enter__()
            assert not torch.equal(forward(model, ids), native)
        assert torch.equal(forward(model, ids), native)
        left_open.__exit__(None, None, None)


def test_detach_restores_what_was_there(model: Any) -> None:
    before = object()
    routers = routers_of(model)
    try:
        routers[0].router_replay = before
        with MegatronReplay(model):
            assert routers[0].router_replay is not before
        assert [r.router_replay for r in routers] == [before, None]
        with pytest.raises(ZeroDivisionError), MegatronReplay(model):
            raise ZeroDivisionError
        assert [r.router_replay for r in routers] == [before, None]
        with MegatronReplay(model):
            routers[1].router_replay = later = object()  # somebody else took over
        assert routers[1].router_replay is later
    finally:
        for router in routers:
            router.router_replay = None


def test_field_14_78_models_share_nothing() -> None:
    """orphaned routers and a reference model in Megatron's class-global list are not involved"""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    policy, reference, _orphan = (make_model(i, moe_enable_routing_replay=True) for i in range(3))
    assert len(RouterReplay.global_router_replay_instances) == 6
    batch = random_batch([6], missing=0)
    ids = padded(batch)
    with torch.no_grad():
        native = forward(reference, ids)
        with random_replay(policy) as replay, random_replay(reference) as other:
            with replay.step(), replay.microbatch(batch, input_ids=ids):
                RouterReplay.clear_global_indices()
                RouterReplay.clear_global_router_replay_instances()
                with record_routing(policy) as used:
                    forward(policy, ids)
                assert torch.equal(forward(reference, ids), native)
            assert other.report().total.rows_replayed == 0
    expected = np.sort(batch.routed_experts[:5], axis=-1)
    assert np.array_equal(used[0][:5], expected)
    assert isinstance(routers_of(policy)[0].router_replay, RouterReplay)


def test_copies_carry_no_live_state(model: Any) -> None:
    batch = random_batch([6])
    ids = padded(batch)
    with torch.no_grad(), random_replay(model) as replay, replay.step():
        native = forward(model, ids)
        with replay.microbatch(batch, input_ids=ids):
            # process groups cannot be copied, whoever copies a router shares them
            router = routers_of(model)[0]
            groups = {id(v): v for k, v in vars(router).items() if k.endswith("_group")}
            copied = copy.deepcopy(router, groups)
            pickled = pickle.loads(pickle.dumps(routers_of(model)[0].router_replay))
            forward(model, ids)
        assert copied.router_replay is None
        assert pickled is None
        assert torch.equal(forward(model, ids), native)


def test_wrappers_are_looked_through(model: Any) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

    batch = random_batch([6])
    ids = padded(batch)
    replay = random_replay([Wrapper(Wrapper(model)), model])
    with replay, replay.step(), replay.microbatch(batch, input_ids=ids):
        forward(model, ids)


# ------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("setting", "value", "advice"),
    [
        ("moe_router_fusion", True, "False"),
        ("moe_router_force_load_balancing", True, "False"),
        ("moe_input_jitter_eps", 0.01, "None"),
        ("moe_expert_capacity_factor", 1.0, "None"),
        ("enable_cuda_graph", True, "False"),
        ("external_cuda_graph", True, "False"),
        ("overlap_moe_expert_parallel_comm", True, "False"),
    ],
)
def test_settings_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch, setting: str, value: Any, advice: str
) -> None:
    assert hasattr(model.config, setting)  # a renamed setting must not pass unseen
    monkeypatch.setattr(model.config, setting, value)
    with pytest.raises(UnsupportedError) as e:
        MegatronReplay(model)
    assert str(e.value).startswith(f"{setting} is {value!r}: ")
    assert f"set it to {advice} (router of decoder layer 0)" in str(e.value)


def test_sinkhorn_and_unknown_routing_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(moe_router_load_balancing_type="sinkhorn")
    for kind in ("sinkhorn", "quantile_balancing", ["aux_loss", "sinkhorn"]):
        monkeypatch.setattr(routers_of(model)[1], "routing_type", kind)
        monkeypatch.setattr(routers_of(model)[0], "routing_type", "aux_loss")
        name = kind if isinstance(kind, str) else "sinkhorn"
        with pytest.raises(UnsupportedError, match=f"load_balancing_type is '{name}': .*set one"):
            MegatronReplay(model)
        # the first router was left alone
        assert routers_of(model)[0].router_replay is None


def test_routers_refused() -> None:
    model = make_model()
    router = routers_of(model)[0]
    with MegatronReplay(model), pytest.raises(UnsupportedError, match="layer 0 is already under"):
        MegatronReplay(model)
    with pytest.raises(UnsupportedError, match="no TopKRouter"):
        MegatronReplay(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="two routers of decoder layer 0"):
        MegatronReplay([model, make_model()])

    known = type(router)
    router.__class__ = type("FancyRouter", (known,), {})
    with pytest.raises(UnsupportedError, match=r"decoder.layers.0.mlp.router is a FancyRouter"):
        MegatronReplay(model)
    router.__class__ = known
    router.layer_number = None
    with pytest.raises(UnsupportedError, match="layer_number is None"):
        MegatronReplay(model)
    model.decoder.layers[0].mlp.router = torch.nn.Linear(32, 8)
    with pytest.raises(UnsupportedError, match=r"mlp.router is a Linear, expected .*TopKRouter"):
        MegatronReplay(model)


def test_versions_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core
    from megatron.core.transformer.moe import router

    monkeypatch.setattr(megatron.core, "__version__", "0.15.2")
    with pytest.raises(UnsupportedError, match=r"version 0\.15\.2, expected 0\.16 or later"):
        MegatronReplay(model)
    monkeypatch.undo()
    monkeypatch.setattr(router, "topk_routing_with_score_function", lambda logits, topk: None)
    with pytest.raises(UnsupportedError, match="no parameter router_replay"):
        MegatronReplay(model)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(MissingDependencyError, match=r"rollout-routing-replay\[megatron\]"):
        MegatronReplay(model)
