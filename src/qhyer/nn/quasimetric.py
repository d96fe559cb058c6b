"""Quasimetrics on a latent space: d(x, x) = 0, d >= 0 and d(x, z) <= d(x, y) + d(y, z), but not symmetric.

IQE: interval quasimetric embeddings (Wang and Isola, 2022). MRN: metric residual networks (Liu et al., 2023).
Full precision always: distances to neighbours, of size one, are differences of large coordinates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qhyer.nn.mlp import MLP
from qhyer.nn.scan import kernels


def union_length(x: Tensor, y: Tensor) -> Tensor:
    """Length of the union over i of the intervals [x_i, y_i] with x_i < y_i: (..., k) and (..., k) -> (...).

    The union's length is the sum of its right ends less the sum of its left ends, and an end of an interval is an end
    of the union if no other interval covers it. That is k^2 comparisons instead of a sort, and a gradient that
    needs nothing but the marks. Of intervals with a common end, the first has it.
    """
    if x.numel() and x.shape == y.shape and x.dtype == y.dtype == torch.float32 and kernels(x) is not None:
        from qhyer.nn import quasimetric_triton

        return quasimetric_triton.union_length(x, y)
    index = torch.arange(x.shape[-1], device=x.device)
    before = index < index[:, None]  # (k, k): j before i, i down, j across
    valid = x < y
    xi, yi, xj, yj = x[..., :, None], y[..., :, None], x[..., None, :], y[..., None, :]
    covers_left = ((xj < xi) | ((xj == xi) & before)) & (yj >= xi) & valid[..., None, :]  # (..., k, k)
    covers_right = ((yj > yi) | ((yj == yi) & before)) & (xj <= yi) & valid[..., None, :]
    left = valid & ~covers_left.any(-1)
    right = valid & ~covers_right.any(-1)
    return (y * right - x * left).sum(-1)


class Quasimetric(nn.Module, ABC):
    """d(phi(s), phi(g)), the latent phi an MLP with LayerNorm that states and goals share."""

    def __init__(self, inputs: int, hidden: Sequence[int], latent: int) -> None:
        super().__init__()
        self.phi = MLP(inputs, hidden, latent, layer_norm=True)

    def encode(self, observations: Tensor) -> Tensor:
        with torch.autocast(observations.device.type, enabled=False):
            return self.phi(observations)

    @abstractmethod
    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """From latent x (..., latent) to latent y: (...)."""

    def forward(self, observations: Tensor, goals: Tensor) -> Tensor:
        return self.distance(self.encode(observations), self.encode(goals))


class IQE(Quasimetric):
    """Groups of `intervals` coordinates; a group's distance is the length of the union of its intervals [x_i, y_i].

    d = rho mean + (1 - rho) max over the groups, rho = sigmoid of a learned number.
    """

    def __init__(self, inputs: int, hidden: Sequence[int], latent: int, intervals: int = 8) -> None:
        super().__init__(inputs, hidden, latent)
        assert latent % intervals == 0
        self.intervals = intervals
        self.mix = nn.Parameter(torch.zeros(()))

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            groups = union_length(x.unflatten(-1, (-1, self.intervals)), y.unflatten(-1, (-1, self.intervals)))
            return torch.lerp(groups.amax(-1), groups.mean(-1), torch.sigmoid(self.mix))


class MRN(Quasimetric):
    """Euclidean distance of one half of the latent, plus the greatest excess of x over y in the other."""

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            metric, residual = (x - y).tensor_split((x.shape[-1] // 2,), dim=-1)
            # The floor keeps the root's gradient finite where x = y.
            return metric.square().sum(-1).clamp(min=1e-12).sqrt() + residual.amax(-1).relu()
