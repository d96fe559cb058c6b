"""VDT: value-guided Decision Transformer.

Idea. Values learned as IQL learns them say which of the data's actions to imitate more, pull the predicted actions up,
and choose, when acting, between what several target returns suggest.
Paper. Value-Guided Decision Transformer: A Unified Reinforcement Learning Framework for Online and Offline Settings,
NeurIPS 2025.
Code. ruthless-man/VDT at 6726f55, read for its critics, its policy's loss and its settings (gym; there are none for
mazes).
Deviations. Inferred: imitation is weighted by exp(beta A), as the paper is described; the released code has beta and
does not use it. The values' backup is one step, as in the code, where the paper is said to have n. One critic step per
policy step (the code: a hundred), the learning rate constant. When acting, the critic at the current step chooses; the
code rolls candidates forward in a copy of the simulator, which no agent here has. Returns are not divided by a discount
on the way, as the code's are. Next observations are standardised for the critic, too. Windows as DT's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qhyer import losses
from qhyer.agent import Batch, Memory, Metrics, Stage
from qhyer.agents._sequence import ChoosesByValue, ReturnToGo, SequenceConfig, heads_fit, state_width
from qhyer.data.episodes import DataSpec
from qhyer.nn.backbones import gpt
from qhyer.nn.optim import adamw
from qhyer.nn.plain import Critics
from qhyer.nn.values import follow, target_of
from qhyer.nn.windows import WindowTokens


@dataclass(frozen=True)
class VDTConfig(SequenceConfig):
    steps: int = 10_000
    batch_size: int = 2048
    learning_rate: float = 3e-4
    width: int = 256
    layers: int = 6
    warmup: int = 0
    heads: int = 4
    """attention heads"""
    value_hidden: tuple[int, ...] = (256, 256)
    """widths of the hidden layers of V and of each Q"""
    discount: float = 0.99
    """of the value"""
    expectile: float = 0.7
    """tau: how far V leans to the best of the data"""
    temperature: float = 3.0
    """beta: weight of the advantage in imitation, exp(beta A)"""
    eta: float = 1.0
    """weight of climbing Q"""
    target_rate: float = 0.005
    """how far the target Q moves per update"""
    candidates: int = 10
    """target returns tried at each step when acting"""
    reward_shift: float = 0.0
    """added to every reward: -1 in antmaze"""
    terminal: bool = True
    """nothing follows a goal; off where the task goes on, as in maze2d"""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads_fit(self.width, self.heads)


class VDT(ChoosesByValue):
    Config = VDTConfig
    training_only = ("value.", "critic.")  # the target critics choose
    config: VDTConfig

    def __init__(self, config: VDTConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d, state = config.width, state_width(spec, config.goal)
        self.ask = ReturnToGo(
            config.return_scale, config.target_return, config.tolerance, reward_shift=config.reward_shift
        )
        inputs = {"return": 1, "state": state, "action": spec.action_dim}
        self.tokens = WindowTokens(inputs, d, config.horizon, config.dropout)
        self.trunk = gpt(d, config.layers, config.heads, config.dropout, nn.ReLU)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        model = list(self.parameters())
        self.value = Critics(1, state, config.value_hidden, nn.Mish)
        self.critic = Critics(2, state + spec.action_dim, config.value_hidden, nn.Mish)
        self.target_critic = target_of(self.critic)
        values = [*self.value.parameters(), *self.critic.parameters()]
        self.optimizers = (
            adamw(model, config.learning_rate, config.weight_decay),
            torch.optim.Adam(values, lr=config.learning_rate, fused=True),
        )
        follow(self.optimizers[1], self.target_critic, self.critic, config.target_rate)

    def value_loss(self, batch: Batch, states: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        """IQL's two losses at the valid steps, and the advantage A = min_j Q'_j(s, a) - V(s) there (B, K)."""
        share = losses.shares(batch["valid"])
        going = 1.0 - batch["reached"] * float(self.config.terminal)
        with torch.no_grad():
            best = self.target_critic(states, batch["actions"]).amin(0)  # (B, K)
            next_v = self.value(self.states(batch["next_observations"], batch["goals"])).squeeze(0)
            target = batch["rewards"] + self.config.discount * going * next_v
        v = self.value(states).squeeze(0)
        value = losses.masked_mean(losses.expectile(best - v, self.config.expectile), share)
        error = losses.mse(target - self.critic(states, batch["actions"])).sum(0)
        critic = losses.masked_mean(error, share)
        metrics = {"value/loss": value, "value/mean": losses.masked_mean(v, share), "critic/loss": critic}
        return value + critic, (best - v).detach(), {name: metric.detach() for name, metric in metrics.items()}

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """The values', and E[min(exp(beta A), 100) (a-hat - a)^2] - eta E[Q_i(s, a-hat)] / E|Q_j|, i and j the critics
        in an order that a coin decides; no gradient passes between the two losses."""
        window = self.window(batch)
        values, advantage, value_metrics = self.value_loss(batch, window.states)
        actions = self.predict(*window)
        share = losses.shares(batch["valid"])
        _, metrics = self.imitation(batch, actions.detach())
        weight = losses.awr_weight(advantage, self.config.temperature)
        imitation = losses.masked_mean(weight * losses.mse(actions - batch["actions"]).mean(-1), share)
        climb, q = self.climb(window.states, actions, share)
        more = {
            "actor/weighted": imitation.detach(),
            "actor/weight": losses.masked_mean(weight, share),
            "actor/q": q,
        }
        return values + imitation + self.config.eta * climb, metrics | value_metrics | more

    def stages(self) -> tuple[Stage, ...]:
        return self.learn(*self.optimizers, name="joint", rewards=(1.0, self.config.reward_shift))

    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """Several target returns; of their actions the one with the highest min_j Q'_j."""
        return self.choose(observation, goal, memory, self.config.candidates)
