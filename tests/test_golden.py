"""Files that were written once: today's reader reads them, today's writer still writes them so."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

import make_golden as golden
import storage_tools as tools
from r3.storage import ShardReader, ShardWriter
from r3.storage.batch_file import load_batch

# what deflate_is_the_same makes with the zlib that the files were written with
DEFLATED = "ed424f6452af0db2184765a06eeb1c7d54cf5da38dcd6f14629a74173f257cee"
NAMES = [name for name, *_ in golden.shards()]
EXPECTED = json.loads((golden.FOLDER / "expected.json").read_text())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same files as they are written today."""
    folder = tmp_path_factory.mktemp("golden")
    golden.write(folder)
    return folder


def test_the_folder_is_complete_and_small(written):
    assert sorted(EXPECTED) == sorted(NAMES)
    files = sorted(p.name for p in golden.FOLDER.iterdir())
    assert files == sorted(p.name for p in written.iterdir())
    assert sum(p.stat().st_size for p in golden.FOLDER.iterdir()) < 60_000


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_golden_files_are_read(name):
    with (
        np.load(golden.FOLDER / "expected.npz", allow_pickle=False) as arrays,
        ShardReader(golden.FOLDER / f"{name}.r3") as reader,
    ):
        assert reader.torn is None
        assert len(reader) == len(EXPECTED[name])
        for i, (trace, expected) in enumerate(zip(reader, EXPECTED[name], strict=True)):
            assert str(trace.rollout_id) == expected["rollout_id"]
            assert trace.digest == expected["digest"]
            assert trace.prompt_len == expected["prompt_len"]
            assert trace.provenance.to_dict() == expected["provenance"]
            forms = {
                c: [column.align, column.version, column.data.dtype.str, list(column.data.shape)]
                for c, column in trace.columns.items()
            }
            assert list(forms.items()) == list(expected["columns"].items())
            ids = trace.routed_experts
            if f"{name}.{i}" in arrays:
                np.testing.assert_array_equal(ids, arrays[f"{name}.{i}"])
            data = np.ascontiguousarray(ids, ids.dtype.newbyteorder("<")).tobytes()
            assert hashlib.sha256(data).hexdigest() == expected["ids"]
            assert_is_made_anew(name, i, trace)


def assert_is_made_anew(name: str, i: int, trace: tools.RoutingTrace) -> None:
    """The trace is the one that make_golden makes; so the files hold what the script says."""
    traces, keep_order = next((t, k) for n, t, k, _ in golden.shards() if n == name)
    tools.assert_same(trace, traces[i], keep_order)


def test_golden_files_hold_what_they_are_there_for():
    shares, exceptions, indexes = set(), set(), {}
    for name in EXPECTED:
        data = (golden.FOLDER / f"{name}.r3").read_bytes()
        markers = [marker for _, marker, _ in tools.split_file(data)[1]]
        indexes[name] = markers.count(b"R3ix")
        for _, marker, content in tools.split_file(data)[1]:
            if marker != b"R3rc":
                continue
            column = tools.split_record(content)[0]["columns"][1]
            assert column["codec"] == ("enum-ordered" if name == "enum_ordered" else "enum")
            if column.get("spans"):
                shares.add(name)
            if any(column.get("exceptions", ())):
                exceptions.add(name)
    assert {"shared", "enum_ordered"} <= exceptions
    assert indexes == {name: 12 if name == "indexes" else 1 for name in EXPECTED}
    columns = {c for traces in EXPECTED.values() for trace in traces for c in trace["columns"]}
    assert len(columns) == 13


@pytest.mark.parametrize(
    "name", [f"{n}.r3" for n in NAMES] + ["batch.safetensors", "expected.json"]
)
def test_the_same_bytes_are_written_today(name, written):
    if name.endswith(".r3") and not deflate_is_the_same():
        pytest.skip("another zlib, which deflates to other bytes")
    assert (written / name).read_bytes() == (golden.FOLDER / name).read_bytes()


def deflate_is_the_same() -> bool:
    deflate = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    data = deflate.compress((np.arange(5000) ** 2 // 977 % 251).astype(np.uint8)) + deflate.flush()
    return hashlib.sha256(data).hexdigest() == DEFLATED


def test_the_golden_batch_is_read():
    pytest.importorskip("safetensors")
    found, expected = load_batch(golden.FOLDER / "batch.safetensors"), golden.batch()
    assert found.spec == expected.spec
    assert found.rollout_ids == expected.rollout_ids
    for name in ("token_ids", "routed_experts", "valid", "cu_seqlens", "prompt_lens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("name", NAMES)
def test_golden_files_are_gone_on_with(name, tmp_path):
    path = tmp_path / "a.r3"
    shutil.copy(golden.FOLDER / f"{name}.r3", path)
    traces, keep_order = next((t, k) for n, t, k, _ in golden.shards() if n == name)
    with ShardWriter(path, traces[0].spec, keep_order=keep_order) as writer:
        assert [writer.append(t) for t in traces] == list(range(len(traces)))
        assert writer.append(golden.make(traces[0].spec, 70, 77)) == len(traces)
    assert path.read_bytes().startswith((golden.FOLDER / f"{name}.r3").read_bytes())
    tools.assert_same(tools.read_all(path)[0], traces[0], keep_order)
