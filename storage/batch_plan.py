"""Which layers and sequences of a batch go into one object, so that readers take little else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from r3.batch import RoutingBatch
from r3.errors import SpecError
from r3.storage.selection import choose_layers, choose_sequences

# A block has so many tokens at least. Objects cost half a millisecond each, so not too few; a
# reader of a few sequences takes whole blocks, so not too many.
_BLOCK = 1 << 15


class Plan(NamedTuple):
    """What goes into one object: decoder layers, ascending, and sequences."""

    groups: tuple[tuple[int, ...], ...]
    blocks: tuple[range, ...]

    @property
    def per_block(self) -> int:
        """Objects of a block: columns, logprobs, and the experts of each group."""
        return 2 + len(self.groups)

    def name(self, number: int) -> str:
        """What object `number` holds, for messages."""
        block, kind = divmod(number, self.per_block)
        held = self.blocks[block]
        sequences = f"sequences {held.start}..{held.stop - 1}"
        if kind < 2:
            return f"{('token_ids and valid', 'logprobs')[kind]} of {sequences}"
        return f"routed_experts of layers {list(self.groups[kind - 2])}, {sequences}"


def make_plan(
    batch: RoutingBatch,
    layer_groups: Iterable[Iterable[int]] | None = None,
    sequence_groups: Iterable[slice | range] | None = None,
) -> Plan:
    """Groups of layers and blocks of sequences that cover the batch.

    layer_groups: decoder layers, each in one group; None: every MoE layer by itself.
    sequence_groups: one behind the other; None: blocks of whole sequences, 32,768 tokens at least.
    Raises SpecError, IndexError for groups that leave something out or name it twice.
    """
    layers = batch.spec.moe_layers
    groups: list[tuple[int, ...]] = [(layer,) for layer in layers]
    if layer_groups is not None:
        groups = [choose_layers(batch.spec, list(group)).moe_layers for group in layer_groups]
    if sorted(layer for group in groups for layer in group) != list(layers):
        raise SpecError(
            f"layer_groups are {groups}, expected each of the MoE layers {list(layers)} in one"
        )
    if sequence_groups is None:
        return Plan(tuple(groups), tuple(_blocks(batch.cu_seqlens.tolist())))
    blocks = [choose_sequences(len(batch), group) for group in sequence_groups]
    if [i for block in blocks for i in block] != list(range(len(batch))):
        raise IndexError(
            f"sequence_groups are {blocks}, expected 0..{len(batch) - 1}, one behind the other"
        )
    return Plan(tuple(groups), tuple(blocks))


def _blocks(cu_seqlens: list[int]) -> Iterator[range]:
    first, total = 0, cu_seqlens[-1]
    for i, end in enumerate(cu_seqlens[1:], 1):
        # what is left is a block too
        if min(end - cu_seqlens[first], total - end) >= _BLOCK or end == total:
            yield range(first, i)
            first = i


def places(layers: Sequence[int], wanted: Sequence[int]) -> slice | list[int]:
    """Where `wanted` are in `layers`; a slice, which copies nothing, if they are neighbours"""
    at = [layers.index(layer) for layer in wanted]
    return slice(at[0], at[-1] + 1) if at[-1] - at[0] == len(at) - 1 else at


def overlap(a: range, b: range) -> range:
    """What two ranges of step 1 have in common"""
    return range(max(a.start, b.start), min(a.stop, b.stop))
