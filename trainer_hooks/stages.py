"""Which decoder layers a pipeline rank of a trainer owns, so that it loads the routing of no other.

Pure Python; follows Megatron-core, which cuts a model into pp_size * vpp_size chunks of consecutive
layers and deals them to the ranks in turn: chunk vp_stage * pp_size + pp_rank is virtual stage
vp_stage of rank pp_rank. A chunk's layers are counted over all decoder layers, its routers over the
MoE layers among these. Layers for multi-token prediction (MTP) are none of the decoder layers, and
have no recorded routing.

    counts = layer_counts(48, pp_size=4, vpp_size=2)
    batch = load_batch(path, layers=stage_moe_layers(spec, counts, pp_size=4, pp_rank=1))
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from r3.errors import ReplayError
from r3.spec import RouterSpec


def layer_counts(
    num_layers: int,
    pp_size: int,
    vpp_size: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
) -> tuple[int, ...]:
    """The number of decoder layers of each model chunk, in the order of the model.

    first, last: layers of the whole first and last pipeline rank, if these have others than the
    rest (num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage). embedding, loss:
    these count as a layer (account_for_embedding_in_pipeline_split,
    account_for_loss_in_pipeline_split). With a pipeline_model_parallel_layout the counts are the
    numbers of its decoder layers; this function is not needed.

    Raises ReplayError, naming found and expected, where Megatron-core refuses the split.
    """
    sizes = {"num_layers": num_layers, "pp_size": pp_size, "vpp_size": vpp_size}
    ends = {name: n for name, n in (("first", first), ("last", last)) if n is not None}
    for name, size in (sizes | ends).items():
        _check_int(name, size, 1, None)
    if vpp_size > 1 and pp_size == 1:
        raise ReplayError(f"vpp_size is {vpp_size} with pp_size=1, expected 1")
    if ends and (embedding or loss):
        raise ReplayError(
            f"{' and '.join(ends)} given with embedding={embedding} and loss={loss}, expected "
            "either kind of uneven split"
        )
    ranks = pp_size - len(ends)
    layers = num_layers - sum(ends.values()) + bool(embedding) + bool(loss)
    # no layers for no ranks, else as many for each as the chunks need
    if ranks < 0 or layers < 0 or (layers == 0) != (ranks == 0) or (ranks and layers % ranks):
        raise ReplayError(
            f"{layers} layers for {ranks} pipeline ranks, of {num_layers=} and {pp_size=} with "
            f"{first=}, {last=}, {embedding=}, {loss=}, expected the same number for each rank"
        )
    per_rank = [layers // ranks if ranks else 0] * pp_size
    if first is not None:
        per_rank[0] = first
    if last is not None:
        per_rank[-1] = last
    for rank, count in enumerate(per_rank):
        if count % vpp_size:
            raise ReplayError(
                f"{count} layers in pipeline rank {rank}, expected a multiple of {vpp_size=}"
            )
    counts = [count // vpp_size for count in per_rank] * vpp_size
    counts[0] -= bool(embedding)
    counts[-1] -= bool(loss)
    return tuple(counts)


def stage_layers(
    counts: Sequence[int], pp_size: int, pp_rank: int, vp_stage: int | None = None
) -> tuple[int, ...]:
    """The 0-based decoder layers of a pipeline rank, ascending.

    counts: decoder layers of each model chunk, as of `layer_counts`. vp_stage: one virtual stage
    only; None: all of the rank. Raises ReplayError for what is not within the counts.
    """
    return tuple(chain(*_chunks(counts, pp_size, pp_rank, vp_stage)))


def stage_moe_layers(
    spec: RouterSpec,
    counts: Sequence[int],
    pp_size: int,
    pp_rank: int,
    vp_stage: int | None = None,
) -> tuple[int, ...]:
    """Those of `stage_layers` that have a router; can be none.

    Raises ReplayError as `stage_layers`, and for counts of another number of layers than the
    model's.
    """
    chunks = _chunks(counts, pp_size, pp_rank, vp_stage)
    if sum(counts) != spec.num_layers:
        raise ReplayError(
            f"counts are of {sum(counts)} decoder layers, expected the {spec.num_layers} of the "
            "routing's model; layers for multi-token prediction do not count"
        )
    return tuple(layer for layer in spec.moe_layers if any(layer in chunk for chunk in chunks))


def _chunks(counts: Sequence[int], pp_size: int, pp_rank: int, vp_stage: int | None) -> list[range]:
    """The layers of the chunks that `stage_layers` asks for, in the order of the model"""
    _check_int("pp_size", pp_size, 1, None)
    _check_int("pp_rank", pp_rank, 0, pp_size - 1)
    for i, count in enumerate(counts):
        _check_int(f"counts[{i}]", count, 0, None)
    if not len(counts) or len(counts) % pp_size:
        raise ReplayError(
            f"counts has {len(counts)} model chunks, expected a multiple of {pp_size=}"
        )
    vpp_size = len(counts) // pp_size
    if vp_stage is not None:
        _check_int("vp_stage", vp_stage, 0, vpp_size - 1)
    chunks = []
    for stage in range(vpp_size) if vp_stage is None else [vp_stage]:
        chunk = stage * pp_size + pp_rank
        offset = sum(counts[:chunk])
        chunks.append(range(offset, offset + counts[chunk]))
    return chunks


def _check_int(name: str, value: int, least: int, most: int | None) -> None:
    expected = f"an integer of at least {least}" if most is None else f"{least}..{most}"
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_int or value < least or (most is not None and value > most):
        raise ReplayError(f"{name} is {value!r}, expected {expected}")
