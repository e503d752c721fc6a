"""Other frameworks' routing payloads, each by its name, with the same two functions.

    batch = from_wire(reply, "vllm", spec=spec)
    samples = to_wire(batch, "slime")

docs/wire.md says what each format is and what is refused. There is one module per format. Arrays
come as numpy or torch and go as numpy. No framework is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from r3.batch import RoutingBatch
from r3.errors import FormatError
from r3.identity import RolloutId
from r3.spec import RouterSpec
from r3.storage.wire import (
    megatron,
    miles,
    nemo_rl,
    prime_rl,
    r3_rows,
    sglang,
    skyrl,
    slime,
    verl,
    vllm,
    vllm_021,
)
from r3.storage.wire.reading import Given, naming

__all__ = ["FORMATS", "JSON_FORMATS", "from_wire", "to_wire"]

_MODULES: dict[str, ModuleType] = {
    "vllm": vllm,
    "vllm-0.21": vllm_021,
    "sglang": sglang,
    "verl": verl,
    "slime": slime,
    "miles": miles,
    "nemo-rl": nemo_rl,
    "prime-rl": prime_rl,
    "skyrl": skyrl,
    "megatron": megatron,
    "r3": r3_rows,
}
FORMATS = tuple(_MODULES)
# whose objects are text and numbers: one JSON document for each sequence
JSON_FORMATS = ("vllm", "vllm-0.21", "sglang", "nemo-rl", "prime-rl", "skyrl", "r3")


def to_wire(batch: RoutingBatch, name: str) -> Any:
    """`batch` as format `name` of FORMATS has it.

    That is a list with one object per sequence; for "verl" a mapping of padded arrays; for
    "megatron" a list of one array per MoE layer.

    Raises UnsupportedError, naming rollout and row, where `from_wire` or the framework would take
    the result for something else: a missing row where nothing stands for one, more experts than
    the format's integers hold. Raises TraceError for an impossible batch, FormatError for a name
    that is not known.
    """
    return _module(name).to_wire(batch)


def from_wire(
    obj: Any,
    name: str,
    *,
    spec: RouterSpec,
    token_ids: Sequence[Any] | None = None,
    prompt_lens: Sequence[int] | None = None,
    rollout_ids: Sequence[RolloutId | str] | None = None,
    valid: Sequence[Any] | None = None,
    physical_to_logical: Any = None,
) -> RoutingBatch:
    """The sequences in `obj`, which is of format `name`: see docs/wire.md or its module.

    The other arguments have an entry for each sequence, in the order of `obj`. token_ids: all ids
    of each, prompt and response, where the payload does not hold them; where it does, both must be
    the same. prompt_lens: as well. rollout_ids: their names, new ones by default. valid: bool
    [n - 1] for each, which rows were captured, where the payload alone does not tell missing rows
    from data. physical_to_logical: the expert in each slot of a load balancer (EPLB), integers
    [slots] or [MoE layers, slots], where ids are those of slots.

    Raises CaptureError if the routing is not there at all; FormatError for a payload that is
    malformed or contradicts itself; TraceError for rows that are not of these tokens and routers,
    or that may be data or missing; each names the sequence, and row and layer where there is one.
    """
    given = Given(spec, token_ids, prompt_lens, rollout_ids, valid, physical_to_logical)
    module = _module(name)
    with naming(name):
        batch: RoutingBatch = module.from_wire(obj, given)
        return batch


def _module(name: str) -> ModuleType:
    if name not in _MODULES:
        raise FormatError(f"{name!r} is not a format, expected one of {', '.join(FORMATS)}")
    return _MODULES[name]
