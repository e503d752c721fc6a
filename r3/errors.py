"""The exceptions and warnings of this project: one place, so that a caller can catch them by kind.

Everything that goes wrong because of what a user handed in is an `R3Error`; its text names the
rollout, row and layer where there is one, what was found and what was expected.
"""


class R3Error(Exception):
    """Base class of all errors raised on purpose by this package."""


class SpecError(R3Error, ValueError):
    """A RouterSpec cannot be built, or two specs that must agree do not."""


class TraceError(R3Error, ValueError):
    """A trace or batch has content that no engine can have produced (shape, range, duplicates)."""


class FormatError(R3Error, ValueError):
    """A file is not in the format it should be in: foreign, truncated, corrupt or too new."""


class UnsupportedError(R3Error, ValueError):
    """A model, engine or trainer setting under which the result could not be trusted."""


class CaptureError(R3Error, RuntimeError):
    """The engine did not deliver the routing it was asked for."""


class ReplayError(R3Error, RuntimeError):
    """Routing could not be replayed as asked: other tokens, other rows, or a router left out."""


class TransportError(R3Error, RuntimeError):
    """A batch on its way between processes is lost, was freed, or could not be put there."""


class MissingDependencyError(R3Error, ImportError):
    """An optional package is not installed; the text names the extra that brings it."""


class SuspiciousRoutingWarning(UserWarning):
    """Routing that is possible but looks like filler, stale rows or a layer never written."""


class TornShardWarning(UserWarning):
    """A shard file ends within a record: its writer is at work, or died; what is whole is read."""


class StaleRoutingWarning(UserWarning):
    """Rows older than `max_weight_lag` allows are replayed all the same, as was asked for."""


class RawLogprobsWarning(UserWarning):
    """The engine reported log-probabilities other than those it sampled from."""
