"""What Mamba does between its projections, as Triton kernels, forward and backward.

The scan, fused with what sits next to it:

    Delta = softplus(dt + bias);  h_t = exp(Delta_t A) h_{t-1} + Delta_t x_t B_t;  y_t = (C_t h_t + D x_t) * silu(z_t)

A program is one warp: BLOCK channels of one sequence, walking through time with their states (N, BLOCK) in registers.

No hidden state is written to memory, not even some of them: backward needs h and its adjoint g (the gradient of the
loss by h_t) at the same time only in g_t exp(Delta_t A) h_{t-1}, and that product is a sum over what enters and leaves
the state afterwards. With out_s = dy_s C_s h_s and in_s = Delta_s x_s B_s g_s (per channel and state),

    g_t exp(Delta_t A) h_{t-1} = sum_{s >= t} (out_s - in_s)

since both g_t h_t - in_t and g_{t-1} h_{t-1} - out_{t-1} equal it. So

    dDelta_t = sum_{s >= t} sum_n A_n (out_s - in_s) + ...,      dA = sum_s (out_s - in_s) sum_{t <= s} Delta_t

split into a pass forward in time, which has h, and one backward, which has g. Between them goes one number per channel
and step. (The suffix sum costs about one decimal digit of float32 against keeping the states.)

Everything is float32 inside, whatever the tensors are. Sums over channels (dB, dC) and over sequences (dA, dD, dbias)
are written as partial sums and added by torch in a fixed order: no atomics, so that the same inputs give the same bits.

The causal convolution with its SiLU: forward a warp takes STEPS rows of BLOCK channels, unrolled, with every row it
needs in registers from the start. Backward it walks through the whole of a sequence, and of several, so that no row is
read and no gradient computed twice, and leaves its sums over time once, at the end.

`nn/scan.py` decides when this runs; importing qhyer does not import it. Where `mamba_cuda.py` can serve, its kernels
do the scan, and these are their reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qhyer.nn import mamba_cuda
from qhyer.nn.rows_triton import sigmoid, softplus
from qhyer.nn.total_triton import share, total
from qhyer.streams import Put, at_once

# Channels of a program, and steps whose instructions the compiler may interleave.
FORWARD = {"BLOCK": 64, "UNROLL": 1}
BACKWARD = {"BLOCK": 64, "UNROLL": 2}
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, dy_ptr, t, L, E, x_row, dt_row, B_row, C_row, z_row, dy_row, e, n, N,
    GATE: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The inputs of step t (of the nearest step, outside of the sequence). Loaded a step ahead of their use: on the way
    from memory they take as long as a step's arithmetic."""
    t = tl.minimum(tl.maximum(t, 0), L - 1)
    channel, known = e < E, n < N
    x = tl.load(x_ptr + t * x_row + e, mask=channel, other=0.0)
    dt = tl.load(dt_ptr + t * dt_row + e, mask=channel, other=0.0)
    B = tl.load(B_ptr + t * B_row + n, mask=known, other=0.0)
    C = tl.load(C_ptr + t * C_row + n, mask=known, other=0.0)
    z, dy = x, x
    if GATE:
        z = tl.load(z_ptr + t * z_row + e, mask=channel, other=0.0)
    if BACKWARD:
        dy = tl.load(dy_ptr + t * dy_row + e, mask=channel, other=0.0)
    return x, dt, B, C, z, dy


@triton.jit
def _scan_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, bias_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, state_ptr,  # A (N, E), state (B, N, E)
    y_ptr, last_ptr,  # (B, L, E), (B, N, E)
    L, E,
    x_batch, x_row, dt_batch, dt_row, B_batch, B_row, C_batch, C_row, z_batch, z_row,
    N: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    SOFTPLUS: tl.constexpr, GATE: tl.constexpr, STATE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, P)  # P: N rounded up to a power of two
    channel = e < E
    known = n < N
    cell = known[:, None] & channel[None, :]
    at = n[:, None] * E + e[None, :]
    A = tl.load(A_ptr + at, mask=cell, other=0.0) * LOG2E  # exp(v) is computed as exp2(v log2 e)
    D = tl.load(D_ptr + e, mask=channel, other=0.0)
    if SOFTPLUS:
        bias = tl.load(bias_ptr + e, mask=channel, other=0.0)
    if STATE:
        h = tl.load(state_ptr + b * N * E + at, mask=cell, other=0.0)
    else:
        h = tl.zeros([P, BLOCK], tl.float32)
    x_ptr += b * x_batch
    dt_ptr += b * dt_batch
    B_ptr += b * B_batch
    C_ptr += b * C_batch
    z_ptr += b * z_batch
    y_ptr += b * L * E
    x_, dt_, B_, C_, z_, _ = _step(x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, x_ptr, 0, L, E, x_row, dt_row, B_row, C_row,
                                   z_row, 0, e, n, N, GATE, False)  # fmt: skip
    for t in tl.range(0, L, loop_unroll_factor=UNROLL):
        x, delta, B, C = x_.to(tl.float32), dt_.to(tl.float32), B_.to(tl.float32), C_.to(tl.float32)
        z = z_.to(tl.float32)
        x_, dt_, B_, C_, z_, _ = _step(x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, x_ptr, t + 1, L, E, x_row, dt_row, B_row,
                                       C_row, z_row, 0, e, n, N, GATE, False)  # fmt: skip
        if SOFTPLUS:
            delta = softplus(delta + bias)
        h = tl.exp2(delta[None, :] * A) * h + (delta * x)[None, :] * B[:, None]
        y = tl.sum(h * C[:, None], 0) + D * x
        if GATE:
            y *= z * sigmoid(z)
        tl.store(y_ptr + t * E + e, y, mask=channel)
    if LAST:
        tl.store(last_ptr + b * N * E + at, h, mask=cell)


@triton.jit
def _scan_backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, bias_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, state_ptr, dy_ptr, dlast_ptr,  # inputs
    dx_ptr, ddt_ptr, dz_ptr,  # (B, L, E)
    dBC_ptr,  # (blocks, B, L, 2 N): partial sums over channels
    dparameter_ptr, dstate_ptr,  # per sequence: (B, N + 2, E) of A, bias and D, (B, N, E)
    between_ptr,  # (B, L, E): what the first pass tells the second
    L, E, batch,
    x_batch, x_row, dt_batch, dt_row, B_batch, B_row, C_batch, C_row, z_batch, z_row, dy_batch, dy_row,
    dz_batch, dz_row,
    N: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    SOFTPLUS: tl.constexpr, GATE: tl.constexpr, STATE: tl.constexpr, DLAST: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, P)
    channel = e < E
    known = n < N
    cell = known[:, None] & channel[None, :]
    at = n[:, None] * E + e[None, :]
    A = tl.load(A_ptr + at, mask=cell, other=0.0) * LOG2E
    D = tl.load(D_ptr + e, mask=channel, other=0.0)
    if SOFTPLUS:
        bias = tl.load(bias_ptr + e, mask=channel, other=0.0)
    if STATE:
        h = tl.load(state_ptr + b * N * E + at, mask=cell, other=0.0)
    else:
        h = tl.zeros([P, BLOCK], tl.float32)
    x_ptr += b * x_batch
    dt_ptr += b * dt_batch
    B_ptr += b * B_batch
    C_ptr += b * C_batch
    z_ptr += b * z_batch
    dy_ptr += b * dy_batch
    dx_ptr += b * L * E
    ddt_ptr += b * L * E
    dz_ptr += b * dz_batch
    between_ptr += b * L * E
    dBC_ptr += (tl.program_id(0) * batch + b) * L * (2 * N)
    dA = tl.zeros([P, BLOCK], tl.float32)
    elapsed = tl.zeros([BLOCK], tl.float32)  # sum of Delta up to here
    x_, dt_, B_, C_, z_, dy_ = _step(x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, dy_ptr, 0, L, E, x_row, dt_row, B_row, C_row,
                                     z_row, dy_row, e, n, N, GATE, True)  # fmt: skip
    for t in tl.range(0, L, loop_unroll_factor=UNROLL):  # forward in time, with h
        x, delta, dy = x_.to(tl.float32), dt_.to(tl.float32), dy_.to(tl.float32)
        B, C, z = B_.to(tl.float32), C_.to(tl.float32), z_.to(tl.float32)
        x_, dt_, B_, C_, z_, dy_ = _step(x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, dy_ptr, t + 1, L, E, x_row, dt_row, B_row,
                                         C_row, z_row, dy_row, e, n, N, GATE, True)  # fmt: skip
        if SOFTPLUS:
            delta = softplus(delta + bias)
        h = tl.exp2(delta[None, :] * A) * h + (delta * x)[None, :] * B[:, None]
        elapsed += delta
        Ch = h * C[:, None]
        if GATE:
            s = sigmoid(z)
            y = tl.sum(Ch, 0) + D * x
            tl.store(dz_ptr + t * dz_row + e, dy * y * s * (1.0 + z * (1.0 - s)), mask=channel)
            dy *= z * s
        tl.store(between_ptr + t * E + e, dy * tl.sum(Ch * A, 0), mask=channel)  # sum_n A_n out_t
        tl.store(dBC_ptr + t * (2 * N) + N + n, tl.sum(dy[None, :] * h, 1), mask=known)  # dC
        dA += (elapsed * dy)[None, :] * Ch
    dD = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    if DLAST:
        g = tl.load(dlast_ptr + b * N * E + at, mask=cell, other=0.0)
        dA += elapsed[None, :] * (g * h)
        through = tl.sum(A * g * h, 0)  # sum over n and over all that is to come of A (out - in)
    else:
        g = tl.zeros([P, BLOCK], tl.float32)
        through = tl.zeros([BLOCK], tl.float32)
    x_, dt_, B_, C_, z_, dy_ = _step(x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, dy_ptr, L - 1, L, E, x_row, dt_row, B_row,
                                     C_row, z_row, dy_row, e, n, N, GATE, True)  # fmt: skip
    between = tl.load(between_ptr + (L - 1) * E + e, mask=channel, other=0.0)
    for t in tl.range(L - 1, -1, -1, loop_unroll_factor=UNROLL):  # backward in time, with g
        x, delta, dy = x_.to(tl.float32), dt_.to(tl.float32), dy_.to(tl.float32)
        B, C, z = B_.to(tl.float32), C_.to(tl.float32), z_.to(tl.float32)
        x_, dt_, B_, C_, z_, dy_ = _step(x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, dy_ptr, t - 1, L, E, x_row, dt_row, B_row,
                                         C_row, z_row, dy_row, e, n, N, GATE, True)  # fmt: skip
        through += between
        between = tl.load(between_ptr + tl.maximum(t - 1, 0) * E + e, mask=channel, other=0.0)
        if SOFTPLUS:
            delta = softplus(delta + bias)
        if GATE:
            dy *= z * sigmoid(z)
        g += dy[None, :] * C[:, None]
        entering = delta * x
        tl.store(dBC_ptr + t * (2 * N) + n, tl.sum(entering[None, :] * g, 1), mask=known)  # dB
        Bg = g * B[:, None]
        through -= entering * tl.sum(Bg * A, 0)
        dA -= (elapsed * entering)[None, :] * Bg
        elapsed -= delta
        dentering = tl.sum(Bg, 0)
        ddelta = through * LN2 + dentering * x
        tl.store(dx_ptr + t * E + e, dentering * delta + D * dy, mask=channel)
        dD += dy * x
        if SOFTPLUS:
            ddelta *= 1.0 - tl.exp2(-delta * LOG2E)  # the derivative of softplus is sigmoid = 1 - exp(-softplus)
            dbias += ddelta
        tl.store(ddt_ptr + t * E + e, ddelta, mask=channel)
        g *= tl.exp2(delta[None, :] * A)
    dparameter_ptr += b * (N + 2) * E
    tl.store(dparameter_ptr + at, dA, mask=cell)
    tl.store(dparameter_ptr + N * E + e, dbias, mask=channel)
    tl.store(dparameter_ptr + (N + 1) * E + e, dD, mask=channel)
    if STATE:
        tl.store(dstate_ptr + b * N * E + at, g, mask=cell)


@triton.jit
def _conv_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, y_ptr, L, lead, x_batch,
    x_row: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,  # known strides: a row is a constant away from another
    SEGMENTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = (tl.program_id(1) * SEGMENTS + tl.arange(0, SEGMENTS)) * STEPS
    channel = e < E
    x_at = x_ptr + b * x_batch + (start + lead)[:, None] * x_row + e[None, :]
    y_at = y_ptr + b * L * E + start[:, None] * E + e[None, :]
    bias = tl.load(bias_ptr + e, mask=channel, other=0.0)[None, :]
    weights = ()
    for j in tl.static_range(WIDTH):
        weights = weights + (tl.load(weight_ptr + e * WIDTH + j, mask=channel, other=0.0)[None, :],)  # noqa: RUF005
    xs = ()  # every row once, and all of them asked for before the first is needed
    for o in tl.static_range(STEPS + WIDTH - 1):
        t = start + (o - (WIDTH - 1))
        known = t < L
        if o < WIDTH - 1:  # the others are not before the beginning
            known &= t >= -lead
        inside = known[:, None] if E % BLOCK == 0 else known[:, None] & channel[None, :]
        xs = xs + (tl.load(x_at + (o - (WIDTH - 1)) * x_row, mask=inside, other=0.0),)  # noqa: RUF005
    for o in tl.static_range(STEPS):
        pre = bias
        for j in tl.static_range(WIDTH):
            pre += weights[j] * xs[o + j].to(tl.float32)
        known = start + o < L
        inside = known[:, None] if E % BLOCK == 0 else known[:, None] & channel[None, :]
        tl.store(y_at + o * E, pre * sigmoid(pre), mask=inside)


@triton.jit
def _conv_rows(  # type: ignore[no-untyped-def]
    x_at, dy_at, row, rows, zero, known, x_row: tl.constexpr, dy_row: tl.constexpr, LEAD: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """STEPS rows of x and of dy, from `row` on; zeros where there are none."""
    x_at += row * x_row
    dy_at += row * dy_row
    xs, dys = (), ()
    for o in tl.static_range(STEPS):
        inside = known & (zero + (row + o) < rows)
        xs = xs + (tl.load(x_at + o * x_row, mask=inside, other=0.0),)  # noqa: RUF005
        if LEAD > 0:
            inside &= zero + (row + o) >= LEAD
        dys = dys + (tl.load(dy_at + o * dy_row, mask=inside, other=0.0),)  # noqa: RUF005
    return xs, dys


@triton.jit
def _conv_backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, dy_ptr,
    dx_ptr, dparameter_ptr,  # (B, lead + L, E), (programs, E WIDTH + E): partial sums of weight and bias
    L, batch, turns, x_batch, dy_batch, dx_batch,
    x_row: tl.constexpr, dy_row: tl.constexpr, dx_row: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
    LEAD: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A warp walks through BLOCK channels of a sequence, and of others after it: at row r, with x of this row and of
    the WIDTH - 1 before, it has the pre-activation there, and with its gradient all of dx at row r - (WIDTH - 1). The
    next STEPS rows are on their way while these are computed."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = e < E
    rows = L + LEAD
    zero = tl.zeros([BLOCK], tl.int32)  # rows are compared as vectors: the interpreter knows no masks of one number
    bias = tl.load(bias_ptr + e, mask=channel, other=0.0)
    weights = ()
    dweights = ()
    for j in tl.static_range(WIDTH):
        weights = weights + (tl.load(weight_ptr + e * WIDTH + j, mask=channel, other=0.0),)  # noqa: RUF005
        dweights = dweights + (tl.zeros([BLOCK], tl.float32),)  # noqa: RUF005
    dbias = tl.zeros([BLOCK], tl.float32)
    for turn in range(turns):
        b = (turn * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        here = zero + b < batch
        if E % BLOCK != 0:
            here &= channel
        x_at = x_ptr + b * x_batch + e
        dy_at = dy_ptr + b * dy_batch - LEAD * dy_row + e  # output t is at row lead + t
        dx_at = dx_ptr + b * dx_batch + e
        before = ()  # x of the WIDTH - 1 rows before, the last of them last
        dpres = ()  # gradients by the pre-activations there
        for _ in tl.static_range(WIDTH - 1):
            before = before + (tl.zeros([BLOCK], tl.float32),)  # noqa: RUF005
            dpres = dpres + (tl.zeros([BLOCK], tl.float32),)  # noqa: RUF005
        next_xs, next_dys = _conv_rows(x_at, dy_at, 0, rows, zero, here, x_row, dy_row, LEAD, STEPS)
        for row in range(0, rows + WIDTH - 1, STEPS):
            xs, dys = next_xs, next_dys
            into = dx_at + row * dx_row
            next_xs, next_dys = _conv_rows(x_at, dy_at, row + STEPS, rows, zero, here, x_row, dy_row, LEAD, STEPS)
            for o in tl.static_range(STEPS):
                window = before + (xs[o].to(tl.float32),)  # noqa: RUF005
                pre = bias
                for j in tl.static_range(WIDTH):
                    pre += weights[j] * window[j]
                s = sigmoid(pre)
                dpre = dys[o].to(tl.float32) * s * (1.0 + pre * (1.0 - s))  # zero where there is no output
                dpres = dpres + (dpre,)  # noqa: RUF005
                added = ()
                for j in tl.static_range(WIDTH):
                    added = added + (dweights[j] + dpre * window[j],)  # noqa: RUF005
                dweights = added
                dbias += dpre
                dx = tl.zeros([BLOCK], tl.float32)
                for j in tl.static_range(WIDTH):
                    dx += weights[j] * dpres[WIDTH - 1 - j]
                at = row + o - (WIDTH - 1)
                inside = here & (zero + at < rows)
                if o < WIDTH - 1:  # the others are not before the beginning
                    inside &= zero + at >= 0
                tl.store(into + (o - (WIDTH - 1)) * dx_row, dx, mask=inside)
                before, dpres = window[1:], dpres[1:]
    dparameter_ptr += tl.program_id(1).to(tl.int64) * (WIDTH + 1) * E
    for j in tl.static_range(WIDTH):
        tl.store(dparameter_ptr + e * WIDTH + j, dweights[j], mask=channel)
    tl.store(dparameter_ptr + WIDTH * E + e, dbias, mask=channel)


def _rows(*tensors: Tensor) -> list[int]:
    """Strides of batch and time; the last dimension is contiguous."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    """Views are fine (B, C and z are slices of a projection) as long as their channels lie side by side."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def by_hand(
    x: Tensor, dt: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None,
    state: Tensor | None, *others: Tensor,
) -> bool:  # fmt: skip
    """Whether the kernels of `mamba_cuda.py` do it; they take B and C of one dtype."""
    given = (dt, B, C, *others) if z is None else (dt, B, C, z, *others)
    vectors = (D,) if bias is None else (D, bias)
    return state is None and B.dtype == C.dtype and mamba_cuda.suits(x, A, vectors, given)


def scan_forward(
    x: Tensor, dt: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None,
    state: Tensor | None, ends: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`gated_scan` without autograd; the last state is written if `ends`, else it is empty."""
    batch, length, width = x.shape
    size = A.shape[1]
    x, dt, B, C = _contiguous(x, dt, B, C)
    if by_hand(x, dt, bias, A, B, C, D, z, state):
        return mamba_cuda.forward(x, dt, bias, A, B, C, D, z, ends)
    y = torch.empty(batch, length, width, device=x.device, dtype=x.dtype)
    last = torch.empty(batch if ends else 0, size, width, device=x.device, dtype=torch.float32)
    gate = x if z is None else _contiguous(z)[0]
    _scan_forward_kernel[(triton.cdiv(width, FORWARD["BLOCK"]), batch)](
        x, dt, D if bias is None else bias, A.t().contiguous(), B, C, D, gate,
        D if state is None else state.mT.contiguous(), y, last, length, width, *_rows(x, dt, B, C, gate),
        N=size, P=triton.next_power_of_2(size), **FORWARD, SOFTPLUS=bias is not None, GATE=z is not None,
        STATE=state is not None, LAST=ends, num_warps=1,
    )  # fmt: skip
    return y, last.mT


def scan_backward(
    x: Tensor, dt: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None,
    state: Tensor | None, dy: Tensor, dlast: Tensor | None, dz: Tensor | None, dBC: Tensor, put: Put = at_once,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Writes dz and d[B; C] (B, L, 2 N), whose batch and rows may lie anywhere -> dx, ddt, the sums of which
    `of_parameters` are parts, dstate (empty without a state)."""
    batch, length, width = x.shape
    size = A.shape[1]
    x, dt, B, C, dy = _contiguous(x, dt, B, C, dy)
    blocks = triton.cdiv(width, BACKWARD["BLOCK"])

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=x.device, dtype=dtype)

    written = (dBC,) if dz is None else (dBC, dz)
    if dlast is None and by_hand(x, dt, bias, A, B, C, D, z, state, dy, *written):
        return *mamba_cuda.backward(x, dt, bias, A, B, C, D, z, dy, dz, dBC, put), empty(0)
    dx, ddt = empty(batch, length, width, dtype=x.dtype), empty(batch, length, width, dtype=dt.dtype)
    parts, dparameter = empty(blocks, batch, length, 2 * size), empty(batch, size + 2, width)
    dstate = empty(0) if state is None else empty(batch, size, width)
    gate, dgate = (x, dx) if z is None or dz is None else (_contiguous(z)[0], dz)
    _scan_backward_kernel[(blocks, batch)](
        x, dt, D if bias is None else bias, A.t().contiguous(), B, C, D, gate,
        D if state is None else state.mT.contiguous(), dy, D if dlast is None else dlast.mT.contiguous(),
        dx, ddt, dgate, parts, dparameter, dstate, empty(batch, length, width), length, width, batch,
        *_rows(x, dt, B, C, gate, dy, dgate),
        N=size, P=triton.next_power_of_2(size), **BACKWARD, SOFTPLUS=bias is not None, GATE=z is not None,
        STATE=state is not None, DLAST=dlast is not None, num_warps=1,
    )  # fmt: skip
    total(parts, dBC)
    sums = put(lambda: total(dparameter), [dparameter], D)  # (N + 2, E); by hand all in one row
    return dx, ddt, sums, dstate if state is None else dstate.mT


def of_parameters(sums: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """-> dA (E, N) and d[bias; D] (2, E), of either layout."""
    if sums.dim() == 1:
        dA, dvector = sums.split([len(sums) - 2 * width, 2 * width])
        return dA.view(width, -1), dvector.view(2, width)
    return sums[:-2].t(), sums[-2:]


@torch.library.custom_op("qhyer::gated_scan", mutates_args=())
def gated_scan(
    x: Tensor, dt: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None,
    state: Tensor | None, ends: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> y (B, L, E) in x's dtype and the last state (B, E, N), float32, as are A (E, N), D, bias and state.

    Without `bias`, dt is Delta itself; without `z` there is no gate; without `ends` the last state comes back empty.
    """
    return scan_forward(x, dt, bias, A, B, C, D, z, state, ends)


@gated_scan.register_fake
def _(x: Tensor, dt: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None,
      state: Tensor | None, ends: bool = True) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, length, width = x.shape
    y = x.new_empty(batch, length, width)
    batch = batch if ends else 0
    x, dt, B, C = _contiguous(x, dt, B, C)
    if by_hand(x, dt, bias, A, B, C, D, z, state):
        return y, x.new_empty(batch, width, A.shape[1], dtype=torch.float32)
    return y, x.new_empty(batch, A.shape[1], width, dtype=torch.float32).mT


@torch.library.custom_op("qhyer::gated_scan_backward", mutates_args=())
def gated_scan_backward(
    x: Tensor, dt: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None,
    state: Tensor | None, dy: Tensor, dlast: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dx, ddt, dz, d[B; C] (B, L, 2 N), sums `of_parameters`, dstate; absent ones are empty."""
    batch, length, width = x.shape
    dz = None if z is None else torch.empty(batch, length, width, device=x.device, dtype=z.dtype)
    dBC = torch.empty(batch, length, 2 * A.shape[1], device=x.device, dtype=B.dtype)
    dx, ddt, sums, dstate = scan_backward(x, dt, bias, A, B, C, D, z, state, dy, dlast, dz, dBC)
    return dx, ddt, x.new_empty(0) if dz is None else dz, dBC, sums, dstate


@gated_scan_backward.register_fake
def _(x: Tensor, dt: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None,
      state: Tensor | None, dy: Tensor, dlast: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, length, width = x.shape
    size = A.shape[1]
    x, dt, B, C, dy = _contiguous(x, dt, B, C, dy)
    hand = dlast is None and by_hand(x, dt, bias, A, B, C, D, z, state, dy)
    return (
        x.new_empty(batch, length, width),
        dt.new_empty(batch, length, width),
        x.new_empty(0) if z is None else z.new_empty(batch, length, width),
        x.new_empty(batch, length, 2 * size, dtype=B.dtype),
        x.new_empty((size + 2) * width if hand else (size + 2, width), dtype=torch.float32),
        x.new_empty(0) if state is None else x.new_empty(batch, size, width, dtype=torch.float32).mT,
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:-1])
    ctx.set_materialize_grads(False)  # training uses y alone: no zeros for the last state's gradient


def _backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Any, ...]:
    x, dt, bias, A, B, C, D, z, state = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    dx, ddt, dz, dBC, sums, dstate = gated_scan_backward(x, dt, bias, A, B, C, D, z, state, dy, dlast)
    dB, dC = dBC.chunk(2, dim=-1)
    dA, dvector = of_parameters(sums, x.shape[2])
    return (
        dx, ddt, None if bias is None else dvector[0], dA, dB, dC, dvector[1], None if z is None else dz,
        None if state is None else dstate, None,
    )  # fmt: skip


gated_scan.register_autograd(_backward, setup_context=_setup)


# ------------------------------------------------------------------------------------------------ the convolution

CONV_STEPS, CONV_BLOCK = 16, 64  # forward: rows of a warp, and channels
CONV_BACKWARD_STEPS = 8  # rows on their way while as many are computed
CONV_WARPS = 16 * 132  # of a backward launch: 16 on every multiprocessor of an H200, each leaving partial sums


def conv_forward(x: Tensor, weight: Tensor, bias: Tensor, lead: int) -> Tensor:
    """`conv_silu` without autograd."""
    (x,) = _contiguous(x)
    batch, rows, width = x.shape
    length = rows - lead
    # Segments of a program, a warp each: as many as there are, up to four, and all as long.
    segments = min(4, triton.next_power_of_2(triton.cdiv(length, CONV_STEPS)))
    tiles = triton.cdiv(length, segments * CONV_STEPS)
    steps = triton.cdiv(length, segments * tiles)
    y = torch.empty(batch, length, width, device=x.device, dtype=x.dtype)
    _conv_forward_kernel[(triton.cdiv(width, CONV_BLOCK), tiles, batch)](
        x, weight, bias, y, length, lead, x.stride(0), x_row=x.stride(1), E=width, WIDTH=weight.shape[1],
        SEGMENTS=segments, STEPS=steps, BLOCK=CONV_BLOCK, num_warps=segments,
    )  # fmt: skip
    return y


def conv_backward(
    x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, lead: int, dx: Tensor, put: Put = at_once
) -> Tensor:
    """Writes dx, whose batch and rows may lie anywhere -> d[weight; bias], in a row as they lie in memory."""
    x, dy = _contiguous(x, dy)
    batch, rows, width = x.shape
    taps = weight.shape[1]
    blocks = triton.cdiv(width, CONV_BLOCK)
    programs, turns = share(batch, CONV_WARPS // blocks)
    dparameter = torch.empty(programs, (taps + 1) * width, device=x.device, dtype=torch.float32)
    _conv_backward_kernel[(blocks, programs)](
        x, weight, bias, dy, dx, dparameter, rows - lead, batch, turns, x.stride(0), dy.stride(0), dx.stride(0),
        x_row=x.stride(1), dy_row=dy.stride(1), dx_row=dx.stride(1), E=width, WIDTH=taps,
        LEAD=lead, STEPS=CONV_BACKWARD_STEPS, BLOCK=CONV_BLOCK, num_warps=1,
    )  # fmt: skip
    return put(lambda: total(dparameter), [dparameter], weight)


def of_conv(sums: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """-> dweight (E, width) and dbias (E,)."""
    dweight, dbias = sums.split([weight.numel(), len(sums) - weight.numel()])
    return dweight.view(weight.shape), dbias


@torch.library.custom_op("qhyer::conv_silu", mutates_args=())
def conv_silu(x: Tensor, weight: Tensor, bias: Tensor, lead: int) -> Tensor:
    """SiLU of the causal depth-wise convolution. x (B, lead + L, E), its first `lead` rows being the past of the
    others (before them it is zero), weight (E, width) -> (B, L, E)."""
    return conv_forward(x, weight, bias, lead)


@conv_silu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, lead: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] - lead, x.shape[2])


@torch.library.custom_op("qhyer::conv_silu_backward", mutates_args=())
def conv_silu_backward(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, lead: int) -> tuple[Tensor, Tensor]:
    """-> dx, d[weight; bias] (E width + E,)."""
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    return dx, conv_backward(x, weight, bias, dy, lead, dx)


@conv_silu_backward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, lead: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(weight.numel() + bias.numel(), dtype=torch.float32)


def _conv_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.lead = inputs
    ctx.save_for_backward(x, weight, bias)


def _conv_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    dx, sums = conv_silu_backward(x, weight, bias, dy, ctx.lead)
    return dx, *of_conv(sums, weight), None


conv_silu.register_autograd(_conv_backward, setup_context=_conv_setup)
