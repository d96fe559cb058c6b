"""Chance when acting, told by the episode: an episode that is played again, alone or in a batch, is the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def first_row(observation: Tensor, goal: Tensor, rows: int) -> Tensor:
    """Where in a table of `rows` random numbers an episode begins (n,): read off the bits of its first observation
    and goal (n, d_s), so that episodes differ and yet each is the same alone, in a batch and again."""
    bits = torch.cat([observation, goal], dim=-1).float().contiguous().view(torch.int32).long()  # (n, 2 d_s)
    odd = 2 * torch.arange(bits.shape[-1], device=bits.device) + 1
    mixed = (bits * odd).sum(-1) * 0x9E3779B1  # Knuth's multiplier: neighbours land far apart
    return (mixed >> 16) % rows


def table(rows: int, width: int) -> Tensor:
    """Draws of N(0, I) (rows, width), always the same ones: what acting takes its chance from."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


def next_rows(
    observation: Tensor, goal: Tensor, memory: Mapping[str, Tensor] | None, count: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Which rows of a table of so many are an episode's next (n, count), and where those after them begin (n,), to be
    remembered as "row"."""
    row = memory["row"] if memory and "row" in memory else first_row(observation, goal, rows)
    return (row[:, None] + torch.arange(count, device=row.device)) % rows, (row + count) % rows
