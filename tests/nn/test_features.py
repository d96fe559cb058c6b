"""Sine features of coordinates."""

from __future__ import annotations

import math

import pytest
import torch

from qhyer.nn.features import fourier, fourier_dim


def test_worked_example():
    """x = 1: [1, sin(pi/4), sin(pi/2), cos(pi/4), cos(pi/2)]."""
    half = math.sqrt(0.5)
    expected = torch.tensor([1.0, half, 1.0, half, 0.0], dtype=torch.float64)
    torch.testing.assert_close(fourier(torch.ones(1, dtype=torch.float64), 2), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("octaves", [0, 1, 3])
def test_sizes(octaves):
    assert fourier(torch.randn(2, 5, 4), octaves).shape == (2, 5, fourier_dim(4, octaves))


def test_none_is_the_identity():
    x = torch.randn(3, 2)
    assert fourier(x, 0) is x and fourier_dim(7, 0) == 7


def test_periods_are_eight_and_halves_of_it():
    x = torch.randn(5, 1, dtype=torch.float64)
    for octave, period in enumerate((8.0, 4.0, 2.0)):
        here, there = fourier(x, 3), fourier(x + period, 3)
        for offset in (1, 4):  # sines, cosines
            torch.testing.assert_close(here[:, offset + octave], there[:, offset + octave])
        if octave:
            assert not torch.allclose(here[:, octave], there[:, octave])  # the next slower one differs


def test_each_coordinate_has_its_own_features():
    x = torch.randn(4, 3)
    y = x.clone()
    y[:, 1] += 0.5
    changed = ((fourier(x, 2) - fourier(y, 2)).abs().amax(0) > 0).nonzero().flatten().tolist()
    assert changed == [1, 3 + 2, 3 + 3, 9 + 2, 9 + 3]
