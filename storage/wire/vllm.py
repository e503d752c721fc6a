"""vLLM 0.22 and later: replies of /v1/completions, /v1/chat/completions, /inference/v1/generate.

`choices[].routed_experts` is base64 of a .npy file, [n - 1, num_hidden_layers, top_k] uint8 or
uint16, dense layers as zeros, without a sign for a missing row. Token ids are there with
`return_token_ids`: `choices[].token_ids`, and `prompt_token_ids` in the choice or the reply.
Replies do not repeat the request's `routed_experts_prompt_start`: put it into the reply, beside
`choices`, if it was not 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from r3.batch import RoutingBatch
from r3.errors import FormatError
from r3.storage.wire.npy import decode_npy, encode_npy
from r3.storage.wire.payload import (
    count_of,
    fields_of,
    first_of,
    items_of,
    routing_of,
)
from r3.storage.wire.reading import Found, Given, naming, to_batch
from r3.storage.wire.writing import parts_of

ASK = "vLLM's --enable-return-routed-experts"
ASK_TOKENS = "return_token_ids in the request"
START = "routed_experts_prompt_start"
_DTYPES = ("uint8", "uint16", "int32")  # by the field's description in vLLM's protocol


def to_wire(batch: RoutingBatch) -> list[dict[str, Any]]:
    """One completions reply for each sequence."""
    replies = []
    for part in parts_of(batch, "vllm"):
        ids = part.rows(part.spec.dtype, start=part.start)
        choice = {
            "index": 0,
            "prompt_token_ids": part.prompt,
            "token_ids": part.response,
            "routed_experts": encode_npy(ids),
        }
        start = {START: part.start} if part.start else {}
        replies.append({"object": "text_completion", "choices": [choice], **start})
    return replies


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: a reply, or a list of them, or of the base64 strings alone."""

    def read(i: int, item: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Found:
        reply, choice = item
        payload = routing_of(choice, "routed_experts", ASK)
        ids = decode_npy(payload, "routed_experts")
        if ids.dtype.name not in _DTYPES:
            raise FormatError(f"routed_experts is {ids.dtype}, expected one of {_DTYPES}")
        given.check_width(ids.dtype)
        prompt = first_of("prompt_token_ids", choice, reply)
        tokens, prompt_len = given.tokens(i, prompt, choice.get("token_ids"), ASK_TOKENS)
        start = count_of(first_of(START, reply, {START: 0}), START)
        return Found(tokens, prompt_len, ids, start=start)

    return to_batch(list(choices_of(obj)), read, given)


def choices_of(obj: Any) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each reply with each of its choices; a payload alone is a choice of an empty reply."""
    replies = [obj] if isinstance(obj, Mapping | str) else items_of(obj, "the payload")
    for i, reply in enumerate(replies):
        if isinstance(reply, str):
            yield {}, {"routed_experts": reply}
            continue
        with naming(f"reply {i}"):
            fields = fields_of(reply, "it")
            for choice in items_of(fields.get("choices"), "choices"):
                yield fields, fields_of(choice, "a choice")
