"""What Megatron-core needs replaced to run on a CPU with gloo, and how to undo it.

Two names are patched, both looked up at call time, so the patches have to stay in place while a
model is built and run. Verified with megatron-core 0.16; a version that no longer needs a patch
does not get it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from r3.errors import UnsupportedError
from r3.trainer_hooks.megatron_routers import megatron_version

# (object, name, what it was before; _ABSENT if it had no such name)
_ABSENT = object()
_patched: list[tuple[Any, str, Any]] = []
# where the process group that init_single_process made keeps its store; None if it made none
_store: tempfile.TemporaryDirectory[str] | None = None


def install() -> None:
    """Patch torch and Megatron-core for a CPU. Does nothing the second time.

    Raises UnsupportedError where CUDA is available (Megatron needs no help there) and for a version
    of Megatron-core that this was not tried with; MissingDependencyError without it.
    """
    if _patched:
        return
    import torch

    if torch.cuda.is_available():
        raise UnsupportedError(
            "r3.trainer_hooks.megatron_cpu on a machine with CUDA, expected one without: use "
            "Megatron-core as it is"
        )
    version = megatron_version()
    if not version.startswith("0.16."):
        raise UnsupportedError(f"megatron-core is version {version}, expected 0.16 on a CPU")
    from megatron.core.transformer.moe import moe_utils

    # Routers and buffers are created on, and moved to, torch.cuda.current_device(); a torch.device
    # is accepted wherever its index is.
    _patch(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # 0.16.1 imports this name only if TransformerEngine is there, and reads it in any case.
    if not hasattr(moe_utils, "te_general_gemm"):
        _patch(moe_utils, "te_general_gemm", None)


def uninstall() -> None:
    """Undo `install`."""
    while _patched:
        owner, name, before = _patched.pop()
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _patch(owner: Any, name: str, value: Any) -> None:
    _patched.append((owner, name, getattr(owner, name, _ABSENT)))
    setattr(owner, name, value)


def init_single_process() -> None:
    """Install the shim and set up gloo and model parallelism of one rank. Repeating it is safe.

    Raises UnsupportedError if torch.distributed already runs with more than one rank.
    """
    global _store
    install()
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not dist.is_initialized():
        # a file and not a port: nothing to collide with
        _store = tempfile.TemporaryDirectory(prefix="r3-gloo-", ignore_cleanup_errors=True)
        store = dist.FileStore(str(Path(_store.name) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    elif dist.get_world_size() != 1:
        raise UnsupportedError(f"world size is {dist.get_world_size()}, expected 1")
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()


def destroy() -> None:
    """Undo `init_single_process`; a process group that somebody else made stays."""
    global _store
    import torch.distributed as dist
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if _store is not None:
        if dist.is_initialized():
            dist.destroy_process_group()
        _store.cleanup()
        _store = None
    uninstall()
