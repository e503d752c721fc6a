"""Bytes for the chunk decoders, with numpy and with the kernels, for routers of every kind.

Both must say the same. What they accept must be sets of experts, and exactly the bytes that the
encoders write for them: no content has two forms. The kernels check no bounds; a run with
NUMBA_BOUNDSCHECK=1 in the environment makes an access out of bounds an IndexError, a finding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import numpy as np

from r3 import FormatError, RouterSpec
from r3.storage import codec, kernels
from r3.storage.codec import CODECS, ChunkCodec
from r3.storage.enumeration import OrderCode, Packing, SetCode

from .campaign import Report, run_inputs
from .traces import expect

# experts and top_k: tiny, common, all chosen, around the widths of words, above the exact code
ROUTERS = (
    (1, 1),
    (2, 1),
    (2, 2),
    (8, 2),
    (16, 16),
    (20, 10),
    (60, 4),
    (64, 6),
    (64, 8),
    (64, 64),
    (68, 33),
    (96, 20),
    (128, 8),
    (160, 6),
    (255, 9),
    (256, 8),
    (257, 2),
    (300, 5),
    (384, 8),
    (512, 10),
    (512, 22),
    (1024, 8),
    (1024, 32),
    (4096, 5),
    (4096, 6),
    (4097, 3),
    (5000, 1),
    (8192, 8),
    (65536, 1),
    (65536, 4),
    (65536, 9),
)


_ALIKE = 500  # consecutive inputs are of a few routers, whose tables are made once


def run(seed: int, inputs: range) -> Report:
    for experts in (8, 300):  # kernels for ids of either width, compiled outside of time limits
        spec, enum = _spec(experts, 2), CODECS["enum"]
        data = _encode_both(enum, spec, np.arange(2, dtype=spec.dtype)[None])
        expect(_both(enum, spec, data[1], 1) is not None, "the first set is refused")
    numbers = iter(inputs)
    return run_inputs(seed, inputs, lambda rng: check(routers(seed, next(numbers) // _ALIKE), rng))


@cache
def routers(seed: int, block: int) -> tuple[RouterSpec, ...]:
    rng = random.Random(f"{seed} {block}")
    chosen = rng.sample(ROUTERS, 4)
    for most in (70, 70, 600, 600):
        experts = rng.randint(1, most)
        chosen.append((experts, rng.randint(1, min(experts, 24))))
    return tuple(_spec(*pair) for pair in chosen)


def check(specs: tuple[RouterSpec, ...], rng: random.Random) -> str:
    # few with many rows, as one input is as good as another
    rows = rng.choice((1, 1, 2, 3, 5, 8, 13, 40, 127, 128, 129, rng.randint(1, 300)))
    spec, chosen = rng.choice(specs), CODECS[rng.choice(("enum", "enum", "enum-ordered"))]
    size = chosen.size(rows, spec)
    if rng.random() < 0.3:
        data, kind = rng.randbytes(size), "random"
    else:
        data, kind = _nearly_valid(chosen, spec, rows, rng), "near"
    expect(len(data) == size, f"{len(data)} bytes packed, expected {size}")
    found = _both(chosen, spec, data, rows)
    if found is None:
        return f"refused +{kind}-refused"
    ascending = np.sort(found, axis=1).astype(np.int64)
    expect(bool((ascending[:, 1:] > ascending[:, :-1]).all()), "an expert twice in a row")
    expect(bool((ascending[:, -1] < spec.num_experts).all()), "an expert that there is not")
    if not chosen.keeps_order:
        expect(np.array_equal(ascending, found), "not ascending")
    expect(_encode_both(chosen, spec, found) == [data] * 2, "other bytes for the same sets")
    return f"accepted +{kind}-accepted"


@cache
def _spec(experts: int, top_k: int) -> RouterSpec:
    return RouterSpec(experts, top_k, (0,), 1)


@contextmanager
def _coded_by(use: ModuleType | None) -> Iterator[None]:
    """Code with the kernels, or with numpy for None."""
    before = codec._kernels
    codec._kernels = lambda values: use
    try:
        yield
    finally:
        codec._kernels = before


def _encode_both(chosen: ChunkCodec, spec: RouterSpec, ids: np.ndarray) -> list[bytes]:
    found = []
    for use in (None, kernels):
        out = np.zeros(chosen.size(len(ids), spec), np.uint8)
        with _coded_by(use):
            chosen.encode(ids, spec, out)
        found.append(out.tobytes())
    return found


def _both(chosen: ChunkCodec, spec: RouterSpec, data: bytes, rows: int) -> np.ndarray | None:
    """What numpy and the kernels make of it, which is the same; None if they refuse it."""
    found = []
    for use in (None, kernels):
        # into a part of something larger, as records are read
        whole = np.full((rows + 2, 3, spec.top_k), 7, spec.dtype)
        with _coded_by(use):
            refused = _refused(chosen, spec, data, whole[1:-1, 1])
        ids = whole[1:-1, 1].copy()
        whole[1:-1, 1] = 7
        expect(bool((whole == 7).all()), "written beyond the array")
        found.append((refused, ids))
    (refused, ids), (also_refused, same) = found
    expect(refused == also_refused, f"numpy: {refused}; kernels: {also_refused}")
    if refused:
        return None
    expect(np.array_equal(ids, same), "numpy and kernels read other sets")
    return ids


def _refused(chosen: ChunkCodec, spec: RouterSpec, data: bytes, out: np.ndarray) -> bool:
    try:
        chosen.decode(np.frombuffer(data, np.uint8), spec, out)
    except FormatError:
        return True
    return False


def _nearly_valid(chosen: ChunkCodec, spec: RouterSpec, rows: int, rng: random.Random) -> bytes:
    """Ranks at and around their limits, packed; some with bits changed."""
    sets = SetCode.of(spec.num_experts, spec.top_k)
    data = _pack(sets.packing, rows, rng)
    if chosen.keeps_order:
        data += _pack(OrderCode.of(spec.top_k).packing, rows, rng)
    changed = bytearray(data)
    for _ in range(rng.choice((0, 0, 0, 1, 2, 9)) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    if changed and rng.random() < 0.1:
        changed[-1] |= 128  # padding, mostly
    return bytes(changed)


def _pack(packing: Packing, rows: int, rng: random.Random) -> bytes:
    limit = packing.limit
    ranks = [rng.randrange(limit) for _ in range(rows)]
    if rng.random() < 0.4:
        edge = (0, 1, limit // 2, limit - 1, limit - 1, limit, limit + 1, limit + 255)
        for _ in range(rng.choice((1, 3))):
            ranks[rng.randrange(rows)] = rng.choice(edge) % (1 << 64 * packing.limbs)
    dtype = np.uint64 if packing.limbs == 1 else object
    return packing.pack(np.array(ranks, dtype))
