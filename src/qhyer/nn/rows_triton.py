"""What kernels of rows share: which columns are a thread's, the norm of a row and its gradient, dropout, sums, tiles.

Importing qhyer does not import this module.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def columns(BLOCK: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """VECTOR columns in a row are one thread's. Were these more than make one row of a warp's share, the compiler would
    put some warps on other rows, and sums over rows would pass through shared memory."""
    return tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)


@triton.jit
def sigmoid(v):  # type: ignore[no-untyped-def]
    root = tl.rsqrt(
        1.0 + tl.exp2(v * -1.4426950408889634)
    )  # 1 / u as rsqrt(u)^2: two instructions, a division takes ten
    return root * root


@triton.jit
def softplus(v):  # type: ignore[no-untyped-def]
    return tl.where(v > 20.0, v, tl.log2(1.0 + tl.exp2(v * 1.4426950408889634)) * 0.6931471805599453)


@triton.jit
def row_norm(v, column, eps, C: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The norm of rows v without scale and bias, and 1 / deviation. Columns past C come out as zero."""
    if BLOCK != C:
        v = tl.where(column[None, :], v, 0.0)
    v -= (tl.sum(v, 1) * (1.0 / C))[:, None]
    if BLOCK != C:
        v = tl.where(column[None, :], v, 0.0)
    inverse = (1.0 / tl.sqrt(tl.sum(v * v, 1) * (1.0 / C) + eps))[:, None]
    return v * inverse, inverse


@triton.jit
def row_norm_backward(dv, v, inverse, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """From the gradient by v, normalised, that by what the norm was given. dv and v are zero past C."""
    first = (tl.sum(dv, 1) * (1.0 / C))[:, None]
    second = (tl.sum(dv * v, 1) * (1.0 / C))[:, None]
    return inverse * (dv - first - v * second)


@triton.jit
def kept(seed, row, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which numbers of these rows dropout keeps (ROWS, COLUMNS): those whose 16 random bits reach the threshold, as
    `dropping` gives it.

    Random bits are half of what a kernel of dropout does. Philox of seven rounds (the fewest with which it passes all
    of the usual tests) gives four words at a time: those of four neighbouring columns, in the upper bits for the first
    half of a row, in the lower bits for the second.
    """
    four = tl.arange(0, COLUMNS // 8)
    b0, b1, b2, b3 = tl.randint4x(seed, row[:, None] * (COLUMNS // 8) + four[None, :], n_rounds=7)
    words = tl.reshape(tl.join(tl.join(b0, b1), tl.join(b2, b3)), [ROWS, COLUMNS // 2])
    bits = tl.reshape(tl.permute(tl.join(words, words << 16), (0, 2, 1)), [ROWS, COLUMNS])
    return bits.to(tl.int32, bitcast=True) >= threshold


def dropping(drop: float) -> tuple[int, float]:
    """-> threshold of random bits, signed and in the upper half of a word, and the scale of what is kept."""
    dropped = min(round(drop * 2**16), 2**16 - 1)
    return (dropped - 2**15) * 2**16, 1.0 / (1.0 - dropped / 2**16)


@triton.jit
def zeros(N: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """N vectors of zeros."""
    found = ()
    for _ in tl.static_range(N):
        found = found + (tl.zeros([SIZE], tl.float32),)  # noqa: RUF005
    return found


def tile_of(width: int, columns: int, each: int) -> dict[str, int]:
    """`columns`: of a warp at most; `each`: elements of a thread."""
    block = max(16, triton.next_power_of_2(width))
    warps = min(8, max(1, block // columns))
    vector = min(4, max(1, block // (32 * warps)))
    return dict(BLOCK=block, VECTOR=vector, ROWS=max(1, each * 32 * warps // block), num_warps=warps)


def strips(width: int, sums: int) -> dict[str, int]:
    """Tiles for kernels that add up rows, and no columns: a strip of at most 128 columns, two of them a thread's, in
    all rows of the tile, so that a thread adds up its own. The more sums it keeps, the fewer rows beside them."""
    block = 128 if width > 64 else 64
    return dict(BLOCK=block, VECTOR=2, ROWS=8 if sums <= 8 else 4 if sums <= 16 else 2, num_warps=block // 64)
