"""The labels of one training step's batch: length and weight lag, and the trainer's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.columns import on_host
from r3.errors import TraceError
from r3.json_fields import brief
from r3.slices import Labels, lag_labels, length_labels

_OWN = ("length", "weight_lag")  # dimensions that need no labels


def step_labels(
    batch: RoutingBatch, lag: np.ndarray | None, known_lag: np.ndarray, labels: Mapping[str, Any]
) -> Iterator[Labels]:
    """lag: int64 [T], or None; known where bool [T] `known_lag`. labels: by dimension, text or
    integers, one for each token [T] or each sequence [B]. Raises TraceError for others."""
    if not isinstance(labels, Mapping):
        raise TraceError(
            f"labels is of type {type(labels).__name__}, expected a dictionary by dimension"
        )
    yield length_labels(batch.cu_seqlens)
    if lag is not None:
        yield lag_labels(lag, known_lag, batch.cu_seqlens)
    for name, given in labels.items():
        if not isinstance(name, str):
            raise TraceError(f"labels: {brief(name)} is a dimension, expected text as its name")
        if name in _OWN:
            raise TraceError(f"labels: {name!r} comes by itself, expected another dimension")
        values = on_host(given, f"labels: {name!r}")
        if values.shape not in ((batch.num_tokens,), (len(batch),)) or values.dtype.kind not in (
            "iubUO"
        ):
            raise TraceError(
                f"labels: {name!r} is {values.dtype} of shape {list(values.shape)}, expected text "
                f"or integers of shape [{batch.num_tokens}] (tokens) or [{len(batch)}] (sequences)"
            )
        if values.dtype.kind == "O":
            for i, value in enumerate(values):
                if not isinstance(value, str | int | np.integer):
                    raise TraceError(
                        f"labels: {name!r}: entry {i} is {brief(value)}, expected text or an "
                        "integer"
                    )
        try:
            as_text = values.astype(str)
        except ValueError as e:  # an integer of thousands of digits
            raise TraceError(f"labels: {name!r}: {e}") from None
        texts, codes = np.unique(as_text, return_inverse=True)
        codes = codes.astype(np.int64)
        if len(codes) != batch.num_tokens:
            codes = np.repeat(codes, np.diff(batch.cu_seqlens))
        yield Labels(name, codes, codes, texts.tolist())
