"""vLLM's own capture (Model Runner V2), taken only after a self-test has seen it work.

Imported only in a vLLM worker process (`worker_cls` names the classes below).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from r3.engine_hooks.vllm_facts import worker_facts
from r3.engine_hooks.vllm_selftest import check_self_test, run_tokens
from r3.spec import RouterSpec


class _SelfTested:
    vllm_config: Any
    model_runner: Any

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        spec = RouterSpec.from_hf_config(self.vllm_config.model_config.hf_text_config)
        # int32 [tokens, decoder layers, top_k]; every routed layer writes its plane in each pass
        buffer = self.model_runner.aux_output_connector._capturer.device_buffer
        tokens = run_tokens(self.vllm_config)
        buffer[:tokens] = -1
        run_tokens(self.vllm_config, self.model_runner)
        ids = buffer[:tokens].cpu().numpy()
        check_self_test(ids[:, list(spec.moe_layers)], spec)
        buffer[:tokens] = 0  # as vLLM made it: nothing else writes the planes of dense layers
        return times

    def r3_facts(self) -> dict[str, str]:
        """For `collective_rpc`: what only the worker knows of how rows are made."""
        return worker_facts(self.model_runner, self.vllm_config)


class NativeCPUWorker(_SelfTested, CPUWorker):
    """vLLM's CPU worker; its native rows are tried before they are trusted."""


class NativeGPUWorker(_SelfTested, Worker):
    """vLLM's GPU worker; its native rows are tried before they are trusted."""
