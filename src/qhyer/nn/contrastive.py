"""Contrastive RL (Eysenbach et al. 2022), the binary form: f(s, a, g) = phi(s, a)^T psi(g) tells pairs from strangers.

Of B transitions and their B hindsight goals, the B pairs on the diagonal are positive and the B (B - 1) others
negative. A classifier of all of them has the optimal logit log p(g | s, a) / p(g) - log(B - 1), as each positive faces
B - 1 negatives. The loss subtracts log(B - 1) itself, so that f is the log ratio whatever the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer.nn.densities import DensityEstimator, Following, GivenContext, HistogramMarginal
from qhyer.nn.mlp import MLP


def nce_loss(ratio: Tensor) -> Tensor:
    """f (B, B), transitions by goals -> binary cross-entropy, summed over a transition's goals."""
    batch = len(ratio)
    logits = ratio - math.log(batch - 1)
    # softplus(-x) = softplus(x) - x: all are negatives, and the diagonal is put right.
    return (F.softplus(logits).sum() - logits.diagonal().sum()) / batch


class Contrastive(DensityEstimator):
    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        goal_dim: int,
        hidden: Sequence[int] = (256, 256),
        representation: int = 64,
        marginal: HistogramMarginal | None = None,
        goal_hidden: Sequence[int] | None = None,
        layer_norm: bool = False,
    ) -> None:
        """marginal: p(g); without it log_prob is the log ratio. goal_hidden: layers of psi; phi's if not given."""
        super().__init__()
        self.phi = MLP(state_dim + action_dim, hidden, representation, layer_norm)
        self.psi = MLP(goal_dim, hidden if goal_hidden is None else goal_hidden, representation, layer_norm)
        self.marginal = marginal

    def log_ratio(self, goal: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """log p(g | s, a) / p(g), (...)."""
        return (self.phi(torch.cat([state, action], dim=-1)) * self.psi(goal)).sum(-1)

    def log_prob(self, goal: Tensor, state: Tensor, action: Tensor) -> Tensor:
        ratio = self.log_ratio(goal, state, action)
        return ratio if self.marginal is None else ratio + self.marginal.log_prob(goal)

    def loss(self, goal: Tensor, state: Tensor, action: Tensor, following: Following | None = None) -> Tensor:
        phi, psi = self.phi(torch.cat([state, action], dim=-1)), self.psi(goal)  # (B, representation)
        return nce_loss(phi @ psi.mT)

    def after_step(self, goal: Tensor, state: Tensor, action: Tensor) -> None:
        if self.marginal is not None:
            self.marginal.observe(goal)


def given_context(dim: int, context_dim: int, blocks: int, channels: int) -> GivenContext:
    """The classifier in the place of a flow of so many blocks and channels, with about as many weights: its hidden
    layers have 2 blocks channels^2, all of them psi's here. phi is a linear map of the context."""
    width = GivenContext.width(2 * blocks * channels**2)
    return GivenContext(Contrastive(context_dim, 0, dim, (), context_dim, goal_hidden=(width, width), layer_norm=True))
