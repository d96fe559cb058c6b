"""CGDT: Critic-Guided Decision Transformer (Wang et al., 2024).

Idea. In a random world a high return may be luck. A critic that knows the distribution of returns after a history and
an action holds the policy to it: the action predicted for a return should be one that is expected to bring it.
Paper. Critic-Guided Decision Transformer for Offline Reinforcement Learning, AAAI 2024.
Code. sharkwyf/cgdt at aa6933c, read for its losses and sizes. The expectiles and the weight of guidance per task are
not in it.
Deviations. Inferred: tau_c, tau_p and alpha; the code's defaults (0.5, 0.5 and 0) switch the method off. Critic and
policy learn side by side, while alpha rises; the code trains the critic first. The policy is the mean alone, fitted by
squared error (one of the code's two ways). AdamW in place of LAMB. Padding counts nowhere. The target return is not
swept over at the end. Windows as DT's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qhyer import losses
from qhyer.agent import Batch, Metrics, Stage
from qhyer.agents._sequence import ReturnConditioned, ReturnToGo, SequenceConfig, heads_fit, state_width
from qhyer.data.episodes import DataSpec
from qhyer.errors import require
from qhyer.nn.backbones import gpt
from qhyer.nn.optim import adamw
from qhyer.nn.values import frozen
from qhyer.nn.windows import WindowTokens


@dataclass(frozen=True)
class CGDTConfig(SequenceConfig):
    steps: int = 80_000
    batch_size: int = 256
    width: int = 512
    layers: int = 4
    horizon: int = 0
    weight_decay: float = 5e-4
    heads: int = 4
    """attention heads"""
    acting_steps: int = 5
    """steps of history while acting"""
    critic_expectile: float = 0.5
    """tau_c: below 1/2 the critic leans to low returns"""
    policy_expectile: float = 0.5
    """tau_p: below 1/2 actions that promise more than was asked for are the worse ones"""
    alpha: float = 0.1
    """weight of guidance, once it has risen"""
    rise: int = 10_000
    """updates over which it does"""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads_fit(self.width, self.heads)
        for name in ("critic_expectile", "policy_expectile"):
            require(0.0 < getattr(self, name) < 1.0, f"{name} must lie between 0 and 1")
        require(self.acting_steps >= 1 and self.rise >= 1, "acting_steps and rise must be at least 1")


class CGDT(ReturnConditioned):
    Config = CGDTConfig
    training_only = ("critic.",)
    config: CGDTConfig

    def __init__(self, config: CGDTConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d, state = config.width, state_width(spec, config.goal)
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance)
        inputs = {"return": 1, "state": state, "action": spec.action_dim}
        self.tokens = WindowTokens(inputs, d, config.horizon, config.dropout)
        self.trunk = gpt(d, config.layers, config.heads, config.dropout, nn.ReLU)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        model = list(self.parameters())
        tokens = WindowTokens({"state": state, "action": spec.action_dim}, d, config.horizon, config.dropout)
        trunk = gpt(d, config.layers, config.heads, config.dropout, nn.ReLU)
        self.critic = nn.ModuleDict({"tokens": tokens, "trunk": trunk, "head": nn.Linear(d, 2)})
        self.optimizers = (
            adamw(model, config.learning_rate, config.weight_decay),
            adamw(self.critic.parameters(), config.learning_rate, config.weight_decay),
        )

    @property
    def acting_context(self) -> int:
        return min(self.config.acting_steps, self.config.context)

    def expected(self, states: Tensor, actions: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-deviation of the return after each state and action of a window: (B, K) each."""
        x = self.critic["tokens"]({"state": states, "action": actions}, times)
        numbers = self.critic["head"](self.critic["trunk"](x)[:, 1::2]).float()
        return numbers[..., 0], numbers[..., 1].clamp(-10.0, 2.0)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """With u = (R - mu) / sigma and |tau - 1(u < 0)| / max(tau, 1 - tau) =: w_tau(u):
        critic E[w_tau_c(u) (-log N(R; mu, sigma^2))], at the data's actions; policy (E[(a-hat - a)^2] + alpha
        E[w_tau_p(u) u^2]) / (1 + alpha), u at the predicted ones. No gradient passes between the two."""
        config, window = self.config, self.window(batch)
        share = losses.shares(batch["valid"])
        mean, log_std = self.expected(window.states, window.actions, window.times)
        u = (window.returns - mean) * torch.exp(-log_std)
        nll = losses.diagonal_nll(mean[..., None], log_std[..., None], window.returns[..., None])
        critic = losses.masked_mean(losses.asymmetry(u.detach(), config.critic_expectile) * nll, share)
        actions = self.predict(*window)
        imitation, metrics = self.imitation(batch, actions)
        with frozen(self.critic):
            mean, log_std = self.expected(window.states, actions, window.times)
        u = (window.returns - mean) * torch.exp(-log_std)
        guidance = losses.masked_mean(losses.asymmetry(u.detach(), config.policy_expectile) * u.square(), share)
        alpha = config.alpha * (self.ask.updates / config.rise).clamp(max=1.0)
        policy = (imitation + alpha * guidance) / (1.0 + alpha)
        more = {"critic/loss": critic.detach(), "actor/guidance": guidance.detach(), "actor/alpha": alpha.clone()}
        return critic + policy, metrics | more

    def stages(self) -> tuple[Stage, ...]:
        return self.learn(*self.optimizers, name="joint")
