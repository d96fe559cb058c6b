"""Which row becomes the goal. Everything here returns row indices; samplers gather.

All draws take an explicit generator and are plain index arithmetic, so a whole training step can be captured in
a CUDA graph. Tests compare the frequencies with the closed forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from qhyer.data.episodes import Episodes


class Several:
    """Generators of several seeds, in the place of one. What they draw has the seeds as its first axis, and each row of
    it is what its own generator would have drawn alone; arithmetic on the draws is done for all at once."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators, self.device = generators, generators[0].device


Source = torch.Generator | Several


def of_seeds(generators: Sequence[torch.Generator]) -> torch.Generator:
    """What a sampler of these seeds draws from: the one, or several in its place (the type is a sampler's)."""
    return generators[0] if len(generators) == 1 else cast(torch.Generator, Several(generators))


def batch_shape(generator: Source, batch_size: int) -> tuple[int, ...]:
    """(B,), or of several generators (S, B)."""
    return (len(generator.generators), batch_size) if isinstance(generator, Several) else (batch_size,)


def uniform(generator: Source, shape: tuple[int, ...]) -> Tensor:
    """U[0, 1) in float64: in float32 the geometric law below would lose its tail beyond 2^-24."""
    if isinstance(generator, Several):
        out = torch.empty(shape, device=generator.device, dtype=torch.float64)
        for one, row in zip(generator.generators, out.unbind()):
            row.uniform_(generator=one)
        return out
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)


def random_index(generator: Source, shape: tuple[int, ...], size: int) -> Tensor:
    """Uniform integers in [0, size)."""
    if isinstance(generator, Several):
        out = torch.empty(shape, device=generator.device, dtype=torch.long)
        for one, row in zip(generator.generators, out.unbind()):
            row.random_(0, size, generator=one)
        return out
    return torch.randint(size, shape, generator=generator, device=generator.device)


def geometric_steps(generator: Source, shape: tuple[int, ...], discount: float) -> Tensor:
    """K ~ Geom(1 - discount) on {1, 2, ...}, as in Eq. (1): P(K = k) = (1 - discount) discount^(k-1)."""
    if discount <= 0.0:
        return torch.ones(shape, dtype=torch.long, device=generator.device)
    u = 1.0 - uniform(generator, shape)  # (0, 1]
    return (torch.log(u) / math.log(discount)).long() + 1  # never negative, so that cutting off is rounding down


def geometric_future(generator: Source, episodes: Episodes, rows: Tensor, discount: float) -> Tensor:
    """A future row of the same episode, geometrically far, clamped to the final state."""
    steps = geometric_steps(generator, tuple(rows.shape), discount)
    return torch.minimum(rows + steps, episodes.end_of[rows])


def uniform_future(generator: Source, episodes: Episodes, rows: Tensor) -> Tensor:
    """A future row of the same episode, uniform over rows + 1 ... final state."""
    last = episodes.end_of[rows]
    ahead = (last - rows).clamp(min=1)
    offset = (uniform(generator, tuple(rows.shape)) * ahead).long() + 1
    return torch.minimum(rows + offset, last)


def random_rows(generator: Source, episodes: Episodes, shape: tuple[int, ...]) -> Tensor:
    """Any row of the dataset, uniform."""
    return random_index(generator, shape, len(episodes.observations))


def mixture(
    generator: Source,
    episodes: Episodes,
    rows: Tensor,
    *,
    p_current: float,
    p_trajectory: float,
    p_random: float,
    discount: float | None,
) -> Tensor:
    """OGBench's mixture: the state itself, a future one (geometric, or uniform when discount is None), or any row."""
    assert abs(p_current + p_trajectory + p_random - 1.0) < 1e-9
    if p_random == 1.0:
        return random_rows(generator, episodes, tuple(rows.shape))
    if discount is None:
        future = uniform_future(generator, episodes, rows)
    else:
        future = geometric_future(generator, episodes, rows, discount)
    if p_trajectory == 1.0:
        return future
    u = uniform(generator, tuple(rows.shape))
    anywhere = random_rows(generator, episodes, tuple(rows.shape))
    goal = torch.where(u < p_current + p_trajectory, future, anywhere)
    return torch.where(u < p_current, rows, goal)


class Neighbours:
    """Rows whose goal coordinates fall into the same small cell: where one episode passes through another.

    Cells are cubes of side `cell`, in standard deviations of each coordinate.
    """

    def __init__(self, episodes: Episodes, cell: float) -> None:
        spec = episodes.spec()
        indices = list(episodes.goal_indices)
        std = torch.tensor([spec.observation_std[i] for i in indices], device=episodes.device)
        places = torch.floor(episodes.observations[:, indices] / (std * cell)).long()  # (N, d_g)
        _, self.cell_of, counts = torch.unique(places, dim=0, return_inverse=True, return_counts=True)
        self.order = torch.argsort(self.cell_of, stable=True)  # rows, cell by cell
        self.counts = counts
        self.first = torch.cumsum(counts, 0) - counts

    def swap(self, generator: torch.Generator, rows: Tensor) -> Tensor:
        """For each row, a row of the same cell, uniform; often one of another episode, perhaps the row itself."""
        cell = self.cell_of[rows]
        pick = (uniform(generator, tuple(rows.shape)) * self.counts[cell]).long()
        return self.order[self.first[cell] + torch.minimum(pick, self.counts[cell] - 1)]


def stitched_future(
    generator: torch.Generator,
    episodes: Episodes,
    neighbours: Neighbours,
    rows: Tensor,
    discount: float,
    rate: float,
    hops: int = 16,
) -> Tensor:
    """A future row, geometrically far, along a path that may change episodes where they pass nearby.

    The walk has K ~ Geom(1 - discount) steps as in Eq. (1). At a rate of `rate` per step, and wherever an episode
    ends, it goes on from a random row of the same cell: the occupancy of the behaviour seen as a Markov process,
    in which goals beyond an episode's own end have their due probability. After `hops` changes it stays.
    """
    remaining = geometric_steps(generator, tuple(rows.shape), discount)
    for hop in range(hops + 1):
        reach = torch.minimum(remaining, episodes.end_of[rows] - rows)
        if hop < hops:
            reach = torch.minimum(reach, geometric_steps(generator, tuple(rows.shape), 1.0 - rate))
        rows = rows + reach
        remaining = remaining - reach
        if hop < hops:
            rows = torch.where(remaining > 0, neighbours.swap(generator, rows), rows)
    return rows
