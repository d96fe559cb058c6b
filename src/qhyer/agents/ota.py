"""OTA: option-aware temporally abstracted value learning (Ahn et al., 2025).

Idea. HIQL, whose high policy is read off a value of its own. Far from the goal a value of single steps is noise: its
differences are small and its order wrong. A value of options, each n steps of the data long and worth one discount,
sees a horizon n times as short; the low policy keeps the value of steps.
Paper. Option-aware Temporally Abstracted Value for Offline Goal-Conditioned Reinforcement Learning, NeurIPS 2025.
Code. ota-v/ota-v, agents/ota.py and utils/datasets.py, as ktolnos/TTGS has them at 0a6d7a9.
Deviations. The final state of an episode may be a goal, and the state reached by its last action a subgoal or an
option's end (the code's index arithmetic leaves it out).
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
from qhyer.errors import require
from qhyer.losses import awr
from qhyer.nn.mlp import MLP
from qhyer.nn.representations import GoalRepresentation, to_sphere
from qhyer.nn.values import Value, follow, implicit_value_loss, target_of
from qhyer.streams import all_at_once


@dataclass(frozen=True)
class OTAConfig(GoalConfig):
    hidden: tuple[int, ...] = (512, 512, 512)
    """widths of both actors' hidden layers"""
    value_hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the hidden layers of both values and of the goal representation"""
    representation: int = 10
    """width of phi([s; g]), the high actor's action"""
    subgoal_steps: int = 25
    """k: subgoals lie this many steps ahead"""
    option_steps: int = 5
    """n: an option of the high value goes on for this many steps, or until its goal"""
    discount: float = 0.99
    """gamma, of both values, for a step and for an option alike, and of their future goals"""
    expectile: float = 0.7
    """tau of the values: towards 1, the best that the data can do"""
    target_rate: float = 0.005
    """how far the target values move towards the values at each update"""
    alpha_low: float = 3.0
    """inverse temperature of the low actor's weights: 0 imitates, more prefers what the value prefers"""
    alpha_high: float = 3.0
    """the same, of the high actor"""
    value_p_current: float = 0.2
    """chance that a value's goal is the state itself (the high value's: the option's end)"""
    value_p_random: float = 0.3
    """chance that it is any row of the dataset; otherwise it lies ahead in the episode"""
    actor_p_random: float = 0.0
    """chance that a high actor's goal is any row; otherwise it lies ahead in the episode"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.value_p_current < 1.0, "value_p_current must be below 1: an option needs somewhere to go")


class Seen(NamedTuple):
    """What the losses read off phi and the values without a gradient; a value is the mean of both heads."""

    z_next: Tensor
    """phi([s'; g]) (B, d_z), g the low value's goal"""
    z_option: Tensor
    """phi([e; g]) (B, d_z), e the option's end, g the high value's goal"""
    z_low: Tensor
    """phi([s; w]) (B, d_z), w the low actor's goal"""
    z_high: Tensor
    """phi([s; w]) (B, d_z), w the high actor's target"""
    low_advantage: Tensor
    """V(s', w) - V(s, w) (B,): what the action is worth on the way to w"""
    high_advantage: Tensor
    """V_high(w, g) - V_high(s, g) (B,): what going to w is worth on the way to g"""


class OTA(Agent):
    Config = OTAConfig
    training_only = ("phi.", "value.", "target_value.", "high_value.", "target_high_value.")
    stackable = True
    config: OTAConfig

    def __init__(self, config: OTAConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d_s, d_z = spec.observation_dim, config.representation
        self.phi = GoalRepresentation(2 * d_s, config.value_hidden, d_z)  # one, which both values shape
        self.value = Value(2, d_s + d_z, config.value_hidden)
        self.high_value = Value(2, d_s + d_z, config.value_hidden)
        # The means start near zero: flax variance scale 1e-2.
        self.low_actor = MLP(d_s + d_z, config.hidden, spec.action_dim, final_scale=1e-2)
        self.high_actor = MLP(2 * d_s, config.hidden, d_z, final_scale=1e-2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=config.learning_rate, fused=True)
        # Only the heads lag: values, targets and low actor share one phi.
        self.target_value, self.target_high_value = target_of(self.value), target_of(self.high_value)
        follow(self.optimizer, self.target_value, self.value, config.target_rate)
        follow(self.optimizer, self.target_high_value, self.high_value, config.target_rate)

    @torch.no_grad()
    def look(self, batch: Batch) -> Seen:
        """One call of phi for all pairs, and one of each value."""
        s, s_next, g = batch["observations"], batch["next_observations"], batch["value_goals"]
        low, high, far = batch["low_actor_goals"], batch["high_actor_targets"], batch["high_actor_goals"]
        states = torch.cat([s_next, batch["option_ends"], s, s_next, s, high, s])
        goals = torch.cat([g, batch["option_goals"], self.as_goal(high), low, low, far, far])
        z = self.phi(states, goals)  # (7 B, d_z)
        z_next, z_option, z_high, _, z_low, _, _ = z.chunk(7)
        first, second = 3 * len(s), 5 * len(s)  # of the pairs that are compared, by steps and by options
        low_after, low_before = self.value(states[first:second], z[first:second]).mean(0).chunk(2)
        high_after, high_before = self.high_value(states[second:], z[second:]).mean(0).chunk(2)
        return Seen(z_next, z_option, z_low, z_high, low_after - low_before, high_after - high_before)

    # -------------------------------------------------------------------------------------------- the values

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

    def high_value_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """The same of V_high, where a step is an option: from s to its end e, -1 unless e is the goal, one gamma."""
        s, e, g, config = batch["observations"], batch["option_ends"], batch["option_goals"], self.config
        return implicit_value_loss(
            "high_value",
            self.high_value,
            self.target_high_value,
            (s, self.phi(s, g)),
            (e, seen.z_option),
            batch["option_rewards"],
            batch["option_masks"],
            config.discount,
            config.expectile,
        )

    # -------------------------------------------------------------------------------------------- the actors

    def low_actor_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """-E[exp(alpha A) log pi_l(a | s, phi([s; w]))], A = V(s', w) - V(s, w), w the state k steps ahead."""
        mean = self.low_actor(torch.cat([batch["observations"], seen.z_low], dim=-1))
        return awr("low_actor", mean, batch["actions"], seen.low_advantage, self.config.alpha_low)

    def high_actor_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """-E[exp(alpha A) log pi_h(phi([s; w]) | s, g)], A = V_high(w, g) - V_high(s, g), w k steps ahead or g."""
        mean = self.high_actor(torch.cat([batch["observations"], batch["high_actor_goals"]], dim=-1))
        return awr("high_actor", mean, seen.z_high, seen.high_advantage, self.config.alpha_high)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All four at once, on the same transitions; the values share phi, all else is each one's own."""
        seen = self.look(batch)
        losses = (self.value_loss, self.high_value_loss, self.low_actor_loss, self.high_actor_loss)
        return all_at_once([partial(loss, batch, seen) for loss in losses], [*batch.values(), *seen])

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        current, anywhere = config.value_p_current, config.value_p_random
        sampler = HierarchicalSamplerConfig(
            value=GoalLaw(current, 1.0 - current - anywhere, anywhere, config.discount),
            subgoal_steps=config.subgoal_steps,
            p_random=config.actor_p_random,
            option_steps=config.option_steps,
        )
        return (Stage("joint", config.steps, config.batch_size, sampler, self.loss, (self.optimizer,)),)

    # ------------------------------------------------------------------------------------------------ acting

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """A new subgoal at every step, put back on the sphere where phi lives; then the action towards it."""
        z = to_sphere(self.high_actor(torch.cat([observation, goal], dim=-1)))  # (n, d_z)
        return self.low_actor(torch.cat([observation, z], dim=-1)).clamp(-1.0, 1.0), None
