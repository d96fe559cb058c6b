"""x.sum(0) for the partial sums that the other kernels leave: many rows, few thousand columns, one launch.

Every column is added up by one program in a fixed order, so the same inputs give the same bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 128  # wanted, about one a multiprocessor: narrow buffers are cut into narrow strips
TILE = 8192  # numbers read at a time: enough on the way from memory to keep it busy


@triton.jit
def _total_kernel(  # type: ignore[no-untyped-def]
    x_ptr, total_ptr, R, K, row, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, R, ROWS):
        inside = ((first + r) < R)[:, None] & (k < K)[None, :]
        total += tl.load(x_ptr + (first + r).to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
    at = k
    if WIDTH > 0:  # rows of so many numbers, `row` apart
        at = (k // WIDTH).to(tl.int64) * row + k % WIDTH
    tl.store(total_ptr + at, tl.sum(total, 0), mask=k < K)


def total(x: Tensor, out: Tensor | None = None) -> Tensor:
    """(R, ...) float32, contiguous -> (...), in float32, or into `out`: of any dtype, its rows a fixed step apart."""
    columns = math.prod(x.shape[1:])
    width = step = 0
    if out is None:
        out = torch.empty(x.shape[1:], device=x.device, dtype=torch.float32)
    elif not out.is_contiguous():
        lines = out.view(-1, out.shape[-1])
        width, step = lines.shape[1], lines.stride(0)
    # A strip is 8 columns at least, the 32 bytes in which memory is read: (1511, 1040), a seam's, is 130 strips, each
    # of them read in two rounds, where strips of 16 were 65 in three.
    strip = max(8, triton.next_power_of_2(columns // PROGRAMS + 1) // 2)
    rows = min(TILE // strip if strip == 8 else 512, triton.next_power_of_2(x.shape[0]))
    block = min(TILE // rows, 512, strip)
    _total_kernel[(triton.cdiv(columns, block),)](
        x, out, x.shape[0], columns, step, ROWS=rows, BLOCK=block, WIDTH=width, num_warps=4
    )
    return out


def front(x: Tensor, dim: int | None, size: int) -> Tensor:
    """For a kernel's vmap rule: vmap's axis, of this size, in front."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def share(tiles: int, programs: int) -> tuple[int, int]:
    """For a kernel whose programs leave a row of partial sums each: how many programs, and how many tiles each takes in
    turn, so that all have as much to do as the others, nearly."""
    steps = triton.cdiv(tiles, max(1, min(programs, tiles)))
    return triton.cdiv(tiles, steps), steps
