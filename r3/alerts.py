"""What in a run's recorded figures a person should look at, and where to look.

Collapses announce themselves in the tails and in trends while means still look well, so that is
what is judged: shares of extreme tokens, far quantiles, effective sample size, and figures against
their own past. Everything here is a function of records (r3.monitor); nothing is remembered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

Level = Literal["notice", "bad"]
Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class Alert:
    """One thing to look at: `value` of a figure went beyond `limit`; `look_at` is what to do next.

    figure: the name it is recorded under; value, limit; each None where there is no single one.
    """

    name: str
    level: Level
    figure: str | None
    value: float | None
    limit: float | None
    message: str
    look_at: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values by the names above."""
        return asdict(self)


@dataclass(frozen=True)
class AlertLimits:
    """Beyond what a figure is worth an alert. r is trainer / sampler probability of a token.

    extreme_tokens, extreme_tokens_bad: share of tokens with max(r, 1/r) > 2. Ma et al. 2025 (arXiv
        2510.11370): mostly below 1e-4 with replay, 2.5e-4 without on Qwen3-30B-A3B, above 0.1 where
        the run had collapsed.
    kl, kl_bad: KL k3. NeMo-RL calls less than 1e-3 acceptable; Ma et al. have 1.5e-3 without and
        7.5e-4 with replay. Fireworks report a collapse from about 0.013.
    abs_logratio: |log r| of one token. Own choice: rounding does not change a probability by a
        factor of 22,000; another token, another context or a log-prob of another temperature does.
    correlation: of the two probabilities of a token. Own choice: rounding and stale weights leave
        0.97 and more, log-probabilities of neighbouring tokens hardly correlate.
    ess: effective sample size / size, untruncated weights. 0.5 is where the asynchronous runs that
        this is taken from resynchronized weights.
    rows_without_route: share of rows that the engine delivered no routing for. Own choice.
    outside_topk: share of replayed experts outside the trainer's own top-k. From 0.15 on
        MegatronReplay looks for shifted rows; on Qwen3-30B-A3B rows shifted by one have about 0.57.
    left_out: tokens without a usable log-prob. There should be none.
    jump: factor over the median of the `before` steps before, for shares of routing.
    jump_least: what such a share must reach besides, so that 1e-5 after 0 is no jump.
    rise: factor of the median of the last `recent` steps over that of the `before` steps before
        them, for tails. Own choice: such medians of healthy runs stay within a factor of 2.
    extreme_tokens_least, p999_least: what these must reach besides; below it nothing is wrong.
    lag_rise: weight updates by which the mean lag must have risen, between these medians.
    recent, before: steps. Trends need all of them, jumps half of `before`.
    """

    extreme_tokens: float = 1e-3
    extreme_tokens_bad: float = 1e-2
    kl: float = 1e-3
    kl_bad: float = 1e-2
    abs_logratio: float = 10.0
    correlation: float = 0.9
    ess: float = 0.5
    rows_without_route: float = 0.01
    outside_topk: float = 0.15
    left_out: float = 0.0
    jump: float = 1.5
    jump_least: float = 0.01
    rise: float = 3.0
    extreme_tokens_least: float = 1e-4
    p999_least: float = 0.1
    lag_rise: float = 1.0
    recent: int = 5
    before: int = 20

    @property
    def steps(self) -> int:
        """How many past steps are looked at."""
        return self.recent + self.before


# name of the alert -> what to look at next
LOOK_AT = {
    "extreme_tokens": "slices by length, turn and weight lag: which tokens; with replay off, turn "
    "it on; with replay on, outside_topk_experts_forced and the worst tokens of `r3 compare`",
    "extreme_tokens_rising": "weight lag and environment at the step where it began; lower the "
    "learning rate only when these are excluded",
    "tail_rising": "the same figure by slice; weight lag and environment where it began",
    "wrong_token": "the worst tokens of `r3 compare`: trainer_logprobs[i] must be that of token i, "
    "under the temperature sampled with (processed_logprobs in vLLM)",
    "kl": "routing/cell_disagreement_free: if high, replay; if low, dtypes of head and KV cache, "
    "quantization, sampling settings",
    "uncorrelated": "whether trainer_logprobs are shifted by a token: entry i must be that of token"
    " i; whether they are of the same rollouts, and of one temperature",
    "ess_token": "resynchronize the weights (lower the lag) rather than correct harder",
    "ess_sequence": "sequence-level weights carry little information at this length: resynchronize "
    "rather than correct harder, or use a geometric mask",
    "disagreement_jump": "did the last weight update reach the engine; then the environment "
    "(another kernel, dtype or parallel size)",
    "outside_topk": "native.alignment(): are the rows shifted, or of other tokens or weights",
    "outside_topk_jump": "native.alignment(); whether the last weight update reached the engine",
    "rows_without_route": "which rollouts (report().rollouts): prefix cache, preemption, retries "
    "through an engine without capture",
    "rollout_without_route": "the engine that served them: is capture on, did the response keep "
    "its routing on the way",
    "no_tokens": "does the engine return log-probs (`logprobs=0`), do the traces keep them; what "
    "the mask leaves",
    "left_out": "the record's left_out and examples: positive log-probs are of raw logits, "
    "infinite ones of tokens that a filter removed, NaN of tokens without one",
    "weight_lag_rising": "is generation falling behind: queue of unfinished rollouts, in-flight "
    "weight updates",
    "not_enclosed": "a forward pass within step() that neither microbatch() nor record() encloses",
    "alignment": "how rows reach the trainer: order of layers, dense first layers, first row of a "
    "response, order of rollouts",
    "environment": "whether the change was meant; compare steps before and after",
}

# alert, figure, (level, field of the limits) worst first, what the figure is
_ABOVE: tuple[tuple[str, str, tuple[tuple[Level, str], ...], str], ...] = (
    (
        "extreme_tokens",
        "routing/extreme_2",
        (("bad", "extreme_tokens_bad"), ("notice", "extreme_tokens")),
        "share of tokens whose probabilities differ by more than a factor of 2",
    ),
    (
        "wrong_token",
        "routing/abs_logratio_max",
        (("bad", "abs_logratio"),),
        "largest |log-ratio| of a token",
    ),
    (
        "kl",
        "rollout_corr/k3_kl",
        (("bad", "kl_bad"), ("notice", "kl")),
        "KL k3",
    ),
    (
        "outside_topk",
        "routing/outside_topk_experts_forced",
        (("bad", "outside_topk"),),
        "share of replayed experts outside the trainer's own top-k",
    ),
    (
        "rows_without_route",
        "routing/rows_without_route_fraction",
        (("notice", "rows_without_route"),),
        "share of rows without a route from the engine",
    ),
    (
        "left_out",
        "routing/left_out",
        (("notice", "left_out"),),
        "tokens left out because a log-prob is not finite or is positive",
    ),
)
# alert, figure, level, field of the limits, what the figure is
_BELOW: tuple[tuple[str, str, Level, str, str], ...] = (
    (
        "uncorrelated",
        "training/rollout_actor_probs_pearson_corr",
        "bad",
        "correlation",
        "correlation of the trainer's and the engine's probabilities",
    ),
    (
        "ess_token",
        "routing/ess",
        "bad",
        "ess",
        "effective sample size of token weights, as a share of the tokens,",
    ),
    (
        "ess_sequence",
        "routing/ess_sequence",
        "notice",
        "ess",
        "effective sample size of sequence weights, as a share of the sequences,",
    ),
)
_JUMPS = (
    ("disagreement_jump", "routing/cell_disagreement_free", "share of cells routed differently"),
    (
        "outside_topk_jump",
        "routing/outside_topk_experts_forced",
        "share of replayed experts outside the trainer's own top-k",
    ),
)
_RISES: tuple[tuple[str, str, Level, str, str], ...] = (
    (
        "extreme_tokens_rising",
        "routing/extreme_2",
        "bad",
        "extreme_tokens_least",
        "share of tokens whose probabilities differ by more than a factor of 2",
    ),
    (
        "tail_rising",
        "routing/abs_logratio_p999",
        "notice",
        "p999_least",
        "0.999 quantile of |log-ratio|",
    ),
)


def find_alerts(
    past: Sequence[Metrics], record: Mapping[str, Any], limits: AlertLimits | None = None
) -> list[Alert]:
    """Alerts of one step's record, "bad" ones first.

    past: the "metrics" of the steps before, oldest first; the last `limits.steps` are looked at.
    record: that of the step, as StepMonitor makes and read_metrics returns it, of which "metrics",
    "changes", "rollouts_without_route" and "alignment" are read. A figure that is absent, None or
    NaN raises no alert, nor does a trend before there are steps enough.
    """
    limits = limits or AlertLimits()
    metrics = record["metrics"]
    past = past[-limits.steps :]
    found = [
        *_beyond(metrics, limits),
        *_jumps(past, metrics, limits),
        *_trends(past, metrics, limits),
        *_others(record, metrics),
    ]
    return sorted(found, key=lambda alert: alert.level != "bad")  # stable


def _alert(
    name: str,
    level: Level,
    figure: str | None,
    value: float | None,
    limit: float | None,
    message: str,
) -> Alert:
    return Alert(name, level, figure, value, limit, message, LOOK_AT[name])


def _number(metrics: Metrics, name: str) -> float | None:
    value = metrics.get(name)
    if value is None or value != value:
        return None
    try:
        float(value)
    except OverflowError:  # an integer that a file may hold
        return math.copysign(math.inf, value > 0 or -1)
    return value


def _beyond(metrics: Metrics, limits: AlertLimits) -> list[Alert]:
    found = []
    for name, figure, levels, what in _ABOVE:
        value = _number(metrics, figure)
        for level, field in levels:
            limit = getattr(limits, field)
            if value is not None and value > limit:
                text = f"{what} is {value:.3g}, above {limit:g}"
                found.append(_alert(name, level, figure, value, limit, text))
                break
    for name, figure, level, field, what in _BELOW:
        value, limit = _number(metrics, figure), getattr(limits, field)
        if value is not None and value < limit:
            text = f"{what} is {value:.3g}, below {limit:g}"
            found.append(_alert(name, level, figure, value, limit, text))
    return found


def _jumps(past: Sequence[Metrics], metrics: Metrics, limits: AlertLimits) -> list[Alert]:
    found = []
    for name, figure, what in _JUMPS:
        value = _number(metrics, figure)
        before = _series(past, figure)[-limits.before :]
        if value is None or len(before) < max(1, limits.before // 2):
            continue
        usual = median(before)
        limit = max(limits.jump * usual, limits.jump_least)
        if value > limit:
            text = f"{what} is {value:.3g}, and was {usual:.3g} in the {len(before)} steps before"
            found.append(_alert(name, "bad", figure, value, limit, text))
    return found


def _trends(past: Sequence[Metrics], metrics: Metrics, limits: AlertLimits) -> list[Alert]:
    found = []
    for name, figure, level, least, what in _RISES:
        medians = _medians(past, metrics, figure, limits)
        if medians is None:
            continue
        now, before = medians
        limit = max(limits.rise * before, getattr(limits, least))
        if now > limit:
            found.append(_alert(name, level, figure, now, limit, _risen(what, now, before, limits)))
    lag = "routing/weight_lag_mean"
    medians = _medians(past, metrics, lag, limits)
    if medians is not None:
        now, before = medians
        limit = before + limits.lag_rise
        if now > limit:
            text = _risen("weight lag", now, before, limits)
            found.append(_alert("weight_lag_rising", "notice", lag, now, limit, text))
    return found


def _risen(what: str, now: float, before: float, limits: AlertLimits) -> str:
    return (
        f"{what} has a median of {now:.3g} in the last {limits.recent} steps, and of {before:.3g} "
        f"in the {limits.before} before"
    )


def _series(past: Sequence[Metrics], figure: str) -> list[float]:
    return [x for x in (_number(m, figure) for m in past) if x is not None]


def _medians(
    past: Sequence[Metrics], metrics: Metrics, figure: str, limits: AlertLimits
) -> tuple[float, float] | None:
    """Of the last `recent` steps, this one included, and of the `before` steps before them."""
    if _number(metrics, figure) is None:
        return None
    series = _series([*past, metrics], figure)[-limits.steps :]
    if len(series) < limits.steps:
        return None
    return median(series[-limits.recent :]), median(series[: limits.before])


def _others(record: Mapping[str, Any], metrics: Metrics) -> list[Alert]:
    found = []
    tokens = "routing/tokens"
    if _number(metrics, tokens) == 0:
        text = "the trainer gave log-probs, and there is no token to compare"
        found.append(_alert("no_tokens", "bad", tokens, 0.0, None, text))
    figure = "routing/rollouts_without_route"
    count = _number(metrics, figure)
    if count:
        names = ", ".join(map(str, record.get("rollouts_without_route") or ()))
        text = f"{count:g} rollouts without any routing: {names}"
        found.append(_alert("rollout_without_route", "bad", figure, count, 0.0, text))
    figure = "routing/cells_not_enclosed"
    count = _number(metrics, figure)
    if count and _number(metrics, "routing/cells_replayed"):
        text = f"{count:g} cells of this step were routed in passes that nothing enclosed"
        found.append(_alert("not_enclosed", "notice", figure, count, 0.0, text))
    alignment = record.get("alignment")
    if alignment and alignment.get("fault"):
        found.append(_alert("alignment", "bad", None, None, None, alignment["text"]))
    changes = record.get("changes")
    if changes:
        text = "; ".join(f"{k}: {old!r} -> {new!r}" for k, (old, new) in sorted(changes.items()))
        found.append(_alert("environment", "notice", None, None, None, f"changed: {text}"))
    return found
