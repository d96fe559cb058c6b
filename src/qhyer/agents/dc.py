"""DC: Decision ConvFormer (Kim et al., 2024).

Idea. Decision Transformer with a short convolution in place of attention: two steps back is where the next action of a
Markov process is decided, and each kind of token has its own filter.
Paper. Decision ConvFormer: Local Filtering in MetaFormer is Sufficient for Decision Making, ICLR 2024.
Code. beanie00/Decision-ConvFormer at 3db9b9e, read for its settings and its convolution.
Deviations. Those of DT: windows within an episode instead of padding on the left (which the code does not mask, and
fills differently in training and evaluation). The option without action tokens is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qhyer.agents._sequence import ReturnConditioned, ReturnToGo, SequenceConfig, state_width
from qhyer.data.episodes import DataSpec
from qhyer.nn.backbones import convformer
from qhyer.nn.optim import adamw
from qhyer.nn.windows import WindowTokens


@dataclass(frozen=True)
class DCConfig(SequenceConfig):
    context: int = 8
    learning_rate: float = 1e-3
    taps: int = 6
    """tokens a filter spans, the token itself included: two steps"""


class DC(ReturnConditioned):
    Config = DCConfig
    config: DCConfig

    def __init__(self, config: DCConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d = config.width
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance)
        inputs = {"return": 1, "state": state_width(spec, config.goal), "action": spec.action_dim}
        self.tokens = WindowTokens(inputs, d, config.horizon, config.dropout)
        self.trunk = convformer(d, config.layers, config.dropout, taps=config.taps)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        self.optimizer = adamw(self.parameters(), config.learning_rate, config.weight_decay)
