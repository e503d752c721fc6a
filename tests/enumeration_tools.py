"""Sets and orders as numbers, on Python's integers, as plainly as docs/format.md defines them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from r3 import RouterSpec
from r3.storage.enumeration import SetCode
from storage_tools import random_ids

kernels = pytest.importorskip("r3.storage.kernels")

MODELS = [(8, 2), (60, 4), (64, 8), (128, 8), (256, 8), (384, 8), (512, 22)]
EDGES = [(1, 1), (2, 1), (2, 2), (64, 64), (65, 64), (67, 33), (68, 34), (4096, 2), (4097, 1)]
EDGES += [(4097, 64), (8193, 3), (65536, 1), (65536, 4), (65536, 64)]
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def routers(draw: st.DrawFn) -> tuple[int, int]:
    if draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(MODELS + EDGES))
    experts = draw(st.integers(1, 80) | st.integers(1, 600) | st.integers(1, 65536))
    return experts, draw(st.integers(1, min(experts, draw(st.sampled_from([4, 9, 64])))))


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
