"""Sine features of coordinates: a small network can then draw walls and corners, which it is slow to learn raw."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def fourier(x: Tensor, octaves: int) -> Tensor:
    """x (..., d) -> [x, sin(2^k pi x / 4), cos(2^k pi x / 4)] for k < octaves: periods 8, 4, 2, ... deviations."""
    if octaves == 0:
        return x
    rates = math.pi / 4 * 2.0 ** torch.arange(octaves, device=x.device, dtype=x.dtype)
    angles = (x[..., None] * rates).flatten(-2)  # (..., d * octaves)
    return torch.cat([x, torch.sin(angles), torch.cos(angles)], dim=-1)


def fourier_dim(dim: int, octaves: int) -> int:
    return dim * (1 + 2 * octaves)
