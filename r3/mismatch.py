"""How far the trainer's log-probabilities are from those the tokens were sampled with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r3.errors import TraceError


@dataclass(frozen=True)
class LogprobMismatch:
    """Statistics of the log-ratio log(pi_trainer / pi_sampler) over sampled tokens.

    kl_k3: mean of r - 1 - log r with r the ratio, which estimates KL(sampler || trainer)
    (the form used by Ma et al. 2025, arXiv 2510.11370); abs_logratio_p99, abs_logratio_max: 0.99
    quantile (linear interpolation) and maximum of |log r|. All in float64.
    """

    tokens: int
    kl_k3: float
    abs_logratio_p99: float
    abs_logratio_max: float

    @classmethod
    def of(cls, trainer: np.ndarray, sampler: np.ndarray) -> LogprobMismatch:
        """trainer, sampler: log-probabilities [tokens] of the sampled tokens.

        Raises TraceError if there are none, if shapes differ or if one is not finite.
        """
        if trainer.shape != sampler.shape or trainer.ndim != 1 or not len(trainer):
            raise TraceError(
                f"log-probabilities have shapes {list(trainer.shape)} (trainer) and "
                f"{list(sampler.shape)} (sampler), expected the same [tokens], at least one"
            )
        log_ratio = trainer.astype(np.float64) - sampler.astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(log_ratio))
        if len(bad):
            i = int(bad[0])
            raise TraceError(
                f"{len(bad)} log-ratios are not finite, the first at sampled token {i}: trainer "
                f"{trainer[i]}, sampler {sampler[i]}"
            )
        size = np.abs(log_ratio)
        with np.errstate(over="ignore"):  # a ratio beyond float64 is an infinite k3, and is shown
            k3 = np.expm1(log_ratio) - log_ratio  # expm1: r - 1 without cancellation near r = 1
        return cls(
            tokens=len(log_ratio),
            kl_k3=float(k3.mean()),
            abs_logratio_p99=float(np.quantile(size, 0.99)),
            abs_logratio_max=float(size.max()),
        )
