"""Turns what vLLM returns into a RoutingTrace.

Works on the rows of our capture (MoE layers only, missing rows -1) and on vLLM's own
(`enable_return_routed_experts`: all decoder layers, dense ones as zeros).
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from r3.engine_hooks.rows import unpack
from r3.errors import CaptureError, RawLogprobsWarning
from r3.identity import Provenance, RolloutId
from r3.spec import RouterSpec
from r3.trace import RoutingTrace

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "max_tokens", "n"),
)


def trace_from_output(
    output: Any,
    engine: Any,
    *,
    sampling_params: Any = None,
    rollout_id: RolloutId | None = None,
    completion: int = 0,
) -> RoutingTrace:
    """One finished completion of a vLLM RequestOutput as a RoutingTrace.

    engine: the LLM, AsyncLLM or LLMEngine that made it, or its VllmConfig.
    sampling_params: what it was sampled with, for the provenance.
    completion: `CompletionOutput.index` of the one to take, for n > 1.

    Log-probabilities are taken when the request asked for them (`SamplingParams(logprobs=0)`).
    They are those really sampled from only with `logprobs_mode="processed_logprobs"`; otherwise
    a RawLogprobsWarning is given and the provenance says so.

    Raises CaptureError if the rows, the prompt or the log-probabilities are absent, TraceError
    if the rows are impossible.
    """
    config = _vllm_config(engine)
    rollout_id = rollout_id or RolloutId.unique()
    where = f"rollout {rollout_id} (request {output.request_id})"
    result = next((c for c in output.outputs if c.index == completion), None)
    if result is None:
        raise CaptureError(
            f"{where}: completion {completion} asked for, found {[c.index for c in output.outputs]}"
        )
    if result.finish_reason is None:
        raise CaptureError(f"{where}: the request has not finished; rows come with its last output")
    if output.prompt_token_ids is None:
        raise CaptureError(f"{where}: the prompt was given as embeddings and has no token ids")
    prompt, sampled = list(output.prompt_token_ids), list(result.token_ids)
    rows = result.routed_experts
    spec = RouterSpec.from_hf_config(config.model_config.hf_text_config)
    if rows is None:
        if len(prompt) + len(sampled) > 1:
            raise CaptureError(
                f"{where}: the engine returned no routed_experts (finish reason "
                f"{result.finish_reason!r}). Is capture on? "
                'additional_config={"r3": {"capture": true}}; does VLLM_PLUGINS, if set, name r3; '
                "was the request aborted before its first token?"
            )
        rows = np.zeros((0, len(spec.moe_layers), spec.top_k), spec.dtype)
    versions = None
    if rows.ndim == 4:  # our hook's; vLLM's own have three axes and no versions
        rows, versions = unpack(rows, spec)
    return RoutingTrace.build(
        spec=spec,
        token_ids=np.asarray(prompt + sampled, np.int64),
        routed_experts=rows,
        prompt_len=len(prompt),
        logprobs=_sampled_logprobs(result, config, where),
        weight_versions=versions,
        rollout_id=rollout_id,
        provenance=provenance(config, sampling_params),
    )


def provenance(engine: Any, sampling_params: Any = None) -> Provenance:
    """What a VllmConfig (or the engine that holds one) says about how its rows were made."""
    import vllm

    config = _vllm_config(engine)
    model, parallel = config.model_config, config.parallel_config
    backend = config.attention_config.backend
    return Provenance(
        engine="vllm",
        engine_version=vllm.__version__,
        model=str(model.model),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization or "",
        kv_cache_dtype=str(config.cache_config.cache_dtype),
        attention_backend="" if backend is None else getattr(backend, "name", str(backend)),
        device=config.device_config.device_type,
        logprobs_mode=model.logprobs_mode,
        parallel={
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "data": parallel.data_parallel_size,
        },
        sampling={}
        if sampling_params is None
        else {k: getattr(sampling_params, k) for k in _SAMPLING} | {"engine_seed": model.seed},
    )


def _vllm_config(engine: Any) -> Any:
    engine = getattr(engine, "llm_engine", engine)
    config = getattr(engine, "vllm_config", engine)
    if not hasattr(config, "model_config"):
        raise CaptureError(
            f"{type(engine).__name__} is neither a vLLM engine nor a VllmConfig: it has no "
            "vllm_config"
        )
    return config


def _sampled_logprobs(result: Any, config: Any, where: str) -> np.ndarray | None:
    """float32 [sampled tokens], or None if the request did not ask for log-probabilities."""
    if result.logprobs is None:
        return None
    mode = config.model_config.logprobs_mode
    if not mode.endswith("logprobs"):
        raise CaptureError(
            f"{where}: logprobs_mode is {mode!r}, which returns logits; expected "
            "'processed_logprobs'"
        )
    if mode != "processed_logprobs":
        warnings.warn(
            f"logprobs_mode is {mode!r}: these are the model's log-probabilities before "
            "temperature, top-p and penalties, not those the tokens were sampled from. Start "
            "vLLM with logprobs_mode='processed_logprobs'.",
            RawLogprobsWarning,
            stacklevel=3,
        )
    if len(result.logprobs) != len(result.token_ids):
        raise CaptureError(
            f"{where}: {len(result.logprobs)} log-probabilities for {len(result.token_ids)} tokens"
        )
    values = np.empty(len(result.token_ids), np.float32)
    for i, (token, choices) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        if token not in choices or not math.isfinite(choices[token].logprob):
            raise CaptureError(
                f"{where}: sampled token {i} (id {token}) has no finite log-probability"
            )
        values[i] = choices[token].logprob
    return values
