"""slime: a Sample, as a mapping (`Sample.to_dict()`).

`rollout_routed_experts`: int32 [len(tokens) - 1, num_hidden_layers, top_k]. Nothing stands for a
missing row; rows of consecutive experts pad batches. `tokens`, `response_length`,
`rollout_log_probs` of the response, and `loss_mask`, 0 for what was not sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.storage.wire.payload import (
    array_of,
    count_of,
    fields_of,
    integers,
    items_of,
    routing_of,
)
from r3.storage.wire.reading import Found, Given, sampled_logprobs, to_batch
from r3.storage.wire.writing import Part, parts_of

ASK = "--use-rollout-routing-replay"


def to_wire(batch: RoutingBatch) -> list[dict[str, Any]]:
    """One Sample for each sequence, its routing in numpy."""
    return [sample_of(part, part.rows(np.int32, arange=True)) for part in parts_of(batch, "slime")]


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: a Sample as a mapping, or a list of them; arrays are numpy or torch."""
    return samples_to_batch(obj, given, arange=True)


def sample_of(part: Part, ids: np.ndarray) -> dict[str, Any]:
    """The fields of a Sample that are known here."""
    logprobs, mask = part.logprobs_and_mask() or (None, None)
    return {
        "tokens": part.token_ids.tolist(),
        "response_length": len(part.response),
        "loss_mask": mask,
        "rollout_log_probs": logprobs,
        "rollout_routed_experts": ids,
    }


def samples_to_batch(obj: Any, given: Given, *, arange: bool) -> RoutingBatch:
    """The batch of Samples; arange: rows of 0..top_k - 1 may be a filler."""

    def read(i: int, item: Any) -> Found:
        sample = fields_of(item, "the Sample")
        value = routing_of(sample, "rollout_routed_experts", ASK)
        ids = array_of(value, "int32", 3, "rollout_routed_experts")
        if sample.get("tokens") is None:
            tokens, prompt_len = given.tokens(i)
        else:
            whole = integers(sample["tokens"], "tokens")
            length = sample.get("response_length")
            split = len(whole) - count_of(length, "response_length", most=len(whole))
            tokens, prompt_len = given.tokens(i, whole[:split], whole[split:])
        logprobs = sampled_logprobs(
            sample.get("rollout_log_probs"),
            sample.get("loss_mask"),
            len(tokens) - prompt_len,
            ("rollout_log_probs", "loss_mask"),
        )
        return Found(tokens, prompt_len, ids, logprobs=logprobs)

    items = [obj] if isinstance(obj, Mapping) else items_of(obj, "the payload")
    return to_batch(items, read, given, arange=arange)
