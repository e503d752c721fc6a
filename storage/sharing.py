"""Which rows of a trace the file already has: prompts of a group, earlier turns of a conversation.

Engines route the same tokens alike, mostly: a prompt that comes from the prefix cache has the very
same rows, one that is computed again differs in a few cells. So a trace is compared with the record
that begins with most of its tokens, row by row; its first rows are then written as rows of that
record and exceptions. Nothing is assumed: what is read back is what was appended.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from r3.checks import sort_rows
from r3.errors import FormatError
from r3.storage.codec import CHUNK_ROWS, ChunkCodec
from r3.storage.experts import MAX_SPANS, Span
from r3.storage.record import SharedRows
from r3.storage.stored import Records
from r3.trace import RoutingTrace

_BLOCK = 64  # tokens; shorter beginnings are not looked for
_MAX_BLOCKS = 1 << 16  # that are remembered, 4 million tokens
# share of cells from which on rows are better stored anew, to be shared from there: the rest of a
# group of eight or more would else pay for the same exceptions again and again
_TOO_DIFFERENT = 1 / 8
_WORTH = 1024  # bits that sharing has to save, about what it adds to the header


@dataclass(frozen=True)
class _Stored:
    """Where the first rows of an appended trace are: rows stored by records, as far as all were
    captured."""

    frame: int
    spans: tuple[Span, ...]

    def first(self, rows: int) -> tuple[Span, ...]:
        spans = []
        for span in self.spans[:MAX_SPANS]:
            if rows <= 0:
                break
            spans.append(Span(span.record, span.start, min(span.rows, rows)))
            rows -= span.rows
        return tuple(spans)


class SharedPrefixes:
    """Remembers the beginnings of appended traces and finds the longest for a new one."""

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec
        # digest of the first i * _BLOCK tokens -> a trace that began so and has the rows
        self._blocks: OrderedDict[bytes, _Stored] = OrderedDict()

    def find(self, trace: RoutingTrace, file: Records) -> SharedRows:
        """The rows of `trace` that are best taken from what `file` has."""
        for block in reversed(_block_digests(trace)):
            if block in self._blocks:
                self._blocks.move_to_end(block)
                try:
                    return self._compare(trace, self._blocks[block], file)
                except FormatError:  # damaged meanwhile: what is new is none the worse for it
                    del self._blocks[block]
        return SharedRows()

    def add(self, trace: RoutingTrace, frame: int, shared: SharedRows) -> None:
        """Remember a trace whose record is at `frame`."""
        spans = list(shared.spans)
        own = _captured(trace) - shared.rows
        if own > 0:
            spans.append(Span(frame, 0, own))
        stored = _Stored(frame, tuple(spans))
        # beginnings of which rows are missing here are left to a later trace that has them
        rows = sum(span.rows for span in spans[:MAX_SPANS])
        for i, block in enumerate(_block_digests(trace)[: (rows + 1) // _BLOCK], 1):
            if i * _BLOCK > shared.rows + 1:  # what was there was not worth sharing
                self._blocks.pop(block, None)
            self._blocks.setdefault(block, stored)
        while len(self._blocks) > _MAX_BLOCKS:
            self._blocks.popitem(last=False)

    def _compare(self, trace: RoutingTrace, stored: _Stored, file: Records) -> SharedRows:
        tokens = file.record_at(stored.frame).column("token_ids")
        n = min(len(tokens), trace.num_tokens)
        differ = tokens[:n] != trace.token_ids[:n]
        spans = stored.first(min(int(differ.argmax()) if differ.any() else n, _captured(trace)))
        rows = sum(span.rows for span in spans)
        if len(spans) == MAX_SPANS:  # store it whole, for those that follow to share in one piece
            return SharedRows()
        spec = trace.spec
        theirs = np.empty((rows, len(spec.moe_layers), spec.top_k), spec.dtype)
        layers, at = range(len(spec.moe_layers)), 0
        for span in spans:
            part = theirs[at : at + span.rows]
            file.record_at(span.record).read_stored(layers, span.start, part)
            at += span.rows
        mine = trace.routed_experts[:rows]
        if not self._codec.keeps_order:
            mine = sort_rows(mine, trace.valid[:rows])
        cells = (mine != theirs).any(axis=-1)
        # the number of rows that saves most: each row costs its exceptions, and else its cells
        cell = 8 * self._codec.size(CHUNK_ROWS, spec) / CHUNK_ROWS
        exception = cell + max(1, rows.bit_length())
        saved = np.cumsum(cell * cells.shape[1] - exception * cells.sum(axis=1))
        if not rows or saved.max() < _WORTH:
            return SharedRows()
        rows = int(saved.argmax()) + 1
        if cells[:rows].mean() > _TOO_DIFFERENT:
            return SharedRows()
        exceptions = []
        for layer in layers if cells[:rows].any() else ():
            different = np.flatnonzero(cells[:rows, layer])
            exceptions.append((different, trace.routed_experts[different, layer]))
        return SharedRows(_Stored(stored.frame, spans).first(rows), exceptions)


def _captured(trace: RoutingTrace) -> int:
    """How many rows there are before the first that was not captured."""
    return trace.num_rows if trace.valid.all() else int(trace.valid.argmin())


def _block_digests(trace: RoutingTrace) -> list[bytes]:
    """For each i, the digest of the first i * _BLOCK tokens."""
    digests = []
    last = b""
    tokens = np.ascontiguousarray(trace.token_ids)
    for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
        block = tokens[end - _BLOCK : end].tobytes()
        last = hashlib.blake2b(last + block, digest_size=16).digest()
        digests.append(last)
    return digests
