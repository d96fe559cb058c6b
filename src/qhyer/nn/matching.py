"""Flow matching: a law given a condition, as where noise is carried to along a learnt velocity (Lipman et al., 2023).

A network v(x, t | c) learns the velocity of straight lines from noise x0 ~ N(0, I) to a sample x1: at
x_t = (1 - t) x0 + t x1 it is x1 - x0, and its mean over all lines through x_t carries noise into the samples' law.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qhyer.nn.mlp import MLP


def fresh(like: Tensor) -> Tensor:
    """Noise of this shape. Not `randn_like`: torch's compiler takes two of the same tensor for one draw."""
    return torch.randn(like.shape, device=like.device, dtype=like.dtype)


class Velocity(nn.Module):
    """v(x, t | c): (..., d), (..., 1) and conditions (..., d_1), (..., d_2), ... -> (..., d)."""

    def __init__(self, size: int, conditions: int, hidden: Sequence[int], layer_norm: bool = False) -> None:
        """conditions: the width of all of them, side by side."""
        super().__init__()
        self.size = size
        self.net = MLP(conditions + size + 1, hidden, size, layer_norm=layer_norm)

    def forward(self, x: Tensor, t: Tensor, *conditions: Tensor) -> Tensor:
        return self.net(torch.cat([*conditions, x, t], dim=-1))

    def errors(self, sample: Tensor, *conditions: Tensor) -> Tensor:
        """(v(x_t, t | c) - (x1 - x0))^2 (..., d) of samples x1 (..., d), with noise and time drawn anew: its mean is
        the loss."""
        noise, t = fresh(sample), torch.rand(sample[..., :1].shape, device=sample.device, dtype=sample.dtype)
        return (self(torch.lerp(noise, sample, t), t, *conditions) - (sample - noise)).square()

    def carry(self, noise: Tensor, *conditions: Tensor, steps: int = 10) -> Tensor:
        """Noise (..., d) carried from t = 0 to 1 in this many steps of Euler's: (..., d), a sample."""
        x = noise
        for step in range(steps):
            x = x + self(x, torch.full_like(x[..., :1], step / steps), *conditions) / steps
        return x
