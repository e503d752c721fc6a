"""Training steps under replay in any layout: what each rank routed, lost and differentiated.

Runs in the processes of `megatron_ranks.run_ranks`, or in the test's own for one rank. Expected
rows are cut here with plain tensor operations and share no code with `trainer_hooks.layout`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_ranks import (
    forward_tokens,
    on_context_rank,
    random_hf_weights,
    router_gradients,
    run_schedule,
    unwrapped,
)
from megatron_tools import FOUR_LAYERS as CONFIG
from megatron_tools import packed_params, random_batch
from r3 import ReplayError, RouterSpec, RoutingBatch
from r3.trainer_hooks import MegatronReplay
from r3.trainer_hooks.megatron_cpu import shim
from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_model_chunks, load_hf_weights

SPEC = RouterSpec(num_experts=8, top_k=2, moe_layers=(0, 2, 3), num_layers=4)
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}


class Layout(NamedTuple):
    """sizes: of `shim.set_parallel`. settings: of the model. kind: padded, left or packed."""

    sizes: dict[str, int]
    settings: dict[str, Any]
    kind: str = "padded"
    ranks: int = 2


LAYOUTS = {
    "none": Layout({}, {}, ranks=1),
    "left": Layout({}, {}, "left", ranks=1),
    "packed": Layout({}, {}, "packed", ranks=1),
    "tp": Layout({"tp": 2}, {}),
    "tp-packed": Layout({"tp": 2}, ALLTOALL, "packed"),
    "tp-left": Layout({"tp": 2}, {}, "left"),
    "ep": Layout({"ep": 2}, {}),
    "ep-alltoall": Layout({"ep": 2}, ALLTOALL),
    "pp": Layout({"pp": 2}, {}),
    "pp-uneven": Layout({"pp": 2}, {"num_layers_in_first_pipeline_stage": 1}),
    "pp-packed": Layout({"pp": 2}, {}, "packed"),
    "vpp": Layout({"pp": 2, "vpp": 2}, {}),
    "cp": Layout({"cp": 2}, {}),
    "cp-packed": Layout({"cp": 2}, {}, "packed"),
    "tp-pp": Layout({"tp": 2, "pp": 2}, ALLTOALL, ranks=4),
    "ep-cp": Layout({"ep": 2, "cp": 2}, ALLTOALL, ranks=4),
    "cp-vpp-packed": Layout({"cp": 2, "pp": 2, "vpp": 2}, {}, "packed", ranks=4),
}


RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "full of 2": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "moe and attention": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe", "core_attn"],
    },
}


def make_microbatches(kind: str, count: int = 4, complete: bool = False) -> list[dict[str, Any]]:
    """Sequences of different lengths with random routing, a tenth of it missing, and padding.

    batch; grid int64 [b, s], the packed token of each slot, -1 for padding; input_ids, labels.
    complete: no routing is missing, not even that of the last tokens.
    """
    return [_microbatch(kind, seed, complete) for seed in range(count)]


def _microbatch(kind: str, seed: int, complete: bool) -> dict[str, Any]:
    lengths = {"packed": [7, 11, 12]}.get(kind, [16, 11])
    batch = random_batch(lengths, SPEC, seed=seed, missing=0 if complete else 0.1)
    if complete:
        routed = batch.routed_experts.copy()
        routed[~batch.valid] = [2, 5]
        batch = dataclasses.replace(
            batch, routed_experts=routed, valid=np.ones(batch.num_tokens, bool)
        )
    places = [torch.arange(a, b) for a, b in itertools.pairwise(batch.cu_seqlens)]
    found: dict[str, Any] = {"batch": batch}
    if kind == "packed":
        ends = [0, 8, 20, 32]
        grid = torch.full((1, 32), -1)
        for start, tokens in zip(ends, places, strict=False):
            grid[0, start : start + len(tokens)] = tokens
        found["cu_seqlens"] = ends
    else:
        grid = torch.full((2, 16), -1)
        for row, tokens in zip(grid, places, strict=True):
            slots = slice(16 - len(tokens), 16) if kind == "left" else slice(0, len(tokens))
            row[slots] = tokens
    if kind == "left":
        found["starts"] = np.array([16 - n for n in lengths])
        hidden = (grid < 0)[:, None, None, :] | torch.ones(16, 16).triu(1).bool()
        found["attention_mask"] = hidden
    tokens = torch.from_numpy(batch.token_ids).long()
    found["grid"] = grid
    found["input_ids"] = torch.where(grid >= 0, tokens[grid], 0)
    generator = torch.Generator().manual_seed(100 + seed)
    found["labels"] = torch.randint(1, 64, grid.shape, generator=generator)
    return found


def masked_loss(output: torch.Tensor, microbatch: Any) -> tuple[torch.Tensor, int]:
    real = on_context_rank(microbatch["grid"], microbatch.get("cu_seqlens")) >= 0
    return (output.float() * real).sum(), int(real.sum())


def local_rows(microbatch: Any) -> torch.Tensor:
    """int64 [rows], the packed token of each of this rank's router rows, -1 for padding"""
    from megatron.core import parallel_state as ps

    grid = on_context_rank(microbatch["grid"], microbatch.get("cu_seqlens"))
    rows = grid.T  # [s, b]
    if ps.get_tensor_model_parallel_world_size() > 1:  # with sequence parallelism, here always
        rows = rows.chunk(ps.get_tensor_model_parallel_world_size())[
            ps.get_tensor_model_parallel_rank()
        ]
    return rows.reshape(-1)


Enter = Callable[[Any, Any], AbstractContextManager[Any]]


def enter_replay(replay: MegatronReplay) -> Enter:
    """Inner pipeline stages are not told the ids."""

    def enter(chunk: Any, microbatch: Any) -> AbstractContextManager[Any]:
        return replay.microbatch(microbatch["batch"], **arguments(chunk, microbatch))

    return enter


def arguments(chunk: Any, microbatch: Any) -> dict[str, Any]:
    ends, ids = microbatch.get("cu_seqlens"), microbatch["input_ids"]
    first = unwrapped(chunk).pre_process
    found: dict[str, Any] = {"input_ids": on_context_rank(ids, ends) if first else None}
    if ends is not None:
        found["packed_seq_params"] = packed_params(ends)
    elif not first:
        found["seq_length"] = ids.shape[1]
    if "starts" in microbatch:
        found["starts"] = microbatch["starts"]
    return found


def enter_native(chunks: Sequence[Any], switching: bool) -> Enter:
    """Megatron's own RouterReplay, told its rows before each forward pass.

    switching: to REPLAY_BACKWARD behind each forward pass, as its users do for recomputation.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    layers = [x.layer_number - 1 for c in chunks for x in c.decoder.layers if _router(x)]

    @contextmanager
    def enter(_chunk: Any, microbatch: Any) -> Iterator[None]:
        batch: RoutingBatch = microbatch["batch"]
        rows = local_rows(microbatch)
        table = torch.from_numpy(batch.routed_experts[rows].astype(np.int64))
        table[rows < 0] = torch.tensor([0, 1])  # its table has no mask
        RouterReplay.set_replay_data([table[:, SPEC.moe_layers.index(i)] for i in layers])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        if switching:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    return enter


def _router(layer: Any) -> Any:
    return getattr(layer.mlp, "router", None)


@contextmanager
def witness(chunks: Sequence[Any]) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Every map that a router hands to its MoE layer, by decoder layer, in the order of calls."""
    found: dict[int, list[torch.Tensor]] = {}
    handles = []
    for chunk in chunks:
        for layer in unwrapped(chunk).decoder.layers:
            if _router(layer) is not None:
                maps = found.setdefault(layer.layer_number - 1, [])
                handles.append(
                    _router(layer).register_forward_hook(
                        lambda _m, _i, output, maps=maps: maps.append(output[1].detach().clone())
                    )
                )
    yield found
    for handle in handles:
        handle.remove()


def matching(maps: Sequence[torch.Tensor], microbatches: Sequence[Any], layer: int) -> Counter[int]:
    """How many of `maps` replay microbatch i in `layer`, by i; -1 for none of them.

    A map replays a microbatch if all its rows with routing go to just the recorded experts and no
    row goes to another number of experts.
    """
    found: Counter[int] = Counter()
    for used in maps:
        which = [i for i, m in enumerate(microbatches) if _replays(used, m, layer)]
        found[which[0] if which else -1] += 1
    return found


def _replays(used: torch.Tensor, microbatch: Any, layer: int) -> bool:
    batch: RoutingBatch = microbatch["batch"]
    rows = local_rows(microbatch).numpy()
    if used.shape != (len(rows), SPEC.num_experts) or not (used.sum(1) == SPEC.top_k).all():
        return False
    replayed = (rows >= 0) & batch.valid[rows]
    expected = batch.routed_experts[rows, SPEC.moe_layers.index(layer)].astype(int)
    recorded = np.zeros(used.shape, bool)
    np.put_along_axis(recorded, expected, True, axis=1)
    return bool((used.numpy()[replayed] == recorded[replayed]).all())


class Outcome(NamedTuple):
    """losses on the last stage; gradients [E, H] by layer; maps: see `matching`, by layer."""

    losses: list[float]
    gradients: dict[int, torch.Tensor]
    maps: dict[int, Counter[int]]
    report: dict[str, Any]


def run_case(layout: str, recompute: str = "none", how: str = "r3", count: int = 4) -> Outcome:
    """One training step. how: "r3" or, with complete routing, "complete" (the same), and Megatron's
    own "native" and "native, switching", see `enter_native`."""
    sizes, settings, kind, _ = LAYOUTS[layout]
    shim.set_parallel(**sizes)
    megatrons = how.startswith("native")
    own = {"moe_enable_routing_replay": True} if megatrons else {}
    if megatrons:
        from megatron.core.transformer.moe.router_replay import RouterReplay

        RouterReplay.clear_global_router_replay_instances()
    chunks = build_model_chunks(CONFIG, **settings, **RECOMPUTE[recompute], **own)
    load_hf_weights(chunks, random_hf_weights(CONFIG))
    microbatches = make_microbatches(kind, count, complete=how != "r3")
    replay = None if megatrons else MegatronReplay(chunks, max_outside_fraction=None)
    enter = enter_replay(replay) if replay else enter_native(chunks, how == "native, switching")

    def forward(chunk: Any, microbatch: Any) -> torch.Tensor:
        with enter(chunk, microbatch):
            return forward_tokens(chunk, microbatch)

    with witness(chunks) as maps, replay.step() if replay else nullcontext():
        losses = run_schedule(chunks, microbatches, forward, loss=masked_loss)
    report = {} if replay is None else replay.report().to_dict()
    if replay:
        replay.detach()
    return Outcome(
        losses,
        router_gradients(chunks),
        {layer: matching(m, microbatches, layer) for layer, m in maps.items()},
        report,
    )


def run_r2(layout: str) -> dict[int, tuple[int, int]]:
    """Record a pass, turn the routers round, replay it: rows by layer, and those replayed wrongly.

    Of each rank's real rows, without the last of a sequence, on which nothing depends.
    """
    sizes, settings, kind, _ = LAYOUTS[layout]
    shim.set_parallel(**sizes)
    chunks = build_model_chunks(CONFIG, **settings)
    load_hf_weights(chunks, random_hf_weights(CONFIG))
    microbatches = make_microbatches(kind)
    own: dict[tuple[int, int], RoutingBatch] = {}
    with MegatronReplay(chunks, max_outside_fraction=None) as replay:

        def record(chunk: Any, m: Any) -> torch.Tensor:
            with replay.record(m["batch"], **arguments(chunk, m)) as native:
                output = forward_tokens(chunk, m)
            own[id(chunk), id(m)] = native.to_batch()
            return output

        def update(chunk: Any, m: Any) -> torch.Tensor:
            with replay.microbatch(own[id(chunk), id(m)], **arguments(chunk, m)):
                return forward_tokens(chunk, m)

        with witness(chunks) as before, replay.step():
            run_schedule(chunks, microbatches, record, loss=masked_loss, forward_only=True)
        with torch.no_grad():
            for chunk in chunks:
                for router in filter(None, map(_router, chunk.decoder.layers)):
                    router.weight.neg_()
        with witness(chunks) as after, replay.step():
            run_schedule(chunks, microbatches, update, loss=masked_loss)
    found = {}
    for layer, maps in before.items():
        rows = wrong = 0
        for m, a, b in zip(microbatches, maps, after[layer], strict=True):
            tokens = local_rows(m).numpy()
            kept = (tokens >= 0) & ~np.isin(tokens, m["batch"].cu_seqlens[1:] - 1)
            rows += int(kept.sum())
            wrong += int((a[kept] != b[kept]).any(1).sum())
        found[layer] = rows, wrong
    return found


def run_out_of_step(layout: str) -> str:
    """What replay says when the last stage is given two microbatches in the other order."""
    from megatron.core import parallel_state as ps

    sizes, settings, kind, _ = LAYOUTS[layout]
    shim.set_parallel(**sizes)
    chunks = build_model_chunks(CONFIG, **settings)
    load_hf_weights(chunks, random_hf_weights(CONFIG))
    fed = make_microbatches(kind)
    told = [fed[i] for i in ((1, 0, 2, 3) if ps.is_pipeline_last_stage() else range(4))]
    order = {id(chunk): iter(told) for chunk in chunks}
    with MegatronReplay(chunks, max_outside_fraction=None) as replay:

        def forward(chunk: Any, m: Any) -> torch.Tensor:
            other = next(order[id(chunk)])
            with replay.microbatch(other["batch"], **arguments(chunk, other)):
                return forward_tokens(chunk, m)

        try:
            with replay.step():
                run_schedule(chunks, fed, forward, loss=masked_loss)
        except ReplayError as e:
            return str(e)
    return "nothing"


Key = tuple[str, str, str]  # layout, recompute, how


def run_cases(rank: int, world_size: int, store: Path, *, keys: list[Key]) -> dict[Key, Any]:
    """What `run_case` finds, or `run_r2` or `run_out_of_step` where that is how."""
    others = {"r2": run_r2, "out of step": run_out_of_step}
    shim.init_ranks(store, rank, world_size)
    found = {}
    for key in keys:
        try:
            found[key] = others[key[2]](key[0]) if key[2] in others else run_case(*key)
        except Exception as e:
            e.add_note(f"in case {key}")
            raise
    return found
