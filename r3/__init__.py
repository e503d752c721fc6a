"""rollout-routing-replay: capture, store, replay and inspect the expert routing of MoE rollouts.

This package is the core: what a routing trace is and what can be said of one. It imports numpy
and nothing heavier. Beside it: `r3.storage` (files), `r3.engine_hooks` (capture),
`r3.trainer_hooks` (replay), `r3.cli` (the command line).
"""

from pathlib import Path as _Path

# In the repository storage/, engine_hooks/ and trainer_hooks/ lie beside r3/ and are mapped below
# it when the package is built. With the clone as working directory this folder shadows an
# installed package, so look beside it too, which is where they are in a clone.
_root = _Path(__file__).resolve().parent.parent
if not (_root / "r3" / "storage").exists() and (_root / "storage" / "__init__.py").exists():
    __path__.append(str(_root))

from r3.batch import RoutingBatch  # noqa: E402
from r3.checks import Suspicion  # noqa: E402
from r3.errors import (  # noqa: E402
    CaptureError,
    FormatError,
    MissingDependencyError,
    R3Error,
    RawLogprobsWarning,
    ReplayError,
    SpecError,
    StaleRoutingWarning,
    SuspiciousRoutingWarning,
    TornShardWarning,
    TraceError,
    TransportError,
    UnsupportedError,
)
from r3.identity import Provenance, RolloutId  # noqa: E402
from r3.merge import merge_prefill_decode  # noqa: E402
from r3.spec import RouterSpec  # noqa: E402
from r3.trace import Column, RoutingTrace  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Column",
    "FormatError",
    "MissingDependencyError",
    "Provenance",
    "R3Error",
    "RawLogprobsWarning",
    "ReplayError",
    "RolloutId",
    "RouterSpec",
    "RoutingBatch",
    "RoutingTrace",
    "SpecError",
    "StaleRoutingWarning",
    "Suspicion",
    "SuspiciousRoutingWarning",
    "TornShardWarning",
    "TraceError",
    "TransportError",
    "UnsupportedError",
    "merge_prefill_decode",
]
