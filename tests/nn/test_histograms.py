"""Numbers as histograms: masses against the normal law's own, means, entropy, and a mean learnt through them."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from qhyer.losses import cross_entropy, discounted, hl_gauss
from qhyer.nn.values import Ensemble, HistogramValue, target_of

EDGES = torch.linspace(-10.0, 0.0, 21, dtype=torch.float64)


@pytest.mark.parametrize("y", [-10.0, -9.9, -7.25, -5.0, -0.1, 0.0])
@pytest.mark.parametrize("std", [0.1, 0.375, 2.0])
def test_masses_are_a_truncated_normal_s(y, std):
    law = stats.truncnorm((-10.0 - y) / std, (0.0 - y) / std, loc=y, scale=std)
    expected = torch.from_numpy(law.cdf(EDGES[1:].numpy()) - law.cdf(EDGES[:-1].numpy()))
    found = hl_gauss(torch.tensor(y, dtype=torch.float64), EDGES, std)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert float(found.sum()) == pytest.approx(1.0)


def test_beyond_the_range_is_its_end():
    y = torch.tensor([-1e6, -11.0, 3.0, 1e6], dtype=torch.float64)
    ends = torch.tensor([-10.0, -10.0, 0.0, 0.0], dtype=torch.float64)
    assert torch.equal(hl_gauss(y, EDGES, 0.5), hl_gauss(ends, EDGES, 0.5))


def test_the_mean_is_the_number_away_from_the_ends():
    """To 1e-4 of a bin with sigma of 0.75 bins; at an end it is the cut normal's, about 0.7 bins inside."""
    value = HistogramValue(1, 2, (4,), 20, -10.0, 0.0).double()
    y = torch.linspace(-7.5, -2.5, 101, dtype=torch.float64)
    masses = value.histogram(y)
    assert masses.shape == (101, 20)
    torch.testing.assert_close(value.mean(masses.log()), y, rtol=0, atol=1e-3)
    end = float(value.mean(value.histogram(torch.zeros(1, dtype=torch.float64)).log()))
    assert -0.36 < end < -0.3  # of bins that are half a unit wide


def test_histograms_are_finite_in_single_precision():
    value = HistogramValue(1, 2, (4,), 101, -1000.0, 0.0)
    masses = value.histogram(torch.linspace(-1100.0, 100.0, 5001))
    assert masses.isfinite().all() and (masses >= 0).all()
    torch.testing.assert_close(masses.sum(-1), torch.ones(5001))


def test_cross_entropy():
    """-(0.25 log 0.5 + 0.75 log 0.25), and at its least, where both are equal, the entropy."""
    logits, masses = torch.log(torch.tensor([0.5, 0.25, 0.25])) + 7.0, torch.tensor([0.25, 0.75, 0.0])
    assert float(cross_entropy(logits, masses)) == pytest.approx(0.25 * math.log(2) + 0.75 * math.log(4))
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    masses = logits.detach().softmax(-1)
    loss = cross_entropy(logits, masses)
    torch.testing.assert_close(loss.detach(), -(masses * masses.log()).sum(-1))
    loss.sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(masses), rtol=0, atol=1e-12)


def test_discounted():
    rewards = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    torch.testing.assert_close(discounted(rewards, 0.5), torch.tensor([-1.75, -1.0, 0.5]))
    torch.testing.assert_close(discounted(rewards, 0.0), rewards[:, 0])
    torch.testing.assert_close(discounted(rewards, 1.0), rewards.sum(-1))


def test_a_histogram_value_is_an_ensemble_and_its_target_has_its_bins():
    value = HistogramValue(2, 5, (8,), 11, -3.0, 0.0)
    assert isinstance(value.net, Ensemble) and value(torch.randn(7, 2), torch.randn(7, 3)).shape == (2, 7, 11)
    torch.testing.assert_close(value.centres, torch.linspace(-3 + 1.5 / 11, -1.5 / 11, 11))
    assert value.std == pytest.approx(0.75 * 3 / 11)
    target = target_of(value)
    assert torch.equal(target.edges, value.edges) and not any(p.requires_grad for p in target.parameters())
    assert not {"edges", "centres"} & {name.split(".")[-1] for name in value.state_dict()}


def test_means_stay_in_full_precision():
    value = HistogramValue(2, 5, (8,), 101, -100.0, 0.0)
    x = torch.randn(7, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = value(x)
        mean = value.mean(logits)
        loss = cross_entropy(logits, value.histogram(mean.detach()))
    assert mean.dtype == loss.dtype == torch.float32
    assert torch.equal(mean, value.mean(value(x)))


def test_a_mean_is_learnt_through_histograms():
    """Cross-entropy to hist(y), y = -5 +- 2 as a coin says: the mean goes to the mean of y."""
    torch.manual_seed(0)
    value = HistogramValue(1, 1, (16,), 21, -10.0, 0.0)
    optimizer = torch.optim.Adam(value.parameters(), lr=1e-2)
    x = torch.ones(256, 1)
    for _ in range(200):
        y = torch.where(torch.rand(256) < 0.25, -3.0, -7.0)
        loss = cross_entropy(value(x), value.histogram(y)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(value.mean(value(x))[0, 0].detach()) == pytest.approx(-6.0, abs=0.3)
