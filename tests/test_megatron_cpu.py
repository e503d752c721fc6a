"""A Qwen3-MoE in Megatron-core on a CPU equals the one in Hugging Face, weight by weight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3 import FormatError, RolloutId, RouterSpec, RoutingBatch, RoutingTrace, UnsupportedError
from r3.trainer_hooks import MegatronReplay
from r3.trainer_hooks.megatron_cpu import shim
from r3.trainer_hooks.megatron_cpu.qwen3_moe import (
    build_gpt_model,
    load_hf_weights,
    token_logprobs,
)
from r3.trainer_hooks.megatron_recorder import record_routing

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "softmax over all": {"norm_topk_prob": False},
    "dense layers": {"mlp_only_layers": [1]},
    "every second": {"decoder_sparse_step": 2, "rope_parameters": {"rope_theta": 500.0}},
}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    shim.init_single_process()
    yield
    shim.destroy()


def make_hf(seed: int = 0, **changes: Any) -> Any:
    import transformers

    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,  # large, so that routing depends on the token
    }
    config = transformers.Qwen3MoeConfig(**{**values, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.Qwen3MoeForCausalLM(config).float().eval()


def make_ids(b: int, s: int, seed: int = 1) -> Any:
    return torch.randint(1, 64, (b, s), generator=torch.Generator().manual_seed(seed))


def gates_of(hf: Any) -> list[Any]:
    return [layer.mlp.gate for layer in hf.model.layers if hasattr(layer.mlp, "gate")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_routing_equal_hugging_face(variant: str) -> None:
    hf = make_hf(**VARIANTS[variant])
    model = build_gpt_model(hf.config).eval()
    load_hf_weights(model, hf.state_dict())
    ids = make_ids(3, 20)
    chosen: list[np.ndarray] = []

    def hook(_gate: Any, _inputs: Any, out: Any) -> None:
        sets = out[2].sort(dim=-1).values.view(3, 20, 2)
        chosen.append(sets.transpose(0, 1).reshape(60, 2).numpy())  # s-major, as Megatron

    for gate in gates_of(hf):
        gate.register_forward_hook(hook)
    with torch.no_grad(), record_routing(model) as used:
        expected = hf(ids).logits
        found = model(ids, torch.arange(20).expand(3, 20), None)
        logprobs = token_logprobs(model, ids)
    assert (found - expected).abs().max() < 1e-4
    assert len(used) == 2
    assert np.array_equal(used[0], np.stack(chosen, axis=1))
    assert len(np.unique(used[0][:, 0], axis=0)) > 5  # routing does depend on the token
    spec = RouterSpec.from_hf_config(hf.config)
    assert used[0].shape == (60, len(spec.moe_layers), 2)
    reference = expected.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert (logprobs - reference).abs().max() < 1e-4


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_replay_equals_hugging_face_with_forced_experts(norm_topk_prob: bool) -> None:
    """Whole model, float64 oracle: log-probabilities and every router's gradient under replay"""
    hf = make_hf(norm_topk_prob=norm_topk_prob)
    model = build_gpt_model(hf.config)
    load_hf_weights(model, hf.state_dict())
    spec = RouterSpec.from_hf_config(hf.config)
    ids = make_ids(2, 10)
    rng = np.random.default_rng(0)
    forced = rng.random((2, 10, 3, 8)).argsort(-1)[..., :2]  # [b, s, layers, k]
    traces = [
        RoutingTrace.build(
            spec=spec,
            token_ids=ids[i].numpy(),
            routed_experts=forced[i, :-1],
            prompt_len=1,
            rollout_id=RolloutId("run", sample=i),
        )
        for i in range(2)
    ]
    with MegatronReplay(model, max_outside_fraction=None) as replay, replay.step():
        with replay.microbatch(RoutingBatch.from_traces(traces), input_ids=ids):
            logprobs = token_logprobs(model, ids)
        logprobs.mean().backward()

    hf = hf.double()
    hf.set_experts_implementation("eager")  # the grouped kernel has no float64
    gates = gates_of(hf)
    for layer, gate in enumerate(gates):
        indices = torch.from_numpy(forced[:, :, layer].reshape(20, 2))

        def gate_forward(x: Any, gate: Any = gate, indices: Any = indices) -> Any:
            s = x.reshape(-1, x.shape[-1]) @ gate.weight.T
            e = s.exp()
            total = e.gather(1, indices) if norm_topk_prob else e
            weights = e.gather(1, indices) / total.sum(1, keepdim=True)
            return s, weights, indices

        gate.forward = gate_forward
    logits = hf(ids).logits
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    # the last token routes natively in Megatron; no log-probability here depends on it
    expected.mean().backward()
    assert (logprobs - expected).abs().max() < 1e-4
    for layer, gate in zip(model.decoder.layers, gates, strict=True):
        found = layer.mlp.router.weight.grad.double()
        assert (found - gate.weight.grad).norm() / gate.weight.grad.norm() < 1e-4


def test_packed_sequences_equal_single_ones() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    hf = make_hf()
    model = build_gpt_model(hf.config).eval()
    load_hf_weights(model, hf.state_dict())
    parts = [make_ids(1, n, seed=n) for n in (4, 9, 1, 6)]
    cu = torch.tensor(np.cumsum([0, *(p.shape[1] for p in parts)]), dtype=torch.int32)
    params = PackedSeqParams("thd", cu, cu, max_seqlen_q=9, max_seqlen_kv=9)
    ids = torch.cat(parts, dim=1)
    with torch.no_grad():
        found = model(ids, torch.arange(20)[None], None, packed_seq_params=params)
        expected = torch.cat([hf(p).logits for p in parts], dim=1)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 4])
def test_weights_from_a_directory(tmp_path: Path, tied: bool, shards: int) -> None:
    """transformers writes experts one by one, and holds them packed; both load the same"""
    hf = make_hf(tie_word_embeddings=tied)
    size = "100GB" if shards == 1 else "30KB"
    hf.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards > 1)
    config = json.loads((tmp_path / "config.json").read_text())
    one, other = build_gpt_model(config), build_gpt_model(hf.config)
    load_hf_weights(one, tmp_path)
    load_hf_weights(other, hf.state_dict())
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    hf = make_hf(tie_word_embeddings=True)
    model = build_gpt_model(hf.config)
    before = [p.clone() for p in model.parameters()]
    good = hf.state_dict()

    def attempt(message: str, **changes: Any) -> None:
        weights = {**good, **{k.replace("__", "."): v for k, v in changes.items()}}
        weights = {k: v for k, v in weights.items() if v is not None}
        with pytest.raises(FormatError, match=message):
            load_hf_weights(model, weights)

    gate, q = "model__layers__1__mlp__gate__weight", "model__layers__0__self_attn__q_proj__weight"
    attempt("model.layers.1.mlp.gate.weight is missing", **{gate: None})
    attempt("model.layers.9.x of the checkpoint is not one", model__layers__9__x=torch.ones(1))
    attempt("mlp.router.weight has shape", **{gate: torch.ones(7, 32)})
    attempt(r"q_proj.weight has shape \[63, 32\], expected \[64, 32\]", **{q: torch.ones(63, 32)})
    attempt(
        "gate_up_proj has 7 experts, expected 8",
        model__layers__0__mlp__experts__gate_up_proj=torch.ones(7, 32, 32),
    )
    attempt("lm_head.weight differs", lm_head__weight=torch.ones(64, 32))
    with pytest.raises(FormatError, match=r"neither model.safetensors nor"):
        load_hf_weights(model, tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"model-00001-of-00002.safetensors is missing"):
        load_hf_weights(model, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mixtral"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("rope_type", "yarn"),
        ("rope_theta", None),
    ],
)
def test_configs_refused(field: str, value: Any) -> None:
    values = make_hf().config.to_dict()
    if field.startswith("rope"):
        values["rope_parameters"] = {**values["rope_parameters"], field: value}
    else:
        values[field] = value
    with pytest.raises(UnsupportedError, match=field):
        build_gpt_model(values)


def test_rope_theta_of_transformers_4() -> None:
    values = make_hf().config.to_dict()
    theta = values.pop("rope_parameters")["rope_theta"]
    model = build_gpt_model({**values, "rope_theta": theta, "rope_scaling": None})
    assert model.rotary_pos_emb.inv_freq[1] == pytest.approx(theta ** (-1 / 8))
