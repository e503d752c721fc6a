"""Consumers of routing: which rows of a batch a trainer's routers see, and replay in them.

`MegatronReplay` needs megatron-core and torch; importing this package needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3.trainer_hooks.megatron import MegatronReplay

__all__ = ["MegatronReplay"]


def __getattr__(name: str) -> Any:
    if name == "MegatronReplay":
        from r3.trainer_hooks.megatron import MegatronReplay

        return MegatronReplay
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
