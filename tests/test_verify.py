"""`verify`, `merge` and rotation: everything that can be read is, and what is lost is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import r3
from r3 import FormatError, RolloutId, SpecError, TraceError
from r3.storage import RotatingWriter, ShardReader, ShardWriter, merge, shard_paths, verify
from storage_tools import SPEC, SPECS, make_trace, random_ids


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "r3.cli", *map(str, arguments)], capture_output=True, text=True
    )


def group(n: int = 300) -> list[r3.RoutingTrace]:
    """Six traces; those with an even number share their first 200 tokens and rows."""
    rng = np.random.default_rng(0)
    tokens, ids = rng.integers(0, 999, n), random_ids(rng, SPEC, n - 1)
    traces = []
    for i in range(6):
        if i % 2:
            traces.append(make_trace(seed=i, n=50, missing=i))
            continue
        mine = np.concatenate([tokens[:200], rng.integers(0, 999, n - 200)])
        rows = np.concatenate([ids[:200], random_ids(rng, SPEC, n - 201)])
        traces.append(
            make_trace(n=n, token_ids=mine, routed_experts=rows, rollout_id=RolloutId("g", str(i)))
        )
    return traces


def write(path: Path, traces: list[r3.RoutingTrace], **options: bool) -> Path:
    with ShardWriter(path, SPEC, **options) as writer:
        for trace in traces:
            writer.append(trace)
    return path


def frames(path: Path) -> list[int]:
    with ShardReader(path) as reader:
        return reader.entries["frame"].tolist()


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_whole_file(tmp_path):
    traces = group()
    found = verify(write(tmp_path / "a.r3", traces))
    assert (found.ok, found.closed, found.records) == (True, True, 6)
    assert found.tokens == sum(t.num_tokens for t in traces)
    assert found.file_bytes == (tmp_path / "a.r3").stat().st_size
    empty = verify(write(tmp_path / "b.r3", []))
    assert (empty.ok, empty.closed, empty.records) == (True, True, 0)


def test_a_file_that_is_being_written(tmp_path):
    with ShardWriter(tmp_path / "a.r3", SPEC) as writer:
        writer.append(make_trace())
        found = verify(tmp_path / "a.r3")
        assert (found.ok, found.closed, found.records) == (True, False, 1)
    assert verify(tmp_path / "a.r3").closed


def test_damaged_payload_takes_the_records_that_rest_on_it(tmp_path):
    path = write(tmp_path / "a.r3", group())
    start, after, *_ = frames(path)
    damage(path, after - 30)  # in the last chunk of record 0, whose rows records 2 and 4 share
    found = verify(path)
    assert (found.ok, found.records) == (False, 3)
    assert [loss.rollout_id for loss in found.losses] == [f"g/{i}/0/0/0" for i in (0, 2, 4)]
    assert (found.losses[0].start, found.losses[0].stop) == (start, after)
    assert all("layer 3" in loss.reason for loss in found.losses)


@pytest.mark.parametrize("at", [0, 5, 13])
def test_damaged_frame_is_passed_over(tmp_path, at):
    path = write(tmp_path / "a.r3", group())
    places = frames(path)
    damage(path, places[1] + at)
    found = verify(path)
    assert found.records == 5
    [loss] = found.losses
    assert (loss.start, loss.stop, loss.rollout_id) == (places[1], places[2], None)


def test_damaged_header_is_one_loss(tmp_path):
    path = write(tmp_path / "a.r3", group())
    places = frames(path)
    damage(path, places[1] + 40)
    [loss] = verify(path).losses
    assert (loss.start, loss.stop) == (places[1], places[2])
    assert "checksum" in loss.reason


def test_damaged_index_is_a_loss(tmp_path):
    path = write(tmp_path / "a.r3", group())
    damage(path, path.stat().st_size - 50)
    found = verify(path)
    assert (found.records, found.closed, len(found.losses)) == (6, False, 1)
    assert "index" in found.losses[0].reason


def test_cut_file(tmp_path):
    path = write(tmp_path / "a.r3", group())
    last = frames(path)[-1]
    os.truncate(path, last + 100)
    found = verify(path)
    assert (found.records, found.closed) == (5, False)
    assert (found.losses[0].start, found.losses[0].stop) == (last, last + 100)
    os.truncate(path, last)  # between two records: nothing shows that there was one more
    found = verify(path)
    assert (found.ok, found.closed, found.records) == (True, False, 5)


def test_no_header_is_an_error(tmp_path):
    (tmp_path / "a.r3").write_bytes(b"foreign")
    with pytest.raises(FormatError, match=r"a\.r3: not a \.r3 file"):
        verify(tmp_path / "a.r3")


def test_merge_stores_each_rollout_once_and_shares_again(tmp_path):
    traces = group()
    one, two = write(tmp_path / "1.r3", traces[:4]), write(tmp_path / "2.r3", traces[2:])
    merged = merge(tmp_path / "all.r3", [one, two])
    assert (merged.records, merged.repeats, merged.losses) == (6, 2, [])
    with ShardReader(tmp_path / "all.r3") as reader:
        assert [t.digest for t in reader] == [t.digest for t in traces]
    whole = write(tmp_path / "whole.r3", traces)
    assert (tmp_path / "all.r3").stat().st_size == whole.stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.r3", "2.r3", "all.r3", "whole.r3"]


def test_merge_keeps_the_order_of_ids(tmp_path):
    traces = [make_trace(seed=i) for i in range(2)]
    plain = write(tmp_path / "1.r3", traces[:1])
    ordered = write(tmp_path / "2.r3", traces[1:], keep_order=True)
    merge(tmp_path / "all.r3", [plain, ordered])
    with ShardReader(tmp_path / "all.r3") as reader:
        assert np.array_equal(reader[0].routed_experts, np.sort(traces[0].routed_experts))
        assert np.array_equal(reader[1].routed_experts, traces[1].routed_experts)


def test_merge_refuses_and_leaves_nothing(tmp_path):
    one = write(tmp_path / "1.r3", [make_trace(seed=0)])
    two = write(tmp_path / "2.r3", [make_trace(seed=1, rollout_id=RolloutId("run", "0"))])
    with pytest.raises(TraceError, match=r"2\.r3: rollout run/0/0/0/0 is record 0 of .*out\.r3"):
        merge(tmp_path / "out.r3", [one, two])
    with pytest.raises(FormatError, match="exists"):
        merge(one, [two])
    with pytest.raises(FormatError, match="nothing to merge"):
        merge(tmp_path / "out.r3", [])
    with ShardWriter(tmp_path / "3.r3", SPECS[1]) as writer:
        writer.append(make_trace(SPECS[1], seed=9))
    with pytest.raises(SpecError):
        merge(tmp_path / "out.r3", [one, tmp_path / "3.r3"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.r3", "2.r3", "3.r3"]


def test_a_torn_file_is_merged_only_to_salvage(tmp_path):
    path = write(tmp_path / "a.r3", group())
    os.truncate(path, frames(path)[-1] + 100)
    with pytest.raises(FormatError, match=r"a\.r3: 100 bytes from byte"):
        merge(tmp_path / "out.r3", [path])
    (tmp_path / "foreign.r3").write_bytes(b"foreign")
    merged = merge(tmp_path / "out.r3", [tmp_path / "foreign.r3", path], salvage=True)
    assert merged.records == 5
    assert [Path(file).name for file, _ in merged.losses] == ["foreign.r3", "a.r3"]
    with pytest.raises(FormatError, match="at least one sound file"):
        merge(tmp_path / "none.r3", [tmp_path / "foreign.r3"], salvage=True)


def test_what_recovery_dropped_is_no_loss(tmp_path):
    """A record that was not on the disk when the power went, with a whole one behind it."""
    path, traces = tmp_path / "a.r3", group()
    with ShardWriter(path, SPEC) as writer:
        for trace in traces:
            writer.append(trace)
        data = bytearray(path.read_bytes())  # as it is before anything was synced
        places = writer.entries["frame"].tolist()
    data[places[1] + 30 : places[2]] = bytes(places[2] - places[1] - 30)
    path.write_bytes(data)
    with pytest.warns(r3.TornShardWarning, match=f"record at byte {places[1]}"):
        ShardWriter(path, SPEC).close()
    found = verify(path)
    assert (found.ok, found.closed, found.records, found.dropped) == (True, True, 5, 1)
    with ShardReader(path) as reader:
        assert [t.digest for t in reader] == [t.digest for t in traces[:1] + traces[2:]]


def test_salvage(tmp_path):
    path = write(tmp_path / "a.r3", group())
    damage(path, frames(path)[1] + 40)
    with pytest.raises(FormatError):
        merge(tmp_path / "out.r3", [path])
    merged = merge(tmp_path / "out.r3", [path], salvage=True)
    assert (merged.records, len(merged.losses)) == (5, 1)
    assert verify(tmp_path / "out.r3").ok


@pytest.mark.slow
def test_commands(tmp_path):
    path = write(tmp_path / "a.r3", group())
    done = command("verify", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "records 6, tokens" in done.stdout
    damage(path, frames(path)[1] + 40)
    done = command("verify", path, "--json")
    [found] = json.loads(done.stdout)
    assert (done.returncode, found["ok"], found["records"]) == (1, False, 5)
    done = command("merge", tmp_path / "out.r3", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr
    done = command("merge", "--salvage", tmp_path / "out.r3", path)
    assert done.returncode == 1
    assert "records 5, files 1, repeats 0, losses 1" in done.stdout
    assert command("inspect", tmp_path / "out.r3").returncode == 0
    done = command("verify", tmp_path / "absent.r3", path)  # the one does not hide the other
    assert (done.returncode, done.stderr.count("absent.r3")) == (2, 1)
    assert "losses 1" in done.stdout
    for out in (".", tmp_path / "absent" / "out.r3"):
        done = command("merge", out, tmp_path / "out.r3")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    closed = ["sh", "-c", f"{sys.executable} -m r3.cli verify {tmp_path}/out.r3 >&-"]
    assert subprocess.run(closed, capture_output=True).stderr == b""
    assert command("verify").returncode == 2


def test_rotation(tmp_path):
    place, traces = tmp_path / "run.r3", [make_trace(seed=i, n=60) for i in range(20)]
    with RotatingWriter(place, SPEC, max_bytes=5000, durable=True) as writer:
        written = [writer.append(trace) for trace in traces[:15]]
        writer.flush()
        assert writer.append(traces[0]) == written[0]
        with pytest.raises(TraceError, match=r"run-00000\.r3"):
            writer.append(make_trace(seed=99, rollout_id=traces[0].rollout_id))
    with RotatingWriter(place, SPEC, max_bytes=5000) as writer:  # goes on with the last
        assert [writer.append(trace) for trace in traces[:15]] == written
        written += [writer.append(trace) for trace in traces[15:]]
    paths = shard_paths(place)
    assert [p.name for p in paths] == [f"run-{i:05}.r3" for i in range(len(paths))]
    assert len(paths) > 3
    assert all(p.stat().st_size < 5000 + 3000 for p in paths)
    found = []
    for path in paths:
        with ShardReader(path) as reader:
            found += [(path, i, trace.digest) for i, trace in enumerate(reader)]
    assert found == [(*w, t.digest) for w, t in zip(written, traces, strict=True)]


def test_rotation_refuses_other_routers_in_earlier_files(tmp_path):
    with RotatingWriter(tmp_path / "a.r3", SPEC, max_bytes=1) as writer:
        for i in range(3):
            writer.append(make_trace(seed=i))
    with pytest.raises(SpecError, match=r"a-00000\.r3"):
        RotatingWriter(tmp_path / "a.r3", SPECS[1], max_bytes=1)
    (tmp_path / "a-00009.r3").touch()  # the disk was full when it was made
    assert [p.name for p in shard_paths(tmp_path / "a.r3")] == [f"a-0000{i}.r3" for i in range(3)]
    (tmp_path / "a-00009.r3").unlink()
    (tmp_path / "a-00000.r3").unlink()  # moved elsewhere: the others go on
    with RotatingWriter(tmp_path / "a.r3", SPEC, max_bytes=1) as writer:
        assert writer.append(make_trace(seed=5))[0].name == "a-00003.r3"
