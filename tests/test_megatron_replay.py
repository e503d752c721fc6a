"""Replay in real Megatron-core routers on a CPU, against oracles that share no code with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_tools import (
    MARKS,
    SPEC,
    expected_rows,
    forward,
    make_model,
    native_topk,
    packed_params,
    padded,
    random_batch,
    random_replay,
    routers_of,
)
from r3 import RouterSpec, RoutingBatch, RoutingTrace
from r3.trainer_hooks.megatron_cpu.qwen3_moe import token_logprobs
from r3.trainer_hooks.megatron_recorder import record_routing
from r3.trainer_hooks.megatron_routers import megatron_version

pytestmark = MARKS


# ------------------------------------------------------------------------- what is really used


@pytest.mark.parametrize("layout", ["padded", "padded without last", "packed", "one sequence"])
def test_the_moe_layers_use_the_recorded_experts(model: Any, layout: str) -> None:
    """field.md 1, 2, 6, 85: rows n-1, padding and missing rows native, router order s-major"""
    lengths = [9, 5, 12, 7] if layout != "one sequence" else [19]
    batch = random_batch(lengths)
    starts, packed = batch.cu_seqlens[:-1], None
    if layout == "packed":
        input_ids = torch.tensor([[*batch.token_ids.tolist(), 0, 0, 0]])
        rows = [*range(batch.num_tokens), -1, -1, -1]
        packed = packed_params([*batch.cu_seqlens[:-1].tolist(), batch.num_tokens + 3])
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
    with random_replay(model) as replay, replay.step():
        with (
            replay.microbatch(batch, input_ids=input_ids, packed_seq_params=packed),
            record_routing(model) as used,
            native_topk(model) as native,
        ):
            forward(model, input_ids, packed)
        report = replay.report()
    ids, replayed = expected_rows(batch, rows)
    padding = np.array(rows) < 0
    assert 0 < replayed.sum() < len(rows)
    assert len(used) == 1
    for layer, number in enumerate(SPEC.moe_layers):
        expected = np.where(replayed[:, None], ids[:, layer], native[layer])
        turns = np.arange(padding.sum() * 2).reshape(-1, 2) % 8  # spread over all experts
        expected[padding] = np.sort(turns)
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


def test_padding_is_padding_where_the_last_token_has_routing(model: Any) -> None:
    """a batch built by hand, of an engine that forwarded the last token too"""
    batch = random_batch([4, 7], missing=0)
    routed = np.where(batch.valid[:, None, None], batch.routed_experts, [6, 7]).astype(np.uint8)
    fields = {**batch.__dict__, "routed_experts": routed, "valid": np.ones(11, bool)}
    batch = RoutingBatch(**fields)
    ids = padded(batch)
    with (
        random_replay(model) as replay,
        replay.step(),
        record_routing(model) as used,
    ):
        with replay.microbatch(batch, input_ids=ids):
            forward(model, ids)
        assert replay.report().layers[2].rows_replayed == 11
        assert replay.report().layers[2].rows_missing == 0
    assert used[0][8::2, 1].tolist() == [[0, 1], [2, 3], [4, 5]]  # sequence 0 from position 4
    assert np.array_equal(used[0][7::2, 1], np.sort(routed[7:, 1]))  # sequence 1 from position 3


def test_counts_add_up_over_a_step_and_start_anew(model: Any) -> None:
    batch = random_batch([6, 4], missing=0)
    ids = padded(batch)
    with random_replay([model]) as replay:
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
    with torch.no_grad(), random_replay(model) as replay, replay.step():
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


def sqrtsoftplus_over_set(s: Any, ids: Any, _bias: Any) -> Any:
    g = (1 + s.exp()).log().sqrt().gather(1, ids)
    return g / g.sum(1, keepdim=True)


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
    "sigmoid, groups": (
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
        },
        sigmoid_over_set,
    ),
    # from megatron-core 0.19 on
    "sqrtsoftplus": ({"moe_router_score_function": "sqrtsoftplus"}, sqrtsoftplus_over_set),
    "sqrtsoftplus, bias": (
        {"moe_router_score_function": "sqrtsoftplus", "moe_router_enable_expert_bias": True},
        sqrtsoftplus_over_set,
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_gates_and_router_gradient_follow_the_formula(name: str) -> None:
    """field.md 77: gates gathered from the dense scores; float64 autograd of the formula agrees"""
    settings, formula = SCORES[name]
    if name.startswith("sqrtsoftplus") and megatron_version().startswith("0.16."):
        pytest.skip("megatron-core 0.16 has no sqrtsoftplus; `make test-full` runs this with 0.19")
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
    with random_replay(model) as replay, replay.step():
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
    with random_replay(model) as replay, replay.step(), replay.microbatch(batch, input_ids=ids):
        probs, _ = router(x)
    gate = 1 / (1 + np.exp(2.0))
    np.testing.assert_allclose(probs.detach()[0], [1 - gate, 0, gate, 0], rtol=1e-6)
    probs[0, 2].backward()
    slope = gate * (1 - gate)
    np.testing.assert_allclose(router.weight.grad[:, 0], [-slope, 0, slope, 0], atol=1e-7)


@pytest.mark.parametrize("top_k", [1, 2, 7, 13])
@pytest.mark.parametrize("at_a_time", [1, 1 << 24])
def test_counting_agrees_with_a_sort(
    monkeypatch: pytest.MonkeyPatch, top_k: int, at_a_time: int
) -> None:
    """Scores with many ties, few and many experts a row, in pieces: outside is what has top_k or
    more scores above it"""
    from r3.trainer_hooks import megatron_microbatch

    monkeypatch.setattr(megatron_microbatch, "_AT_A_TIME", at_a_time)
    config = {"num_hidden_layers": 1, "mlp_only_layers": [], "num_experts": 32}
    config |= {"num_experts_per_tok": top_k, "norm_topk_prob": False}
    (router,) = routers_of(model := make_model(0, config))
    spec = RouterSpec(32, top_k, (0,), 1)
    batch = random_batch([40], spec, missing=0.2)
    x = torch.randn(39, 1, 32, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():  # scores of a few values only
        router.weight.copy_(router.weight[torch.arange(32) % 9])
    input_ids = torch.from_numpy(batch.token_ids[None, :-1])
    with random_replay(model) as replay, replay.step():
        with replay.microbatch(batch, input_ids=input_ids):
            router(x)
        counts = replay.report().layers[0]
    scores = (x[:, 0] @ router.weight.T).detach()
    expected = []
    for row in np.flatnonzero(batch.valid[:39]):
        chosen = batch.routed_experts[row, 0].astype(int)
        above = [int((scores[row] > scores[row, e] + 1e-5).sum()) for e in chosen]
        expected.append(sum(a >= top_k for a in above))
    assert counts.outside_topk_experts_forced == sum(expected) > 0
    assert counts.outside_topk_cells_forced == sum(e > 0 for e in expected)


def test_passes_that_nothing_encloses_are_counted(model: Any) -> None:
    batch = random_batch([6, 4])
    ids = padded(batch)
    with random_replay(model) as replay:
        forward(model, ids)  # before a step
        with replay.step():
            forward(model, ids)
            with replay.microbatch(batch, input_ids=ids):
                forward(model, ids)
        assert {c.rows_not_enclosed for c in replay.report().layers.values()} == {12}
        assert "rows_not_enclosed" in str(replay.report())
        with replay.step(), replay.microbatch(batch, input_ids=ids):
            forward(model, ids)
        assert "rows_not_enclosed" not in str(replay.report())
