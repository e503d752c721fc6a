"""Base64 of an .npy, against numpy's own writer and files built by hand; and what is refused."""

from __future__ import annotations

import base64
import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import FormatError
from r3.storage.wire.npy import decode_npy, encode_npy

TYPES = ("uint8", "int8", "int16", "uint16", "int32", "int64")
OTHERS = ("bool", "uint32", "uint64", "float16", "float64", "complex64", "S3", "U3", "M8[s]", "V4")


def saved(array: np.ndarray, **options: Any) -> bytes:
    with io.BytesIO() as file:
        np.save(file, array, **options)
        return file.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def built(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> str:
    """A file with any header, of any length, as the format's description has it."""
    width = 2 if version[0] == 1 else 4
    head = header.encode("latin1")
    head += b" " * (-(9 + width + len(head)) % 64) + b"\n"
    data = b"\x93NUMPY" + bytes(version) + len(head).to_bytes(width, "little") + head + data
    return text(data)


def fields(descr: str = "'|u1'", fortran: str = "False", shape: str = "(2, 1, 2)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


def refused(payload: Any) -> str:
    with pytest.raises(FormatError, match=r"^choice 3[ :]") as info:
        decode_npy(payload, "choice 3")
    assert len(str(info.value)) < 1000
    return str(info.value)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.sampled_from("<>="),
    st.lists(st.integers(0, 5), min_size=3, max_size=4),
    st.integers(0, 2**32),
)
def test_what_numpy_saves_is_read_and_what_is_written_numpy_loads(name, order, shape, seed):
    info = np.iinfo(name)
    values = np.random.default_rng(seed).integers(info.min, info.max, shape, name, endpoint=True)
    array = values.astype(np.dtype(name).newbyteorder(order))
    found = decode_npy(text(saved(array)), "it")
    assert found.dtype == np.dtype(name)
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, values)
    assert encode_npy(array) == text(saved(array))
    back = np.load(io.BytesIO(base64.b64decode(encode_npy(array))), allow_pickle=False)
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize(
    "view",
    [
        np.arange(24, dtype=np.int16).reshape(2, 3, 4)[::-1],
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[:, [0, 2]],
        np.arange(24, dtype=np.uint8).reshape(6, 4, 1)[:, [0, 2]],  # in Fortran order by itself
        np.arange(24, dtype=np.uint8).reshape(4, 3, 2).T,
        np.broadcast_to(np.uint16(7), (2, 3, 4)),
    ],
)
def test_views_of_any_layout_come_back(view):
    np.testing.assert_array_equal(decode_npy(encode_npy(view), "it"), view)


def test_memory_of_the_text_is_not_written_to():
    found = decode_npy(encode_npy(np.zeros((2, 2, 2), np.uint8)), "it")
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_types_are_refused(name):
    said = refused(text(saved(np.zeros((2, 1, 2), name))))
    assert "of shape [2, 1, 2], expected integers in C order" in said


def test_objects_and_structures_are_refused_without_unpickling():
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    traps = np.empty((1, 1, 1), object)
    traps[0, 0, 0] = Trap()
    assert "an .npy of '|O'" in refused(text(saved(traps, allow_pickle=True)))
    assert "[('a', '|u1')]" in refused(text(saved(np.zeros((2, 1, 2), [("a", "u1")]))))
    assert "not an .npy" in refused(built(fields("('|u1', (2,))"), bytes(8)))


def test_other_shapes_and_orders_are_refused():
    for shape in ((), (4,), (2, 2), (1, 1, 1, 2, 2)):
        said = refused(text(saved(np.zeros(shape, np.uint8))))
        assert "with three or four axes" in said
        assert f"'shape': {shape}" in said
    assert "in Fortran order" in refused(text(saved(np.zeros((2, 3, 4), np.uint8, order="F"))))
    assert "in Fortran order" in refused(built(fields(fortran="True"), bytes(4)))


HUGE = 1 << 62
SHAPES = [
    *("(-2, -1, 2)", "(-2, 1, -2)", "(-1, 0, 0)", "(2, 1, -2)", "(0, -1, 5)", "(True, 2, 2)"),
    *("(2.0, 1, 2)", "('2', 1, 2)", "(None, 1, 2)", "2", "[2, 1, 2]", "None", "(2, 1)", "()"),
    *(f"({HUGE}, 1, 2)", f"({HUGE}, {HUGE}, {HUGE})", f"(0, {HUGE}, {HUGE})", f"(0, 1, {1 << 70})"),
    *("(4294967296, 4294967296, 1)", f"(0, {HUGE * 2 - 1}, 4)", "(2, 1, 1)", "(2, 1, 3)"),
    *("(0, 1, 2)", "(1000, 48, 8)"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_that_four_bytes_cannot_be_are_refused(shape):
    tracemalloc.start()
    try:
        for data in (bytes(4), b""):
            for dtype in ("'|u1'", "'<i8'"):
                if not (shape == "(0, 1, 2)" and not data):
                    refused(built(fields(dtype, shape=shape), data))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


HEADERS = [
    *("", "1", "[]", "{}", "{'descr': '|u1'}", "{1: 2, 'a': 3}", "{[]: 1}", "{**1}", "'''", "'"),
    *("{'a': (", "[1", "(" * 900, "-" * 900 + "1", "9" * 900, "\\", "\x00", "\t1\n\t 2\n)", "x("),
    *("{'descr': '|u1', 'fortran_order': False}", fields() + ", 1", fields() * 2, "open('x')"),
    *("__import__('os')", "{x: 1 for x in y}", "\xff\xfe", fields(fortran="1"), fields("None")),
    *(fields(d) for d in ("()", "('<i4', -1)", "[()]", "{}", "{'a': 1}", "[([], '|u1')]", "5")),
    *(fields(d) for d in ("'zz'", "''", "('|u1', 10**99)", "'|u1,|u1'", "'|u1' * 9", "b'|u1'")),
    fields() + " " * 1000,
]


@pytest.mark.parametrize("number", range(len(HEADERS)))
def test_headers_that_are_none_are_refused(number):
    refused(built(HEADERS[number], bytes(4)))


def test_a_header_written_by_hand_is_read():
    """So that the refusals above are those of what was changed."""
    assert decode_npy(built(fields(), bytes(range(4))), "it").tolist() == [[[0, 1]], [[2, 3]]]


def test_other_versions_of_the_format_are_refused():
    for version in ((2, 0), (3, 0), (0, 0), (1, 1), (255, 255)):
        assert "not an .npy" in refused(built(fields(), bytes(4), version))
    zipped = io.BytesIO()
    np.savez(zipped, np.zeros((1, 1, 1), np.uint8))
    assert "not an .npy" in refused(text(zipped.getvalue()))


def test_every_other_length_is_refused():
    data = saved(np.arange(6, dtype="<i2").reshape(3, 1, 2))
    for end in range(len(data)):
        refused(text(data[:end]))
    for more in (b"\0", b"\0\0", data):
        assert "of shape [3, 1, 2], expected 12" in refused(text(data + more))


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of the header that numpy evaluates
def test_no_changed_byte_raises_anything_else():
    data = saved(np.arange(6, dtype="<i2").reshape(3, 1, 2))
    for at in range(len(data)):
        for value in {0, 1, 10, 32, 39, 40, 45, 57, 92, 123, 128, 255} - {data[at]}:
            changed = data[:at] + bytes([value]) + data[at + 1 :]
            try:
                found = decode_npy(text(changed), "choice 3")
            except FormatError:
                continue
            assert found.nbytes == 12


def test_what_is_no_base64_is_refused():
    data = saved(np.zeros((2, 1, 2), np.uint8))
    good = text(data)
    for bad in (
        *(
            base64.b85encode(data).decode(),
            f" {good}",
            f"{good}\n",
            good[:-1],
        ),
        *(
            good[:9] + "\n" + good[9:],
            good[:9] + "-" + good[10:],
            "\u0141" * 8,
            "r3.rows/1:" + good,
        ),
    ):
        assert "not base64" in refused(bad)
    for odd in (None, 5, good.encode(), [good], [[[0, 1]], [[2, 3]]], {"data": good}, data):
        assert "expected a string of base64" in refused(odd)
    assert "not an .npy" in refused("")
    assert "not an .npy" in refused(data.hex())  # base64 by its characters
