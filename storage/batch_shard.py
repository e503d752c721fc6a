"""The records of shard files that a batch was made of, so that it can be read a second time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import SpecError, TransportError
from r3.identity import RolloutId
from r3.storage.reader import ShardReader
from r3.storage.selection import choose_layers, choose_sequences


@dataclass(frozen=True)
class BatchRecords:
    """Where the sequences of a batch are stored: paths of `.r3` files, and of each sequence the
    rollout's name and the digest of its trace."""

    paths: tuple[Path, ...]
    rollouts: tuple[str, ...]
    digests: tuple[str, ...]

    @classmethod
    def find(
        cls, batch: RoutingBatch, shard: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
    ) -> BatchRecords:
        """The records of `batch` in one file or several, which must be of the same rollouts.

        Compared are token ids, prompt lengths, which rows there are, and the experts of the first
        MoE layer, as sets: reading the others here would cost as much as reading all again.
        Raises TransportError, naming the rollout, for a sequence that is not there or is another;
        SpecError for files of other routers; FormatError for a damaged file.
        """
        files = [shard] if isinstance(shard, str | os.PathLike) else shard
        paths = tuple(Path(file).absolute() for file in files)
        with ExitStack() as stack:
            readers = _open(paths, stack)
            for reader in readers:
                if reader.spec != batch.spec:
                    raise SpecError(
                        f"{reader.path}: {reader.spec}, expected the routers of the batch, "
                        f"{batch.spec}"
                    )
            digests = [_compared(batch, i, readers) for i in range(len(batch))]
        return cls(paths, tuple(map(str, batch.rollout_ids)), tuple(digests))

    def read(
        self, layers: Iterable[int] | None = None, sequences: slice | range | None = None
    ) -> RoutingBatch:
        """The batch, or part of it, as the files have it: the experts of a row ascending.

        Raises TransportError if a rollout is there no more or with other content; SpecError and
        IndexError for layers or sequences that the batch has not; FormatError for a damaged file.
        """
        part = choose_sequences(len(self.rollouts), sequences)
        pieces = []
        with ExitStack() as stack:
            readers = _open(self.paths, stack)
            chosen = choose_layers(readers[0].spec, layers)
            places = [readers[0].spec.moe_layers.index(layer) for layer in chosen.moe_layers]
            for i in part:
                reader, number = _locate(self.rollouts[i], readers)
                trace = reader[number]
                if trace.digest != self.digests[i]:
                    raise TransportError(
                        f"rollout {self.rollouts[i]}: its record in {reader.path} has digest "
                        f"{trace.digest}, expected {self.digests[i]}: the file is another one"
                    )
                whole = RoutingBatch.from_traces([trace])
                # only these layers are kept
                ids = np.ascontiguousarray(whole.routed_experts[:, places])
                pieces.append(dataclasses.replace(whole, spec=chosen, routed_experts=ids))
        ends = np.cumsum([0, *(piece.num_tokens for piece in pieces)])
        return RoutingBatch(
            spec=chosen,
            rollout_ids=tuple(piece.rollout_ids[0] for piece in pieces),
            cu_seqlens=ends.astype(np.int64),
            **{
                name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in _JOINED
            },
        )


_JOINED = (
    "prompt_lens",
    "token_ids",
    "routed_experts",
    "valid",
    "logprobs",
    "weight_versions",
)


def _open(paths: Sequence[Path], stack: ExitStack) -> list[ShardReader]:
    if not paths:
        raise TransportError("no shard file is given, expected one or more")
    return [stack.enter_context(ShardReader(path)) for path in paths]


def _locate(rollout: RolloutId | str, readers: Sequence[ShardReader]) -> tuple[ShardReader, int]:
    for reader in readers:
        if rollout in reader:
            return reader, reader.find(rollout)
    files = ", ".join(str(reader.path) for reader in readers)
    raise TransportError(f"rollout {rollout} is not in {files}")


def _compared(batch: RoutingBatch, i: int, readers: Sequence[ShardReader]) -> str:
    """The digest of the record of sequence `i`"""
    rollout = batch.rollout_ids[i]
    rows = slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
    reader, number = _locate(rollout, readers)
    header = reader.header(number)
    stored = reader.slice(number, layers=batch.spec.moe_layers[:1])
    first = f"the experts of layer {batch.spec.moe_layers[0]}"
    pairs: dict[str, tuple[Any, Any]] = {
        "prompt_len": (header.prompt_len, batch.prompt_lens[i]),
        "token_ids": (stored.token_ids, batch.token_ids[rows]),
        "valid": (stored.valid, batch.valid[rows]),
        first: (np.sort(stored.routed_experts), np.sort(batch.routed_experts[rows, :1])),
    }
    for name, (found, expected) in pairs.items():
        if not np.array_equal(found, expected):
            raise TransportError(
                f"rollout {rollout}: {name} in {reader.path}: not as in the batch, expected "
                "the file that the batch was made of"
            )
    return header.digest
