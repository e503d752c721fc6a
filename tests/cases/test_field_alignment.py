"""Public bugs of alignment: which row of a record is replayed for which token and layer.

Rows of the project's list, and where each is tested ("arrays": without a trainer):
   1  test_field_capture, test_layout (arrays); test_megatron_replay
   2  test_field_capture, test_layout (arrays); test_megatron_replay
   4  test_field_turns (arrays)
   6  test_layout (arrays); test_megatron_replay
   9  test_layout (arrays); test_megatron_parallel, in its context-parallel layouts
  11  here
  12  test_stages, here (arrays); test_megatron_parallel, in its pipeline layouts
  14  test_megatron_misuse
  15  test_stages (arrays); here
  18  here
  21  here
  24  here (arrays)
  25  test_layout (arrays); test_megatron_parallel, in its left-padded layouts
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from r3 import CaptureError, RolloutId, RouterSpec, RoutingBatch, RoutingTrace, TraceError
from r3.engine_hooks.vllm_trace import trace_from_output
from r3.trainer_hooks.binding import Limits, bind
from r3.trainer_hooks.layout import view_of
from r3.trainer_hooks.stages import layer_counts, stage_moe_layers

TOY = RouterSpec(num_experts=8, top_k=2, moe_layers=(0, 1, 2, 3), num_layers=4)


def real(test: Callable[..., None]) -> Callable[..., None]:
    """A test on Megatron-core's own routers"""
    for mark in (
        pytest.mark.slow,
        pytest.mark.usefixtures("megatron"),
        pytest.mark.filterwarnings("ignore::UserWarning"),
    ):
        test = mark(test)
    return test


def random_ids(rows: int, layers: int = 4, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).random((rows, layers, 8))
    return noise.argsort(axis=-1)[..., :2]


def build(ids: np.ndarray, tokens: int, spec: RouterSpec = TOY, prompt_len: int = 2) -> Any:
    return RoutingTrace.build(
        spec=spec,
        token_ids=np.arange(1, tokens + 1),
        routed_experts=ids,
        prompt_len=prompt_len,
        rollout_id=RolloutId("case"),
    )


# --------------------------------------------------------------------------- 11: dense layers


def with_dense(ids: np.ndarray, dense: int = 2) -> np.ndarray:
    """As engines do it: all layers, the dense ones zero"""
    return np.concatenate([np.zeros((len(ids), dense, 2), ids.dtype), ids], axis=1)


def test_field_11_dense_layers_are_left_out() -> None:
    """On arrays. L = 6, of which the first 2 are dense and are in the payload"""
    spec = RouterSpec.from_hf_config(
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 6,
            "first_k_dense_replace": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        }
    )
    assert spec.moe_layers == (2, 3, 4, 5)
    ids = random_ids(11)
    for payload in (with_dense(ids), ids):
        batch = RoutingBatch.from_traces([build(payload, 12, spec)])
        view = view_of(batch, seq_length=12)
        found = bind(batch, view, spec.moe_layers, Limits())
        assert np.array_equal(found.experts[:, :11], ids.transpose(1, 0, 2))
        last = bind(batch, view, (4, 5), Limits())  # of a pipeline stage
        assert np.array_equal(last.experts[:, :11], ids[:, 2:].transpose(1, 0, 2))
    # the first four of all layers are not the four MoE layers
    with pytest.raises(TraceError, match=r"case/.*row 0, layer 2: .*all zero"):
        build(with_dense(ids)[:, :4], 12, spec)
    for layers in (3, 5):
        with pytest.raises(TraceError, match=rf"case/.* {layers}\b"):
            build(with_dense(ids)[:, :layers], 12, spec)


@real
def test_field_11_routers_behind_dense_layers_get_their_own_rows() -> None:
    """L = 6, of which the first 2 are dense and are in the payload"""
    import torch

    from megatron_tools import forward, make_model, random_replay
    from r3.trainer_hooks.megatron_recorder import record_routing

    model = make_model(config={"num_hidden_layers": 6, "mlp_only_layers": [0, 1]})
    spec = RouterSpec(8, 2, (2, 3, 4, 5), 6)
    ids = random_ids(11)
    batch = RoutingBatch.from_traces([build(with_dense(ids), 12, spec)])
    tokens = torch.from_numpy(batch.token_ids)[None, :11].long()
    with random_replay(model) as replay, replay.step(), record_routing(model) as used:
        assert replay.moe_layers == spec.moe_layers
        with replay.microbatch(batch, input_ids=tokens):
            forward(model, tokens)
    assert np.array_equal(used[0], np.sort(ids, axis=-1))


# --------------------------------------------------------------------------- 12: hybrid models


def test_field_12_a_stage_is_bound_to_its_own_columns() -> None:
    """On arrays. freq [0, 1, 1, 0, 1, 1], pp 2, vpp 1; and one layer to each virtual stage"""
    spec = RouterSpec(8, 2, (1, 2, 4, 5), 6)
    ids = random_ids(11)
    batch = RoutingBatch.from_traces([build(ids, 12, spec)])
    view = view_of(batch, seq_length=11)
    counts = layer_counts(6, pp_size=2, vpp_size=1)
    for rank, columns in enumerate(([0, 1], [2, 3])):
        layers = stage_moe_layers(spec, counts, 2, rank)
        found = bind(batch, view, layers, Limits()).experts
        assert np.array_equal(found, ids[:, columns].transpose(1, 0, 2))
    counts = layer_counts(6, pp_size=2, vpp_size=3)
    expected: list[list[list[int]]] = [[[], [1], [2]], [[0], [], [3]]]  # by rank and stage
    for rank in range(2):
        for stage in range(3):
            layers = stage_moe_layers(spec, counts, 2, rank, stage)
            found = bind(batch, view, layers, Limits()).experts
            assert np.array_equal(found, ids[:, expected[rank][stage]].transpose(1, 0, 2))


# ------------------------------------------------------------------------------ 15, 18: MTP


@pytest.fixture(params=["as built", "number 1"])
def mtp_model(request: Any, megatron: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """4 decoder layers and one for multi-token prediction, under Megatron's number or again 1"""
    import megatron.core.models.gpt as gpt
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from megatron_tools import make_model
    from r3.trainer_hooks.megatron_cpu.modules import RMSNorm

    original = gpt.GPTModel

    def with_mtp(*, config: Any, transformer_layer_spec: Any, **more: Any) -> Any:
        block = get_gpt_mtp_block_spec(config, transformer_layer_spec, use_transformer_engine=False)
        for spec in block.layer_specs:  # norms that run on a CPU
            layer = spec.submodules
            layer.enorm = layer.hnorm = layer.layer_norm = RMSNorm
        return original(
            config=config,
            transformer_layer_spec=transformer_layer_spec,
            mtp_block_spec=block,
            **more,
        )

    monkeypatch.setattr(gpt, "GPTModel", with_mtp)
    config = {"num_hidden_layers": 4, "mlp_only_layers": []}
    model = make_model(config=config, mtp_num_layers=1)
    if request.param == "number 1":  # as other versions count it
        mtp_router(model).layer_number = 1
    return model


def mtp_router(model: Any) -> Any:
    from megatron.core.transformer.moe.router import TopKRouter

    (router,) = (m for m in model.mtp.modules() if isinstance(m, TopKRouter))
    return router


def run_mtp(model: Any, ids: Any) -> Any:
    """Megatron's forward pass of a model with MTP wants labels"""
    import torch

    b, s = ids.shape
    positions = torch.arange(s).expand(b, s)
    return model(ids, positions, None, labels=ids.roll(-1, dims=1))


@real
def test_field_15_the_router_of_an_mtp_layer_is_left_alone(mtp_model: Any) -> None:
    """Layer numbers [1, 2, 3, 4, 1]: the last is no decoder layer and has no recorded routing"""
    from megatron_tools import expected_rows, padded, random_batch, random_replay
    from r3.trainer_hooks.megatron_recorder import record_routing

    batch = random_batch([9, 9], TOY, missing=0)
    ids = padded(batch)
    router, maps = mtp_router(mtp_model), []
    handle = router.register_forward_hook(lambda _m, x, out: maps.append((x[0], out[1])))
    with random_replay(mtp_model) as replay, record_routing(mtp_model) as used:
        assert replay.moe_layers == (0, 1, 2, 3)
        assert router.router_replay is None
        with replay.step():
            with replay.microbatch(batch, input_ids=ids):
                loss = run_mtp(mtp_model, ids)
            loss.mean().backward()
            report = replay.report()
    handle.remove()
    rows = [9 * i + j for j in range(9) for i in range(2)]
    expected, replayed = expected_rows(batch, rows)
    assert replayed.sum() == 16
    assert np.array_equal(used[0][replayed], expected[replayed])
    assert {layer: c.rows_replayed for layer, c in report.layers.items()} == dict.fromkeys(
        range(4), 16
    )
    # it ran, once, and natively
    ((hidden, chosen),) = maps
    logits = hidden.detach().flatten(0, -2).double() @ router.weight.detach().double().T
    native = logits.topk(2).indices
    assert chosen.gather(1, native).all()
    assert int(chosen.sum()) == 2 * 18
    assert router.weight.grad.abs().sum() > 0


@real
def test_field_18_a_recorded_pass_has_no_slot_for_mtp(mtp_model: Any) -> None:
    """A layer list with None in the MTP slot: no such slot, in no layer number"""
    from megatron_tools import padded, random_batch, random_replay
    from r3.trainer_hooks.megatron_recorder import record_routing

    batch = random_batch([9, 9], TOY)
    ids = padded(batch)
    with random_replay(mtp_model) as replay, record_routing(mtp_model) as used:
        with replay.step(weight_version=3):
            with replay.record(batch, input_ids=ids) as native:
                run_mtp(mtp_model, ids)
            own = native.to_batch()
            assert native.alignment().layers == (0, 1, 2, 3)
        assert own.spec == TOY
        assert own.routed_experts.shape == (18, 4, 2)
        # and what was recorded is replayed
        with replay.step(weight_version=3):
            with replay.microbatch(own, input_ids=ids):
                run_mtp(mtp_model, ids)
            assert replay.report().total.rows_replayed == 4 * 16
            assert replay.report().total.outside_topk_experts_forced == 0
    assert np.array_equal(used[0][:16], used[1][:16])  # the last two rows are last tokens
    order = [9 * i + j for j in range(8) for i in range(2)]
    assert np.array_equal(np.sort(own.routed_experts[order], axis=-1), used[0][:16])


# ------------------------------------------------------------------------------- 21: padding

TAIL = 1000


def test_field_21_a_tail_of_padding_is_spread() -> None:
    """On arrays. The tail of 1000 rows goes to all experts alike, padded or packed"""
    batch = RoutingBatch.from_traces([build(random_ids(11), 12)])
    for layout in ({"seq_length": 12 + TAIL}, {"cu_seqlens": np.array([0, 12, 12 + TAIL])}):
        found = bind(batch, view_of(batch, **layout), TOY.moe_layers, Limits())
        for layer in found.experts:
            assert np.bincount(layer[12:].ravel()).tolist() == [TAIL * 2 // 8] * 8
            assert (layer[12:, 0] != layer[12:, 1]).all()


@real
@pytest.mark.parametrize("packed", [False, True])
def test_field_21_no_expert_gets_all_of_a_tail(packed: bool) -> None:
    """The tail of 1000 rows: natively one expert gets nearly all of it"""
    import torch

    from megatron_tools import SPEC, forward, make_model, packed_params, random_batch, random_replay
    from r3.trainer_hooks.megatron_recorder import record_routing

    model = make_model(config={"max_position_embeddings": 2048})
    batch = random_batch([12], SPEC)
    ids = torch.zeros(1, 12 + TAIL, dtype=torch.long)
    ids[0, :12] = torch.from_numpy(batch.token_ids)
    params = packed_params([0, 12, 12 + TAIL]) if packed else None
    with torch.no_grad(), random_replay(model) as replay, record_routing(model) as used:
        forward(model, ids, params)
        with replay.step(), replay.microbatch(batch, input_ids=ids, packed_seq_params=params):
            forward(model, ids, params)
        total = replay.report().total
    native, spread = (
        [np.bincount(u[12:, layer].ravel(), minlength=8) for layer in range(2)] for u in used
    )
    assert max(n.max() for n in native) > 0.9 * TAIL
    assert [s.tolist() for s in spread] == [[TAIL * 2 // 8] * 8] * 2
    assert total.rows_replayed == 2 * int(batch.valid.sum())
    assert total.rows_missing == 2 * int(11 - batch.valid.sum())


# ------------------------------------------------------------------------------- 24: streams


def joined(chunks: list[np.ndarray]) -> RoutingTrace:
    """A stream of chunks that end behind token 4, 5 and 6, by the rows that each brings"""
    trace = None
    for tokens, ids in zip((4, 5, 6), chunks, strict=True):
        chunk = build(ids, tokens, prompt_len=3 if trace is None else tokens - 1)
        trace = chunk if trace is None else trace.extend(chunk)
    assert trace is not None
    return trace


def test_field_24_chunks_of_a_stream() -> None:
    """On arrays. 3 chunks with 3, 4, 5 rows so far, or 3, 1, 1 new ones: 5 rows either way"""
    ids = random_ids(5)
    cumulative = joined([ids[:3], ids[:4], ids])
    deltas = []
    for tokens in (4, 5, 6):
        rows = np.full((tokens - 1, 4, 2), -1)  # not this chunk's
        new = slice(0 if tokens == 4 else tokens - 2, tokens - 1)
        rows[new] = ids[new]
        deltas.append(rows)
    assert [int((d[:, 0, 0] >= 0).sum()) for d in deltas] == [3, 1, 1]
    for trace in (cumulative, joined(deltas)):
        assert trace.num_rows == 5
        assert trace.valid.all()
        assert np.array_equal(trace.routed_experts, ids)
        assert trace.sampled.tolist() == [False] * 3 + [True] * 3
    # taken for one another they have another number of rows
    with pytest.raises(TraceError, match=r"case/.*12 rows, expected 5"):
        build(np.concatenate([ids[:3], ids[:4], ids]), 6)
    with pytest.raises(TraceError, match=r"case/.*1 rows, expected 5"):
        build(ids[4:], 6)


@pytest.mark.parametrize("rows", [5, 1])
def test_field_24_the_last_chunk_of_an_engines_stream(rows: int) -> None:
    """On arrays. Its tokens are a delta, and its rows cumulative or not: refused by name"""
    done = SimpleNamespace(
        index=0,
        finish_reason="length",
        token_ids=[6],
        logprobs=None,
        routed_experts=random_ids(rows).astype(np.uint8),
    )
    output = SimpleNamespace(request_id="7", prompt_token_ids=[1, 2, 3], outputs=[done])
    hf = {"model_type": "mixtral", "num_hidden_layers": 4, "num_experts_per_tok": 2}
    engine = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=hf | {"num_local_experts": 8})
    )
    message = rf"case/.*has {rows} rows, expected 3, .*output_kind=DELTA .*use FINAL_ONLY"
    with pytest.raises(TraceError, match=message):
        trace_from_output(output, engine, rollout_id=RolloutId("case"))
    done.finish_reason = None
    with pytest.raises(CaptureError, match="has not finished; rows come with its last output"):
        trace_from_output(output, engine, rollout_id=RolloutId("case"))
