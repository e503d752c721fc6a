"""One trace from two engines: the prompt's rows from prefill, the others from decode."""

from __future__ import annotations

import dataclasses

import numpy as np

from r3.columns import margins_or_nan
from r3.errors import TraceError
from r3.trace import Column, RoutingTrace


def merge_prefill_decode(prefill: RoutingTrace, decode: RoutingTrace) -> RoutingTrace:
    """The trace of a rollout whose prompt was forwarded by one engine and continued by another.

    The decode engine received the prompt's KV, so its rows there are missing or bogus. If it
    marks any of them missing (this package's capture does), its mask is believed: rows that it
    computed itself, such as that of the last prompt token, are its own, the others come from
    `prefill`. If it marks none, all rows of the prompt come from `prefill` where it has them. A
    row that neither captured stays missing.

    prefill: the prompt and at least one sampled token, without which the last prompt token has
    no row; what was sampled there, and its log-probability, is not used.

    Token ids, log-probabilities, rollout id and further columns are those of `decode`, also the
    provenance, with that of `prefill` as `extra["prefill"]`. Weight versions go with their rows;
    if only one of the two has them there are none, for -1 means a missing row and any other
    number would be a guess. So do router margins, which are NaN where only the other has them.

    Raises TraceError, naming both rollouts, if the two are not of one prompt and one model.
    """
    where = f"decode rollout {decode.rollout_id}, prefill rollout {prefill.rollout_id}"
    if prefill.spec != decode.spec:
        raise TraceError(f"{where}: prefill has {prefill.spec}, expected decode's {decode.spec}")
    prompt_len = decode.prompt_len
    if prefill.prompt_len != prompt_len:
        raise TraceError(
            f"{where}: prefill has a prompt of {prefill.prompt_len} tokens, expected decode's "
            f"{prompt_len}"
        )
    found, expected = prefill.token_ids[:prompt_len], decode.token_ids[:prompt_len]
    if (found != expected).any():
        at = int((found != expected).argmax())
        raise TraceError(
            f"{where}: token {at}: prefill has id {found[at]}, expected decode's {expected[at]}"
        )
    if prefill.num_tokens > decode.num_tokens:
        raise TraceError(
            f"{where}: prefill has {prefill.num_tokens} tokens, expected at most decode's "
            f"{decode.num_tokens}: are the two exchanged?"
        )
    rows = min(prompt_len, decode.num_rows)  # a decode that sampled nothing has a row less
    if prefill.num_rows < rows:
        raise TraceError(
            f"{where}: token {prefill.num_rows}: prefill has {prefill.num_rows} rows, expected "
            f"{rows} for the prompt: its trace needs the token it sampled"
        )
    # [decode's rows], True where the row is prefill's
    taken = np.zeros(decode.num_rows, bool)
    taken[:rows] = prefill.valid[:rows]
    if not decode.valid[:rows].all():
        taken &= ~decode.valid

    def pick(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        merged = theirs.copy()
        merged[taken] = mine[:rows][taken[:rows]]
        return merged

    columns = {
        name: column
        for name, column in decode.columns.items()
        if name not in ("valid", "weight_versions")
    }
    columns["routed_experts"] = Column(pick(prefill.routed_experts, decode.routed_experts), "row")
    valid = decode.valid | taken
    if not valid.all():
        columns["valid"] = Column(valid, "row")
    if prefill.weight_versions is not None and decode.weight_versions is not None:
        versions = pick(prefill.weight_versions, decode.weight_versions)
        columns["weight_versions"] = Column(versions, "row")
    if "router_margins" in prefill.columns.keys() | decode.columns.keys():
        margins = pick(margins_or_nan(prefill.columns), margins_or_nan(decode.columns))
        columns["router_margins"] = Column(margins, "row")
    extra = {**decode.provenance.extra, "prefill": prefill.provenance.to_dict()}
    return RoutingTrace(
        decode.spec,
        prompt_len,
        columns,
        decode.rollout_id,
        dataclasses.replace(decode.provenance, extra=extra),
    )
