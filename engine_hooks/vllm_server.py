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

vLLM's engine client is asked for outputs in the context of the request, in which the middleware has
put an object that follows them (`wrap_generate`).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from r3.engine_hooks.vllm_patches import check_front_end, wrap_generate
from r3.engine_hooks.vllm_plugin import capture_settings
from r3.engine_hooks.vllm_reply import Reply
from r3.engine_hooks.vllm_request import FORMS, NONE, REFERENCE, read_request
from r3.engine_hooks.vllm_trace import fetch_facts, is_capturing, provenance
from r3.errors import R3Error, TraceError, UnsupportedError
from r3.spec import RouterSpec
from r3.storage.background import BackgroundWriter

# /invocations is SageMaker's name for the first two
_PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/invocations")
INFO_PATH = "/v1/routed_experts"
_REQUEST: ContextVar[_Request | None] = ContextVar("r3_request", default=None)

_Message = dict[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


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
            request = _Request(receive)
            token = _REQUEST.set(request)
            try:
                await self._app(scope, request.receive, _Sender(request, send))
            finally:
                _REQUEST.reset(token)
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
        check_front_end()
        if not hasattr(engine, "output_processor"):
            raise UnsupportedError(f"{type(engine).__name__} has no output_processor")
        self._engine = engine
        self._spec = RouterSpec.from_hf_config(config.model_config.hf_text_config)
        folder = capture_settings(app.state.args.additional_config).get("store")
        if folder is not None:
            self._store = BackgroundWriter(folder, self._spec)
        await fetch_facts(engine)
        wrap_generate(engine, self._follow)
        # behind the server's own authentication, which is for all of /v1
        app.add_api_route(INFO_PATH, self._info, methods=["GET"])

    def _follow(self, params: Any, request_id: str) -> Callable[[Any], Any] | None:
        request = _REQUEST.get()
        if request is None:
            return None
        if request.reply is None:  # raises what vLLM makes a 400 of
            asked = read_request(request.take_body(), self._store is not None)
            request.reply = Reply(asked, self._spec, self._engine, self._store)
        return request.reply.follow(params, request_id)

    async def _info(self) -> dict[str, Any]:
        return {
            "spec": self._spec.to_dict(),
            "provenance": provenance(self._engine).to_dict(),
            "forms": [f for f in FORMS if f != REFERENCE or self._store is not None],
            "default": None if self._store is None else REFERENCE,
        }


class _Request:
    """One HTTP request: its body as vLLM reads it, and its Reply once vLLM asks the engine.

    Nothing is read here before vLLM does, nor without it: what its authentication turns away costs
    nothing.
    """

    def __init__(self, receive: _Receive) -> None:
        self._receive = receive
        self._body: list[bytes] = []
        self.reply: Reply | None = None

    async def receive(self) -> _Message:
        message = await self._receive()
        if message["type"] == "http.request" and self.reply is None:
            self._body.append(message.get("body", b""))
        return message

    def take_body(self) -> bytes:
        """What was read, once."""
        body, self._body = b"".join(self._body), []
        return body


class _Sender:
    """Puts the routing into the messages of one reply."""

    def __init__(self, request: _Request, send: _Send) -> None:
        self._request, self._send = request, send
        self._reply: Reply | None = None  # there is something to be put in
        self._start: _Message | None = None  # held back until the length is known
        self._streams = self._failed = False
        self._body = b""

    async def __call__(self, message: _Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            kind = headers.get(b"content-type", b"")
            self._streams = kind.startswith(b"text/event-stream")
            self._reply = self._request.reply
            if self._reply is not None and self._reply.form in (None, NONE):
                self._reply = None  # vLLM sends it, or nobody does
            if self._reply is None or self._streams or message["status"] != 200:
                await self._send(message)
            else:
                self._start = message
        elif self._reply is None or message["type"] != "http.response.body":
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
            body, status = _error(str(e)), 500
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
        assert self._reply is not None
        data = event.removeprefix(b"data: ")
        try:
            if data == b"[DONE]" and not self._failed and self._reply.unsent:
                raise TraceError(f"choices {self._reply.unsent}: vLLM sent no piece for their rows")
            if not data.startswith(b"{"):
                return event
            return b"data: " + await self._with_routing(data)
        except R3Error as e:
            self._failed = True
            text = b"data: " + _error(str(e))
            return text + b"\n\n" + event if data == b"[DONE]" else text

    async def _with_routing(self, body: bytes) -> bytes:
        """A reply, or a piece of one, with `routed_experts` in its choices."""
        try:
            document = json.loads(body)
        except ValueError:
            return body
        assert self._reply is not None
        if not isinstance(document, dict):
            return body
        self._failed |= bool(document.get("error"))
        found = False
        for choice in document.get("choices") or ():
            value = await self._reply.value(choice["index"])
            if value is not None:
                choice["routed_experts"], found = value, True
        if not found:
            return body
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _error(text: str) -> bytes:
    error = {"message": text, "type": "InternalServerError", "param": None, "code": 500}
    return json.dumps({"error": error}).encode()
