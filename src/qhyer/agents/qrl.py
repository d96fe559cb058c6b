"""QRL: quasimetric reinforcement learning (Wang et al., 2023), as in OGBench's reference implementation.

Idea. The number of steps from s to g is a quasimetric. Among the quasimetrics that give every transition of the data at
most one step, the greatest is the shortest way: push all pairs apart, hold neighbours together. The actor then climbs
-d through a model of the latent's dynamics.
Paper. Optimal Goal-Reaching Reinforcement Learning via Quasimetric Learning, ICML 2023; protocol of OGBench, ICLR 2025.
Code. seohongpark/ogbench, impls/agents/qrl.py at 1d41409.
Deviations. The final state of an episode may be a goal (OGBench's index arithmetic leaves it out). The union of
intervals is computed by comparing ends instead of sorting them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.agent import Agent, Batch, GoalConfig, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw, ValueActorSamplerConfig
from qhyer.errors import require
from qhyer.losses import awr_weight, ddpg_bc, gaussian_nll, push_apart
from qhyer.nn.mlp import MLP
from qhyer.nn.quasimetric import IQE, MRN, Quasimetric
from qhyer.nn.values import frozen
from qhyer.streams import all_at_once

INTERVALS = 8
"""coordinates per group of IQE"""


@dataclass(frozen=True)
class QRLConfig(GoalConfig):
    hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the actor's hidden layers"""
    value_hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the hidden layers of phi and of the dynamics"""
    latent_dim: int = 512
    """length of phi(s)"""
    quasimetric: Literal["iqe", "mrn"] = "iqe"
    """the family of distances: interval quasimetric embeddings, or metric residual networks (faster)"""
    margin: float = 0.05
    """by how much, squared and on average, a transition may exceed one step"""
    actor_loss: Literal["ddpgbc", "awr"] = "ddpgbc"
    """climb -d through the latent's dynamics and stay near the data, or imitate with weights exp(alpha A)"""
    alpha: float = 0.003
    """weight of staying near the data (ddpgbc), or of the advantage (awr)"""
    actor_p_random: float = 0.0
    """chance that an actor's goal is any row of the dataset; otherwise it lies ahead in the episode"""

    whole_goals = (
        "its distance is one between states, and grows wherever it may; that a state is at none from itself holds it "
        "back, and nothing would tie a goal known in part to the states that reach it"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.latent_dim >= 2, "latent_dim must be at least 2")
        require(
            self.quasimetric != "iqe" or self.latent_dim % INTERVALS == 0,
            f"latent_dim must be a multiple of {INTERVALS} with iqe",
        )
        require(self.margin >= 0.0, "margin cannot be negative")


class QRL(Agent):
    Config = QRLConfig
    training_only = ("metric.", "dynamics.", "log_dual")
    stackable = True
    config: QRLConfig

    def __init__(self, config: QRLConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        state, action, latent = spec.observation_dim, spec.action_dim, config.latent_dim
        self.metric: Quasimetric
        if config.quasimetric == "iqe":
            self.metric = IQE(state, config.value_hidden, latent, INTERVALS)
        else:
            self.metric = MRN(state, config.value_hidden, latent)
        self.log_dual = nn.Parameter(torch.zeros(()))  # lambda = exp of it, so it stays positive; 1 at the start
        self.dynamics: MLP | None = None
        if config.actor_loss == "ddpgbc":
            self.dynamics = MLP(latent + action, config.value_hidden, latent, layer_norm=True)
        # The mean layer starts near zero: flax variance scale 1e-2.
        self.actor = MLP(2 * state, config.hidden, action, final_scale=1e-2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=config.learning_rate, fused=True)

    def predict(self, latent: Tensor, actions: Tensor) -> Tensor:
        """The latent one step on: the dynamics predict its change."""
        assert self.dynamics is not None
        with torch.autocast(latent.device.type, enabled=False):
            return latent + self.dynamics(torch.cat([latent, actions.float()], dim=-1))

    def value_loss(self, z: Tensor, next_z: Tensor, goal_z: Tensor) -> tuple[Tensor, Metrics]:
        """max_d E[d(s, g)] subject to C = E[relu(d(s, s') - 1)^2] <= margin, by its Lagrangian, over d and lambda.

        The distance is maximised through 100 softplus(5 - d / 100), which levels off. lambda ascends: its own term
        has the opposite sign of the constraint's, and each is a constant to the other.
        """
        there = torch.stack([goal_z, next_z])
        apart, step = self.metric.distance(z.expand_as(there), there)  # (B,)
        push = push_apart(apart)
        excess = F.relu(step - 1.0).square().mean()
        dual = self.log_dual.exp()
        loss = push + dual.detach() * excess + dual * (self.config.margin - excess.detach())
        metrics = {
            "value/loss": loss,
            "value/push": push,
            "value/excess": excess,
            "value/dual": dual,
            "value/distance": apart.mean(),
            "value/step": step.mean(),
        }
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def dynamics_loss(self, z: Tensor, next_z: Tensor, actions: Tensor) -> tuple[Tensor, Metrics]:
        """E[d(phi(s'), phi^) + d(phi^, phi(s'))] / 2 for the predicted phi^; phi learns from it too."""
        predicted = self.predict(z, actions)
        loss = self.metric.distance(torch.stack([next_z, predicted]), torch.stack([predicted, next_z])).mean()
        return loss, {"dynamics/loss": loss.detach()}

    def actor_loss(self, batch: Batch, z: Tensor) -> tuple[Tensor, Metrics]:
        """At the actor's goals. ddpgbc: -E[Q] / E|Q| - alpha E[log pi(a | s, g)], Q = -d(phi^, phi(g)), phi^ predicted
        from the mean cut to [-1, 1]. awr: -E[min(exp(alpha A), 100) log pi(a | s, g)], A = d(s, g) - d(s', g)."""
        s, a, g = batch["observations"], batch["actions"], batch["actor_goals"]
        mean = self.actor(torch.cat([s, g], dim=-1))  # (B, d_a)
        nll = gaussian_nll(mean, a)
        with torch.no_grad():
            goal_z = self.metric.encode(g)
        if self.dynamics is not None:
            with frozen(self.metric, self.dynamics):
                q = -self.metric.distance(self.predict(z.detach(), mean.clamp(-1.0, 1.0)), goal_z)  # (B,)
            loss = ddpg_bc(q, nll, self.config.alpha)
            metrics = {"actor/q": q.mean()}
        else:
            with torch.no_grad():
                next_z = self.metric.encode(batch["next_observations"])
                advantage = self.metric.distance(z, goal_z) - self.metric.distance(next_z, goal_z)  # (B,)
            weight = awr_weight(advantage, self.config.alpha)
            loss = (weight * nll).mean()
            metrics = {"actor/advantage": advantage.mean(), "actor/weight": weight.mean()}
        metrics |= {"actor/loss": loss, "actor/mse": F.mse_loss(mean.detach(), a)}
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All at once; the actor's gradient stays the actor's."""
        seen = torch.cat([batch["observations"], batch["next_observations"], batch["value_goals"]])
        z, next_z, goal_z = self.metric.encode(seen).chunk(3)  # (B, latent)
        losses = [lambda: self.value_loss(z, next_z, goal_z)]
        if self.dynamics is not None:
            losses.append(lambda: self.dynamics_loss(z, next_z, batch["actions"]))
        return all_at_once([*losses, lambda: self.actor_loss(batch, z)], [*batch.values(), z, next_z, goal_z])

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        sampler = ValueActorSamplerConfig(
            value=GoalLaw(0.0, 0.0, 1.0),  # all pairs of states are to be far apart
            actor=GoalLaw(0.0, 1.0 - config.actor_p_random, config.actor_p_random),
        )
        return (Stage("joint", config.steps, config.batch_size, sampler, self.loss, (self.optimizer,)),)

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        return self.actor(torch.cat([observation, goal], dim=-1)).clamp(-1.0, 1.0), None
