"""Which router row is which token: against a brute-force model in lists, on all small cases."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import ReplayError, RolloutId, RouterSpec, RoutingBatch, TraceError
from r3.trainer_hooks.layout import RankPlace, RankView, check_batch, view_of

SPEC = RouterSpec(num_experts=8, top_k=2, moe_layers=(0, 1), num_layers=2)
PAD = 0
# the parts of a rank that has neither tensor nor sequence parallelism, and of those that have
TENSOR_PLACES = (
    {},
    {"tp_size": 2, "tp_rank": 1},
    {"tp_size": 2, "tp_rank": 0, "sequence_parallel": True},
    {"tp_size": 2, "tp_rank": 1, "sequence_parallel": True},
)


def make_batch(sequences: list[list[int]], spec: RouterSpec = SPEC) -> RoutingBatch:
    lengths = [len(s) for s in sequences]
    total = sum(lengths)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    valid = np.ones(total, bool)
    valid[cu[1:] - 1] = False
    ids = np.tile(np.array([0, 1], np.uint8), (total, len(spec.moe_layers), 1))
    return RoutingBatch(
        spec=spec,
        rollout_ids=tuple(RolloutId("run", sample=i) for i in range(len(sequences))),
        cu_seqlens=cu,
        prompt_lens=np.ones(len(sequences), np.int64),
        token_ids=np.concatenate([np.array(s, np.int32) for s in sequences]),
        routed_experts=np.where(valid[:, None, None], ids, 0).astype(np.uint8),
        valid=valid,
        logprobs=np.full(total, np.nan, np.float32),
        weight_versions=np.full(total, -1, np.int64),
    )


def distinct(lengths: list[int] | tuple[int, ...]) -> list[list[int]]:
    """Sequences in which every token of the batch is another one, so that no two can be confused"""
    numbers = itertools.count(1)
    return [[next(numbers) for _ in range(n)] for n in lengths]


def ids_of(sequences: list[list[int]], width: int, value: int = PAD) -> np.ndarray:
    return np.array([list(s) + [value] * (width - len(s)) for s in sequences], np.int64)


def index_of(sequences: list[list[int]], input_ids: Any, **layout: Any) -> list[int]:
    return view_of(make_batch(sequences), input_ids=np.array(input_ids), **layout).index.tolist()


# --- the brute-force model: lists of (token id, packed token), cut as the tensors are


class Slot(NamedTuple):
    id: int
    token: int


def labelled(sequences: list[list[int]]) -> list[list[Slot]]:
    tokens = itertools.count()
    return [[Slot(t, next(tokens)) for t in s] for s in sequences]


def row_of(slots: list[Slot], start: int, width: int, value: int = PAD) -> list[Slot]:
    """`slots` in a row of `width`; what does not fit is not fed"""
    row = [Slot(value, -1)] * start + slots
    return (row + [Slot(value, -1)] * width)[:width]


def cut_cp(row: list[Slot], cp_size: int, cp_rank: int) -> list[Slot]:
    if cp_size == 1:
        return row
    size = len(row) // (2 * cp_size)
    chunks = [row[k : k + size] for k in range(0, len(row), size)] if size else [[]] * 2 * cp_size
    return chunks[cp_rank] + chunks[-1 - cp_rank]


def cut_segments(segments: list[list[Slot]], place: RankPlace) -> list[Slot]:
    return [slot for s in segments for slot in cut_cp(s, place.cp_size, place.cp_rank)]


def expect(grid: list[list[Slot]], place: RankPlace) -> tuple[list[list[int]], list[int]]:
    """RankView.slots and .index of a rank that is fed `grid` [b][s_cp]"""
    positions = list(zip(*grid, strict=True))  # [s_cp][b]
    if place.sequence_parallel:
        size = len(positions) // place.tp_size
        positions = positions[place.tp_rank * size :][:size]
    return [[x.token for x in row] for row in grid], [x.token for p in positions for x in p]


def check(grid: list[list[Slot]], place: RankPlace, view: RankView) -> None:
    slots, index = expect(grid, place)
    assert view.slots.tolist() == slots
    assert view.index.tolist() == index
    assert view.slots.dtype == view.index.dtype == np.int64
    assert view.shape[0] * view.shape[1] == len(index)
    assert view.shape[1] == len(grid)


def ids_in(grid: list[list[Slot]]) -> np.ndarray:
    return np.array([[x.id for x in row] for row in grid], np.int64).reshape(len(grid), -1)


def up_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def small_lengths() -> Iterator[tuple[int, ...]]:
    """Up to 3 sequences of 1 to 5 tokens; three of them in one order each"""
    for count in (1, 2):
        yield from itertools.product(range(1, 6), repeat=count)
    for a, b, c in itertools.combinations_with_replacement(range(1, 6), 3):
        yield (b, c, a)


def small_places(cp_size: int) -> list[RankPlace]:
    return [
        RankPlace(cp_size=cp_size, cp_rank=r, **tensor)  # type: ignore[arg-type]
        for r in range(cp_size)
        for tensor in TENSOR_PLACES
    ]


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("cut", [False, True])
def test_padded_on_all_small_cases(cp_size: int, cut: bool) -> None:
    """Right, left and mixed padding, with and without last tokens and ids"""
    places = small_places(cp_size)
    for lengths in small_lengths():
        sequences = distinct(lengths)
        batch, slots = make_batch(sequences), labelled(sequences)
        fed = [s[:-1] if cut else s for s in slots]
        least = up_to(max(map(len, fed)), 2 * cp_size)
        widths = (least, least + 2 * cp_size)[: 1 if cp_size == 3 else 2]
        for s, side in itertools.product(widths, ("right", "left", "mixed")):
            room = [s - len(f) for f in fed]
            starts = {
                "right": None,
                "left": np.array(room),
                "mixed": np.array([k // 2 for k in room], np.int32),
            }[side]
            at = [0] * len(fed) if starts is None else starts.tolist()
            rows = [row_of(f, k, s) for f, k in zip(fed, at, strict=True)]
            blind = [row_of(f, k, s) for f, k in zip(slots, at, strict=True)]
            for place in places:
                if place.sequence_parallel and s // cp_size % 2:
                    continue
                grid = [cut_cp(r, cp_size, place.cp_rank) for r in rows]
                ids = ids_in(grid)
                check(grid, place, view_of(batch, input_ids=ids, starts=starts, place=place))
                # a stage without ids takes a last token as fed where there is a slot for it
                grid = [cut_cp(r, cp_size, place.cp_rank) for r in blind]
                check(grid, place, view_of(batch, starts=starts, seq_length=s, place=place))


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("cut", [False, True])
def test_packed_on_all_small_cases(cp_size: int, cut: bool) -> None:
    """Segments of just the tokens, rounded up and larger; padding behind, as segment or not"""
    for lengths, more in itertools.product(small_lengths(), (0, 1)):
        sequences = distinct(lengths)
        batch, slots = make_batch(sequences), labelled(sequences)
        fed = [s[:-1] if cut else s for s in slots]
        multiple = 2 * cp_size if cp_size > 1 else 1
        widths = [up_to(len(f) + more * (k % 2), multiple) for k, f in enumerate(fed)]
        if more:
            widths.append(4 * cp_size)  # a segment of padding
        cu = np.cumsum([0, *widths]).astype(np.int32)
        extra = 2 if cp_size == 1 and more else 0
        rows = [row_of(f, 0, w) for f, w in zip([*fed, []], widths, strict=False)]
        blind = [row_of(f, 0, w) for f, w in zip([*slots, []], widths, strict=False)]
        for place in small_places(cp_size):
            if place.sequence_parallel and (cu[-1] // cp_size % 2):
                continue
            grid = [cut_segments(rows, place)]
            grid[0] += [Slot(PAD, -1)] * extra
            ids = ids_in(grid)
            check(grid, place, view_of(batch, input_ids=ids, cu_seqlens=cu, place=place))
            grid = [cut_segments(blind, place)]
            check(grid, place, view_of(batch, cu_seqlens=cu, place=place))


@st.composite
def places(draw: st.DrawFn) -> RankPlace:
    cp_size, tp_size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
    return RankPlace(
        tp_size=tp_size,
        tp_rank=draw(st.integers(0, tp_size - 1)),
        sequence_parallel=draw(st.booleans()),
        cp_size=cp_size,
        cp_rank=draw(st.integers(0, cp_size - 1)),
    )


lengths_st = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@given(data=st.data(), lengths=lengths_st, place=places(), vocabulary=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_any_vocabulary_is_read_as_fed(
    data: st.DataObject, lengths: list[int], place: RankPlace, vocabulary: int
) -> None:
    """Repeated tokens, padding that is a token, any layout: rows with routing are right"""
    pick = np.random.default_rng(data.draw(st.integers(0, 999)))
    sequences = [pick.integers(0, vocabulary, n).tolist() for n in lengths]
    value = data.draw(st.integers(0, vocabulary))
    batch, slots = make_batch(sequences), labelled(sequences)
    fed = [s[:-1] if data.draw(st.booleans()) else s for s in slots]
    multiple = 2 * place.cp_size * place.tp_size
    layout: dict[str, Any]
    if data.draw(st.booleans()):
        widths = [up_to(len(f) + data.draw(st.integers(0, 9)), multiple) for f in fed]
        rows = [row_of(f, 0, w, value) for f, w in zip(fed, widths, strict=True)]
        grid = [cut_segments(rows, place)]
        layout = {"cu_seqlens": np.cumsum([0, *widths])}
    else:
        s = up_to(max(map(len, fed)) + data.draw(st.integers(0, 9)), multiple)
        starts = [data.draw(st.integers(0, s - len(f))) for f in fed]
        rows = [row_of(f, k, s, value) for f, k in zip(fed, starts, strict=True)]
        grid = [cut_cp(r, place.cp_size, place.cp_rank) for r in rows]
        layout = {"starts": np.array(starts), "seq_length": s}
    view = view_of(batch, input_ids=ids_in(grid), place=place, **layout)
    # the last token carries no routing: it may count as padding, and padding of its id as it
    routed = np.append(batch.valid, False)
    _, index = expect(grid, place)
    assert np.where(routed[view.index], view.index, -1).tolist() == [
        t if routed[t] else -1 for t in index
    ]


@given(data=st.data(), lengths=lengths_st, place=places(), packed=st.booleans())
@settings(max_examples=150, deadline=None)
def test_one_wrong_token_is_found(
    data: st.DataObject, lengths: list[int], place: RankPlace, packed: bool
) -> None:
    """By the rank that is fed it, by name of rollout and position; by no other rank"""
    sequences = distinct(lengths)
    batch, slots = make_batch(sequences), labelled(sequences)
    i = data.draw(st.integers(0, len(lengths) - 1))
    j = data.draw(st.integers(0, lengths[i] - 1))
    wrong = Slot(9999, slots[i][j].token)
    multiple = 2 * place.cp_size * place.tp_size
    s = up_to(max(lengths), multiple) + multiple
    widths = [up_to(n, multiple) + multiple for n in lengths] if packed else [s] * len(lengths)
    rows = [row_of(f, 0, w) for f, w in zip(slots, widths, strict=True)]
    rows[i][j] = wrong
    cut = [cut_cp(r, place.cp_size, place.cp_rank) for r in rows]
    grid = [cut_segments(rows, place)] if packed else cut
    layout = {"cu_seqlens": np.cumsum([0, *widths])} if packed else {}
    if wrong not in cut[i]:
        check(grid, place, view_of(batch, input_ids=ids_in(grid), place=place, **layout))
        return
    row, column = (0, grid[0].index(wrong)) if packed else (i, cut[i].index(wrong))
    if j == lengths[i] - 1 and cut[i][-1] == wrong:
        return  # alone behind its sequence it cannot be told from padding; see below
    with pytest.raises(ReplayError) as e:
        view_of(batch, input_ids=ids_in(grid), place=place, **layout)
    assert str(e.value) == (
        f"rollout run/0/{i}/0/0: token {j} (input_ids[{row}, {column}]): found 9999, expected "
        f"{sequences[i][j]}; the trainer's tokens are not those of this routing"
    )


def test_the_ranks_share_the_batch() -> None:
    """Every token is a row of just one rank of the context and sequence parallel ones"""
    batch = make_batch(distinct([5, 16, 3]))
    for layout in ({"seq_length": 16}, {"cu_seqlens": np.array([0, 8, 24, 32])}):
        seen: list[int] = []
        for cp_rank, tp_rank in itertools.product(range(2), range(2)):
            place = RankPlace(2, tp_rank, True, 2, cp_rank)
            seen += view_of(batch, place=place, **layout).index.tolist()  # type: ignore[arg-type]
        assert sorted(t for t in seen if t >= 0) == list(range(24))


def test_wrong_last_token_before_padding_is_found() -> None:
    with pytest.raises(ReplayError, match=r"token 2 \(input_ids\[0, 2\]\): found 9, expected 3"):
        index_of([[1, 2, 3], [4, 5, 6, 7, 8]], [[1, 2, 9, 0, 0], [4, 5, 6, 7, 8]])
    # alone in its row or segment it cannot be told from padding; no routing belongs to it
    assert index_of([[1, 2, 3]], [[1, 2, 9]]) == [0, 1, -1]
    assert index_of([[1, 2], [3, 4]], [[1, 9, 3, 4]], cu_seqlens=np.array([0, 2, 4])) == [
        *[0, -1],
        *[2, 3],
    ]
    with pytest.raises(ReplayError, match=r"1/0/0: token 0 .*found 9, expected 3"):
        index_of([[1, 2], [3, 4]], [[1, 2, 9, 9]], cu_seqlens=np.array([0, 2, 4]))
    # only slots of this rank count: of 8, rank 0 of 2 sees 0, 1, 6, 7
    place = RankPlace(cp_size=2)
    assert index_of([[*range(1, 8)]], [[1, 2, 0, 0]], place=place) == [0, 1, -1, -1]
    with pytest.raises(ReplayError, match=r"token 6 \(input_ids\[0, 2\]\): found 9, expected 7"):
        index_of([[*range(1, 8)]], [[1, 2, 9, 0]], place=place)


# --- rows of field.md


def test_field_1_and_2_rows_without_routing_are_told_apart() -> None:
    """field.md 1, 2: 12 tokens with 11 rows; neither the last token nor padding has routing"""
    sequence = [*range(1, 13)]
    batch = make_batch([sequence])
    for ids in ([sequence], [[*sequence, 0, 0]], [[*sequence[:-1], 0, 0]], [sequence[:-1]]):
        index = view_of(batch, input_ids=np.array(ids)).index
        replayed = (index >= 0) & batch.valid[index]
        assert replayed.tolist() == [True] * 11 + [False] * (len(ids[0]) - 11)


def test_field_6_rows_are_s_major() -> None:
    """field.md 6: two samples of 2 and 3 tokens, padded to 3"""
    # token 4 is the last of its sample and has no row of routing
    assert index_of([[5, 6], [7, 8, 9]], [[5, 6, 0], [7, 8, 9]]) == [0, 2, 1, 3, -1, 4]
    assert index_of([[5, 6], [7, 8, 9]], [[5, 6, 0], [7, 8, 0]]) == [0, 2, 1, 3, -1, -1]
    # fed without last tokens
    assert index_of([[5, 6, 1], [7, 8, 9, 1]], [[5, 6, 0], [7, 8, 9]]) == [0, 3, 1, 4, -1, 5]


@pytest.mark.parametrize("layout", [{"seq_length": 8}, {"cu_seqlens": np.array([0, 8])}])
def test_field_9_context_parallel_rows(layout: dict[str, Any]) -> None:
    """field.md 9: 8 rows, cp 2 -> [0, 1, 6, 7]"""
    batch = make_batch([[*range(10, 18)]])
    for rank, rows in enumerate([[0, 1, 6, 7], [2, 3, 4, 5]]):
        place = RankPlace(cp_size=2, cp_rank=rank)
        ids = np.array([rows]) + 10
        assert view_of(batch, place=place, **layout).index.tolist() == rows
        assert view_of(batch, input_ids=ids, place=place, **layout).index.tolist() == rows


def test_field_25_prompts_that_end_at_one_slot() -> None:
    """field.md 25: a prompt slot of 5 with a prompt of 3, response of 4: rows from column 2 on"""
    sequence = [*range(1, 8)]
    ids = np.array([[0, 0, *sequence]])
    batch = make_batch([sequence])
    batch.prompt_lens[:] = 3
    view = view_of(batch, input_ids=ids, starts=5 - batch.prompt_lens)
    assert view.slots.tolist() == [[-1, -1, 0, 1, 2, 3, 4, 5, 6]]
    assert not batch.valid[view.slots[0, -1]]  # the last column has no row
    with pytest.raises(ReplayError, match=r"found 0, expected 1; .*padded on the left: give start"):
        view_of(batch, input_ids=ids)


# --- refusals

TWO = [[1, 2, 3], [4, 5, 6, 7]]
CU = np.array([0, 3, 7])
CP2 = RankPlace(cp_size=2)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {},
            r"found none of input_ids, seq_length and cu_seqlens \(packed_seq_params\), expected",
        ),
        ({"seq_length": -1}, "seq_length is -1, expected an integer 0"),
        ({"seq_length": 4.0}, "seq_length is 4.0, expected an integer 0"),
        ({"seq_length": 2**31}, "seq_length is 2147483648, expected"),
        ({"seq_length": 2}, "1/0/0: 4 tokens, .* from slot 0 of 2 on: seq_length is 2, expected "),
        ({"seq_length": 6, "place": CP2}, "seq_length is 6, expected a multiple of 4, twice the"),
        ({"input_ids": [[1, 2]]}, "input_ids is a list, expected a numpy array"),
        ({"input_ids": np.zeros((2, 4))}, r"shape \[2, 4\] and dtype float64, expected integers"),
        ({"input_ids": np.zeros(4, int)}, r"shape \[4\] and dtype int64, expected integers \[2, s"),
        ({"input_ids": np.zeros((3, 4), int)}, r"shape \[3, 4\], expected \[2, s\], one row per"),
        ({"input_ids": np.zeros((1, 7), int)}, r"shape \[1, 7\], .*packed .*need cu_seqlens"),
        ({"input_ids": np.zeros((2, 2), int)}, "run/0/1/0/0: 4 tokens, .*expected at least 3 slo"),
        (
            {"input_ids": np.zeros((2, 4), int), "seq_length": 5},
            r"shape \[2, 4\], expected \[2, s\] with seq_length s=5$",
        ),
        (
            {"input_ids": np.zeros((2, 8), int), "seq_length": 8, "place": CP2},
            r"shape \[2, 8\], expected \[2, s / 2\] with seq_length s=8; .*fed whole sequences",
        ),
        (
            {"input_ids": np.zeros((2, 3), int), "place": CP2},
            r"shape \[2, 3\], which are 6 slots before .* expected a multiple of 4, twice",
        ),
        ({"seq_length": 5, "starts": [0, 1]}, "starts is a list, expected a numpy array"),
        ({"seq_length": 5, "starts": np.zeros(2)}, "starts has shape .*float64, expected integers"),
        ({"seq_length": 5, "starts": np.zeros(3, int)}, "starts has 3 entries, expected 2"),
        ({"seq_length": 5, "starts": np.array([-1, 0])}, "run/0/0/0/0: 3 tokens, .*slot -1 of 5"),
        ({"seq_length": 5, "starts": np.array([0, 3])}, "slot 3 of 5 on: .*expected at least 6 sl"),
        ({"seq_length": 7, "starts": np.array([0, 2**63], np.uint64)}, "1/0/0: 4 tokens"),
        ({"cu_seqlens": CU, "starts": np.zeros(2, int)}, "starts and cu_seqlens are given"),
        ({"cu_seqlens": CU, "seq_length": 7}, "seq_length and cu_seqlens are given, expected one"),
        ({"cu_seqlens": [0, 3, 7]}, r"cu_seqlens is a list, expected a numpy array \[3\]"),
        ({"cu_seqlens": CU / 1}, r"cu_seqlens has .*float64, expected integers \[3\]"),
        ({"cu_seqlens": CU[:2]}, "cu_seqlens has 2 entries, expected 3 or more for 2 sequences"),
        ({"cu_seqlens": CU + 1}, r"cu_seqlens is \[1, 4, 8\], expected ascending integers from 0"),
        ({"cu_seqlens": np.array([0, 8, 7])}, "expected ascending integers from 0"),
        ({"cu_seqlens": np.array([0, 8, 2**31])}, "expected ascending integers from 0 to at most"),
        ({"cu_seqlens": np.array([0, 1, 7])}, "run/0/0/0/0: segment 0 .*, 0 to 1, has 1 slots, ex"),
        (
            {"cu_seqlens": np.array([0, 4, 10]), "place": CP2},
            "segment 1 .*4 to 10, .*multiple of 4",
        ),
        (
            {"cu_seqlens": np.array([0, 4, 8, 9]), "place": CP2},
            "^segment 2 of .*has 1 slots, expected a multiple of 4, twice the cp_size=2: give the",
        ),
        (
            {"cu_seqlens": CU, "input_ids": np.zeros((2, 4), int)},
            r"shape \[2, 4\], expected \[1, T >= 7\] with cu_seqlens up to 7",
        ),
        ({"cu_seqlens": CU, "input_ids": np.zeros((1, 6), int)}, r"\[1, 6\], expected \[1, T >= 7"),
        ({"cu_seqlens": CU, "input_ids": np.zeros(7, int)}, r"shape \[7\] and .*expected integers"),
        (
            {"cu_seqlens": np.array([0, 4, 8]), "input_ids": np.zeros((1, 5), int), "place": CP2},
            r"shape \[1, 5\], expected \[1, 4\] with cu_seqlens up to 8 and cp_size=2",
        ),
        (
            {"cu_seqlens": np.array([0, 4, 8]), "input_ids": np.zeros((1, 8), int), "place": CP2},
            r"shape \[1, 8\], expected \[1, 4\] .*the rank is fed whole sequences",
        ),
        (
            {"seq_length": 5, "place": RankPlace(2, 0, True)},
            "fed 5 positions, expected a multiple of tp_size=2 for sequence parallelism",
        ),
        (
            {"cu_seqlens": CU, "input_ids": np.array([[1, 2, 3, 4, 5, 6, 7] + [0] * 2])}
            | {"place": RankPlace(2, 0, True)},
            "fed 9 positions, expected a multiple of tp_size=2",
        ),
    ],
)
def test_what_no_layout_allows(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        view_of(make_batch(TWO), **layout)


def test_lengths_that_tensor_parallelism_alone_does_not_split() -> None:
    view = view_of(make_batch(TWO), seq_length=5, place=RankPlace(tp_size=2, tp_rank=1))
    assert view.shape == (5, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_size": 0}, "tp_size is 0, expected a positive integer"),
        ({"cp_size": 1.0}, "cp_size is 1.0, expected a positive integer"),
        ({"cp_size": True}, "cp_size is True, expected a positive integer"),
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank is 2, expected 0..1 with tp_size=2"),
        ({"cp_rank": -1}, "cp_rank is -1, expected 0..0 with cp_size=1"),
        ({"sequence_parallel": 1}, "sequence_parallel is 1, expected a bool"),
    ],
)
def test_places_that_are_none(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        RankPlace(**sizes)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_the_other_padding_is_named(cut: bool, cp_rank: int) -> None:
    sequences = distinct([9, 6])
    batch, place = make_batch(sequences), RankPlace(cp_size=2, cp_rank=cp_rank)
    fed = [s[: len(s) - cut] for s in labelled(sequences)]
    left = [row_of(f, 12 - len(f), 12) for f in fed]
    ids = ids_in([cut_cp(r, 2, cp_rank) for r in left])
    with pytest.raises(ReplayError, match=r"; the sequences are padded on the left: give starts$"):
        view_of(batch, input_ids=ids, place=place)
    right = [row_of(f, 0, 12) for f in fed]
    ids = ids_in([cut_cp(r, 2, cp_rank) for r in right])
    starts = np.array([12 - len(f) for f in fed])
    with pytest.raises(ReplayError, match="; the sequences are padded on the right: leave out sta"):
        view_of(batch, input_ids=ids, starts=starts, place=place)
    # other tokens are no matter of padding
    for layout in ({}, {"starts": starts}):
        with pytest.raises(ReplayError, match=r"not those of this routing$"):
            view_of(batch, input_ids=ids + 1, place=place, **layout)


@pytest.mark.parametrize("cp_rank", range(4))
@pytest.mark.parametrize("length", range(3, 9))
def test_whole_sequences_fed_to_a_context_parallel_rank(length: int, cp_rank: int) -> None:
    """Also where a rank's own reading has padding only; not where both readings are one"""
    sequences, place = distinct([length, 2]), RankPlace(cp_size=4, cp_rank=cp_rank)
    batch, ids = make_batch(sequences), ids_of(sequences, 8)
    if cp_rank == 0 and length <= 4:  # all of it is in the first of 8 chunks of 4
        assert view_of(batch, input_ids=ids, place=place).slots.max() == length + 1
        return
    with pytest.raises(ReplayError, match=r"holds the whole sequences|is fed whole sequences, ex"):
        view_of(batch, input_ids=ids, place=place)


def test_padding_is_one_id_and_other_ids_are_tokens_without_routing() -> None:
    """A reply or an end-of-sequence that the trainer appended; on context-parallel ranks too"""
    batch = make_batch(distinct([3, 2]))
    starts = np.array([2, 0])
    ids = np.array([[8, 8, 1, 2, 3, 8], [4, 5, 8, 8, 8, 8]])
    assert view_of(batch, input_ids=ids, starts=starts).slots.tolist() == [
        [-1, -1, 0, 1, 2, -1],
        [3, 4, -1, -1, -1, -1],
    ]
    ids[1, 2] = 9
    message = (
        "input_ids[1, 2] is 9 and belongs to no token of the batch, expected padding, which is 8 "
        "elsewhere: the trainer feeds tokens that this routing does not have"
    )
    with pytest.raises(ReplayError) as e:
        view_of(batch, input_ids=ids, starts=starts)
    assert str(e.value) == message
    place = RankPlace(cp_size=2, cp_rank=1)  # slots 2..5 of 8
    ids = np.array([[1, 2, 3, 8], [8, 8, 8, 8]])
    assert view_of(batch, input_ids=ids, starts=starts, place=place).slots.tolist() == [
        [0, 1, 2, -1],
        [-1, -1, -1, -1],
    ]
    ids[1, 2] = 9
    with pytest.raises(ReplayError, match=r"input_ids\[1, 2\] is 9 and belongs to no token"):
        view_of(batch, input_ids=ids, starts=starts, place=place)


def test_a_share_that_also_reads_as_whole_sequences() -> None:
    """Both readings the same, or the rest one id as padding is: nothing to refuse"""
    place = RankPlace(cp_size=2)  # slots 0, 1, 6, 7 of 8
    ids = np.array([[1, 2, 9, 9]])
    view = view_of(make_batch([[1, 2]]), input_ids=ids, place=place)
    assert view.slots.tolist() == [[0, 1, -1, -1]]
    ids = np.array([[5, 5, 5, 5]])
    view = view_of(make_batch([[5, 5, 5, 5]]), input_ids=ids, place=place)
    assert view.slots.tolist() == [[0, 1, -1, -1]]


def test_surplus_segments_hold_only_padding() -> None:
    batch, cu = make_batch([[1, 2]]), np.array([0, 2, 4, 4, 6])
    for padding in ([0, 0, 0, 0], [9, 9, 9, 9, 9, 9]):
        view = view_of(batch, input_ids=np.array([[1, 2, *padding]]), cu_seqlens=cu)
        assert view.slots.tolist() == [[0, 1] + [-1] * len(padding)]
    for tokens in ([3, 3, 4, 4], [9, 9, 9, 9, 3, 4]):  # behind the segments too
        with pytest.raises(ReplayError, match="belongs to no token of the batch"):
            view_of(batch, input_ids=np.array([[1, 2, *tokens]]), cu_seqlens=cu)


def test_a_sequence_of_one_token_needs_no_slot() -> None:
    batch = make_batch([[1], [2, 3]])
    assert view_of(batch, cu_seqlens=np.array([0, 0, 1])).index.tolist() == [1]
    starts = np.array([1, 0])
    assert view_of(batch, seq_length=1, starts=starts).slots.tolist() == [[-1], [1]]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64])
def test_any_integers_will_do(dtype: type) -> None:
    batch = make_batch(TWO)
    ids, starts = np.array([[0, 1, 2, 3], [4, 5, 6, 7]], dtype), np.array([1, 0], dtype)
    assert view_of(batch, input_ids=ids, starts=starts).slots.tolist() == [
        [-1, 0, 1, 2],
        [3, 4, 5, 6],
    ]
    ids = np.array([[1, 2, 3, 4, 5, 6, 7]], dtype)
    assert view_of(batch, input_ids=ids, cu_seqlens=CU.astype(dtype)).index.tolist() == [*range(7)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": np.array([0, 2, 4])}, "cu_seqlens"),
        ({"cu_seqlens": np.array([0, 5, 5])}, "cu_seqlens"),
        ({"valid": np.ones(5, np.int8)}, "valid has shape"),
        ({"routed_experts": np.zeros((4, 2, 2), np.uint8)}, "5 tokens, 2 MoE layers, 2"),
        ({"routed_experts": np.full((5, 2, 2), 8)}, "rollout run/0/0/0/0: row 0, layer 0: .*id 8"),
        ({"routed_experts": np.full((5, 2, 2), 5)}, r"row 0, layer 0: experts \[5, 5\]"),
        ({"routed_experts": np.zeros((5, 1, 2), np.uint8)}, "MoE layers=2"),
    ],
)
def test_batches_built_by_hand_are_checked(change: dict[str, np.ndarray], message: str) -> None:
    batch = make_batch([[1, 2], [3, 4, 5]])
    check_batch(batch)
    broken = RoutingBatch(**{**batch.__dict__, **change})
    with pytest.raises(TraceError, match=message):
        check_batch(broken)


def test_the_package_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, r3.trainer_hooks, r3.trainer_hooks.layout, r3.trainer_hooks.stages\n"
        "import r3.trainer_hooks.megatron_routers\n"
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@given(lengths=lengths_st, place=places(), packed=st.booleans())
@settings(max_examples=100, deadline=None)
def test_router_rows_return_to_their_tokens(
    lengths: list[int], place: RankPlace, packed: bool
) -> None:
    batch = make_batch(distinct(lengths))
    multiple = 2 * place.cp_size * place.tp_size
    widths = [up_to(n, multiple) for n in lengths]
    layout: dict[str, Any] = (
        {"cu_seqlens": np.cumsum([0, *widths])} if packed else {"seq_length": max(widths)}
    )
    view = view_of(batch, place=place, **layout)
    seen = np.where(view.index >= 0, batch.token_ids[view.index], PAD)
    here = np.isin(np.arange(batch.num_tokens), view.index)
    tokens = view.to_tokens(seen, batch.num_tokens)
    assert np.array_equal(tokens, np.where(here, batch.token_ids, 0))
    with pytest.raises(ReplayError, match=r"router rows, expected"):
        view.to_tokens(seen[1:], batch.num_tokens)
