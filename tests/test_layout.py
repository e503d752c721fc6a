"""Which router row is which token: against a brute-force model, on all small cases."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from r3 import ReplayError, RolloutId, RouterSpec, RoutingBatch, TraceError
from r3.trainer_hooks.layout import check_batch, view_of

SPEC = RouterSpec(num_experts=8, top_k=2, moe_layers=(0, 1), num_layers=2)


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


def pad(sequences: list[list[int]], width: int, value: int = 0) -> np.ndarray:
    return np.array([list(s) + [value] * (width - len(s)) for s in sequences], np.int64)


def index_of(sequences: list[list[int]], input_ids: np.ndarray) -> list[int]:
    return view_of(make_batch(sequences), input_ids).index.tolist()


def distinct(lengths: list[int]) -> list[list[int]]:
    """Sequences in which every token of the batch is another one, so that no two can be confused"""
    numbers = itertools.count(1)
    return [[next(numbers) for _ in range(n)] for n in lengths]


def s_major(sequences: list[list[int]], input_ids: np.ndarray) -> list[int]:
    """Brute force: walk slots in the order in which the router sees them, find each token."""
    flat = [t for s in sequences for t in s]
    return [
        flat.index(int(input_ids[i, j])) if input_ids[i, j] in flat else -1
        for j in range(input_ids.shape[1])
        for i in range(input_ids.shape[0])
    ]


lengths_st = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(lengths=lengths_st, extra=st.integers(0, 3), cut=st.booleans())
@settings(max_examples=300, deadline=None)
def test_padded(lengths: list[int], extra: int, cut: bool) -> None:
    sequences = distinct(lengths)
    fed = [s[:-1] if cut else s for s in sequences]
    width = max(map(len, fed)) + extra
    assume(width > 0)
    ids = pad(fed, width)
    assert index_of(sequences, ids) == s_major(sequences, ids)


@given(lengths=st.lists(st.integers(1, 5), min_size=2, max_size=4), extra=st.integers(0, 6))
@settings(max_examples=300, deadline=None)
def test_packed_with_and_without_last_tokens(lengths: list[int], extra: int) -> None:
    sequences = distinct(lengths)
    for fed in (sequences, [s[:-1] for s in sequences]):
        row = [t for s in fed for t in s] + [0] * extra
        if not row:
            continue
        ids = np.array([row])
        assert index_of(sequences, ids) == s_major(sequences, ids)


@given(data=st.data(), lengths=lengths_st)
@settings(max_examples=300, deadline=None)
def test_any_vocabulary_reads_as_fed_or_is_refused(data: st.DataObject, lengths: list[int]) -> None:
    """Repeated tokens, padding that is a token: rows with routing are right or there is an error"""
    tokens = st.integers(0, 2)
    sequences = [data.draw(st.lists(tokens, min_size=n, max_size=n)) for n in lengths]
    cut, packed = data.draw(st.booleans()), data.draw(st.booleans())
    packed = packed and len(sequences) > 1
    fed = [s[:-1] if cut else s for s in sequences]
    extra, value = data.draw(st.integers(0, 4)), data.draw(tokens)
    starts = np.cumsum([0, *lengths])
    places = [[int(a) + j for j in range(len(s))] for a, s in zip(starts, fed, strict=False)]
    if packed:
        ids = np.array([[t for s in fed for t in s] + [value] * extra], np.int64)
        truth = [p for row in places for p in row] + [-1] * extra
    else:
        width = max(map(len, fed)) + extra
        ids = pad(fed, width, value)
        truth = pad(places, width, -1).T.reshape(-1).tolist()
    assume(ids.size > 0)
    refusal = ""
    try:
        found = index_of(sequences, ids)
    except ReplayError as e:
        refusal = str(e)
    if refusal:
        # only packed tokens that repeat can be ambiguous
        assert packed, refusal
        assert "can be read as" in refusal
        return
    last = set((starts[1:] - 1).tolist())  # carries no routing: may count as padding
    assert [-1 if t in last else t for t in found] == [-1 if t in last else t for t in truth]


@given(data=st.data(), lengths=lengths_st, packed=st.booleans())
@settings(max_examples=300, deadline=None)
def test_one_wrong_token_is_found(data: st.DataObject, lengths: list[int], packed: bool) -> None:
    sequences = distinct(lengths)
    i = data.draw(st.integers(0, len(lengths) - 1))
    # the last token's slot may be padding, see the next test
    assume(lengths[i] > 1)
    j = data.draw(st.integers(0, lengths[i] - 2))
    changed = [list(s) for s in sequences]
    changed[i][j] = 99
    if packed and len(lengths) > 1:
        ids = np.array([[t for s in changed for t in s]])
    else:
        ids = pad(changed, max(lengths))
    with pytest.raises(ReplayError) as e:
        index_of(sequences, ids)
    assert f"rollout run/0/{i}/0/0: token {j} " in str(e.value)
    assert f"found 99, expected {sequences[i][j]}" in str(e.value)


def test_wrong_last_token_before_padding_is_found() -> None:
    with pytest.raises(ReplayError, match=r"token 2 \(input_ids\[0, 2\]\): found 9, expected 3"):
        index_of([[1, 2, 3], [4, 5, 6, 7, 8]], np.array([[1, 2, 9, 0, 0], [4, 5, 6, 7, 8]]))
    # alone in its row it cannot be told from padding; no routing belongs to it
    assert index_of([[1, 2, 3]], np.array([[1, 2, 9]])) == [0, 1, -1]
    with pytest.raises(ReplayError, match=r"1/0/0: token 1 .*found 9, expected 4"):
        index_of([[1, 2], [3, 4]], np.array([[1, 2, 3, 9]]))


def test_field_6_rows_are_s_major() -> None:
    """field.md 6: two samples of 2 and 3 tokens, padded to 3"""
    assert index_of([[5, 6], [7, 8, 9]], np.array([[5, 6, 0], [7, 8, 9]])) == [0, 2, 1, 3, -1, 4]
    # the same, fed without last tokens
    assert index_of([[5, 6, 1], [7, 8, 9, 1]], np.array([[5, 6, 0], [7, 8, 9]])) == [
        *[0, 3],
        *[1, 4],
        *[-1, 5],
    ]


def test_field_25_left_padding_is_refused_by_position() -> None:
    """field.md 25: a prompt of 3 in a slot of 5, response of 4; only right padding is known here"""
    sequence = [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(ReplayError, match=r"token 0 \(input_ids\[0, 0\]\): found 0, expected 1"):
        index_of([sequence], np.array([[0, 0, *sequence]]))


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([3, 3], (3, 3)),  # neither one row per sequence nor one row
        ([4, 2], (2, 2)),  # more than the last token left out
        ([4, 2], (1, 3)),
        ([4], (1, 2)),
        ([3], (3,)),
        ([3], (1, 3, 1)),
    ],
)
def test_shapes_of_neither_layout(lengths: list[int], shape: tuple[int, ...]) -> None:
    with pytest.raises(ReplayError, match=r"input_ids has shape \[.*expected"):
        index_of(distinct(lengths), np.zeros(shape, np.int64))


def test_float_ids_are_refused() -> None:
    with pytest.raises(ReplayError, match="float64"):
        index_of([[1, 2]], np.array([[1.0, 2.0]]))


def test_ambiguous_packing_is_refused() -> None:
    with pytest.raises(ReplayError, match="can be read as the 4 tokens"):
        index_of([[1, 1], [1, 1]], np.array([[1, 1, 1, 1]]))
    # not where both readings replay the same rows
    assert index_of([[1, 2, 7], [7]], np.array([[1, 2, 7, 7]])) == [0, 1, 2, 3]


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
        "import sys, r3.trainer_hooks, r3.trainer_hooks.layout, r3.trainer_hooks.megatron_routers\n"
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.booleans())
def test_router_rows_return_to_their_tokens(lengths: list[int], packed: bool) -> None:
    sequences = distinct(lengths)
    batch = make_batch(sequences)
    width = max(lengths)
    ids = (
        [list(itertools.chain(*sequences))]
        if packed
        else [s + [0] * (width - len(s)) for s in sequences]
    )
    view = view_of(batch, np.array(ids))
    seen = np.array(ids).T.reshape(-1)  # what a router sees of [b, s], s-major
    assert np.array_equal(view.to_tokens(seen, batch.num_tokens), batch.token_ids)
    with pytest.raises(ReplayError, match=r"router rows, expected"):
        view.to_tokens(seen[1:], batch.num_tokens)
