"""What else a Megatron router does with a choice: which of it follows the replayed map.

  gate weights and their gradient   replayed   test_megatron_replay.py
  experts' load, tokens dispatched  replayed   here, and everywhere the map is looked at
  expert bias update                replayed
  auxiliary loss, all three kinds   native
  z-loss                            neither: of the logits
Oracles: the losses' formulas, by hand in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_replay_runs import CONFIG, RECOMPUTE, SPEC
from megatron_tools import (
    MARKS,
    forward,
    make_model,
    padded,
    random_batch,
    random_replay,
    routers_of,
)
from r3 import RouterSpec

pytestmark = MARKS

ONE_LAYER = {"num_hidden_layers": 1, "mlp_only_layers": []}
EXPERTS, TOP_K, ROWS, COEFF = 8, 2, 16, 0.3


@pytest.fixture(autouse=True)
def no_schedule_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's schedules leave the scale of auxiliary losses in a class"""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))


def logged() -> dict[str, float]:
    """The losses of the only layer that Megatron has logged so far, added up"""
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    return {k: float(v["values"][0]) for k, v in get_moe_layer_wise_logging_tracker().items()}


def balance(scores: torch.Tensor, chosen: torch.Tensor, coeff: float) -> torch.Tensor:
    """coeff * E * sum_i f_i P_i (Switch Transformer, arXiv 2101.03961, eq. 4; top-k as Megatron's)

    scores [rows, E], normalised; chosen int64 [rows, top_k].
    """
    rows, experts = scores.shape
    share = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
    return coeff * experts * (share * scores.sum(0) / rows).sum()


class Passed:
    """One pass of a lone router under replay, without a loss of its own"""

    def __init__(self, **settings: Any) -> None:
        model = make_model(3, ONE_LAYER, **settings).train()
        self.router = router = routers_of(model)[0]
        batch = random_batch([ROWS + 1], RouterSpec(EXPERTS, TOP_K, (0,), 1), missing=0)
        x = torch.randn(ROWS, 1, 32, generator=torch.Generator().manual_seed(4))
        ids = torch.from_numpy(batch.token_ids[None, :-1])
        self.before = logged()
        with random_replay(model) as replay, replay.step():
            with replay.microbatch(batch, input_ids=ids):
                probs, self.used = router(x)
            assert replay.report().total.outside_topk_experts_forced > 0
        (probs * 0).sum().backward()  # only what is attached to the gate has a gradient
        self.weight = router.weight.detach().double().requires_grad_()
        self.logits = x[:, 0].double() @ self.weight.T
        self.native = self.logits.topk(TOP_K).indices
        recorded = batch.routed_experts[:ROWS, 0].astype(np.int64)
        self.recorded = torch.from_numpy(recorded)
        assert torch.equal(
            self.used, torch.zeros(ROWS, EXPERTS, dtype=torch.bool).scatter(1, self.recorded, True)
        )

    def assert_loss(self, loss: torch.Tensor, name: str, coeff: float = COEFF) -> None:
        """loss: by hand, of self.logits"""
        found = logged()[name] - self.before.get(name, 0)
        assert found == pytest.approx(float(loss) / coeff, rel=1e-5)
        loss.backward()
        error = (self.router.weight.grad.double() - self.weight.grad).norm()
        assert error < 1e-5 * self.weight.grad.norm()


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("aux_loss", "load_balancing_loss"),
        ("seq_aux_loss", "seq_load_balancing_loss"),
        ("global_aux_loss", "global_load_balancing_loss"),
    ],
)
def test_auxiliary_losses_use_the_native_choice(kind: str, name: str, function: str) -> None:
    """One sequence, one rank, one pass: the three kinds are of the same value"""
    passed = Passed(
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=COEFF,
        moe_router_score_function=function,
    )
    scores = passed.logits.softmax(-1)
    if function == "sigmoid":
        scores = passed.logits.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
    loss = balance(scores, passed.native, COEFF)
    replayed = balance(scores, passed.recorded, COEFF)
    assert abs(float(loss - replayed)) > 0.01 * float(loss)  # they can be told apart
    passed.assert_loss(loss, name)
    if kind == "global_aux_loss":
        expected = torch.bincount(passed.native.flatten(), minlength=EXPERTS)
        assert torch.equal(passed.router.global_tokens_per_expert, expected.float())


def test_z_loss_is_of_the_logits() -> None:
    """coeff * mean(logsumexp^2) (ST-MoE, arXiv 2202.08906, eq. 5)"""
    passed = Passed(moe_z_loss_coeff=COEFF)
    passed.assert_loss(COEFF * (passed.logits.logsumexp(-1) ** 2).mean(), "z_loss")


@pytest.mark.parametrize("recompute", ["none", "full", "moe"])
def test_expert_bias_follows_the_replayed_load(recompute: str) -> None:
    """Counted once, with recomputation too; padding in equal parts"""
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    model = make_model(
        0,
        CONFIG,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        **RECOMPUTE[recompute],
    ).train()
    batch = random_batch([16, 13], SPEC, missing=0)
    batch.valid[-1] = batch.valid[15] = True  # the last ones too, so that all rows are known
    batch.routed_experts[[15, -1]] = [2, 5]
    ids = padded(batch, extra=1)  # 5 rows of padding
    with random_replay(model) as replay, replay.step():
        with replay.microbatch(batch, input_ids=ids):
            loss = forward(model, ids).sum()
        loss.backward()
        with torch.no_grad(), replay.microbatch(batch, input_ids=ids):
            forward(model, ids)  # does not train
    padding = np.bincount(np.arange(5 * 2) % 8, minlength=8)
    for i, router in enumerate(routers_of(model)):
        load = np.bincount(batch.routed_experts[:, i].ravel(), minlength=8) + padding
        assert router.local_tokens_per_expert.tolist() == load.tolist()
        before = router.expert_bias.clone()
        after = get_updated_expert_bias(
            router.local_tokens_per_expert, router.expert_bias.clone(), 1e-3
        )
        moved = np.sign((after - before).numpy())
        assert moved.tolist() == np.sign(load.mean() - load).tolist()


def test_experts_get_the_replayed_load(megatron: None) -> None:
    """What the dispatcher hands to each expert: rows of the replayed map, in both dispatchers"""
    for dispatcher in ("allgather", "alltoall"):
        model = make_model(0, CONFIG, moe_token_dispatcher_type=dispatcher)
        batch = random_batch([14, 9], SPEC, missing=0)
        ids = padded(batch)
        loads: list[list[int]] = []

        def note(_experts: Any, args: Any, loads: list[list[int]] = loads) -> None:
            loads.append(args[1].tolist())

        handles = [
            layer.mlp.experts.register_forward_pre_hook(note)
            for layer in model.decoder.layers
            if hasattr(layer.mlp, "router")
        ]
        with (
            torch.no_grad(),
            random_replay(model) as replay,
            replay.step(),
            replay.microbatch(batch, input_ids=ids),
        ):
            forward(model, ids)
        for handle in handles:
            handle.remove()
        for i, load in enumerate(loads):
            known = np.bincount(batch.routed_experts[batch.valid, i].ravel(), minlength=8)
            # 5 rows of padding are spread, the 2 last tokens go where the router sends them
            rest = np.array(load) - known - np.bincount(np.arange(10) % 8, minlength=8)
            assert rest.min() >= 0
            assert rest.sum() == 2 * 2


def test_a_map_of_probabilities_gives_the_same_experts_while_none_is_zero() -> None:
    """DeepEP's dispatcher works the experts out again, as the top-k of the gate weights ("flex",
    moe_flex_dispatcher_backend "deepep"). On arrays, as it runs on GPUs only: it finds the replayed
    experts unless a weight underflows to zero, and then that expert's share is zero in any case."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 64, generator=generator) * 20
    recorded = torch.rand(4096, 64, generator=generator).topk(8).indices
    chosen = torch.zeros(4096, 64, dtype=torch.bool).scatter(1, recorded, True)
    for probs in (
        torch.zeros(4096, 64).scatter(1, recorded, logits.gather(1, recorded).softmax(-1)),
        torch.zeros(4096, 64).scatter(1, recorded, logits.gather(1, recorded).sigmoid()),
    ):
        weights, again = probs.topk(8)
        lost = chosen & ~torch.zeros_like(chosen).scatter(1, again, True)
        assert lost.any() == (weights == 0).any()
        assert (probs[lost] == 0).all()
