"""GCIVL: goal-conditioned implicit V-learning, OGBench's variant of IQL (Kostrikov et al., 2022) without a Q.

Idea. Fit V(s, g), minus the discounted number of steps to the goal, by an upper expectile of one-step backups over the
data; then imitate each action the more, the nearer it brought the goal by that value.
Paper. OGBench: Benchmarking Offline Goal-Conditioned RL, ICLR 2025; the value is HIQL's (Park et al., 2023).
Code. seohongpark/ogbench, impls/agents/gcivl.py at 1d41409.
Deviations. The final state of an episode may be a goal (OGBench's index arithmetic leaves it out).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qhyer.agent import Agent, Batch, GoalConfig, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw, ValueActorSamplerConfig
from qhyer.losses import awr
from qhyer.nn.mlp import MLP
from qhyer.nn.values import Value, follow, implicit_value_loss, target_of
from qhyer.streams import all_at_once


@dataclass(frozen=True)
class GCIVLConfig(GoalConfig):
    hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the actor's hidden layers"""
    value_hidden: tuple[int, ...] = (512, 512, 512)
    """widths of each value's hidden layers"""
    discount: float = 0.99
    """of the value, and of its geometric future goals"""
    expectile: float = 0.9
    """tau: how far the value leans to the best of the data"""
    alpha: float = 10.0
    """of the actor's weights exp(alpha A)"""
    target_rate: float = 0.005
    """how far the target values move per update"""
    value_p_current: float = 0.2
    """chance that a value's goal is the state itself"""
    value_p_random: float = 0.3
    """chance that it is any row of the dataset; otherwise it lies ahead in the episode"""
    actor_p_random: float = 0.0
    """chance that an actor's goal is any row; otherwise it lies ahead in the episode"""


class GCIVL(Agent):
    Config = GCIVLConfig
    training_only = ("value.", "target_value.")
    stackable = True
    config: GCIVLConfig

    def __init__(self, config: GCIVLConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        pair = 2 * spec.observation_dim
        self.value = Value(2, pair, config.value_hidden)
        self.target_value = target_of(self.value)
        # The mean layer starts near zero: flax variance scale 1e-2.
        self.actor = MLP(pair, config.hidden, spec.action_dim, final_scale=1e-2)
        learned = [*self.value.parameters(), *self.actor.parameters()]
        self.optimizer = torch.optim.Adam(learned, lr=config.learning_rate, fused=True)
        follow(self.optimizer, self.target_value, self.value, config.target_rate)

    def value_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Of V(s, g) on r + gamma V'(s', g), V' the target values (nn/values.py)."""
        s, next_s, g, config = batch["observations"], batch["next_observations"], batch["value_goals"], self.config
        return implicit_value_loss(
            "value",
            self.value,
            self.target_value,
            (s, g),
            (next_s, g),
            batch["rewards"],
            batch["masks"],
            config.discount,
            config.expectile,
        )

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Advantage-weighted regression: -E[min(exp(alpha A), 100) log pi(a | s, g)], A = V(s', g) - V(s, g)."""
        s, next_s, g = batch["observations"], batch["next_observations"], batch["actor_goals"]
        with torch.no_grad():
            v, next_v = self.value(torch.cat([s, next_s]), torch.cat([g, g])).mean(0).chunk(2)  # (B,)
        mean = self.actor(torch.cat([s, g], dim=-1))
        return awr("actor", mean, batch["actions"], next_v - v, self.config.alpha)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Both at once; no gradient passes between them."""
        return all_at_once([partial(loss, batch) for loss in (self.value_loss, self.actor_loss)], batch.values())

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
