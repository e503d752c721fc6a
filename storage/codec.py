"""Arrays as bytes and back: the seam at which codecs for expert ids are put in.

A record names the codec of each of its columns. `routed_experts` is cut into chunks, one layer by
up to CHUNK_ROWS rows, each written by a chunk codec from `CODECS`; every other column is "raw" or
"deflate". Decoders take untrusted bytes: they compare all sizes before they ask for memory, and
raise FormatError for whatever does not fit.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
import zlib
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import numpy as np

from r3.errors import FormatError
from r3.spec import RouterSpec
from r3.storage.enumeration import OrderCode, SetCode

Buffer = bytes | bytearray | memoryview

RAW, DEFLATE = "raw", "deflate"
CHUNK_ROWS = 4096
# the dtypes that a column can have, little-endian; no objects, no text, no structures
DTYPES = {
    name: np.dtype(name if name == "bool" else "<" + name)
    for name in ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_AXES = 8
_MAX_BYTES = 1 << 62  # below what numpy can address, so that reshape never fails
_WORTH_DEFLATING = 16  # bytes to be saved, for which a reader has to do more
_DEFLATE_RATIO = 1032  # nothing expands more than that; more was not written by deflate


class ChunkCodec(Protocol):
    """Turns the expert ids of one layer, uint8 or uint16 [rows, top_k], into bytes and back."""

    name: str
    keeps_order: bool

    def size(self, rows: int, spec: RouterSpec) -> int:
        """Bytes of a chunk of so many rows."""
        ...

    def encode(self, ids: np.ndarray, spec: RouterSpec, out: np.ndarray) -> None:
        """Write ids, distinct and in range in each row, to out, uint8 [size] of zeros."""
        ...

    def decode(self, data: np.ndarray, spec: RouterSpec, out: np.ndarray) -> None:
        """Read data, uint8 [size], into out [rows, top_k]. Raises FormatError."""
        ...


class EnumCodec:
    """Each row by its number among all sets (r3.storage.enumeration); ids come back ascending."""

    name = "enum"
    keeps_order = False

    def size(self, rows: int, spec: RouterSpec) -> int:
        return SetCode.of(spec.num_experts, spec.top_k).packing.size(rows)

    def encode(self, ids: np.ndarray, spec: RouterSpec, out: np.ndarray) -> None:
        code = SetCode.of(spec.num_experts, spec.top_k)
        kernels = _kernels(ids.size * code.packing.limbs)
        if kernels:
            kernels.encode_sets(code, ids, out)
        else:
            out[:] = np.frombuffer(code.packing.pack(code.rank(ids)), np.uint8)

    def decode(self, data: np.ndarray, spec: RouterSpec, out: np.ndarray) -> None:
        code = SetCode.of(spec.num_experts, spec.top_k)
        kernels = _kernels(out.size * code.packing.limbs)
        if kernels:
            kernels.decode_sets(code, data, out)
        else:
            out[:] = code.unrank(code.packing.unpack(data, len(out)))


class OrderedEnumCodec:
    """The sets as EnumCodec has them, and behind them in which order each row named its ids."""

    name = "enum-ordered"
    keeps_order = True
    _sets = EnumCodec()

    def size(self, rows: int, spec: RouterSpec) -> int:
        return self._sets.size(rows, spec) + OrderCode.of(spec.top_k).packing.size(rows)

    def encode(self, ids: np.ndarray, spec: RouterSpec, out: np.ndarray) -> None:
        at, code = self._sets.size(len(ids), spec), OrderCode.of(spec.top_k)
        self._sets.encode(ids, spec, out[:at])
        kernels = _kernels(ids.size)
        if kernels and code.packing.limbs == 1:
            kernels.encode_order(code, ids, out[at:])
        else:
            out[at:] = np.frombuffer(code.packing.pack(code.rank(ids)), np.uint8)

    def decode(self, data: np.ndarray, spec: RouterSpec, out: np.ndarray) -> None:
        at, code = self._sets.size(len(out), spec), OrderCode.of(spec.top_k)
        self._sets.decode(data[:at], spec, out)
        kernels = _kernels(out.size)
        if kernels and code.packing.limbs == 1:
            kernels.decode_order(code, data[at:], out)
        else:
            out[:] = code.arrange(out, code.packing.unpack(data[at:], len(out)))


CODECS: dict[str, ChunkCodec] = {codec.name: codec for codec in (EnumCodec(), OrderedEnumCodec())}


def find_codec(name: str) -> ChunkCodec:
    """The codec of that name. Raises FormatError for one that this version does not have."""
    if name not in CODECS:
        raise FormatError(f"codec {name!r} for routed_experts, expected one of {sorted(CODECS)}")
    return CODECS[name]


# numpy has coded so many values (ids times 64-bit words of a rank) in this process; loading the
# kernels costs about as much as coding 8 million of them, and compiling them once some seconds
_coded = 0
_loaded: ModuleType | None = None
_unusable = False
_WORTH_LOADING = 8 << 20


def _kernels(values: int) -> ModuleType | None:
    """r3.storage.kernels once there is enough to do for it, None until then or without numba.

    So nobody waits for a compiler to read a few traces, and a long job soon has fast code.
    """
    global _coded, _loaded, _unusable
    if _loaded is None and not _unusable:
        _coded += values
        if _coded >= _WORTH_LOADING:
            try:
                _loaded = importlib.import_module("r3.storage.kernels")
            except Exception as e:  # whatever a numba that does not fit its numpy raises
                _unusable = True
                if importlib.util.find_spec("numba") is not None:
                    warnings.warn(f"numba cannot be used, storage is slow: {e}", stacklevel=4)
    return _loaded


def dtype_name(dtype: np.dtype) -> str:
    """How a record names `dtype` of either byte order. Raises FormatError if it is not plain."""
    name = _NAMES.get(dtype.newbyteorder("<"))
    if name is None:
        raise FormatError(f"dtype {dtype}, expected one of {', '.join(DTYPES)}")
    return name


def array_size(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of an array. Raises FormatError for a dtype or shape that no record can have."""
    if dtype not in DTYPES:
        raise FormatError(f"dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not 1 <= len(shape) <= _MAX_AXES or min(shape) < 0:
        raise FormatError(f"shape {list(shape)[:9]}, expected 1 to {_MAX_AXES} axes of 0 or more")
    item = DTYPES[dtype].itemsize
    if math.prod(max(1, n) for n in shape) * item > _MAX_BYTES:
        raise FormatError(f"shape {list(shape)} is larger than any file")
    return math.prod(shape) * item


def check_column_size(codec: str, dtype: str, shape: Sequence[int], size: int) -> None:
    """Raise FormatError unless `size` bytes in that codec can be an array of that shape."""
    expected = array_size(dtype, shape)
    if codec == RAW and size != expected:
        raise FormatError(f"{size} bytes, expected {expected} for {dtype} of shape {list(shape)}")
    if codec == DEFLATE and expected > size * _DEFLATE_RATIO:
        raise FormatError(f"{size} bytes that expand to {expected}, which deflate cannot do")
    if codec not in (RAW, DEFLATE):
        raise FormatError(f"codec {codec!r}, expected {RAW!r} or {DEFLATE!r}")


def encode_raw(array: np.ndarray) -> Buffer:
    """Little-endian bytes of `array` in C order; a view where the array already is that."""
    items = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return items.reshape(-1).view(np.uint8).data


def encode_column(array: np.ndarray) -> tuple[str, Buffer]:
    """Codec and bytes of `array`: deflate over byte planes where that saves something, else raw.

    A byte plane is one byte of each item, lowest first: exponents and high bytes of ids are alike
    and shrink, mantissas do not.
    """
    raw = encode_raw(array)
    planes = np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(-1, array.itemsize).T)
    # runs and skewed bytes are all that there is to gain, and this finds them at 250 MB/s
    deflate = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    packed = deflate.compress(planes.data) + deflate.flush()
    return (DEFLATE, packed) if len(packed) < len(raw) - _WORTH_DEFLATING else (RAW, raw)


def decode_column(codec: str, data: Buffer, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """The array of that dtype name and shape, in memory of its own.

    Raises FormatError if `data` is not exactly that, or holds a bool that is not 0 or 1.
    """
    check_column_size(codec, dtype, shape, len(data))
    expected, item = array_size(dtype, shape), DTYPES[dtype].itemsize
    if codec == DEFLATE:
        inflate = zlib.decompressobj(-15)
        try:
            data = inflate.decompress(data, expected + 1)
        except zlib.error as e:
            raise FormatError(f"not deflate: {e}") from None
        if len(data) != expected or not inflate.eof or inflate.unused_data:
            raise FormatError(f"deflate of other than {expected} bytes")
        planes = np.frombuffer(data, np.uint8).reshape(item, -1)
        octets = planes.T.flatten()
    else:
        octets = np.frombuffer(data, np.uint8).copy()
    array = octets.view(DTYPES[dtype]).reshape(shape)
    if dtype == "bool" and expected and octets.max() > 1:
        raise FormatError(f"a bool stored as {octets.max()}, expected 0 or 1")
    return array.astype(array.dtype.newbyteorder("="), copy=False)
