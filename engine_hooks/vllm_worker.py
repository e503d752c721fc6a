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
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from r3.engine_hooks.rows import pack, stamp
from r3.engine_hooks.vllm_facts import worker_facts
from r3.engine_hooks.vllm_groups import full_attention_group
from r3.engine_hooks.vllm_patches import watch_load_weights
from r3.engine_hooks.vllm_scheduler import StepRows
from r3.engine_hooks.vllm_selftest import check_self_test, run_tokens
from r3.errors import CaptureError, UnsupportedError
from r3.spec import RouterSpec


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
        self._dp_rank = config.parallel_config.data_parallel_rank
        dp = config.parallel_config.data_parallel_size > 1
        # Where Python runs in each pass, the tensors themselves are kept. In a compiled model or
        # a CUDA graph only writes to memory that stays in place are replayed.
        self._planes: list[torch.Tensor | None] = [None] * len(runners)
        self._buffer: torch.Tensor | None = None
        device = config.device_config.device_type
        if device != "cpu" or config.compilation_config.mode != CompilationMode.NONE:
            tokens = max(
                config.scheduler_config.max_num_batched_tokens,
                config.compilation_config.max_cudagraph_capture_size or 0,
            )
            # one plane per layer, so that a router writes contiguously
            shape = (len(runners), tokens, spec.top_k)
            self._buffer = torch.full(shape, -1, dtype=torch.int32, device=device)
        for plane, runner in enumerate(runners):
            _check_router(runner, spec)
            keep = self._planes.__setitem__ if self._buffer is None else self._write
            runner.router.set_capture_fn(partial(self._keep_own if dp else keep, plane))

    def _write(self, plane: int, topk_ids: torch.Tensor) -> None:
        assert self._buffer is not None
        self._buffer[plane, : topk_ids.shape[0]] = topk_ids

    def _keep_own(self, plane: int, topk_ids: torch.Tensor) -> None:
        """With data parallelism a router may see the tokens of all ranks, in rank order."""
        metadata = get_forward_context().dp_metadata
        if metadata is not None:
            counts = metadata.num_tokens_across_dp_cpu.tolist()
            own = counts[self._dp_rank]
            if len(topk_ids) == sum(counts) and len(counts) > 1:
                start = sum(counts[: self._dp_rank])
                topk_ids = topk_ids[start : start + own]
            elif len(topk_ids) != own:
                raise CaptureError(
                    f"a router chose for {len(topk_ids)} tokens, expected the {own} of this data-"
                    f"parallel rank or all {sum(counts)}"
                )
        if self._buffer is None:
            self._planes[plane] = topk_ids
        else:
            self._write(plane, topk_ids)

    def clear(self, tokens: int) -> None:
        """Forget the last pass, so that a router that does not call back is noticed."""
        if self._buffer is None:
            self._planes[:] = [None] * len(self._planes)
        else:
            self._buffer[:, :tokens] = -1

    def read(self, tokens: int) -> np.ndarray:
        """Ids [tokens, layers, top_k] of the last pass; raises CaptureError if some are absent."""
        if self._buffer is not None:
            ids = self._buffer[:, :tokens].cpu().numpy()
            silent = np.flatnonzero((ids < 0).any(axis=(1, 2)))
            ids = ids.transpose(1, 0, 2)
        else:
            silent = [i for i, p in enumerate(self._planes) if p is None or len(p) < tokens]
            if not len(silent):
                planes = self._planes
                if len(planes[0]) != tokens:  # type: ignore[arg-type]
                    planes = [p[:tokens] for p in planes]  # type: ignore[index]
                return torch.stack(planes, 1).numpy()  # type: ignore[arg-type]
        if len(silent):
            raise CaptureError(
                f"layer {self.spec.moe_layers[silent[0]]}: the router did not report {tokens} rows "
                "in this forward pass; its kernel bypasses the capture callback"
            )
        return ids


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

    def __init__(self, spec: RouterSpec) -> None:
        self._spec = spec
        self.version = 0
        self.planes = stamp(0, spec)
        self._touched = False

    def touched(self) -> None:
        self._touched = True

    def set(self, version: int) -> None:
        """The caller's own number, not below the current one."""
        if isinstance(version, bool) or not isinstance(version, int) or version < self.version:
            raise CaptureError(
                f"weight version {version!r}, expected an integer from {self.version} "
                "(versions do not fall)"
            )
        self.planes = stamp(version, self._spec)
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
        self._weights = WeightVersion(spec)
        # every way to new weights ends here or in one of the methods below
        watch_load_weights(model, self._weights.touched)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self._group, _ = full_attention_group(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        tokens = run_tokens(self.vllm_config)
        self._tap.clear(tokens)
        run_tokens(self.vllm_config, self.model_runner)
        check_self_test(self._tap.read(tokens), self._tap.spec)
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
        rows = pack(self._tap.read(n), self._weights.planes, self._tap.spec)
        runner = self.model_runner
        if self.vllm_config.use_v2_model_runner:
            batch = runner.execute_model_state.input_batch
            starts = batch.query_start_loc_np[: len(batch.req_ids) + 1]
            positions = batch.positions
            slots = runner.block_tables.slot_mappings[self._group]
        else:
            batch = runner.input_batch
            starts = runner.query_start_loc.np[: batch.num_reqs + 1]
            positions = runner.positions
            slots = batch.block_table[self._group].slot_mapping.gpu
        if starts[-1] != n:
            raise CaptureError(f"the pass covered {starts[-1]} tokens, expected {n}")
        return StepRows(
            rows=rows,
            # copies: the buffers are written again in the next step
            slots=np.array(slots[:n].cpu().numpy(), np.int64),
            starts=starts.tolist(),
            positions=positions[:n].cpu().numpy()[starts[:-1]].tolist(),
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._step is not None and output is not None:
            inner = output
            for name in ("_model_runner_output", "model_runner_output"):  # asynchronous outputs
                inner = getattr(inner, name, inner)
            inner.aux_output_connector_output, self._step = self._step, None
        return output

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
