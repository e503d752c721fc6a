"""What traces say that may explain a mismatch, as labels for r3.slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from r3.batch import RoutingBatch
from r3.columns import PROMPT
from r3.slices import OTHER, SEGMENTS, Labels, lag_labels, length_labels, octaves, of_pass
from r3.trace import RoutingTrace

_MOST_TAGS = 64


class TraceLabels:
    """Labels the tokens of batches, with the same labels for all of them.

    segment     the kind of the token that was fed: the log-probability of the first answer token
                counts as prompt's, that of the first one behind a tool's reply as reply's
    turn        turn of the conversation
    length      tokens of the rollout
    weight_lag  weight version of the trainer's rows minus that of the engine's; where both are
                known
    tag         each tag of the rollout; the first 64 that are met, and "other"
    A dimension that says nothing, since there are no turns, say, has no labels.
    """

    def __init__(self) -> None:
        self._tags: dict[str, None] = {}

    def of(
        self, traces: Sequence[RoutingTrace], engine: RoutingBatch, trainer: RoutingBatch
    ) -> Iterator[Labels]:
        """engine: the batch of `traces`; trainer: of the same tokens."""
        cu_seqlens = engine.cu_seqlens
        fed = _segments(traces, engine)
        yield Labels("segment", fed, of_pass(fed, cu_seqlens), list(SEGMENTS))
        if any("turns" in t.columns for t in traces):
            turns = [
                t.columns["turns"].data if "turns" in t.columns else np.zeros(t.num_tokens, int)
                for t in traces
            ]
            codes, texts = octaves(np.concatenate(turns).astype(np.int64))
            yield Labels("turn", codes, codes, texts)
        yield length_labels(cu_seqlens)
        known = (engine.weight_versions >= 0) & (trainer.weight_versions >= 0)
        if known.any():
            lag = trainer.weight_versions - engine.weight_versions
            yield lag_labels(lag, known, cu_seqlens)
        yield from self._by_tag(traces, np.diff(cu_seqlens))

    def _by_tag(self, traces: Sequence[RoutingTrace], lengths: np.ndarray) -> Iterator[Labels]:
        # a rollout may have several tags: each is a dimension of one label here
        found: dict[str, np.ndarray] = {}
        for i, trace in enumerate(traces):
            for tag in trace.tags:
                if len(self._tags) < _MOST_TAGS:
                    self._tags.setdefault(tag)
                label = tag if tag in self._tags else OTHER
                found.setdefault(label, np.full(len(traces), -1))[i] = 0
        for label, sequences in found.items():
            codes = np.repeat(sequences, lengths)
            yield Labels("tag", codes, codes, [label])


def _segments(traces: Sequence[RoutingTrace], batch: RoutingBatch) -> np.ndarray:
    """int64 [T]: 0 prompt, 1 answer, 2 reply"""
    found = np.ones(batch.num_tokens, np.int64)
    for start, trace in zip(batch.cu_seqlens, traces, strict=False):
        if trace.segments is not None:
            found[start : start + trace.num_tokens] = trace.segments
        else:
            found[start : start + trace.prompt_len] = PROMPT
    return found
