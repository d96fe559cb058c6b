"""DMamba: Decision Mamba (Ota, 2024).

Idea. Decision Transformer with a Mamba mixer in place of attention; norms, MLPs, tokens and loss stay.
Paper. Decision Mamba: Reinforcement Learning via Sequence Modeling with Selective State Spaces, 2024.
Code. Toshihiro-Ota/decision-mamba at 35f9944, read for its layer and its settings (gym and Atari; there are none for
mazes).
Deviations. Those of DT. Mamba keeps its own initialisation: the code's pass over all Linear layers resets the bias of
the step sizes to zero, and with it every memory to a few tokens. A_log, D and that bias are not decayed. The window is
computed anew at each step when acting, as in the code.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qhyer.agents._sequence import ReturnConditioned, ReturnToGo, SequenceConfig, state_width
from qhyer.data.episodes import DataSpec
from qhyer.nn.backbones import mamba
from qhyer.nn.optim import adamw
from qhyer.nn.windows import WindowTokens


@dataclass(frozen=True)
class DMambaConfig(SequenceConfig):
    learning_rate: float = 1e-3
    state_size: int = 16
    """N: Mamba's state per channel"""


class DMamba(ReturnConditioned):
    Config = DMambaConfig
    config: DMambaConfig

    def __init__(self, config: DMambaConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d = config.width
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance)
        inputs = {"return": 1, "state": state_width(spec, config.goal), "action": spec.action_dim}
        self.tokens = WindowTokens(inputs, d, config.horizon, config.dropout)
        self.trunk = mamba(d, config.layers, config.dropout, config.state_size)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        self.optimizer = adamw(self.parameters(), config.learning_rate, config.weight_decay)
