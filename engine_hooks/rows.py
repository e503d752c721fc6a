"""How rows travel from an engine's routers to a trace: packed with their weight version.

A packed row is [layers + P, top_k] of the spec's dtype. The last P planes hold, in their first
four bytes, the little-endian weight version plus one; zero there means that the row is missing.
So a row and what is known of it are one item to store, slice and send, and memory that was never
written reads as missing.

Packed arrays have four axes, [rows, 1, layers + P, top_k]: nobody can take them for plain ones.
Numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from r3.errors import TraceError
from r3.spec import RouterSpec

MAX_WEIGHT_VERSION = 2**32 - 2


def version_planes(spec: RouterSpec) -> int:
    """Planes of top_k ids that hold four bytes."""
    return -(-4 // (spec.top_k * spec.dtype.itemsize))


def stamp(version: int, spec: RouterSpec) -> np.ndarray:
    """The version planes [P, top_k] of rows computed under `version`, 0..MAX_WEIGHT_VERSION."""
    if not 0 <= version <= MAX_WEIGHT_VERSION:
        raise TraceError(f"weight version {version}, expected 0..{MAX_WEIGHT_VERSION}")
    planes = np.zeros((version_planes(spec), spec.top_k), spec.dtype)
    planes.view(np.uint8).reshape(-1)[:4] = np.frombuffer((version + 1).to_bytes(4, "little"), "u1")
    return planes


def pack(ids: np.ndarray, version: int, spec: RouterSpec) -> np.ndarray:
    """Packed rows of `ids`, integers [rows, layers, top_k], computed under one version."""
    planes = stamp(version, spec)
    rows = np.empty((len(ids), 1, len(spec.moe_layers) + len(planes), spec.top_k), spec.dtype)
    rows[:, 0, : -len(planes)] = ids
    rows[:, 0, -len(planes) :] = planes
    return rows


def unpack(rows: np.ndarray, spec: RouterSpec) -> tuple[np.ndarray, np.ndarray]:
    """Ids [rows, layers, top_k] and int64 weight versions [rows] of packed rows.

    Missing rows have version -1 and ids -1; ids are then of a signed type. Raises TraceError for
    an array that is not packed rows of `spec`.
    """
    layers = len(spec.moe_layers)
    expected = (1, layers + version_planes(spec), spec.top_k)
    if rows.ndim != 4 or rows.shape[1:] != expected or rows.dtype != spec.dtype:
        raise TraceError(
            f"packed rows have shape {list(rows.shape)} and dtype {rows.dtype}, expected "
            f"[rows, {', '.join(map(str, expected))}] and {spec.dtype}"
        )
    planes = np.ascontiguousarray(rows[:, 0, layers:]).view(np.uint8)
    planes = planes.reshape(len(rows), version_planes(spec) * spec.top_k * spec.dtype.itemsize)
    versions = np.ascontiguousarray(planes[:, :4]).view("<u4")[:, 0].astype(np.int64) - 1
    ids = rows[:, 0, :layers]
    missing = versions < 0
    if missing.any():
        ids = ids.astype(np.int16 if ids.dtype == np.uint8 else np.int32)
        ids[missing] = -1
    return ids, versions


class SlotStore:
    """Packed rows by physical KV slot: a row lives exactly as long as its keys and values.

    Time is counted in passes of the model. A row counts only if it was written since its block was
    last given out; so a block that changes hands, or is filled from elsewhere, has no rows until
    something is computed into it. Writes are gathered and scattered many passes at a time: between
    two passes there is little time and much to do.

    Memory is taken as slots are first written.
    """

    _MOST_PASSES, _MOST_ROWS = 64, 8192  # gathered before they are scattered

    def __init__(self, num_blocks: int, block_size: int, spec: RouterSpec) -> None:
        self.block_size = block_size
        self._layers = len(spec.moe_layers)
        slots = num_blocks * block_size
        shape = (slots, 1, self._layers + version_planes(spec), spec.top_k)
        self._rows = np.zeros(shape, spec.dtype)  # untouched pages cost no memory
        self._written = np.zeros(slots, np.int64)  # pass in which the slot was last written
        self._given_out = np.zeros(num_blocks, np.int64)  # pass before which its block was
        # the rows with one item each: numpy scatters them several times faster
        self._item = np.dtype((np.void, self._rows[0].nbytes))
        self._items = self._rows.reshape(-1).view(self._item)
        self._pass = 1
        self._waiting: list[tuple[np.ndarray, np.ndarray, int]] = []
        self._waiting_rows = 0

    def next_pass(self, given_out: Iterable[int], copies: Iterable[tuple[int, int]]) -> None:
        """Begin a pass: blocks given out for it, and whole blocks (from, to) copied before it."""
        self._pass += 1
        for block in given_out:
            self._given_out[block] = self._pass
        for source, target in copies:
            self._scatter()
            a, b, n = source * self.block_size, target * self.block_size, self.block_size
            self._rows[b : b + n] = self._rows[a : a + n]
            known = self._written[a : a + n] >= self._given_out[source]
            self._written[b : b + n] = np.where(known, self._pass, 0)

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Rows computed in this pass. slots: int64 [n]; rows: packed [n, ...], contiguous.

        Both are kept and must not change.
        """
        self._waiting.append((slots, rows, self._pass))
        self._waiting_rows += len(slots)
        if len(self._waiting) >= self._MOST_PASSES or self._waiting_rows >= self._MOST_ROWS:
            self._scatter()

    def _scatter(self) -> None:
        if not self._waiting:
            return
        # of several rows for one slot numpy keeps the last, which is the latest
        slots = np.concatenate([slots for slots, _, _ in self._waiting])
        rows = np.concatenate([rows for _, rows, _ in self._waiting])
        self._items[slots] = rows.reshape(-1).view(self._item)
        passes = [number for _, _, number in self._waiting]
        self._written[slots] = np.repeat(passes, [len(slots) for slots, _, _ in self._waiting])
        self._waiting, self._waiting_rows = [], 0

    def read(self, blocks: np.ndarray, start: int, end: int) -> np.ndarray:
        """Packed rows of positions start..end of a sequence that lies in `blocks`, int64."""
        self._scatter()
        block, offset = np.divmod(np.arange(start, end), self.block_size)
        slots = blocks[block] * self.block_size + offset
        rows = self._rows[slots]
        stale = self._written[slots] < self._given_out[blocks[block]]
        stale |= self._written[slots] == 0
        rows[stale, :, self._layers :] = 0
        return rows
