"""What lies between networks and their losses, as Triton kernels, forward and backward.

Few numbers, and in plain torch many small kernels one after the other, each of which takes longer to begin than to
compute. With v what is valid and n = max(sum v, 1),

    actor      L_BC = sum v (|a - mean|^2 / 2 + A log(2 pi) / 2) / n,      L_Q = sum v |tau - 1(u < 0)| u^2 / n
               with u = Q - Q-hat, and beside them the means of (a - mean)^2, of Q and of -u
    scale      the running mean of |Q - shift|, moved by this batch's, and Q normalised with it
    normal     log N(z; 0, I) + log|det|, what a flow's density ends with

The actor's sums leave every program as partial sums that a second kernel adds, the scale's are of one program: a fixed
order and no atomics, so that the same inputs give the same bits. The actor's backward computes errors again
instead of keeping them, and reads the gradients of the two losses on the device.

Everything is float32. Importing qhyer does not import this module.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from qhyer.nn.rows_triton import zeros

TILE = 1024  # numbers of a program
SUMS = tl.constexpr(5)  # of the actor: of squares, of L_Q, of Q, of -u, of v
FINISH = 256  # rows of partial sums that are read at a time
SCALE_TILE = 8192  # values of Q that are read at a time


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels can take these: float32, few enough for 32 bits, and not of seeds that are stacked."""
    stacked = not torch.compiler.is_compiling() and any(is_batchedtensor(x) for x in tensors)
    return not stacked and all(x.dtype == torch.float32 and 0 < x.numel() < 2**31 for x in tensors)


def _tile(numbers: int) -> dict[str, int]:
    pad = max(2, triton.next_power_of_2(numbers))
    return dict(PAD=pad, ROWS=max(1, TILE // pad), num_warps=4)


# ------------------------------------------------------------------------------------------------------ the actor


@triton.jit
def _expectile(u, tau, rest):  # type: ignore[no-untyped-def]
    """|tau - 1(u < 0)|; rest: 1 - tau."""
    return tl.where(u < 0.0, rest, tau)


@triton.jit(do_not_specialize=["M"])
def _actor_kernel(  # type: ignore[no-untyped-def]
    mean_ptr, action_ptr, q_hat_ptr, q_ptr, valid_ptr,  # (M, A) twice, (M,) thrice
    partial_ptr,  # (SUMS, programs)
    M, tau, rest, A: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, PAD)
    known = m < M
    cell = known[:, None] & (j < A)[None, :]
    at = m[:, None] * A + j[None, :]
    valid = tl.load(valid_ptr + m, mask=known, other=0).to(tl.float32)
    error = tl.load(mean_ptr + at, mask=cell, other=0.0) - tl.load(action_ptr + at, mask=cell, other=0.0)
    q = tl.load(q_ptr + m, mask=known, other=0.0)
    u = q - tl.load(q_hat_ptr + m, mask=known, other=0.0)
    partial_ptr += tl.program_id(0)
    programs = tl.num_programs(0)
    tl.store(partial_ptr, tl.sum(tl.sum(error * error, 1) * valid, 0))
    tl.store(partial_ptr + programs, tl.sum(_expectile(u, tau, rest) * u * u * valid, 0))
    tl.store(partial_ptr + 2 * programs, tl.sum(q * valid, 0))
    tl.store(partial_ptr + 3 * programs, tl.sum(-u * valid, 0))
    tl.store(partial_ptr + 4 * programs, tl.sum(valid, 0))


@triton.jit(do_not_specialize=["programs"])
def _actor_finish_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, bc_ptr, regression_ptr, beside_ptr, programs, constant, A: tl.constexpr, BLOCK: tl.constexpr
):
    sums = zeros(SUMS, BLOCK)
    for first in range(0, programs, BLOCK):
        r = first + tl.arange(0, BLOCK)
        sums_ = ()
        for i in tl.static_range(SUMS):
            found = tl.load(partial_ptr + i * programs + r, mask=r < programs, other=0.0)
            sums_ = sums_ + (sums[i] + found,)  # noqa: RUF005
        sums = sums_
    count = tl.sum(sums[4], 0)
    share = 1.0 / tl.maximum(count, 1.0)
    squares = tl.sum(sums[0], 0) * share
    tl.store(bc_ptr, 0.5 * squares + constant * (count * share))
    tl.store(regression_ptr, tl.sum(sums[1], 0) * share)
    tl.store(beside_ptr, squares / A)
    tl.store(beside_ptr + 1, tl.sum(sums[2], 0) * share)
    tl.store(beside_ptr + 2, tl.sum(sums[3], 0) * share)
    tl.store(beside_ptr + 3, share)


@triton.jit(do_not_specialize=["M"])
def _actor_backward_kernel(  # type: ignore[no-untyped-def]
    mean_ptr, action_ptr, q_hat_ptr, q_ptr, valid_ptr, beside_ptr, dbc_ptr, dregression_ptr,
    dmean_ptr, dq_hat_ptr,  # (M, A), (M,)
    M, tau, rest, A: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, PAD)
    known = m < M
    cell = known[:, None] & (j < A)[None, :]
    at = m[:, None] * A + j[None, :]
    share = tl.load(valid_ptr + m, mask=known, other=0).to(tl.float32) * tl.load(beside_ptr + 3)
    error = tl.load(mean_ptr + at, mask=cell, other=0.0) - tl.load(action_ptr + at, mask=cell, other=0.0)
    tl.store(dmean_ptr + at, error * (share * tl.load(dbc_ptr))[:, None], mask=cell)
    u = tl.load(q_ptr + m, mask=known, other=0.0) - tl.load(q_hat_ptr + m, mask=known, other=0.0)
    dq_hat = -2.0 * _expectile(u, tau, rest) * u * (share * tl.load(dregression_ptr))
    tl.store(dq_hat_ptr + m, dq_hat, mask=known)


def actor_losses(
    mean: Tensor, actions: Tensor, q_hat: Tensor, q: Tensor, valid: Tensor, tau: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Of means and actions (..., A), Q-hat, Q and what is valid (...): L_BC and L_Q, and without gradient the means of
    (a - mean)^2, of Q and of Q-hat - Q. No gradient passes to actions and Q."""
    bc, regression, beside = actor(mean, actions, q_hat, q, valid, tau)
    error, q_mean, gap, _ = beside.detach().unbind()
    return bc, regression, (error, q_mean, gap)


@torch.library.custom_op("qhyer::actor_losses", mutates_args=())
def actor(
    mean: Tensor, actions: Tensor, q_hat: Tensor, q: Tensor, valid: Tensor, tau: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> L_BC (), L_Q (), and (4,): the means of (a - mean)^2, of Q and of Q-hat - Q, and 1 / n."""
    numbers, rows = mean.shape[-1], q.numel()
    tile = _tile(numbers)
    programs = triton.cdiv(rows, tile["ROWS"])
    partial = mean.new_empty(SUMS.value, programs)
    bc, regression, beside = mean.new_empty(()), mean.new_empty(()), mean.new_empty(4)
    _actor_kernel[(programs,)](
        mean.contiguous(), actions.contiguous(), q_hat.contiguous(), q.contiguous(), valid.contiguous(), partial,
        rows, tau, 1.0 - tau, A=numbers, **tile,
    )  # fmt: skip
    constant = numbers * 0.5 * math.log(2 * math.pi)
    _actor_finish_kernel[(1,)](
        partial, bc, regression, beside, programs, constant, A=numbers, BLOCK=FINISH, num_warps=4
    )
    return bc, regression, beside


@actor.register_fake
def _(
    mean: Tensor, actions: Tensor, q_hat: Tensor, q: Tensor, valid: Tensor, tau: float
) -> tuple[Tensor, Tensor, Tensor]:
    return mean.new_empty(()), mean.new_empty(()), mean.new_empty(4)


@torch.library.custom_op("qhyer::actor_losses_backward", mutates_args=())
def actor_backward(
    mean: Tensor, actions: Tensor, q_hat: Tensor, q: Tensor, valid: Tensor, beside: Tensor,
    dbc: Tensor, dregression: Tensor, tau: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> the gradients of mean and q_hat."""
    numbers, rows = mean.shape[-1], q.numel()
    dmean, dq_hat = mean.new_empty(mean.shape), q_hat.new_empty(q_hat.shape)
    tile = _tile(numbers)
    _actor_backward_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        mean.contiguous(), actions.contiguous(), q_hat.contiguous(), q.contiguous(), valid.contiguous(), beside,
        dbc, dregression, dmean, dq_hat, rows, tau, 1.0 - tau, A=numbers, **tile,
    )  # fmt: skip
    return dmean, dq_hat


@actor_backward.register_fake
def _(mean: Tensor, actions: Tensor, q_hat: Tensor, q: Tensor, valid: Tensor, beside: Tensor,
      dbc: Tensor, dregression: Tensor, tau: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return mean.new_empty(mean.shape), q_hat.new_empty(q_hat.shape)


def _actor_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.tau = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient


def _actor_backward(ctx: Any, dbc: Tensor | None, dregression: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    beside = ctx.saved_tensors[-1]
    dbc = beside.new_zeros(()) if dbc is None else dbc
    dregression = beside.new_zeros(()) if dregression is None else dregression
    dmean, dq_hat = actor_backward(*ctx.saved_tensors, dbc, dregression, ctx.tau)
    return dmean, None, dq_hat, None, None, None


actor.register_autograd(_actor_backward, setup_context=_actor_setup)


# ------------------------------------------------------------------------------------------------- the scale of Q


@triton.jit(do_not_specialize=["M"])
def _scale_kernel(  # type: ignore[no-untyped-def]
    q_ptr, valid_ptr, shift_ptr, scale_ptr, seen_ptr, out_ptr, M, rate, floor, BLOCK: tl.constexpr
):
    """One program: all of it knows the old scale, read before the sums, when one thread writes the new one."""
    shift, before, seen = tl.load(shift_ptr), tl.load(scale_ptr), tl.load(seen_ptr)
    spread = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for first in range(0, M, BLOCK):
        m = first + tl.arange(0, BLOCK)
        valid = tl.load(valid_ptr + m, mask=m < M, other=0).to(tl.float32)
        spread += tl.abs(tl.load(q_ptr + m, mask=m < M, other=0.0) - shift) * valid
        count += valid
    now = tl.sum(spread, 0) / tl.maximum(tl.sum(count, 0), 1.0)
    scale = tl.where(seen > 0.0, before + rate * (now - before), now)
    tl.store(scale_ptr, scale)
    tl.store(seen_ptr, 1.0)
    for first in range(0, M, BLOCK):
        m = first + tl.arange(0, BLOCK)
        q = tl.load(q_ptr + m, mask=m < M, other=0.0)
        tl.store(out_ptr + m, (q - shift) / (scale + floor), mask=m < M)


@torch.library.custom_op("qhyer::running_scale", mutates_args=("scale", "seen"))
def normalized(
    q: Tensor, valid: Tensor, shift: Tensor, scale: Tensor, seen: Tensor, rate: float, floor: float
) -> Tensor:
    """(q - shift) / (scale + floor), once `scale` has moved by `rate` towards the mean of |q - shift| over what is
    valid; all the way the first time, while `seen` is zero. No gradient."""
    out = q.new_empty(q.shape)
    _scale_kernel[(1,)](
        q.contiguous(), valid.contiguous(), shift, scale, seen, out, q.numel(), rate, floor,
        BLOCK=SCALE_TILE, num_warps=16,
    )  # fmt: skip
    return out


@normalized.register_fake
def _(q: Tensor, valid: Tensor, shift: Tensor, scale: Tensor, seen: Tensor, rate: float, floor: float) -> Tensor:
    return q.new_empty(q.shape)


# ------------------------------------------------------------------------------------------- the density of a flow


@triton.jit(do_not_specialize=["M"])
def _normal_kernel(  # type: ignore[no-untyped-def]
    z_ptr, log_det_ptr, out_ptr, M, constant, D: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, PAD)
    cell = (m < M)[:, None] & (j < D)[None, :]
    z = tl.load(z_ptr + m[:, None] * D + j[None, :], mask=cell, other=0.0)
    log_det = tl.load(log_det_ptr + m, mask=m < M, other=0.0)
    tl.store(out_ptr + m, -0.5 * tl.sum(z * z, 1) - constant + log_det, mask=m < M)


@triton.jit(do_not_specialize=["M"])
def _normal_backward_kernel(  # type: ignore[no-untyped-def]
    z_ptr, dout_ptr, dz_ptr, M, D: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, PAD)
    cell = (m < M)[:, None] & (j < D)[None, :]
    at = m[:, None] * D + j[None, :]
    g = tl.load(dout_ptr + m, mask=m < M, other=0.0)
    tl.store(dz_ptr + at, -g[:, None] * tl.load(z_ptr + at, mask=cell, other=0.0), mask=cell)


@torch.library.custom_op("qhyer::normal_density", mutates_args=())
def normal(z: Tensor, log_det: Tensor) -> Tensor:
    """log N(z; 0, I) + log|det|: z (..., d), log|det| (...) -> (...)."""
    out = z.new_empty(log_det.shape)
    tile = _tile(z.shape[-1])
    constant = 0.5 * z.shape[-1] * math.log(2 * math.pi)
    _normal_kernel[(triton.cdiv(log_det.numel(), tile["ROWS"]),)](
        z.contiguous(), log_det.contiguous(), out, log_det.numel(), constant, D=z.shape[-1], **tile
    )
    return out


@normal.register_fake
def _(z: Tensor, log_det: Tensor) -> Tensor:
    return z.new_empty(log_det.shape)


@torch.library.custom_op("qhyer::normal_density_backward", mutates_args=())
def normal_backward(z: Tensor, dout: Tensor) -> Tensor:
    dz = z.new_empty(z.shape)
    tile = _tile(z.shape[-1])
    _normal_backward_kernel[(triton.cdiv(dout.numel(), tile["ROWS"]),)](
        z.contiguous(), dout.contiguous(), dz, dout.numel(), D=z.shape[-1], **tile
    )
    return dz


@normal_backward.register_fake
def _(z: Tensor, dout: Tensor) -> Tensor:
    return z.new_empty(z.shape)


def _normal_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _normal_backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    dout = dout.contiguous()  # of a mean, it is one number, expanded; the flow needs it written out, too
    return normal_backward(*ctx.saved_tensors, dout), dout


normal.register_autograd(_normal_backward, setup_context=_normal_setup)
