"""Every wrong table is an error, or is counted and reported: never a silent change of the loss.

Each fault is tried under both dispatchers on the real model. The right table is the trainer's own
choice, as of an engine that agrees with it in all cells. Megatron's own RouterReplay takes most of
these without a word; see the last test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_replay_runs import ALLTOALL, CONFIG, SPEC
from megatron_tools import MARKS, forward, make_model, padded, random_batch
from r3 import R3Error, ReplayError, RoutingBatch, RoutingTrace, TraceError
from r3.trainer_hooks import MegatronReplay

pytestmark = MARKS

LENGTHS = [60, 50, 40, 30]
DISPATCHERS: dict[str, dict[str, Any]] = {"allgather": {}, "alltoall": ALLTOALL}


class Setting:
    """A model, the right table for a batch of tokens, and the loss under it"""

    def __init__(self, settings: dict[str, Any], top_k: int = 2) -> None:
        config = {**CONFIG, "num_experts_per_tok": top_k, "norm_topk_prob": top_k > 1}
        self.model = make_model(0, config, **settings)
        spec = dataclasses.replace(SPEC, top_k=top_k)
        blank = random_batch(LENGTHS, spec, missing=0)
        self.ids = padded(blank)
        with torch.no_grad(), MegatronReplay(self.model) as replay, replay.step(weight_version=7):
            with replay.record(blank, input_ids=self.ids) as own:
                logits = forward(self.model, self.ids)
            self.batch = own.to_batch()
        self.loss = self.loss_of(logits)

    def loss_of(self, logits: torch.Tensor) -> float:
        real = torch.arange(self.ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
        return float((logits.logsumexp(-1) * real).sum() / real.sum())

    def replay(self, batch: Any, **options: Any) -> tuple[float, Any]:
        """The loss under `batch`, and the report"""
        version = options.pop("weight_version", 7)
        with (
            torch.no_grad(),
            MegatronReplay(self.model, **options) as replay,
        ):
            with (
                replay.step(weight_version=version),
                replay.microbatch(batch, input_ids=self.ids),
            ):
                loss = self.loss_of(forward(self.model, self.ids))
            return loss, replay.report()


@pytest.fixture(scope="module")
def settings(megatron: None) -> dict[str, Setting]:
    return {name: Setting(s) for name, s in DISPATCHERS.items()}


def with_rows(batch: RoutingBatch, routed: np.ndarray, **fields: Any) -> RoutingBatch:
    return dataclasses.replace(batch, routed_experts=np.ascontiguousarray(routed), **fields)


def in_rows(batch: RoutingBatch, change: Callable[[np.ndarray], np.ndarray]) -> RoutingBatch:
    """Each sequence's rows changed by itself; the last has none"""
    routed = batch.routed_experts.copy()
    for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        routed[a : b - 1] = change(routed[a : b - 1])
    return with_rows(batch, routed)


def one_cell(value: Any) -> Callable[[RoutingBatch], RoutingBatch]:
    def change(batch: RoutingBatch) -> RoutingBatch:
        routed = batch.routed_experts.astype(np.int64)
        routed[3, 1] = value
        return with_rows(batch, routed)

    return change


def b_major(batch: RoutingBatch) -> RoutingBatch:
    """Rows of a padded [b, s] table read as [s, b]: what belongs to another sequence"""
    b, s = len(batch), max(LENGTHS)
    slots = np.zeros((b, s, *batch.routed_experts.shape[1:]), batch.routed_experts.dtype)
    for i, (a, z) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        slots[i, : z - a] = batch.routed_experts[a:z]
    wrong = slots.reshape(s, b, *slots.shape[2:]).swapaxes(0, 1)
    # the fillers of padding are no sets: take any from the batch
    filler = batch.routed_experts[np.arange(b * s).reshape(b, s) % 20]
    empty = (wrong[..., :1] == wrong[..., 1:2]).any(axis=(2, 3))
    wrong = np.where(empty[..., None, None], filler, wrong)
    routed = np.concatenate([wrong[i, :n] for i, n in enumerate(LENGTHS)])
    return with_rows(batch, routed)


def of_another_rollout(batch: RoutingBatch) -> RoutingBatch:
    rest = random_batch(LENGTHS, SPEC, seed=5, missing=0)
    return with_rows(batch, np.where(batch.valid[:, None, None], rest.routed_experts, 0))


def none_missing(batch: RoutingBatch) -> Any:
    return None


# name: (what becomes of the batch, the error, its text)
ERRORS: dict[str, tuple[Callable[[RoutingBatch], Any], type[R3Error], str]] = {
    "short": (
        lambda b: with_rows(b, b.routed_experts[:-1]),
        TraceError,
        r"routed_experts has shape \[179, 3, 2\].*\[180 tokens, 3 MoE layers, 2\]",
    ),
    "long": (
        lambda b: with_rows(b, np.concatenate([b.routed_experts, b.routed_experts[:1]])),
        TraceError,
        r"shape \[181, 3, 2\]",
    ),
    "narrow": (
        lambda b: with_rows(b, b.routed_experts[..., :1]),
        TraceError,
        r"\[59, 3, 1\]|, 1\]",
    ),
    "wide": (
        lambda b: with_rows(b, np.concatenate([b.routed_experts, b.routed_experts[..., :1]], -1)),
        TraceError,
        r", 3\]",
    ),
    "a layer too few": (lambda b: with_rows(b, b.routed_experts[:, 1:]), TraceError, r", 2, 2\]"),
    # 300 in a byte is 44
    "uint8 wrap": (one_cell(np.array([300, 1]).astype(np.uint8)), TraceError, "row 3, layer 2.*44"),
    "-1": (one_cell([-1, 3]), TraceError, "row 3, layer 2: expert id -1"),
    "id = E": (one_cell([8, 3]), TraceError, "row 3, layer 2: expert id 8"),
    "duplicate": (one_cell([5, 5]), TraceError, "row 3, layer 2: .*one expert twice"),
    "all zero": (
        lambda b: with_rows(b, np.zeros_like(b.routed_experts)),
        TraceError,
        "row 0, layer 0: .*one expert twice",
    ),
    "b-major order": (b_major, ReplayError, "outside the trainer's native top-k"),
    "shifted by a row": (
        lambda b: in_rows(b, lambda r: np.concatenate([r[:1], r[:-1]])),
        ReplayError,
        "rows are shifted by one: recorded row t\\+1 agrees with token t",
    ),
    "shifted by a row, the other way": (
        lambda b: in_rows(b, lambda r: np.concatenate([r[1:], r[-1:]])),
        ReplayError,
        "rows are shifted by one: recorded row t-1 agrees with token t",
    ),
    "shifted by a layer": (
        lambda b: with_rows(b, np.roll(b.routed_experts, 1, axis=1)),
        ReplayError,
        "layers are shifted by one",
    ),
    "rows of another rollout": (of_another_rollout, ReplayError, "outside the trainer's native"),
    "None": (none_missing, ReplayError, "batch is a NoneType, expected a RoutingBatch"),
    "a trace": (
        lambda b: RoutingTrace.build(
            spec=SPEC, token_ids=[1, 2], routed_experts=np.tile([0, 1], (1, 3, 1)), prompt_len=1
        ),
        ReplayError,
        "batch is a RoutingTrace, expected a RoutingBatch",
    ),
}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("fault", ERRORS)
def test_a_wrong_table_is_an_error(
    settings: dict[str, Setting], dispatcher: str, fault: str
) -> None:
    setting = settings[dispatcher]
    change, error, text = ERRORS[fault]
    with pytest.raises(error, match=text):
        setting.replay(change(setting.batch))
    # and leaves nothing behind
    loss, report = setting.replay(setting.batch)
    assert loss == pytest.approx(setting.loss, abs=1e-6)
    assert report.total.outside_topk_experts_forced == 0


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_stale_rows(settings: dict[str, Setting], dispatcher: str) -> None:
    """Rows of version 7, one of them of 4: stop, route natively, or warn"""
    setting = settings[dispatcher]
    batch = of_another_rollout(setting.batch)
    versions = setting.batch.weight_versions.copy()
    versions[11] = 4
    routed = setting.batch.routed_experts.copy()
    routed[11] = batch.routed_experts[11]  # an old row that says something else
    batch = with_rows(setting.batch, routed, weight_versions=versions)
    with pytest.raises(ReplayError, match="row 11: weight version 4, expected at least 5"):
        setting.replay(batch, max_weight_lag=2)
    loss, report = setting.replay(batch, max_weight_lag=2, on_stale="native")
    assert loss == pytest.approx(setting.loss, abs=1e-6)
    assert {c.rows_stale for c in report.layers.values()} == {1}
    assert report.rollouts[batch.rollout_ids[0]].rows_stale == 1
    with pytest.warns(UserWarning, match="row 11: weight version 4"):
        loss, report = setting.replay(batch, max_weight_lag=2, on_stale="warn")
    assert abs(loss - setting.loss) > 1e-6
    assert report.total.rows_stale == 0
    assert report.total.outside_topk_experts_forced > 0  # told of all the same
    with pytest.raises(ReplayError, match="weight version 7, expected at most the trainer's, 6"):
        setting.replay(batch, weight_version=6)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_missing_rows_are_routed_natively_and_counted(
    settings: dict[str, Setting], dispatcher: str
) -> None:
    """A row of -1 is a missing one: whatever is in it, the loss is the native one"""
    setting = settings[dispatcher]
    routed = setting.batch.routed_experts.astype(np.int64)
    valid = setting.batch.valid.copy()
    routed[70:80], valid[70:80] = -1, False
    versions = np.where(valid, setting.batch.weight_versions, -1)
    batch = with_rows(setting.batch, routed, valid=valid, weight_versions=versions)
    loss, report = setting.replay(batch)
    assert loss == pytest.approx(setting.loss, abs=1e-6)
    assert {c.rows_missing for c in report.layers.values()} == {10}
    (rollout,) = (name for name, r in report.rollouts.items() if r.native_fraction)
    assert rollout == batch.rollout_ids[1]
    assert (report.rollouts[rollout].rows_missing, report.rollouts[rollout].rows) == (10, 49)
    assert f"rollout {rollout}: 10 missing and 0 stale of 49 rows" in str(report)
    message = (
        r"10 of 176 rows .*: 10 missing, 0 stale \(5.7%\), expected at most .*5.0%; "
        rf".*{rollout} \(20%\)"
    )
    with pytest.raises(ReplayError, match=message):
        setting.replay(batch, max_missing_fraction=0.05)


@pytest.mark.parametrize("shift", [1, None], ids=["shifted by a row", "of another rollout"])
def test_one_wrong_rollout_among_right_ones_is_found(
    settings: dict[str, Setting], shift: int | None
) -> None:
    """Too few to move the share of all; counted by rollout, against brute force"""
    setting = settings["allgather"]
    right = setting.batch
    routed = right.routed_experts.copy()
    if shift:
        routed[60:108] = right.routed_experts[61:109]
    else:
        routed[60:109] = random_batch(LENGTHS, SPEC, seed=5, missing=0).routed_experts[60:109]
    batch = with_rows(right, routed)
    wrong = batch.rollout_ids[1]
    with pytest.raises(ReplayError) as e:
        setting.replay(batch)
    assert f" in the answer of rollout {wrong}, expected at most" in str(e.value)
    assert "too few" in str(e.value)  # for a diagnosis, of 49 rows
    _, report = setting.replay(batch, max_outside_fraction=None)
    assert list(report.rollouts) == list(batch.rollout_ids)
    counts = report.rollouts.values()
    assert [r.cells_replayed for r in counts] == [3 * (n - 1) for n in LENGTHS]
    outside = [r.outside_topk_experts_forced for r in counts]
    assert sum(outside) == report.total.outside_topk_experts_forced
    assert outside[1] == max(outside) > 0.4 * 2 * 3 * 49


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_all_zero_may_be_legal_with_one_expert(megatron: None, dispatcher: str) -> None:
    """top-1: no rule over the array sees it, the witness does"""
    setting = Setting(DISPATCHERS[dispatcher] | {"moe_router_pre_softmax": True}, top_k=1)
    loss, _ = setting.replay(setting.batch)
    assert loss == pytest.approx(setting.loss, abs=1e-6)
    with pytest.raises(ReplayError, match="outside the trainer's native top-k"):
        setting.replay(with_rows(setting.batch, np.zeros_like(setting.batch.routed_experts)))


SILENT = ["duplicate", "all zero", "b-major order", "shifted by a row", "rows of another rollout"]


@pytest.mark.parametrize("fault", SILENT)
def test_megatrons_own_replay_takes_them_silently(settings: dict[str, Setting], fault: str) -> None:
    """The reason for all of this"""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    setting = settings["allgather"]
    model = make_model(0, CONFIG, moe_enable_routing_replay=True)
    batch = ERRORS[fault][0](setting.batch)
    table = np.tile([0, 1], (60, 4, 3, 1))
    for i, (a, b) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        table[: b - a - 1, i] = batch.routed_experts[a : b - 1]
    rows = torch.from_numpy(table).flatten(0, 1)
    RouterReplay.set_replay_data(list(rows.unbind(1)))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with torch.no_grad():
        loss = setting.loss_of(forward(model, setting.ids))
    assert abs(loss - setting.loss) > 1e-4
