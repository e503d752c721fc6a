"""Which layers a pipeline rank owns: against dealing them out in lists, and against Megatron."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from r3 import ReplayError, RouterSpec
from r3.trainer_hooks.stages import layer_counts, stage_layers, stage_moe_layers


def spec_of(freq: list[int]) -> RouterSpec:
    """A router in every layer with a 1, as Megatron's moe_layer_freq says it"""
    layers = tuple(i for i, moe in enumerate(freq) if moe)
    return RouterSpec(num_experts=8, top_k=2, moe_layers=layers, num_layers=len(freq))


def splits() -> Iterator[dict[str, Any]]:
    """All splits of up to 12 layers, the impossible ones too"""
    sizes = itertools.product(range(1, 13), range(1, 5), range(1, 4))
    for num_layers, pp_size, vpp_size in sizes:
        split = {"num_layers": num_layers, "pp_size": pp_size, "vpp_size": vpp_size}
        for embedding, loss in itertools.product((False, True), repeat=2):
            yield split | {"embedding": embedding, "loss": loss}
        for first, last in itertools.product((None, 1, 2, 3, 4, 6), repeat=2):
            if first or last:
                yield split | {"first": first, "last": last}


def dealt(
    num_layers: int,
    pp_size: int,
    vpp_size: int = 1,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
) -> list[list[list[int]]] | None:
    """Brute force: the layers of [pp_rank][vp_stage], by trying sizes of chunks; None if none fit

    Chunks of one rank are equal, the middle ranks are equal, and embedding and loss are layers.
    """
    layers: list[Any] = ["embedding"] * embedding + [*range(num_layers)] + ["loss"] * loss
    for size in range(1, len(layers) + 1):
        sizes = [[size] * pp_size]
        if first is not None:
            sizes[0][0] = first // vpp_size
        if last is not None:
            sizes[0][-1] = last // vpp_size
        fits = sum(sizes[0]) * vpp_size == len(layers)
        whole = (first or 0) % vpp_size == 0 == (last or 0) % vpp_size
        one_rank = pp_size == 1 and (vpp_size > 1 or (first is not None and last is not None))
        if not fits or not whole or one_rank:
            continue
        rest = iter(layers)
        ranks: list[list[list[int]]] = [[] for _ in range(pp_size)]
        for _ in range(vpp_size):
            for rank in range(pp_size):
                chunk = [next(rest) for _ in range(sizes[0][rank])]
                ranks[rank].append([x for x in chunk if isinstance(x, int)])
        return ranks
    return None


def test_all_small_splits() -> None:
    possible = 0
    for split in splits():
        ranks = dealt(**split)
        if ranks is None:
            with pytest.raises(ReplayError, match="expected"):
                layer_counts(**split)
            continue
        possible += 1
        counts, pp_size = layer_counts(**split), split["pp_size"]
        assert sum(counts) == split["num_layers"]
        spec = spec_of([i % 3 != 1 for i in range(split["num_layers"])])
        for rank, chunks in enumerate(ranks):
            whole = [layer for chunk in chunks for layer in chunk]
            assert list(stage_layers(counts, pp_size, rank)) == whole == sorted(whole)
            moe = tuple(layer for layer in whole if layer in spec.moe_layers)
            assert stage_moe_layers(spec, counts, pp_size, rank) == moe
            for stage, chunk in enumerate(chunks):
                assert stage_layers(counts, pp_size, rank, stage) == tuple(chunk)
                moe = tuple(layer for layer in chunk if layer in spec.moe_layers)
                assert stage_moe_layers(spec, counts, pp_size, rank, stage) == moe
    assert possible > 200


def test_chunks_of_virtual_stages_interleave() -> None:
    """The example in Megatron's get_num_layers_to_build: 8 layers, 2 stages, 2 virtual stages"""
    counts = layer_counts(8, 2, 2)
    assert counts == (2, 2, 2, 2)
    assert [stage_layers(counts, 2, rank) for rank in range(2)] == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_field_12_hybrid_layers_are_counted_by_routers() -> None:
    """field.md 12: freq [0, 1, 1, 0, 1, 1], pp 2, vpp 1: the MoE ordinal per stage"""
    spec = spec_of([0, 1, 1, 0, 1, 1])
    counts = layer_counts(6, pp_size=2, vpp_size=1)
    stages = [stage_moe_layers(spec, counts, 2, rank) for rank in range(2)]
    assert stages == [(1, 2), (4, 5)]
    # columns of routed_experts, not decoder layers
    assert [[spec.moe_layers.index(layer) for layer in s] for s in stages] == [[0, 1], [2, 3]]


def test_field_15_mtp_layers_are_no_decoder_layers() -> None:
    """field.md 15: layer numbers [1, 2, 3, 4, 1], the last one of an MTP layer"""
    spec = spec_of([1, 1, 1, 1])
    # a layout that gives MTP and loss a stage of their own: no decoder layers there
    for counts in (layer_counts(4, 2), (2, 2), (2, 2, 0, 0)):
        owned = [stage_moe_layers(spec, counts, 2, rank) for rank in range(2)]
        assert owned == [(0, 1), (2, 3)]
    with pytest.raises(ReplayError, match=r"of 5 decoder layers, expected the 4 of .*multi-token"):
        stage_moe_layers(spec, (2, 3), 2, 0)


def test_a_rank_without_routers() -> None:
    assert stage_moe_layers(spec_of([0, 0, 1, 1]), (2, 2), 2, 0) == ()
    assert stage_layers((0, 4), 2, 0) == ()


def test_numpy_integers_will_do() -> None:
    counts = np.array([1, 2, 3, 4])
    assert stage_layers(counts, 2, np.int64(1)) == (1, 2, 6, 7, 8, 9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0, expected an integer of at least 1"),
        ({"pp_size": 2.0}, "pp_size is 2.0, expected an integer of at least 1"),
        ({"vpp_size": None}, "vpp_size is None, expected an integer of at least 1"),
        ({"first": 0}, "first is 0, expected an integer of at least 1"),
        ({"last": True}, "last is True, expected an integer of at least 1"),
        ({"pp_size": 1, "vpp_size": 2}, "vpp_size is 2 with pp_size=1, expected 1"),
        ({"first": 4, "loss": True}, "first given with embedding=False and loss=True, expected ei"),
        ({"pp_size": 3}, "8 layers for 3 pipeline ranks, of num_layers=8 and pp_size=3 with first"),
        ({"embedding": True}, "9 layers for 2 pipeline ranks, .*expected the same number for each"),
        ({"first": 6, "last": 1}, "1 layers for 0 pipeline ranks, .*first=6, last=1"),
        ({"first": 9}, "-1 layers for 1 pipeline ranks"),
        ({"first": 8}, "0 layers for 1 pipeline ranks"),
        ({"vpp_size": 3}, "4 layers in pipeline rank 0, expected a multiple of vpp_size=3"),
        ({"vpp_size": 2, "last": 3}, "5 layers in pipeline rank 0, expected a multiple of vpp"),
    ],
)
def test_splits_that_are_none(split: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        layer_counts(**({"num_layers": 8, "pp_size": 2} | split))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (((), 1, 0), "counts has 0 model chunks, expected a multiple of pp_size=1"),
        (((1, 2, 3), 2, 0), "counts has 3 model chunks, expected a multiple of pp_size=2"),
        (((1, -1), 2, 0), r"counts\[1\] is -1, expected an integer of at least 0"),
        (((1, 1.0), 2, 0), r"counts\[1\] is 1.0, expected an integer of at least 0"),
        (((1, 1), 0, 0), "pp_size is 0, expected an integer of at least 1"),
        (((1, 1), 2, 2), r"pp_rank is 2, expected 0\.\.1"),
        (((1, 1), 2, -1), r"pp_rank is -1, expected 0\.\.1"),
        (((1, 1), 2, 0, 1), r"vp_stage is 1, expected 0\.\.0"),
        (((1, 1), 2, 0, -1), r"vp_stage is -1, expected 0\.\.0"),
    ],
)
def test_ranks_that_are_none(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        stage_layers(*args)
    with pytest.raises(ReplayError, match=message):
        stage_moe_layers(spec_of([1, 1]), *args)


@pytest.mark.slow
def test_megatron_builds_these_layers() -> None:
    """Its own functions on all splits above; where they refuse one, so does layer_counts"""
    import torch
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    agreed = 0
    for split in splits():
        pp_size, vpp_size = split["pp_size"], split["vpp_size"]
        try:
            counts = layer_counts(**split)
        except ReplayError:
            counts = None
        virtual = vpp_size > 1
        chunks = [(v if virtual else None, p) for v in range(vpp_size) for p in range(pp_size)]
        try:
            config = TransformerConfig(
                num_layers=split["num_layers"],
                hidden_size=8,
                num_attention_heads=2,
                pipeline_model_parallel_size=pp_size,
                virtual_pipeline_model_parallel_size=vpp_size if virtual else None,
                pipeline_dtype=torch.float32,
                num_layers_in_first_pipeline_stage=split.get("first"),
                num_layers_in_last_pipeline_stage=split.get("last"),
                account_for_embedding_in_pipeline_split=split.get("embedding", False),
                account_for_loss_in_pipeline_split=split.get("loss", False),
            )
            built = [get_num_layers_to_build(config, *chunk) for chunk in chunks]
        except (ValueError, AssertionError):
            assert counts is None, split
            continue
        if counts is None:
            # let through with one rank for both ends or for virtual stages, and with ends that
            # have more layers than there are
            ends = [split[name] for name in ("first", "last") if split.get(name)]
            one_rank = pp_size == 1 and (virtual or len(ends) == 2)
            assert one_rank or sum(ends) > split["num_layers"], split
            continue
        assert built == list(counts), split
        if virtual and pp_size == 2 and split.get("first") and split.get("last"):
            # no middle ranks: Megatron 0.16 divides by their number
            with pytest.raises(ZeroDivisionError):
                get_transformer_layer_offset(config, *chunks[-1])
            continue
        for stage, rank in chunks:
            offset = get_transformer_layer_offset(config, stage, rank)
            chunk = (stage or 0) * pp_size + rank
            layers = stage_layers(counts, pp_size, rank, stage or 0)
            assert layers == tuple(range(offset, offset + built[chunk])), split
        agreed += 1
    assert agreed > 200


@pytest.mark.slow
def test_megatron_layouts_are_counts() -> None:
    """pipeline_model_parallel_layout: the counts are its numbers of decoder layers"""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    pp_size = 2
    layout = PipelineParallelLayerLayout.from_str("E|t*3|t|tt|t*2m|L", 2)
    counts = [
        layout.layout[rank][stage].count(LayerType.decoder)
        for stage in range(layout.virtual_pipeline_model_parallel_size)
        for rank in range(pp_size)
    ]
    assert counts == [0, 3, 1, 2, 2, 0]
    assert stage_layers(counts, pp_size, 0) == (3, 6, 7)
    assert stage_layers(counts, pp_size, 1) == (0, 1, 2, 4, 5)
