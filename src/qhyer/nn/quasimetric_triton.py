"""The length of a union of intervals, `union_length` of nn/quasimetric.py, as Triton kernels, forward and backward.

In plain torch the k^2 comparisons of every group are some twenty tensors (..., k, k) that are written and read again;
here they stay in registers. Backward makes the marks of the union's ends once more and keeps nothing but x and y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qhyer.nn.total_triton import front


@triton.jit
def _ends(x_ptr, y_ptr, M, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's groups: their numbers (rows,), places and intervals (rows, BLOCK), and which left and which right
    ends are ends of the union: those that no other interval covers. Of intervals with a common end, the first has it.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    known = row < M
    at = row[:, None] * K + i[None, :]
    cell = known[:, None] & (i < K)[None, :]
    x = tl.load(x_ptr + at, mask=cell, other=0.0)
    y = tl.load(y_ptr + at, mask=cell, other=0.0)
    left = x < y
    right = left
    for j in tl.static_range(K):
        xj = tl.load(x_ptr + row * K + j, mask=known, other=0.0)[:, None]
        yj = tl.load(y_ptr + row * K + j, mask=known, other=0.0)[:, None]
        before = (i > j)[None, :]
        valid = xj < yj
        left = left & ~(((xj < x) | ((xj == x) & before)) & (yj >= x) & valid)
        right = right & ~(((yj > y) | ((yj == y) & before)) & (xj <= y) & valid)
    return row, at, cell, x, y, left, right


@triton.jit(do_not_specialize=["M"])
def _union_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, length_ptr, M, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row, _at, _cell, x, y, left, right = _ends(x_ptr, y_ptr, M, K, BLOCK, ROWS)
    length = tl.sum(tl.where(right, y, 0.0) - tl.where(left, x, 0.0), 1)
    length += tl.sum(tl.where((x != x) | (y != y), x + y, 0.0), 1)  # no comparison shows what is not a number
    tl.store(length_ptr + row, length, mask=row < M)


@triton.jit(do_not_specialize=["M"])
def _union_backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, dlength_ptr, dx_ptr, dy_ptr, M, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row, at, cell, _x, _y, left, right = _ends(x_ptr, y_ptr, M, K, BLOCK, ROWS)
    dlength = tl.load(dlength_ptr + row, mask=row < M, other=0.0)[:, None]
    tl.store(dx_ptr + at, tl.where(left, -dlength, 0.0), mask=cell)
    tl.store(dy_ptr + at, tl.where(right, dlength, 0.0), mask=cell)


def _launch(k: int, rows: int) -> tuple[tuple[int], dict[str, int]]:
    block = triton.next_power_of_2(k)
    each = max(1, 512 // block)  # four numbers a thread
    return (triton.cdiv(rows, each),), dict(K=k, BLOCK=block, ROWS=each, num_warps=4)


@torch.library.custom_op("qhyer::union_length", mutates_args=())
def union_length(x: Tensor, y: Tensor) -> Tensor:
    """(..., k) and (..., k), float32 -> (...)."""
    x, y = x.contiguous(), y.contiguous()
    length = x.new_empty(x.shape[:-1])
    grid, sizes = _launch(x.shape[-1], length.numel())
    _union_forward_kernel[grid](x, y, length, length.numel(), **sizes)
    return length


@union_length.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1])


@torch.library.custom_op("qhyer::union_length_backward", mutates_args=())
def union_length_backward(x: Tensor, y: Tensor, dlength: Tensor) -> tuple[Tensor, Tensor]:
    x, y, dlength = x.contiguous(), y.contiguous(), dlength.contiguous()
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    grid, sizes = _launch(x.shape[-1], dlength.numel())
    _union_backward_kernel[grid](x, y, dlength, dx, dy, dlength.numel(), **sizes)
    return dx, dy


@union_length_backward.register_fake
def _(x: Tensor, y: Tensor, dlength: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), y.new_empty(y.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dlength: Tensor) -> tuple[Tensor, Tensor]:
    dx, dy = union_length_backward(*ctx.saved_tensors, dlength)
    return dx, dy


union_length.register_autograd(_backward, setup_context=_setup)


@union_length.register_vmap
def _(info: Any, in_dims: Sequence[int | None], x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return union_length(front(x, in_dims[0], info.batch_size), front(y, in_dims[1], info.batch_size)), 0
