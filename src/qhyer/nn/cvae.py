"""Conditional VAE of p(g | s, a) (Sohn et al. 2015), its density by importance weighting as in SPOT (Wu et al. 2022).

p(g | s, a) = E_{z ~ N(0, I)} p(g | z, s, a),   encoder q(z | g, s, a), both Gaussian with diagonal covariance
ELBO        = E_q log p(g | z, s, a) - KL(q || N(0, I))  <=  log p(g | s, a)
log p       ~ log (1/L) sum_l p(g | z_l, s, a) p(z_l) / q(z_l | g, s, a),  z_l ~ q: closer from below as L grows
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qhyer.nn.densities import DensityEstimator, Following, GivenContext
from qhyer.nn.mlp import MLP

LOG_2PI = math.log(2 * math.pi)


class CVAE(DensityEstimator):
    noise: Tensor

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        goal_dim: int,
        hidden: Sequence[int] = (750, 750),
        latent: int | None = None,
        samples: int = 100,
        std: float | None = None,
        beta: float = 1.0,
    ) -> None:
        """latent: dimensions of z; twice the goal's when not given. samples: L of log_prob. std: the decoder's standard
        deviation; learned, for each point and dimension, when not given. beta: weight of the KL in the loss.

        SPOT's loss, mean squared error + 0.5 mean KL, is std = sqrt(1/8), beta = 1 where latent is twice the goal's.
        """
        super().__init__()
        self.goal_dim, self.std, self.beta = goal_dim, std, beta
        self.latent = latent = 2 * goal_dim if latent is None else latent
        self.encoder = MLP(state_dim + action_dim + goal_dim, hidden, 2 * latent)
        self.decoder = MLP(state_dim + action_dim + latent, hidden, goal_dim if std is not None else 2 * goal_dim)
        # The same noise for every point: log_prob is then a function of its inputs alone.
        self.register_buffer("noise", torch.randn(samples, latent))

    def encode(self, goal: Tensor, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of q(z | g, s, a), (..., latent) each."""
        mean, log_std = self.encoder(torch.cat([state, action, goal], dim=-1)).chunk(2, dim=-1)
        return mean, log_std.clamp(-4, 15)  # SPOT's range

    def log_likelihood(self, goal: Tensor, z: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """log p(g | z, s, a), (...)."""
        out = self.decoder(torch.cat([state, action, z], dim=-1))
        if self.std is not None:
            mean, log_std = out, torch.full_like(out, math.log(self.std))
        else:
            mean, log_std = out.chunk(2, dim=-1)
            log_std = log_std.clamp(-4, 2)
        squares = ((goal - mean) * torch.exp(-log_std)).square()
        return -(0.5 * squares + log_std + 0.5 * LOG_2PI).sum(-1)

    def loss(self, goal: Tensor, state: Tensor, action: Tensor, following: Following | None = None) -> Tensor:
        mean, log_std = self.encode(goal, state, action)
        z = mean + torch.exp(log_std) * torch.randn_like(mean)
        kl = 0.5 * (mean.square() + torch.exp(2 * log_std) - 2 * log_std - 1).sum(-1)
        return (self.beta * kl - self.log_likelihood(goal, z, state, action)).mean()  # -ELBO

    def log_prob(self, goal: Tensor, state: Tensor, action: Tensor) -> Tensor:
        mean, log_std = (part.unsqueeze(-2) for part in self.encode(goal, state, action))  # (..., 1, latent)
        z = mean + torch.exp(log_std) * self.noise  # (..., L, latent)
        samples = z.shape[-2]
        goal, state, action = (x.unsqueeze(-2).expand(*x.shape[:-1], samples, -1) for x in (goal, state, action))
        # log p(z) - log q(z | g, s, a): the 2 pi of both cancel.
        prior = (0.5 * self.noise.square() + log_std - 0.5 * z.square()).sum(-1)  # (..., L)
        log_weight = self.log_likelihood(goal, z, state, action) + prior
        return log_weight.logsumexp(-1) - math.log(samples)


def given_context(dim: int, context_dim: int, blocks: int, channels: int, samples: int = 10) -> GivenContext:
    """A CVAE in the place of a flow of so many blocks and channels, with about as many weights: its hidden layers have
    2 blocks channels^2, half of them for each network here. Few samples: every step of every window asks."""
    width = GivenContext.width(blocks * channels**2)
    return GivenContext(CVAE(context_dim, 0, dim, (width, width), samples=samples))
