"""CQL: conservative Q-learning (Kumar et al., 2020), as it is run on D4RL.

Idea. Soft actor-critic on fixed data fails where Q is too high for actions nobody took. Push Q down on sampled actions
and up on the data's, until the difference is small.
Paper. Conservative Q-Learning for Offline Reinforcement Learning, NeurIPS 2020.
Code. tinkoff-ai/CORL, algorithms/offline/cql.py at eeeeef2, with its settings for mazes.
Deviations. Observations are standardised everywhere (in antmaze CORL leaves them raw); no warm start by imitation. The
reward is that of the state, not of the next one. With goals they stand beside the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qhyer.agent import Agent, AgentConfig, Batch, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw, Rewards, RewardSamplerConfig
from qhyer.errors import require
from qhyer.losses import mse
from qhyer.nn.conservative import Conservative
from qhyer.nn.values import follow


@dataclass(frozen=True)
class CQLConfig(AgentConfig):
    batch_size: int = 256
    policy_learning_rate: float = 3e-5
    """of the policy and its temperature; `learning_rate` is the critics'"""
    hidden: tuple[int, ...] = (256, 256, 256)
    """widths of the policy's hidden layers"""
    value_hidden: tuple[int, ...] = (256, 256, 256)
    """widths of the hidden layers of each Q"""
    discount: float = 0.99
    """of the value"""
    weight: float = 10.0
    """w of the penalty"""
    gap: float = 5.0
    """how large the penalty may be; its multiplier rises above, and falls below"""
    samples: int = 10
    """actions drawn of each of three kinds"""
    best_backup: bool = False
    """the best of as many next actions is backed up, instead of one"""
    floor: float | None = None
    """the penalty is cut there"""
    target_rate: float = 0.005
    """how far the target Q moves per update"""
    goal: Literal["concat", "none"] = "none"
    """the goal's coordinates beside the state, or one task for all"""
    tolerance: float = 0.0
    """a state this near to the goal, in its coordinates, is worth a reward; 0: the goal's own row alone"""
    dataset_rewards: bool = False
    """the dataset's own rewards instead of those of goals in hindsight"""
    reward_scale: float = 1.0
    """rewards are multiplied by it, then shifted"""
    reward_shift: float = 0.0
    """added to every reward"""
    terminal: bool = True
    """nothing follows a goal; off where the task goes on, as in maze2d"""
    p_current: float = 0.2
    """chance that a goal is the state itself"""
    p_random: float = 0.3
    """chance that it is any row; otherwise it lies ahead, geometrically"""

    @property
    def reads_whole_goals(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.samples >= 1 and self.weight > 0.0, "samples and weight must be positive")
        require(self.policy_learning_rate > 0.0, "policy_learning_rate must be positive")


class CQL(Agent):
    Config = CQLConfig
    config: CQLConfig

    def __init__(self, config: CQLConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        self.learner = Conservative(
            spec.observation_dim + (spec.goal_dim if config.goal == "concat" else 0),
            spec.action_dim,
            config.hidden,
            config.value_hidden,
            config.discount,
            config.weight,
            config.gap,
            config.samples,
            config.best_backup,
            -math.inf if config.floor is None else config.floor,
        )
        self.optimizers = (
            torch.optim.Adam(self.learner.critic_parameters(), lr=config.learning_rate, fused=True),
            torch.optim.Adam(self.learner.actor_parameters(), lr=config.policy_learning_rate, fused=True),
        )
        follow(self.optimizers[0], self.learner.target_critic, self.learner.critic, config.target_rate)

    def state(self, observations: Tensor, goals: Tensor) -> Tensor:
        """Standardised, with the goal's coordinates where there are goals: (B, d)."""
        s = self.normalize(observations)
        return s if self.config.goal == "none" else torch.cat([s, self.normalize(goals)[:, self.goal_indices]], dim=-1)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """All of nn/conservative.py, where the formulas stand."""
        s = self.state(batch["observations"], batch["goals"])
        next_s = self.state(batch["next_observations"], batch["goals"])
        loss, metrics = self.learner(s, batch["actions"], batch["rewards"], batch["masks"], next_s)
        with torch.no_grad():
            metrics["actor/mse"] = mse(self.learner.policy.mode(s) - batch["actions"]).mean()
        return loss, metrics

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        law = GoalLaw(config.p_current, 1.0 - config.p_current - config.p_random, config.p_random, config.discount)
        rewards = Rewards(config.tolerance, config.dataset_rewards, config.reward_scale, config.reward_shift)
        sampler = RewardSamplerConfig(law, rewards, config.terminal)
        return (Stage("joint", config.steps, config.batch_size, sampler, self.loss, self.optimizers),)

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        return self.learner.policy.mode(self.state(observation, goal)), None

    def acting_state(self) -> dict[str, Tensor]:
        """The policy alone."""
        state = super().acting_state().items()
        return {name: value for name, value in state if not name.startswith("learner.") or ".policy." in name}
