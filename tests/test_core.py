"""The core nouns: RouterSpec, RolloutId, Provenance, RoutingTrace, RoutingBatch and the checks."""

from __future__ import annotations

import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import r3
from r3 import Column, Provenance, RolloutId, RouterSpec, RoutingBatch, RoutingTrace
from r3.checks import check_distinct, check_shape_and_range, find_suspicious, sort_rows

SPEC = RouterSpec(num_experts=64, top_k=4, moe_layers=(1, 2, 4), num_layers=5)
NAME = RolloutId("run", "g", 1, 2, 3)


def random_ids(rows: int, spec: RouterSpec = SPEC, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scores = rng.random((rows, len(spec.moe_layers), spec.num_experts))
    return scores.argsort(axis=-1)[..., : spec.top_k]


def build(n: int = 12, spec: RouterSpec = SPEC, **changes: object) -> RoutingTrace:
    values = {
        "spec": spec,
        "token_ids": np.arange(n) % 97,
        "routed_experts": random_ids(n - 1, spec),
        "prompt_len": 3,
        "rollout_id": NAME,
    }
    return RoutingTrace.build(**(values | changes))


def refused(*words: str, **changes: object) -> None:
    """Building fails with a message that names the rollout and says all the words."""
    with pytest.raises(r3.TraceError) as caught:
        build(**changes)
    for word in ("run/g/1/2/3", *words):
        assert word in str(caught.value)


# --- RouterSpec


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 3, "mlp_only_layers": [2]},
        {"mlp_only_layers": [0, 5]},
    ],
    ids=str,
)
def test_qwen3_moe_against_the_layers_transformers_builds(fields):
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=6,
        num_experts=16,
        num_experts_per_tok=3,
        hidden_size=32,
        moe_intermediate_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        **fields,
    )
    with torch.device("meta"):
        layers = Qwen3MoeForCausalLM(config).model.layers
    sparse = tuple(i for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts"))
    expected = RouterSpec(16, 3, sparse, 6)
    assert 0 < len(sparse) <= 6
    assert RouterSpec.from_hf_config(config) == expected
    assert RouterSpec.from_hf_config(config.to_dict()) == expected


@pytest.mark.slow
def test_mixtral_config():
    from transformers import MixtralConfig

    config = MixtralConfig(num_hidden_layers=3, num_local_experts=8, num_experts_per_tok=2)
    expected = RouterSpec(8, 2, (0, 1, 2), 3)
    assert RouterSpec.from_hf_config(config) == expected
    assert RouterSpec.from_hf_config(config.to_dict()) == expected
    # config.json as published, with the older name
    published = {"model_type": "mixtral", "num_hidden_layers": 3, "num_experts_per_tok": 2}
    assert RouterSpec.from_hf_config(published | {"num_local_experts": 8}) == expected


def test_configs_that_are_refused():
    with pytest.raises(r3.UnsupportedError, match=r"'qwen3' has no routed experts.*dense"):
        RouterSpec.from_hf_config({"model_type": "qwen3", "num_hidden_layers": 2})
    with pytest.raises(r3.UnsupportedError, match=r"'newmoe'.*mixtral, qwen3_moe.*RouterSpec\("):
        RouterSpec.from_hf_config({"model_type": "newmoe", "n_routed_experts": 8})
    with pytest.raises(r3.SpecError, match="num_experts_per_tok"):
        RouterSpec.from_hf_config(
            {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8}
        )
    with pytest.raises(r3.UnsupportedError, match="no sparse layer"):
        RouterSpec.from_hf_config(
            {
                "model_type": "qwen3_moe",
                "num_hidden_layers": 2,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "mlp_only_layers": [0, 1],
            }
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 65537}, "at most 65536"),
        ({"top_k": True}, "top_k is True"),
        ({"top_k": 65}, "top_k is 65"),
        ({"moe_layers": ()}, "empty"),
        ({"moe_layers": (2, 1)}, "ascending"),
        ({"moe_layers": (1, 1)}, "ascending"),
        ({"moe_layers": (-1,)}, "ascending"),
        ({"moe_layers": (5,)}, "0..4"),
        ({"moe_layers": (1.0,)}, "integers"),
        ({"score_function": "relu"}, "relu"),
        ({"num_groups": 4}, "together"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups is 5, expected 1..4"),
        ({"num_groups": "4", "topk_groups": 1}, "num_groups is '4'"),
    ],
    ids=str,
)
def test_specs_of_no_model(changes, words):
    with pytest.raises(r3.SpecError, match=re.escape(words)):
        RouterSpec.from_dict(SPEC.to_dict() | changes)


def test_spec_round_trip_and_plain_integers():
    spec = RouterSpec(np.int64(64), np.int32(4), np.arange(3), 5, "sigmoid", np.int64(8), 2)
    assert RouterSpec.from_dict(spec.to_dict()) == spec
    values = spec.to_dict()
    assert type(values["num_groups"]) is type(values["num_experts"]) is int
    with pytest.raises(r3.SpecError, match="no field 'later'"):
        RouterSpec.from_dict(values | {"later": 1})
    with pytest.raises(r3.SpecError, match="moe_layers"):
        RouterSpec.from_dict({"num_experts": 8, "top_k": 2, "num_layers": 2})


# --- RolloutId and Provenance


def test_rollout_id():
    assert RolloutId.parse(str(NAME)) == NAME
    assert str(RolloutId("run")) == "run/0/0/0/0"
    assert RolloutId.unique() != RolloutId.unique()
    for text in ("", "run", "run/g/1/2", "run/g/1/2/-3", "run/g/1/2/x", "/g/1/2/3", "a/b/c/1/2/3"):
        with pytest.raises(r3.TraceError):
            RolloutId.parse(text)
    with pytest.raises(r3.TraceError):
        RolloutId.parse("run/g/0/0/" + "9" * 5000)
    for wrong in ({"run": ""}, {"run": "a/b"}, {"run": 1}, {"run": "r", "sample": -1}):
        with pytest.raises(r3.TraceError):
            RolloutId(**wrong)


def test_provenance():
    made = Provenance(
        engine="vllm", parallel={"tensor": 2}, sampling={"top_p": 0.9}, extra={"a": 1}
    )
    assert Provenance.from_dict(made.to_dict()) == made
    assert Provenance().to_dict() == {}
    for known in (True, False):  # False is known, None is not
        made = Provenance(model_revision="main", head_dtype="float32", batch_invariant=known)
        assert made.to_dict()["batch_invariant"] is known
        assert Provenance.from_dict(made.to_dict()) == made
    later = Provenance.from_dict({"engine": "vllm", "later": [1], "extra": {"a": 1}})
    assert later.extra == {"a": 1, "later": [1]}
    assert Provenance.from_dict(later.to_dict()) == later
    for wrong in (
        {"engine": 5},
        {"sampling": 3},
        {"extra": "x", "later": 1},
        {"model": None},
        {"batch_invariant": "true"},
    ):
        with pytest.raises(r3.TraceError, match=r"Provenance\."):
            Provenance.from_dict(wrong)


# --- RoutingTrace


def test_build_brings_arrays_to_their_forms():
    ids = random_ids(11)
    trace = build(routed_experts=ids.astype(np.int64), logprobs=[-1.0] * 9)
    assert trace.routed_experts.dtype == np.uint8
    assert trace.token_ids.dtype == np.int32
    assert (trace.num_tokens, trace.num_rows) == (12, 11)
    assert trace.valid.all()
    assert "valid" not in trace.columns
    assert np.isnan(trace.logprobs[:3]).all()
    assert (trace.logprobs[3:] == -1).all()
    # all decoder layers, the dense ones as zeros
    wide = np.zeros((11, 5, 4), int)
    wide[:, [1, 2, 4]] = ids
    assert (build(routed_experts=wide).routed_experts == ids).all()


def test_shape_and_dtype_are_checked():
    ids = random_ids(11)
    refused("[11, 2, 4]", "MoE layers=3", routed_experts=ids[:, :2])
    refused("10 rows", "expected 11", routed_experts=ids[:10])
    refused("12 rows", "expected 11", routed_experts=random_ids(12))
    refused("[11, 12]", routed_experts=ids.reshape(11, 12))
    refused("float64", "integers", routed_experts=ids.astype(float))
    refused("prompt_len is 13", "0..12", prompt_len=13)
    refused("prompt_len is 1.5", prompt_len=1.5)
    refused("at least one", token_ids=[])
    refused("token 2", "-5", token_ids=[1, 2, -5] + [1] * 9)
    refused("token 1", str(2**31), token_ids=[1, 2**31] + [1] * 10)
    refused("valid", "bool [11]", valid=np.ones(12, bool))
    refused("logprobs", "12 plain values", logprobs=np.zeros(4))


def test_impossible_ids_name_row_layer_found_and_expected():
    ids = random_ids(11)
    ids[7, 2, 1] = 64
    refused("row 7", "layer 4", "expert id 64", "0..63", routed_experts=ids)
    ids = random_ids(11)
    ids[2, 0] = [9, 8, 9, 7]
    refused("row 2", "layer 1", "[9, 8, 9, 7]", "4 different", routed_experts=ids)
    ids = random_ids(11)
    ids[3, 1, 2] = -1
    refused("row 3", "layer 2", "expert id -1", "missing as a whole", routed_experts=ids)
    ids = random_ids(11)
    ids[3, 1] = -1  # one layer of a row
    refused("row 3", "layer 2", "expert id -1", routed_experts=ids)


def test_missing_rows_are_a_mask():
    ids = random_ids(11)
    ids[[0, 10]] = -1
    mask = np.ones(11, bool)
    mask[5] = False  # whatever stands in a row that is not valid is dropped
    trace = build(routed_experts=ids, valid=mask)
    assert np.flatnonzero(~trace.valid).tolist() == [0, 5, 10]
    assert not trace.routed_experts[[0, 5, 10]].any()
    columns = dict(trace.columns)
    filled = trace.routed_experts.copy()
    filled[5, 0] = [1, 2, 3, 4]
    columns["routed_experts"] = Column(filled, "row")
    with pytest.raises(r3.TraceError, match=r"row 5 is missing.*\[1, 2, 3, 4\].*layer 1"):
        RoutingTrace(SPEC, 3, columns)


def test_arrays_are_copied_and_cannot_be_changed():
    """A collector that reuses its buffers, and code that writes into a trace after its checks."""
    ids, valid = random_ids(11).astype(SPEC.dtype), np.ones(11, bool)
    valid[4] = False
    tokens, values = np.arange(12, dtype=np.int32), np.full(9, -1, np.float32)
    reward = np.zeros(12)
    trace = build(
        token_ids=tokens,
        routed_experts=ids,
        valid=valid,
        logprobs=values,
        extra={"reward": Column(reward, "token")},
    )
    before = trace.digest
    for array in (ids, tokens, values, reward):
        array[:] = 1
    valid[:] = True
    del trace.__dict__["digest"]
    assert trace.digest == before
    for column in trace.columns.values():
        with pytest.raises(ValueError, match="read-only"):
            column.data[0] = 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
def test_log_probabilities_are_checked(value):
    values = np.full(12, -1.0)
    values[:3] = np.nan
    values[5] = value
    refused("token 5: log-probability", "expected a finite number", logprobs=values)
    values[5], values[2] = -1, -1
    refused("token 2: log-probability -1.0", "expected NaN in the prompt", logprobs=values)


def test_columns_are_checked():
    extra = Column(np.arange(12), "token")
    found = build(extra={"reward": extra}).columns["reward"]
    assert (found.align, found.version, found.data.tolist()) == ("token", 1, list(range(12)))
    refused("'reward'", "11 plain values", extra={"reward": Column(np.arange(12), "row")})
    refused("'reward'", "byte", extra={"reward": Column(np.arange(12), "byte")})
    refused("'reward'", "object", extra={"reward": Column(np.array([None] * 12), "token")})
    refused("own argument", extra={"token_ids": extra})
    columns = dict(build().columns)
    columns["token_ids"] = Column(columns["token_ids"].data, "token", version=2)
    with pytest.raises(r3.TraceError, match="version 2, expected 1"):
        RoutingTrace(SPEC, 3, columns)
    del columns["token_ids"]
    with pytest.raises(r3.TraceError, match="'token_ids' is missing"):
        RoutingTrace(SPEC, 3, columns)


def test_one_token_has_no_rows():
    trace = build(1, prompt_len=1)
    assert trace.num_rows == 0
    assert trace.suspicions == []


# --- suspicious content


def suspicious(*expected: tuple[str, int | None, int, int], **changes: object) -> None:
    with pytest.warns(r3.SuspiciousRoutingWarning, match="run/g/1/2/3"):
        trace = build(**changes)
    found = [(s.kind, s.layer, s.rows, s.first_row) for s in trace.suspicions]
    assert found == list(expected)


def test_random_routing_is_not_suspicious():
    for seed in range(5):
        assert find_suspicious(random_ids(200, seed=seed), SPEC) == []


def test_profiling_run_look_alike():
    """The first 20 rows hold one and the same routing: what dummy inputs leave behind."""
    ids = random_ids(99)
    ids[:20] = ids[0]
    suspicious(("repeated_rows", None, 20, 0), n=100, routed_experts=ids)
    # order within a row does not hide it, one repeated token explains it
    shuffled = ids.copy()
    shuffled[3] = shuffled[3, :, ::-1]
    suspicious(("repeated_rows", None, 20, 0), n=100, routed_experts=shuffled)
    assert not build(100, routed_experts=ids, token_ids=[7] * 100).suspicions
    ids[15:] = random_ids(84, seed=1)
    assert not build(100, routed_experts=ids).suspicions


def test_one_constant_layer():
    """Reported only if it is constant over a whole sequence that is long enough and varied."""
    ids = random_ids(99)
    ids[:, 1] = ids[30, 1]
    suspicious(("constant_layer", 2, 99, 0), n=100, routed_experts=ids)
    assert not build(100, routed_experts=ids, token_ids=[7] * 100).suspicions
    assert not build(20, routed_experts=ids[:19]).suspicions
    ids[0] = random_ids(1, seed=5)[0]
    assert not build(100, routed_experts=ids).suspicions


@pytest.mark.parametrize("shift", [0, 5, 62])
def test_arange_fillers(shift):
    ids = random_ids(11)
    ids[9:] = (np.arange(4) + shift) % 64
    suspicious(("filler_rows", None, 2, 9), routed_experts=ids)
    ids = random_ids(11)
    ids[4] = np.arange(12).reshape(3, 4) + 50  # another stretch per layer
    suspicious(("filler_rows", None, 1, 4), routed_experts=ids)


def test_arange_is_possible_with_few_experts():
    spec = RouterSpec(8, 2, (0, 1), 2)
    ids = np.tile([0, 1], (11, 2, 1))
    assert not build(spec=spec, routed_experts=ids).suspicions


def test_all_zero_layer_of_a_top_1_model():
    spec = RouterSpec(16, 1, (0, 1, 3), 4)
    ids = random_ids(11, spec)
    ids[:, 2] = 0
    suspicious(("all_zero_layer", 3, 11, 0), spec=spec, routed_experts=ids)
    # one row of expert 0 is a choice
    assert not build(2, prompt_len=1, spec=spec, routed_experts=ids[:1]).suspicions


# --- digest


def test_digest_ignores_order_within_a_row_identity_and_provenance():
    ids = random_ids(11)
    same = build(routed_experts=ids[..., ::-1], rollout_id=RolloutId("x"))
    other = build(routed_experts=ids, provenance=Provenance(engine="vllm"))
    assert same.digest == other.digest == build().digest
    assert re.fullmatch("[0-9a-f]{32}", same.digest)


def test_digest_depends_on_everything_else():
    ids = random_ids(11)
    swapped = ids[[1, 0, *range(2, 11)]]
    layers = ids[:, [1, 0, 2]]
    missing = np.ones(11, bool)
    missing[4] = False
    big = Column(np.arange(12, dtype=">i4"), "token")
    little = Column(np.arange(12, dtype="<i4"), "token")
    sigmoid = RouterSpec(64, 4, (1, 2, 4), 5, "sigmoid")
    traces = [
        build(),
        build(routed_experts=swapped),
        build(routed_experts=layers),
        build(valid=missing),
        build(prompt_len=4),
        build(token_ids=[1] * 12),
        build(logprobs=np.zeros(9)),
        build(spec=sigmoid),
        build(spec=RouterSpec(64, 4, (1, 2, 3), 5)),
        build(extra={"a": little}),
        build(extra={"b": little}),
        build(extra={"a": Column(little.data, "token", 2)}),
        build(extra={"a": Column(little.data[:11], "row")}),
        build(extra={"a": Column(little.data.astype("<i8"), "token")}),
    ]
    digests = [t.digest for t in traces]
    assert len(set(digests)) == len(digests)
    assert build(extra={"a": big}).digest == build(extra={"a": little}).digest


FROZEN = {
    # one per form of trace, as the first version computed them: files hold them
    "small": "7e77411ca95585704e5ea43200c490f9",
    "columns": "693744595f7decab178851f1238efaf1",
    "wide": "158583149e97c85f86ec4f756be54d95",
    "top_1": "b31f3a72d57c204d11c266974060e7de",
    "big": "45ff1b54366ebb34fb57818cd04148fe",
    "one_token": "e97f1488fadc4b7b8a6f3eb20972eb7a",
}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("form", FROZEN)
def test_digests_stay_what_they_were(form, ordered):
    spec, rows, step = {
        "small": (SPEC, 11, 61),
        "columns": (SPEC, 40, 5),
        "wide": (RouterSpec(300, 6, (0, 1), 2, "sigmoid"), 40, 293),
        "top_1": (RouterSpec(16, 1, (0, 1, 2), 3), 40, 1),
        "big": (RouterSpec(128, 8, tuple(range(48)), 48), 3000, 101),
        "one_token": (SPEC, 0, 1),
    }[form]
    row, layer, k = np.ogrid[:rows, : len(spec.moe_layers), : spec.top_k]
    ids = (row * row * 7 + layer * 3 + k * step) % spec.num_experts
    more = {}
    if form in ("columns", "wide"):
        more["valid"] = ~np.isin(np.arange(rows), [0, 7, 39])
    if form == "columns":
        more["weight_versions"] = [3] * 20 + [4] * 20
        more["logprobs"] = -np.arange(39) / 4
        more["extra"] = {
            "reward": Column(np.arange(41) / 8, "token"),
            "mark": Column(np.arange(40).astype(">i2"), "row", 3),
        }
    trace = RoutingTrace.build(
        spec=spec,
        token_ids=np.arange(rows + 1) * 31 % 1009,
        routed_experts=np.sort(ids, axis=-1) if ordered else ids,
        prompt_len=min(2, rows + 1),
        **more,
    )
    assert trace.digest == FROZEN[form]


# --- ascending rows


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 30),
    layers=st.integers(1, 3),
    top_k=st.integers(1, 23),
    dtype=st.sampled_from(["uint8", "uint16", "int32", ">u2"]),
    ascending=st.sampled_from([0, 0.5, 1]),
    cleared=st.sampled_from([0, 0.5, 1]),
)
@settings(max_examples=300, deadline=None)
def test_rows_are_sorted(seed, rows, layers, top_k, dtype, ascending, cleared):
    """Against numpy; what is ascending is not copied, nothing is changed in place."""
    rng = np.random.default_rng(seed)
    ids = rng.random((rows, layers, 24)).argsort(axis=-1)[..., :top_k].astype(dtype)
    valid = rng.random(rows) < 0.8
    done = valid & (rng.random(rows) < ascending)
    ids[done] = np.sort(ids[done], axis=-1)
    ids[~valid & (rng.random(rows) < cleared)] = 0
    before = ids.copy()
    ordered = sort_rows(ids, valid)
    assert (ids == before).all()
    assert (ordered == np.sort(ids, axis=-1)).all()
    assert (ordered is ids) == (ordered == ids).all()


def test_checks_look_at_every_piece_of_a_long_rollout():
    """Far more rows than are looked at together, in each order; the position is the rollout's."""
    ids = np.tile(random_ids(500), (120, 1, 1)).astype(np.uint8)
    for made in (ids, np.sort(ids, axis=-1)):
        valid = np.ones(60000, bool)
        check_distinct(made, valid, SPEC, "x")
        assert find_suspicious(made, SPEC) == []
        wrong = made.copy()
        wrong[58500, 2, 1] = 64
        with pytest.raises(r3.TraceError, match="row 58500, layer 4: expert id 64"):
            check_shape_and_range(wrong, valid, SPEC, "x")
        wrong[58500, 2] = wrong[58500, 2, 0]
        with pytest.raises(r3.TraceError, match=r"row 58500, layer 4: experts .* one expert twice"):
            check_distinct(wrong, valid, SPEC, "x")
        valid[58500] = False
        check_distinct(wrong, valid, SPEC, "x")
        repeated = made.copy()
        repeated[58000:58030] = repeated[58000]
        repeated[58600] = np.arange(4)
        found = [(f.kind, f.rows, f.first_row) for f in find_suspicious(repeated, SPEC)]
        assert found == [("repeated_rows", 30, 58000), ("filler_rows", 1, 58600)]


@pytest.mark.slow
def test_a_trace_keeps_no_second_copy_of_its_rows():
    """In whatever order they are. Temporaries are small, with one copy if rows must be sorted."""
    spec = RouterSpec(64, 8, tuple(range(12)), 12)
    ids = np.tile(random_ids(500, spec), (60, 1, 1)).astype(np.uint8)
    for made, copies in ((np.sort(ids, axis=-1), 0), (ids, 1)):
        columns = dict(build(30001, spec, routed_experts=made).columns)
        tracemalloc.start()
        trace = RoutingTrace(spec, 3, columns)
        assert trace.digest
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept < 0.1 * ids.nbytes
        assert peak < (copies + 0.6) * ids.nbytes


# --- RoutingBatch


def test_batch():
    ids = random_ids(4)
    ids[1] = -1
    a = build(5, routed_experts=ids, rollout_id=RolloutId("a"), logprobs=np.zeros(2))
    b = build(3, rollout_id=RolloutId("b"))
    batch = RoutingBatch.from_traces([a, b])
    assert (len(batch), batch.num_tokens) == (2, 8)
    assert batch.cu_seqlens.tolist() == [0, 5, 8]
    assert batch.valid.tolist() == [True, False, True, True, False, True, True, False]
    assert (batch.routed_experts[5:7] == b.routed_experts).all()
    assert not batch.routed_experts[~batch.valid].any()
    assert np.isnan(batch.logprobs[[0, 1, 2, 5, 6, 7]]).all()
    assert (batch.logprobs[3:5] == 0).all()
    assert batch.prompt_lens.tolist() == [3, 3]
    assert batch.locate(4) == (RolloutId("a"), 4)
    assert batch.locate(5) == (RolloutId("b"), 0)
    with pytest.raises(r3.TraceError, match="at least one"):
        RoutingBatch.from_traces([])
    other = build(3, RouterSpec(64, 4, (0, 1, 2), 5), rollout_id=RolloutId("c"))
    with pytest.raises(r3.TraceError, match=r"c/0/0/0/0.*a/0/0/0/0"):
        RoutingBatch.from_traces([a, other])


# --- what is suspicious and what is not


def test_looping_tokens_and_skewed_routers_are_not_suspicious():
    """Honest repetition: a rollout that loops over two tokens, one layer that has a favourite."""
    rng = np.random.default_rng(3)
    ids, tokens = np.repeat(random_ids(1), 200, axis=0), np.arange(200) % 2
    assert find_suspicious(ids, SPEC, token_ids=tokens) == []
    assert [f.kind for f in find_suspicious(ids, SPEC)] == ["repeated_rows"]
    top_1 = RouterSpec(4, 1, (0,), 1)
    tokens = rng.integers(0, 999, 1000)
    for _ in range(50):
        skewed = rng.choice(4, (1000, 1, 1), p=[0.75, 0.15, 0.05, 0.05])
        assert find_suspicious(skewed, top_1, token_ids=tokens) == []


def test_profiling_rows_before_real_ones_are_found():
    """The shape of a real log: thousands of equal rows, then routing; some tokens repeat."""
    rng = np.random.default_rng(4)
    ids = np.concatenate([np.repeat(random_ids(1), 900, axis=0), random_ids(300, seed=5)])
    (found,) = find_suspicious(ids, SPEC, token_ids=rng.integers(0, 50, 1200))
    assert (found.kind, found.layer, found.rows, found.first_row) == ("repeated_rows", None, 900, 0)
