"""Each formula against numbers worked by hand, and its limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from qhyer import losses


def test_expectile_by_hand():
    """|0.9 - 1(u < 0)| u^2: 0.9 * 4, 0.1 * 9, 0."""
    u = torch.tensor([2.0, -3.0, 0.0])
    torch.testing.assert_close(losses.expectile(u, 0.9), torch.tensor([3.6, 0.9, 0.0]))


def test_quantile_by_hand():
    """|0.9 - 1(u < 0)| |u|: 0.9 * 2, 0.1 * 3, 0."""
    u = torch.tensor([2.0, -3.0, 0.0])
    torch.testing.assert_close(losses.quantile(u, 0.9), torch.tensor([1.8, 0.3, 0.0]))


def test_expectile_at_one_half_is_half_the_mse():
    u = torch.randn(50)
    torch.testing.assert_close(losses.expectile(u, 0.5), losses.mse(u) / 2)


def minimiser(loss) -> float:
    grid = torch.linspace(-0.2, 1.2, 14_001, dtype=torch.float64)
    return float(grid[loss(grid).argmin()])


@pytest.mark.parametrize("tau", [0.5, 0.7, 0.95, 0.99])
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_expectile_minimiser_of_two_points(tau, share):
    """Values 0 and 1, the 1 with probability p: tau p (1 - m) = (1 - tau)(1 - p) m, so m -> 1 as tau -> 1."""
    expected = tau * share / (tau * share + (1 - tau) * (1 - share))
    found = minimiser(lambda m: share * losses.expectile(1 - m, tau) + (1 - share) * losses.expectile(0 - m, tau))
    assert found == pytest.approx(expected, abs=2e-4)


def test_expectile_approaches_the_maximum_from_below():
    values = torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grid = torch.linspace(-3, 3, 3001, dtype=torch.float64)
    found = [
        float(grid[losses.expectile(values[:, None] - grid, tau).mean(0).argmin()]) for tau in (0.5, 0.9, 0.99, 0.9999)
    ]
    assert found == sorted(found) and found[0] == pytest.approx(float(values.mean()), abs=2e-3)
    assert float(values.max()) - 0.1 < found[-1] <= float(values.max())


def test_quantile_minimiser_is_the_quantile():
    values = torch.arange(1.0, 102.0, dtype=torch.float64) / 101
    found = minimiser(lambda m: losses.quantile(values[:, None] - m, 0.9).mean(0))
    assert found == pytest.approx(91 / 101, abs=1e-3)


@pytest.mark.parametrize("std", [1.0, 0.3])
def test_gaussian_nll(std):
    mean, target = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(losses.gaussian_nll(mean, target, std), -Normal(mean, std).log_prob(target).sum(-1))
    worked = losses.gaussian_nll(torch.zeros(1), torch.tensor([2.0]))
    assert float(worked) == pytest.approx(2.0 + 0.5 * math.log(2 * math.pi))


def test_masked_mean():
    x = torch.tensor([[1.0, 2.0, 100.0], [3.0, -50.0, 7.0]])
    valid = torch.tensor([[True, True, False], [True, False, False]])
    assert float(losses.masked_mean(x, losses.shares(valid))) == 2.0  # (1 + 2 + 3) / 3: over entries, not over rows
    assert float(losses.masked_mean(x, losses.shares(valid.float()))) == 2.0
    assert float(losses.masked_mean(x, losses.shares(torch.ones_like(valid)))) == pytest.approx(float(x.mean()))
    assert float(losses.masked_mean(x, losses.shares(torch.zeros_like(valid)))) == 0.0


def test_masked_entries_get_no_gradient():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    losses.masked_mean(x.square(), losses.shares(torch.tensor([1, 0, 1]))).backward()
    assert x.grad.tolist() == [1.0, 0.0, 3.0]


def test_expectile_by_an_advantage_of_its_own():
    """0.9 where A >= 0, 0.1 elsewhere, whatever the error's sign; with A = error it is the expectile."""
    advantage, error = torch.tensor([1.0, -1.0, 0.0, -2.0]), torch.tensor([-2.0, 3.0, 1.0, -1.0])
    expected = torch.tensor([0.9 * 4, 0.1 * 9, 0.9, 0.1])
    torch.testing.assert_close(losses.expectile_by(advantage, error, 0.9), expected)
    torch.testing.assert_close(losses.expectile_by(error, error, 0.9), losses.expectile(error, 0.9))


def test_awr_weight_by_hand():
    """exp(10 A), at most 100: e^1, e^-5, 1, and e^10 cut; no gradient."""
    advantage = torch.tensor([0.1, -0.5, 0.0, 1.0], requires_grad=True)
    weight = losses.awr_weight(advantage, 10.0)
    torch.testing.assert_close(weight, torch.tensor([math.e, math.exp(-5), 1.0, 100.0]))
    assert not weight.requires_grad


def test_ddpg_bc_by_hand():
    """q = 1, -3: -(-1) / 2 plus 0.3 times the mean of 2, 4; q's gradient sees the divisor as a constant."""
    q, nll = torch.tensor([1.0, -3.0], requires_grad=True), torch.tensor([2.0, 4.0])
    loss = losses.ddpg_bc(q, nll, 0.3)
    assert float(loss.detach()) == pytest.approx(0.5 + 0.3 * 3.0, rel=1e-5)
    loss.backward()
    torch.testing.assert_close(q.grad, torch.tensor([-0.25, -0.25]), rtol=1e-5, atol=0)
    zero = torch.zeros(3, requires_grad=True)
    losses.ddpg_bc(zero, torch.zeros(3), 0.3).backward()
    assert zero.grad.isfinite().all()


def test_binary_nce_by_hand():
    """-log sigmoid(l) on the diagonal, -log sigmoid(-l) off it, the mean over all of two tables."""
    logits = torch.randn(2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    total = 0.0
    for e in range(2):
        for i in range(5):
            for k in range(5):
                sign = 1.0 if i == k else -1.0
                total += math.log(1 + math.exp(-sign * float(logits[e, i, k])))
    assert float(losses.binary_nce(logits)) == pytest.approx(total / 50)
