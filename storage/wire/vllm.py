"""vLLM 0.22 and later: replies of /v1/completions, /v1/chat/completions, /inference/v1/generate.

`choices[].routed_experts` is base64 of a .npy file, [n - 1, num_hidden_layers, top_k] uint8 or
uint16, dense layers as zeros, without a sign for a missing row. Token ids are there with
`return_token_ids`: `choices[].token_ids`, and `prompt_token_ids` in the choice or the reply.
Replies do not repeat the request's `routed_experts_prompt_start`: put it into the reply, beside
`choices`, if it was not 0.

Replies of this package's server are read too, with the rows as text of r3.storage.wire.compact.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import CaptureError, FormatError
from r3.storage.wire.compact import LABEL, decode_rows
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

ASK = "vLLM's --enable-return-routed-experts, or r3 serve,"
ASK_TOKENS = "return_token_ids in the request"
START = "routed_experts_prompt_start"
_DTYPES = ("uint8", "uint16", "int32")  # by the field's description in vLLM's protocol
_NO_LOGPROB = -9999.0  # what vLLM writes into JSON for minus infinity


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
        logprobs = part.response_logprobs
        if logprobs is not None and not np.isnan(logprobs).any():
            choice["logprobs"] = {"token_logprobs": logprobs.tolist()}
        start = {START: part.start} if part.start else {}
        replies.append({"object": "text_completion", "choices": [choice], **start})
    return replies


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: a reply, a mapping or an object of the openai package; or a list of them, or of the
    strings alone."""

    def read(i: int, item: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Found:
        reply, choice = item
        payload = routing_of(choice, "routed_experts", ASK)
        if isinstance(payload, Mapping | list):
            raise FormatError(
                f"routed_experts is {reprlib.repr(payload)}, expected a string: a handle of a "
                "record, or the pieces of a stream, are read by "
                "r3.engine_hooks.vllm_response.trace_from_response"
            )
        prompt = first_of("prompt_token_ids", choice, reply)
        tokens, prompt_len = given.tokens(i, prompt, choice.get("token_ids"), ASK_TOKENS)
        logprobs = logprobs_of(choice, prompt_len, len(tokens) - prompt_len)
        if isinstance(payload, str) and payload.startswith(LABEL):
            rows = decode_rows(payload, given.spec, tokens)
            return Found(tokens, prompt_len, rows.ids, rows.start, logprobs, rows.versions)
        ids = decode_npy(payload, "routed_experts")
        if ids.dtype.name not in _DTYPES:
            raise FormatError(f"routed_experts is {ids.dtype}, expected one of {_DTYPES}")
        given.check_width(ids.dtype)
        start = count_of(first_of(START, reply, {START: 0}), START)
        return Found(tokens, prompt_len, ids, start, logprobs)

    return to_batch(list(choices_of(obj)), read, given)


def choices_of(obj: Any) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each reply with each of its choices; a payload alone is a choice of an empty reply."""
    alone = isinstance(obj, Mapping | str) or hasattr(obj, "model_dump")
    for i, reply in enumerate([obj] if alone else items_of(obj, "the payload")):
        if isinstance(reply, str):
            yield {}, {"routed_experts": reply}
            continue
        with naming(f"reply {i}"):
            fields = fields_of(reply.model_dump() if hasattr(reply, "model_dump") else reply, "it")
            for choice in items_of(fields.get("choices"), "choices"):
                yield fields, fields_of(choice, "a choice")


def logprobs_of(choice: Mapping[str, Any], prompt: int, sampled: int) -> np.ndarray | None:
    """float32 [sampled] from a choice of `prompt` and `sampled` tokens; None if it has none.

    They are those sampled from only if the server ran with `--logprobs-mode processed_logprobs`,
    which the reply does not tell. Raises CaptureError if one is missing or not finite.
    """
    given = choice.get("logprobs")
    if not isinstance(given, Mapping):
        return None
    values = given.get("token_logprobs")
    if values is None and (values := given.get("content")) is None:
        return None
    if not isinstance(values, list):
        raise FormatError(f"log-probabilities are {reprlib.repr(values)}, expected a list")
    values = [v.get("logprob") if isinstance(v, Mapping) else v for v in values]
    if len(values) == prompt + sampled:  # with echo those of the prompt come first
        values = values[prompt:]
    if len(values) != sampled:
        raise CaptureError(f"{len(values)} log-probabilities for {sampled} tokens")
    for i, value in enumerate(values):
        if type(value) not in (int, float) or not _NO_LOGPROB < value < 1:  # nor NaN
            raise CaptureError(
                f"sampled token {i} has log-probability {value!r}, expected a finite one"
            )
    return np.asarray(values, np.float32)
