"""Replay under every parallel layout and recomputation equals one plain rank, and Megatron's own
RouterReplay does not.

Oracles: the map that each router hands to its MoE layer against rows cut with plain tensor
operations; loss and router gradients against one rank that recomputes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from megatron_ranks import run_ranks
from megatron_replay_runs import (
    LAYOUTS,
    RECOMPUTE,
    SPEC,
    Key,
    Outcome,
    run_case,
    run_cases,
)
from megatron_tools import MARKS

pytestmark = MARKS

# every layout and every kind of recomputation at least once, the delicate pairs all
SELECTED = {
    ("tp", "none"),
    ("tp", "full"),
    ("tp-packed", "moe"),
    ("tp-left", "block"),
    ("ep", "full"),
    ("ep-alltoall", "moe"),
    ("pp", "none"),
    ("pp", "full"),
    ("pp-uneven", "moe"),
    ("pp-packed", "full"),
    ("vpp", "none"),
    ("vpp", "full"),
    ("vpp", "moe"),
    ("cp", "full of 2"),
    ("cp", "moe and attention"),
    ("cp-packed", "none"),
    ("cp-packed", "full"),
}
NATIVE = [
    # told once per forward pass, it recomputes with the rows of the newest microbatch
    ("pp", "full", "native"),
    # a queue per layer gets an entry for each chunk that runs
    ("vpp", "full", "native, switching"),
    ("vpp", "moe", "native, switching"),
]


def possible(layout: str, recompute: str) -> bool:
    """Megatron fails where a chunk has not a multiple of the layers that are recomputed at once"""
    return recompute != "full of 2" or not ("uneven" in layout or "vpp" in layout)


def pairs(ranks: int) -> list[Any]:
    return [
        pytest.param(
            (layout, recompute, "r3"),
            id=f"{layout}-{recompute}",
            marks=[] if ranks == 1 or (layout, recompute) in SELECTED else pytest.mark.full,
        )
        for layout, settings in LAYOUTS.items()
        if settings.ranks == ranks
        for recompute in RECOMPUTE
        if possible(layout, recompute)
    ]


@pytest.fixture(scope="module")
def reference() -> Callable[..., Outcome]:
    """One rank that recomputes nothing, by kind of microbatch"""
    found: dict[tuple[str, str], Outcome] = {}

    def get(kind: str, how: str = "r3") -> Outcome:
        if (kind, how) not in found:
            found[kind, how] = run_case("none" if kind == "padded" else kind, "none", how)
        return found[kind, how]

    return get


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> list[dict[Key, Any]]:
    """All chosen cases in one pair of processes"""
    chosen = [i.callspec.params for i in request.session.items if hasattr(i, "callspec")]
    keys = [p["on_two"] for p in chosen if "on_two" in p]
    return run_ranks(2, run_cases, keys=keys)


def check(key: Key, found: list[Outcome], expected: Outcome) -> None:
    layout, recompute, _ = key
    times = Counter(dict.fromkeys(range(4), 2 if RECOMPUTE[recompute] else 1))
    once = Counter(dict.fromkeys(range(4), 1))
    losses = [o.losses for o in found if o.losses]
    assert losses
    for x in losses:
        assert x == pytest.approx(expected.losses, rel=1e-5)
    assert set().union(*(o.gradients for o in found)) == set(SPEC.moe_layers)
    for o in found:
        assert set(o.gradients) == set(o.maps) == set(o.report["layers"])
        for layer, gradient in o.gradients.items():
            error = (gradient - expected.gradients[layer]).norm() / gradient.norm()
            assert error < 1e-5, layer
            # "block" recomputes the first layer of a chunk only
            assert o.maps[layer] == times or (recompute == "block" and o.maps[layer] == once), layer
        counted = {
            layer: (c["rows_replayed"], c["rows_missing"])
            for layer, c in o.report["layers"].items()
        }
        assert len(set(counted.values())) == 1  # and recomputation counted nothing
        assert min(counted[next(iter(counted))]) > 0
    # each row counts on one rank: those of data-parallel ranks are all the same
    replayed = expected.report["layers"][0]["rows_replayed"]
    sizes = LAYOUTS[layout].sizes
    split = sizes.get("tp", 1) * sizes.get("cp", 1)
    first = [o.report["layers"][0]["rows_replayed"] for o in found if 0 in o.report["layers"]]
    assert sum(first) * split == replayed * len(first)


@pytest.mark.parametrize("key", pairs(1))
def test_one_rank(key: Key, reference: Callable[..., Outcome]) -> None:
    check(key, [run_case(*key)], reference(LAYOUTS[key[0]].kind))


@pytest.mark.parametrize("on_two", pairs(2))
def test_two_ranks(
    on_two: Key, two_ranks: list[dict[Key, Any]], reference: Callable[..., Outcome]
) -> None:
    check(on_two, [r[on_two] for r in two_ranks], reference(LAYOUTS[on_two[0]].kind))


R2 = ("tp", "vpp", "cp-packed")


@pytest.mark.parametrize(
    "on_two",
    [
        pytest.param((name, "none", "r2"), id=name, marks=[] if name in R2 else pytest.mark.full)
        for name, layout in LAYOUTS.items()
        if layout.ranks == 2
    ],
)
def test_r2_on_two_ranks(on_two: Key, two_ranks: list[dict[Key, Any]]) -> None:
    """Rows that were split over ranks are put together, and cut again"""
    found = [r[on_two] for r in two_ranks]
    assert set().union(*found) == set(SPEC.moe_layers)
    assert all(rows > 0 and wrong == 0 for r in found for rows, wrong in r.values())


@pytest.mark.parametrize("on_two", [("pp", "none", "out of step")], ids=" ".join)
def test_stages_out_of_step(on_two: Key, two_ranks: list[dict[Key, Any]]) -> None:
    """A stage that is fed hidden states sees no tokens; both are told"""
    for found in two_ranks:
        assert "stages of the pipeline were given different microbatches" in found[on_two]
        assert "[4, 4] passes by stage, as in the first one [True, False]" in found[on_two]


@pytest.mark.parametrize("on_two", NATIVE, ids=" ".join)
def test_megatrons_own_replay_is_wrong_there(
    on_two: Key, two_ranks: list[dict[Key, Any]], reference: Callable[..., Outcome]
) -> None:
    """The reason for not building on it: no error, the same loss, and other gradients"""
    expected = reference(LAYOUTS[on_two[0]].kind, "complete")
    found = [r[on_two] for r in two_ranks]
    losses = next(o.losses for o in found if o.losses)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    worst = max(
        float((g - expected.gradients[layer]).norm() / g.norm())
        for o in found
        for layer, g in o.gradients.items()
    )
    assert worst > 0.1
    assert any(m != Counter(dict.fromkeys(range(4), 2)) for o in found for m in o.maps.values())


def test_megatrons_own_replay_is_right_where_it_is_simple(
    reference: Callable[..., Outcome],
) -> None:
    """So what is shown above is not due to how it is used here"""
    expected = reference("padded", "complete")
    for recompute in ("none", "full"):
        found = run_case("none", recompute, "native, switching")
        for layer, gradient in found.gradients.items():
            error = (gradient - expected.gradients[layer]).norm() / gradient.norm()
            assert error < 1e-5


@pytest.mark.parametrize(
    "keys",
    [
        [("tp-pp", "full", "r3"), ("ep-cp", "moe", "r3")],
        pytest.param(
            [
                (layout, recompute, "r3")
                for layout, settings in LAYOUTS.items()
                if settings.ranks == 4
                for recompute in RECOMPUTE
                if possible(layout, recompute)
            ],
            marks=pytest.mark.full,
        ),
    ],
    ids=["one of each", "all"],
)
def test_four_ranks(keys: list[Key], reference: Callable[..., Outcome]) -> None:
    found = run_ranks(4, run_cases, keys=keys)
    for key in keys:
        check(key, [r[key] for r in found], reference(LAYOUTS[key[0]].kind))
