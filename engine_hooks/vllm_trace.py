"""Turns what vLLM returns into a RoutingTrace.

Works on the rows of our capture (MoE layers only, missing rows -1) and on vLLM's own
(`enable_return_routed_experts`: all decoder layers, dense ones as zeros).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from typing import Any

import numpy as np

from r3.engine_hooks.rows import unpack
from r3.engine_hooks.vllm_facts import mode_name
from r3.errors import CaptureError, RawLogprobsWarning, TraceError
from r3.identity import Provenance, RolloutId
from r3.spec import RouterSpec
from r3.trace import RoutingTrace

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "max_tokens", "n"),
)
_FACTS = "_r3_facts"  # attribute of a VllmConfig: what the engine's workers have said


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
    expected = len(prompt) + len(sampled) - 1
    if len(rows) != expected:
        raise TraceError(
            f"{where}: routed_experts has {len(rows)} rows, expected {expected}, one less than "
            "tokens. With output_kind=DELTA the last output holds only its own tokens: use "
            "FINAL_ONLY or CUMULATIVE; routed_experts_prompt_start leaves rows out"
        )
    return RoutingTrace.build(
        spec=spec,
        token_ids=np.asarray(prompt + sampled, np.int64),
        routed_experts=rows,
        prompt_len=len(prompt),
        logprobs=_sampled_logprobs(result, config, where),
        weight_versions=versions,
        rollout_id=rollout_id,
        provenance=_with_labels(provenance(engine, sampling_params), result),
    )


def provenance(engine: Any, sampling_params: Any = None) -> Provenance:
    """How an engine makes its rows: whatever can explain that a trainer disagrees with them.

    engine: as for `trace_from_output`. Most is read off its VllmConfig. What only its workers
    know (attention backend, MoE kernel, KV-cache type, graphs, device name) an LLM or LLMEngine
    with capture is asked for, once: the first call belongs into the thread that drives the
    engine and waits for it, like any other call to it; the answer stays with its VllmConfig. An
    AsyncLLM must be asked beforehand, see `fetch_facts`. Where nobody was asked, or a dead engine
    did not answer, these fields are empty or those of the settings.
    """
    import vllm
    from vllm import envs

    config = _vllm_config(engine)
    model, parallel, draft = config.model_config, config.parallel_config, config.speculative_config
    backend = config.attention_config.backend
    sizes = {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "data": parallel.data_parallel_size,
        "expert": 1,
        "decode_context": getattr(parallel, "decode_context_parallel_size", 1),
        "prefill_context": getattr(parallel, "prefill_context_parallel_size", 1),
    }
    if parallel.enable_expert_parallel:  # over all ranks that hold experts
        sizes["expert"] = sizes["tensor"] * sizes["data"] * sizes["prefill_context"]
    always = ("tensor", "pipeline", "data", "expert")
    commit = getattr(model.hf_config, "_commit_hash", None)  # of a model from the hub
    fields: dict[str, Any] = {
        "engine": "vllm",
        "engine_version": vllm.__version__,
        "model": str(model.model),
        "model_revision": commit or model.revision or "",
        "dtype": str(model.dtype).removeprefix("torch."),
        "head_dtype": str(getattr(model, "head_dtype", "")).removeprefix("torch."),
        "quantization": model.quantization or "",
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "attention_backend": "" if backend is None else getattr(backend, "name", str(backend)),
        "batch_invariant": getattr(envs, "VLLM_BATCH_INVARIANT", None),
        "device": config.device_config.device_type,
        "logprobs_mode": model.logprobs_mode,
        "parallel": {k: v for k, v in sizes.items() if v != 1 or k in always},
        "sampling": {}
        if sampling_params is None
        else {k: getattr(sampling_params, k) for k in _SAMPLING} | {"engine_seed": model.seed},
    }
    native = config.aux_output_config.enable_return_routed_experts
    extra = {
        "rows": "native" if native else "hook" if is_capturing(config) else "",
        "compilation": mode_name(config.compilation_config.mode),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "speculative": "" if draft is None else str(draft.method),
        "speculative_tokens": 0 if draft is None else draft.num_speculative_tokens,
    }
    for name, value in _facts(engine, config).items():
        (fields if name in Provenance.__dataclass_fields__ else extra)[name] = value
    return Provenance(**fields, extra={k: v for k, v in extra.items() if v or v is False})


def _with_labels(made: Provenance, result: Any) -> Provenance:
    """With vLLM's own weight versions, if the user ever set one, in `extra["weight_versions"]`:
    [label, start, end] for each run of sampled tokens."""
    spans = getattr(result, "weight_versions", None) or []
    if all(span.version == "default" for span in spans):
        return made
    labels = [[span.version, span.start, span.end] for span in spans]
    return dataclasses.replace(made, extra={**made.extra, "weight_versions": labels})


async def fetch_facts(engine: Any) -> dict[str, str]:
    """Ask the workers of an AsyncLLM what only they know, for the provenance of its traces.

    Once after the start is enough: the answer stays with the engine's VllmConfig. Also takes what
    `provenance` takes. Returns the answer, empty for an engine without capture. Raises what the
    engine raises if it is dead.
    """
    config = _vllm_config(engine)
    if engine is not config and not hasattr(config, _FACTS):
        asked = _ask(engine, config)
        answers = await asked if inspect.isawaitable(asked) else asked
        setattr(config, _FACTS, _merged(answers))
    return dict(getattr(config, _FACTS, {}))


def _facts(engine: Any, config: Any) -> dict[str, str]:
    """What the workers have said, asking them if that can be done here."""
    if not hasattr(config, _FACTS):
        if engine is config or inspect.iscoroutinefunction(getattr(engine, "collective_rpc", None)):
            return {}  # nobody to ask here and now: see fetch_facts
        try:
            answers = _ask(engine, config)
        except Exception:  # a dead engine's outputs are still good, and vLLM raises any class
            answers = []
        setattr(config, _FACTS, _merged(answers))
    return getattr(config, _FACTS)


def _ask(engine: Any, config: Any) -> Any:
    """One answer per worker, or an awaitable of them; none where no worker of ours runs."""
    if not is_capturing(config) or not hasattr(engine, "collective_rpc"):
        return []
    # no timeout: vLLM would take an answer that comes too late for that of its next call
    return engine.collective_rpc("r3_facts")


def _merged(answers: list[dict[str, str]]) -> dict[str, str]:
    names = dict.fromkeys(name for answer in answers for name in answer)
    values = {name: {a[name] for a in answers if name in a} for name in names}
    return {name: ", ".join(sorted(found)) for name, found in values.items()}


def is_capturing(config: Any) -> bool:
    """Whether the workers are those of this package (see vllm_plugin)."""
    return str(config.parallel_config.worker_cls).startswith("r3.engine_hooks.")


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
