"""What sits between the matrix products of a pre-norm decoder, as Triton kernels, forward and backward.

A seam ends one sublayer and begins the next:

    r = y + bias,  or of two branches  alpha (y + bias) + (1 - alpha) y2
    x <- x + dropout(r);   h = LN(x);   alpha' = sigmoid(w . h + b)

In plain torch this is five to ten kernels, each of which reads and writes (M, d). Nothing here computes much, so what
counts is that every such tensor is read once and written once. Besides, biases of the products on either side move in
here, forward (they are added on the way) and backward (their column sums are taken on the way).

A program has one warp for every 256 columns and a tile of whole rows: at widths up to 256 a row's sums are shuffles
within a warp. Columns come in fours (`_columns`): 16 bytes of float32, 8 of bfloat16. Left to itself, the compiler
would choose 16 bytes for either, and move tiles from one layout to the other through shared memory.

Backward walks through many tiles per program, with the gradients of the parameters in registers; every program writes
one row of partial sums, and torch adds those in a fixed order: no atomics, so that the same inputs give the same bits.

Dropout's mask is a function of a seed and the place in the matrix (`kept`, a call of Philox for eight columns);
backward computes it again. The seed is a tensor on the device, so that a CUDA graph draws a new one at every replay.

Rows that nobody reads after a seam need not leave it (`read`): a decoder's heads are read at a step's tokens but for
its action, so the last block's seam takes these rows from where they lie and writes them close together. All that comes
after, that block's MLP and the last norm, forward and backward, has fewer rows and need not know. Backward is given
gradients that lie close together, and writes them in full, zeros at the rows left out: the branches before saw all.

Everything is float32 inside, whatever the tensors are. Importing qhyer does not import this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from qhyer.nn.rows_triton import dropping, kept
from qhyer.nn.total_triton import share
from qhyer.nn.total_triton import total as _total
from qhyer.streams import aside

SEAM_WARPS = 12 * 132  # of one backward launch: 12 on every multiprocessor of an H200, each leaving partial sums
SEAM_REGISTERS = 168  # that so many have; told, the compiler uses them to ask for tensors early
REGISTERS = 65536  # of a multiprocessor, and so the most that a program's threads have together
WARPS = 8 * 132  # of GELU's, and of column sums
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _columns(BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.max_contiguous(tl.arange(0, BLOCK), 4)


@triton.jit
def _source(row, L: tl.constexpr, P: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the rows lie that are read, `row` by row: the first R of every P in windows of L."""
    taken: tl.constexpr = (L + P - 1) // P * R  # of a window
    return row // taken * L + row % taken // R * P + row % R


# A seed may be any element of a tensor of seeds: one kernel for all, however it is aligned.
@triton.jit(do_not_specialize=["M", "threshold"], do_not_specialize_on_alignment=["seed_ptr"])
def _seam_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, y_bias_ptr, y2_ptr, alpha_ptr, weight_ptr, bias_ptr, gate_weight_ptr, gate_bias_ptr, seed_ptr,
    x_out_ptr, h_ptr, alpha_out_ptr, stats_ptr,  # (M, D), (M, D), (M,), (2, M) of mean and 1 / deviation
    M, threshold, scale, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, MIX: tl.constexpr, GATE: tl.constexpr, DROP: tl.constexpr,
    L: tl.constexpr, P: tl.constexpr, R: tl.constexpr,  # what is read of x, y, y2 and alpha; L = 0: every row
):  # fmt: skip
    start = tl.program_id(0) * ROWS
    r = tl.arange(0, ROWS)
    e = _columns(BLOCK)
    row = start + r
    column = e < D
    cell = (row < M)[:, None] & column[None, :]
    at = r[:, None] * D + e[None, :]
    base = start.to(tl.int64) * D
    source, source_base, source_at = row, base, at
    if L > 0:
        source, first = _source(row, L, P, R), _source(start, L, P, R)
        source_base, source_at = first.to(tl.int64) * D, (source - first)[:, None] * D + e[None, :]
    x = tl.load(x_ptr + source_base + source_at, mask=cell, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + source_base + source_at, mask=cell, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(y_bias_ptr + e, mask=column, other=0.0).to(tl.float32)[None, :]
        if MIX:
            alpha = tl.load(alpha_ptr + source, mask=row < M, other=0.0).to(tl.float32)[:, None]
            y2 = tl.load(y2_ptr + source_base + source_at, mask=cell, other=0.0).to(tl.float32)
            y = alpha * y + (1.0 - alpha) * y2
        if DROP:
            y = tl.where(kept(tl.load(seed_ptr), source, threshold, ROWS, BLOCK), y * scale, 0.0)
        x = (x + y).to(x_out_ptr.dtype.element_ty)
        tl.store(x_out_ptr + base + at, x, mask=cell)
        x = x.to(tl.float32)  # backward knows x as it was written, so the norm is of that
    mean = tl.sum(x, 1) * (1.0 / D)
    centred = tl.where(cell, x - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) * (1.0 / D) + eps)
    weight = tl.load(weight_ptr + e, mask=column, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + e, mask=column, other=0.0).to(tl.float32)
    h = (centred * inverse[:, None] * weight[None, :] + bias[None, :]).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + base + at, h, mask=cell)
    tl.store(stats_ptr + row, mean, mask=row < M)
    tl.store(stats_ptr + M + row, inverse, mask=row < M)
    if GATE:
        gate = tl.load(gate_weight_ptr + e, mask=column, other=0.0).to(tl.float32)
        logit = tl.sum(h.to(tl.float32) * gate[None, :], 1) + tl.load(gate_bias_ptr).to(tl.float32)
        tl.store(alpha_out_ptr + row, tl.sigmoid(logit), mask=row < M)


@triton.jit(do_not_specialize=["M", "threshold", "steps"], do_not_specialize_on_alignment=["seed_ptr"])
def _seam_backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, stats_ptr, y_ptr, y_bias_ptr, y2_ptr, alpha_ptr, weight_ptr, bias_ptr, gate_weight_ptr, alpha_out_ptr,
    seed_ptr, dx_out_ptr, dh_ptr, dalpha_out_ptr,  # x: as it left
    dx_ptr, dy_ptr, dy2_ptr, dalpha_ptr,
    partial_ptr,  # (programs, PARTIAL): of the norm's weight and bias, the gate's weight, y_bias, the gate's bias
    M, steps, threshold, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTIAL: tl.constexpr, H: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, MIX: tl.constexpr, GATE: tl.constexpr, DROP: tl.constexpr,
    DX: tl.constexpr, DH: tl.constexpr, L: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, ROWS)
    e = _columns(BLOCK)
    column = e < D
    at = r[:, None] * D + e[None, :]
    weight = tl.load(weight_ptr + e, mask=column, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    if GATE:
        bias = tl.load(bias_ptr + e, mask=column, other=0.0).to(tl.float32)[None, :]
        gate = tl.load(gate_weight_ptr + e, mask=column, other=0.0).to(tl.float32)[None, :]
        dgate = tl.zeros([ROWS, BLOCK], tl.float32)
        dgate_bias = tl.zeros([ROWS], tl.float32)
    if BIAS:
        dy_bias = tl.zeros([ROWS, BLOCK], tl.float32)
        if MIX:
            y_bias = tl.load(y_bias_ptr + e, mask=column, other=0.0).to(tl.float32)[None, :]
    if DROP:
        seed = tl.load(seed_ptr)
    for step in range(steps):
        start = (step * tl.num_programs(0) + tl.program_id(0)) * ROWS
        row = start + r
        cell = (row < M)[:, None] & column[None, :]
        base = start.to(tl.int64) * D
        source, source_base, source_at = row, base, at
        if L > 0:
            source, first_source = _source(row, L, P, R), _source(start, L, P, R)
            source_base, source_at = first_source.to(tl.int64) * D, (source - first_source)[:, None] * D + e[None, :]
        # All loads before the first store, and in their own dtypes: none may pass a store, and each would be waited for
        # in turn. What lies outside is loaded as zero and adds zero to every sum, so that only stores need a mask.
        x = tl.load(x_ptr + base + at, mask=cell, other=0.0)
        if DH:
            dh = tl.load(dh_ptr + base + at, mask=cell, other=0.0)
        else:
            dh = tl.zeros([ROWS, BLOCK], tl.float32)
        mean = tl.load(stats_ptr + row, mask=row < M, other=0.0)[:, None]
        inverse = tl.load(stats_ptr + M + row, mask=row < M, other=0.0)[:, None]
        if GATE:
            out = tl.load(alpha_out_ptr + row, mask=row < M, other=0.0)
            dlogit = tl.load(dalpha_out_ptr + row, mask=row < M, other=0.0)
        if DX:
            dx_out = tl.load(dx_out_ptr + base + at, mask=cell, other=0.0)
        if MIX:
            alpha = tl.load(alpha_ptr + source, mask=row < M, other=0.0)
            y = tl.load(y_ptr + source_base + source_at, mask=cell, other=0.0)
            y2 = tl.load(y2_ptr + source_base + source_at, mask=cell, other=0.0)
        x = (x.to(tl.float32) - mean) * inverse
        dh = dh.to(tl.float32)
        if GATE:
            dlogit = dlogit.to(tl.float32) * out * (1.0 - out)
            dgate_bias += dlogit
            dgate += dlogit[:, None] * (x * weight + bias).to(H).to(tl.float32)  # the gate saw h rounded
            dh += dlogit[:, None] * gate
        dweight += dh * x
        dbias += dh
        dx = dh * weight
        first = tl.sum(dx, 1) * (1.0 / D)
        second = tl.sum(dx * x, 1) * (1.0 / D)
        dx = inverse * (dx - first[:, None] - x * second[:, None])
        if DX:
            dx += dx_out.to(tl.float32)
        tl.store(dx_ptr + source_base + source_at, dx, mask=cell)
        if ADD:
            if DROP:
                dx = tl.where(kept(seed, source, threshold, ROWS, BLOCK), dx * scale, 0.0)
            dy = dx
            if MIX:
                difference = y.to(tl.float32) - y2.to(tl.float32)
                if BIAS:
                    difference += y_bias
                tl.store(dalpha_ptr + source, tl.sum(dx * difference, 1), mask=row < M)
                dy = alpha.to(tl.float32)[:, None] * dx
                tl.store(dy2_ptr + source_base + source_at, dx - dy, mask=cell)
            tl.store(dy_ptr + source_base + source_at, dy, mask=cell)
            if BIAS:
                dy_bias += dy
        if L > 0:  # whoever has the last row that is read of a step writes the zeros of those after it
            place = source % L
            zero = tl.zeros([ROWS, BLOCK], tl.float32)
            for p in tl.static_range(1, P - R + 1):
                empty = (row < M) & (place % P == R - 1) & (place + p < L)
                there = empty[:, None] & column[None, :]
                tl.store(dx_ptr + source_base + source_at + p * D, zero, mask=there)
                tl.store(dy_ptr + source_base + source_at + p * D, zero, mask=there)
                if MIX:
                    tl.store(dy2_ptr + source_base + source_at + p * D, zero, mask=there)
                    tl.store(dalpha_ptr + source + p, tl.zeros([ROWS], tl.float32), mask=empty)
    partial_ptr += tl.program_id(0).to(tl.int64) * PARTIAL
    tl.store(partial_ptr + e, tl.sum(dweight, 0), mask=column)
    tl.store(partial_ptr + D + e, tl.sum(dbias, 0), mask=column)
    if GATE:
        tl.store(partial_ptr + 2 * D + e, tl.sum(dgate, 0), mask=column)
        tail = tl.zeros([16], tl.float32) + tl.sum(dgate_bias, 0)  # sixteen times, so that rows stay aligned
        tl.store(partial_ptr + PARTIAL - 16 + tl.arange(0, 16), tail)
    if BIAS:
        tl.store(partial_ptr + (3 if GATE else 2) * D + e, tl.sum(dy_bias, 0), mask=column)


@triton.jit
def _gelu(v):  # type: ignore[no-untyped-def]
    """-> Phi(v) and exp(-v^2 / 2), of which both GELU and its derivative are made.

    The error function as in Abramowitz and Stegun, 7.1.26: within 1.5e-7 of it, the rounding of 1 + erf in float32, and
    by way of the exponential that the derivative needs anyway.
    """
    root = tl.rsqrt(1.0 + 0.23164189 * tl.abs(v))  # 0.3275911 / sqrt(2)
    t = root * root  # 1 / u as rsqrt(u)^2: two instructions, where a division takes ten
    bell = tl.exp2(v * v * (-0.5 * LOG2E))
    tail = 0.5307027145 * t - 0.7265760135  # half of the coefficients there
    tail = tail * t + 0.7107068705
    tail = tail * t - 0.142248368
    tail = tail * t + 0.127414796
    tail = tail * t * bell  # Phi(-|v|)
    return tl.where(v < 0.0, tail, 1.0 - tail), bell


@triton.jit(do_not_specialize=["M"])
def _gelu_forward_kernel(  # type: ignore[no-untyped-def]
    u_ptr, bias_ptr, y_ptr, M, F, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(1) * ROWS
    r = tl.arange(0, ROWS)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cell = (start + r < M)[:, None] & (e < F)[None, :]
    at = r[:, None] * F + e[None, :]
    base = start.to(tl.int64) * F
    v = tl.load(u_ptr + base + at, mask=cell, other=0.0).to(tl.float32)
    v += tl.load(bias_ptr + e, mask=e < F, other=0.0).to(tl.float32)[None, :]
    phi, _bell = _gelu(v)
    tl.store(y_ptr + base + at, v * phi, mask=cell)


@triton.jit(do_not_specialize=["M", "steps"])
def _gelu_backward_kernel(  # type: ignore[no-untyped-def]
    u_ptr, bias_ptr, dy_ptr, du_ptr, partial_ptr, M, F, steps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, ROWS)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = r[:, None] * F + e[None, :]
    bias = tl.load(bias_ptr + e, mask=e < F, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    start = tl.program_id(1) * ROWS
    cell = (start + r < M)[:, None] & (e < F)[None, :]
    next_u = tl.load(u_ptr + start.to(tl.int64) * F + at, mask=cell, other=0.0)
    next_dy = tl.load(dy_ptr + start.to(tl.int64) * F + at, mask=cell, other=0.0)
    for _ in range(steps):
        u, dy, here, base = next_u, next_dy, cell, start.to(tl.int64) * F
        start += tl.num_programs(1) * ROWS  # the next tile is on its way while this one is computed
        cell = (start + r < M)[:, None] & (e < F)[None, :]
        next_u = tl.load(u_ptr + start.to(tl.int64) * F + at, mask=cell, other=0.0)
        next_dy = tl.load(dy_ptr + start.to(tl.int64) * F + at, mask=cell, other=0.0)
        v = u.to(tl.float32) + bias
        phi, bell = _gelu(v)
        du = dy.to(tl.float32) * (phi + v * bell * 0.3989422804014327)  # 1 / sqrt(2 pi)
        tl.store(du_ptr + base + at, du, mask=here)
        total += du
    tl.store(partial_ptr + tl.program_id(1) * F + e, tl.sum(total, 0), mask=e < F)


@triton.jit(do_not_specialize=["M", "steps"])
def _sum_kernel(  # type: ignore[no-untyped-def]
    u_ptr, partial_ptr, M, F, u_row, steps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, ROWS)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = r[:, None] * u_row + e[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(steps):
        start = (step * tl.num_programs(1) + tl.program_id(1)) * ROWS
        cell = (start + r < M)[:, None] & (e < F)[None, :]
        total += tl.load(u_ptr + start.to(tl.int64) * u_row + at, mask=cell, other=0.0).to(tl.float32)
    tl.store(partial_ptr + tl.program_id(1) * F + e, tl.sum(total, 0), mask=e < F)


# ------------------------------------------------------------------------------------------------------- the seam


def _tile(width: int, each: int) -> dict[str, int]:
    """`each`: elements of a thread."""
    block = max(16, triton.next_power_of_2(width))
    warps = max(1, block // 256)
    return dict(D=width, BLOCK=block, ROWS=max(1, each * 32 * warps // block), num_warps=warps)


def _reading(read: Sequence[int]) -> dict[str, int]:
    return dict(zip("LPR", read or (0, 1, 1), strict=True))


def _taken(read: Sequence[int]) -> int:
    """How many rows of a window are read."""
    length, per_step, first = read
    return -(-length // per_step) * first


def _left(x: Tensor, read: Sequence[int]) -> tuple[int, ...]:
    """The shape in which x leaves."""
    return (len(x) // read[0] * _taken(read), x.shape[1]) if read else tuple(x.shape)


def _entered(x: Tensor, read: Sequence[int]) -> tuple[int, ...]:
    """The shape in which x, as it left, had entered."""
    return (len(x) // _taken(read) * read[0], x.shape[1]) if read else tuple(x.shape)


def seam(
    x: Tensor, y: Tensor | None, y_bias: Tensor | None, y2: Tensor | None, alpha: Tensor | None,
    norm_weight: Tensor, norm_bias: Tensor, gate_weight: Tensor | None, gate_bias: Tensor | None,
    drop: float, seed: Tensor | None, eps: float, out_dtype: torch.dtype,
    read: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """-> x + dropout(r) in x's dtype, its norm h in `out_dtype`, and the gate's alpha, float32, as above.

    x, y, y2 (..., d), any dtypes; alpha (...). Without `y2`, r is y + y_bias; without `y` there is none, and x comes
    back as it is. Without `gate_weight` (d or 1 x d) there is no alpha; with it, alpha is that of h as rounded to
    `out_dtype`, the gate's weight and the sum being float32. `seed`: one int64 on x's device, needed if `drop` > 0;
    whoever draws it must leave it as it is until backward.

    `read`, (L, P, R): x (B L, d) has windows of L rows, and only the first R of every P rows of a window leave, in
    order: x, h and alpha are what they are without, at these rows, with ceil(L / P) R rows a window. The last P rows of
    a window may be fewer, but not fewer than R.
    """
    if y is None and (y_bias is not None or y2 is not None):
        raise ValueError("y_bias and y2 go with y")
    if (y2 is None) != (alpha is None) or (gate_weight is None) != (gate_bias is None):
        raise ValueError("y2 goes with alpha, and gate_weight with gate_bias")
    if y is None:
        drop = 0.0
    if not 0.0 <= drop < 1.0 or (drop > 0.0 and seed is None):
        raise ValueError(f"drop is in [0, 1), and if not 0 needs a seed, not {drop} and {seed}")
    if read is not None:
        length, per_step, first = read
        if y is None or x.dim() != 2 or len(x) % length:
            raise ValueError(f"read goes with y and rows of whole windows of {length}, not {tuple(x.shape)}")
        if not 0 < first <= (length - 1) % per_step + 1:
            raise ValueError(f"of windows of {length} rows, {first} of every {per_step} cannot be read: some lack")
    x_out, h, alpha_out, *_stats = (_First.apply if y is None else seam_forward)(
        x, y, y_bias, y2, alpha, norm_weight, norm_bias, gate_weight, gate_bias, drop, seed, eps, out_dtype, read or ()
    )
    return x_out, h, None if gate_weight is None else alpha_out


@torch.library.custom_op("qhyer::seam", mutates_args=())
def seam_forward(
    x: Tensor, y: Tensor | None, y_bias: Tensor | None, y2: Tensor | None, alpha: Tensor | None,
    norm_weight: Tensor, norm_bias: Tensor, gate_weight: Tensor | None, gate_bias: Tensor | None,
    drop: float, seed: Tensor | None, eps: float, out_dtype: torch.dtype, read: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> x_out (empty without y), h, alpha_out (empty without a gate), mean and inverse deviation (2, M), M being the
    rows that are read. `read`: empty for all."""
    x = x.contiguous()
    shape = _left(x, read)
    width = x.shape[-1]
    rows = math.prod(shape[:-1])
    x_out = x.new_empty(shape if y is not None else 0)
    h = x.new_empty(shape, dtype=out_dtype)
    alpha_out = x.new_empty(shape[:-1] if gate_weight is not None else 0, dtype=torch.float32)
    stats = x.new_empty(2, rows, dtype=torch.float32)
    tile = _tile(width, 32)
    _seam_forward_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        x, x if y is None else y.contiguous(), x if y_bias is None else y_bias.contiguous(),
        x if y2 is None else y2.contiguous(), x if alpha is None else alpha.contiguous(),
        norm_weight, norm_bias, x if gate_weight is None else gate_weight.contiguous(),
        x if gate_bias is None else gate_bias, x if seed is None else seed,
        x_out, h, alpha_out, stats, rows, *dropping(drop), eps, **tile,
        ADD=y is not None, BIAS=y_bias is not None, MIX=y2 is not None, GATE=gate_weight is not None, DROP=drop > 0.0,
        **_reading(read),
    )  # fmt: skip
    return x_out, h, alpha_out, stats


@seam_forward.register_fake
def _(x: Tensor, y: Tensor | None, y_bias: Tensor | None, y2: Tensor | None, alpha: Tensor | None,
      norm_weight: Tensor, norm_bias: Tensor, gate_weight: Tensor | None, gate_bias: Tensor | None,
      drop: float, seed: Tensor | None, eps: float, out_dtype: torch.dtype, read: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    shape = _left(x, read)
    return (
        x.new_empty(shape if y is not None else 0),
        x.new_empty(shape, dtype=out_dtype),
        x.new_empty(shape[:-1] if gate_weight is not None else 0, dtype=torch.float32),
        x.new_empty(2, math.prod(shape[:-1]), dtype=torch.float32),
    )


@torch.library.custom_op("qhyer::seam_backward", mutates_args=())
def seam_backward(
    x: Tensor, stats: Tensor, y: Tensor | None, y_bias: Tensor | None, y2: Tensor | None, alpha: Tensor | None,
    norm_weight: Tensor, norm_bias: Tensor, gate_weight: Tensor | None, alpha_out: Tensor, seed: Tensor | None,
    dx_out: Tensor | None, dh: Tensor | None, dalpha_out: Tensor | None,
    drop: float, h_dtype: torch.dtype, y_dtype: torch.dtype | None, biased: bool, read: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dx, dy, dy2, dalpha (M,), and the gradients of the parameters in a row: those of the norm's weight and bias,
    of the gate's weight, of y_bias, of the gate's bias, as far as there are such. `x` is the one that left, y and
    y_bias are needed for dalpha alone. What went in (y, y2, alpha) and its gradients have every row, the rest those
    that are read."""
    width = x.shape[-1]
    rows = x.numel() // width
    x = x.contiguous()
    gate = gate_weight is not None and dalpha_out is not None
    shape = _entered(x, read)
    dx = x.new_empty(shape)
    dy = x.new_empty(0) if y_dtype is None else x.new_empty(shape, dtype=y_dtype)
    dy2 = x.new_empty(0) if y2 is None else x.new_empty(shape, dtype=y2.dtype)
    dalpha = x.new_empty(0 if y2 is None else math.prod(shape[:-1]), dtype=torch.float32)
    tile = _tile(width, 16)
    programs, steps = share(triton.cdiv(rows, tile["ROWS"]), SEAM_WARPS // tile["num_warps"])
    size = (2 + gate + biased) * width + 16 * gate
    partial = x.new_empty(programs, size, dtype=torch.float32)
    _seam_backward_kernel[(programs,)](
        x, stats, x if y is None else y.contiguous(), x if y_bias is None else y_bias.contiguous(),
        x if y2 is None else y2.contiguous(), x if alpha is None else alpha.contiguous(), norm_weight, norm_bias,
        x if gate_weight is None else gate_weight.contiguous(), alpha_out, x if seed is None else seed,
        x if dx_out is None else dx_out.contiguous(), x if dh is None else dh.contiguous(),
        x if dalpha_out is None else dalpha_out.contiguous(),
        dx, dy, dy2, dalpha, partial, rows, steps, *dropping(drop), **tile, PARTIAL=size, H=TYPES[h_dtype],
        ADD=y_dtype is not None, BIAS=biased, MIX=y2 is not None, GATE=gate, DROP=drop > 0.0,
        DX=dx_out is not None, DH=dh is not None, **_reading(read),
        maxnreg=min(SEAM_REGISTERS, REGISTERS // (32 * tile["num_warps"])),
    )  # fmt: skip
    return dx, dy, dy2, dalpha, aside(lambda: _total(partial), [partial], norm_weight)


@seam_backward.register_fake
def _(x: Tensor, stats: Tensor, y: Tensor | None, y_bias: Tensor | None, y2: Tensor | None, alpha: Tensor | None,
      norm_weight: Tensor, norm_bias: Tensor, gate_weight: Tensor | None, alpha_out: Tensor, seed: Tensor | None,
      dx_out: Tensor | None, dh: Tensor | None, dalpha_out: Tensor | None,
      drop: float, h_dtype: torch.dtype, y_dtype: torch.dtype | None, biased: bool, read: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    width, shape = x.shape[-1], _entered(x, read)
    gate = gate_weight is not None and dalpha_out is not None
    return (
        x.new_empty(shape),
        x.new_empty(0) if y_dtype is None else x.new_empty(shape, dtype=y_dtype),
        x.new_empty(0) if y2 is None else x.new_empty(shape, dtype=y2.dtype),
        x.new_empty(0 if y2 is None else math.prod(shape[:-1]), dtype=torch.float32),
        x.new_empty((2 + gate + biased) * width + 16 * gate, dtype=torch.float32),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, y, y_bias, y2, alpha, norm_weight, norm_bias, gate_weight, gate_bias, *rest = inputs
    ctx.drop, seed, _eps, ctx.h_dtype, ctx.read = rest
    x_out, _h, alpha_out, stats = output
    mix = y2 is not None
    ctx.save_for_backward(
        x if y is None else x_out, stats, y if mix else None, y_bias if mix else None, y2, alpha,
        norm_weight, norm_bias, gate_weight, alpha_out, seed if ctx.drop > 0.0 else None,
    )  # fmt: skip
    ctx.y_dtype = None if y is None else y.dtype
    ctx.y_bias_dtype = None if y_bias is None else y_bias.dtype
    ctx.gate_bias = None if gate_bias is None else (gate_bias.shape, gate_bias.dtype)
    ctx.set_materialize_grads(False)  # what is not used after (the last alpha, the last x) costs nothing


def _backward(
    ctx: Any, dx_out: Tensor | None, dh: Tensor | None, dalpha_out: Tensor | None, _dstats: Tensor | None
) -> tuple[Any, ...]:
    alpha, norm_weight, norm_bias, gate_weight = ctx.saved_tensors[5:9]
    width = norm_weight.shape[0]
    dx, dy, dy2, dalpha, sums = seam_backward(
        *ctx.saved_tensors, dx_out, dh, dalpha_out,
        ctx.drop, ctx.h_dtype, ctx.y_dtype, ctx.y_bias_dtype is not None, ctx.read,
    )  # fmt: skip
    gate = gate_weight is not None and dalpha_out is not None
    at = (2 + gate) * width
    return (
        dx,
        None if ctx.y_dtype is None else dy,
        None if ctx.y_bias_dtype is None else sums[at : at + width].to(ctx.y_bias_dtype),
        None if alpha is None else dy2,
        None if alpha is None else dalpha.view(alpha.shape).to(alpha.dtype),
        sums[:width].to(norm_weight.dtype),
        sums[width : 2 * width].to(norm_bias.dtype),
        sums[2 * width : 3 * width].view(gate_weight.shape).to(gate_weight.dtype) if gate else None,
        sums[-1].reshape(ctx.gate_bias[0]).to(ctx.gate_bias[1]) if gate else None,
        None, None, None, None, None,
    )  # fmt: skip


seam_forward.register_autograd(_backward, setup_context=_setup)


class _First(torch.autograd.Function):
    """A seam without y, out of which x comes as it went in. What follows reads x as well as h: if it read the x that
    went in, autograd would add its gradient to that of h in a pass over memory; the kernel has it at hand. (An
    operation of torch.library may not return what it was given.)"""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = seam_forward(*inputs)
        _setup(ctx, inputs, output)
        return inputs[0], output[1], output[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_out: Tensor | None, dh: Tensor | None, dalpha_out: Tensor | None) -> tuple[Any, ...]:
        return _backward(ctx, dx_out, dh, dalpha_out, None)


# --------------------------------------------------------------------------------------- the middle of an MLP, sums


def _wide(width: int, each: int) -> dict[str, int]:
    """Tiles for four warps, 256 columns being 8 of every thread of a warp; `each`: elements of a thread."""
    block = min(256, max(16, triton.next_power_of_2(width)))
    return dict(ROWS=128 * each // block, BLOCK=block, num_warps=4)


@torch.library.custom_op("qhyer::bias_gelu", mutates_args=())
def bias_gelu(u: Tensor, bias: Tensor) -> Tensor:
    """GELU, that of the error function, of u + bias; u (..., F), the result in u's dtype."""
    u = u.contiguous()
    width = u.shape[-1]
    rows = u.numel() // width
    y = torch.empty_like(u)
    tile = _wide(width, 32)
    grid = (triton.cdiv(width, tile["BLOCK"]), triton.cdiv(rows, tile["ROWS"]))
    _gelu_forward_kernel[grid](u, bias, y, rows, width, **tile)
    return y


@bias_gelu.register_fake
def _(u: Tensor, bias: Tensor) -> Tensor:
    return u.new_empty(u.shape)


@torch.library.custom_op("qhyer::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(u: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """-> du and, in float32, dbias."""
    u, dy = u.contiguous(), dy.contiguous()
    width = u.shape[-1]
    rows = u.numel() // width
    du = torch.empty_like(u)
    tile = _wide(width, 16)
    blocks = triton.cdiv(width, tile["BLOCK"])
    programs, steps = share(triton.cdiv(rows, tile["ROWS"]), WARPS // 2 // blocks)
    partial = u.new_empty(programs, width, dtype=torch.float32)
    _gelu_backward_kernel[(blocks, programs)](u, bias, dy, du, partial, rows, width, steps, **tile)
    return du, aside(lambda: _total(partial), [partial], bias)


@bias_gelu_backward.register_fake
def _(u: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty(u.shape[-1], dtype=torch.float32)


def _gelu_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gelu_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    u, bias = ctx.saved_tensors
    du, dbias = bias_gelu_backward(u, bias, dy)
    return du, dbias.to(bias.dtype)


bias_gelu.register_autograd(_gelu_backward, setup_context=_gelu_setup)


@torch.library.custom_op("qhyer::column_sum", mutates_args=())
def column_sum(u: Tensor) -> Tensor:
    """u (..., F) -> (F,), float32: the gradient of a bias, of which there is none in turn. Slices of columns are read
    where they are."""
    width = u.shape[-1]
    flat = u.reshape(-1, width)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    rows = flat.shape[0]
    tile = _wide(width, 32)
    blocks = triton.cdiv(width, tile["BLOCK"])
    programs, steps = share(triton.cdiv(rows, tile["ROWS"]), WARPS // blocks)
    partial = u.new_empty(programs, width, dtype=torch.float32)
    _sum_kernel[(blocks, programs)](flat, partial, rows, width, flat.stride(0), steps, **tile)
    return _total(partial)


@column_sum.register_fake
def _(u: Tensor) -> Tensor:
    return u.new_empty(u.shape[-1], dtype=torch.float32)
