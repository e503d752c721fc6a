"""What a trainer hands to `StepState.of`, checked before anything is made of it."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from r3.batch import RoutingBatch
from r3.columns import on_host
from r3.errors import TraceError
from r3.json_fields import INT64, brief

REPLAY_COUNTS = (  # of ReplayReport, by layer
    *("rows_replayed", "rows_missing", "rows_stale", "rows_padding", "rows_not_enclosed"),
    *("outside_topk_cells_forced", "outside_topk_experts_forced"),
    *("rows_compared", "outside_topk_cells_free", "outside_topk_experts_free"),
)


def check_batch(value: object, name: str) -> None:
    """Raise TraceError for what is no RoutingBatch; name: of the argument."""
    if not isinstance(value, RoutingBatch):
        raise TraceError(f"{name} is of type {type(value).__name__}, expected a RoutingBatch")


def checked_version(value: Any) -> int:
    """A weight version: an integer, of any library, as an int. Raises TraceError for others."""
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):
        found = -1
    if not 0 <= found <= INT64:
        raise TraceError(f"weight_version is {brief(value)}, expected an integer of 0 to 2**63 - 1")
    return found


def replay_counts(report: Any) -> tuple[dict[int, dict[str, int]], int]:
    """REPLAY_COUNTS of a ReplayReport by layer, and the router's top_k; none if `report` is None.

    Raises TraceError for anything else.
    """
    if report is None:
        return {}, 0
    try:  # by its fields: the hooks are no part of the core
        counts = {
            operator.index(i): {k: operator.index(getattr(c, k)) for k in REPLAY_COUNTS}
            for i, c in report.layers.items()
        }
        top_k = operator.index(report.top_k)
    except (AttributeError, TypeError):
        raise TraceError(
            f"report is of type {type(report).__name__}, expected what MegatronReplay.report() "
            "returns"
        ) from None
    if top_k < 1 or min((n for c in counts.values() for n in c.values()), default=0) < 0:
        raise TraceError("report has negative counts or no top_k, expected one of MegatronReplay")
    return counts, top_k if counts else 0


def per_token(values: Any, name: str, tokens: int) -> np.ndarray:
    """numpy of `values`, numpy or torch. Raises TraceError unless these are [tokens]."""
    values = on_host(values, name)
    if values.shape != (tokens,):
        raise TraceError(
            f"{name} has shape {list(values.shape)}, expected [{tokens}]: one for each token of "
            "the batch, packed like it, prompts included"
        )
    return values
