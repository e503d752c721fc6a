"""How rows travel from an engine's routers to a trace: packed with their weight version.

A packed row is [layers + P, top_k] of the spec's dtype. The last P planes hold, in their first
four bytes, the little-endian weight version plus one; zero there means that the row is missing.
So a row and what is known of it are one item to store, slice and send, and memory that was never
written reads as missing.

Packed arrays have four axes, [rows, 1, layers + P, top_k]: nobody can take them for plain ones.
Numpy only.
"""

from __future__ import annotations

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


def pack(ids: np.ndarray, planes: np.ndarray, spec: RouterSpec) -> np.ndarray:
    """Packed rows of `ids`, integers [rows, layers, top_k], under one `stamp`."""
    layers = len(spec.moe_layers)
    rows = np.empty((len(ids), 1, layers + len(planes), spec.top_k), spec.dtype)
    rows[:, 0, :layers] = ids
    rows[:, 0, layers:] = planes
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
    planes = np.ascontiguousarray(rows[:, 0, layers:]).reshape(len(rows), -1).view(np.uint8)
    versions = np.ascontiguousarray(planes[:, :4]).view("<u4")[:, 0].astype(np.int64) - 1
    ids = rows[:, 0, :layers]
    missing = versions < 0
    if missing.any():
        ids = ids.astype(np.int16 if ids.dtype == np.uint8 else np.int32)
        ids[missing] = -1
    return ids, versions


class SlotStore:
    """Packed rows by physical KV slot: a row lives exactly as long as its keys and values.

    Memory is taken as slots are first written.
    """

    def __init__(self, num_blocks: int, block_size: int, spec: RouterSpec) -> None:
        self.block_size = block_size
        self._layers = len(spec.moe_layers)
        shape = (num_blocks * block_size, 1, self._layers + version_planes(spec), spec.top_k)
        self._rows = np.zeros(shape, spec.dtype)  # untouched pages cost no memory

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """slots: int64 [n]; rows: packed [n, ...]."""
        self._rows[slots] = rows

    def forget_block(self, block: int) -> None:
        """Mark the rows of a KV block missing: it belongs to another request from now on."""
        start = block * self.block_size
        self._rows[start : start + self.block_size, :, self._layers :] = 0

    def copy_block(self, source: int, target: int) -> None:
        """Follow a copy of a whole KV block."""
        a, b, n = source * self.block_size, target * self.block_size, self.block_size
        self._rows[b : b + n] = self._rows[a : a + n]

    def read(self, blocks: np.ndarray, start: int, end: int) -> np.ndarray:
        """Packed rows of positions start..end of a sequence that lies in `blocks`, int64."""
        block, offset = np.divmod(np.arange(start, end), self.block_size)
        return self._rows[blocks[block] * self.block_size + offset]
