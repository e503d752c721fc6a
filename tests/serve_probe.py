"""A middleware for the server under test: counts what its API process still holds of requests."""

from __future__ import annotations

import collections
import gc
import json
from typing import Any

PATH = "/held"
# what this package has of a request, a choice of it, a record; and vLLM's of a running request
KINDS = ("Reply", "_Choice", "_Sender", "RoutingTrace", "RequestState")


class Held:
    """GET /held: how many objects of each of KINDS are alive."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        gc.collect()
        found = collections.Counter(type(x).__name__ for x in gc.get_objects())
        content = json.dumps({kind: found[kind] for kind in KINDS}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content})
