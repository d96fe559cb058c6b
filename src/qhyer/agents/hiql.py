"""HIQL: hierarchical implicit Q-learning (Park et al., 2023), as in OGBench's reference implementation.

Idea. One value V(s, g), learnt without actions, and two policies read off it. The high one names a subgoal some steps
ahead, the low one the action towards it: far away, where V is noisy, it only has to tell good subgoals from bad, whose
values differ far more than those of neighbouring states. A subgoal is the representation phi([s; w]) that V itself
has learnt.
Paper. HIQL: Offline Goal-Conditioned RL with Latent States as Actions, NeurIPS 2023; protocol of OGBench, ICLR 2025.
Code. seohongpark/ogbench, impls/agents/hiql.py at 1d41409.
Deviations. The final state of an episode may be a goal, and the state reached by its last action a subgoal (OGBench's
index arithmetic leaves it out).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from qhyer.agent import Agent, Batch, GoalConfig, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw, HierarchicalSamplerConfig
from qhyer.losses import awr
from qhyer.nn.mlp import MLP
from qhyer.nn.representations import GoalRepresentation, to_sphere
from qhyer.nn.values import Value, follow, implicit_value_loss, target_of
from qhyer.streams import all_at_once


@dataclass(frozen=True)
class HIQLConfig(GoalConfig):
    hidden: tuple[int, ...] = (512, 512, 512)
    """widths of both actors' hidden layers"""
    value_hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the hidden layers of the value and of the goal representation"""
    representation: int = 10
    """width of phi([s; g]), the high actor's action"""
    subgoal_steps: int = 25
    """k: subgoals lie this many steps ahead"""
    discount: float = 0.99
    """gamma, of the value and of its future goals"""
    expectile: float = 0.7
    """tau of the value: towards 1, the best that the data can do"""
    target_rate: float = 0.005
    """how far the target value moves towards the value at each update"""
    alpha_low: float = 3.0
    """inverse temperature of the low actor's weights: 0 imitates, more prefers what the value prefers"""
    alpha_high: float = 3.0
    """the same, of the high actor"""
    low_actor_rep_grad: bool = False
    """let the low actor shape the representation, too (OGBench: with images)"""
    value_p_current: float = 0.2
    """chance that a value's goal is the state itself"""
    value_p_random: float = 0.3
    """chance that it is any row of the dataset; otherwise it lies ahead in the episode"""
    actor_p_random: float = 0.0
    """chance that a high actor's goal is any row; otherwise it lies ahead in the episode"""


class Seen(NamedTuple):
    """What the losses read off phi and V without a gradient."""

    z_next: Tensor
    """phi([s'; g]) (B, d_z), g the value's goal"""
    z_low: Tensor
    """phi([s; w]) (B, d_z), w the low actor's goal"""
    z_high: Tensor
    """phi([s; w]) (B, d_z), w the high actor's target"""
    low_advantage: Tensor
    """V(s', w) - V(s, w) (B,), the mean of both heads: what the action is worth on the way to w"""
    high_advantage: Tensor
    """V(w, g) - V(s, g) (B,): what going to w is worth on the way to g"""


class HIQL(Agent):
    Config = HIQLConfig
    training_only = ("phi.", "value.", "target_value.")  # phi, too: the high actor has learnt to name its values
    stackable = True
    config: HIQLConfig

    def __init__(self, config: HIQLConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d_s, d_z = spec.observation_dim, config.representation
        self.phi = GoalRepresentation(2 * d_s, config.value_hidden, d_z)
        self.value = Value(2, d_s + d_z, config.value_hidden)
        # The means start near zero: flax variance scale 1e-2.
        self.low_actor = MLP(d_s + d_z, config.hidden, spec.action_dim, final_scale=1e-2)
        self.high_actor = MLP(2 * d_s, config.hidden, d_z, final_scale=1e-2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=config.learning_rate, fused=True)
        # Only the head lags: value, target and low actor share one phi.
        self.target_value = target_of(self.value)
        follow(self.optimizer, self.target_value, self.value, config.target_rate)

    @torch.no_grad()
    def look(self, batch: Batch) -> Seen:
        """One call of phi for all pairs, and one of V: networks so small take little longer over six batches than one.

        The pairs are [s'; g], [s; w] for both w, and those whose values are compared; [s; w] of the low actor is both.
        """
        s, s_next, g = batch["observations"], batch["next_observations"], batch["value_goals"]
        low, high, far = batch["low_actor_goals"], batch["high_actor_targets"], batch["high_actor_goals"]
        states = torch.cat([s_next, s, s_next, s, high, s])
        goals = torch.cat([g, self.as_goal(high), low, low, far, far])
        z = self.phi(states, goals)  # (6 B, d_z)
        z_next, z_high, _, z_low, _, _ = z.chunk(6)
        first = 2 * len(s)  # of the pairs that are compared
        low_after, low_before, high_after, high_before = self.value(states[first:], z[first:]).mean(0).chunk(4)
        return Seen(z_next, z_low, z_high, low_after - low_before, high_after - high_before)

    # --------------------------------------------------------------------------------------------- the value

    def value_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """Of V(s, phi([s; g])) on r + gamma V'(s', phi([s'; g])), V' the target value (nn/values.py)."""
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

    # -------------------------------------------------------------------------------------------- the actors

    def low_actor_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """-E[exp(alpha A) log pi_l(a | s, phi([s; w]))], A = V(s', w) - V(s, w), w the state k steps ahead."""
        s, w, a = batch["observations"], batch["low_actor_goals"], batch["actions"]
        z = self.phi(s, w) if self.config.low_actor_rep_grad else seen.z_low  # (B, d_z)
        mean = self.low_actor(torch.cat([s, z], dim=-1))
        return awr("low_actor", mean, a, seen.low_advantage, self.config.alpha_low)

    def high_actor_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """-E[exp(alpha A) log pi_h(phi([s; w]) | s, g)], A = V(w, g) - V(s, g), w k steps ahead or g if nearer."""
        mean = self.high_actor(torch.cat([batch["observations"], batch["high_actor_goals"]], dim=-1))
        return awr("high_actor", mean, seen.z_high, seen.high_advantage, self.config.alpha_high)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All three at once, on the same transitions; each has its own parameters."""
        seen = self.look(batch)
        losses = (self.value_loss, self.low_actor_loss, self.high_actor_loss)
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

    # ------------------------------------------------------------------------------------------------ acting

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """A new subgoal at every step, put back on the sphere where phi lives; then the action towards it."""
        z = to_sphere(self.high_actor(torch.cat([observation, goal], dim=-1)))  # (n, d_z)
        return self.low_actor(torch.cat([observation, z], dim=-1)).clamp(-1.0, 1.0), None
