"""SAW: subgoal advantage-weighted policy bootstrapping (Zhou and Kao, 2025).

Idea. HIQL's value, and one flat policy instead of a hierarchy. A policy towards near goals, which is easy to learn,
teaches the flat one: it says what to do to get to the state a few steps ahead, which the data have shown, and the flat
policy does so on its way to the goal, the more the nearer that state is to it. Nothing has to invent subgoals.
Paper. Flattening Hierarchies with Policy Bootstrapping, NeurIPS 2025.
Code. johnlyzhou/saw, impls/agents/saw.py at 1ce8ac7.
Deviations. The final state of an episode may be a goal, and the state reached by its last action a subgoal (the code's
index arithmetic leaves it out).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer.agent import Agent, Batch, GoalConfig, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw, HierarchicalSamplerConfig
from qhyer.errors import require
from qhyer.losses import awr, awr_weight
from qhyer.nn.mlp import MLP
from qhyer.nn.representations import GoalRepresentation
from qhyer.nn.values import Value, follow, implicit_value_loss, target_of
from qhyer.streams import all_at_once


@dataclass(frozen=True)
class SAWConfig(GoalConfig):
    hidden: tuple[int, ...] = (512, 512, 512)
    """widths of both policies' hidden layers"""
    value_hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the hidden layers of the value and of the goal representations"""
    representation: int = 10
    """width of phi([s; g]), the value's and the policy's"""
    subgoal_steps: int = 25
    """k: subgoals lie this many steps ahead"""
    discount: float = 0.99
    """gamma, of the value and of its future goals"""
    expectile: float = 0.7
    """tau of the value: towards 1, the best that the data can do"""
    target_rate: float = 0.005
    """how far the target value moves towards the value at each update"""
    alpha_low: float = 3.0
    """inverse temperature of the weights of the policy towards subgoals"""
    alpha: float = 3.0
    """the same, of the flat policy's imitation of the data"""
    beta: float = 3.0
    """the same, of its imitation of the policy towards subgoals: 0 imitates it everywhere alike"""
    value_p_current: float = 0.2
    """chance that a value's goal is the state itself"""
    value_p_random: float = 0.3
    """chance that it is any row of the dataset; otherwise it lies ahead in the episode"""
    actor_p_random: float = 0.0
    """chance that the flat policy's goal is any row; otherwise it lies ahead in the episode"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.beta >= 0.0, "beta cannot be negative")


class Seen(NamedTuple):
    """What the losses read off phi and V without a gradient; V is the mean of both heads."""

    z_next: Tensor
    """phi([s'; g]) (B, d_z), g the value's goal"""
    near: Tensor
    """V(s', w) - V(s, w) (B,): what the action is worth on the way to w, k steps ahead"""
    far: Tensor
    """V(s', g) - V(s, g) (B,): what it is worth on the way to g, the flat policy's goal"""
    subgoal: Tensor
    """V(w, g) - V(s, g) (B,): what going to w is worth on the way to g; w is g where that is nearer"""


class SAW(Agent):
    Config = SAWConfig
    training_only = ("phi.", "value.", "target_value.", "sub_actor.")
    stackable = True
    config: SAWConfig

    def __init__(self, config: SAWConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d_s, d_z = spec.observation_dim, config.representation
        self.phi = GoalRepresentation(2 * d_s, config.value_hidden, d_z)
        self.value = Value(2, d_s + d_z, config.value_hidden)
        # The means start near zero: flax variance scale 1e-2.
        self.sub_actor = MLP(2 * d_s, config.hidden, spec.action_dim, final_scale=1e-2)  # sees [s; w] as they are
        self.actor_phi = GoalRepresentation(2 * d_s, config.value_hidden, d_z)  # not the value's: its own
        self.actor = MLP(d_s + d_z, config.hidden, spec.action_dim, final_scale=1e-2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=config.learning_rate, fused=True)
        self.target_value = target_of(self.value)  # only the head lags: value and target share one phi
        follow(self.optimizer, self.target_value, self.value, config.target_rate)

    def mean(self, observations: Tensor, goals: Tensor) -> Tensor:
        """The flat policy's mean (B, d_a)."""
        return self.actor(torch.cat([observations, self.actor_phi(observations, goals)], dim=-1))

    @torch.no_grad()
    def look(self, batch: Batch) -> Seen:
        """One call of phi for all pairs, and one of V."""
        s, s_next, g = batch["observations"], batch["next_observations"], batch["value_goals"]
        near, far, subgoal = batch["low_actor_goals"], batch["high_actor_goals"], batch["high_actor_targets"]
        states = torch.cat([s_next, s_next, s, s_next, s, subgoal])
        z = self.phi(states, torch.cat([g, near, near, far, far, far]))  # (6 B, d_z)
        first = len(s)  # of the pairs that are compared
        near_next, near_here, far_next, far_here, on_way = self.value(states[first:], z[first:]).mean(0).chunk(5)
        return Seen(z[:first], near_next - near_here, far_next - far_here, on_way - far_here)

    def value_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """HIQL's: of V(s, phi([s; g])) on r + gamma V'(s', phi([s'; g])), V' the target value (nn/values.py)."""
        s, s_next, g, config = batch["observations"], batch["next_observations"], batch["value_goals"], self.config
        return implicit_value_loss(
            "value",
            self.value,
            self.target_value,
            (s, self.phi(s, g)),
            (s_next, seen.z_next),
            batch["rewards"],
            batch["masks"],
            config.discount,
            config.expectile,
        )

    def sub_actor_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """-E[exp(alpha_low A) log pi_sub(a | s, w)], A = V(s', w) - V(s, w), w the state k steps ahead."""
        mean = self.sub_actor(torch.cat([batch["observations"], batch["low_actor_goals"]], dim=-1))
        return awr("sub_actor", mean, batch["actions"], seen.near, self.config.alpha_low)

    def actor_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """-E[exp(alpha A) log pi(a | s, g)] + E[exp(beta B) |mu(s, g) - mu_sub(s, w)|^2], A = V(s', g) - V(s, g), B =
        V(w, g) - V(s, g): the divergence of two Gaussians of one width is the distance of their means, but for a
        factor, which the code leaves out."""
        s, w = batch["observations"], self.as_goal(batch["high_actor_targets"])
        mean = self.mean(s, batch["high_actor_goals"])
        imitation, metrics = awr("actor", mean, batch["actions"], seen.far, self.config.alpha)
        with torch.no_grad():
            taught = self.sub_actor(torch.cat([s, w], dim=-1))  # (B, d_a)
            weight = awr_weight(seen.subgoal, self.config.beta)  # (B,)
        distance = F.mse_loss(mean, taught, reduction="none").sum(-1)  # (B,); in full precision, as log pi is
        bootstrap = (weight * distance).mean()
        metrics |= {
            "bootstrap/loss": bootstrap.detach(),
            "bootstrap/distance": distance.detach().mean(),
            "bootstrap/advantage": seen.subgoal.mean(),
            "bootstrap/weight": weight.mean(),
        }
        return imitation + bootstrap, metrics

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All at once, on the same transitions; each has its own parameters."""
        seen = self.look(batch)
        losses = (self.value_loss, self.sub_actor_loss, self.actor_loss)
        return all_at_once([partial(loss, batch, seen) for loss in losses], [*batch.values(), *seen])

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        current, anywhere = config.value_p_current, config.value_p_random
        sampler = HierarchicalSamplerConfig(
            value=GoalLaw(current, 1.0 - current - anywhere, anywhere, config.discount),
            subgoal_steps=config.subgoal_steps,
            p_random=config.actor_p_random,
        )
        return (Stage("joint", config.steps, config.batch_size, sampler, self.loss, (self.optimizer,)),)

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        return self.mean(observation, goal).clamp(-1.0, 1.0), None
