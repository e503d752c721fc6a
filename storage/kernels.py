"""r3.storage.enumeration in numba: ids of one chunk to bytes and back, in blocks of 128 rows.

Blocks are turned so that the inner loops run over rows, which the compiler makes vector code of.
Ranks that fit 64 bits have kernels of their own. Importing this module costs what importing numba
costs; compiled code is kept on disk, so compiling (a few seconds) happens once per installation.
"""

from __future__ import annotations

import sys
from functools import cache, lru_cache
from typing import Any

import numba
import numpy as np

from r3.errors import FormatError
from r3.storage.enumeration import SetCode, no_such_rank

_BLOCK = 128
_U = np.uint64
_MANTISSA = 7  # bits of a rank's leading digits by which a first guess of an id is looked up
_SHIFT = 52 - _MANTISSA
_ZERO_KEY = (1023 << _MANTISSA) - 1  # so that 1 has key 1, and 0 less than that
_LITTLE = sys.byteorder == "little"
_PADDING, _NOT_A_SET = -1, -2  # what kernels return besides 0 and the first bad row + 1


def _jit(function: Any, *signature: Any) -> Any:
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(*signature, cache=True, **options)(function)
    except RuntimeError:  # no folder to keep compiled code in
        return numba.njit(*signature, **options)(function)


@cache
def _compiled(kernel: Any, dtype: np.dtype) -> Any:
    """The kernel for ids of that dtype: one form for arrays of any strides, read-only or not, so
    that each is compiled once."""
    u, i = numba.uint64, numba.int64
    id_type = numba.from_dtype(dtype)
    codes = numba.types.Array(numba.uint8, 1, "C", readonly=not _encodes(kernel))
    ids = numba.types.Array(id_type, 2, "A", readonly=_encodes(kernel))
    words = numba.types.Array(u, 2, "A", readonly=_encodes(kernel))
    packing = (i, u, i, i, i)
    signatures = {
        _encode: (ids, words, u[:, ::1], numba.intp[:, ::1], i, *packing, codes),
        _decode: (codes, u[:, ::1], numba.int32[:, ::1], i[::1], u, *packing, ids, words),
        _encode_wide: (ids, u[:, :, ::1], numba.intp[:, ::1], i, i, *packing, codes),
        _decode_wide: (codes, u[:, :, ::1], numba.int32[:, ::1], u[::1], i, i, *packing, ids),
    }
    return _jit(kernel, i(*signatures[kernel]))


def _encodes(kernel: Any) -> bool:
    return kernel in (_encode, _encode_wide)


class Tables:
    """What the kernels look up for one `SetCode`.

    binomials: uint64 [top_k, universe + 1, limbs], closed by a value that no rank reaches.
    guess: int32 [top_k, keys]: the largest id whose binomial is sure not to exceed a rank with
    that key; the id sought is at most `steps[k]` higher. swaps: a sorting network, intp [n, 2].
    """

    def __init__(self, code: SetCode) -> None:
        limbs, size = code.packing.limbs, 8 * code.packing.limbs
        rows = [[*row, code.sets] for row in code.binomials.tolist()]
        octets = b"".join(value.to_bytes(size, "little") for row in rows for value in row)
        self.binomials = np.frombuffer(octets, "<u8").astype(np.uint64)
        self.binomials = self.binomials.reshape(code.top_k, -1, limbs)
        self.swaps = sorting_network(code.top_k)
        keys = _keys(self.binomials)
        top = int(keys.max()) + 1
        self.guess = np.empty((code.top_k, top), np.int32)
        self.steps = np.empty(code.top_k, np.int64)
        for k, row in enumerate(keys):
            # C(s, k + 1) is 0 to s = k, and rises then
            counts = np.bincount(row[k + 1 : -1], minlength=top)
            self.guess[k] = k + np.cumsum(counts) - counts
            self.steps[k] = counts.max()


@lru_cache(maxsize=16)
def tables(code: SetCode) -> Tables:
    return Tables(code)


def sorting_network(n: int) -> np.ndarray:
    """Comparators, intp [m, 2], that sort n values (Batcher's odd-even merge sort)."""
    swaps = []
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        swaps.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return np.array(swaps, np.intp).reshape(-1, 2)


def encode_sets(code: SetCode, ids: np.ndarray, out: np.ndarray) -> None:
    """Write the chunk of ids, uint8 or uint16 [rows, top_k], to out, uint8 [size(rows)].

    Raises FormatError for an id that is out of range or twice in a row.
    """
    t, p = tables(code), code.packing
    last = p.word_bits(len(ids) % p.group)
    words = (p.planes, _U(p.base), p.group, p.word_bits(p.group), last)
    if p.limbs == 1 and not code.low_bits:
        state = _compiled(_encode, ids.dtype)(
            ids, _as_words(ids), t.binomials[..., 0], t.swaps, code.num_experts, *words, out
        )
    else:
        arguments = (t.binomials, t.swaps, code.num_experts, code.low_bits)
        state = _compiled(_encode_wide, ids.dtype)(ids, *arguments, *words, out)
    if state:
        raise FormatError(f"a row of {code.top_k} ids that are not a set below {code.num_experts}")


def decode_sets(code: SetCode, data: np.ndarray, out: np.ndarray) -> None:
    """Read a chunk, uint8 [size(rows)], into out, uint8 or uint16 [rows, top_k], ascending.

    Raises FormatError for bytes that encode_sets never writes.
    """
    t, p = tables(code), code.packing
    last = p.word_bits(len(out) % p.group)
    words = (p.planes, _U(p.base), p.group, p.word_bits(p.group), last)
    if p.limbs == 1 and not code.low_bits:
        arguments = (t.binomials[..., 0], t.guess, t.steps, _U(p.limit - 1))
        state = _compiled(_decode, out.dtype)(data, *arguments, *words, out, _as_words(out))
    else:
        limit = np.array([(p.limit - 1) >> 64 * i & (1 << 64) - 1 for i in range(p.limbs)], _U)
        arguments = (t.binomials, t.guess, limit, code.num_experts, code.low_bits)
        state = _compiled(_decode_wide, out.dtype)(data, *arguments, *words, out)
    if state == _PADDING:
        raise FormatError(f"padding behind row {len(out) - 1} is not zero")
    if state:
        raise FormatError(no_such_rank(state - 1))


def _as_words(ids: np.ndarray) -> np.ndarray:
    """ids as uint64 [rows, words] where rows are whole words, which is faster; else no words."""
    if ids.shape[1] * ids.itemsize % 8 or ids.strides[1] != ids.itemsize or not ids.flags.aligned:
        return np.empty((len(ids), 0), np.uint64)
    if ids.strides[0] % 8 or ids.__array_interface__["data"][0] % 8 or not _LITTLE:
        return np.empty((len(ids), 0), np.uint64)
    return ids.view(np.uint64)


@_jit
def _put_words(digits, base, group, bits, last_bits, out):
    """The digits [rows] as words, bit by bit behind each other, into out (zeros)."""
    rows = len(digits)
    acc, fill, at = _U(0), 0, 0
    for first in range(0, rows, group):
        n = min(group, rows - first)
        width = bits if n == group else last_bits
        word = _U(0)
        for i in range(first + n - 1, first - 1, -1):
            word = word * base + digits[i]
        acc |= word << _U(fill)
        if fill + width >= 64:
            for b in range(8):
                out[at + b] = np.uint8((acc >> _U(8 * b)) & _U(255))
            at += 8
            acc = word >> _U(64 - fill) if fill else _U(0)
            fill += width - 64
        else:
            fill += width
    while fill > 0:
        out[at] = np.uint8(acc & _U(255))
        acc >>= _U(8)
        at += 1
        fill -= 8


@_jit
def _get_words(data, base, group, bits, last_bits, digits):
    """Inverse of _put_words; False if bits behind the last word are not zero."""
    rows, size, bit = len(digits), len(data), 0
    for first in range(0, rows, group):
        n = min(group, rows - first)
        width = bits if n == group else last_bits
        at, shift = bit >> 3, bit & 7
        word = _U(0)
        if at + 8 <= size:
            for b in range(8):
                word |= _U(data[at + b]) << _U(8 * b)
        else:
            for b in range(size - at):
                word |= _U(data[at + b]) << _U(8 * b)
        word >>= _U(shift)
        if shift + width > 64:
            word |= _U(data[at + 8]) << _U(64 - shift)
        if width < 64:
            word &= (_U(1) << _U(width)) - _U(1)
        for i in range(first, first + n - 1):
            high = word // base
            digits[i] = word - high * base
            word = high
        digits[first + n - 1] = word
        bit += width
    return (bit & 7) == 0 or (data[bit >> 3] >> np.uint8(bit & 7)) == 0


@_jit
def _turn(ids, id_words, first, m, a):
    """Rows first .. first + m of ids to the columns of a [top_k, m]."""
    if id_words.shape[1]:
        words = np.empty(_BLOCK, np.uint64)
        width, n = _U(8 * ids.itemsize), 8 // ids.itemsize
        for w in range(id_words.shape[1]):
            for j in range(m):
                words[j] = id_words[first + j, w]
            for i in range(n):
                row = a[w * n + i]
                for j in range(m):
                    row[j] = words[j] >> (width * _U(i))
    else:
        for j in range(m):
            for k in range(len(a)):
                a[k, j] = ids[first + j, k]


@_jit
def _turn_back(a, first, m, out, out_words):
    """Inverse of _turn."""
    if out_words.shape[1]:
        words = np.empty(_BLOCK, np.uint64)
        width, n = _U(8 * out.itemsize), 8 // out.itemsize
        for w in range(out_words.shape[1]):
            words[:m] = 0
            for i in range(n):
                row = a[w * n + i]
                for j in range(m):
                    words[j] |= _U(row[j]) << (width * _U(i))
            for j in range(m):
                out_words[first + j, w] = words[j]
    else:
        for j in range(m):
            for k in range(len(a)):
                out[first + j, k] = a[k, j]


@_jit
def _sort_block(a, swaps, m):
    for p in range(len(swaps)):
        x, y = a[swaps[p, 0]], a[swaps[p, 1]]
        for j in range(m):
            low, high = min(x[j], y[j]), max(x[j], y[j])
            x[j] = low
            y[j] = high


@_jit
def _not_sets(a, m, num_experts):
    """Whether one of the sorted rows a[:, :m] has an id twice or one that is out of range."""
    bad = 0
    for k in range(1, len(a)):
        x, y = a[k - 1], a[k]
        for j in range(m):
            bad |= x[j] >= y[j]
    x = a[len(a) - 1]
    for j in range(m):
        bad |= x[j] >= num_experts
    return bad != 0


def _encode(
    ids, id_words, binomials, swaps, num_experts, planes, base, group, bits, last_bits, out
):
    rows, top_k = ids.shape
    a = np.empty((top_k, _BLOCK), ids.dtype)
    ranks = np.empty(_BLOCK, np.uint64)
    digits = np.empty(rows, np.uint64)
    for first in range(0, rows, _BLOCK):
        m = min(_BLOCK, rows - first)
        _turn(ids, id_words, first, m, a)
        _sort_block(a, swaps, m)
        if _not_sets(a, m, num_experts):
            return _NOT_A_SET
        ranks[:m] = 0
        for k in range(top_k):
            column, row = binomials[k], a[k]
            for j in range(m):
                ranks[j] += column[row[j]]
        for b in range(planes):
            plane = out[b * rows + first : b * rows + first + m]
            for j in range(m):
                plane[j] = np.uint8((ranks[j] >> _U(8 * b)) & _U(255))
        for j in range(m):
            digits[first + j] = ranks[j] >> _U(8 * planes)
    _put_words(digits, base, group, bits, last_bits, out[planes * rows :])
    return 0


def _decode(
    data, binomials, guess, steps, limit, planes, base, group, bits, last_bits, out, out_words
):
    rows, top_k = out.shape
    digits = np.empty(rows, np.uint64)
    if not _get_words(data[planes * rows :], base, group, bits, last_bits, digits):
        return _PADDING
    floats = np.empty(_BLOCK, np.float64)
    as_bits = floats.view(np.int64)
    ids = np.empty((top_k, _BLOCK), np.int64)
    for first in range(0, rows, _BLOCK):
        m = min(_BLOCK, rows - first)
        ranks = digits[first : first + m]
        for b in range(planes - 1, -1, -1):
            plane = data[b * rows + first : b * rows + first + m]
            for j in range(m):
                ranks[j] = (ranks[j] << _U(8)) | _U(plane[j])
        over = 0
        for j in range(m):
            over |= ranks[j] > limit
        if over:
            for j in range(m):
                if ranks[j] > limit:
                    return first + j + 1
        for k in range(top_k - 1, 0, -1):
            column, start, row, n = binomials[k], guess[k], ids[k], steps[k]
            for j in range(m):
                floats[j] = np.float64(ranks[j])
            for j in range(m):
                row[j] = start[max(0, (as_bits[j] >> _SHIFT) - _ZERO_KEY)]
            for _ in range(n):
                for j in range(m):
                    row[j] += column[row[j] + 1] <= ranks[j]
            for j in range(m):
                ranks[j] -= column[row[j]]
        for j in range(m):
            ids[0, j] = np.int64(ranks[j])
        _turn_back(ids, first, m, out, out_words)
    return 0


def _keys(values: np.ndarray) -> np.ndarray:
    """int64 [...] that rise with values, uint64 [..., limbs]: exponent and leading bits.

    What `_key` does for one value; both round alike, so that equal values have equal keys.
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
    return np.maximum((floats.view(np.int64) >> _SHIFT) - _ZERO_KEY, 0) + (64 * top << _MANTISSA)


@_jit
def _key(value, limbs, floats, as_bits):
    top = limbs - 1
    while top > 0 and value[top] == 0:
        top -= 1
    floats[0] = np.float64(value[top])
    if top > 0 and value[top] >> _U(53) == 0:
        # of what stands below so much that it converts exactly: rounding then keeps the order
        floats[0] += np.float64(value[top - 1] & ~_U(2047)) * 2.0**-64
    return max(0, (as_bits[0] >> _SHIFT) - _ZERO_KEY) + (64 * top << _MANTISSA)


@_jit
def _shift_bits(value, bits, left):
    """Shift uint64 [limbs] in place; what leaves it is zero."""
    limbs, whole, part = len(value), bits // 64, bits % 64
    for n in range(limbs):
        i = limbs - 1 - n if left else n
        near = i - whole if left else i + whole
        far = near - 1 if left else near + 1
        x = value[near] if 0 <= near < limbs else _U(0)
        y = value[far] if 0 <= far < limbs and part else _U(0)
        if part:
            x = x << _U(part) if left else x >> _U(part)
            y = y >> _U(64 - part) if left else y << _U(64 - part)
        value[i] = x | y


def _encode_wide(
    ids, binomials, swaps, num_experts, low, planes, base, group, bits, last_bits, out
):
    rows, top_k = ids.shape
    limbs = binomials.shape[2]
    a = np.empty((top_k, _BLOCK), ids.dtype)
    rank = np.empty(limbs + 1, np.uint64)  # the last is zero, so that the digits can reach over
    digits = np.empty(rows, np.uint64)
    limb, shift = planes // 8, 8 * (planes % 8)
    for first in range(0, rows, _BLOCK):
        m = min(_BLOCK, rows - first)
        for j in range(m):
            for k in range(top_k):
                a[k, j] = ids[first + j, k]
        _sort_block(a, swaps, m)
        if _not_sets(a, m, num_experts):
            return _NOT_A_SET
        for j in range(m):
            rank[:] = 0
            for k in range(top_k):
                high = np.int64(a[k, j])
                if low:
                    high = (high >> low) + k
                carry = _U(0)
                for i in range(limbs):
                    x = rank[i] + binomials[k, high, i]
                    more = _U(x < rank[i])
                    rank[i] = x + carry
                    carry = more | _U(rank[i] < carry)
            if low:
                _shift_bits(rank, low * top_k, True)
                for k in range(top_k):
                    value = _U(a[k, j]) & ((_U(1) << _U(low)) - _U(1))
                    i, at = k * low // 64, k * low % 64
                    rank[i] |= value << _U(at)
                    if at + low > 64:
                        rank[i + 1] |= value >> _U(64 - at)
            for b in range(planes):
                out[b * rows + first + j] = np.uint8((rank[b // 8] >> _U(8 * (b % 8))) & _U(255))
            digits[first + j] = rank[limb] >> _U(shift)
            if shift:
                digits[first + j] |= rank[limb + 1] << _U(64 - shift)
    _put_words(digits, base, group, bits, last_bits, out[planes * rows :])
    return 0


@_jit
def _at_most(value, rank, limbs):
    for i in range(limbs - 1, -1, -1):
        if value[i] != rank[i]:
            return value[i] < rank[i]
    return True


def _decode_wide(
    data, binomials, guess, limit, num_experts, low, planes, base, group, bits, last_bits, out
):
    rows, top_k = out.shape
    limbs = binomials.shape[2]
    digits = np.empty(rows, np.uint64)
    if not _get_words(data[planes * rows :], base, group, bits, last_bits, digits):
        return _PADDING
    need = np.ones(top_k, np.int64)  # limbs that are not zero in ranks of the first k + 1 ids
    for k in range(top_k):
        for i in range(limbs):
            if binomials[k, binomials.shape[1] - 2, i]:
                need[k] = i + 1
    floats = np.empty(1, np.float64)
    as_bits = floats.view(np.int64)
    rank, lows = np.empty(limbs, np.uint64), np.zeros(top_k, np.int64)
    limb, shift = planes // 8, 8 * (planes % 8)
    for j in range(rows):
        rank[:] = 0
        rank[limb] = digits[j] << _U(shift)
        if shift and limb + 1 < limbs:
            rank[limb + 1] = digits[j] >> _U(64 - shift)
        for b in range(planes):
            rank[b // 8] |= _U(data[b * rows + j]) << _U(8 * (b % 8))
        lost = shift and limb + 1 == limbs and digits[j] >> _U(64 - shift)
        if lost or not _at_most(rank, limit, limbs):
            return j + 1
        if low:
            for k in range(top_k):
                i, at = k * low // 64, k * low % 64
                x = rank[i] >> _U(at)
                if at + low > 64:
                    x |= rank[i + 1] << _U(64 - at)
                lows[k] = np.int64(x & ((_U(1) << _U(low)) - _U(1)))
            _shift_bits(rank, low * top_k, False)
        above = np.int64(num_experts)
        for k in range(top_k - 1, -1, -1):
            n = need[k]
            s = np.int64(guess[k, _key(rank, n, floats, as_bits)])
            while _at_most(binomials[k, s + 1], rank, n):
                s += 1
            borrow = _U(0)
            for i in range(n):
                x = rank[i] - binomials[k, s, i]
                less = _U(rank[i] < binomials[k, s, i])
                rank[i] = x - borrow
                borrow = less | _U(x < borrow)
            if low:
                s = ((s - k) << low) | lows[k]
                if s >= above:
                    return j + 1
                above = s
            out[j, k] = s
    return 0
