"""The tokens of a window, [s;g], Q, a per step, as Triton kernels, forward and backward.

    x_3k = u_k + e_k + c_0,    x_3k+1 = q_k w + e_k + c_1,    x_3k+2 = W a_k + e_k + c_2

with u the state's product, which is torch's, e the positions and c a token's kind and bias together. In plain torch the
products of one number and of few are kernels of their own, in either direction, and so are the stack of the three, what
is added to it, and its slices and sums backward. All of it is little to compute: what counts is that (B, 3 K, d) is
written once, and its gradient read once.

A program has one step k of the window, a strip of columns and some of the sequences. So it holds e_k and the weights in
registers, and its sum of gradients over sequences is that of e_k. It leaves one row of partial sums; a second kernel
adds them, those of e_k and all others at once, in a fixed order: no atomics, so that the same inputs give the same
bits.

Inputs and weights are rounded to the product's dtype, as a product in that dtype would; everything else is float32.
Importing qhyer does not import this module.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qhyer.nn.rows_triton import columns, strips, zeros
from qhyer.nn.total_triton import share

FORWARD = 8 * 132  # programs of a forward launch: eight on every multiprocessor of an H200
BACKWARD = 3 * 132  # of a backward launch, each leaving partial sums


@triton.jit(do_not_specialize=["B", "T", "L", "steps"])
def _tokens_forward_kernel(  # type: ignore[no-untyped-def]
    state_ptr, q_ptr, action_ptr, q_weight_ptr, weight_ptr,  # (B, T, D), (B, T), (B, T, A), (D,), (D, A)
    position_ptr, kind_ptr, state_bias_ptr, q_bias_ptr, bias_ptr,  # (T, D), (3, D), thrice (D,)
    x_ptr,  # (B, L, D), L = 3 T or one less
    B, T, L, steps,
    A: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1)
    e = tl.program_id(0) * BLOCK + columns(BLOCK, VECTOR)
    column = e < D
    acting = tl.where(3 * k + 2 < L, B, 0)  # sequences that have this step's action
    low = state_ptr.dtype.element_ty
    position = tl.load(position_ptr + k * D + e, mask=column, other=0.0)
    of_state = position + tl.load(kind_ptr + e, mask=column, other=0.0)
    of_state += tl.load(state_bias_ptr + e, mask=column, other=0.0)
    of_q = position + tl.load(kind_ptr + D + e, mask=column, other=0.0)
    of_q += tl.load(q_bias_ptr + e, mask=column, other=0.0)
    of_action = position + tl.load(kind_ptr + 2 * D + e, mask=column, other=0.0)
    of_action += tl.load(bias_ptr + e, mask=column, other=0.0)
    q_weight = tl.load(q_weight_ptr + e, mask=column, other=0.0).to(low).to(tl.float32)
    weight = ()
    for j in tl.static_range(A):
        weight = weight + (tl.load(weight_ptr + e * A + j, mask=column, other=0.0).to(low).to(tl.float32),)  # noqa: RUF005
    for step in range(steps):
        b = ((step * tl.num_programs(2) + tl.program_id(2)) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        known = b < B
        cell = known[:, None] & column[None, :]
        m = b * T + k
        at = (b * L + 3 * k)[:, None] * D + e[None, :]
        state = tl.load(state_ptr + m[:, None] * D + e[None, :], mask=cell, other=0.0).to(tl.float32)
        tl.store(x_ptr + at, state + of_state[None, :], mask=cell)
        q = tl.load(q_ptr + m, mask=known, other=0.0).to(low).to(tl.float32)
        tl.store(x_ptr + at + D, q[:, None] * q_weight[None, :] + of_q[None, :], mask=cell)
        x = tl.zeros([ROWS, BLOCK], tl.float32) + of_action[None, :]
        for j in tl.static_range(A):
            a = tl.load(action_ptr + m * A + j, mask=known, other=0.0).to(low).to(tl.float32)
            x += a[:, None] * weight[j][None, :]
        tl.store(x_ptr + at + 2 * D, x, mask=(b < acting)[:, None] & column[None, :])


@triton.jit(do_not_specialize=["B", "T", "L", "steps"])
def _tokens_backward_kernel(  # type: ignore[no-untyped-def]
    dx_ptr, q_ptr, action_ptr, dstate_ptr,
    partial_ptr,  # (slices, T, (8 + A) D): of kinds, biases, q_weight, weight (D, A), position
    B, T, L, steps,
    A: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1)
    e = tl.program_id(0) * BLOCK + columns(BLOCK, VECTOR)
    column = e < D
    acting = tl.where(3 * k + 2 < L, B, 0)  # sequences that have this step's action
    low = dstate_ptr.dtype.element_ty
    of_state = tl.zeros([BLOCK], tl.float32)
    of_q = tl.zeros([BLOCK], tl.float32)
    of_action = tl.zeros([BLOCK], tl.float32)
    dq_weight = tl.zeros([BLOCK], tl.float32)
    dweight = zeros(A, BLOCK)
    for step in range(steps):
        b = ((step * tl.num_programs(2) + tl.program_id(2)) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        known = b < B
        cell = known[:, None] & column[None, :]
        m = b * T + k
        at = (b * L + 3 * k)[:, None] * D + e[None, :]
        # What lies outside is loaded as zero and adds zero to every sum, so that only stores need a mask.
        state = tl.load(dx_ptr + at, mask=cell, other=0.0).to(tl.float32)
        g = tl.load(dx_ptr + at + D, mask=cell, other=0.0).to(tl.float32)
        action = tl.load(dx_ptr + at + 2 * D, mask=(b < acting)[:, None] & column[None, :], other=0.0).to(tl.float32)
        tl.store(dstate_ptr + m[:, None] * D + e[None, :], state, mask=cell)
        of_state += tl.sum(state, 0)
        of_q += tl.sum(g, 0)
        of_action += tl.sum(action, 0)
        q = tl.load(q_ptr + m, mask=known, other=0.0).to(low).to(tl.float32)
        dq_weight += tl.sum(q[:, None] * g, 0)
        dweight_ = ()
        for j in tl.static_range(A):
            a = tl.load(action_ptr + m * A + j, mask=known, other=0.0).to(low).to(tl.float32)
            dweight_ = dweight_ + (dweight[j] + tl.sum(a[:, None] * action, 0),)  # noqa: RUF005
        dweight = dweight_
    row = tl.program_id(2).to(tl.int64) * T + k
    partial_ptr += row * ((8 + A) * D)
    for twice in tl.static_range(2):  # kinds and biases have the same gradients, but each its own memory
        tl.store(partial_ptr + (3 * twice) * D + e, of_state, mask=column)
        tl.store(partial_ptr + (3 * twice + 1) * D + e, of_q, mask=column)
        tl.store(partial_ptr + (3 * twice + 2) * D + e, of_action, mask=column)
    tl.store(partial_ptr + 6 * D + e, dq_weight, mask=column)
    for j in tl.static_range(A):
        tl.store(partial_ptr + 7 * D + e * A + j, dweight[j], mask=column)
    tl.store(partial_ptr + (7 + A) * D + e, of_state + of_q + of_action, mask=column)


@triton.jit(do_not_specialize=["slices", "T"])
def _sums_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, sums_ptr,  # (slices, T, W + D), (W + T D,)
    slices, T, W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first W columns are added up over slices and steps, the last D, of positions, over slices alone."""
    wide = tl.cdiv(W, BLOCK)
    strips = tl.cdiv(D, BLOCK)
    place = tl.program_id(0) - wide
    of_position = place >= 0
    k = tl.where(of_position, place // strips, 0).to(tl.int64)
    e = tl.where(of_position, place % strips, tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    column = e < tl.where(of_position, D, W)
    partial_ptr += tl.where(of_position, k * (W + D) + W, 0)
    apart = tl.where(of_position, T, 1).to(tl.int64) * (W + D)  # from a row to the next
    rows = tl.where(of_position, slices, slices * T)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, rows, ROWS):
        r = first + tl.arange(0, ROWS)
        cell = (r < rows)[:, None] & column[None, :]
        total += tl.load(partial_ptr + r[:, None] * apart + e[None, :], mask=cell, other=0.0)
    tl.store(sums_ptr + tl.where(of_position, W + k * D, 0) + e, tl.sum(total, 0), mask=column)


def _grid(batch: int, steps: int, width: int, tile: dict[str, int], programs: int) -> tuple[tuple[int, int, int], int]:
    """-> strips, steps of the window and slices of the sequences, and how many tiles of sequences a slice has."""
    blocks = triton.cdiv(width, tile["BLOCK"])
    slices, rounds = share(triton.cdiv(batch, tile["ROWS"]), programs // (steps * blocks))
    return (blocks, steps, slices), rounds


@torch.library.custom_op("qhyer::tokens", mutates_args=())
def embed(
    state: Tensor, q: Tensor, actions: Tensor, q_weight: Tensor, weight: Tensor, position: Tensor, kind: Tensor,
    state_bias: Tensor, q_bias: Tensor, bias: Tensor, last: bool,
) -> Tensor:  # fmt: skip
    """The state's product (B, T, d), Q (B, T), actions (B, T, A) and float32 parameters, q_weight (d, 1), weight
    (d, A), position (T, d), kind (3, d) and biases (d,) -> tokens (B, 3 T, d), float32; without `last`, one less. No
    gradient passes to Q and the actions."""
    batch, steps, width = state.shape
    tokens = 3 * steps - (not last)
    x = state.new_empty(batch, tokens, width, dtype=torch.float32)
    tile = strips(width, weight.shape[1])
    grid, rounds = _grid(batch, steps, width, tile, FORWARD)
    _tokens_forward_kernel[grid](
        state.contiguous(), q.contiguous(), actions.contiguous(), q_weight.contiguous(), weight.contiguous(),
        position.contiguous(), kind.contiguous(), state_bias, q_bias, bias, x, batch, steps, tokens, rounds,
        A=weight.shape[1], D=width, **tile,
    )  # fmt: skip
    return x


@embed.register_fake
def _(state: Tensor, q: Tensor, actions: Tensor, q_weight: Tensor, weight: Tensor, position: Tensor, kind: Tensor,
      state_bias: Tensor, q_bias: Tensor, bias: Tensor, last: bool,
) -> Tensor:  # fmt: skip
    batch, steps, width = state.shape
    return state.new_empty(batch, 3 * steps - (not last), width, dtype=torch.float32)


@torch.library.custom_op("qhyer::tokens_backward", mutates_args=())
def embed_backward(dx: Tensor, q: Tensor, actions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """-> the gradients of the state's product, in `dtype`, and of the parameters in a row: of the kinds, the biases,
    q_weight, weight, position."""
    batch, steps, numbers = actions.shape
    width = dx.shape[-1]
    dstate = dx.new_empty(batch, steps, width, dtype=dtype)
    tile = strips(width, numbers)
    grid, rounds = _grid(batch, steps, width, tile, BACKWARD)
    partial = dx.new_empty(grid[2], steps, (8 + numbers) * width, dtype=torch.float32)
    _tokens_backward_kernel[grid](
        dx.contiguous(), q.contiguous(), actions.contiguous(), dstate, partial,
        batch, steps, dx.shape[1], rounds, A=numbers, D=width, **tile,
    )  # fmt: skip
    wide, block = (7 + numbers) * width, 32
    sums = dx.new_empty(wide + steps * width, dtype=torch.float32)
    _sums_kernel[(triton.cdiv(wide, block) + steps * triton.cdiv(width, block),)](
        partial, sums, grid[2], steps, W=wide, D=width, ROWS=64, BLOCK=block, num_warps=4
    )
    return dstate, sums


@embed_backward.register_fake
def _(dx: Tensor, q: Tensor, actions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, steps, numbers = actions.shape
    width = dx.shape[-1]
    sums = dx.new_empty((7 + numbers + steps) * width, dtype=torch.float32)
    return dx.new_empty(batch, steps, width, dtype=dtype), sums


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    state, q, actions, *_ = inputs
    ctx.save_for_backward(q, actions)
    ctx.dtype = state.dtype


def _backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
    q, actions = ctx.saved_tensors
    width, numbers = dx.shape[-1], actions.shape[-1]
    dstate, sums = embed_backward(dx, q, actions, ctx.dtype)
    counts = [3, 3, 1, numbers, actions.shape[1]]
    kinds, biases, dq_weight, dweight, dposition = sums.split([count * width for count in counts])
    return (
        dstate, None, None, dq_weight.view(width, 1), dweight.view(width, numbers), dposition.view(-1, width),
        kinds.view(3, width), *biases.view(3, width), None,
    )  # fmt: skip


embed.register_autograd(_backward, setup_context=_setup)
