"""Sets and orders of experts as numbers, against exact arithmetic on Python's integers."""

from __future__ import annotations

import itertools
import math

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enumeration_tools import (
    MODELS,
    QUICK,
    back,
    by_kernels,
    find_packing,
    kernels,
    order_rank,
    pack,
    random_rows,
    routers,
    set_limit,
    set_rank,
)
from r3 import RouterSpec
from r3.storage import codec
from r3.storage.enumeration import OrderCode, Packing, SetCode
from storage_tools import make_trace, record_parts


@given(routers(), st.integers(0, 300), st.integers(0, 2**32))
@QUICK
def test_sets_have_the_bytes_of_their_definition(model, rows, seed):
    (experts, k), code = model, SetCode.of(*model)
    ids = random_rows(experts, k, rows, seed)
    limit = set_limit(experts, k)[1]
    ranks = [set_rank(row, experts) for row in ids.tolist()]
    data = pack(ranks, limit)
    assert code.packing.limit == limit
    assert (code.packing.planes, code.packing.base, code.packing.group) == find_packing(limit)
    assert code.packing.size(rows) == len(data)
    found = code.rank(ids)
    assert found.tolist() == ranks
    assert code.packing.pack(found) == data
    assert by_kernels(code, ids) == data
    octets = np.frombuffer(data, np.uint8)
    assert code.packing.unpack(octets, rows).tolist() == ranks
    expected = np.sort(ids, axis=-1)
    np.testing.assert_array_equal(code.unrank(found), expected)
    np.testing.assert_array_equal(back(code, data, rows, ids.dtype), expected)


@given(st.integers(1, 64), st.integers(0, 40), st.integers(0, 2**32))
@QUICK
def test_orders_have_the_bytes_of_their_definition(k, rows, seed):
    ids = np.random.default_rng(seed).permuted(np.tile(np.arange(k), (rows, 1)), axis=-1)
    if rows:
        ids[-1] = ids[-1, np.argsort(-ids[-1])]  # descending: the last order
    ids = (ids * 3 + 1).astype(np.uint8)
    code, ranks = OrderCode.of(k), [order_rank(row) for row in ids.tolist()]
    data = pack(ranks, math.factorial(k))
    found = code.rank(ids)
    assert found.tolist() == ranks
    assert code.packing.pack(found) == data
    unpacked = code.packing.unpack(np.frombuffer(data, np.uint8), rows)
    assert unpacked.tolist() == ranks
    ascending = np.sort(ids, axis=-1)
    np.testing.assert_array_equal(code.arrange(ascending, unpacked), ids)
    if code.packing.limbs == 1:  # what the kernels are for
        out = np.zeros(len(data), np.uint8)
        kernels.encode_order(code, ids, out)
        assert out.tobytes() == data
        kernels.decode_order(code, out, ascending)
        np.testing.assert_array_equal(ascending, ids)


@given(st.integers(1, 2**70) | st.integers(2**62, 2**66), st.integers(0, 99), st.integers(0, 2**32))
@QUICK
def test_any_numbers_are_packed(limit, rows, seed):
    rng = np.random.default_rng(seed)
    ranks = [int.from_bytes(rng.bytes(10), "little") % limit for _ in range(rows)]
    if rows:
        ranks[0], ranks[-1] = 0, limit - 1
    packing = Packing.of(limit)
    array = np.array(ranks, np.uint64 if packing.limbs == 1 else object)
    data = packing.pack(array)
    assert data == pack(ranks, limit)
    assert packing.unpack(np.frombuffer(data, np.uint8), rows).tolist() == ranks


@given(routers(), st.integers(0, 300), st.integers(0, 2**32), st.booleans())
@QUICK
def test_codecs(model, rows, seed, ordered):
    """By the kernels and by numpy: the same bytes, and the same ids back."""
    spec = RouterSpec(*model, (0,), 1)
    ids = random_rows(*model, rows, seed)
    chunk = codec.find_codec("enum-ordered" if ordered else "enum")
    data = pack([set_rank(row, model[0]) for row in ids.tolist()], set_limit(*model)[1])
    if ordered:
        data += pack([order_rank(row) for row in ids.tolist()], math.factorial(model[1]))
    assert chunk.size(rows, spec) == len(data)
    for module in (kernels, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "_kernels", lambda values, module=module: module)
            out = np.zeros(len(data), np.uint8)
            chunk.encode(ids, spec, out)
            assert out.tobytes() == data
            found = np.empty_like(ids)
            chunk.decode(out, spec, found)
        np.testing.assert_array_equal(found, ids if ordered else np.sort(ids, axis=-1))


@pytest.mark.parametrize("experts", range(1, 13))
def test_small_models_are_enumerated_whole(experts):
    for k in range(1, experts + 1):
        code, total = SetCode.of(experts, k), math.comb(experts, k)
        sets = np.array(list(itertools.combinations(range(experts), k)), np.uint8)
        assert sorted(code.rank(sets).tolist()) == list(range(total))
        every = code.unrank(np.arange(total, dtype=np.uint64))
        # ranks rise with the ids, the highest first
        assert every[:, ::-1].tolist() == sorted(sets[:, ::-1].tolist())
        assert back(code, by_kernels(code, sets), total, np.uint8).tolist() == sets.tolist()


@pytest.mark.parametrize("k", range(1, 8))
def test_small_orders_are_enumerated_whole(k):
    orders = np.array(list(itertools.permutations(range(k))), np.uint8)  # as a dictionary has them
    ranks = np.arange(len(orders), dtype=np.uint64)
    np.testing.assert_array_equal(OrderCode.of(k).rank(orders), ranks)
    ascending = np.tile(np.arange(k, dtype=np.uint8), (len(orders), 1))
    np.testing.assert_array_equal(OrderCode.of(k).arrange(ascending, ranks), orders)


@pytest.mark.parametrize("model", MODELS)
def test_size_is_close_to_the_least_possible(model):
    """4,096 rows of 48 layers, with the checksums and the column's place in the header."""
    spec = RouterSpec(*model, tuple(range(48)), 48)
    ((values, payload),) = record_parts(make_trace(spec, 4097))
    entry = values["columns"][1]
    total = entry["bytes"] + len(msgpack.packb(entry))
    assert entry["bytes"] == len(payload) - values["columns"][0]["bytes"]
    assert total * 8 <= 1.02 * 4096 * 48 * math.log2(math.comb(*model))
