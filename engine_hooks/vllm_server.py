"""Routing in the replies of vLLM's OpenAI server: a middleware, for vLLM's own `--middleware`.

    --additional-config '{"r3": {"capture": true}}'
    --middleware r3.engine_hooks.vllm_server.RoutedExperts

(`r3 serve` sets both.) POST requests to /v1/completions, /v1/chat/completions and
/inference/v1/generate take two fields more:

    routed_experts  "npy": base64 of an .npy, as vLLM has it, in streams too, where each piece
                    brings the rows of its tokens; "compact": text of r3.storage.wire.compact,
                    likewise; "reference": the server stores a record, the last piece of a choice
                    brings its handle; "none". Left out: "reference" if the server has a store, else
                    what vLLM itself sends: "npy" where nothing is streamed, and on the last piece
                    of a stream of /inference/v1/generate
    rollout_id      run/group/sample/turn/attempt of the first choice, for "reference"; `sample` is
                    counted up for the others. Left out: a unique one

GET /v1/routed_experts says what a client has to know: routers, provenance, forms.

One thing of vLLM is wrapped: `generate` of the server's own engine client. What it returns is
passed on to the object that the middleware has put into the context of the request.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from r3.engine_hooks.vllm_plugin import capture_settings
from r3.engine_hooks.vllm_reply import FORMS, REFERENCE, Reply
from r3.engine_hooks.vllm_trace import fetch_facts, is_capturing, provenance
from r3.errors import R3Error, TraceError, UnsupportedError
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.background import BackgroundWriter

_PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
INFO_PATH = "/v1/routed_experts"
# fields of a request that are read here; a body without them is not even parsed
_FIELDS = (b"routed_experts", b"rollout_id", b"use_beam_search")
_REPLY: ContextVar[Reply | None] = ContextVar("r3_reply", default=None)

_Message = dict[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


class _Refused(Exception):
    """A request with a field that cannot be served; the text goes to the client."""


class RoutedExperts:
    """The middleware; one per server process. Without capture the server does not start."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._engine: Any = None
        self._store: BackgroundWriter | None = None
        self._spec: RouterSpec

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].endswith(_PATHS):
            await self._serve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _lifespan(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        try:
            await self._start(scope["app"])
        except (R3Error, OSError) as e:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"routed experts: {e}"})
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if self._store is not None:
                self._store.close()

    async def _start(self, app: Any) -> None:
        engine = app.state.engine_client
        config = getattr(engine, "vllm_config", None)
        if config is None or not is_capturing(config):
            raise UnsupportedError(
                'capture is off; expected --additional-config \'{"r3": {"capture": true}}\''
            )
        if not hasattr(engine, "output_processor"):
            raise UnsupportedError(f"{type(engine).__name__} has no output_processor")
        self._engine = engine
        self._spec = RouterSpec.from_hf_config(config.model_config.hf_text_config)
        folder = capture_settings(app.state.args.additional_config).get("store")
        if folder is not None:
            self._store = BackgroundWriter(folder, self._spec)
        await fetch_facts(engine)
        generate = engine.generate

        def followed(prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
            outputs = generate(prompt, sampling_params, request_id, **kwargs)
            reply = _REPLY.get()
            return outputs if reply is None else reply.follow(outputs, sampling_params, request_id)

        engine.generate = followed
        # behind the server's own authentication, which is for all of /v1
        app.add_api_route(INFO_PATH, self._info, methods=["GET"])

    async def _info(self) -> dict[str, Any]:
        return {
            "spec": self._spec.to_dict(),
            "provenance": provenance(self._engine).to_dict(),
            "forms": [f for f in FORMS if f != REFERENCE or self._store is not None],
            "default": None if self._store is None else REFERENCE,
        }

    async def _serve(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        body, receive = await _whole_body(receive)
        try:
            reply = self._asked(body)
        except _Refused as e:
            await _refuse(send, str(e))
            return
        if self._store is not None and reply.form == REFERENCE:
            await self._store.room()
        token = _REPLY.set(reply)
        try:
            if reply.form is None or reply.form == "none":
                await self._app(scope, receive, send)
            else:
                await self._app(scope, receive, _Sender(reply, send))
        finally:
            _REPLY.reset(token)

    def _asked(self, body: bytes) -> Reply:
        form = None if self._store is None else REFERENCE
        fields: Any = {}
        if any(name in body for name in _FIELDS):
            try:
                fields = json.loads(body)
            except (ValueError, RecursionError):
                fields = {}  # vLLM says what is wrong with it
            if not isinstance(fields, dict):
                fields = {}
        if fields.get("routed_experts") is not None:
            form = fields["routed_experts"]
            if form not in FORMS:
                raise _Refused(
                    f"routed_experts is {json.dumps(form):.100}, expected one of {', '.join(FORMS)}"
                )
            if form == REFERENCE and self._store is None:
                raise _Refused(
                    'routed_experts is "reference" and the server has no store: r3 serve --store'
                )
        if form not in (None, "none") and fields.get("use_beam_search"):
            raise _Refused('routed_experts: beam search has none, expected "none"')
        rollout_id = None
        if fields.get("rollout_id") is not None:
            if form != REFERENCE:
                raise _Refused('rollout_id is for routed_experts "reference" only')
            try:
                rollout_id = RolloutId.parse(str(fields["rollout_id"]))
            except TraceError as e:
                raise _Refused(str(e)) from None
        parameters = fields.get("sampling_params")  # where generate has it
        place = parameters if isinstance(parameters, dict) else fields
        if form == REFERENCE and place.get("routed_experts_prompt_start"):
            raise _Refused("routed_experts_prompt_start: a record has all rows, expected 0")
        return Reply(form, self._spec, self._engine, self._store, rollout_id)


class _Sender:
    """Puts the routing into the messages of one reply."""

    def __init__(self, reply: Reply, send: _Send) -> None:
        self._reply, self._send = reply, send
        self._start: _Message | None = None  # held back until the length is known
        self._streams = False
        self._body = b""

    async def __call__(self, message: _Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            kind = headers.get(b"content-type", b"")
            self._streams = kind.startswith(b"text/event-stream")
            if self._streams or message["status"] != 200:
                await self._send(message)
            else:
                self._start = message
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._streams:
            await self._stream(message)
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._whole()
        else:
            await self._send(message)

    async def _whole(self) -> None:
        assert self._start is not None
        body, status = self._body, self._start["status"]
        try:
            body = await self._with_routing(body)
        except R3Error as e:
            body, status = _error(str(e), 500), 500
        headers = [(k, v) for k, v in self._start["headers"] if k != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send(self._start | {"status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _stream(self, message: _Message) -> None:
        *events, self._body = (self._body + message.get("body", b"")).split(b"\n\n")
        more = message.get("more_body", False)
        if not more and self._body:
            events, self._body = [*events, self._body], b""
        sent = [await self._event(event) for event in events]
        body = b"".join(event + b"\n\n" for event in sent)
        if body or not more:
            await self._send(message | {"body": body})

    async def _event(self, event: bytes) -> bytes:
        data = event.removeprefix(b"data: ")
        try:
            if data == b"[DONE]" and self._reply.unsent:
                raise TraceError(f"choices {self._reply.unsent}: vLLM sent no piece for their rows")
            if not data.startswith(b"{"):
                return event
            return b"data: " + await self._with_routing(data)
        except R3Error as e:
            text = b"data: " + _error(str(e), 500)
            return text + b"\n\n" + event if data == b"[DONE]" else text

    async def _with_routing(self, body: bytes) -> bytes:
        """A reply, or a piece of one, with `routed_experts` in its choices."""
        try:
            document = json.loads(body)
        except ValueError:
            return body
        choices = document.get("choices") if isinstance(document, dict) else None
        found = False
        for choice in choices or ():
            value = await self._reply.value(choice["index"])
            if value is not None:
                choice["routed_experts"], found = value, True
        if not found:
            return body
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


async def _whole_body(receive: _Receive) -> tuple[bytes, _Receive]:
    """The body of a request, and a `receive` that gives it once more."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = b"".join(parts)
    if message["type"] == "http.request":
        message = {"type": "http.request", "body": body, "more_body": False}
    messages = [message]  # or the word that the client is gone

    async def again() -> _Message:
        return messages.pop() if messages else await receive()

    return body, again


def _error(text: str, code: int) -> bytes:
    kind = "BadRequestError" if code == 400 else "InternalServerError"
    error = {"message": text, "type": kind, "param": "routed_experts", "code": code}
    return json.dumps({"error": error}).encode()


async def _refuse(send: _Send, text: str) -> None:
    body = _error(text, 400)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
