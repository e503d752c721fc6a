"""Which layers and sequences of a batch are asked for: one meaning wherever a part is read."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable

from r3.errors import SpecError
from r3.spec import RouterSpec


def choose_layers(spec: RouterSpec, layers: Iterable[int] | None) -> RouterSpec:
    """`spec` with only these decoder layers, ascending; None for all.

    Raises SpecError for layers that are not there and for none at all.
    """
    if layers is None:
        return spec
    wanted = list(layers)
    unknown = [layer for layer in wanted if layer not in spec.moe_layers]
    if unknown or not wanted:
        raise SpecError(
            f"decoder layers {unknown} asked for, expected one or more of the MoE layers "
            f"{list(spec.moe_layers)}"
        )
    kept = tuple(layer for layer in spec.moe_layers if layer in wanted)
    return dataclasses.replace(spec, moe_layers=kept)


def choose_sequences(count: int, sequences: slice | range | None) -> range:
    """Those numbers of `count` sequences, one behind the other; None for all.

    A slice is cut off at the ends, as for a list, a range is not. Raises IndexError for sequences
    that are not there and for none at all, TypeError for anything but a slice or a range.
    """
    if sequences is None:
        return range(count)
    if not isinstance(sequences, slice | range):
        raise TypeError(f"sequences is {reprlib.repr(sequences)}, expected a slice or a range")
    part = range(count)[sequences] if isinstance(sequences, slice) else sequences
    if not part or part.step != 1 or part.start < 0 or part.stop > count:
        raise IndexError(
            f"sequences {sequences} asked for, expected one or more of 0..{count - 1} in steps of 1"
        )
    return part
