"""Records that are whole by their checksums, but not what a writer writes."""

from __future__ import annotations

import contextlib
import tracemalloc
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r3 import Column, FormatError, RoutingTrace
from r3.storage import ShardReader, ShardWriter
from r3.storage.experts import MAX_SPANS
from storage_tools import (
    MAGIC,
    SALT,
    SPEC,
    assert_same,
    file_bytes,
    framed,
    make_trace,
    packed,
    read_all,
    record_parts,
    refused,
    write,
)

ONE_FILE = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=100,
    deadline=None,
)


MANY = MAX_SPANS + 1


def header_and_payload(trace: RoutingTrace) -> tuple[dict[str, Any], bytes]:
    return record_parts(trace)[0]


# --- hostile records: whole by their checksums


def mutations() -> dict[str, tuple[Any, str]]:
    """Header changes by name: (function of the header, words of the error)."""

    def top(**changes: Any) -> Any:
        return lambda h: h.update(changes)

    def column(i: int, **changes: Any) -> Any:
        return lambda h: h["columns"][i].update(changes)

    def drop(key: str) -> Any:
        return lambda h: h.pop(key)

    big = 2**60
    return {
        "codec": (column(1, codec="zip9"), "codec 'zip9'"),
        "other codec": (column(0, codec="enum"), "codec 'enum', expected 'raw' or 'deflate'"),
        "raw ids": (column(1, codec="raw"), "codec 'raw' for routed_experts"),
        "ordered ids": (column(1, codec="enum-ordered"), "expected 84 by its rows"),
        "not deflate": (column(0, codec="raw"), "bytes, expected 36 for i4 of shape [9]"),
        "other deflate": (column(0, dtype="i8"), "'token_ids': deflate of other than 72 bytes"),
        "dtype": (column(0, dtype="O"), "dtype 'O'"),
        "ids dtype": (column(1, dtype="u2"), "column 'routed_experts': u2"),
        "ids shape": (column(1, shape=[8, 3, 5]), "expected u1 of shape [rows, 3, 4]"),
        "more rows": (column(1, shape=[9, 3, 4]), "9 rows, expected one less"),
        "fewer rows": (column(1, shape=[7, 3, 4]), "8 stored rows, expected at most"),
        "huge rows": (column(1, shape=[big, 3, 4]), "larger than any file"),
        "many rows": (column(1, shape=[2**40, 3, 4]), "which none can have"),
        "rows": (column(1, shape=[2000, 3, 4]), "2000 rows, expected one less"),
        "huge stored": (column(1, stored=big), f"{big} stored rows, expected at most"),
        "both huge": (column(1, shape=[2**40, 3, 4], stored=2**40), "by its rows"),
        "fewer stored": (column(1, stored=7), "expected 63 by its rows"),
        "negative stored": (column(1, stored=-1), "stored is -1"),
        "span": (column(1, spans=[5]), "span 5"),
        "span of text": (column(1, spans=[[0, 0, "1"]]), "expected integers"),
        "span of nothing": (column(1, spans=[[0, 0, 0]]), "span of no rows"),
        "spans too long": (
            column(1, spans=[[0, 0, 1]], exceptions=[]),
            "1 spans with 1 rows and 8 stored",
        ),
        "huge span": (column(1, spans=[[0, 0, 2**62]] * 9, exceptions=[]), "spans with"),
        "many spans": (
            column(1, shape=[MANY, 3, 4], stored=0, spans=[[0, 0, 1]] * MANY, exceptions=[]),
            f"{MANY} spans",
        ),
        "negative shape": (column(0, shape=[-9]), "shape is [-9]"),
        "huge product": (column(0, shape=[2**40] * 8), "larger than any file"),
        "huge nothing": (column(0, shape=[0, 2**62, 2**62]), "larger than any file"),
        "many axes": (column(0, shape=[1] * 9), "1 to 8 axes"),
        "no axes": (column(0, shape=[]), "1 to 8 axes"),
        "shape of text": (column(0, shape=["9"]), "expected integers"),
        "shape of bool": (column(0, shape=[True]), "expected integers"),
        "size": (column(0, bytes=2**62), "by its header"),
        "deflated size": (column(0, codec="deflate", shape=[2**40]), "deflate cannot do"),
        "negative size": (column(0, bytes=-1), "bytes is -1"),
        "checksum": (column(0, crc32=7), "'token_ids': checksum"),
        "no checksum": (column(0, crc32=None), "crc32 is None"),
        "align": (column(0, align="page"), "align is 'page'"),
        "version": (column(0, version=2), "version 2"),
        "name": (column(1, name="token_ids"), "'token_ids'"),
        "no name": (column(0, name=None), "name is None"),
        "no tokens": (column(0, name="x"), "'token_ids' is missing"),
        "lost column": (lambda h: h["columns"].pop(), "by its header"),
        "no columns": (top(columns=[]), "by its header"),
        "columns of text": (top(columns=["a"]), "expected a map"),
        "digest": (top(digest="0" * 32), "expected '0000"),
        "no such digest": (top(digest="x"), "expected 32 hexadecimal digits"),
        "prompt_len": (top(prompt_len=4), "digest"),
        "huge prompt_len": (top(prompt_len=2**63), "prompt_len"),
        "rollout id": (top(rollout_id="x"), "run/group/sample/turn/attempt"),
        "long rollout id": (top(rollout_id="r/g/0/0/" + "9" * 5000), "rollout id"),
        "odd rollout id": (top(rollout_id="r/g/00/0/0"), "written 'r/g/0/0/0'"),
        "provenance": (top(provenance={"engine": 5}), "Provenance.engine"),
        "provenance list": (top(provenance=[1]), "expected dict"),
        "no digest": (drop("digest"), "no 'digest'"),
        "bytes": (top(digest=b"0" * 32), "not msgpack of plain values"),
        "extension": (top(later=msgpack.ExtType(5, b"x")), "not msgpack of plain values"),
        "empty extension": (top(later=msgpack.ExtType(5, b"")), "not msgpack of plain values"),
        "timestamp": (top(later=msgpack.Timestamp(1)), "not msgpack of plain values"),
        "integer key": (top(provenance={5: 5}), "not msgpack of plain values"),
        "bytes key": (top(provenance={b"k": 5}), "not msgpack of plain values"),
        "nested": (top(later=[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]), "nested more than 16"),
    }


@pytest.mark.parametrize("name", mutations())
def test_hostile_record(name, tmp_path):
    path = tmp_path / "a.r3"
    header, payload = header_and_payload(make_trace())
    change, words = mutations()[name]
    change(header)
    path.write_bytes(file_bytes(packed(header) + payload))
    tracemalloc.start()
    try:
        refused(path, words, "record 0 at byte")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",  # a list, then a map, of 2^32 - 1 items
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",  # text of as many bytes
        b"\xdc\xff\xff" * 1023 + b"\xc0",  # lists of 65,535 in each other
        b"\x91" * 5000 + b"\xc0",
        b"\x91" * 900 + b"\xc0",
        b"\x81\xa1\xff\xc0",  # a key that is not UTF-8
        b"\x82\xa1a\xc0\xa1a\xc0",  # a key twice
        b"\x81\x90\xc0",  # a key that is a list
        b"\xc0\xc0",
        b"",
    ],
    ids=lambda d: d[:8].hex(),
)
def test_hostile_msgpack(data, tmp_path):
    path = tmp_path / "a.r3"
    for content in (MAGIC + packed(data), file_bytes(packed(data))):
        path.write_bytes(content)
        refused(path, "header")


def test_checked_content(tmp_path):
    """Payloads that no engine wrote are refused although every checksum is right."""
    path = tmp_path / "a.r3"
    trace = make_trace(missing=1, token_ids=np.random.default_rng(0).integers(0, 2**31, 9))
    header, payload = header_and_payload(trace)
    assert header["columns"][0]["codec"] == "raw"
    tokens, ids, valid = header["columns"]
    start, chunk = tokens["bytes"], ids["bytes"] // 3
    behind = start + ids["bytes"]
    for at, value, words in (
        (start + chunk + 16, 0x1C, "layer 2, stored rows 0 to 6: row 6 of a chunk stands for no"),
        (start + chunk + 16, 0x80, "layer 2, stored rows 0 to 6: padding behind row 6"),
        (behind + 1, 0, "0 shared and 7 stored rows, expected the 6 captured ones"),
        (len(payload) - 1, 2, "a bool stored as 2"),
        (3, 0x80, "token 0: id -"),
        (0, payload[0] ^ 1, f"expected '{trace.digest}'"),
    ):
        changed = bytearray(payload)
        changed[at] = value
        if value == 0x1C:  # the highest digit of row 6, and its planes
            changed[at - 10] = changed[at - 3] = 0xFF
        for layer in range(3):
            end = start + (layer + 1) * chunk - 4
            changed[end : end + 4] = zlib.crc32(changed[end + 4 - chunk : end]).to_bytes(
                4, "little"
            )
        tokens["crc32"] = zlib.crc32(changed[:start])
        valid["crc32"] = zlib.crc32(changed[behind:])
        path.write_bytes(file_bytes(packed(header) + bytes(changed)))
        refused(path, words, "rollout run/0/0/0/0", "record 0 at byte")
    changed = bytearray(payload)
    changed[start + chunk] ^= 1
    tokens["crc32"] = zlib.crc32(payload[:start])
    path.write_bytes(file_bytes(packed(header) + bytes(changed)))
    refused(path, "column 'routed_experts': layer 2, stored rows 0 to 6: checksum")


def test_one_rollout_twice_in_a_file(tmp_path):
    path = tmp_path / "a.r3"
    header, payload = header_and_payload(make_trace())
    path.write_bytes(file_bytes(*[packed(header) + payload] * 2))
    refused(path, "records 0 and 1 are both of rollout run/0/0/0/0")
    with (
        ShardReader(path) as reader,
        pytest.raises(FormatError, match=f"{path}: records 0 and 1 are both"),
    ):
        reader.get("run/0/0/0/0")


def test_later_minor_versions_are_read(tmp_path):
    """Map keys that this version does not know are skipped, columns are carried through."""
    path, trace = tmp_path / "a.r3", make_trace(extra={"later": Column(np.arange(9), "token", 7)})
    header, payload = header_and_payload(trace)
    header["new"] = {"a": [1, 2.5, None, True]}
    header["columns"][0]["new"] = "x"
    header["columns"][1]["new"] = "x"
    path.write_bytes(file_bytes(packed(header) + payload, version=[2, 9], new=[1]))
    (found,) = read_all(path)
    assert_same(found, trace)
    assert_same(read_all(write(tmp_path / "b.r3", [found]))[0], trace)
    with ShardWriter(path, SPEC) as writer:  # goes on with it
        writer.append(make_trace(seed=1))
    assert_same(read_all(path)[0], trace)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from([2**31, 2**32, 2**60, "enum", "raw", "u1", "bool", [[0, 0, 1]]]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(data=st.data())
@ONE_FILE
def test_mutated_fields(tmp_path, data):
    """Any value in any field, checksums made right: FormatError, or a trace that passes."""
    path = tmp_path / "a.r3"
    values = {"version": [2, 0], "spec": SPEC.to_dict(), "salt": SALT.hex()}
    header, payload = header_and_payload(make_trace())
    places: list[Any] = [values, values["spec"], header, header["provenance"], *header["columns"]]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places))
        key = data.draw(st.sampled_from([*place, "engine", "num_groups", "spans", "exceptions"]))
        place[key] = data.draw(ANYTHING)
    content = MAGIC + packed(values)
    path.write_bytes(content + framed(packed(header) + payload, len(content)))
    with contextlib.suppress(FormatError):
        read_all(path)
