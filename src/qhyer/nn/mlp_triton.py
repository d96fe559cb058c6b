"""What OGBench's value networks do between their matrix products, as Triton kernels, forward and backward:

    y = LN(GELU(u + bias)) * scale + shift,    u = x W, the activation before the norm, GELU in its tanh form

In plain torch that is three kernels forward and, with the sums over rows that bias, scale and shift want, some ten
backward; these networks are small (1024 x 512), so that starting a kernel takes as long as its work. Here it is one
forward, and one and the sum of its partial sums backward, which keeps u alone and computes the rest again.

An ensemble's members, each with its own parameters, are the second axis of the grid. Sums over rows leave each program
as a row of partial sums, added in a fixed order: no atomics, so that the same inputs give the same bits.

Everything is float32 inside, whatever the tensors are. Importing qhyer does not import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qhyer.nn.rows_triton import columns, row_norm, row_norm_backward, sigmoid, tile_of
from qhyer.nn.total_triton import front, share
from qhyer.nn.total_triton import total as _total

PROGRAMS = 264  # of a backward launch, of all members: two on every multiprocessor of an H200, each with partial sums
SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
CUBE = tl.constexpr(0.044715)


@triton.jit
def _half_tanh(x):  # type: ignore[no-untyped-def]
    """(1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, which is a sigmoid: GELU is x times this."""
    return sigmoid((x + x * x * x * CUBE) * SLOPE)


@triton.jit(do_not_specialize=["M"])
def _gelu_norm_forward_kernel(  # type: ignore[no-untyped-def]
    u_ptr, bias_ptr, scale_ptr, shift_ptr, y_ptr,  # (members, M, C), thrice (members, C), (members, M, C)
    M, eps, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    e = columns(BLOCK, VECTOR)
    column = e < C
    cell = (start + r < M)[:, None] & column[None, :]
    at = (member * M + start) * C + r[:, None] * C + e[None, :]
    of = member * C + e
    x = tl.load(u_ptr + at, mask=cell, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + of, mask=column, other=0.0)[None, :]
    v, _inverse = row_norm(x * _half_tanh(x), column, eps, C, BLOCK)
    scale = tl.load(scale_ptr + of, mask=column, other=0.0)[None, :]
    shift = tl.load(shift_ptr + of, mask=column, other=0.0)[None, :]
    tl.store(y_ptr + at, v * scale + shift, mask=cell)


@triton.jit(do_not_specialize=["M", "steps"])
def _gelu_norm_backward_kernel(  # type: ignore[no-untyped-def]
    u_ptr, bias_ptr, scale_ptr, dy_ptr, du_ptr,
    partial_ptr,  # (programs, 3, members, C): of bias, scale, shift
    M, eps, steps, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, ROWS)
    e = columns(BLOCK, VECTOR)
    column = e < C
    of = member * C + e
    bias = tl.load(bias_ptr + of, mask=column, other=0.0)[None, :]
    scale = tl.load(scale_ptr + of, mask=column, other=0.0)[None, :]
    dbias = tl.zeros([BLOCK], tl.float32)
    dscale = tl.zeros([BLOCK], tl.float32)
    dshift = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        start = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS
        cell = (start + r < M)[:, None] & column[None, :]
        at = (member * M + start) * C + r[:, None] * C + e[None, :]
        # Gradients outside are loaded as zero and add zero to every sum.
        dy = tl.load(dy_ptr + at, mask=cell, other=0.0).to(tl.float32)
        x = tl.load(u_ptr + at, mask=cell, other=0.0).to(tl.float32) + bias
        half = _half_tanh(x)
        v, inverse = row_norm(x * half, column, eps, C, BLOCK)
        dv = row_norm_backward(dy * scale, v, inverse, C)
        # d(x half)/dx = half + x half (1 - half) 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
        du = dv * (half + x * half * (1.0 - half) * SLOPE * (1.0 + x * x * CUBE * 3.0))
        if BLOCK != C:
            du = tl.where(cell, du, 0.0)
        tl.store(du_ptr + at, du, mask=cell)
        if SUMS:
            dbias += tl.sum(du, 0)
            dscale += tl.sum(dy * v, 0)
            dshift += tl.sum(dy, 0)
    if SUMS:
        members = tl.num_programs(1)
        partial_ptr += tl.program_id(0).to(tl.int64) * (3 * members * C) + of
        tl.store(partial_ptr, dbias, mask=column)
        tl.store(partial_ptr + members * C, dscale, mask=column)
        tl.store(partial_ptr + 2 * members * C, dshift, mask=column)


@torch.library.custom_op("qhyer::gelu_norm", mutates_args=())
def gelu_norm(u: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """u (members, M, C); bias, scale, shift (members, 1, C) -> (members, M, C), all float32."""
    u = u.contiguous()
    members, rows, width = u.shape
    y = torch.empty_like(u)
    tile = tile_of(width, 256, 32)
    _gelu_norm_forward_kernel[(triton.cdiv(rows, tile["ROWS"]), members)](
        u, bias.contiguous(), scale.contiguous(), shift.contiguous(), y, rows, eps, C=width, **tile
    )
    return y


@gelu_norm.register_fake
def _(u: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return u.new_empty(u.shape)


@torch.library.custom_op("qhyer::gelu_norm_backward", mutates_args=())
def gelu_norm_backward(
    u: Tensor, bias: Tensor, scale: Tensor, dy: Tensor, eps: float, sums: bool
) -> tuple[Tensor, Tensor]:
    """-> du and, if `sums` is set, d[bias; scale; shift] (3, members, 1, C), else nothing of it (0)."""
    u, dy = u.contiguous(), dy.contiguous()
    members, rows, width = u.shape
    du = torch.empty_like(u)
    tile = tile_of(width, 256, 32)
    programs, steps = share(triton.cdiv(rows, tile["ROWS"]), max(1, PROGRAMS // members))
    partial = u.new_empty((programs, 3, members, 1, width) if sums else 0, dtype=torch.float32)
    _gelu_norm_backward_kernel[(programs, members)](
        u, bias.contiguous(), scale.contiguous(), dy, du, partial, rows, eps, steps, C=width, **tile, SUMS=sums
    )
    return du, _total(partial) if sums else partial


@gelu_norm_backward.register_fake
def _(u: Tensor, bias: Tensor, scale: Tensor, dy: Tensor, eps: float, sums: bool) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty((3, u.shape[0], 1, u.shape[-1]) if sums else 0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, bias, scale, _shift, ctx.eps = inputs
    ctx.save_for_backward(u, bias, scale)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    u, bias, scale = ctx.saved_tensors
    sums = any(ctx.needs_input_grad[1:4])  # not where an actor climbs a critic that stays as it is
    du, parameters = gelu_norm_backward(u, bias, scale, dy, ctx.eps, sums)
    return du, *(parameters.view(3, *bias.shape) if sums else (None, None, None)), None


gelu_norm.register_autograd(_backward, setup_context=_setup)


@gelu_norm.register_vmap
def _(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> tuple[Tensor, int]:
    """Networks of several seeds are more members; autograd lies below, and sees one call."""
    *tensors, eps = inputs
    folded = (front(x, dim, info.batch_size).flatten(0, 1) for x, dim in zip(tensors, in_dims))
    return gelu_norm(*folded, eps).unflatten(0, (info.batch_size, -1)), 0
