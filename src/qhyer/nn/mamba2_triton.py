"""Mamba-2's scan of a window as two Triton kernels, with softplus, skip and gate.

    Delta = softplus(dt + bias);  S_t = sum of Delta A up to t
    y_t = (sum_{s <= t} M_ts x_s + D x_t) * silu(z_t),     M_ts = C_t . (Delta_s B_s) exp(S_t - S_s)

A program has one head of one sequence, as in `attention_triton.py`: M is one tile in registers, so that there is no
recurrence to walk through and nothing to keep. Backward makes M once more. The gradient by S_t - S_s is dM_ts M_ts, of
which the sums over rows and over columns alone are needed, S being a sum itself; and these are sums over channels,

    sum_s dM_ts M_ts = dy_t . (M x)_t,      sum_t dM_ts M_ts = (M^T dy)_s . x_s

as in attention's backward. What their differences add up to from t on is the gradient by Delta_t A.

Products are in the dtype of `u` (float32 as three products of its halves) with float32 sums, everything else is
float32. B and C are those of all heads: each writes its part of their gradient, and of the parameters', and torch adds
them in a fixed order: no atomics, so that the same inputs give the same bits.

`mamba2.head_scan` is the reference. Where `mamba2_cuda.py` can serve, its kernels do the same by hand. Importing qhyer
does not import this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from qhyer.nn import mamba2_cuda
from qhyer.nn.attention_triton import MAX_LENGTH
from qhyer.nn.rows_triton import sigmoid, softplus
from qhyer.nn.total_triton import total
from qhyer.streams import Put, at_once

if TYPE_CHECKING:
    from qhyer.nn.mamba2 import Mamba2

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(ptr, t, c, L, row, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows t and columns c of a matrix; zero outside of its L rows and WIDTH columns."""
    inside = (t < L)[:, None] & (c < WIDTH)[None, :]
    return tl.load(ptr + t[:, None] * row + c[None, :], mask=inside, other=0.0)


@triton.jit
def _steps(dt_ptr, t, L, dt_row, bias):  # type: ignore[no-untyped-def]
    """Delta, zero past the end."""
    v = tl.load(dt_ptr + t * dt_row, mask=t < L, other=0.0).to(tl.float32) + bias
    return tl.where(t < L, softplus(v), 0.0)


@triton.jit
def _decays(after, before, past):  # type: ignore[no-untyped-def]
    """exp(S_t - S_s), zero where s is not past; S in powers of two."""
    return tl.exp2(tl.where(past, after - before, -float("inf")))


@triton.jit
def _head_scan_forward_kernel(  # type: ignore[no-untyped-def]
    u_ptr, dt_ptr, bias_ptr, A_ptr, D_ptr, z_ptr, y_ptr,  # u: x of all heads, B, C
    L, H, u_batch, u_row, dt_batch, dt_row, z_batch, z_row,
    WIDTH: tl.constexpr, N: tl.constexpr, T: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, p, n = tl.arange(0, T), tl.arange(0, P), tl.arange(0, S)
    inner = H * WIDTH
    u_ptr += b * u_batch
    x = _tile(u_ptr + h * WIDTH, t, p, L, u_row, WIDTH)
    B = _tile(u_ptr + inner, t, n, L, u_row, N)
    C = _tile(u_ptr + inner + N, t, n, L, u_row, N)
    z = _tile(z_ptr + b * z_batch + h * WIDTH, t, p, L, z_row, WIDTH).to(tl.float32)
    delta = _steps(dt_ptr + b * dt_batch + h, t, L, dt_row, tl.load(bias_ptr + h))
    B = (B.to(tl.float32) * delta[:, None]).to(x.dtype)
    elapsed = tl.cumsum(delta * (tl.load(A_ptr + h) * LOG2E), 0)
    decays = _decays(elapsed[:, None], elapsed[None, :], t[:, None] >= t[None, :])
    M = tl.dot(C, tl.trans(B), input_precision="tf32x3") * decays
    y = tl.dot(M.to(x.dtype), x, input_precision="tf32x3") + tl.load(D_ptr + h) * x.to(tl.float32)
    y *= z * sigmoid(z)
    inside = (t < L)[:, None] & (p < WIDTH)[None, :]
    tl.store(y_ptr + b * L * inner + h * WIDTH + t[:, None] * inner + p[None, :], y, mask=inside)


@triton.jit
def _head_scan_backward_kernel(  # type: ignore[no-untyped-def]
    u_ptr, dt_ptr, bias_ptr, A_ptr, D_ptr, z_ptr, dy_ptr,
    du_ptr, dz_ptr, ddt_ptr,
    dBC_ptr, dparameter_ptr,  # parts of a head: (H, B, L, 2 N), of a sequence: (B, 3, H) of bias, A_log and D
    L, H, batch, u_batch, u_row, dt_batch, dt_row, z_batch, z_row, dy_batch, dy_row,
    du_batch, du_row, dz_batch, dz_row, ddt_batch, ddt_row,
    WIDTH: tl.constexpr, N: tl.constexpr, T: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, p, n = tl.arange(0, T), tl.arange(0, P), tl.arange(0, S)
    inner = H * WIDTH
    inside = (t < L)[:, None] & (p < WIDTH)[None, :]
    u_ptr += b * u_batch
    x = _tile(u_ptr + h * WIDTH, t, p, L, u_row, WIDTH)
    B = _tile(u_ptr + inner, t, n, L, u_row, N)
    C = _tile(u_ptr + inner + N, t, n, L, u_row, N)
    A, D = tl.load(A_ptr + h), tl.load(D_ptr + h)
    delta = _steps(dt_ptr + b * dt_batch + h, t, L, dt_row, tl.load(bias_ptr + h))
    elapsed = tl.cumsum(delta * (A * LOG2E), 0)
    # M^T, and its gradient likewise: so dy, which the gate has passed through, is the second factor of its products. As
    # the first of one the compiler would compute it, with its sigmoid, once more (2656 instructions instead of 3032).
    decays = _decays(elapsed[None, :], elapsed[:, None], t[None, :] >= t[:, None])
    entering = (B.to(tl.float32) * delta[:, None]).to(x.dtype)
    M = (tl.dot(entering, tl.trans(C), input_precision="tf32x3") * decays).to(x.dtype)
    y = tl.dot(tl.trans(M), x, input_precision="tf32x3")
    # Not before: they would take registers from the products.
    z = _tile(z_ptr + b * z_batch + h * WIDTH, t, p, L, z_row, WIDTH).to(tl.float32)
    dy = _tile(dy_ptr + b * dy_batch + h * WIDTH, t, p, L, dy_row, WIDTH).to(tl.float32)
    s = sigmoid(z)
    dz = dy * (y + D * x.to(tl.float32)) * s * (1.0 + z * (1.0 - s))
    tl.store(dz_ptr + b * dz_batch + h * WIDTH + t[:, None] * dz_row + p[None, :], dz, mask=inside)
    dy *= z * s
    dD = tl.sum(tl.sum(dy * x.to(tl.float32), 1), 0)
    low = dy.to(x.dtype)
    rows = tl.sum(low.to(tl.float32) * y, 1)
    dx = tl.dot(M, low, input_precision="tf32x3")
    later = tl.cumsum(rows - tl.sum(dx * x.to(tl.float32), 1), 0, reverse=True)  # by Delta_t A
    du_ptr += b * du_batch
    tl.store(du_ptr + h * WIDTH + t[:, None] * du_row + p[None, :], dx + D * dy, mask=inside)
    dG = (tl.dot(x, tl.trans(low), input_precision="tf32x3") * decays).to(x.dtype)
    dentering = tl.dot(dG, C, input_precision="tf32x3")
    known = (t < L)[:, None] & (n < N)[None, :]
    dBC_ptr += (h * batch + b) * L * (2 * N)
    at = t[:, None] * (2 * N) + n[None, :]
    tl.store(dBC_ptr + at, dentering * delta[:, None], mask=known)
    tl.store(dBC_ptr + N + at, tl.dot(tl.trans(dG), entering, input_precision="tf32x3"), mask=known)
    ddelta = tl.sum(dentering * B.to(tl.float32), 1) + A * later
    ddt = tl.where(t < L, ddelta * (1.0 - tl.exp2(-delta * LOG2E)), 0.0)  # softplus' is 1 - exp(-softplus)
    tl.store(ddt_ptr + b * ddt_batch + h + t * ddt_row, ddt, mask=t < L)
    dparameter_ptr += b * 3 * H + h
    tl.store(dparameter_ptr, tl.sum(ddt, 0))
    tl.store(dparameter_ptr + H, A * tl.sum(delta * later, 0))
    tl.store(dparameter_ptr + 2 * H, dD)


def _launch(length: int, width: int, size: int) -> dict[str, int]:
    T, P, S = (max(16, triton.next_power_of_2(each)) for each in (length, width, size))
    return dict(WIDTH=width, N=size, T=T, P=P, S=S, num_warps=8 if max(T, P) > 64 else 4)


def shared_bytes(length: int, width: int, size: int, dtype: torch.dtype) -> int:
    """Shared memory that backward asks for at most, as Triton 3.6 and 3.9 compile it for Hopper: two tiles as M, two of
    channels, four of states."""
    tile = _launch(length, width, size)
    T, P, S = tile["T"], tile["P"], tile["S"]
    return 2 * T * (T + P + 2 * S) * dtype.itemsize


def fits(mamba: Mamba2, length: int, dtype: torch.dtype, room: int) -> bool:
    """Whether a head's tiles find room on a chip with so many bytes of shared memory."""
    width = mamba.inner // mamba.heads
    return (
        length <= MAX_LENGTH
        and mamba.state_size <= 128
        and shared_bytes(length, width, mamba.state_size, dtype) <= room
    )


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch and time; the last dimension is contiguous."""
    assert all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def forward(u: Tensor, dt: Tensor, bias: Tensor, A: Tensor, D: Tensor, z: Tensor) -> Tensor:
    """u (B, L, E + 2 N): x', B' and C' side by side; dt (B, L, H); bias, A and D (H,), float32; z (B, L, E)
    -> y (B, L, E) in u's dtype."""
    batch, length, width = z.shape
    heads = len(D)
    y = torch.empty(batch, length, width, device=u.device, dtype=u.dtype)
    if mamba2_cuda.suits((dt,), (bias, A, D), (u, y, z)):
        mamba2_cuda.forward(u, dt, bias, A, D, z, y)
        return y
    launch = _launch(length, width // heads, (u.shape[2] - width) // 2)
    if launch["num_warps"] == 4 and u.element_size() == 2:
        launch["maxnreg"] = 128  # one less than left to itself: four programs on a multiprocessor, not three
    _head_scan_forward_kernel[(heads, batch)](u, dt, bias, A, D, z, y, length, heads, *_strides(u, dt, z), **launch)
    return y


def backward(
    u: Tensor, dt: Tensor, bias: Tensor, A: Tensor, D: Tensor, z: Tensor, dy: Tensor, dz: Tensor, ddt: Tensor,
    put: Put = at_once,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Writes dz and ddt, whose batch and rows may lie anywhere -> du and, in float32, d[bias; A_log; D] (3, H)."""
    batch, length, width = z.shape
    heads, size = len(D), (u.shape[2] - width) // 2
    du = torch.empty(u.shape, device=u.device, dtype=u.dtype)
    parts = torch.empty(heads, batch, length, 2 * size, device=u.device, dtype=torch.float32)
    dparameter = torch.empty(batch, 3, heads, device=u.device, dtype=torch.float32)
    if mamba2_cuda.suits((dt, ddt), (bias, A, D), (u, dy, du, dz, z)):
        mamba2_cuda.backward(u, dt, bias, A, D, z, dy, du, dz, ddt, parts, dparameter)
    else:
        _head_scan_backward_kernel[(heads, batch)](
            u, dt, bias, A, D, z, dy, du, dz, ddt, parts, dparameter, length, heads, batch,
            *_strides(u, dt, z, dy, du, dz, ddt), **_launch(length, width // heads, size),
        )  # fmt: skip
    total(parts, du[..., width:])
    return du, put(lambda: total(dparameter), [dparameter], D)
