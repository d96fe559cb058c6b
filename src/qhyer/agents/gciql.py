"""GCIQL: goal-conditioned implicit Q-learning (Kostrikov et al., 2022), as in OGBench's reference implementation.

Idea. V(s, g) is an upper expectile of Q(s, a, g) over the data's actions, Q the one-step backup of V: the best that the
data can do, without asking for an action it does not have. The actor then climbs Q and stays near the data.
Paper. Offline Reinforcement Learning with Implicit Q-Learning, ICLR 2022; protocol of OGBench, ICLR 2025.
Code. seohongpark/ogbench, impls/agents/gciql.py at 1d41409.
Deviations. The final state of an episode may be a goal (OGBench's index arithmetic leaves it out).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer.agent import Agent, Batch, GoalConfig, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw, ValueActorSamplerConfig
from qhyer.losses import awr_weight, ddpg_bc, expectile, gaussian_nll, mse
from qhyer.nn.mlp import MLP
from qhyer.nn.values import Value, follow, frozen, spread, target_of
from qhyer.streams import all_at_once


@dataclass(frozen=True)
class GCIQLConfig(GoalConfig):
    hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the actor's hidden layers"""
    value_hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the hidden layers of V and of each Q"""
    discount: float = 0.99
    """of the value, and of its geometric future goals"""
    expectile: float = 0.9
    """tau: how far V leans to the best of the data"""
    actor_loss: Literal["ddpgbc", "awr"] = "ddpgbc"
    """climb Q and stay near the data, or imitate with weights exp(alpha (Q - V))"""
    alpha: float = 0.3
    """weight of staying near the data (ddpgbc), or of the advantage (awr)"""
    target_rate: float = 0.005
    """how far the target Q moves per update"""
    value_p_current: float = 0.2
    """chance that a value's goal is the state itself"""
    value_p_random: float = 0.3
    """chance that it is any row of the dataset; otherwise it lies ahead in the episode"""
    actor_p_random: float = 0.0
    """chance that an actor's goal is any row; otherwise it lies ahead in the episode"""


class GCIQL(Agent):
    Config = GCIQLConfig
    training_only = ("value.", "critic.", "target_critic.")
    stackable = True
    config: GCIQLConfig

    def __init__(self, config: GCIQLConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        pair = 2 * spec.observation_dim
        self.value = Value(1, pair, config.value_hidden)
        self.critic = Value(2, pair + spec.action_dim, config.value_hidden)
        self.target_critic = target_of(self.critic)
        # The mean layer starts near zero: flax variance scale 1e-2.
        self.actor = MLP(pair, config.hidden, spec.action_dim, final_scale=1e-2)
        learned = [p for net in (self.value, self.critic, self.actor) for p in net.parameters()]
        self.optimizer = torch.optim.Adam(learned, lr=config.learning_rate, fused=True)
        follow(self.optimizer, self.target_critic, self.critic, config.target_rate)

    def value_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """E[L_tau(min_j Q'_j(s, a, g) - V(s, g))], Q' the target critics."""
        s, g = batch["observations"], batch["value_goals"]
        with torch.no_grad():
            q = self.target_critic(s, g, batch["actions"]).amin(0)  # (B,)
        v = self.value(s, g).squeeze(0)  # (B,)
        loss = expectile(q - v, self.config.expectile).mean()
        return loss, {"value/loss": loss.detach(), **spread(v)}

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Sum over j of E[(r + gamma V(s', g) - Q_j(s, a, g))^2]; V is the online one, and gets no gradient."""
        s, g = batch["observations"], batch["value_goals"]
        with torch.no_grad():
            next_v = self.value(batch["next_observations"], g).squeeze(0)  # (B,)
            target = batch["rewards"] + self.config.discount * batch["masks"] * next_v
        q = self.critic(s, g, batch["actions"])  # (2, B)
        loss = mse(target - q).sum(0).mean()
        return loss, {"critic/loss": loss.detach(), "critic/target": target.mean()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """At the actor's goals. ddpgbc: -E[Q(s, mu, g)] / E|Q| - alpha E[log pi(a | s, g)], Q = min_j Q_j, mu the mean
        cut to [-1, 1]. awr: -E[min(exp(alpha (Q(s, a, g) - V(s, g))), 100) log pi(a | s, g)]."""
        s, a, g = batch["observations"], batch["actions"], batch["actor_goals"]
        mean = self.actor(torch.cat([s, g], dim=-1))  # (B, d_a)
        nll = gaussian_nll(mean, a)
        if self.config.actor_loss == "ddpgbc":
            with frozen(self.critic):
                q = self.critic(s, g, mean.clamp(-1.0, 1.0)).amin(0)  # (B,)
            loss = ddpg_bc(q, nll, self.config.alpha)
            metrics = {"actor/q": q.mean()}
        else:
            with torch.no_grad():
                advantage = self.critic(s, g, a).amin(0) - self.value(s, g).squeeze(0)  # (B,)
            weight = awr_weight(advantage, self.config.alpha)
            loss = (weight * nll).mean()
            metrics = {"actor/advantage": advantage.mean(), "actor/weight": weight.mean()}
        metrics |= {"actor/loss": loss, "actor/mse": F.mse_loss(mean.detach(), a)}
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All three at once; no gradient passes between them."""
        losses = (self.value_loss, self.critic_loss, self.actor_loss)
        return all_at_once([partial(loss, batch) for loss in losses], batch.values())

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        current, anywhere = config.value_p_current, config.value_p_random
        sampler = ValueActorSamplerConfig(
            value=GoalLaw(current, 1.0 - current - anywhere, anywhere, config.discount),
            actor=GoalLaw(0.0, 1.0 - config.actor_p_random, config.actor_p_random),
        )
        return (Stage("joint", config.steps, config.batch_size, sampler, self.loss, (self.optimizer,)),)

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        return self.actor(torch.cat([observation, goal], dim=-1)).clamp(-1.0, 1.0), None
