"""How far the trainer's log-probabilities are from those the tokens were sampled with.

lr = log p_trainer - log p_sampler of a sampled token (natural log), r = exp(lr) the importance
ratio. A mean hides what breaks a run: a few tokens far off, errors that add up over a sequence, a
batch whose weight lies on a few tokens. So there is one mergeable state with means, tails,
sequences and effective sample sizes, and everything is in float64.

Figures with a name of verl's (rollout_corr_helper.py and debug/metrics.py of its repository) have
verl's formula, without its clamp of lr to +-20.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3.errors import FormatError, TraceError
from r3.mismatch_input import EXAMPLES, KINDS, counted_tokens
from r3.mismatch_parts import EDGES, EXTREMES, SIDES, Measured, measure
from r3.quantiles import Quantiles
from r3.shares import share

CLIP = (0.5, 2.0)  # of r: 2 is where verl and slime truncate token weights, 0.5 its inverse
_FORMAT = "r3-mismatch/1"
_NAMES = ("format", "clip", "counts", "sums", "maxima", "weights", "abs_logratios", "examples")


@dataclass(frozen=True, eq=False)
class LogprobMismatch:
    """What is kept of tokens and sequences; `metrics` and the like are derived from it.

    States add up (`+`), and the sum is that of one call with all sequences, to the last bit of
    everything but `examples`; sequences are to be whole. States are never changed.

    clip: (low, high) bounds of r. measured: counts, sums, maxima and weights by name.
    abs_logratios: |lr| of all tokens. examples: the first tokens left out, as text.
    """

    clip: tuple[float, float]
    measured: Measured
    abs_logratios: Quantiles
    examples: tuple[str, ...]

    @classmethod
    def zero(cls, clip: tuple[float, float] = CLIP) -> LogprobMismatch:
        """No token: where a sum starts."""
        return cls.of(np.zeros(0), np.zeros(0), clip=clip)

    @classmethod
    def of(
        cls,
        trainer: Any,
        sampler: Any,
        *,
        cu_seqlens: Any = None,
        mask: Any = None,
        clip: tuple[float, float] = CLIP,
        strict: bool = False,
        names: Sequence[object] | None = None,
    ) -> LogprobMismatch:
        """The state of a batch.

        trainer, sampler: log-probabilities, numpy or torch, any float dtype, on any device, with
        a gradient or without: [T] with cu_seqlens [sequences + 1] (one sequence without), or [B,
        S], each row a sequence. mask: of that shape, bool or 0 and 1, the tokens that count (None:
        all); the others may hold anything. clip: bounds of r, 0 <= low <= 1 <= high, for the
        shares beyond them and for weights min(r, high). names: of the sequences, for messages.

        A token that counts with a log-probability that is not finite, or above
        r3.columns.ROUNDING, is left out and counted, see `left_out`; TraceError if `strict`.
        A sequence without a token that counts is none. No tokens at all is a state too.
        Raises TraceError for shapes that do not fit and values that are none of the above.
        """
        bounds = _checked_clip(clip)
        tokens = counted_tokens(trainer, sampler, cu_seqlens, mask, names, strict)
        sizes = Quantiles.of(np.abs(tokens.trainer - tokens.sampler))
        return cls(bounds, measure(tokens, bounds), sizes, tokens.examples)

    def __add__(self, other: LogprobMismatch) -> LogprobMismatch:
        """Raises TraceError if `clip` differs."""
        if not isinstance(other, LogprobMismatch):
            return NotImplemented
        if other.clip != self.clip:
            raise TraceError(f"cannot add a mismatch of clip {other.clip} to one of {self.clip}")
        return LogprobMismatch(
            self.clip,
            self.measured + other.measured,
            self.abs_logratios + other.abs_logratios,
            (self.examples + other.examples)[:EXAMPLES],
        )

    @property
    def counts(self) -> dict[str, int]:
        """Counts by name, such as `tokens`, `sequences`, `left_out`, `extreme_2`."""
        return self.measured.counts

    @property
    def left_out(self) -> dict[str, int]:
        """Tokens left out by what is wrong, `trainer_nan` and so on; one can be in two of them."""
        return {kind: self.counts[kind] for kind in KINDS}

    def survival(self, thresholds: np.ndarray) -> np.ndarray:
        """float64 [m]: share of tokens with |lr| above each of `thresholds` [m].

        See Quantiles.survival for how exact; `extreme_2` and the like of `metrics` are exact.
        """
        return self.abs_logratios.survival(thresholds)

    def buckets(self) -> dict[str, list[dict[str, float]]]:
        """Tokens by their probability, low <= p < high, that `sampler` or `trainer` gave them.

        A p of 1, or above by rounding, is in the last bucket. Figures are those of `metrics`.
        """
        return {side: [self._bucket(side, i) for i in range(len(EDGES) - 1)] for side in SIDES}

    def _bucket(self, side: str, i: int) -> dict[str, float]:
        cell, tokens = f"{side}_{i}", self.counts[f"{side}_{i}_tokens"]
        return {
            "low": EDGES[i],
            "high": EDGES[i + 1],
            "tokens": tokens,
            "abs_logratio_mean": share(math.fsum(self.measured.sums[f"{cell}_abs"]), tokens),
            "kl_k3": share(math.fsum(self.measured.sums[f"{cell}_k3"]), tokens),
            "extreme_2": share(self.counts[f"{cell}_extreme"], tokens),
        }

    def metrics(self) -> dict[str, float]:
        """All figures by name; nan for what has no tokens, inf for what is beyond float64.

        tokens, sequences, left_out: counts.
        kl_k1, kl_k3: means of -lr and of r - 1 - lr, both estimate KL(sampler || trainer) in nats
            (Schulman 2020; k3 as in Ma et al. 2025, arXiv 2510.11370). chi2_token: mean r**2 - 1.
        logratio_min, logratio_max, abs_logratio_mean, _p50, _p90, _p99, _p999, _max: of lr, |lr|.
        extreme_TAU: share with max(r, 1 / r) > TAU, F(TAU) of Ma et al. 2025.
        ratio_fraction_high, ratio_fraction_low: shares with r > high, r < low. ratio_mean,
            ratio_truncated_mean: of r, min(r, high).
        ess, ess_truncated: (sum w)**2 / (n * sum w**2) with w = r, min(r, high); ess_sequence,
            ess_sequence_truncated: with r = exp(sum of lr) of a sequence.
        seq_logratio_mean, seq_logratio_abs_mean, seq_logratio_abs_max: of the sum of lr of a
            sequence, and of its size; errors of opposite sign cancel in it, so
            seq_abs_logratio_mean, seq_abs_logratio_max: of the sum of |lr|.
        seq_geometric_mean: mean of exp(mean lr). seq_mean_logratio_abs_max: largest |mean lr|.
            chi2_seq: mean of exp(2 * sum of lr) - 1.
        training_log_ppl, rollout_log_ppl: mean over sequences of -(mean log p); training_ppl,
            rollout_ppl: mean of exp of that. log_ppl_diff, log_ppl_abs_diff, log_ppl_diff_max,
            log_ppl_diff_min: of -(mean lr) of a sequence; ppl_ratio: mean of exp of that.
        probs_diff_mean, probs_diff_max, probs_diff_std: of |p_trainer - p_sampler|, with n - 1 in
            the deviation. probs_pearson: correlation of the two, nan if one is constant.
        """
        n, sequences = self.counts["tokens"], self.counts["sequences"]
        total = {name: math.fsum(parts) for name, parts in self.measured.sums.items()}
        top = {name: x if n else math.nan for name, x in self.measured.maxima.items()}

        def per_token(x: float) -> float:
            return share(x, n)

        def per_sequence(x: float) -> float:
            return share(x, sequences)

        found: dict[str, float] = {k: self.counts[k] for k in ("tokens", "sequences", "left_out")}
        found["kl_k1"] = 0.0 - per_token(total["lr"])
        found["kl_k3"] = per_token(total["k3"])
        found["chi2_token"] = per_token(total["chi2"])
        found["logratio_min"] = 0.0 - top["-lr"]
        found["logratio_max"] = top["lr"]
        found["abs_logratio_mean"] = per_token(total["abs"])
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
            found[f"abs_logratio_{name}"] = self.abs_logratios.quantile(q)
        found["abs_logratio_max"] = self.abs_logratios.largest
        for tau in EXTREMES:
            found[f"extreme_{tau:g}"] = per_token(self.counts[f"extreme_{tau:g}"])
        found["ratio_fraction_high"] = per_token(self.counts["high"])
        found["ratio_fraction_low"] = per_token(self.counts["low"])
        found["ratio_mean"] = self.measured.weights["token"].mean(n)
        found["ratio_truncated_mean"] = self.measured.weights["token_truncated"].mean(n)
        found["ess"] = self.measured.weights["token"].effective_share(n)
        found["ess_truncated"] = self.measured.weights["token_truncated"].effective_share(n)
        for name in ("sequence", "sequence_truncated"):
            found[f"ess_{name}"] = self.measured.weights[name].effective_share(sequences)
        found["seq_logratio_mean"] = per_sequence(total["lr"])
        found["seq_logratio_abs_mean"] = per_sequence(total["seq_abs"])
        found["seq_logratio_abs_max"] = max(top["seq"], top["-seq"])
        found["seq_abs_logratio_mean"] = per_sequence(total["abs"])
        found["seq_abs_logratio_max"] = top["seq_sum_abs"]
        found["seq_geometric_mean"] = per_sequence(total["geometric"])
        found["seq_mean_logratio_abs_max"] = max(top["mean"], top["-mean"])
        found["chi2_seq"] = per_sequence(total["seq_chi2"])
        for name, side in (("training", "trainer"), ("rollout", "sampler")):
            for what in ("log_ppl", "ppl"):
                found[f"{name}_{what}"] = per_sequence(total[f"{side}_{what}"])
        found["log_ppl_diff"] = 0.0 - per_sequence(total["mean"])
        found["log_ppl_abs_diff"] = per_sequence(total["mean_abs"])
        found["log_ppl_diff_max"] = top["-mean"]
        found["log_ppl_diff_min"] = 0.0 - top["mean"]
        found["ppl_ratio"] = per_sequence(total["ppl_ratio"])
        found["probs_diff_mean"] = per_token(total["diff"])
        found["probs_diff_max"] = top["diff"]
        found["probs_diff_std"] = _deviation(n, total, constant=top["diff"] == -top["-diff"])
        constant = any(top[x] == -top[f"-{x}"] for x in "pq")
        found["probs_pearson"] = math.nan if constant else _pearson(n, total)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `from_dict` makes the same state, bit for bit.

        Numbers beyond float64 are text: "inf".
        """
        return {
            "format": _FORMAT,
            "clip": list(self.clip),
            **self.measured.to_dict(),
            "abs_logratios": self.abs_logratios.to_dict(),
            "examples": list(self.examples),
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> LogprobMismatch:
        """The state that `to_dict` wrote, of another rank or a file.

        Raises FormatError for what no state gives.
        """
        try:
            if not isinstance(found, Mapping) or found.get("format") != _FORMAT:
                raise ValueError(f"expected a dictionary of format {_FORMAT!r}")
            if set(found) != set(_NAMES):
                raise ValueError(f"found {reprlib.repr(list(found))}, expected {_NAMES}")
            clip, examples = found["clip"], found["examples"]
            if type(clip) is not list or type(examples) is not list or len(examples) > EXAMPLES:
                raise ValueError(f"clip or examples: expected lists, of at most {EXAMPLES} texts")
            if not all(type(text) is str for text in examples):
                raise ValueError("examples: expected text")
            state = cls(
                _checked_clip(tuple(clip)),
                Measured.from_dict(found),
                Quantiles.from_dict(found["abs_logratios"]),
                tuple(examples),
            )
            if state.abs_logratios.count != state.measured.counts["tokens"]:
                raise ValueError("abs_logratios: expected as many as tokens")
        except (ValueError, TypeError, OverflowError) as e:  # our own errors are ValueErrors
            raise FormatError(f"a mismatch cannot be read: {e}") from None
        return state


def _checked_clip(clip: tuple[float, float]) -> tuple[float, float]:
    try:
        low, high = map(float, clip)
    except (TypeError, ValueError, OverflowError):
        low = high = math.nan
    if not 0 <= low <= 1 <= high < math.inf or low == high:
        raise TraceError(
            f"clip is {reprlib.repr(clip)}, expected bounds (low, high) with 0 <= low <= 1 <= high"
        )
    return low, high


def _deviation(n: int, total: Mapping[str, float], constant: bool) -> float:
    """Of |p - q|, with n - 1; nan for one token."""
    if n < 2:
        return math.nan
    if constant:  # which the difference of rounded squares does not show
        return 0.0
    return math.sqrt(max(0.0, _spread(n, total, "diff2", "diff", "diff") / (n - 1)))


def _pearson(n: int, total: Mapping[str, float]) -> float:
    """Correlation of p and q, of which none is constant; nan for one token."""
    if n < 2:
        return math.nan
    squares = _spread(n, total, "pp", "p", "p") * _spread(n, total, "qq", "q", "q")
    if squares <= 0:  # the spread is less than its rounding
        return math.nan
    return min(1.0, max(-1.0, _spread(n, total, "pq", "p", "q") / math.sqrt(squares)))


def _spread(n: int, total: Mapping[str, float], product: str, a: str, b: str) -> float:
    """sum (a - mean a)(b - mean b)"""
    return total[product] - total[a] * total[b] / n
