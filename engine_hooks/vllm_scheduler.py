"""The scheduler side of capture in vLLM: keeps rows by KV slot and hands them out, each once.

vLLM's scheduler consults an object, `aux_output_connector`, when it builds a step, when it emits
tokens and when a request ends. Ours stands in the place of the native one. Each step the worker
brings the rows of every token it forwarded; they are stored under the slots that the same tokens'
keys and values went to. So chunked prefill, prefix-cache hits and preemption need no bookkeeping:
rows of a cached prefix are found where its KV is, and a block that is given out anew, or filled
from elsewhere, has no rows until something is computed into it.

A request of n accepted tokens has n - 1 rows. Every emission brings the rows from the last one
to there: those of the pass that sampled the tokens, whatever happens to its KV later.

Imported only in a vLLM engine process (`scheduler_cls` names the classes below).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from r3.engine_hooks.rows import SlotStore
from r3.engine_hooks.vllm_groups import full_attention_group
from r3.engine_hooks.vllm_patches import watch_new_blocks
from r3.errors import CaptureError
from r3.spec import RouterSpec

# What is handed out is kept until its request ends. A view of a whole pass would keep the rows of
# all requests with it, copies one by one cost a microsecond each: so a few share one.
_TOGETHER = 16


@dataclass(slots=True)
class StepRows:
    """What a worker brings back from one forward pass over R requests and n tokens."""

    rows: np.ndarray  # packed [n, 1, layers + P, top_k]
    slots: np.ndarray  # int64 [n], KV slots of the tokens
    starts: Sequence[int]  # R + 1 offsets of the requests' tokens in the pass
    positions: list[int]  # R positions of their first tokens in their sequences


class RowConnector:
    """Rows of all sequences in the KV cache, and how many of each request went out."""

    def __init__(self, store: SlotStore, block_ids: Any) -> None:
        """block_ids: function from a request id to its KV blocks in the store's group."""
        self._store = store
        self._block_ids = block_ids
        self._emitted: dict[str, int] = {}
        self._preempted: dict[str, list[int]] = {}  # blocks that a request had to give back
        self._fresh: list[int] = []
        # of the pass being taken in: index of a request, positions, starts, rows; if each request
        # has one row, the rows in parts of a few requests
        self._now: (
            tuple[dict[str, int], Sequence[int], Sequence[int], np.ndarray, list[np.ndarray]] | None
        ) = None

    def blocks_given_out(self, blocks: list[Any]) -> None:
        """Called with KV blocks that leave the free list: what they held is overwritten."""
        self._fresh.extend(block.block_id for block in blocks)

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> list[int] | None:
        """The blocks given out since the last pass, for `absorb` to forget in its turn."""
        if not scheduler_output.total_num_scheduled_tokens:
            return None
        fresh, self._fresh = self._fresh, []
        return fresh

    def absorb(self, scheduler_output: Any, output: Any) -> None:
        """Take in what the worker brought; steps come back in the order in which they were built.

        A step may have been scheduled while an earlier one was still running, so the store
        changes here and not in `build_connector_meta`.
        """
        step = output.aux_output_connector_output
        self._store.next_pass(
            scheduler_output.aux_output_connector_metadata or (),
            scheduler_output.kv_cache_block_copies or (),
        )
        if step is None:
            if scheduler_output.total_num_scheduled_tokens:
                raise CaptureError(
                    "the worker brought no routing for a pass over "
                    f"{scheduler_output.total_num_scheduled_tokens} tokens"
                )
            self._now = None
            return
        rows, positions, starts = step.rows, step.positions, step.starts
        self._store.write(step.slots, rows)
        parts = []
        if len(positions) == len(rows):
            if len(rows) <= _TOGETHER:
                parts = [rows]
            else:
                parts = [rows[i : i + _TOGETHER].copy() for i in range(0, len(rows), _TOGETHER)]
        self._now = output.req_id_to_index, positions, starts, rows, parts

    def take_output(self, request: Any, output: StepRows | None) -> np.ndarray | None:
        """The packed rows that belong to the tokens being emitted for `request`.

        output: what `absorb` has just taken in.
        """
        request_id = request.request_id
        end = request.num_tokens - 1
        start = self._emitted.get(request_id)
        if start is None:
            skip = request.sampling_params.routed_experts_prompt_start
            start = min(skip, request.num_prompt_tokens)
        if end <= start:
            return None
        self._emitted[request_id] = end
        if self._now is not None:
            index, positions, starts, rows, parts = self._now
            i = index[request_id]
            position, offset = positions[i], starts[i]
            if start >= position:  # its rows were just computed
                if parts and start == position and end == start + 1:
                    at = i % _TOGETHER
                    return parts[i // _TOGETHER][at : at + 1]
                offset -= position
                if end + offset > starts[i + 1]:
                    raise CaptureError(
                        f"request {request_id}: the worker brought rows up to "
                        f"{starts[i + 1] - offset}, expected {end}"
                    )
                return rows[start + offset : end + offset].copy()
        blocks = self._block_ids(request_id) or self._preempted.get(request_id, [])
        if len(blocks) * self._store.block_size < end:
            raise CaptureError(
                f"request {request_id}: {len(blocks)} KV blocks of {self._store.block_size} "
                f"tokens, expected room for {end} rows"
            )
        return self._store.read(np.asarray(blocks, np.int64), start, end)

    def request_finished(self, request: Any) -> None:
        """Called when a request ends or is preempted, before its blocks are freed."""
        request_id = request.request_id
        if request.is_finished():
            self._emitted.pop(request_id, None)
            self._preempted.pop(request_id, None)
        elif request.num_in_flight_tokens:
            # its last pass is still on the way and will be delivered after the blocks are gone
            self._preempted[request_id] = list(self._block_ids(request_id))

    def reset(self) -> None:
        """Called after the prefix cache was emptied. Rows live with their KV: nothing to do."""


class _Capturing:
    """Puts a RowConnector into a vLLM scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager, config = self.kv_cache_manager, self.kv_cache_config  # type: ignore[attr-defined]
        hf_config = self.vllm_config.model_config.hf_text_config  # type: ignore[attr-defined]
        group, block_size = full_attention_group(config)
        store = SlotStore(config.num_blocks, block_size, RouterSpec.from_hf_config(hf_config))
        self.aux_output_connector = connector = RowConnector(
            store, lambda request_id: manager.get_block_ids(request_id)[group]
        )
        watch_new_blocks(manager.block_pool, connector.blocks_given_out)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.aux_output_connector.absorb(scheduler_output, model_runner_output)
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )


class CaptureScheduler(_Capturing, Scheduler):
    """vLLM's scheduler with our connector in its place."""


class CaptureAsyncScheduler(_Capturing, AsyncScheduler):
    """vLLM's asynchronous scheduler with our connector in its place."""
