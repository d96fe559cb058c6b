"""Flow matching: errors by hand, Euler's steps along known velocities, and a law that is learnt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qhyer.nn.matching import Velocity


class Known(nn.Module):
    """A velocity read off [c; x; t]."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x[..., :1], x[..., 1:-1], x[..., -1:])


def known(function, size: int = 2) -> Velocity:
    velocity = Velocity(size, 1, (4,))
    velocity.net = Known(function)
    return velocity


def test_the_straight_way_has_no_error():
    """All samples in one point c: the velocity at x_t is (c - x_t) / (1 - t), whatever the noise was."""
    velocity = known(lambda c, x, t: (c - x) / (1 - t)).double()
    torch.manual_seed(0)
    c = torch.randn(50, 1).double()
    errors = velocity.errors(c.expand(-1, 2), c)
    assert errors.shape == (50, 2)
    torch.testing.assert_close(errors, torch.zeros_like(errors), atol=1e-18, rtol=0.0)


def test_errors_are_squares_of_what_is_missing():
    """A velocity of nothing misses x1 - x0: with x1 = 3, a mean square of 3^2 + 1."""
    torch.manual_seed(0)
    errors = known(lambda c, x, t: 0 * x).errors(torch.full((200_000, 2), 3.0), torch.zeros(200_000, 1))
    assert float(errors.mean()) == pytest.approx(10.0, rel=0.01)


def test_noise_is_carried_by_steps_of_euler():
    x = torch.randn(3, 5, 2, dtype=torch.float64)
    c = torch.randn(3, 5, 1, dtype=torch.float64)
    carried = known(lambda c, x, t: c + 2 * t).carry(x, c, steps=4)
    torch.testing.assert_close(carried, x + c + 2 * (0 + 0.25 + 0.5 + 0.75) / 4)  # the left ends of four steps
    torch.testing.assert_close(known(lambda c, x, t: -x).carry(x, c, steps=10), x * 0.9**10)


def test_two_ways_are_learnt_and_not_their_mean():
    """Samples at +c and -c, which one Gaussian would put at 0."""
    torch.manual_seed(0)
    velocity = Velocity(1, 1, (64, 64))
    optimizer = torch.optim.Adam(velocity.parameters(), lr=3e-3)
    for _ in range(600):
        c = 1.0 + torch.rand(256, 1)
        sample = torch.where(torch.rand(256, 1) < 0.5, c, -c)
        loss = velocity.errors(sample, c).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    c = torch.full((1000, 1), 1.5)
    with torch.no_grad():
        found = velocity.carry(torch.randn(1000, 1), c)
    assert 0.4 < float((found > 0).float().mean()) < 0.6
    assert float((found.abs() - 1.5).abs().median()) < 0.2
    assert float((found.abs() < 0.75).float().mean()) < 0.15
