"""A product with gradients of its own is F.linear; without a GPU, its bias's sum in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from qhyer.nn.products_triton import lowered, product

device = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(*leading: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = dict(x=(*leading, 7), weight=(20, 7), bias=(20,))
    return {n: torch.randn(shape, generator=generator).to(device).requires_grad_() for n, shape in shapes.items()}


def gradients(y: Tensor, by: dict[str, Tensor]) -> dict[str, Tensor]:
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
    return dict(zip(by, torch.autograd.grad((direction * y).sum(), list(by.values()))))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("leading", [(1,), (33,), (3, 5)])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_it_is_f_linear(leading, with_bias, dtype):
    by = inputs(*leading)
    if not with_bias:
        del by["bias"]
    tolerance = {None: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    with torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False):
        ours, theirs = product(**by), F.linear(by["x"], by["weight"], by.get("bias"))
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    expected = gradients(theirs, by)
    for name, gradient in gradients(ours, by).items():
        assert gradient.dtype == torch.float32
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient / scale, expected[name] / scale, rtol=tolerance, atol=tolerance)


def test_gradients_only_where_they_are_needed():
    by = inputs(3)
    expected = gradients(product(**by), by)
    for name in by:
        one = {n: t if n == name else t.detach() for n, t in by.items()}
        assert torch.equal(gradients(product(**one), {name: one[name]})[name], expected[name])
    with torch.no_grad():
        assert not product(**by).requires_grad


def test_weights_are_cast_all_at_once():
    by = inputs(3)
    weights = [by["weight"], by["bias"]]
    for low, weight in zip(lowered(weights, torch.bfloat16), weights):
        assert not low.requires_grad and torch.equal(low, weight.bfloat16())
    same = lowered(weights, torch.float32)
    assert all(low.data_ptr() == weight.data_ptr() and not low.requires_grad for low, weight in zip(same, weights))
    with torch.autocast(device, torch.bfloat16):
        given = product(**by, low=lowered(weights, torch.bfloat16)[0])
        assert torch.equal(given, product(**by))
