"""Base64 of an `.npy`, as vLLM sends routing; read strictly, whatever it declares of itself."""

from __future__ import annotations

import base64
import io
import math
import re

import numpy as np

from r3.errors import FormatError
from r3.storage.wire.payload import decode_base64

# what np.save writes before an array: magic, version 1.0, length of the text, the text
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([^']{2,8})', 'fortran_order': (True|False), "
    rb"'shape': \((\d{1,18}(?:, \d{1,18}){2,3})\), \} {0,64}\n"
)
_DTYPES = {
    code: np.dtype(code)
    for code in ("|u1", "|i1", "<u2", "<i2", "<i4", "<i8", ">u2", ">i2", ">i4", ">i8")
}
_MAX_ITEMS = 1 << 59


def encode_npy(array: np.ndarray) -> str:
    """Base64 of `array` as np.save writes it."""
    with io.BytesIO() as file:
        # numpy writes some views with an axis of 1 in Fortran order
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode()


def decode_npy(text: str, where: str) -> np.ndarray:
    """Integers of three or four axes of the text that `encode_npy` made; read-only where possible.

    [rows, layers, top_k], or packed rows (r3.engine_hooks.rows). where: names the field.

    Raises FormatError for anything else: another alphabet, a dtype that is no integer, another
    number of axes, bytes that are too few or too many for the shape.
    """
    data = decode_base64(text, where)
    at = len(_MAGIC) + 2
    start = at + int.from_bytes(data[len(_MAGIC) : at], "little")
    header = _HEADER.fullmatch(data[at:start]) if data.startswith(_MAGIC) else None
    if header is None:
        raise FormatError(
            f"{where}: not an .npy of version 1.0 with three or four axes: {data[:90]!r}"
        )
    code, fortran, axes = (
        header[1].decode("ascii", "replace"),
        header[2] == b"True",
        header[3].decode(),
    )
    shape = tuple(map(int, axes.split(", ")))
    if fortran or code not in _DTYPES:
        raise FormatError(
            f"{where}: an .npy of {code!r} of shape {list(shape)}{' in Fortran order' * fortran}, "
            "expected integers in C order"
        )
    dtype, rest = _DTYPES[code], len(data) - start
    expected = math.prod(shape) * dtype.itemsize
    # with an axis of 0 the others may be more than numpy can address
    if rest != expected or math.prod(max(1, n) for n in shape) > _MAX_ITEMS:
        raise FormatError(
            f"{where}: {rest} bytes for {dtype} of shape {list(shape)}, expected {expected}"
        )
    array = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)
