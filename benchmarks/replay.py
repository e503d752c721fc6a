"""What replay costs in Megatron-core on a CPU: in a router, in a whole MoE layer, and beforehand.

Native routing, replay without counting and replay with counting (`count_outside`) take turns, each
call being timed by the clock of the thread's own CPU time, on one thread; ratios are medians over
the rounds of a variant against native routing in the same round. Routers of hidden size 256 and,
as in Qwen3-30B-A3B, 2048, where the projection to logits takes most of the time on a CPU; the MoE
layer has hidden size 256 and experts of 64. All of them in float32, without and with gradients.

Sequences have 256 slots, a tenth of them padding; one row of each has no routing. What is replayed
are the router's own choices, so that the experts have the same work either way.

    python benchmarks/replay.py [--json] [--repeats N]
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import numpy as np
import torch

from r3 import RolloutId, RouterSpec, RoutingBatch, RoutingTrace
from r3.trainer_hooks import MegatronReplay
from r3.trainer_hooks.binding import Limits, bind
from r3.trainer_hooks.layout import check_batch, view_of
from r3.trainer_hooks.megatron_cpu import shim
from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_gpt_model
from r3.trainer_hooks.megatron_microbatch import Microbatch

SLOTS, TOKENS = 256, 230  # of a sequence
VOCAB = 64
BOUND_TOKENS = 30_000
HIDDEN, WIDE = 256, 2048
# whether it counts; None for native routing
VARIANTS = {"native": None, "replay": False, "replay_counters": True}


def make_batch(spec: RouterSpec, ids: np.ndarray) -> tuple[RoutingBatch, torch.Tensor]:
    """A batch with routing `ids` [SLOTS, sequences, layers, top_k], and the tokens that the model
    is fed, [sequences, SLOTS]."""
    rng = np.random.default_rng(0)
    traces = [
        RoutingTrace.build(
            spec=spec,
            token_ids=rng.integers(1, VOCAB, TOKENS),
            routed_experts=ids[: TOKENS - 1, i],
            prompt_len=TOKENS // 4,
            valid=np.arange(TOKENS - 1) != rng.integers(TOKENS - 1),
            rollout_id=RolloutId("benchmark", sample=i),
        )
        for i in range(ids.shape[1])
    ]
    batch = RoutingBatch.from_traces(traces)
    fed = np.zeros((len(traces), SLOTS), np.int64)
    fed[:, :TOKENS] = batch.token_ids.reshape(-1, TOKENS)
    return batch, torch.from_numpy(fed)


def make_model(spec: RouterSpec, hidden: int, expert_hidden: int) -> Any:
    torch.manual_seed(0)
    return build_gpt_model(
        {
            "model_type": "qwen3_moe",
            "vocab_size": VOCAB,
            "hidden_size": hidden,
            "intermediate_size": expert_hidden,
            "moe_intermediate_size": expert_hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": spec.num_experts,
            "num_experts_per_tok": spec.top_k,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": SLOTS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
    )


@contextmanager
def _routing(
    model: Any, batch: RoutingBatch, fed: torch.Tensor, count: bool | None
) -> Iterator[Callable[[], None]]:
    """One of VARIANTS. What it yields makes room for one more forward pass."""
    if count is None:
        yield lambda: None
        return
    with (
        MegatronReplay(model, count_outside=count, max_outside_fraction=None) as replay,
        replay.step(),
        replay.microbatch(batch, input_ids=fed),
    ):
        assert replay.state.current is not None
        yield replay.state.current.called.clear


def _timed(module: Any, x: torch.Tensor) -> float:
    start = time.thread_time_ns()
    output = module(x)
    spent = time.thread_time_ns() - start
    del output  # with the graph
    return spent / 1e6


def forward_times(
    model: Any, module: Any, spec: RouterSpec, sequences: int, grad: bool, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a forward pass of `module` by variant, and their ratios to native."""
    x = torch.randn(SLOTS, sequences, model.config.hidden_size)
    chosen = model.decoder.layers[0].mlp.router(x)[1].nonzero()[:, 1]
    batch, fed = make_batch(spec, chosen.reshape(SLOTS, sequences, 1, spec.top_k).numpy())
    x.requires_grad_(grad)
    spent: dict[str, list[float]] = {name: [] for name in VARIANTS}
    order = list(VARIANTS)
    with torch.set_grad_enabled(grad):
        for _ in range(repeats):
            for name in order:
                with _routing(model, batch, fed, VARIANTS[name]) as again:
                    _timed(module, x)  # what was done in between has cooled the caches
                    again()
                    spent[name].append(_timed(module, x))
            order = order[1:] + order[:1]
    ratios = {
        name: round(
            statistics.median(a / b for a, b in zip(times, spent["native"], strict=True)), 3
        )
        for name, times in spent.items()
        if name != "native"
    }
    return {name: round(statistics.median(times), 3) for name, times in spent.items()}, ratios


def bind_cost(spec: RouterSpec, repeats: int) -> dict[str, Any]:
    """What entering microbatch() takes, and what it then holds, for BOUND_TOKENS in all layers."""
    noise = np.random.default_rng(0).random(
        (SLOTS, len(spec.moe_layers), spec.num_experts), np.float32
    )
    ids = noise.argpartition(spec.top_k - 1, axis=-1)[..., : spec.top_k]
    rolled = [np.roll(ids, i, axis=0) for i in range(-(-BOUND_TOKENS // TOKENS))]
    batch, fed = make_batch(spec, np.stack(rolled, axis=1))
    layers, limits = spec.moe_layers, Limits()
    spent: dict[str, list[float]] = {name: [] for name in ("checks", "view", "tables", "all")}
    for _ in range(repeats):
        times = [time.thread_time_ns()]
        check_batch(batch)
        times.append(time.thread_time_ns())
        view = view_of(batch, input_ids=fed.numpy())
        times.append(time.thread_time_ns())
        binding = bind(batch, view, layers, limits)
        microbatch = Microbatch(
            batch,
            view,
            binding,
            layers,
            input_ids=fed,
            record=False,
            count=True,
        )
        times.append(time.thread_time_ns())
        parts = [(b - a) / 1e6 for a, b in itertools.pairwise(times)]
        for name, ms in zip(spent, [*parts, sum(parts)], strict=True):
            spent[name].append(ms)
    tensors = [v for v in vars(microbatch).values() if isinstance(v, torch.Tensor) and v is not fed]
    size = sum(t.nbytes for t in tensors)
    return {
        "bind_tokens": batch.num_tokens,
        "bind_rows": fed.numel(),
        "bind_ms": {name: round(statistics.median(ms), 1) for name, ms in spent.items()},
        "bound_bytes": size,
        "bound_bytes_per_layer": binding.experts.nbytes // len(layers),
        "view_bytes": view.slots.nbytes + view.index.nbytes,
    }


def measure(rows: int, experts: int, top_k: int, layers: int, repeats: int) -> dict[str, Any]:
    shim.init_single_process()
    result: dict[str, Any] = {
        "rows": rows,
        "experts": experts,
        "top_k": top_k,
        "layers": layers,
        "threads": torch.get_num_threads(),
    }
    spec = RouterSpec(experts, top_k, (0,), 1)
    for hidden in (HIDDEN, WIDE):
        model = make_model(spec, hidden, 64 if hidden == HIDDEN else 8)
        layer = model.decoder.layers[0].mlp
        what = {"router_forward": layer.router, "layer_forward": layer}
        if hidden == WIDE:
            what = {f"router_forward_{WIDE}": layer.router}
        for name, module in what.items():
            times = repeats if module is layer.router else max(repeats // 4, 5)
            for grad in (False, True):
                full = f"{name}_grad" if grad else name
                click.echo(f"{full} ...", err=True)
                found = forward_times(model, module, spec, rows // SLOTS, grad, times)
                result[f"{full}_ms"], result[f"{full}_ratio"] = found
    click.echo("binding ...", err=True)
    bound = RouterSpec(experts, top_k, tuple(range(layers)), layers)
    return result | bind_cost(bound, max(repeats // 20, 5))


def show(result: dict[str, Any]) -> None:
    click.echo(f"{result['rows']} rows, {result['top_k']} of {result['experts']} experts, CPU ms:")
    click.echo("                              native          replay        with counters")
    for name, ms in result.items():
        if "forward" not in name or not name.endswith("_ms"):
            continue
        ratio = result[name.removesuffix("ms") + "ratio"]
        cells = (f"{ms[v]:9.3f} {ratio[v]:6.3f} x" for v in ratio)
        click.echo(f"  {name.removesuffix('_ms'):26s}{ms['native']:9.3f}  " + "  ".join(cells))
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in result["bind_ms"].items() if name != "all")
    click.echo(
        f"entering a microbatch of {result['bind_tokens']} tokens x {result['layers']} layers: "
        f"{result['bind_ms']['all']:.1f} ms ({parts})\n"
        f"it holds {result['bound_bytes']:,} bytes on the device, "
        f"{result['bound_bytes_per_layer']:,} of them per layer, and "
        f"{result['view_bytes']:,} on the host besides the batch"
    )


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--rows", default=2048, show_default=True, help=f"a multiple of {SLOTS}")
@click.option("--experts", default=128, show_default=True)
@click.option("--top-k", default=8, show_default=True)
@click.option("--layers", default=48, show_default=True, help="of the microbatch that is bound")
@click.option("--repeats", default=200, show_default=True)
def main(as_json: bool, rows: int, experts: int, top_k: int, layers: int, repeats: int) -> None:
    if rows < SLOTS or rows % SLOTS:
        raise click.BadParameter(f"{rows}, expected a multiple of {SLOTS}", param_hint="--rows")
    warnings.filterwarnings("ignore", module="megatron")
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result = measure(rows, experts, top_k, layers, repeats)
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
