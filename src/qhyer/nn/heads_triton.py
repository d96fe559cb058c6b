"""Heads that are read at some tokens of a window, as Triton kernels, forward and backward.

Of the outputs h (B, L, d) of a decoder whose tokens take turns, P a step, one head is read at every step's state token
(Q-hat, one number) and one where the action is (A numbers):

    q_b,k = w . h_b,s + c,    a_b,k = W h_b,t + b,    s = k P + STATE,  t = k P + ACTION

In plain torch that is one product at all tokens, most of whose results nobody reads, and backward fills in gradients of
zero for these before it multiplies them. Here a head reads its own tokens alone. Backward writes the gradient of h in
full, zeros where nothing was read, and every program leaves a row of partial sums for the heads' parameters, which are
added in a fixed order: no atomics, so that the same inputs give the same bits.

Weights are rounded to h's dtype, as a product in that dtype would; sums and results are float32. Importing qhyer does
not import this module.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from qhyer.nn.rows_triton import columns, strips, tile_of, zeros
from qhyer.nn.total_triton import share
from qhyer.nn.total_triton import total as _total

PROGRAMS = 4 * 132  # of a backward launch: four on every multiprocessor of an H200, each leaving partial sums
UNROLLED = 32  # outputs of the action's head: the kernels are unrolled over them


@triton.jit(do_not_specialize=["M"])
def _heads_forward_kernel(  # type: ignore[no-untyped-def]
    h_ptr, weight_ptr, bias_ptr, q_weight_ptr, q_bias_ptr,  # (B, L, D), (A, D), (A,), (D,), (1,)
    out_ptr, q_ptr,  # (M, A), (M,): M = B K
    M, K: tl.constexpr, L: tl.constexpr, P: tl.constexpr, STATE: tl.constexpr, ACTION: tl.constexpr,
    Q: tl.constexpr, A: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = columns(BLOCK, VECTOR)
    known, column = m < M, e < D
    cell = known[:, None] & column[None, :]
    at = ((m // K).to(tl.int64) * L + (m % K) * P)[:, None] * D + e[None, :]
    low = h_ptr.dtype.element_ty
    h = tl.load(h_ptr + at + ACTION * D, mask=cell, other=0.0).to(tl.float32)
    for j in tl.static_range(A):
        weight = tl.load(weight_ptr + j * D + e, mask=column, other=0.0).to(low).to(tl.float32)
        out = tl.sum(h * weight[None, :], 1) + tl.load(bias_ptr + j).to(tl.float32)
        tl.store(out_ptr + m.to(tl.int64) * A + j, out, mask=known)
    if Q:
        h = tl.load(h_ptr + at + STATE * D, mask=cell, other=0.0).to(tl.float32)
        weight = tl.load(q_weight_ptr + e, mask=column, other=0.0).to(low).to(tl.float32)
        tl.store(q_ptr + m, tl.sum(h * weight[None, :], 1) + tl.load(q_bias_ptr).to(tl.float32), mask=known)


@triton.jit(do_not_specialize=["M", "steps"])
def _heads_backward_kernel(  # type: ignore[no-untyped-def]
    h_ptr, weight_ptr, q_weight_ptr, dout_ptr, dq_ptr, dh_ptr,
    partial_ptr,  # (programs, PARTIAL): of weight, of q_weight; of the biases at BIAS
    M, steps, K: tl.constexpr, L: tl.constexpr, P: tl.constexpr, STATE: tl.constexpr, ACTION: tl.constexpr,
    Q: tl.constexpr, A: tl.constexpr, D: tl.constexpr, PARTIAL: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * BLOCK + columns(BLOCK, VECTOR)
    column = e < D
    low = h_ptr.dtype.element_ty
    dweight = zeros(A, BLOCK)
    dbias = tl.zeros([BLOCK], tl.float32)  # of output j at column j, so that one store takes them all
    if Q:
        q_weight = tl.load(q_weight_ptr + e, mask=column, other=0.0).to(low).to(tl.float32)[None, :]
        dq_weight = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        m = (step * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
        known, first = m < M, (m % K) * P
        cell = known[:, None] & column[None, :]
        at = ((m // K).to(tl.int64) * L + first)[:, None] * D + e[None, :]
        # What lies outside is loaded as zero and adds zero to every sum, so that only stores need a mask.
        h = tl.load(h_ptr + at + ACTION * D, mask=cell, other=0.0).to(tl.float32)
        dh = tl.zeros([ROWS, BLOCK], tl.float32)
        dweight_ = ()
        for j in tl.static_range(A):
            g = tl.load(dout_ptr + m.to(tl.int64) * A + j, mask=known, other=0.0)
            g = tl.broadcast_to(g[:, None], [ROWS, BLOCK])
            weight = tl.load(weight_ptr + j * D + e, mask=column, other=0.0).to(low).to(tl.float32)
            dh += g * weight[None, :]
            dweight_ = dweight_ + (dweight[j] + tl.sum(g * h, 0),)  # noqa: RUF005
            dbias += tl.where(e == j, tl.sum(g, 0), 0.0)
        dweight = dweight_
        if Q:
            h = tl.load(h_ptr + at + STATE * D, mask=cell, other=0.0).to(tl.float32)
            g = tl.broadcast_to(tl.load(dq_ptr + m, mask=known, other=0.0)[:, None], [ROWS, BLOCK])
            dq_weight += tl.sum(g * h, 0)
            dbias += tl.where(e == A, tl.sum(g, 0), 0.0)
            if STATE == ACTION:
                dh += g * q_weight
            else:
                tl.store(dh_ptr + at + STATE * D, g * q_weight, mask=cell)
        tl.store(dh_ptr + at + ACTION * D, dh, mask=cell)
        for p in tl.static_range(P):
            if p != ACTION and (p != STATE or not Q):
                there = cell & (first + p < L)[:, None]
                tl.store(dh_ptr + at + p * D, tl.zeros([ROWS, BLOCK], tl.float32), mask=there)
    partial_ptr += tl.program_id(1).to(tl.int64) * PARTIAL
    for j in tl.static_range(A):
        tl.store(partial_ptr + j * D + e, dweight[j], mask=column)
    if Q:
        tl.store(partial_ptr + A * D + e, dq_weight, mask=column)
    tl.store(partial_ptr + BIAS + e, dbias, mask=e < (A + 1 if Q else A))


def _steps(length: int, per_step: int, at: int) -> int:
    """How often a step's token `at` comes in windows of this many tokens."""
    return max(0, -((at - length) // per_step))


def fits(h: Tensor, action_head: nn.Linear, per_step: int, state_at: int, action_from: int) -> bool:
    """Whether the kernels can read such heads: not too many numbers, and windows that lack an action at most."""
    same = _steps(h.shape[1], per_step, state_at) == _steps(h.shape[1], per_step, action_from)
    ends = h.shape[1] % per_step in (0, per_step - 1)
    return same and ends and action_head.out_features <= UNROLLED and h.numel() > 0


def read_heads(
    h: Tensor, action_head: nn.Linear, q_head: nn.Linear | None, per_step: int, state_at: int, action_from: int
) -> tuple[Tensor | None, Tensor]:
    """h (B, L, d) -> Q-hat (B, K) and the action head's numbers (B, K, A), float32."""
    q = (None, None) if q_head is None else (q_head.weight, q_head.bias)
    out, q_hat = heads(h, action_head.weight, action_head.bias, *q, per_step, state_at, action_from)
    return None if q_head is None else q_hat, out


@torch.library.custom_op("qhyer::heads", mutates_args=())
def heads(
    h: Tensor, weight: Tensor, bias: Tensor, q_weight: Tensor | None, q_bias: Tensor | None,
    per_step: int, state_at: int, action_from: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> the action head's numbers (B, K, A) and Q-hat (B, K), which is empty without its head."""
    h = h.contiguous()
    batch, length, width = h.shape
    outputs, steps = weight.shape[0], _steps(length, per_step, action_from)
    out = h.new_empty(batch, steps, outputs, dtype=torch.float32)
    q_hat = h.new_empty((batch, steps) if q_weight is not None else 0, dtype=torch.float32)
    tile = tile_of(width, 256, 32)
    _heads_forward_kernel[(triton.cdiv(batch * steps, tile["ROWS"]),)](
        h, weight.contiguous(), bias, h if q_weight is None else q_weight.contiguous(), h if q_bias is None else q_bias,
        out, q_hat, batch * steps, K=steps, L=length, P=per_step, STATE=state_at, ACTION=action_from,
        Q=q_weight is not None, A=outputs, D=width, **tile,
    )  # fmt: skip
    return out, q_hat


@heads.register_fake
def _(h: Tensor, weight: Tensor, bias: Tensor, q_weight: Tensor | None, q_bias: Tensor | None,
      per_step: int, state_at: int, action_from: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, length, _ = h.shape
    steps = _steps(length, per_step, action_from)
    out = h.new_empty(batch, steps, weight.shape[0], dtype=torch.float32)
    return out, h.new_empty((batch, steps) if q_weight is not None else 0, dtype=torch.float32)


def _sizes(outputs: int, width: int, with_q: bool) -> tuple[int, int]:
    """Of a row of sums: where the biases begin, and its length, a multiple of 16 so that rows stay aligned."""
    begin = (outputs + with_q) * width
    return begin, triton.cdiv(begin + outputs + with_q, 16) * 16


@torch.library.custom_op("qhyer::heads_backward", mutates_args=())
def heads_backward(
    h: Tensor, weight: Tensor, q_weight: Tensor | None, dout: Tensor, dq: Tensor | None,
    per_step: int, state_at: int, action_from: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> dh, and the gradients of the parameters in a row: of weight, q_weight, bias, q_bias (and a few more)."""
    h = h.contiguous()
    batch, length, width = h.shape
    outputs, steps = weight.shape[0], _steps(length, per_step, action_from)
    dh = torch.empty_like(h)
    begin, size = _sizes(outputs, width, q_weight is not None)
    tile = strips(width, outputs)
    blocks = triton.cdiv(width, tile["BLOCK"])
    programs, rounds = share(triton.cdiv(batch * steps, tile["ROWS"]), PROGRAMS // blocks)
    partial = h.new_empty(programs, size, dtype=torch.float32)
    _heads_backward_kernel[(blocks, programs)](
        h, weight.contiguous(), h if q_weight is None else q_weight.contiguous(), dout.contiguous(),
        h if dq is None else dq.contiguous(), dh, partial, batch * steps, rounds, K=steps, L=length, P=per_step,
        STATE=state_at, ACTION=action_from, Q=q_weight is not None, A=outputs, D=width, PARTIAL=size, BIAS=begin,
        **tile,
    )  # fmt: skip
    return dh, _total(partial)


@heads_backward.register_fake
def _(h: Tensor, weight: Tensor, q_weight: Tensor | None, dout: Tensor, dq: Tensor | None,
      per_step: int, state_at: int, action_from: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _, size = _sizes(weight.shape[0], weight.shape[1], q_weight is not None)
    return h.new_empty(h.shape), h.new_empty(size, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, weight, bias, q_weight, q_bias, *ctx.places = inputs
    ctx.save_for_backward(h, weight, q_weight)
    ctx.dtypes = bias.dtype, None if q_bias is None else q_bias.dtype


def _backward(ctx: Any, dout: Tensor, dq: Tensor) -> tuple[Any, ...]:
    h, weight, q_weight = ctx.saved_tensors
    outputs, width = weight.shape
    with_q = q_weight is not None
    dh, sums = heads_backward(h, weight, q_weight, dout, dq if with_q else None, *ctx.places)
    begin, _ = _sizes(outputs, width, with_q)
    return (
        dh,
        sums[: outputs * width].view(weight.shape).to(weight.dtype),
        sums[begin : begin + outputs].to(ctx.dtypes[0]),
        sums[outputs * width : begin].view(q_weight.shape).to(q_weight.dtype) if with_q else None,
        sums[begin + outputs : begin + outputs + 1].to(ctx.dtypes[1]) if with_q else None,
        None, None, None,
    )  # fmt: skip


heads.register_autograd(_backward, setup_context=_setup)
