"""What every format has in common when it is read: sequences in a payload become a RoutingBatch.

A format finds its sequences (`Found`); here tokens are compared with those the caller knows, rows
counted, the layer axis brought to the MoE layers and missing rows told from data. Nothing here
knows a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.columns import ANSWER, PROMPT, REPLY, Column, as_array
from r3.errors import FormatError, R3Error, TraceError
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.wire.payload import floats, integers, mask_of
from r3.trace import RoutingTrace

_BY_CHANCE = 1e-9


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors of this package that come from inside begin with `what`."""
    try:
        yield
    except R3Error as e:
        raise type(e)(f"{what}: {e}") from None


@dataclass(frozen=True, eq=False)
class Found:
    """One sequence of n tokens in a payload.

    token_ids int64 [n]; ids: integers [rows, layers, top_k] of the rows from `start` on; logprobs:
    float32 [n - prompt_len], NaN where not sampled, or None; versions: int64 [rows] or None;
    rollout_id: as text, or None.
    """

    token_ids: np.ndarray
    prompt_len: int
    ids: np.ndarray
    start: int = 0
    logprobs: np.ndarray | None = None
    versions: np.ndarray | None = None
    rollout_id: str | None = None


@dataclass(frozen=True, eq=False)
class Given:
    """What the caller of `from_wire` knows: see there."""

    spec: RouterSpec
    token_ids: Sequence[Any] | None = None
    prompt_lens: Sequence[int] | None = None
    rollout_ids: Sequence[RolloutId | str] | None = None
    valid: Sequence[Any] | None = None
    physical_to_logical: Any = None

    @property
    def id_range(self) -> int:
        """How many ids there are: experts, or the slots of the load balancer if these are more."""
        slots = 0
        if self.physical_to_logical is not None:
            slots = (as_array(self.physical_to_logical, "physical_to_logical").shape or (0,))[-1]
        return max(self.spec.num_experts, slots)

    def expect(self, count: int) -> None:
        """Raise FormatError unless each list given has one entry for each of `count` sequences."""
        for name in ("token_ids", "prompt_lens", "rollout_ids", "valid"):
            given = getattr(self, name)
            if given is not None and len(given) != count:
                raise FormatError(
                    f"{name} has {len(given)} entries, expected one for each of {count} sequences"
                )

    def check_width(self, dtype: Any) -> None:
        """Raise FormatError for integers too narrow for the ids of this model."""
        if np.iinfo(dtype).max < self.id_range - 1:
            raise FormatError(
                f"ids are {np.dtype(dtype).name}, which ends at {np.iinfo(dtype).max}, expected a "
                f"type that holds 0..{self.id_range - 1}: wider ids were cut"
            )

    def check_not_cut(self, ids: np.ndarray) -> None:
        """Raise FormatError for uint8 ids that a type chosen by their values would not have got.

        For formats whose writer takes uint8 whenever no id is above 255: with more experts that
        happens by chance in very few ids only.
        """
        routed = len(ids) * len(self.spec.moe_layers) * self.spec.top_k
        chance = (256 / max(self.id_range, 256)) ** routed
        if ids.dtype == np.uint8 and chance < _BY_CHANCE:
            raise FormatError(
                f"{routed} ids as uint8 of a model of {self.id_range} experts, none above 255: "
                "wider ids were cut"
            )

    def tokens(
        self, i: int, prompt: Any = None, response: Any = None, ask: str = ""
    ) -> tuple[np.ndarray, int]:
        """Token ids, int64 [n], and prompt length of sequence i.

        prompt, response: its token ids as the payload has them, or None. Raises TraceError where
        they contradict what was given, FormatError if both together do not tell; ask: the setting
        that puts them into the payload.
        """
        head = None if prompt is None else integers(prompt, "prompt token ids")
        tail = None if response is None else integers(response, "response token ids")
        known = self.prompt_lens[i] if self.prompt_lens is not None else None
        given = None
        if self.token_ids is not None:
            given = integers(self.token_ids[i], f"token_ids[{i}]")
        prompt_len: int | None = None
        if head is not None and tail is not None:
            tokens, prompt_len = np.concatenate([head, tail]), len(head)
            if given is not None:
                _check_same(tokens, given, 0)
        elif given is None:
            missing = "prompt" if head is None else "response"
            raise FormatError(
                f"the payload has no {missing} token ids: pass token_ids="
                + (f", or have it hold them ({ask})" if ask else "")
            )
        else:
            tokens = given
            if head is not None:
                prompt_len = len(head)
                _check_same(head, given[: len(head)], 0)
            elif tail is not None:
                prompt_len = max(len(given) - len(tail), 0)
                _check_same(tail, given[prompt_len:], prompt_len)
        if prompt_len is None:
            if known is None:
                raise FormatError(
                    "the payload does not tell the prompt's length: pass prompt_lens="
                )
            return tokens, known
        if known is not None and known != prompt_len:
            raise TraceError(
                f"a prompt of {prompt_len} tokens in the payload, expected {known} by prompt_lens"
            )
        return tokens, prompt_len


def _check_same(found: np.ndarray, given: np.ndarray, first: int) -> None:
    if len(found) != len(given):
        raise TraceError(
            f"{len(found)} token ids, expected {len(given)} by token_ids (all ids of a sequence, "
            "prompt and response)"
        )
    if (found != given).any():
        at = int((found != given).argmax())
        raise TraceError(
            f"token {first + at} is {found[at]}, expected {given[at]} by token_ids: rows of "
            "another sequence"
        )


def sampled_logprobs(logprobs: Any, mask: Any, length: int, names: tuple[str, str]) -> Any:
    """float32 [length] from a response's log-probabilities and mask, NaN where it is 0; or None.

    mask: 0 or 1, None for all 1: formats write 0.0 where nothing was sampled.
    """
    if logprobs is None:
        return None
    values = floats(logprobs, length, names[0])
    if mask is not None:
        values[~mask_of(mask, length, names[1])] = np.nan
    return values


def to_batch(
    items: Sequence[Any],
    read: Callable[[int, Any], Found],
    given: Given,
    *,
    zeros: bool = False,
    arange: bool = False,
) -> RoutingBatch:
    """The batch of these sequences, each of which `read(i, items[i])` finds in the payload.

    zeros: the format writes a missing row as expert 0 throughout. arange: it fills in rows of
    0..top_k - 1, which could be data as well.
    """
    given.expect(len(items))
    traces = []
    for i, item in enumerate(items):
        with naming(f"sequence {i}"):
            traces.append(_trace(i, read(i, item), given, zeros, arange))
    return RoutingBatch.from_traces(traces)


def _trace(i: int, found: Found, given: Given, zeros: bool, arange: bool) -> RoutingTrace:
    spec, n, start = given.spec, len(found.token_ids), found.start
    if not 0 <= start <= max(n - 1, 0):
        raise TraceError(f"rows from {start} on, expected a start of 0..{max(n - 1, 0)}")
    ids = _moe_rows(found.ids, n, start, given)
    valid = np.arange(max(n - 1, 0)) >= start
    if given.valid is not None:
        said = as_array(given.valid[i], f"valid[{i}]")
        if said.shape != valid.shape or (said.dtype != bool and said.size):
            raise TraceError(
                f"valid[{i}] is {said.dtype} of shape {list(said.shape)}, expected bool "
                f"[{len(valid)}], one for each row"
            )
        valid &= said.astype(bool)
    else:
        valid[start:] &= ~_missing(ids, start, spec, zeros, arange)
    whole = ids
    if start:
        whole = np.zeros((len(valid), *ids.shape[1:]), ids.dtype)
        whole[start:] = ids
    extra, versions = {}, None
    name = given.rollout_ids[i] if given.rollout_ids else found.rollout_id
    if found.versions is not None:
        versions = np.full(len(valid), -1, np.int64)
        versions[start:] = found.versions
    logprobs = found.logprobs
    if logprobs is not None and np.isnan(logprobs).all():
        logprobs = None
    elif logprobs is not None and np.isnan(logprobs).any():
        segments = np.full(n, PROMPT, np.uint8)
        segments[found.prompt_len :] = np.where(np.isnan(logprobs), REPLY, ANSWER)
        extra["segments"] = Column(segments, "token")
    return RoutingTrace.build(
        spec=spec,
        token_ids=found.token_ids,
        routed_experts=whole,
        prompt_len=found.prompt_len,
        valid=valid,
        logprobs=logprobs,
        weight_versions=versions,
        physical_to_logical=given.physical_to_logical,
        rollout_id=name,
        extra=extra,
    )


def _moe_rows(ids: np.ndarray, n: int, start: int, given: Given) -> np.ndarray:
    """The rows `start` .. n - 1 in the MoE layers, of `ids` that may have one more row and all
    layers. Raises TraceError for any other shape, a dense layer that is not empty, and a surplus
    row that holds no experts."""
    spec, rows = given.spec, max(n - 1 - start, 0)
    moe, top_k = len(spec.moe_layers), spec.top_k
    if ids.ndim != 3 or ids.shape[2] != top_k or ids.shape[1] not in (moe, spec.num_layers):
        raise TraceError(
            f"routed_experts has shape {list(ids.shape)}, expected [rows, layers, top_k={top_k}] "
            f"with the {moe} MoE layers or all {spec.num_layers}"
        )
    if len(ids) not in (rows, rows + 1):
        raise TraceError(
            f"{len(ids)} rows of routing from row {start} on, expected {rows} for {n} tokens, or "
            "one more, for the last token, which has no place here"
        )
    surplus, ids = ids[rows:], ids[:rows]
    if surplus.size and not -1 <= int(surplus.min()) <= int(surplus.max()) < given.id_range:
        raise TraceError(
            f"the surplus row {n - 1}, of the last token, holds ids {surplus.min()} to "
            f"{surplus.max()}, expected 0..{given.id_range - 1}, or -1"
        )
    if ids.shape[1] == moe:
        return ids
    for layer in sorted(set(range(spec.num_layers)) - set(spec.moe_layers)):
        wrong = ((ids[:, layer] != 0) & (ids[:, layer] != -1)).any(axis=-1)
        if wrong.any():
            row = int(wrong.argmax())
            raise TraceError(
                f"row {start + row}, layer {layer}: experts {ids[row, layer].tolist()} in a dense "
                f"layer, expected zeros or -1: layers are shifted, or the model has other MoE "
                f"layers than {list(spec.moe_layers)}"
            )
    return spec.select_moe_layers(ids)


def _missing(
    ids: np.ndarray, start: int, spec: RouterSpec, zeros: bool, arange: bool
) -> np.ndarray:
    """bool [rows]: missing by a format's convention. Raises TraceError where it could be data."""
    if zeros and spec.top_k > 1:
        return np.asarray(~ids.any(axis=(1, 2)))
    unclear = is_arange(ids)  # with one expert per token: expert 0
    if (zeros or arange) and unclear.any():
        what = "expert 0" if spec.top_k == 1 else f"experts 0..{spec.top_k - 1}"
        raise TraceError(
            f"row {start + int(unclear.argmax())} is {what} in all layers: in this format that may "
            "be data or a missing row; pass valid=, which says what rows were captured"
        )
    return np.zeros(len(ids), bool)


def is_arange(ids: np.ndarray) -> np.ndarray:
    """bool [rows]: experts 0..top_k - 1, in this order, in all layers."""
    same: np.ndarray = ids == np.arange(ids.shape[2])
    return np.asarray(same.all(axis=(1, 2)))
