"""The scheduler side of capture in vLLM: asks the worker for rows and hands them out, each once.

vLLM's scheduler consults an object, `aux_output_connector`, when it builds a step, when it emits
tokens and when a request ends. Ours stands in the place of the native one; nothing is wrapped.
A request of n accepted tokens has n - 1 rows, and every emission brings the rows from the last
one to there, whatever happened to its KV in between.

Imported only in a vLLM engine process (`scheduler_cls` names the classes below).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from r3.errors import CaptureError


class RowConnector:
    """Keeps, per request, the number of rows that went out; holds no rows itself."""

    def __init__(self) -> None:
        self._emitted: dict[str, int] = {}

    def build_connector_meta(
        self, scheduler_output: Any, requests: dict[str, Any]
    ) -> dict[str, tuple[int, int]]:
        """Row range [start, end) to gather, for each request that will sample in this step."""
        ranges = {}
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = requests[request_id]
            end = request.num_computed_tokens + scheduled
            if end < request.num_tokens:
                continue  # a chunk of a prompt: nothing is emitted after it
            start = self._emitted.get(request_id)
            if start is None:
                skip = request.sampling_params.routed_experts_prompt_start
                start = self._emitted[request_id] = min(skip, request.num_prompt_tokens)
            ranges[request_id] = (start, end)
        return ranges

    def take_output(self, request: Any, output: dict[str, Any] | None) -> np.ndarray | None:
        """The rows [n, layers, top_k] that belong to the tokens being emitted for `request`."""
        request_id, end = request.request_id, request.num_tokens - 1
        start = self._emitted.get(request_id, 0)
        if end <= start:
            return None
        rows = (output or {}).get(request_id)
        have = (0, 0) if rows is None else (rows.token_start, rows.token_start + len(rows.rows))
        if not have[0] <= start <= end <= have[1]:
            raise CaptureError(
                f"request {request_id}: the worker brought rows {have[0]}..{have[1]}, expected "
                f"rows {start}..{end}"
            )
        assert rows is not None
        self._emitted[request_id] = end
        return rows.rows[start - have[0] : end - have[0]]

    def request_finished(self, request: Any) -> None:
        """Called when a request ends or is preempted; a preempted one keeps its count."""
        if request.is_finished():
            self._emitted.pop(request.request_id, None)

    def reset(self) -> None:
        """Called after the prefix cache was emptied. Rows live with their KV: nothing to do."""


class CaptureScheduler(Scheduler):
    """vLLM's scheduler with our connector in its place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = RowConnector()  # type: ignore[assignment]


class CaptureAsyncScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler with our connector in its place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = RowConnector()  # type: ignore[assignment]
