"""r3: this package's own, with the rows as a short string (r3.storage.wire.compact).

{"rollout_id": "...", "token_ids": [...], "prompt_len": p, "routed_experts": "r3.rows/1:..."}. The
string knows its first row, missing rows, weight versions, and which tokens it is of.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import FormatError
from r3.storage.wire.compact import decode_rows, encode_rows
from r3.storage.wire.payload import count_of, fields_of, integers, items_of, routing_of
from r3.storage.wire.reading import Found, Given, to_batch
from r3.storage.wire.writing import parts_of

ASK = "routing from this package's plugin"


def to_wire(batch: RoutingBatch) -> list[dict[str, Any]]:
    """One mapping for each sequence."""
    return [
        {
            "rollout_id": str(part.rollout_id),
            "token_ids": part.token_ids.tolist(),
            "prompt_len": part.prompt_len,
            "routed_experts": encode_rows(
                part.rows(np.int32, missing=-1, all_layers=False),
                part.spec,
                tokens=part.token_ids,
                versions=part.versions,
            ),
        }
        for part in parts_of(batch, "r3")
    ]


def from_wire(obj: Any, given: Given) -> RoutingBatch:
    """obj: a mapping, or a list of them, or of the strings alone."""

    def read(i: int, item: Any) -> Found:
        alone = {"routed_experts": item} if isinstance(item, str) else item
        fields = fields_of(alone, "the rollout")
        text = routing_of(fields, "routed_experts", ASK)
        if fields.get("token_ids") is None:
            tokens, prompt_len = given.tokens(i)
        else:
            whole = integers(fields["token_ids"], "token_ids")
            split = count_of(fields.get("prompt_len"), "prompt_len", most=len(whole))
            tokens, prompt_len = given.tokens(i, whole[:split], whole[split:])
        rows = decode_rows(text, given.spec, tokens)
        name = fields.get("rollout_id")
        if name is not None and not isinstance(name, str):
            raise FormatError(f"rollout_id is {reprlib.repr(name)}, expected text")
        return Found(
            tokens, prompt_len, rows.ids, rows.start, versions=rows.versions, rollout_id=name
        )

    items = [obj] if isinstance(obj, Mapping | str) else items_of(obj, "the payload")
    return to_batch(items, read, given)
