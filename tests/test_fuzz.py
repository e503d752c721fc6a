"""A sample of every campaign of tests/fuzz, and the least case of each bug that they found."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fuzz import forge, runner, traces
from fuzz.campaign import Report
from r3 import TornShardWarning
from r3.storage import ShardReader, ShardWriter
from r3.storage.frames import ENTRY, INDEX, make_entry, read_file_header, scan

# inputs of each campaign
SAMPLES = {
    "kills": 3,
    "cuts": 120,
    "power": 150,
    "bits": 400,
    "bytes": 200,
    "records": 1500,
    "headers": 500,
    "indexes": 500,
    "chunks": 500,
    "files": 60,
}


def passed(report: Report) -> None:
    assert not report.findings, "\n".join(report.findings[:3])
    assert report.inputs


SLOW = ("power", "files", "kills", "bits", "cuts", "bytes")  # some seconds each


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in runner.campaigns()],
)
def test_sample(name: str) -> None:
    campaign = runner.campaigns()[name]
    passed(runner.run_campaign(campaign, 0, SAMPLES[name] / campaign.inputs, processes=1))


@pytest.mark.slow
@pytest.mark.full
def test_kernels_stay_within_bounds() -> None:
    passed(runner.run_checked(seed=0, scale=0.05))


@pytest.mark.parametrize("damage", ["markers", "indexes"])
def test_damage_is_gone_through_in_proportion_to_its_size(damage: str) -> None:
    """Each of many false markers made the search for the other marker go to the end of the file,
    and each of many indexes in each other was read to its end: minutes for some megabytes."""
    shard = traces.make_shard(traces.SPECS[0], 0)
    data, size, work = bytearray(shard.data), 1 << 16, 0
    header = read_file_header(lambda at, n: bytes(data[at : at + n]), len(data))
    if damage == "markers":
        data += b"R3rcR3rc" * 1000
    while damage == "indexes" and len(data) < len(shard.data) + size // 2:
        left = len(shard.data) + size - len(data) - 16
        data += header.frame(INDEX, len(data), left - left % 40)
    data += bytes(len(shard.data) + size - len(data))

    def find(marker: bytes, start: int, end: int) -> int:
        nonlocal work
        place = data.find(marker, start, end)
        work += (place if place >= 0 else end) - start
        return place

    def read(at: int, n: int) -> bytes:
        nonlocal work
        work += n
        return bytes(data[at : at + n])

    found = scan(header, read, find, header.end, len(data))
    assert [(start, end) for start, end, _ in found.gaps] == [(len(shard.data), len(data))]
    assert len(found.records) == len(shard.records)
    assert work <= 4 * len(data)


def test_writer_takes_no_memory_for_a_record_that_is_not_there(tmp_path: Path) -> None:
    """An index named the frame of a record of a terabyte, and the writer that went through it asked
    for that much; a reader compared it with the file."""
    shard = traces.make_shard(traces.SPECS[1], 2)
    image = forge.take_apart(shard)
    huge = forge.take_record(shard.data[shard.ends[0] + 16 : shard.ends[1]])
    name = huge.values["rollout_id"] = "huge/0/0/0/0"
    column = {"name": "huge", "align": "rollout", "version": 1, "dtype": "u1", "codec": "raw"}
    huge.values["columns"].append(column | {"shape": [1 << 40], "bytes": 1 << 40, "crc32": 0})
    huge.frame, huge.extra, huge.seal = 1, 1 << 40, False
    entries = np.frombuffer(make_entry(huge.frame, name, huge.values["digest"]), ENTRY)
    image.parts += [huge, forge.Index(0, 0, 0, entries, 2)]
    path = tmp_path / "huge.r3"
    path.write_bytes(image.build())
    tracemalloc.start()
    with pytest.warns(TornShardWarning, match="expected a whole record"):
        ShardWriter(path, shard.spec).close()
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_slice_behind_the_last_token_is_empty(tmp_path: Path) -> None:
    """It was refused as rows that are not there."""
    shard = traces.make_shard(traces.SPECS[1], 2)
    path = tmp_path / "whole.r3"
    path.write_bytes(shard.data)
    with ShardReader(path) as reader:
        for i, trace in enumerate(shard.traces):
            n = trace.num_tokens
            for tokens in (slice(n, n), slice(n + 5, n + 9), slice(n - 1, n)):
                part = reader.slice(i, tokens=tokens)
                assert len(part.token_ids) == len(part.valid) == len(part.routed_experts)
                assert len(part.valid) == len(range(n)[tokens])
                assert not part.valid.any()
