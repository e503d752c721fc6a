"""Shifted rows and layers and foreign rows are told from right ones, which are never accused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from r3 import RolloutId, RouterSpec, RoutingBatch, RoutingTrace, TraceError
from r3.alignment import Alignment, _clear_sign, diagnose

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
SPECS = {
    "8 of 128": RouterSpec(128, 8, tuple(range(8)), 8),
    "2 of 8": RouterSpec(8, 2, tuple(range(8)), 8),
    "1 of 16": RouterSpec(16, 1, tuple(range(8)), 8),
    "6 of 64, 3 dense": RouterSpec(64, 6, tuple(range(3, 11)), 11),
}
SPEC = SPECS["8 of 128"]


def markov_rows(rng: np.random.Generator, sequences: int, rows: int, spec: RouterSpec):
    """uint8 [sequences, rows, layers, top_k]: a token keeps each expert of the last with p = 0.43.

    The others are drawn by a skewed popularity; layers are independent.
    """
    layers, experts, k = len(spec.moe_layers), spec.num_experts, spec.top_k
    popularity = np.log(rng.gamma(1.0, size=(layers, experts)) + 1e-3)
    ids = np.empty((rows, sequences, layers, k), np.int64)
    for t in range(rows):
        score = popularity + rng.gumbel(size=(sequences, layers, experts))
        if t:
            kept = rng.random((sequences, layers, k)) < 0.43
            drawn = np.take_along_axis(score, ids[t - 1], axis=-1)
            np.put_along_axis(score, ids[t - 1], np.where(kept, 99.0, drawn), axis=-1)
        ids[t] = np.argpartition(-score, k - 1, axis=-1)[..., :k]
    return ids.swapaxes(0, 1).astype(spec.dtype)


def pack(spec: RouterSpec, sequences, rng: np.random.Generator, tokens=None) -> RoutingBatch:
    """A batch of rows [n - 1, layers, top_k] per sequence; token ids random unless given."""
    return RoutingBatch.from_traces(
        RoutingTrace.build(
            spec=spec,
            token_ids=rng.integers(0, 5000, len(rows) + 1) if tokens is None else tokens[i],
            routed_experts=rows,
            prompt_len=1,
            rollout_id=RolloutId(f"r{i}"),
        )
        for i, rows in enumerate(sequences)
    )


def make_batch(spec: RouterSpec = SPEC, sequences: int = 3, rows: int = 100, seed: int = 0):
    rng = np.random.default_rng(seed)
    return pack(spec, markov_rows(rng, sequences, rows, spec), rng)


def native_of(batch: RoutingBatch, share: float = 0.0, seed: int = 0, one_expert: bool = False):
    """int64 [T, layers, top_k]: the record with a share of cells replaced, in another order.

    one_expert: of such a cell only one expert is another one. Rows that are not recorded have
    routing too; it must not matter.
    """
    rng, spec = np.random.default_rng([seed, 1]), batch.spec
    noise = rng.random((*batch.routed_experts.shape[:2], spec.num_experts))
    ids = batch.routed_experts.astype(np.int64)
    changed = rng.random(ids.shape[:2]) < share
    anything = noise.argpartition(spec.top_k - 1, axis=-1)[..., : spec.top_k]
    if one_expert:
        np.put_along_axis(noise, ids, -1.0, axis=-1)  # an expert that the set does not have
        other = np.concatenate([noise.argmax(axis=-1)[..., None], ids[..., 1:]], axis=-1)
        ids = np.where(changed[..., None], other, ids)
    else:
        ids = np.where(changed[..., None], anything, ids)
    ids = np.where(batch.valid[:, None, None], ids, anything)
    return rng.permuted(ids, axis=-1)


def shift_rows(batch: RoutingBatch, shift: int) -> RoutingBatch:
    """What an engine hands over whose rows come `shift` tokens late: row t is that of t - shift."""
    ids, valid = np.zeros_like(batch.routed_experts), np.zeros_like(batch.valid)
    for start, stop in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        for t in range(max(start, start + shift), min(stop, stop + shift) - 1):
            ids[t], valid[t] = batch.routed_experts[t - shift], batch.valid[t - shift]
    ids[~valid] = 0
    return dataclasses.replace(batch, routed_experts=ids, valid=valid)


def shift_layers(batch: RoutingBatch, shift: int) -> RoutingBatch:
    return dataclasses.replace(batch, routed_experts=np.roll(batch.routed_experts, shift, axis=1))


def verdict(found: Alignment) -> tuple[bool, str | None, int]:
    return found.enough, found.fault, found.shift


# --- right records


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("one_expert", [False, True])
def test_right_records_are_found_right(name, share, one_expert):
    batch = make_batch(SPECS[name])
    found = diagnose(batch, native_of(batch, share, one_expert=one_expert))
    assert verdict(found) == (True, None, 0)
    assert found.rows == 300
    assert found.cells == 2400
    # a random set shares a few experts with the one it replaces
    lost = share / SPECS[name].top_k if one_expert else share
    assert 1 - lost - 0.03 < found.agreement < 1 - 0.7 * lost + 0.03
    assert set(found.row_shifts) == {-2, -1, 1, 2}
    assert set(found.layer_shifts) == {-3, -2, -1, 1, 2, 3}
    assert "agree best with the trainer's router where they stand" in str(found)


def test_agreement_against_a_loop_over_cells():
    batch = make_batch(SPECS["2 of 8"], sequences=2, rows=9)
    batch.valid[3], batch.routed_experts[3] = False, 0
    native = native_of(batch, 0.5)
    found = diagnose(batch, native)

    def mean(rows: int, layers: int) -> float:
        shared = [
            len({*batch.routed_experts[t + rows, m + layers]} & {*native[t, m]}) / 2
            for t in np.flatnonzero(batch.valid)
            for m in range(8)
            if 0 <= t + rows < 20
            and (t + rows) // 10 == t // 10
            and batch.valid[t + rows]
            and 0 <= m + layers < 8
        ]
        return float(np.mean(shared))

    assert found.rows == 17
    assert found.agreement == pytest.approx(mean(0, 0))
    assert found.agreement_per_layer.shape == (8,)
    assert found.agreement_per_layer.mean() == pytest.approx(found.agreement)
    assert found.row_shifts == pytest.approx({s: mean(s, 0) for s in (-2, -1, 1, 2)})
    assert found.layer_shifts == pytest.approx({s: mean(0, s) for s in (-3, -2, -1, 1, 2, 3)})


def test_no_false_alarm_at_any_size():
    """200 draws from 4 rows up, with masked rows, some tokens in any order and some layers."""
    judged = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        spec = SPECS[rng.choice(list(SPECS))]
        rows = int(rng.choice([4, 8, 16, 40, 100]))
        batch = make_batch(spec, int(rng.integers(1, 5)), rows, seed)
        missing = rng.random(batch.num_tokens) < rng.choice([0.0, 0.3])
        batch.valid[missing], batch.routed_experts[missing] = False, 0
        native = native_of(batch, rng.choice([0.0, 0.1, 0.25]), seed, bool(rng.integers(2)))
        tokens = rng.permutation(batch.num_tokens)[: rng.integers(1, batch.num_tokens + 1)]
        places = np.sort(rng.permutation(8)[: rng.integers(1, 9)])
        layers = [spec.moe_layers[i] for i in places]
        found = diagnose(batch, native[tokens][:, places], tokens, layers)
        assert found.fault is None, (seed, str(found))
        judged += found.enough
    assert judged > 15  # most draws are small


@pytest.mark.parametrize("fault", ["none", "rows", "layers", "others"])
def test_too_few_rows_are_not_judged(fault):
    batch = make_batch(sequences=2, rows=20)
    native = native_of(batch)
    wrong = {
        "none": batch,
        "rows": shift_rows(batch, 1),
        "layers": shift_layers(batch, 1),
        "others": make_batch(sequences=2, rows=20, seed=9),
    }
    found = diagnose(wrong[fault], native)
    assert verdict(found) == (False, None, 0)
    assert "cannot be judged" in str(found)
    assert "too few" in str(found)


def test_no_rows_at_all():
    batch = make_batch()
    found = diagnose(batch, native_of(batch)[:0], np.zeros(0, int))
    assert verdict(found) == (False, None, 0)
    assert found.rows == found.cells == 0
    assert np.isnan(found.agreement)
    values = found.to_dict()
    assert values["agreement"] is values["agreement_per_layer"] is values["other_rollout"] is None
    json.dumps(values, allow_nan=False)


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("spec", [RouterSpec(4, 4, (0, 1, 2, 3), 4), SPECS["2 of 8"]])
def test_constant_routing_cannot_be_judged(spec, share):
    """Every place agrees as well as any other, so none can be right or wrong."""
    batch = make_batch(spec, rows=200)
    batch.routed_experts[batch.valid] = np.arange(spec.top_k)
    for wrong in (batch, shift_rows(batch, 1)):
        assert verdict(diagnose(wrong, native_of(batch, share))) == (False, None, 0)


def test_a_nearly_constant_router_is_not_accused():
    """What differs is rounding, on both sides for itself."""
    batch = make_batch(SPECS["2 of 8"], rows=400)
    batch.routed_experts[batch.valid] = [0, 1]
    recorded = native_of(batch, 0.1, seed=1).astype(np.uint8)
    recorded[~batch.valid] = 0
    noisy = dataclasses.replace(batch, routed_experts=recorded)
    assert verdict(diagnose(noisy, native_of(batch, 0.1, seed=2))) == (False, None, 0)


def test_rows_that_agree_well_are_not_accused() -> None:
    """Two layers that choose alike in 95 of 100 rows, exchanged: a fault that changes next to
    nothing, and periodic text has places that agree a little better than the right one, too"""
    right = make_batch(rows=200)
    routed = right.routed_experts.copy()
    alike = np.random.default_rng(5).random(len(routed)) < 0.95
    for layer in range(1, routed.shape[1]):
        routed[alike, layer] = routed[alike, 0]
    right = dataclasses.replace(right, routed_experts=routed)
    wrong = shift_layers(right, 1)
    found = diagnose(wrong, native_of(right))
    assert found.layer_shifts[1] > found.agreement + 0.02 > 0.92
    assert found.fault is None


def test_what_lies_between_right_and_wrong_is_not_judged():
    """Four rows in five are of other weights, which is more than rounding and less than all."""
    batch = make_batch()
    foreign = np.arange(batch.num_tokens) % 5 > 0
    native = np.where(foreign[:, None, None], native_of(batch, 1.0), native_of(batch))
    assert verdict(diagnose(batch, native)) == (False, None, 0)


def test_a_fault_of_some_rollouts_is_found_in_theirs():
    """Together, three late ones of five win as much as they lose; nothing is said of them all."""
    batch = make_batch(sequences=5, rows=130)
    native, late = native_of(batch, 0.1), shift_rows(batch, 1)
    right = np.arange(batch.num_tokens) >= 3 * 131
    mixed = dataclasses.replace(
        batch,
        routed_experts=np.where(right[:, None, None], batch.routed_experts, late.routed_experts),
        valid=np.where(right, batch.valid, late.valid),
    )
    assert verdict(diagnose(mixed, native)) == (False, None, 0)
    for i in range(5):
        tokens = np.arange(i * 131, (i + 1) * 131)
        expected = (True, "row shift", 1) if i < 3 else (True, None, 0)
        assert verdict(diagnose(mixed, native[tokens], tokens)) == expected


def test_a_place_that_hardly_differs_is_not_named():
    """One cell in a hundred is another one: a shift by a row wins all there is, which is little."""
    batch = make_batch(SPECS["2 of 8"], rows=400)
    batch.routed_experts[batch.valid] = [0, 1]
    recorded = native_of(batch, 0.01, seed=1).astype(np.uint8)
    recorded[~batch.valid] = 0
    batch = dataclasses.replace(batch, routed_experts=recorded)
    found = diagnose(shift_rows(batch, 1), native_of(batch))
    assert found.row_shifts[1] == 1.0
    assert verdict(found) == (False, None, 0)


def test_rows_of_a_block_count_once():
    """Ten blocks, three of them against the others: no verdict, however many rows they have."""
    values = np.repeat([1.0] * 7 + [-0.5] * 3, 16)
    assert _clear_sign(values, np.repeat(np.arange(10), 16)) == 0
    assert _clear_sign(values, np.arange(160)) == 1
    assert _clear_sign(-values, np.arange(160)) == -1
    assert _clear_sign(np.ones(160), np.repeat(np.arange(10), 16)) == 1
    assert _clear_sign(np.ones(160), np.repeat(np.arange(5), 32)) == 0  # too few blocks
    assert _clear_sign(np.ones(60), np.arange(60)) == 0  # too few rows
    assert _clear_sign(np.zeros(160), np.arange(160)) == 0


# --- shifts


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_shifted_rows(name, shift):
    batch = make_batch(SPECS[name])
    found = diagnose(shift_rows(batch, shift), native_of(batch, 0.1))
    assert verdict(found) == (True, "row shift", shift)
    assert found.row_shifts[shift] > 0.85
    assert found.gain == pytest.approx(found.row_shifts[shift] - found.agreement, abs=0.03)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shift", [-3, -2, -1, 1, 2, 3])
def test_shifted_layers(name, shift):
    batch = make_batch(SPECS[name])
    found = diagnose(shift_layers(batch, shift), native_of(batch, 0.1))
    assert verdict(found) == (True, "layer shift", shift)
    assert found.layer_shifts[shift] > 0.85


def test_rows_that_lack_the_first_come_early():
    """An engine that drops the row of the first token: row 0 is that of token 1."""
    rng = np.random.default_rng(0)
    rows = markov_rows(rng, 3, 101, SPEC)
    right, wrong = pack(SPEC, rows[:, :100], rng), pack(SPEC, rows[:, 1:], rng)
    found = diagnose(wrong, native_of(right, 0.05))
    assert verdict(found) == (True, "row shift", -1)
    assert "rows are shifted by one: recorded row t-1 agrees with token t of the trainer" in str(
        found
    )
    assert "the recorded rows come one token early" in str(found)


def test_rows_behind_a_filler_come_late():
    """An engine that writes something in front of the first row: row 1 is that of token 0."""
    rng = np.random.default_rng(0)
    rows = markov_rows(rng, 3, 101, SPEC)
    right, wrong = pack(SPEC, rows[:, 1:], rng), pack(SPEC, rows[:, :100], rng)
    found = diagnose(wrong, native_of(right, 0.05))
    assert verdict(found) == (True, "row shift", 1)
    numbers = f"({found.row_shifts[1]:.2f} against {found.row_shifts[1] - found.gain:.2f} at shift"
    assert f"recorded row t+1 agrees with token t of the trainer {numbers} 0)" in str(found)
    assert str(found).endswith("the recorded rows come one token late")


def test_layers_behind_dense_ones():
    """The first eight of eleven layers are taken, three dense ones that hold anything included."""
    spec = SPECS["6 of 64, 3 dense"]
    rng = np.random.default_rng(0)
    rows = markov_rows(rng, 3, 100, dataclasses.replace(spec, moe_layers=tuple(range(11))))
    right, wrong = pack(spec, rows[:, :, 3:], rng), pack(spec, rows[:, :, :8], rng)
    found = diagnose(wrong, native_of(right, 0.05))
    assert verdict(found) == (True, "layer shift", 3)
    assert "recorded layer l+3 agrees with layer l of the trainer" in str(found)
    assert "the recorded layers come three layers late; dense first layers? The model has 3" in str(
        found
    )
    early = diagnose(right, native_of(wrong))
    assert verdict(early) == (True, "layer shift", -3)
    assert "three layers early" in str(early)
    flat = make_batch()
    assert "dense" not in str(diagnose(shift_layers(flat, 1), native_of(flat)))


def test_the_larger_gain_is_named():
    """Rows of which two layers in three come a layer late, and all others a token late."""
    batch = make_batch(RouterSpec(64, 4, tuple(range(12)), 12))
    late, deep = shift_rows(batch, 1), shift_layers(batch, 1)
    mixed = np.where((np.arange(12) < 8)[:, None], deep.routed_experts, late.routed_experts)
    mixed[~late.valid] = 0
    found = diagnose(dataclasses.replace(late, routed_experts=mixed), native_of(batch))
    assert verdict(found) == (True, "layer shift", 1)


# --- rows of others


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sequences", [2, 5])
def test_rows_of_another_rollout(name, sequences):
    batch = make_batch(SPECS[name], sequences)
    ids = np.roll(batch.routed_experts, 101, axis=0)
    found = diagnose(dataclasses.replace(batch, routed_experts=ids), native_of(batch, 0.1))
    assert verdict(found) == (True, "other rows", 0)
    assert f"({found.agreement:.2f} against {found.other_rollout:.2f}" in str(found)


def test_rows_of_another_model():
    found = diagnose(make_batch(), native_of(make_batch(seed=1)))
    assert verdict(found) == (True, "other rows", 0)


def test_sequences_and_tokens_swapped():
    """A padded [b, s] batch whose native rows were flattened as [s, b]."""
    batch = make_batch(sequences=4, rows=100)
    native = native_of(batch, 0.05)
    assert verdict(diagnose(batch, native)) == (True, None, 0)
    swapped = native.reshape(4, 101, 8, 8).swapaxes(0, 1).reshape(404, 8, 8)
    assert verdict(diagnose(batch, swapped)) == (True, "other rows", 0)


def test_samples_of_one_prompt_are_told_apart_by_their_answers():
    """The rows of the prompt are the same in all of them, and speak for no one."""
    rng = np.random.default_rng(0)
    rows = markov_rows(rng, 5, 300, SPEC)
    tokens = rng.integers(0, 5000, (5, 301))
    rows[:4, :200], tokens[:4, :200] = rows[0, :200], tokens[0, :200]  # the fifth: another prompt
    batch = pack(SPEC, rows, rng, tokens)
    native = native_of(batch)
    found = diagnose(batch, native)
    assert verdict(found) == (True, None, 0)
    assert found.other_rollout < 0.3
    wrong = pack(SPEC, rows[[1, 2, 3, 0, 4]], rng, tokens)
    group = np.arange(3 * 301)  # those whose next rollout is of the same prompt
    found = diagnose(wrong, native[group], group)
    assert verdict(found) == (True, "other rows", 0)
    assert found.agreement > 0.6


def test_one_sequence_is_compared_with_itself_far_away():
    batch = make_batch(sequences=1, rows=300)
    native = native_of(batch, 0.1)
    found = diagnose(batch, native)
    assert verdict(found) == (True, None, 0)
    assert found.other_rollout < found.row_shifts[1] < found.agreement
    ids = np.roll(batch.routed_experts, 60, axis=0)
    ids[~batch.valid] = 0
    foreign = dataclasses.replace(batch, routed_experts=ids)
    assert verdict(diagnose(foreign, native)) == (True, "other rows", 0)
    assert verdict(diagnose(shift_rows(batch, -1), native)) == (True, "row shift", -1)


def test_behind_the_end_of_all_others_a_rollout_is_compared_with_itself():
    rng = np.random.default_rng(0)
    rows = markov_rows(rng, 2, 1500, SPEC)
    batch = pack(SPEC, [rows[0], rows[1, :80]], rng)
    native, long = native_of(batch), np.arange(1500)
    assert verdict(diagnose(batch, native[long], long)) == (True, None, 0)
    batch.routed_experts[80:1500] = np.roll(batch.routed_experts[80:1500], 200, axis=0)
    assert verdict(diagnose(batch, native[long], long)) == (True, "other rows", 0)


def test_a_rollout_sampled_twice_is_compared_with_itself():
    rng = np.random.default_rng(0)
    rows, tokens = markov_rows(rng, 1, 200, SPEC)[0], rng.integers(0, 5000, 201)
    batch = pack(SPEC, [rows, rows], rng, [tokens, tokens])
    found = diagnose(batch, native_of(batch, 0.1))
    assert verdict(found) == (True, None, 0)
    assert found.other_rollout < 0.3


def test_without_any_other_row_neighbours_decide():
    """A token repeated on and on has no other token to be compared with."""
    rng = np.random.default_rng(0)
    batch = pack(SPEC, markov_rows(rng, 3, 100, SPEC), rng, np.full((3, 101), 7))
    native = native_of(batch, 0.1)
    found = diagnose(batch, native)
    assert found.other_rollout is None
    assert verdict(found) == (True, None, 0)
    assert verdict(diagnose(shift_rows(batch, 2), native)) == (True, "row shift", 2)


# --- parts of a batch


@pytest.mark.parametrize("part", [[0], [7], [2, 3], [0, 3, 4, 7]])
def test_layers_of_a_pipeline_stage(part):
    """Layers shifted beyond those the stage has are found in the batch."""
    spec = SPECS["6 of 64, 3 dense"]
    batch = make_batch(spec)
    layers, native = [spec.moe_layers[i] for i in part], native_of(batch, 0.1)[:, part]
    right = diagnose(batch, native, layers=layers)
    assert verdict(right) == (True, None, 0)
    assert right.layers == tuple(layers)
    assert right.agreement_per_layer.shape == (len(part),)
    assert set(right.layer_shifts) == {
        s for s in range(-3, 4) if s and any(0 <= i + s < 8 for i in part)
    }
    found = diagnose(shift_rows(batch, 1), native, layers=layers)
    assert verdict(found) == (True, "row shift", 1)
    for shift in right.layer_shifts:
        found = diagnose(shift_layers(batch, shift), native, layers=layers)
        assert verdict(found) == (True, "layer shift", shift)


def test_some_tokens_in_any_order_with_padding():
    batch = make_batch()
    rng = np.random.default_rng(0)
    native = native_of(batch, 0.1)
    tokens = rng.permutation(303)[:200]
    padded = np.concatenate([tokens, np.full(56, -1), tokens[:9]])
    ids = np.where((padded >= 0)[:, None, None], native[padded], -7)  # what padding holds is no id
    for wrong, expected in (
        (batch, (True, None, 0)),
        (shift_rows(batch, 1), (True, "row shift", 1)),
        (shift_layers(batch, -1), (True, "layer shift", -1)),
        (make_batch(seed=1), (True, "other rows", 0)),
    ):
        found = diagnose(wrong, ids, padded)
        assert verdict(found) == expected
        assert found.rows == wrong.valid[tokens].sum()
        ordered = np.sort(tokens)
        assert found.to_dict() == diagnose(wrong, native[ordered], ordered).to_dict()


def test_masked_rows():
    batch = make_batch()
    native = native_of(batch, 0.1)
    missing = np.random.default_rng(0).random(303) < 0.4
    batch.valid[missing], batch.routed_experts[missing] = False, 0
    found = diagnose(batch, native)
    assert verdict(found) == (True, None, 0)
    assert found.rows == batch.valid.sum()
    assert verdict(diagnose(shift_rows(batch, -1), native)) == (True, "row shift", -1)


def test_many_rows_are_sampled_in_blocks():
    spec = RouterSpec(16, 2, (0, 1, 2), 3)
    batch = make_batch(spec, sequences=200, rows=150)
    native = native_of(batch, 0.1)
    found = diagnose(batch, native)
    assert verdict(found) == (True, None, 0)
    assert 7500 < found.rows < 9000
    assert found.agreement == pytest.approx(0.91, abs=0.02)
    assert diagnose(batch, native).to_dict() == found.to_dict()
    late = diagnose(shift_rows(batch, 1), native)
    assert verdict(late) == (True, "row shift", 1)


# --- results and errors


def test_plain_values():
    batch = make_batch()
    values = diagnose(shift_rows(batch, 1), native_of(batch)).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert (values["fault"], values["shift"], values["enough"]) == ("row shift", 1, True)
    assert list(values["row_shifts"]) == ["-2", "-1", "1", "2"]
    assert len(values["agreement_per_layer"]) == 8


def test_arguments_are_left_as_they_are():
    batch = make_batch()
    native = native_of(batch)
    tokens = np.arange(303)[::-1].copy()
    before = [x.copy() for x in (batch.routed_experts, batch.valid, native, tokens)]
    diagnose(batch, native, tokens)
    for x, y in zip(before, (batch.routed_experts, batch.valid, native, tokens), strict=True):
        assert (x == y).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"native": np.zeros((303, 8, 8))}, "native is float64 of shape"),
        ({"native": np.zeros((302, 8, 8), int)}, r"expected integers \[tokens=303, layers=8, top"),
        ({"layers": [0, 1]}, r"\[303, 8, 8\], expected integers \[tokens=303, layers=2, top_k=8\]"),
        ({"layers": [1, 0]}, "expected ascending decoder layers"),
        ({"layers": [0, 0]}, "expected ascending decoder layers"),
        ({"layers": [8]}, "out of the MoE layers"),
        ({"layers": []}, "out of the MoE layers"),
        ({"tokens": np.arange(4)}, "expected integers .tokens=4"),
        ({"tokens": np.arange(303.0)}, "tokens is float64"),
        ({"tokens": np.arange(303) + 1}, r"tokens: row 302: 303, expected 0..302"),
        ({"tokens": np.arange(303) - 2}, r"tokens: row 0: -2, expected 0..302"),
        ({"native": np.full((303, 8, 8), 128)}, "native routing: row 0, layer 0: expert id 128"),
        ({"native": np.full((303, 8, 8), -1)}, "expert id -1"),
        ({"native": np.zeros((303, 8, 8), int)}, "name one expert twice"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    batch = make_batch()
    with pytest.raises(TraceError, match=message):
        diagnose(**{"batch": batch, "native": native_of(batch)} | change)


# --- real routing

real = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no real traces in {TRACES}")


def real_batch(name: str) -> RoutingBatch:
    rng = np.random.default_rng(0)  # the token ids are not known
    if name == "mixtral":
        data = np.load(TRACES / "mixtral-8x7b-instruct.npz")
        rows = np.split(data["experts"], data["cu_seqlens"][1:-1])
        return pack(RouterSpec(8, 2, tuple(range(32)), 32), rows, rng)
    # profiling rows first; 25 prompts without boundaries
    rows = np.array_split(np.load(TRACES / "qwen1.5-moe-a2.7b-gsm8k.npy")[8448:], 25)
    return pack(RouterSpec(60, 4, (0, 8, 12, 18, 23), 24), rows, rng)


@real
@pytest.mark.parametrize("name", ["mixtral", "qwen"])
@pytest.mark.parametrize("one_expert", [False, True])
def test_real_rows_are_found_right(name, one_expert):
    batch = real_batch(name)
    for seed in range(20):
        found = diagnose(batch, native_of(batch, 0.1, seed, one_expert))
        assert verdict(found) == (True, None, 0)


@real
@pytest.mark.parametrize("name", ["mixtral", "qwen"])
@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_real_rows_shifted(name, shift, share):
    batch = real_batch(name)
    native = native_of(batch, share)
    found = diagnose(shift_rows(batch, shift), native)
    assert verdict(found) == (True, "row shift", shift)
    found = diagnose(shift_layers(batch, shift), native)
    assert verdict(found) == (True, "layer shift", shift)


@real
@pytest.mark.parametrize("name", ["mixtral", "qwen"])
def test_real_rows_of_others(name):
    batch = real_batch(name)
    ids = batch.routed_experts.copy()
    ids[batch.valid] = np.roll(ids[batch.valid], 175, axis=0)
    found = diagnose(dataclasses.replace(batch, routed_experts=ids), native_of(batch, 0.1))
    assert verdict(found) == (True, "other rows", 0)
