"""Routing of one HTTP request to a vLLM server: rows from the engine, text for the reply.

`Reply` follows the outputs of the engine for one request, takes their rows and keeps them until the
middleware (r3.engine_hooks.vllm_server) asks for what goes into the next piece of the reply. In a
stream the rows of a choice leave vLLM only with its last output; here they are taken from the state
that vLLM keeps per request, so that each piece brings those of its tokens.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r3.engine_hooks.rows import unpack
from r3.engine_hooks.vllm_request import COMPACT, NONE, NPY, REFERENCE, Asked
from r3.engine_hooks.vllm_trace import trace_from_output
from r3.errors import CaptureError
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.background import BackgroundWriter
from r3.storage.wire.compact import encode_rows
from r3.storage.wire.npy import encode_npy
from r3.trace import RoutingTrace

_LARGE = 1 << 18  # bytes of rows from which on work is done in a thread


@dataclass(slots=True)
class _Choice:
    """What is known of one choice, and what has not been sent of it."""

    tokens: list[int]  # prompt, then sampled
    prompt_len: int
    sent: int  # rows that were sent, or that the request did not want
    parts: list[np.ndarray] = field(default_factory=list)  # rows that were not
    logprobs: list[Any] | None = None
    handle: dict[str, str] | None = None  # of the record, for REFERENCE

    @property
    def waiting(self) -> int:
        return sum(map(len, self.parts))


class Reply:
    """The routing of one HTTP request.

    engine: the AsyncLLM. store: for REFERENCE.
    """

    def __init__(
        self, asked: Asked, spec: RouterSpec, engine: Any, store: BackgroundWriter | None = None
    ) -> None:
        self.form, self.spec = asked.form, spec
        self._engine, self._store = engine, store
        self._rollout_id = asked.rollout_id or RolloutId.unique()
        self._choices: dict[int, _Choice] = {}
        self._calls = 0  # choices of the prompts so far

    def follow(
        self, params: Any, request_id: str
    ) -> Callable[[AsyncGenerator[Any, None]], AsyncGenerator[Any, None]]:
        """A function from the engine's outputs for the next prompt of the request to the same
        without their rows, where these are sent otherwise."""
        first, self._calls = self._calls, self._calls + params.n
        self._name(self._calls - 1)  # before anything is generated
        return lambda outputs: self._follow(outputs, params, request_id, first)

    async def _follow(
        self, outputs: AsyncGenerator[Any, None], params: Any, request_id: str, first: int
    ) -> AsyncGenerator[Any, None]:
        prompt: list[int] | None = None
        if self.form == REFERENCE and self._store is not None:
            await self._store.room()
        try:
            async for output in outputs:
                prompt = output.prompt_token_ids if prompt is None else prompt
                for result in output.outputs:  # before anything is awaited: no rows of later tokens
                    if self.form is not None:
                        self._take(result, params, prompt or [], request_id, first)
                for result in output.outputs:
                    if self.form is None and result.routed_experts is not None:
                        rows = result.routed_experts
                        result.routed_experts = await _work(plain_rows, rows, self.spec)
                    elif self.form == REFERENCE and result.finish_reason is not None:
                        await self._record(result, output, params, first)
                yield output
        finally:
            await outputs.aclose()

    def _take(
        self, result: Any, params: Any, prompt: list[int], request_id: str, first: int
    ) -> None:
        delta = params.output_kind.name == "DELTA"
        number = first + result.index
        choice = self._choices.get(number)
        if choice is None:
            skipped = min(params.routed_experts_prompt_start, len(prompt))
            choice = self._choices[number] = _Choice(list(prompt), len(prompt), skipped)
            if result.logprobs is not None:
                choice.logprobs = []
        choice.tokens.extend(result.token_ids)
        if choice.logprobs is not None and result.logprobs is not None:
            choice.logprobs.extend(result.logprobs)
        if delta and self.form in (NPY, COMPACT):
            choice.parts += self._chunks(request_id, result.index, prompt)
        if result.routed_experts is not None:
            choice.parts.append(result.routed_experts)
            result.routed_experts = None
        if self.form == NONE:
            choice.parts.clear()
        elif result.finish_reason is not None:
            self._check_complete(choice, number, request_id, result.finish_reason)

    def _chunks(self, request_id: str, index: int, prompt: list[int]) -> list[np.ndarray]:
        """Rows of a running sequence that vLLM keeps for its last output; they are taken away."""
        processor = self._engine.output_processor
        taken: list[np.ndarray] = []
        for name in processor.external_req_ids.get(request_id, ()):
            state = processor.request_states.get(name)
            # two requests may have been given one id: the prompt is this very list
            if state and state.request_index == index and state.prompt_token_ids is prompt:
                taken, state.routed_experts_chunks = state.routed_experts_chunks, []
        return taken

    def _check_complete(self, choice: _Choice, number: int, request_id: str, reason: str) -> None:
        found, expected = choice.sent + choice.waiting, max(len(choice.tokens) - 1, 0)
        if found == expected or choice.sent > expected:
            return
        if reason == "abort" and len(choice.tokens) == choice.prompt_len:
            choice.parts.clear()  # it never ran, and has nothing to be replayed
            return
        raise CaptureError(
            f"request {request_id} ({reason}), choice {number}: routing for {found} rows, expected "
            f"{expected}, one less than tokens: the engine did not return what was asked for"
        )

    def _name(self, number: int) -> RolloutId:
        """Of choice `number`. Raises TraceError for one that is too high."""
        sample = self._rollout_id.sample + number
        return dataclasses.replace(self._rollout_id, sample=sample)

    async def _record(self, result: Any, output: Any, params: Any, first: int) -> None:
        assert self._store is not None
        number = first + result.index
        choice = self._choices[number]
        rollout_id = self._name(number)
        whole = copy.copy(output)
        rows, choice.parts = choice.parts, []

        def make() -> RoutingTrace:
            whole.prompt_token_ids = choice.tokens[: choice.prompt_len]
            completion = copy.copy(result)
            completion.token_ids = choice.tokens[choice.prompt_len :]
            completion.logprobs = choice.logprobs
            completion.routed_experts = np.concatenate(rows) if rows else None
            whole.outputs = [completion]
            return trace_from_output(
                whole,
                self._engine.vllm_config,
                sampling_params=params,
                rollout_id=rollout_id,
                completion=result.index,
            )

        size = sum(part.nbytes for part in rows) + 64 * len(choice.tokens)
        choice.handle = (await self._store.append(make, size)).to_dict()

    async def value(self, number: int) -> Any:
        """What the next piece of choice `number` carries; None if it has nothing to carry."""
        choice = self._choices.get(number)
        if choice is None:
            return None
        if self.form == REFERENCE:
            handle, choice.handle = choice.handle, None
            return handle
        if not choice.parts:
            return None
        rows, start = np.concatenate(choice.parts), choice.sent
        # with vLLM's stream_interval rows may be here before their tokens: these wait
        count = min(len(rows), len(choice.tokens) - 1 - start)
        choice.parts = [rows[count:]] if count < len(rows) else []
        if count <= 0:
            return None
        choice.sent += count
        tokens = choice.tokens[start : start + count + 1]
        encode = _npy_text if self.form == NPY else _compact_text
        return await _work(encode, rows[:count], self.spec, start, tokens)

    @property
    def unsent(self) -> list[int]:
        """Choices with rows or handles that no piece of the reply has carried."""
        return [n for n, c in self._choices.items() if c.parts or c.handle is not None]


def plain_rows(rows: np.ndarray, spec: RouterSpec) -> np.ndarray:
    """Rows of the engine as vLLM itself returns them: [rows, num_layers, top_k], dense layers zero.

    A missing row, which vLLM has no sign for, is -1 throughout, and ids are then int32.
    """
    if rows.ndim == 3:  # vLLM's own
        return rows
    ids, _ = unpack(rows, spec)
    if ids.dtype.kind == "i":
        ids = ids.astype(np.int32, copy=False)
    if len(spec.moe_layers) == spec.num_layers:
        return ids
    whole = np.zeros((len(ids), spec.num_layers, spec.top_k), ids.dtype)
    whole[:, list(spec.moe_layers)] = ids
    if ids.dtype.kind == "i":
        whole[(ids == -1).all(axis=(1, 2))] = -1
    return whole


def _npy_text(rows: np.ndarray, spec: RouterSpec, start: int, tokens: list[int]) -> str:
    return encode_npy(plain_rows(rows, spec))


def _compact_text(rows: np.ndarray, spec: RouterSpec, start: int, tokens: list[int]) -> str:
    if rows.ndim == 4:
        ids, versions = unpack(rows, spec)
        return encode_rows(ids, spec, tokens=tokens, start=start, versions=versions)
    return encode_rows(spec.select_moe_layers(rows), spec, tokens=tokens, start=start)


async def _work(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), in a thread if it takes long enough for other requests to wait for it."""
    large = any(isinstance(a, np.ndarray) and a.nbytes > _LARGE for a in args)
    return await asyncio.to_thread(function, *args) if large else function(*args)
