"""miles: a Sample, as a mapping. That of slime, but rows of -1 throughout are missing ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.storage.wire.reading import Given
from r3.storage.wire.slime import sample_of, samples_to_batch
from r3.storage.wire.writing import parts_of


def to_wire(batch: RoutingBatch) -> list[dict[str, Any]]:
    """One Sample for each sequence, its routing in numpy."""
    return [sample_of(part, part.rows(np.int32, missing=-1)) for part in parts_of(batch, "miles")]


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: a Sample as a mapping, or a list of them; arrays are numpy or torch."""
    return samples_to_batch(obj, given, arange=False)
