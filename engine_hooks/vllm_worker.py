"""The worker side of capture in vLLM: reads what the routers chose in each forward pass.

Each MoE router of the model calls back with its expert ids. After the pass they go to the
scheduler (see vllm_scheduler) with the KV slots of their tokens and the version of the weights
that computed them. A router that stays silent is an error there and then.

Imported only in a vLLM worker process (`worker_cls` names the classes at the end).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import CompilationMode
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from r3.engine_hooks.rows import MAX_WEIGHT_VERSION, pack, stamp, unpack
from r3.engine_hooks.vllm_facts import worker_facts
from r3.engine_hooks.vllm_groups import full_attention_group
from r3.engine_hooks.vllm_patches import watch_load_weights
from r3.engine_hooks.vllm_scheduler import StepRows
from r3.engine_hooks.vllm_selftest import check_self_test, run_tokens
from r3.errors import CaptureError, UnsupportedError
from r3.spec import RouterSpec

_MAX_VIEWS = 64  # numbers of tokens whose views are kept: those of decode steps repeat


class RouterTap:
    """The expert ids that the routers of one loaded model chose in the last forward pass.

    Only the modules of `model` are bound, so a draft model's routers are not heard. Must be made
    before anything is compiled: a traced router keeps the callback that it had.
    """

    def __init__(self, model: torch.nn.Module, spec: RouterSpec, config: Any) -> None:
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
        # Where Python runs in each pass, the tensors themselves are kept. In a compiled model or
        # a CUDA graph only writes to memory that stays in place are replayed.
        self._kept: list[list[torch.Tensor]] = [[] for _ in runners]
        self._buffer: torch.Tensor | None = None
        device = config.device_config.device_type
        tokens = max(
            config.scheduler_config.max_num_batched_tokens,
            config.compilation_config.max_cudagraph_capture_size or 0,
        )
        if device != "cpu" or config.compilation_config.mode != CompilationMode.NONE:
            # one plane per layer, so that a router writes contiguously
            shape = (len(runners), tokens, spec.top_k)
            self._buffer = torch.full(shape, -1, dtype=torch.int32, device=device)
        rows = pack(np.zeros((tokens, len(runners), spec.top_k), spec.dtype), 0, spec)
        self._rows = torch.from_numpy(rows.reshape(tokens, -1, spec.top_k))
        self._views: dict[int, tuple[list[torch.Tensor], np.ndarray]] = {}
        for plane, runner in enumerate(runners):
            _check_router(runner, spec)
            keep = self._kept[plane].append if self._buffer is None else partial(self._write, plane)
            runner.router.set_capture_fn(keep)

    def _write(self, plane: int, topk_ids: torch.Tensor) -> None:
        assert self._buffer is not None
        self._buffer[plane, : topk_ids.shape[0]] = topk_ids

    def clear(self, tokens: int) -> None:
        """Forget the last pass, so that a router that does not call back is noticed."""
        for kept in self._kept:
            kept.clear()
        if self._buffer is not None:
            self._buffer[:, :tokens] = -1

    def set_stamp(self, planes: np.ndarray) -> None:
        """Rows read from now on carry these version planes [P, top_k]."""
        self._rows[:, -len(planes) :] = torch.from_numpy(planes)

    def read(self, tokens: int) -> np.ndarray:
        """Packed rows of the last pass, [tokens, 1, layers + P, top_k].

        Raises CaptureError if a router did not report.
        """
        # This runs between two steps of a model, on cold caches, where every call costs
        # microseconds: views of the work space are kept, and one call copies and narrows all.
        views = self._views.get(tokens)
        planes, rows = views or self._make_views(tokens)
        if self._buffer is not None:
            ids = self._buffer[:, :tokens].cpu()
            if int(ids.min()) < 0:
                self._complain(int((ids < 0).flatten(1).any(1).int().argmax()), tokens)
            chosen = list(ids.unbind())
        else:
            chosen = []
            try:
                for kept in self._kept:
                    chosen.append(kept.pop())
            except IndexError:
                self._complain(len(chosen), tokens)
            if any(self._kept):  # reported twice
                self._complain(next(i for i, k in enumerate(self._kept) if k), tokens)
            # what a router reports depends on the number of tokens: looked at when it is new
            if views is None or chosen[0].shape[0] != tokens:
                chosen = [self._cut(i, ids, tokens) for i, ids in enumerate(chosen)]
        try:
            torch._foreach_copy_(planes, chosen)
        except RuntimeError:  # sizes that do not match
            chosen = [self._cut(i, ids, tokens) for i, ids in enumerate(chosen)]
            torch._foreach_copy_(planes, chosen)
        return rows.copy()

    def _cut(self, plane: int, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        if ids.shape[0] < tokens:
            self._complain(plane, tokens)
        return ids[:tokens]

    def _complain(self, plane: int, tokens: int) -> None:
        raise CaptureError(
            f"layer {self.spec.moe_layers[plane]}: the router did not report {tokens} rows, once, "
            "in this forward pass; its kernel bypasses the capture callback"
        )

    def _make_views(self, tokens: int) -> tuple[list[torch.Tensor], np.ndarray]:
        rows = self._rows[:tokens]
        planes = [rows[:, i] for i in range(len(self._kept))]
        views = planes, rows.numpy()[:, None]
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        self._views[tokens] = views
        return views


def _check_router(runner: Any, spec: RouterSpec) -> None:
    router, layer = runner.router, runner.layer_id
    if runner.is_monolithic or not isinstance(router, BaseRouter):
        raise UnsupportedError(
            f"layer {layer}: {type(runner.routed_experts.quant_method).__name__} with "
            f"{type(router).__name__} routes inside its kernel; its choice cannot be read"
        )
    if (router.top_k, router.global_num_experts) != (spec.top_k, spec.num_experts):
        raise UnsupportedError(
            f"layer {layer}: router chooses {router.top_k} of {router.global_num_experts} experts, "
            f"expected {spec.top_k} of {spec.num_experts} from the config"
        )


class WeightVersion:
    """Counts weight updates: the version rises once before the first pass after one.

    An update may come in many pieces and through several functions; whatever touches the weights
    calls `touched`.
    """

    def __init__(self, tap: RouterTap) -> None:
        self._tap = tap
        self.version = 0
        self._touched = False

    def touched(self) -> None:
        self._touched = True

    def set(self, version: int) -> None:
        """The caller's own number for the weights as they are now.

        It may not fall, and not stay while there are new weights; half of the range is left for
        updates to come.
        """
        least = self.version + self._touched
        if isinstance(version, bool) or not isinstance(version, int) or version < least:
            raise CaptureError(
                f"weight version {version!r}, expected an integer from {least} (versions do not "
                "fall, and rise with an update)"
            )
        if version > MAX_WEIGHT_VERSION // 2:
            raise CaptureError(
                f"weight version {version}, expected at most {MAX_WEIGHT_VERSION // 2}"
            )
        self._tap.set_stamp(stamp(version, self._tap.spec))
        self.version, self._touched = version, False

    def settle(self) -> None:
        """Called before each pass."""
        if self._touched:
            self.set(self.version + 1)


class _Capturing:
    """Puts a RouterTap beside the model runner of a vLLM worker."""

    vllm_config: Any
    model_runner: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        model = self.model_runner.get_model()
        spec = RouterSpec.from_hf_config(self.vllm_config.model_config.hf_text_config)
        self._tap = RouterTap(model, spec, self.vllm_config)
        self._weights = WeightVersion(self._tap)
        self._v2 = self.vllm_config.use_v2_model_runner
        # every way to new weights ends here or in one of the methods below
        watch_load_weights(model, self._weights.touched)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self._group, _ = full_attention_group(kv_cache_config)
        self._buffers: tuple[Any, ...] | None = None

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        tokens = run_tokens(self.vllm_config)
        self._tap.clear(tokens)
        run_tokens(self.vllm_config, self.model_runner)
        rows = self._tap.read(tokens)
        ids, _ = unpack(rows, self._tap.spec)
        check_self_test(ids, self._tap.spec)
        return times

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any) -> Any:
        self._step = None
        n = scheduler_output.total_num_scheduled_tokens
        if n:
            self._weights.settle()
            self._tap.clear(n)
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if output is None and n:  # a forward pass was made; sample_tokens follows
            self._step = self._collect(n)
        return output

    def _collect(self, n: int) -> StepRows:
        runner = self.model_runner
        if self._v2:
            batch = runner.execute_model_state.input_batch
            starts = batch.query_start_loc_np[: len(batch.req_ids) + 1]
            positions = batch.positions.cpu().numpy()
            slots = runner.block_tables.slot_mappings[self._group].cpu().numpy()
        else:
            batch = runner.input_batch
            if self._buffers is None:
                table = batch.block_table[self._group]
                self._buffers = runner.positions, table.slot_mapping.gpu
                if runner.positions.device.type == "cpu":  # views of the same memory
                    self._buffers = tuple(b.numpy() for b in self._buffers)
            positions, slots = self._buffers
            if not isinstance(slots, np.ndarray):
                positions, slots = positions.cpu().numpy(), slots.cpu().numpy()
            starts = None
            if batch.num_reqs != n:
                starts = runner.query_start_loc.np[: batch.num_reqs + 1]
        if starts is None:  # one token of each request, as in most steps
            offsets, firsts = range(n + 1), positions[:n].tolist()
        else:
            offsets, firsts = starts.tolist(), positions[starts[:-1]].tolist()
            if offsets[-1] != n:
                raise CaptureError(f"the pass covered {offsets[-1]} tokens, expected {n}")
        return StepRows(
            rows=self._tap.read(n),
            slots=slots[:n].copy(),  # the buffer is written again in the next step
            starts=offsets,
            positions=firsts,
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._step is not None and output is not None:
            self._attach(output)
        return output

    def _attach(self, output: Any) -> None:
        if not isinstance(output, ModelRunnerOutput):  # an asynchronous one
            output = output.model_runner_output if self._v2 else output._model_runner_output
        output.aux_output_connector_output, self._step = self._step, None

    def reload_weights(self, *args: Any, **kwargs: Any) -> Any:
        self._weights.touched()
        return super().reload_weights(*args, **kwargs)  # type: ignore[misc]

    def update_weights(self, *args: Any, **kwargs: Any) -> Any:
        self._weights.touched()
        return super().update_weights(*args, **kwargs)  # type: ignore[misc]

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> Any:
        self._weights.touched()
        return super().finish_weight_update(*args, **kwargs)  # type: ignore[misc]

    def reset_weights(self, *args: Any, **kwargs: Any) -> Any:
        self._weights.touched()
        return super().reset_weights(*args, **kwargs)  # type: ignore[misc]

    def r3_set_weight_version(self, version: int) -> None:
        """For `collective_rpc`: rows of the passes from now on carry this version."""
        self._weights.set(version)

    def r3_weight_version(self) -> int:
        """For `collective_rpc`: the version of the next pass."""
        self._weights.settle()
        return self._weights.version

    def r3_facts(self) -> dict[str, str]:
        """For `collective_rpc`: what only the worker knows of how rows are made."""
        return worker_facts(self.model_runner, self.vllm_config)


class CaptureCPUWorker(_Capturing, CPUWorker):
    """vLLM's CPU worker with a RouterTap."""


class CaptureGPUWorker(_Capturing, Worker):
    """vLLM's GPU worker with a RouterTap."""
