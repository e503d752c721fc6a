"""Public bugs of transport: what happens to routing on its way from the engine to the trainer.

Each test is named by the number of the bug in the project's list. Payloads are made as
frameworks make them, with numpy and base64; no server runs here.
"""

from __future__ import annotations

import base64
import io
import json
import time
from typing import Any

import numpy as np
import pytest

import r3
from r3 import RolloutId, RouterSpec, RoutingBatch, RoutingTrace
from r3.storage.wire import FORMATS, JSON_FORMATS, from_wire, to_wire

TOY = RouterSpec(num_experts=8, top_k=2, moe_layers=(0, 1, 2, 3), num_layers=4)
TOKENS, PROMPT = list(range(12)), 5


def random_ids(rows: int, spec: RouterSpec = TOY, seed: int = 0) -> np.ndarray:
    scores = np.random.default_rng(seed).random((rows, len(spec.moe_layers), spec.num_experts))
    return scores.argpartition(spec.top_k - 1, axis=-1)[..., : spec.top_k]


def batch_of(ids: np.ndarray, spec: RouterSpec = TOY) -> RoutingBatch:
    trace = RoutingTrace.build(
        spec=spec,
        token_ids=np.arange(len(ids) + 1),
        routed_experts=ids,
        prompt_len=min(PROMPT, len(ids)),
        rollout_id=RolloutId("case"),
    )
    return RoutingBatch.from_traces([trace])


def npy(ids: np.ndarray) -> str:
    with io.BytesIO() as file:
        np.save(file, ids)
        return base64.b64encode(file.getvalue()).decode()


def vllm_reply(ids: np.ndarray, **changes: Any) -> dict[str, Any]:
    choice = {"token_ids": TOKENS[PROMPT:], "routed_experts": npy(ids)} | changes
    return {"prompt_token_ids": TOKENS[:PROMPT], "choices": [choice]}


def payload(ids: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(ids.tobytes()).decode()
    return {"data": data, "shape": list(ids.shape), "dtype": ids.dtype.name}


def given() -> dict[str, Any]:
    return {"spec": TOY, "token_ids": [TOKENS], "prompt_lens": [PROMPT]}


def parts(value: Any) -> int:
    """Objects that a JSON encoder visits."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + sum(map(parts, value)) if isinstance(value, list) else 1


def test_57_routing_is_one_opaque_string():
    """1,500 tokens x 48 layers x 8 here. Token ids apart, a payload is a few objects and not
    a million, and our own is shorter than half of a byte for each id."""
    spec = RouterSpec(128, 8, tuple(range(48)), 48)
    batch = batch_of(random_ids(1499, spec), spec)
    nested = time.perf_counter()
    json.dumps(batch.routed_experts.tolist())
    nested = time.perf_counter() - nested
    sizes = {}
    for name in ("vllm", "sglang", "nemo-rl", "prime-rl", "skyrl", "r3"):
        (item,) = to_wire(batch, name)
        assert parts(item) < 1500 + 40
        start = time.perf_counter()
        text = json.dumps(item)
        assert time.perf_counter() - start < nested
        sizes[name] = len(text)
    raw = 1499 * 48 * 8
    assert raw * 4 / 3 < sizes["vllm"] < raw * 4 / 3 + 20_000
    assert raw * 16 / 3 < sizes["sglang"]  # int32, as it is asked for
    assert sizes["r3"] < 0.7 * sizes["vllm"]


@pytest.mark.parametrize(("experts", "dtype"), [(128, "uint8"), (256, "uint8"), (300, "uint16")])
def test_59_as_many_bytes_as_the_experts_need(experts, dtype):
    """E = 128, 256, 300. NeMo-RL has a sign: one byte to 128 experts, two from there on."""
    spec = RouterSpec(experts, 2, (0, 1), 2)
    batch = batch_of(random_ids(11, spec), spec)
    assert batch.routed_experts.dtype == dtype
    (reply,) = to_wire(batch, "vllm")
    data = base64.b64decode(reply["choices"][0]["routed_experts"])
    assert np.load(io.BytesIO(data)).dtype == dtype
    (item,) = to_wire(batch, "nemo-rl")
    label = item["routed_experts"].split(":")[1]
    assert label == ("int8" if experts == 128 else "int16")


def test_60_ids_that_a_byte_cannot_hold():
    """300 as a byte is 44: such ids are refused by their type, as no value of theirs is wrong."""
    spec = RouterSpec(512, 2, (0, 1, 2, 3), 4)
    ids = random_ids(11, spec)
    ids[4, 2] = [300, 44]
    cut = (ids % 256).astype(np.uint8)
    assert cut[4, 2].tolist() == [44, 44]
    good = from_wire(vllm_reply(ids.astype(np.uint16)), "vllm", spec=spec)
    assert good.routed_experts[4, 2].tolist() == [300, 44]
    with pytest.raises(r3.FormatError, match=r"uint8, which ends at 255.*holds 0\.\.511"):
        from_wire(vllm_reply(cut), "vllm", spec=spec)
    for name in ("prime-rl", "skyrl"):  # these choose the type by the ids
        with pytest.raises(r3.FormatError, match=r"uint8 of a model of 512 .*were cut"):
            from_wire(payload(cut), name, **given() | {"spec": spec})
    text = base64.b64encode(cut.astype(np.int8).tobytes()).decode()
    with pytest.raises(r3.FormatError, match="int8, which ends at 127"):
        from_wire(f"nrlre1:int8:11x4x2:{text}", "nemo-rl", **given() | {"spec": spec})


def test_61_label_and_bytes_contradict_each_other():
    """Bytes of uint8 under the label of a wider type, and the other way round."""
    ids = random_ids(11).astype(np.uint8)
    text = base64.b64encode(ids.tobytes()).decode()
    for name, wrong in (
        ("skyrl", payload(ids) | {"dtype": "int16"}),
        ("prime-rl", payload(ids) | {"dtype": "uint16"}),
        ("nemo-rl", f"nrlre1:int16:11x4x2:{text}"),
    ):
        with pytest.raises(r3.FormatError, match=r"88 bytes, expected 176 for u?int16"):
            from_wire(wrong, name, **given())
    for name in ("skyrl", "prime-rl"):
        with pytest.raises(r3.FormatError, match="176 bytes, expected 88 for uint8"):
            from_wire(payload(ids.astype(np.uint16)) | {"dtype": "uint8"}, name, **given())
    data = bytearray(base64.b64decode(npy(ids)))
    at = data.index(b"|u1")
    data[at : at + 3] = b"<u2"
    with pytest.raises(r3.FormatError, match="88 bytes"):
        from_wire(vllm_reply(ids, routed_experts=base64.b64encode(data).decode()), "vllm", spec=TOY)
    with pytest.raises(r3.TraceError, match="88 bytes, expected 352"):  # int32, without a label
        from_wire(text, "sglang", **given())


def test_62_base85_is_not_base64():
    """The same bytes in both alphabets."""
    ids = random_ids(11)
    for dtype, name in ((np.uint8, "prime-rl"), (np.uint8, "skyrl"), (np.int8, "nemo-rl")):
        other = base64.b85encode(ids.astype(dtype).tobytes()).decode()
        wrong: Any = payload(ids.astype(dtype)) | {"data": other}
        if name == "nemo-rl":
            wrong = f"nrlre1:int8:11x4x2:{other}"
        with pytest.raises(r3.FormatError, match="not base64 of the standard alphabet"):
            from_wire(wrong, name, **given())
    raw = base64.b64decode(npy(ids.astype(np.uint8)))
    for text in (base64.b85encode(raw).decode(), base64.urlsafe_b64encode(b"\xff" * 9).decode()):
        with pytest.raises(r3.FormatError, match="base64"):
            from_wire(vllm_reply(ids, routed_experts=text), "vllm", spec=TOY)
    with pytest.raises(r3.FormatError, match="base64"):
        from_wire(base64.b85encode(ids.astype("<i4").tobytes()).decode(), "sglang", **given())


def test_63_only_the_rows_that_are_new():
    """12 tokens, the caller already has 10 rows: the others come alone, and join what is there."""
    ids = random_ids(11)
    first = RoutingTrace.build(
        spec=TOY, token_ids=TOKENS[:11], routed_experts=ids[:10], prompt_len=5
    )
    delta = ids[10:]
    numbers = base64.b64encode(delta.astype("<i4").tobytes()).decode()
    meta = {"routed_experts": numbers, "routed_experts_start_len": 10}
    replies = {
        "vllm": {
            "prompt_token_ids": TOKENS[:11],
            "choices": [{"token_ids": TOKENS[11:], "routed_experts": npy(delta.astype(np.uint8))}],
            "routed_experts_prompt_start": 10,
        },
        "sglang": {
            "prompt_token_ids": TOKENS[:11],
            "output_ids": TOKENS[11:],
            "meta_info": meta,
        },
        "prime-rl": {
            "prompt_ids": TOKENS[:11],
            "completion_ids": TOKENS[11:],
            "routed_experts": payload(delta.astype(np.uint8)) | {"start": 10},
        },
    }
    for name, reply in replies.items():
        batch = from_wire(reply, name, spec=TOY, rollout_ids=["run/0/0/1/0"])
        assert batch.valid.tolist() == [*[False] * 10, True, False]
        (turn,) = batch.to_traces()
        whole = first.extend(turn)
        assert whole.valid.all()
        np.testing.assert_array_equal(whole.routed_experts, ids)
        without = json.loads(json.dumps(reply))
        for place in (without, without.get("meta_info", {}), without.get("routed_experts") or {}):
            for key in ("routed_experts_prompt_start", "routed_experts_start_len", "start"):
                place.pop(key, None)
        with pytest.raises(r3.TraceError, match=r"expected"):  # rows of nobody knows which tokens
            from_wire(without, name, spec=TOY)


def test_73_field_that_a_gateway_dropped():
    """The field is absent, or null, in each format: an error that says what to look at."""
    (sample,) = to_wire(batch_of(random_ids(11)), "slime")
    asked = {
        "vllm": "--enable-return-routed-experts",
        "vllm-0.21": "--enable-return-routed-experts",
        "sglang": "return_routed_experts: true",
        "verl": "enable_rollout_routing_replay",
        "slime": "--use-rollout-routing-replay",
        "miles": "--use-rollout-routing-replay",
        "nemo-rl": "policy.router_replay.enabled",
        "prime-rl": "enable_return_routed_experts",
        "skyrl": "enable_return_routed_experts",
        "r3": "plugin",
    }
    assert set(asked) == set(FORMATS) - {"megatron"}  # which is nothing but the routing
    for name, flag in asked.items():
        whole = to_wire(batch_of(random_ids(11)), name)
        for null in (False, True):
            reply = without_routing(whole, null)
            with pytest.raises(r3.CaptureError, match="gateway or an allowlist") as caught:
                from_wire(reply, name, spec=TOY)
            assert flag in str(caught.value)
            assert ("is null" in str(caught.value)) == null
    assert set(JSON_FORMATS) < set(FORMATS)
    with pytest.raises(r3.CaptureError, match="slime: sequence 1: there is no rollout_routed"):
        from_wire([sample, without_routing(sample, False)], "slime", spec=TOY)


def without_routing(value: Any, null: bool) -> Any:
    """`value` without fields that hold routing, or with null in them."""
    if isinstance(value, dict):
        return {
            key: None if "routed_experts" in key else without_routing(item, null)
            for key, item in value.items()
            if null or "routed_experts" not in key
        }
    return [without_routing(item, null) for item in value] if isinstance(value, list) else value
