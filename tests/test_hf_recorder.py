"""The recorder for Hugging Face models, against what the models themselves report
(`output_router_logits`) and a float64 computation of each router's choice."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import r3
from family_configs import FLAT, varied
from r3 import RouterSpec

torch = pytest.importorskip("torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = [
    pytest.mark.slow,
    # random models of two or three experts' width repeat themselves; rows are compared exactly
    pytest.mark.filterwarnings("ignore::r3.SuspiciousRoutingWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices of 32 are not worth a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


GROUPED = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_routed_experts": 16}
VOCAB = 64


def make(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model in eval mode, its routers far from ties."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = varied(family, seed) | changes
    if family in ("gpt_oss", "nemotron_h"):
        values["head_dim"] = 8
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**values, eos_token_id=None, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, p in (*model.named_parameters(), *model.named_buffers()):
            if "e_score_correction_bias" in name:
                p.normal_(std=0.3)
            elif p.ndim == 2 and ("gate.weight" in name or "router.weight" in name):
                p.normal_()
    return model


def record(model: Any, **inputs: Any) -> Any:
    from r3.engine_hooks.hf_recorder import record_routing

    with torch.no_grad(), record_routing(model) as rec:
        model(**inputs)
    return rec


def batch(seed: int = 0) -> Any:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (3, 11), generator=rng)


def right_padded() -> tuple[Any, Any]:
    ids, mask = batch(), torch.ones(3, 11, dtype=torch.int64)
    mask[0, 7:], mask[2, 1:] = 0, 0
    return ids * mask, mask


def left_padded() -> tuple[Any, Any]:
    ids, mask = batch(), torch.ones(3, 11, dtype=torch.int64)
    mask[1, :4], mask[2, :9] = 0, 0
    return ids * mask, mask


def sets(ids: np.ndarray) -> np.ndarray:
    return np.sort(np.asarray(ids), axis=-1)


def selection(logits: np.ndarray, bias: np.ndarray, spec: RouterSpec, family: str) -> tuple:
    """Of one layer, in float64: the chosen set [rows, top_k], and whether it was near a tie."""
    x = logits.astype(np.float64)
    if spec.score_function == "sigmoid":
        x = 1 / (1 + np.exp(-x)) + bias
    near = np.zeros(len(x), bool)
    if spec.num_groups:
        groups = np.sort(x.reshape(len(x), spec.num_groups, -1), axis=-1)
        # DeepSeek-V2 ranks groups by their best expert, the others by the sum of their best two
        best = np.exp(groups[..., -1]) if family == "deepseek_v2" else groups[..., -2:].sum(-1)
        ranks = np.sort(best, axis=-1)[:, ::-1]
        if spec.topk_groups < spec.num_groups:
            near |= ranks[:, spec.topk_groups - 1] - ranks[:, spec.topk_groups] < 1e-6
        keep = best >= ranks[:, [spec.topk_groups - 1]]
        x = np.where(np.repeat(keep, x.shape[1] // spec.num_groups, axis=1), x, -np.inf)
    order = np.argsort(-x, axis=-1, kind="stable")
    top = np.take_along_axis(x, order, axis=-1)
    near |= top[:, spec.top_k - 1] - top[:, spec.top_k] < 1e-6
    return np.sort(order[:, : spec.top_k], axis=-1), near


def biases(model: Any, layers: int) -> list[np.ndarray]:
    found = [b for n, b in model.named_buffers() if "e_score_correction_bias" in n]
    return [b.double().numpy() for b in found] or [np.zeros(1)] * layers


CASES = [(f, 0, {}) for f in FLAT] + [
    ("deepseek_v3", 1, GROUPED | {"first_k_dense_replace": 1}),
    ("deepseek_v2", 1, GROUPED | {"topk_method": "group_limited_greedy"}),
    ("glm4_moe", 1, GROUPED),
    ("qwen3_moe", 0, {"mlp_only_layers": [0], "decoder_sparse_step": 1}),
    ("llama4_text", 0, {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2}),
    ("gpt_oss", 0, {"num_hidden_layers": 2, "num_experts_per_tok": 4}),
]


@pytest.mark.parametrize(("family", "seed", "changes"), CASES, ids=str)
def test_rows_are_the_choice_of_the_routers(family, seed, changes):
    from r3.engine_hooks.hf_recorder import record_routing

    model = make(family, seed, **changes)
    ids, mask = right_padded()
    with torch.no_grad(), record_routing(model) as rec:
        out = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    spec = RouterSpec.from_hf_config(model.config)
    assert rec.spec == spec
    assert rec.routed_experts.shape == (ids.numel(), len(spec.moe_layers), spec.top_k)
    assert rec.routed_experts.dtype == spec.dtype
    assert len(out.router_logits) == len(spec.moe_layers)
    ties = 0
    bias = biases(model, len(spec.moe_layers))
    for layer, logits in enumerate(out.router_logits):
        values = logits.reshape(ids.numel(), -1).float().numpy()
        expected, near = selection(values, bias[layer], spec, family)
        np.testing.assert_array_equal(sets(rec.routed_experts[:, layer])[~near], expected[~near])
        ties += near[mask.flatten().numpy() == 1].sum()  # padding may be zeros throughout
    assert ties <= 1


# --- traces


FEW = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "mixtral")


def positions(mask: Any) -> Any:
    return (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize("padded", [right_padded, left_padded])
@pytest.mark.parametrize("family", FEW)
def test_traces_of_a_padded_batch_are_those_of_each_sequence_alone(family, padded):
    model = make(family)
    ids, mask = padded()
    rec = record(model, input_ids=ids, attention_mask=mask, position_ids=positions(mask))
    traces = rec.traces(ids, mask, prompt_lens=[2, 3, 1])
    for b, trace in enumerate(traces):
        alone = ids[b][mask[b] == 1][None]
        (expected,) = record(model, input_ids=alone).traces(alone.numpy())
        np.testing.assert_array_equal(trace.token_ids, alone[0])
        assert trace.num_rows == alone.shape[1] - 1
        np.testing.assert_array_equal(sets(trace.routed_experts), sets(expected.routed_experts))
        assert (trace.prompt_len, expected.prompt_len) == ([2, 3, 1][b], alone.shape[1])
        assert trace.valid.all()
        assert trace.spec == RouterSpec.from_hf_config(model.config)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("family", FEW)
def test_traces_of_generate(family, chunked):
    from r3.engine_hooks.hf_recorder import record_routing

    model = make(family)
    ids, mask = left_padded()
    if chunked:  # the cache is filled by several passes; without padding
        ids, mask = batch(), torch.ones(3, 11, dtype=torch.int64)
    options = {"prefill_chunk_size": 4} if chunked else {}
    with record_routing(model) as rec:
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, **options
        )
    assert len(rec.forwards) == (3 if chunked else 1) + 5
    assert len(rec.routed_experts) == 3 * (11 + 5)
    mask = torch.cat([mask, torch.ones(3, 6, dtype=torch.int64)], dim=1)
    mask[0, -2:] = 0  # as if it had ended earlier than the others
    traces = rec.traces(out, mask)
    again = record(model, input_ids=out, attention_mask=mask, position_ids=positions(mask))
    for trace, expected in zip(traces, again.traces(out, mask), strict=True):
        np.testing.assert_array_equal(trace.token_ids, expected.token_ids)
        np.testing.assert_array_equal(sets(trace.routed_experts), sets(expected.routed_experts))


def test_provenance_and_names():
    import transformers

    model = make("qwen3_moe").to(torch.bfloat16)
    names = [r3.RolloutId("run", str(b)) for b in range(3)]
    traces = record(model, input_ids=batch()).traces(batch(), rollout_ids=names)
    assert [t.rollout_id for t in traces] == names
    provenance = traces[0].provenance
    assert provenance.engine == "transformers"
    assert provenance.engine_version == transformers.__version__
    assert (provenance.dtype, provenance.device) == ("bfloat16", "cpu")
    assert provenance.attention_backend == "sdpa"


def test_embeddings_are_traced_without_comparing_tokens():
    model = make("qwen3_moe")
    embeds = model.get_input_embeddings()(batch()).detach()
    by_embeds = record(model, inputs_embeds=embeds)
    by_ids = record(model, input_ids=batch())
    np.testing.assert_array_equal(by_embeds.routed_experts, by_ids.routed_experts)
    assert [t.digest for t in by_embeds.traces(batch())] == [
        t.digest for t in by_ids.traces(batch())
    ]


def test_traces_refuse_what_was_not_fed():
    ids, mask = right_padded()
    rec = record(make("qwen3_moe"), input_ids=ids, attention_mask=mask)

    def refused(words: str, *args: Any, error: type = r3.TraceError, **kwargs: Any) -> None:
        with pytest.raises(error, match=words):
            rec.traces(*args, **kwargs)

    other = ids.clone()
    other[1, 5] += 1
    refused(rf"sequence 1, position 5: .* token {ids[1, 5]}, input_ids says {other[1, 5]}", other)
    other = ids.clone()
    other[0, 9] += 1  # padding is not compared
    assert len(rec.traces(other, mask)) == 3
    holes = mask.clone()
    holes[1, 4] = 0
    refused("sequence 1: attention_mask has 10 tokens with padding between", ids, holes)
    refused("sequence 2: attention_mask has 0 tokens", ids, mask * torch.tensor([[1], [1], [0]]))
    refused("of 0 and 1", ids, mask * 2)
    refused(r"attention_mask has shape \[3, 10\]", ids, mask[:, :10])
    refused(r"shape \[33\]", ids.flatten())
    refused("2 prompt_lens for 3", ids, mask, prompt_lens=[1, 2])
    refused("prompt_len is 9", ids, mask, prompt_lens=[9, 1, 1])
    refused(r"\[\[3, 11\]\] do not add up to .*\[3, 9\]", ids[:, :9], error=r3.CaptureError)
    refused("do not add up", ids[:2], error=r3.CaptureError)
    rec.clear()
    assert rec.routed_experts.shape == (0, len(rec.spec.moe_layers), rec.spec.top_k)
    refused("do not add up", ids, mask, error=r3.CaptureError)


# --- hooks


def hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def routers(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.endswith("Router")]


@contextmanager
def routers_return(model: Any, change: Any) -> Iterator[None]:
    """Within the block the last router of the model returns change(logits, scores, indices)."""
    router = routers(model)[-1]
    original = router.forward
    router.forward = lambda x: change(*original(x))
    try:
        yield
    finally:
        router.forward = original


def test_hooks_go_and_recorders_do_not_disturb_each_other():
    from r3.engine_hooks.hf_recorder import record_routing

    model = make("qwen3_moe")
    before = hooks(model)
    with torch.no_grad(), record_routing(model) as outer:
        model(batch())  # input_ids by position
        with record_routing(model) as inner:
            model(input_ids=batch(1))
        model(input_ids=batch(2))
    assert hooks(model) == before
    assert (len(outer.forwards), len(inner.forwards)) == (3, 1)
    np.testing.assert_array_equal(outer.forwards[1], inner.routed_experts)
    np.testing.assert_array_equal(outer.routed_experts, np.concatenate(outer.forwards))
    assert not (outer.forwards[0] == outer.forwards[1]).all()

    with pytest.raises(KeyError), record_routing(model):
        raise KeyError
    assert hooks(model) == before


def test_a_forward_pass_that_fails_leaves_nothing():
    from r3.engine_hooks.hf_recorder import record_routing

    model = make("qwen3_moe")

    def fail(*_: Any) -> None:
        raise KeyError

    with torch.no_grad(), record_routing(model) as rec:
        with pytest.raises(KeyError), routers_return(model, fail):
            model(input_ids=batch())
        assert rec.forwards == []
        model(input_ids=batch(1))
    np.testing.assert_array_equal(
        rec.routed_experts, record(model, input_ids=batch(1)).routed_experts
    )


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_gradients_and_recomputation(checkpointing):
    """checkpointing: none, or layers run again in the backward pass, use_reentrant or not."""
    from r3.engine_hooks.hf_recorder import record_routing

    def gradients(recorded: bool) -> tuple[Any, Any]:
        model = make("qwen3_moe").train()
        if checkpointing is not None:
            options = {"use_reentrant": checkpointing}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        rec = None
        if recorded:
            with record_routing(model) as rec:
                model(input_ids=batch(), labels=batch()).loss.backward()
        else:
            model(input_ids=batch(), labels=batch()).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, rec

    plain, _ = gradients(recorded=False)
    grads, rec = gradients(recorded=True)
    assert plain.keys() == grads.keys()
    assert any("gate.weight" in n and g.abs().sum() > 0 for n, g in grads.items())
    for name, value in plain.items():
        torch.testing.assert_close(grads[name], value, rtol=0, atol=0)
    assert len(rec.forwards) == 1
    np.testing.assert_array_equal(
        rec.routed_experts, record(make("qwen3_moe"), input_ids=batch()).routed_experts
    )
    assert len(rec.traces(batch())) == 3


def test_impossible_rows_raise():
    model = make("qwen3_moe")
    spec = RouterSpec.from_hf_config(model.config)
    layer = spec.moe_layers[-1]

    def refused(change: Any, error: type, words: str) -> None:
        with pytest.raises(error, match=words), routers_return(model, change):
            record(model, input_ids=batch())

    # on a module that does not use them, so that only the recorder can object
    for m in model.modules():
        if hasattr(m, "experts"):
            m.experts.forward = lambda x, *_: x

    def first(indices: Any, value: Any) -> Any:
        changed = indices.clone()
        changed[4, 0] = value
        return changed

    many = spec.num_experts
    where = f"forward pass 0: row 4, layer {layer}"
    refused(lambda a, b, i: (a, b, first(i, many)), r3.TraceError, f"{where}: expert id {many}")
    refused(lambda a, b, i: (a, b, first(i, -1)), r3.TraceError, f"{where}: expert id -1")
    refused(lambda a, b, i: (a, b, first(i, i[4, 1])), r3.TraceError, f"{where}: .* twice")
    refused(lambda a, b, i: (a, b, i[1:]), r3.CaptureError, "rows per layer .*expected 33 in each")
    kind = f"layer {layer}: Qwen3MoeTopKRouter returns"
    refused(lambda a, b, i: (a, b, a), r3.UnsupportedError, kind)
    refused(lambda a, b, i: (a, b, i[:, :1]), r3.UnsupportedError, kind)
    refused(lambda a, b, i: (i, b, i), r3.UnsupportedError, kind)


def test_scores_of_llama4_that_do_not_show_the_choice():
    model = make("llama4_text", num_experts_per_tok=2)

    def lose(scores: Any, logits: Any) -> tuple[Any, Any]:
        scores = scores.clone()
        scores[3] = 0.0  # as bfloat16 may round a very low score
        return scores, logits

    with pytest.raises(r3.CaptureError, match="row 3 uses 0 experts"), routers_return(model, lose):
        record(model, input_ids=batch())


def test_a_router_that_is_bypassed():
    model = make("qwen3_moe")
    *_, block = (m for m in model.modules() if type(m).__name__ == "Qwen3MoeSparseMoeBlock")
    block.forward = lambda x: x
    layer = RouterSpec.from_hf_config(model.config).moe_layers[-1]
    with pytest.raises(r3.CaptureError, match=rf"routers of layers \[{layer}\] did not report"):
        record(model, input_ids=batch())


def test_models_that_are_refused():
    import transformers as t

    from r3.engine_hooks.hf_recorder import record_routing

    def refused(model: Any, words: str, spec: RouterSpec | None = None) -> None:
        with pytest.raises(r3.UnsupportedError, match=words), record_routing(model, spec):
            pass

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 32}
    dense = t.Qwen3ForCausalLM(t.Qwen3Config(**sizes))
    refused(dense, "'qwen3' has no routed experts")
    refused(torch.nn.Linear(2, 2), "Linear is not a transformers model")
    two = RouterSpec(4, 2, (0, 1), 2)
    refused(dense, r"Qwen3ForCausalLM: no stacks .*routers in \[\].*transformers 5", two)

    model = make("qwen3_moe")
    before = hooks(model)
    spec = RouterSpec.from_hf_config(model.config)
    fields = spec.to_dict()
    refused(model, "no stacks", RouterSpec.from_dict(fields | {"moe_layers": [0]}))
    wrong = RouterSpec.from_dict(fields | {"top_k": spec.top_k + 1})
    refused(model, re.escape(f"layer {spec.moe_layers[0]}: Qwen3MoeTopKRouter.top_k is"), wrong)

    class Compiled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod, self.config = model, model.config

    refused(Compiled(), "compiled")
    experts = next(m.experts for m in model.modules() if hasattr(m, "experts"))
    experts._is_expert_parallel = True
    refused(model, "expert parallel")
    assert hooks(model) == before


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "llama4"])
def test_the_language_model_of_a_multimodal_one(family):
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**varied(family, 0))
    if family == "llama4":
        config.vision_config.update({"hidden_size": 32, "num_attention_heads": 2})
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    language = model.model.language_model if hasattr(model, "model") else model.language_model
    language.to_empty(device="cpu")
    with torch.no_grad():
        for p in (*language.parameters(), *language.buffers()):
            if p.is_floating_point():
                p.normal_(std=0.1)
    rec = record(model, input_ids=batch())
    assert rec.spec == RouterSpec.from_hf_config(config)
    assert len(rec.traces(batch())) == 3
