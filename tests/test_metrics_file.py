"""The file of a step monitor: whole lines, foreign files left alone, wrong fields named."""

from __future__ import annotations

import json
import math
import os
import resource
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import (
    FormatError,
    R3Error,
    TornShardWarning,
    TraceError,
)
from r3.monitor import StepMonitor, read_metrics
from step_tools import (
    DEEP,
    lines_of,
    make_batch,
)


def test_nan_and_infinity_are_null(tmp_path):
    batch = make_batch(lengths=(5,))
    trainer = np.full(5, -1.0)
    logprobs = batch.logprobs.copy()
    logprobs[3:] = -2000, -1
    batch = replace(batch, logprobs=logprobs)
    with StepMonitor(tmp_path / "m.jsonl") as monitor:
        record = monitor.record(0, batch=batch, trainer_logprobs=trainer)
    assert record["metrics"]["rollout_corr/k3_kl"] == math.inf
    (line,) = lines_of(tmp_path / "m.jsonl")
    assert line["metrics"]["rollout_corr/k3_kl"] is None
    assert line["metrics"]["routing/abs_logratio_max"] == 1999
    assert {"kl", "wrong_token"} <= {a["name"] for a in line["alerts"]}


def test_a_torn_last_line_is_cut_off(tmp_path):
    path, batch = tmp_path / "m.jsonl", make_batch()
    with StepMonitor(path) as monitor:
        for step in range(3):
            monitor.record(step, batch=batch)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in (last + 1, last + 9, last + 200, len(whole) - 2):
        path.write_bytes(whole[:end])
        assert [r["step"] for r in read_metrics(path)] == [0, 1]
        with pytest.warns(TornShardWarning, match=rf"{end - last} bytes are cut off") as caught:
            monitor = StepMonitor(path)
        assert caught[0].filename == __file__
        with monitor:
            monitor.record(2, batch=batch)
        assert [r["step"] for r in read_metrics(path)] == [0, 1, 2]
    path.write_bytes(whole[:-1])  # a whole record without its newline is kept
    with StepMonitor(path) as monitor:
        monitor.record(3, batch=batch)
    assert [r["step"] for r in read_metrics(path)] == [0, 1, 2, 3]
    path.write_bytes(whole[:30])  # nothing but a torn line
    with pytest.warns(TornShardWarning), StepMonitor(path) as monitor:
        monitor.record(0, batch=batch)
    assert len(lines_of(path)) == 1


RECORD = b'{"step":1,"time":1.5,"metrics":{"a":1}}'


@pytest.mark.parametrize(
    "content",
    [
        *(b"abc", b"R3SHARD\x00\x01\x02", b'{"a": 1}\n', b"[1]\n{", b'{"step": 1}\nxyz', b"\n"),
        # whole JSON values without a newline
        *(b'{"step": 1, "loss": 2.5}', b'{"step":1,"metrics":{"a":"str"}}', b"17", b'"text"'),
        *(b'{"step":1,"time":2,"loss":2.5}', b'{"step":1,"time":2} and more'),
        b'{"step":1,"time":2,"metrics":{"a":' + b"1" * 5000 + b"}}",
        b'{"step":1,"time":NaN}',
        b'{"step":1,"time":2,"text":"\xff"}',
        # beginnings, but not surely of a line of ours
        *(
            b"{",
            b'{"step',
            b'{"step":',
            b'{"step":1',
            b'{"step":1,"time"',
            b'{"step": 1, "time": 2',
        ),
        *(b'{"step":"1","time":', b'{"step":1,"loss":2.', b'{"step":1,"time":2,"loss":'),
        *(b'{"step":1,"time":noon', b'{"step":1,"time":' + b"[" * 5000),
        # behind records of ours
        *(RECORD + b'\n{"step": 1, "loss": 2.5}', RECORD + b"\n[1]", RECORD + b"\n" + b"[" * 5000),
    ],
)
def test_another_kind_of_file_stays_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    for act in (StepMonitor, read_metrics):
        with pytest.raises(FormatError, match=r"notes\.txt"):
            act(path)
        assert path.read_bytes() == content


def test_a_last_line_is_kept_or_cut_off_but_never_lost(tmp_path):
    """Any beginning of a line, alone and behind a record"""
    path = tmp_path / "m.jsonl"
    surely = len(b'{"step":1,"time":')
    for before in (b"", RECORD + b"\n"):
        for end in range(1, len(RECORD) + 1):
            rest = RECORD[:end]
            path.write_bytes(before + rest)
            if rest == RECORD:
                StepMonitor(path).close()
                assert path.read_bytes() == before + rest + b"\n"
                assert read_metrics(path) == [json.loads(RECORD)]
            elif before or end >= surely:
                assert len(read_metrics(path)) == bool(before)
                with pytest.warns(TornShardWarning, match=f"{end} bytes are cut off"):
                    StepMonitor(path).close()
                assert path.read_bytes() == before
            else:
                with pytest.raises(FormatError, match="expected JSON lines of a StepMonitor"):
                    StepMonitor(path)
                assert path.read_bytes() == before + rest


def test_a_line_beyond_all_size_is_no_torn_one(tmp_path, monkeypatch):
    monkeypatch.setattr("r3.metrics_file.MAX_LINE", 100_000)
    path = tmp_path / "m.jsonl"
    content = RECORD[:-2] * 5000
    path.write_bytes(content)
    for act in (StepMonitor, read_metrics):
        with pytest.raises(FormatError, match="more than 100000 bytes"):
            act(path)
    assert path.read_bytes() == content


def test_no_steps_are_none(tmp_path):
    path = tmp_path / "m.jsonl"
    with StepMonitor(path):
        assert read_metrics(path) == read_metrics(path, last=1) == []
    assert read_metrics(path) == []


def test_only_the_end_of_a_long_file_is_read(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    line = json.dumps({"step": 0, "metrics": {"routing/rows": 1}, "pad": "x" * 5000})
    lines = [line.replace('"step": 0', f'"step": {i}') for i in range(1000)]
    path.write_text("not JSON\n" + "\n".join(lines) + "\n")
    with StepMonitor(path) as monitor:
        assert [step for step, _ in monitor._past] == list(range(900, 1000))
    with pytest.raises(FormatError, match="line 1: not strict JSON"):
        read_metrics(path)
    path.write_text("\n".join(lines) + "\n")
    assert [r["step"] for r in read_metrics(path)] == list(range(1000))
    monkeypatch.setattr("r3.metrics_file.MAX_LINE", 5000)
    with pytest.raises(FormatError, match="line 1: more than 5000 bytes"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "metrics": {"a": NaN}}', "NaN is no JSON"),
        ('{"step": 1, "metrics": {"a": true}}', "a is True, expected a number or null"),
        ('{"step": 1, "metrics": {"a": "1"}}', "a is '1', expected a number or null"),
        ('{"step": 1}', 'expected an object with "metrics"'),
        ('{"metrics": {}}', 'expected an object with "step"'),
        ('{"step": 1, "metrics": []}', r"metrics is \[\], expected an object"),
        ('{"step": 1.0, "metrics": {}}', "step is 1.0, expected an integer"),
        ('{"step": true, "metrics": {}}', "step is True, expected an integer"),
        (f'{{"step": {2**63}, "metrics": {{}}}}', "step is 9223372036854775808, expected"),
        ("[]", r"it is \[\], expected an object"),
        ("[" * 100_000, "not strict JSON"),
        ("", "not strict JSON"),
    ],
)
def test_a_line_that_no_monitor_writes_is_named(tmp_path, line, message):
    path = tmp_path / "m.jsonl"
    good = '{"step": 0, "metrics": {}}'
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(FormatError, match=rf"m\.jsonl: line 2: .*{message}"):
        read_metrics(path)


ALERT = {"name": "kl", "level": "bad", "message": "m", "look_at": "l", "figure": None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metrics": {"a": 10**400}}, r"metrics\.a is 10000.*0000, expected a number or null"),
        ({"metrics": {"a": math.inf}}, r"metrics\.a is inf"),  # as 1e999 is read
        (
            {"metrics": {"a": DEEP}},
            r"metrics\.a is \[\[\[\[\[\[\[...\]+, expected a number or null",
        ),
        ({"time": "now"}, "time is 'now', expected a number"),
        ({"alerts": {}}, "alerts is {}, expected a list"),
        ({"alerts": None}, "alerts is None, expected a list"),
        ({"alerts": ["kl"]}, r"alerts\.0 is 'kl', expected an object"),
        (
            {"alerts": [ALERT, {**ALERT, "level": "good"}]},
            r"alerts\.1\.level is 'good', expected one",
        ),
        ({"alerts": [{**ALERT, "level": []}]}, r"alerts\.0\.level is \[\]"),
        ({"alerts": [{**ALERT, "figure": 1}]}, r"alerts\.0\.figure is 1, expected text or null"),
        (
            {"alerts": [{**ALERT, "value": "1"}]},
            r"alerts\.0\.value is '1', expected a number or null",
        ),
        ({"alerts": [{**ALERT, "more": DEEP}]}, r"alerts\.0\.more is .*levels of lists"),
        *(
            ({"alerts": [{**ALERT, name: 1}]}, rf"alerts\.0\.{name} is 1, expected text")
            for name in ("name", "message", "look_at")
        ),
        *(
            (
                {"alerts": [{k: v for k, v in ALERT.items() if k != name}]},
                rf'alerts\.0 is .*, expected an object with "{name}"',
            )
            for name in ("name", "message", "look_at", "level")
        ),
        ({"layers": {"1": {}}}, "layers is .*, expected a list"),
        ({"layers": [1]}, r"layers\.0 is 1, expected an object"),
        ({"layers": [{}]}, r'layers\.0 is {}, expected an object with "layer"'),
        ({"layers": [{"layer": 1.0}]}, r"layers\.0\.layer is 1\.0, expected a layer"),
        ({"layers": [{"layer": -1}]}, r"layers\.0\.layer is -1"),
        ({"layers": [{"layer": 2**31 + 1}]}, r"layers\.0\.layer is 2147483649"),
        ({"layers": [{"layer": 1, "max_vio_engine": "1"}]}, r"layers\.0\.max_vio_engine is '1'"),
        ({"slices": []}, r"slices is \[\], expected an object"),
        ({"slices": {"length": {"8-15": 1}}}, r"slices\.length\.8-15 is 1, expected an object"),
        ({"slices": {"length": {"8-15": {"rows": []}}}}, r"slices\.length\.8-15\.rows is \[\]"),
        ({"changes": []}, "changes is"),
        (
            {"changes": {"engine.dtype": "x"}},
            r"changes\.engine\.dtype is 'x', expected a list of 2",
        ),
        ({"changes": {"a": [1, 2, 3]}}, r"changes\.a is \[1, 2, 3\], expected a list of 2"),
        ({"changes": {"a": [1, [2]]}}, r"changes\.a\.1 is \[2\], expected text, a number"),
        ({"environment": 1}, "environment is 1, expected an object"),
        ({"environment": {"a": {}}}, r"environment\.a is {}"),
        (
            {"left_out": {"trainer_nan": -1}},
            r"left_out\.trainer_nan is -1, expected an integer of 0",
        ),
        ({"left_out": {"trainer_nan": 2**63}}, r"left_out\.trainer_nan is"),
        ({"examples": "text"}, "examples is 'text', expected a list"),
        ({"examples": [1]}, r"examples\.0 is 1, expected text"),
        ({"rollouts_without_route": [None]}, r"rollouts_without_route\.0 is None, expected text"),
        ({"alignment": []}, r"alignment is \[\], expected an object"),
        ({"alignment": {"fault": 1, "text": ""}}, r"alignment\.fault is 1, expected text or null"),
        ({"alignment": {"fault": "row shift"}}, 'alignment is .*, expected an object with "text"'),
        ({"pad": DEEP}, "pad is .*, expected at most 15 levels of lists and objects"),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path, fields, message):
    path = tmp_path / "m.jsonl"
    good = json.dumps({"step": 0, "metrics": {}})
    bad = json.dumps({"step": 1, "metrics": {}, **fields}).replace("Infinity", "1e999")
    path.write_text(f"{good}\n{bad}\n{good}\n")
    with pytest.raises(FormatError, match=rf"m\.jsonl: line 2: {message}") as caught:
        read_metrics(path)
    assert len(str(caught.value)) < 500
    with pytest.raises(FormatError, match=rf"m\.jsonl: line 2 from the end: {message}"):
        StepMonitor(path)


def test_lines_of_other_versions_are_read(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = [
        {"step": 0, "metrics": {}},
        {"step": 1, "metrics": {"a": None, "b": 1, "c": -1e300}, "alignment": None, "pad": [[1]]},
        {
            "step": 2,
            "metrics": {},
            "alerts": [{**ALERT, "more": {"a": 1}}],
            "layers": [{"layer": 0}],
        },
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_metrics(path) == lines
    with StepMonitor(path) as monitor:
        monitor.record(3, batch=make_batch())
    assert len(read_metrics(path)) == 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=40), st.integers(1, 25))
def test_the_highest_steps_are_kept(tmp_path_factory, steps, last):
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    lines = [{"step": step, "metrics": {"at": i}} for i, step in enumerate(steps)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_metrics(path, last=last) == read_metrics(path)[-last:]


def test_a_number_of_steps_that_is_none(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"")
    for last in (0, -1, True, 1.0, "1"):
        with pytest.raises(TraceError, match="expected None or an integer of at least 1"):
            read_metrics(path, last=last)


def test_files_that_are_none(tmp_path):
    for act in (StepMonitor, read_metrics):
        with pytest.raises(FormatError, match="a folder, expected a metrics file"):
            act(tmp_path)
        with pytest.raises(FormatError, match=r"none/m\.jsonl: cannot be opened"):
            act(tmp_path / "none" / "m.jsonl")
    with pytest.raises(FormatError, match="No such file"):
        read_metrics(tmp_path / "m.jsonl")


def test_one_monitor_at_a_time(tmp_path):
    path = tmp_path / "m.jsonl"
    with StepMonitor(path), pytest.raises(FormatError, match="another monitor has this file"):
        StepMonitor(path)
    with StepMonitor(path) as monitor:
        monitor.record(0, batch=make_batch())
        shared = os.dup(monitor._file._file.fileno())  # as a forked process has it
    StepMonitor(path).close()
    os.close(shared)
    with pytest.raises(R3Error, match=r"m\.jsonl: is closed"):
        monitor.record(1, batch=make_batch())
    monitor.close()


def test_a_full_disk_leaves_no_half_line(tmp_path):
    path, batch = tmp_path / "m.jsonl", make_batch()
    with StepMonitor(path) as monitor:
        monitor.record(0, batch=batch)
        size = path.stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            for room in (100, 0):
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
                with pytest.raises(R3Error, match=r"m\.jsonl: .*(disk full|cannot be written)"):
                    monitor.record(1, batch=batch)
                assert path.stat().st_size == size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        monitor.record(1, batch=batch)
    assert [r["step"] for r in lines_of(path)] == [0, 1]
