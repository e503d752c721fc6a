"""How the column routed_experts lies in its record: chunks by layer, then exceptions by layer.

Of a record's rows the first `shared` may be those of earlier records (`spans`); what differs from
them is written as exceptions, cell by cell. The rows behind them that were captured are stored
here, each layer in chunks of CHUNK_ROWS rows. Every size follows from the header's numbers, so a
reader goes straight to the layers and rows it wants. Each chunk has a checksum behind it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from r3.errors import FormatError
from r3.spec import RouterSpec
from r3.storage.codec import CHUNK_ROWS, Buffer, ChunkCodec
from r3.storage.enumeration import from_bits, to_bits
from r3.storage.header import Read

MAX_SPANS = 256
_CRC = 4  # bytes behind each chunk


@dataclass(frozen=True)
class Span:
    """`rows` rows that the record whose frame is at byte `record` of the file stores from its
    stored row `start` on."""

    record: int
    start: int
    rows: int


@dataclass(frozen=True, eq=False)
class ExpertsLayout:
    """Where chunks and exceptions lie, in bytes from the start of the column.

    stored: rows that are stored here. shared: rows that spans bring. exceptions: per MoE layer,
    how many of the shared cells differ; empty if none does.
    """

    codec: ChunkCodec
    spec: RouterSpec
    stored: int
    shared: int
    exceptions: Sequence[int]

    @cached_property
    def _chunk(self) -> int:
        return self.codec.size(CHUNK_ROWS, self.spec) + _CRC

    @cached_property
    def _layer(self) -> int:
        whole, rest = divmod(self.stored, CHUNK_ROWS)
        return whole * self._chunk + (self.codec.size(rest, self.spec) + _CRC if rest else 0)

    @cached_property
    def _exception_ends(self) -> list[int]:
        ends = [self._layer * len(self.spec.moe_layers)]
        for count in self.exceptions:
            size = -(-count * self._position_bits // 8) + self.codec.size(count, self.spec) + _CRC
            ends.append(ends[-1] + (size if count else 0))
        return ends

    @property
    def _position_bits(self) -> int:
        return max(1, (self.shared - 1).bit_length())

    @property
    def size(self) -> int:
        """Bytes of the whole column."""
        return self._exception_ends[-1]

    def encode(
        self, ids: np.ndarray, exceptions: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> Buffer:
        """The bytes of the column.

        ids [stored, MoE layers, top_k]; exceptions: per MoE layer, the shared rows that differ
        (ascending) and their ids [count, top_k]; empty if none does.
        """
        out = np.zeros(self.size, np.uint8)
        for first in range(0, self.stored, CHUNK_ROWS):
            part = ids[first : first + CHUNK_ROWS]
            size = self.codec.size(len(part), self.spec)
            for layer in range(part.shape[1]):
                at = layer * self._layer + first // CHUNK_ROWS * self._chunk
                self.codec.encode(part[:, layer], self.spec, out[at : at + size])
                _seal(out[at : at + size + _CRC])
        for layer, (rows, cells) in enumerate(exceptions):
            begin, end = self._exception_ends[layer : layer + 2]
            if begin < end:
                bits = np.packbits(
                    to_bits(rows.astype(np.uint64), self._position_bits), bitorder="little"
                )
                out[begin : begin + len(bits)] = bits
                self.codec.encode(cells, self.spec, out[begin + len(bits) : end - _CRC])
                _seal(out[begin:end])
        return out.data

    def read(self, read: Read, layers: Sequence[int], start: int, out: np.ndarray) -> None:
        """Fill out [rows, layers, top_k] with the stored rows from `start` on.

        layers: positions among the MoE layers. Raises FormatError, naming layer and rows.
        """
        end = start + len(out)
        for block in range(start // CHUNK_ROWS, -(-end // CHUNK_ROWS)):
            first = block * CHUNK_ROWS
            rows = min(CHUNK_ROWS, self.stored - first)
            low, high = max(start, first), min(end, first + rows)
            for i, layer in enumerate(layers):
                at = layer * self._layer + block * self._chunk
                try:
                    data = _unseal(read(at, self.codec.size(rows, self.spec) + _CRC))
                    if high - low == rows:
                        self.codec.decode(data, self.spec, out[low - start : high - start, i])
                        continue
                    whole = np.empty((rows, self.spec.top_k), self.spec.dtype)
                    self.codec.decode(data, self.spec, whole)
                except FormatError as e:
                    where = f"layer {self.spec.moe_layers[layer]}, stored rows {first} to"
                    raise FormatError(f"{where} {first + rows - 1}: {e}") from None
                out[low - start : high - start, i] = whole[low - first : high - first]

    def read_exceptions(self, read: Read, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The shared rows that differ in a layer, ascending, and their ids [count, top_k]."""
        count = self.exceptions[layer] if self.exceptions else 0
        cells = np.empty((count, self.spec.top_k), self.spec.dtype)
        if not count:
            return np.empty(0, np.int64), cells
        begin, end = self._exception_ends[layer : layer + 2]
        try:
            data = _unseal(read(begin, end - begin))
            bits, width = -(-count * self._position_bits // 8), count * self._position_bits
            stream = np.unpackbits(data[:bits], bitorder="little")
            rows = from_bits(stream[:width], count).astype(np.int64)
            if stream[width:].any() or (rows[1:] <= rows[:-1]).any() or rows[-1] >= self.shared:
                raise FormatError(f"rows that are not ascending below {self.shared}")
            self.codec.decode(data[bits:], self.spec, cells)
        except FormatError as e:
            where = f"layer {self.spec.moe_layers[layer]}, exceptions"
            raise FormatError(f"{where}: {e}") from None
        return rows, cells


def _seal(chunk: np.ndarray) -> None:
    chunk[-_CRC:] = np.frombuffer(zlib.crc32(chunk[:-_CRC].data).to_bytes(_CRC, "little"), np.uint8)


def _unseal(chunk: Buffer) -> np.ndarray:
    data = np.frombuffer(chunk, np.uint8)
    found, expected = zlib.crc32(chunk[:-_CRC]), int.from_bytes(data[-_CRC:].tobytes(), "little")
    if found != expected:
        raise FormatError(f"checksum {found:08x}, expected {expected:08x}")
    return data[:-_CRC]
