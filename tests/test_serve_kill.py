"""Handles of `r3 serve --store` outlive the server: kill -9 and SIGTERM under load.

A handle is acknowledged when the client has the whole reply. From then on its record is in the
store, whatever happens to the server; nobody was promised more.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest

from r3 import RoutingTrace
from r3.engine_hooks.vllm_response import join_stream
from r3.errors import CaptureError, SuspiciousRoutingWarning, TornShardWarning
from r3.storage import ShardReader
from r3.storage.background import RecordHandle
from routing_check import check_routing
from serve_tools import APIS, Clients, Server, plain_tokens

AT_ONCE = 12
LOST = (httpx.HTTPError, openai.APIError, CaptureError)  # what a client sees of a server that died


class Acknowledged(NamedTuple):
    """What a client knows when it has the whole reply."""

    handle: RecordHandle
    tokens: list[int]
    prompt_len: int


class Load(threading.Thread):
    """Clients, each with one request for references after the other until the server is gone."""

    def __init__(self, server: Server, seed: int) -> None:
        super().__init__()
        self.found: list[Acknowledged] = []
        self.lost = 0
        self._server, self._rng = server, np.random.default_rng(seed)
        self.start()

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        async with Clients(self._server) as clients:
            await asyncio.gather(*(self._one(clients) for _ in range(AT_ONCE)))

    async def _one(self, clients: Clients) -> None:
        rng = self._rng
        while True:
            api, n, stream = rng.choice(APIS), int(rng.integers(1, 4)), bool(rng.integers(0, 2))
            prompt = plain_tokens(rng, int(rng.integers(1, 80)))
            asked = {"n": n, "stream": stream, "max_tokens": int(rng.integers(1, 60))}
            try:
                reply = await clients.ask(str(api), prompt, form="reference", **asked)
                self.found += acknowledged(reply, n)
            except LOST:
                self.lost += 1
                return

    def wait_for(self, count: int) -> None:
        """Until so many handles are acknowledged."""
        while len(self.found) < count:
            assert self.is_alive(), f"the clients ended, {self._server.text()[-3000:]}"
            time.sleep(0.01)


async def terminated_under_way(server: Server, rng: np.random.Generator) -> list[Acknowledged]:
    """Streams that all have begun when the server is sent SIGTERM; what they bring in the end."""
    begun = [asyncio.Event() for _ in range(AT_ONCE)]

    async def one(clients: Clients, event: asyncio.Event) -> list[Acknowledged]:
        asked = {"form": "reference", "stream": True, "max_tokens": 200}
        pieces = []
        async for piece in clients.pieces(str(rng.choice(APIS)), plain_tokens(rng, 20), **asked):
            pieces.append(piece)
            if any(c.get("token_ids") for c in piece["choices"]):
                event.set()
        return acknowledged(join_stream(pieces), 1)

    async with Clients(server) as clients:
        replies = asyncio.gather(*(one(clients, event) for event in begun))
        await asyncio.gather(*(event.wait() for event in begun))
        server.process.send_signal(signal.SIGTERM)
        return [a for found in await replies for a in found]


def acknowledged(reply: dict[str, Any], n: int) -> list[Acknowledged]:
    if reply.get("error"):
        raise CaptureError(str(reply["error"]))
    assert [c["index"] for c in reply["choices"]] == [*range(n)]
    found = []
    for choice in reply["choices"]:
        handle = choice["routed_experts"]
        handle = handle[0] if isinstance(handle, list) else handle  # as join_stream has it
        prompt = choice.get("prompt_token_ids") or reply["prompt_token_ids"]
        tokens = [*prompt, *choice["token_ids"]]
        found.append(Acknowledged(RecordHandle.from_dict(handle), tokens, len(prompt)))
    return found


def read_all(store: Path, promised: list[Acknowledged]) -> list[RoutingTrace]:
    """Their records: there, of the digest of the handle, and of the tokens of the reply."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SuspiciousRoutingWarning)
        warnings.simplefilter("ignore", TornShardWarning)
        traces = [p.handle.read(store) for p in promised]
    for trace, p in zip(traces, promised, strict=True):
        assert trace.token_ids.tolist() == p.tokens, p
        assert trace.prompt_len == p.prompt_len, p
        assert trace.valid.all()
        assert (trace.weight_versions == 0).all()
    return traces


def count_records(store: Path) -> int:
    """Records in all files; one that ends within a record is read as far as it is whole."""
    total = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornShardWarning)
        for path in store.glob("*.r3"):
            if path.stat().st_size:
                with ShardReader(path) as shard:
                    total += len(shard)
    return total


@pytest.mark.parametrize(
    ("kills", "sigterms"),
    [pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(20, 1, marks=pytest.mark.full)],
)
def test_what_was_acknowledged_survives(kills, sigterms, model_dir, tmp_path):
    """kill -9 at a random moment, of the API server or of all processes; then a server on the same
    store, and so on; in the end SIGTERM, with time to bring the replies under way to their end.

    Without --shutdown-timeout SIGTERM breaks them off, and vLLM, with or without this package, may
    then wait for a client that waits for it.
    """
    model, store = model_dir("qwen3_moe"), tmp_path / "store"
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # pytest -s
    rng = np.random.default_rng(seed)
    promised: list[Acknowledged] = []
    last: list[Acknowledged] = []
    for number in range(kills):
        with Server(model, tmp_path, store=store) as server:
            load = Load(server.ready(), seed + number)
            load.wait_for(int(rng.integers(1, 100)))
            time.sleep(float(rng.uniform(0, 0.5)))
            how = "all" if rng.integers(0, 2) else "the API server"
            if how == "all":
                server.kill()
            else:
                os.kill(server.process.pid, signal.SIGKILL)
            load.join()
        assert load.lost == AT_ONCE
        read_all(store, last + load.found)  # those of the server before it too
        promised, last = promised + load.found, load.found
        report(f"kill -9 of {how}, {load.lost} replies lost", last, promised, store)

    for _ in range(sigterms):
        with Server(model, tmp_path, "--shutdown-timeout", 60, store=store) as server:
            last = asyncio.run(terminated_under_way(server.ready(), rng))
            assert server.ended() == 0, server.text()[-3000:]
            server.wait_gone()
        assert len(last) == AT_ONCE
        promised += last
        report("SIGTERM", last, promised, store)

    assert len({p.handle.rollout_id for p in promised}) == len(promised)
    assert len({p.handle.file for p in promised}) == kills + sigterms
    traces = read_all(store, promised)
    some = rng.choice(len(promised), min(len(promised), 100), replace=False)
    print(check_routing([traces[i] for i in some], model))


def report(how: str, last: list[Acknowledged], promised: list[Acknowledged], store: Path) -> None:
    stored = count_records(store)
    assert stored >= len(promised)
    print(f"{how}: {len(last)} acknowledged, {len(promised)} in all; {stored} records")
