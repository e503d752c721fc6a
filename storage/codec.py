"""Arrays as bytes and back: the seam at which codecs for expert ids are put in.

A record names the codec of each of its columns. `routed_experts` is written by a codec from
`CODECS`, every other column is "raw". Decoders take untrusted bytes: they compare all sizes before
they ask for memory, and raise FormatError for whatever does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from r3.errors import FormatError
from r3.spec import RouterSpec

Buffer = bytes | bytearray | memoryview

RAW = "raw"
# the dtypes that a raw column can have, little-endian; no objects, no text, no structures
DTYPES = {
    name: np.dtype(name if name == "bool" else "<" + name)
    for name in ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_AXES = 8
_MAX_BYTES = 1 << 62  # below what numpy can address, so that reshape never fails


class Codec(Protocol):
    """Turns expert ids [rows, MoE layers, top_k] into bytes and back, exactly, as sets per row."""

    name: str

    def encode(self, ids: np.ndarray, spec: RouterSpec) -> Buffer:
        """Bytes of `ids`, uint8 or uint16 (spec.dtype) [rows, MoE layers, top_k]."""
        ...

    def decode(self, data: Buffer, rows: int, spec: RouterSpec) -> np.ndarray:
        """Ids [rows, MoE layers, top_k] of spec.dtype. Raises FormatError for a wrong size."""
        ...


class PlainCodec:
    """The ids as they are: uint8 to 256 experts, else little-endian uint16, in C order.

    Keeps the order within the top_k. Decoding makes a view of `data`, not a copy.
    """

    name = "plain"

    def encode(self, ids: np.ndarray, spec: RouterSpec) -> Buffer:
        return _bytes_of(ids.astype(spec.dtype.newbyteorder("<"), copy=False))

    def decode(self, data: Buffer, rows: int, spec: RouterSpec) -> np.ndarray:
        name = _NAMES[spec.dtype.newbyteorder("<")]
        return decode_raw(data, name, (rows, len(spec.moe_layers), spec.top_k))


CODECS: dict[str, Codec] = {codec.name: codec for codec in (PlainCodec(),)}
DEFAULT_CODEC = PlainCodec.name


def find_codec(name: str) -> Codec:
    """The codec of that name. Raises FormatError for one that this version does not have."""
    if name not in CODECS:
        raise FormatError(f"codec {name!r} for routed_experts, expected one of {sorted(CODECS)}")
    return CODECS[name]


def dtype_name(dtype: np.dtype) -> str:
    """How a record names `dtype` of either byte order. Raises FormatError if it is not plain."""
    name = _NAMES.get(dtype.newbyteorder("<"))
    if name is None:
        raise FormatError(f"dtype {dtype}, expected one of {', '.join(DTYPES)}")
    return name


def raw_size(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a raw array. Raises FormatError for a dtype or shape that no record can have."""
    if dtype not in DTYPES:
        raise FormatError(f"dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not 1 <= len(shape) <= _MAX_AXES or min(shape) < 0:
        raise FormatError(f"shape {list(shape)[:9]}, expected 1 to {_MAX_AXES} axes of 0 or more")
    item = DTYPES[dtype].itemsize
    if math.prod(max(1, n) for n in shape) * item > _MAX_BYTES:
        raise FormatError(f"shape {list(shape)} is larger than any file")
    return math.prod(shape) * item


def encode_raw(array: np.ndarray) -> Buffer:
    """Little-endian bytes of `array` in C order; a view where the array already is that."""
    return _bytes_of(array.astype(array.dtype.newbyteorder("<"), copy=False))


def decode_raw(data: Buffer, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """The array of that dtype name and shape, a view of `data`.

    Raises FormatError if `data` is not exactly as long as that, or holds a bool that is not 0 or 1.
    """
    expected = raw_size(dtype, shape)
    if len(data) != expected:
        raise FormatError(
            f"{len(data)} bytes, expected {expected} for {dtype} of shape {list(shape)}"
        )
    array = np.frombuffer(data, dtype=DTYPES[dtype]).reshape(shape)
    if dtype == "bool" and expected and array.view(np.uint8).max() > 1:
        raise FormatError(f"a bool stored as {array.view(np.uint8).max()}, expected 0 or 1")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
