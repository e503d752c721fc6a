"""Base64 of an `.npy`, as vLLM sends routing; read strictly, whatever it declares of itself."""

from __future__ import annotations

import base64
import binascii
import io
import math
import reprlib

import numpy as np

from r3.errors import FormatError

_DTYPES = ("uint8", "int8", "int16", "uint16", "int32", "int64")
_MAX_ITEMS = 1 << 59


def encode_npy(array: np.ndarray) -> str:
    """Base64 of `array` as np.save writes it."""
    with io.BytesIO() as file:
        # numpy writes some views with an axis of 1 in Fortran order
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode()


def decode_npy(text: str, where: str) -> np.ndarray:
    """Integers of three or four axes of the text that `encode_npy` made; read-only where possible.

    [rows, layers, top_k], or packed rows (r3.engine_hooks.rows).

    where: names the sequence. Raises FormatError for anything else: another alphabet, a dtype that
    is no integer, another number of axes, bytes that are too few or too many for the shape.
    """
    if not isinstance(text, str):
        raise FormatError(f"{where}: {reprlib.repr(text)}, expected base64 of an .npy as text")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise FormatError(f"{where}: {reprlib.repr(text)} is not base64: {e}") from None
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version}")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=1000)
    except Exception as e:  # numpy reads the header as Python text, which may raise nearly anything
        raise FormatError(f"{where}: not an .npy: {' '.join(str(e).split())[:200]}") from None
    if fortran or len(shape) not in (3, 4) or dtype.newbyteorder("=").name not in _DTYPES:
        raise FormatError(
            f"{where}: an .npy of {dtype} of shape {list(shape)}{' in Fortran order' * fortran}, "
            f"expected integers [rows, layers, top_k] in C order"
        )
    rest, expected = len(data) - file.tell(), math.prod(shape) * dtype.itemsize
    # with an axis of 0 the others may be more than numpy can address
    large = math.prod(max(1, n) for n in shape) > _MAX_ITEMS
    if rest != expected or min(shape) < 0 or large or any(type(n) is not int for n in shape):
        raise FormatError(
            f"{where}: {rest} bytes for {dtype} of shape {list(shape)}, expected {expected}"
        )
    array = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)
