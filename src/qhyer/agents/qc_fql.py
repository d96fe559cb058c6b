"""QC-FQL: flow Q-learning over chunks of actions (Li, Zhou and Levine, 2025), here towards goals.

Idea. A critic judges h actions at once and its backup spans h steps, without the bias of an h-step return whose later
actions another policy chose. What keeps the policy near the data is a flow that imitates their chunks, which may go
several ways: an actor makes a chunk of noise in one step, stays near what the flow makes of the same noise, and climbs
the critic. A chunk is carried out to its end.
Paper. Reinforcement Learning with Action Chunking, NeurIPS 2025 (arXiv 2507.07969).
Code. ColinQiyangLi/qc, agents/acfql.py (actor_type distill-ddpg) at 48283b4.
Deviations. The authors learn one task from its rewards. Here every network sees the goal, rewards are -1 until the
goal's own row and 0 there, and a chunk ends at its goal: neither rewards nor bootstrapping after it; goals follow the
laws of OGBench's GCIQL, with uniform future ones for the actor (inferred). When acting, noise comes from a fixed table.
Steps beyond an episode's end repeat its last action (there, they are the next episode's); both count as none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qhyer.agent import Batch, Metrics
from qhyer.agents._chunks import ChunkAgent, ChunkConfig
from qhyer.data.episodes import DataSpec
from qhyer.losses import discounted, mse
from qhyer.nn.matching import fresh
from qhyer.nn.values import Value, spread, target_of
from qhyer.streams import all_at_once


@dataclass(frozen=True)
class QCFQLConfig(ChunkConfig):
    """The authors' settings, as they are."""


class QCFQL(ChunkAgent):
    Config = QCFQLConfig
    training_only = ("flow.", "critic.", "target_critic.")
    config: QCFQLConfig

    def __init__(self, config: QCFQLConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        self.critic = Value(2, self.pair + self.size, config.value_hidden)
        self.target_critic = target_of(self.critic)
        self.learn(self.critic, self.target_critic)

    def q(self, observations: Tensor, goals: Tensor, chunks: Tensor) -> Tensor:
        return self.critic(observations, goals, chunks).mean(0)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Mean over j of E[(y - Q_j(s, g, a))^2], y = sum_u gamma^u r_u + gamma^h mean_j Q'_j(s_h, g, mu(s_h, g, z)):
        Q' the target critics, a the chunk, s_h the state after it; chunks that an episode's end cuts count as none."""
        s_h, g, gamma = batch["next_observations"], batch["value_goals"], self.config.discount
        with torch.no_grad():
            chunks = self.propose(fresh(batch["actions"]), s_h, g).clamp(-1.0, 1.0)  # (B, h d_a)
            after = self.target_critic(s_h, g, chunks).mean(0)  # (B,)
            y = discounted(batch["rewards"], gamma) + gamma**self.config.chunk * batch["masks"] * after
        q = self.critic(batch["observations"], g, batch["actions"])  # (2, B)
        loss = (mse(y - q) * batch["valid"][..., -1]).mean()
        return loss, {"critic/loss": loss.detach(), "critic/target": y.mean(), **spread(q, "critic")}

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All three at once; no gradient passes between them."""
        losses = (self.critic_loss, self.flow_loss, self.actor_loss)
        return all_at_once([partial(loss, batch) for loss in losses], batch.values())
