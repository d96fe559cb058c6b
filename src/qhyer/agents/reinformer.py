"""Reinformer: max-return sequence modelling (Zhuang et al., 2024).

Idea. Nobody knows which return to ask for. Predict it: an upper expectile of the returns that the data have from this
state and history, the greatest that is in distribution; then act as where it came true.
Paper. Reinformer: Max-Return Sequence Modeling for Offline RL, ICML 2024.
Code. Dragon-Zhuang/Reinformer at 61eaed9, read for its tokens, losses and settings.
Deviations. AdamW in place of LAMB. Windows are drawn uniformly over their starts, where the code takes one per episode
and so lets one-step episodes swamp a batch. Means over padding are left out of the return's scale and the entropy. The
paper's K and expectile per task were not to be had: the code's defaults stand. The temperature is a parameter, and so
is saved. The state head, which the code does not train, is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qhyer import distributed, losses
from qhyer.agent import Batch, Memory, Metrics, Stage
from qhyer.agents._sequence import ReturnToGo, SequenceAgent, SequenceConfig, heads_fit, state_width
from qhyer.data.episodes import DataSpec
from qhyer.errors import require
from qhyer.nn.backbones import gpt
from qhyer.nn.optim import adamw
from qhyer.nn.windows import WindowTokens


@dataclass(frozen=True)
class ReinformerConfig(SequenceConfig):
    steps: int = 50_000
    batch_size: int = 128
    context: int = 5
    width: int = 256
    layers: int = 4
    warmup: int = 5_000
    heads: int = 8
    """attention heads"""
    expectile: float = 0.99
    """tau of the return regression: towards 1, the greatest return in the data"""
    temperature: float = 0.1
    """alpha at the start: weight of the policy's entropy, which then follows a target of -d_a"""
    reward_scale: float = 1.0
    """rewards are multiplied by it, then shifted"""
    reward_shift: float = 0.0
    """added to every reward: a return then counts the steps that are left, too"""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads_fit(self.width, self.heads)
        require(self.temperature > 0.0, "temperature must be positive")


class Reinformer(SequenceAgent):
    Config = ReinformerConfig
    config: ReinformerConfig

    def __init__(self, config: ReinformerConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d = config.width
        rewards = (config.reward_scale, config.reward_shift)
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance, *rewards)
        # The return comes after the state, which predicts it, and before the action, which it conditions.
        inputs = {"state": state_width(spec, config.goal), "return": 1, "action": spec.action_dim}
        self.tokens = WindowTokens(inputs, d, config.horizon)
        self.trunk = gpt(d, config.layers, config.heads, config.dropout, post_norm=True)
        self.return_head = nn.Linear(d, 1)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        self.log_std = nn.Parameter(torch.zeros(spec.action_dim))
        self.log_temperature = nn.Parameter(torch.tensor(config.temperature).log())
        model = [p for name, p in self.named_parameters() if name != "log_temperature"]
        self.optimizer = adamw(model, config.learning_rate, config.weight_decay)
        self.temperature_optimizer = torch.optim.Adam([self.log_temperature], lr=config.learning_rate, fused=True)

    def predict(self, states: Tensor, returns: Tensor, actions: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """A window -> R-hat at its states (B, T), which has not seen R, and the mean action at its returns."""
        x = self.tokens({"state": states, "return": returns, "action": actions}, times)
        h = self.trunk(x[:, :-1])  # the last action is the past of nothing
        best = self.return_head(self.tokens.read(h, "state")).squeeze(-1)
        return best, self.action_head(self.tokens.read(h, "return"))

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """E[L_tau(u)], u = (R - R-hat) / E|R|, and -E[log pi(a)] - alpha H, alpha such that H is -d_a."""
        window = self.window(batch)
        best, mean = self.predict(*window)
        share = losses.shares(batch["valid"])
        size = distributed.mean(losses.masked_mean(window.returns.abs(), share)).clamp(min=1e-6)
        u = (window.returns - best) / size
        regression = losses.masked_mean(losses.expectile(u, self.config.expectile), share)
        log_std = self.log_std.clamp(-20.0, 2.0)
        nll = losses.masked_mean(losses.diagonal_nll(mean, log_std, batch["actions"]), share)
        entropy = (log_std + 0.5 * math.log(2.0 * math.pi * math.e)).sum()
        alpha = self.log_temperature.exp()
        temperature = alpha * (entropy + self.spec.action_dim).detach()
        loss = regression + nll - alpha.detach() * entropy + temperature
        metrics = {
            "actor/nll": nll,
            "actor/mse": losses.masked_mean((mean - batch["actions"]).square().mean(-1), share),
            "actor/entropy": entropy,
            "actor/temperature": alpha,
            "return/loss": regression,
            "return/hat_minus_return": losses.masked_mean(-u, share) * size,
        }
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def stages(self) -> tuple[Stage, ...]:
        return self.learn(
            self.optimizer, self.temperature_optimizer, rewards=(self.config.reward_scale, self.config.reward_shift)
        )

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        """Predicts the return at the state, writes it into the return's token, reads the action there: two passes.

        `target_return`, if there is one, takes the place of the prediction, and is counted down as DT's.
        """
        window = self.recall(observation, goal, memory)
        if self.config.target_return is None:
            best, _ = self.predict(*window)
            returns = torch.cat([window.returns[:, :-1], best[:, -1:]], dim=1)
            window = window._replace(returns=returns)
        _, mean = self.predict(*window)
        action = mean[:, -1].clamp(-1.0, 1.0)
        return action, self.remember(window, observation, goal, action, memory)
