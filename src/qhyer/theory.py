"""The paper's two theorems as numbers: how far expectile regression stays below the maximum, and what that costs.

Theorem 3.1. Q* is the greatest value in the data at some place, c (the paper's c-tilde) the fraction of samples there
that attain it, R = Q* - Q_min their range. The tau-expectile of the samples lies below Q* by at most

    epsilon_tau = (1 - tau) R / (tau c/2 + (1 - tau)(1 - c/2))

The half of c pays for the samples that chance may leave out (Hoeffding). Of samples at hand, whose c is counted and not
assumed, the first-order condition says more, and `expectile_bias_of_sample` is that: no half, and the factor (1 - c)
that the paper's last step drops from the numerator.

Theorem 3.2 adds up what that error, the density's error and the policy's error cost in return.

Plain floats, or numpy arrays where a function says so; no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qhyer.errors import require

Array = NDArray[np.float64]


def _check(tau: ArrayLike, coverage: ArrayLike) -> tuple[Array, Array]:
    tau, coverage = np.asarray(tau, dtype=np.float64), np.asarray(coverage, dtype=np.float64)
    require(bool(((tau >= 0.5) & (tau < 1)).all()), "tau must lie in [0.5, 1)")
    require(bool(((coverage > 0) & (coverage <= 1)).all()), "coverage must lie in (0, 1]")
    return tau, coverage


def expectile_bias(tau: ArrayLike, coverage: ArrayLike, value_range: ArrayLike = 1.0) -> Array:
    """Theorem 3.1: epsilon_tau, with `coverage` c-tilde and `value_range` Q* - Q_min; arrays broadcast.

    At tau = 1/2 it is the whole range: the bound is empty for the mean.
    """
    tau, coverage = _check(tau, coverage)
    half = coverage / 2
    return (1 - tau) * np.asarray(value_range) / (tau * half + (1 - tau) * (1 - half))


def expectile_bias_of_sample(tau: ArrayLike, coverage: ArrayLike, value_range: ArrayLike = 1.0) -> Array:
    """Theorem 3.1 for samples at hand, `coverage` being counted: (1 - tau)(1 - c) R / (tau c + (1 - tau)(1 - c)).

    Attained where all other samples sit at Q_min, so nothing smaller holds for all samples with this coverage.
    """
    tau, coverage = _check(tau, coverage)
    below = (1 - tau) * (1 - coverage)
    return below * np.asarray(value_range) / (tau * coverage + below)


def tau_for(bias: float, coverage: float, value_range: float = 1.0) -> float:
    """The smallest tau in [1/2, 1) whose epsilon_tau is at most `bias`: Theorem 3.1 solved for tau."""
    require(0 < coverage <= 1, "coverage must lie in (0, 1]")
    require(bias > 0 and value_range >= 0, "the bias must be positive, and the range not negative")
    if bias >= value_range:
        return 0.5
    # epsilon ((1 - tau) + (2 tau - 1) c/2) = (1 - tau) R is linear in tau.
    gap, gain = value_range - bias, bias * coverage / 2
    return (gap + gain) / (gap + 2 * gain)


def expectile(values: ArrayLike, tau: float, weights: ArrayLike | None = None) -> Array:
    """The tau-expectile of `values` (..., n), each counting for its weight: where the loss of Eq. (9) is least. Exact.

    The first-order condition makes it a mean of the values, each with its weight times tau if it lies above and times
    1 - tau if not. For tau > 1/2 no other split into upper and lower values has a greater mean: try all, take the most.
    """
    require(0 < tau < 1, "tau must lie in (0, 1)")
    values = np.asarray(values, dtype=np.float64)
    weights = np.broadcast_to(np.ones(1) if weights is None else np.asarray(weights, dtype=np.float64), values.shape)
    require(bool((weights >= 0).all() and (weights.sum(-1) > 0).all()), "weights must be positive somewhere")
    order = np.argsort(values, axis=-1)
    v, w = np.take_along_axis(values, order, -1), np.take_along_axis(weights, order, -1)
    below, below_sum = np.cumsum(w, -1), np.cumsum(w * v, -1)  # of the first j values, j = 1 ... n
    above, above_sum = below[..., -1:] - below, below_sum[..., -1:] - below_sum
    means = ((1 - tau) * below_sum + tau * above_sum) / ((1 - tau) * below + tau * above)
    return means.max(-1) if tau >= 0.5 else means.min(-1)


def samples_needed(
    coverage: float, least_visits: float, states: int, actions: int, goals: int, horizon: int, delta: float = 0.05
) -> float:
    """Theorem 3.1's condition on the number of trajectories N (its proof, last step), for probability 1 - delta.

    `least_visits` is d_min, the smallest probability with which the data visit a (state, action) at a given time.
    The first term makes the visits to each (state, action) at least half of what is expected; the second makes the
    fraction of greatest values among them at least c/2.
    """
    require(0 < coverage <= 1 and 0 < least_visits <= 1, "coverage and least_visits must lie in (0, 1]")
    require(0 < delta < 1, "delta must lie in (0, 1)")
    log = math.log(2.0 * states * actions * goals * horizon / delta)
    return max(2 / least_visits**2 * log, 4 / (coverage**2 * least_visits) * log)


@dataclass(frozen=True)
class Suboptimality:
    """Theorem 3.2: the terms of the bound on J(pi*) - J(pi-hat)."""

    policy: float
    """learning the policy from N trajectories: falls as N^(-1/4)"""
    approximation: float
    """what the best policy of the class misses: sqrt(delta_approx)"""
    q_density: float
    """the density's error: sqrt(epsilon_NF)"""
    q_expectile: float
    """the expectile's bias: epsilon_tau"""

    @property
    def total(self) -> float:
        return self.policy + self.approximation + self.q_density + self.q_expectile


def suboptimality(
    *,
    trajectories: float,
    horizon: int,
    bias: float,
    density_error: float,
    approximation: float = 0.0,
    mismatch: float = 1.0,
    lipschitz_policy: float = 1.0,
    lipschitz_q: float = 1.0,
    log_policies: float = 1.0,
    log_range: float = 1.0,
    delta: float = 0.05,
) -> Suboptimality:
    """Theorem 3.2, with the constants that its proof gives before they disappear into O(...).

        2 H^2 sqrt(c*/2) ((c log(|Pi|/delta) / N)^(1/4) + sqrt(delta_approx))
      + 2 H^2 L_pi (epsilon_tau + L_Q sqrt(c* epsilon_NF))

    `bias` is epsilon_tau, `density_error` epsilon_NF (a mean square), `mismatch` c*, `log_policies` log|Pi|,
    `log_range` c. The constant of the maximum-likelihood step is not given and taken as one. The last line has other
    factors in front (c*/c-tilde before the first term, c* before the last) that its own steps do not produce; the
    dependence on N, delta_approx, epsilon_NF and epsilon_tau, which is what the theorem states, is the same.
    """
    require(trajectories > 0 and horizon >= 1, "trajectories and horizon must be positive")
    require(min(bias, density_error, approximation) >= 0, "errors cannot be negative")
    require(0 < delta < 1 and mismatch > 0, "delta must lie in (0, 1), and the mismatch be positive")
    scale = 2.0 * horizon**2
    learning = scale * math.sqrt(mismatch / 2)
    complexity = log_range * (log_policies - math.log(delta)) / trajectories
    return Suboptimality(
        policy=learning * complexity**0.25,
        approximation=learning * math.sqrt(approximation),
        q_density=scale * lipschitz_policy * lipschitz_q * math.sqrt(mismatch * density_error),
        q_expectile=scale * lipschitz_policy * bias,
    )
