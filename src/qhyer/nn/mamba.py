"""A Mamba mixer (Gu and Dao, 2024) as Decision Mamba uses it, Eqs. (6) to (8), in plain PyTorch.

    x, z = W_in v;  x' = SiLU(Conv1d(x));  (delta, B, C) = W_x x';  Delta = softplus(W_Delta delta + b)
    y = scan(x', Delta, A, B, C, D);  out = W_out (y * SiLU(z))

Letters: d model width · E inner width (expand * d) · N state size · R rank of Delta · L tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.nn.scan import kernels, selective_scan, selective_scan_step


class MambaState(NamedTuple):
    """All a mixer needs of the past: the last inputs of the convolution and the state of the scan."""

    conv: Tensor  # (B, width - 1, E)
    ssm: Tensor  # (B, E, N)


class _CausalConv(torch.autograd.Function):
    """A sum of shifted products, in place. Autograd's own slices would fill and add a padded copy per tap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        width = weight.shape[1]
        length = x.shape[1] - width + 1
        out = torch.addcmul(bias, x[:, :length], weight[:, 0])
        for j in range(1, width):
            out.addcmul_(x[:, j : j + length], weight[:, j])
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (dout,) = grads
        x, weight = ctx.saved_tensors
        length = dout.shape[1]
        dx, dweight = torch.zeros_like(x), torch.empty_like(weight)
        for j in range(weight.shape[1]):
            dx[:, j : j + length].addcmul_(dout, weight[:, j])
            dweight[:, j] = (dout * x[:, j : j + length]).sum((0, 1))
        return dx, dweight, dout.sum((0, 1))


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Depth-wise convolution over already left-padded inputs (B, width - 1 + L, E) -> (B, L, E).

    Channel-last as everything else here, and fast on a CPU at these widths. Half precision comes back as float32.
    """
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return _CausalConv.apply(x.to(dtype), weight, bias)


def convolve(x: Tensor, weight: Tensor, bias: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    """SiLU of the causal convolution of x (B, L, E) after its `past` (B, width - 1, E), and the past of what follows.
    Without one an episode begins: the rows before the first are zero."""
    before = weight.shape[1] - 1
    seen = x if past is None else torch.cat([past.to(x.dtype), x], dim=1)
    missing = before if past is None else 0
    if (fused := kernels(x)) is not None:
        y = fused.conv_silu(seen, weight, bias, before - missing)
    else:
        y = F.silu(causal_conv(F.pad(seen, (0, 0, missing, 0)), weight, bias))
    if missing:  # only a window that starts an episode, shorter than the convolution, lacks rows in its state
        seen = F.pad(seen, (0, 0, max(0, before - seen.shape[1]), 0))
    return y, seen[:, seen.shape[1] - before :]


def step_biases(count: int) -> Tensor:
    """softplus of them is log-uniform in [1e-3, 1e-1]: memories from tens to thousands of steps at the start. A
    generic initialisation of biases would set every step to softplus(0) = 0.69 and forget at once."""
    step = torch.exp(torch.rand(count) * (math.log(1e-1) - math.log(1e-3)) + math.log(1e-3))
    return step + torch.log(-torch.expm1(-step))  # inverse of softplus


class Mamba(nn.Module):
    def __init__(self, dim: int, state_size: int = 16, conv_width: int = 4, expand: int = 2) -> None:
        super().__init__()
        inner, rank = expand * dim, math.ceil(dim / 16)
        self.inner, self.rank, self.state_size, self.conv_width = inner, rank, state_size, conv_width
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(inner, conv_width).uniform_(-1, 1) / math.sqrt(conv_width))
        self.conv_bias = nn.Parameter(torch.empty(inner).uniform_(-1, 1) / math.sqrt(conv_width))
        self.x_proj = nn.Linear(inner, rank + 2 * state_size, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1, state_size + 1).float().log().repeat(inner, 1))  # (E, N)
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)
        with torch.no_grad():
            nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
            self.dt_proj.bias.copy_(step_biases(inner))
        for parameter in (self.A_log, self.D, self.dt_proj.bias):
            parameter.no_decay = True  # type: ignore[attr-defined]

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. (8): the input decides its step size, its way in and its way out. x' (..., E) -> Delta, B, C."""
        dt, B, C = self.x_proj(x).split([self.rank, self.state_size, self.state_size], dim=-1)
        return F.softplus(self.dt_proj(dt).float()), B, C

    @property
    def A(self) -> Tensor:
        return -torch.exp(self.A_log.float())

    def kept(self, length: int) -> float:
        """Numbers that a token of so many keeps for the backward pass without kernels, as counted: most of them are
        states and decays, (E, N) each."""
        return 2.0 * self.inner * self.state_size + 11.2 * self.inner

    def initial_state(self, batch: int, like: Tensor) -> MambaState:
        return MambaState(
            like.new_zeros(batch, self.conv_width - 1, self.inner),
            torch.zeros(batch, self.inner, self.state_size, device=like.device, dtype=self.A_log.dtype),
        )

    def forward(self, v: Tensor, state: MambaState | None = None) -> tuple[Tensor, MambaState]:
        """v (B, L, d), continuing from `state` -> outputs (B, L, d) and the state after them."""
        x, z = self.in_proj(v).chunk(2, dim=-1)  # (B, L, E) each
        conv, ssm = (None, None) if state is None else state
        x, conv = convolve(x, self.conv_weight, self.conv_bias, conv)  # Eq. (6)
        if (fused := kernels(x)) is not None:
            dt, B, C = self.x_proj(x).split([self.rank, self.state_size, self.state_size], dim=-1)
            dt = F.linear(dt, self.dt_proj.weight)  # its bias and softplus, the skip and the gate are in the kernel
            y, ssm = fused.gated_scan(x, dt, self.dt_proj.bias, self.A, B, C, self.D, z, ssm)
        else:
            delta, B, C = self._select(x)
            y, ssm = selective_scan(x, delta, self.A, B, C, self.D, ssm)
            y = y.to(v.dtype) * F.silu(z)
        return self.out_proj(y), MambaState(conv, ssm)

    def step(self, v: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
        """One token: v (B, d)."""
        if kernels(v) is not None:
            y, after = self(v[:, None], state)
            return y[:, 0], after
        x, z = self.in_proj(v).chunk(2, dim=-1)  # (B, E)
        x, conv = convolve(x[:, None], self.conv_weight, self.conv_bias, state.conv)
        delta, B, C = self._select(x[:, 0])
        y, ssm = selective_scan_step(x[:, 0], delta, self.A, B, C, self.D, state.ssm)
        return self.out_proj(y.to(v.dtype) * F.silu(z)), MambaState(conv, ssm)

    @torch.no_grad()
    def readout(self, v: Tensor) -> dict[str, Tensor]:
        """What the selection does on these inputs: Delta_t (B, L, E) and A_bar_t = exp(Delta_t A) (B, L, E, N)."""
        x, _ = self.in_proj(v).chunk(2, dim=-1)
        delta, _, _ = self._select(convolve(x, self.conv_weight, self.conv_bias, None)[0])
        return {"delta": delta, "A_bar": torch.exp(delta[..., None] * self.A)}  # Eq. (13)
