"""An exact probability of binary coordinates given a context: what a flow cannot give.

A flow is a continuous bijection from one Gaussian. Asked for goals whose coordinates are zeros and ones, it must tear
that Gaussian into 2^D spikes, and learns neither spikes nor weights. Factorised one coordinate after the other,

    log p(b | y) = sum_i log p(b_i | b_1 ... b_{i-1}, y),

every factor is a Bernoulli, and the whole is normalised over all patterns. One masked network computes all factors at
once (Germain et al., 2015): unit j of a hidden layer has a degree, sees inputs of at most that degree, and is seen
by coordinates beyond it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bits(nn.Module):
    """p(bits | context); `channels` hidden units in each of two layers."""

    def __init__(self, dim: int, context_dim: int, channels: int) -> None:
        super().__init__()
        self.dim = dim
        inputs = torch.cat([torch.zeros(context_dim, dtype=torch.long), torch.arange(1, dim + 1)])  # degrees
        hidden = torch.arange(channels) % dim  # 0: the context alone
        self.register_buffer("mask_in", (hidden[:, None] >= inputs).float(), persistent=False)
        self.register_buffer("mask_hidden", (hidden[:, None] >= hidden).float(), persistent=False)
        self.register_buffer("mask_out", (torch.arange(1, dim + 1)[:, None] > hidden).float(), persistent=False)
        self.first = nn.Linear(context_dim + dim, channels)
        self.second = nn.Linear(channels, channels)
        self.head = nn.Linear(channels, dim)

    mask_in: Tensor
    mask_hidden: Tensor
    mask_out: Tensor

    def logits(self, bits: Tensor, context: Tensor) -> Tensor:
        """bits (..., D) of zeros and ones, context (..., c) -> log-odds of each bit given the ones before it."""
        h = torch.cat([context, 2.0 * bits - 1.0], dim=-1)
        h = F.silu(F.linear(h, self.first.weight * self.mask_in, self.first.bias))
        h = h + F.silu(F.linear(h, self.second.weight * self.mask_hidden, self.second.bias))
        return F.linear(h, self.head.weight * self.mask_out, self.head.bias)

    def log_prob(self, bits: Tensor, context: Tensor) -> Tensor:
        """log p(bits | context), (...,): at most zero."""
        logits = self.logits(bits, context)
        return -F.softplus(torch.where(bits > 0.5, -logits, logits)).sum(-1)
