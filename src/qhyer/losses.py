"""Each formula once, as a pure function. Reductions are explicit: means are taken over what is valid."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer import distributed


def shares(valid: Tensor) -> Tensor:
    """What each entry counts in the mean over the entries where `valid` is one: nothing where it is not, and nothing
    anywhere if there is none.

    Where processes share a batch, their counts differ: divided by the mean count, their results average to the mean.
    """
    valid = valid.float()
    return valid / distributed.mean(valid.sum()).clamp(min=1.0 / distributed.world())


def masked_mean(x: Tensor, share: Tensor) -> Tensor:
    """Mean of x, each entry counting for its share (same shape)."""
    return (x * share).sum()


def expectile(u: Tensor, tau: float) -> Tensor:
    """Eq. (9): L^2_tau(u) = |tau - 1(u < 0)| u^2, u = target - prediction; tau > 1/2 leans to the maximum."""
    weight = torch.where(u < 0, 1.0 - tau, tau)
    return weight * u.square()


def quantile(u: Tensor, tau: float) -> Tensor:
    """Pinball loss: |tau - 1(u < 0)| |u|, the L1 sibling of the expectile."""
    weight = torch.where(u < 0, 1.0 - tau, tau)
    return weight * u.abs()


def mse(u: Tensor) -> Tensor:
    """u^2: what the expectile is, up to a factor 2, at tau = 1/2."""
    return u.square()


def gaussian_nll(mean: Tensor, target: Tensor, std: float = 1.0) -> Tensor:
    """-log N(target; mean, std^2 I), summed over the last dimension."""
    squares = ((target - mean) / std).square().sum(-1)
    return 0.5 * squares + mean.shape[-1] * (math.log(std) + 0.5 * math.log(2 * math.pi))


def gelu(x: Tensor) -> Tensor:
    """The tanh form, which is what flax (and so OGBench) calls gelu."""
    return F.gelu(x, approximate="tanh")
