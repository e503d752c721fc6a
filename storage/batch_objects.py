"""A batch as many immutable objects, of which a reader takes those that hold its layers and rows.

Knows nothing about where the objects are kept; r3.storage.ray_store keeps them in Ray. Sequences
are cut into blocks, MoE layers into groups. For a block of t tokens there are

    columns     {"token_ids": int32 [t], "valid": uint8, bit i of byte j for token 8 * j + i,
                 "versions", "lengths": int64, runs of equal weight versions over the valid rows}
    logprobs    float32 [t]
    experts     uint8 or uint16 [t, layers of the group, top_k], one such object for each group

in this order, block after block. Experts are most of the bytes and are plain arrays, so that what
lies in one object is used where it is; the columns are small, so that every reader can have them.
An index of plain values says what is where and has a CRC-32 of each sequence in each object.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import FormatError
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.batch_plan import Plan, overlap, places
from r3.storage.selection import choose_layers, choose_sequences

_COLUMNS = ("token_ids", "valid", "logprobs", "weight_versions")  # with a checksum each


def make_objects(batch: RoutingBatch, plan: Plan) -> Iterator[Any]:
    """The objects of a batch that passes `check()`, in order; a copy of one at a time is made."""
    for block in plan.blocks:
        rows = slice(int(batch.cu_seqlens[block.start]), int(batch.cu_seqlens[block.stop]))
        valid = batch.valid[rows]
        versions, lengths = _runs(batch.weight_versions[rows][valid])
        yield {
            "token_ids": np.ascontiguousarray(batch.token_ids[rows]),
            "valid": np.packbits(valid, bitorder="little"),
            "versions": versions,
            "lengths": lengths,
        }
        yield np.ascontiguousarray(batch.logprobs[rows])
        for group in plan.groups:
            at = places(batch.spec.moe_layers, group)
            yield np.ascontiguousarray(batch.routed_experts[rows][:, at])


def make_index(batch: RoutingBatch, plan: Plan) -> dict[str, Any]:
    """Plain values and arrays: all that is not in an object, and a checksum of all that is."""
    spans = list(pairwise(batch.cu_seqlens.tolist()))

    def crcs(data: np.ndarray) -> list[int]:
        return [_crc(data[a:b]) for a, b in spans]

    sums = [crcs(getattr(batch, name)) for name in _COLUMNS]
    for group in plan.groups:
        sums.append(crcs(batch.routed_experts[:, places(batch.spec.moe_layers, group)]))
    return {
        "spec": batch.spec.to_dict(),
        "rollout_ids": list(map(str, batch.rollout_ids)),
        "cu_seqlens": np.array(batch.cu_seqlens),
        "prompt_lens": np.array(batch.prompt_lens),
        "layer_groups": [list(group) for group in plan.groups],
        "blocks": [block.start for block in plan.blocks],
        "crc32": np.array(sums, np.uint32),  # [columns and groups, sequences]
    }


def index_crc(index: Mapping[str, Any]) -> int:
    """CRC-32 of an index, by its values."""
    crc = 0
    for name in ("spec", "rollout_ids", "layer_groups", "blocks"):
        crc = zlib.crc32(json.dumps(index[name]).encode(), crc)
    for name in ("cu_seqlens", "prompt_lens", "crc32"):
        crc = zlib.crc32(np.ascontiguousarray(index[name]).data, crc)
    return crc


def plan_of(index: Mapping[str, Any]) -> Plan:
    """The plan that an index was made by."""
    edges = [*index["blocks"], len(index["rollout_ids"])]
    return Plan(
        tuple(map(tuple, index["layer_groups"])), tuple(range(a, b) for a, b in pairwise(edges))
    )


def assemble(
    index: Mapping[str, Any],
    get: Callable[[list[int]], Sequence[Any]],
    *,
    layers: Iterable[int] | None = None,
    sequences: slice | range | None = None,
    logprobs: bool = False,
) -> RoutingBatch:
    """A batch, or part of one, of what `get` returns for the numbers of objects.

    layers, sequences: as of `r3.storage.batch_file.load_batch`. logprobs: whether to have them;
    they are NaN otherwise. Only objects that hold something of it are asked for, all at once.

    Where the rows lie in one block, token_ids and logprobs are views of the objects, and so is
    routed_experts where its layers are neighbours in one group: not copied, and read-only if the
    objects are. Otherwise the part is copied together. Checksums and content are checked: raises
    FormatError, naming the object, TraceError for content that no batch has; SpecError and
    IndexError for what is not there.
    """
    plan, spec = plan_of(index), RouterSpec.from_dict(index["spec"])
    rollouts = tuple(map(RolloutId.parse, index["rollout_ids"]))
    chosen = choose_layers(spec, layers)
    part = choose_sequences(len(rollouts), sequences)
    groups = [g for g, group in enumerate(plan.groups) if set(group) & set(chosen.moe_layers)]
    blocks = [b for b, block in enumerate(plan.blocks) if overlap(block, part)]
    kinds = [0, *([1] if logprobs else []), *(2 + g for g in groups)]
    numbers = [b * plan.per_block + kind for b in blocks for kind in kinds]
    objects = dict(zip(numbers, get(numbers), strict=True))

    pieces = [_Piece(index, plan, spec, b, overlap(plan.blocks[b], part), objects) for b in blocks]
    columns = [piece.columns() for piece in pieces]
    experts = [[(plan.groups[g], piece.experts(g)) for g in groups] for piece in pieces]
    cu_seqlens = index["cu_seqlens"][part.start : part.stop + 1]
    cu_seqlens = cu_seqlens - cu_seqlens[0]
    token_ids, valid, versions = (_joined([c[i] for c in columns]) for i in range(3))
    batch = RoutingBatch(
        spec=chosen,
        rollout_ids=rollouts[part.start : part.stop],
        cu_seqlens=cu_seqlens,
        prompt_lens=index["prompt_lens"][part.start : part.stop].copy(),
        token_ids=token_ids,
        routed_experts=_joined_experts(experts, chosen, len(token_ids)),
        valid=valid,
        logprobs=_joined([piece.logprobs() for piece in pieces])
        if logprobs
        else np.full(len(token_ids), np.nan, np.float32),
        weight_versions=versions,
    )
    batch.check()
    return batch


@dataclasses.dataclass(frozen=True, eq=False)
class _Piece:
    """The sequences `part` of block `block`, in its objects; each column checked when it is read"""

    index: Mapping[str, Any]
    plan: Plan
    spec: RouterSpec
    block: int
    part: range
    objects: Mapping[int, Any]

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """token_ids, valid, weight_versions of the part"""
        name, found = self._object(0)
        total = self._total
        tokens, bits, runs, lengths = (
            found[x] for x in ("token_ids", "valid", "versions", "lengths")
        )
        _check_form(name, "token_ids", tokens, np.dtype(np.int32), (total,))
        _check_form(name, "valid", bits, np.dtype(np.uint8), (-(-total // 8),))
        valid = np.unpackbits(bits, count=total, bitorder="little").view(bool)
        _check_form(name, "lengths", lengths, np.dtype(np.int64), np.shape(runs))
        _check_form(name, "versions", runs, np.dtype(np.int64), lengths.shape)
        if (lengths < 0).any() or lengths.sum() != valid.sum():
            raise FormatError(
                f"{name}: weight versions of {lengths.sum()} rows, expected {valid.sum()}"
            )
        versions = np.full(total, -1, np.int64)
        versions[valid] = np.repeat(runs, lengths)
        return (
            self._checked(name, tokens, 0),
            self._checked(name, valid, 1),
            self._checked(name, versions, 3),
        )

    def logprobs(self) -> np.ndarray:
        name, found = self._object(1)
        _check_form(name, "logprobs", found, np.dtype(np.float32), (self._total,))
        return self._checked(name, found, 2)

    def experts(self, group: int) -> np.ndarray:
        """[tokens, layers of the group, top_k]"""
        name, found = self._object(2 + group)
        shape = (self._total, len(self.plan.groups[group]), self.spec.top_k)
        _check_form(name, "routed_experts", found, self.spec.dtype, shape)
        return self._checked(name, found, len(_COLUMNS) + group)

    def _object(self, kind: int) -> tuple[str, Any]:
        number = self.block * self.plan.per_block + kind
        return self.plan.name(number), self.objects[number]

    @cached_property
    def _total(self) -> int:
        """Tokens of the block"""
        cu, held = self.index["cu_seqlens"], self.plan.blocks[self.block]
        return int(cu[held.stop] - cu[held.start])

    @cached_property
    def _edges(self) -> list[int]:
        """Where the sequences of the part begin in the block, and where the last one ends"""
        cu = self.index["cu_seqlens"]
        edges = cu[self.part.start : self.part.stop + 1] - cu[self.plan.blocks[self.block].start]
        return edges.tolist()

    @cached_property
    def _crcs(self) -> np.ndarray:
        return self.index["crc32"][:, self.part.start : self.part.stop]

    def _checked(self, name: str, data: np.ndarray, row: int) -> np.ndarray:
        """The part of `data` [tokens of the block, ...], a view"""
        for i, (a, b), crc in zip(
            self.part, pairwise(self._edges), self._crcs[row].tolist(), strict=True
        ):
            found = _crc(data[a:b])
            if found != crc:
                column = _COLUMNS[row] if row < len(_COLUMNS) else "routed_experts"
                raise FormatError(
                    f"{name}: {column}: rollout {self.index['rollout_ids'][i]}: checksum "
                    f"{found:08x}, expected {crc:08x}"
                )
        return data[self._edges[0] : self._edges[-1]]


def _joined_experts(
    pieces: list[list[tuple[tuple[int, ...], np.ndarray]]], chosen: RouterSpec, total: int
) -> np.ndarray:
    """[total, chosen layers, top_k] of pieces of rows, in each the groups and their arrays"""
    wanted = chosen.moe_layers
    if len(pieces) == 1 and len(pieces[0]) == 1:
        group, ids = pieces[0][0]
        return ids[:, places(group, wanted)]
    out = np.empty((total, len(wanted), chosen.top_k), chosen.dtype)
    start = 0
    for piece in pieces:
        for group, ids in piece:
            held = [layer for layer in group if layer in wanted]
            rows = slice(start, start + len(ids))
            out[rows, places(wanted, held)] = ids[:, places(group, held)]
        start += len(piece[0][1])
    return out


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values int64 and lengths int64 of the runs of equal numbers"""
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
    return values[starts], np.diff(np.append(starts, len(values)))


def _crc(data: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(data).data)


def _check_form(name: str, column: str, data: Any, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    found = (data.dtype, data.shape) if isinstance(data, np.ndarray) else type(data).__name__
    if found != (dtype, shape):
        raise FormatError(f"{name}: {column} is {found}, expected {(dtype, shape)}")
