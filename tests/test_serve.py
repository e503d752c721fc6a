"""`r3 serve`, the real one: every way to ask, every form of the answer, many clients, refusals.

What is right is said by Hugging Face in float32 (routing_check) and by the replies themselves: a
greedy request has one answer, however it is asked for.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from r3 import RolloutId, RouterSpec, RoutingTrace
from r3.engine_hooks.vllm_response import join_stream
from r3.errors import CaptureError, TraceError
from r3.storage import ShardReader
from r3.storage.background import RecordHandle
from r3.storage.wire.compact import decode_rows
from r3.storage.wire.npy import decode_npy
from routing_check import check_routing
from serve_tools import (
    ABSENT,
    APIS,
    PLAIN_TOKENS,
    Clients,
    Server,
    body,
    plain_tokens,
    traces_of,
)

pytestmark = pytest.mark.slow

FORMS = (ABSENT, "npy", "compact", "reference", "none")


@pytest.fixture(scope="module")
def model(model_dir) -> Path:
    """Its first layer is dense."""
    return model_dir("qwen3_moe")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    with Server(model, folder, store=folder / "store") as server:
        yield server.ready()


@pytest.fixture(scope="module")
def spec(server) -> RouterSpec:
    return server.spec()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def test_info_says_what_a_client_must_know(server, model):
    info = server.info()
    config = json.loads((model / "config.json").read_text())
    assert RouterSpec.from_dict(info["spec"]) == RouterSpec.from_hf_config(config)
    assert info["provenance"]["engine"] == "vllm"
    assert info["provenance"]["logprobs_mode"] == "processed_logprobs"
    assert info["provenance"]["moe_kernel"]  # only a worker knows it
    assert info["forms"] == ["npy", "compact", "reference", "none"]
    assert info["default"] == "reference"
    assert server.http.get("/v1/routed_experts", headers={"authorization": ""}).status_code == 401


@pytest.mark.parametrize("api", APIS)
def test_all_forms_of_a_reply_are_one_full_trace(api, server, spec, model, rng):
    """Several prompts where the API takes them, each twice; one is longer than a KV block, so that
    all but the first reply have rows from the prefix cache."""
    prompts = [plain_tokens(rng, count) for count in (4, 75, 1)]
    prompt = prompts if api == "completions" else prompts[1]
    choices = 6 if api == "completions" else 2
    found: dict[tuple[str, bool], list[RoutingTrace]] = {}
    for stream in (False, True):
        for form in FORMS:
            asked = {"form": form, "stream": stream, "n": 2, "max_tokens": 15, "greedy": True}
            reply = server.ask(api, prompt, **asked)
            if form == "none":
                assert all(c.get("routed_experts") is None for c in reply["choices"])
                with pytest.raises(CaptureError, match=r"--middleware.* gateway .*\"none\""):
                    traces_of(reply, spec, store=server.store)
                continue
            found[form, stream] = traces_of(reply, spec, choices, store=server.store)
            if form in (ABSENT, "reference"):
                check_records(reply, choices)

    counts = check_routing([t for traces in found.values() for t in traces], model)
    print(f"{api}: {counts}")  # pytest -s
    assert counts.shifted > 0.2 * counts.cells, "rows shifted by one would have passed"
    first = found["reference", False]
    if api == "completions":
        asked = [p for p in prompts for _ in range(2)]
        assert [t.token_ids[: t.prompt_len].tolist() for t in first] == asked
    for (form, stream), traces in found.items():
        for a, b in zip(first, traces, strict=True):
            check_same(a, b, excused=counts.excused)
            assert b.prompt_len == a.prompt_len, (form, stream)
            sampled = b.logprobs[b.prompt_len :]
            assert np.isfinite(sampled).all()
            assert np.isnan(b.logprobs[: b.prompt_len]).all()
            if form == "npy":
                assert b.weight_versions is None
            else:
                assert (b.weight_versions == 0).all()
            if form in (ABSENT, "reference"):
                assert b.provenance.engine == "vllm"
                assert b.provenance.sampling["n"] == 2


def check_records(reply: dict[str, Any], choices: int) -> None:
    """Each choice has its own record: `sample` is counted up."""
    found = [c["routed_experts"] for c in reply["choices"]]  # of a stream a list of one
    handles = [RecordHandle.from_dict(x[0] if isinstance(x, list) else x) for x in found]
    ids = [RolloutId.parse(h.rollout_id) for h in handles]
    assert [i.sample for i in ids] == [c["index"] for c in reply["choices"]] == [*range(choices)]
    assert len({i.run for i in ids}) == 1


def check_same(a: RoutingTrace, b: RoutingTrace, excused: int) -> None:
    """Equal tokens and sets; another batch may let a near-tie fall to the other side."""
    assert a.token_ids.tolist() == b.token_ids.tolist()
    differ = (np.sort(a.routed_experts) != np.sort(b.routed_experts)).any(axis=-1)
    assert differ.sum() <= excused, f"{differ.sum()} cells differ, {excused} are excused"


@pytest.mark.parametrize("api", APIS)
def test_sampled_choices_have_rows_of_their_own(api, server, spec, model, rng):
    """The choices differ, so rows of another choice would not pass."""
    traces = []
    for form in ("npy", "compact", "reference"):
        for stream in (False, True):
            asked = {"form": form, "stream": stream, "n": 4, "max_tokens": 20}
            reply = server.ask(api, plain_tokens(rng, 20), **asked)
            some = traces_of(reply, spec, 4, store=server.store)
            assert len({t.token_ids.tobytes() for t in some}) == 4
            traces += some
    print(api, check_routing(traces, model))


@pytest.mark.parametrize("interval", [1, 3])  # tokens
@pytest.mark.parametrize("form", ["npy", "compact"])
@pytest.mark.parametrize("api", APIS)
def test_each_piece_brings_the_rows_of_its_tokens(api, form, interval, server, spec, rng):
    """They come with the tokens, are nowhere twice, and add up to what is not streamed."""
    prompt = plain_tokens(rng, 40)
    asked = {"form": form, "greedy": True, "max_tokens": 30}
    server.ask(api, prompt, **asked)  # from here on the prefix is cached: the same passes each time
    (whole,) = traces_of(server.ask(api, prompt, **asked), spec)
    tokens = whole.token_ids.tolist()
    rows: list[np.ndarray] = []
    known, pieces = 0, 0
    each = {"stream_interval": interval} if interval > 1 else {}
    for piece in server.pieces(api, prompt, stream=True, sampling=each, **asked):
        for choice in piece["choices"]:
            sampled, text = choice.get("token_ids") or [], choice.get("routed_experts")
            if text is not None:
                rows.append(some_rows(text, form, spec, tokens, sum(map(len, rows))))
                assert len(rows[-1])
            known += len(sampled)
            if sampled:
                assert sum(map(len, rows)) == whole.prompt_len + known - 1
                pieces += 1
    # vLLM puts outputs together that the client's task has not taken yet
    assert 2 <= pieces <= 1 + 30 // interval, f"{known} tokens in {pieces} pieces"
    assert known == len(tokens) - whole.prompt_len
    assert np.array_equal(np.sort(np.concatenate(rows)), np.sort(whole.routed_experts))


def some_rows(text: str, form: str, spec: RouterSpec, tokens: list[int], start: int) -> np.ndarray:
    """Rows [rows, MoE layers, top_k] of one piece, the first of which is `start`."""
    if form == "compact":
        rows = decode_rows(text, spec, tokens)
        assert rows.start == start
        assert (rows.versions == 0).all()
        return rows.ids
    ids = decode_npy(text, "piece")
    assert ids.shape[1:] == (spec.num_layers, spec.top_k)
    assert not ids[:, 0].any()  # the dense layer, as vLLM has it
    return spec.select_moe_layers(ids)


@pytest.mark.parametrize("api", APIS)
def test_63_a_turn_brings_only_rows_that_the_caller_has_not(api, server, spec, model, rng):
    """11 tokens, of which the caller has 10 rows, and one more: one row comes."""
    asked = {"sampling": {"allowed_token_ids": list(PLAIN_TOKENS)}}  # chat reads them from text
    traces = []
    for form in ("npy", "compact"):
        for stream in (False, True):
            asked |= {"form": form, "stream": stream}
            replies = [server.ask(api, plain_tokens(rng, 5), max_tokens=6, **asked) for _ in "ab"]
            before, other = (traces_of(reply, spec)[0] for reply in replies)
            assert (before.num_tokens, before.num_rows) == (11, 10)

            history = before.token_ids.tolist()
            reply = server.ask(api, history, max_tokens=1, start=10, **asked)
            check_one_row(reply, form, spec, history)
            (turn,) = traces_of(reply, spec, before=before)
            assert turn.token_ids[:11].tolist() == history
            assert turn.num_tokens == 12
            assert (turn.weight_versions is None) == (form == "npy")
            rows = np.sort(turn.routed_experts[:10])
            assert np.array_equal(rows, np.sort(before.routed_experts))
            traces += [before, turn]

            with pytest.raises(TraceError, match=r"rows from 10 on, expected all 11: .* before="):
                traces_of(reply, spec)
            words = r"token \d is \d+, expected .*not the same conversation"
            with pytest.raises(TraceError, match=words):
                traces_of(reply, spec, before=other)
    check_routing(traces, model)


def check_one_row(reply: dict[str, Any], form: str, spec: RouterSpec, history: list[int]) -> None:
    """The reply to a history of 11 tokens has row 10 only, in one piece."""
    (choice,) = reply["choices"]
    text = choice["routed_experts"]
    (text,) = text if isinstance(text, list) else [text]
    if form == "npy":
        assert decode_npy(text, "turn").shape == (1, spec.num_layers, spec.top_k)
        return
    rows = decode_rows(text, spec, history + choice["token_ids"])
    assert (rows.start, len(rows.ids), rows.versions.tolist()) == (10, 1, [0])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_73_a_field_that_was_lost_on_the_way_is_an_error(api, stream, server, spec, rng):
    """A gateway passes on what it knows."""
    reply = server.ask(api, plain_tokens(rng, 9), form="compact", stream=stream)
    traces_of(reply, spec)
    choice = reply["choices"][0]
    del choice["routed_experts"]
    words = rf"no routed_experts \(finish reason '{choice['finish_reason']}'\).*r3 serve.*gateway"
    with pytest.raises(CaptureError, match=words):
        traces_of(reply, spec)


def test_records_have_the_name_that_the_client_gives(server, spec, rng):
    """`sample` is counted up over the choices, and the same content may be stored again."""
    given = RolloutId("run-7", "prompt 3 ü", sample=2, turn=1, attempt=4)
    prompts = [plain_tokens(rng, 6), plain_tokens(rng, 7)]
    asked = {"n": 2, "greedy": True, "max_tokens": 5, "rollout_id": str(given)}
    replies = [server.ask("completions", prompts, stream=s, **asked) for s in (False, True)]
    for reply in replies:
        traces = traces_of(reply, spec, 4, store=server.store)
        names = [str(t.rollout_id) for t in traces]
        assert names == [f"run-7/prompt 3 ü/{sample}/1/4" for sample in (2, 3, 4, 5)]
    whole, pieces = ([c["routed_experts"] for c in reply["choices"]] for reply in replies)
    assert [[handle] for handle in whole] == pieces


@pytest.mark.parametrize("api", APIS)
def test_a_name_that_other_content_has_is_refused(api, server, spec, rng):
    """Streamed or not the reply ends with an error, and the record that is there stays."""
    asked = {"rollout_id": f"taken/{api}/0/0/0"}
    reply = server.ask(api, plain_tokens(rng, 8), **asked)
    words = rf"taken/{api}/0/0/0 is record .*found other content .*count RolloutId.attempt up"
    answer = server.post(api, body(api, plain_tokens(rng, 8), **asked))
    assert answer.status_code == 400
    assert re.search(words, answer.json()["error"]["message"])

    with pytest.raises((CaptureError, openai.APIError), match=words):
        server.ask(api, plain_tokens(rng, 8), stream=True, **asked)
    answer = server.post(api, body(api, plain_tokens(rng, 8), stream=True, **asked))
    assert re.search(words, answer.text)
    assert '"digest"' not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    traces_of(reply, spec, store=server.store)


BAD_FIELDS = [
    ({"routed_experts": "wat"}, '"wat", expected one of npy, compact, reference, none'),
    ({"routed_experts": 7}, "is 7, expected one of"),
    ({"routed_experts": ["npy"]}, "expected one of"),
    ({"routed_experts": "x" * 1000}, "expected one of"),
    ({"rollout_id": "run/1"}, "'run/1' is not of the form run/group/sample/turn/attempt"),
    ({"rollout_id": 5}, "is not of the form"),
    ({"rollout_id": "/0/0/0/0"}, "RolloutId.run is ''"),
    ({"rollout_id": "a/b/0/0/0", "routed_experts": "npy"}, 'for routed_experts "reference" only'),
    ({"rollout_id": "a/b/0/0/0", "routed_experts": "none"}, 'for routed_experts "reference" only'),
]


@pytest.mark.parametrize("api", APIS)
def test_bad_fields_are_refused_by_name(api, server, rng):
    for fields, words in BAD_FIELDS:
        for stream in (False, True):
            answer = server.post(api, body(api, plain_tokens(rng, 4), stream=stream) | fields)
            assert answer.status_code == 400, (fields, answer.text)
            assert words in answer.json()["error"]["message"]
            assert len(answer.text) < 500
    server.wait_idle()


@pytest.mark.parametrize("api", APIS)
def test_rows_left_out_do_not_go_into_records(api, server, rng):
    for form in (ABSENT, "reference"):
        for stream in (False, True):
            sent = body(api, plain_tokens(rng, 8), form=form, start=3, stream=stream)
            answer = server.post(api, sent)
            assert "routed_experts_prompt_start" in answer.text
            assert '"error"' in answer.text
            assert stream or answer.status_code == 400


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_beam_search_has_no_routing(api, server, spec, rng):
    """vLLM searches by many small requests: none of them is the rollout."""
    prompt = plain_tokens(rng, 5)
    before = records(server.store)
    for form in (ABSENT, "npy", "compact", "reference"):
        answer = server.post(api, body(api, prompt, form=form, n=2, use_beam_search=True))
        assert answer.status_code == 400
        assert 'beam search has none, expected "none"' in answer.json()["error"]["message"]
    reply = server.ask(api, prompt, form="none", n=2, use_beam_search=True)
    assert len(reply["choices"]) == 2
    assert all(c.get("routed_experts") is None for c in reply["choices"])
    assert records(server.store) == before


def records(store: Path) -> int:
    total = 0
    for path in store.glob("*.r3"):
        with ShardReader(path) as shard:
            total += len(shard)
    return total


def test_bodies_that_are_no_request(server, spec, rng):
    """The server says 400 and goes on."""
    deep = b'{"routed_experts":' + b"[" * 200_000
    long = json.dumps({"routed_experts": "y" * (20 << 20), "model": "tiny", "prompt": "t5"})
    bad = (
        *(b"", b"{", b"null", b'{"routed_experts": ', b'["routed_experts"]', b'"rollout_id"'),
        *(b'{"routed_experts": "npy"}', b"\xff\xfe routed_experts", deep, long.encode()),
    )
    for api in APIS:
        for content in bad:
            answer = server.post(api, content)
            assert answer.status_code == 400, (content[:40], answer.text[:200])
            assert len(answer.content) < 1000
    traces_of(server.ask("completions", plain_tokens(rng, 4), form="npy"), spec)


def test_requests_of_one_id_do_not_mix(server, spec, model, rng):
    """A client, or a retry, may send the same X-Request-Id while the first is still running."""

    async def both() -> list[dict[str, Any]]:
        asked = {"max_tokens": 60, "n": 2, "stream": True}
        async with Clients(server, **{"x-request-id": "the-same"}) as clients:
            return await asyncio.gather(
                *(
                    clients.ask(api, plain_tokens(rng, 10), form=form, **asked)
                    for api in ("completions", "chat")
                    for form in ("npy", "compact", "reference")
                    for _ in range(2)
                )
            )

    traces = [t for r in asyncio.run(both()) for t in traces_of(r, spec, 2, store=server.store)]
    check_routing(traces, model)


ROUNDS, WARM_UP, AT_ONCE = 6, 3, 32
GROWTH = 8.0  # MiB in all rounds after the first few: allocators, vLLM's own statistics


def test_many_clients_of_which_a_third_leave(server, spec, model, rng):
    """Each finished reply is whole and right. Of those that were left nothing stays: no object in
    the API server, no request in the engine, and memory does not grow from round to round.

    The worker's memory is not judged: without capture it grows as much, vLLM's CPU build keeps
    kernels by the size of a batch.
    """
    asked = {"form": "npy", "stream": True, "max_tokens": 400, "sampling": {"ignore_eos": True}}
    for _ in range(9):  # it may be over before the server is asked what it holds
        with contextlib.closing(server.pieces("generate", plain_tokens(rng, 9), **asked)) as pieces:
            next(pieces)
            held = server.held()
        if all(held[kind] for kind in ("Reply", "_Choice", "RequestState")):
            break
    else:
        pytest.fail(f"blind: {held}")

    traces: list[RoutingTrace] = []
    levels, left = [], 0
    for _ in range(ROUNDS):
        finished, gone = asyncio.run(one_round(server, rng, AT_ONCE))
        for reply, choices in finished:
            traces += traces_of(reply, spec, choices, store=server.store)
        left += gone
        server.wait_idle()
        levels.append(server.memory())
    some = rng.choice(len(traces), min(len(traces), 100), replace=False)
    counts = check_routing([traces[i] for i in some], model)
    print(f"{ROUNDS * AT_ONCE} requests, {left} left early; {len(traces)} traces; {counts}")
    print("MiB after each round:", [{k: round(v, 1) for k, v in x.items()} for x in levels])
    assert 0.1 < left / (ROUNDS * AT_ONCE) < 0.6
    assert counts.shifted > 0.2 * counts.cells
    for name in ("API server", "EngineCore"):
        grown = levels[-1][name] - max(level[name] for level in levels[:WARM_UP])
        assert grown < GROWTH, f"{name} grew by {grown:.1f} MiB in {ROUNDS - WARM_UP} rounds"


async def one_round(
    server: Server, rng: np.random.Generator, at_once: int
) -> tuple[list[tuple[dict[str, Any], int]], int]:
    """Replies with their number of choices, and how many clients left before the end."""
    shared = plain_tokens(rng, 64)  # two KV blocks that some find in the cache

    async def one(clients: Clients) -> tuple[dict[str, Any], int] | None:
        api, n = rng.choice(APIS), int(rng.integers(1, 3))
        prompt: Any = shared * int(rng.integers(0, 2)) + plain_tokens(rng, int(rng.integers(1, 60)))
        prompts = int(rng.integers(1, 3)) if api == "completions" else 1
        if prompts > 1:
            prompt = [prompt, plain_tokens(rng, int(rng.integers(1, 60)))]
        form = rng.choice([f for f in FORMS if f != "none"])
        asked = {"form": str(form), "stream": bool(rng.integers(0, 2)), "n": n}
        asked["max_tokens"] = int(rng.integers(1, 100))
        if rng.random() > 1 / 3:
            return await clients.ask(api, prompt, **asked), n * prompts
        if asked["stream"]:
            after = int(rng.integers(1, 20))
            async with contextlib.aclosing(clients.pieces(api, prompt, **asked)) as pieces:
                async for _ in pieces:
                    after -= 1
                    if not after:
                        return None
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    clients.ask(api, prompt, **asked), float(rng.uniform(0.01, 1.0))
                )
        return None

    async with Clients(server) as clients:
        replies = await asyncio.gather(*(one(clients) for _ in range(at_once)))
    finished = [r for r in replies if r is not None]
    return finished, at_once - len(finished)


@pytest.fixture(scope="module")
def bare(model, tmp_path_factory) -> Iterator[Server]:
    """A server without a store."""
    with Server(model, tmp_path_factory.mktemp("bare")) as server:
        yield server.ready()


@pytest.mark.full
def test_without_a_store_a_client_of_vllm_gets_what_it_knows(bare, model, rng):
    """Byte for byte base64 of an .npy of vLLM's own shape, where vLLM would send one."""
    spec = bare.spec()
    assert bare.info()["forms"] == ["npy", "compact", "none"]
    assert bare.info()["default"] is None
    traces = []
    for api in APIS:
        prompt = plain_tokens(rng, 20)
        reply = bare.ask(api, prompt, n=2)
        for choice, trace in zip(reply["choices"], traces_of(reply, spec, 2), strict=True):
            data = base64.b64decode(choice["routed_experts"], validate=True)
            array = np.load(io.BytesIO(data))
            assert array.dtype == np.uint8
            assert array.shape == (trace.num_tokens - 1, spec.num_layers, spec.top_k)
            assert not array[:, 0].any()  # the dense layer
            file = io.BytesIO()
            np.save(file, array)
            assert file.getvalue() == data
            assert np.array_equal(array[:, 1:], trace.routed_experts)
            traces.append(trace)

        pieces = list(bare.pieces(api, prompt, stream=True))
        sent = [c.get("routed_experts") for piece in pieces for c in piece["choices"]]
        if api == "generate":  # all rows on the last piece
            assert [x is not None for x in sent] == [False] * (len(sent) - 1) + [True]
            traces += traces_of(join_stream(pieces), spec)
        else:
            assert not any(sent)
            with pytest.raises(CaptureError, match="only if the request asks for it"):
                traces_of(join_stream(pieces), spec)
        for form in ("npy", "compact"):
            traces += traces_of(bare.ask(api, prompt, form=form, stream=True), spec)
    check_routing(traces, model)


@pytest.mark.full
@pytest.mark.parametrize("api", APIS)
def test_without_a_store_there_are_no_references(api, bare, rng):
    for fields, words in (
        ({"routed_experts": "reference"}, "has no store: r3 serve --store"),
        ({"rollout_id": "a/b/0/0/0"}, 'for routed_experts "reference" only'),
    ):
        answer = bare.post(api, body(api, plain_tokens(rng, 4)) | fields)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
    if api != "generate":
        reply = bare.ask(api, plain_tokens(rng, 4), n=2, use_beam_search=True)
        assert all(c.get("routed_experts") is None for c in reply["choices"])


def config(value: dict[str, Any]) -> tuple[str, str]:
    return "--additional-config", json.dumps({"r3": value})


REFUSED_STARTS = {
    "store below a file": ((), r"r3: .*/file/store: Not a directory"),
    "capture false": (config({"capture": False}), "r3: .*capture is off, expected a server"),
    "unknown key": (config({"captured": 1}), r"r3: additional_config\[\"r3\"\]"),
    "source": (
        config({"capture": True, "source": "wat"}),
        'r3: .*"hook" or "native"',
    ),
    "setting": (("--pipeline-parallel-size", "2"), "does not support pipeline_parallel_size=2"),
}


@pytest.mark.parametrize(
    "case",
    [
        *(x for x in REFUSED_STARTS if x != "setting"),  # which only vLLM sees
        pytest.param("setting", marks=pytest.mark.full),
    ],
)
def test_what_cannot_be_served_does_not_start(case, model, tmp_path):
    """The process ends soon, not with 0, nothing of it stays, and it says why."""
    args, words = REFUSED_STARTS[case]
    (tmp_path / "file").touch()
    store = tmp_path / "file" / "store" if case == "store below a file" else None
    start = time.monotonic()
    with Server(model, tmp_path, *args, store=store) as server:
        assert server.ended() not in (0, None)
        server.wait_gone()
        print(f"{case}: {time.monotonic() - start:.1f} s")
        assert re.search(words, server.text()), server.text()[-3000:]
