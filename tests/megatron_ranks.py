"""Several Megatron-core ranks on one machine: processes, layouts, schedules, gradients.

Starting a process imports torch and Megatron (seconds), so one set of processes runs many cases,
changing the layout in between with `shim.set_parallel`. Shape legend: b sequences, s slots of all
context-parallel ranks together, E experts, H hidden size.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from r3.trainer_hooks.megatron_cpu import shim

TIMEOUT = 300  # seconds for all that a set of processes does

# ------------------------------------------------------------------------------------ processes


def run_ranks(world_size: int, function: Callable[..., Any], /, **kwargs: Any) -> list[Any]:
    """Call `function(rank, world_size, store, **kwargs)` in processes of their own, one per rank.

    function: of an importable module; it calls `shim.init_ranks(store, rank, world_size, ...)`.
    Returns the (picklable) results by rank. A rank that raises or dies fails the test at once with
    its traceback, and so does a timeout; no process is left behind.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: dict[Any, int] = {}  # of Connections
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="r3-ranks-") as folder:
        store = Path(folder) / "store"
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                args = (function, rank, world_size, store, kwargs, theirs)
                process = context.Process(target=_rank, args=args)
                process.start()
                theirs.close()
                processes.append(process)
                pipes[ours] = rank
            end = time.monotonic() + TIMEOUT
            while pipes:
                ready: list[Any] = wait(list(pipes), max(0.0, end - time.monotonic()))
                if not ready:
                    pytest.fail(f"ranks {sorted(pipes.values())} did nothing for {TIMEOUT} s")
                errors = []
                for pipe in ready:
                    rank = pipes.pop(pipe)
                    try:
                        ok, value = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        ok, value = False, "ended without a word"
                    if ok:
                        results[rank] = value
                    else:
                        errors.append(f"rank {rank} of {world_size}: {value}")
                if errors:
                    pytest.fail("\n".join(errors), pytrace=False)
        finally:
            for process in processes:
                if len(results) < world_size:
                    process.kill()
                process.join()
    return [results[rank] for rank in range(world_size)]


def _rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: Path,
    kwargs: dict[str, Any],
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    try:
        # plain pickle: torch's own for processes leaves tensors in the memory of this one
        result = pickle.dumps((True, function(rank, world_size, store, **kwargs)))
    except BaseException:
        result = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(result)


# ---------------------------------------------------------------------------------------- model


def random_hf_weights(
    hf_config: Mapping[str, Any], seed: int = 0, scale: float = 0.3
) -> dict[str, torch.Tensor]:
    """A whole Hugging Face Qwen3-MoE checkpoint, float32, the same in every process.

    scale: standard deviation of the matrices; large, so that routing depends on the token.
    """
    c = hf_config
    width, size = c["hidden_size"], c["head_dim"]
    heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], width)}

    def add_mlp(prefix: str, inner: int) -> None:
        shapes[f"{prefix}gate_proj.weight"] = shapes[f"{prefix}up_proj.weight"] = (inner, width)
        shapes[f"{prefix}down_proj.weight"] = (width, inner)

    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (width,)
        shapes[layer + "post_attention_layernorm.weight"] = (width,)
        for name, count in (("q", heads), ("k", groups), ("v", groups)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (count * size, width)
        shapes[layer + "self_attn.o_proj.weight"] = (width, heads * size)
        for name in ("q", "k"):
            shapes[f"{layer}self_attn.{name}_norm.weight"] = (size,)
        if i in c.get("mlp_only_layers", []):
            add_mlp(layer + "mlp.", c["intermediate_size"])
            continue
        shapes[layer + "mlp.gate.weight"] = (c["num_experts"], width)
        for e in range(c["num_experts"]):
            add_mlp(f"{layer}mlp.experts.{e}.", c["moe_intermediate_size"])
    shapes["model.norm.weight"] = (width,)
    if not c.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (c["vocab_size"], width)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(shape, generator=generator)
        if len(shape) > 1
        else 0.5 + torch.rand(shape, generator=generator)
        for name, shape in shapes.items()
    }


def unwrapped(module: Any) -> Any:
    """The GPTModel inside wrappers of Megatron"""
    while hasattr(module, "module"):
        module = module.module
    return module


# ------------------------------------------------------------------------------------- schedule

Microbatch = Mapping[str, Any]
Loss = Callable[[torch.Tensor, Any], tuple[torch.Tensor, int]]


def on_context_rank(tensor: torch.Tensor, ends: Sequence[int] | None = None) -> torch.Tensor:
    """This context-parallel rank's share of [b, s], along the last dim.

    ends: where packed sequences start and end, [0, ..., s]; each is cut for itself.
    """
    from megatron.core import parallel_state as ps

    cp, rank = ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()
    ends = [0, tensor.shape[-1]] if ends is None else ends
    lengths = [ends[i + 1] - ends[i] for i in range(len(ends) - 1)]
    parts: list[torch.Tensor] = []
    for sequence in tensor.split(lengths, dim=-1):
        chunks = sequence.chunk(2 * cp, dim=-1) if cp > 1 else [sequence]
        parts += [chunks[rank], chunks[2 * cp - 1 - rank]] if cp > 1 else chunks
    return torch.cat(parts, dim=-1)


def forward_tokens(chunk: Any, microbatch: Microbatch) -> torch.Tensor:
    """What a chunk makes of a microbatch: loss per token [b, s / cp], or hidden states.

    microbatch: input_ids and labels, int64 [b, s] of all context-parallel ranks. It may have
    cu_seqlens (ints from 0 to s, for packed input [1, s]), cu_seqlens_padded (where sequences
    padded each for itself start and end; cu_seqlens then counts their tokens only) and
    attention_mask (bool [b, 1, s, s], true where hidden).
    """
    ids, ends = microbatch["input_ids"], microbatch.get("cu_seqlens")
    b, s = ids.shape
    params = None
    if ends is not None:
        from megatron.core.packed_seq_params import PackedSeqParams

        cu = torch.tensor(ends, dtype=torch.int32)
        ends = microbatch.get("cu_seqlens_padded", ends)
        padded = torch.tensor(ends, dtype=torch.int32)
        longest = int(padded.diff().max())
        params = PackedSeqParams(
            "thd",
            cu,
            cu,
            padded if "cu_seqlens_padded" in microbatch else None,
            padded if "cu_seqlens_padded" in microbatch else None,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    mask = microbatch.get("attention_mask")
    if mask is not None:  # queries are shared out, and all keys are there
        mask = on_context_rank(mask.transpose(2, 3)).transpose(2, 3)
    places = torch.arange(s).expand(b, s)
    local = [on_context_rank(x, ends) for x in (ids, places, microbatch["labels"])]
    return chunk(local[0], local[1], mask, labels=local[2], packed_seq_params=params)


def summed_loss(output: torch.Tensor, _microbatch: Any) -> tuple[torch.Tensor, int]:
    """Of every token on this rank"""
    return output.float().sum(), output.numel()


def run_schedule(
    chunks: Sequence[Any],
    microbatches: Sequence[Any],
    forward: Callable[[Any, Any], torch.Tensor] = forward_tokens,
    *,
    loss: Loss = summed_loss,
    forward_only: bool = False,
    shape: tuple[int, int] | None = None,
) -> list[float]:
    """Megatron's own forward and backward schedule of the current layout; leaves gradients.

    forward(chunk, microbatch) returns the chunk's output. loss(output, microbatch) returns the sum
    of the losses and the number of tokens, both of this rank; they become the mean over all context
    ranks. shape: (b, s) of every microbatch, by default that of its "input_ids". Returns the loss
    of each microbatch on the last pipeline stage and [] on others.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    b, s = shape or microbatches[0]["input_ids"].shape
    group = ps.get_context_parallel_group()

    def step(iterator: Any, chunk: Any) -> Any:
        microbatch = next(iterator)
        output = forward(chunk, microbatch)

        def mean(output: torch.Tensor) -> Any:
            total, count = loss(output, microbatch)
            everywhere = torch.stack([total.detach(), torch.tensor(float(count))])
            dist.all_reduce(everywhere, group=group)
            return total / everywhere[1], {"loss": float(everywhere[0] / everywhere[1])}

        return output, mean

    iterators = [iter(microbatches) for _ in chunks]
    single = len(chunks) == 1
    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators[0] if single else iterators,
        model=chunks[0] if single else list(chunks),
        num_microbatches=len(microbatches),
        seq_length=s,
        micro_batch_size=b,
        forward_only=forward_only,
    )
    return [x["loss"] for x in found]


def router_gradients(chunks: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Router gradients after `run_schedule`, [E, H] by 0-based decoder layer, as of one rank.

    As Megatron reduces them: ranks of sequence parallelism saw different tokens for the same loss,
    those of data and context parallelism have losses to be averaged (the schedule multiplies the
    loss by the number of context ranks). Expert-parallel ranks are data-parallel ones to a router.
    Under `wrap` Megatron has reduced them itself, unless for a distributed optimizer: into shards.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    found = {}
    data = ps.get_data_parallel_group(with_context_parallel=True)
    for chunk in chunks:
        for layer in unwrapped(chunk).decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is None:
                continue
            if hasattr(router.weight, "main_grad"):
                found[layer.layer_number - 1] = router.weight.main_grad.clone()
                continue
            gradient = router.weight.grad.clone()
            if router.config.sequence_parallel:
                dist.all_reduce(gradient, group=ps.get_tensor_model_parallel_group())
            dist.all_reduce(gradient, group=data)
            found[layer.layer_number - 1] = gradient / data.size()
    return found


# ------------------------------------------------------------------------------------- wrappers


def wrap(
    chunks: Sequence[Any], *, distributed_optimizer: bool = False, **settings: Any
) -> tuple[list[Any], Any]:
    """Chunks as Megatron trains them, and their Adam, the distributed one if so wished.

    Each is put into a DistributedDataParallel (settings: its config) and, if of bfloat16, into a
    Float16Module. An optimizer, unlike the rest, is made and used inside `optimizer_on_cpu()`.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config = chunks[0].config
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer, **settings)
    half = [Float16Module(config, c) for c in chunks] if config.bf16 else chunks
    wrapped = [DistributedDataParallel(config, ddp, c) for c in half]
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed_optimizer,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    return wrapped, optimizer


@contextmanager
def optimizer_on_cpu() -> Iterator[None]:
    """Lets Megatron's optimizers find what they ask for: buffers on "cuda", and CUDA's names of
    the parameters' types."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer

    original = torch.Tensor.type

    def cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    with pytest.MonkeyPatch.context() as patch:
        for module in (utils, clip_grads, optimizer):
            patch.setattr(module, "torch", shim.TorchOnCpu())
        patch.setattr(torch.Tensor, "type", cuda_type)
        yield
