"""Statistics of evaluations: intervals and pass@k. Plain numbers in, plain numbers out."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
               2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
"""97.5% quantiles of Student's distribution with 1, 2, ... degrees of freedom; beyond these a formula is as exact."""


def wilson_interval(successes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a success rate, within [0, 1]; (0, 1) for n = 0, where nothing is known.

    Raises ValueError unless 0 <= successes <= n and 0 < confidence < 1.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}: they must be between 0 and n")
    z = NormalDist().inv_cdf(0.5 + _checked(confidence) / 2)
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    centre = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    # At the ends the bound is the rate itself, which rounding would miss.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95% interval of the mean of independent, roughly normal values (one per seed); None for a single value,
    which says nothing about the spread. Raises ValueError for none, or one that is not finite."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"expected finite values, one per seed, got {values!r}")
    if len(values) == 1:
        return None
    freedom = len(values) - 1
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96 + 2.4 / freedom
    half = quantile * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate 1 − C(n−c, k)/C(n, k) that one of k samples is right, from n samples of which c are right.

    Raises ValueError for k > n: n samples say nothing about more than n.
    """
    if n < 1 or not 0 <= c <= n:
        raise ValueError(f"{c} right of {n} samples: there must be at least one sample, and 0 <= right <= samples")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples per problem, got {n}; sample more or lower k")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(values: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000,
                       seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over problems; `values` holds one number per problem.

    Problems are what is drawn again, never samples within one. The same seed gives the same interval. Raises ValueError
    for no problem, a value that is not finite, a confidence outside (0, 1), or no resample.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"expected one finite value per problem, got {values!r}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(resamples)]
    tail = (1 - _checked(confidence)) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _checked(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    return confidence
