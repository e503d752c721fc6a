"""The figures of a training step and the one table of the names they are recorded under."""

from __future__ import annotations

from typing import Any

import numpy as np

from r3.load import max_violation
from r3.shares import share
from r3.slices import OTHER, SliceCounts, label_order
from r3.step_input import REPLAY_COUNTS
from r3.step_state import StepState

MOST_LABELS = 64  # recorded of a dimension; those with the fewest tokens share the label OTHER

_VERL = {  # names of verl's, where its formula is the very same
    "kl_k1": "rollout_corr/kl",
    "kl_k3": "rollout_corr/k3_kl",
    "training_ppl": "rollout_corr/training_ppl",
    "training_log_ppl": "rollout_corr/training_log_ppl",
    "rollout_ppl": "rollout_corr/rollout_ppl",
    "rollout_log_ppl": "rollout_corr/rollout_log_ppl",
    "log_ppl_diff": "rollout_corr/log_ppl_diff",
    "log_ppl_abs_diff": "rollout_corr/log_ppl_abs_diff",
    "log_ppl_diff_max": "rollout_corr/log_ppl_diff_max",
    "log_ppl_diff_min": "rollout_corr/log_ppl_diff_min",
    "ppl_ratio": "rollout_corr/ppl_ratio",
    # verl's at token level, where `high` is its threshold and `low` is 1 / high
    "ratio_fraction_high": "rollout_corr/rollout_is_ratio_fraction_high",
    "ratio_fraction_low": "rollout_corr/rollout_is_ratio_fraction_low",
    "probs_diff_mean": "training/rollout_probs_diff_mean",
    "probs_diff_max": "training/rollout_probs_diff_max",
    "probs_diff_std": "training/rollout_probs_diff_std",
    "probs_pearson": "training/rollout_actor_probs_pearson_corr",
}
# not under verl's names, as its chi2 and mean weight clamp log-ratios to +-20, and its effective
# sample size clamps weights on both sides
_LOGPROBS = (
    *("tokens", "sequences", "left_out", "chi2_token", "chi2_seq"),
    *("logratio_min", "logratio_max", "abs_logratio_mean"),
    *("abs_logratio_p50", "abs_logratio_p90", "abs_logratio_p99", "abs_logratio_p999"),
    "abs_logratio_max",
    *("extreme_1.1", "extreme_1.5", "extreme_2", "extreme_5", "extreme_10"),
    *("ratio_mean", "ratio_truncated_mean"),
    *("ess", "ess_truncated", "ess_sequence", "ess_sequence_truncated"),
    *("seq_logratio_mean", "seq_logratio_abs_mean", "seq_logratio_abs_max"),
    *("seq_abs_logratio_mean", "seq_abs_logratio_max", "seq_geometric_mean"),
    "seq_mean_logratio_abs_max",
)
_ROUTING = (
    *("cell_disagreement_free", "expert_disagreement_free", "token_disagreement_free"),
    *("layers_per_token_free", "max_vio_engine", "max_vio_trainer_free"),
    *("outside_topk_cells_forced", "outside_topk_experts_forced"),
    *("outside_topk_cells_free", "outside_topk_experts_free"),
    *("rows", "rows_without_route_fraction", "rollouts", "rollouts_without_route"),
    *("cells_replayed", "cells_missing", "cells_stale", "cells_padding", "cells_not_enclosed"),
    *("cells_native_fraction", "weight_lag_mean", "weight_lag_max"),
    *("alerts_notice", "alerts_bad"),
)
NAMES = {**_VERL, **{key: f"routing/{key}" for key in _LOGPROBS + _ROUTING}}


def figures(state: StepState) -> dict[str, float]:
    """Figures by the keys of NAMES, NaN for shares of nothing; what was not given has no key."""
    found = {}
    if state.has_logprobs:
        found = state.mismatch.metrics()
        if not found["tokens"]:
            found = {name: found[name] for name in ("tokens", "left_out")}
    found |= {
        "rollouts": state.rollouts,
        "rollouts_without_route": state.rollouts_without_route,
        "rows": state.rows,
        "rows_without_route_fraction": share(state.rows_without_route, state.rows),
    }
    if state.lag_max is not None:
        found["weight_lag_mean"] = state.lag_sum / state.lag_rows
        found["weight_lag_max"] = state.lag_max
    layers = layer_figures(state)
    for name in ("max_vio_engine", "max_vio_trainer_free"):
        values = [layer[name] for layer in layers if name in layer]
        if values:
            found[name] = float(np.mean(values))
    return found | _disagreement(state) | _replay(state)


def _disagreement(state: StepState) -> dict[str, float]:
    stages = [s for s in state.routing.values() if s.tokens]
    if not stages:
        return {}
    cells = sum(s.tokens * len(s.cells) for s in stages)
    found = {
        "cell_disagreement_free": sum(s.cells.sum() for s in stages) / cells,
        "expert_disagreement_free": sum(s.experts.sum() / s.top_k for s in stages) / cells,
        "layers_per_token_free": sum(s.cells.sum() / s.tokens for s in stages),
    }
    if len(stages) == 1:  # several stages do not know of each other's tokens
        found["token_disagreement_free"] = stages[0].differing / stages[0].tokens
    return {name: float(x) for name, x in found.items()}


def _replay(state: StepState) -> dict[str, float]:
    if not state.replay:
        return {}
    total = {k: sum(counts[k] for counts in state.replay.values()) for k in REPLAY_COUNTS}
    native = total["rows_missing"] + total["rows_stale"]
    # rows of all layers are cells
    kinds = ("replayed", "missing", "stale", "padding", "not_enclosed")
    return {
        **{f"cells_{kind}": total[f"rows_{kind}"] for kind in kinds},
        "cells_native_fraction": share(native, native + total["rows_replayed"]),
        **_outside(total, state.replay_top_k),
    }


def _outside(counts: Any, top_k: int) -> dict[str, float]:
    found = {}
    for kind, rows in (("forced", counts["rows_replayed"]), ("free", counts["rows_compared"])):
        if rows:
            found[f"outside_topk_cells_{kind}"] = counts[f"outside_topk_cells_{kind}"] / rows
            experts = counts[f"outside_topk_experts_{kind}"]
            found[f"outside_topk_experts_{kind}"] = experts / (rows * top_k)
    return found


def layer_figures(state: StepState) -> list[dict[str, float]]:
    """One entry for each decoder layer, ascending: "layer", and what is known of it by the keys of
    NAMES."""
    found: dict[int, dict[str, float]] = {}
    for layers, s in state.routing.items():
        vio_a, vio_b = max_violation(s.load_a), max_violation(s.load_b)
        for i, layer in enumerate(layers):
            entry = found.setdefault(layer, {"layer": layer})
            if s.load_a[i].any():
                entry["max_vio_engine"] = float(vio_a[i])
            if s.tokens:
                entry["cell_disagreement_free"] = float(s.cells[i] / s.tokens)
                entry["expert_disagreement_free"] = float(s.experts[i] / (s.tokens * s.top_k))
                entry["max_vio_trainer_free"] = float(vio_b[i])
    for layer, counts in state.replay.items():
        entry = found.setdefault(layer, {"layer": layer})
        entry |= _outside(counts, state.replay_top_k)
    return [found[layer] for layer in sorted(found)]


def slice_figures(state: StepState) -> dict[str, dict[str, dict[str, float]]]:
    """By dimension and label: figures by the keys of NAMES, NaN for what there are no tokens or
    rows for. At most MOST_LABELS labels of a dimension, and OTHER for the rest."""
    stages = sum(s.tokens > 0 for s in state.routing.values())
    found = {}
    for dimension, parts in state.slices.items():
        few, rest = sorted(parts, key=label_order), []
        if len(parts) > MOST_LABELS:
            tokens = {label: part.mismatch.metrics()["tokens"] for label, part in parts.items()}
            by_size = sorted(parts, key=lambda x: (-tokens[x], -parts[x].rows, x))
            few, rest = sorted(by_size[:MOST_LABELS], key=label_order), by_size[MOST_LABELS:]
        kept = {label: parts[label] for label in few}
        for label in rest:
            kept[OTHER] = kept[OTHER] + parts[label] if OTHER in kept else parts[label]
        found[dimension] = {label: _of_slice(part, stages) for label, part in kept.items()}
    return found


def _of_slice(part: SliceCounts, stages: int) -> dict[str, float]:
    known = part.mismatch.metrics()
    return {
        **{k: known[k] for k in ("tokens", "kl_k3", "abs_logratio_p99", "extreme_2", "ess")},
        "rows": part.rows,
        "cell_disagreement_free": share(part.differing_cells, part.cells),
        "token_disagreement_free": share(part.differing, part.rows if stages == 1 else 0),
    }
