"""The conditional RealNVP and its encoder between their matrix products, as Triton kernels, forward and backward.

A block of the flow is three launches. With n one of the two networks, s and t:

    enter    h_n = LN(LeakyReLU(context_n + z_1 first_n)) * scale + bias
    product  u_n = h_n second_n                                                       (torch, TF32 where it is allowed)
    leave    s, t = (LN(LeakyReLU(u_n + second_bias_n)) * scale + bias) . head_n + head_bias_n
             z' = [z_1, (z_2 - t) exp(-s)];   log|det| -= sum s;   z = z' W of the next block

In plain torch a block is about twenty, most of which move (2, M, C) to do one operation on it.

Backward walks through the blocks in reverse: the gradient of `leave`, the product, the gradient of `enter`. It needs u
and h, which the products wrote anyway, z' (z_1 is a part of it, so that z itself is not kept) and s; the first norm's
input it computes again from the context. The whole flow is one operator, so that gradients of all blocks share their
buffers: that of the contexts is written in place, that of every `second` is one batched product, and parameters' sums
over rows leave each program as a row of partial sums, all of which are added at once in a fixed order: no atomics, so
that the same inputs give the same bits. Without gradient nothing is kept, and all blocks use the same memory.

`norm_silu` is what the encoder does between its products.

Everything is float32 inside, whatever the tensors are. Importing qhyer does not import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qhyer.nn.products_triton import product
from qhyer.nn.rows_triton import columns, row_norm, row_norm_backward, sigmoid, tile_of, zeros
from qhyer.nn.total_triton import share
from qhyer.nn.total_triton import total as _total
from qhyer.streams import begin

if TYPE_CHECKING:
    from qhyer.nn.flow import ConditionalRealNVP

PROGRAMS = 2 * 132  # of a backward launch, per network: two on every multiprocessor of an H200, each with partial sums
SILU_PROGRAMS = 132  # of the encoder's, once or twice, by their warps
SLOPE = tl.constexpr(0.01)  # of LeakyReLU
EPS = tl.constexpr(1e-5)  # of the flow's norms


@triton.jit
def _enter(  # type: ignore[no-untyped-def]
    ctx, z_at, known, first_ptr, e, column, KEPT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The first Dense: the context's part, and that of z_1 added to it."""
    for k in tl.static_range(KEPT):
        z = tl.load(z_at + k, mask=known, other=0.0)
        ctx += z[:, None] * tl.load(first_ptr + k * C + e, mask=column, other=0.0)[None, :]
    return ctx


@triton.jit(do_not_specialize=["M", "block"])
def _flow_enter_kernel(  # type: ignore[no-untyped-def]
    z_ptr, ctx_ptr, first_ptr, scale_ptr, bias_ptr,  # (M, D), (M, BLOCKS, 2, C), parameters of all blocks
    h_ptr,  # (2, M, C)
    M, block,
    D: tl.constexpr, KEPT: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1)
    which = block * 2 + n
    start = tl.program_id(0).to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    e = columns(BLOCK, VECTOR)
    known = start + r < M
    column = e < C
    cell = known[:, None] & column[None, :]
    at = r[:, None] * (BLOCKS * 2 * C) + e[None, :]
    ctx = tl.load(ctx_ptr + start * (BLOCKS * 2 * C) + which * C + at, mask=cell, other=0.0).to(tl.float32)
    v = _enter(ctx, z_ptr + start * D + r * D, known, first_ptr + which * (KEPT * C), e, column, KEPT, C)
    v, _inverse = row_norm(tl.where(v > 0.0, v, v * SLOPE), column, EPS, C, BLOCK)
    scale = tl.load(scale_ptr + which * C + e, mask=column, other=0.0)
    bias = tl.load(bias_ptr + which * C + e, mask=column, other=0.0)
    h_ptr += (start + n.to(tl.int64) * M) * C
    tl.store(h_ptr + r[:, None] * C + e[None, :], v * scale[None, :] + bias[None, :], mask=cell)


@triton.jit
def _leave(  # type: ignore[no-untyped-def]
    u, second_bias_ptr, scale_ptr, bias_ptr, which, e, column,
    C: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The second LeakyReLU and norm of one network."""
    v = u + tl.load(second_bias_ptr + which * C + e, mask=column, other=0.0)[None, :]
    v, _inverse = row_norm(tl.where(v > 0.0, v, v * SLOPE), column, EPS, C, BLOCK)
    scale = tl.load(scale_ptr + (BLOCKS * 2 + which) * C + e, mask=column, other=0.0)
    bias = tl.load(bias_ptr + (BLOCKS * 2 + which) * C + e, mask=column, other=0.0)
    return v * scale[None, :] + bias[None, :]


@triton.jit(do_not_specialize=["M", "block"])
def _flow_leave_kernel(  # type: ignore[no-untyped-def]
    u_ptr, second_bias_ptr, scale_ptr, bias_ptr, head_ptr, head_bias_ptr,  # (2, M, C), parameters; head (.., OUT, C)
    z_ptr, log_det_ptr, matrix_ptr,  # (M, D), (M,) or at first a number, (BLOCKS, D, D)
    after_ptr, s_ptr, z_next_ptr, log_det_next_ptr,  # z' (M, D), (M, OUT), z' W (M, D), (M,)
    M, block,
    D: tl.constexpr, KEPT: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PAD: tl.constexpr,  # PAD: D, up to a power of two
    FIRST: tl.constexpr, LAST: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    OUT: tl.constexpr = D - KEPT
    start = tl.program_id(0).to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    e = columns(BLOCK, VECTOR)
    known = start + r < M
    column = e < C
    cell = known[:, None] & column[None, :]
    at = r[:, None] * C + e[None, :]
    u_s = tl.load(u_ptr + start * C + at, mask=cell, other=0.0)
    u_t = tl.load(u_ptr + (start + M) * C + at, mask=cell, other=0.0)
    if FIRST:
        log_det = tl.zeros([ROWS], tl.float32) + tl.load(log_det_ptr)
    else:
        log_det = tl.load(log_det_ptr + start + r, mask=known, other=0.0)
    k = tl.arange(0, PAD)
    matrix_ptr += (block + 1) * (D * D)
    z_next = tl.zeros([ROWS, PAD], tl.float32)
    z_at = z_ptr + start * D + r * D
    after_at = after_ptr + start * D + r * D
    s_at = s_ptr + start * OUT + r * OUT
    for i in tl.static_range(KEPT):
        z = tl.load(z_at + i, mask=known, other=0.0)
        if LAST or STORE:
            tl.store(after_at + i, z, mask=known)
        if not LAST:
            z_next += z[:, None] * tl.load(matrix_ptr + i * D + k, mask=k < D, other=0.0)[None, :]
    y_s = _leave(u_s, second_bias_ptr, scale_ptr, bias_ptr, block * 2, e, column, C, BLOCKS, BLOCK)
    y_t = _leave(u_t, second_bias_ptr, scale_ptr, bias_ptr, block * 2 + 1, e, column, C, BLOCKS, BLOCK)
    head_ptr += block * (2 * OUT * C)
    head_bias_ptr += block * (2 * OUT)
    for j in tl.static_range(OUT):
        head_s = tl.load(head_ptr + j * C + e, mask=column, other=0.0)
        head_t = tl.load(head_ptr + (OUT + j) * C + e, mask=column, other=0.0)
        s = tl.sum(y_s * head_s[None, :], 1) + tl.load(head_bias_ptr + j)
        t = tl.sum(y_t * head_t[None, :], 1) + tl.load(head_bias_ptr + OUT + j)
        z = (tl.load(z_at + KEPT + j, mask=known, other=0.0) - t) * tl.exp(-s)
        log_det -= s
        if LAST or STORE:
            tl.store(after_at + KEPT + j, z, mask=known)
        if STORE:
            tl.store(s_at + j, s, mask=known)
        if not LAST:
            z_next += z[:, None] * tl.load(matrix_ptr + (KEPT + j) * D + k, mask=k < D, other=0.0)[None, :]
    tl.store(log_det_next_ptr + start + r, log_det, mask=known)
    if not LAST:
        tl.store(z_next_ptr + start * D + r[:, None] * D + k[None, :], z_next, mask=known[:, None] & (k < D)[None, :])


@triton.jit(do_not_specialize=["M", "block", "steps"])
def _flow_leave_backward_kernel(  # type: ignore[no-untyped-def]
    u_ptr, second_bias_ptr, scale_ptr, bias_ptr, head_ptr, after_ptr, s_ptr,  # as in forward
    dafter_ptr, dlog_det_ptr,  # of z' (M, D), of log|det| (M,)
    du_ptr,  # (2, M, C)
    partial_ptr,  # (programs, TOTAL), see _segments
    M, block, steps,
    D: tl.constexpr, KEPT: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr, TOTAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    OUT: tl.constexpr = D - KEPT
    n = tl.program_id(1)
    which = block * 2 + n
    norm = (BLOCKS * 2 + which) * C  # the second of a network's two
    r = tl.arange(0, ROWS)
    e = columns(BLOCK, VECTOR)
    column = e < C
    at = r[:, None] * C + e[None, :]
    second_bias = tl.load(second_bias_ptr + which * C + e, mask=column, other=0.0)[None, :]
    scale = tl.load(scale_ptr + norm + e, mask=column, other=0.0)[None, :]
    bias = tl.load(bias_ptr + norm + e, mask=column, other=0.0)[None, :]
    head_ptr += which * (OUT * C)
    u_ptr += n.to(tl.int64) * M * C
    du_ptr += n.to(tl.int64) * M * C
    dscale = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    dsecond_bias = tl.zeros([BLOCK], tl.float32)
    dhead = zeros(OUT, BLOCK)
    dhead_bias = zeros(OUT, BLOCK)  # the same number everywhere: as a vector of rows, g would be needed in two layouts
    for step in range(steps):
        start = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS
        known = start + r < M
        cell = known[:, None] & column[None, :]
        # What lies outside is loaded as zero and adds zero to every sum, so that only stores need a mask.
        u = tl.load(u_ptr + start * C + at, mask=cell, other=0.0) + second_bias
        v, inverse = row_norm(tl.where(u > 0.0, u, u * SLOPE), column, EPS, C, BLOCK)
        y = v * scale + bias
        dlog_det = tl.load(dlog_det_ptr + start + r, mask=known, other=0.0)
        dy = tl.zeros([ROWS, BLOCK], tl.float32)
        dhead_, dhead_bias_ = (), ()
        for j in tl.static_range(OUT):
            dz = tl.load(dafter_ptr + start * D + (r * D + KEPT + j), mask=known, other=0.0)
            z = tl.load(after_ptr + start * D + (r * D + KEPT + j), mask=known, other=0.0)
            s = tl.load(s_ptr + start * OUT + (r * OUT + j), mask=known, other=0.0)
            g = tl.where(n == 0, -dz * z - dlog_det, -dz * tl.exp(-s))  # by s, or by t
            dy += g[:, None] * tl.load(head_ptr + j * C + e, mask=column, other=0.0)[None, :]
            dhead_ = dhead_ + (dhead[j] + tl.sum(g[:, None] * y, 0),)  # noqa: RUF005
            dhead_bias_ = dhead_bias_ + (dhead_bias[j] + tl.sum(tl.broadcast_to(g[:, None], [ROWS, BLOCK]), 0),)  # noqa: RUF005
        dhead, dhead_bias = dhead_, dhead_bias_
        dscale += tl.sum(dy * v, 0)
        dbias += tl.sum(dy, 0)
        du = row_norm_backward(dy * scale, v, inverse, C)
        du = tl.where(u > 0.0, du, du * SLOPE)
        dsecond_bias += tl.sum(du, 0)
        tl.store(du_ptr + start * C + at, du, mask=cell)
    partial_ptr += tl.program_id(0).to(tl.int64) * TOTAL
    tl.store(partial_ptr + norm + e, dscale, mask=column)
    tl.store(partial_ptr + BLOCKS * 4 * C + norm + e, dbias, mask=column)
    tl.store(partial_ptr + (BLOCKS * 8 + which) * C + e, dsecond_bias, mask=column)
    partial_ptr += BLOCKS * (10 + 2 * KEPT) * C
    for j in tl.static_range(OUT):
        tl.store(partial_ptr + (which * OUT + j) * C + e, dhead[j], mask=column)
        tl.store(partial_ptr + BLOCKS * 2 * OUT * C + which * OUT + j + e, dhead_bias[j], mask=e < 1)


@triton.jit(do_not_specialize=["M", "block", "steps"])
def _flow_enter_backward_kernel(  # type: ignore[no-untyped-def]
    ctx_ptr, first_ptr, scale_ptr, matrix_ptr, after_ptr, s_ptr,  # z' (M, D), whose first part is z_1; as in forward
    dafter_ptr, dh_ptr,  # of z' (M, D), of h (2, M, C)
    dctx_ptr, dz_ptr, dbefore_ptr,  # (M, BLOCKS, 2, C), of z (M, D), of what W made z of (M, D)
    partial_ptr,
    M, block, steps,
    D: tl.constexpr, KEPT: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr, TOTAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Both networks in turn, since dz is the sum of what they and z' add to it."""
    OUT: tl.constexpr = D - KEPT
    r = tl.arange(0, ROWS)
    i = tl.arange(0, PAD)
    e = columns(BLOCK, VECTOR)
    column = e < C
    first_ptr += block * (2 * KEPT * C)
    scale_ptr += block * (2 * C)
    matrix_ptr += block * (D * D)
    dscale, dbias, dfirst = zeros(2, BLOCK), zeros(2, BLOCK), zeros(2 * KEPT, BLOCK)
    for step in range(steps):
        start = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS
        known = start + r < M
        cell = known[:, None] & column[None, :]
        after_at = after_ptr + start * D + r * D
        dz = ()
        for k in tl.static_range(KEPT):
            dz = dz + (tl.load(dafter_ptr + start * D + (r * D + k), mask=known, other=0.0),)  # noqa: RUF005
        dscale_, dbias_, dfirst_ = (), (), ()
        for n in tl.static_range(2):
            place = start * (BLOCKS * 2 * C) + (block * 2 + n) * C
            at = r[:, None] * (BLOCKS * 2 * C) + e[None, :]
            ctx = tl.load(ctx_ptr + place + at, mask=cell, other=0.0).to(tl.float32)
            dh = tl.load(dh_ptr + (start + n * M) * C + (r[:, None] * C + e[None, :]), mask=cell, other=0.0)
            u = _enter(ctx, after_at, known, first_ptr + n * (KEPT * C), e, column, KEPT, C)
            v, inverse = row_norm(tl.where(u > 0.0, u, u * SLOPE), column, EPS, C, BLOCK)
            dscale_ = dscale_ + (dscale[n] + tl.sum(dh * v, 0),)  # noqa: RUF005
            dbias_ = dbias_ + (dbias[n] + tl.sum(dh, 0),)  # noqa: RUF005
            scale = tl.load(scale_ptr + n * C + e, mask=column, other=0.0)[None, :]
            du = row_norm_backward(dh * scale, v, inverse, C)
            du = tl.where(u > 0.0, du, du * SLOPE)
            tl.store(dctx_ptr + place + at, du, mask=cell)
            dz_ = ()
            for k in tl.static_range(KEPT):
                z = tl.load(after_at + k, mask=known, other=0.0)
                first = tl.load(first_ptr + (n * KEPT + k) * C + e, mask=column, other=0.0)[None, :]
                dfirst_ = dfirst_ + (dfirst[n * KEPT + k] + tl.sum(z[:, None] * du, 0),)  # noqa: RUF005
                dz_ = dz_ + (dz[k] + tl.sum(du * first, 1),)  # noqa: RUF005
            dz = dz_
        dscale, dbias, dfirst = dscale_, dbias_, dfirst_
        for j in tl.static_range(OUT):
            moved = tl.load(dafter_ptr + start * D + (r * D + KEPT + j), mask=known, other=0.0)
            s = tl.load(s_ptr + start * OUT + (r * OUT + j), mask=known, other=0.0)
            dz = dz + (moved * tl.exp(-s),)  # noqa: RUF005
        dbefore = tl.zeros([ROWS, PAD], tl.float32)  # dz W^T
        for k in tl.static_range(D):
            tl.store(dz_ptr + start * D + (r * D + k), dz[k], mask=known)
            dbefore += dz[k][:, None] * tl.load(matrix_ptr + i * D + k, mask=i < D, other=0.0)[None, :]
        at = r[:, None] * D + i[None, :]
        tl.store(dbefore_ptr + start * D + at, dbefore, mask=known[:, None] & (i < D)[None, :])
    partial_ptr += tl.program_id(0).to(tl.int64) * TOTAL
    for n in tl.static_range(2):
        which = block * 2 + n
        tl.store(partial_ptr + which * C + e, dscale[n], mask=column)
        tl.store(partial_ptr + (BLOCKS * 4 + which) * C + e, dbias[n], mask=column)
        for k in tl.static_range(KEPT):
            tl.store(partial_ptr + (BLOCKS * 10 + which * KEPT + k) * C + e, dfirst[n * KEPT + k], mask=column)


@triton.jit(do_not_specialize=["M", "steps"])
def _flow_matrix_kernel(  # type: ignore[no-untyped-def]
    x_ptr, between_ptr, dz_ptr,  # (M, D), (BLOCKS - 1, M, D), (BLOCKS, M, D)
    partial_ptr,  # (programs, BLOCKS, D, D)
    M, steps,
    D: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """dW of every block: what W was given, transposed, times the gradient of what it made."""
    block = tl.program_id(0)
    i = tl.arange(0, PAD)
    if block > 0:
        x_ptr = between_ptr + (block - 1).to(tl.int64) * M * D
    dz_ptr += block.to(tl.int64) * M * D
    total = tl.zeros([PAD, PAD], tl.float32)
    for step in range(steps):
        row = (step * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        z = tl.load(x_ptr + row[None, :] * D + i[:, None], mask=(row < M)[None, :] & (i < D)[:, None], other=0.0)
        dz = tl.load(dz_ptr + row[:, None] * D + i[None, :], mask=(row < M)[:, None] & (i < D)[None, :], other=0.0)
        total += tl.dot(z, dz, input_precision="ieee")
    partial_ptr += (tl.program_id(1) * tl.num_programs(0) + block) * (D * D)
    tl.store(partial_ptr + i[:, None] * D + i[None, :], total, mask=(i < D)[:, None] & (i < D)[None, :])


# ------------------------------------------------------------------------------------------------------- the flow


def _backward_tiles(channels: int, dim: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tiles of `leave` and `enter`, of as many rows each. The more dimensions, the more sums are kept in registers, and
    the smaller the tile beside them; `enter` keeps those of both networks."""
    leave = tile_of(channels, 128, 32 if dim <= 5 else 16)
    return leave, {**tile_of(channels, 64, 16), "ROWS": leave["ROWS"]}


def _segments(blocks: int, kept: int, out: int, channels: int) -> list[tuple[int, ...]]:
    """The parameters whose gradients are sums over rows, as they follow one another in a row of partial sums: scales
    and biases of the norms, second_bias, first, head (its last two dimensions exchanged), head_bias."""
    return [
        (2, blocks, 2, 1, channels),
        (2, blocks, 2, 1, channels),
        (blocks, 2, 1, channels),
        (blocks, 2, kept, channels),
        (blocks, 2, out, channels),
        (blocks, 2, 1, out),
    ]


def flow_forward(flow: ConditionalRealNVP, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
    """ConditionalRealNVP.forward: data (..., d) -> noise (..., d) and log|det df/dx| (...), all float32, d > 1."""
    couplings = flow.couplings
    if not couplings.kept:
        raise ValueError("in one dimension there is no half to keep: that is the plain code's")
    linears = begin("linears", flow.linears, x.device)
    contexts = product(context, couplings.context.weight, couplings.context.bias)
    matrices, log_det = linears()
    arguments = (
        x.reshape(-1, flow.dim), contexts.view(-1, couplings.context.out_features),
        matrices, log_det, couplings.first, couplings.second, couplings.second_bias, couplings.norm_scale,
        couplings.norm_bias, couplings.head, couplings.head_bias,
    )  # fmt: skip
    store = torch.is_grad_enabled() and any(argument.requires_grad for argument in arguments)
    z, log_det, *_ = flow_blocks(*arguments, store)
    return z.view(x.shape), log_det.view(x.shape[:-1])


@torch.library.custom_op("qhyer::flow_blocks", mutates_args=())
def flow_blocks(
    x: Tensor, ctx: Tensor, matrices: Tensor, offset: Tensor, first: Tensor, second: Tensor, second_bias: Tensor,
    scale: Tensor, bias: Tensor, head: Tensor, head_bias: Tensor, store: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x (M, d), contexts (M, blocks * 2 * C), matrices (blocks, d, d), a number to begin log|det| with, and the
    couplings' parameters -> z (M, d), log|det| (M,), and if `store` is set what backward needs (else empty):
    z' of all blocks but the last (blocks - 1, M, d), s (blocks, M, d - kept), u and h (blocks, 2, M, C)."""
    x, ctx, matrices = x.contiguous(), ctx.contiguous(), matrices.contiguous()
    rows, dim = x.shape
    blocks, _, kept, channels = first.shape
    head = head.mT.contiguous()  # so that each of its columns is read in one go
    sizes = dict(D=dim, KEPT=kept, C=channels, BLOCKS=blocks)
    enter, leave = tile_of(channels, 256, 32), tile_of(channels, 512, 32)
    empty = lambda *shape: torch.empty(shape, device=x.device, dtype=torch.float32)
    between = empty(blocks - 1, rows, dim) if store else empty(0)
    s = empty(blocks, rows, dim - kept) if store else empty(0)
    u = empty(blocks if store else 1, 2, rows, channels)
    h = empty(blocks if store else 1, 2, rows, channels)
    result = empty(rows, dim)
    z, z_next = torch.mm(x, matrices[0], out=empty(rows, dim)), empty(rows, dim)
    log_det, log_det_next = offset, empty(rows)
    for block in range(blocks):
        last = block == blocks - 1
        u_, h_ = (u[block], h[block]) if store else (u[0], h[0])
        _flow_enter_kernel[(triton.cdiv(rows, enter["ROWS"]), 2)](
            z, ctx, first, scale, bias, h_, rows, block, **sizes, **enter
        )
        torch.bmm(h_, second[block], out=u_)
        _flow_leave_kernel[(triton.cdiv(rows, leave["ROWS"]),)](
            u_, second_bias, scale, bias, head, head_bias, z, log_det, matrices,
            between[block] if store and not last else result, s[block] if store else s, z_next, log_det_next,
            rows, block, **sizes, **leave, PAD=triton.next_power_of_2(dim), FIRST=block == 0, LAST=last, STORE=store,
        )  # fmt: skip
        z, z_next = z_next, z
        log_det, log_det_next = log_det_next, empty(rows) if block == 0 else log_det
    return result, log_det, between, s, u if store else empty(0), h if store else empty(0)


@flow_blocks.register_fake
def _(x: Tensor, ctx: Tensor, matrices: Tensor, offset: Tensor, first: Tensor, second: Tensor, second_bias: Tensor,
      scale: Tensor, bias: Tensor, head: Tensor, head_bias: Tensor, store: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, dim = x.shape
    blocks, _, kept, channels = first.shape
    empty = lambda *shape: x.new_empty(shape, dtype=torch.float32)
    kept_for_backward = (
        (blocks - 1, rows, dim), (blocks, rows, dim - kept), (blocks, 2, rows, channels), (blocks, 2, rows, channels)
    )  # fmt: skip
    between, s, u, h = (empty(*shape) if store else empty(0) for shape in kept_for_backward)
    return empty(rows, dim), empty(rows), between, s, u, h


@torch.library.custom_op("qhyer::flow_blocks_backward", mutates_args=())
def flow_blocks_backward(
    x: Tensor, ctx: Tensor, matrices: Tensor, first: Tensor, second: Tensor, second_bias: Tensor, scale: Tensor,
    bias: Tensor, head: Tensor, z: Tensor, between: Tensor, s: Tensor, u: Tensor, h: Tensor,
    dz: Tensor, dlog_det: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dx, dctx, dmatrices, dsecond, and the gradients of `_segments` in a row."""
    x, ctx, matrices, dz, dlog_det = (tensor.contiguous() for tensor in (x, ctx, matrices, dz, dlog_det))
    rows, dim = x.shape
    blocks, _, kept, channels = first.shape
    head = head.mT.contiguous()
    empty = lambda *shape: torch.empty(shape, device=x.device, dtype=torch.float32)
    dentry = empty(blocks, rows, dim)  # of every block's z
    du, dh, dctx = torch.empty_like(u), empty(2, rows, channels), torch.empty_like(ctx)
    total = sum(torch.Size(shape).numel() for shape in _segments(blocks, kept, dim - kept, channels))
    stride = triton.cdiv(total, 16) * 16  # rows of partial sums stay aligned
    leave, enter = _backward_tiles(channels, dim)
    programs, steps = share(triton.cdiv(rows, leave["ROWS"]), PROGRAMS)
    partial = empty(programs, stride)
    sizes = dict(D=dim, KEPT=kept, C=channels, BLOCKS=blocks, TOTAL=stride)
    for block in reversed(range(blocks)):
        after = z if block == blocks - 1 else between[block]
        _flow_leave_backward_kernel[(programs, 2)](
            u[block], second_bias, scale, bias, head, after, s[block], dz, dlog_det, du[block], partial,
            rows, block, steps, **sizes, **leave,
        )  # fmt: skip
        torch.bmm(du[block], second[block].mT, out=dh)
        dbefore = empty(rows, dim)
        _flow_enter_backward_kernel[(programs,)](
            ctx, first, scale, matrices, after, s[block], dz, dh, dctx, dentry[block], dbefore, partial,
            rows, block, steps, **sizes, **enter, PAD=triton.next_power_of_2(dim),
        )  # fmt: skip
        dz = dbefore
    dsecond = torch.bmm(h.flatten(0, 1).mT, du.flatten(0, 1), out=empty(blocks * 2, channels, channels))
    programs, steps = share(triton.cdiv(rows, 64), PROGRAMS // blocks)
    dmatrices = empty(programs, blocks, dim, dim)
    _flow_matrix_kernel[(blocks, programs)](
        x, between, dentry, dmatrices, rows, steps, D=dim, ROWS=64, PAD=max(16, triton.next_power_of_2(dim))
    )
    return dz, dctx, _total(dmatrices), dsecond.view_as(second), _total(partial)[:total]


@flow_blocks_backward.register_fake
def _(x: Tensor, ctx: Tensor, matrices: Tensor, first: Tensor, second: Tensor, second_bias: Tensor, scale: Tensor,
      bias: Tensor, head: Tensor, z: Tensor, between: Tensor, s: Tensor, u: Tensor, h: Tensor,
      dz: Tensor, dlog_det: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    blocks, _, kept, channels = first.shape
    total = sum(torch.Size(shape).numel() for shape in _segments(blocks, kept, x.shape[1] - kept, channels))
    return (
        x.new_empty(x.shape),
        ctx.new_empty(ctx.shape),
        matrices.new_empty(matrices.shape),
        second.new_empty(second.shape),
        x.new_empty(total),
    )


def _flow_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, contexts, matrices, _offset, first, second, second_bias, scale, bias, head, _head_bias, store = inputs
    z, _log_det, *stored = output
    if not store:
        raise RuntimeError("backward of a flow that was computed without `store`")
    ctx.save_for_backward(x, contexts, matrices, first, second, second_bias, scale, bias, head, z, *stored)
    ctx.set_materialize_grads(False)  # no zeros for what is stored


def _flow_backward(ctx: Any, dz: Tensor | None, dlog_det: Tensor | None, *_: None) -> tuple[Any, ...]:
    first, head, z = ctx.saved_tensors[3], ctx.saved_tensors[8], ctx.saved_tensors[9]
    dz = torch.zeros_like(z) if dz is None else dz
    dlog_det = z.new_zeros(z.shape[0]) if dlog_det is None else dlog_det
    dx, dctx, dmatrices, dsecond, sums = flow_blocks_backward(*ctx.saved_tensors, dz, dlog_det)
    blocks, _, kept, channels = first.shape
    shapes = _segments(blocks, kept, head.shape[-1], channels)
    pieces = sums.split([torch.Size(shape).numel() for shape in shapes])
    dscale, dbias, dsecond_bias, dfirst, dhead, dhead_bias = (p.view(shape) for p, shape in zip(pieces, shapes))
    return (
        dx, dctx, dmatrices, dlog_det.sum(), dfirst, dsecond, dsecond_bias, dscale, dbias,
        dhead.mT, dhead_bias, None,
    )  # fmt: skip


flow_blocks.register_autograd(_flow_backward, setup_context=_flow_setup)


# ---------------------------------------------------------------------------------------------------- the encoder


@triton.jit(do_not_specialize=["M"])
def _silu_forward_kernel(  # type: ignore[no-untyped-def]
    u_ptr, u_bias_ptr, weight_ptr, bias_ptr, y_ptr,
    M, eps, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    e = columns(BLOCK, VECTOR)
    column = e < C
    cell = (start + r < M)[:, None] & column[None, :]
    at = r[:, None] * C + e[None, :]
    u = tl.load(u_ptr + start * C + at, mask=cell, other=0.0).to(tl.float32)
    u += tl.load(u_bias_ptr + e, mask=column, other=0.0).to(tl.float32)[None, :]
    v, _inverse = row_norm(u, column, eps, C, BLOCK)
    weight = tl.load(weight_ptr + e, mask=column, other=0.0).to(tl.float32)[None, :]
    v = v * weight + tl.load(bias_ptr + e, mask=column, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + start * C + at, v * sigmoid(v), mask=cell)


@triton.jit(do_not_specialize=["M", "steps"])
def _silu_backward_kernel(  # type: ignore[no-untyped-def]
    u_ptr, u_bias_ptr, weight_ptr, bias_ptr, dy_ptr, du_ptr,
    partial_ptr,  # (programs, 3, C): of u_bias, weight, bias
    M, eps, steps, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, ROWS)
    e = columns(BLOCK, VECTOR)
    column = e < C
    u_bias = tl.load(u_bias_ptr + e, mask=column, other=0.0).to(tl.float32)[None, :]
    weight = tl.load(weight_ptr + e, mask=column, other=0.0).to(tl.float32)[None, :]
    bias = tl.load(bias_ptr + e, mask=column, other=0.0).to(tl.float32)[None, :]
    du_bias = tl.zeros([BLOCK], tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        start = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS
        cell = (start + r < M)[:, None] & column[None, :]
        at = r[:, None] * C + e[None, :]
        # Gradients outside are loaded as zero and add zero to every sum.
        dy = tl.load(dy_ptr + start * C + at, mask=cell, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + start * C + at, mask=cell, other=0.0).to(tl.float32) + u_bias
        v, inverse = row_norm(u, column, eps, C, BLOCK)
        a = v * weight + bias
        gate = sigmoid(a)
        da = dy * gate * (1.0 + a * (1.0 - gate))
        dweight += tl.sum(da * v, 0)
        dbias += tl.sum(da, 0)
        du = row_norm_backward(da * weight, v, inverse, C)
        du_bias += tl.sum(du, 0)
        tl.store(du_ptr + start * C + at, du, mask=cell)
    partial_ptr += tl.program_id(0).to(tl.int64) * (3 * C)
    tl.store(partial_ptr + e, du_bias, mask=column)
    tl.store(partial_ptr + C + e, dweight, mask=column)
    tl.store(partial_ptr + 2 * C + e, dbias, mask=column)


@torch.library.custom_op("qhyer::norm_silu", mutates_args=())
def norm_silu(u: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """silu(layer_norm(u + bias) * weight + norm_bias) over the last dimension, in `out_dtype`."""
    u = u.contiguous()
    width = u.shape[-1]
    rows = u.numel() // width
    y = torch.empty_like(u, dtype=out_dtype)
    tile = tile_of(width, 256, 32)
    _silu_forward_kernel[(triton.cdiv(rows, tile["ROWS"]),)](u, bias, weight, norm_bias, y, rows, eps, C=width, **tile)
    return y


@norm_silu.register_fake
def _(u: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    return u.new_empty(u.shape, dtype=out_dtype)


@torch.library.custom_op("qhyer::norm_silu_backward", mutates_args=())
def norm_silu_backward(
    u: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor, dy: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """-> du and d[bias; weight; norm_bias] (3, C), float32."""
    u, dy = u.contiguous(), dy.contiguous()
    width = u.shape[-1]
    rows = u.numel() // width
    du = torch.empty_like(u)
    tile = tile_of(width, 256, 32)
    programs, steps = share(triton.cdiv(rows, tile["ROWS"]), max(2, 8 // tile["num_warps"]) * SILU_PROGRAMS)
    partial = u.new_empty(programs, 3, width, dtype=torch.float32)
    _silu_backward_kernel[(programs,)](u, bias, weight, norm_bias, dy, du, partial, rows, eps, steps, C=width, **tile)
    return du, _total(partial)


@norm_silu_backward.register_fake
def _(u: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor, dy: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty(3, u.shape[-1], dtype=torch.float32)


def _silu_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps, _out_dtype = inputs
    ctx.save_for_backward(*tensors)


def _silu_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    u, bias, weight, norm_bias = ctx.saved_tensors
    du, (dbias, dweight, dnorm_bias) = norm_silu_backward(u, bias, weight, norm_bias, dy, ctx.eps)
    return du, dbias.to(bias.dtype), dweight.to(weight.dtype), dnorm_bias.to(norm_bias.dtype), None, None


norm_silu.register_autograd(_silu_backward, setup_context=_silu_setup)
