"""prime-rl: tokens of a response, with the routing as its inference server sends it.

`routed_experts`: {"data": base64, "shape": [rows, num_hidden_layers, top_k], "start": first row,
"dtype": "uint8" or "uint16"}, the type by the largest id; without a dtype it is uint8. Missing rows
are padded with expert 0. `prompt_ids`, `completion_ids`, `completion_mask`, `completion_logprobs`;
or a reply of its /generate, with `choices[].token_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.batch import RoutingBatch
from r3.storage.wire.payload import (
    count_of,
    decode_base64,
    encode_base64,
    fields_of,
    first_of,
    label_of,
    raw_array,
    routing_of,
)
from r3.storage.wire.reading import Found, Given, sampled_logprobs, to_batch
from r3.storage.wire.skyrl import payloads_of, shape_of
from r3.storage.wire.writing import parts_of

ASK = (
    "enable_return_routed_experts of the inference server, or enable_router_replay of the trainer,"
)


def to_wire(batch: RoutingBatch) -> list[dict[str, Any]]:
    """One mapping of tokens for each sequence."""
    items = []
    for part in parts_of(batch, "prime-rl"):
        # with one expert per token, expert 0 in all layers could be a missing row
        ids = part.rows(part.spec.dtype, start=part.start, arange=part.spec.top_k == 1)
        logprobs, mask = part.logprobs_and_mask() or (None, None)
        item: dict[str, Any] = {
            "prompt_ids": part.prompt,
            "completion_ids": part.response,
            "routed_experts": {
                "data": encode_base64(ids),
                "shape": list(ids.shape),
                "start": part.start,
                "dtype": ids.dtype.name,
            },
        }
        if logprobs is not None:
            item |= {"completion_mask": mask, "completion_logprobs": logprobs}
        items.append(item)
    return items


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: tokens or a reply, as mappings, or a list of them, or of `routed_experts` alone."""

    def read(i: int, item: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Found:
        reply, fields = item
        payload = fields_of(routing_of(fields, "routed_experts", ASK), "routed_experts")
        label = label_of(payload.get("dtype", "uint8"), ("uint8", "uint16"))
        data = decode_base64(payload.get("data"), "data")
        ids = raw_array(data, label, shape_of(payload), "data")
        given.check_not_cut(ids)
        prompt = first_of("prompt_ids", fields, {"prompt_ids": reply.get("prompt_token_ids")})
        response = first_of("completion_ids", fields, {"completion_ids": fields.get("token_ids")})
        tokens, prompt_len = given.tokens(i, prompt, response)
        logprobs = sampled_logprobs(
            fields.get("completion_logprobs"),
            fields.get("completion_mask"),
            len(tokens) - prompt_len,
            ("completion_logprobs", "completion_mask"),
        )
        start = count_of(first_of("start", payload, {"start": 0}), "start")
        return Found(tokens, prompt_len, ids, start=start, logprobs=logprobs)

    return to_batch(payloads_of(obj), read, given, zeros=True)
