"""The plain MLP of OGBench's agents, with flax's details in PyTorch (docs/deviations.md)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.losses import gelu
from qhyer.nn.scan import kernels


def norm_kernel(x: Tensor) -> Callable[..., Tensor] | None:
    """GELU and LayerNorm as one kernel, `gelu_norm` of nn/mlp_triton.py, where it can serve this input of a network."""
    half = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) != torch.float32
    if half or x.dtype != torch.float32 or not x.numel() or kernels(x) is None:
        return None
    from qhyer.nn.mlp_triton import gelu_norm

    return gelu_norm


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
        self.layer_norm = layer_norm
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
        fused = norm_kernel(x) if self.layer_norm and x.dim() == 2 else None
        for layer, norm in zip(self.layers, self.norms):
            if fused is None:
                x = norm(gelu(layer(x)))
                continue
            assert isinstance(layer, nn.Linear) and isinstance(norm, nn.LayerNorm)
            own = (parameter.view(1, 1, -1) for parameter in (layer.bias, norm.weight, norm.bias))  # one member
            x = fused(F.linear(x, layer.weight)[None], *own, norm.eps).squeeze(0)
        return self.head(x)
