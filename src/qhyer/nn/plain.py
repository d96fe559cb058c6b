"""The plain networks of D4RL's methods: Linear and an activation, no norm, torch's initial weights; several at once.

OGBench's agents have their own (nn/mlp.py, nn/values.py), with flax's details. Values stay in full precision whatever
the training's, as there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def plain(
    inputs: int, hidden: Sequence[int], outputs: int, activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise([inputs, *hidden]):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers, nn.Linear([inputs, *hidden][-1], outputs))


def orthogonal(network: nn.Module, gain: float, last: float) -> None:
    """Orthogonal matrices with this gain, the last with its own; zero biases."""
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    for layer in linear:
        nn.init.orthogonal_(layer.weight, last if layer is linear[-1] else gain)
        nn.init.zeros_(layer.bias)


class Critics(nn.Module):
    """V(s) or Q(s, a), several members: inputs (..., d_1), (..., d_2), read side by side -> (members, ...)."""

    def __init__(
        self, members: int, inputs: int, hidden: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(plain(inputs, hidden, 1, activation) for _ in range(members))

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast(inputs[0].device.type, enabled=False):
            weight = next(self.parameters())
            x = torch.cat([part.to(weight.dtype) for part in inputs], dim=-1)
            return torch.stack([member(x).squeeze(-1) for member in self.members])
