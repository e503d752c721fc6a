"""The two halves of the demo, each run in a process of its own (r3.cli.isolate).

`sample` is what a rollout worker does, `recompute` what a trainer does; together they are the
shortest complete example of this package.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from r3.batch import RoutingBatch
from r3.errors import ReplayError, UnsupportedError
from r3.identity import Provenance, RolloutId
from r3.monitor import StepMonitor, StepState
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


def microbatches(file: Path) -> tuple[list[RoutingBatch], Provenance]:
    """The rollouts of `file` as the trainer is fed them, and what the engine says of itself."""
    with ShardReader(file) as shard:
        batches = [
            RoutingBatch.from_traces([shard[j] for j in range(i, min(i + _MICROBATCH, len(shard)))])
            for i in range(0, len(shard), _MICROBATCH)
        ]
        return batches, shard[0].provenance


def recompute(report: Report, *, model: Path, file: Path) -> None:
    """Recompute the rollouts of `file`; see `recompute_batches`."""
    batches, engine = microbatches(file)
    recompute_batches(report, model=model, folder=file.parent, batches=batches, engine=engine)


def recompute_batches(
    report: Report,
    *,
    model: Path,
    folder: Path,
    batches: list[RoutingBatch],
    engine: Provenance,
) -> None:
    """Recompute `batches` in float32, without and with replay.

    Writes to `folder` what the trainer did: `native.r3`, its own routing with router margins, and
    `replay.r3`, the routing that its MoE layers used under replay; both with its
    log-probabilities, float32, of the sampled tokens. And `metrics.jsonl`, the line of one training
    step, which names `engine`.
    """
    report("starting Megatron-core", 0, 1)
    import torch
    from transformers import AutoConfig

    from r3.trainer_hooks.layout import view_of
    from r3.trainer_hooks.megatron import MegatronReplay, trainer_provenance
    from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_gpt_model, load_hf_weights
    from r3.trainer_hooks.megatron_cpu.shim import init_single_process
    from r3.trainer_hooks.megatron_recorder import record_routing

    init_single_process()
    gpt = build_gpt_model(AutoConfig.from_pretrained(model))
    load_hf_weights(gpt, model)
    gpt.eval()
    made = trainer_provenance(gpt)

    spec = batches[0].spec
    margins = spec.top_k < spec.num_experts  # else there is no other choice
    alignment = None
    parts: list[dict[str, Any]] = []  # of the training step, one for each microbatch
    with ExitStack() as stack:
        shards = {
            name: stack.enter_context(ShardWriter(folder / f"{name}.r3", spec)) for name in _PASSES
        }
        replay = stack.enter_context(MegatronReplay(gpt))
        stack.enter_context(torch.no_grad())
        stack.enter_context(replay.step())
        for i, batch in enumerate(batches):
            input_ids = _right_padded(batch)
            view = view_of(batch, input_ids=input_ids.numpy())
            sampled = ~np.isnan(batch.logprobs)
            logprobs = {}
            # an independent witness of both passes: what the MoE layers really used
            with record_routing(gpt) as forwards:
                report("recomputing in Megatron-core, native", i, len(batches))
                with replay.record(batch, input_ids=input_ids, margins=margins) as native:
                    logprobs["native"] = _logprobs(gpt, input_ids, batch)
                report("recomputing in Megatron-core, replay", i, len(batches))
                with replay.microbatch(batch, input_ids=input_ids):
                    logprobs["replay"] = _logprobs(gpt, input_ids, batch)
            used = {
                name: _as_used(
                    batch,
                    view.to_tokens(rows, batch.num_tokens),
                    np.where(sampled, logprobs[name], np.float32(np.nan)),
                )
                for name, rows in zip(_PASSES, forwards, strict=True)
            }
            _check_same(native.to_batch(), used["native"])
            for name, own in used.items():
                gaps = native.margins() if margins and name == "native" else None
                for trace in own.to_traces(provenance=made, margins=gaps):
                    shards[name].append(trace)
            version = int(batch.weight_versions.max())
            # what a training step records: log-probabilities of the pass that is trained with
            parts.append(
                {
                    "batch": batch,
                    "trainer_logprobs": used["replay"].logprobs,
                    "native": used["native"],
                    "weight_version": version if version >= 0 else None,  # the engine's
                }
            )
            alignment = alignment or native.alignment()
    parts[-1]["report"] = replay.report()
    state = functools.reduce(operator.add, (StepState.of(**part) for part in parts))
    with StepMonitor(folder / "metrics.jsonl") as monitor:
        monitor.record(0, state, alignment=alignment, engine=engine, trainer=made)


_PASSES = ("native", "replay")


def _as_used(batch: RoutingBatch, used: np.ndarray, logprobs: np.ndarray) -> RoutingBatch:
    """`batch` as the trainer forwarded it: ids [T, MoE layers, top_k] and log-probabilities [T]."""
    valid = np.ones(batch.num_tokens, bool)
    valid[batch.cu_seqlens[1:] - 1] = False
    return dataclasses.replace(
        batch,
        routed_experts=np.where(valid[:, None, None], used, 0).astype(batch.spec.dtype),
        valid=valid,
        logprobs=logprobs,
        # the weights are those of the engine
        weight_versions=np.where(valid, batch.weight_versions.max(), -1),
    )


def _check_same(recorded: RoutingBatch, used: RoutingBatch) -> None:
    """Raise ReplayError if replay recorded another native routing than the MoE layers used."""
    differs = (np.sort(recorded.routed_experts) != used.routed_experts).any(axis=(1, 2))
    differs |= recorded.valid != used.valid
    if differs.any():
        rollout, row = used.locate(int(differs.argmax()))
        raise ReplayError(
            f"rollout {rollout}: row {row}: the recorded native routing is not what the MoE layers "
            f"used, expected the same; {int(differs.sum())} rows are like that"
        )


def _right_padded(batch: RoutingBatch) -> torch.Tensor:
    """input_ids int64 [b, s], one row per sequence."""
    import torch

    sequences = [torch.tensor(x) for x in np.split(batch.token_ids, batch.cu_seqlens[1:-1])]
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).long()


def _logprobs(gpt: Any, input_ids: torch.Tensor, batch: RoutingBatch) -> np.ndarray:
    """The trainer's log-probability of each packed token, float32 [T]; NaN for the first of each
    sequence."""
    from r3.trainer_hooks.megatron_cpu.qwen3_moe import token_logprobs

    values = token_logprobs(gpt, input_ids).numpy()  # [b, s - 1], of tokens 1..s-1
    lengths = np.diff(batch.cu_seqlens)
    first = np.array([np.nan], np.float32)
    return np.concatenate(
        [x for row, n in zip(values, lengths, strict=True) for x in (first, row[: n - 1])]
    )


def _kv_cache_bytes(model: Path) -> int:
    """Room for the demo's rollouts: 64 MiB for the tiny model, 4 GiB for a real one."""
    weights = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    return 64 << 20 if weights < 1 << 30 else 4 << 30
