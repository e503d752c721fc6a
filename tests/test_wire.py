"""Round trips through every framework's format."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import r3
from r3 import RolloutId, RouterSpec, RoutingBatch
from r3.storage.wire import FORMATS, JSON_FORMATS, from_wire, to_wire
from wire_tools import (
    MARKED,
    OFFSET,
    TOY,
    all_layers,
    assert_same,
    batches,
    make_batch,
    random_ids,
    round_trip,
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


# --- payloads made by hand


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy(array: np.ndarray) -> str:
    with io.BytesIO() as file:
        np.save(file, array)
        return b64(file.getvalue())


TOKENS, PROMPT = list(range(100, 112)), 5
IDS = random_ids(np.random.default_rng(1), 11)
FULL = all_layers(IDS)


def vllm(ids: np.ndarray = FULL, dtype: str = "uint8", **changes: Any) -> dict[str, Any]:
    choice = {"token_ids": TOKENS[PROMPT:], "routed_experts": npy(ids.astype(dtype))}
    return {"prompt_token_ids": TOKENS[:PROMPT], "choices": [choice | changes]}


def vllm_021(ids: np.ndarray = FULL) -> dict[str, Any]:
    return {
        "prompt_token_ids": TOKENS[:PROMPT],
        "prompt_routed_experts": ids[:PROMPT].tolist(),
        "choices": [{"token_ids": TOKENS[PROMPT:], "routed_experts": ids[PROMPT:].tolist()}],
    }


def sglang(ids: np.ndarray = FULL, **meta: Any) -> dict[str, Any]:
    meta = {"routed_experts": b64(ids.astype("<i4").tobytes())} | meta
    return {
        "prompt_token_ids": TOKENS[:PROMPT],
        "output_ids": TOKENS[PROMPT:],
        "meta_info": meta,
    }


def sample(ids: np.ndarray = FULL, **changes: Any) -> dict[str, Any]:
    return {
        "tokens": TOKENS,
        "response_length": 7,
        "rollout_routed_experts": ids.astype(np.int32),
    } | changes


def nemo(ids: np.ndarray = IDS, dtype: str = "int8", **changes: Any) -> dict[str, Any]:
    shape = "x".join(map(str, ids.shape))
    return {
        "prompt_token_ids": TOKENS[:PROMPT],
        "generation_token_ids": TOKENS[PROMPT:],
        "routed_experts": f"nrlre1:{dtype}:{shape}:{b64(ids.astype(dtype).tobytes())}",
    } | changes


def packed(ids: np.ndarray = FULL, dtype: str = "uint8", **changes: Any) -> dict[str, Any]:
    data = b64(ids.astype(dtype).tobytes())
    return {"data": data, "shape": list(ids.shape), "dtype": dtype} | changes


def prime(ids: np.ndarray = FULL, **changes: Any) -> dict[str, Any]:
    return {
        "prompt_ids": TOKENS[:PROMPT],
        "completion_ids": TOKENS[PROMPT:],
        "routed_experts": packed(ids, start=0) | changes,
    }


def skyrl(ids: np.ndarray = FULL, **changes: Any) -> dict[str, Any]:
    choice = {"token_ids": TOKENS[PROMPT:], "routed_experts": packed(ids) | changes}
    return {"prompt_token_ids": TOKENS[:PROMPT], "choices": [choice]}


def verl(ids: np.ndarray = FULL, width: int = 8, longest: int = 9) -> dict[str, Any]:
    """Prompt of 5 in a slot of 8, response of 7 in one of 9: rows from column 3 on."""
    routed = np.zeros((1, width + longest, *ids.shape[1:]), np.int16)
    routed[0, width - PROMPT : width - PROMPT + len(ids)] = ids
    input_ids = np.zeros((1, width + longest), np.int64)
    input_ids[0, width - PROMPT : width + 7] = TOKENS
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids > 0).astype(np.int64),
        "responses": input_ids[:, width:],
        "routed_experts": routed,
    }


def megatron(ids: np.ndarray = IDS) -> list[np.ndarray]:
    return list(ids.transpose(1, 0, 2).astype(np.int64))


BY_HAND: dict[str, Callable[..., Any]] = {
    "vllm": vllm,
    "vllm-0.21": vllm_021,
    "sglang": sglang,
    "verl": verl,
    "slime": sample,
    "miles": sample,
    "nemo-rl": nemo,
    "prime-rl": prime,
    "skyrl": skyrl,
    "megatron": megatron,
}


def read(obj: Any, name: str, spec: RouterSpec = TOY, **given: Any) -> RoutingBatch:
    if name == "megatron":
        given = {"token_ids": [TOKENS], "prompt_lens": [PROMPT]} | given
    return from_wire(obj, name, spec=spec, **given)


def assert_read(found: RoutingBatch, missing: Sequence[int] = ()) -> None:
    """IDS of TOKENS, but for missing rows."""
    valid = [row not in missing for row in range(11)]
    assert found.token_ids.tolist() == TOKENS
    assert found.prompt_lens.tolist() == [PROMPT]
    assert found.valid.tolist() == [*valid, False]
    expected = np.where(np.array(valid)[:, None, None], IDS, 0)
    np.testing.assert_array_equal(found.routed_experts[:-1], expected)


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


# --- single formats


def test_vllm_places_of_token_ids_and_several_choices():
    completions = vllm(prompt_token_ids=TOKENS[:PROMPT])
    del completions["prompt_token_ids"]
    assert_read(read(completions, "vllm"))
    both = vllm()
    both["choices"] *= 2
    found = read([both, vllm()], "vllm", rollout_ids=["a/0/0/0/0", RolloutId("b"), "c/0/0/0/0"])
    assert [str(name) for name in found.rollout_ids] == ["a/0/0/0/0", "b/0/0/0/0", "c/0/0/0/0"]
    with pytest.raises(r3.TraceError, match=r"vllm: sequence 1: .* rows"):
        read([vllm(), vllm(FULL[1:])], "vllm")
    assert_read(read(vllm(FULL, "uint16"), "vllm"))
    for dtype in ("int16", "int64", "float32", "uint32"):
        with pytest.raises(r3.FormatError, match="routed_experts"):
            read(vllm(FULL, dtype), "vllm")


def test_vllm_first_row_is_that_of_the_request():
    reply = vllm(FULL[4:])
    with pytest.raises(r3.TraceError, match=r"7 rows .* expected 11"):
        read(reply, "vllm")
    assert_read(read(reply | {"routed_experts_prompt_start": 4}, "vllm"), missing=range(4))
    for start in (-1, 3, 6, 12, 2**70, True, "4"):
        with pytest.raises(r3.R3Error, match=r"start|rows"):
            read(reply | {"routed_experts_prompt_start": start}, "vllm")


def test_vllm_021_rows_are_of_the_prompt_and_of_the_choice():
    reply = vllm_021()
    reply["choices"] *= 2
    assert len(read(reply, "vllm-0.21")) == 2
    shifted = vllm_021()
    shifted["prompt_routed_experts"] = FULL[:4].tolist()
    shifted["choices"][0]["routed_experts"] = FULL[4:].tolist()
    with pytest.raises(r3.TraceError, match="prompt_routed_experts has 4 rows, expected 5"):
        read(shifted, "vllm-0.21")
    one = vllm_021()
    one["choices"][0] = {"token_ids": TOKENS[PROMPT : PROMPT + 1], "routed_experts": None}
    assert read(one, "vllm-0.21").valid.tolist() == [*[True] * 5, False]
    for wrong in ([[1, 2]], [[[1.5, 2.0]]], [[[1], [2, 3]]], [[[True, False]]], "x", 7):
        bad = vllm_021()
        bad["choices"][0]["routed_experts"] = wrong
        with pytest.raises(r3.R3Error, match=r"sequence 0: routed_experts"):
            read(bad, "vllm-0.21")


def test_sglang_places_of_the_payload():
    text = sglang()["meta_info"]["routed_experts"]
    choice = {"prompt_token_ids": TOKENS[:PROMPT], "token_ids": TOKENS[PROMPT:]}
    for reply in (
        {"choices": [choice], "sglext": {"routed_experts": text}},
        {"choices": [choice | {"meta_info": {"routed_experts": text}}]},
        {"choices": [choice | {"sgl_ext": {"routed_experts": text}}]},
    ):
        assert_read(read(reply, "sglang"))
    with pytest.raises(r3.CaptureError, match=r"sequence 1: there is no routed_experts"):
        read({"choices": [choice] * 2, "sglext": {"routed_experts": text}}, "sglang")
    differ = {"choices": [choice | {"meta_info": {"routed_experts": b64(b"")}}]}
    with pytest.raises(r3.FormatError, match="2 times, expected the same"):
        read(differ | {"sglext": {"routed_experts": text}}, "sglang")


def test_sglang_first_row_and_number_of_bytes():
    assert_read(read(sglang(FULL[4:], routed_experts_start_len=4), "sglang"), missing=range(4))
    assert_read(read(sglang(FULL[4:]) | {"routed_experts_start_len": 4}, "sglang"), range(4))
    for wrong in (IDS, FULL[:, :, :1], FULL[4:]):
        with pytest.raises(r3.TraceError, match=r"bytes, expected 528: 11 rows .* 6 layers"):
            read(sglang(wrong), "sglang")
    narrow = b64(FULL.astype("u1").tobytes())
    with pytest.raises(r3.TraceError, match="132 bytes, expected 528"):
        read(sglang(routed_experts=narrow), "sglang")


def test_verl_padding_and_shifts():
    for shift in (-1, 1):
        moved = verl()
        moved["routed_experts"] = np.roll(moved["routed_experts"], shift, axis=1)
        if shift > 0:  # as if the last token had a row: only the first, missing, is a sign
            assert not read(moved, "verl").valid[0]
        else:
            with pytest.raises(r3.TraceError, match="column 2 is padding on the left"):
                read(moved, "verl")
    late = verl()
    late["routed_experts"][0, 16] = all_layers(IDS)[:1]
    with pytest.raises(r3.TraceError, match=r"column 16 is padding on the right"):
        read(late, "verl")
    gap = verl()
    gap["attention_mask"][0, 5] = 0
    with pytest.raises(r3.TraceError, match="attention_mask"):
        read(gap, "verl")
    for key in ("input_ids", "attention_mask", "responses"):
        with pytest.raises(r3.FormatError, match=f"no {key}"):
            read({k: v for k, v in verl().items() if k != key}, "verl")
    for dtype in ("uint8", "int32", "float32"):
        wide = verl()
        wide["routed_experts"] = wide["routed_experts"].astype(dtype)
        with pytest.raises(r3.FormatError, match="expected int16 with 4 axes"):
            read(wide, "verl")


@pytest.mark.slow  # imports torch
def test_verl_jagged_and_torch():
    import torch

    parts = {
        "prompts": [TOKENS[:PROMPT], TOKENS[:PROMPT]],
        "responses": [TOKENS[PROMPT:], TOKENS[PROMPT:8]],
        "routed_experts": [FULL.astype(np.int16), FULL[:8].astype(np.int16)],
        "rollout_log_probs": [-np.arange(7.0), -np.arange(3.0)],
        "response_mask": [[1] * 7, [1, 0, 1]],
    }
    found = read(parts, "verl")
    assert found.cu_seqlens.tolist() == [0, 12, 20]
    assert found.logprobs[12 + 5 :].tolist()[::2] == [0.0, -2.0]
    assert np.isnan(found.logprobs[12 + 6])
    tensors = {
        key: torch.nested.nested_tensor(
            [torch.tensor(np.array(v)) for v in values], layout=torch.jagged
        )
        for key, values in parts.items()
    }
    with_torch = read(tensors, "verl")
    np.testing.assert_array_equal(with_torch.routed_experts, found.routed_experts)
    padded = {key: torch.tensor(value) for key, value in verl().items()}
    assert_read(read(padded, "verl"))
    assert_read(read(sample() | {"rollout_routed_experts": torch.tensor(FULL).int()}, "slime"))
    assert_read(read([torch.tensor(layer) for layer in megatron()], "megatron"))


def test_samples():
    mask = [1, 1, 0, 0, 1, 1, 1]
    logprobs = [-0.5, -0.25, 0.0, 0.0, -1.0, -2.0, -3.0]
    found = read(sample(loss_mask=mask, rollout_log_probs=logprobs), "slime")
    assert found.logprobs[5:7].tolist() == [-0.5, -0.25]
    assert np.isnan(found.logprobs[:5]).all()
    assert np.isnan(found.logprobs[7:9]).all()
    cases = (
        ({"rollout_log_probs": [0.0]}, "rollout_log_probs is .*expected 7 numbers"),
        ({"rollout_log_probs": logprobs, "loss_mask": [2] * 7}, "loss_mask .*each 0 or 1"),
        ({"response_length": 13}, "response_length is 13, expected an integer of 0 to 12"),
        ({"response_length": None}, "response_length is None"),
        ({"tokens": [1.5] * 12}, "tokens is .*expected a list of integers"),
        ({"tokens": [True, *TOKENS[1:]]}, "tokens holds booleans"),
        ({"tokens": [2**80] * 12}, "tokens"),
        (
            {"rollout_routed_experts": FULL},
            "rollout_routed_experts is int64 of shape.*expected int32 with 3 axes",
        ),
        ({"rollout_routed_experts": FULL.tolist()}, "expected an array or tensor of int32"),
    )
    for changes, message in cases:
        with pytest.raises(r3.FormatError, match=f"slime: sequence 0: {message}"):
            read(sample(**changes), "slime")


def test_nemo_rl_labels():
    assert_read(read(nemo(IDS, "int16"), "nemo-rl"))
    assert_read(read(nemo(IDS, "int32"), "nemo-rl"))
    wide = RouterSpec(200, 2, TOY.moe_layers, 6)
    with pytest.raises(r3.FormatError, match=r"int8, which ends at 127.*0\.\.199"):
        read(nemo(IDS, "int8"), "nemo-rl", wide)
    for experts, label in ((128, "int8"), (129, "int16"), (32768, "int16"), (32769, "int32")):
        batch = make_batch([(3, 1)], RouterSpec(experts, 2, (0,), 2))
        assert to_wire(batch, "nemo-rl")[0]["routed_experts"].startswith(f"nrlre1:{label}:3x1x2:")
    for text in (
        "nrlre2:int8:1x1x1:AA==",
        "nrlre1:uint8:1x1x1:AA==",
        "nrlre1:int8:1x1:AA==",
        "",
        7,
    ):
        with pytest.raises(r3.FormatError, match="expected nrlre1:"):
            read(nemo(routed_experts=text), "nemo-rl")
    for text in ("nrlre1:int8:2x1x1:AA==", "nrlre1:int8:999999999999x999999999x8:AA=="):
        with pytest.raises(r3.FormatError, match="has 1 bytes, expected"):
            read(nemo(routed_experts=text), "nemo-rl")


def test_prime_rl_payload():
    old = prime()
    del old["routed_experts"]["dtype"]
    assert_read(read(old, "prime-rl"))
    delta = prime(FULL[4:])
    delta["routed_experts"]["start"] = 4
    assert_read(read(delta, "prime-rl"), missing=range(4))
    for changes in ({"dtype": "int16"}, {"dtype": 7}, {"shape": [11, 12]}, {"data": b"AA=="}):
        with pytest.raises(r3.FormatError, match=r"dtype|shape|data"):
            read(prime(**changes), "prime-rl")


def test_skyrl_takes_the_smallest_dtype_only():
    with pytest.raises(r3.FormatError, match="as int16, expected uint8, the smallest"):
        read(skyrl(**packed(FULL, "int16")), "skyrl")
    with pytest.raises(r3.FormatError, match="dtype is 'uint16'"):
        read(skyrl(dtype="uint16"), "skyrl")
    output = {
        "prompt_token_ids": [TOKENS[:PROMPT]],
        "response_ids": [TOKENS[PROMPT:]],
        "rollout_expert_indices": [FULL.astype(np.uint8)],
    }
    assert_read(read(output, "skyrl"))
    with pytest.raises(r3.FormatError, match=r"\[1, 0, 1\] entries"):
        read(output | {"response_ids": []}, "skyrl")


def test_megatron_rows_of_last_tokens_are_filled_and_spread():
    batch = make_batch([(5, 2), (1, 1), (9, 3)])
    layers = to_wire(batch, "megatron")
    assert [(a.dtype.name, a.shape) for a in layers] == [("int64", (15, 2))] * 4
    ends = [4, 5, 14]
    for layer in layers:
        assert (layer[:, 0] != layer[:, 1]).all()
        assert len({tuple(layer[end]) for end in ends}) > 1
    for wrong in (layers[:3], [a[:13] for a in layers], [a.astype(np.int32) for a in layers]):
        with pytest.raises(r3.R3Error, match=r"megatron: "):
            from_wire(
                wrong,
                "megatron",
                spec=TOY,
                token_ids=[[1] * 5, [1], [1] * 9],
                prompt_lens=[2, 1, 3],
            )


def test_r3_strings_are_of_their_tokens():
    batch = make_batch([(12, 5)], missing=[np.arange(11) == 3])
    (item,) = to_wire(batch, "r3")
    with pytest.raises(r3.TraceError, match=r"r3: sequence 0: .*other tokens"):
        read(item | {"token_ids": TOKENS}, "r3")
    with pytest.raises(r3.FormatError, match="prompt_len is 13, expected an integer of 0 to 12"):
        read(item | {"prompt_len": 13}, "r3")


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


def test_ids_of_a_byte_in_a_wide_model():
    """Formats that choose a type by the ids: that none of many is above 255 is no chance."""
    spec = RouterSpec(512, 2, TOY.moe_layers, 6)
    for name in ("prime-rl", "skyrl"):
        with pytest.raises(r3.FormatError, match="88 ids as uint8 of a model of 512 experts"):
            read(BY_HAND[name](), name, spec)
        few = read([packed(FULL[:2])], name, spec, token_ids=[TOKENS[:3]], prompt_lens=[1])
        np.testing.assert_array_equal(few.routed_experts[:2], IDS[:2])
