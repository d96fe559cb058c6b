"""The selective scan of Mamba, Eqs. (7), (8), (13).

    h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t u_t,      y_t = C_t h_t + D u_t

Shapes   u, delta (B, L, E) · A (E, N) · B, C (B, L, N) · D (E,) · state h (B, E, N)

`selective_scan_ref` is the loop a student can read. `selective_scan` gives the same values and gradients with all
products batched over time, so that only the recurrence itself runs step by step: its backward is linear in L
(an autograd loop that indexes `A[:, t]` is quadratic). `selective_scan_step` is one step of it, for acting.
Half-precision inputs are computed in float32; float64 stays float64. On CUDA the work is done by the kernels of
`mamba_triton.py`, which never write the hidden states to memory; everywhere else by the code below.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _load_kernels(device: torch.device, current: bool) -> ModuleType | None:
    """None, and a warning, where Triton is not installed or cannot run; it launches on the current device alone."""
    try:
        module = importlib.import_module("qhyer.nn.mamba_triton")
        if not current:
            raise RuntimeError("it is not the current device")
        module.total(torch.zeros(1, 16, device=device))  # whether any can be compiled and launched
        return module
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        logging.getLogger(__name__).warning("no Triton kernels on %s, plain PyTorch in their place: %s", device, reason)
        return None


def _known_kernels(device: torch.device, current: bool) -> ModuleType | None:
    """The same to torch.compile, which would look past the cache and into the import."""
    return _load_kernels(device, current)


# What torch.compiler.assume_constant_result does, which would import the whole compiler here.
_known_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


_here = threading.local()


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, and in this thread, plain PyTorch alone: for gradients that are differentiated in turn, since the
    kernels' own gradients cannot be. A plain flag, so that torch.compile can follow it."""
    before = getattr(_here, "plain", False)
    _here.plain = True
    try:
        yield
    finally:
        _here.plain = before


def kernels(x: Tensor) -> ModuleType | None:
    """The Triton kernels where they can serve this tensor, else None.

    The variable QHYER_TRITON turns them off (0), or lets Triton's interpreter run them on a CPU (interpret), for tests.
    """
    use = os.environ.get("QHYER_TRITON", "1")
    if x.dtype == torch.float64 or use == "0" or not (x.is_cuda or use == "interpret"):
        return None
    if getattr(_here, "plain", False):
        return None
    return _known_kernels(x.device, not x.is_cuda or x.device.index == torch.cuda.current_device())


def full(*tensors: Tensor) -> list[Tensor]:
    """In float32 where they have half of its precision."""
    return [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]


def selective_scan_ref(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, one step after the other. Returns y (B, L, E) and the last state (B, E, N)."""
    dtype = u.dtype
    u, delta, A, B, C, D = full(u, delta, A, B, C, D)
    h = u.new_zeros(u.shape[0], u.shape[2], A.shape[1]) if state is None else state
    ys = []
    for u_t, delta_t, B_t, C_t in zip(u.unbind(1), delta.unbind(1), B.unbind(1), C.unbind(1)):
        A_bar = torch.exp(delta_t[..., None] * A)  # Eq. (13), (B, E, N)
        h = A_bar * h + (delta_t * u_t)[..., None] * B_t[:, None, :]  # Eq. (7)
        ys.append((h * C_t[:, None, :]).sum(-1) + D * u_t)
    return torch.stack(ys, 1).to(dtype), h


class _Scan(torch.autograd.Function):
    """State-major inside, (N, B, L, E): each state's slice is one contiguous block that stays in the cache, every
    product is one call over all steps, and nothing is transposed."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        size, length = A.shape[1], u.shape[1]
        x = delta * u
        h = u.new_empty(size, *u.shape)
        decay = torch.empty_like(h)
        for n in range(size):
            torch.mul(delta, A[:, n], out=decay[n]).exp_()
            torch.mul(x, B[..., n, None], out=h[n])  # the inputs; the recurrence below turns them into states
        if state is not None:
            h[:, :, 0].addcmul_(decay[:, :, 0], state.permute(2, 0, 1))
        for t in range(1, length):
            h[:, :, t].addcmul_(decay[:, :, t], h[:, :, t - 1])
        y = C[..., 0, None] * h[0]
        for n in range(1, size):
            y.addcmul_(C[..., n, None], h[n])
        ctx.save_for_backward(u, delta, A, B, C, h, decay, state)
        return y, h[:, :, -1].permute(1, 2, 0).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, dstate = grads
        u, delta, A, B, C, h, decay, state = ctx.saved_tensors
        size, length = A.shape[1], u.shape[1]
        x = delta * u
        g = torch.empty_like(h)  # dL/dh_t: what comes through y_t, then what comes back from h_{t+1}
        for n in range(size):
            torch.mul(dy, C[..., n, None], out=g[n])
        g[:, :, -1] += dstate.permute(2, 0, 1)
        for t in range(length - 2, -1, -1):
            g[:, :, t].addcmul_(decay[:, :, t + 1], g[:, :, t + 1])
        dA, dB, dC = torch.empty_like(A), torch.empty_like(B), torch.empty_like(C)
        dx, ddelta = torch.zeros_like(x), torch.zeros_like(x)
        dprevious = torch.empty_like(state) if state is not None else None
        buffer = torch.empty_like(x)
        for n in range(size):
            dC[..., n] = torch.mul(h[n], dy, out=buffer).sum(-1)
            dB[..., n] = torch.mul(g[n], x, out=buffer).sum(-1)
            dx.addcmul_(g[n], B[..., n, None])
            through = torch.mul(g[n], decay[n], out=buffer)  # dL/dh_{t-1}; times h_{t-1} it is dL/d(Delta_t A_n)
            if dprevious is not None:
                dprevious[..., n] = through[:, 0]
                through[:, 0] *= state[..., n]
            else:
                through[:, 0] = 0.0
            through[:, 1:] *= h[n, :, :-1]
            ddelta.addcmul_(through, A[:, n])
            dA[:, n] = through.mul_(delta).sum((0, 1))
        ddelta.addcmul_(dx, u)
        return dx * delta, ddelta, dA, dB, dC, dprevious


def _scan_without_gradient(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keeps one state (N, B, E) instead of all of them: when acting, memory traffic is the cost."""
    A = A.t()[:, None]  # (N, 1, E)
    h = u.new_zeros(A.shape[0], u.shape[0], u.shape[2])
    if state is not None:
        h.copy_(state.permute(2, 0, 1))  # always a copy: h is changed in place, the caller's state must not be
    y = torch.empty_like(u)
    x = delta * u
    for t in range(u.shape[1]):
        h.mul_(torch.exp_(delta[:, t] * A)).addcmul_(x[:, t], B[:, t].t()[..., None])
        torch.sum(h * C[:, t].t()[..., None], 0, out=y[:, t])
    return y, h.permute(1, 2, 0).contiguous()


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor | None = None, ends: bool = True
) -> tuple[Tensor, Tensor]:
    """The same as `selective_scan_ref`, faster. Without `ends`, who trains and has no use for it, the last state may
    come back empty."""
    dtype = u.dtype
    if (fused := kernels(u)) is not None:
        A, D = full(A, D)
        return fused.gated_scan(u, delta, None, A, B, C, D, None, state, ends)
    u, delta, A, B, C, D = full(u, delta, A, B, C, D)
    if torch.is_grad_enabled():
        y, last = _Scan.apply(u, delta, A, B, C, state)
    else:
        y, last = _scan_without_gradient(u, delta, A, B, C, state)
    return (y + D * u).to(dtype), last


def selective_scan_step(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One step: u, delta (B, E), B, C (B, N), state (B, E, N) -> y (B, E) and the next state."""
    dtype = u.dtype
    u, delta, A, B, C, D = full(u, delta, A, B, C, D)
    state = torch.exp(delta[..., None] * A) * state + (delta * u)[..., None] * B[:, None, :]
    return ((state * C[:, None, :]).sum(-1) + D * u).to(dtype), state
