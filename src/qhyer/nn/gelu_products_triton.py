"""The wide middle of an MLP, as Triton kernels: the products that make it, with GELU on the way out.

    u = h W^T,   y = GELU(u + bias)                               forward: h (M, d), W (F, d)
    dy = g V,    du = dy GELU'(u + bias),   y once more           backward: g (M, d), V (d, F)

A product apart writes (M, F), the widest tensor of a block, for the next kernel to read: forward that is u, backward
dy. Here a program has a tile of the product in registers, in float32, and goes on from there; dy is never written. y is
not kept for backward, where it takes no more than a store.

The middle is narrow in d, so these kernels wait for memory and not for the tensor cores. Programs with the same rows of
h come one after the other, which is why h is read from memory once; the weight stays in the cache. The column sums of
du, the bias's gradient, are left as one row by every tile of rows and added in a fixed order: no atomics, so that the
same inputs give the same bits.

Values are rounded where the products apart would round them: u, and dy, to the dtype of the products before anything is
made of them. Importing qhyer does not import this module.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qhyer.nn.attention_triton import shared_memory
from qhyer.nn.seam_triton import _gelu
from qhyer.nn.total_triton import total
from qhyer.streams import aside

MAX_WIDTH = 512  # of d: beyond, multiplying takes longer than writing the result, and is better left to cuBLAS


class Tile(NamedTuple):
    """What a program has of a product: `strip` tiles of rows x columns, one after the other, `depth` of d at a time.
    Where that is all of d, the rows are loaded once for all of them.

    On the way out a tile goes in `pieces`, since GELU of all of it at once would need more registers than there are;
    backward, `ahead` of the pieces of u are loaded before they are needed.
    """

    rows: int
    columns: int
    depth: int
    strip: int
    pieces: int
    ahead: int
    warps: int
    stages: int


# In half precision two such programs fit on a multiprocessor of an H200: one computes while the other waits for memory.
FORWARD = Tile(128, 128, 64, 1, 1, 0, 8, 3)
BACKWARD = Tile(128, 128, 64, 1, 4, 0, 8, 3)


@triton.jit
def _load(ptr, inside, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WHOLE:
        x = tl.load(ptr)
    else:
        x = tl.load(ptr, mask=inside, other=0.0)
    return x


@triton.jit
def _store(ptr, x, inside, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WHOLE:
        tl.store(ptr, x)
    else:
        tl.store(ptr, x, mask=inside)


@triton.jit
def _rows(x_ptr, r, k, known, K: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    return _load(x_ptr + r[:, None] * K + k[None, :], known[:, None] & (k < K)[None, :], WHOLE)


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    weight_ptr, k, e, K: tl.constexpr, F: tl.constexpr, DOWN: tl.constexpr, WHOLE: tl.constexpr
):
    """(depth, columns) of the weight, which lies as (K, F) where it is the one of the way down, else as (F, K)."""
    at = k[:, None] * (F if DOWN else 1) + e[None, :] * (1 if DOWN else K)
    return _load(weight_ptr + at, (k < K)[:, None] & (e < F)[None, :], WHOLE)


@triton.jit
def _read(ptr, at, r, known, F: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """These rows of (M, F), and its columns from `at` on."""
    e = at + tl.arange(0, WIDTH)
    return _load(ptr + r[:, None] * F + e[None, :], known[:, None] & (e < F)[None, :], WHOLE)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, x, r, e, known, K: tl.constexpr, F: tl.constexpr, DOWN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A tile of the product, float32. `x`: its rows, where a tile is as deep as they are long."""
    k = tl.arange(0, DEPTH)
    if DEPTH >= K:
        out = tl.dot(x, _weights(weight_ptr, k, e, K, F, DOWN, WHOLE), input_precision="tf32x3")
    else:
        out = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, K, DEPTH):
            part = _rows(x_ptr, r, first + k, known, K, WHOLE)
            weight = _weights(weight_ptr, first + k, e, K, F, DOWN, WHOLE)
            out = tl.dot(part, weight, out, input_precision="tf32x3")
    return out


@triton.jit
def _halves(x):  # type: ignore[no-untyped-def]
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def _pieces(x, PIECES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile cut into 1, 2 or 4 from left to right. A thread has columns of all of them, so that nothing moves."""
    pieces = (x,)
    if PIECES > 1:
        pieces = _halves(x)
    if PIECES == 4:
        pieces = _halves(pieces[0]) + _halves(pieces[1])  # type: ignore[misc]
    return pieces


@triton.jit(do_not_specialize=["M"])
def _up_gelu_kernel(  # type: ignore[no-untyped-def]
    h_ptr, weight_ptr, bias_ptr, u_ptr, y_ptr, M, K: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STRIP: tl.constexpr, PIECES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    strips: tl.constexpr = (F + STRIP * COLUMNS - 1) // (STRIP * COLUMNS)
    width: tl.constexpr = COLUMNS // PIECES
    start = tl.program_id(0) // strips * ROWS
    strip = tl.program_id(0) % strips * STRIP
    r = tl.arange(0, ROWS)
    known = start + r < M
    base = start.to(tl.int64) * F
    h_ptr += start.to(tl.int64) * K
    h = 0.0
    if DEPTH >= K:
        h = _rows(h_ptr, r, tl.arange(0, DEPTH), known, K, WHOLE)
    for j in range(STRIP):
        at = (strip + j) * COLUMNS
        u = _product(
            h_ptr, weight_ptr, h, r, at + tl.arange(0, COLUMNS), known, K, F, False, ROWS, COLUMNS, DEPTH, WHOLE
        )
        parts = _pieces(u.to(u_ptr.dtype.element_ty), PIECES)  # backward knows u as it is written
        for p in tl.static_range(PIECES):
            e = at + p * width + tl.arange(0, width)
            cell = known[:, None] & (e < F)[None, :]
            to = r[:, None] * F + e[None, :]
            _store(u_ptr + base + to, parts[p], cell, WHOLE)
            v = parts[p].to(tl.float32) + _load(bias_ptr + e, e < F, WHOLE).to(tl.float32)[None, :]
            phi, _bell = _gelu(v)
            _store(y_ptr + base + to, v * phi, cell, WHOLE)


@triton.jit(do_not_specialize=["M"])
def _down_gelu_backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, weight_ptr, u_ptr, bias_ptr, du_ptr, y_ptr, partial_ptr,  # partial (tiles of rows, F)
    M, K: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STRIP: tl.constexpr, PIECES: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    strips: tl.constexpr = (F + STRIP * COLUMNS - 1) // (STRIP * COLUMNS)
    width: tl.constexpr = COLUMNS // PIECES
    start = tl.program_id(0) // strips * ROWS
    strip = tl.program_id(0) % strips * STRIP
    r = tl.arange(0, ROWS)
    known = start + r < M
    base = start.to(tl.int64) * F
    grad_ptr += start.to(tl.int64) * K
    partial_ptr += (tl.program_id(0) // strips).to(tl.int64) * F
    grad = 0.0
    if DEPTH >= K:
        grad = _rows(grad_ptr, r, tl.arange(0, DEPTH), known, K, WHOLE)
    for j in range(STRIP):
        at = (strip + j) * COLUMNS
        us = ()
        for p in tl.static_range(AHEAD):
            us = us + (_read(u_ptr + base, at + p * width, r, known, F, width, WHOLE),)  # noqa: RUF005
        dy = _product(
            grad_ptr, weight_ptr, grad, r, at + tl.arange(0, COLUMNS), known, K, F, True, ROWS, COLUMNS, DEPTH, WHOLE
        )
        parts = _pieces(dy.to(u_ptr.dtype.element_ty), PIECES)
        for p in tl.static_range(PIECES):
            e = at + p * width + tl.arange(0, width)
            cell = known[:, None] & (e < F)[None, :]
            to = r[:, None] * F + e[None, :]
            if p + AHEAD < PIECES:
                us = us + (_read(u_ptr + base, at + (p + AHEAD) * width, r, known, F, width, WHOLE),)  # noqa: RUF005
            v = us[p].to(tl.float32) + _load(bias_ptr + e, e < F, WHOLE).to(tl.float32)[None, :]
            phi, bell = _gelu(v)
            du = parts[p].to(tl.float32) * (phi + v * bell * 0.3989422804014327)  # 1 / sqrt(2 pi)
            _store(du_ptr + base + to, du, cell, WHOLE)
            _store(y_ptr + base + to, v * phi, cell, WHOLE)
            # Rows beyond M have a gradient of zero and add zero.
            _store(partial_ptr + e, tl.sum(du, 0), e < F, WHOLE)


def _fitted(tile: Tile, rows: int, width: int, wide: int, size: int) -> Tile:
    """The tile for (rows, width) by (width, wide), of numbers of so many bytes: no larger than they are."""

    def within(block: int, length: int) -> int:
        return min(block, max(16, triton.next_power_of_2(length)))

    columns = within(tile.columns, wide)
    pieces = min(tile.pieces, columns // 16)
    return tile._replace(
        rows=within(tile.rows, rows),
        columns=columns,
        depth=within(max(16, tile.depth * 2 // size), width),
        strip=min(tile.strip, triton.cdiv(wide, columns)),
        pieces=pieces,
        ahead=min(tile.ahead, pieces),
    )


def _launch(tile: Tile, rows: int, width: int, wide: int) -> tuple[tuple[int], dict[str, int | bool]]:
    """The grid, and what kernels are compiled for; masks only where something sticks out."""
    strip = tile.strip * tile.columns
    whole = rows % tile.rows == 0 and wide % strip == 0 and width % tile.depth == 0
    return (triton.cdiv(rows, tile.rows) * triton.cdiv(wide, strip),), dict(
        K=width, F=wide, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, STRIP=tile.strip, PIECES=tile.pieces,
        WHOLE=whole, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def suits(h: Tensor, weight: Tensor) -> bool:
    """Whether these kernels are the way to multiply h (M, d) by a weight (F, d): half precision, where rows begin at
    multiples of 16 bytes, on a GPU with room for a tile. float32 has its own settings, which are cuBLAS's to read."""
    wide, width = weight.shape
    room = max(tile.stages * (tile.rows + tile.columns) * tile.depth * 2 for tile in (FORWARD, BACKWARD))
    return (
        h.dtype in (torch.bfloat16, torch.float16)
        and width <= MAX_WIDTH
        and width % 8 == wide % 8 == 0
        and room <= shared_memory(h.device)
    )


def forward(h: Tensor, weight: Tensor, bias: Tensor, tile: Tile = FORWARD) -> tuple[Tensor, Tensor]:
    """`up_gelu`, with another tile."""
    h, weight = h.contiguous(), weight.contiguous()
    (rows, width), wide = h.shape, weight.shape[0]
    u, y = h.new_empty(rows, wide), h.new_empty(rows, wide)
    tile = _fitted(tile, rows, width, wide, h.element_size())
    grid, settings = _launch(tile, rows, width, wide)
    _up_gelu_kernel[grid](h, weight, bias, u, y, rows, **settings)
    return u, y


def backward(
    grad: Tensor, weight: Tensor, u: Tensor, bias: Tensor, tile: Tile = BACKWARD
) -> tuple[Tensor, Tensor, Tensor]:
    """`down_gelu_backward`, with another tile."""
    grad, weight, u = grad.contiguous(), weight.contiguous(), u.contiguous()
    (rows, width), wide = grad.shape, weight.shape[1]
    du, y = torch.empty_like(u), torch.empty_like(u)
    tile = _fitted(tile, rows, width, wide, u.element_size())
    grid, settings = _launch(tile, rows, width, wide)
    partial = u.new_empty(triton.cdiv(rows, tile.rows), wide, dtype=torch.float32)
    _down_gelu_backward_kernel[grid](grad, weight, u, bias, du, y, partial, rows, AHEAD=tile.ahead, **settings)
    return du, aside(lambda: total(partial), [partial]), y


@torch.library.custom_op("qhyer::up_gelu", mutates_args=())
def up_gelu(h: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """-> u = h W^T and GELU(u + bias), that of the error function; h (M, d) and W (F, d) of one dtype, the results'."""
    return forward(h, weight, bias)


@up_gelu.register_fake
def _(h: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    shape = h.shape[0], weight.shape[0]
    return h.new_empty(shape), h.new_empty(shape)


@torch.library.custom_op("qhyer::down_gelu_backward", mutates_args=())
def down_gelu_backward(grad: Tensor, weight: Tensor, u: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient (M, d) of y V^T, V (d, F) and y = GELU(u + bias): -> du, dbias in float32, and y again."""
    return backward(grad, weight, u, bias)


@down_gelu_backward.register_fake
def _(grad: Tensor, weight: Tensor, u: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty(u.shape[1], dtype=torch.float32), u.new_empty(u.shape)
