"""Eik-HiQRL: hierarchical quasimetric RL under an Eikonal constraint (Giammarino and Qureshi, 2026).

Idea. Where one moves at speed at most one, the time d(s, g) to a goal changes by at most one per unit of way: its slope
|grad_s d| is at most one, and the greatest such quasimetric is the shortest way (Eikonal equation). Unlike QRL's
constraint on transitions this asks for states and goals alone. It fails where bodies and contacts rule the motion, and
so only the high level of HIQL's hierarchy has it; the low level keeps an implicit value V, its slope drawn to one.
Paper. Goal Reaching with Eikonal-Constrained Hierarchical Quasimetric Reinforcement Learning, ICLR 2026.
Code. VittorioGiammarino/Pi-HiQRL, agents/pi_hiqrl.py at d9483b5, an earlier name of the same method.
Deviations. The final state of an episode may be a goal, and the state reached by its last action a subgoal (the index
arithmetic there leaves it out). A slope of zero has no direction and passes no gradient (there: 1e-8 is added to every
coordinate). Left out: MRN in place of IQE, the slope along s' - s in place of its length.
"""

from __future__ import annotations

from collections.abc import Callable
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
from qhyer.losses import awr, awr_weight, gaussian_nll, push_apart
from qhyer.nn.mlp import MLP
from qhyer.nn.quasimetric import IQE
from qhyer.nn.representations import GoalRepresentation, to_sphere
from qhyer.nn.scan import without_kernels
from qhyer.nn.values import Value, follow, implicit_value_loss, target_of
from qhyer.streams import all_at_once

INTERVALS = 8
"""coordinates per group of IQE"""


@dataclass(frozen=True)
class EikHiQRLConfig(GoalConfig):
    hidden: tuple[int, ...] = (512, 512, 512)
    """widths of both actors' hidden layers"""
    value_hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the hidden layers of the distance, of nu, of the low value and of the goal representation"""
    latent_dim: int = 512
    """length of the distance's latent"""
    coordinates: int = 0
    """the distance and the high actor see this many coordinates of a state, the first ones; 0: all"""
    encoding: int = 0
    """the distance sees a state as nu(s), a learned vector of this length; 0: as it is"""
    representation: int = 10
    """width of phi([s; g]), the high actor's action"""
    subgoal_steps: int = 25
    """k: subgoals lie this many steps ahead"""
    discount: float = 0.99
    """gamma, of the low value and of the future goals"""
    expectile: float = 0.7
    """tau of the low value: towards 1, the best that the data can do"""
    target_rate: float = 0.005
    """how far the target of the low value moves towards it at each update"""
    alpha_low: float = 3.0
    """inverse temperature of the low actor's weights: 0 imitates, more prefers what the value prefers"""
    alpha_high: float = 3.0
    """the same, of the high actor"""
    low_actor_rep_grad: bool = False
    """let the low actor shape the representation, too"""
    value_p_current: float = 0.2
    """chance that a goal of the distance and of the low value is the state itself"""
    value_p_random: float = 0.3
    """chance that it is any row of the dataset; otherwise it lies ahead in the episode"""
    actor_p_random: float = 0.0
    """chance that a high actor's goal is any row; otherwise it lies ahead in the episode"""

    whole_goals = (
        "its distance is one between states, and grows wherever it may; that a state is at none from itself holds it "
        "back, and nothing would tie a goal known in part to the states that reach it (--agent.coordinates has "
        "distance and high actor see the first columns alone, of states and goals alike)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.latent_dim >= 1 and self.latent_dim % INTERVALS == 0, f"latent_dim: a multiple of {INTERVALS}")
        require(self.coordinates >= 0 and self.encoding >= 0, "coordinates and encoding cannot be negative")


def slopes(function: Callable[[Tensor], Tensor], s: Tensor) -> tuple[Tensor, Tensor]:
    """f(s) (m, B) and |grad_s f_j(s)| (m, B); both can be differentiated again. f_j at a row reads that row alone.

    In full precision, going back as much as going forth.
    """
    with without_kernels(), torch.autocast(s.device.type, enabled=False):
        values, back, *_ = torch.func.vjp(function, s)
        heads = torch.eye(len(values), dtype=values.dtype, device=s.device)[..., None].expand(-1, *values.shape)
        gradients = torch.stack([back(head)[0] for head in heads.unbind()])  # (m, B, d), of one head at a time
        return values, torch.linalg.vector_norm(gradients, dim=-1)


class Seen(NamedTuple):
    """What the losses read off phi, V and d without a gradient."""

    z_next: Tensor
    """phi([s'; g]) (B, d_z), g the value's goal"""
    z_low: Tensor
    """phi([s; w]) (B, d_z), w the low actor's goal"""
    z_high: Tensor
    """phi([s; w]) (B, d_z), w the high actor's target"""
    low_advantage: Tensor
    """V_j(s', w) - V_j(s, w) (2, B): what the action is worth on the way to w"""
    high_advantage: Tensor
    """d(s, g) - d(w, g) (B,): what going to w is worth on the way to g"""


class EikHiQRL(Agent):
    Config = EikHiQRLConfig
    training_only = ("metric.", "nu.", "phi.", "value.", "target_value.")
    stackable = True
    config: EikHiQRLConfig

    def __init__(self, config: EikHiQRLConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d_s, d_z = spec.observation_dim, config.representation
        require(config.coordinates <= d_s, f"coordinates must be at most {d_s}: so many numbers has a state here")
        d_h = config.coordinates or d_s
        self.nu = MLP(d_h, config.value_hidden, config.encoding, layer_norm=True) if config.encoding else None
        self.metric = IQE(config.encoding or d_h, config.value_hidden, config.latent_dim, INTERVALS)
        self.phi = GoalRepresentation(2 * d_s, config.value_hidden, d_z)
        self.value = Value(2, d_s + d_z, config.value_hidden)
        # The means start near zero: flax variance scale 1e-2.
        self.low_actor = MLP(d_s + d_z, config.hidden, spec.action_dim, final_scale=1e-2)
        self.high_actor = MLP(2 * d_h, config.hidden, d_z, final_scale=1e-2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=config.learning_rate, fused=True)
        # Only the head lags: value, target and low actor share one phi.
        self.target_value = target_of(self.value)
        follow(self.optimizer, self.target_value, self.value, config.target_rate)

    def high(self, states: Tensor) -> Tensor:
        """What the high level sees of them: (B, d_h)."""
        return states[..., : self.config.coordinates] if self.config.coordinates else states

    def encode(self, x: Tensor) -> Tensor:
        """The distance's latent (B, latent) of what the high level sees (B, d_h)."""
        with torch.autocast(x.device.type, enabled=False):
            return self.metric.encode(x if self.nu is None else self.nu(x))

    @torch.no_grad()
    def look(self, batch: Batch) -> Seen:
        """One call of phi for all pairs, one of V, and one of the distance's latent.

        The pairs are [s'; g], [s; w] for both w, and [s'; w] of the low actor, whose values are compared.
        """
        s, s_next, g = batch["observations"], batch["next_observations"], batch["value_goals"]
        low, high, far = batch["low_actor_goals"], batch["high_actor_targets"], batch["high_actor_goals"]
        states, goals = torch.cat([s_next, s, s_next, s]), torch.cat([g, high, low, low])
        z = self.phi(states, goals)  # (4 B, d_z)
        z_next, z_high, _, z_low = z.chunk(4)
        first = 2 * len(s)  # of the pairs that are compared
        low_after, low_before = self.value(states[first:], z[first:]).chunk(2, dim=1)  # (2, B)
        here, there, goal = self.encode(self.high(torch.cat([s, high, far]))).chunk(3)  # (B, latent)
        before, after = self.metric.distance(torch.stack([here, there]), torch.stack([goal, goal]))  # (B,)
        return Seen(z_next, z_low, z_high, low_after - low_before, before - after)

    # -------------------------------------------------------------------------------------------- the values

    def distance_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """max_d E[d(s, g)] where |grad_s d| is at most one: E[100 softplus(5 - d / 100)] + E[relu(|grad_s d| - 1)^2].

        The slope is by what the high level sees, not by nu(s). No dual variable: the constraint's weight is one.
        """
        s, g = self.high(batch["observations"]), self.high(batch["value_goals"])  # (B, d_h)
        goal = self.encode(g)  # (B, latent)
        found = slopes(lambda x: self.metric.distance(self.encode(x), goal)[None], s)
        # Where g is s, d has an edge, and which side of it counts would be for rounding to say: neither does.
        apart, slope = (x * (s != g).any(-1) for x in found)  # (1, B)
        push = push_apart(apart)
        excess = F.relu(slope - 1.0).square().mean()
        loss = push + excess
        metrics = {
            "distance/loss": loss,
            "distance/push": push,
            "distance/excess": excess,
            "distance/mean": apart.mean(),
            "distance/slope": slope.mean(),
        }
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def value_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """HIQL's, of V(s, phi([s; g])) on r + gamma V'(s', phi([s'; g])), V' the target value (nn/values.py), plus the
        sum over j of E[(|grad_s V_j| - 1)^2]: too flat counts, too; and phi's part in s belongs to the slope."""
        s, s_next, g, config = batch["observations"], batch["next_observations"], batch["value_goals"], self.config
        fit, metrics = implicit_value_loss(
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
        _, slope = slopes(lambda x: self.value(x, self.phi(x, g)), s)  # (2, B)
        eikonal = (slope - 1.0).square().sum(0).mean()
        loss = fit + eikonal
        more = {"value/loss": loss, "value/eikonal": eikonal, "value/slope": slope.mean()}
        return loss, metrics | {name: metric.detach() for name, metric in more.items()}

    # -------------------------------------------------------------------------------------------- the actors

    def low_actor_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """-E[mean_j exp(alpha A_j) log pi_l(a | s, phi([s; w]))], A_j = V_j(s', w) - V_j(s, w), w k steps ahead."""
        s, w, a = batch["observations"], batch["low_actor_goals"], batch["actions"]
        z = self.phi(s, w) if self.config.low_actor_rep_grad else seen.z_low  # (B, d_z)
        mean = self.low_actor(torch.cat([s, z], dim=-1))
        weight = awr_weight(seen.low_advantage, self.config.alpha_low).mean(0)  # (B,): the mean of weights
        loss = (weight * gaussian_nll(mean, a)).mean()
        return loss, {
            "low_actor/loss": loss.detach(),
            "low_actor/mse": F.mse_loss(mean.detach(), a),
            "low_actor/advantage": seen.low_advantage.mean(),
            "low_actor/weight": weight.mean(),
        }

    def high_actor_loss(self, batch: Batch, seen: Seen) -> tuple[Tensor, Metrics]:
        """-E[exp(alpha A) log pi_h(phi([s; w]) | s, g)], A = d(s, g) - d(w, g), w k steps ahead or g if nearer.

        phi has the whole of s and w; pi_h has what the high level sees of s and g.
        """
        mean = self.high_actor(
            torch.cat([self.high(batch["observations"]), self.high(batch["high_actor_goals"])], dim=-1)
        )
        return awr("high_actor", mean, seen.z_high, seen.high_advantage, self.config.alpha_high)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All four at once, on the same transitions; each has its own parameters."""
        seen = self.look(batch)
        losses = (self.value_loss, self.low_actor_loss, self.high_actor_loss)
        calls = [partial(self.distance_loss, batch), *(partial(loss, batch, seen) for loss in losses)]
        return all_at_once(calls, [*batch.values(), *seen])

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
        z = to_sphere(self.high_actor(torch.cat([self.high(observation), self.high(goal)], dim=-1)))  # (n, d_z)
        return self.low_actor(torch.cat([observation, z], dim=-1)).clamp(-1.0, 1.0), None
