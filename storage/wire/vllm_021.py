"""vLLM 0.21: nested lists, the prompt's rows in the reply, the others in each choice.

`prompt_routed_experts` [prompt, layers, top_k] and `choices[].routed_experts` [response - 1,
layers, top_k], all decoder layers; rows whose KV came from the prefix cache are -1 throughout.
Token ids: `prompt_token_ids` in the reply or the choice, `choices[].token_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import TraceError
from r3.storage.wire.payload import fields_of, first_of, items_of, nested_array, routing_of
from r3.storage.wire.reading import Found, Given, naming, to_batch
from r3.storage.wire.vllm import ASK, ASK_TOKENS
from r3.storage.wire.writing import parts_of


def to_wire(batch: RoutingBatch) -> list[dict[str, Any]]:
    """One reply for each sequence."""
    replies = []
    for part in parts_of(batch, "vllm-0.21"):
        ids = part.rows(np.int64, missing=-1)
        choice = {
            "index": 0,
            "token_ids": part.response,
            "routed_experts": ids[part.prompt_len :].tolist(),
        }
        replies.append(
            {
                "prompt_token_ids": part.prompt,
                "prompt_routed_experts": ids[: part.prompt_len].tolist(),
                "choices": [choice],
            }
        )
    return replies


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: a reply, or a list of them."""
    spec, items = given.spec, []
    replies = [obj] if isinstance(obj, Mapping) else items_of(obj, "the payload")
    for i, value in enumerate(replies):
        with naming(f"reply {i}"):
            reply = fields_of(value, "it")
            lists = routing_of(reply, "prompt_routed_experts", ASK)
            what = "prompt_routed_experts"
            rows = nested_array(lists, spec.num_layers, spec.top_k, what)  # once for all choices
            choices = items_of(reply.get("choices"), "choices")
            items += [(reply, rows, fields_of(choice, "a choice")) for choice in choices]

    def read(i: int, item: tuple[Mapping[str, Any], np.ndarray, Mapping[str, Any]]) -> Found:
        reply, of_prompt, choice = item
        prompt = first_of("prompt_token_ids", choice, reply)
        tokens, prompt_len = given.tokens(i, prompt, choice.get("token_ids"), ASK_TOKENS)
        sampled = len(tokens) - prompt_len
        lists = choice.get("routed_experts")
        if lists is not None or sampled > 1:  # a single token has no row
            lists = routing_of(choice, "routed_experts", ASK)
        of_choice = nested_array(
            [] if lists is None else lists, spec.num_layers, spec.top_k, "routed_experts"
        )
        if sampled and len(of_prompt) != prompt_len:
            raise TraceError(
                f"prompt_routed_experts has {len(of_prompt)} rows, expected {prompt_len}, one for "
                "each token of the prompt"
            )
        if len(of_choice) and len(of_prompt) and of_choice.shape[1:] != of_prompt.shape[1:]:
            raise TraceError(
                f"routed_experts has rows of shape {list(of_choice.shape[1:])}, expected "
                f"{list(of_prompt.shape[1:])}, as in prompt_routed_experts"
            )
        parts = [rows for rows in (of_prompt, of_choice) if len(rows)] or [of_prompt]
        return Found(tokens, prompt_len, np.concatenate(parts))

    return to_batch(items, read, given)
