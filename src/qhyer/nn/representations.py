"""Representations of goals that a hierarchy passes down: vectors of a fixed length, on a sphere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.nn.mlp import MLP

FLOOR, NUDGE = 1e-6, 1e-15


def to_sphere(x: Tensor) -> Tensor:
    """Each vector (..., d) scaled to length sqrt(d): its entries have a mean square of one.

    Nothing has no direction: zero stays zero and passes no gradient, as if it were infinitely long. It does occur,
    where a state of zeros is its own goal and no bias has moved yet, and 0 / 0 would spoil every weight.
    """
    # A nudge that changes no number of any size: at zero, a norm's gradient cannot be differentiated.
    length = F.threshold(torch.linalg.vector_norm(x + NUDGE, dim=-1, keepdim=True), FLOOR, torch.inf)
    return x / length * math.sqrt(x.shape[-1])


class GoalRepresentation(nn.Module):
    """phi([s; g]), a vector of length sqrt(d): a goal as it looks from a state. In full precision, as values are."""

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int, layer_norm: bool = True) -> None:
        """inputs: the width of state and goal together."""
        super().__init__()
        self.net = MLP(inputs, hidden, outputs, layer_norm=layer_norm)

    def forward(self, observations: Tensor, goals: Tensor) -> Tensor:
        """(B, d_s), (B, d_s) -> (B, d)."""
        with torch.autocast(observations.device.type, enabled=False):
            return to_sphere(self.net(torch.cat([observations, goals], dim=-1).float()))
