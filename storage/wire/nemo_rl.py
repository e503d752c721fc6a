"""NeMo-RL: output items of NeMo Gym, with the routing in one string.

    nrlre1:<int8, int16 or int32>:<n>x<layers>x<top_k>:<base64>

One row per token; int8 to 128 experts, int16 to 32768, else int32; missing rows are -1 throughout.
`prompt_token_ids`, `generation_token_ids`, `generation_log_probs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import FormatError
from r3.spec import RouterSpec
from r3.storage.wire.payload import (
    decode_base64,
    encode_base64,
    fields_of,
    items_of,
    raw_array,
    routing_of,
)
from r3.storage.wire.reading import Found, Given, sampled_logprobs, to_batch
from r3.storage.wire.writing import parts_of

ASK = "policy.router_replay.enabled, with vllm_kwargs.enable_return_routed_experts,"
_ENVELOPE = re.compile(r"nrlre1:(int8|int16|int32):(\d{1,12})x(\d{1,12})x(\d{1,12}):")


def to_wire(batch: RoutingBatch) -> list[dict[str, Any]]:
    """One output item for each sequence; the last token's row is a missing one."""
    items = []
    for part in parts_of(batch, "nemo-rl"):
        rows = part.rows(_dtype(part.spec), missing=-1, all_layers=False)
        ids = np.concatenate([rows, np.full((1, *rows.shape[1:]), -1, rows.dtype)])
        shape = "x".join(map(str, ids.shape))
        item: dict[str, Any] = {
            "prompt_token_ids": part.prompt,
            "generation_token_ids": part.response,
            "routed_experts": f"nrlre1:{ids.dtype.name}:{shape}:{encode_base64(ids)}",
        }
        known = part.logprobs_and_mask()
        if known is not None and all(known[1]):  # the item has no mask
            item["generation_log_probs"] = known[0]
        items.append(item)
    return items


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: an output item as a mapping, or a list of them, or of the strings alone."""

    def read(i: int, item: Any) -> Found:
        alone = {"routed_experts": item} if isinstance(item, str) else item
        fields = fields_of(alone, "the output item")
        ids = _decode(routing_of(fields, "routed_experts", ASK), given)
        prompt, response = fields.get("prompt_token_ids"), fields.get("generation_token_ids")
        tokens, prompt_len = given.tokens(i, prompt, response)
        logprobs = sampled_logprobs(
            fields.get("generation_log_probs"),
            None,
            len(tokens) - prompt_len,
            ("generation_log_probs", ""),
        )
        return Found(tokens, prompt_len, ids, logprobs=logprobs)

    items = [obj] if isinstance(obj, Mapping | str) else items_of(obj, "the payload")
    return to_batch(items, read, given)


def _dtype(spec: RouterSpec) -> type[np.signedinteger[Any]]:
    if spec.num_experts <= 128:
        return np.int8
    return np.int16 if spec.num_experts <= 32768 else np.int32


def _decode(text: object, given: Given) -> np.ndarray:
    envelope = _ENVELOPE.match(text) if isinstance(text, str) else None
    if not isinstance(text, str) or envelope is None:
        raise FormatError(
            f"routed_experts is {text!r:.60}, expected "
            "nrlre1:<int8, int16 or int32>:<n>x<layers>x<top_k>:<base64>"
        )
    label, *shape = envelope.groups()
    given.check_width(label)
    data = decode_base64(text[envelope.end() :], "routed_experts")
    return raw_array(data, label, [int(n) for n in shape], "routed_experts")
