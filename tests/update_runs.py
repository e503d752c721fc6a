"""What the tests of weight updates and KV transfer do inside vLLM, each in a process of its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import engine_runs

PROMPTS, PROMPT, SAMPLED = 6, 70, 20
BLOCK = 32


def _llm(model: Path, **settings: Any) -> Any:
    defaults = {
        "max_num_batched_tokens": 256,
        "block_size": BLOCK,
        "kv_cache_memory_bytes": 8 << 20,
    }
    return engine_runs._llm(model, **(defaults | settings))


def _tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(4, 512) for _ in range(n)]


def _traces(llm: Any, prompts: list[list[int]], sampled: int = SAMPLED) -> list[Any]:
    from vllm import SamplingParams

    from r3.engine_hooks.vllm_trace import trace_from_output

    sampling = SamplingParams(max_tokens=sampled, temperature=1.0, ignore_eos=True)
    requests = [{"prompt_token_ids": p} for p in prompts]
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    return [trace_from_output(o, llm, sampling_params=sampling) for o in outputs]


def updates(
    report: Any, *, model: Path, embeddings: Path, mutate: str | None = None
) -> dict[str, Any]:
    """In-place updates of the embedding table, one in two pieces, with and without a cache reset.

    embeddings: safetensors file with the new `model.embed_tokens.weight`.
    """
    from safetensors.torch import load_file

    if mutate == "version not raised":
        from r3.engine_hooks.vllm_worker import WeightVersion

        WeightVersion.touched = lambda self: None  # type: ignore[method-assign]
    llm = _llm(model)
    rng = random.Random(5)
    prompts = [_tokens(rng, PROMPT) for _ in range(PROMPTS)]
    found: dict[str, Any] = {"before": _traces(llm, prompts)}

    def load(worker: Any) -> int:
        new = load_file(embeddings)
        for _ in range(2):  # two calls without a pass between them are one update
            worker.model_runner.model.load_weights(new.items())
        return worker.r3_weight_version()

    found["version"] = llm.collective_rpc(load)
    longer = [p + _tokens(rng, 5) for p in prompts]
    found["mixed"] = _traces(llm, longer)  # their first two blocks are still in the cache
    assert llm.reset_prefix_cache()
    found["after"] = _traces(llm, longer)
    llm.collective_rpc("r3_set_weight_version", args=(40,))
    found["set"] = _traces(llm, prompts[:1])

    def attempt(name: str, version: Any) -> None:
        try:
            llm.collective_rpc("r3_set_weight_version", args=(version,))
            found[name] = "accepted"
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"

    attempt("same weights, same number", 40)
    attempt("fallen", 39)
    attempt("no number", "41")
    attempt("too high", 2**32 - 2)
    llm.collective_rpc(lambda worker: worker.model_runner.model.load_weights([]) and None)
    attempt("new weights, same number", 40)
    return found


def reloads(report: Any, *, model: Path, multiprocessing: str) -> list[int]:
    """Weight versions seen by rows around vLLM's own functions for new weights."""
    llm = _llm(model, multiprocessing=multiprocessing)
    prompt = [_tokens(random.Random(1), 9)]
    seen = []
    for name, kwargs in (
        (None, {}),
        ("reload_weights", {"weights_path": str(model)}),
        ("reload_weights", {}),
        (None, {}),
    ):
        if name:
            llm.collective_rpc(name, kwargs=kwargs)
        (trace,) = _traces(llm, prompt, 4)
        (version,) = set(trace.weight_versions.tolist())
        seen.append(version)
    return seen


def transfer(
    report: Any, *, model: Path, folder: Path, role: str, mutate: str | None = None
) -> list[Any]:
    """One half of disaggregated serving: KV blocks of the prompts go through files in `folder`.

    role "prefill" samples one token of each prompt and leaves the KV there; "decode" loads it
    and goes on, in an engine whose KV slots have been used by other requests before.
    """
    if mutate == "slots not invalidated":
        from r3.engine_hooks.rows import SlotStore

        original = SlotStore.next_pass
        SlotStore.next_pass = lambda self, given_out, copies: original(self, (), copies)  # type: ignore
    rng = random.Random(5)
    prompts = [_tokens(rng, PROMPT + 10 * i) for i in range(PROMPTS)]
    transfer_config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    # the connector of the example saves prompts that fit into one pass
    llm = _llm(model, kv_transfer_config=transfer_config, max_num_batched_tokens=1024)
    if role == "prefill":
        return _traces(llm, prompts, 1)
    # prompts shorter than a block leave nothing in the folder; what they sample fills the slots
    for _ in range(4):
        _traces(llm, [_tokens(rng, 20) for _ in range(16)], 150)
    return _traces(llm, prompts)
