"""Chance when acting, told by the episode: an episode that is played again, alone or in a batch, is the same."""

from __future__ import annotations

import torch
from torch import Tensor


def first_row(observation: Tensor, goal: Tensor, rows: int) -> Tensor:
    """Where in a table of `rows` random numbers an episode begins (n,): read off the bits of its first observation
    and goal (n, d_s), so that episodes differ and yet each is the same alone, in a batch and again."""
    bits = torch.cat([observation, goal], dim=-1).float().contiguous().view(torch.int32).long()  # (n, 2 d_s)
    odd = 2 * torch.arange(bits.shape[-1], device=bits.device) + 1
    mixed = (bits * odd).sum(-1) * 0x9E3779B1  # Knuth's multiplier: neighbours land far apart
    return (mixed >> 16) % rows
