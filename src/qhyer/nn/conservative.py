"""Conservative Q-learning (Kumar et al., 2020): soft actor-critic whose Q is pushed down where the data are not.

    penalty = log sum_a exp(Q(s, a)) - Q(s, a_data)          over sampled actions, each divided by its density
    L_Q = sum_j E[(r + gamma min Q'(s', a') - Q_j(s, a))^2] + alpha' w (penalty_j - gap)      alpha' ascends
    L_pi = E[alpha log pi(a | s) - min_j Q_j(s, a)],   alpha such that the entropy is -d_a

States are whatever the agent makes of observations and goals; the module knows nothing of either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.losses import mse
from qhyer.nn.plain import Critics, orthogonal, plain
from qhyer.nn.values import frozen, target_of


class SquashedGaussian(nn.Module):
    """a = tanh(u), u ~ N(mean, std^2), the log-deviation scaled and shifted by learned numbers (1 and -1 at first)."""

    def __init__(self, inputs: int, hidden: Sequence[int], action_dim: int) -> None:
        super().__init__()
        self.net = plain(inputs, hidden, 2 * action_dim)
        orthogonal(self.net, math.sqrt(2.0), 0.01)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.offset = nn.Parameter(torch.tensor(-1.0))

    def numbers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            mean, log_std = self.net(x.float()).chunk(2, dim=-1)
            return mean, (self.scale * log_std + self.offset).clamp(-20.0, 2.0)

    def sample(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """States (B, d) -> actions (count, B, d_a) and their log-densities (count, B)."""
        mean, log_std = self.numbers(x)
        noise = torch.randn(count, *mean.shape, device=mean.device, dtype=mean.dtype)
        u = mean + log_std.exp() * noise
        return torch.tanh(u), squashed_log_density(u, mean, log_std)

    def mode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.numbers(x)[0])


def squashed_log_density(u: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log p(tanh u) where u is Gaussian: the Gaussian's, less log |d tanh u / du| = 2 (log 2 - u - softplus(-2 u))."""
    gaussian = -0.5 * ((u - mean) * torch.exp(-log_std)).square() - log_std - 0.5 * math.log(2.0 * math.pi)
    return (gaussian - 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))).sum(-1)


class Conservative(nn.Module):
    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        hidden: Sequence[int],
        value_hidden: Sequence[int],
        discount: float,
        weight: float,
        gap: float,
        samples: int,
        best_backup: bool,
        floor: float = -math.inf,
    ) -> None:
        """weight, gap: w and how large the penalty may be. samples: actions of each kind. best_backup: of as many next
        actions the best counts, instead of one. floor: the penalty is cut there."""
        super().__init__()
        self.discount, self.weight, self.gap, self.floor = discount, weight, gap, floor
        self.samples, self.best_backup, self.action_dim = samples, best_backup, action_dim
        self.policy = SquashedGaussian(state_dim, hidden, action_dim)
        self.critic = Critics(2, state_dim + action_dim, value_hidden)
        for member in self.critic.members:
            orthogonal(member, math.sqrt(2.0), 0.01)
        self.target_critic = target_of(self.critic)
        self.log_alpha = nn.Parameter(torch.zeros(()))  # of the entropy
        self.log_lagrange = nn.Parameter(torch.ones(()))  # alpha' of the penalty

    def actor_parameters(self) -> list[nn.Parameter]:
        return [*self.policy.parameters(), self.log_alpha]

    def critic_parameters(self) -> list[nn.Parameter]:
        return [*self.critic.parameters(), self.log_lagrange]

    def value(self, states: Tensor) -> Tensor:
        """V(s) = min_j Q_j(s, a) at the policy's mode: (...)."""
        return self.critic(states, self.policy.mode(states)).amin(0)

    def penalty(self, states: Tensor, actions: Tensor, next_states: Tensor, q: Tensor) -> Tensor:
        """(2, B): log-sum-exp over actions drawn uniformly, from the policy here, and from the policy at s', all judged
        at s and divided by the densities they were drawn with; less Q of the data, q (2, B)."""
        count, batch = self.samples, len(states)
        with torch.no_grad():
            anywhere = 2.0 * torch.rand(count, batch, self.action_dim, device=states.device) - 1.0
            here, log_here = self.policy.sample(states, count)
            there, log_there = self.policy.sample(next_states, count)
            tried = torch.cat([anywhere, here, there])  # (3 n, B, d_a)
            flat = torch.full_like(log_here, -self.action_dim * math.log(2.0))
            log_p = torch.cat([flat, log_here, log_there])  # (3 n, B)
        at = self.critic(states.expand(3 * count, -1, -1), tried)  # (2, 3 n, B)
        return ((at - log_p).logsumexp(1) - q).clamp(min=self.floor)

    def forward(
        self, states: Tensor, actions: Tensor, rewards: Tensor, masks: Tensor, next_states: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of all losses, each of which reaches its own parameters alone, and metrics."""
        with torch.no_grad():
            coming, _ = self.policy.sample(next_states, self.samples if self.best_backup else 1)
            next_q = self.target_critic(next_states.expand(len(coming), -1, -1), coming).amin(0).amax(0)  # (B,)
            target = rewards + self.discount * masks * next_q
        q = self.critic(states, actions)  # (2, B)
        error = mse(target - q).mean(1).sum()
        excess = self.weight * (self.penalty(states, actions, next_states, q).mean(1) - self.gap)  # (2,)
        lagrange = self.log_lagrange.exp().clamp(max=1e6)
        critic = error + (lagrange.detach() * excess).sum()
        ascent = -0.5 * (lagrange * excess.detach()).sum()

        chosen, log_pi = self.policy.sample(states, 1)
        with frozen(self.critic):
            value = self.critic(states, chosen[0]).amin(0)
        actor = (self.log_alpha.exp().detach() * log_pi[0] - value).mean()
        entropy = -(self.log_alpha * (log_pi[0] - self.action_dim).detach()).mean()
        metrics = {
            "critic/loss": error,
            "critic/penalty": excess.mean() / self.weight + self.gap,
            "critic/mean": q.mean(),
            "critic/lagrange": lagrange,
            "actor/loss": actor,
            "actor/entropy": -log_pi.mean(),
            "actor/alpha": self.log_alpha.exp(),
        }
        return critic + ascent + actor + entropy, {name: metric.detach() for name, metric in metrics.items()}
