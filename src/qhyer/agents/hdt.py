"""HDT: QHyer's hybrid backbone asked for a return, without Q.

Idea. Decision Transformer with QHyer's gated attention and Mamba in place of attention alone: what the backbone
brings by itself. The paper's ablation of its architecture (figure of SSM variants) compares it with LSDT and DMixer.
Paper. QHyer, the section on ablations; sizes are those of its D4RL runs, everything else is DT's.
Code. None.
Deviations. Those of DT. The window is computed anew at each step when acting, as for the other sequence models.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qhyer.agents._sequence import ReturnConditioned, ReturnToGo, SequenceConfig, heads_fit, state_width
from qhyer.data.episodes import DataSpec
from qhyer.nn.backbones import HybridTrunk
from qhyer.nn.optim import adamw
from qhyer.nn.windows import WindowTokens


@dataclass(frozen=True)
class HDTConfig(SequenceConfig):
    heads: int = 4
    state_size: int = 16
    """N: Mamba's state per channel"""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads_fit(self.width, self.heads)


class HDT(ReturnConditioned):
    Config = HDTConfig
    config: HDTConfig

    def __init__(self, config: HDTConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d = config.width
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance)
        inputs = {"return": 1, "state": state_width(spec, config.goal), "action": spec.action_dim}
        self.tokens = WindowTokens(inputs, d, config.horizon, config.dropout)
        self.trunk = HybridTrunk(d, config.layers, config.heads, config.dropout, config.state_size)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        self.optimizer = adamw(self.parameters(), config.learning_rate, config.weight_decay)
