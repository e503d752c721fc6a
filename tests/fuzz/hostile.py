"""Changes to headers, columns and indexes that no writer makes.

What makes sizes and checksums fit again afterwards is here where a reader compares sizes first, and
in `forge` for checksums.
"""

from __future__ import annotations

import math
import random
import zlib
from typing import Any

import numpy as np

from r3 import RouterSpec
from r3.storage.codec import DTYPES, encode_raw
from r3.storage.record import EXPERTS

from .forge import ENTRY, Image, Index, Record, Values, experts_layout, msgpack

_NUMBERS = (0, 1, 2, 3, 63, 64, 65, 255, 256, 4095, 4096, 65535, 65536, 1 << 20, 1 << 24, 1 << 31)
_HUGE = ((1 << 31) - 1, 1 << 32, 1 << 53, 1 << 60, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_KEYS = ("rollout_id", "prompt_len", "digest", "provenance", "columns", "spans", "exceptions")
_KEYS += ("name", "align", "version", "dtype", "shape", "codec", "stored", "bytes", "crc32", "zzz")
_TEXTS = ("", "a", "enum", "enum-ordered", "raw", "deflate", "token", "row", "rollout", EXPERTS)
_TEXTS += ("token_ids", "valid", "logprobs", "segments", "turns", "kept_ids", "kept_counts", "tags")
_TEXTS += (
    "a/b/0/0/0",
    "a/b/0/0/00",
    "a/b/9007199254740992/0/0",
    "\u0000",
    "\U0001f600" * 40,
    "1e9",
)


def any_number(rng: random.Random) -> int:
    match rng.randrange(6):
        case 0 | 1:
            return rng.choice(_NUMBERS)
        case 2:
            return rng.choice(_HUGE)
        case 3:
            return -rng.choice((1, 2, 1 << 31, 1 << 63))
        case _:
            return rng.randrange(300)


def any_value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that msgpack has, and mostly nothing that belongs there."""
    match rng.randrange(14):
        case 0 | 1 | 2 | 3:
            return any_number(rng)
        case 4 | 5:
            return rng.choice(_TEXTS)
        case 6 | 7 if depth < 3:
            return [any_value(rng, depth + 1) for _ in range(rng.randrange(5))]
        case 8 if depth < 3:
            return {rng.choice(_KEYS): any_value(rng, depth + 1) for _ in range(3)}
        case 9:
            return rng.choice((0.0, -1.5, float("nan"), float("inf"), 1e300))
        case 10:
            return rng.choice((True, False, None))
        case 11:
            return rng.choice((*DTYPES, "O", "U4", "<i4", "f16", "c8"))
        case 12:
            return rng.choice((b"", b"ab", msgpack.ExtType(3, b"x"), msgpack.Timestamp(1)))
        case _:
            nested: Any = []
            for _ in range(rng.choice((1, 14, 15, 16, 17, 40, 600))):
                nested = [nested]
            return nested


def near(value: Any, rng: random.Random) -> Any:
    """`value` with a little changed, or anything."""
    if type(value) is int and rng.random() < 0.6:
        return max(0, value + rng.choice((-64, -8, -2, -1, 1, 2, 8, 64, value, -value)))
    if type(value) is list and value and rng.random() < 0.7:
        changed, at = list(value), rng.randrange(len(value))
        match rng.randrange(5):
            case 0:
                del changed[at]
            case 1:
                changed.insert(at, changed[at])
            case 2:
                return changed * rng.choice((2, 9, 70))
            case _:
                changed[at] = near(changed[at], rng)
        return changed
    if type(value) is str and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(("", " ", "/", "\u00e9", "0", value)) + value[at + 1 :]
    return any_value(rng)


def change_map(values: Values, rng: random.Random) -> None:
    """One entry changed, added or taken out."""
    key = rng.choice(list(values)) if values and rng.random() < 0.85 else rng.choice(_KEYS)
    match rng.randrange(8):
        case 0:
            values.pop(key, None)
        case 1:
            values[rng.choice(_KEYS)] = any_value(rng)
        case _:
            values[key] = near(values.get(key), rng)


def change_record(record: Record, spec: RouterSpec, frames: list[int], rng: random.Random) -> None:
    """One to three changes, mostly followed by what makes sizes and checksums fit again.

    frames: where the records of the file are, itself among them.
    """
    columns = record.values["columns"]
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.randrange(16)
        at = rng.randrange(len(columns)) if columns else 0
        item = columns[at] if columns else None
        if kind == 0:
            change_map(record.values, rng)
        elif kind == 1 and type(record.values.get("provenance")) is dict:
            change_map(record.values["provenance"], rng)
        elif kind in (2, 3) and type(item) is dict:
            change_map(item, rng)
        elif kind in (4, 5, 6, 7):
            _change_experts(columns, frames, rng)
        elif kind in (8, 9, 10) and columns:
            record.payloads[at] = change_bytes(record.payloads[at], rng)
        elif kind in (11, 12) and type(item) is dict:
            record.payloads[at] = _other_content(item, record.payloads[at], rng)
        elif kind == 13:
            _change_columns(record, rng)
        elif kind == 14 and type(item) is dict and item.get("name") != EXPERTS:
            record.payloads[at] = _bomb(item, rng)
        elif kind == 15:
            record.extra = rng.choice((0, 0, -1, 1, -8, 16, 1 << 40, 1 << 62))
        columns = record.values.get("columns")
        if type(columns) is not list or len(columns) != len(record.payloads):
            return
    record.seal = rng.random() < 0.95
    if rng.random() < 0.85:
        _fit(record, spec, rng)
    if rng.random() < 0.04:
        record.packed = change_bytes(msgpack.packb(record.values), rng)


def _fit(record: Record, spec: RouterSpec, rng: random.Random) -> None:
    """Bring payloads to the sizes that their headers ask for, and the other way round."""
    for i, item in enumerate(record.values["columns"]):
        if type(item) is not dict:
            continue
        if item.get("name") == EXPERTS and (layout := experts_layout(item, spec)) is not None:
            size = layout.size
            if size < 1 << 16:
                filler = rng.choice((bytes, rng.randbytes))
                payload = record.payloads[i][:size]
                record.payloads[i] = payload + filler(size - len(payload))
        item["bytes"] = len(record.payloads[i])


def _change_experts(columns: list[Any], frames: list[int], rng: random.Random) -> None:
    item = next((c for c in columns if type(c) is dict and c.get("name") == EXPERTS), None)
    if item is None:
        return
    spans, layers = item.get("spans"), item.get("shape")
    count = len(layers) if type(layers) is list else 1
    if type(spans) is list and spans and rng.random() < 0.7:
        span = rng.choice(spans)
        match rng.randrange(5):
            case 0 if type(span) is list and span:
                span[0] = rng.choice((*frames, *frames, any_number(rng)))
            case 1 if type(span) is list and len(span) == 3 and type(span[2]) is int:
                part = rng.randint(0, max(0, span[2]))  # the same rows as two spans
                spans.insert(spans.index(span) + 1, [span[0], span[1], span[2] - part])
                span[2] = part
            case 2:
                item["spans"] = near(spans, rng)
            case _ if type(span) is list and span:
                at = rng.randrange(len(span))
                span[at] = near(span[at], rng)
    match rng.randrange(8):
        case 0 | 1:
            item["stored"] = near(item.get("stored"), rng)
        case 2:
            item["exceptions"] = near(item.get("exceptions"), rng)
        case 3:
            item["codec"] = rng.choice(("enum", "enum-ordered", "raw", "deflate", "zzz"))
        case 4:
            item["shape"] = near(item.get("shape"), rng)
        case 5:
            item["spans"] = [[rng.choice(frames), rng.randrange(9), rng.randrange(1, 40)]]
            item["exceptions"] = [] if rng.random() < 0.5 else [rng.randrange(5)] * count
            if type(item.get("stored")) is int and rng.random() < 0.8:
                item["stored"] = max(0, item["stored"] - item["spans"][0][2])
        case _:
            pass


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        size = rng.choice((1, 1, 2, 4, 8, 30))
        match rng.randrange(6):
            case 0:
                changed[at:at] = rng.randbytes(size)
            case 1:
                del changed[at : at + size]
            case 2:
                changed[at : at + size] = bytes([rng.choice((0, 255))]) * len(changed[at:][:size])
            case _ if at < len(changed):
                changed[at] = rng.choice((changed[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(changed)


def _other_content(item: Values, payload: bytes, rng: random.Random) -> bytes:
    """Other values of the same size or of another, raw or by deflate."""
    size = rng.choice((len(payload), len(payload), rng.randrange(400)))
    try:
        dtype, shape = DTYPES[item["dtype"]], tuple(min(n, 5000) for n in item["shape"])
        if len(shape) > 4 or math.prod(shape) > 1 << 20:
            raise ValueError("too large to be made")
        values = np.frombuffer(rng.randbytes(8), "<u8") % np.array([3, 300, 1 << 31, 1 << 62])
        with np.errstate(all="ignore"):
            array = np.full(shape, rng.choice((*values.tolist(), -1, 0, 1))).astype(dtype)
        data = bytes(encode_raw(array))
    except (KeyError, TypeError, ValueError, OverflowError):
        data = rng.randbytes(size)
    if rng.random() < 0.3:
        data = change_bytes(data, rng)
    item["codec"] = rng.choice(("raw", "raw", "deflate"))
    return data if item["codec"] == "raw" else deflate(data)


def _bomb(item: Values, rng: random.Random) -> bytes:
    """What expands to more, or to less, than the header has room for."""
    size = rng.choice((100, 10_000, 1_000_000))
    said = size + rng.choice((0, 0, -1, 1, size, 30 * size))
    item |= {"codec": "deflate", "dtype": rng.choice(("u1", "bool", "i1")), "shape": [said]}
    item["align"] = rng.choice(("rollout", "rollout", "row"))
    return deflate(bytes([rng.choice((0, 1, 7))]) * size)


def deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def _change_columns(record: Record, rng: random.Random) -> None:
    columns = record.values.get("columns")
    if type(columns) is not list or not columns:
        return
    a, b = rng.randrange(len(columns)), rng.randrange(len(columns))
    match rng.randrange(4):
        case 0:
            del columns[a], record.payloads[a]
        case 1:
            for both in (columns, record.payloads):
                both[a], both[b] = both[b], both[a]
        case 2:
            copy = dict(columns[a]) if type(columns[a]) is dict else columns[a]
            if type(copy) is dict and rng.random() < 0.7:
                copy["name"] = rng.choice((*_TEXTS, "other"))
            columns.append(copy)
            record.payloads.append(record.payloads[a])
        case 3 if type(columns[a]) is dict:
            columns[a]["name"] = rng.choice((*_TEXTS, "other"))


def change_image(image: Image, rng: random.Random) -> None:
    """Changes to where things are: indexes, their entries, frames, what stands at the end."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(image.parts))
        part = image.parts[at]
        match rng.randrange(12):
            case 0:
                del image.parts[at]
                if not image.parts:
                    return
            case 1:
                image.parts.insert(rng.randrange(len(image.parts)), part)
            case 2:
                image.tail = rng.choice((frame_like(rng), image.tail + rng.randbytes(9)))
            case 3 if isinstance(part, Record):
                part.extra = rng.choice((-1, 1, 16, -16, 1 << 40, 1 << 62, (1 << 63) - 1))
            case 4:
                change_map(image.header, rng)
            case _ if indexes := [p for p in image.parts if isinstance(p, Index)]:
                # the last index is the one that is read first
                change_index(rng.choice((indexes[-1], rng.choice(indexes))), image, rng)
            case _:
                pass


def frame_like(rng: random.Random) -> bytes:
    """Bytes that look like the beginnings and ends of frames."""
    pieces = (b"R3rc", b"R3ix", b"R3ie", rng.randbytes(12), bytes(8))
    return b"".join(rng.choices(pieces, k=rng.choice((1, 5, 100)) * rng.choice((1,) * 50 + (50,))))


def change_index(index: Index, image: Image, rng: random.Random) -> None:
    entries = index.entries = index.entries.copy()
    at = rng.randrange(len(entries)) if len(entries) else 0
    frames = [part.frame for part in image.parts]
    match rng.randrange(10):
        case 0:
            index.before = rng.choice((*frames, index.frame, any_number(rng)))
        case 1:
            index.first = near(index.first, rng) if rng.random() < 0.5 else any_number(rng)
        case 2:
            index.synced = rng.choice((0, len(entries), len(entries) + 1, any_number(rng)))
        case 3 if len(entries):
            entries["frame"][at] = any_number(rng) % (1 << 64)
        case 4 if len(entries):
            entries["frame"][at] ^= np.uint64(rng.choice((1, 2, 16)))
        case 5 if len(entries):
            entries["frame"][at] = rng.choice(frames)
        case 6:
            index.entries = np.delete(entries, at) if len(entries) else entries
        case 7:
            index.entries = np.concatenate([entries, entries[at : at + 1]])
        case 8:
            index.extra = rng.choice((1, -1, 40, -40, 39))
        case _:
            index.entries = np.empty(0, ENTRY) if rng.random() < 0.3 else entries[::-1].copy()
    if not isinstance(index.first, int) or isinstance(index.first, bool):
        index.first = 0
