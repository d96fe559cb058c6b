"""IQL: implicit Q-learning (Kostrikov et al., 2022), as it is run on D4RL.

Idea. V is an upper expectile of Q over the data's actions, Q the one-step backup of V: the best that the data can do,
without asking for an action it does not have. The policy imitates, each action by how much better than V it is.
Paper. Offline Reinforcement Learning with Implicit Q-Learning, ICLR 2022.
Code. tinkoff-ai/CORL, algorithms/offline/iql.py at eeeeef2; its antmaze values are the authors' own.
Deviations. The policy's learning rate does not fall along a cosine: one schedule serves all networks of an update. The
reward is that of the state, not of the next one. With goals (GCIQL is OGBench's form of that) they stand beside the
state, and value and policy see the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from qhyer.agent import Agent, AgentConfig, Batch, Memory, Metrics, Stage
from qhyer.data.episodes import DataSpec
from qhyer.data.samplers import GoalLaw, Rewards, RewardSamplerConfig
from qhyer.losses import awr_weight, diagonal_nll, expectile, mse
from qhyer.nn.plain import Critics, plain
from qhyer.nn.values import follow, target_of


@dataclass(frozen=True)
class IQLConfig(AgentConfig):
    batch_size: int = 256
    hidden: tuple[int, ...] = (256, 256)
    """widths of the policy's hidden layers"""
    value_hidden: tuple[int, ...] = (256, 256)
    """widths of the hidden layers of V and of each Q"""
    discount: float = 0.99
    """of the value"""
    expectile: float = 0.7
    """tau: how far V leans to the best of the data"""
    temperature: float = 3.0
    """beta: weight of the advantage in imitation, exp(beta A)"""
    target_rate: float = 0.005
    """how far the target Q moves per update"""
    goal: Literal["concat", "none"] = "none"
    """the goal's coordinates beside the state, or one task for all"""
    tolerance: float = 0.0
    """a state this near to the goal, in its coordinates, is worth a reward; 0: the goal's own row alone"""
    dataset_rewards: bool = False
    """the dataset's own rewards instead of those of goals in hindsight"""
    reward_shift: float = 0.0
    """added to every reward: -1 in antmaze"""
    terminal: bool = True
    """nothing follows a goal; off where the task goes on, as in maze2d"""
    p_current: float = 0.2
    """chance that a goal is the state itself"""
    p_random: float = 0.3
    """chance that it is any row; otherwise it lies ahead, geometrically"""

    @property
    def reads_whole_goals(self) -> bool:
        return False


class IQL(Agent):
    Config = IQLConfig
    training_only = ("value.", "critic.", "target_critic.", "log_std")
    config: IQLConfig

    def __init__(self, config: IQLConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        state = spec.observation_dim + (spec.goal_dim if config.goal == "concat" else 0)
        self.value = Critics(1, state, config.value_hidden)
        self.critic = Critics(2, state + spec.action_dim, config.value_hidden)
        self.target_critic = target_of(self.critic)
        self.actor = nn.Sequential(plain(state, config.hidden, spec.action_dim), nn.Tanh())
        self.log_std = nn.Parameter(torch.zeros(spec.action_dim))
        learned = [p for net in (self.value, self.critic, self.actor) for p in net.parameters()]
        self.optimizer = torch.optim.Adam([*learned, self.log_std], lr=config.learning_rate, fused=True)
        follow(self.optimizer, self.target_critic, self.critic, config.target_rate)

    def state(self, observations: Tensor, goals: Tensor) -> Tensor:
        """Standardised, with the goal's coordinates where there are goals: (B, d)."""
        s = self.normalize(observations)
        return s if self.config.goal == "none" else torch.cat([s, self.normalize(goals)[:, self.goal_indices]], dim=-1)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """E[L_tau(A)], A = min_j Q'_j(s, a) - V(s); (1/2) sum_j E[(r + gamma V(s') - Q_j(s, a))^2]; and
        -E[min(exp(beta A), 100) log pi(a | s)]. No gradient passes between the three."""
        s, a = self.state(batch["observations"], batch["goals"]), batch["actions"]
        with torch.no_grad():
            best = self.target_critic(s, a).amin(0)  # (B,)
            next_v = self.value(self.state(batch["next_observations"], batch["goals"])).squeeze(0)
            target = batch["rewards"] + self.config.discount * batch["masks"] * next_v
        v = self.value(s).squeeze(0)  # (B,)
        advantage = best - v
        value = expectile(advantage, self.config.expectile).mean()
        critic = mse(target - self.critic(s, a)).mean()
        mean = self.actor(s)
        weight = awr_weight(advantage, self.config.temperature)
        actor = (weight * diagonal_nll(mean, self.log_std.clamp(-20.0, 2.0), a)).mean()
        metrics = {
            "value/loss": value,
            "value/mean": v.mean(),
            "critic/loss": critic,
            "critic/target": target.mean(),
            "actor/loss": actor,
            "actor/weight": weight.mean(),
            "actor/mse": mse(mean - a).mean(),
        }
        return value + critic + actor, {name: metric.detach() for name, metric in metrics.items()}

    def stages(self) -> tuple[Stage, ...]:
        config = self.config
        law = GoalLaw(config.p_current, 1.0 - config.p_current - config.p_random, config.p_random, config.discount)
        rewards = Rewards(config.tolerance, config.dataset_rewards, shift=config.reward_shift)
        sampler = RewardSamplerConfig(law, rewards, config.terminal)
        return (Stage("joint", config.steps, config.batch_size, sampler, self.loss, (self.optimizer,)),)

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        return self.actor(self.state(observation, goal)), None
