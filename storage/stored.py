"""A record in a file, read part by part: its header, a column, some layers and rows, the trace."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from r3.columns import Column
from r3.errors import FormatError, SpecError, TraceError
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.codec import Buffer, decode_column
from r3.storage.frames import FRAME, RECORD, FileHeader
from r3.storage.record import EXPERTS, ColumnHeader, RecordHeader, read_header
from r3.trace import RoutingTrace

_RECENT = 512  # records that are kept; more than one record can share rows of


class Records(Protocol):
    """What a record needs of the file that it is in."""

    spec: RouterSpec

    def read(self, offset: int, size: int) -> Buffer:
        """Bytes of the file; FormatError if they are not there."""
        ...

    def record_at(self, frame: int) -> StoredRecord:
        """The record whose frame is at that byte; FormatError if there is none."""
        ...


@dataclass(frozen=True, eq=False)
class RoutingSlice:
    """Some layers of some tokens of one rollout, aligned to tokens as RoutingBatch is.

    layers: decoder layer indices. start: position of the first token. token_ids int32 [t];
    routed_experts uint8 or uint16 [t, layers, top_k], zeros where not valid; valid bool [t], false
    for rows that were not captured and for the last token of the rollout.
    """

    rollout_id: RolloutId
    layers: tuple[int, ...]
    start: int
    token_ids: np.ndarray
    routed_experts: np.ndarray
    valid: np.ndarray


@dataclass(frozen=True, eq=False)
class StoredRecord:
    """The record of `size` bytes at byte `offset` of a file; its frame is at byte `frame`.

    Whatever does not fit is a FormatError that names the rollout, once the header is read.
    """

    file: Records
    frame: int
    offset: int
    size: int

    @cached_property
    def header(self) -> RecordHeader:
        return read_header(self._read, self.size, self.file.spec)

    @cached_property
    def experts(self) -> ColumnHeader:
        """The header of routed_experts, which is there and has a row less than tokens."""
        experts, tokens = self.header.column(EXPERTS), self.header.column("token_ids")
        if experts is None or tokens is None:
            missing = EXPERTS if experts is None else "token_ids"
            raise FormatError(f"rollout {self.header.rollout_id}: column {missing!r} is missing")
        if len(tokens.shape) != 1 or tokens.shape[0] != experts.shape[0] + 1:
            raise FormatError(
                f"rollout {self.header.rollout_id}: {experts.shape[0]} rows, expected one less "
                f"than the tokens, of shape {list(tokens.shape)}"
            )
        return experts

    def column(self, name: str) -> np.ndarray:
        """The array of a column other than routed_experts."""
        header = self.header.column(name)
        if header is None or header.layout is not None:
            raise KeyError(f"rollout {self.header.rollout_id} has no column {name!r} to read so")
        data = self._read(header.offset, header.size)
        try:
            if (found := zlib.crc32(data)) != header.crc32:
                raise FormatError(f"checksum {found:08x}, expected {header.crc32:08x}")
            return decode_column(header.codec, data, header.dtype, header.shape)
        except FormatError as e:
            raise FormatError(f"rollout {self.header.rollout_id}: column {name!r}: {e}") from None

    @cached_property
    def _valid(self) -> np.ndarray | None:
        """bool [rows]; None if all rows were captured. Agrees with what is stored."""
        layout, rows = self.experts.layout, self.experts.shape[0]
        assert layout is not None
        found, valid = rows, None
        if self.header.column("valid") is not None:
            valid = self.column("valid")
            if valid.shape != (rows,) or valid.dtype != bool:
                raise FormatError(
                    f"rollout {self.header.rollout_id}: column 'valid' has shape "
                    f"{list(valid.shape)} and dtype {valid.dtype}, expected bool [{rows}]"
                )
            found = int(valid.sum()) if valid[: layout.shared].all() else -1
        if found != layout.stored + layout.shared:
            raise FormatError(
                f"rollout {self.header.rollout_id}: {layout.shared} shared and {layout.stored} "
                f"stored rows, expected the {found if found >= 0 else 'first'} captured ones"
            )
        return valid

    def routed_experts(self, layers: Sequence[int], start: int, stop: int) -> np.ndarray:
        """Ids [stop - start, layers, top_k] of rows start .. stop; zeros for rows not captured.

        layers: positions among the MoE layers, each once.
        """
        try:
            return self._routed_experts(layers, start, stop)
        except FormatError as e:
            where = f"rollout {self.header.rollout_id}: column {EXPERTS!r}: "
            raise FormatError(where + str(e).removeprefix(where)) from None

    def _routed_experts(self, layers: Sequence[int], start: int, stop: int) -> np.ndarray:
        layout, spec, valid = self.experts.layout, self.file.spec, self._valid
        assert layout is not None
        own = max(start, min(stop, layout.shared))
        if valid is None:
            out = np.empty((stop - start, len(layers), spec.top_k), spec.dtype)
            self.read_stored(layers, own - layout.shared, out[own - start :])
        else:
            out = np.zeros((stop - start, len(layers), spec.top_k), spec.dtype)
            mask = valid[own:stop]
            before = int(valid[layout.shared : own].sum())
            part = np.empty((int(mask.sum()), *out.shape[1:]), spec.dtype)
            self.read_stored(layers, before, part)
            out[own - start :][mask] = part
        if start < own:
            self._read_shared(layers, start, out[: own - start])
        return out

    def read_stored(self, layers: Sequence[int], start: int, out: np.ndarray) -> None:
        """Fill out [rows, layers, top_k] with rows that are stored in this record."""
        column = self.experts
        assert column.layout is not None
        if start + len(out) > column.layout.stored:
            raise FormatError(
                f"rows {start} to {start + len(out) - 1} of what rollout {self.header.rollout_id} "
                f"stores, expected less than its {column.layout.stored}"
            )
        if len(out):
            column.layout.read(self._read_experts, layers, start, out)

    def _read_shared(self, layers: Sequence[int], start: int, out: np.ndarray) -> None:
        column = self.experts
        assert column.layout is not None
        at, stop = 0, start + len(out)
        for span in column.spans:
            low, high = max(start, at), min(stop, at + span.rows)
            if low < high:
                if span.record >= self.frame:
                    raise FormatError(f"shares rows of byte {span.record}, expected earlier ones")
                other = self.file.record_at(span.record)
                if other.experts.codec != column.codec:
                    raise FormatError(f"shares rows in codec {other.experts.codec!r}")
                other.read_stored(layers, span.start + low - at, out[low - start : high - start])
            at += span.rows
        for i, layer in enumerate(layers):
            rows, cells = column.layout.read_exceptions(self._read_experts, layer)
            inside = (rows >= start) & (rows < stop)
            out[rows[inside] - start, i] = cells[inside]

    def slice(self, layers: Sequence[int] | None, tokens: slice) -> RoutingSlice:
        """Some layers (decoder layer indices; all if None) of some tokens (step 1)."""
        spec, n = self.file.spec, self.experts.shape[0] + 1
        chosen = spec.moe_layers if layers is None else tuple(layers)
        if not isinstance(tokens, slice) or tokens.step not in (None, 1):
            raise TraceError(f"tokens are {tokens!r}, expected a slice with a step of 1")
        start, stop, _ = tokens.indices(n)
        for layer in chosen:
            if layer not in spec.moe_layers:
                raise SpecError(f"layer {layer}, expected one of the MoE layers {spec.moe_layers}")
        stop = max(start, stop)
        # the last token of the rollout has no row
        first, last = min(start, n - 1), min(stop, n - 1)
        ids = self.routed_experts([spec.moe_layers.index(x) for x in chosen], first, last)
        valid = np.ones(last - first, bool)
        if self._valid is not None:
            valid[:] = self._valid[first:last]
        tail = (stop - start) - (last - first)
        return RoutingSlice(
            rollout_id=self.header.rollout_id,
            layers=chosen,
            start=start,
            token_ids=self.column("token_ids")[start:stop],
            routed_experts=np.pad(ids, ((0, tail), (0, 0), (0, 0))) if tail else ids,
            valid=np.pad(valid, (0, tail)) if tail else valid,
        )

    def trace(self) -> RoutingTrace:
        """The whole trace: checksums, content and digest are all checked.

        Warns as RoutingTrace does.
        """
        header, rows = self.header, self.experts.shape[0]
        columns = {}
        for c in header.columns:
            if c.name == EXPERTS:
                layers = range(len(self.file.spec.moe_layers))
                data = self.routed_experts(layers, 0, rows)
            else:
                data = self.column(c.name)
            columns[c.name] = Column(data, c.align, c.version)
        try:
            trace = RoutingTrace(
                self.file.spec, header.prompt_len, columns, header.rollout_id, header.provenance
            )
        except TraceError as e:  # names the rollout itself
            raise FormatError(str(e)) from None
        if trace.digest != header.digest:
            raise FormatError(
                f"rollout {header.rollout_id}: its content has digest {trace.digest}, expected "
                f"{header.digest[:40]!r}"
            )
        return trace

    def _read(self, offset: int, size: int) -> Buffer:
        if offset + size > self.size:
            raise FormatError(f"ends at byte {self.size}, expected {offset + size}")
        return self.file.read(self.offset + offset, size)

    def _read_experts(self, offset: int, size: int) -> Buffer:
        return self._read(self.experts.offset + offset, size)


class RecentRecords:
    """The records of a file that were asked for last, so that their headers are read once."""

    def __init__(self, file: Records) -> None:
        # a proxy, so that a file nobody has any more is closed at once, and gives up its lock
        self._file: Records = weakref.proxy(file)
        self._records: dict[int, StoredRecord] = {}

    def at(self, frame: int, header: FileHeader, end: int) -> StoredRecord:
        """The record whose frame is at that byte, in a file that ends at `end`.

        Raises FormatError if there is none.
        """
        record = self._records.get(frame)
        if record is None:
            data = bytes(self._file.read(frame, FRAME.size))
            marker, size = header.parse_frame(data, frame)
            if marker != RECORD or size > end - frame - FRAME.size:
                raise FormatError(f"{size} bytes of {marker!r}, expected a whole record")
            record = StoredRecord(self._file, frame, frame + FRAME.size, size)
            if len(self._records) >= _RECENT:
                self._records.clear()
            self._records[frame] = record
        return record

    def clear(self) -> None:
        self._records.clear()
