"""DMixer: Decision Mixer (Zheng et al., 2025).

Idea. A long window of which every second block sees only the tokens that a router picks; the others pass it by. A
network that sees one token at a time learns who is picked, and decides when acting.
Paper. Decision Mixer: Integrating Long-term and Local Dependencies via Dynamic Token Selection for Decision-Making,
ICML 2025.
Code. ruthless-man/Decision-Mixer at 6f7438d, incomplete as released (a package is missing), read for the router and its
settings.
Deviations. The number of tokens picked is a fixed share: in the code a network gives it, through a cast to an integer
that no gradient passes, from the whole window, future included. The share of one half is inferred. A picked token
becomes x + w (block(x) - x), as in mixture-of-depths, where the code multiplies the block's output by w. The guess is
trained in the same step as the rest (the code has a second optimiser with its own rate). Otherwise as DT.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from qhyer.agent import Batch, Metrics
from qhyer.agents._sequence import ReturnConditioned, ReturnToGo, SequenceConfig, heads_fit, state_width
from qhyer.data.episodes import DataSpec
from qhyer.errors import require
from qhyer.nn.backbones import Trunk, routed
from qhyer.nn.optim import adamw
from qhyer.nn.windows import WindowTokens


@dataclass(frozen=True)
class DMixerConfig(SequenceConfig):
    steps: int = 25_000
    batch_size: int = 256
    learning_rate: float = 1e-3
    context: int = 120
    width: int = 256
    layers: int = 6
    warmup: int = 250
    heads: int = 4
    """attention heads"""
    capacity: float = 0.5
    """share of a window's tokens that every second block sees in training"""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads_fit(self.width, self.heads)
        require(0.0 < self.capacity <= 1.0, "capacity must lie above 0 and be at most 1")


class DMixer(ReturnConditioned):
    Config = DMixerConfig
    config: DMixerConfig
    trunk: Trunk

    def __init__(self, config: DMixerConfig, spec: DataSpec) -> None:
        super().__init__(config, spec)
        d = config.width
        self.ask = ReturnToGo(config.return_scale, config.target_return, config.tolerance)
        inputs = {"return": 1, "state": state_width(spec, config.goal), "action": spec.action_dim}
        self.tokens = WindowTokens(inputs, d, config.horizon, config.dropout)
        self.trunk = routed(d, config.layers, config.heads, config.dropout, config.capacity)
        self.action_head = nn.Sequential(nn.Linear(d, spec.action_dim), nn.Tanh())
        self.optimizer = adamw(self.parameters(), config.learning_rate, config.weight_decay)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """DT's, and the cross-entropy of guessing from a token alone whether it is picked (no gradient to it)."""
        h, guess = self.trunk.with_loss(self.tokenize(*self.window(batch)))
        loss, metrics = self.imitation(batch, self.action_head(self.read(h)))
        return loss + guess, metrics | {"router/guess": guess.detach()}
