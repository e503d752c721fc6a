"""Judges captured traces: against what was asked, and against Hugging Face cell by cell."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from r3.errors import SuspiciousRoutingWarning
from r3.storage import ShardReader
from r3.trace import RoutingTrace
from tiny_models import hf_routing

NEAR_TIE = 1e-4  # gap between the k-th and the next score below which float32 may flip a set


@dataclass
class Counts:
    """A cell is one token in one layer."""

    cells: int = 0
    differ: int = 0  # from Hugging Face, all of them excused
    near: int = 0  # near-ties
    excused: int = 0  # near-ties, and what follows from one that fell differently
    shifted: int = 0  # cells that would be wrong, were the rows shifted by one token

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self._values(), other._values(), strict=True)))

    def _values(self) -> tuple[int, ...]:
        return self.cells, self.differ, self.near, self.excused, self.shifted

    def __str__(self) -> str:
        return (
            f"{self.cells} cells, {self.differ} differ from Hugging Face, {self.near} near-ties "
            f"({self.excused} excused)"
        )


def read_traces(file: Path) -> list[RoutingTrace]:
    """All traces of a file that scenario_play wrote.

    Greedy decoding of a tiny model runs in circles: what is suspicious in large models is not here.
    """
    with ShardReader(file) as shard, warnings.catch_warnings():
        warnings.simplefilter("ignore", SuspiciousRoutingWarning)
        return list(shard)


def check_routing(traces: list[RoutingTrace], model: Path) -> Counts:
    """Every cell must be what Hugging Face chooses in float32, except near-ties.

    A near-tie that fell to the other side changes what comes after it: the later layers of its
    token and of all tokens behind it are excused too.
    """
    counts = Counts()
    spec = traces[0].spec
    truth = hf_routing(model, [t.token_ids for t in traces], spec.top_k)
    for trace, (experts, gap) in zip(traces, truth, strict=True):
        assert trace.valid.all(), f"{trace.rollout_id}: {(~trace.valid).sum()} rows are missing"
        rows = np.sort(trace.routed_experts, axis=-1)
        wrong = (rows != experts[:-1]).any(axis=-1)
        tie = gap[:-1] < NEAR_TIE
        excused = tie.copy()
        for token, layer in np.argwhere(wrong & tie):
            excused[token:, layer + 1 :] = True
        bad = np.argwhere(wrong & ~excused)
        assert not len(bad), (
            f"{trace.rollout_id}: {len(bad)} of {wrong.size} cells differ from Hugging Face, the "
            f"first at token, layer {bad[0]}, {trace.prompt_len} of {len(rows)} rows are prompt"
        )
        shifted = (rows[:-1] != experts[1:-1]).any(axis=-1) & ~tie[1:]
        counts += Counts(*(int(a.sum()) for a in (wrong >= 0, wrong, tie, excused, shifted)))
    return counts


def check_lengths(traces: list[RoutingTrace], facts: dict[str, dict[str, Any]]) -> None:
    """Token ids are those asked and returned, and each but the last has a row of version 0."""
    assert [str(t.rollout_id) for t in traces] == list(facts)
    for trace in traces:
        fact = facts[str(trace.rollout_id)]
        asked, sampled, where = fact["asked"], fact["sampled"], str(trace.rollout_id)
        assert fact["prompt"] == asked.prompt, where
        assert trace.token_ids.tolist() == asked.prompt + sampled, where
        assert trace.prompt_len == len(asked.prompt), where
        assert len(trace.routed_experts) == len(trace.token_ids) - 1, where
        assert trace.valid.all(), where
        assert (trace.weight_versions == 0).all(), where
        assert 1 <= len(sampled) <= asked.max_tokens, where
        if fact["finish"] == "length":
            assert len(sampled) == asked.max_tokens, where
        elif fact["finish"] == "stop":
            words = " ".join(f"t{i}" for i in sampled)
            assert sampled[-1] in (1, *asked.stop_token_ids) or any(
                s in words for s in asked.stop
            ), where
        else:
            assert fact["finish"] == "abort", where
        assert asked.logprobs == (trace.logprobs is not None), where
