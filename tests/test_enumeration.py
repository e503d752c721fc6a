"""Sets and orders of experts as numbers, against exact arithmetic on Python's integers.

The definitions stand here once more, as plainly as docs/format.md has them.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from fractions import Fraction
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import FormatError, RouterSpec
from r3.storage import codec
from r3.storage.enumeration import OrderCode, Packing, SetCode
from storage_tools import make_trace, random_ids, record_parts, write

kernels = pytest.importorskip("r3.storage.kernels")

MODELS = [(8, 2), (60, 4), (64, 8), (128, 8), (256, 8), (384, 8), (512, 22)]
EDGES = [(1, 1), (2, 1), (2, 2), (64, 64), (65, 64), (67, 33), (68, 34), (4096, 2), (4097, 1)]
EDGES += [(4097, 64), (8193, 3), (65536, 1), (65536, 4), (65536, 64)]
QUICK = settings(max_examples=60, deadline=None)


@st.composite
def routers(draw: st.DrawFn) -> tuple[int, int]:
    if draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(MODELS + EDGES))
    experts = draw(st.integers(1, 80) | st.integers(1, 600) | st.integers(1, 65536))
    return experts, draw(st.integers(1, min(experts, draw(st.sampled_from([4, 9, 64])))))


# --- what the format says


def set_limit(experts: int, k: int) -> tuple[int, int]:
    """Low bits that stand as they are, and the number of ranks."""
    low = max(0, (experts - 1).bit_length() - 12)
    universe = ((experts - 1) >> low) + 1 + (k - 1 if low else 0)
    return low, math.comb(universe, k) << low * k


def set_rank(ids: list[int], experts: int) -> int:
    low = max(0, (experts - 1).bit_length() - 12)
    ids = sorted(ids)
    rank = sum(math.comb((s >> low) + (i if low else 0), i + 1) for i, s in enumerate(ids))
    for s in reversed(ids):
        rank = rank << low | s % (1 << low)
    return rank


def order_rank(ids: list[int]) -> int:
    """How many permutations of the same ids come before this one in a dictionary."""
    rank = 0
    for i, x in enumerate(ids):
        rank += sum(y < x for y in ids[i + 1 :]) * math.factorial(len(ids) - i - 1)
    return rank


def find_packing(limit: int) -> tuple[int, int, int]:
    """Planes, base and group with the fewest bits for a rank, then most planes, least group."""
    best = None
    for planes in range(200):
        if planes and 256**planes >= limit:
            break
        base = -(-limit // 256**planes)
        for group in range(1, 65):
            if base**group > 2**64 or (base == 1 and group > 1):
                break
            bits = Fraction(8 * planes * group + (base**group - 1).bit_length(), group)
            if best is None or (bits, -planes, group) < best[0]:
                best = (bits, -planes, group), (planes, base, group)
    return best[1]


def pack(ranks: list[int], limit: int) -> bytes:
    planes, base, group = find_packing(limit)
    out = bytes((rank >> 8 * i) & 255 for i in range(planes) for rank in ranks)
    stream = bits = 0
    for first in range(0, len(ranks), group):
        digits = [rank >> 8 * planes for rank in ranks[first : first + group]]
        stream |= sum(d * base**i for i, d in enumerate(digits)) << bits
        bits += (base ** len(digits) - 1).bit_length()
    return out + stream.to_bytes(-(-bits // 8), "little")


def random_rows(experts: int, k: int, rows: int, seed: int) -> np.ndarray:
    ids = random_ids(np.random.default_rng(seed), RouterSpec(experts, k, (0,), 1), rows)[:, 0]
    if rows:  # the first and the last set
        ids[0] = np.arange(k)
        ids[-1] = np.arange(experts - k, experts)[::-1]
    return ids


def by_kernels(code: SetCode, ids: np.ndarray) -> bytes:
    out = np.zeros(code.packing.size(len(ids)), np.uint8)
    kernels.encode_sets(code, ids, out)
    return out.tobytes()


def back(code: SetCode, data: bytes, rows: int, dtype: Any) -> np.ndarray:
    out = np.empty((rows, code.top_k), dtype)
    kernels.decode_sets(code, np.frombuffer(data, np.uint8), out)
    return out


# --- round trips and exact bytes


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
    np.testing.assert_array_equal(code.arrange(np.sort(ids, axis=-1), unpacked), ids)


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


# --- layouts of memory


@given(routers(), st.integers(1, 200), st.integers(0, 2**32), st.integers(0, 5))
@QUICK
def test_inputs_of_any_layout(model, rows, seed, layout):
    code, ids = SetCode.of(*model), random_rows(*model, rows, seed)
    other = {
        0: lambda a: np.repeat(a, 3, axis=0)[::3],  # as a layer of several lies
        1: lambda a: np.asfortranarray(a),
        2: lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        3: lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype),  # odd address
        4: lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
        5: lambda a: np.frombuffer(a.tobytes(), a.dtype),
    }[layout](ids).reshape(ids.shape)
    other.flags.writeable = False
    assert (other == ids).all()
    data = by_kernels(code, ids)
    assert by_kernels(code, other) == data
    assert code.packing.pack(code.rank(other)) == data
    both = np.full((rows, 2, code.top_k), 7, ids.dtype)
    kernels.decode_sets(code, np.frombuffer(b"x" + data, np.uint8)[1:], both[:, 1])
    np.testing.assert_array_equal(both[:, 1], np.sort(ids, axis=-1))
    assert (both[:, 0] == 7).all()


# --- what is refused


@pytest.mark.parametrize("model", [(60, 4), (8, 2), (512, 22), (5000, 3), (300, 1)])
def test_encode_refuses_what_is_no_set(model):
    code = SetCode.of(*model)
    for bad in ("range", "twice"):
        ids = random_rows(*model, 300, 0)
        if bad == "range":
            ids[200, -1] = model[0]
        elif model[1] == 1:
            continue
        else:
            ids[200, -1] = ids[200, 0]
        with pytest.raises(FormatError, match="not a set"):
            by_kernels(code, ids)
        with pytest.raises(FormatError, match="not a set"):
            code.rank(ids)


@given(routers(), st.integers(1, 99), st.integers(0, 2**32))
@QUICK
def test_decode_takes_what_encode_writes_and_nothing_else(model, rows, seed):
    """Any bytes: a set for each row that encodes to the same bytes, or the same FormatError."""
    code = SetCode.of(*model)
    rng = np.random.default_rng(seed)
    data = np.frombuffer(by_kernels(code, random_rows(*model, rows, seed)), np.uint8).copy()
    for _ in range(rng.integers(1, 4) if len(data) else 0):
        # ends of planes and of the words hold what reaches over the limit first
        data[rng.choice([0, len(data) - 1, rng.integers(len(data))])] = rng.integers(256)
    found = []
    out = np.empty((rows, code.top_k), np.uint16)
    for decode in (
        lambda: kernels.decode_sets(code, data, out),
        lambda: code.unrank(code.packing.unpack(data, rows)),
    ):
        try:
            decode()
            found.append("")
        except FormatError as e:
            found.append(str(e))
    assert bool(found[0]) == bool(found[1])
    if not found[0]:
        assert by_kernels(code, out) == data.tobytes()


def test_ranks_and_padding_that_do_not_exist():
    for limit, rows in ((math.comb(60, 4), 33), (math.comb(512, 22), 5), (28, 9), (1, 3)):
        packing = Packing.of(limit)
        size, group = packing.size(rows), packing.word_bits(rows % packing.group)
        bits = rows // packing.group * packing.word_bits(packing.group) + group
        if bits % 8:
            data = np.zeros(size, np.uint8)
            data[-1] = 0x80
            with pytest.raises(FormatError, match=f"padding behind row {rows - 1}"):
                packing.unpack(data, rows)
    for model in ((60, 4), (512, 22), (8, 2), (5000, 3), (65536, 64)):
        code = SetCode.of(*model)
        ranks = [set_rank(list(range(model[1])), model[0])] * 200
        row = 150 - 150 % code.packing.group + code.packing.group - 1  # the last of its word
        ranks[row] = code.packing.limit
        data = np.frombuffer(pack(ranks, code.packing.limit), np.uint8)
        assert len(data) == code.packing.size(200)
        words = f"row {row} of a chunk stands for no set"
        with pytest.raises(FormatError, match=words):
            code.packing.unpack(data, 200)
        with pytest.raises(FormatError, match=words):
            kernels.decode_sets(code, data, np.empty((200, model[1]), np.uint16))


# --- with and without numba


def test_without_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "r3.storage.kernels")
    monkeypatch.setattr(codec, "_coded", 1 << 40)
    monkeypatch.setattr(codec, "_loaded", None)
    spec, chunk = RouterSpec(128, 8, (0,), 1), codec.find_codec("enum")
    ids = random_rows(128, 8, 4096, 0)
    out = np.zeros(chunk.size(4096, spec), np.uint8)
    chunk.encode(ids, spec, out)
    assert out.tobytes() == by_kernels(SetCode.of(128, 8), ids)
    found = np.empty_like(ids)
    chunk.decode(out, spec, found)
    np.testing.assert_array_equal(found, np.sort(ids, axis=-1))
    assert "r3.storage.kernels" not in sys.modules


def test_a_few_traces_do_not_load_numba_and_many_do(tmp_path):
    spec = RouterSpec(128, 8, tuple(range(48)), 48)
    path = write(tmp_path / "a.r3", [make_trace(spec, 500, i) for i in range(3)])
    script = """
import sys
from r3.storage import ShardReader
reader = ShardReader(sys.argv[1])
for i in range(3):
    reader[i]
print("numba" in sys.modules)
for i in range(60):
    reader[i % 3]
print("numba" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]
