"""r3.storage.enumeration in numba: the ids of one chunk to bytes and back.

Importing this module costs what importing numba costs; compiled code is kept on disk, so compiling
(some seconds) happens once per installation.
"""

from __future__ import annotations

import sys
from functools import cache, lru_cache
from typing import Any

import numba
import numpy as np

from r3.checks import sorting_network
from r3.errors import FormatError
from r3.storage import loops
from r3.storage.enumeration import OrderCode, Packing, SetCode, no_such_rank
from r3.storage.loops import MANTISSA, SHIFT, ZERO_KEY

_U = np.uint64
_LITTLE = sys.byteorder == "little"


class Tables:
    """What the kernels look up for one `SetCode`.

    binomials: uint64 [top_k, limbs, universe + 1], closed by a value that no rank reaches.
    need: limbs that are not zero in ranks of the first k + 1 ids.
    guess: int32 [top_k, keys]: the largest id whose binomial is sure not to exceed a rank with
    that key; the id sought is at most `steps[k]` higher. pairs: uint16 [C(universe, 2)], the two
    lowest ids by what is then left of the rank, to 256 experts. swaps: a sorting network,
    intp [n, 2].
    """

    def __init__(self, code: SetCode) -> None:
        limbs, size = code.packing.limbs, 8 * code.packing.limbs
        rows = [[*row, code.sets] for row in code.binomials.tolist()]
        octets = b"".join(value.to_bytes(size, "little") for row in rows for value in row)
        values = np.frombuffer(octets, "<u8").astype(np.uint64).reshape(code.top_k, -1, limbs)
        self.binomials = np.ascontiguousarray(values.transpose(0, 2, 1))
        self.need = np.array([max(1, -(-int(r[-2]).bit_length() // 64)) for r in rows], np.int64)
        self.need[-1] = limbs  # ranks of whole sets go on behind the last binomial
        self.swaps = np.array(sorting_network(code.top_k), np.intp).reshape(-1, 2)
        leading = keys(values)
        top = int(leading.max()) + 1
        self.guess = np.empty((code.top_k, top), np.int32)
        self.steps = np.empty(code.top_k, np.int64)
        for k, row in enumerate(leading):
            # C(s, k + 1) is 0 to s = k, and rises then
            counts = np.bincount(row[k + 1 : -1], minlength=top)
            self.guess[k] = k + np.cumsum(counts) - counts
            self.steps[k] = counts.max()
        small = code.top_k > 1 and code.universe <= 256
        second, first = np.tril_indices(code.universe if small else 0, -1)
        self.pairs = (second << 8 | first).astype(np.uint16)


@lru_cache(maxsize=16)
def tables(code: SetCode) -> Tables:
    return Tables(code)


def encode_sets(code: SetCode, ids: np.ndarray, out: np.ndarray) -> None:
    """Write the chunk of ids, uint8 or uint16 [rows, top_k], to out, uint8 [size(rows)].

    Raises FormatError for an id that is out of range or twice in a row.
    """
    _check_size(out, code.packing, len(ids))
    t = tables(code)
    sizes = (code.num_experts, code.low_bits, *_packing(code.packing, len(ids)))
    encode = _compiled(loops.encode, ids.dtype)
    state = encode(ids, _as_words(ids), t.binomials, t.need, t.swaps, *sizes, out)
    if state:
        raise FormatError(code.not_a_set)


def decode_sets(code: SetCode, data: np.ndarray, out: np.ndarray) -> None:
    """Read a chunk, uint8 [size(rows)], into out, uint8 or uint16 [rows, top_k], ascending.

    Raises FormatError for bytes that encode_sets never writes.
    """
    _check_size(data, code.packing, len(out))
    t, limit, limbs = tables(code), code.packing.limit - 1, code.packing.limbs
    highest = np.array([limit >> 64 * i & (1 << 64) - 1 for i in range(limbs)], _U)
    sizes = (code.num_experts, code.low_bits, *_packing(code.packing, len(out)))
    look_up = (t.binomials, t.need, t.guess, t.steps, t.pairs, highest)
    decode = _compiled(loops.decode, out.dtype)
    _check(decode(data, *look_up, *sizes, out, _as_words(out)), len(out))


def encode_order(code: OrderCode, ids: np.ndarray, out: np.ndarray) -> None:
    """Write the orders of ids, uint8 or uint16 [rows, top_k], to out, uint8 [size(rows)]; to 20
    ids."""
    _check_size(out, code.packing, len(ids))
    _compiled(loops.encode_order, ids.dtype)(ids, *_packing(code.packing, len(ids)), out)


def decode_order(code: OrderCode, data: np.ndarray, ids: np.ndarray) -> None:
    """Bring ascending ids [rows, top_k] into the orders in data, uint8 [size(rows)]; to 20 ids.

    Raises FormatError for bytes that encode_order never writes.
    """
    _check_size(data, code.packing, len(ids))
    sizes = (_U(code.packing.limit - 1), *_packing(code.packing, len(ids)))
    _check(_compiled(loops.decode_order, ids.dtype)(data, *sizes, ids), len(ids))


def _check_size(data: np.ndarray, packing: Packing, rows: int) -> None:
    # the loops do not look
    if len(data) != packing.size(rows):
        raise FormatError(f"{len(data)} bytes, expected {packing.size(rows)} for {rows} rows")


def _check(state: int, rows: int) -> None:
    """Raise FormatError for what a decoder returned, unless all is well."""
    if state == loops.PADDING:
        raise FormatError(f"padding behind row {rows - 1} is not zero")
    if state:
        raise FormatError(no_such_rank(state - 1))


def _packing(packing: Packing, rows: int) -> tuple[int, np.uint64, int, int, int]:
    whole, last = packing.word_bits(packing.group), packing.word_bits(rows % packing.group)
    return packing.planes, _U(packing.base), packing.group, whole, last


def _as_words(ids: np.ndarray) -> np.ndarray:
    """ids as uint64 [rows, words] where rows are whole words, which is faster; else no words."""
    if ids.shape[1] * ids.itemsize % 8 or ids.strides[1] != ids.itemsize or not ids.flags.aligned:
        return np.empty((len(ids), 0), np.uint64)
    if ids.strides[0] % 8 or ids.__array_interface__["data"][0] % 8 or not _LITTLE:
        return np.empty((len(ids), 0), np.uint64)
    return ids.view(np.uint64)


@cache
def _compiled(kernel: Any, dtype: np.dtype) -> Any:
    """The kernel for ids of that dtype: one form for arrays of any strides, read-only or not, so
    that each is compiled once."""
    u, i, array = numba.uint64, numba.int64, numba.types.Array
    encodes = kernel in (loops.encode, loops.encode_order)
    codes = array(numba.uint8, 1, "C", readonly=not encodes)
    ids = array(numba.from_dtype(dtype), 2, "A", readonly=encodes)
    words = array(u, 2, "A", readonly=encodes)
    packing = (i, u, i, i, i)
    table, need, guess = u[:, :, ::1], i[::1], numba.int32[:, ::1]
    look_up = (table, need, guess, i[::1], numba.uint16[::1], u[::1])
    signatures = {
        loops.encode: (ids, words, table, need, numba.intp[:, ::1], i, i, *packing, codes),
        loops.decode: (codes, *look_up, i, i, *packing, ids, words),
        loops.encode_order: (ids, *packing, codes),
        loops.decode_order: (codes, u, *packing, ids),
    }
    return loops.compile_kernel(kernel, i(*signatures[kernel]))


def keys(values: np.ndarray) -> np.ndarray:
    """int64 [...] that rise with values, uint64 [..., limbs]: exponent and leading bits.

    What the loops do for one rank; all round alike, so that equal values have equal keys.
    """
    limbs = values.shape[-1]
    top = limbs - 1 - (values[..., ::-1] != 0).argmax(axis=-1)
    top = np.where(values.any(axis=-1), top, 0)
    x = np.take_along_axis(values, top[..., None], axis=-1)[..., 0]
    below = np.take_along_axis(values, np.maximum(top - 1, 0)[..., None], axis=-1)[..., 0]
    floats = x.astype(np.float64)
    floats += (
        np.where((top > 0) & (x < 1 << 53), (below & ~_U(2047)).astype(np.float64), 0) * 2**-64
    )
    return np.maximum((floats.view(np.int64) >> SHIFT) - ZERO_KEY, 0) + (64 * top << MANTISSA)
