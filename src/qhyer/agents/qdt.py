"""QDT: Q-learning Decision Transformer (Yamagata et al., 2023).

Idea. A return says what happened, not what could have. Where a conservative value promises more than the logged return,
put it in its place, and train Decision Transformer on the corrected returns: they stitch.
Paper. Q-learning Decision Transformer: Leveraging Dynamic Programming for Conditional Sequence Modelling in Offline RL,
ICML 2023.
Code. takuyamagata/qdt_simple at 5d2f757 (a toy problem). Its D4RL settings were not to be had: critic sizes and penalty
are CORL's for CQL, the model's are DT's.
Deviations. Inferred: V(s) is Q at the policy's mode, in place of the toy's maximum over actions. Value and model learn
side by side, each window relabelled as it is drawn; the paper trains the value first. Since a goal in hindsight has a
return of its own, the backward sweep starts `sweep` steps after the window, from the logged return there, instead of at
the episode's end. As in the code, within a window only the last return is corrected, the others follow from rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qhyer.agent import Batch, Metrics, Stage
from qhyer.agents._sequence import ReturnConditioned, ReturnToGo, SequenceConfig, heads_fit, state_width
from qhyer.data.episodes import DataSpec
from qhyer.errors import require
from qhyer.nn.backbones import gpt
from qhyer.nn.conservative import Conservative
from qhyer.nn.optim import adamw
from qhyer.nn.values import follow
from qhyer.nn.windows import WindowTokens


@dataclass(frozen=True)
class QDTConfig(SequenceConfig):
    heads: int = 1
    """attention heads"""
    sweep: int = 20
    """steps after the window over which values may take the place of returns"""
    value_learning_rate: float = 3e-4
    """of the critics"""
    policy_learning_rate: float = 3e-5
    """of the policy that the critics are asked about"""
    hidden: tuple[int, ...] = (256, 256, 256)
    """widths of that policy's hidden layers"""
    value_hidden: tuple[int, ...] = (256, 256, 256)
    """widths of the hidden layers of each Q"""
    discount: float = 0.99
    """of the value; returns have none"""
    weight: float = 10.0
    """w of the conservative penalty"""
    gap: float = 5.0
    """how large that penalty may be"""
    samples: int = 10
    """actions drawn of each of three kinds"""
    target_rate: float = 0.005
    """how far the target Q moves per update"""
    terminal: bool = True
    """nothing follows a goal; off where the task goes on, as in maze2d"""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads_fit(self.width, self.heads)
        require(self.sweep >= 1 and self.samples >= 1, "sweep and samples must be at least 1")


def sweep(values: Tensor, rewards: Tensor, returns: Tensor, valid: Tensor) -> Tensor:
    """max(R-hat, V) at the first of M rows, all (B, M): R-hat = r + max(R-hat, V) of the next, backwards from the last
    row, where R-hat is the logged return; beyond an episode's end there is neither."""
    better = torch.maximum(returns[:, -1], values[:, -1])
    best = torch.where(valid[:, -1], better, returns[:, -1])
    for m in range(rewards.shape[1] - 2, -1, -1):
        following = torch.where(valid[:, m + 1], rewards[:, m] + best, returns[:, m])
        best = torch.where(valid[:, m], torch.maximum(following, values[:, m]), returns[:, m])
    return best


class QDT(ReturnConditioned):
    Config = QDTConfig
    training_only = ("learner.",)
    config: QDTConfig

    def __init__(self, config: QDTConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d, state = config.width, state_width(spec, config.goal)
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance)
        self.tokens = WindowTokens(
            {"return": 1, "state": state, "action": spec.action_dim}, d, config.horizon, config.dropout
        )
        self.trunk = gpt(d, config.layers, config.heads, config.dropout, nn.ReLU)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        model = list(self.parameters())
        self.learner = Conservative(
            state,
            spec.action_dim,
            config.hidden,
            config.value_hidden,
            config.discount,
            config.weight,
            config.gap,
            config.samples,
            best_backup=False,
        )
        self.optimizers = (
            adamw(model, config.learning_rate, config.weight_decay),
            torch.optim.Adam(self.learner.critic_parameters(), lr=config.value_learning_rate, fused=True),
            torch.optim.Adam(self.learner.actor_parameters(), lr=config.policy_learning_rate, fused=True),
        )
        follow(self.optimizers[1], self.learner.target_critic, self.learner.critic, config.target_rate)

    @torch.no_grad()
    def relabelled(self, batch: Batch) -> Tensor:
        """Returns to go (B, K) with what comes after the window corrected: never less than logged."""
        values = self.learner.value(self.states(batch["ahead_observations"], batch["goals"]))  # (B, M)
        logged = batch["ahead_returns"]
        best = sweep(values, batch["ahead_rewards"], logged, batch["ahead_valid"])
        return batch["returns"] + (best - logged[:, 0])[:, None]

    def value_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Conservative Q-learning on one valid step of each window."""
        valid = batch["valid"]
        pick = (torch.rand(len(valid), device=valid.device) * valid.sum(1)).long()  # (B,)
        rows = torch.arange(len(valid), device=valid.device)
        s = self.states(batch["observations"][rows, pick][:, None], batch["goals"])[:, 0]
        next_s = self.states(batch["next_observations"][rows, pick][:, None], batch["goals"])[:, 0]
        masks = 1.0 - batch["reached"][rows, pick] * float(self.config.terminal)
        return self.learner(s, batch["actions"][rows, pick], batch["rewards"][rows, pick], masks, next_s)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """The value's, and DT's on corrected returns; no gradient passes between them."""
        value, value_metrics = self.value_loss(batch)
        corrected = batch | {"returns": self.relabelled(batch)}
        loss, metrics = self.imitation(corrected, self.predict(*self.window(corrected)))
        metrics["return/gain"] = (corrected["returns"] - batch["returns"])[:, 0].mean()
        renamed = {name.replace("actor/", "policy/"): metric for name, metric in value_metrics.items()}
        return loss + value, metrics | renamed

    def stages(self) -> tuple[Stage, ...]:
        return self.learn(*self.optimizers, name="joint", ahead=self.config.sweep)
