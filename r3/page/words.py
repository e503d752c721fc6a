"""What the page calls its figures, and what each one means: the glossary is made from here."""

# ruff: noqa: RUF001 (dashes, minus and times signs are meant)

from __future__ import annotations

# key: (name in tables, definition). Natural logarithms throughout; lr = log(trainer / engine).
TERMS: dict[str, tuple[str, str]] = {
    "cell_disagreement": (
        "Cells routed differently",
        "A cell is one token in one MoE layer. Share of cells whose set of experts differs between "
        "engine and trainer; the order of the experts does not count.",
    ),
    "expert_disagreement": (
        "Experts routed differently",
        "Experts the engine used and the trainer did not, of all experts used "
        "(cells × experts per token).",
    ),
    "token_disagreement": (
        "Tokens routed differently",
        "Share of tokens with at least one layer whose set of experts differs.",
    ),
    "layers_per_token_mean": (
        "Differing layers per token",
        "Mean over tokens of the number of layers whose set of experts differs.",
    ),
    "kl_k3": (
        "KL divergence (k3)",
        "Mean over sampled tokens of r − 1 − log r with r = trainer's / engine's probability of "
        "the token: an estimate of KL(engine ‖ trainer) that is never negative.",
    ),
    "abs_logratio_p99": (
        "|log-ratio|, 99th percentile",
        "One sampled token in a hundred has a larger |log(trainer's / engine's probability)|.",
    ),
    "abs_logratio_max": (
        "|log-ratio|, largest",
        "The largest |log(trainer's / engine's probability)| of one sampled token.",
    ),
    "extreme_2": (
        "F(2), extreme tokens",
        "Share of sampled tokens whose probability differs by more than a factor of 2, either way: "
        "max(r, 1/r) > 2. In the published runs it passed 0.1 when a run collapsed.",
    ),
    "ess": (
        "Effective sample size",
        "(Σ r)² / (n Σ r²) over sampled tokens: 1 where all importance weights are equal, near 0 "
        "where a few tokens carry all the weight.",
    ),
    "abs_logratio_p999": (
        "|log-ratio|, 0.999 quantile",
        "One sampled token in a thousand has a larger |log(trainer's / engine's probability)|.",
    ),
    "ess_sequence": (
        "Effective sample size, sequences",
        "(Σ w)² / (n Σ w²) over rollouts with w = exp(Σ log r), the weight of a whole rollout. It "
        "falls with the length of the rollouts.",
    ),
    "probs_pearson": (
        "Correlation of probabilities",
        "Of the trainer's and the engine's probabilities of the sampled tokens. Rounding leaves it "
        "near 1; log-probabilities that are shifted by a token hardly correlate.",
    ),
    "rows_without_route": (
        "Rows without a route",
        "Share of rows (passes of a token) for which the engine delivered no routing.",
    ),
    "weight_lag": (
        "Lag of the weights",
        "Updates of the trainer's weights between those that a row was generated with and now.",
    ),
    "max_vio": (
        "MaxVio",
        "Largest expert load / mean expert load − 1 in a layer: 0 is perfect balance.",
    ),
    "top1_changed": ("First expert changed", "Share of cells whose highest-scored expert differs."),
    "margin": (
        "Flip margin",
        "Router logit of the last expert chosen minus that of the first one not chosen, in the "
        "trainer: how little it takes to change the set.",
    ),
    "outside_topk": (
        "Outside the trainer's top-k",
        "Cells and experts where the routing that was used is not what the trainer's own router "
        "would have chosen. Forced: under replay. Free: in a pass without replay.",
    ),
    "logratio": (
        "Log-ratio",
        "log(trainer's / engine's probability) of a sampled token. Positive: the trainer finds "
        "the token more likely than the engine did.",
    ),
    "seq_logratio": (
        "Log-ratio of a rollout",
        "Sum of the log-ratios of its tokens: the logarithm of its importance weight.",
    ),
}

# What the other figures of `metrics` are, for the full table.
METRICS: dict[str, str] = {
    "tokens": "sampled tokens counted",
    "sequences": "rollouts counted",
    "left_out": "tokens left out: log-prob not finite or positive",
    "kl_k1": "mean of −lr, unbiased, can be negative",
    "chi2_token": "mean of r² − 1 over tokens",
    "logratio_min": "smallest lr",
    "logratio_max": "largest lr",
    "abs_logratio_mean": "mean of |lr|",
    "abs_logratio_p50": "median of |lr|",
    "abs_logratio_p90": "90th percentile of |lr|",
    "abs_logratio_p999": "99.9th percentile of |lr|",
    "extreme_1.1": "F(1.1): share with max(r, 1/r) > 1.1",
    "extreme_1.5": "F(1.5)",
    "extreme_5": "F(5)",
    "extreme_10": "F(10)",
    "ratio_fraction_high": "share with r above the upper clip bound",
    "ratio_fraction_low": "share with r below the lower clip bound",
    "ratio_mean": "mean of r; 1 where there is no bias",
    "ratio_truncated_mean": "mean of min(r, upper clip bound)",
    "ess_truncated": "effective sample size of min(r, upper clip bound)",
    "ess_sequence": "effective sample size of whole rollouts, weight exp(Σ lr)",
    "ess_sequence_truncated": "the same, weights cut at the upper clip bound",
    "seq_logratio_mean": "mean over rollouts of Σ lr",
    "seq_logratio_abs_mean": "mean over rollouts of |Σ lr|",
    "seq_logratio_abs_max": "largest |Σ lr| of a rollout",
    "seq_abs_logratio_mean": "mean over rollouts of Σ |lr|",
    "seq_abs_logratio_max": "largest Σ |lr| of a rollout",
    "seq_geometric_mean": "mean over rollouts of exp(mean lr)",
    "seq_mean_logratio_abs_max": "largest |mean lr| of a rollout",
    "chi2_seq": "mean of exp(Σ lr)² − 1 over rollouts",
    "training_log_ppl": "log-perplexity of the rollouts under the trainer",
    "rollout_log_ppl": "log-perplexity of the rollouts under the engine",
    "training_ppl": "perplexity under the trainer",
    "rollout_ppl": "perplexity under the engine",
    "log_ppl_diff": "mean difference of log-perplexities",
    "log_ppl_abs_diff": "mean absolute difference of log-perplexities",
    "log_ppl_diff_max": "largest difference of log-perplexities",
    "log_ppl_diff_min": "smallest difference of log-perplexities",
    "ppl_ratio": "mean ratio of perplexities",
    "probs_diff_mean": "mean of |p trainer − p engine|",
    "probs_diff_max": "largest |p trainer − p engine|",
    "probs_diff_std": "standard deviation of |p trainer − p engine|",
    "probs_pearson": "correlation of both sides' probabilities",
}
# And those that only training steps have.
METRICS |= {
    "cell_disagreement_free": "share of cells routed differently, trainer by its own router",
    "expert_disagreement_free": "share of experts routed differently, trainer by its own router",
    "token_disagreement_free": "share of tokens routed differently, trainer by its own router",
    "layers_per_token_free": "differing layers per token, trainer by its own router",
    "max_vio_engine": "MaxVio of the engine, mean over layers",
    "max_vio_trainer_free": "MaxVio of the trainer's own routing, mean over layers",
    "outside_topk_cells_forced": "share of replayed cells not the trainer's own top-k",
    "outside_topk_experts_forced": "share of replayed experts outside the trainer's own top-k",
    "outside_topk_cells_free": "share of the engine's cells not the free trainer's top-k",
    "outside_topk_experts_free": "share of the engine's experts outside the free trainer's top-k",
    "rows": "rows: passes of a token",
    "rows_without_route_fraction": "share of rows without a route from the engine",
    "rollouts": "rollouts of the step",
    "rollouts_without_route": "rollouts without any routing",
    "cells_replayed": "cells under replay that used the engine's experts",
    "cells_missing": "cells under replay without a route, routed natively",
    "cells_stale": "cells under replay with a route of older weights, routed natively",
    "cells_padding": "cells of padding",
    "cells_not_enclosed": "cells of passes that nothing enclosed",
    "cells_native_fraction": "share of cells under replay that were routed natively",
    "weight_lag_mean": "updates of the weights since those of a row, mean",
    "weight_lag_max": "updates of the weights since those of a row, largest",
    "alerts_notice": "alerts of level notice",
    "alerts_bad": "alerts of level bad",
}

# Sections that a finding or an alert can point at (`look_at`), by the id of their heading.
SECTIONS: dict[str, str] = {
    "figures": "Native against replay",
    "steps": "Training steps",
    "where": "Where routing differs",
    "tails": "Tails of the log-ratio",
    "attribution": "Tokens by number of differing layers",
    "rollouts": "Worst rollouts",
    "tokens": "Worst tokens",
    "slices": "Slices",
    "probability": "By probability of the token",
    "margins": "Flip margins",
    "experts": "Experts: load and swaps",
    "outside": "Outside the trainer's own top-k",
    "sources": "What was compared",
    "reading": "How to read this page",
}
