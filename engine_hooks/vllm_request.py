"""What a request to a vLLM server asks for: the fields that r3.engine_hooks.vllm_server adds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from r3.errors import TraceError, UnsupportedError
from r3.identity import RolloutId

NPY, COMPACT, REFERENCE, NONE = "npy", "compact", "reference", "none"
FORMS = (NPY, COMPACT, REFERENCE, NONE)
# a body without our fields need not be parsed; names may be escaped, or be in UTF-16
_SIGNS = (b"routed_experts", b"rollout_id", b"\\u", b"\0")


@dataclass(frozen=True)
class Asked:
    """form: one of FORMS, or None for what vLLM itself would send. rollout_id: of choice 0."""

    form: str | None
    rollout_id: RolloutId | None = None


def read_request(body: bytes, has_store: bool) -> Asked:
    """What the body of a request asks for. Raises UnsupportedError for what cannot be served."""
    default = REFERENCE if has_store else None
    if not has_store and not any(sign in body for sign in _SIGNS):
        return Asked(default)
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return Asked(default)  # vLLM has taken it for something else
    if not isinstance(fields, dict):
        return Asked(default)
    form = default
    if fields.get("routed_experts") is not None:
        form = fields["routed_experts"]
        if form not in FORMS:
            raise UnsupportedError(
                f"routed_experts is {json.dumps(form):.100}, expected one of {', '.join(FORMS)}"
            )
    if form == REFERENCE and not has_store:
        raise UnsupportedError(
            'routed_experts is "reference" and the server has no store: r3 serve --store'
        )
    if form not in (None, NONE) and fields.get("use_beam_search"):
        raise UnsupportedError('routed_experts: beam search has none, expected "none"')
    parameters = fields.get("sampling_params")  # where generate has it
    place: dict[str, Any] = parameters if isinstance(parameters, dict) else fields
    if form == REFERENCE and place.get("routed_experts_prompt_start"):
        raise UnsupportedError("routed_experts_prompt_start: a record has all rows, expected 0")
    if fields.get("rollout_id") is None:
        return Asked(form)
    if form != REFERENCE:
        raise UnsupportedError('rollout_id is for routed_experts "reference" only')
    try:
        return Asked(form, RolloutId.parse(str(fields["rollout_id"])))
    except TraceError as e:
        raise UnsupportedError(str(e)) from None
