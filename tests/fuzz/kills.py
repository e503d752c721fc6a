"""Writers that are killed (SIGKILL) at a random moment, again and again on the same file.

What `append` returned for must be there afterwards, once, as it was; the next writer must go on.
Some writers have several threads, some wait for the disk, some write big records, and some hand
their bytes to the system in small pieces, as a busy system may do with any write.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from r3 import FormatError, RouterSpec, RoutingTrace, TornShardWarning
from r3.storage import ShardWriter

from .campaign import Report, run_inputs, scratch
from .traces import SPECS, expect, make_ids, make_trace, read_all, read_torn

Write = Callable[[int, Sequence[memoryview]], int]


def run(seed: int, inputs: range) -> Report:
    # a child that takes longer is killed all the same, so nothing can hang but reading
    return run_inputs(seed, inputs, check, seconds=30)


@cache
def traces(spec: RouterSpec, big: bool) -> tuple[RoutingTrace, ...]:
    """What a child appends: groups of four with the same prompt, and single ones."""
    made = []
    for group in range(4 if big else 30):
        whole = make_trace(spec, 10_000 + group, 160)
        prompt = whole.token_ids, make_ids(spec, 160, np.random.default_rng(group))
        for member in range(5):
            made.append(
                make_trace(
                    spec,
                    20_000 + 10 * group + member + 500_000 * big,
                    180 + 5 * member,
                    prompt=prompt if member else None,
                    missing=0.1 * (member == 3),
                    more=member == 2,
                    payload=3 << 20 if big and member == 1 else 0,
                )
            )
    for trace in made:
        trace.digest  # noqa: B018  # computed and kept, before children are forked
    return tuple(made)


def check(rng: random.Random) -> str:
    """One file, whose writer is killed; with some probability the next one on it too."""
    spec, big = rng.choice(SPECS[:3]), rng.random() < 0.25
    path = scratch() / "killed.r3"
    path.unlink(missing_ok=True)
    known = {str(t.rollout_id): t.digest for t in traces(spec, big)}
    acknowledged: dict[str, str] = {}
    kills, torn = 0, 0
    while True:
        acknowledged |= _kill_one(path, spec, big, rng)
        kills += 1
        state = _inspect(path, acknowledged, known)
        torn += state == "torn"
        if rng.random() < 0.6:
            break
    words = [state, *["+kills"] * kills, *["+torn-by-kills"] * torn]
    words += ["+acknowledged"] * len(acknowledged)
    if state == "empty":  # killed before there was a header: a new file is all that can be made
        path.unlink(missing_ok=True)
    _go_on(path, spec, big, acknowledged, known, rng)
    return " ".join(words)


def _kill_one(path: Path, spec: RouterSpec, big: bool, rng: random.Random) -> dict[str, str]:
    """Let a child append until it is killed; what it acknowledged, by rollout id."""
    receive, send = os.pipe()
    delay, seed = rng.expovariate(1 / 0.06), rng.random()
    if (child := os.fork()) == 0:
        try:
            os.close(receive)
            _append(path, spec, big, random.Random(seed), send)
        finally:
            os._exit(1)
    os.close(send)
    time.sleep(min(delay, 0.6))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(receive, "rb") as pipe:
        lines = pipe.read().decode().splitlines()
    errors = [line for line in lines if line.startswith("error")]
    expect(not errors, f"the writer failed: {errors[:1]}")
    expect(os.WIFSIGNALED(status), f"the writer ended by itself: status {status}")
    return dict(line.split() for line in lines)


def _append(path: Path, spec: RouterSpec, big: bool, rng: random.Random, pipe: int) -> None:
    """What the child does: append, in one or several threads, and say so."""
    if rng.random() < 0.6:
        os.writev = _in_pieces(rng, os.writev)  # type: ignore[assignment]
    left = list(traces(spec, big))
    rng.shuffle(left)
    flush_every = rng.choice([1, 5, 1000])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TornShardWarning)
            try:
                writer = ShardWriter(
                    path, spec, durable=rng.random() < 0.5, keep_order=rng.random() < 0.3
                )
            except FormatError:
                if path.stat().st_size >= 200:  # else its header was cut short by the last kill
                    raise
                path.unlink()
                writer = ShardWriter(path, spec)

        def work() -> None:
            try:
                for i in range(10**9):
                    try:
                        trace = left.pop()
                    except IndexError:
                        break
                    writer.append(trace)
                    os.write(pipe, f"{trace.rollout_id} {trace.digest}\n".encode())
                    if i % flush_every == 0:
                        writer.flush()
            except BaseException as e:
                os.write(pipe, f"error {e!r}\n".encode())

        threads = [threading.Thread(target=work) for _ in range(rng.choice([1, 1, 3]))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if rng.random() < 0.5:
            writer.close()
    except BaseException as e:
        os.write(pipe, f"error {e!r}\n".encode())
    time.sleep(60)


def _in_pieces(rng: random.Random, write: Write) -> Write:
    """writev that takes a part of what it is given, and its time."""

    def writev(file: int, pieces: Sequence[memoryview]) -> int:
        data = b"".join(pieces)
        time.sleep(rng.choice([0, 0, 0.002]))
        return write(file, [memoryview(data)[: rng.randint(1, max(64, len(data) // 2))]])

    return writev


def _inspect(path: Path, acknowledged: dict[str, str], known: dict[str, str]) -> str:
    """Read what was left: all that was acknowledged, once, and nothing that was not appended."""
    try:
        found, torn = read_torn(path)
    except FormatError:
        # only a file whose header is not there may be refused
        expect(not acknowledged and (not path.exists() or path.stat().st_size < 200), "refused")
        return "empty"
    names = dict(found)
    expect(len(names) == len(found), "a rollout is there twice")
    for name, digest in acknowledged.items():
        expect(names.get(name) == digest, f"{name} was acknowledged and is {names.get(name)}")
    expect(names.items() <= known.items(), "a record that nobody appended")
    return "whole" if torn is None else "torn"


def _go_on(
    path: Path,
    spec: RouterSpec,
    big: bool,
    acknowledged: dict[str, str],
    known: dict[str, str],
    rng: random.Random,
) -> None:
    """A new writer resumes and appends all traces; those that were there are not stored again."""
    before: list[tuple[str, str]] = []
    with suppress(FormatError, FileNotFoundError):
        before, _ = read_torn(path)
    expect(acknowledged.keys() <= {name for name, _ in before}, "acknowledged records are gone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornShardWarning)
        writer = ShardWriter(path, spec, durable=rng.random() < 0.5)
    with writer:
        expect(len(writer) == len(before), f"{len(writer)} records, a reader had {len(before)}")
        for trace in traces(spec, big):
            writer.append(trace)
    found = read_all(path)
    expect(found[: len(before)] == before, "the records are not where they were")
    expect(len(found) == len(known) and dict(found) == known, "not all traces, each once")
