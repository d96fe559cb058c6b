"""RvS: reinforcement learning via supervised learning (Emmons et al., 2022).

Idea. No memory and no values: a large MLP imitates the action, given the state and what came of it, which is the goal
(RvS-G) or the mean reward per step still to come (RvS-R).
Paper. RvS: What is Essential for Offline RL via Supervised Learning?, ICLR 2022.
Code. scottemmons/rvs at 90c0ffb, read for its settings and its draws of goals.
Deviations. A goal lies ahead of a state drawn uniformly; the code draws pairs of times and calls the earlier one the
state, which favours early states. The gains of the orthogonal initial weights (sqrt 2, and 0.01 for the mean) are those
of the policy class it builds on, from memory. No part of the data is held out. The mean reward asked for is constant
while acting, as in the code; by default it is the greatest in a batch of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from qhyer.agent import Agent, AgentConfig, Batch, Memory, Metrics, Stage
from qhyer.agents._sequence import ReturnToGo
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw, Rewards, RewardSamplerConfig
from qhyer.losses import diagonal_nll
from qhyer.nn.plain import orthogonal, plain


@dataclass(frozen=True)
class RvSConfig(AgentConfig):
    steps: int = 20_000
    batch_size: int = 16_384
    learning_rate: float = 1e-3
    hidden: tuple[int, ...] = (1024, 1024)
    """widths of the hidden layers"""
    goal: Literal["concat", "none"] = "concat"
    """RvS-G: the goal's coordinates beside the state; or RvS-R: the mean reward per step to come"""
    tolerance: float = 0.0
    """a state this near to the goal, in its coordinates, is worth a reward; 0: the goal's own row alone"""
    dataset_rewards: bool = False
    """the dataset's own rewards instead of those of goals in hindsight"""
    target_return: float | None = None
    """mean reward per step asked for when acting; the greatest of a batch of the data when None"""
    p_random: float = 0.0
    """chance that a goal is any row; otherwise it lies ahead, uniformly"""

    @property
    def reads_whole_goals(self) -> bool:
        return False


class RvS(Agent):
    Config = RvSConfig
    config: RvSConfig

    def __init__(self, config: RvSConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        outcome = spec.goal_dim if config.goal == "concat" else 1
        self.actor = plain(spec.observation_dim + outcome, config.hidden, spec.action_dim)
        orthogonal(self.actor, 2.0**0.5, 0.01)
        self.log_std = nn.Parameter(torch.zeros(spec.action_dim))
        self.ask = ReturnToGo(1.0, config.target_return, config.tolerance)
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), self.log_std], lr=config.learning_rate, fused=True)

    def mean(self, observations: Tensor, goals: Tensor, averages: Tensor) -> Tensor:
        """The policy's mean (B, d_a); observations are raw, as in the code."""
        outcome = goals[:, self.goal_indices] if self.config.goal == "concat" else averages[:, None]
        return self.actor(torch.cat([observations, outcome], dim=-1))

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """-E[log pi(a | s, outcome)], a Gaussian whose deviations do not depend on the state."""
        averages = batch["averages"] if self.config.goal == "none" else torch.zeros_like(batch["rewards"])
        self.ask({"returns": averages, "valid": torch.ones_like(averages, dtype=torch.bool)})
        mean = self.mean(batch["observations"], batch["goals"], averages)
        loss = diagonal_nll(mean, self.log_std, batch["actions"]).mean()
        error = (mean - batch["actions"]).square().mean()
        return loss, {
            "actor/bc": loss.detach(),
            "actor/mse": error.detach(),
            "actor/std": self.log_std.exp().mean().detach(),
        }

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        law = GoalLaw(0.0, 1.0 - config.p_random, config.p_random)
        rewards = Rewards(config.tolerance, config.dataset_rewards)
        sampler = RewardSamplerConfig(law, rewards, average=config.goal == "none")
        return (
            Stage(
                "actor",
                config.steps,
                config.batch_size,
                sampler,
                self.loss,
                (self.optimizer,),
                after_step=self.ask.after_step,
            ),
        )

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        return self.mean(observation, goal, self.ask.target().expand(len(observation))).clamp(-1.0, 1.0), None
