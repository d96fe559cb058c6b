"""The selective scan of Mamba, Eqs. (7), (8), (13).

    h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t u_t,      y_t = C_t h_t + D u_t

Shapes   u, delta (B, L, E) · A (E, N) · B, C (B, L, N) · D (E,) · state h (B, E, N)

`selective_scan_ref` is the loop a student can read. `selective_scan` gives the same values and gradients with all
products batched over time, so that only the recurrence itself runs step by step: its backward is linear in L
(an autograd loop that indexes `A[:, t]` is quadratic). `selective_scan_step` is one step of it, for acting.
Half-precision inputs are computed in float32; float64 stays float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _full(*tensors: Tensor) -> list[Tensor]:
    return [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]


def selective_scan_ref(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, one step after the other. Returns y (B, L, E) and the last state (B, E, N)."""
    dtype = u.dtype
    u, delta, A, B, C, D = _full(u, delta, A, B, C, D)
    h = u.new_zeros(u.shape[0], u.shape[2], A.shape[1]) if state is None else state
    ys = []
    for u_t, delta_t, B_t, C_t in zip(u.unbind(1), delta.unbind(1), B.unbind(1), C.unbind(1)):
        A_bar = torch.exp(delta_t[..., None] * A)  # Eq. (13), (B, E, N)
        h = A_bar * h + (delta_t * u_t)[..., None] * B_t[:, None, :]  # Eq. (7)
        ys.append((h * C_t[:, None, :]).sum(-1) + D * u_t)
    return torch.stack(ys, 1).to(dtype), h


class _Scan(torch.autograd.Function):
    """Time-major and channel-last inside, (L, B, N, E): every product is one batched call over all L."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        u, delta, B, C = (t.transpose(0, 1).contiguous() for t in (u, delta, B, C))  # (L, B, ...)
        A = A.t().contiguous()  # (N, E)
        length, batch, width = u.shape
        size = A.shape[0]
        decay = torch.exp_(delta[:, :, None, :] * A)  # (L, B, N, E)
        h = (delta * u)[:, :, None, :] * B[..., None]  # the inputs; becomes the states in place
        if state is not None:
            h[0].addcmul_(decay[0], state.transpose(1, 2))
        for t in range(1, length):
            h[t].addcmul_(decay[t], h[t - 1])
        y = torch.bmm(C.view(-1, 1, size), h.view(-1, size, width)).view(length, batch, width)
        ctx.save_for_backward(u, delta, A, B, C, h, state)
        return y.transpose(0, 1), h[-1].transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, dstate = grads
        u, delta, A, B, C, h, state = ctx.saved_tensors
        length, batch, width = u.shape
        size = A.shape[0]
        dy = dy.transpose(0, 1).contiguous()
        decay = torch.exp_(delta[:, :, None, :] * A)  # recomputed: cheaper than keeping it
        g = C[..., None] * dy[:, :, None, :]  # dL/dh_t; the part that comes through y
        g[-1] += dstate.transpose(1, 2)
        for t in range(length - 2, -1, -1):
            g[t].addcmul_(decay[t + 1], g[t + 1])
        flat_g, flat_h = g.view(-1, size, width), h.view(-1, size, width)
        x = delta * u
        dB = torch.bmm(flat_g, x.view(-1, width, 1)).view_as(B)
        dC = torch.bmm(flat_h, dy.view(-1, width, 1)).view_as(C)
        dx = torch.bmm(B.view(-1, 1, size), flat_g).view_as(x)
        decay.mul_(g)  # dL/d(h_{t-1}); times h_{t-1} it is dL/d(Delta_t A)
        dprevious = decay[0].transpose(1, 2).clone() if state is not None else None
        decay[1:].mul_(h[:-1])
        if state is not None:
            decay[0].mul_(state.transpose(1, 2))
        else:
            decay[0].zero_()
        dA = torch.einsum("lbne,lbe->ne", decay, delta)
        ddelta = dx * u + torch.einsum("lbne,ne->lbe", decay, A)
        du = dx * delta
        return du.transpose(0, 1), ddelta.transpose(0, 1), dA.t(), dB.transpose(0, 1), dC.transpose(0, 1), dprevious


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `selective_scan_ref`, faster."""
    dtype = u.dtype
    u, delta, A, B, C, D = _full(u, delta, A, B, C, D)
    y, last = _Scan.apply(u, delta, A, B, C, state)
    return (y + D * u).to(dtype), last


def selective_scan_step(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One step: u, delta (B, E), B, C (B, N), state (B, E, N) -> y (B, E) and the next state."""
    dtype = u.dtype
    u, delta, A, B, C, D = _full(u, delta, A, B, C, D)
    state = torch.exp(delta[..., None] * A) * state + (delta * u)[..., None] * B[:, None, :]
    return ((state * C[:, None, :]).sum(-1) + D * u).to(dtype), state
