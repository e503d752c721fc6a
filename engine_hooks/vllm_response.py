"""Turns what a vLLM server replied into a RoutingTrace; needs no vLLM.

For the replies of r3.engine_hooks.vllm_server, and for those of vLLM's own capture.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from r3.engine_hooks.rows import unpack
from r3.errors import CaptureError, FormatError, SpecError, TraceError
from r3.identity import Provenance, RolloutId
from r3.spec import RouterSpec
from r3.storage.background import RecordHandle
from r3.storage.wire.compact import LABEL, decode_rows
from r3.storage.wire.npy import decode_npy
from r3.storage.wire.reading import naming
from r3.storage.wire.vllm import logprobs_of
from r3.trace import RoutingTrace

FIELD = "routed_experts"


def trace_from_response(
    response: Any,
    spec: RouterSpec,
    *,
    choice: int = 0,
    before: RoutingTrace | None = None,
    store: str | os.PathLike[str] | None = None,
    rollout_id: RolloutId | None = None,
    provenance: Provenance | None = None,
) -> RoutingTrace:
    """One choice of a reply as a RoutingTrace.

    response: of /v1/completions, /v1/chat/completions or /inference/v1/generate, as a mapping or as
    an object of the openai package; of a stream, what `join_stream` makes of its pieces. Ask for
    `"return_token_ids": true`. choice: its `index`.
    before: the trace of the conversation so far, for a request with `routed_experts_prompt_start`:
    the rows that it left out are taken from there, and the tokens compared. An .npy does not say
    where it begins: it has to be all rows, or those from before.num_rows on.
    store: the server's folder, to read a record that the reply only refers to; it has a rollout id
    and a provenance of its own.

    Log-probabilities are taken where the reply has one for each sampled token; they are those
    sampled from only if the server runs with `--logprobs-mode processed_logprobs`.

    Raises CaptureError if there are no rows or token ids, FormatError for a field that is not what
    it says it is, TraceError for rows that cannot be of these tokens, SpecError for a record of
    other routers.
    """
    reply = _mapping(response)
    result = _choice(reply, choice)
    where = f"choice {choice}"
    rows = result.get(FIELD)
    if rows is None or rows == []:
        raise CaptureError(
            f"{where}: the reply has no {FIELD} (finish reason {result.get('finish_reason')!r}). "
            "Is capture on in the server (r3 serve, or --additional-config and --middleware)? Did "
            'a gateway drop the field? Did the request ask for "none"? In a stream of completions '
            "or chat it comes only if the request asks for it"
        )
    parts = rows if isinstance(rows, list) else [rows]
    if len(parts) == 1 and isinstance(parts[0], dict):
        return _record(parts[0], spec, reply, result, store, where)
    prompt, sampled = _tokens(reply, result, where)
    tokens = [*prompt, *sampled]
    if all(isinstance(p, str) and p.startswith(LABEL) for p in parts):
        start, ids, versions = _compact(parts, spec, tokens, where)
    else:
        start, ids, versions = _npy(parts, spec, len(tokens), where)
        if before is not None and start not in (0, before.num_rows):
            raise TraceError(
                f"{where}: {len(ids)} rows, which do not say where they begin, for {len(tokens)} "
                f"tokens, expected those from row {before.num_rows} of before on: set "
                f'routed_experts_prompt_start to that, or ask for "compact"'
            )
    if before is not None:
        ids, versions = _joined(before, start, ids, versions, spec, tokens, where)
    elif start:
        raise TraceError(
            f"{where}: rows from {start} on, expected all {len(tokens) - 1}: give the trace of the "
            "rows before, before="
        )
    if rollout_id is not None:
        where = f"rollout {rollout_id}"
    with naming(where):
        logprobs = logprobs_of(result, len(prompt), len(sampled))
    return RoutingTrace.build(
        spec=spec,
        token_ids=np.asarray(tokens, np.int64),
        routed_experts=ids,
        prompt_len=len(prompt),
        logprobs=logprobs,
        weight_versions=versions,
        rollout_id=rollout_id,
        provenance=provenance,
    )


def join_stream(chunks: Iterable[Any]) -> dict[str, Any]:
    """The pieces of one streamed reply as one reply, for `trace_from_response`.

    chunks: mappings or objects of the openai package, in their order, all of them. Kept are token
    ids, log-probabilities, finish reasons, and the routing, a list with that of each piece. Raises
    CaptureError for a stream that ended with an error or before a finish reason, FormatError for
    pieces of several.
    """
    choices: dict[int, dict[str, Any]] = {}
    joined: dict[str, Any] = {}
    for chunk in chunks:
        piece = _mapping(chunk)
        if piece.get("error"):
            raise CaptureError(f"the stream ended with an error: {piece['error']!r:.500}")
        _keep_prompt(joined, piece)
        for part in _choices(piece.get("choices") or []):
            choice = choices.setdefault(part["index"], {"index": part["index"]})
            _keep_prompt(choice, part)
            ids, logprobs = part.get("token_ids"), part.get("logprobs")
            if ids is not None and not isinstance(ids, list):
                raise FormatError(f"token_ids is {reprlib.repr(ids)}, expected integers")
            if ids is not None:
                choice.setdefault("token_ids", []).extend(ids)
            if part.get(FIELD) is not None:
                choice.setdefault(FIELD, []).append(part[FIELD])
            for name, values in logprobs.items() if isinstance(logprobs, Mapping) else ():
                if isinstance(values, list):
                    choice.setdefault("logprobs", {}).setdefault(name, []).extend(values)
            if part.get("finish_reason") is not None:
                choice["finish_reason"] = part["finish_reason"]
    open_ones = [i for i, c in choices.items() if "finish_reason" not in c]
    if open_ones or not choices:
        raise CaptureError(
            f"the stream ended before choices {open_ones or 'began'} were finished: it was cut"
        )
    return joined | {"choices": [choices[i] for i in sorted(choices)]}


def _keep_prompt(joined: dict[str, Any], piece: Mapping[str, Any]) -> None:
    prompt = piece.get("prompt_token_ids")
    if prompt is not None and joined.setdefault("prompt_token_ids", prompt) != prompt:
        raise FormatError("pieces with different prompt_token_ids, expected those of one stream")


def _mapping(response: Any) -> Mapping[str, Any]:
    if hasattr(response, "model_dump"):
        response = response.model_dump()
    if not isinstance(response, Mapping):
        raise FormatError(
            f"{reprlib.repr(response)}, expected a reply: a mapping or an object of the openai "
            "package"
        )
    return response


def _choice(reply: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    if reply.get("error"):
        raise CaptureError(f"the server replied with an error: {reply['error']!r:.500}")
    choices = _choices(reply.get("choices"))
    indexes = [c.get("index") for c in choices]
    if len(set(indexes)) != len(indexes):
        raise FormatError(f"choices have the indexes {indexes}, expected each once")
    for result in choices:
        if result.get("index") == index:
            if "finish_reason" in result and result["finish_reason"] is None:
                raise CaptureError(f"choice {index} has not finished")
            return result
    raise CaptureError(f"choice {index} asked for, found {indexes}")


def _choices(choices: Any) -> list[Mapping[str, Any]]:
    if not isinstance(choices, list) or not all(
        isinstance(c, Mapping) and type(c.get("index")) is int for c in choices
    ):
        raise FormatError(
            f"choices is {reprlib.repr(choices)}, expected a list of objects, each with its index"
        )
    return choices


def _tokens(
    reply: Mapping[str, Any], result: Mapping[str, Any], where: str
) -> tuple[list[int], list[int]]:
    prompt, other = result.get("prompt_token_ids"), reply.get("prompt_token_ids")
    if prompt and other and prompt != other:
        raise FormatError(f"{where}: other prompt_token_ids in the choice than in the reply")
    prompt = prompt or other
    sampled = result.get("token_ids")
    for name, ids in (("prompt_token_ids", prompt), ("token_ids", sampled)):
        if ids is None:
            raise CaptureError(
                f'{where}: the reply has no {name}: ask for "return_token_ids": true'
            )
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
            raise FormatError(
                f"{where}: {name} is {reprlib.repr(ids)}, expected integers from 0, below 2**31"
            )
    return prompt, sampled  # type: ignore[return-value]


def _compact(
    parts: list[str], spec: RouterSpec, tokens: list[int], where: str
) -> tuple[int, np.ndarray, np.ndarray | None]:
    pieces = []
    for number, part in enumerate(parts):
        try:
            pieces.append(decode_rows(part, spec, tokens))
        except (FormatError, TraceError) as e:
            raise type(e)(f"{where}, piece {number} of its routing: {e}") from None
    end = start = pieces[0].start
    for number, piece in enumerate(pieces):
        if piece.start != end:
            raise TraceError(
                f"{where}, piece {number} of its routing: rows from {piece.start} on, expected "
                f"from {end}"
            )
        end += len(piece.ids)
    if end != max(len(tokens) - 1, 0):
        raise TraceError(
            f"{where}: routing up to row {end}, expected {len(tokens) - 1}, one less than tokens"
        )
    versions = [p.versions for p in pieces if p.versions is not None]
    ids = np.concatenate([p.ids for p in pieces])
    return start, ids, np.concatenate(versions) if len(versions) == len(pieces) else None


def _npy(
    parts: list[str], spec: RouterSpec, tokens: int, where: str
) -> tuple[int, np.ndarray, np.ndarray | None]:
    arrays = [decode_npy(part, f"{where}: {FIELD}") for part in parts]
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) != 1:
        raise TraceError(f"{where}: pieces of routing with shapes {shapes}, expected one")
    rows, versions = np.concatenate(arrays), None
    if rows.ndim == 4:  # of a server with capture and without our middleware
        rows, versions = unpack(rows, spec)
    elif rows.shape[1:] != (spec.num_layers, spec.top_k):
        raise TraceError(
            f"{where}: {FIELD} of shape {list(rows.shape)}, expected [rows, num_layers="
            f"{spec.num_layers}, top_k={spec.top_k}]"
        )
    start = max(tokens - 1, 0) - len(rows)
    if start < 0:
        raise TraceError(
            f"{where}: {FIELD} has {len(rows)} rows in {len(parts)} pieces, expected "
            f"{tokens - 1}, one less than tokens"
        )
    return start, rows, versions


def _joined(
    before: RoutingTrace,
    start: int,
    ids: np.ndarray,
    versions: np.ndarray | None,
    spec: RouterSpec,
    tokens: list[int],
    where: str,
) -> tuple[np.ndarray, np.ndarray | None]:
    """All rows of a rollout: those before `start` from an earlier trace of its first tokens."""
    if before.spec != spec:
        raise TraceError(f"{where}: before is of {before.spec}, expected {spec}")
    if start > before.num_rows or before.num_tokens > len(tokens):
        raise TraceError(
            f"{where}: rows from {start} on of {len(tokens)} tokens, expected before to have the "
            f"rows up to there; it has {before.num_rows}, of {before.num_tokens} tokens"
        )
    differ = before.token_ids != np.asarray(tokens[: before.num_tokens])
    if differ.any():
        at = int(differ.argmax())
        raise TraceError(
            f"{where}: token {at} is {tokens[at]}, expected {before.token_ids[at]} as in rollout "
            f"{before.rollout_id}: not the same conversation"
        )
    earlier = before.routed_experts[:start].astype(np.int32)
    earlier[~before.valid[:start]] = -1
    rest = spec.select_moe_layers(ids)
    both = None
    if not start:
        both = versions
    elif versions is not None and before.weight_versions is not None:
        both = np.concatenate([before.weight_versions[:start], versions])
    return np.concatenate([earlier, rest]), both


def _record(
    handle: dict[str, Any],
    spec: RouterSpec,
    reply: Mapping[str, Any],
    result: Mapping[str, Any],
    store: str | os.PathLike[str] | None,
    where: str,
) -> RoutingTrace:
    """The record that a reply refers to; its tokens are those of the reply, where it has any."""
    place = RecordHandle.from_dict(handle)
    if store is None:
        raise CaptureError(
            f"{where}: the reply refers to rollout {place.rollout_id} in {place.file}: give the "
            "server's folder, store="
        )
    trace = place.read(store)
    if trace.spec != spec:
        raise SpecError(f"{where}: rollout {place.rollout_id} is of {trace.spec}, expected {spec}")
    if result.get("token_ids") is not None:
        prompt, sampled = _tokens(reply, result, where)
        found, expected = trace.token_ids.tolist(), [*prompt, *sampled]
        if found != expected or trace.prompt_len != len(prompt):
            raise TraceError(
                f"{where}: rollout {place.rollout_id} has other tokens than the reply: "
                f"{len(found)}, {trace.prompt_len} of the prompt, expected {len(expected)} and "
                f"{len(prompt)}"
            )
    return trace
