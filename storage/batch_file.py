"""Batches as safetensors files, of which a trainer rank reads its layers and its sequences only.

Any reader of safetensors opens them. The tensors, for T tokens in B sequences:

    routed_experts.<decoder layer>  uint8 or uint16 [T, top_k], one tensor for each MoE layer
    token_ids int32 [T], valid bool [T], logprobs float32 [T], weight_versions int64 [T]
    cu_seqlens int64 [B + 1], prompt_lens int64 [B]
    crc32 uint32 [4 + MoE layers, B]: CRC-32 of the bytes of each sequence in token_ids, valid,
        logprobs, weight_versions and each layer, in this order

safetensors has no checksums. Those of a sequence are its own, so that a part of the file is checked
by reading just that part. The metadata, all of it text:

    format, version   "r3-batch", "1"
    spec              RouterSpec.to_dict() as JSON
    rollout_ids       JSON list of B names
    crc32.<tensor>    CRC-32 as 8 hex digits of cu_seqlens, prompt_lens and crc32
    crc32             of all other metadata: key, zero byte, value, zero byte, ascending by key

What is left of the header, names and dtypes and shapes, follows from these and is compared.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
import uuid
import zlib
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from r3.batch import RoutingBatch, check_cu_seqlens
from r3.errors import FormatError, MissingDependencyError, SpecError, TraceError
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.selection import choose_layers, choose_sequences

FORMAT, VERSION = "r3-batch", "1"
_PER_TOKEN = ("token_ids", "valid", "logprobs", "weight_versions")
_WHOLE = ("cu_seqlens", "prompt_lens", "crc32")  # read as a whole, whatever is asked for
_MAX_HEADER = 100_000_000  # bytes; safetensors reads no more
# how safetensors calls the dtypes
_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "float32": "F32",
}


def save_batch(batch: RoutingBatch, path: str | os.PathLike[str]) -> None:
    """Write `batch` to a file, in one step: another one at `path` is replaced or as it was.

    The same batch always makes the same bytes. Raises TraceError, naming the field, for a batch
    that `load_batch` would refuse; FormatError if there is something else than a file at `path`;
    OSError if it cannot be written.
    """
    path = Path(path)
    if path.exists():
        _check_regular(path)
    batch.check()
    names = ("cu_seqlens", "prompt_lens", *_PER_TOKEN)
    tensors = {name: np.ascontiguousarray(getattr(batch, name)) for name in names}
    layers = np.ascontiguousarray(batch.routed_experts.transpose(1, 0, 2))
    tensors |= zip(_layer_names(batch.spec), layers, strict=True)
    spans = list(pairwise(batch.cu_seqlens.tolist()))
    aligned = [tensors[name] for name in (*_PER_TOKEN, *_layer_names(batch.spec))]
    tensors["crc32"] = np.array(
        [[zlib.crc32(t[a:b].data) for a, b in spans] for t in aligned], "u4"
    )
    # wide items first, so that every tensor is aligned to its own
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    _write(path, [_header(batch, tensors), *tensors.values()])


def load_batch(
    path: str | os.PathLike[str],
    *,
    layers: Iterable[int] | None = None,
    sequences: slice | range | None = None,
) -> RoutingBatch:
    """Read a file that `save_batch` wrote, or a part of it; what is not asked for is not read.

    layers: decoder layer indices, of spec.moe_layers; the result's spec has only these, ascending.
    sequences: those numbers, one behind the other; a slice is cut off at the ends, as for a list,
    a range is not. Both default to all.

    Checksums and content of what is read are checked. Raises FormatError, naming path and tensor,
    for anything but a whole, sound file; SpecError for layers that are not there, IndexError for
    sequences that are not there or no sequence at all; MissingDependencyError without safetensors.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as e:
        raise MissingDependencyError(
            "safetensors is not installed: pip install 'rollout-routing-replay[megatron]'"
        ) from e
    path = Path(path)
    _check_regular(path)
    try:
        with safe_open(path, framework="numpy") as file:
            return _read(file, layers, sequences)
    except (SpecError, IndexError) as e:  # of the arguments
        raise type(e)(f"{path}: {e}") from None
    except (SafetensorError, OSError, FormatError, TraceError) as e:
        raise FormatError(f"{path}: {e}") from None


def _read(file: Any, layers: Iterable[int] | None, sequences: slice | range | None) -> RoutingBatch:
    values = file.metadata() or {}
    spec, rollouts = _parse(values)
    tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    total = next(iter(tensors["token_ids"].get_shape()), 0) if "token_ids" in tensors else 0
    forms = _forms(spec, len(rollouts), total)
    for name in sorted(forms.keys() ^ tensors.keys()):
        raise FormatError(
            f"tensor {name} is missing"
            if name in forms
            else f"tensor {reprlib.repr(name)}, expected none of that name"
        )
    for name, form in forms.items():
        dtype, shape = tensors[name].get_dtype(), tensors[name].get_shape()
        if (dtype, shape) != form:
            raise FormatError(
                f"tensor {name} is {dtype} of shape {shape}, expected {form[0]} of shape {form[1]}"
            )
    whole = {name: tensors[name][:] for name in _WHOLE}
    for name, data in whole.items():
        _check_crc(name, zlib.crc32(data), values.get(f"crc32.{name}"))
    cu_seqlens = whole["cu_seqlens"]
    check_cu_seqlens(cu_seqlens, total)

    chosen = choose_layers(spec, layers)
    part = choose_sequences(len(rollouts), sequences)
    cu_seqlens = cu_seqlens[part.start : part.stop + 1]
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    cu_seqlens = cu_seqlens - first
    crcs = dict(zip((*_PER_TOKEN, *_layer_names(spec)), whole["crc32"].tolist(), strict=True))

    def read(name: str) -> np.ndarray:
        data = tensors[name][first:last]
        for i, (a, b) in zip(part, pairwise(cu_seqlens.tolist()), strict=True):
            where = f"{name}: rollout {rollouts[i]}"
            _check_crc(where, zlib.crc32(data[a:b]), f"{crcs[name][i]:08x}")
        return data

    columns = {name: read(name) for name in _PER_TOKEN}
    if columns["valid"].view(np.uint8).max() > 1:
        raise FormatError("valid: a bool that is neither 0 nor 1")
    ids = np.empty((last - first, len(chosen.moe_layers), spec.top_k), spec.dtype)
    for j, name in enumerate(_layer_names(chosen)):
        ids[:, j] = read(name)
    batch = RoutingBatch(
        spec=chosen,
        rollout_ids=rollouts[part.start : part.stop],
        cu_seqlens=cu_seqlens,
        prompt_lens=whole["prompt_lens"][part.start : part.stop].copy(),
        routed_experts=ids,
        **columns,
    )
    batch.check()
    return batch


def _layer_names(spec: RouterSpec) -> list[str]:
    return [f"routed_experts.{layer}" for layer in spec.moe_layers]


def _forms(spec: RouterSpec, count: int, total: int) -> dict[str, tuple[str, list[int]]]:
    """dtype and shape, as safetensors writes them, of all tensors for so many sequences, tokens."""
    return {
        "token_ids": ("I32", [total]),
        "valid": ("BOOL", [total]),
        "logprobs": ("F32", [total]),
        "weight_versions": ("I64", [total]),
        "cu_seqlens": ("I64", [count + 1]),
        "prompt_lens": ("I64", [count]),
        "crc32": ("U32", [len(_PER_TOKEN) + len(spec.moe_layers), count]),
    } | dict.fromkeys(_layer_names(spec), (_CODES[spec.dtype.name], [total, spec.top_k]))


def _check_crc(where: str, found: int, expected: str | None) -> None:
    if f"{found:08x}" != expected:
        raise FormatError(f"{where}: checksum {found:08x}, expected {reprlib.repr(expected)}")


def _parse(values: dict[str, str]) -> tuple[RouterSpec, tuple[RolloutId, ...]]:
    for name, expected in (("format", FORMAT), ("version", VERSION)):
        if values.get(name) != expected:
            found = reprlib.repr(values.get(name))
            raise FormatError(f"{name} {found} in the metadata, expected {expected!r}")
    _check_crc("metadata", _metadata_crc(values), values.get("crc32"))
    try:
        spec, names = json.loads(values["spec"]), json.loads(values["rollout_ids"])
        if type(spec) is not dict:
            raise FormatError(f"spec is {reprlib.repr(spec)}, expected a JSON object")
        if type(names) is not list or not names or any(type(name) is not str for name in names):
            raise FormatError(f"rollout_ids is {reprlib.repr(names)}, expected a JSON list of text")
        rollouts = tuple(map(RolloutId.parse, names))
        for rollout, name in zip(rollouts, names, strict=True):
            if str(rollout) != name:
                raise FormatError(f"rollout id {name!r}, expected it written {str(rollout)!r}")
        return RouterSpec.from_dict(spec), rollouts
    except KeyError as e:
        raise FormatError(f"metadata: {e} is missing") from None
    except (ValueError, RecursionError) as e:  # of JSON, and what r3 raises
        raise FormatError(f"metadata: {e}") from None


def _metadata_crc(values: Mapping[str, str]) -> int:
    parts = (f"{name}\0{values[name]}\0" for name in sorted(values) if name != "crc32")
    return zlib.crc32("".join(parts).encode())


def _header(batch: RoutingBatch, tensors: Mapping[str, np.ndarray]) -> bytes:
    """All that precedes the tensors. safetensors would write metadata in an order of chance."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "spec": json.dumps(batch.spec.to_dict()),
        "rollout_ids": json.dumps([str(rollout) for rollout in batch.rollout_ids]),
    } | {f"crc32.{name}": f"{zlib.crc32(tensors[name].data):08x}" for name in _WHOLE}
    metadata["crc32"] = f"{_metadata_crc(metadata):08x}"
    ends = accumulate((tensor.nbytes for tensor in tensors.values()), initial=0)
    entries = {
        name: {"dtype": _CODES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": span}
        for (name, tensor), span in zip(tensors.items(), pairwise(ends), strict=True)
    }
    text = json.dumps({"__metadata__": metadata} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise TraceError(f"a header of {len(text)} bytes, expected at most {_MAX_HEADER}")
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, pieces: list[Any]) -> None:
    temporary = path.with_name(f".r3-{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _check_regular(path: Path) -> None:
    try:
        regular = stat.S_ISREG(path.stat().st_mode)  # a FIFO would block on opening
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise FormatError(f"{path}: cannot be opened as a safetensors file: {reason}") from None
    if not regular:
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise FormatError(f"{path}: {kind}, expected a safetensors file")
