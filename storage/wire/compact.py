"""Routing rows as a short string of text, for replies over HTTP: a label, then base64.

    r3.rows/1:<base64>

The bytes behind the label, all numbers little-endian:

    u32      n, bytes of the header
    n bytes  header, a msgpack list: num_experts, top_k, MoE layers, start, rows, token_crc,
             missing, versions
    ...      sets of the rows that are not missing, row by row and in each by layer, one chunk of
             the codec "enum" (docs/format.md, about log2 C(num_experts, top_k) bits for each)
    u32      CRC-32 of all bytes before it

Row i of the string is row start + i of its rollout. token_crc is the CRC-32 of the token ids
start..start + rows, int32, one more than rows: so a string can be told from that of another
rollout, or of another place in it. missing: ascending runs [first row, rows, first row, rows, ...].
versions: runs [rows, weight version, ...] over the rows that are not missing, nil when not known.

The ids of a row come back ascending: rows are sets.
"""

from __future__ import annotations

import base64
import reprlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from r3.checks import check_distinct, check_shape_and_range
from r3.errors import FormatError, TraceError
from r3.spec import RouterSpec
from r3.storage.codec import CODECS
from r3.storage.wire.payload import decode_base64

LABEL = "r3.rows/1:"
_CODEC = CODECS["enum"]
_U32 = 4
_FIELDS = 8


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows `start` and following of a rollout.

    ids: [rows, MoE layers, top_k], of the spec's dtype, or wider and signed where a row is missing,
    which is then -1 throughout. versions: int64 [rows], -1 where missing, or None when not known.
    """

    start: int
    ids: np.ndarray
    versions: np.ndarray | None


def encode_rows(
    ids: np.ndarray,
    spec: RouterSpec,
    *,
    tokens: Sequence[int] | np.ndarray,
    start: int = 0,
    versions: np.ndarray | None = None,
) -> str:
    """Rows start..start + rows of a rollout as text.

    ids: integers [rows, MoE layers, top_k]; a missing row is -1 throughout. tokens: the ids of the
    tokens start..start + rows, one more than rows. versions: int64 [rows], of the weights behind
    each row, 0 or more where it is not missing; None if not known.

    Raises TraceError for impossible ids, versions or tokens.
    """
    where = f"rows from {start}"
    valid = np.ones(len(ids), bool)
    if ids.dtype.kind == "i" and ids.ndim == 3 and ids.size:
        valid = ~(ids == -1).all(axis=(1, 2))
    check_shape_and_range(ids, valid, spec, where)
    kept = np.ascontiguousarray(ids[valid], spec.dtype)
    check_distinct(kept, np.ones(len(kept), bool), spec, where)
    if start < 0:
        raise TraceError(f"{where}: expected rows from 0 or more")
    if len(tokens) != len(ids) + 1:
        raise TraceError(f"{where}: {len(tokens)} tokens for {len(ids)} rows, expected one more")
    runs = None
    if versions is not None:
        known = versions[valid] if len(versions) == len(ids) else versions
        if len(versions) != len(ids) or (len(known) and known.min() < 0):
            raise TraceError(
                f"{where}: {len(versions)} weight versions, the lowest "
                f"{known.min() if len(known) else None}, expected one of 0 or more for each row"
            )
        runs = _runs(known)
    header = msgpack.packb(
        [
            *(spec.num_experts, spec.top_k, len(spec.moe_layers), int(start), len(ids)),
            *(_token_crc(tokens), _missing_runs(valid), runs),
        ]
    )
    cells = kept.reshape(-1, spec.top_k)
    size = _CODEC.size(len(cells), spec)
    out = np.zeros(_U32 + len(header) + size + _U32, np.uint8)
    out[:_U32] = _octets(len(header))
    out[_U32 : _U32 + len(header)] = np.frombuffer(header, np.uint8)
    _CODEC.encode(cells, spec, out[_U32 + len(header) : -_U32])
    out[-_U32:] = _octets(zlib.crc32(out[:-_U32].data))
    return LABEL + base64.b64encode(out.data).decode()


def decode_rows(text: str, spec: RouterSpec, tokens: Sequence[int] | np.ndarray) -> Rows:
    """What `encode_rows` wrote for rows of the rollout with these token ids, all of them.

    Raises FormatError for text that is not that, whole and sound; TraceError if the rows are of
    other routers, other tokens or do not fit into the rollout.
    """
    data = _data(text)
    size = int.from_bytes(data[:_U32], "little")
    if size > len(data) - 2 * _U32:
        raise FormatError(f"header of {size} bytes in routing rows of {len(data)} bytes")
    fields = _header(data[_U32 : _U32 + size])
    found, (start, rows, token_crc) = fields[:3], fields[3:6]
    expected = [spec.num_experts, spec.top_k, len(spec.moe_layers)]
    if found != expected:
        raise TraceError(
            f"routing rows of {found[1]} of {found[0]} experts in {found[2]} MoE layers, expected "
            f"{expected[1]} of {expected[0]} in {expected[2]}"
        )
    if start + rows > max(len(tokens) - 1, 0):
        raise TraceError(
            f"routing rows {start} to {start + rows}, expected at most {max(len(tokens) - 1, 0)} "
            f"rows for {len(tokens)} tokens"
        )
    if rows and _token_crc(tokens[start : start + rows + 1]) != token_crc:
        raise TraceError(
            f"routing rows {start} to {start + rows} are of other tokens than those of this "
            "rollout at these positions: rows of another rollout, or shifted"
        )
    valid = _valid(fields[6], rows)
    versions = None if fields[7] is None else _versions(fields[7], valid)
    cells = int(valid.sum()) * len(spec.moe_layers)
    payload = np.frombuffer(data, np.uint8)[_U32 + size : -_U32]
    if len(payload) != _CODEC.size(cells, spec):
        raise FormatError(
            f"{len(payload)} bytes of routing for {int(valid.sum())} rows, expected "
            f"{_CODEC.size(cells, spec)}"
        )
    kept = np.empty((cells, spec.top_k), spec.dtype)
    _CODEC.decode(payload, spec, kept)
    shape = (len(spec.moe_layers), spec.top_k)
    ids = kept.reshape(-1, *shape)
    if not valid.all():
        ids = np.full((rows, *shape), -1, np.int16 if spec.dtype == np.uint8 else np.int32)
        ids[valid] = kept.reshape(-1, *shape)
    return Rows(start, ids, versions)


def _data(text: str) -> bytes:
    """The bytes behind the label, whose checksum is right."""
    if not isinstance(text, str) or not text.startswith(LABEL):
        raise FormatError(f"{reprlib.repr(text)}, expected text that begins with {LABEL!r}")
    data = decode_base64(text[len(LABEL) :], f"routing rows behind {LABEL!r}")
    if len(data) < 2 * _U32:
        raise FormatError(f"{len(data)} bytes behind {LABEL!r}, expected {2 * _U32} or more")
    found, expected = zlib.crc32(data[:-_U32]), int.from_bytes(data[-_U32:], "little")
    if found != expected:
        raise FormatError(f"routing rows with checksum {found:08x}, expected {expected:08x}")
    return data


def _header(data: bytes) -> list[Any]:
    try:
        fields = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as e:
        raise FormatError(f"header of routing rows: not msgpack: {e}") from None
    if type(fields) is not list or len(fields) != _FIELDS:
        raise FormatError(
            f"header of routing rows is {reprlib.repr(fields)}, expected {_FIELDS} fields"
        )
    lists = [x for x in fields[6:] if x is not None]
    numbers = [*fields[:6], *(n for part in lists if type(part) is list for n in part)]
    if (
        type(fields[6]) is not list
        or any(type(part) is not list or len(part) % 2 for part in lists)
        or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers)
    ):
        raise FormatError(
            f"header of routing rows is {reprlib.repr(fields)}, expected counts and runs of two "
            "numbers each"
        )
    return fields


def _valid(missing: list[int], rows: int) -> np.ndarray:
    valid = np.ones(rows, bool)
    at = 0
    for first, count in zip(missing[::2], missing[1::2], strict=True):
        if first < at or count < 1 or first + count > rows:
            raise FormatError(
                f"missing rows {first} to {first + count}, expected ascending runs below {rows}"
            )
        valid[first : first + count] = False
        at = first + count + 1
    return valid


def _versions(runs: list[int], valid: np.ndarray) -> np.ndarray:
    counts, known = runs[::2], int(valid.sum())
    if sum(counts) != known or 0 in counts:
        raise FormatError(f"weight versions of {sum(counts)} rows, expected {known}")
    versions = np.full(len(valid), -1, np.int64)
    versions[valid] = np.repeat(np.array(runs[1::2], np.int64), np.array(counts, np.int64))
    return versions


def _missing_runs(valid: np.ndarray) -> list[int]:
    edges = np.flatnonzero(np.diff(np.concatenate([[True], valid, [True]]).astype(np.int8)))
    return [n for a, b in edges.reshape(-1, 2).tolist() for n in (a, b - a)]


def _runs(values: np.ndarray) -> list[int]:
    if not len(values):
        return []
    firsts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    counts = np.diff(np.append(firsts, len(values)))
    return [int(n) for pair in zip(counts, values[firsts], strict=True) for n in pair]


def _token_crc(tokens: Sequence[int] | np.ndarray) -> int:
    try:
        return zlib.crc32(np.asarray(tokens).astype("<i4", casting="same_kind").tobytes())
    except (TypeError, OverflowError, ValueError) as e:
        raise TraceError(f"token ids are {reprlib.repr(tokens)}, expected integers: {e}") from None


def _octets(number: int) -> np.ndarray:
    return np.frombuffer(number.to_bytes(_U32, "little"), np.uint8)
