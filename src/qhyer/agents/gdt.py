"""GDT: Graph Decision Transformer (Hu et al., 2023).

Idea. A step is a small graph: the state and the return cause the action, and all of a step causes the next. Attention
that is told which pairs of tokens are such edges need not learn it.
Paper. Graph Decision Transformer, 2023.
Code. None of the authors' that we found; edges, block and head as re-implemented in AndssY/TrojanTO at 8c1802d. What
this file knows of the block is second-hand (inferred from that code), and no maze settings are known.
Deviations. Scores are divided by sqrt(d_h), where the re-implementation takes the root twice and so divides by its
square. Embeddings of edges are given per layer, without a shared table before them: the same family. The norm on tokens
is applied. GDT-plus (a second transformer over state and fused token) is left out. Otherwise as DT.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qhyer.agents._sequence import ReturnConditioned, ReturnToGo, SequenceConfig, heads_fit, state_width
from qhyer.data.episodes import DataSpec
from qhyer.nn.backbones import graph
from qhyer.nn.optim import adamw
from qhyer.nn.windows import WindowTokens


@dataclass(frozen=True)
class GDTConfig(SequenceConfig):
    heads: int = 1
    """attention heads"""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads_fit(self.width, self.heads)


class GDT(ReturnConditioned):
    Config = GDTConfig
    config: GDTConfig

    def __init__(self, config: GDTConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d = config.width
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance)
        inputs = {"return": 1, "state": state_width(spec, config.goal), "action": spec.action_dim}
        self.tokens = WindowTokens(inputs, d, config.horizon, config.dropout)
        self.trunk = graph(d, config.layers, config.heads, config.dropout)
        self.action_head = nn.Sequential(nn.LayerNorm(2 * d), nn.Linear(2 * d, spec.action_dim), nn.Tanh())
        self.optimizer = adamw(self.parameters(), config.learning_rate, config.weight_decay)

    def read(self, h: Tensor) -> Tensor:
        """The action sees its two causes, side by side: (B, T, 2 d)."""
        return torch.cat([self.tokens.read(h, "state"), self.tokens.read(h, "return")], dim=-1)
