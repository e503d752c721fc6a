"""The worker side of capture in vLLM: reads what the routers chose, by physical KV slot.

Each MoE router of the model calls back with its expert ids in every forward pass. After the pass
the rows are stored under the KV slots that the same tokens' keys and values went to, so a row
lives exactly as long as its KV: chunked prefill, prefix-cache hits and preemption need no
bookkeeping of their own. When a request samples, the rows it has not handed out yet are gathered
through its block table and travel to the scheduler with the model output.

Imported only in a vLLM worker process (`worker_cls` names the class below).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from r3.errors import CaptureError, UnsupportedError
from r3.spec import RouterSpec


class SlotRows:
    """Rows [layers, top_k] kept by physical KV slot, with a mark for slots that were written."""

    def __init__(self, num_blocks: int, block_size: int, spec: RouterSpec) -> None:
        self.spec, self.block_size = spec, block_size
        shape = (num_blocks * block_size, len(spec.moe_layers), spec.top_k)
        self._rows = np.zeros(shape, spec.dtype)  # untouched pages cost no memory
        self._written = np.zeros(shape[0], bool)

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """slots: int64 [n]; rows: [n, layers, top_k] of the spec's dtype."""
        self._rows[slots] = rows
        self._written[slots] = True

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Follow vLLM's copies of whole KV blocks; pairs of (from, to) block numbers."""
        for a, b in np.asarray(pairs, np.int64) * self.block_size:
            self._rows[b : b + self.block_size] = self._rows[a : a + self.block_size]
            self._written[b : b + self.block_size] = self._written[a : a + self.block_size]

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Rows [n, layers, top_k]; of a signed type, with -1, if some were never written."""
        rows, written = self._rows[slots], self._written[slots]
        if not written.all():
            rows = rows.astype(np.int16 if rows.dtype == np.uint8 else np.int32)
            rows[~written] = -1
        return rows


class RoutingCapture:
    """Binds to the routers of one loaded model and turns forward passes into rows."""

    def __init__(self, model: torch.nn.Module, spec: RouterSpec, max_tokens: int) -> None:
        self.spec = spec
        runners = sorted(
            (m for m in model.modules() if isinstance(m, MoERunner)), key=lambda m: m.layer_id
        )
        found = tuple(m.layer_id for m in runners)
        if found != spec.moe_layers:
            raise UnsupportedError(
                f"the loaded model has routers in layers {found}, expected {spec.moe_layers} "
                "from its config"
            )
        # one plane per layer, so that a router writes contiguously
        self._ids = torch.full((len(runners), max_tokens, spec.top_k), -1, dtype=torch.int32)
        for plane, runner in enumerate(runners):
            router, layer = runner.router, runner.layer_id
            if runner.is_monolithic or not isinstance(router, BaseRouter):
                raise UnsupportedError(
                    f"layer {layer}: {type(runner.routed_experts.quant_method).__name__} with "
                    f"{type(router).__name__} routes inside its kernel; its choice cannot be read"
                )
            if (router.top_k, router.global_num_experts) != (spec.top_k, spec.num_experts):
                raise UnsupportedError(
                    f"layer {layer}: router chooses {router.top_k} of "
                    f"{router.global_num_experts} experts, expected {spec.top_k} of "
                    f"{spec.num_experts} from the config"
                )
            router.set_capture_fn(partial(self._on_routing, plane))
        self._store: SlotRows | None = None
        self._outputs: dict[str, AuxRequestOutput] | None = None

    def _on_routing(self, plane: int, topk_ids: torch.Tensor) -> None:
        n = topk_ids.shape[0]
        if n <= self._ids.shape[1]:  # profiling runs may be larger than any real step
            self._ids[plane, :n] = topk_ids

    def allocate(self, kv_cache_config: Any) -> None:
        """Make room for one row per KV slot."""
        groups = kv_cache_config.kv_cache_groups
        kinds = [type(g.kv_cache_spec) for g in groups]
        if kinds != [FullAttentionSpec]:
            raise UnsupportedError(
                f"capture keeps rows by the KV slots of one full-attention group, found "
                f"{[k.__name__ for k in kinds]}"
            )
        self._store = SlotRows(
            kv_cache_config.num_blocks, groups[0].kv_cache_spec.block_size, self.spec
        )

    def before_step(self, scheduler_output: Any) -> None:
        """Forget the last pass, so that a router that does not call back is noticed."""
        self._ids[:, : scheduler_output.total_num_scheduled_tokens] = -1

    def after_forward(self, scheduler_output: Any, runner: Any) -> None:
        """Store the rows of the pass just made and gather those that go out with its samples."""
        n = scheduler_output.total_num_scheduled_tokens
        store = self._store
        if not n or store is None:
            return
        ids = self._ids[:, :n].numpy()
        unwritten = (ids < 0).any(axis=(1, 2))
        if unwritten.any():
            layer = self.spec.moe_layers[int(unwritten.argmax())]
            raise CaptureError(
                f"layer {layer}: the router did not report {n} rows in this forward pass; "
                "its kernel bypasses the capture callback"
            )
        batch = runner.input_batch
        table = batch.block_table[0]
        if scheduler_output.kv_cache_block_copies:
            store.copy_blocks(scheduler_output.kv_cache_block_copies)
        rows = ids.transpose(1, 0, 2).astype(self.spec.dtype, order="C")
        store.write(table.slot_mapping.gpu[:n].cpu().numpy(), rows)
        row_ends = runner.query_start_loc.np[1:]
        outputs = {}
        for request, (start, end) in scheduler_output.aux_output_connector_metadata.items():
            i = batch.req_id_to_index[request]
            if end - start == 1:  # a decode step: its only row was just computed
                wanted = rows[row_ends[i] - 1 : row_ends[i]].copy()
            else:
                block, offset = np.divmod(np.arange(start, end), table.block_size)
                blocks = table.block_table.np[i, block].astype(np.int64)
                wanted = store.read(blocks * table.block_size + offset)
            outputs[request] = AuxRequestOutput(start, wanted)
        self._outputs = outputs

    def take_outputs(self) -> dict[str, AuxRequestOutput] | None:
        """The rows gathered in the last step, once."""
        outputs, self._outputs = self._outputs, None
        return outputs


class CaptureCPUWorker(CPUWorker):
    """vLLM's CPU worker with a RoutingCapture beside its model runner."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        config = self.vllm_config
        self.routing_capture = RoutingCapture(
            self.model_runner.get_model(),
            RouterSpec.from_hf_config(config.model_config.hf_text_config),
            config.scheduler_config.max_num_batched_tokens,
        )

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self.routing_capture.allocate(kv_cache_config)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any) -> Any:
        self.routing_capture.before_step(scheduler_output)
        output = super().execute_model(scheduler_output)
        if output is None:  # a forward pass was made; sample_tokens follows
            self.routing_capture.after_forward(scheduler_output, self.model_runner)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        rows = self.routing_capture.take_outputs()
        if rows is not None:
            output.aux_output_connector_output = rows
        return output
