"""Packed rows and the slot store, against plain Python: what goes in comes out, or is missing."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import RouterSpec, TraceError
from r3.engine_hooks.rows import MAX_WEIGHT_VERSION, SlotStore, pack, stamp, unpack

SPECS = [(16, 4, 3), (8, 1, 2), (256, 8, 2), (300, 1, 2), (65536, 64, 1)]  # experts, top_k, layers


def spec_of(experts: int, top_k: int, layers: int) -> RouterSpec:
    return RouterSpec(experts, top_k, tuple(range(layers)), layers)


@given(
    shape=st.sampled_from(SPECS),
    rows=st.integers(0, 5),
    version=st.integers(0, MAX_WEIGHT_VERSION),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_packed_rows_round_trip(shape, rows, version, seed):
    spec = spec_of(*shape)
    size = (rows, len(spec.moe_layers), spec.top_k)
    ids = np.random.default_rng(seed).integers(0, spec.num_experts, size)
    found, versions = unpack(pack(ids, version, spec), spec)
    assert (found == ids).all()
    assert found.shape == ids.shape
    assert versions.tolist() == [version] * rows


def test_what_is_not_packed_rows_is_refused():
    spec = spec_of(16, 4, 3)
    rows = pack(np.zeros((2, 3, 4), int), 0, spec)
    for wrong in (rows[:, 0], rows[:, :, :3], rows.astype(np.int16), rows[..., :2]):
        with pytest.raises(TraceError, match="packed rows have shape"):
            unpack(wrong, spec)
    for version in (-1, MAX_WEIGHT_VERSION + 1):
        with pytest.raises(TraceError, match=f"weight version {version}"):
            stamp(version, spec)


@pytest.mark.parametrize("seed", range(6))
def test_the_store_against_a_dictionary(seed):
    """Blocks dealt anew, copied, and written, over more passes than are scattered at once."""
    rng, blocks, block_size = random.Random(seed), 12, 4
    spec = spec_of(*SPECS[seed % len(SPECS)])
    store, known = SlotStore(blocks, block_size, spec), {}
    for number in range(300):
        dealt = rng.sample(range(blocks), rng.randrange(3))
        copies = [tuple(rng.sample(range(blocks), 2))] if rng.random() < 0.1 else []
        store.next_pass(dealt, copies)
        for block in dealt:
            for slot in range(block * block_size, (block + 1) * block_size):
                known.pop(slot, None)
        for source, target in copies:
            for i in range(block_size):
                value = known.get(source * block_size + i)
                known.pop(target * block_size + i, None)
                if value is not None:
                    known[target * block_size + i] = value
        slots = [rng.randrange(blocks * block_size) for _ in range(rng.randrange(5))]
        size = (len(slots), len(spec.moe_layers), spec.top_k)
        ids = np.random.default_rng(number).integers(0, spec.num_experts, size)
        store.write(np.array(slots, np.int64), pack(ids, number, spec))
        known.update(zip(slots, [(i, number) for i in ids], strict=True))
        if rng.random() < 0.1:
            table = np.array(rng.sample(range(blocks), 3), np.int64)
            start = rng.randrange(6)
            found, versions = unpack(store.read(table, start, 3 * block_size), spec)
            for i, position in enumerate(range(start, 3 * block_size)):
                slot = int(table[position // block_size]) * block_size + position % block_size
                expected, version = known.get(slot, (-1, -1))
                assert versions[i] == version
                assert (found[i] == expected).all()
