"""The middleware as plain ASGI, a unit test: the app behind it and its engine are data that look
like vLLM's, so that messages can be cut anywhere. tests/test_serve*.py ask a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncGenerator, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from r3 import CaptureError, RouterSpec
from r3.engine_hooks.rows import pack
from r3.engine_hooks.vllm_response import join_stream, trace_from_response
from r3.engine_hooks.vllm_server import INFO_PATH, RoutedExperts
from r3.storage.background import BackgroundWriter
from r3.storage.wire.compact import decode_rows
from r3.storage.wire.npy import encode_npy
from storage_tools import random_ids

MODEL = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
SPEC = RouterSpec.from_hf_config(MODEL)


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch):
    """What is compared with vLLM's source when the server starts is tested with the real one."""
    monkeypatch.setattr("r3.engine_hooks.vllm_server.check_front_end", lambda: None)


PROMPT = [11, 12, 13, 14]
IDS_OF_NONE = np.zeros((0, 2, 2), np.uint8)
STEPS = [[21], [22, 23], [24]]  # tokens of each output
TOKENS = PROMPT + [t for step in STEPS for t in step]
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"
MORE = {"more_body": True}


def start(status: int, kind: bytes, length: int | None = None) -> dict[str, Any]:
    headers = [(b"x-request-id", b"7"), (b"content-type", kind)]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": status, "headers": headers}


def choice(first: int, prompt: list[int], result: Any) -> dict[str, Any]:
    return {
        "index": first + result.index,
        "text": "ü\n\n",
        "finish_reason": result.finish_reason,
        "prompt_token_ids": prompt,
        "token_ids": list(result.token_ids),
    }


def pieces_of(size: int) -> Callable[[bytes], list[bytes]]:
    return lambda body: [body[i : i + size] for i in range(0, len(body), size)]


def rows_of(choice: int, version: int = 5) -> np.ndarray:
    """Packed rows of a choice, one less than tokens."""
    return pack(random_ids(np.random.default_rng(choice), SPEC, len(TOKENS) - 1), version, SPEC)


class Engine:
    """Outputs of an AsyncLLM for one prompt after the other, and what it keeps meanwhile."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
        self.rows: Callable[[int], np.ndarray] = rows_of  # of each choice
        self.ahead = 0  # rows that are there before their tokens
        self.reason = "length"
        self.prompts = 0

    async def generate(
        self, prompt: list[int], params: Any, request_id: str
    ) -> AsyncGenerator[Any, None]:
        first, self.prompts = self.prompts * params.n, self.prompts + 1
        delta = params.output_kind.name == "DELTA"
        names = [f"{i}_{request_id}" for i in range(params.n)]
        processor = self.output_processor
        processor.external_req_ids[request_id] = names
        for i, name in enumerate(names):
            state = SimpleNamespace(request_index=i, prompt_token_ids=prompt)
            state.routed_experts_chunks = []
            processor.request_states[name] = state

        def result(i: int, tokens: list[int], rows: Any, reason: str | None) -> Any:
            return SimpleNamespace(
                index=i, token_ids=tokens, routed_experts=rows, finish_reason=reason, logprobs=None
            )

        def output(results: list[Any]) -> Any:
            return SimpleNamespace(
                request_id=request_id, prompt_token_ids=prompt, outputs=results, finished=True
            )

        start = params.routed_experts_prompt_start
        whole = [self.rows(first + i)[start:] for i in range(params.n)]
        if not delta:
            sampled = [t for step in STEPS for t in step]
            yield output([result(i, sampled, whole[i], self.reason) for i in range(params.n)])
            return
        sent = [0] * params.n
        tokens = len(prompt)
        for number, step in enumerate(STEPS):
            tokens += len(step)
            for i, name in enumerate(names):
                state = processor.request_states[name]
                end = max(0, tokens - 1 - start + self.ahead)
                state.routed_experts_chunks.append(whole[i][sent[i] : end])
                sent[i] = end
                rows = reason = None
                if number == len(STEPS) - 1:
                    rows, reason = np.concatenate(state.routed_experts_chunks), self.reason
                    del processor.request_states[name]
                yield output([result(i, list(step), rows, reason)])


def make_config(**changes: Any) -> Any:
    """The fields of a VllmConfig that are read."""
    parts = {
        "model_config": SimpleNamespace(
            hf_text_config=MODEL,
            hf_config=MODEL,
            model="tiny",
            revision=None,
            dtype="torch.float32",
            quantization=None,
            logprobs_mode="processed_logprobs",
            seed=0,
        ),
        "parallel_config": SimpleNamespace(
            worker_cls="r3.engine_hooks.vllm_worker.CaptureCPUWorker",
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            enable_expert_parallel=False,
        ),
        "speculative_config": None,
        "attention_config": SimpleNamespace(backend=None),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "device_config": SimpleNamespace(device_type="cpu"),
        "aux_output_config": SimpleNamespace(enable_return_routed_experts=False),
        "compilation_config": SimpleNamespace(mode=None),
        "scheduler_config": SimpleNamespace(async_scheduling=False),
    }
    return SimpleNamespace(**(parts | changes))


def params_of(fields: dict[str, Any]) -> Any:
    kind = "DELTA" if fields.get("stream") else "FINAL_ONLY"
    start = fields.get("routed_experts_prompt_start", 0)
    known = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0}
    known |= {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "seed": None, "max_tokens": 4}
    return SimpleNamespace(
        n=fields.get("n", 1),
        output_kind=SimpleNamespace(name=kind),
        routed_experts_prompt_start=start,
        **known,
    )


@dataclasses.dataclass
class Server:
    """Stands for vLLM's app: engine.generate for each prompt, replies in vLLM's shapes.

    cut: divides the bytes of a body into messages; without it, pieces of a stream leave as they
    come. events: changes those of a stream that is cut.
    """

    additional_config: dict[str, Any]
    cut: Callable[[bytes], list[bytes]] | None = None
    events: Callable[[list[bytes]], list[bytes]] = list

    def __post_init__(self) -> None:
        self.state = SimpleNamespace(
            engine_client=Engine(make_config()),
            args=SimpleNamespace(additional_config=self.additional_config),
        )
        self.routes: dict[str, Any] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.bodies: list[bytes] = []
        self.replies: list[bytes] = []

    def add_api_route(self, path: str, endpoint: Any, methods: list[str]) -> None:
        assert methods == ["GET"]
        self.routes[path] = endpoint

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls.append((scope, receive, send))
        if scope["type"] == "lifespan":
            assert (await receive())["type"] == "lifespan.startup"
            await send({"type": "lifespan.startup.complete"})
            assert (await receive())["type"] == "lifespan.shutdown"
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        else:
            return
        self.bodies.append(body)
        fields = json.loads(body)
        params = params_of(fields)
        prompts = fields.get("prompts", [PROMPT])
        try:
            streams = [
                self.state.engine_client.generate(prompt, params, f"cmpl-{i}")
                for i, prompt in enumerate(prompts)
            ]
        except ValueError as e:  # as vLLM does
            await self.reply(json.dumps({"error": {"message": str(e)}}).encode(), send, 400)
            return
        if fields.get("stream"):
            await self._stream(streams, prompts, params.n, send)
        else:
            choices = []
            for number, stream in enumerate(streams):
                async for output in stream:
                    for result in output.outputs:
                        rows = result.routed_experts
                        choices.append(choice(number * params.n, prompts[number], result))
                        choices[-1]["routed_experts"] = None if rows is None else encode_npy(rows)
            document = {"id": "cmpl", "object": "text_completion", "choices": choices}
            await self.reply(json.dumps(document).encode(), send)

    async def _stream(self, streams: Any, prompts: Any, n: int, send: Any) -> None:
        await send(start(200, EVENTS))
        events = []
        for number, stream in enumerate(streams):
            async for output in stream:
                parts = [choice(number * n, prompts[number], r) for r in output.outputs]
                events.append(b"data: " + json.dumps({"id": "é", "choices": parts}).encode())
                if self.cut is None:  # as vLLM: each piece leaves when it is there
                    await send(
                        {"type": "http.response.body", "body": events.pop() + b"\n\n"} | MORE
                    )
        events += [b'data: {"choices": [], "usage": {"total_tokens": 1}}', b"data: [DONE]"]
        body = b"".join(event + b"\n\n" for event in self.events(events))
        self.replies.append(body)
        for part in self.cut(body) if self.cut else [body]:
            await send({"type": "http.response.body", "body": part} | MORE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reply(self, body: bytes, send: Any, status: int = 200, kind: bytes = JSON) -> None:
        self.replies.append(body)
        await send(start(status, kind, len(body)))
        parts = self.cut(body) if self.cut else [body]
        for number, part in enumerate(parts):
            more = number < len(parts) - 1
            await send({"type": "http.response.body", "body": part, "more_body": more})


def serve(server: Server, *requests: Any, **options: Any) -> list[list[dict[str, Any]]]:
    """Messages of the replies to requests, (path, fields or body in parts), in one life of it."""

    async def main() -> list[list[dict[str, Any]]]:
        app = RoutedExperts(server)
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        scope = {"type": "lifespan", "app": server}
        life = asyncio.ensure_future(app(scope, inbox.get, outbox.put))
        inbox.put_nowait({"type": "lifespan.startup"})
        assert (await outbox.get())["type"] == "lifespan.startup.complete"
        replies = [await asyncio.wait_for(request(app, *r, **options), 20) for r in requests]
        inbox.put_nowait({"type": "lifespan.shutdown"})
        await life
        return replies

    return asyncio.run(main())


async def request(app: Any, path: str, body: Any, gone: bool = False) -> list[dict[str, Any]]:
    """The messages of one reply. gone: the client leaves before the body has ended."""
    parts = [json.dumps(body).encode()] if isinstance(body, dict) else body
    inbox = [
        {"type": "http.request", "body": part, "more_body": gone or i < len(parts) - 1}
        for i, part in enumerate(parts)
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return inbox.pop(0) if inbox else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
    return sent


def body_of(messages: list[dict[str, Any]], status: int = 200) -> bytes:
    """The body of a reply that is whole: one start, a last message, the length that it declares."""
    first, *rest = messages
    assert first["type"] == "http.response.start"
    assert first["status"] == status
    assert [m["type"] for m in rest] == ["http.response.body"] * len(rest)
    assert [m.get("more_body", False) for m in rest] == [True] * (len(rest) - 1) + [False]
    body = b"".join(m["body"] for m in rest)
    lengths = [int(v) for k, v in first["headers"] if k == b"content-length"]
    assert lengths in ([], [len(body)])
    return body


def document(messages: list[dict[str, Any]], status: int = 200) -> Any:
    return json.loads(body_of(messages, status))


def events(messages: list[dict[str, Any]]) -> list[Any]:
    """Documents of a stream, without the [DONE] at its end."""
    *pieces, done, end = body_of(messages).split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return [json.loads(piece.removeprefix(b"data: ")) for piece in pieces]


def plain() -> Server:
    return Server({"r3": {"capture": True}})


def assert_rows_of(number: int, trace: Any, first: int = 0, version: int | None = 5) -> None:
    assert trace.token_ids.tolist() == TOKENS
    expected = random_ids(np.random.default_rng(number), SPEC, len(TOKENS) - 1)
    found = np.sort(trace.routed_experts, axis=-1)[first:]
    assert found.tolist() == np.sort(expected, axis=-1)[first:].tolist()
    if version is not None:
        assert trace.weight_versions[first:].tolist() == [version] * len(found)


@pytest.mark.parametrize("form", ["npy", "compact"])
@pytest.mark.parametrize("size", [1, 50, 10**6])
@pytest.mark.parametrize("path", [PATH, CHAT, "/inference/v1/generate", "/prefix/v1/completions"])
def test_a_whole_reply_brings_its_rows(form, size, path):
    server = plain()
    server.cut = pieces_of(size)
    (messages,) = serve(server, (path, {"routed_experts": form}))
    assert len(messages) == 2
    assert (b"x-request-id", b"7") in messages[0]["headers"]
    reply = document(messages)
    assert reply["choices"][0]["text"] == "ü\n\n"
    trace = trace_from_response(reply, SPEC)
    assert_rows_of(0, trace, version=5 if form == "compact" else None)


@pytest.mark.parametrize("form", ["npy", "compact"])
@pytest.mark.parametrize("size", [None, 1, 2, 3, 7, 64, 300, 10**6])
def test_pieces_of_a_stream_bring_theirs_wherever_they_are_cut(form, size):
    server = plain()
    server.cut = size and pieces_of(size)
    (messages,) = serve(server, (PATH, {"routed_experts": form, "stream": True}))
    pieces = events(messages)
    assert len(pieces) == len(STEPS) + 1
    trace = trace_from_response(join_stream(pieces), SPEC)
    assert_rows_of(0, trace, version=5 if form == "compact" else None)
    if size is None:  # rows of a piece are those of its tokens
        carried = [p["choices"][0]["routed_experts"] for p in pieces[:-1]]
        assert all(isinstance(text, str) for text in carried)
        assert all(m["body"].endswith(b"\n\n") or not m["body"] for m in messages[1:])
    else:
        assert pieces[-1] == {"choices": [], "usage": {"total_tokens": 1}}


def test_choices_and_prompts_are_told_apart():
    fields = {"routed_experts": "compact", "n": 2, "prompts": [list(PROMPT), list(PROMPT)]}
    whole, streamed = serve(plain(), (PATH, fields), (PATH, fields | {"stream": True}))
    for reply, first in ((document(whole), 0), (join_stream(events(streamed)), 4)):
        for number in range(4):
            assert_rows_of(first + number, trace_from_response(reply, SPEC, choice=number))


def test_rows_of_the_prompt_that_are_left_out():
    fields = {"routed_experts": "compact", "routed_experts_prompt_start": 2}
    whole, streamed = serve(plain(), (PATH, fields), (PATH, fields | {"stream": True}))
    earlier = trace_from_response(
        document(serve(plain(), (PATH, {"routed_experts": "compact"}))[0]), SPEC
    )
    for number, reply in enumerate((document(whole), join_stream(events(streamed)))):
        assert_rows_of(number, trace_from_response(reply, SPEC, before=earlier), first=2)


def test_a_missing_row_is_minus_one_in_an_npy():
    rows = rows_of(0)
    rows[2, 0, 2:] = 0
    for fields in ({"routed_experts": "npy"}, {"routed_experts": "compact"}, {}):
        server = plain()
        server.state.engine_client.rows = lambda _: rows
        trace = trace_from_response(document(serve(server, (PATH, fields))[0]), SPEC)
        assert trace.valid.tolist() == [True, True, False, True, True, True, True]


def test_rows_of_vllms_own_capture_are_sent_in_each_form():
    ids = random_ids(np.random.default_rng(0), SPEC, len(TOKENS) - 1)
    rows = np.zeros((len(ids), 3, 2), np.uint8)
    rows[:, 1:] = ids
    for fields in ({"routed_experts": "npy"}, {"routed_experts": "compact"}, {}):
        server = plain()
        server.state.engine_client.rows = lambda _: rows
        trace = trace_from_response(document(serve(server, (PATH, fields))[0]), SPEC)
        assert_rows_of(0, trace, version=None)


def test_without_the_field_a_reply_is_that_of_vllm():
    server = plain()
    server.cut = pieces_of(9)
    whole, streamed = serve(server, (PATH, {}), (PATH, {"stream": True}))
    assert_rows_of(0, trace_from_response(document(whole), SPEC), version=None)
    assert [body_of(whole), body_of(streamed)] == server.replies
    assert b"routed_experts" not in body_of(streamed)
    assert [m["body"] for m in streamed[1:-1]] == pieces_of(9)(server.replies[1])


def test_none_brings_nothing_and_nothing_is_kept():
    server = plain()
    fields = {"routed_experts": "none"}
    whole, streamed = serve(server, (PATH, fields), (PATH, fields | {"stream": True}))
    assert document(whole)["choices"][0]["routed_experts"] is None
    assert b"routed_experts" not in body_of(streamed)


def test_the_body_of_a_request_arrives_as_it_was_sent():
    server = plain()
    text = json.dumps({"routed_experts": "npy", "x": "ü" * 99}, ensure_ascii=False).encode()
    serve(server, *[(PATH, pieces_of(size)(text)) for size in (1, 10, 10**6)])
    assert server.bodies == [text] * 3


@pytest.mark.parametrize("parts", [[], [b""], [b'{"routed_experts": "npy"'], [b"{", b'"a": 1}']])
def test_a_client_that_leaves_before_its_body_has_ended_is_told_of_to_the_app(parts):
    server = plain()
    assert serve(server, (PATH, parts), gone=True) == [[]]
    assert server.bodies == []
    assert len(server.calls) == 2  # the life of the server, and this one


REFUSED = [
    ({"routed_experts": "full"}, 'is "full", expected one of npy, compact, reference, none'),
    ({"routed_experts": False}, "is false, expected one of"),
    ({"routed_experts": True}, "is true, expected one of"),
    ({"routed_experts": ["npy"]}, 'is ["npy"], expected one of'),
    ({"routed_experts": {}}, "is {}, expected one of"),
    ({"routed_experts": "x" * 10**5}, "expected one of"),
    ({"routed_experts": "reference"}, "the server has no store: r3 serve --store"),
    ({"routed_experts": "npy", "use_beam_search": True}, "beam search has none"),
    ({"rollout_id": "r/g/0/0/0"}, 'rollout_id is for routed_experts "reference" only'),
    ({"routed_experts": "npy", "rollout_id": "r/g/0/0/0"}, "is for routed_experts"),
]
REFUSED_WITH_STORE = [
    ({"rollout_id": "r/g/0"}, "not of the form run/group/sample/turn/attempt"),
    ({"rollout_id": 5}, "not of the form"),
    ({"rollout_id": ["r/g/0/0/0"]}, "not of the form"),
    ({"rollout_id": "\ud800/g/0/0/0"}, "no UTF-8"),
    ({"rollout_id": "r/g/0/0/0", "routed_experts": "npy"}, "is for routed_experts"),
    ({"routed_experts_prompt_start": 3}, "a record has all rows, expected 0"),
    ({"use_beam_search": True}, "beam search has none"),  # whose steps would be records
]


@pytest.mark.parametrize(
    ("fields", "said", "store"),
    [(*r, False) for r in REFUSED] + [(*r, True) for r in REFUSED_WITH_STORE],
)
def test_what_cannot_be_served_is_refused_and_the_engine_not_asked(fields, said, store, tmp_path):
    server = plain()
    if store:
        server.additional_config["r3"]["store"] = str(tmp_path)
    (messages,) = serve(server, (PATH, fields))
    error = document(messages, 400)["error"]
    assert said in error["message"]
    assert len(error["message"]) < 300
    assert server.state.engine_client.prompts == 0


def test_other_paths_and_kinds_go_through_untouched():
    """The very objects, so every byte."""

    async def main() -> None:
        seen = []

        async def inner(*args: Any) -> None:
            seen.append(args)

        app = RoutedExperts(inner)
        kinds = [("http", p) for p in ("/v1/models", "/", "/v1/completions/x", "/v1/responses")]
        for kind, path in [*kinds, ("websocket", PATH)]:
            given: tuple[Any, ...] = ({"type": kind, "path": path}, object(), object())
            await app(*given)
            assert all(a is b for a, b in zip(seen.pop(), given, strict=True))

    asyncio.run(main())


class Fixed(Server):
    """Answers with messages that stand fixed."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        super().__init__({"r3": {"capture": True}})
        self.messages = messages

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
        else:
            for message in self.messages:
                await send(message)


def bodies(*parts: bytes) -> list[dict[str, Any]]:
    messages = [{"type": "http.response.body", "body": p} | MORE for p in parts]
    return [*messages[:-1], messages[-1] | {"more_body": False}]


@pytest.mark.parametrize("status", [201, 400, 401, 404, 500, 503])
def test_errors_of_vllm_go_through_message_by_message(status):
    messages = [start(status, JSON, 12), *bodies(b'{"choices', b'": [', b"{}]}")]
    assert serve(Fixed(messages), (PATH, {"routed_experts": "npy"})) == [messages]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"plain",
        b"{",
        b"\xff\x00",
        b"[]",
        b"5",
        b"null",
        b'{"choices": null}',
        b'{"a": "\xc3\xa9"}',
    ],
)
def test_replies_that_are_none_of_ours_keep_their_bytes(body):
    halves = [start(200, JSON, len(body)), *bodies(body[:1], body[1:])]
    (messages,) = serve(Fixed(halves), (PATH, {"routed_experts": "compact"}))
    assert body_of(messages) == body
    assert sorted(messages[0]["headers"]) == sorted(halves[0]["headers"])


def test_parts_of_a_stream_that_are_none_of_ours_keep_their_bytes():
    body = b": ping\n\ndata: {broken\n\nevent: x\ndata: {}\n\ndata: [1]\n\ndata:  [DONE]\n\n"
    body += 'data: {"error": {"message": "é"}}\n\ndata: [DONE]\n\n'.encode()
    for size in (1, 5, 1000):
        messages = [start(200, EVENTS), *bodies(*pieces_of(size)(body), b"")]
        (found,) = serve(Fixed(messages), (PATH, {"routed_experts": "npy", "stream": True}))
        assert body_of(found) == body


def test_rows_without_a_piece_end_a_stream_with_an_error():
    """vLLM may leave a piece out, of a choice without text say; then rows would be lost."""
    server = plain()
    server.cut = pieces_of(40)
    server.events = lambda events: events[-2:]
    (messages,) = serve(server, (PATH, {"routed_experts": "npy", "stream": True}))
    *_, last = events(messages)
    assert last["error"]["message"] == "choices [0]: vLLM sent no piece for their rows"
    with pytest.raises(CaptureError, match=r"the stream ended with an error: .*sent no piece"):
        join_stream(events(messages))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rows", [0, 3, 6, 8])
def test_other_rows_than_tokens_are_an_error_of_the_request(rows, stream):
    server = plain()
    ids = random_ids(np.random.default_rng(0), SPEC, rows)
    server.state.engine_client.rows = lambda _: pack(ids, 0, SPEC)
    if stream and rows == 8:  # the fake engine keeps no more than there are tokens
        return
    said = rf"request cmpl-0 \(length\), choice 0: routing for {rows} rows, expected 7"
    with pytest.raises(CaptureError, match=said):
        serve(server, (PATH, {"routed_experts": "npy", "stream": stream}))


def test_rows_that_cannot_be_encoded_are_an_error_of_the_reply():
    server = plain()
    rows = rows_of(0)
    rows[3, 0, 1] = 7  # one expert twice
    server.state.engine_client.rows = lambda _: rows
    fields = {"routed_experts": "compact"}
    whole, streamed = serve(server, (PATH, fields), (PATH, fields | {"stream": True}))
    assert "row 3, layer 2" in document(whole, 500)["error"]["message"]
    with pytest.raises(CaptureError, match="name one expert twice"):
        join_stream(events(streamed))


# by reference


@pytest.fixture
def vllm_version(monkeypatch):
    """What is read of the package itself: a version. To import it takes seconds."""
    module = ModuleType("vllm")
    module.__version__ = "0.32.0"
    module.envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize("fields", [{}, {"routed_experts": "reference"}])
def test_a_handle_leaves_when_its_record_is_stored(fields, tmp_path, vllm_version):
    server = Server({"r3": {"capture": True, "store": str(tmp_path)}})
    fields = fields | {"n": 2}
    named = fields | {"rollout_id": "run/group/4/1/0"}
    whole, streamed = serve(server, (PATH, named), (PATH, fields | {"stream": True}))
    reply, pieces = document(whole), events(streamed)
    for number in (0, 1):
        trace = trace_from_response(reply, SPEC, choice=number, store=tmp_path)
        assert_rows_of(number, trace)
        assert str(trace.rollout_id) == f"run/group/{4 + number}/1/0"
        assert trace.provenance.engine_version == "0.32.0"
        trace = trace_from_response(join_stream(pieces), SPEC, choice=number, store=tmp_path)
        assert_rows_of(2 + number, trace)
        assert trace.rollout_id.sample == number
    carried = [p["choices"][0]["finish_reason"] for p in pieces[:-1] if "routed" in str(p)]
    assert carried == ["length", "length"]


def test_one_rollout_id_for_two_requests_is_an_error_of_the_second(tmp_path, vllm_version):
    server = Server({"r3": {"capture": True, "store": str(tmp_path)}})
    with pytest.raises(ValueError, match=r"run/group/0/0/0 .*other content"):
        serve(server, *[(PATH, {"rollout_id": "run/group/0/0/0"})] * 2)


def test_requests_for_references_wait_until_there_is_room(tmp_path, vllm_version, monkeypatch):
    monkeypatch.setattr(BackgroundWriter.__init__, "__kwdefaults__", {"max_pending": 100})

    async def main() -> None:
        server = Server({"r3": {"capture": True, "store": str(tmp_path)}})
        app = RoutedExperts(server)
        await app._start(server)
        writer = app._store
        writer.pending = 100
        waits = asyncio.ensure_future(request(app, PATH, {}))
        others = await request(app, PATH, {"routed_experts": "compact"})
        assert_rows_of(0, trace_from_response(document(others), SPEC))
        assert not waits.done()
        writer._free(100)
        reply = document(await asyncio.wait_for(waits, 10))
        assert_rows_of(1, trace_from_response(reply, SPEC, store=tmp_path))
        assert writer.pending == 0
        writer.close()

    asyncio.run(main())


# the start of a server


def startup(server: Any) -> list[Any]:
    async def main() -> list[Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "lifespan.startup" if not sent else "lifespan.shutdown"}

        async def send(message: Any) -> None:
            sent.append(message)

        await RoutedExperts(server)({"type": "lifespan", "app": server}, receive, send)
        return sent

    return asyncio.run(main())


def test_a_server_without_what_is_needed_does_not_start(tmp_path):
    off, empty, dense, odd, full = (plain() for _ in range(5))
    off.state.engine_client.vllm_config.parallel_config.worker_cls = "vllm.v1.worker.Worker"
    del empty.state.engine_client.output_processor
    dense.state.engine_client.vllm_config.model_config.hf_text_config = {"model_type": "llama"}
    odd.additional_config["r3"]["store"] = 5
    (tmp_path / "file").write_bytes(b"")
    full.additional_config["r3"]["store"] = str(tmp_path / "file" / "x")
    for server, said in [
        (off, "capture is off; expected --additional-config"),
        (empty, "Engine has no output_processor"),
        (dense, "llama"),
        (odd, '"store"'),
        (full, "file"),
    ]:
        (message,) = startup(server)
        assert message["type"] == "lifespan.startup.failed"
        assert said in message["message"].replace("['store']", '"store"')
        assert server.calls == []
    names = [m["type"] for m in startup(plain())]
    assert names == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_the_server_says_what_a_client_has_to_know(tmp_path, vllm_version):
    for config, forms, default in [
        ({"capture": True}, ["npy", "compact", "none"], None),
        (
            {"capture": True, "store": str(tmp_path)},
            ["npy", "compact", "reference", "none"],
            "reference",
        ),
    ]:
        server = Server({"r3": config})
        startup(server)
        info = json.loads(json.dumps(asyncio.run(server.routes[INFO_PATH]())))
        assert RouterSpec.from_dict(info["spec"]) == SPEC
        assert info["provenance"]["engine"] == "vllm"
        assert (info["forms"], info["default"]) == (forms, default)


@pytest.mark.parametrize("form", ["npy", "compact"])
def test_rows_that_are_there_before_their_tokens_wait_for_them(form):
    """As with vLLM's stream_interval, which a request can set."""
    server = plain()
    server.state.engine_client.ahead = 2
    (messages,) = serve(server, (PATH, {"stream": True, "routed_experts": form}))
    pieces = events(messages)
    assert_rows_of(0, trace_from_response(join_stream(pieces), SPEC), version=None)
    tokens = len(PROMPT)
    for piece, step in zip(pieces[:-1], STEPS, strict=True):  # the last has the usage
        tokens += len(step)
        if form == "compact":
            rows = decode_rows(piece["choices"][0]["routed_experts"], SPEC, TOKENS)
            assert rows.start + len(rows.ids) == tokens - 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"routed\\u005fexperts": "compact"}',
        json.dumps({"routed_experts": "compact"}).encode("utf-16"),
    ],
)
def test_a_field_is_seen_however_it_is_written(body):
    (messages,) = serve(plain(), (PATH, [body]))
    assert_rows_of(0, trace_from_response(document(messages), SPEC))


def test_beam_search_is_seen_however_it_is_written(tmp_path):
    server = plain()
    server.additional_config["r3"]["store"] = str(tmp_path)
    (messages,) = serve(server, (PATH, [b'{"use\\u005fbeam_search": true}']))
    assert "beam search has none" in document(messages, 400)["error"]["message"]


def test_a_sample_that_cannot_be_counted_up_is_refused_before_anything_is_generated(tmp_path):
    server = plain()
    server.additional_config["r3"]["store"] = str(tmp_path)
    fields = {"n": 2, "rollout_id": f"r/g/{2**53 - 1}/0/0"}
    (messages,) = serve(server, (PATH, fields))
    assert "RolloutId.sample is 9007199254740992" in document(messages, 400)["error"]["message"]
    assert server.state.engine_client.prompts == 0


def test_what_was_aborted_before_it_ran_has_no_routing_and_is_no_error(monkeypatch):
    server = plain()
    server.state.engine_client.reason = "abort"
    server.state.engine_client.rows = lambda _: pack(IDS_OF_NONE, 0, SPEC)
    monkeypatch.setattr(sys.modules[__name__], "STEPS", [[]])
    (messages,) = serve(server, (PATH, {"routed_experts": "compact"}))
    reply = document(messages)
    assert reply["choices"][0]["finish_reason"] == "abort"
    with pytest.raises(CaptureError, match=r"no routed_experts .finish reason 'abort'"):
        trace_from_response(reply, SPEC)


def test_a_client_without_the_key_costs_nothing():
    """What the app answers without reading the body is sent on; the body is not read here."""
    reads = []

    async def main() -> list[Any]:
        async def refuses(scope: Any, receive: Any, send: Any) -> None:
            await send(start(401, JSON, 2))
            await send({"type": "http.response.body", "body": b"{}"})

        async def receive() -> Any:
            reads.append(1)
            return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await RoutedExperts(refuses)({"type": "http", "path": PATH}, receive, send)
        return sent

    assert [m["type"] for m in asyncio.run(main())] == ["http.response.start", "http.response.body"]
    assert not reads
