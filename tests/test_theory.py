"""Theorems 3.1 and 3.2 as properties: the bound holds for every sample, moves the right way, and is attained."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qhyer import theory
from qhyer.errors import UserError
from qhyer.losses import expectile

TAUS = np.array([0.5, 0.7, 0.9, 0.95, 0.99, 0.999])


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    tau=st.floats(0.5, 0.999),
    scale=st.floats(0.01, 10.0),
)
def test_bound_holds_for_every_sample(values: list[int], tau: float, scale: float) -> None:
    sample = scale * np.array(values, dtype=float)
    best, spread = sample.max(), np.ptp(sample)
    coverage = float((sample == best).mean())
    error = best - theory.expectile(sample, tau)
    tight = theory.expectile_bias_of_sample(tau, coverage, spread)
    assert -1e-12 <= error <= tight + 1e-9 * scale
    assert tight <= theory.expectile_bias(tau, coverage, spread) + 1e-12


def test_tight_bound_is_attained() -> None:
    """Two values, a fraction c of them at the top: tau c D = (1 - tau)(1 - c)(R - D)."""
    for tau in TAUS:
        error = 3.0 - theory.expectile([3.0, 1.0], tau, weights=[0.2, 0.8])
        assert error == pytest.approx(theory.expectile_bias_of_sample(tau, 0.2, 2.0), rel=1e-12)


def test_monotone_in_tau_and_coverage() -> None:
    coverage = np.linspace(0.05, 1.0, 20)
    for bound in (theory.expectile_bias, theory.expectile_bias_of_sample):
        grid = bound(TAUS[:, None], coverage, 0.7)
        assert (np.diff(grid, axis=0) <= 0).all() and (np.diff(grid[1:], axis=1) < 0).all()
    grid = theory.expectile_bias(TAUS[:, None], coverage, 0.7)
    assert (np.diff(grid, axis=0) < 0).all()
    np.testing.assert_allclose(grid[0], 0.7)  # at tau = 1/2 it says nothing
    assert theory.expectile_bias(1 - 1e-9, 0.05, 0.7) < 1e-6
    np.testing.assert_allclose(theory.expectile_bias(0.9, 0.3, 4.0), 4 * theory.expectile_bias(0.9, 0.3))


def test_tau_for_inverts_the_bound() -> None:
    for bias in (0.3, 0.01, 1e-4):
        tau = theory.tau_for(bias, 0.25, 0.8)
        assert 0.5 <= tau < 1
        assert theory.expectile_bias(tau, 0.25, 0.8) == pytest.approx(bias, rel=1e-9)
    assert theory.tau_for(0.9, 0.25, 0.8) == 0.5


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.9, 0.999])
def test_expectile_is_the_minimiser_of_eq_9(tau: float) -> None:
    """Its gradient is zero there, for rows of values with their own weights, ties and values of no weight."""
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(40, 7)), rng.uniform(size=(40, 7))
    values[:10, 1] = values[:10, 0]
    weights[10:20, 2:5] = 0.0
    found = torch.from_numpy(theory.expectile(values, tau, weights)).requires_grad_()
    loss = (expectile(torch.from_numpy(values) - found[:, None], tau) * torch.from_numpy(weights)).sum()
    loss.backward()
    assert found.grad is not None and found.grad.abs().max() < 1e-6  # tau is a float32 in the loss
    assert theory.expectile([2.0, 2.0], tau) == pytest.approx(2.0)
    np.testing.assert_allclose(theory.expectile(values, 0.5, weights), (values * weights).sum(1) / weights.sum(1))


def test_samples_needed() -> None:
    problem = dict(states=25, actions=4, goals=25, horizon=100)
    log = math.log(2 * 25 * 4 * 25 * 100 / 0.05)
    assert theory.samples_needed(1.0, 0.01, **problem) == pytest.approx(2e4 * log)  # visits decide
    assert theory.samples_needed(0.05, 0.1, **problem) == pytest.approx(4 / 0.00025 * log)  # coverage decides
    few = [theory.samples_needed(c, 0.1, **problem) for c in (0.01, 0.1, 0.2)]
    assert few[0] > few[1] > few[2]
    assert theory.samples_needed(0.1, 0.1, **problem, delta=0.01) > theory.samples_needed(0.1, 0.1, **problem)


def test_visits_condition_is_hoeffding_s() -> None:
    """With N from the first condition, fewer than half of the expected visits are as rare as promised."""
    d, delta = 0.3, 0.05
    n = math.ceil(theory.samples_needed(1.0, d, 1, 1, 1, 1, delta))
    visits = np.random.default_rng(0).binomial(n, d, size=20_000)
    assert (visits < n * d / 2).mean() <= delta / 2


def test_suboptimality() -> None:
    base = dict(horizon=10, bias=0.1, density_error=0.04, approximation=0.01)
    few, many = theory.suboptimality(trajectories=100, **base), theory.suboptimality(trajectories=1600, **base)
    assert few.policy == pytest.approx(2 * many.policy)  # N^(-1/4)
    assert (few.approximation, few.q_density, few.q_expectile) == pytest.approx(
        (200 * math.sqrt(0.5) * 0.1, 200 * 0.2, 200 * 0.1)
    )
    assert many.total == pytest.approx(many.policy + many.approximation + many.q_density + many.q_expectile)
    harder = theory.suboptimality(trajectories=100, mismatch=4.0, **base)
    assert harder.q_density == pytest.approx(2 * few.q_density) and harder.q_expectile == few.q_expectile


def test_what_is_not_a_tau_is_refused() -> None:
    for tau, coverage in ((1.0, 0.5), (0.3, 0.5), (0.9, 0.0), (0.9, 1.5)):
        with pytest.raises(UserError):
            theory.expectile_bias(tau, coverage)
