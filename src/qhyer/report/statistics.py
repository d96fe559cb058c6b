"""Intervals with an explicit random generator: the same rows give the same table on every machine.

One run says how often *this policy* succeeds, so its interval is Wilson's over its episodes. Several runs say
how often *the algorithm* succeeds, so the interval is a bootstrap over seeds. A seed is drawn with all its tasks: one
training made them, and they rise and fall together. (Agarwal et al., 2021, draw anew for each task; there each task
has its own trainings.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Z95 = 1.959963984540054  # the standard normal's 97.5 % point
RESAMPLES = 10_000


def wilson(successes: float, trials: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval for a success rate: unlike p ± z·se it does not collapse at 0 and 1."""
    if trials <= 0:
        return math.nan, math.nan
    rate = successes / trials
    centre = rate + z * z / (2 * trials)
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # At the ends the formula gives 0 and 1 up to rounding; say them exactly.
    low = 0.0 if successes <= 0 else (centre - half) / scale
    high = 1.0 if successes >= trials else (centre + half) / scale
    return low, high


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n − 1) over seeds; one seed has no spread, so NaN."""
    array = np.asarray(values, dtype=float)
    if not array.size:
        return math.nan, math.nan
    return float(array.mean()), float(array.std(ddof=1)) if array.size > 1 else math.nan


def mean_of_tasks(strata: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over tasks of the mean over seeds, along the last axis: every task weighs the same."""
    return np.mean([values.mean(axis=-1) for values in strata], axis=0)


def iqm(strata: Sequence[np.ndarray]) -> np.ndarray:
    """Interquartile mean over all seeds × tasks: the lowest and highest quarter of the scores are set aside.

    Fractional trimming is rounded down, as scipy.stats.trim_mean(0.25) and rliable do.
    """
    values = np.sort(np.concatenate(list(strata), axis=-1), axis=-1)
    cut = int(0.25 * values.shape[-1])
    return values[..., cut : values.shape[-1] - cut].mean(axis=-1)


def seed_bootstrap(
    strata: Sequence[Sequence[float] | np.ndarray],
    generator: np.random.Generator,
    statistic: Callable[[Sequence[np.ndarray]], np.ndarray] = mean_of_tasks,
    resamples: int = RESAMPLES,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of `statistic`; `strata` holds, for each task, one score per seed, seeds in the same order.

    Seeds are drawn with replacement. Tasks are fixed: they are the benchmark. Where seeds lack tasks nobody can say
    which scores belong together: then give one stratum, of what each seed has overall.
    """
    arrays = [np.asarray(values, dtype=float) for values in strata]
    if not arrays or any(values.size == 0 for values in arrays):
        return math.nan, math.nan
    count = arrays[0].size
    if any(values.size != count for values in arrays):
        raise ValueError("each task needs a score of every seed")
    seeds = generator.integers(count, size=(resamples, count))
    drawn = [values[seeds] for values in arrays]
    tail = (1 - level) / 2
    low, high = np.quantile(statistic(drawn), [tail, 1 - tail])
    return float(low), float(high)
