"""A Mamba-2 mixer (Dao and Gu, 2024): Mamba whose channels share one decay per head, so that what the recurrence does
to a whole window is a product of matrices.

    x, B, C, z, dt = W_in v;  (x', B', C') = SiLU(Conv1d(x, B, C));  Delta = softplus(dt + b)
    h_t = exp(Delta_t A) h_{t-1} + Delta_t x'_t B'_t^T,     y_t = h_t C'_t + D x'_t           for each head
    out = W_out (y * SiLU(z))

Written out over the steps of a window this is attention without a softmax, whose scores fall off with time:

    y_t = sum_{s <= t} (C'_t . B'_s) exp(Delta_{s+1} A + ... + Delta_t A) Delta_s x'_s  +  D x'_t

`head_scan` computes it so, a chunk of steps at a time with the state between them: linear in length, and each chunk is
three products. `head_scan_ref` is the recurrence, step by step. Mamba's own scan (`scan.py`) has a decay for every
channel and state and cannot be written in this way.

Letters: d model width · E inner width (expand * d) · H heads of P = E / H channels · N state size · L tokens. Left out
of Mamba-2: the norm before W_out and groups of B and C, which large models need.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.nn.mamba import MambaState, convolve, step_biases
from qhyer.nn.scan import full

HEAD_WIDTH = 64  # channels of a head, Mamba-2's default; fewer where these do not divide the inner width
CHUNK = 128  # steps of one product of matrices, whose work grows with the square


def head_scan_ref(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition. x (B, L, H, P), delta (B, L, H), A and D (H,), B and C (B, L, N), state (B, H, P, N)
    -> y (B, L, H, P) and the last state."""
    dtype = x.dtype
    x, delta, A, B, C, D = full(x, delta, A, B, C, D)
    h = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[2]) if state is None else state
    ys = []
    for t in range(x.shape[1]):
        y, h = head_scan_step(x[:, t], delta[:, t], A, B[:, t], C[:, t], D, h)
        ys.append(y)
    return torch.stack(ys, 1).to(dtype), h


def head_scan_step(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One step: x (B, H, P), delta (B, H), B and C (B, N), state (B, H, P, N) -> y (B, H, P) and the next state."""
    dtype = x.dtype
    x, delta, A, B, C, D = full(x, delta, A, B, C, D)
    entering = (delta[..., None] * x)[..., None] * B[:, None, None]  # (B, H, P, N)
    state = torch.exp(delta * A)[..., None, None] * state + entering
    return ((state * C[:, None, None]).sum(-1) + D[:, None] * x).to(dtype), state


def head_scan(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `head_scan_ref`, by products of matrices."""
    dtype = x.dtype
    x, delta, A, B, C, D = full(x, delta, A, B, C, D)
    ys = []
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, x.shape[1], CHUNK):
            some = slice(start, start + CHUNK)
            y, state = _chunk(x[:, some], delta[:, some], A, B[:, some], C[:, some], state)
            ys.append(y)
        y = (ys[0] if len(ys) == 1 else torch.cat(ys, 1)) + D[:, None] * x
    assert state is not None, "at least one step"
    return y.to(dtype), state


def _chunk(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """`head_scan` of a few steps, without the skip."""
    elapsed = (delta * A).cumsum(1).transpose(1, 2)  # (B, H, L): logarithm of what is left of a state from before
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    decay = (elapsed[..., None] - elapsed[..., None, :]).masked_fill(later, -math.inf).exp()  # (B, H, t, s)
    scores = (C @ B.mT)[:, None] * decay * delta.transpose(1, 2)[:, :, None]
    channels = x.transpose(1, 2)  # (B, H, L, P)
    y = scores @ channels
    left = torch.exp(elapsed[..., -1:] - elapsed) * delta.transpose(1, 2)  # (B, H, L): of each step, at the end
    last = (left[..., None] * channels).mT @ B[:, None]  # (B, H, P, N)
    if state is not None:
        y = y + torch.exp(elapsed)[..., None] * (C[:, None] @ state.mT)
        last = last + torch.exp(elapsed[..., -1])[..., None, None] * state
    return y.transpose(1, 2), last


class Mamba2(nn.Module):
    """Takes the place of `Mamba` in a block: the same calls, the same kind of state."""

    def __init__(self, dim: int, state_size: int = 16, conv_width: int = 4, expand: int = 2) -> None:
        super().__init__()
        inner = expand * dim
        self.inner, self.state_size, self.conv_width = inner, state_size, conv_width
        self.heads = inner // math.gcd(inner, HEAD_WIDTH)
        self.mixed = inner + 2 * state_size  # channels of x, B and C, which pass through the convolution
        self.in_proj = nn.Linear(dim, self.mixed + inner + self.heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.mixed, conv_width).uniform_(-1, 1) / math.sqrt(conv_width))
        self.conv_bias = nn.Parameter(torch.empty(self.mixed).uniform_(-1, 1) / math.sqrt(conv_width))
        self.dt_bias = nn.Parameter(step_biases(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())  # (H,), as Mamba-2 begins
        self.D = nn.Parameter(torch.ones(self.heads))
        self.out_proj = nn.Linear(inner, dim, bias=False)

    @property
    def A(self) -> Tensor:
        return -torch.exp(self.A_log.float())

    def _project(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """v (..., d) -> x, B and C side by side (..., E + 2 N), z (..., E) and Delta (..., H)."""
        mixed, z, dt = self.in_proj(v).split([self.mixed, self.inner, self.heads], dim=-1)
        return mixed, z, F.softplus(dt.float() + self.dt_bias)

    def _part(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """After the convolution: x by heads (..., H, P), B and C (..., N)."""
        x, B, C = mixed.split([self.inner, self.state_size, self.state_size], dim=-1)
        return x.unflatten(-1, (self.heads, -1)), B, C

    def kept(self, length: int) -> float:
        """Numbers that a token of so many keeps for the backward pass without kernels, as counted."""
        return (12.0 + 0.045 * min(length, CHUNK)) * self.inner

    def initial_state(self, batch: int, like: Tensor) -> MambaState:
        shape = batch, self.heads, self.inner // self.heads, self.state_size
        return MambaState(
            like.new_zeros(batch, self.conv_width - 1, self.mixed),
            torch.zeros(shape, device=like.device, dtype=self.A_log.dtype),
        )

    def forward(self, v: Tensor, state: MambaState | None = None) -> tuple[Tensor, MambaState]:
        """v (B, L, d), continuing from `state` -> outputs (B, L, d) and the state after them."""
        mixed, z, delta = self._project(v)
        mixed, conv = convolve(mixed, self.conv_weight, self.conv_bias, None if state is None else state.conv)
        x, B, C = self._part(mixed)
        y, ssm = head_scan(x, delta, self.A, B, C, self.D, None if state is None else state.ssm)
        return self.out_proj(y.flatten(-2).to(v.dtype) * F.silu(z)), MambaState(conv, ssm)

    def step(self, v: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
        """One token: v (B, d)."""
        mixed, z, delta = self._project(v)
        mixed, conv = convolve(mixed[:, None], self.conv_weight, self.conv_bias, state.conv)
        x, B, C = self._part(mixed[:, 0])
        y, ssm = head_scan_step(x, delta, self.A, B, C, self.D, state.ssm)
        return self.out_proj(y.flatten(-2).to(v.dtype) * F.silu(z)), MambaState(conv, ssm)

    @torch.no_grad()
    def readout(self, v: Tensor) -> dict[str, Tensor]:
        """What the selection does on these inputs: Delta_t (B, L, H) and A_bar_t = exp(Delta_t A) (B, L, H, 1)."""
        _, _, delta = self._project(v)
        return {"delta": delta, "A_bar": torch.exp(delta * self.A)[..., None]}
