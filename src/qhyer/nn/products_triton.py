"""A matrix product in autocast's dtype whose weight's gradient is float32 at once, and its bias's a kernel's sum.

Autocast casts a weight for every product, and backward computes its gradient in the low dtype, which loses digits that
the product had, and casts it back: a kernel more each time. Importing qhyer does not import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qhyer.nn.seam_triton import column_sum


class _Product(torch.autograd.Function):
    """x W^T + bias, W given as it is and again in x's dtype. x (M, n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, low: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, low)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return x @ low.t() if bias is None else torch.addmm(bias.to(x.dtype), x, low.t())

    @staticmethod
    @once_differentiable  # the low weight is apart from the one it is made of
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        dx = grad @ low if ctx.needs_input_grad[0] else None
        dweight = weight_gradient(grad, x).to(ctx.dtypes[0]) if ctx.needs_input_grad[1] else None
        dbias = column_sum(grad).to(ctx.dtypes[1]) if ctx.needs_input_grad[3] else None
        return dx, dweight, None, dbias


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x, float32."""
    if grad.dtype != torch.float32 and grad.is_cuda:
        return torch.mm(grad.t(), x, out_dtype=torch.float32)
    return (grad.t() @ x).float()


def product_dtype(x: Tensor) -> torch.dtype:
    """What a product of x is computed in: autocast's dtype where it is on."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def lowered(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The weights in this dtype, all cast by one kernel. No gradient passes through."""
    if all(weight.dtype == dtype for weight in weights):
        return [weight.detach() for weight in weights]
    low = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    with torch.no_grad():
        torch._foreach_copy_(low, list(weights))
    return low


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, low: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias), x (..., n). `low`: the weight in the product's dtype, where it is at hand."""
    dtype = product_dtype(x)
    flat = x.reshape(-1, x.shape[-1]).to(dtype)
    low = weight.detach().to(dtype) if low is None else low
    return _Product.apply(flat, weight, low, bias).view(*x.shape[:-1], weight.shape[0])
