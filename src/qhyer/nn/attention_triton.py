"""Causal attention over short sequences as two Triton kernels, straight from the packed projection and back into it.

A program has one head of one sequence. With L <= 128 its scores are one tile in registers, so there is nothing to
stream over and nothing to keep: backward loads q, k, v again and computes the probabilities (and the dropout mask, from
its seed) once more. Reading q, k, v where the projection left them, adding its bias on the way, and writing their
gradients side by side saves the passes over memory that permuting, adding and summing would take.

Tiles are L and the head's width rounded up to powers of two. Beyond the width everything is zero. Rows beyond L are
not: they hold the bias, but the causal mask hides them as keys, and as queries their gradient is zero.

The bias of the keys moves all scores of a query alike, which the softmax does not see: it is not added, and its
gradient is zero, and written as that.

Products are in the dtype of `qkv` (float32 as three products of its halves: as exact, and the tensor cores do it) with
float32 sums, the softmax is float32. The bias gradient is written as one partial sum per sequence and added by torch in
a fixed order: no atomics, so that the same inputs give the same bits.

Importing qhyer does not import this.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qhyer.nn.rows_triton import dropping, kept
from qhyer.nn.total_triton import total
from qhyer.streams import Put, at_once

MAX_LENGTH = 128
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(ptr, bias_ptr, t, d, L, row, WIDTH: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = (t < L)[:, None] & (d < WIDTH)[None, :]
    x = tl.load(ptr + t[:, None] * row + d[None, :], mask=inside, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + bias[None, :]).to(x.dtype)
    return x


@triton.jit
def _weights(q, k, t, scale, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the softmax weighs by, up to a factor of each row, and the inverse of its sum, which that is."""
    s = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    s = tl.where(t[:, None] >= tl.arange(0, P)[None, :], s, -float("inf"))
    # The difference first: multiplied first, one product is rounded and the other, fused, is not, which for scores of
    # 1e9 leaves a greatest weight of infinity.
    p = tl.exp2((s - tl.max(s, 1)[:, None]) * (scale * LOG2E))
    return p, 1.0 / tl.sum(p, 1)


@triton.jit(do_not_specialize=["threshold"], do_not_specialize_on_alignment=["seed_ptr"])
def _attention_forward_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, bias_ptr, seed_ptr, o_ptr, L, H, scale, threshold, kept_scale, qkv_batch, qkv_row,
    WIDTH: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(0), tl.program_id(1)
    t = tl.arange(0, P)
    d = tl.arange(0, D)
    qkv_ptr += b.to(tl.int64) * qkv_batch + h * WIDTH
    bias_ptr += h * WIDTH
    third = H * WIDTH
    q = _load(qkv_ptr, bias_ptr, t, d, L, qkv_row, WIDTH, BIAS)
    k = _load(qkv_ptr + third, bias_ptr, t, d, L, qkv_row, WIDTH, False)
    v = _load(qkv_ptr + 2 * third, bias_ptr + 2 * third, t, d, L, qkv_row, WIDTH, BIAS)
    p, factor = _weights(q, k, t, scale, P)
    if DROP:
        p = tl.where(kept(tl.load(seed_ptr), (b * H + h) * P + t, threshold, P, P), p, 0.0)
        factor *= kept_scale
    o = tl.dot(p.to(v.dtype), v, input_precision="tf32x3") * factor[:, None]
    inside = (t < L)[:, None] & (d < WIDTH)[None, :]
    tl.store(o_ptr + b.to(tl.int64) * L * third + h * WIDTH + t[:, None] * third + d[None, :], o, mask=inside)


@triton.jit(do_not_specialize=["threshold"], do_not_specialize_on_alignment=["seed_ptr"])
def _attention_backward_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, bias_ptr, seed_ptr, do_ptr, dqkv_ptr, dbias_ptr,  # dbias (B, 3 H WIDTH): partial sums
    L, H, scale, threshold, kept_scale, qkv_batch, qkv_row, do_batch, do_row, dqkv_batch, dqkv_row,
    WIDTH: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(0), tl.program_id(1)
    t = tl.arange(0, P)
    d = tl.arange(0, D)
    third = H * WIDTH
    known = d < WIDTH
    inside = (t < L)[:, None] & known[None, :]
    qkv_ptr += b.to(tl.int64) * qkv_batch + h * WIDTH
    do_ptr += b.to(tl.int64) * do_batch + h * WIDTH
    bias_ptr += h * WIDTH
    dbias_ptr += b.to(tl.int64) * 3 * third + h * WIDTH
    at = dqkv_ptr + b.to(tl.int64) * dqkv_batch + h * WIDTH + t[:, None] * dqkv_row + d[None, :]
    q = _load(qkv_ptr, bias_ptr, t, d, L, qkv_row, WIDTH, BIAS)
    k = _load(qkv_ptr + third, bias_ptr, t, d, L, qkv_row, WIDTH, False)
    do = _load(do_ptr, bias_ptr, t, d, L, do_row, WIDTH, False).to(q.dtype)
    p, factor = _weights(q, k, t, scale, P)
    if DROP:  # p: as scaled where it is kept
        stays = kept(tl.load(seed_ptr), (b * H + h) * P + t, threshold, P, P)
        p *= (factor * kept_scale)[:, None]
        dv = tl.dot(tl.trans(tl.where(stays, p, 0.0).to(q.dtype)), do, input_precision="tf32x3")
    else:
        p *= factor[:, None]
        dv = tl.dot(tl.trans(p.to(q.dtype)), do, input_precision="tf32x3")
    v = _load(qkv_ptr + 2 * third, bias_ptr + 2 * third, t, d, L, qkv_row, WIDTH, BIAS)
    tl.store(at + 2 * third, dv, mask=inside)
    if BIAS:
        tl.store(dbias_ptr + 2 * third + d, tl.sum(dv, 0), mask=known)
    dp = tl.dot(do, tl.trans(v), input_precision="tf32x3")
    if DROP:
        dp = tl.where(stays, dp, 0.0)
        ds = (p * (dp - (tl.sum(p * dp, 1) / kept_scale)[:, None]) * scale).to(q.dtype)
    else:
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q.dtype)
    dq = tl.dot(ds, k, input_precision="tf32x3")
    tl.store(at, dq, mask=inside)
    if BIAS:
        tl.store(dbias_ptr + d, tl.sum(dq, 0), mask=known)
        tl.store(dbias_ptr + third + d, tl.zeros([D], tl.float32), mask=known)
    dk = tl.dot(tl.trans(ds), q, input_precision="tf32x3")
    tl.store(at + third, dk, mask=inside)


def _launch(length: int, width: int) -> dict[str, Any]:
    P, D = max(16, triton.next_power_of_2(length)), max(16, triton.next_power_of_2(width))
    return dict(WIDTH=width, P=P, D=D, num_warps=8 if max(P, D) > 64 else 4)


def shared_bytes(length: int, width: int, dtype: torch.dtype) -> int:
    """Shared memory that backward asks for at most. As compiled for Hopper, where it asks for more than elsewhere."""
    tile = _launch(length, width)
    P, D, size = tile["P"], tile["D"], dtype.itemsize
    return 2 * P * (P + D) * size + (0 if size == 4 else 3 * P * D)


@torch.compiler.assume_constant_result  # torch's compiler cannot follow the question
def shared_memory(device: torch.device) -> int:
    """What a program on this GPU may have of it; Hopper's where there is no GPU."""
    return _found(device)


@functools.cache
def _found(device: torch.device) -> int:
    if device.type != "cuda":
        return 227 * 1024
    index = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


def _packed(x: Tensor) -> Tensor:
    """Batch and rows may lie anywhere, a row's numbers side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(qkv: Tensor, bias: Tensor | None, heads: int, drop: float, seed: Tensor | None) -> Tensor:
    """`short_attention` without autograd."""
    batch, length, packed = qkv.shape
    assert length <= MAX_LENGTH, f"{length} steps are too many for one tile of scores: at most {MAX_LENGTH}"
    assert drop == 0.0 or seed is not None, "dropout needs a seed"
    qkv, width = _packed(qkv), packed // (3 * heads)
    o = torch.empty(batch, length, heads * width, device=qkv.device, dtype=qkv.dtype)
    launch = _launch(length, width)
    if launch["num_warps"] == 4 and qkv.element_size() == 2:
        launch["maxnreg"] = 80  # six programs on a multiprocessor
    _attention_forward_kernel[(heads, batch)](
        qkv, qkv if bias is None else bias, qkv if seed is None else seed, o, length, heads, 1.0 / math.sqrt(width),
        *dropping(drop), *qkv.stride()[:2], BIAS=bias is not None, DROP=drop > 0.0, **launch,
    )  # fmt: skip
    return o


def backward(
    qkv: Tensor, bias: Tensor | None, heads: int, drop: float, seed: Tensor | None, do: Tensor, dqkv: Tensor,
    put: Put = at_once,
) -> Tensor:  # fmt: skip
    """Writes dqkv, whose batch and rows may lie anywhere -> dbias in float32 (empty without a bias)."""
    batch, length, packed = qkv.shape
    qkv, do, width = _packed(qkv), _packed(do), packed // (3 * heads)
    dbias = torch.empty(batch, 0 if bias is None else packed, device=qkv.device, dtype=torch.float32)
    launch = _launch(length, width)
    if launch["num_warps"] == 4 and qkv.element_size() == 2:
        launch["maxnreg"] = 128  # instead of 160: four programs on a multiprocessor, not three
    _attention_backward_kernel[(heads, batch)](
        qkv, qkv if bias is None else bias, qkv if seed is None else seed, do, dqkv, dbias, length, heads,
        1.0 / math.sqrt(width), *dropping(drop), *qkv.stride()[:2], *do.stride()[:2], *dqkv.stride()[:2],
        BIAS=bias is not None, DROP=drop > 0.0, **launch,
    )  # fmt: skip
    return put(lambda: total(dbias), [dbias], qkv if bias is None else bias)


@torch.library.custom_op("qhyer::short_attention", mutates_args=())
def short_attention(qkv: Tensor, bias: Tensor | None, heads: int, drop: float, seed: Tensor | None) -> Tensor:
    """Causal attention. qkv (B, L, 3 d), as `view(B, L, 3, heads, d / heads)`, L <= 128; bias (3 d,), added to it
    -> (B, L, d) in qkv's dtype.

    Probabilities are dropped with probability `drop`, by `seed` (one int64, on the device: a captured graph reads what
    is there when it is replayed); at 0.0 it is not needed.
    """
    return forward(qkv, bias, heads, drop, seed)


@short_attention.register_fake
def _(qkv: Tensor, bias: Tensor | None, heads: int, drop: float, seed: Tensor | None) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3)


@torch.library.custom_op("qhyer::short_attention_backward", mutates_args=())
def short_attention_backward(
    qkv: Tensor, bias: Tensor | None, heads: int, drop: float, seed: Tensor | None, do: Tensor
) -> tuple[Tensor, Tensor]:
    """-> dqkv and, in float32, dbias (empty without a bias)."""
    dqkv = torch.empty(qkv.shape, device=qkv.device, dtype=qkv.dtype)
    return dqkv, backward(qkv, bias, heads, drop, seed, do, dqkv)


@short_attention_backward.register_fake
def _(
    qkv: Tensor, bias: Tensor | None, heads: int, drop: float, seed: Tensor | None, do: Tensor
) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), qkv.new_empty(0 if bias is None else qkv.shape[2], dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, bias, ctx.heads, ctx.drop, seed = inputs
    ctx.save_for_backward(qkv, bias, seed)


def _backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
    qkv, bias, seed = ctx.saved_tensors
    dqkv, dbias = short_attention_backward(qkv, bias, ctx.heads, ctx.drop, seed, do)
    return dqkv, None if bias is None else dbias.to(bias.dtype), None, None, None


short_attention.register_autograd(_backward, setup_context=_setup)
