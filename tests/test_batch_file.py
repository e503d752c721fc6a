"""Batches as safetensors files: round trips, parts of them, damage and hostile content."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import resource
import stat
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

import r3
from r3 import FormatError, RolloutId, RouterSpec, RoutingBatch, RoutingTrace, SpecError, TraceError
from r3.storage.batch_file import load_batch, save_batch

SMALL = RouterSpec(num_experts=8, top_k=2, moe_layers=(1, 2, 4), num_layers=5)
WIDE = RouterSpec(num_experts=300, top_k=5, moe_layers=(0, 3), num_layers=4)
ARRAYS = [f.name for f in dataclasses.fields(RoutingBatch) if f.name not in ("spec", "rollout_ids")]


def make_trace(
    n: int,
    spec: RouterSpec = SMALL,
    *,
    seed: int = 0,
    missing: float = 0.0,
    logprobs: bool = True,
    versions: bool = True,
    name: RolloutId | None = None,
) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    scores = rng.random((n - 1, len(spec.moe_layers), spec.num_experts))
    prompt_len = int(rng.integers(0, n + 1))
    return RoutingTrace.build(
        spec=spec,
        token_ids=rng.integers(0, 2**31, n),
        routed_experts=scores.argsort(axis=-1)[..., : spec.top_k],
        prompt_len=prompt_len,
        valid=rng.random(n - 1) >= missing,
        logprobs=-rng.random(n - prompt_len) if logprobs else None,
        weight_versions=rng.integers(0, 2**63, n - 1) if versions else None,
        rollout_id=name or RolloutId("run", sample=seed),
    )


def make_batch(*lengths: int, spec: RouterSpec = SMALL, **options: Any) -> RoutingBatch:
    return RoutingBatch.from_traces(
        make_trace(n, spec, seed=i, **options) for i, n in enumerate(lengths)
    )


def assert_equal(found: RoutingBatch, expected: RoutingBatch) -> None:
    assert (found.spec, found.rollout_ids) == (expected.spec, expected.rollout_ids)
    for name in ARRAYS:
        a, b = getattr(found, name), getattr(expected, name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), name
        assert a.flags.c_contiguous, name
        assert a.flags.writeable, name


def part_of(batch: RoutingBatch, layers: list[int], first: int, last: int) -> RoutingBatch:
    """By numpy: those layers of sequences first..last - 1."""
    start, stop = batch.cu_seqlens[first], batch.cu_seqlens[last]
    axis = [batch.spec.moe_layers.index(layer) for layer in layers]
    per_token = ("token_ids", "valid", "logprobs", "weight_versions")
    return RoutingBatch(
        spec=dataclasses.replace(batch.spec, moe_layers=tuple(layers)),
        rollout_ids=batch.rollout_ids[first:last],
        cu_seqlens=batch.cu_seqlens[first : last + 1] - start,
        prompt_lens=batch.prompt_lens[first:last],
        routed_experts=batch.routed_experts[start:stop][:, axis],
        **{name: getattr(batch, name)[start:stop] for name in per_token},
    )


def refused(path: Path, *words: str, error: type[Exception] = FormatError, **part: Any) -> None:
    """Loading fails with one message that names the path and says all the words."""
    with pytest.raises(error) as caught:
        load_batch(path, **part)
    assert type(caught.value) is error
    for word in (str(path), *words):
        assert word in str(caught.value)


# --- weight versions of a batch


def test_from_traces_packs_weight_versions() -> None:
    a = make_trace(4, seed=1, missing=0.5, versions=True)
    b = make_trace(3, seed=2, versions=False)
    assert 0 < a.valid.sum() < 3
    versions = RoutingBatch.from_traces([a, b]).weight_versions
    assert versions.dtype == np.int64
    assert versions.tolist() == [*a.weight_versions.tolist(), -1, -1, -1, -1]
    assert (versions[:3] != -1).tolist() == a.valid.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": np.array([0, 2, 4])}, "cu_seqlens is .* number of tokens, 5"),
        ({"cu_seqlens": np.array([0, 5, 5])}, "cu_seqlens is .*ascending"),
        ({"cu_seqlens": np.array([1, 2, 5])}, "cu_seqlens is .*ascending integers from 0"),
        ({"cu_seqlens": np.array([0, 5])}, r"cu_seqlens is int64 of shape \[2\], expected .*\[3\]"),
        ({"prompt_lens": np.array([3, 0])}, "prompt_lens: rollout run/0/0/0/0: 3, expected 0..2"),
        ({"prompt_lens": np.array([0, -1])}, "prompt_lens: rollout run/0/1/0/0: -1, expected 0..3"),
        ({"valid": np.ones(5, bool)}, "valid: rollout run/0/0/0/0: True at the last token"),
        ({"valid": np.zeros(5, bool)}, "row 0 is missing .* expected zeros"),
        ({"valid": np.ones(5, np.int8)}, "valid is int8"),
        ({"token_ids": np.array([0, 1, 2, -7, 4], np.int32)}, "rollout run/0/1/0/0: token 1: -7"),
        ({"routed_experts": np.zeros((5, 2, 2), np.uint8)}, r"expected uint8 .*\[5, 3, 2\]"),
        ({"routed_experts": np.zeros((5, 3, 2), np.uint8)}, "name one expert twice"),
        ({"routed_experts": np.full((5, 3, 2), 8, np.uint8)}, "run/0/0/0/0: row 0, layer 1: .* 8"),
        ({"logprobs": np.full(5, np.inf, np.float32)}, "logprobs: rollout run/0/0/0/0: token 0"),
        ({"weight_versions": np.full(5, 3)}, "weight_versions: rollout run/0/0/0/0: row 1"),
        ({"weight_versions": np.full(5, -2)}, "weight_versions: rollout run/0/0/0/0: row 0"),
        ({"rollout_ids": ()}, "cu_seqlens"),
    ],
    ids=str,
)
def test_batches_built_by_hand_are_checked(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    batch = make_batch(2, 3)
    batch.check()
    broken = dataclasses.replace(batch, **change)
    with pytest.raises(TraceError, match=message):
        broken.check()
    with pytest.raises(TraceError, match=message):
        save_batch(broken, tmp_path / "file")
    assert not list(tmp_path.iterdir())


# --- round trips


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_round_trip_and_parts(tmp_path: Path, data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from([SMALL, WIDE]))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    batch = RoutingBatch.from_traces(
        make_trace(
            n,
            spec,
            seed=data.draw(st.integers(0, 999)),
            missing=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
            logprobs=data.draw(st.booleans()),
            versions=data.draw(st.booleans()),
            name=RolloutId(data.draw(st.text(min_size=1, max_size=3)).replace("/", "-"), sample=i),
        )
        for i, n in enumerate(lengths)
    )
    path = tmp_path / "batch.safetensors"
    save_batch(batch, path)
    assert_equal(load_batch(path), batch)
    first = data.draw(st.integers(0, len(batch) - 1))
    last = data.draw(st.integers(first + 1, len(batch)))
    layers = data.draw(st.lists(st.sampled_from(spec.moe_layers), min_size=1, unique=True))
    part = part_of(batch, sorted(layers), first, last)
    for sequences in (slice(first, last), range(first, last)):
        assert_equal(load_batch(path, layers=iter(layers), sequences=sequences), part)
    # what was read can be written again
    again = tmp_path / "again"
    save_batch(part, again)
    assert_equal(load_batch(again), part)


def test_other_readers_of_safetensors_see_the_tensors(tmp_path: Path) -> None:
    batch = make_batch(4, 1, 7, missing=0.2)
    save_batch(batch, tmp_path / "file")
    tensors = load_file(tmp_path / "file")
    for j, layer in enumerate(SMALL.moe_layers):
        assert (tensors.pop(f"routed_experts.{layer}") == batch.routed_experts[:, j]).all()
    crc32 = tensors.pop("crc32")
    assert crc32[0, 2] == zlib.crc32(batch.token_ids[5:])
    assert crc32[6, 0] == zlib.crc32(batch.routed_experts[:4, 2].tobytes())
    assert set(tensors) == set(ARRAYS) - {"routed_experts"}
    for name, data in tensors.items():
        assert data.dtype == getattr(batch, name).dtype
        np.testing.assert_array_equal(data, getattr(batch, name))
    before = (tmp_path / "file").read_bytes()
    save_batch(batch, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == before


def test_arguments_that_ask_for_what_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    batch = make_batch(4, 2, 3)
    save_batch(batch, path)
    refused(path, "[0, 3]", "[1, 2, 4]", error=SpecError, layers=[0, 1, 3])
    refused(path, "[]", "[1, 2, 4]", error=SpecError, layers=[])
    for sequences in (range(0, 4), range(-1, 2), range(2, 2), slice(3, 9), slice(0, 3, 2)):
        refused(path, "0..2", error=IndexError, sequences=sequences)
    with pytest.raises(TypeError, match="expected a slice or a range"):
        load_batch(path, sequences=[0, 1])  # type: ignore[arg-type]
    # as for a list
    assert_equal(load_batch(path, sequences=slice(-2, 9)), part_of(batch, [1, 2, 4], 1, 3))
    assert load_batch(path, layers=np.array([4, 1, 4])).spec.moe_layers == (1, 4)


# --- what is read


def layout(path: Path) -> tuple[dict[str, Any], int]:
    """The header and where the data behind it starts."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), 8 + size


def test_parts_can_be_read_where_the_rest_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    batch = make_batch(4, 6, 3)
    save_batch(batch, path)
    header, base = layout(path)
    whole = path.read_bytes()
    data = bytearray(whole)
    for name, entry in header.items():  # all but layer 2 of the middle sequence
        if name in ("__metadata__", "cu_seqlens", "prompt_lens", "crc32"):
            continue
        start, stop = (base + offset for offset in entry["data_offsets"])
        item = (stop - start) // batch.num_tokens
        keep = (4, 10) if not name.startswith("routed") or name.endswith(".2") else (0, 0)
        for i in itertools.chain(range(keep[0] * item), range(keep[1] * item, stop - start)):
            data[start + i] ^= 0xFF
    path.write_bytes(data)
    found = load_batch(path, layers=[2], sequences=range(1, 2))
    assert_equal(found, part_of(batch, [2], 1, 2))
    refused(path, "routed_experts.1: rollout run/0/1/0/0", layers=[1], sequences=range(1, 2))
    refused(path, "token_ids: rollout run/0/0/0/0", layers=[2])


def touched(path: Path, monkeypatch: pytest.MonkeyPatch, **part: Any) -> int:
    """Bytes of the file that are in the memory of this process after loading, by the kernel."""
    sizes = []

    @contextmanager
    def measured(path: Path, framework: str) -> Iterator[Any]:
        with safe_open(path, framework=framework) as file:
            yield file
            lines = Path("/proc/self/smaps").read_text().splitlines()
            for i, line in enumerate(lines):
                if line.endswith(str(path)):
                    (rss,) = (x for x in lines[i + 1 : i + 9] if x.startswith("Rss:"))
                    sizes.append(int(rss.split()[1]) << 10)

    monkeypatch.setattr(safetensors, "safe_open", measured)
    load_batch(path, **part)
    monkeypatch.undo()
    (size,) = sizes
    return size


def test_a_part_of_the_file_is_read_for_a_part_of_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RouterSpec(num_experts=512, top_k=8, moe_layers=tuple(range(8)), num_layers=8)
    total, lengths = 1 << 18, [1 << 15] * 8
    valid = np.arange(total) % lengths[0] != lengths[0] - 1
    batch = RoutingBatch(
        spec=spec,
        rollout_ids=tuple(RolloutId("run", sample=i) for i in range(8)),
        cu_seqlens=np.cumsum([0, *lengths]),
        prompt_lens=np.zeros(8, np.int64),
        token_ids=np.zeros(total, np.int32),
        routed_experts=np.arange(8, dtype=np.uint16) * valid[:, None, None].repeat(8, 1),
        valid=valid,
        logprobs=np.full(total, np.nan, np.float32),
        weight_versions=np.full(total, -1),
    )
    path = tmp_path / "file"
    save_batch(batch, path)
    # What is written in one go the kernel keeps, and maps, in blocks of up to some megabytes, of
    # which a slice may need a corner only: written in small pieces, pages are mapped by themselves.
    data = path.read_bytes()
    path.unlink()
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(data), 1 << 14):
            file.write(data[start : start + (1 << 14)])
    layers, others = total * 8 * 8 * 2, total * (4 + 1 + 4 + 8)
    eighth = (layers + others) / 8
    around = 12 * (128 << 10)  # and those around, at both ends of what is read of each tensor
    assert touched(path, monkeypatch) >= layers + others
    assert layers / 8 < touched(path, monkeypatch, layers=[5]) < layers / 8 + others + around
    for i in range(8):
        assert eighth < touched(path, monkeypatch, sequences=range(i, i + 1)) < eighth + around
    both = touched(path, monkeypatch, layers=[5], sequences=slice(2, 3))
    assert layers / 64 < both < (layers / 8 + others) / 8 + around


# --- damage


@pytest.fixture(scope="module")
def tiny() -> RoutingBatch:
    spec = RouterSpec(num_experts=8, top_k=2, moe_layers=(1, 2), num_layers=3)
    return make_batch(3, 2, spec=spec, missing=0.3)


def test_every_flipped_bit_is_found(tiny: RoutingBatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_batch(tiny, path)
    with open(path, "r+b", buffering=0) as file:
        for at, byte in enumerate(path.read_bytes()):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), at)
                with pytest.raises(FormatError, match="file: "):
                    load_batch(path)
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert_equal(load_batch(path), tiny)


def test_every_truncation_is_found(tiny: RoutingBatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_batch(tiny, path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        refused(path)
    path.write_bytes(data + b"\0")
    refused(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    refused(tmp_path / "none", "No such file")
    refused(tmp_path, "a folder")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")
    (tmp_path / "shard").write_bytes(b"\x89R3\r\n\x1a\n\0" + bytes(99))
    refused(tmp_path / "shard")
    with pytest.raises(FormatError, match="not a regular file"):
        save_batch(make_batch(2), tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


# --- files made to deceive, checksums and all


def write_hostile(
    path: Path, edit: Callable[[dict[str, np.ndarray], dict[str, str]], None] = lambda t, m: None
) -> None:
    """A batch of two sequences, 3 and 2 tokens, whose tensors and metadata `edit` has changed."""
    save_batch(make_batch(3, 2), path)
    header, _ = layout(path)
    tensors, metadata = load_file(path), header["__metadata__"]
    edit(tensors, metadata)
    if "crc32" in tensors and tensors["crc32"].shape == (7, 2):
        names = ["token_ids", "valid", "logprobs", "weight_versions"]
        names += [f"routed_experts.{layer}" for layer in SMALL.moe_layers]
        for row, name in zip(tensors["crc32"], names, strict=True):
            if name in tensors:
                data = np.ascontiguousarray(tensors[name])
                row[:] = zlib.crc32(data[:3]), zlib.crc32(data[3:])
    for name in ("cu_seqlens", "prompt_lens", "crc32"):
        if name in tensors:
            metadata[f"crc32.{name}"] = f"{zlib.crc32(np.ascontiguousarray(tensors[name])):08x}"
    text = "".join(f"{k}\0{metadata[k]}\0" for k in sorted(metadata) if k != "crc32")
    metadata["crc32"] = f"{zlib.crc32(text.encode()):08x}"
    codes = {"bool": "BOOL", "float32": "F32", "float64": "F64"}
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, data in tensors.items():
        code = codes.get(data.dtype.name) or data.dtype.kind.upper() + str(8 * data.itemsize)
        entries[name] = {
            "dtype": code,
            "shape": data.shape,
            "data_offsets": [at, at + data.nbytes],
        }
        at += data.nbytes
    packed = json.dumps(entries).encode()
    pieces = (np.ascontiguousarray(data).tobytes() for data in tensors.values())
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + b"".join(pieces))


Edit = Callable[[dict[str, Any], dict[str, str]], None]


def put(name: str, *index: Any, to: Any) -> Edit:
    """Edit: set one element of a tensor, or the tensor as a whole."""

    def edit(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        if index:
            tensors[name] = tensors[name].copy()
            tensors[name][index] = to
        else:
            tensors[name] = to

    return edit


def say(name: str, value: str | None) -> Edit:
    """Edit: set or drop a text of the metadata."""

    def edit(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        metadata.pop(name, None)
        if value is not None:
            metadata[name] = value

    return edit


def say_spec(**changes: Any) -> Edit:
    return say("spec", json.dumps(SMALL.to_dict() | changes))


def drop(name: str) -> Edit:
    def edit(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        del tensors[name]

    return edit


ROLLOUTS = '["run/0/0/0/0", "run/0/1/0/0"]'


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (say("format", None), ["format None", "'r3-batch'"]),
        (say("format", "pt"), ["format 'pt'", "'r3-batch'"]),
        (say("version", "2"), ["version '2'", "'1'"]),
        (say("spec", None), ["metadata: 'spec' is missing"]),
        (say("spec", "{"), ["metadata:"]),
        (say("spec", "[" * 100_000), ["metadata:"]),
        (say("spec", "9" * 5000), ["metadata:"]),
        (say("spec", "[]"), ["spec is []"]),
        (say_spec(num_experts=1 << 40), ["at most 65536"]),
        (say_spec(num_experts=float("nan")), ["num_experts is nan"]),
        (say_spec(moe_layers=[1, 2, 3]), ["tensor routed_experts.3 is missing"]),
        (say_spec(moe_layers=[1, 2]), ["tensor 'routed_experts.4', expected none"]),
        (say_spec(moe_layers=[[1], {}]), ["moe_layers"]),
        (say_spec(top_k=3), ["tensor routed_experts.1 is U8 of shape [5, 2]", "[5, 3]"]),
        (say_spec(num_experts=257), ["is U8 of shape [5, 2], expected U16"]),
        (say_spec(later=1), ["no field 'later'"]),
        (say("rollout_ids", None), ["'rollout_ids' is missing"]),
        (say("rollout_ids", "[]"), ["rollout_ids is []"]),
        (say("rollout_ids", "[1, 2]"), ["rollout_ids is [1, 2]"]),
        (say("rollout_ids", '{"run/0/0/0/0": 1}'), ["rollout_ids is {"]),
        (say("rollout_ids", '["run"]'), ["rollout id 'run' is not of the form"]),
        (say("rollout_ids", ROLLOUTS.replace("/1/", "/01/")), ["run/0/01/0/0", "expected it"]),
        (say("rollout_ids", ROLLOUTS[:-1] + ', "a/0/0/0/0"]'), ["tensor", "[4]"]),
        (drop("token_ids"), ["tensor token_ids is missing"]),
        (drop("crc32"), ["tensor crc32 is missing"]),
        (drop("routed_experts.2"), ["tensor routed_experts.2 is missing"]),
        (put("more", to=np.zeros(1)), ["tensor 'more'"]),
        (put("token_ids", to=np.zeros((), np.int32)), ["tensor token_ids is I32 of shape []"]),
        (put("token_ids", to=np.zeros(0, np.int32)), ["tensor valid is BOOL of shape [5]"]),
        (put("token_ids", to=np.zeros((0, 1 << 60), np.int32)), ["of shape [0, 1152921504606846"]),
        (put("token_ids", to=np.zeros(5, np.int64)), ["tensor token_ids is I64", "expected I32"]),
        (put("logprobs", to=np.zeros(5)), ["tensor logprobs is F64 of shape [5], expected F32"]),
        (put("valid", to=np.zeros(5, np.uint8)), ["tensor valid is U8", "expected BOOL"]),
        (put("valid", to=np.full(5, 2, np.uint8).view(bool)), ["valid: a bool", "0 nor 1"]),
        (put("weight_versions", to=np.zeros(6, np.int64)), ["weight_versions is I64 of shape [6]"]),
        (put("prompt_lens", to=np.zeros(3, np.int64)), ["prompt_lens is I64 of shape [3]"]),
        (put("prompt_lens", 1, to=3), ["prompt_lens: rollout run/0/1/0/0: 3, expected 0..2"]),
        (put("prompt_lens", 0, to=-1), ["prompt_lens: rollout run/0/0/0/0: -1, expected 0..3"]),
        (put("cu_seqlens", to=np.array([0, 3, 6])), ["cu_seqlens is [0, 3, 6]", "tokens, 5"]),
        (put("cu_seqlens", 0, to=1), ["cu_seqlens is [1, 3, 5]"]),
        (put("cu_seqlens", 1, to=5), ["cu_seqlens is [0, 5, 5]"]),
        (put("cu_seqlens", 1, to=-(2**63)), ["cu_seqlens is [0, -9223372036854775808, 5]"]),
        (put("cu_seqlens", 1, to=2**63 - 1), ["cu_seqlens is [0, 9223372036854775807, 5]"]),
        (put("token_ids", 4, to=-1), ["token_ids: rollout run/0/1/0/0: token 1: -1"]),
        (put("valid", 4, to=True), ["valid: rollout run/0/1/0/0: True at the last token"]),
        (put("valid", 0, to=False), ["routed_experts: rollout run/0/0/0/0: row 0 is missing"]),
        (put("routed_experts.4", 4, to=1), ["rollout run/0/1/0/0: row 1 is missing", "layer 4"]),
        (put("routed_experts.2", 3, to=5), ["run/0/1/0/0: row 0, layer 2: experts [5, 5]"]),
        (put("routed_experts.2", 1, 0, to=8), ["run/0/0/0/0: row 1, layer 2: expert id 8"]),
        (put("logprobs", 0, to=0.5), ["logprobs: rollout run/0/0/0/0: token 0"]),
        (put("weight_versions", 4, to=3), ["weight_versions: rollout run/0/1/0/0: row 1"]),
        (put("weight_versions", 3, to=-5), ["weight_versions: rollout run/0/1/0/0: row 0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_hostile_files(edit: Edit, words: list[str], tmp_path: Path) -> None:
    write_hostile(tmp_path / "file")
    assert_equal(load_batch(tmp_path / "file"), make_batch(3, 2))
    write_hostile(tmp_path / "file", edit)
    refused(tmp_path / "file", *words)


def test_headers_that_lie_about_sizes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tensor = '{"dtype":"U8","shape":[%s],"data_offsets":[0,%s]}'
    for header in (
        "",
        "null",
        "[]",
        "{}",
        '{"__metadata__":{"format":"r3-batch"}}',
        '{"__metadata__":{"format":1}}',
        '{"__metadata__":null}',
        '{"token_ids":%s}' % (tensor % (2**40, 2**40)),
        '{"token_ids":%s}' % (tensor % (f"{2**40},{2**40}", 8)),
        '{"token_ids":%s}' % (tensor % (-1, 8)),
        "{" * 10_000,
    ):
        data = header.encode()
        path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(8))
        refused(path)
    for size in (2**63, 2**64 - 1, 2**32, 100_000_001, 3):
        path.write_bytes(struct.pack("<Q", size) + b"{}" + bytes(8))
        refused(path)


# --- writing in one step


def failing(*args: Any, **kwargs: Any) -> None:
    raise OSError("no")


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("step", ["fsync", "replace", "limit"])
def test_a_failure_leaves_what_was_there(
    step: str, earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    first, second = make_batch(3), make_batch(9, 40)
    if earlier:
        save_batch(first, path)
    before = path.read_bytes() if earlier else None
    if step != "limit":
        monkeypatch.setattr(os, step, failing)
        with pytest.raises(OSError, match="no"):
            save_batch(second, path)
    else:  # as on a full disk, in the middle of a write; Python ignores the signal
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                save_batch(second, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] * earlier
    assert (path.read_bytes() if earlier else None) == before
    monkeypatch.undo()
    save_batch(second, path)
    assert_equal(load_batch(path), second)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        save_batch(make_batch(2), tmp_path / "file")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save_batch(make_batch(2), tmp_path / "none" / "file")


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_batch(make_batch(2), tmp_path / "file")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(r3.MissingDependencyError, match=r"rollout-routing-replay\[megatron\]"):
        load_batch(tmp_path / "file")
