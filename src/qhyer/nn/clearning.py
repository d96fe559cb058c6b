"""C-learning (Eysenbach et al. 2021): a classifier tells where one will be from where one could be.

C(s, a, g) is the probability that g is a future state of (s, a) and not a goal of another transition. At the optimum
C / (1 - C) = p(g | s, a) / p(g), so the classifier's logit is the log ratio. Two ways to learn it:

    mc  positives are hindsight goals:  -log C(s, a, g+) - log(1 - C(s, a, g))
    td  positives are next states:      -(1 - discount) log C(s, a, s') - log(1 - C(s, a, g))
                                        - discount w log C(s, a, g)
        w = p(g | s', a') / p(g), from a slow copy of the classifier: the recursion of the future density
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer.nn.densities import DensityEstimator, Following, HistogramMarginal
from qhyer.nn.mlp import MLP


def mc_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Logits of hindsight goals and of other goals (B)."""
    return (F.softplus(-positive) + F.softplus(negative)).mean()


def td_loss(following: Tensor, other: Tensor, ratio: Tensor, discount: float) -> Tensor:
    """Logits at the next state and at another goal, and that goal's ratio w one step on (B)."""
    positive = (1 - discount) * F.softplus(-following) + discount * ratio * F.softplus(-other)
    return (positive + F.softplus(other)).mean()


class CLearning(DensityEstimator):
    """One classifier. (The original takes the lesser of two, which an actor needs and an estimate does not.)"""

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        goal_dim: int,
        hidden: Sequence[int] = (256, 256),
        kind: Literal["mc", "td"] = "mc",
        discount: float = 0.99,
        clip: float = 100.0,
        slow: float = 0.005,
        marginal: HistogramMarginal | None = None,
    ) -> None:
        """discount, clip (largest w), slow (step of the copy): for td. marginal: p(g); without it log_prob is the log
        ratio."""
        super().__init__()
        self.kind, self.discount, self.clip, self.slow = kind, discount, clip, slow
        self.classifier = MLP(state_dim + action_dim + goal_dim, hidden, 1)
        self.target = copy.deepcopy(self.classifier).requires_grad_(False) if kind == "td" else None
        self.marginal = marginal

    def log_ratio(self, goal: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """log p(g | s, a) / p(g), (...)."""
        return self.classifier(torch.cat([state, action, goal], dim=-1)).squeeze(-1)

    def log_prob(self, goal: Tensor, state: Tensor, action: Tensor) -> Tensor:
        ratio = self.log_ratio(goal, state, action)
        return ratio if self.marginal is None else ratio + self.marginal.log_prob(goal)

    def loss(self, goal: Tensor, state: Tensor, action: Tensor, following: Following | None = None) -> Tensor:
        other = goal.roll(1, dims=0)  # a batch is drawn independently: the neighbour's goal is a draw of p(g)
        negative = self.log_ratio(other, state, action)
        if self.target is None:
            return mc_loss(self.log_ratio(goal, state, action), negative)
        assert following is not None, "C-learning of kind td needs the next step"
        next_goal, next_state, next_action = following
        with torch.no_grad():
            ratio = self.target(torch.cat([next_state, next_action, other], dim=-1)).squeeze(-1).exp()
        return td_loss(self.log_ratio(next_goal, state, action), negative, ratio.clamp(max=self.clip), self.discount)

    @torch.no_grad()
    def after_step(self, goal: Tensor, state: Tensor, action: Tensor) -> None:
        if self.marginal is not None:
            self.marginal.observe(goal)
        if self.target is not None:
            for slow, fast in zip(self.target.parameters(), self.classifier.parameters()):
                slow.lerp_(fast, self.slow)
