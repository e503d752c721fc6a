"""Replies of a server, written by hand, become traces or errors that say what is wrong."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from typing import Any

import numpy as np
import pytest

from r3 import (
    CaptureError,
    FormatError,
    Provenance,
    R3Error,
    RolloutId,
    RouterSpec,
    RoutingTrace,
    SpecError,
    TraceError,
)
from r3.engine_hooks.rows import pack
from r3.engine_hooks.vllm_response import join_stream, trace_from_response
from r3.storage.background import BackgroundWriter
from r3.storage.wire.compact import encode_rows
from r3.storage.wire.npy import encode_npy
from storage_tools import make_trace, random_ids

SPEC = RouterSpec(8, 2, (1, 2), 4)  # layers 0 and 3 are dense
PROMPT, SAMPLED = [11, 12, 13], [21, 22, 23]
TOKENS = PROMPT + SAMPLED
IDS = random_ids(np.random.default_rng(1), SPEC, 5)


def engine_rows(ids: np.ndarray = IDS, spec: RouterSpec = SPEC) -> np.ndarray:
    """As vLLM has them: all decoder layers, dense ones zero."""
    rows = np.zeros((len(ids), spec.num_layers, ids.shape[2]), ids.dtype)
    rows[:, list(spec.moe_layers)] = ids
    return rows


def compact(first: int = 0, end: int = 5, version: int = 3) -> str:
    tokens = TOKENS[first : end + 1]
    versions = np.full(end - first, version)
    return encode_rows(IDS[first:end], SPEC, tokens=tokens, start=first, versions=versions)


def reply(routed: Any = None, **changes: Any) -> dict[str, Any]:
    """Of /v1/completions, with an .npy if nothing else is given."""
    choice = {
        "index": 0,
        "text": "...",
        "logprobs": None,
        "finish_reason": "length",
        "prompt_token_ids": PROMPT,
        "token_ids": SAMPLED,
        "routed_experts": encode_npy(engine_rows()) if routed is None else routed,
    }
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice | changes]}


def refused(error: type[Exception], said: str, response: Any, **options: Any) -> None:
    with pytest.raises(error, match=said):
        trace_from_response(response, SPEC, **options)


def assert_whole(trace: RoutingTrace) -> None:
    assert trace.spec == SPEC
    assert trace.token_ids.tolist() == TOKENS
    assert trace.prompt_len == 3
    assert np.sort(trace.routed_experts, -1).tolist() == np.sort(IDS, -1).tolist()
    assert trace.valid.all()


class Reply:
    """What the openai package makes of JSON: fields of a model that can be dumped."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def model_dump(self) -> dict[str, Any]:
        return copy.deepcopy(self._values)


def test_a_reply_is_a_trace():
    name, provenance = RolloutId("r", "g", 3), Provenance(engine="vllm")
    for response in (reply(), Reply(reply()), json.loads(json.dumps(reply()))):
        trace = trace_from_response(response, SPEC, rollout_id=name, provenance=provenance)
        assert_whole(trace)
        assert (trace.rollout_id, trace.provenance) == (name, provenance)
        assert trace.logprobs is None
        assert trace.weight_versions is None
    one, two = (trace_from_response(reply(), SPEC).rollout_id for _ in range(2))
    assert one != two


def test_the_prompt_may_stand_in_the_reply_as_for_chat():
    chat = reply()
    del chat["choices"][0]["prompt_token_ids"]
    chat["prompt_token_ids"] = PROMPT
    assert_whole(trace_from_response(chat, SPEC))


def test_compact_and_packed_rows_bring_weight_versions():
    trace = trace_from_response(reply(compact()), SPEC)
    assert_whole(trace)
    assert trace.weight_versions.tolist() == [3] * 5
    rows = np.concatenate([pack(IDS[:2], 7, SPEC), pack(IDS[2:], 8, SPEC)])
    trace = trace_from_response(reply(encode_npy(rows)), SPEC)
    assert_whole(trace)
    assert trace.weight_versions.tolist() == [7, 7, 8, 8, 8]


def test_missing_rows_are_missing_in_each_form():
    ids = IDS.astype(np.int16)
    ids[1] = -1
    rows = engine_rows(ids)
    rows[1] = -1
    packed = pack(IDS, 5, SPEC)
    packed[1, 0, 2:] = 0
    versions = np.full(5, 5)
    text = encode_rows(ids, SPEC, tokens=TOKENS, versions=versions)
    for routed in (encode_npy(rows), encode_npy(packed), text):
        trace = trace_from_response(reply(routed), SPEC)
        assert trace.valid.tolist() == [True, False, True, True, True]
        assert np.sort(trace.routed_experts[2:]).tolist() == np.sort(IDS[2:]).tolist()
        if routed is not None and trace.weight_versions is not None:
            assert trace.weight_versions.tolist() == [5, -1, 5, 5, 5]


def test_the_choice_is_found_by_its_index():
    first, second = reply()["choices"][0], reply(compact(), index=1)["choices"][0]
    first["token_ids"] = [1, 2]
    response = {"choices": [second, first]}
    assert_whole(trace_from_response(response, SPEC, choice=1))
    refused(TraceError, "choice 0: routed_experts has 5 rows in 1 pieces, expected 4", response)
    refused(CaptureError, r"choice 2 asked for, found \[1, 0\]", response, choice=2)


# refusals of trace_from_response


@pytest.mark.parametrize("odd", [None, 5, "{}", b"{}", [], [("choices", [])]])
def test_what_is_no_reply_is_refused(odd):
    refused(FormatError, "expected a reply: a mapping or an object of the openai", odd)


@pytest.mark.parametrize(
    "odd", [None, 5, "x", {}, [5], [None], ["x"], [[]], [{}], [{"index": "0"}]]
)
def test_choices_that_are_none_are_refused(odd):
    refused(FormatError, "choices is .*, expected a list of objects", {"choices": odd})
    if odd:
        with pytest.raises(FormatError, match="choices is"):
            join_stream([{"choices": odd}])


def test_errors_of_the_server_are_told():
    error = {"message": "no such model", "code": 404}
    refused(CaptureError, "server replied with an error: .*no such model", {"error": error})
    refused(CaptureError, r"choice 0 asked for, found \[\]", {"choices": []})
    refused(CaptureError, "choice 0 has not finished", reply(finish_reason=None))


def test_a_reply_without_rows_says_why_that_may_be():
    for routed in ({}, {"routed_experts": None}, {"routed_experts": []}):
        response = reply(finish_reason="abort")
        del response["choices"][0]["routed_experts"]
        response["choices"][0] |= routed
        said = "choice 0: the reply has no routed_experts .finish reason 'abort'.*gateway drop"
        refused(CaptureError, said, response)


def test_a_reply_without_tokens_says_what_to_ask_for():
    for name in ("token_ids", "prompt_token_ids"):
        refused(CaptureError, f'no {name}: ask for "return_token_ids": true', reply(**{name: None}))
    for odd in ("abc", 5, {"0": 1}, [1.0, 2, 3], [True, 2, 3], ["1"], [None], [-1, 2, 3], [2**31]):
        refused(FormatError, "token_ids is .*, expected integers from 0", reply(token_ids=odd))
        refused(FormatError, "token_ids is .*, expected", reply(compact(), prompt_token_ids=odd))


@pytest.mark.parametrize("rows", [0, 1, 4, 6, 7, 12])
def test_fewer_or_more_rows_than_tokens_are_refused(rows):
    ids = random_ids(np.random.default_rng(0), SPEC, rows)
    for array in (engine_rows(ids), pack(ids, 0, SPEC)):
        said = f"rows from {5 - rows} on, expected all 5" if rows < 5 else f"has {rows} rows"
        refused(TraceError, f"choice 0: .*{said}", reply(encode_npy(array)))


def test_rows_of_other_routers_are_refused():
    rng = np.random.default_rng(0)
    for spec in (
        RouterSpec(8, 3, (1, 2), 4),
        RouterSpec(8, 2, (1, 2), 5),
        RouterSpec(8, 2, (0,), 1),
    ):
        ids = random_ids(rng, spec, 5)
        said = r"expected \[rows, num_layers=4, top_k=2\]"
        refused(TraceError, said, reply(encode_npy(engine_rows(ids, spec))))
        if (spec.top_k, len(spec.moe_layers)) != (2, 2):  # packed rows have MoE layers only
            refused(TraceError, "packed rows have shape", reply(encode_npy(pack(ids, 0, spec))))
    refused(TraceError, "expected .rows, num_layers=4", reply(encode_npy(IDS)))  # MoE layers only
    wide = engine_rows().astype(np.int64)
    for value, found in ((8, 8), (2**32 + 1, 2**32 + 1), (-1, -1)):
        bad = wide.copy()
        bad[2, 1, 0] = value
        refused(TraceError, f"row 2, layer 1: expert id {found}", reply(encode_npy(bad)))
        whole = trace_from_response(reply(), SPEC)
        refused(TraceError, f"expert id {found}", reply(encode_npy(bad)), before=whole)
    refused(TraceError, "name one expert twice", reply(encode_npy(np.zeros((5, 4, 2), np.uint8))))


def test_fields_that_are_not_what_they_should_be_are_refused():
    nested = engine_rows().tolist()
    handles = [{"rollout_id": "a"}] * 2
    for odd in (5, True, "", "!", nested, [5], [None], "nrlre1:int8:5x2x2:AAAA", handles, [[]]):
        refused(FormatError, "choice 0", reply(odd))
    mixed = [compact(0, 3), encode_npy(engine_rows(IDS[3:]))]
    for routed in (mixed, mixed[::-1], base64.b85encode(b"\x93NUMPY" + bytes(200)).decode()):
        refused(FormatError, "choice 0: .*not base64", reply(routed))
    both = [encode_npy(engine_rows(IDS[:3])), encode_npy(pack(IDS[3:], 0, SPEC))]
    refused(TraceError, "pieces of routing with shapes", reply(both))


def test_compact_text_of_other_tokens_is_refused_and_named():
    other = [*TOKENS[:4], 99, TOKENS[5]]
    said = "choice 0, piece 0 of its routing: routing rows 0 to 5 are of other tokens"
    refused(TraceError, said, reply(compact(), token_ids=other[3:]))
    said = "choice 0, piece 1 of its routing: routing rows with checksum"
    spoilt = compact(3, 5)
    refused(FormatError, said, reply([compact(0, 3), spoilt[:20] + "AAAA" + spoilt[24:]]))


# streams


def pieces(routed: list[Any], tokens: list[list[int]], **last: Any) -> list[dict[str, Any]]:
    """Pieces of a completion's stream, as vLLM sends them."""
    chunks = []
    for number, (part, ids) in enumerate(zip(routed, tokens, strict=True)):
        choice = {"index": 0, "text": "", "finish_reason": None, "token_ids": ids}
        if number == 0:
            choice["prompt_token_ids"] = PROMPT
        if part is not None:
            choice["routed_experts"] = part
        chunks.append({"id": "cmpl-1", "choices": [choice]})
    chunks[-1]["choices"][0]["finish_reason"] = "length"
    chunks[-1]["choices"][0] |= last
    return chunks


ONE_EACH = [[21], [22], [23]]


def test_pieces_are_joined_in_each_form():
    cuts = [(0, 3), (3, 4), (4, 5)]
    forms = [
        [encode_npy(engine_rows(IDS[a:b])) for a, b in cuts],
        [encode_npy(pack(IDS[a:b], 3, SPEC)) for a, b in cuts],
        [compact(a, b) for a, b in cuts],
        [None, None, encode_npy(engine_rows())],
        [None, compact(0, 4), compact(4, 5)],
    ]
    for routed in forms:
        chunks = pieces(routed, ONE_EACH)
        usage = {"id": "cmpl-1", "choices": [], "usage": {"total_tokens": 6}}
        for stream in (chunks, [*chunks, usage], map(Reply, chunks)):
            assert_whole(trace_from_response(join_stream(stream), SPEC))


def test_streams_of_several_choices_are_told_apart():
    one = pieces([compact(0, 3), compact(3, 4), compact(4, 5)], ONE_EACH)
    other = [copy.deepcopy(c) for c in one]
    for chunk in other:
        chunk["choices"][0]["index"] = 1
    mixed = [c for pair in zip(other, one, strict=True) for c in pair]
    together = [{"choices": a["choices"] + b["choices"]} for a, b in zip(other, one, strict=True)]
    for stream in (mixed, together):
        joined = join_stream(stream)
        assert [c["index"] for c in joined["choices"]] == [0, 1]
        for choice in (0, 1):
            assert_whole(trace_from_response(joined, SPEC, choice=choice))


def test_counts_that_grow_instead_of_pieces_are_refused():
    """field.md, 24: rows of 3, 4 and 5 against one token each; 5 rows, never 12."""
    growing = [encode_npy(engine_rows(IDS[:n])) for n in (3, 4, 5)]
    joined = join_stream(pieces(growing, ONE_EACH))
    refused(TraceError, "has 12 rows in 3 pieces, expected 5", joined)
    joined = join_stream(pieces([compact(0, n) for n in (3, 4, 5)], ONE_EACH))
    refused(TraceError, "piece 1 of its routing: rows from 0 on, expected from 3", joined)


def test_growing_or_lost_pieces_are_not_taken_for_a_later_start():
    """Where earlier rows are known, too few or too many of an .npy could begin anywhere."""
    tokens = list(range(30))
    ids = random_ids(np.random.default_rng(2), SPEC, 29)
    before = RoutingTrace.build(
        spec=SPEC, token_ids=tokens[:24], routed_experts=ids[:23], prompt_len=10
    )
    cuts = [(23, 26), (26, 27), (27, 28), (28, 29)]
    delta = [encode_npy(engine_rows(ids[a:b])) for a, b in cuts]
    growing = [encode_npy(engine_rows(ids[23:b])) for _, b in cuts]
    sampled = [[26], [27], [28], [29]]

    def read(routed: list[Any]) -> RoutingTrace:
        chunks = pieces(routed, sampled)
        chunks[0]["choices"][0]["prompt_token_ids"] = tokens[:26]
        return trace_from_response(join_stream(chunks), SPEC, before=before)

    expected = np.sort(ids, -1).tolist()
    assert np.sort(read(delta).routed_experts, -1).tolist() == expected
    for wrong in (
        growing,
        [*delta[:3], None],
        [None, *delta[1:]],
    ):
        with pytest.raises(TraceError, match="which do not say where they begin, for 30 tokens"):
            read(wrong)


@pytest.mark.parametrize(
    ("routed", "said"),
    [
        ([None, compact(3, 4), compact(4, 5)], "rows from 3 on, expected all 5"),
        ([compact(0, 3), None, compact(4, 5)], "piece 1 .*rows from 4 on, expected from 3"),
        ([compact(0, 3), compact(3, 4), None], "routing up to row 4, expected 5"),
        ([compact(3, 4), compact(0, 3), compact(4, 5)], "piece 1 .*from 0 on, expected from 4"),
        ([compact(0, 3), compact(3, 4), compact(3, 4)], "piece 2 .*from 3 on, expected from 4"),
        ([None, encode_npy(engine_rows(IDS[3:])), None], "rows from 3 on, expected all 5"),
    ],
)
def test_pieces_that_are_lost_doubled_or_swapped_are_refused(routed, said):
    refused(TraceError, said, join_stream(pieces(routed, ONE_EACH)))


def test_streams_that_were_cut_are_refused():
    whole = pieces([compact(0, 3), compact(3, 4), compact(4, 5)], ONE_EACH)
    for stream in ([], whole[:0], [{"choices": []}], [{"choices": None}], [{"usage": {}}]):
        with pytest.raises(CaptureError, match="ended before choices began were finished"):
            join_stream(stream)
    for count in (1, 2):
        with pytest.raises(CaptureError, match=r"ended before choices \[0\] were finished: it was"):
            join_stream(whole[:count])
    error = {"error": {"message": "engine is dead"}}
    for stream in ([error], [*whole[:2], error], [*whole, error]):
        with pytest.raises(CaptureError, match=r"ended with an error: .*engine is dead"):
            join_stream(stream)
    for odd in ("[DONE]", None, [whole[0]], b"data: {}"):
        with pytest.raises(FormatError, match="expected a reply"):
            join_stream([*whole, odd])


def test_odd_fields_of_pieces_are_refused_when_they_are_read():
    for name, odd in [("token_ids", 5), ("token_ids", "ab"), ("routed_experts", 5)]:
        chunks = pieces([compact(0, 3), compact(3, 4), compact(4, 5)], ONE_EACH, **{name: odd})
        with pytest.raises(FormatError):
            trace_from_response(join_stream(chunks), SPEC)
    for odd in (5, "ab", [1], {"tokens": 5}, None):
        chunks = pieces([compact(0, 5), None, None], ONE_EACH, logprobs=odd)
        assert trace_from_response(join_stream(chunks), SPEC).logprobs is None


# earlier turns


def conversation() -> tuple[RoutingTrace, list[int], list[int], np.ndarray]:
    """A trace of 6 tokens, the next prompt and answer, and rows of all of it, of newer weights."""
    before = trace_from_response(reply(compact()), SPEC)
    ids = random_ids(np.random.default_rng(5), SPEC, 10)
    return before, [*TOKENS, 31, 32], [41, 42, 43], ids


@pytest.mark.parametrize("start", [0, 2, 5])
@pytest.mark.parametrize("form", ["compact", "packed", "npy"])
def test_rows_that_were_left_out_come_from_before(start, form):
    before, prompt, sampled, ids = conversation()
    tokens = prompt + sampled
    if form == "compact":
        versions = np.full(10 - start, 9)
        routed = encode_rows(
            ids[start:], SPEC, tokens=tokens[start:], start=start, versions=versions
        )
    else:
        rows = pack(ids, 9, SPEC) if form == "packed" else engine_rows(ids)
        routed = encode_npy(rows[start:])
    response = reply(routed, prompt_token_ids=prompt, token_ids=sampled)
    if form != "compact" and start == 2:  # which 8 rows these are, nobody says
        refused(TraceError, "expected those from row 5 of before on", response, before=before)
        return
    trace = trace_from_response(response, SPEC, before=before)
    expected = np.concatenate([IDS[:start], ids[start:]])
    assert np.sort(trace.routed_experts, -1).tolist() == np.sort(expected, -1).tolist()
    assert trace.token_ids.tolist() == tokens
    assert trace.prompt_len == 8
    if form == "npy":
        assert trace.weight_versions is None
    else:
        assert trace.weight_versions.tolist() == [3] * start + [9] * (10 - start)
    assert before.extend(trace).num_rows == 10


def test_missing_rows_of_before_stay_missing():
    before, prompt, sampled, ids = conversation()
    valid = np.array([True, False, True, True, True])
    lossy = RoutingTrace.build(
        spec=SPEC, token_ids=TOKENS, routed_experts=IDS, prompt_len=3, valid=valid
    )
    routed = encode_npy(engine_rows(ids[5:]))
    response = reply(routed, prompt_token_ids=prompt, token_ids=sampled)
    trace = trace_from_response(response, SPEC, before=lossy)
    assert trace.valid.tolist() == [*valid, *[True] * 5]
    assert before.valid.all()


def test_another_conversation_is_refused():
    before, prompt, sampled, ids = conversation()
    routed = encode_npy(engine_rows(ids[5:]))
    good = {"prompt_token_ids": prompt, "token_ids": sampled}
    refused(TraceError, "rows from 5 on, expected all 10: give the trace", reply(routed, **good))
    other = good | {"prompt_token_ids": [*prompt[:4], 99, *prompt[5:]]}
    said = (
        f"token 4 is 99, expected 22 as in rollout {before.rollout_id}: not the same conversation"
    )
    refused(TraceError, said, reply(routed, **other), before=before)
    longer = RoutingTrace.build(
        spec=SPEC,
        token_ids=[*prompt, *sampled, 7],
        routed_experts=random_ids(np.random.default_rng(0), SPEC, 11),
        prompt_len=3,
    )
    routed = encode_rows(ids[7:], SPEC, tokens=[*prompt, *sampled][7:], start=7)
    refused(
        TraceError,
        "rows from 7 on of 11 tokens.* 11,? of 12 tokens",
        reply(routed, **good),
        before=longer,
    )
    refused(
        TraceError,
        "rows from 7 on of 11 tokens.* 5,? of 6 tokens",
        reply(routed, **good),
        before=before,
    )
    stranger = make_trace(RouterSpec(8, 2, (1, 3), 4), n=6)
    refused(TraceError, "before is of RouterSpec", reply(routed, **good), before=stranger)


# log-probabilities


def test_log_probabilities_of_both_kinds_of_reply_are_taken():
    values = [-0.5, 0, -9998.0]
    completion = {"tokens": ["a", "b", "c"], "token_logprobs": values, "top_logprobs": [None] * 3}
    chat = {"content": [{"token": "a", "logprob": v, "top_logprobs": []} for v in values]}
    echo = {"token_logprobs": [None, -1.0, -2.0, *values]}
    for logprobs in (completion, chat, echo):
        trace = trace_from_response(reply(logprobs=logprobs), SPEC)
        assert np.isnan(trace.logprobs[:3]).all()
        assert trace.logprobs[3:].tolist() == values
    parts = [{"token_logprobs": [v]} for v in values]
    chunks = pieces([compact(), None, None], ONE_EACH)
    for chunk, part in zip(chunks, parts, strict=True):
        chunk["choices"][0]["logprobs"] = part
    assert trace_from_response(join_stream(chunks), SPEC).logprobs[3:].tolist() == values
    chunks[0]["choices"][0]["logprobs"] = {"token_logprobs": [None, -1.0, -2.0, -0.5]}  # with echo
    assert trace_from_response(join_stream(chunks), SPEC).logprobs[3:].tolist() == values


def test_log_probabilities_that_nobody_asked_for_are_absent():
    for none in (None, {}, {"content": None}, {"token_logprobs": None, "content": None}, [], "x"):
        assert trace_from_response(reply(logprobs=none), SPEC).logprobs is None


def test_log_probabilities_that_cannot_be_are_refused():
    nan, infinity = float("nan"), float("inf")
    for odd in (-9999.0, -1e9, None, "x", True, [], {}, {"logprob": None}, nan, -infinity):
        said = "sampled token 1 has log-probability .*, expected a finite one"
        refused(CaptureError, said, reply(logprobs={"token_logprobs": [-1.0, odd, -1.0]}))
        content = [{"logprob": -1.0}, {"logprob": odd}, {"logprob": -1.0}]
        if odd != {"logprob": None}:
            refused(CaptureError, said, reply(logprobs={"content": content}))
    refused(
        TraceError,
        "token 4: log-probability 0.1",
        reply(logprobs={"token_logprobs": [-1.0, 0.1, -1.0]}),
    )
    for count in (0, 1, 2, 4, 5, 7):  # 6 are those of prompt and answer
        said = f"{count} log-probabilities for 3 tokens"
        refused(CaptureError, said, reply(logprobs={"token_logprobs": [-1.0] * count}))
    for odd in (5, "abc", {"logprob": -1.0}):
        refused(FormatError, "expected a list", reply(logprobs={"token_logprobs": odd}))
        refused(FormatError, "expected a list", reply(logprobs={"content": odd}))


# references


def stored(folder: Any, trace: RoutingTrace) -> dict[str, str]:
    async def main() -> dict[str, str]:
        writer = BackgroundWriter(folder, trace.spec)
        try:
            return (await writer.append(lambda: trace, 10)).to_dict()
        finally:
            writer.close()

    return asyncio.run(main())


def test_a_handle_is_read_from_the_store(tmp_path):
    trace = trace_from_response(reply(compact()), SPEC, rollout_id=RolloutId("r", "g", 2))
    handle = stored(tmp_path, trace)
    no_tokens = {"token_ids": None, "prompt_token_ids": None}
    stream = join_stream(pieces([None, None, handle], ONE_EACH))
    for response in (reply(handle), reply(handle, **no_tokens), stream):
        found = trace_from_response(response, SPEC, store=tmp_path)
        assert_whole(found)
        assert found.digest == trace.digest
        assert found.rollout_id == trace.rollout_id


def test_a_handle_that_cannot_be_read_or_is_of_another_rollout_is_refused(tmp_path):
    trace = trace_from_response(reply(compact()), SPEC, rollout_id=RolloutId("r", "g", 2))
    handle = stored(tmp_path, trace)
    refused(CaptureError, f"refers to rollout r/g/2/0/0 in {handle['file']}: give", reply(handle))
    options: dict[str, Any] = {"store": tmp_path}
    for changes in ({"token_ids": [21, 22, 24]}, {"token_ids": [21, 22]}):
        said = "rollout r/g/2/0/0 has other tokens than the reply"
        refused(TraceError, said, reply(handle, **changes), **options)
    moved = {"prompt_token_ids": TOKENS[:2], "token_ids": TOKENS[2:]}
    refused(TraceError, "6, 3 of the prompt, expected 6 and 2", reply(handle, **moved), **options)
    refused(FormatError, "cannot be opened", reply(handle | {"file": "other.r3"}), **options)
    refused(FormatError, "expected a name without", reply(handle | {"file": "../x"}), **options)
    refused(FormatError, "has digest", reply(handle | {"digest": "0" * 32}), **options)
    refused(FormatError, "is not in it", reply(handle | {"rollout_id": "r/g/3/0/0"}), **options)
    refused(FormatError, "expected a handle", reply({}), **options)
    refused(FormatError, "expected a string of base64", reply([handle, handle]), **options)
    refused(FormatError, "not base64", reply([compact(0, 3), handle]), **options)
    with pytest.raises(SpecError, match="rollout r/g/2/0/0 is of RouterSpec"):
        trace_from_response(reply(handle), RouterSpec(8, 2, (1, 3), 4), **options)


def test_nothing_else_is_raised_for_json_of_any_kind():
    odd = [None, True, -1, 0.5, "x", [], [[]], {}, {"index": 0}, [None], [{}], "\ud800", 2**70]
    fields = [
        "index",
        "logprobs",
        "finish_reason",
        "prompt_token_ids",
        "token_ids",
        "routed_experts",
    ]
    for field in fields:
        for value in odd:
            for wrapped in (value, [value], {"content": value}, {"token_logprobs": [value]}):
                response = reply(**{field: wrapped})
                for make in (lambda r: r, lambda r: join_stream([r])):
                    try:
                        trace_from_response(make(response), SPEC)
                    except R3Error:
                        continue
