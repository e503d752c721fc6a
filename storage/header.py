"""Header blocks: a length, a checksum and one msgpack map of plain values.

Headers are untrusted: plain values only, bounded in size, number and depth, so that they cannot run
code and mean the same in every language.
"""

from __future__ import annotations

import reprlib
import struct
import zlib
from collections.abc import Callable
from typing import Any

import msgpack

from r3.errors import FormatError
from r3.storage.codec import Buffer

# `read(offset, size)`: that part of a record or column, as a view or in memory of its own;
# FormatError if it is not there
Read = Callable[[int, int], Buffer]

MAX_HEADER = 1 << 20  # bytes
_MAX_ITEMS = 1 << 14  # values in a header
_MAX_DEPTH = 16  # of lists and maps in each other
_PREFIX = struct.Struct("<II")  # length of the header, CRC-32 of that length and the header


def pack_header(values: dict[str, Any]) -> bytes:
    """Length, checksum and msgpack of `values`.

    Raises FormatError for what `read_packed` would refuse, so that it is never written.
    """
    try:
        data = msgpack.packb(values)
    except (ValueError, TypeError, OverflowError, RecursionError) as e:
        raise FormatError(
            f"header: {e}, expected plain values (text, numbers, lists, maps)"
        ) from None
    length = len(data).to_bytes(4, "little")
    packed = _PREFIX.pack(len(data), zlib.crc32(data, zlib.crc32(length))) + data
    read_packed(lambda offset, size: packed[offset : offset + size], len(packed))
    return packed


def read_packed(read: Read, size: int) -> tuple[dict[str, Any], int]:
    """The map that `pack_header` wrote at the start of `size` bytes, and the offset behind it."""
    if size < _PREFIX.size:
        raise FormatError(f"header cut short: {size} bytes, expected at least {_PREFIX.size}")
    length, crc32 = _PREFIX.unpack(read(0, _PREFIX.size))
    end = _PREFIX.size + length
    if length > MAX_HEADER:
        raise FormatError(f"header of {length} bytes, expected at most {MAX_HEADER}")
    if end > size:
        raise FormatError(f"header cut short or corrupt: ends at byte {end} of {size}")
    data = read(_PREFIX.size, length)
    found = zlib.crc32(data, zlib.crc32(length.to_bytes(4, "little")))
    if found != crc32:
        raise FormatError(f"header is corrupt: checksum {found:08x}, expected {crc32:08x}")
    try:
        values = msgpack.unpackb(
            data,
            strict_map_key=True,
            object_pairs_hook=_as_dict,
            ext_hook=_no_extension,
            max_ext_len=0,
            max_bin_len=0,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
        )
        _check_plain(values)
    except (ValueError, TypeError, msgpack.UnpackException) as e:
        raise FormatError(
            f"header is not msgpack of plain values: {e or type(e).__name__}"
        ) from None
    if type(values) is not dict:
        raise FormatError(f"header is {reprlib.repr(values)}, expected a map")
    return values, end


def _as_dict(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs) or not all(type(k) is str for k in values):
        raise ValueError("a map with a repeated key or a key that is not text")
    return values


def _no_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")


def _check_plain(value: Any) -> None:
    level, count = [value], 0
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if type(item) is dict:
                inner.extend(item.values())
            elif type(item) is list:
                inner.extend(item)
            elif type(item) not in (str, int, float, bool, type(None)):
                raise ValueError(f"a value of type {type(item).__name__}")
        count += len(inner)
        if count > _MAX_ITEMS:
            raise ValueError(f"more than {_MAX_ITEMS} values")
        if not inner:
            return
        level = inner
    raise ValueError(f"nested more than {_MAX_DEPTH} deep")


def get(values: dict[str, Any], key: str, kind: type) -> Any:
    """values[key] of exactly that type; integers from 0."""
    if key not in values:
        raise FormatError(f"header has no {key!r}")
    value = values[key]
    if type(value) is not kind or (type(value) is int and value < 0):
        raise FormatError(f"{key} is {reprlib.repr(value)}, expected {kind.__name__}")
    return value
