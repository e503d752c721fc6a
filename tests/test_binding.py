"""What happens to each router row: against a brute-force model, row by row, in plain Python.

Arrays only, no Megatron-core. Which packed token a row is, is `layout`'s business (test_layout);
here views are taken from it for all ranks of a layout.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import ReplayError, RolloutId, RouterSpec, RoutingBatch, StaleRoutingWarning
from r3.trainer_hooks.binding import Binding, Limits, bind
from r3.trainer_hooks.layout import RankPlace, RankView, view_of
from r3.trainer_hooks.megatron_report import RolloutCounts

SPEC = RouterSpec(num_experts=8, top_k=2, moe_layers=(1, 2, 4), num_layers=5)
ANY = Limits(None)


def make_batch(
    valid: list[list[bool]],
    versions: list[list[int]] | int = -1,
    spec: RouterSpec = SPEC,
    names: list[int] | None = None,
    seed: int = 0,
) -> RoutingBatch:
    """A batch by hand. valid: of all tokens of each sequence, the last ones too."""
    lengths = [len(v) for v in valid]
    mask = np.concatenate([np.array(v, bool) for v in valid])
    noise = np.random.default_rng(seed).random(
        (len(mask), len(spec.moe_layers), min(spec.num_experts, 64))
    )
    ids = noise.argsort(axis=-1)[..., : spec.top_k]
    if isinstance(versions, int):
        versions = [[versions] * n for n in lengths]
    return RoutingBatch(
        spec=spec,
        rollout_ids=tuple(RolloutId("run", sample=i) for i in names or range(len(valid))),
        cu_seqlens=np.cumsum([0, *lengths]),
        prompt_lens=np.ones(len(valid), np.int64),
        token_ids=np.arange(1, len(mask) + 1, dtype=np.int32),
        routed_experts=np.where(mask[:, None, None], ids, 0).astype(spec.dtype),
        valid=mask,
        logprobs=np.full(len(mask), np.nan, np.float32),
        weight_versions=np.where(mask, np.concatenate(versions), -1),
    )


def rows_of(length: int, missing: int = 0) -> list[bool]:
    """One sequence whose first rows are missing, and whose last token has none, as ever"""
    return [i >= missing for i in range(length - 1)] + [False]


def whole(batch: RoutingBatch, extra: int = 0) -> RankView:
    """The view of one rank without any split, padded on the right"""
    return view_of(batch, seq_length=int(np.diff(batch.cu_seqlens).max()) + extra)


def bound(batch: RoutingBatch, limits: Limits = ANY, version: int | None = None) -> Binding:
    return bind(batch, whole(batch), batch.spec.moe_layers, limits, version)


LAYOUTS = [  # tp_size with sequence parallelism, cp_size, packed
    *itertools.product((1, 2), (1, 2), (False, True)),
    (3, 1, False),
    (1, 3, True),
]


def all_views(
    batch: RoutingBatch, tp_size: int, cp_size: int, packed: bool, extra: int
) -> list[RankView]:
    """Those of all ranks of a layout; extra: further slots, in units of what the splits divide"""
    unit = 2 * tp_size * cp_size
    widths = [-(-n // unit) * unit + extra * unit for n in np.diff(batch.cu_seqlens).tolist()]
    how: dict[str, Any] = {"seq_length": max(widths)}
    if packed:
        how = {"cu_seqlens": np.cumsum([0, *widths, unit])}  # and a segment of padding
    return [
        view_of(batch, place=RankPlace(tp_size, tp, tp_size > 1, cp_size, cp), **how)
        for tp, cp in itertools.product(range(tp_size), range(cp_size))
    ]


@st.composite
def batches(draw: st.DrawFn) -> RoutingBatch:
    """Any rows missing, any versions from -1 to 5, and the same rollout twice at times"""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = rng.random()
    valid = [[*(rng.random(n - 1) < share).tolist(), False] for n in lengths]
    versions = [rng.integers(-1, 6, n).tolist() for n in lengths]
    names = rng.integers(0, len(lengths), len(lengths)).tolist()
    return make_batch(valid, versions, names=names, seed=int(rng.integers(99)))


# --------------------------------------------------------------------------- the brute force


class Model:
    """What is to become of each token, by the rules in words"""

    def __init__(self, batch: RoutingBatch, lag: int | None = None, now: int = 0) -> None:
        self.kind: list[str] = []
        self.rollouts: dict[RolloutId, RolloutCounts] = {}
        self.expected = 0
        for i, name in enumerate(batch.rollout_ids):
            first, end = batch.cu_seqlens[i : i + 2].tolist()
            kinds = [self._kind(batch, t, t == end - 1, lag, now) for t in range(first, end)]
            self.kind += kinds
            self.expected += len(kinds) - 1
            missing, stale = kinds.count("missing"), kinds.count("stale")
            old = self.rollouts.get(name, RolloutCounts())
            self.rollouts[name] = old + RolloutCounts(len(kinds) - 1, missing, stale)

    @staticmethod
    def _kind(batch: RoutingBatch, t: int, last: bool, lag: int | None, now: int) -> str:
        if not batch.valid[t]:
            return "last" if last else "missing"
        version = int(batch.weight_versions[t])
        if lag is not None and (version == -1 or version < now - lag):
            return "stale"
        return "replayed"

    @property
    def native(self) -> int:
        return self.kind.count("missing") + self.kind.count("stale")


def check(found: Binding, batch: RoutingBatch, view: RankView, layers: list[int], m: Model) -> None:
    kinds = [m.kind[t] if t >= 0 else "padding" for t in view.index.tolist()]
    assert found.native.dtype == np.int64
    assert found.native.tolist() == [
        r for r, kind in enumerate(kinds) if kind in ("missing", "stale", "last")
    ]
    assert found.replayed.dtype == bool
    assert found.replayed.tolist() == [kind == "replayed" for kind in kinds]
    assert found.rows_missing == kinds.count("missing")
    assert found.rows_stale == kinds.count("stale")
    assert found.rollouts == m.rollouts
    assert found.experts.shape == (len(layers), len(kinds), batch.spec.top_k)
    padding = [r for r, kind in enumerate(kinds) if kind == "padding"]
    for row, layer in zip(found.experts, layers, strict=True):
        column = batch.spec.moe_layers.index(layer)
        for r, kind in enumerate(kinds):
            if kind == "replayed":
                assert row[r].tolist() == batch.routed_experts[view.index[r], column].tolist()
        check_spread(row[padding], batch.spec)


def check_spread(rows: np.ndarray, spec: RouterSpec) -> None:
    """Distinct experts in each row, and none of them with more than its share"""
    for row in rows.tolist():
        assert len(set(row)) == spec.top_k
        assert 0 <= min(row) <= max(row) < spec.num_experts
    counts = np.bincount(rows.ravel(), minlength=spec.num_experts)
    assert counts.max(initial=0) <= math.ceil(len(rows) * spec.top_k / spec.num_experts) + 1


@given(batch=batches(), layout=st.sampled_from(LAYOUTS), extra=st.integers(0, 2), data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_row_is_replayed_native_or_spread(
    batch: RoutingBatch, layout: tuple[int, int, bool], extra: int, data: st.DataObject
) -> None:
    layers = data.draw(st.sampled_from([[1, 2, 4], [2], [1, 4], []]))
    lag, now = data.draw(st.sampled_from([None, 0, 1, 3, 9])), data.draw(st.integers(5, 7))
    limits, model = Limits(None, lag, "native"), Model(batch, lag, now)
    total = np.zeros(3, int)
    for view in all_views(batch, *layout, extra):
        found = bind(batch, view, layers, limits, now)
        check(found, batch, view, layers, model)
        total += [found.rows_missing, found.rows_stale, found.replayed.sum()]
    # ranks share the tokens, and each has counted its own
    assert total.tolist() == [model.kind.count(k) for k in ("missing", "stale", "replayed")]


@given(
    batch=batches(),
    layout=st.sampled_from(LAYOUTS),
    fraction=st.sampled_from([None, 0, 0.1, 0.3, 0.5, 0.8, 1]),
    lag=st.sampled_from([None, 0, 1, 3]),
    on_stale=st.sampled_from(["stop", "native", "warn"]),
    now=st.sampled_from([None, 3, 4, 5, 6]),
)
@settings(max_examples=150, deadline=None)
def test_all_ranks_stop_or_none(
    batch: RoutingBatch,
    layout: tuple[int, int, bool],
    fraction: float | None,
    lag: int | None,
    on_stale: Any,
    now: int | None,
) -> None:
    """Or some would wait for the others for ever; and the brute force says which it is"""
    outcomes = set()
    for view in all_views(batch, *layout, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = bind(batch, view, SPEC.moe_layers, Limits(fraction, lag, on_stale), now)
                result = repr(sorted(found.rollouts.items()))
            except ReplayError as e:
                result = f"error: {e}"
        outcomes.add((result, *(str(w.message) for w in caught)))
    ((result, *warned),) = outcomes

    newest = int(batch.weight_versions.max())
    if now is None:
        model = Model(batch)
        wrong = lag is not None
    else:
        aged = Model(batch, lag, now)
        stale = aged.kind.count("stale") > 0
        model = aged if on_stale == "native" else Model(batch)
        wrong = newest > now or (stale and on_stale == "stop")
        assert bool(warned) == (stale and on_stale == "warn" and newest <= now)
    # fractions here have no decimals that a product would round
    too_many = fraction is not None and 10 * model.native > round(10 * fraction) * model.expected
    assert result.startswith("error: ") == (wrong or too_many)


# ------------------------------------------------------------------------------------ padding


@pytest.mark.parametrize(
    ("experts", "top_k"), [(8, 2), (8, 8), (7, 3), (128, 8), (5, 1), (64, 6), (2, 2), (300, 64)]
)
@pytest.mark.parametrize("padding", [0, 1, 2, 3, 7, 100, 1001])
def test_padding_is_spread(experts: int, top_k: int, padding: int) -> None:
    spec = RouterSpec(experts, top_k, (0, 1), 2)
    batch = make_batch([rows_of(3), rows_of(2)], spec=spec)
    view = view_of(batch, cu_seqlens=np.array([0, 3, 5, 5 + padding]))
    found = bind(batch, view, (0, 1), ANY)
    for layer in found.experts:
        check_spread(layer[5:], spec)
    assert found.replayed.tolist() == [True, True, False, True, False] + [False] * padding
    assert found.native.tolist() == [2, 4]


def test_padding_is_padding_where_the_last_token_has_routing() -> None:
    """Of an engine that forwarded it too; it is the token that index -1 stands for in numpy"""
    batch = make_batch([rows_of(3), [True] * 4], 1)
    view = view_of(batch, cu_seqlens=np.array([0, 3, 7, 60]))
    found = bind(batch, view, [1], ANY)
    assert found.replayed.tolist() == [True, True, False, *[True] * 4, *[False] * 53]
    assert (found.rows_missing, found.rows_stale, found.native.tolist()) == (0, 0, [2])
    check_spread(found.experts[0, 7:], SPEC)
    found = bind(batch, view, [1], Limits(None, 1, "native"), 5)
    assert not found.replayed.any()
    assert found.native.tolist() == [*range(7)]
    assert found.rows_stale <= 6


# -------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [
        (8, np.uint8),
        (256, np.uint8),
        (257, np.int16),
        (32768, np.int16),
        (32769, np.int32),
        (65536, np.int32),
    ],
)
def test_ids_are_as_narrow_as_torch_allows(experts: int, dtype: Any) -> None:
    """and never wrap around, neither those recorded nor those of padding"""
    spec = RouterSpec(experts, 2, (0,), 1)
    batch = make_batch([rows_of(3)], spec=spec)
    batch.routed_experts[0, 0] = [experts - 1, experts - 2]
    view = view_of(batch, cu_seqlens=np.array([0, 3, 3 + experts // 2 + 1]))
    found = bind(batch, view, [0], ANY).experts
    assert found.dtype == dtype
    assert found[0, 0].tolist() == [experts - 1, experts - 2]
    assert int(found.min()) >= 0
    assert int(found[0, 3:].max()) == experts - 1


# ------------------------------------------------------------------------------------- layers


def test_only_the_layers_asked_for() -> None:
    batch = make_batch([rows_of(6), rows_of(4)])
    view = whole(batch)
    everything = bind(batch, view, SPEC.moe_layers, ANY).experts
    for layers in itertools.permutations(SPEC.moe_layers, 2):
        found = bind(batch, view, iter(layers), ANY).experts
        expected = everything[[SPEC.moe_layers.index(x) for x in layers]]
        assert np.array_equal(found, expected)
    none = bind(batch, view, (), ANY)  # a stage whose layers are all dense
    assert none.experts.shape == (0, len(view.index), 2)
    assert none.replayed.sum() == 8


# ----------------------------------------------------------------------- max_missing_fraction


@pytest.mark.parametrize(
    ("missing", "rows", "fraction"),
    [(0, 8, 0), (4, 8, 0.5), (1, 8, 0.125), (6, 8, 0.75), (8, 8, 1), (3, 10, 0.3), (7, 10, 0.7)],
)
def test_just_the_limit_may_be_missing(missing: int, rows: int, fraction: float) -> None:
    batch = make_batch([rows_of(rows + 1, missing)])
    assert bound(batch, Limits(fraction)).rows_missing == missing
    if missing < rows:
        batch = make_batch([rows_of(rows + 1, missing + 1)])
        with pytest.raises(ReplayError, match=f"{missing + 1} of {rows} rows have no routing"):
            bound(batch, Limits(fraction))
        assert bound(batch, Limits(None)).rows_missing == missing + 1


def test_the_limit_is_met_in_decimals_too() -> None:
    """29 of 100 rows are missing and 0.29 may be"""
    for percent in range(101):
        batch = make_batch([rows_of(101, percent)])
        assert bound(batch, Limits(percent / 100)).rows_missing == percent


def test_last_tokens_and_padding_count_neither_way() -> None:
    """Four sequences of one token, and one of which half is missing; most rows are padding"""
    batch = make_batch([*[[False]] * 4, rows_of(5, 2)])
    view = view_of(batch, seq_length=50)
    found = bind(batch, view, [1], Limits(0.5))
    assert found.rollouts[RolloutId("run", sample=4)] == RolloutCounts(4, 2, 0)
    assert found.rollouts[RolloutId("run", sample=0)] == RolloutCounts(0, 0, 0)
    with pytest.raises(ReplayError, match="2 of 4 rows"):
        bind(batch, view, [1], Limits(0.49))


def test_a_batch_that_needs_no_routing_passes_every_limit() -> None:
    batch = make_batch([[False], [False]])
    found = bound(batch, Limits(0, 0), version=3)
    assert set(found.rollouts.values()) == {RolloutCounts()}
    assert found.native.tolist() == [0, 1]


def test_the_message_names_the_worst_rollouts() -> None:
    """By their share and not by their rows, and only some of them"""
    batch = make_batch([rows_of(101, 30), rows_of(5, 4), rows_of(11), rows_of(11, 5)])
    with pytest.raises(ReplayError) as e:
        bound(batch, Limits(0.25))
    assert str(e.value) == (
        "39 of 124 rows have no routing that may be replayed: 39 missing, 0 stale (31.5%), "
        "expected at most max_missing_fraction = 25.0%; by share of their rows: "
        "run/0/1/0/0 (100%), run/0/3/0/0 (50%), run/0/0/0/0 (30%)"
    )
    with pytest.raises(ReplayError) as e:
        bound(make_batch([rows_of(10, i) for i in range(9)]), Limits(0))
    assert str(e.value).endswith(
        ": run/0/8/0/0 (89%), run/0/7/0/0 (78%), run/0/6/0/0 (67%), run/0/5/0/0 (56%), "
        "run/0/4/0/0 (44%) and 3 more"
    )


def test_a_rollout_that_is_there_twice_counts_twice() -> None:
    batch = make_batch([rows_of(5, 1), rows_of(9, 2), rows_of(4)], names=[7, 7, 8])
    assert bound(batch).rollouts == {
        RolloutId("run", sample=7): RolloutCounts(12, 3, 0),
        RolloutId("run", sample=8): RolloutCounts(3, 0, 0),
    }


# ------------------------------------------------------------------------------ weight versions


def test_lag_is_counted_from_the_trainers_version() -> None:
    batch = make_batch([[True] * 7 + [False]], [[1, 2, 3, 4, 5, 6, 7, 0]])
    for lag in range(9):
        found = bound(batch, Limits(None, lag, "native"), version=8)
        assert found.replayed.tolist() == [8 - v <= lag for v in range(1, 8)] + [False]
        assert found.rows_stale == 7 - found.replayed.sum()
    assert bound(batch, Limits(None), version=8).replayed.sum() == 7  # any lag
    assert bound(batch, Limits(None)).replayed.sum() == 7


def test_stop_names_the_first_old_row() -> None:
    batch = make_batch([rows_of(4), [True] * 4 + [False]], [[5] * 4, [5, 5, 2, 3, 0]])
    with pytest.raises(ReplayError) as e:
        bound(batch, Limits(1, 2), version=6)
    assert str(e.value) == (
        "rollout run/0/1/0/0: row 2: weight version 2, expected at least 4 (the trainer has 6, "
        "max_weight_lag is 2); 2 of 7 rows are like that"
    )
    assert bound(batch, Limits(1, 4), version=6).rows_stale == 0


@pytest.mark.parametrize("on_stale", ["stop", "native", "warn"])
def test_rows_of_unknown_version_are_old(on_stale: Any) -> None:
    batch = make_batch([[True] * 4 + [False], rows_of(4, 1)], [[5, 5, -1, 5, 0], [5] * 4])
    limits = Limits(1, 9, on_stale)
    message = r"rollout run/0/0/0/0: row 2: no weight version, expected at least -4 .*; 1 of 6 rows"
    if on_stale == "stop":
        with pytest.raises(ReplayError, match=message):
            bound(batch, limits, version=5)
    elif on_stale == "warn":
        with pytest.warns(StaleRoutingWarning, match=message):
            found = bound(batch, limits, version=5)
        assert (found.rows_stale, int(found.replayed.sum())) == (0, 6)
        assert found.rollouts[RolloutId("run", sample=1)] == RolloutCounts(3, 1, 0)
    else:
        found = bound(batch, limits, version=5)
        assert (found.rows_stale, int(found.replayed.sum())) == (1, 5)
        assert found.rollouts[RolloutId("run")] == RolloutCounts(4, 0, 1)
    # without a limit a version need not be known, and a missing row never has one
    assert bound(batch, Limits(1), version=5).replayed.sum() == 6
    known = make_batch([rows_of(9, 8)], 5)
    assert bound(known, Limits(1, 0), version=5).rows_stale == 0


@pytest.mark.parametrize("on_stale", ["native", "warn"])
@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_rows_that_are_new_enough(on_stale: Any) -> None:
    batch = make_batch([rows_of(5, 1)], 4)
    found = bound(batch, Limits(None, 1, on_stale), version=5)
    assert (found.rows_missing, found.rows_stale) == (1, 0)


@pytest.mark.parametrize("limits", [Limits(), Limits(None, 0), Limits(None, 3, "native")])
def test_rows_newer_than_the_trainer_are_an_error(limits: Limits) -> None:
    """Whatever is done about old ones: the numbers are of two different countings"""
    batch = make_batch([rows_of(4), [True] * 3 + [False]], [[6] * 4, [6, 7, 7, 0]])
    message = r"rollout run/0/1/0/0: row 1: weight version 7, expected at most the trainer's, 6"
    with pytest.raises(ReplayError, match=message):
        bound(batch, limits, version=6)


@pytest.mark.parametrize("on_stale", ["stop", "native", "warn"])
def test_a_lag_needs_the_trainers_version(on_stale: Any) -> None:
    batch = make_batch([rows_of(4)], 3)
    with pytest.raises(ReplayError, match=r"max_weight_lag is set .*step\(weight_version=\.\.\.\)"):
        bound(batch, Limits(None, 5, on_stale))


def test_old_rows_count_toward_what_may_be_missing() -> None:
    """2 missing and 2 old of 8; routed natively they are alike"""
    versions = [[5, 5, 1, 1, 5, 5, 5, 5, 0]]
    batch = make_batch([rows_of(9, 2)], versions)
    found = bound(batch, Limits(0.5, 1, "native"), version=5)
    assert found.rollouts == {RolloutId("run"): RolloutCounts(8, 2, 2)}
    assert next(iter(found.rollouts.values())).native_fraction == 0.5
    with pytest.raises(ReplayError, match=r"4 of 8 rows .*50\.0%.*49\.0%; .*run/0/0/0/0 \(50%\)"):
        bound(batch, Limits(0.49, 1, "native"), version=5)
    # replayed all the same they are not missing
    with pytest.warns(StaleRoutingWarning, match="2 of 6 rows"):
        found = bound(batch, Limits(0.25, 1, "warn"), version=5)
    assert (found.rows_missing, found.rows_stale, found.native.tolist()) == (2, 0, [0, 1, 8])


@pytest.mark.parametrize("length", [1, 4])
def test_last_tokens_with_routing_can_be_old_too(length: int) -> None:
    """Of an engine that forwarded them; a limit of 1 is met by everything"""
    batch = make_batch([[True] * length], 1)
    found = bound(batch, Limits(1, 1, "native"), version=5)
    assert found.replayed.sum() == 0
    assert all(r.native_fraction <= 1 for r in found.rollouts.values())


# -------------------------------------------------------------------------------------- options


FRACTION = "max_missing_fraction is {}, expected a number from 0 to 1, or None"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_missing_fraction": -0.01}, FRACTION.format("-0.01")),
        ({"max_missing_fraction": 1.01}, FRACTION.format("1.01")),
        ({"max_missing_fraction": math.nan}, FRACTION.format("nan")),
        ({"max_missing_fraction": "x"}, FRACTION.format("'x'")),
        ({"max_missing_fraction": True}, FRACTION.format("True")),
        ({"max_weight_lag": True}, "max_weight_lag is True, expected an integer from 0, or None"),
        ({"max_weight_lag": -1}, "max_weight_lag is -1, expected an integer from 0, or None"),
        ({"max_weight_lag": 1.0}, "max_weight_lag is 1.0, expected an integer from 0, or None"),
        ({"max_weight_lag": "1"}, "max_weight_lag is '1', expected an integer from 0, or None"),
        ({"on_stale": "ignore"}, "on_stale is 'ignore', expected 'stop', 'native' or 'warn'"),
        ({"on_stale": None}, "on_stale is None, expected 'stop', 'native' or 'warn'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError) as e:
        Limits(**options)
    assert str(e.value) == message


def test_the_batch_is_left_as_it_was() -> None:
    batch = make_batch([rows_of(9, 2), rows_of(3)], [[1] * 9, [5] * 3])
    copies = {
        f.name: getattr(batch, f.name).copy()
        for f in dataclasses.fields(batch)
        if isinstance(getattr(batch, f.name), np.ndarray)
    }
    found = bind(batch, whole(batch, extra=3), [1, 4], Limits(None, 1, "native"), 5)
    found.experts[:] = 0
    for name, before in copies.items():
        assert np.array_equal(getattr(batch, name), before, equal_nan=name == "logprobs"), name
