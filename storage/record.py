"""One trace as one self-describing record: a checksummed msgpack header, then the columns.

The header says of every column what it is and where it lies, so a reader can fetch one column
without the others. Headers are untrusted: plain values only, bounded in size and depth, and every
length in them is compared with what is there before memory is taken.
"""

from __future__ import annotations

import reprlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from r3.errors import FormatError, R3Error, TraceError
from r3.identity import Provenance, RolloutId
from r3.spec import RouterSpec
from r3.storage.codec import (
    DEFAULT_CODEC,
    RAW,
    Buffer,
    decode_raw,
    dtype_name,
    encode_raw,
    find_codec,
    raw_size,
)
from r3.trace import ALIGNMENTS, Column, RoutingTrace

# `read(offset, size)`: that part of a record, in memory of its own; FormatError if it is not there
Read = Callable[[int, int], Buffer]

MAX_HEADER = 1 << 20  # bytes
_MAX_ITEMS = 1 << 16  # of one list or map in a header
_MAX_DEPTH = 16  # of lists and maps in each other
_PREFIX = struct.Struct("<II")  # length of the header, CRC-32 of that length and the header


@dataclass(frozen=True)
class ColumnHeader:
    """Where a column lies in its record and how to read it.

    offset, size: bytes from the start of the record, and in it. crc32: of those bytes.
    """

    name: str
    align: str
    version: int
    dtype: str
    shape: tuple[int, ...]
    codec: str
    offset: int
    size: int
    crc32: int


@dataclass(frozen=True)
class RecordHeader:
    """What a record says of its trace before any column is read."""

    rollout_id: RolloutId
    prompt_len: int
    digest: str
    provenance: Provenance
    columns: tuple[ColumnHeader, ...]


def encode_record(trace: RoutingTrace) -> list[Buffer]:
    """The bytes of a record, in pieces to be written one behind the other.

    Columns are views of the trace's arrays. Raises TraceError, naming the rollout, for a column
    or a provenance value that the format has no place for.
    """
    columns, payloads = [], []
    try:
        for name, column in trace.columns.items():
            if name == "routed_experts":
                codec = DEFAULT_CODEC
                payload = find_codec(codec).encode(column.data, trace.spec)
            else:
                codec, payload = RAW, encode_raw(column.data)
            columns.append(
                {
                    "name": name,
                    "align": column.align,
                    "version": column.version,
                    "dtype": dtype_name(column.data.dtype),
                    "shape": list(column.data.shape),
                    "codec": codec,
                    "bytes": len(payload),
                    "crc32": zlib.crc32(payload),
                }
            )
            payloads.append(payload)
        header = pack_header(
            {
                "rollout_id": str(trace.rollout_id),
                "prompt_len": int(trace.prompt_len),
                "digest": trace.digest,
                "provenance": trace.provenance.to_dict(),
                "columns": columns,
            }
        )
        size = len(header) + sum(map(len, payloads))
        read_header(lambda offset, n: header[offset : offset + n], size)
    except FormatError as e:
        raise TraceError(f"rollout {trace.rollout_id} cannot be stored: {e}") from None
    return [header, *payloads]


def read_header(read: Read, size: int) -> RecordHeader:
    """The header of a record of `size` bytes. Raises FormatError for anything but a whole one."""
    values, offset = read_packed(read, size)
    rollout = _get(values, "rollout_id", str)
    try:
        rollout_id = RolloutId.parse(rollout)
        provenance = Provenance.from_dict(_get(values, "provenance", dict))
    except R3Error as e:
        raise FormatError(str(e)) from None
    if str(rollout_id) != rollout:
        raise FormatError(f"rollout id {rollout!r}, expected it written {str(rollout_id)!r}")
    columns: list[ColumnHeader] = []
    for item in _get(values, "columns", list):
        if type(item) is not dict:
            raise FormatError(f"column is {reprlib.repr(item)}, expected a map")
        column = _column(item, offset)
        if column.name in {c.name for c in columns}:
            raise FormatError(f"two columns are named {column.name!r}")
        columns.append(column)
        offset += column.size
    if offset != size:
        raise FormatError(f"record has {size} bytes, expected {offset} by its header")
    prompt_len, digest = _get(values, "prompt_len", int), _get(values, "digest", str)
    return RecordHeader(rollout_id, prompt_len, digest, provenance, tuple(columns))


def read_trace(read: Read, size: int, spec: RouterSpec) -> RoutingTrace:
    """The trace of a record of `size` bytes: checksums, content and digest are all checked.

    Raises FormatError, naming the rollout. Warns as RoutingTrace does.
    """
    header = read_header(read, size)
    try:
        columns = {
            c.name: Column(_decode(read, c, spec), c.align, c.version) for c in header.columns
        }
        trace = RoutingTrace(spec, header.prompt_len, columns, header.rollout_id, header.provenance)
    except FormatError as e:
        raise FormatError(f"rollout {header.rollout_id}: {e}") from None
    except TraceError as e:  # names the rollout itself
        raise FormatError(str(e)) from None
    if trace.digest != header.digest:
        raise FormatError(
            f"rollout {header.rollout_id}: its content has digest {trace.digest}, expected "
            f"{reprlib.repr(header.digest)}"
        )
    return trace


def _column(item: dict[str, Any], offset: int) -> ColumnHeader:
    name = _get(item, "name", str)
    try:
        shape = tuple(_get(item, "shape", list))
        if any(type(n) is not int for n in shape):
            raise FormatError(f"shape is {reprlib.repr(shape)}, expected integers")
        column = ColumnHeader(
            name=name,
            align=_get(item, "align", str),
            version=_get(item, "version", int),
            dtype=_get(item, "dtype", str),
            shape=shape,
            codec=_get(item, "codec", str),
            offset=offset,
            size=_get(item, "bytes", int),
            crc32=_get(item, "crc32", int),
        )
        if column.align not in ALIGNMENTS:
            raise FormatError(f"align is {column.align!r}, expected one of {ALIGNMENTS}")
        unpacked = raw_size(column.dtype, shape)
        if name == "routed_experts":
            find_codec(column.codec)
        elif column.codec != RAW:
            raise FormatError(f"codec {column.codec!r}, expected {RAW!r}")
        elif column.size != unpacked:
            raise FormatError(
                f"{column.size} bytes, expected {unpacked} for {column.dtype} of shape "
                f"{list(shape)}"
            )
    except FormatError as e:
        raise FormatError(f"column {reprlib.repr(name)}: {e}") from None
    return column


def _decode(read: Read, column: ColumnHeader, spec: RouterSpec) -> np.ndarray:
    data = read(column.offset, column.size)
    found = zlib.crc32(data)
    if found != column.crc32:
        raise FormatError(
            f"column {column.name!r}: checksum {found:08x}, expected {column.crc32:08x}"
        )
    try:
        if column.name != "routed_experts":
            return decode_raw(data, column.dtype, column.shape)
        expected = (dtype_name(spec.dtype), (len(spec.moe_layers), spec.top_k))
        if (column.dtype, column.shape[1:]) != expected:
            raise FormatError(
                f"{column.dtype} of shape {list(column.shape)}, expected {expected[0]} of shape "
                f"[rows, {expected[1][0]}, {expected[1][1]}] by the file's routers"
            )
        return find_codec(column.codec).decode(data, column.shape[0], spec)
    except FormatError as e:
        raise FormatError(f"column {column.name!r}: {e}") from None


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
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if type(item) is dict:
                inner.extend(item.values())
            elif type(item) is list:
                inner.extend(item)
            elif type(item) not in (str, int, float, bool, type(None)):
                raise ValueError(f"a value of type {type(item).__name__}")
        if not inner:
            return
        level = inner
    raise ValueError(f"nested more than {_MAX_DEPTH} deep")


def _get(values: dict[str, Any], key: str, kind: type) -> Any:
    """values[key] of exactly that type; integers from 0."""
    if key not in values:
        raise FormatError(f"header has no {key!r}")
    value = values[key]
    if type(value) is not kind or (type(value) is int and value < 0):
        raise FormatError(f"{key} is {reprlib.repr(value)}, expected {kind.__name__}")
    return value
