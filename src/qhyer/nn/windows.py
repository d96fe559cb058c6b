"""Tokens of a window as Decision Transformer has them: a linear map per kind, a vector for the time, then a norm.

    x = LN(W_kind v_t + b_kind + e_t),   e_t learned, the same for all tokens of a step

The kinds are named in their order within a step: ("return", "state", "action"), ("state", "return", "action"), ...
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class WindowTokens(nn.Module):
    def __init__(self, inputs: Mapping[str, int], dim: int, horizon: int, dropout: float = 0.0) -> None:
        """inputs: width of each kind, in order. horizon: steps with a vector of their own (later ones share the last),
        0 for none at all. dropout: on the tokens."""
        super().__init__()
        self.kinds = tuple(inputs)
        self.embed = nn.ModuleDict({kind: nn.Linear(width, dim) for kind, width in inputs.items()})
        # Small beside the values: a window at times rarely seen in training should look like any other.
        self.time = nn.Parameter(0.02 * torch.randn(horizon, dim)) if horizon else None
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Mapping[str, Tensor], times: Tensor) -> Tensor:
        """Per kind (B, T, width), a return (B, T); times (B, T) since the episode began -> (B, T * P, d)."""
        tokens = [self.embed[kind](v if v.dim() == 3 else v[..., None]) for kind in self.kinds for v in [values[kind]]]
        x = torch.stack(tokens, dim=2)  # (B, T, P, d)
        if self.time is not None:
            x = x + self.time[times.clamp(max=len(self.time) - 1)][:, :, None]
        return self.dropout(self.norm(x)).flatten(1, 2)

    def read(self, h: Tensor, kind: str) -> Tensor:
        """Of outputs (B, L, d), perhaps short of the last tokens, those at this kind: (B, T, d)."""
        return h[:, self.kinds.index(kind) :: len(self.kinds)]
