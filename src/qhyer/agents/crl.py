"""CRL: contrastive reinforcement learning (Eysenbach et al., 2022), as in OGBench's reference implementation.

Idea. Tell the goals that a state and action led to from those that others led to. The best classifier's logit is
log p(g | s, a) / p(g) up to a constant, p the discounted future of the behaviour: a Q without any backup. The actor
climbs it and stays near the data.
Paper. Contrastive Learning as Goal-Conditioned Reinforcement Learning, NeurIPS 2022; protocol of OGBench, ICLR 2025.
Code. seohongpark/ogbench, impls/agents/crl.py at 1d41409. The published scores are older than its commit 15594e3,
before which the actor climbed log max(exp f, 1e-6) instead of f: `q_floor`.
Deviations. The final state of an episode may be a goal (OGBench's index arithmetic leaves it out). Where processes
share a batch, the negatives of each are its own share's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer.agent import Agent, Batch, GoalConfig, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw, ValueActorSamplerConfig
from qhyer.errors import require
from qhyer.losses import awr_weight, binary_nce, ddpg_bc, gaussian_nll
from qhyer.nn.mlp import MLP
from qhyer.nn.values import Bilinear, frozen
from qhyer.streams import all_at_once


@dataclass(frozen=True)
class CRLConfig(GoalConfig):
    hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the actor's hidden layers"""
    value_hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the hidden layers of phi and psi"""
    latent_dim: int = 512
    """length of phi(s, a) and psi(g)"""
    discount: float = 0.99
    """of the geometric future goals"""
    actor_loss: Literal["ddpgbc", "awr"] = "ddpgbc"
    """climb the critic and stay near the data, or imitate with weights exp(alpha (Q - V)), V contrastive too"""
    alpha: float = 0.1
    """weight of staying near the data (ddpgbc), or of the advantage (awr)"""
    actor_p_random: float = 0.0
    """chance that an actor's goal is any row of the dataset; otherwise it lies ahead in the episode"""
    q_floor: float | None = None
    """no Q or V of the actor's loss is below this; OGBench's published scores are of code with log 1e-6 = -13.8"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.latent_dim >= 1, "latent_dim must be at least 1")
        require(self.q_floor is None or math.isfinite(self.q_floor), "q_floor must be a number, such as -13.8")


class CRL(Agent):
    Config = CRLConfig
    training_only = ("critic.", "value.")
    stackable = True
    config: CRLConfig

    def __init__(self, config: CRLConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        state, action = spec.observation_dim, spec.action_dim
        self.critic = Bilinear(2, state + action, state, config.value_hidden, config.latent_dim)
        self.value: Bilinear | None = None
        if config.actor_loss == "awr":
            self.value = Bilinear(1, state, state, config.value_hidden, config.latent_dim)
        # The mean layer starts near zero: flax variance scale 1e-2.
        self.actor = MLP(2 * state, config.hidden, action, final_scale=1e-2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=config.learning_rate, fused=True)

    def contrastive_loss(self, name: str, logits: Tensor) -> tuple[Tensor, Metrics]:
        """Binary cross-entropy over all pairs of the batch: the k-th goal is the future of the i-th row iff k = i."""
        loss = binary_nce(logits)  # logits (members, B, B)
        with torch.no_grad():
            mean, count = logits.mean(0), logits.shape[-1]
            positive = mean.diagonal().mean()
            accuracy = (mean.argmax(1) == torch.arange(count, device=mean.device)).mean(dtype=mean.dtype)
            negative = (mean.sum() - count * positive) / max(1, count * (count - 1))
        metrics = {"loss": loss.detach(), "accuracy": accuracy, "positive": positive, "negative": negative}
        return loss, {f"{name}/{metric}": value for metric, value in metrics.items()}

    def floored(self, logit: Tensor) -> Tensor:
        """Below the floor there is nothing to climb."""
        return logit if self.config.q_floor is None else logit.clamp_min(self.config.q_floor)

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """At the actor's goals. ddpgbc: -E[Q(s, mu, g)] / E|Q| - alpha E[log pi(a | s, g)], Q = min_j f_j the logit, mu
        the mean cut to [-1, 1]. awr: -E[min(exp(alpha (Q(s, a, g) - V(s, g))), 100) log pi(a | s, g)]."""
        s, a, g = batch["observations"], batch["actions"], batch["actor_goals"]
        mean = self.actor(torch.cat([s, g], dim=-1))  # (B, d_a)
        nll = gaussian_nll(mean, a)
        if self.value is None:
            with frozen(self.critic):
                q = self.floored(self.critic(g, s, mean.clamp(-1.0, 1.0)).amin(0))  # (B,)
            loss = ddpg_bc(q, nll, self.config.alpha)
            metrics = {"actor/q": q.mean()}
        else:
            with torch.no_grad():
                q, v = self.critic(g, s, a).amin(0), self.value(g, s).squeeze(0)  # (B,), (B,)
                advantage = self.floored(q) - self.floored(v)
            weight = awr_weight(advantage, self.config.alpha)
            loss = (weight * nll).mean()
            metrics = {"actor/advantage": advantage.mean(), "actor/weight": weight.mean()}
        metrics |= {"actor/loss": loss, "actor/mse": F.mse_loss(mean.detach(), a)}
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All at once; no gradient passes between them."""
        s, g, value = batch["observations"], batch["value_goals"], self.value
        losses = [lambda: self.contrastive_loss("critic", self.critic.table(g, s, batch["actions"]))]
        if value is not None:
            losses.append(lambda: self.contrastive_loss("value", value.table(g, s)))
        return all_at_once([*losses, lambda: self.actor_loss(batch)], batch.values())

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        sampler = ValueActorSamplerConfig(
            value=GoalLaw(discount=config.discount),  # only the geometric law makes the logit a discounted future's
            actor=GoalLaw(0.0, 1.0 - config.actor_p_random, config.actor_p_random),
        )
        return (Stage("joint", config.steps, config.batch_size, sampler, self.loss, (self.optimizer,)),)

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        return self.actor(torch.cat([observation, goal], dim=-1)).clamp(-1.0, 1.0), None
