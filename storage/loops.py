"""The loops of r3.storage.kernels, compiled by numba; all in one file, for its cache to notice.

A block of rows is turned so that the inner loops run over rows, which the compiler makes vector
code of; a[k] then is the k-th id of every row, and ranks[i] the i-th 64 bits of every rank. No loop
checks bounds: the callers see to it that every array is as large as its docstring says.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

BLOCK = 256
MANTISSA = 7  # bits of a rank's leading digits by which a first guess of an id is looked up
SHIFT = 52 - MANTISSA
ZERO_KEY = (1023 << MANTISSA) - 1  # so that 1 has key 1, and 0 less than that
PADDING, NOT_A_SET = -1, -2  # what kernels return besides 0 and the first bad row + 1
_U = np.uint64


_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def jit(function: Any) -> Any:
    """Compiled as part of the kernels that call it."""
    return numba.njit(**_OPTIONS)(function)


def inline(function: Any) -> Any:
    """For what runs in every block: arrays that the caller made are then known not to overlap."""
    return numba.njit(inline="always", **_OPTIONS)(function)


def compile_kernel(function: Any, signature: Any) -> Any:
    """Compiled now, or taken from where numba keeps what it compiled."""
    try:
        return numba.njit(signature, cache=True, **_OPTIONS)(function)
    except Exception:  # no folder for it, no room in it, a file in it cut short: do without
        return numba.njit(signature, **_OPTIONS)(function)


@jit
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


@jit
def _get_words(data, base, group, bits, last_bits, digits):
    """Inverse of _put_words. 0, or what is wrong: bits behind the last word that are not zero, or
    a digit that is none, of the row before the number returned."""
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
        if word >= base:
            return first + n
        digits[first + n - 1] = word
        bit += width
    if bit & 7 and data[bit >> 3] >> np.uint8(bit & 7):
        return PADDING
    return 0


@inline
def _turn(ids, id_words, first, m, a):
    """Rows first .. first + m of ids to the columns of a [top_k, m]."""
    if id_words.shape[1]:
        words = np.empty(BLOCK, np.uint64)
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


@inline
def _turn_back(a, first, m, out, out_words):
    """Inverse of _turn."""
    if out_words.shape[1]:
        words = np.empty(BLOCK, np.uint64)
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


@inline
def _sort_block(a, swaps, m):
    for p in range(len(swaps)):
        x, y = a[swaps[p, 0]], a[swaps[p, 1]]
        for j in range(m):
            low, high = min(x[j], y[j]), max(x[j], y[j])
            x[j] = low
            y[j] = high


@inline
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


@jit
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


def encode(
    ids,
    id_words,
    binomials,
    need,
    swaps,
    num_experts,
    low,
    planes,
    base,
    group,
    bits,
    last_bits,
    out,
):
    rows, top_k = ids.shape
    limbs = binomials.shape[1]
    a = np.empty((top_k, BLOCK), ids.dtype)
    ranks = np.zeros((limbs + 1, BLOCK), np.uint64)  # the last stays zero, for the digits
    digits = np.empty(rows, np.uint64)
    at, carry = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64)
    for first in range(0, rows, BLOCK):
        m = min(BLOCK, rows - first)
        _turn(ids, id_words, first, m, a)
        _sort_block(a, swaps, m)
        if _not_sets(a, m, num_experts):
            return NOT_A_SET
        for i in range(limbs):
            ranks[i, :m] = 0
        for k in range(top_k):
            _add(ranks, binomials[k], need[k], a[k], low, k, m, at, carry)
        if low:
            _put_low_bits(ranks, a, low, m)
        for b in range(planes):
            rank, shift = ranks[b // 8], _U(8 * (b % 8))
            plane = out[b * rows + first : b * rows + first + m]
            for j in range(m):
                plane[j] = np.uint8((rank[j] >> shift) & _U(255))
        near, far, shift = ranks[planes // 8], ranks[planes // 8 + 1], 8 * (planes % 8)
        for j in range(m):
            digits[first + j] = near[j] >> _U(shift)
        if shift and limbs > 1:
            for j in range(m):
                digits[first + j] |= far[j] << _U(64 - shift)
    _put_words(digits, base, group, bits, last_bits, out[planes * rows :])
    return 0


@inline
def _add(ranks, columns, limbs, row, low, k, m, at, carry):
    """Add the binomials of the ids in a row of a block to the ranks. at, carry [m]: room."""
    rank, column = ranks[0], columns[0]
    if limbs == 1 and not low:
        for j in range(m):
            rank[j] += column[row[j]]
        return
    for j in range(m):
        carry[j] = 0
        at[j] = (np.int64(row[j]) >> low) + k if low else np.int64(row[j])
    for i in range(limbs):
        rank, column = ranks[i], columns[i]
        for j in range(m):
            x = column[at[j]]
            y = rank[j] + x
            z = y + carry[j]
            carry[j] = _U(y < x) | _U(z < y)
            rank[j] = z


@jit
def _put_low_bits(ranks, a, low, m):
    """Shift the ranks left and write the low bits of the ids below them."""
    lane = np.empty(len(ranks), np.uint64)
    for j in range(m):
        lane[:] = ranks[:, j]
        _shift_bits(lane, low * len(a), True)
        for k in range(len(a)):
            value = _U(a[k, j]) & ((_U(1) << _U(low)) - _U(1))
            i, at = k * low // 64, k * low % 64
            lane[i] |= value << _U(at)
            if at + low > 64:
                lane[i + 1] |= value >> _U(64 - at)
        ranks[:, j] = lane


def decode(
    data,
    binomials,
    need,
    guess,
    steps,
    pairs,
    highest,
    num_experts,
    low,
    planes,
    base,
    group,
    bits,
    last_bits,
    out,
    out_words,
):
    rows, top_k = out.shape
    limbs = binomials.shape[1]
    digits = np.empty(rows, np.uint64)
    state = _get_words(data[planes * rows :], base, group, bits, last_bits, digits)
    if state:
        return state
    ranks = np.empty((limbs, BLOCK), np.uint64)
    ids = np.empty((top_k, BLOCK), np.int64)
    floats = np.empty((2, BLOCK), np.float64)
    lows = np.empty((top_k if low else 0, BLOCK), np.int64)
    for first in range(0, rows, BLOCK):
        m = min(BLOCK, rows - first)
        _get_ranks(data, digits, planes, first, m, ranks)
        over = _first_above(ranks, highest, m)
        if over >= 0:
            return first + over + 1
        if low:
            _get_low_bits(ranks, low, lows, m)
        for k in range(top_k - 1, 1 if len(pairs) else 0, -1):
            if need[k] == 1:
                _find_1(ranks[0], binomials[k, 0], guess[k], steps[k], ids[k], m, floats)
            elif need[k] == 2:
                _find_2(ranks, binomials[k], guess[k], steps[k], ids[k], m, floats)
            else:
                _find_n(ranks, binomials[k], guess[k], need[k], ids[k], m)
        rank, row, second = ranks[0], ids[0], ids[min(1, top_k - 1)]
        if len(pairs):
            for j in range(m):
                second[j] = pairs[rank[j]]
            for j in range(m):
                row[j] = second[j] & 255
            for j in range(m):
                second[j] >>= 8
        else:
            for j in range(m):
                row[j] = np.int64(rank[j])
        if low:
            bad = _join_low_bits(ids, lows, low, num_experts, m)
            if bad >= 0:
                return first + bad + 1
        _turn_back(ids, first, m, out, out_words)
    return 0


@inline
def _get_ranks(data, digits, planes, first, m, ranks):
    """Ranks of a block from its digits and planes."""
    rows, limbs = len(digits), len(ranks)
    for i in range(limbs):
        if i != planes // 8:
            ranks[i, :m] = 0
    rank, shift = ranks[planes // 8], 8 * (planes % 8)
    for j in range(m):
        rank[j] = digits[first + j] << _U(shift)
    if shift and planes // 8 + 1 < limbs:
        rank = ranks[planes // 8 + 1]
        for j in range(m):
            rank[j] = digits[first + j] >> _U(64 - shift)
    for b in range(planes):
        rank, place = ranks[b // 8], _U(8 * (b % 8))
        plane = data[b * rows + first : b * rows + first + m]
        for j in range(m):
            rank[j] |= _U(plane[j]) << place


@inline
def _first_above(ranks, highest, m):
    """The first rank above `highest`, or -1."""
    over = 0
    rank, most = ranks[len(ranks) - 1], highest[len(highest) - 1]
    if len(ranks) == 1:
        for j in range(m):
            over |= rank[j] > most
    else:
        for j in range(m):
            over |= rank[j] >= most
    if over:
        for j in range(m):
            for i in range(len(ranks) - 1, -1, -1):
                if ranks[i, j] != highest[i]:
                    if ranks[i, j] > highest[i]:
                        return j
                    break
    return -1


@inline
def _find_1(rank, column, guess, steps, row, m, floats):
    """The largest ids whose binomials do not exceed the ranks, and what of these remains.

    floats [2, m]: room, which would cost too much to ask for each time.
    """
    floats = floats[0]
    as_bits = floats.view(np.int64)
    for j in range(m):
        floats[j] = np.float64(rank[j])
    for j in range(m):
        row[j] = guess[max(0, (as_bits[j] >> SHIFT) - ZERO_KEY)]
    for _ in range(steps):
        for j in range(m):
            row[j] += column[row[j] + 1] <= rank[j]
    for j in range(m):
        rank[j] -= column[row[j]]


@inline
def _find_2(ranks, columns, guess, steps, row, m, floats):
    """_find_1 for ranks of 128 bits."""
    floats, below = floats[0], floats[1]
    as_bits, below_bits = floats.view(np.int64), below.view(np.int64)
    low, high, low_column, high_column = ranks[0], ranks[1], columns[0], columns[1]
    for j in range(m):
        below[j] = np.float64(low[j])
        exact = np.float64(low[j] & ~_U(2047)) * 2.0**-64
        floats[j] = np.float64(high[j]) + (exact if high[j] >> _U(53) == 0 else 0.0)
    for j in range(m):
        one = max(0, (below_bits[j] >> SHIFT) - ZERO_KEY)
        two = (as_bits[j] >> SHIFT) - ZERO_KEY + (64 << MANTISSA)
        row[j] = guess[two if high[j] else one]
    for _ in range(steps):
        for j in range(m):
            x, y = high_column[row[j] + 1], low_column[row[j] + 1]
            row[j] += (x < high[j]) | ((x == high[j]) & (y <= low[j]))
    for j in range(m):
        x = low_column[row[j]]
        high[j] -= high_column[row[j]] + _U(low[j] < x)
        low[j] -= x


@jit
def _find_n(ranks, columns, guess, limbs, row, m):
    """_find_1 for ranks of any size, one by one."""
    floats = np.empty(1, np.float64)
    as_bits = floats.view(np.int64)
    for j in range(m):
        s = guess[_key(ranks, limbs, j, floats, as_bits)]
        while _at_most(columns, s + 1, ranks, limbs, j):
            s += 1
        row[j] = s
        borrow = _U(0)
        for i in range(limbs):
            x, y = ranks[i, j], columns[i, s]
            ranks[i, j] = x - y - borrow
            borrow = _U(x < y) | _U(x - y < borrow)


@jit
def _at_most(columns, s, ranks, limbs, j):
    for i in range(limbs - 1, -1, -1):
        if columns[i, s] != ranks[i, j]:
            return columns[i, s] < ranks[i, j]
    return True


@jit
def _key(ranks, limbs, j, floats, as_bits):
    """A number that rises with a rank: exponent and leading bits; see r3.storage.kernels.keys."""
    top = limbs - 1
    while top > 0 and ranks[top, j] == 0:
        top -= 1
    floats[0] = np.float64(ranks[top, j])
    if top > 0 and ranks[top, j] >> _U(53) == 0:
        floats[0] += np.float64(ranks[top - 1, j] & ~_U(2047)) * 2.0**-64
    return max(0, (as_bits[0] >> SHIFT) - ZERO_KEY) + (64 * top << MANTISSA)


@jit
def _get_low_bits(ranks, low, lows, m):
    """Inverse of _put_low_bits."""
    lane = np.empty(len(ranks) + 1, np.uint64)
    for j in range(m):
        lane[:-1] = ranks[:, j]
        for k in range(len(lows)):
            i, at = k * low // 64, k * low % 64
            x = lane[i] >> _U(at)
            if at + low > 64:
                x |= lane[i + 1] << _U(64 - at)
            lows[k, j] = np.int64(x & ((_U(1) << _U(low)) - _U(1)))
        lane[len(ranks)] = 0
        _shift_bits(lane, low * len(lows), False)
        ranks[:, j] = lane[:-1]


@jit
def _join_low_bits(ids, lows, low, num_experts, m):
    """Make ids of what stood for them; the first row that is no set, or -1."""
    for j in range(m):
        above = np.int64(num_experts)
        for k in range(len(ids) - 1, -1, -1):
            s = ((ids[k, j] - k) << low) | lows[k, j]
            if s >= above:
                return j
            ids[k, j] = above = s
    return -1


def encode_order(ids, planes, base, group, bits, last_bits, out):
    """The orders of rows of ids, as OrderCode.rank and Packing.pack have them, for 64 bits."""
    rows, top_k = ids.shape
    digits = np.empty(rows, np.uint64)
    for j in range(rows):
        rank = _U(0)
        for i in range(top_k):
            smaller = 0
            for k in range(i + 1, top_k):
                smaller += ids[j, k] < ids[j, i]
            rank = rank * _U(top_k - i) + _U(smaller)
        for b in range(planes):
            out[b * rows + j] = np.uint8((rank >> _U(8 * b)) & _U(255))
        digits[j] = rank >> _U(8 * planes)
    _put_words(digits, base, group, bits, last_bits, out[planes * rows :])
    return 0


def decode_order(data, limit, planes, base, group, bits, last_bits, ids):
    """Bring ascending ids into the orders in data; inverse of encode_order."""
    rows, top_k = ids.shape
    digits = np.empty(rows, np.uint64)
    state = _get_words(data[planes * rows :], base, group, bits, last_bits, digits)
    if state:
        return state
    left, smaller = np.empty(top_k, np.int64), np.empty(top_k, np.int64)
    for j in range(rows):
        rank = digits[j]
        for b in range(planes - 1, -1, -1):
            rank = (rank << _U(8)) | _U(data[b * rows + j])
        if rank > limit:
            return j + 1
        for i in range(top_k - 1, -1, -1):
            above = rank // _U(top_k - i)
            smaller[i] = np.int64(rank - above * _U(top_k - i))
            rank = above
        for i in range(top_k):
            left[i] = ids[j, i]
        for i in range(top_k):
            ids[j, i] = left[smaller[i]]
            for k in range(smaller[i], top_k - i - 1):
                left[k] = left[k + 1]
    return 0
