"""Megatron-core's own router replay: one tensor per router, of all tokens of a packed batch.

A list with an int64 [tokens, top_k] for each MoE layer, the sequences one behind the other, each
with a row for its last token. There are no token ids and nothing stands for a missing row. Padded
batches are in another order (tokens first, then sequences): see r3.trainer_hooks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import FormatError, TraceError
from r3.storage.wire.payload import array_of, items_of
from r3.storage.wire.reading import Found, Given, to_batch
from r3.storage.wire.writing import parts_of


def to_wire(batch: RoutingBatch) -> list[np.ndarray]:
    """One int64 [T, top_k] per MoE layer.

    A router wants experts for the last token of each sequence, too, for which none were captured:
    it gets consecutive ones, others at each position so that no expert gets all of them.
    """
    pieces, spec, end = [], batch.spec, 0
    for part in parts_of(batch, "megatron"):
        pieces.append(part.rows(np.int64, all_layers=False))
        end += len(part.token_ids)
        last = (np.arange(spec.top_k) + end * spec.top_k) % spec.num_experts
        pieces.append(np.broadcast_to(last, (1, len(spec.moe_layers), spec.top_k)))
    return list(np.ascontiguousarray(np.concatenate(pieces).transpose(1, 0, 2)))


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: one int64 [rows, top_k] per MoE layer, numpy or torch; rows: n or n - 1 per sequence.

    Needs token_ids= and prompt_lens=.
    """
    layers = [
        array_of(layer, "int64", 2, f"router {i}")
        for i, layer in enumerate(items_of(obj, "the payload"))
    ]
    if len(layers) != len(given.spec.moe_layers) or len({a.shape for a in layers}) > 1:
        raise TraceError(
            f"{len(layers)} arrays of shapes {sorted({a.shape for a in layers})}, expected one of "
            f"the same shape for each of {len(given.spec.moe_layers)} MoE layers"
        )
    if given.token_ids is None:
        raise FormatError("the payload has no token ids: pass token_ids= and prompt_lens=")
    lengths = np.array([len(tokens) for tokens in given.token_ids])
    total = len(layers[0])
    if total not in (lengths.sum(), (lengths - 1).sum()):
        raise TraceError(
            f"{total} rows for sequences of {lengths.tolist()!r:.80} tokens, expected "
            f"{lengths.sum()}, or {(lengths - 1).sum()} without those of last tokens"
        )
    ends = np.cumsum(lengths if total == lengths.sum() else lengths - 1)
    ids = np.stack(layers, axis=1)

    def read(i: int, rows: np.ndarray) -> Found:
        return Found(*given.tokens(i), rows)

    return to_batch(np.split(ids, ends[:-1]), read, given)
