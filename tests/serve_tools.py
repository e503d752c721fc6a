"""`r3 serve` as tests use it: the real server in processes of its own, and clients for it.

A Server is a process group: the API server, vLLM's engine core and its worker. Clients are the
`openai` package, and httpx for /inference/v1/generate, which that package does not know.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil

import serve_probe
from r3 import RouterSpec, RoutingTrace
from r3.engine_hooks.vllm_response import join_stream, trace_from_response
from r3.errors import SuspiciousRoutingWarning

APIS = ("completions", "chat", "generate")
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/inference/v1/generate",
}
ABSENT = "absent"  # no field in the request
# whose text the tokenizer does not split: others begin with one of its special tokens, t1 to t3
PLAIN_TOKENS = range(400, 512)
_NAME, _KEY = "tiny", "key"
_START, _STOP = 180, 60  # seconds at most
_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
_SETTINGS = (
    *("--dtype", "float32", "--enforce-eager", "--enable-scale-out"),
    *("--max-model-len", "512", "--max-num-seqs", "32", "--block-size", "32"),
    *("--kv-cache-memory-bytes", str(16 << 20), "--logprobs-mode", "processed_logprobs"),
    *("--served-model-name", _NAME, "--host", "127.0.0.1", "--api-key", _KEY),
    *("--middleware", "serve_probe.Held"),
)


class Server:
    """`r3 serve` of a tiny model on a free port; leaving the context ends all its processes.

    store: as its --store; args: further ones.
    """

    def __init__(self, model: Path, folder: Path, *args: object, store: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        template = folder / "template.jinja"
        template.write_text(_TEMPLATE)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url, self.store = f"http://127.0.0.1:{port}", store
        self.log = folder / f"serve-{port}.log"
        command = [sys.executable, "-m", "r3.cli", "serve", model, *_SETTINGS]
        command += ["--port", port, "--chat-template", template, *args]
        command += ["--store", store] if store else []
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        self.http = httpx.Client(base_url=self.url, timeout=120, headers=_headers())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.http.close()
        self.kill()

    def text(self) -> str:
        """What it has written."""
        return self.log.read_text(errors="replace")

    def ready(self) -> Server:
        """Wait until it answers."""
        end = time.monotonic() + _START
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health").status_code == 200:
                    return self
            time.sleep(0.1)
        raise AssertionError(f"code {self.process.poll()}, no answer:\n{self.text()[-4000:]}")

    def ended(self) -> int:
        """Wait until the API server ends by itself; its exit code."""
        return self.process.wait(_START)

    def kill(self) -> None:
        """SIGKILL to all of its processes; returns when none is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.wait_gone()

    def wait_gone(self) -> None:
        """Wait until none of its processes is left."""
        end = time.monotonic() + _STOP
        while left := self._processes():
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(0.05)

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                ours = os.getpgid(process.pid) == self.process.pid
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def memory(self) -> dict[str, float]:
        """MiB that each of its processes has for itself, by name."""
        sizes = {}
        for process in self._processes():
            name = " ".join(process.cmdline()).strip()
            if "resource_tracker" not in name:
                kind = name.removeprefix("VLLM::") if name.startswith("VLLM::") else "API server"
                sizes[kind] = process.memory_full_info().uss / (1 << 20)
        return sizes

    def held(self) -> dict[str, int]:
        """Objects of requests that its API process holds, see serve_probe."""
        return self.http.get(serve_probe.PATH).json()

    def running(self) -> float:
        """Requests that vLLM says are running or waiting."""
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(names))

    def wait_idle(self) -> None:
        """Wait until nothing runs: what a client has left, the server ends a moment later."""
        end = time.monotonic() + _STOP
        while self.running() or any(self.held().values()):
            assert time.monotonic() < end, f"{self.running()} running, held: {self.held()}"
            time.sleep(0.1)

    def info(self) -> dict[str, Any]:
        """What a client learns of the server."""
        return self.http.get("/v1/routed_experts").raise_for_status().json()

    def spec(self) -> RouterSpec:
        return RouterSpec.from_dict(self.info()["spec"])

    def ask(self, api: str, prompt: Any, **fields: Any) -> dict[str, Any]:
        """One reply, put together if it is streamed; see `body` for the fields."""
        pieces = list(self.pieces(api, prompt, **fields))
        return join_stream(pieces) if fields.get("stream") else pieces[0]

    def pieces(self, api: str, prompt: Any, **fields: Any) -> Iterator[dict[str, Any]]:
        """The pieces of a stream as they come; what is not streamed is one."""
        sent = body(api, prompt, **fields)
        if api == "generate":
            with self.http.stream("POST", PATHS[api], json=sent) as reply:
                yield from map(_event, filter(_is_event, reply.iter_lines()))
            return
        url = f"{self.url}/v1"
        with openai.OpenAI(base_url=url, api_key=_KEY, max_retries=0) as client:
            reply = _method(client, api)(**_arguments(sent))
            yield from (x.model_dump() for x in (reply if sent["stream"] else [reply]))

    def post(self, api: str, content: bytes | dict[str, Any]) -> httpx.Response:
        """What it answers to any body, of an object as JSON."""
        if isinstance(content, dict):
            content = json.dumps(content).encode()
        kind = {"content-type": "application/json"}
        return self.http.post(PATHS[api], content=content, headers=kind)


class Clients:
    """Many requests at a time to one server, in an event loop; as a context.

    headers: to send with each request.
    """

    def __init__(self, server: Server, **headers: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=server.url,
            timeout=300,
            headers=_headers() | headers,
            limits=httpx.Limits(max_connections=None),
        )
        self._openai = openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=_KEY, max_retries=0, http_client=self._http
        )

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._http.aclose()

    async def ask(self, api: str, prompt: Any, **fields: Any) -> dict[str, Any]:
        """As Server.ask."""
        pieces = [piece async for piece in self.pieces(api, prompt, **fields)]
        return join_stream(pieces) if fields.get("stream") else pieces[0]

    async def pieces(self, api: str, prompt: Any, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        """As Server.pieces; closing the iterator, or cancelling it, leaves the server alone."""
        sent = body(api, prompt, **fields)
        if api == "generate":
            async with self._http.stream("POST", PATHS[api], json=sent) as reply:
                async for line in reply.aiter_lines():
                    if _is_event(line):
                        yield _event(line)
            return
        reply = await _method(self._openai, api)(**_arguments(sent))
        if not sent["stream"]:
            yield reply.model_dump()
            return
        async with reply:
            async for piece in reply:
                yield piece.model_dump()


def body(
    api: str,
    prompt: Any,
    *,
    form: Any = ABSENT,
    stream: bool = False,
    max_tokens: int = 12,
    n: int = 1,
    start: int = 0,
    greedy: bool = False,
    sampling: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A request for tokens and their log-probabilities.

    prompt: token ids, for "completions" also a list of prompts. start: routed_experts_prompt_start.
    greedy: by top_k=1, because vLLM refuses n > 1 at temperature 0. sampling: further parameters of
    it. more: further fields.
    """
    fields = {"model": _NAME, "stream": stream, "return_token_ids": True, **more}
    if form != ABSENT:
        fields["routed_experts"] = form
    params = {"max_tokens": max_tokens, "n": n, "temperature": 1.0, **(sampling or {})}
    if greedy:
        params["top_k"] = 1
    if start:
        params["routed_experts_prompt_start"] = start
    if api == "completions":
        return fields | params | {"prompt": prompt, "logprobs": 1}
    if api == "chat":
        content = " ".join(f"t{token}" for token in prompt)
        return (
            fields | params | {"messages": [{"role": "user", "content": content}], "logprobs": True}
        )
    return fields | {"token_ids": prompt, "sampling_params": params | {"logprobs": 1}}


def traces_of(
    reply: dict[str, Any], spec: RouterSpec, choices: int = 1, **options: Any
) -> list[RoutingTrace]:
    """Of choices 0..choices - 1, each read by `trace_from_response`.

    A tiny model that decodes greedily runs in circles: suspicious in a large one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SuspiciousRoutingWarning)
        return [trace_from_response(reply, spec, choice=i, **options) for i in range(choices)]


def plain_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.choice(PLAIN_TOKENS, count).tolist()


def _headers() -> dict[str, str]:
    return {"authorization": f"Bearer {_KEY}"}


def _method(client: Any, api: str) -> Any:
    return client.completions.create if api == "completions" else client.chat.completions.create


def _arguments(sent: dict[str, Any]) -> dict[str, Any]:
    """What the openai package has no argument for goes into the body as it is."""
    own = ("model", "stream", "prompt", "messages")
    rest = {k: v for k, v in sent.items() if k not in own}
    return {k: v for k, v in sent.items() if k in own} | {"extra_body": rest}


def _is_event(line: str) -> bool:
    return line.startswith(("data: {", "{"))


def _event(line: str) -> dict[str, Any]:
    return json.loads(line.removeprefix("data: "))
