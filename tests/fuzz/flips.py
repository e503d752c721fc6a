"""Damage to whole shards: single bits, and stretches changed, zeroed, moved, put in or taken out.

All of it has to be noticed, by FormatError or by TornShardWarning. Two kinds of damage leave a
file that is as good as before: to an index that a later one has replaced, which `verify` notices,
and the loss of a tail that ends where a record or an index ends. Then the content must be what it
was, or its beginning.
"""

from __future__ import annotations

import random
from itertools import pairwise

from r3 import FormatError, TornShardWarning
from r3.storage import verify

from .campaign import Report, run_inputs, scratch
from .traces import Shard, all_shards, expect, read_all


def run_bits(seed: int, inputs: range) -> Report:
    return run_inputs(seed, inputs, check_bit)


def run_bytes(seed: int, inputs: range) -> Report:
    return run_inputs(seed, inputs, check_bytes)


def check_bit(rng: random.Random) -> str:
    shard = rng.choice(all_shards())
    data = bytearray(shard.data)
    at = rng.randrange(len(data))
    if rng.random() < 0.3:  # where there is most to get wrong: headers, frames, indexes
        at = min(max(0, rng.choice(shard.ends) + rng.randrange(-60, 60)), len(data) - 1)
    data[at] ^= 1 << rng.randrange(8)
    return _read(shard, bytes(data))


def check_bytes(rng: random.Random) -> str:
    shard = rng.choice(all_shards())
    data, size = bytearray(shard.data), rng.randint(2, 64)
    at = rng.randrange(len(data) - size)
    other = rng.randrange(len(data) - size)
    match rng.randrange(7):
        case 0:
            data[at : at + size] = rng.randbytes(size)
        case 1:
            data[at : at + size] = bytes(size)
        case 2:
            data[at : at + size] = data[other : other + size]
        case 3:
            both = data[at : at + size], data[other : other + size]
            data[other : other + size], data[at : at + size] = both
        case 4:
            data[at:at] = rng.choice([rng.randbytes(size), data[other : other + size]])
        case 5:
            del data[at : at + size]
        case 6:  # a whole record or index put in the place of another, or put in twice
            begin, end = rng.choice(list(pairwise(shard.ends)))
            start, stop = rng.choice(list(pairwise(shard.ends)))
            data[start : rng.choice([start, stop])] = shard.data[begin:end]
    return _read(shard, bytes(data))


def _read(shard: Shard, data: bytes) -> str:
    if data == shard.data:
        return "unchanged"
    path = scratch() / "damaged.r3"
    path.write_bytes(data)
    try:
        found = read_all(path)
    except FormatError:
        return "refused"
    except TornShardWarning:
        return "torn"
    if data in (shard.data[:end] for end in shard.ends):
        expect(found == shard.content[: len(found)], "not the beginning of what was there")
        return "shorter"
    changed = [i for i, (a, b) in enumerate(zip(data, shard.data, strict=False)) if a != b]
    expect(
        len(data) == len(shard.data) and all(map(replaced(shard).__contains__, changed)),
        f"not noticed: {len(data)} bytes for {len(shard.data)}, first other byte at {changed[:1]}",
    )
    expect(found == shard.content, "other content")
    expect(not verify(path).ok, "not noticed by `verify` either")
    return "in-replaced-index"


def replaced(shard: Shard) -> set[int]:
    """The bytes of indexes that are part of no chain any more: all but the last, where all records
    fit one."""
    indexes = [(a, b) for a, b in pairwise(shard.ends)]
    indexes = [(a, b) for a, b in indexes if b not in shard.records]
    live = _chain(shard, indexes)
    return {i for a, b in indexes if a not in live for i in range(a, b)}


def _chain(shard: Shard, indexes: list[tuple[int, int]]) -> set[int]:
    live, at = set(), indexes[-1][0]
    while True:
        live.add(at)
        head = shard.data[at + 16 : at + 40]
        before, first = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:16], "little")
        if not first:
            return live
        at = before
