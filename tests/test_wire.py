"""Round trips through every framework's format."""

from __future__ import annotations

import base64
import dataclasses
import json
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import r3
from r3 import FormatError, R3Error, RouterSpec, RoutingBatch
from r3.storage.wire import FORMATS, JSON_FORMATS, from_wire, to_wire
from r3.storage.wire.payload import numbers
from wire_tools import (
    BY_HAND,
    FULL,
    IDS,
    MARKED,
    OFFSET,
    PROMPT,
    TOKENS,
    TOY,
    all_layers,
    assert_read,
    assert_same,
    b64,
    batches,
    make_batch,
    nemo,
    npy,
    prime,
    read,
    round_trip,
    sglang,
    skyrl,
    vllm,
)

WITH_LOGPROBS = ("slime", "miles", "verl", "prime-rl")


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_written_is_read_back(name, data):
    batch = data.draw(batches(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", r3.SuspiciousRoutingWarning)
        if looks_filled_in(batch, name):
            with pytest.raises(r3.UnsupportedError, match="holds what may be filled in"):
                to_wire(batch, name)
            return
        found = round_trip(batch, name)
        assert_same(found, batch)
        if name in WITH_LOGPROBS and (
            name != "verl" or "rollout_log_probs" in to_wire(batch, name)
        ):
            np.testing.assert_array_equal(found.logprobs, batch.logprobs)


def looks_filled_in(batch: RoutingBatch, name: str) -> bool:
    """Whether a row is what the format fills in where there is none, as small models have them."""
    k = batch.spec.top_k
    if name not in ("slime", "skyrl") and not (k == 1 and name in ("verl", "prime-rl")):
        return False
    ids = batch.routed_experts[batch.valid]
    return bool((ids == np.arange(k)).all(axis=(1, 2)).any())


@pytest.mark.parametrize("name", BY_HAND)
def test_payload_made_by_hand(name):
    assert_read(read(BY_HAND[name](), name))


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("last", ["zeros", "data", "arange"])
def test_surplus_row_of_the_last_token_is_left_out(name, last):
    ids = IDS if name in ("nemo-rl", "megatron") else FULL
    row = {"zeros": np.zeros((1, 4, 2), int), "data": IDS[:1], "arange": [[[0, 1]] * 4]}[last]
    row = np.asarray(row) if ids is IDS else all_layers(np.asarray(row))
    assert_read(read(BY_HAND[name](np.concatenate([ids, row])), name))


@pytest.mark.parametrize("name", BY_HAND)
def test_any_other_number_of_rows_is_refused(name):
    if name == "verl":
        return  # rows are told by the columns of their tokens
    ids = IDS if name in ("nemo-rl", "megatron") else FULL
    for wrong in (ids[:10], ids[1:], np.concatenate([ids, ids[:2]]), ids[:0]):
        with pytest.raises(r3.TraceError, match=r"rows|bytes"):
            read(BY_HAND[name](wrong), name)
    bad = np.concatenate([ids, np.full_like(ids[:1], 99)])
    with pytest.raises(r3.TraceError, match=r"surplus row 11.*99"):
        read(BY_HAND[name](bad), name)


@pytest.mark.parametrize("name", [n for n in BY_HAND if n not in ("sglang", "megatron")])
def test_moe_layers_alone_or_all_layers(name):
    assert_read(read(BY_HAND[name](IDS), name))
    assert_read(read(BY_HAND[name](FULL), name))
    with pytest.raises(r3.TraceError, match=r"shape \[.*the 4 MoE layers or all 6"):
        read(BY_HAND[name](FULL[:, :5]), name)
    with pytest.raises(r3.TraceError, match=r"shape \[.*top_k=2"):
        read(BY_HAND[name](FULL[..., :1]), name)


@pytest.mark.parametrize("name", [n for n in BY_HAND if n != "megatron"])
def test_dense_layers_hold_nothing(name):
    ids = FULL.copy()
    ids[3, 1, 0] = 4
    with pytest.raises(
        r3.TraceError, match=r"sequence 0: row 3, layer 1: experts \[4, 0\] in a dense layer"
    ):
        read(BY_HAND[name](ids), name)


@pytest.mark.parametrize("name", ["vllm-0.21", "sglang", "miles", "slime", "nemo-rl", "megatron"])
def test_rows_of_minus_one_are_missing_as_a_whole_or_not_at_all(name):
    ids = IDS.copy() if name in ("nemo-rl", "megatron") else FULL.copy()
    ids[[0, 4]] = -1
    assert_read(read(BY_HAND[name](ids), name), missing=(0, 4))
    ids[4, -1, 1] = 3
    with pytest.raises(r3.TraceError, match=r"row 4, layer 2: expert id -1.*as a whole"):
        read(BY_HAND[name](ids), name)


@pytest.mark.parametrize("name", ["verl", "prime-rl"])
def test_rows_of_zeros_are_missing_by_convention(name):
    ids = FULL.copy()
    ids[[2, 7]] = 0
    assert_read(read(BY_HAND[name](ids), name), missing=(2, 7))
    ids[7, 3] = [1, 0]  # one layer alone
    with pytest.raises(r3.TraceError, match=r"row 7, layer 2: experts \[0, 0\]"):
        read(BY_HAND[name](ids), name)


@pytest.mark.parametrize("name", ["vllm", "sglang", "slime", "nemo-rl", "skyrl"])
def test_rows_of_zeros_are_refused_elsewhere(name):
    ids = IDS.copy() if name == "nemo-rl" else FULL.copy()
    ids[2] = 0
    with pytest.raises(r3.TraceError, match=r"row 2, layer 2: experts \[0, 0\].*twice"):
        read(BY_HAND[name](ids), name)


@pytest.mark.parametrize("name", ["slime", "skyrl"])
def test_rows_of_arange_need_a_mask(name):
    ids = FULL.copy()
    ids[6, 2:] = [0, 1]
    with pytest.raises(r3.TraceError, match=r"row 6 is experts 0..1 in all layers.*valid="):
        read(BY_HAND[name](ids), name)
    valid = np.ones(11, bool)
    found = read(BY_HAND[name](ids), name, valid=[valid])
    assert found.valid[:-1].all()
    assert (found.routed_experts[6] == [0, 1]).all()
    valid[6] = False
    assert_read(read(BY_HAND[name](ids), name, valid=[valid]), missing=(6,))
    for wrong in ([valid[:5]], [valid.astype(int)], [valid, valid], []):
        with pytest.raises(r3.R3Error, match="valid"):
            read(BY_HAND[name](ids), name, valid=wrong)


@pytest.mark.parametrize("name", ["verl", "prime-rl", "slime", "skyrl"])
def test_expert_0_of_a_top_1_model_needs_a_mask(name):
    spec = RouterSpec(8, 1, (2, 3, 4, 5), 6)
    ids = FULL[..., :1].copy()
    ids[6] = 0
    with pytest.raises(r3.TraceError, match=r"row 6 is expert 0 in all layers.*valid="):
        read(BY_HAND[name](ids), name, spec)
    found = read(BY_HAND[name](ids), name, spec, valid=[np.ones(11, bool)])
    assert found.valid[:-1].all()
    with pytest.raises(r3.UnsupportedError, match="row 6 holds what may be filled in"):
        to_wire(found, name)


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in MARKED])
def test_a_missing_row_without_notation_is_not_written(name):
    missing = [np.zeros(11, bool), np.arange(11) == 8]
    batch = make_batch([(12, 5), (12, 5)], missing=missing)
    with pytest.raises(r3.UnsupportedError, match=rf"{name}: .*run/0/1/0/0: row 8 is missing"):
        to_wire(batch, name)
    batch = make_batch([(12, 5), (12, 5)], missing=[np.arange(11) < 4, np.arange(11) < 0])
    if name in OFFSET:
        assert_same(round_trip(batch, name), batch)
        # an engine's first row lies in the prompt
        batch = make_batch([(12, 5)], missing=[np.arange(11) < 6])
        with pytest.raises(r3.UnsupportedError, match="row 0 is missing"):
            to_wire(batch, name)
    else:
        with pytest.raises(r3.UnsupportedError, match="row 0 is missing"):
            to_wire(batch, name)


@pytest.mark.parametrize("name", BY_HAND)
def test_ids_of_a_load_balancer(name):
    """8 experts in 10 slots, slots 8 and 9 copies of 1 and 3."""
    slots = np.array([*range(8), 1, 3])
    physical = IDS.copy()
    physical[2, 1] = [8, 4]
    physical[5, 0] = [9, 0]
    ids = physical if name in ("nemo-rl", "megatron") else all_layers(physical)
    with pytest.raises(r3.TraceError, match=r"row 2, layer 3: expert id 8.*physical_to_logical="):
        read(BY_HAND[name](ids), name)
    found = read(BY_HAND[name](ids), name, physical_to_logical=slots)
    np.testing.assert_array_equal(found.routed_experts[:-1], slots[physical])


@pytest.mark.parametrize("name", [n for n in BY_HAND if n != "megatron"])
def test_tokens_in_the_payload_and_given_are_the_same(name):
    assert_read(read(BY_HAND[name](), name, token_ids=[TOKENS], prompt_lens=[PROMPT]))
    other = [*TOKENS[:7], 5, *TOKENS[8:]]
    with pytest.raises(r3.TraceError, match=r"sequence 0: token 7 is 107, expected 5 by token_ids"):
        read(BY_HAND[name](), name, token_ids=[other])
    with pytest.raises(r3.TraceError, match="12 token ids, expected 11"):
        read(BY_HAND[name](), name, token_ids=[TOKENS[:-1]])
    with pytest.raises(r3.TraceError, match=r"a prompt of 5 .* 4 by prompt_lens"):
        read(BY_HAND[name](), name, prompt_lens=[4])
    for more in ({"token_ids": [TOKENS, TOKENS]}, {"prompt_lens": []}, {"rollout_ids": ["a"] * 2}):
        with pytest.raises(r3.FormatError, match="entries, expected one for each of 1 sequences"):
            read(BY_HAND[name](), name, **more)


def test_payloads_alone_need_tokens():
    alone = {
        "vllm": vllm()["choices"][0]["routed_experts"],
        "sglang": sglang()["meta_info"]["routed_experts"],
        "nemo-rl": nemo()["routed_experts"],
        "prime-rl": prime()["routed_experts"],
        "skyrl": skyrl()["choices"][0]["routed_experts"],
        "r3": to_wire(read(vllm(), "vllm"), "r3")[0]["routed_experts"],
    }
    for name, payload in alone.items():
        given = {"token_ids": [TOKENS], "prompt_lens": [PROMPT]}
        for obj in (payload, [payload]):
            found = from_wire(obj, name, spec=TOY, **given)
            assert found.token_ids.tolist() == TOKENS
            assert found.valid[:-1].all()
        with pytest.raises(r3.FormatError, match="pass token_ids="):
            from_wire(payload, name, spec=TOY)
        with pytest.raises(r3.FormatError, match="pass prompt_lens="):
            from_wire(payload, name, spec=TOY, token_ids=[TOKENS])


def test_prompts_of_the_request_with_the_tokens_of_the_reply():
    """SkyRL's reply, and vLLM's without return_token_ids, lack the prompt's ids."""
    for name in ("skyrl", "vllm", "prime-rl"):
        reply = {"vllm": vllm, "skyrl": skyrl, "prime-rl": skyrl}[name]()
        del reply["prompt_token_ids"]
        with pytest.raises(r3.FormatError, match="no prompt token ids: pass token_ids="):
            read(reply, name)
        assert_read(read(reply, name, token_ids=[TOKENS]))
        with pytest.raises(r3.TraceError, match=r"token 5 is 105, expected 100 by token_ids"):
            read(reply, name, token_ids=[[*TOKENS[:5], *TOKENS[:7]]])


def test_text_and_bytes_that_are_not_the_format():
    good = vllm()["choices"][0]["routed_experts"]
    other = base64.b85encode(base64.b64decode(good)).decode()
    bits = good[:-2].rstrip("=")
    ends = b64(base64.b64decode(good))  # 132 + 128 bytes end in two padding characters
    assert ends.endswith("=")
    last = ends.rstrip("=")[-1]
    stray = ends.rstrip("=")[:-1] + chr(ord(last) + 1) + "=" * ends.count("=")
    for text in (other, good[:-1], bits, good + "\n", good.replace("A", "-"), "", stray, "é"):
        with pytest.raises(r3.FormatError, match="vllm: sequence 0: "):
            read(vllm(routed_experts=text), "vllm")
    with pytest.raises(r3.FormatError, match="sequence 0"):
        read(vllm(routed_experts=npy(np.array([object()], dtype=object).astype("U3"))), "vllm")


def test_unknown_format_and_other_objects():
    batch = make_batch([(3, 1)])
    for call in (lambda: to_wire(batch, "x"), lambda: from_wire({}, "x", spec=TOY)):
        with pytest.raises(r3.FormatError, match="'x' is not a format, expected one of vllm, "):
            call()
    for name in FORMATS:
        for obj in (7, None, object(), [7], [None], {"choices": 7}, b"", 1.5):
            with pytest.raises(r3.R3Error, match=f"{name}: "):
                read(obj, name)


def test_impossible_batch_is_not_written():
    batch = make_batch([(12, 5)])
    ids = batch.routed_experts.copy()
    ids[2, 0] = [5, 5]
    for name in FORMATS:
        with pytest.raises(r3.TraceError, match="row 2, layer 2"):
            to_wire(dataclasses.replace(batch, routed_experts=ids), name)


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_json_formats_are_json(name):
    batch = make_batch([(12, 5), (1, 1), (9, 0)], logprobs=True, replies=0.3)
    found = from_wire(json.loads(json.dumps(to_wire(batch, name))), name, spec=TOY)
    np.testing.assert_array_equal(found.token_ids, batch.token_ids)


def test_every_format_is_documented():
    text = (Path(__file__).resolve().parent.parent / "docs" / "wire.md").read_text()
    table = text[text.index("## The formats") : text.index("## Token ids")]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    assert {row[1].strip(" `"): row[-2].strip() for row in rows} == {
        name: "yes" if name in JSON_FORMATS else "no" for name in FORMATS
    }


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=9),
    st.binary(max_size=9),
    st.lists(st.integers(-1, 9), max_size=3),
    st.dictionaries(st.sampled_from(["data", "shape", "choices"]), st.none(), max_size=2),
    st.just(np.zeros((3, 2, 2), np.int16)),
    st.just(np.array(["x"], object)),
)


def spoiled(draw: Callable[..., Any], value: Any, junk: Any) -> Any:
    """`value` with junk somewhere in it."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        return value | {key: spoiled(draw, value[key], junk)}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], spoiled(draw, value[at], junk), *value[at + 1 :]]
    if isinstance(value, str) and value and draw(st.booleans()):
        at, other = draw(st.integers(0, len(value) - 1)), draw(st.sampled_from(["", *"A/9:x="]))
        return value[:at] + other + value[at + 1 :]
    return junk


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_wrong_is_an_error_of_this_package(name, data):
    obj = BY_HAND[name]() if name in BY_HAND else to_wire(make_batch([(12, 5)]), name)[0]
    bad = spoiled(data.draw, obj, data.draw(JUNK))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", r3.SuspiciousRoutingWarning)
        try:
            found = read(bad, name)
        except r3.R3Error as e:
            message = str(e)
        else:
            found.check()
            return
    assert message.startswith(f"{name}: ")
    assert len(message) < 600


def test_text_among_numbers_takes_no_memory():
    """numpy would make every item as long as the longest text: 80 GB here."""
    long = ["x" * 10**6, *range(20_000)]
    for name, item in (
        ("prime-rl", {"completion_logprobs": long}),
        ("vllm-0.21", {"prompt_routed_experts": [[long]]}),
        ("nemo-rl", {"prompt_token_ids": long}),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(R3Error):
                from_wire(item | {"choices": []}, name, spec=RouterSpec(8, 2, (0,), 1))
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()
    for odd in (long, [1, None], [[1], 2], ["5"], [[[[[[[1]]]]]]], [b"5"], [{}]):
        with pytest.raises(FormatError, match="expected numbers"):
            numbers(odd, "it")
