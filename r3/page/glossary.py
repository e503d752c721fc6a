"""Which words a page has to explain: those of the figures that are on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.page.reach import at, mapping, records
from r3.page.words import METRICS, SECTIONS, TERMS
from r3.step_figures import NAMES

_KEYS = {name: key for key, name in NAMES.items()}
_ROUTING = (("routing", "native"), ("routing", "replay"))
_LOGPROBS = (("mismatch", "native"), ("mismatch", "replay"))
# term: (where in the document it is shown from, keys of NAMES of which one is recorded)
_SHOWN: dict[str, tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "cell_disagreement": (_ROUTING, ("cell_disagreement_free",)),
    "expert_disagreement": (_ROUTING, ("expert_disagreement_free",)),
    "token_disagreement": (_ROUTING, ("token_disagreement_free",)),
    "layers_per_token_mean": (_ROUTING, ("layers_per_token_free",)),
    "logratio": (_LOGPROBS, ("abs_logratio_max",)),
    "kl_k3": (_LOGPROBS, ("kl_k3",)),
    "abs_logratio_p99": (_LOGPROBS, ("abs_logratio_p99",)),
    "abs_logratio_p999": (_LOGPROBS, ("abs_logratio_p999",)),
    "abs_logratio_max": (_LOGPROBS, ("abs_logratio_max",)),
    "extreme_2": (_LOGPROBS, ("extreme_2",)),
    "ess": (_LOGPROBS, ("ess",)),
    "ess_sequence": (_LOGPROBS, ("ess_sequence",)),
    "seq_logratio": (_LOGPROBS, ("seq_logratio_mean",)),
    "probs_pearson": (_LOGPROBS, ("probs_pearson",)),
    "max_vio": ((("routing", "native"),), ("max_vio_engine", "max_vio_trainer_free")),
    "top1_changed": (_ROUTING, ()),
    "margin": ((("routing", "native", "margins"),), ()),
    "outside_topk": (
        (("outside_topk", "forced"), ("outside_topk", "free")),
        ("outside_topk_experts_forced", "outside_topk_experts_free"),
    ),
    "rows_without_route": ((), ("rows_without_route_fraction",)),
    "weight_lag": ((("slices", "weight_lag"),), ("weight_lag_mean", "weight_lag_max")),
}


def terms(data: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name and definition of each term of which the page shows a figure."""
    recorded = {name for r in records(data, "steps") for name in mapping(r, "metrics")}
    return {
        key: TERMS[key]
        for key, (paths, metrics) in _SHOWN.items()
        if any(at(data, *path) for path in paths) or any(NAMES[m] in recorded for m in metrics)
    }


def meaning(recorded: str) -> str | None:
    """What a figure is that is recorded under this name; None for one that is not ours."""
    key = _KEYS.get(recorded, recorded)
    return METRICS.get(key) or TERMS.get(key, (None,))[0]


def titles(data: Mapping[str, Any]) -> dict[str, str]:
    """What the sections are called on this page, by their ids."""
    changed = {}
    if not any(mapping(data, block, "replay") for block in ("routing", "mismatch")):
        changed["figures"] = "Headline figures"
    if not mapping(data, "slices"):
        changed["slices"] = "Slices of the last step"
    return SECTIONS | changed
