"""Shards cut at every byte: what is whole before the cut is read, and nothing else.

That is what a writer leaves that was killed within a write, and what a reader sees while one is at
work.
"""

from __future__ import annotations

import random
import warnings

from r3 import FormatError, TornShardWarning
from r3.storage import ShardReader, ShardWriter

from .campaign import Report, run_inputs, scratch
from .traces import SPECS, Shard, expect, make_shard, make_trace, read_all, read_torn


def shard() -> Shard:
    return make_shard(SPECS[0], 50, flushes=(3,))


def cuts() -> int:
    """How many inputs there are: each length, whole file included."""
    return len(shard().data) + 1


def run(seed: int, inputs: range) -> Report:
    """Input i is the shard cut to i bytes; it does not depend on the seed."""
    lengths = iter(inputs)
    return run_inputs(seed, inputs, lambda rng: check(next(lengths), rng))


def check(length: int, rng: random.Random) -> str:
    made, path = shard(), scratch() / "cut.r3"
    path.write_bytes(made.data[:length])
    if length < made.ends[0]:
        return _no_header(length)
    whole = made.content[: sum(end <= length for end in made.records)]
    torn = length not in made.ends
    found, said = read_torn(path)
    expect(found == whole, f"read {found}, expected {whole}")
    expect((said is not None) == torn, f"torn is {said!r}, expected it to be {torn}")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer = ShardWriter(path, made.spec)
    warned = any(w.category is TornShardWarning for w in caught)
    expect(warned == torn, f"the writer warned: {warned}, expected {torn}")
    expect(len(writer) == len(whole), f"the writer has {len(writer)} records")
    more = length % 2
    with writer:
        for i, trace in enumerate(made.traces[: len(whole)]):
            expect(writer.append(trace) == i, f"record {i} is not known any more")
        if more:
            writer.append(make_trace(made.spec, 999999, 9))
    found = read_all(path)
    expect(len(found) == len(whole) + more, f"{len(found)} records after resuming")
    expect(found[: len(whole)] == whole, f"read {found} after resuming, expected {whole}")
    return "torn" if torn else "whole"


def _no_header(length: int) -> str:
    made, path = shard(), scratch() / "cut.r3"
    for open_it in (lambda: ShardReader(path), lambda: ShardWriter(path, made.spec)):
        try:
            open_it().close()
        except FormatError:
            continue
        # a file of no bytes counts as new
        expect(length == 0 and read_all(path) == [], "opened without a header")
    return "refused"
