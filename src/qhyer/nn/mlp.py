"""The plain MLP of OGBench's agents, with flax's details in PyTorch (docs/deviations.md)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from qhyer.losses import gelu


class MLP(nn.Module):
    """Per hidden layer: Linear, GELU (tanh form), then LayerNorm (eps 1e-6) if asked for: norm after activation."""

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int,
        layer_norm: bool = False,
        final_scale: float = 1.0,
    ) -> None:
        """final_scale: variance scale of the last layer (flax's; the actor's mean uses 1e-2)."""
        super().__init__()
        widths = [inputs, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(b, eps=1e-6) if layer_norm else nn.Identity() for b in hidden)
        self.head = nn.Linear(widths[-1], outputs)
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        # Variance scaling s, fan_avg, uniform = xavier_uniform with gain sqrt(s).
        nn.init.xavier_uniform_(self.head.weight, gain=final_scale**0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms):
            x = norm(gelu(layer(x)))
        return self.head(x)
