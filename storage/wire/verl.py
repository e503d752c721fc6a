"""verl: a batch of padded tensors (`DataProto.batch`), or of jagged ones without padding.

Padded: `input_ids`, `attention_mask` [B, P + R], `responses` [B, R], and `routed_experts` int16
[B, P + R, num_hidden_layers, top_k]. Prompts of up to P tokens stand left of column P, padded on
the left, responses right of it, padded on the right; the row of a token stands at its column. All
else is zeros, as are rows that are missing, so a missing row is told from data where top_k is 2 or
more. Jagged: `prompts`, `responses` and `routed_experts`, nested tensors or lists with one entry
per sequence, n or n - 1 rows. `rollout_log_probs` of the response, `response_mask` 0 for what was
not sampled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import FormatError, TraceError
from r3.storage.wire.payload import array_of, items_of, numbers, routing_of
from r3.storage.wire.reading import Found, Given, naming, sampled_logprobs, to_batch
from r3.storage.wire.writing import parts_of

ASK = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_NAMES = ("rollout_log_probs", "response_mask")
_PAD = 0  # token id; attention_mask says what is padding


def to_wire(batch: RoutingBatch) -> dict[str, np.ndarray]:
    """A padded batch in numpy: int64, int16 `routed_experts`, float32 `rollout_log_probs` if those
    of all responses are known."""
    parts = list(parts_of(batch, "verl"))
    width = max(part.prompt_len for part in parts)
    longest = max(len(part.token_ids) - part.prompt_len for part in parts)
    spec, shape = batch.spec, (len(parts), width + longest)
    input_ids = np.full(shape, _PAD, np.int64)
    attention_mask, sampled = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    logprobs = np.zeros(shape, np.float32)
    routed = np.zeros((*shape, spec.num_layers, spec.top_k), np.int16)
    complete = True
    for i, part in enumerate(parts):
        first, n = width - part.prompt_len, len(part.token_ids)
        input_ids[i, first : first + n] = part.token_ids
        attention_mask[i, first : first + n] = 1
        routed[i, first : first + n - 1] = part.rows(np.int16, missing=0)
        known = part.logprobs_and_mask()
        complete &= known is not None or not part.response
        sampled[i, width : first + n] = 1 if known is None else known[1]
        logprobs[i, width : first + n] = 0 if known is None else known[0]
    found: dict[str, np.ndarray] = {
        "prompts": input_ids[:, :width],
        "responses": input_ids[:, width:],
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "response_mask": sampled[:, width:] if complete else attention_mask[:, width:],
        "routed_experts": routed,
    }
    return found | ({"rollout_log_probs": logprobs[:, width:]} if complete else {})


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: a mapping of tensors, or anything with keys() and [] such as a TensorDict."""
    if not hasattr(obj, "keys") or not hasattr(obj, "__getitem__"):
        raise FormatError(f"a {type(obj).__name__}, expected a mapping of tensors: DataProto.batch")
    fields = {str(key): obj[key] for key in obj.keys()}  # noqa: SIM118  # a TensorDict's
    routed = routing_of(fields, "routed_experts", ASK)
    if getattr(routed, "is_nested", False) or isinstance(routed, list | tuple):
        return _from_jagged(fields, given)
    return _from_padded(fields, given)


def _from_padded(fields: dict[str, Any], given: Given) -> RoutingBatch:
    routed = array_of(fields["routed_experts"], "int16", 4, "routed_experts")
    given.check_width(np.int16)
    shape = routed.shape[:2]
    input_ids = _plane(fields, "input_ids", *shape)
    attention = _plane(fields, "attention_mask", *shape)
    if not np.isin(attention, (0, 1)).all():
        raise FormatError("attention_mask holds other values than 0 and 1")
    responses = _plane(fields, "responses", shape[0])
    width = shape[1] - responses.shape[1]
    if width < 0:
        raise FormatError(f"responses has {responses.shape[1]} columns, input_ids {shape[1]}")
    all_logprobs, sampled = (_of_responses(fields, key, responses.shape) for key in _NAMES)

    def read(i: int, _: Any) -> Found:
        columns = np.flatnonzero(attention[i])
        prompt_len = int((columns < width).sum())
        first, n = width - prompt_len, len(columns)
        if not np.array_equal(columns, np.arange(first, first + n)):
            raise TraceError(
                f"attention_mask has {n} tokens at columns {columns[:1]} to {columns[-1:]}, with a "
                f"gap, expected a prompt up to column {width - 1} and a response from {width} on"
            )
        for side, start, stop in (("left", 0, first), ("right", first + n, shape[1])):
            outside = routed[i, start:stop].any(axis=(1, 2))
            if outside.any():
                raise TraceError(
                    f"column {start + int(outside.argmax())} is padding on the {side} but names "
                    f"experts, expected zeros: rows start at column {first}, or are shifted"
                )
        whole = input_ids[i, first : first + n]
        tokens, prompt_len = given.tokens(i, whole[:prompt_len], whole[prompt_len:])
        length = n - prompt_len
        logprobs = sampled_logprobs(
            None if all_logprobs is None else all_logprobs[i, :length],
            None if sampled is None else sampled[i, :length],
            length,
            _NAMES,
        )
        return Found(tokens, prompt_len, routed[i, first : first + n], logprobs=logprobs)

    return to_batch([None] * shape[0], read, given, zeros=True)


def _of_responses(fields: dict[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    """An array of that shape, or None. Raises FormatError for another shape."""
    if fields.get(name) is None:
        return None
    array = numbers(fields[name], name)
    if array.shape != shape:
        raise FormatError(
            f"{name} has shape {list(array.shape)}, expected {list(shape)}, as responses"
        )
    return array


def _plane(fields: dict[str, Any], name: str, rows: int, columns: int | None = None) -> np.ndarray:
    """Integers [rows, columns], any columns if these are None. Raises FormatError otherwise."""
    if fields.get(name) is None:
        raise FormatError(f"there is no {name}, expected integers of {rows} rows")
    array = numbers(fields[name], name)
    good = array.ndim == 2 and len(array) == rows and array.dtype.kind in "iub"
    if not good or columns not in (None, array.shape[1]):
        raise FormatError(
            f"{name} is {array.dtype} of shape {list(array.shape)}, expected integers "
            f"{[rows, columns or 'R']}, as routed_experts has them"
        )
    return array


def _from_jagged(fields: dict[str, Any], given: Given) -> RoutingBatch:
    given.check_width(np.int16)
    columns = {
        key: _entries(fields[key], key)
        for key in ("routed_experts", "prompts", "responses", *_NAMES)
        if fields.get(key) is not None
    }
    count = len(columns["routed_experts"])
    for key, entries in columns.items():
        if len(entries) != count:
            raise FormatError(f"{key} has {len(entries)} sequences, routed_experts {count}")

    def read(i: int, _: Any) -> Found:
        own = {key: entries[i] for key, entries in columns.items()}
        ids = array_of(own["routed_experts"], "int16", 3, "routed_experts")
        tokens, prompt_len = given.tokens(i, own.get("prompts"), own.get("responses"))
        length = len(tokens) - prompt_len
        logprobs = sampled_logprobs(own.get(_NAMES[0]), own.get(_NAMES[1]), length, _NAMES)
        return Found(tokens, prompt_len, ids, logprobs=logprobs)

    return to_batch([None] * count, read, given, zeros=True)


def _entries(value: Any, what: str) -> list[Any]:
    if getattr(value, "is_nested", False):
        return list(value.unbind())
    with naming("a jagged batch"):
        return items_of(value, what)
