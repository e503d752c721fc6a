"""Batches and payloads for tests of r3.storage.wire, made by hand where a framework would be."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

import r3
from r3 import RolloutId, RouterSpec, RoutingBatch, RoutingTrace
from r3.storage.wire import FORMATS, from_wire, to_wire

# 2 dense layers in front, as in many models
TOY = RouterSpec(num_experts=8, top_k=2, moe_layers=(2, 3, 4, 5), num_layers=6)
# formats in which a missing row has a notation of its own, and those with a first row
MARKED = ("vllm-0.21", "verl", "miles", "nemo-rl", "r3")
OFFSET = ("vllm", "sglang", "prime-rl")


def random_ids(rng: np.random.Generator, rows: int, spec: RouterSpec = TOY) -> np.ndarray:
    """int64 [rows, MoE layers, top_k], different experts in each row and layer, in any order."""
    shape = (rows, len(spec.moe_layers), spec.top_k)
    gaps = rng.integers(0, spec.num_experts - spec.top_k + 1, shape)
    return rng.permuted(np.sort(gaps, axis=-1) + np.arange(spec.top_k), axis=-1)


def all_layers(ids: np.ndarray, spec: RouterSpec = TOY, fill: int = 0) -> np.ndarray:
    """The same ids [rows, num_layers, top_k], dense layers filled, as engines have it."""
    out = np.full((len(ids), spec.num_layers, spec.top_k), fill, ids.dtype)
    out[:, list(spec.moe_layers)] = ids
    return out


def make_batch(
    lengths: list[tuple[int, int]],
    spec: RouterSpec = TOY,
    *,
    seed: int = 0,
    missing: list[np.ndarray] | None = None,
    logprobs: bool = False,
    replies: float = 0.0,
) -> RoutingBatch:
    """lengths: tokens and prompt of each sequence; missing: bool [n - 1] for each."""
    rng = np.random.default_rng(seed)
    traces = []
    for i, (n, prompt_len) in enumerate(lengths):
        valid = np.ones(n - 1, bool) if missing is None else ~missing[i]
        own, extra = None, {}
        if logprobs:
            own = np.full(n, np.nan)
            sampled = (np.arange(n) >= prompt_len) & (rng.random(n) >= replies)
            own[sampled] = -rng.random(int(sampled.sum()))
            kinds = np.where(sampled, 1, np.where(np.arange(n) < prompt_len, 0, 2))
            extra["segments"] = r3.Column(kinds.astype(np.uint8), "token")
        trace = RoutingTrace.build(
            spec=spec,
            token_ids=rng.integers(0, 2**31, n),
            routed_experts=random_ids(rng, n - 1, spec),
            prompt_len=prompt_len,
            valid=valid,
            logprobs=own,
            rollout_id=RolloutId("run", sample=i),
            extra=extra,
        )
        traces.append(trace)
    return RoutingBatch.from_traces(traces)


def round_trip(batch: RoutingBatch, name: str, **given: Any) -> RoutingBatch:
    if name == "megatron":
        ends = batch.cu_seqlens
        given |= {
            "token_ids": [batch.token_ids[a:b] for a, b in pairwise(ends)],
            "prompt_lens": batch.prompt_lens.tolist(),
        }
    return from_wire(
        to_wire(batch, name), name, spec=batch.spec, rollout_ids=batch.rollout_ids, **given
    )


def assert_same(found: RoutingBatch, batch: RoutingBatch) -> None:
    """Routing (as sets), what is missing, tokens and prompts are those of the batch."""
    assert found.spec == batch.spec
    assert found.rollout_ids == batch.rollout_ids
    for name in ("cu_seqlens", "prompt_lens", "token_ids", "valid"):
        np.testing.assert_array_equal(getattr(found, name), getattr(batch, name))
    assert found.routed_experts.dtype == batch.routed_experts.dtype
    np.testing.assert_array_equal(
        np.sort(found.routed_experts, axis=-1), np.sort(batch.routed_experts, axis=-1)
    )


@st.composite
def specs(draw: st.DrawFn) -> RouterSpec:
    """Models of 1 to 300 and more experts, dense layers anywhere."""
    experts = draw(st.sampled_from([1, 2, 3, 8, 127, 128, 129, 255, 256, 257, 300, 512]))
    layers = draw(st.integers(1, 6))
    moe = draw(st.sets(st.integers(0, layers - 1), min_size=1))
    top_k = draw(st.integers(1, min(experts, 9)))
    return RouterSpec(experts, top_k, tuple(sorted(moe)), layers)


@st.composite
def batches(draw: st.DrawFn, name: str) -> RoutingBatch:
    """Batches that format `name` can hold: missing rows as far as it has a notation for them."""
    assert name in FORMATS
    spec = draw(specs())
    tokens = st.sampled_from([1, 2, 3, 7, 12, 40])
    lengths = [(n, draw(st.integers(0, n))) for n in draw(st.lists(tokens, min_size=1, max_size=4))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    missing = [np.zeros(n - 1, bool) for n, _ in lengths]
    if draw(st.booleans()):
        for rows, (_, prompt_len) in zip(missing, lengths, strict=True):
            if name in OFFSET:
                rows[: rng.integers(0, min(len(rows), prompt_len) + 1)] = True
            elif name in MARKED and not (name == "verl" and spec.top_k == 1):
                rows[:] = rng.random(len(rows)) < rng.choice([0.1, 0.5, 1.0])
    with warnings.catch_warnings():  # models of one or two experts repeat themselves
        warnings.simplefilter("ignore", r3.SuspiciousRoutingWarning)
        return make_batch(
            lengths,
            spec,
            seed=int(rng.integers(2**32)),
            missing=missing,
            logprobs=draw(st.booleans()),
            replies=draw(st.sampled_from([0.0, 0.5])),
        )


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
