"""Sets of experts as numbers: the combinatorial number system, and numbers packed without waste.

`SetCode` gives the sets of top_k of num_experts the ranks 0 .. C(num_experts, top_k) - 1,
`OrderCode` the orders of top_k ids the ranks 0 .. top_k! - 1, and `Packing` writes ranks below any
limit in less than 2 % over log2(limit) bits each. docs/format.md has all three bit by bit.

What stands here is the plain numpy reference, vectorised where ranks fit 64 bits, else over
Python's integers. r3.storage.kernels does the same faster.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from r3.errors import FormatError

_WORD = 64  # bits of the words that several ranks share
_EXACT_IDS = 4096  # up to so many experts the code is exact and its tables stay below 20 MB


@dataclass(frozen=True)
class Packing:
    """Ranks 0 .. limit - 1 of one chunk as bytes.

    The lowest `planes` bytes of the ranks stand in planes of their own. What is above them is a
    digit in base `base`; `group` digits share one word of `word_bits` bits.
    """

    limit: int
    planes: int
    base: int
    group: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, limit: int) -> Packing:
        """The packing with the fewest bits per rank; of equals the one with most planes, and of
        these the one with the smallest group."""
        best: tuple[tuple[Fraction, int, int], Packing] | None = None
        for planes in itertools.count():
            if planes and 256**planes >= limit:
                break
            base = -(-limit // 256**planes)
            for group in itertools.count(1):
                if base**group > 1 << _WORD or (base == 1 and group > 1):
                    break
                packing = cls(limit, planes, base, group)
                bits = 8 * planes + Fraction(packing.word_bits(group), group)
                key = (bits, -planes, group)
                if best is None or key < best[0]:
                    best = key, packing
        assert best is not None
        return best[1]

    @property
    def limbs(self) -> int:
        """64-bit words that a rank needs."""
        return max(1, -(-(self.limit - 1).bit_length() // 64))

    def word_bits(self, digits: int) -> int:
        """Bits of a word of so many digits."""
        return (self.base**digits - 1).bit_length()

    def size(self, rows: int) -> int:
        """Bytes of a chunk of `rows` ranks."""
        words, rest = divmod(rows, self.group)
        bits = words * self.word_bits(self.group) + self.word_bits(rest)
        return rows * self.planes + -(-bits // 8)

    def pack(self, ranks: np.ndarray) -> bytes:
        """Bytes of ranks [rows], uint64 or, where they do not fit, objects (Python integers)."""
        planes = [((ranks >> 8 * i) & 255).astype(np.uint8).tobytes() for i in range(self.planes)]
        digits = (ranks >> 8 * self.planes).astype(np.uint64)
        words, rest = divmod(len(digits), self.group)
        whole = digits[: words * self.group].reshape(words, self.group)
        last = digits[words * self.group :].reshape(1, rest)
        bits = [to_bits(self._word(d), self.word_bits(d.shape[1])) for d in (whole, last)]
        return b"".join(planes) + np.packbits(np.concatenate(bits), bitorder="little").tobytes()

    def unpack(self, data: np.ndarray, rows: int) -> np.ndarray:
        """Inverse of `pack`, from uint8 [size(rows)].

        Raises FormatError for bytes that `pack` never writes, naming the row.
        """
        words, rest = divmod(rows, self.group)
        stream = np.unpackbits(data[rows * self.planes :], bitorder="little")
        at, last = words * self.word_bits(self.group), self.word_bits(rest)
        if stream[at + last :].any():
            raise FormatError(f"padding behind row {rows - 1} is not zero")
        digits = [
            self._digits(from_bits(stream[:at], words), self.group),
            self._digits(from_bits(stream[at : at + last], 1), rest),
        ]
        ranks = np.concatenate([d.reshape(-1) for d in digits])
        over = ranks > np.uint64(self.base - 1)  # what follows would not fit
        if over.any():
            raise FormatError(no_such_rank(int(over.argmax())))
        if self.limbs > 1:
            ranks = ranks.astype(object)
        for i in reversed(range(self.planes)):
            ranks = (ranks << 8) | data[i * rows : (i + 1) * rows].astype(ranks.dtype)
        over = ranks > self.limit - 1
        if over.any():
            raise FormatError(no_such_rank(int(over.argmax())))
        return ranks

    def _word(self, digits: np.ndarray) -> np.ndarray:
        """uint64 [words] of digits [words, n], the first digit the least significant."""
        word = np.zeros(len(digits), np.uint64)
        for column in digits.T[::-1]:
            word = word * np.uint64(self.base) + column
        return word

    def _digits(self, words: np.ndarray, n: int) -> np.ndarray:
        """Inverse of `_word`. The last digit takes what is left, be it too much."""
        digits = np.empty((len(words), n), np.uint64)
        for i in range(n):
            digits[:, i] = words
            if i < n - 1:
                words, digits[:, i] = np.divmod(words, np.uint64(self.base))
        return digits


class SetCode:
    """Sets of `top_k` of `num_experts` as ranks, in the combinatorial number system.

    A set s_0 < s_1 < ... has rank C(s_0, 1) + C(s_1, 2) + ... (Knuth, TAOCP 4A, 7.2.1.3). Above
    4,096 experts the lowest `low_bits` bits of each id are written as they are, below the rank of
    what remains; that costs less than 0.1 % and keeps the tables small.
    """

    def __init__(self, num_experts: int, top_k: int) -> None:
        self.num_experts, self.top_k = num_experts, top_k
        self.low_bits = max(0, (num_experts - 1).bit_length() - (_EXACT_IDS - 1).bit_length())
        # ids that share their high bits are told apart by adding their position
        self.universe = ((num_experts - 1) >> self.low_bits) + 1
        self.universe += top_k - 1 if self.low_bits else 0
        self.sets = math.comb(self.universe, top_k)
        self.packing = Packing.of(self.sets << self.low_bits * top_k)

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, num_experts: int, top_k: int) -> SetCode:
        """The code, with its tables, shared by all who ask for it."""
        return cls(num_experts, top_k)

    @cached_property
    def binomials(self) -> np.ndarray:
        """[top_k, universe] C(s, k + 1), or `sets` if less (more is no part of a rank).

        uint64, or objects (Python integers) where ranks need more."""
        row = [1] * self.universe
        rows = []
        for _ in range(self.top_k):
            row = [0, *itertools.accumulate(row[:-1])]
            rows.append([min(value, self.sets) for value in row])
        return np.array(rows, dtype=np.uint64 if self.packing.limbs == 1 else object)

    @property
    def not_a_set(self) -> str:
        return f"a row of {self.top_k} ids that are not a set below {self.num_experts}"

    def rank(self, ids: np.ndarray) -> np.ndarray:
        """Ranks [rows] of ids [rows, top_k] in any order.

        Raises FormatError for an id that is out of range or twice in a row.
        """
        ids, low = np.sort(ids, axis=-1).astype(np.int64), self.low_bits
        if (ids[:, 1:] <= ids[:, :-1]).any() or (ids[:, -1] >= self.num_experts).any():
            raise FormatError(self.not_a_set)
        high = (ids >> low) + (np.arange(self.top_k) if low else 0)
        ranks = self.binomials[np.arange(self.top_k), high].sum(axis=-1)
        for k in reversed(range(self.top_k if low else 0)):
            ranks = (ranks << low) | (ids[:, k] & ((1 << low) - 1)).astype(ranks.dtype)
        return ranks

    def unrank(self, ranks: np.ndarray) -> np.ndarray:
        """Inverse of `rank`: ids int64 [rows, top_k] in ascending order.

        Raises FormatError, naming the row, for a rank that stands for no set (there are such
        above 4,096 experts only).
        """
        low, lows = self.low_bits, []
        for _ in range(self.top_k if low else 0):
            lows.append((ranks & ((1 << low) - 1)).astype(np.int64))
            ranks = ranks >> low
        ids = np.empty((len(ranks), self.top_k), np.int64)
        for k in reversed(range(self.top_k)):
            ids[:, k] = np.searchsorted(self.binomials[k], ranks, side="right") - 1
            ranks = ranks - self.binomials[k][ids[:, k]]
        if low:
            ids = ((ids - np.arange(self.top_k)) << low) | np.stack(lows, axis=1)
            bad = (ids[:, -1] >= self.num_experts) | (ids[:, 1:] <= ids[:, :-1]).any(axis=1)
            if bad.any():
                raise FormatError(no_such_rank(int(bad.argmax())))
        return ids


class OrderCode:
    """The order of `top_k` different ids as a rank below top_k!, for those who keep it.

    Digit i counts the later ids that are smaller than id i (the Lehmer code); the rank has them in
    a mixed base, the first digit the most significant.
    """

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self.packing = Packing.of(math.factorial(top_k))

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, top_k: int) -> OrderCode:
        """The code, shared by all who ask for it."""
        return cls(top_k)

    def rank(self, ids: np.ndarray) -> np.ndarray:
        """Ranks [rows] of ids [rows, top_k]."""
        ranks = np.zeros(len(ids), np.uint64 if self.packing.limbs == 1 else object)
        for i in range(self.top_k):
            digit = (ids[:, i + 1 :] < ids[:, i : i + 1]).sum(axis=1)
            ranks = ranks * (self.top_k - i) + digit.astype(ranks.dtype)
        return ranks

    def arrange(self, ids: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Bring ascending ids [rows, top_k] into the orders with these ranks."""
        digits = np.empty(ids.shape, np.int64)
        for i in reversed(range(self.top_k)):
            digits[:, i] = (ranks % (self.top_k - i)).astype(np.int64)
            ranks = ranks // (self.top_k - i)
        left, out, row = ids, np.empty_like(ids), np.arange(len(ids))
        for i in range(self.top_k):
            out[:, i] = left[row, digits[:, i]]
            keep = np.arange(left.shape[1]) != digits[:, i : i + 1]
            left = left[keep].reshape(len(ids), left.shape[1] - 1)
        return out


def no_such_rank(row: int) -> str:
    return f"row {row} of a chunk stands for no set of experts"


def to_bits(words: np.ndarray, width: int) -> np.ndarray:
    """uint8 bits [words * width] of uint64 words, lowest bit first."""
    octets = words.astype("<u8").view(np.uint8).reshape(len(words), 8)
    return np.unpackbits(octets, axis=1, bitorder="little")[:, :width].reshape(-1)


def from_bits(bits: np.ndarray, words: int) -> np.ndarray:
    """Inverse of `to_bits`."""
    padded = np.zeros((words, 64), np.uint8)
    width = len(bits) // max(words, 1)
    padded[:, :width] = bits.reshape(words, width)
    return np.packbits(padded, axis=1, bitorder="little").view("<u8")[:, 0].astype(np.uint64)
