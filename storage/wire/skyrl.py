"""SkyRL: replies of /skyrl/v1/generate, and what its generators hand to the trainer.

`choices[].routed_experts`: {"data": base64, "shape": [rows, num_hidden_layers, top_k], "dtype"},
the dtype the first of uint8, int16, int32 that holds the largest id, no other. Replies have
`choices[].token_ids`; the prompt's ids are the request's `token_ids`: put them into the reply, as
`prompt_token_ids`. A generator's output is lists over trajectories: `prompt_token_ids`,
`response_ids` and, of arrays or of payloads, `rollout_expert_indices`. Nothing stands for a missing
row; rows of 0..top_k - 1 pad batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import FormatError
from r3.storage.wire.payload import (
    array_of,
    count_of,
    decode_base64,
    encode_base64,
    fields_of,
    items_of,
    label_of,
    raw_array,
    routing_of,
)
from r3.storage.wire.reading import Found, Given, naming, to_batch
from r3.storage.wire.writing import parts_of

ASK = "generator.inference_engine.enable_return_routed_experts"
_DTYPES = ("uint8", "int16", "int32")
_KEYS = ("prompt_token_ids", "response_ids", "rollout_expert_indices")

Item = tuple[Mapping[str, Any], Mapping[str, Any]]


def to_wire(batch: RoutingBatch) -> list[dict[str, Any]]:
    """One reply for each sequence, with the prompt's ids."""
    replies = []
    for part in parts_of(batch, "skyrl"):
        ids = part.rows(np.int32, arange=True)
        ids = ids.astype(_smallest(ids))
        payload = {
            "data": encode_base64(ids),
            "shape": list(ids.shape),
            "dtype": ids.dtype.name,
        }
        choice = {"token_ids": part.response, "routed_experts": payload}
        replies.append({"prompt_token_ids": part.prompt, "choices": [choice]})
    return replies


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: a reply or a generator's output, or a list of replies, or of payloads alone."""

    def read(i: int, item: Item) -> Found:
        reply, choice = item
        ids = _decode(routing_of(choice, "routed_experts", ASK))
        given.check_not_cut(ids)
        prompt, response = reply.get("prompt_token_ids"), choice.get("token_ids")
        tokens, prompt_len = given.tokens(i, prompt, response, "as prompt_token_ids")
        return Found(tokens, prompt_len, ids)

    if isinstance(obj, Mapping) and "rollout_expert_indices" in obj:
        routing_of(obj, "rollout_expert_indices", ASK)
        columns = [items_of(obj.get(key), key) for key in _KEYS]
        if len({len(column) for column in columns}) > 1:
            raise FormatError(
                f"{', '.join(_KEYS)} have {[len(column) for column in columns]} entries, expected "
                "one for each trajectory"
            )
        items: list[Item] = [
            ({"prompt_token_ids": a}, {"token_ids": b, "routed_experts": c})
            for a, b, c in zip(*columns, strict=True)
        ]
    else:
        items = payloads_of(obj)
    return to_batch(items, read, given, arange=True)


def payloads_of(obj: Any) -> list[Item]:
    """Each reply with each choice; what has no choices is itself one, as is a payload alone."""
    items: list[Item] = []
    replies = [obj] if isinstance(obj, Mapping) else items_of(obj, "the payload")
    for i, value in enumerate(replies):
        with naming(f"reply {i}"):
            reply = fields_of(value, "it")
            if "choices" in reply:
                choices = items_of(reply["choices"], "choices")
                items += [(reply, fields_of(choice, "a choice")) for choice in choices]
            else:
                items.append(({}, {"routed_experts": reply} if "data" in reply else reply))
    return items


def shape_of(payload: Mapping[str, Any]) -> Sequence[int]:
    """Three integers of 0 or more. Raises FormatError for anything else."""
    shape = [count_of(n, "shape") for n in items_of(payload.get("shape"), "shape")]
    if len(shape) != 3:
        raise FormatError(f"shape is {shape!r:.60}, expected [rows, layers, top_k]")
    return shape


def _smallest(ids: np.ndarray) -> str:
    largest = int(ids.max(initial=0))
    return next(name for name in _DTYPES if largest <= np.iinfo(name).max)


def _decode(value: Any) -> np.ndarray:
    if not isinstance(value, Mapping):  # an array, in a generator's output
        name = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        return array_of(value, label_of(name, _DTYPES), 3, "rollout_expert_indices")
    label = label_of(value.get("dtype"), _DTYPES)
    ids = raw_array(decode_base64(value.get("data"), "data"), label, shape_of(value), "data")
    if int(ids.min(initial=0)) < 0 or _smallest(ids) != label:
        raise FormatError(
            f"ids {ids.min(initial=0)} to {ids.max(initial=0)} as {label}, expected "
            f"{_smallest(ids)}, the smallest that holds them, and none below 0"
        )
    return ids
