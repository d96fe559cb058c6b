"""Causal multi-head self-attention with an optional cache of past keys and values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class KeyValues(NamedTuple):
    keys: Tensor  # (B, H, P, d/H), P tokens seen so far
    values: Tensor


def causal_attention_ref(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d_h)) v, where query i (the i-th from the end of the keys) sees no later key."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    past = k.shape[-2] - q.shape[-2]
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(past + 1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


class CausalAttention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        assert dim % heads == 0, f"width {dim} is not a multiple of {heads} heads"
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, past: KeyValues | None = None) -> tuple[Tensor, KeyValues]:
        """x (B, L, d), after the tokens in `past` -> outputs (B, L, d) and keys and values of all tokens."""
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        if past is None:
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            k, v = torch.cat([past.keys, k], dim=2), torch.cat([past.values, v], dim=2)
            if length == 1:  # one new token sees everything
                y = F.scaled_dot_product_attention(q, k, v)
            else:
                y = causal_attention_ref(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim)), KeyValues(k, v)
