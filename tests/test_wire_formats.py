"""What is particular to single formats: places of fields, labels, offsets, padding."""

from __future__ import annotations

import json

import numpy as np
import pytest

import r3
from r3 import RolloutId, RouterSpec
from r3.storage.wire import from_wire, to_wire
from wire_tools import (
    BY_HAND,
    FULL,
    IDS,
    PROMPT,
    TOKENS,
    TOY,
    all_layers,
    assert_read,
    b64,
    make_batch,
    megatron,
    nemo,
    packed,
    prime,
    read,
    round_trip,
    sample,
    sglang,
    skyrl,
    verl,
    vllm,
    vllm_021,
)


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
    with pytest.raises(r3.TraceError, match="532 bytes, expected 528"):
        read(sglang(routed_experts=b64(FULL.astype("<i4").tobytes() + bytes(4))), "sglang")
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
        ({"rollout_log_probs": [float("nan")] * 7}, "rollout_log_probs is .*expected 7 numbers"),
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
        ({"rollout_routed_experts": FULL.tolist()}, ".*expected an array or tensor of int32"),
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


def test_nemo_rl_log_probs_are_those_of_the_whole_response():
    batch = make_batch([(12, 5)], logprobs=True)
    np.testing.assert_array_equal(round_trip(batch, "nemo-rl").logprobs, batch.logprobs)
    replies = make_batch([(12, 2)], logprobs=True, replies=0.5)
    assert np.isnan(replies.logprobs[2:]).any()
    assert "generation_log_probs" not in to_wire(replies, "nemo-rl")[0]


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


def test_ids_of_a_byte_in_a_wide_model():
    """Formats that choose a type by the ids: that none of many is above 255 is no chance."""
    spec = RouterSpec(512, 2, TOY.moe_layers, 6)
    for name in ("prime-rl", "skyrl"):
        with pytest.raises(r3.FormatError, match="88 ids as uint8 of a model of 512 experts"):
            read(BY_HAND[name](), name, spec)
        few = read([packed(FULL[:2])], name, spec, token_ids=[TOKENS[:3]], prompt_lens=[1])
        np.testing.assert_array_equal(few.routed_experts[:2], IDS[:2])


@pytest.mark.slow  # imports vLLM
def test_replies_as_vllm_makes_them():
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionResponse,
        ChatCompletionResponseChoice,
        ChatMessage,
    )
    from vllm.entrypoints.openai.completion.protocol import (
        CompletionResponse,
        CompletionResponseChoice,
        UsageInfo,
    )
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        GenerateTokensChoice,
        GenerateTokensResponse,
    )
    from vllm.utils.serial_utils import numpy2base64

    own = {"token_ids": TOKENS[PROMPT:], "routed_experts": numpy2base64(FULL.astype(np.uint8))}
    prompt = {"prompt_token_ids": TOKENS[:PROMPT]}
    message = ChatMessage(role="assistant", content="x")
    chat = ChatCompletionResponseChoice(index=0, message=message, **own)
    replies = (
        CompletionResponse(
            model="m",
            choices=[CompletionResponseChoice(index=0, text="x", **own, **prompt)],
            usage=UsageInfo(),
        ),
        ChatCompletionResponse(model="m", choices=[chat], usage=UsageInfo(), **prompt),
        GenerateTokensResponse(choices=[GenerateTokensChoice(index=0, **own)], **prompt),
    )
    for reply in replies:
        assert_read(read(json.loads(reply.model_dump_json()), "vllm"))
        assert_read(read(reply.model_dump(), "vllm"))
    (made,) = to_wire(read(vllm(), "vllm"), "vllm")
    assert made["choices"][0]["routed_experts"] == own["routed_experts"]
