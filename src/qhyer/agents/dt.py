"""DT: Decision Transformer (Chen et al., 2021).

Idea. Read an episode as a sequence of returns to go, states and actions, and imitate the actions; asked for a high
return, the model repeats what was done where one followed. Without values it cannot join halves of two episodes.
Paper. Decision Transformer: Reinforcement Learning via Sequence Modeling, NeurIPS 2021.
Code. kzl/decision-transformer, gym at e2d82e6; mazes as in tinkoff-ai/CORL, algorithms/offline/dt.py at eeeeef2.
Deviations. Windows lie within an episode and are shorter at its start, where the code pads on the left; the heads that
predict states and returns are left out, since the code does not train them; biases and norms are not decayed. Rewards
of goals in hindsight and a goal beside the state are options for data without rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qhyer.agents._sequence import ReturnConditioned, ReturnToGo, SequenceConfig, heads_fit, state_width
from qhyer.data.episodes import DataSpec
from qhyer.nn.backbones import gpt
from qhyer.nn.optim import adamw
from qhyer.nn.windows import WindowTokens


@dataclass(frozen=True)
class DTConfig(SequenceConfig):
    heads: int = 1
    """attention heads"""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads_fit(self.width, self.heads)


class DT(ReturnConditioned):
    Config = DTConfig
    config: DTConfig

    def __init__(self, config: DTConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d = config.width
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance)
        inputs = {"return": 1, "state": state_width(spec, config.goal), "action": spec.action_dim}
        self.tokens = WindowTokens(inputs, d, config.horizon, config.dropout)
        self.trunk = gpt(d, config.layers, config.heads, config.dropout, nn.ReLU)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        self.optimizer = adamw(self.parameters(), config.learning_rate, config.weight_decay)
