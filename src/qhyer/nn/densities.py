"""Estimators of log p(g | s, a), the density of where one will be: one interface, and the two plainest of them.

    estimator.loss(goal, state, action)        to minimise; goals are the states K ~ Geom(1 - discount) ahead, Eq. (1)
    estimator.after_step(goal, state, action)  after each optimiser step: what is counted or averaged, not learned
    estimator.log_prob(goal, state, action)    (..., d_g), (..., d_s), (..., d_a) -> (...)

There are the flow and the histogram here, `cvae.CVAE`, `clearning.CLearning`, `contrastive.Contrastive`. All work on
any leading dimensions and do nothing whose shape depends on values, so that a step can be captured in a CUDA graph.
`log_prob` is a deterministic function of its inputs.

Classifiers (C-learning, contrastive) learn the ratio p(g | s, a) / p(g). With a `marginal` they multiply it by p(g);
without, log_prob is the density relative to the goals of the data. The flow and the histogram alone integrate to one by
construction; the CVAE would, if its sum over the latent were complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qhyer.nn.flow import ConditionalRealNVP, SAEncoder

Following = tuple[Tensor, Tensor, Tensor]  # goal coordinates of the next state, the next state, the action taken there


class DensityEstimator(nn.Module):
    """What all estimators of log p(g | s, a) are."""

    def log_prob(self, goal: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """(..., d_g), (..., d_s), (..., d_a) -> (...)."""
        raise NotImplementedError

    def loss(self, goal: Tensor, state: Tensor, action: Tensor, following: Following | None = None) -> Tensor:
        """Of a batch (B, ...) of hindsight goals; `following` is for those that bootstrap from the next step."""
        raise NotImplementedError

    def after_step(self, goal: Tensor, state: Tensor, action: Tensor) -> None:
        """What is not learned by gradient: counts, slow copies. Once after each optimiser step, with its batch."""


class GivenContext(nn.Module):
    """An estimator of p(g | context), asked as `flow.ConditionalRealNVP` is: the context stands in the state's place,
    and there is no action. So another estimator reads the same encoding of (s, a) as the flow does."""

    def __init__(self, estimator: DensityEstimator) -> None:
        super().__init__()
        self.estimator = estimator

    @staticmethod
    def width(weights: float) -> int:
        """Of a square matrix with about so many weights; matrix units like multiples of eight."""
        return max(8, 8 * round(math.sqrt(weights) / 8))

    def log_prob(self, goal: Tensor, context: Tensor) -> Tensor:
        """(..., d_g), (..., c) -> (...)."""
        return self.estimator.log_prob(goal, context, context[..., :0])

    def loss(self, goal: Tensor, context: Tensor) -> Tensor:
        """Of a batch of hindsight goals (B, d_g) and contexts (B, c)."""
        return self.estimator.loss(goal, context, context[..., :0])


class FlowDensity(DensityEstimator):
    """Eqs. (4), (5): RealNVP given an encoding of (s, a); exact and normalised. QHyer's critic, alone."""

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        goal_dim: int,
        blocks: int = 6,
        channels: int = 256,
        encoder_width: int = 1024,
        encoder_layers: int = 4,
        representation: int = 64,
        noise: float = 0.0,
    ) -> None:
        """noise: standard deviation of what is added to goals in the loss; goals on a grid or a line need some."""
        super().__init__()
        self.noise = noise
        self.encoder = SAEncoder(state_dim + action_dim, encoder_width, encoder_layers, representation)
        self.flow = ConditionalRealNVP(goal_dim, representation, blocks, channels)

    def log_prob(self, goal: Tensor, state: Tensor, action: Tensor) -> Tensor:
        return self.flow.log_prob(goal, self.encoder(state, action))  # Eq. (4)

    def loss(self, goal: Tensor, state: Tensor, action: Tensor, following: Following | None = None) -> Tensor:
        if self.noise:
            goal = goal + self.noise * torch.randn_like(goal)
        return -self.log_prob(goal, state, action).mean()  # Eq. (5)


class Bins(nn.Module):
    """Equal cells of a box, numbered with the first coordinate varying slowest."""

    low: Tensor
    high: Tensor
    width: Tensor
    last: Tensor
    strides: Tensor

    def __init__(self, low: Sequence[float], high: Sequence[float], counts: Sequence[int]) -> None:
        super().__init__()
        assert len(low) == len(high) == len(counts)
        self.total = math.prod(counts)
        width = [(b - a) / n for a, b, n in zip(low, high, counts)]
        self.log_volume = sum(math.log(w) for w in width)
        strides = [math.prod(counts[i + 1 :]) for i in range(len(counts))]
        for name, values in (("low", low), ("high", high), ("width", width), ("last", [n - 1 for n in counts])):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32), persistent=False)
        self.register_buffer("strides", torch.tensor(strides), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(..., d) -> the cell (...), that nearest to the point for points outside; and whether x is inside the box."""
        cell = ((x - self.low) / self.width).floor().clamp(min=0).minimum(self.last)
        inside = ((x >= self.low) & (x <= self.high)).all(-1)
        return (cell.long() * self.strides).sum(-1), inside


def _log_density(counts: Tensor, cell: Tensor, inside: Tensor, bins: Bins, prior: float) -> Tensor:
    """Of cell frequencies with `prior` imagined samples spread evenly; no density outside the box."""
    mass = (counts + prior / bins.total) / (counts.sum(-1, keepdim=True) + prior)  # (..., cells)
    log_mass = mass.gather(-1, cell.unsqueeze(-1)).squeeze(-1).log().to(torch.get_default_dtype())
    return torch.where(inside, log_mass - bins.log_volume, -math.inf)


class HistogramMarginal(nn.Module):
    """p(g) by counting: what turns a classifier's ratio into a density, where goals have few dimensions."""

    counts: Tensor

    def __init__(self, bins: Bins, prior: float = 1.0) -> None:
        super().__init__()
        self.bins, self.prior = bins, prior
        self.register_buffer("counts", torch.zeros(bins.total, dtype=torch.float64))

    @torch.no_grad()
    def observe(self, goal: Tensor) -> None:
        cell, inside = self.bins(goal)
        self.counts.index_add_(0, cell.flatten(), inside.flatten().to(self.counts.dtype))

    def log_prob(self, goal: Tensor) -> Tensor:
        cell, inside = self.bins(goal)
        return _log_density(self.counts.expand(*cell.shape, -1), cell, inside, self.bins, self.prior)


class Histogram(DensityEstimator):
    """Frequencies of goal cells for each cell of the state and each of a few actions. Nothing is learned by gradient.

    Actions are one-hot (or logits: the greatest entry counts).
    """

    counts: Tensor

    def __init__(
        self, state_bins: Bins, actions: int, goal_bins: Bins, prior: float = 1.0, weight: float = 1.0
    ) -> None:
        """prior: imagined samples per (state cell, action), even over goal cells. weight: what one sample counts; less
        than one where goals are drawn many times from the same transition and are not new evidence."""
        super().__init__()
        self.state_bins, self.actions, self.goal_bins = state_bins, actions, goal_bins
        self.prior, self.weight = prior, weight
        shape = (state_bins.total * actions, goal_bins.total)
        self.register_buffer("counts", torch.zeros(shape, dtype=torch.float64))

    def _row(self, state: Tensor, action: Tensor) -> Tensor:
        return self.state_bins(state)[0] * self.actions + action.argmax(-1)

    def log_prob(self, goal: Tensor, state: Tensor, action: Tensor) -> Tensor:
        cell, inside = self.goal_bins(goal)
        return _log_density(self.counts[self._row(state, action)], cell, inside, self.goal_bins, self.prior)

    def loss(self, goal: Tensor, state: Tensor, action: Tensor, following: Following | None = None) -> Tensor:
        return -self.log_prob(goal, state, action).mean()

    @torch.no_grad()
    def after_step(self, goal: Tensor, state: Tensor, action: Tensor) -> None:
        cell, inside = self.goal_bins(goal)
        index = (self._row(state, action) * self.goal_bins.total + cell).flatten()
        self.counts.view(-1).index_add_(0, index, self.weight * inside.flatten().to(self.counts.dtype))
