"""Parts of payloads that formats share: base64, fields of objects, strict arrays.

Nothing here knows a framework. Whatever is read is checked against the bytes that are there before
memory is taken, and is refused where a lenient reader would guess: another alphabet, padding bits
that are set, a label that the number of bytes contradicts, floats or booleans as integers.
"""

from __future__ import annotations

import base64
import binascii
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from r3.columns import on_host
from r3.errors import CaptureError, FormatError, TraceError

_MAX_DEPTH = 4  # of lists in lists


def decode_base64(text: object, what: str) -> bytes:
    """The bytes of standard base64 with padding. Raises FormatError for anything else."""
    if not isinstance(text, str):
        raise FormatError(f"{what} is {reprlib.repr(text)}, expected a string of base64")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise FormatError(
            f"{what}: not base64 of the standard alphabet ({e}); base85 and URL-safe text are "
            "other formats"
        ) from None
    check_padding(text, what)
    return data


def check_padding(text: str, what: str) -> None:
    """Raise FormatError if base64 has bits set in its padding: one payload has one text."""
    if text and base64.b64encode(base64.b64decode(text[-4:])).decode() != text[-4:]:
        raise FormatError(f"{what}: base64 ends in {text[-4:]!r}, expected no bits in the padding")


def encode_base64(array: np.ndarray) -> str:
    """The bytes of an array in C order, little-endian, as base64."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return base64.b64encode(little.reshape(-1).view(np.uint8).data).decode()


def raw_array(data: bytes, dtype: str, shape: Sequence[int], what: str) -> np.ndarray:
    """`data` as little-endian `dtype` of that shape, not copied.

    dtype: a name that the caller has found in its list. Raises FormatError for another size.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    expected = math.prod(shape) * kind.itemsize
    if len(data) != expected:
        raise FormatError(
            f"{what} has {len(data)} bytes, expected {expected} for {kind.name} of shape "
            f"{list(shape)}: label, shape and bytes contradict each other"
        )
    try:
        return np.frombuffer(data, kind).reshape(shape)
    except ValueError:  # no bytes, and a shape that is none of an array
        raise FormatError(f"{what} has shape {list(shape)}, expected one of an array") from None


def fields_of(value: object, what: str) -> Mapping[str, Any]:
    """A mapping with text for keys. Raises FormatError for any other object."""
    if not isinstance(value, Mapping):
        raise FormatError(
            f"{what} is {_brief(value)}, expected a mapping (model_dump() or to_dict() of an "
            "object makes one)"
        )
    return value


def items_of(value: object, what: str) -> list[Any]:
    """A list or tuple. Raises FormatError for any other object."""
    if not isinstance(value, list | tuple):
        raise FormatError(f"{what} is {_brief(value)}, expected a list")
    return list(value)


def first_of(key: str, *places: Mapping[str, Any]) -> Any:
    """`key` of the first mapping in which it is there and not None; else None."""
    return next((fields[key] for fields in places if fields.get(key) is not None), None)


def routing_of(fields: Mapping[str, Any], key: str, ask: str) -> Any:
    """`fields[key]`, which was asked for. Raises CaptureError if it is absent or None.

    ask: the setting that makes it be there.
    """
    value = fields.get(key)
    if value is None:
        found = f"{key} is null" if key in fields else f"there is no {key}"
        raise CaptureError(
            f"{found}, expected the routing that was asked for: either {ask} is not set, or a "
            "gateway or an allowlist on the way dropped the field"
        )
    return value


def label_of(value: object, labels: Sequence[str]) -> str:
    """One of these names of dtypes. Raises FormatError for anything else."""
    if not isinstance(value, str) or value not in labels:
        raise FormatError(f"dtype is {_brief(value)}, expected one of {', '.join(labels)}")
    return value


def integers(values: object, what: str) -> np.ndarray:
    """int64 [n] from a list, numpy or torch; FormatError for floats, booleans, other shapes."""
    array = numbers(values, what)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise FormatError(f"{what} is {_brief(values)}, expected a list of integers")
    if isinstance(values, list | tuple) and any(type(v) is bool for v in values):
        raise FormatError(f"{what} holds booleans, expected integers")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise FormatError(f"{what} holds {array.max()}, expected less than 2**63")
    return array.astype(np.int64)


def count_of(value: object, what: str, most: int = 1 << 40) -> int:
    """An integer of 0 to `most`. Raises FormatError for anything else, None too."""
    good = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not good or not 0 <= value <= most:  # type: ignore[operator]
        raise FormatError(f"{what} is {_brief(value)}, expected an integer of 0 to {most}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def floats(values: object, length: int, what: str) -> np.ndarray:
    """float32 [length] from a list, numpy or torch. NaN and anything else is a FormatError."""
    array = numbers(values, what)
    good = array.shape == (length,) and (array.dtype.kind in "fiu" or not length)
    if not good or np.isnan(array).any():
        raise FormatError(f"{what} is {_brief(values)}, expected {length} numbers")
    return array.astype(np.float32)


def mask_of(values: object, length: int, what: str) -> np.ndarray:
    """bool [length] from 0 and 1 or booleans. Raises FormatError for anything else."""
    array = numbers(values, what)
    if array.shape != (length,) or not np.isin(array, (0, 1)).all():
        raise FormatError(f"{what} is {_brief(values)}, expected {length} numbers, each 0 or 1")
    return array.astype(bool)


def array_of(value: object, dtype: str, ndim: int, what: str) -> np.ndarray:
    """numpy or torch of exactly this dtype and number of axes. Raises FormatError otherwise."""
    if not isinstance(value, np.ndarray) and not hasattr(value, "detach"):
        raise FormatError(f"{what} is {_brief(value)}, expected an array or tensor of {dtype}")
    array = on_host(value, what)
    if array.dtype.name != dtype or array.ndim != ndim:
        raise FormatError(
            f"{what} is {array.dtype} of shape {list(array.shape)}, expected {dtype} with {ndim} "
            "axes"
        )
    return array


def nested_array(value: object, layers: int, top_k: int, what: str) -> np.ndarray:
    """int64 [rows, layers, top_k] from lists in lists. Raises FormatError for anything else.

    layers, top_k: of an empty list, which does not tell.
    """
    rows = items_of(value, what)
    if not rows:
        return np.zeros((0, layers, top_k), np.int64)
    array = numbers(rows, what)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise FormatError(
            f"{what}: lists of {array.dtype} of shape {list(array.shape)}, expected integers "
            "[rows, layers, top_k]"
        )
    return array.astype(np.int64, copy=False)


def numbers(values: object, what: str) -> np.ndarray:
    """An array of numbers from a list, numpy or torch. Raises FormatError for what is none."""
    if isinstance(values, list | tuple):
        # numpy would make a text as long as the longest of every item
        _check_items(values, what, 0)
    try:
        array = on_host(values, what)
        if array.dtype.kind not in "biuf":
            raise FormatError(f"{what} is {array.dtype}, expected numbers")
        return array
    except (TraceError, OverflowError, RecursionError) as e:
        raise FormatError(f"{what} is not an array: {e}") from None


def _check_items(values: Sequence[Any], what: str, depth: int) -> None:
    kinds = set(map(type, values))
    if kinds & {list, tuple} and kinds <= {list, tuple} and depth < _MAX_DEPTH:
        for inner in values:
            _check_items(inner, what, depth + 1)
    elif not all(issubclass(kind, int | float | np.number | np.bool_) for kind in kinds):
        raise FormatError(f"{what} is {_brief(values)}, expected numbers")


def _brief(value: object) -> str:
    text = reprlib.repr(value)
    return text if len(text) < 200 else f"a {type(value).__name__}"
