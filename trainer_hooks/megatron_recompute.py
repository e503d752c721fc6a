"""Makes a function that Megatron checkpoints run again in the microbatch in which it first ran.

Activation recomputation calls a part of the model a second time, from inside the backward pass,
in whatever order the schedule asks for. A queue of microbatches cannot follow that: an evaluation
pass or an interleaved schedule leaves it one entry off, silently. So nothing is queued: what is
checkpointed is wrapped together with the microbatch at hand, and enters it again when it runs
again. The closure lives as long as the graph node that holds it.

All of Megatron's checkpoints, full, block and selective, pass through
`tensor_parallel.random.checkpoint`, which looks up `CheckpointFunction` in its module when called.
That name is replaced while any replay is attached. Others (torch.utils.checkpoint,
TransformerEngine's for fp8) are not known here; a router that runs in the backward pass without
having been entered again is an error.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from r3.errors import ReplayError, UnsupportedError

if TYPE_CHECKING:
    from r3.trainer_hooks.megatron_microbatch import Microbatch


class State(threading.local):
    """What a thread is in the middle of; on a GPU, backward passes run in a thread of their own."""

    current: Microbatch | None = None
    entered = False  # inside a function that Megatron checkpoints
    asked: set[int] | None = None  # the layers whose routers asked in that function


class Again:
    """Enters the microbatch in which a checkpointed function first ran, as often as asked."""

    def __init__(self, owner: Reentrant, microbatch: Microbatch | None) -> None:
        self._owner, self._microbatch = owner, microbatch
        self._enclosed = microbatch is not None
        self._asked: set[int] | None = None  # in the first run

    @contextmanager
    def __call__(self) -> Iterator[None]:
        owner, state = self._owner, self._owner.state
        if self._enclosed and self._asked and not owner.attached:
            raise ReplayError(
                "activations are recomputed after detach(), expected the backward pass before it: "
                "they would be routed natively"
            )
        before = state.current, state.entered, state.asked
        asked: set[int] = set()
        state.current, state.entered, state.asked = self._microbatch, True, asked
        try:
            yield
        finally:
            state.current, state.entered, state.asked = before
        if state.asked is not None:
            state.asked |= asked
        if self._asked is None:
            self._asked = asked
            if not asked:
                self._microbatch = None  # holds no router: nothing to keep
        elif self._enclosed and asked != self._asked:
            raise ReplayError(
                f"decoder layers {sorted(self._asked - asked)}: the router did not ask for its "
                "routing when it was recomputed, expected it to as in the forward pass: its "
                "router_replay was replaced in between"
            )


class Reentrant(Protocol):
    """What has a state that a checkpointed function must find again."""

    attached: bool
    state: State

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        """A context manager that enters, as often as asked, the state that holds now."""


class _Door:
    """Stands for CheckpointFunction; hands on everything but `apply`."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.owners: weakref.WeakSet[Reentrant] = weakref.WeakSet()

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        states = [owner.capture() for owner in self.owners]

        def again(*inner: Any) -> Any:
            with ExitStack() as stack:
                for state in states:
                    stack.enter_context(state())
                return function(*inner)

        return self.original.apply(again, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def attach(owner: Reentrant) -> None:
    """From here on, checkpointed functions run again in the state of `owner` in which they ran.

    Raises UnsupportedError if Megatron-core checkpoints in another way than is known here.
    """
    from megatron.core.tensor_parallel import random

    if not isinstance(random.CheckpointFunction, _Door):
        _check(random)
        random.CheckpointFunction = _Door(random.CheckpointFunction)
    random.CheckpointFunction.owners.add(owner)


def detach(owner: Reentrant) -> None:
    """Undo `attach`; what was checkpointed before keeps its state."""
    from megatron.core.tensor_parallel import random

    door = random.CheckpointFunction
    if isinstance(door, _Door):
        door.owners.discard(owner)
        if not door.owners:
            random.CheckpointFunction = door.original


def _check(random: Any) -> None:
    from r3.trainer_hooks.megatron_routers import megatron_version

    parameters = list(inspect.signature(random.CheckpointFunction.forward).parameters)
    expected = ["ctx", "run_function", "distribute_saved_activations", "args"]
    if parameters != expected or "CheckpointFunction" not in random.checkpoint.__code__.co_names:
        raise UnsupportedError(
            f"megatron-core {megatron_version()}: tensor_parallel.random.checkpoint is not the "
            f"function that is known here (CheckpointFunction.forward has {parameters}, expected "
            f"{expected}): recomputed routers could not be told which microbatch they belong to"
        )
