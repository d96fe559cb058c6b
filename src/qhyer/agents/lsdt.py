"""LSDT: Long-Short Decision Transformer (Wang et al., 2025).

Idea. Some channels go through attention, for what is far back, the others through a convolution whose kernel each token
makes for itself, for what is near; a gate weighs the channels of both.
Paper. Long-Short Decision Transformer: Bridging Global and Local Dependencies for Generalized Decision-Making, ICLR
2025.
Code. WangJinCheng1998/LSDT (its commit was not noted), read for its block, its goals beside states and its settings.
Deviations. One dropout rate for all (the code has 0.1, 0.2 and 0.25). A kernel of the code has 11 taps around the
token, of which the causal cut leaves 6: only those exist here. The goal beside the state lies ahead of the window in
its episode, where the code takes the goal that steered the collection. Windows as DT's.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qhyer.agent import Stage
from qhyer.agents._sequence import (
    Goal,
    ReturnConditioned,
    ReturnToGo,
    SequenceConfig,
    heads_fit,
    state_width,
)
from qhyer.data.episodes import DataSpec
from qhyer.errors import require
from qhyer.nn.backbones import long_short
from qhyer.nn.optim import adamw
from qhyer.nn.windows import WindowTokens


@dataclass(frozen=True)
class LSDTConfig(SequenceConfig):
    goal: Goal = "concat"
    dropout: float = 0.25
    heads: int = 2
    """attention heads"""
    conv_share: float = 0.5
    """xi: share of the channels that the convolution gets"""
    taps: int = 6
    """tokens a kernel spans, the token itself included"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 < self.conv_share < 1.0, "conv_share must lie between 0 and 1: both branches need channels")
        require(self.taps >= 1, "taps must be at least 1")
        heads_fit(self.width - round(self.conv_share * self.width), self.heads)


class LSDT(ReturnConditioned):
    Config = LSDTConfig
    config: LSDTConfig

    def __init__(self, config: LSDTConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d = config.width
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance)
        inputs = {"return": 1, "state": state_width(spec, config.goal), "action": spec.action_dim}
        short = round(config.conv_share * d)
        self.tokens = WindowTokens(inputs, d, config.horizon)
        self.trunk = long_short(d, config.layers, config.heads, config.dropout, short, config.taps)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        self.optimizer = adamw(self.parameters(), config.learning_rate, config.weight_decay)

    def stages(self) -> tuple[Stage, ...]:
        return self.learn(self.optimizer, cosine=True)
