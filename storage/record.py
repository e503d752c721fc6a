"""One trace as one self-describing record: a checksummed header, then the columns.

The header says of every column what it is and where it lies, so a reader can fetch one column, or
some layers and rows of the routing, without the others. Every length in it is compared with what is
there before memory is taken.
"""

from __future__ import annotations

import reprlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3.columns import ALIGNMENTS
from r3.errors import FormatError, R3Error, TraceError
from r3.identity import Provenance, RolloutId
from r3.spec import RouterSpec
from r3.storage.codec import (
    RAW,
    Buffer,
    array_size,
    check_column_size,
    dtype_name,
    encode_column,
    encode_raw,
    find_codec,
)
from r3.storage.experts import MAX_SPANS, ExpertsLayout, Span
from r3.storage.header import Read, get, pack_header, read_packed
from r3.trace import RoutingTrace

EXPERTS = "routed_experts"
# a record's arrays may be so many times as large as the record, and this many bytes: no honest one
# comes near, and a hostile one cannot ask for memory that it does not itself nearly take
_EXPANSION, _FREE = 4096, 1 << 20


@dataclass(frozen=True)
class ColumnHeader:
    """Where a column lies in its record and how to read it.

    offset, size: bytes from the start of the record, and in it. crc32: of those bytes; None for
    routed_experts, whose parts have their own. layout, spans: of routed_experts only.
    """

    name: str
    align: str
    version: int
    dtype: str
    shape: tuple[int, ...]
    codec: str
    offset: int
    size: int
    crc32: int | None
    layout: ExpertsLayout | None = None
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class RecordHeader:
    """What a record says of its trace before any column is read."""

    rollout_id: RolloutId
    prompt_len: int
    digest: str
    provenance: Provenance
    columns: tuple[ColumnHeader, ...]

    def column(self, name: str) -> ColumnHeader | None:
        return next((c for c in self.columns if c.name == name), None)


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The first rows of a trace as rows that the file already has.

    exceptions: per MoE layer, the rows that differ (ascending) and their ids [count, top_k]; empty
    if none does.
    """

    spans: tuple[Span, ...] = ()
    exceptions: Sequence[tuple[np.ndarray, np.ndarray]] = ()

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.spans)


def encode_record(trace: RoutingTrace, codec: str, shared: SharedRows) -> list[Buffer]:
    """The bytes of a record, in pieces to be written one behind the other.

    Raises TraceError, naming the rollout, for a column or a provenance value that the format has no
    place for.
    """
    try:
        try:
            return _encode(trace, codec, shared, encode_column)
        except _TooDense:  # long runs of one token; leave them as they are
            return _encode(trace, codec, shared, lambda array: (RAW, encode_raw(array)))
    except FormatError as e:
        raise TraceError(f"rollout {trace.rollout_id} cannot be stored: {e}") from None


def _encode(trace: RoutingTrace, codec: str, shared: SharedRows, encode: Any) -> list[Buffer]:
    columns: list[dict[str, Any]] = []
    payloads: list[Buffer] = []
    for name, column in trace.columns.items():
        entry = {
            "name": name,
            "align": column.align,
            "version": column.version,
            "dtype": dtype_name(column.data.dtype),
            "shape": list(column.data.shape),
        }
        if name == EXPERTS:
            own = column.data[shared.rows :]
            if not trace.valid.all():
                own = own[trace.valid[shared.rows :]]
            counts = [len(rows) for rows, _ in shared.exceptions]
            layout = ExpertsLayout(find_codec(codec), trace.spec, len(own), shared.rows, counts)
            payload = layout.encode(own, shared.exceptions)
            entry |= {"codec": codec, "stored": len(own)}
            if shared.spans:
                entry["spans"] = [[s.record, s.start, s.rows] for s in shared.spans]
                entry["exceptions"] = counts
        else:
            entry["codec"], payload = encode(column.data)
            entry["crc32"] = zlib.crc32(payload)
        columns.append(entry | {"bytes": len(payload)})
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
    read_header(lambda offset, n: header[offset : offset + n], size, trace.spec)
    return [header, *payloads]


class _TooDense(FormatError):
    """Arrays out of proportion to their record."""


def read_header(read: Read, size: int, spec: RouterSpec) -> RecordHeader:
    """The header of a record of `size` bytes. Raises FormatError for anything but a whole one."""
    values, offset = read_packed(read, size)
    rollout = get(values, "rollout_id", str)
    try:
        rollout_id = RolloutId.parse(rollout)
        provenance = Provenance.from_dict(get(values, "provenance", dict))
    except R3Error as e:
        raise FormatError(str(e)) from None
    if str(rollout_id) != rollout:
        raise FormatError(f"rollout id {rollout!r}, expected it written {str(rollout_id)!r}")
    columns: list[ColumnHeader] = []
    for item in get(values, "columns", list):
        if type(item) is not dict:
            raise FormatError(f"column is {reprlib.repr(item)}, expected a map")
        column = _column(item, offset, spec)
        if column.name in {c.name for c in columns}:
            raise FormatError(f"two columns are named {column.name!r}")
        columns.append(column)
        offset += column.size
    if offset != size:
        raise FormatError(f"record has {size} bytes, expected {offset} by its header")
    arrays = sum(array_size(c.dtype, c.shape) for c in columns)
    if arrays > size * _EXPANSION + _FREE:
        raise _TooDense(f"arrays of {arrays} bytes in a record of {size}, which none can have")
    prompt_len, digest = get(values, "prompt_len", int), get(values, "digest", str)
    return RecordHeader(rollout_id, prompt_len, digest, provenance, tuple(columns))


def _column(item: dict[str, Any], offset: int, spec: RouterSpec) -> ColumnHeader:
    name = get(item, "name", str)
    try:
        shape = tuple(_integers(get(item, "shape", list), "shape"))
        codec, dtype = get(item, "codec", str), get(item, "dtype", str)
        size, align = get(item, "bytes", int), get(item, "align", str)
        if align not in ALIGNMENTS:
            raise FormatError(f"align is {align!r}, expected one of {ALIGNMENTS}")
        array_size(dtype, shape)
        crc32, layout = None, None
        spans: tuple[Span, ...] = ()
        if name == EXPERTS:
            layout, spans = _experts(item, codec, dtype, shape, spec)
            if size != layout.size:
                raise FormatError(f"{size} bytes, expected {layout.size} by its rows")
        else:
            crc32 = get(item, "crc32", int)
            check_column_size(codec, dtype, shape, size)
        version = get(item, "version", int)
    except FormatError as e:
        raise FormatError(f"column {reprlib.repr(name)}: {e}") from None
    return ColumnHeader(
        name, align, version, dtype, shape, codec, offset, size, crc32, layout, spans
    )


def _experts(
    item: dict[str, Any], codec: str, dtype: str, shape: tuple[int, ...], spec: RouterSpec
) -> tuple[ExpertsLayout, tuple[Span, ...]]:
    expected = (dtype_name(spec.dtype), (len(spec.moe_layers), spec.top_k))
    if (dtype, shape[1:]) != expected:
        raise FormatError(
            f"{dtype} of shape {list(shape)}, expected {expected[0]} of shape "
            f"[rows, {expected[1][0]}, {expected[1][1]}] by the file's routers"
        )
    stored, spans = get(item, "stored", int), []
    for span in get(item, "spans", list) if "spans" in item else []:
        if type(span) is not list or len(span) != 3:
            raise FormatError(f"span {reprlib.repr(span)}, expected a record, a row and a number")
        spans.append(Span(*_integers(span, "span")))
        if not spans[-1].rows:
            raise FormatError("span of no rows")
    counts = get(item, "exceptions", list) if spans else []
    shared = sum(span.rows for span in spans)
    if len(spans) > MAX_SPANS or shared + stored > shape[0]:
        raise FormatError(
            f"{len(spans)} spans with {shared} rows and {stored} stored rows, expected at most "
            f"{MAX_SPANS} and {shape[0]} rows"
        )
    if counts and (len(counts) != shape[1] or max(_integers(counts, "exceptions")) > shared):
        raise FormatError(
            f"exceptions are {reprlib.repr(counts)}, expected none, or {shape[1]} numbers of at "
            f"most {shared}"
        )
    return ExpertsLayout(find_codec(codec), spec, stored, shared, counts), tuple(spans)


def _integers(values: list[Any], name: str) -> list[int]:
    if any(type(n) is not int or not 0 <= n < 1 << 63 for n in values):
        raise FormatError(f"{name} is {reprlib.repr(values)}, expected integers from 0")
    return values
