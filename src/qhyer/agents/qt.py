"""QT: Q-value regularised transformer (Hu et al., 2024).

Idea. Decision Transformer imitates; add a critic learned by n-step backups along the window, and let the predicted
actions climb it. When acting, ask for several returns and take the action the critic likes best.
Paper. Q-value Regularized Transformer for Offline Reinforcement Learning, ICML 2024.
Code. charleshsc/QT at cb9e1a4, read for its losses, its choice of actions and its settings.
Deviations. The slow copy of the actor moves a little at every update (the code: every fifth, after the first thousand).
The candidates' targets are evenly spaced, without noise, and the best is taken, where the code has a list per task,
noise, one more candidate that asks for Q itself, and draws. The learning rate falls by the update, not by the epoch.
The best checkpoint is not picked by test return. Windows as DT's.
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
class QTConfig(SequenceConfig):
    steps: int = 500_000
    batch_size: int = 256
    learning_rate: float = 3e-4
    width: int = 256
    layers: int = 4
    warmup: int = 0
    grad_clip: float = 9.0
    heads: int = 4
    """attention heads"""
    value_hidden: tuple[int, ...] = (256, 256, 256)
    """widths of the hidden layers of each Q"""
    discount: float = 0.99
    """of the value"""
    eta: float = 1.0
    """weight of climbing Q"""
    weight_bc: float = 1.0
    """weight of imitation, and of predicting the next state"""
    target_rate: float = 0.005
    """how far the target Q moves per update"""
    actor_rate: float = 0.001
    """how far the slow actor moves per update: 0.005 every fifth"""
    candidates: int = 10
    """target returns tried at each step when acting"""
    reward_scale: float = 1.0
    """rewards are multiplied by it, then shifted"""
    reward_shift: float = 0.0
    """added to every reward"""
    terminal: bool = True
    """nothing follows a goal; off where the task goes on, as in maze2d"""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads_fit(self.width, self.heads)


def n_step(rewards: Tensor, going: Tensor, last: Tensor, bootstrap: Tensor, discount: float) -> Tensor:
    """y_i = r_i + gamma m_i y_{i+1} before the last step T, and y_T the bootstrap: rewards, going (m) (B, K), last (B,)
    the index T, bootstrap (B,) -> (B, K); what is after T means nothing."""
    y, targets = bootstrap, []
    for i in range(rewards.shape[1] - 1, -1, -1):
        y = torch.where(last <= i, bootstrap, rewards[:, i] + discount * going[:, i] * y)
        targets.append(y)
    return torch.stack(targets[::-1], dim=1)


class QT(ChoosesByValue):
    Config = QTConfig
    training_only = ("slow.", "state_head.", "critic.")  # the target critics choose
    config: QTConfig

    def __init__(self, config: QTConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d, state = config.width, state_width(spec, config.goal)
        rewards = (config.reward_scale, config.reward_shift)
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance, *rewards)
        inputs = {"return": 1, "state": state, "action": spec.action_dim}
        self.tokens = WindowTokens(inputs, d, config.horizon, config.dropout)
        self.trunk = gpt(d, config.layers, config.heads, config.dropout, nn.ReLU)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        acting = nn.ModuleDict({"tokens": self.tokens, "trunk": self.trunk, "action_head": self.action_head})
        self.slow = target_of(acting)
        self.state_head = nn.Linear(d, spec.observation_dim)
        model = [p for p in self.parameters() if p.requires_grad]
        self.critic = Critics(2, state + spec.action_dim, config.value_hidden, nn.Mish)
        self.target_critic = target_of(self.critic)
        self.optimizers = (
            adamw(model, config.learning_rate, config.weight_decay),
            torch.optim.Adam(self.critic.parameters(), lr=config.learning_rate, fused=True),
        )
        follow(self.optimizers[0], self.slow, acting, config.actor_rate)
        follow(self.optimizers[1], self.target_critic, self.critic, config.target_rate)

    def train(self, mode: bool = True) -> QT:
        """The slow actor never drops out."""
        super().train(mode)
        self.slow.eval()
        return self

    def critic_loss(self, batch: Batch, states: Tensor, slow_actions: Tensor) -> tuple[Tensor, Metrics]:
        """Sum over j of E[(y_i - Q_j(s_i, a_i))^2] at all valid steps but the last, from whose value the others are
        backed up: min_j Q'_j at the action of the slow actor (its reward alone where nothing follows it)."""
        valid = batch["valid"]
        going = 1.0 - batch["reached"] * float(self.config.terminal)  # (B, K)
        last, rows = valid.sum(1) - 1, torch.arange(len(valid), device=valid.device)
        with torch.no_grad():
            value = self.target_critic(states[rows, last], slow_actions[rows, last].float()).amin(0)  # (B,)
            there = batch["rewards"][rows, last]
            bootstrap = torch.where(going[rows, last] > 0, value, there)
            target = n_step(batch["rewards"], going, last, bootstrap, self.config.discount)
        before = valid & (torch.arange(valid.shape[1], device=valid.device) < last[:, None])
        q = self.critic(states, batch["actions"])  # (2, B, K)
        loss = losses.masked_mean(losses.mse(target - q).sum(0), losses.shares(before))
        return loss, {"critic/loss": loss.detach(), "critic/mean": q.mean().detach()}

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """The critic's, and eta_2 (MSE of actions + MSE of next states) - eta E[Q_i(s, a-hat)] / E|Q_j|, i and j the
        critics in an order that a coin decides; no gradient passes between the two losses."""
        config, window = self.config, self.window(batch)
        x = self.tokens({"return": window.returns, "state": window.states, "action": window.actions}, window.times)
        h = self.trunk(x)
        actions = self.action_head(self.tokens.read(h, "state"))
        next_states = self.state_head(self.tokens.read(h, "action"))
        with torch.no_grad():
            tokens, trunk, head = (self.slow[name] for name in ("tokens", "trunk", "action_head"))
            values = {"return": window.returns, "state": window.states, "action": window.actions}
            slow_actions = head(self.tokens.read(trunk(tokens(values, window.times)), "state"))
        critic, critic_metrics = self.critic_loss(batch, window.states, slow_actions)
        share = losses.shares(batch["valid"])
        imitation, metrics = self.imitation(batch, actions)
        change = losses.mse(next_states - self.normalize(batch["next_observations"])).mean(-1)
        change = losses.masked_mean(change, share)
        climb, q = self.climb(window.states, actions, share)
        total = config.weight_bc * (imitation + change) + config.eta * climb + critic
        more = {"state/mse": change.detach(), "actor/q": q}
        return total, metrics | critic_metrics | more

    def stages(self) -> tuple[Stage, ...]:
        return self.learn(
            *self.optimizers, name="joint", rewards=(self.config.reward_scale, self.config.reward_shift), cosine=True
        )

    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """Several target returns; of their actions the one with the highest min_j Q'_j."""
        return self.choose(observation, goal, memory, self.config.candidates)
