"""Replay in real Megatron-core routers on a CPU, against oracles that share no code with it."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from r3 import (
    MissingDependencyError,
    ReplayError,
    RolloutId,
    RouterSpec,
    RoutingBatch,
    RoutingTrace,
    SpecError,
    TraceError,
    UnsupportedError,
)
from r3.trainer_hooks import MegatronReplay
from r3.trainer_hooks.megatron_cpu import shim
from r3.trainer_hooks.megatron_cpu.qwen3_moe import (
    build_gpt_model,
    token_logprobs,
)
from r3.trainer_hooks.megatron_recorder import record_routing

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

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


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    shim.init_single_process()
    shim.init_single_process()  # repeating it is safe
    yield
    shim.destroy()
    assert torch.cuda.current_device.__module__ == "torch.cuda"


def make_model(seed: int = 0, config: dict[str, Any] | None = None, **settings: Any) -> Any:
    model = build_gpt_model({**CONFIG, **(config or {})}, **settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # large weights, so that routing depends on the token
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.3, generator=generator)
    return model


@pytest.fixture(scope="module")
def shared() -> Any:
    """A model that tests only read; each test attaches and detaches."""
    return make_model()


@pytest.fixture
def model(shared: Any) -> Iterator[Any]:
    yield shared
    assert all(r.router_replay is None for r in routers_of(shared))
    shared.zero_grad()


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


def forward(model: Any, input_ids: Any, packed_lengths: list[int] | None = None) -> Any:
    b, s = input_ids.shape
    if packed_lengths is None:
        return model(input_ids, torch.arange(s).expand(b, s), None)
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = np.cumsum([0, *packed_lengths])
    ends[-1] = s  # padding belongs to the last sequence
    cu = torch.tensor(ends, dtype=torch.int32)
    params = PackedSeqParams("thd", cu, cu, max_seqlen_q=s, max_seqlen_kv=s)
    return model(input_ids, torch.arange(s)[None], None, packed_seq_params=params)


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


# ------------------------------------------------------------------------- what is really used


@pytest.mark.parametrize("layout", ["padded", "padded without last", "packed", "one sequence"])
def test_the_moe_layers_use_the_recorded_experts(model: Any, layout: str) -> None:
    """field.md 1, 2, 6, 85: rows n-1, padding and missing rows native, router order s-major"""
    lengths = [9, 5, 12, 7] if layout != "one sequence" else [19]
    batch = random_batch(lengths)
    starts, packed_lengths = batch.cu_seqlens[:-1], None
    if layout == "packed":
        input_ids = torch.tensor([[*batch.token_ids.tolist(), 0, 0, 0]])
        rows = [*range(batch.num_tokens), -1, -1, -1]
        packed_lengths = lengths
    else:
        cut = int(layout == "padded without last")
        input_ids = padded(batch)
        for i, n in enumerate(lengths):
            input_ids[i, n - cut :] = 0
        input_ids = input_ids[:, : input_ids.shape[1] - cut]
        rows = [
            int(starts[i]) + j if j < lengths[i] - cut else -1
            for j in range(input_ids.shape[1])
            for i in range(len(lengths))
        ]
    with MegatronReplay(model) as replay, replay.step():
        with (
            replay.microbatch(batch, input_ids=input_ids),
            record_routing(model) as used,
            native_topk(model) as native,
        ):
            forward(model, input_ids, packed_lengths)
        report = replay.report()
    ids, replayed = expected_rows(batch, rows)
    assert 0 < replayed.sum() < len(rows)
    assert len(used) == 1
    for layer, number in enumerate(SPEC.moe_layers):
        expected = np.where(replayed[:, None], ids[:, layer], native[layer])
        assert np.array_equal(used[0][:, layer], expected)
        # the counters, by brute force
        counts = report.layers[number]
        outside = [
            len(set(a) - set(b))
            for a, b, r in zip(ids[:, layer], native[layer], replayed, strict=True)
            if r
        ]
        last = set((batch.cu_seqlens[1:] - 1).tolist())
        missing = [r for r in rows if r >= 0 and not batch.valid[r] and r not in last]
        assert counts.rows_replayed == replayed.sum()
        assert counts.rows_missing == len(missing) > 0
        assert counts.outside_topk_experts_forced == sum(outside) > 0
        assert counts.outside_topk_cells_forced == sum(o > 0 for o in outside)
    assert report.total.rows_replayed == 2 * replayed.sum()
    assert json.loads(json.dumps(report.to_dict()))["layers"]["2"]["rows_missing"] == len(missing)


def test_padding_is_native_where_the_last_token_has_routing(model: Any) -> None:
    """a batch built by hand, of an engine that forwarded the last token too"""
    batch = random_batch([4, 7], missing=0)
    routed = np.where(batch.valid[:, None, None], batch.routed_experts, [6, 7]).astype(np.uint8)
    fields = {**batch.__dict__, "routed_experts": routed, "valid": np.ones(11, bool)}
    batch = RoutingBatch(**fields)
    ids = padded(batch)
    with (
        MegatronReplay(model) as replay,
        replay.step(),
        record_routing(model) as used,
        native_topk(model) as native,
    ):
        with replay.microbatch(batch, input_ids=ids):
            forward(model, ids)
        assert replay.report().layers[2].rows_replayed == 11
        assert replay.report().layers[2].rows_missing == 0
    assert np.array_equal(used[0][8::2, 1], native[1][8::2])  # sequence 0 from position 4
    assert np.array_equal(used[0][7::2, 1], np.sort(routed[7:, 1]))  # sequence 1 from position 3


def test_counts_add_up_over_a_step_and_start_anew(model: Any) -> None:
    batch = random_batch([6, 4], missing=0)
    ids = padded(batch)
    with MegatronReplay([model]) as replay:
        seen = []
        for times in (2, 1):
            with replay.step():
                assert replay.report().total.rows_replayed == 0
                for _ in range(times):
                    with torch.inference_mode(), replay.microbatch(batch, input_ids=ids):
                        forward(model, ids)
                    with replay.microbatch(batch, input_ids=ids):
                        forward(model, ids).sum().backward()
            seen.append(replay.report().total)
        assert seen[0].rows_replayed == 2 * seen[1].rows_replayed == 4 * 2 * 8
        assert seen[0] == seen[1] + seen[1]


def test_own_routing_replayed_changes_nothing(model: Any) -> None:
    """R2: what the trainer recorded itself; logits stay, and nothing is outside the top-k"""
    batch = random_batch([8, 8], missing=0)
    ids = padded(batch)
    with torch.no_grad(), record_routing(model) as used:
        native = forward(model, ids)
    own = used[0].reshape(8, 2, 2, 2).transpose(1, 0, 2, 3).reshape(16, 2, 2)
    batch = RoutingBatch(**{**batch.__dict__, "routed_experts": own.astype(np.uint8)})
    with torch.no_grad(), MegatronReplay(model) as replay, replay.step():
        with replay.microbatch(batch, input_ids=ids):
            logprobs = token_logprobs(model, ids)
        assert replay.report().total.outside_topk_experts_forced == 0
    expected = native.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------ gate weights


def softmax_over_set(s: Any, ids: Any, _bias: Any) -> Any:
    e = s.gather(1, ids).exp()
    return e / e.sum(1, keepdim=True)


def softmax_over_all(s: Any, ids: Any, _bias: Any) -> Any:
    return (s.exp() / s.exp().sum(1, keepdim=True)).gather(1, ids)


def sigmoid_over_set(s: Any, ids: Any, _bias: Any) -> Any:
    g = (1 / (1 + (-s).exp())).gather(1, ids)  # the bias chooses, it does not weigh
    return g / g.sum(1, keepdim=True)


SCORES: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "softmax after": ({}, softmax_over_set),
    "softmax before": ({"moe_router_pre_softmax": True}, softmax_over_all),
    "groups": (
        {
            "moe_router_pre_softmax": True,
            "moe_router_num_groups": 2,  # the better half of the experts, by its two best
            "moe_router_group_topk": 1,
        },
        softmax_over_all,
    ),
    "sigmoid": ({"moe_router_score_function": "sigmoid"}, sigmoid_over_set),
    "sigmoid, bias": (
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        sigmoid_over_set,
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_gates_and_router_gradient_follow_the_formula(name: str) -> None:
    """field.md 77: gates gathered from the dense scores; float64 autograd of the formula agrees"""
    settings, formula = SCORES[name]
    config = {"num_hidden_layers": 1, "mlp_only_layers": []}
    router = routers_of(model := make_model(3, config, **settings))[0]
    if router.expert_bias is not None:
        router.expert_bias.normal_(0, 1, generator=torch.Generator().manual_seed(5))
    spec = RouterSpec(8, 2, (0,), 1)
    batch = random_batch([17], spec, missing=0)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(16, 1, 32, generator=generator)
    target = torch.randn(16, 8, generator=generator)
    input_ids = torch.from_numpy(batch.token_ids[None, :-1])
    with MegatronReplay(model) as replay, replay.step():
        native = router(x)[1]
        with replay.microbatch(batch, input_ids=input_ids):
            probs, used = router(x)
        report = replay.report().layers[0]
    (probs * target).sum().backward()

    weight = router.weight.detach().double().requires_grad_()
    ids = torch.from_numpy(batch.routed_experts[:16, 0].astype(np.int64))
    gates = formula(x[:, 0].double() @ weight.T, ids, router.expert_bias)
    (gates * target.double().gather(1, ids)).sum().backward()

    torch.testing.assert_close(probs.gather(1, ids).double(), gates, rtol=1e-5, atol=1e-7)
    assert used.sum(1).eq(2).all()
    error = (router.weight.grad.double() - weight.grad).norm() / weight.grad.norm()
    assert error < 1e-5
    outside = ~native.gather(1, ids)
    assert report.outside_topk_experts_forced == int(outside.sum()) > 0
    assert report.outside_topk_cells_forced == int(outside.any(1).sum())


def test_field_77_an_expert_outside_the_native_topk_has_a_gradient() -> None:
    """logits [2, 1, 0, -1], native top-2 {0, 1}, replayed {0, 2}"""
    config = {"num_hidden_layers": 1, "mlp_only_layers": [], "num_experts": 4}
    router = routers_of(model := make_model(0, config))[0]
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor([2.0, 1.0, 0.0, -1.0])
    x = torch.zeros(1, 1, 32)
    x[..., 0] = 1
    trace = RoutingTrace.build(
        spec=RouterSpec(4, 2, (0,), 1),
        token_ids=[7, 8],
        routed_experts=np.array([[[2, 0]]]),
        prompt_len=1,
    )
    batch = RoutingBatch.from_traces([trace])
    ids = torch.tensor([[7]])  # fed without the last token
    with MegatronReplay(model) as replay, replay.step(), replay.microbatch(batch, input_ids=ids):
        probs, _ = router(x)
    gate = 1 / (1 + np.exp(2.0))
    np.testing.assert_allclose(probs.detach()[0], [1 - gate, 0, gate, 0], rtol=1e-6)
    probs[0, 2].backward()
    slope = gate * (1 - gate)
    np.testing.assert_allclose(router.weight.grad[:, 0], [-slope, 0, slope, 0], atol=1e-7)


# ------------------------------------------------------------------------- misuse and damage


def test_tokens_of_another_rollout(model: Any) -> None:
    batch = random_batch([6, 8])
    ids = padded(batch)
    expected = int(ids[1, 3])
    ids[1, 3] = 63 if expected != 63 else 62
    with MegatronReplay(model) as replay, replay.step():
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
        (RouterSpec(8, 2, (0, 1, 2), 3), r"layers \[0, 1, 2\], expected .*\[0, 2\]"),
        (RouterSpec(8, 2, (0, 1), 2), r"layers \[0, 1\], expected .*\[0, 2\]"),
    ],
)
def test_routing_of_another_model(model: Any, spec: RouterSpec, message: str) -> None:
    batch = random_batch([6], spec)
    with (
        MegatronReplay(model) as replay,
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
        MegatronReplay(model) as replay,
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
    with MegatronReplay(model) as replay, replay.step():
        with replay.microbatch(batch, input_ids=padded(batch)):
            forward(model, padded(batch))
        assert replay.report().layers[0].rows_missing == 1


def test_steps_and_microbatches_do_not_nest(model: Any) -> None:
    batch = random_batch([6])
    ids = padded(batch)
    with MegatronReplay(model) as replay:
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
            lambda: forward(model, ids.reshape(1, 12), [6, 6]),
            r"shape \[1, 12\].*\[2, 6\]",
        ),
        "other tokens": (lambda: forward(model, ids.flip(0)), "with the same values"),
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
        MegatronReplay(model) as replay,
        replay.step(),
        pytest.raises(ReplayError, match=message),
        replay.microbatch(batch, input_ids=ids),
    ):
        run()
    with (
        MegatronReplay(model) as replay,
        replay.step(),
        pytest.raises(ReplayError, match="input_ids is a ndarray"),
        replay.microbatch(batch, input_ids=ids.numpy()),
    ):
        pass


def test_settings_are_looked_at_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with MegatronReplay(model) as replay:
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
    with MegatronReplay(model) as replay, replay.step():
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


def test_field_74_recomputation_is_refused(model: Any) -> None:
    """one microbatch, a router forwarded again while gradients are computed"""
    batch = random_batch([6])
    ids = padded(batch)
    with MegatronReplay(model) as replay, replay.step():
        with replay.microbatch(batch, input_ids=ids):
            out = torch.utils.checkpoint.checkpoint(forward, model, ids, use_reentrant=False)
        with pytest.raises(ReplayError, match="layer 0: the router ran during the backward pass"):
            out.sum().backward()


def test_an_exception_in_the_middle_leaves_native_routing(model: Any) -> None:
    batch = random_batch([6], missing=0)
    ids = padded(batch)
    with torch.no_grad():
        native = forward(model, ids)
        with MegatronReplay(model) as replay:
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
    with torch.no_grad(), MegatronReplay(model) as replay:
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

    try:
        policy, reference, _orphan = (
            make_model(i, moe_enable_routing_replay=True) for i in range(3)
        )
        assert len(RouterReplay.global_router_replay_instances) == 6
        batch = random_batch([6], missing=0)
        ids = padded(batch)
        with torch.no_grad():
            native = forward(reference, ids)
            with MegatronReplay(policy) as replay, MegatronReplay(reference) as other:
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
    finally:
        RouterReplay.clear_global_router_replay_instances()


def test_copies_carry_no_live_state(model: Any) -> None:
    batch = random_batch([6])
    ids = padded(batch)
    with torch.no_grad(), MegatronReplay(model) as replay, replay.step():
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
    replay = MegatronReplay([Wrapper(Wrapper(model)), model])
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
        ("cuda_graph_impl", "local", "'none'"),
        ("enable_cuda_graph", True, "False"),
        ("external_cuda_graph", True, "False"),
        ("recompute_granularity", "full", "None"),
        ("recompute_granularity", "selective", "None"),
        ("moe_layer_recompute", True, "False"),
        ("mtp_num_layers", 1, "None"),
        ("tensor_model_parallel_size", 2, "1"),
        ("pipeline_model_parallel_size", 2, "1"),
        ("virtual_pipeline_model_parallel_size", 2, "None"),
        ("context_parallel_size", 2, "1"),
        ("expert_model_parallel_size", 2, "1"),
        ("expert_tensor_parallel_size", 2, "1"),
        ("sequence_parallel", True, "False"),
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
    with pytest.raises(UnsupportedError, match="both routers of decoder layer 0"):
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
