"""GAS: graph-assisted stitching (Baek et al., 2025).

Idea. A representation in which Euclidean distance is the number of steps from state to state turns the data of all
episodes into one map. Clusters of states, of those that lie on straight ways, are its nodes; nodes a few steps apart
are joined, whichever episodes they came from, and the shortest way on this graph takes the place of a high policy. A
low policy has learnt to move in any direction of the representation, and heads for one node after the other.
Paper. Graph-Assisted Stitching for Offline Hierarchical Reinforcement Learning, ICML 2025.
Code. qortmdgh4141/GAS, M_utils/agents/gas.py, K_utils, O_utils at c9e590f.
Deviations. The final state of an episode may be a goal and belong to a node (there it is only a next state). The
shortest ways are found anew for the goal of each episode, once, when it begins; by default the code finds them once for
each task, and has this as an option. Each stage has an optimiser of its own, so that the representation rests in the
second one; there one Adam's momentum moves it a little after the graph is built. Distances that decide what is a node
and an edge are in double precision. No images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer.agent import Agent, Batch, GoalConfig, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec, Episodes
from qhyer.data.samplers import GoalLaw, Rewards, RewardSamplerConfig
from qhyer.data.segments import DirectionSamplerConfig, first_beyond
from qhyer.errors import require
from qhyer.losses import ddpg_bc, expectile, gaussian_nll, mse
from qhyer.nn.graph import Graph, centres, cluster, direction, efficient
from qhyer.nn.mlp import MLP
from qhyer.nn.values import Metric, Value, follow, frozen, implicit_value_loss, spread, target_of
from qhyer.streams import all_at_once

BLOCK = 16384  # states whose places are computed at a time


@dataclass(frozen=True)
class GASConfig(GoalConfig):
    distance_steps: int = 1_000_000
    """gradient updates of the representation; `steps` are those of the policy, which come after them"""
    hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the actor's hidden layers"""
    value_hidden: tuple[int, ...] = (512, 512, 512)
    """widths of the hidden layers of the representation, of V and of each Q"""
    representation: int = 32
    """width of a place psi(s)"""
    discount: float = 0.99
    """gamma, of both values, and of how far ahead their goals and the actor's directions lie"""
    distance_expectile: float = 0.999
    """tau of the representation: towards 1, the fewest steps that the data can do with"""
    p_random: float = 0.375
    """chance that a goal of the representation is any row of the dataset; otherwise it lies ahead in the episode"""
    target_rate: float = 0.005
    """how far the target networks move per update"""
    reach: int = 8
    """H: steps to a subgoal. Edges are at most this long, clusters half as wide, directions point no farther ahead"""
    efficiency: float = 0.99
    """states make nodes if where they get in H steps, and in H of distance, lie within an angle of this cosine"""
    expectile: float = 0.7
    """tau of the low value"""
    alpha: float = 1.0
    """weight of staying near the data"""

    stage_steps: ClassVar[tuple[str, ...]] = ("distance_steps", "steps")
    whole_goals = (
        "its map is one of states, and the distance between two of them is that of their places: what is known in part "
        "has no place there"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.reach >= 1, "reach must be at least 1")
        require(0.0 < self.distance_expectile < 1.0, "distance_expectile must lie between 0 and 1")
        require(-1.0 <= self.efficiency <= 1.0, "efficiency is a cosine: between -1 and 1")


class GAS(Agent):
    Config = GASConfig
    training_only = ("target_distance.", "value.", "critic.", "target_critic.")
    config: GASConfig

    def __init__(self, config: GASConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d_s, d_z = spec.observation_dim, config.representation
        self.distance = Metric(2, d_s, config.value_hidden, d_z)
        self.target_distance = target_of(self.distance)
        self.graph = Graph(d_z)
        self.value = Value(1, d_s + d_z, config.value_hidden)
        self.critic = Value(2, d_s + d_z + spec.action_dim, config.value_hidden)
        self.target_critic = target_of(self.critic)
        # The mean layer starts near zero: flax variance scale 1e-2.
        self.actor = MLP(d_s + d_z, config.hidden, spec.action_dim, final_scale=1e-2)
        self.distance_optimizer = torch.optim.Adam(self.distance.parameters(), lr=config.learning_rate, fused=True)
        follow(self.distance_optimizer, self.target_distance, self.distance, config.target_rate)
        learned = [p for net in (self.value, self.critic, self.actor) for p in net.parameters()]
        self.optimizer = torch.optim.Adam(learned, lr=config.learning_rate, fused=True)
        follow(self.optimizer, self.target_critic, self.critic, config.target_rate)

    # ------------------------------------------------------------------------------ the representation, and the map

    def distance_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Of V(s, g) = -|psi(s) - psi(g)| on r + gamma V'(s', g), V' the target: HIQL's loss (nn/values.py), with an
        expectile near one. V is about minus the number of steps, while those are few beside 1 / (1 - gamma)."""
        s, s_next, g = batch["observations"], batch["next_observations"], batch["goals"]
        return implicit_value_loss(
            "distance",
            self.distance,
            self.target_distance,
            (s, g),
            (s_next, g),
            batch["rewards"],
            batch["masks"],
            self.config.discount,
            self.config.distance_expectile,
        )

    @torch.no_grad()
    def places(self, observations: Tensor) -> Tensor:
        """psi(s) of all rows: (N, d_s) -> (N, d_z)."""
        return torch.cat([self.distance.place(part) for part in observations.split(BLOCK)])

    def build_graph(self, episodes: Episodes) -> None:
        """Nodes: centres of clusters of radius H / 2 of the states on straight ways. Edges: up to a distance of H, and
        the shortest that join what is left apart."""
        reach, places = self.config.reach, self.places(episodes.observations)
        if not bool(places.isfinite().all()):
            raise FloatingPointError("the representation has diverged: lower the learning rate")
        beyond = first_beyond(episodes, places, reach)
        places = places[efficient(places, episodes.end_of, beyond, reach, self.config.efficiency)]
        self.graph.build(centres(places, cluster(places, reach / 2)), reach)

    # --------------------------------------------------------------------------------------------- the low policy

    def value_loss(self, batch: Batch, z: Tensor) -> tuple[Tensor, Metrics]:
        """E[L_tau(min_j Q'_j(s, z, a) - V(s, z))], Q' the target critics, z any direction."""
        s = batch["observations"]
        with torch.no_grad():
            q = self.target_critic(s, z, batch["actions"]).amin(0)  # (B,)
        v = self.value(s, z).squeeze(0)  # (B,)
        loss = expectile(q - v, self.config.expectile).mean()
        return loss, {"value/loss": loss.detach(), **spread(v)}

    def critic_loss(self, batch: Batch, z: Tensor) -> tuple[Tensor, Metrics]:
        """Sum over j of E[(r + gamma V(s', z) - Q_j(s, z, a))^2], r = (psi(s') - psi(s))' z: how far the step went in
        this direction. V is the online one, and gets no gradient; there is no end."""
        with torch.no_grad():
            rewards = ((batch["next_places"] - batch["places"]) * z).sum(-1)  # (B,)
            target = rewards + self.config.discount * self.value(batch["next_observations"], z).squeeze(0)
        q = self.critic(batch["observations"], z, batch["actions"])  # (2, B)
        loss = mse(target - q).sum(0).mean()
        metrics = {"critic/loss": loss.detach(), "critic/target": target.mean(), "critic/reward": rewards.mean()}
        return loss, metrics

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """-E[Q(s, z, mu)] / E|Q| - alpha E[log pi(a | s, z)], Q = min_j Q_j, mu the mean cut to [-1, 1], z the
        direction from psi(s) to where the episode goes, no farther than H."""
        s, a, z = batch["observations"], batch["actions"], direction(batch["places"], batch["goal_places"])
        mean = self.actor(torch.cat([s, z], dim=-1))  # (B, d_a)
        with frozen(self.critic):
            q = self.critic(s, z, mean.clamp(-1.0, 1.0)).amin(0)  # (B,)
        loss = ddpg_bc(q, gaussian_nll(mean, a), self.config.alpha)
        return loss, {
            "actor/loss": loss.detach(),
            "actor/q": q.detach().mean(),
            "actor/mse": F.mse_loss(mean.detach(), a),
        }

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All three at once; no gradient passes between them. The values' directions are uniform on the sphere."""
        noise = torch.randn_like(batch["places"])
        z = direction(torch.zeros_like(noise), noise)  # (B, d_z)
        losses = (
            partial(self.value_loss, batch, z),
            partial(self.critic_loss, batch, z),
            partial(self.actor_loss, batch),
        )
        return all_at_once(losses, [*batch.values(), z])

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        pairs = RewardSamplerConfig(
            GoalLaw(0.0, 1.0 - config.p_random, config.p_random, config.discount), Rewards(shift=-1.0)
        )
        ahead = DirectionSamplerConfig(self.places, config.reach, config.discount)
        return (
            Stage(
                "distance",
                config.distance_steps,
                config.batch_size,
                pairs,
                self.distance_loss,
                (self.distance_optimizer,),
                finish=self.build_graph,
            ),
            Stage("policy", config.steps, config.batch_size, ahead, self.loss, (self.optimizer,)),
        )

    # ------------------------------------------------------------------------------------------------------ acting

    def subgoal(self, here: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        """Of places (n, d_z) on the way to places (n, d_z): which to head for (n, d_z), and what to remember.

        The way begins at the node within H from which it is shortest, the way there included; where there is none
        within H, it stays the one before (at first, the nearest). Its last node within H is the subgoal. Once a way has
        a single node, the goal itself is, to the end.
        """
        graph, reach = self.graph, self.config.reach
        away = graph.away(here)  # (n, m)
        if memory is None:
            distance, following = graph.routes(goal, reach)  # (n, m), (n, m + 1)
            start, final = away.argmin(1), torch.zeros(len(here), dtype=torch.bool, device=here.device)
        else:
            distance, following, start, final = (memory[k] for k in ("distance", "following", "start", "final"))
        near = away <= reach
        shortest = torch.where(near, away + distance, torch.inf).argmin(1)  # (n,)
        start = torch.where(near.any(1), shortest, start)
        final = final | (following.gather(1, start[:, None]).squeeze(1) == len(graph))
        close = torch.linalg.vector_norm(goal - here, dim=-1, keepdim=True) <= reach  # (n, 1)
        at = graph.farthest(start, following, torch.cat([near, close], dim=1))  # (n,), m for the goal
        direct = (final | (at == len(graph)))[:, None]
        target = torch.where(direct, goal, graph.nodes[at.clamp(max=len(graph) - 1)])
        return target, {"distance": distance, "following": following, "start": start, "final": final}

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """Without a graph, before the first stage is over, straight to the goal."""
        here, target = self.distance.place(torch.cat([observation, goal])).chunk(2)  # (n, d_z) each
        if len(self.graph):
            target, memory = self.subgoal(here, target, memory)
        z = direction(here, target)
        return self.actor(torch.cat([observation, z], dim=-1)).clamp(-1.0, 1.0), memory
