"""Which rollout a trace belongs to (RolloutId) and what produced it (Provenance)."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from r3.errors import TraceError


@dataclass(frozen=True, order=True)
class RolloutId:
    """The name of one rollout, unique across runs, retries, samples and turns.

    An engine's own request ids repeat, so the name is the trainer's: run and group (a prompt, or
    a GRPO group) are text, sample, turn and attempt count from 0. As text:
    `run/group/sample/turn/attempt`.
    """

    run: str
    group: str = "0"
    sample: int = 0
    turn: int = 0
    attempt: int = 0

    def __post_init__(self) -> None:
        for name in ("run", "group"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or "/" in value or len(value) > 512:
                raise TraceError(
                    f"RolloutId.{name} is {value!r}, expected text of 1 to 512 characters "
                    "without '/'"
                )
            try:
                value.encode()
            except UnicodeEncodeError as e:
                raise TraceError(
                    f"RolloutId.{name} is {value!r}, which has no UTF-8: {e}"
                ) from None
        for name in ("sample", "turn", "attempt"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
                raise TraceError(f"RolloutId.{name} is {value!r}, expected an integer from 0")

    @classmethod
    def unique(cls) -> RolloutId:
        """A name that no other rollout has, for callers that do not name theirs."""
        return cls(run=uuid.uuid4().hex)

    @classmethod
    def parse(cls, text: str) -> RolloutId:
        """Inverse of `str()`. Raises TraceError for anything else."""
        parts = text.split("/")
        numbers = parts[2:]
        if len(parts) != 5 or not all(p.isascii() and p.isdigit() and len(p) < 17 for p in numbers):
            raise TraceError(
                f"rollout id {text!r:.600} is not of the form run/group/sample/turn/attempt"
            )
        return cls(parts[0], parts[1], *map(int, numbers))

    def __str__(self) -> str:
        return f"{self.run}/{self.group}/{self.sample}/{self.turn}/{self.attempt}"


@dataclass(frozen=True)
class Provenance:
    """What produced a trace: whatever can explain why a trainer disagrees with it.

    Empty text and None mean not known. `head_dtype` is that of the logits (the LM head);
    `batch_invariant`: whether a token's result does not depend on the batch it is in. `sampling`
    and `parallel` hold plain values (numbers, text); `extra` is carried through unread.
    """

    engine: str = ""
    engine_version: str = ""
    model: str = ""
    model_revision: str = ""
    dtype: str = ""
    head_dtype: str = ""
    quantization: str = ""
    kv_cache_dtype: str = ""
    attention_backend: str = ""
    moe_kernel: str = ""
    batch_invariant: bool | None = None
    device: str = ""
    logprobs_mode: str = ""
    parallel: Mapping[str, int] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self._items():
            kind, expected = _KINDS.get(name, (str, "text"))
            if not isinstance(value, kind):
                raise TraceError(f"Provenance.{name} is {value!r}, expected {expected}")

    def _items(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values without the unknown ones."""
        known = ((k, v) for k, v in self._items() if v or v is False)
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in known}

    def flat(self) -> dict[str, Any]:
        """`to_dict` with what is in mappings under "field.key": one value for each name."""
        found: dict[str, Any] = {}
        for name, value in self.to_dict().items():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            found |= {f"{name}.{key}" if key else name: item for key, item in inner}
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Provenance:
        """Inverse of `to_dict`; a field of a later version is kept in `extra`.

        Raises TraceError for a field of the wrong type.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        extra = {k: v for k, v in values.items() if k not in known}
        fields = {k: v for k, v in values.items() if k in known}
        made = cls(**fields)
        return dataclasses.replace(made, extra={**made.extra, **extra}) if extra else made


# fields of Provenance that are not text
_KINDS: dict[str, tuple[Any, str]] = {
    "parallel": (Mapping, "a mapping"),
    "sampling": (Mapping, "a mapping"),
    "extra": (Mapping, "a mapping"),
    "batch_invariant": (bool | None, "True, False or None"),
}
