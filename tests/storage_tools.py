"""Shard files for tests: traces to put in, files built by hand, the example of docs/format.md.

What stands here is written from docs/format.md, not with the code that it tests.
"""

from __future__ import annotations

import struct
import tempfile
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import numpy as np
import pytest

import r3
from r3 import Column, FormatError, Provenance, RolloutId, RouterSpec, RoutingTrace
from r3.columns import text_column
from r3.storage import RoutingSlice, ShardReader, ShardWriter

ROOT = Path(__file__).resolve().parent.parent
MAGIC = bytes.fromhex("89 52 33 0d 0a 1a 0a 00")
SALT = bytes(range(8))
SPECS = (
    RouterSpec(60, 4, (1, 2, 3), 4),
    RouterSpec(8, 2, (0, 1), 2),
    RouterSpec(300, 5, (0, 2, 3), 4, "sigmoid", 4, 2),
)
SPEC = SPECS[0]


def random_ids(rng: np.random.Generator, spec: RouterSpec, rows: int) -> np.ndarray:
    """Random ids [rows, MoE layers, top_k], different in each row and layer, in any order."""
    shape = (rows, len(spec.moe_layers), spec.top_k)
    gaps = rng.integers(0, spec.num_experts - spec.top_k + 1, shape)
    ids = np.sort(gaps, axis=-1) + np.arange(spec.top_k)
    return rng.permuted(ids, axis=-1).astype(spec.dtype)


def make_trace(
    spec: RouterSpec = SPEC, n: int = 9, seed: int = 0, missing: int = 0, **changes: Any
) -> RoutingTrace:
    """A random trace of n tokens, rollout run/<seed>, its first rows missing."""
    rng = np.random.default_rng(seed)
    valid = np.ones(n - 1, bool)
    valid[:missing] = False
    values = {
        "spec": spec,
        "token_ids": rng.integers(0, 999, n),
        "routed_experts": random_ids(rng, spec, n - 1),
        "prompt_len": min(3, n),
        "valid": valid,
        "rollout_id": RolloutId("run", str(seed)),
    }
    return RoutingTrace.build(**(values | changes))


def change_cells(rng: np.random.Generator, ids: np.ndarray, spec: RouterSpec, part: float):
    """A copy of ids in which that part of the cells holds other experts."""
    cells = rng.random(ids.shape[:2]) < part
    return np.where(cells[..., None], random_ids(rng, spec, len(ids)), ids)


def continued(
    base: RoutingTrace, rows: int, n: int, seed: int, differ: float = 0.0, **changes: object
) -> RoutingTrace:
    """A trace of n tokens whose first `rows` rows and tokens are those of base."""
    rng = np.random.default_rng([seed, 7])
    spec, rows = base.spec, min(rows, base.num_rows, n - 1)
    tokens = rng.integers(0, 999, n)
    tokens[: rows + 1] = base.token_ids[: rows + 1]
    if rows < base.num_rows and rows + 1 < n:
        tokens[rows + 1] = base.token_ids[rows + 1] + 1
    ids = random_ids(rng, spec, n - 1)
    there = np.flatnonzero(base.valid[:rows])
    ids[there] = change_cells(rng, base.routed_experts[there], spec, differ)
    values = {"token_ids": tokens, "routed_experts": ids}
    return make_trace(spec, n, seed, **(values | changes))


def full_trace(spec: RouterSpec = SPEC, n: int = 40, seed: int = 0, **changes: Any) -> RoutingTrace:
    """A trace with every column that is known, two that are not, and provenance."""
    rng = np.random.default_rng([seed, 1])
    tokens, prompt = rng.integers(0, 999, n), n // 3
    valid = rng.random(n - 1) < 0.8
    segments = np.where(np.arange(n) < prompt, 0, rng.integers(1, 3, n)).astype(np.uint8)
    sampled = segments == 1
    counts = np.where(sampled, rng.integers(0, 4, n), 0).astype(np.uint32)
    kept = [np.arange(c) + t for t, c in zip(tokens, counts, strict=True)]
    columns = {
        "segments": Column(segments, "token"),
        "turns": Column(np.sort(rng.integers(0, 5, n)).astype(np.uint16), "token"),
        "rewards": Column(np.r_[np.full(n - 1, np.nan), -0.5].astype(np.float32), "token"),
        "kept_counts": Column(counts, "token"),
        "kept_ids": Column(np.concatenate(kept).astype(np.int32), "rollout"),
        "tags": text_column(["math", "größe", ""]),
        "entropy": Column(rng.random(n).astype(np.float16), "token", 3),
        "bias": Column(rng.random((2, 3)), "rollout", 2),
    }
    values = {
        "token_ids": tokens,
        "prompt_len": prompt,
        "valid": valid,
        "logprobs": np.where(sampled, -rng.random(n), np.nan),
        "weight_versions": rng.integers(0, 2**40, n - 1),
        "provenance": Provenance(engine="vllm", sampling={"top_p": 0.5}, extra={"a": [1, None]}),
        "extra": columns,
    }
    return make_trace(spec, n, seed, **(values | changes))


def as_stored(trace: RoutingTrace, keep_order: bool = False) -> np.ndarray:
    """The ids of a trace as a file gives them back: ascending, unless it keeps the order."""
    ids = trace.routed_experts
    return ids if keep_order else np.sort(ids, axis=-1)


def assert_same(found: RoutingTrace, expected: RoutingTrace, keep_order: bool = False) -> None:
    """All that was appended came back, bit by bit."""
    assert (found.spec, found.prompt_len) == (expected.spec, expected.prompt_len)
    assert (found.rollout_id, found.digest) == (expected.rollout_id, expected.digest)
    assert found.provenance == expected.provenance
    assert list(found.columns) == list(expected.columns)
    for name, column in expected.columns.items():
        other = found.columns[name]
        assert (other.align, other.version) == (column.align, column.version)
        assert other.data.dtype == column.data.dtype.newbyteorder("=")
        data = as_stored(expected, keep_order) if name == "routed_experts" else column.data
        np.testing.assert_array_equal(other.data, data)
        assert not other.data.flags.writeable
        assert other.data.flags.aligned


def write(path: Path, traces: Iterable[RoutingTrace], **options: Any) -> Path:
    """A closed file of these traces."""
    traces = list(traces)
    with ShardWriter(path, traces[0].spec, **options) as writer:
        for trace in traces:
            writer.append(trace)
    return path


def salted(salt: bytes = SALT) -> Any:
    """Within it, new files have that salt instead of a random one."""
    return mock.patch("r3.storage.writer.os.urandom", lambda size: salt[:size])


def read_all(path: Path) -> list[RoutingTrace]:
    with warnings.catch_warnings():  # hostile content may well be suspicious
        warnings.simplefilter("ignore", r3.SuspiciousRoutingWarning)
        with ShardReader(path) as reader:
            assert len(reader.rollout_ids) == len(reader)
            return list(reader)


def refused(path: Path, *words: str) -> None:
    """Reading fails with one FormatError that names the path and says all the words."""
    with pytest.raises(FormatError) as caught:
        read_all(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


# --- slices


def expected_slice(
    trace: RoutingTrace, layers: tuple[int, ...], tokens: slice, keep_order: bool = False
) -> RoutingSlice:
    """The slice, cut out of the whole trace."""
    ids = as_stored(trace, keep_order)
    ids = np.concatenate([ids, np.zeros_like(ids, shape=(1, *ids.shape[1:]))])
    places = [trace.spec.moe_layers.index(layer) for layer in layers]
    return RoutingSlice(
        rollout_id=trace.rollout_id,
        layers=layers,
        start=tokens.indices(trace.num_tokens)[0],
        token_ids=trace.token_ids[tokens],
        routed_experts=ids[tokens][:, places],
        valid=np.append(trace.valid, False)[tokens],
    )


def assert_slice(found: RoutingSlice, expected: RoutingSlice) -> None:
    for name in ("rollout_id", "layers", "start"):
        assert getattr(found, name) == getattr(expected, name)
    for name in ("token_ids", "routed_experts", "valid"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


# --- files built by hand


def packed(values: Any) -> bytes:
    """A header with a right length and checksum, whatever is in it."""
    data = values if isinstance(values, bytes) else msgpack.packb(values)
    length = len(data).to_bytes(4, "little")
    return length + zlib.crc32(length + data).to_bytes(4, "little") + data


def framed(content: bytes, at: int, size: int | None = None, marker: bytes = b"R3rc") -> bytes:
    """Content with the frame that it has at byte `at` of a file with SALT."""
    head = marker + (len(content) if size is None else size).to_bytes(8, "little")
    return head + zlib.crc32(SALT + at.to_bytes(8, "little") + head).to_bytes(4, "little") + content


def file_header(**changes: Any) -> bytes:
    values = {"version": [2, 0], "spec": SPEC.to_dict(), "salt": SALT.hex()} | changes
    return MAGIC + packed(values)


def file_bytes(*records: bytes, **changes: Any) -> bytes:
    """A file of these records, without an index."""
    data = file_header(**changes)
    for record in records:
        data += framed(record, len(data))
    return data


def index_bytes(
    at: int,
    entries: list[tuple[int, bytes, bytes]],
    before: int = 0,
    first: int = 0,
    synced: int = 0,
) -> bytes:
    """An index, to stand at byte `at`, of (frame, key, digest) of each record."""
    body = struct.pack("<QQQ", before, first, synced)
    body += b"".join(struct.pack("<Q16s16s", *entry) for entry in entries)
    frame = framed(b"", at, len(body) + 16, b"R3ix")
    return frame + body + struct.pack("<IQ4s", zlib.crc32(SALT + frame + body), at, b"R3ie")


def split_file(data: bytes) -> tuple[dict[str, Any], list[tuple[int, bytes, bytes]]]:
    """The file header, and (offset, marker, content) of each frame of a whole file."""
    at = 8
    size = int.from_bytes(data[at : at + 4], "little")
    header = msgpack.unpackb(data[at + 8 : at + 8 + size])
    at += 8 + size
    frames = []
    while at < len(data):
        size = int.from_bytes(data[at + 4 : at + 12], "little")
        frames.append((at, data[at : at + 4], data[at + 16 : at + 16 + size]))
        at += 16 + size
    assert at == len(data)
    return header, frames


def split_record(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and payloads of a record."""
    end = 8 + int.from_bytes(content[:4], "little")
    return msgpack.unpackb(content[8:end]), content[end:]


def record_parts(*traces: RoutingTrace, **options: Any) -> list[tuple[dict[str, Any], bytes]]:
    """Header and payloads of the records that the writer makes of these traces."""
    with tempfile.TemporaryDirectory() as folder:
        data = write(Path(folder) / "a.r3", traces, **options).read_bytes()
    return [split_record(c) for _, marker, c in split_file(data)[1] if marker == b"R3rc"]


# --- the example on the page


def example_trace() -> RoutingTrace:
    return RoutingTrace.build(
        spec=RouterSpec(num_experts=8, top_k=2, moe_layers=(1, 2), num_layers=3),
        token_ids=[5, 6, 7],
        routed_experts=np.array([[[0, 1], [2, 7]], [[3, 1], [4, 5]]]),
        prompt_len=1,
        rollout_id=RolloutId("run"),
        provenance=Provenance(engine="vllm"),
    )


def example_file() -> bytes:
    """The file that docs/format.md shows."""
    with tempfile.TemporaryDirectory() as folder, salted():
        return write(Path(folder) / "a.r3", [example_trace()]).read_bytes()


def example_headers() -> tuple[dict[str, Any], dict[str, Any]]:
    """File header and record header of the example, as docs/format.md has them in JSON."""
    header, frames = split_file(example_file())
    return header, split_record(frames[0][2])[0]


def annotated(data: bytes) -> str:
    """Hex of a file, its parts named, as docs/format.md has it."""
    lines, at, moe_layers = [], 0, split_file(data)[0]["spec"]["moe_layers"]

    def part(size: int, what: str) -> None:
        nonlocal at
        for i in range(at, at + size, 16):
            row = data[i : min(i + 16, at + size)]
            lines.append(f"{i:04x}  {row.hex(' '):47}  {what if i == at else ''}".rstrip())
        at += size

    def number(size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    def header(what: str) -> None:
        size = number(4)
        part(4, f"{size} bytes of {what}")
        part(4, "CRC-32 of the length and these bytes")
        part(size, f"{what}, msgpack")

    part(8, "magic")
    header("file header")
    while at < len(data):
        kind = {b"R3rc": "record", b"R3ix": "index"}[data[at : at + 4]]
        part(4, f"marker of {'a record' if kind == 'record' else 'an index'}")
        size = number(8)
        part(8, f"{size} bytes of {kind}")
        part(4, "CRC-32 of salt, place, marker and length")
        start = at
        if kind == "record":
            header("record header")
            for column in split_record(data[start : start + size])[0]["columns"]:
                if column["name"] != "routed_experts":
                    part(column["bytes"], column["name"])
                    continue
                each = column["bytes"] // len(moe_layers)
                for layer in moe_layers:  # of one chunk each
                    part(each - 4, f"routed_experts, layer {layer}")
                    part(4, "CRC-32 of this chunk")
        else:
            part(8, "frame of the index before: none")
            part(8, f"{number(8)} records before")
            part(8, f"{number(8)} record on the disk before this was written")
            for i in range((size - 40) // 40):
                part(8, f"frame of record {i}")
                part(16, "key of its rollout id")
                part(16, "its digest")
            part(4, "CRC-32 of salt and index to here")
            part(8, "where this index has its marker")
            part(4, "marker of the end of an index")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import json

    print(annotated(example_file()))
    for values in example_headers():
        print(json.dumps(values), end="\n\n")
