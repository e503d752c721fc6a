"""Numbers of sets and orders at their limits: layouts of memory, hostile bytes, no numba."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enumeration_tools import (
    QUICK,
    by_kernels,
    kernels,
    pack,
    random_rows,
    routers,
    set_rank,
)
from r3 import FormatError, RouterSpec
from r3.storage import codec
from r3.storage.enumeration import OrderCode, Packing, SetCode
from storage_tools import make_trace, write


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


@given(st.integers(1, 20), st.integers(1, 99), st.integers(0, 2**32))
@QUICK
def test_decode_of_orders(k, rows, seed):
    """Any bytes: an order for each row that encodes to the same bytes, or the same FormatError."""
    code, rng = OrderCode.of(k), np.random.default_rng(seed)
    ascending = np.tile(np.arange(k, dtype=np.uint16), (rows, 1))
    ids = rng.permuted(ascending, axis=-1)
    data = np.frombuffer(code.packing.pack(code.rank(ids)), np.uint8).copy()
    for _ in range(rng.integers(1, 4) if len(data) else 0):
        data[rng.choice([0, len(data) - 1, rng.integers(len(data))])] = rng.integers(256)
    found = []
    out = ascending.copy()
    for decode in (
        lambda: kernels.decode_order(code, data, out),
        lambda: code.arrange(ascending, code.packing.unpack(data, rows)),
    ):
        try:
            decode()
            found.append("")
        except FormatError as e:
            found.append(str(e))
    assert bool(found[0]) == bool(found[1])
    if not found[0]:
        assert code.packing.pack(code.rank(out)) == data.tobytes()


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
    ids = random_rows(128, 8, 4096, 0)
    expected = by_kernels(SetCode.of(128, 8), ids)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "r3.storage.kernels")
    monkeypatch.setattr(codec, "_coded", 1 << 40)
    monkeypatch.setattr(codec, "_loaded", None)
    monkeypatch.setattr(codec, "_unusable", False)
    spec, chunk = RouterSpec(128, 8, (0,), 1), codec.find_codec("enum")
    out = np.zeros(chunk.size(4096, spec), np.uint8)
    chunk.encode(ids, spec, out)
    assert out.tobytes() == expected
    found = np.empty_like(ids)
    chunk.decode(out, spec, found)
    np.testing.assert_array_equal(found, np.sort(ids, axis=-1))
    assert "r3.storage.kernels" not in sys.modules


@pytest.mark.slow
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
