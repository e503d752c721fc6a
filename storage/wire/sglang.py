"""SGLang: replies of /generate and of its OpenAI endpoints.

`meta_info.routed_experts` (in the reply, or in the choice with `return_meta_info`) or
`sglext.routed_experts` (of the first choice): base64 of int32 in a row, without shape or type,
[n - 1 - start, num_hidden_layers, top_k]. start is the request's `routed_experts_start_len`, which
frameworks keep in `meta_info`. Nothing stands for a missing row. Token ids: `output_ids` and
`prompt_token_ids` of the reply, `token_ids` and `prompt_token_ids` of a choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import FormatError, TraceError
from r3.storage.wire.payload import (
    count_of,
    decode_base64,
    encode_base64,
    fields_of,
    first_of,
    items_of,
    raw_array,
    routing_of,
)
from r3.storage.wire.reading import Found, Given, naming, to_batch
from r3.storage.wire.writing import parts_of

ASK = "SGLang's --enable-return-routed-experts with return_routed_experts: true in the request"
ASK_TOKENS = "return_token_ids or return_prompt_token_ids in the request"
START = "routed_experts_start_len"
_HOLDERS = ("meta_info", "sglext", "sgl_ext")


def to_wire(batch: RoutingBatch) -> list[dict[str, Any]]:
    """One /generate reply for each sequence."""
    replies = []
    for part in parts_of(batch, "sglang"):
        meta: dict[str, Any] = {
            "prompt_tokens": part.prompt_len,
            "completion_tokens": len(part.response),
            "routed_experts": encode_base64(part.rows("<i4", start=part.start)),
        }
        if part.start:
            meta[START] = part.start
        replies.append(
            {
                "prompt_token_ids": part.prompt,
                "output_ids": part.response,
                "meta_info": meta,
            }
        )
    return replies


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: a reply, or a list of them, or of the base64 strings alone."""
    items: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    replies = [obj] if isinstance(obj, Mapping | str) else items_of(obj, "the payload")
    for i, value in enumerate(replies):
        if isinstance(value, str):
            items.append(({}, {"meta_info": {"routed_experts": value}}))
            continue
        with naming(f"reply {i}"):
            reply = fields_of(value, "it")
            items += _choices(reply)

    def read(i: int, item: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Found:
        holders = _holders(*item)
        payload = routing_of(_merged(holders, "routed_experts"), "routed_experts", ASK)
        first = _merged([*holders, *item], START).get(START)
        start = 0 if first is None else count_of(first, START)
        outer, inner = item
        prompt = first_of("prompt_token_ids", inner, outer)
        response = first_of("output_ids", inner, {"output_ids": inner.get("token_ids")})
        tokens, prompt_len = given.tokens(i, prompt, response, ASK_TOKENS)
        return Found(tokens, prompt_len, _ids(payload, len(tokens), start, given), start)

    return to_batch(items, read, given)


def _choices(reply: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each choice and what the reply says of it; a reply without choices is one itself."""
    if "choices" not in reply:
        return [({}, reply)]
    pairs = []
    for j, choice in enumerate(items_of(reply["choices"], "choices")):
        # routing in the reply itself is that of its first choice
        own = reply if j == 0 else {k: v for k, v in reply.items() if k not in _HOLDERS}
        pairs.append((own, fields_of(choice, "a choice")))
    return pairs


def _holders(*objects: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        fields_of(fields[name], name)
        for fields in objects
        for name in _HOLDERS
        if fields.get(name) is not None
    ]


def _merged(holders: list[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """`key` as all holders that have it say. Raises FormatError if they differ."""
    places = [fields[key] for fields in holders if key in fields]
    values = [value for value in places if value is not None]
    if len(values) > 1 and any(type(v) not in (str, int) or v != values[0] for v in values):
        raise FormatError(f"{key} is there {len(values)} times, expected the same each time")
    return {key: values[0] if values else None} if places else {}


def _ids(payload: object, tokens: int, start: int, given: Given) -> np.ndarray:
    data, spec = decode_base64(payload, "routed_experts"), given.spec
    row = spec.num_layers * spec.top_k * 4
    rows, rest = divmod(len(data), row)
    expected = max(tokens - 1 - start, 0)
    if rest or rows not in (expected, expected + 1):
        raise TraceError(
            f"routed_experts has {len(data)} bytes, expected {expected * row}: {expected} rows for "
            f"{tokens} tokens from row {start} on, x {spec.num_layers} layers (all of them) x "
            f"{spec.top_k} experts x 4 bytes (int32)"
        )
    shape = (rows, spec.num_layers, spec.top_k)
    return raw_array(data, "int32", shape, "routed_experts")
