"""What Megatron-core needs replaced to run on CPUs with gloo, on one rank or several, and how to
undo it.

All names are looked up at call time, so the patches have to stay in place while a model is built
and run. Verified with megatron-core 0.16 and 0.19; a version that no longer needs a patch does not
get it.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from r3.errors import UnsupportedError
from r3.trainer_hooks.megatron_routers import megatron_version

VERSIONS = ("0.16.", "0.19.")

_ABSENT = object()  # what a name was before if there was none
_undo: list[Callable[[], Any]] = []  # takes back what install() did, last first
# where the process group that init_single_process made keeps its store; None if it made none
_store: tempfile.TemporaryDirectory[str] | None = None
# whether the process group was made here
_made_group = False


def install() -> None:
    """Patch torch and Megatron-core for a CPU. Does nothing the second time.

    Raises UnsupportedError where CUDA is available (Megatron needs no help there) and for a version
    of Megatron-core that this was not tried with; MissingDependencyError without it.
    """
    if _undo:
        return
    if torch.cuda.is_available():
        raise UnsupportedError(
            "r3.trainer_hooks.megatron_cpu on a machine with CUDA, expected one without: use "
            "Megatron-core as it is"
        )
    version = megatron_version()
    if not version.startswith(VERSIONS):
        expected = " or ".join(v.rstrip(".") for v in VERSIONS)
        raise UnsupportedError(f"megatron-core is version {version}, expected {expected} on a CPU")
    _stub_triton()
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    # Routers and buffers are created on, and moved to, torch.cuda.current_device(); a torch.device
    # is accepted wherever its index is.
    _patch(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # 0.16.1 imports this name only if TransformerEngine is there, and reads it in any case.
    if not hasattr(moe_utils, "te_general_gemm"):
        _patch(moe_utils, "te_general_gemm", None)
    # All schedules count tokens in torch.zeros(device="cuda"); rotary embeddings under context
    # parallelism index with a pinned tensor.
    _patch(schedules, "torch", TorchOnCpu())
    _patch(rope_utils, "torch", TorchOnCpu())
    # The same rotary index, and tied embeddings of two pipeline stages, are moved by .cuda().
    _patch(torch.Tensor, "cuda", lambda self, *_, **__: self)
    # Pipeline stages that batch their messages or exchange shapes wait for the device after it.
    _patch(torch.cuda, "synchronize", lambda *_: None)
    # 0.19's DistributedDataParallel gets the current stream, in case a CUDA graph is to be awaited.
    if not version.startswith("0.16."):
        _patch(torch.cuda, "current_stream", lambda *_: None)
    # Recomputation saves and restores CUDA's random state, sequence parallelism forks it. Nothing
    # draws from it on a CPU; a generator of its own leaves torch's default one alone. (Seeding and
    # setting would not fail, but torch queues each with a stack trace until CUDA starts.)
    cuda = torch.Generator()
    _patch(torch.cuda, "manual_seed", cuda.manual_seed)
    _patch(torch.cuda, "get_rng_state", lambda *_: cuda.get_state())
    _patch(random, "_get_cuda_rng_state", lambda *_, **__: cuda.get_state())
    _patch(random, "_set_cuda_rng_state", lambda state, *_, **__: cuda.set_state(state))
    # Recomputing norms asks TransformerEngine about FP8 unless told None, and the default is False.
    _patch(random.CheckpointWithoutOutput.__init__, "__defaults__", (None,))
    # The all-to-all dispatcher copies its split sizes to the host on a CUDA stream of its own; of
    # this only the conversion is wanted, since gloo takes no tensors for sizes.
    _patch(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "none")
    _patch(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _splits_as_numpy)


def uninstall() -> None:
    """Undo `install`."""
    while _undo:
        _undo.pop()()


def _patch(owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name, _ABSENT)
    if before is _ABSENT or (isinstance(owner, type) and name not in vars(owner)):  # inherited
        _undo.append(lambda: delattr(owner, name))
    else:
        _undo.append(lambda: setattr(owner, name, before))
    setattr(owner, name, value)


class TorchOnCpu:
    """`torch` as a module of Megatron gets to see it: "cuda" is the CPU, no memory is pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **_on_cpu(options))

    def tensor(self, data: Any, **options: Any) -> torch.Tensor:
        return torch.tensor(data, **_on_cpu(options))


def _on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in ("device", "pin_memory")}


def _splits_as_numpy(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(dispatcher, name)
            if isinstance(value, torch.Tensor):
                setattr(dispatcher, name, value.numpy())
    return tokens_per_expert


def _stub_triton() -> None:
    """0.19 imports Triton kernels that only run if a setting asks for them; it goes without them
    where triton is not installed."""
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if importlib.util.find_spec("triton") is not None or name in sys.modules:
        return
    folder = importlib.util.find_spec("megatron.core")
    places = (folder.submodule_search_locations if folder else None) or []
    if any((Path(p) / "transformer/moe/ops/paged_stash.py").exists() for p in places):
        stub = ModuleType(name)
        stub.__getattr__ = lambda _: None  # type: ignore[method-assign]
        sys.modules[name] = stub
        _undo.append(lambda: sys.modules.pop(name, None))


def init_ranks(store: Path, rank: int, world_size: int, **sizes: int | None) -> None:
    """Install the shim and set up gloo and model parallelism of one of `world_size` processes.

    store: a file that does not exist yet, the same for all ranks; they meet there and need no port.
    sizes: those of `set_parallel`. Raises UnsupportedError if torch.distributed already
    runs.
    """
    global _made_group
    install()
    import torch.distributed as dist

    if dist.is_initialized():
        raise UnsupportedError("torch.distributed is already initialized, expected it not to be")
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size
    )
    _made_group = True
    set_parallel(**sizes)  # type: ignore[arg-type]


def set_parallel(
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
) -> None:
    """Set or change the layout of the ranks. All must call it; models built before are void.

    tp, pp, vpp, cp, ep, etp: sizes of tensor, pipeline, virtual pipeline (None: not interleaved),
    context, expert and expert tensor parallelism. Sizes that do not divide the number of ranks are
    refused by Megatron with a RuntimeError. With tp > 1, ep = 1 and etp < tp, Megatron leaves the
    gradients of experts unreduced.
    """
    from megatron.core import parallel_state, tensor_parallel

    _clear_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        # for what CUDA ranks do on the host: here all groups are of gloo
        create_gloo_process_groups=False,
    )
    # without its states, sequence parallelism refuses to run
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def _clear_parallel() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.is_initialized():
        return
    # Megatron only forgets its groups, each of which keeps threads: after 40 layouts 2000 of them
    groups = [g for g in parallel_state._global_process_group_list or [] if g is not None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        dist.destroy_process_group(group)
    tensor_parallel.get_cuda_rng_tracker().reset()


def init_single_process() -> None:
    """Install the shim and set up gloo and model parallelism of one rank. Repeating it is safe.

    Raises UnsupportedError if torch.distributed already runs with more than one rank.
    """
    global _store
    import torch.distributed as dist

    if not dist.is_initialized():
        # a file and not a port: nothing to collide with
        _store = tempfile.TemporaryDirectory(prefix="r3-gloo-", ignore_cleanup_errors=True)
        init_ranks(Path(_store.name) / "store", 0, 1)
        return
    install()
    if dist.get_world_size() != 1:
        raise UnsupportedError(f"world size is {dist.get_world_size()}, expected 1")
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        set_parallel()


def destroy() -> None:
    """Undo `init_single_process` or `init_ranks`; a process group that somebody else made stays."""
    global _store, _made_group
    import torch.distributed as dist

    _clear_parallel()
    if _made_group and dist.is_initialized():
        dist.destroy_process_group()
    _made_group = False
    if _store is not None:
        _store.cleanup()
        _store = None
    uninstall()
