"""The middle of an MLP as two kernels against the products and GELU apart; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from qhyer.nn import gelu_products_triton as products
from qhyer.nn import hybrid_triton
from qhyer.nn.gelu_products_triton import Tile, down_gelu_backward, up_gelu
from qhyer.nn.seam_triton import bias_gelu, bias_gelu_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16
SIZES = [(1, 16, 16), (7, 24, 96), (33, 32, 128), (130, 40, 150), (32, 64, 64)]  # rows, d, F
TILES = {
    "one piece": Tile(32, 64, 16, 1, 1, 0, 4, 2),
    "pieces": Tile(32, 64, 16, 1, 4, 0, 4, 2),
    "pieces ahead": Tile(16, 64, 16, 1, 2, 1, 4, 2),
    "all ahead": Tile(16, 64, 16, 1, 4, 4, 4, 2),
    "strips": Tile(16, 32, 16, 2, 2, 0, 4, 2),
    "all of d at once": Tile(16, 32, 64, 4, 1, 0, 4, 2),
}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1.0))


def rounding(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]


def mostly_equal(ours: Tensor, theirs: Tensor) -> bool:
    """The same bits, but for few that came out on the other side of a rounding."""
    return close(ours, theirs, rounding(ours.dtype)) and bool((ours != theirs).double().mean() < 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("rows, width, wide", SIZES)
def test_up_is_the_product_and_its_gelu(rows, width, wide, dtype):
    torch.manual_seed(rows)
    h, weight, bias = draw(rows, width, dtype=dtype), draw(wide, width, dtype=dtype), draw(wide)
    u, y = up_gelu(h, weight, bias)
    assert close(u, (h.double() @ weight.double().t()).to(dtype), rounding(dtype))
    assert close(y, F.gelu(u.double() + bias.double()).to(dtype), rounding(dtype))  # of u as it was written


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("rows, width, wide", SIZES)
def test_down_is_the_gradient_of_gelu(rows, width, wide, dtype):
    torch.manual_seed(rows)
    grad, weight = draw(rows, width, dtype=dtype), draw(width, wide, dtype=dtype)
    u, bias = draw(rows, wide, dtype=dtype), draw(wide)
    du, dbias, y = down_gelu_backward(grad, weight, u, bias)
    v = (u.double() + bias.double()).requires_grad_()
    expected = torch.autograd.grad(F.gelu(v), v, (grad.double() @ weight.double()).to(dtype).double())[0]
    assert close(du, expected.to(dtype), 2 * rounding(dtype))
    assert close(dbias, expected.sum(0).float(), 2 * rounding(dtype))
    assert close(y, F.gelu(v.detach()).to(dtype), rounding(dtype))


@pytest.mark.parametrize("rows, width, wide", SIZES)
def test_they_round_where_the_kernels_apart_do(rows, width, wide):
    torch.manual_seed(rows)
    h, weight, bias = draw(rows, width, dtype=HALF), draw(wide, width, dtype=HALF), draw(wide)
    u, y = up_gelu(h, weight, bias)
    assert mostly_equal(y, bias_gelu(u, bias))
    du, dbias, again = down_gelu_backward(h, weight.t(), u, bias)
    assert mostly_equal(again, y)
    apart, dbias_apart, _ = bias_gelu_backward(u, bias, (h.float() @ weight.t().float()).to(HALF), False)
    assert mostly_equal(du, apart) and close(dbias, dbias_apart, rounding(HALF))


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("rows, width, wide", [(33, 32, 128), (7, 24, 96)])
def test_a_tile_changes_nothing(rows, width, wide, tile):
    h, weight, bias = draw(rows, width), draw(wide, width), draw(wide)
    u, y = products.forward(h, weight, bias, tile)
    assert close(u, h @ weight.t(), 1e-5) and close(y, bias_gelu(u, bias), 1e-6)
    down = draw(width, wide)
    for got, want in zip(products.backward(h, down, u, bias, tile), bias_gelu_backward(u, bias, h @ down, True)):
        assert close(got, want, 1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_the_middle_is_an_mlp(fused, monkeypatch):
    monkeypatch.setattr(hybrid_triton, "suits", lambda *_: fused)
    h, up, bias, down = (
        x.requires_grad_() for x in (draw(21, 24), draw(96, 24) / 24**0.5, draw(96), draw(24, 96) / 96**0.5)
    )
    ours = hybrid_triton._Middle.apply(h, up, bias, down, up.detach(), down.detach())
    theirs = F.gelu(h @ up.t() + bias) @ down.t()
    assert close(ours, theirs, 1e-5)
    direction = draw(21, 24)
    inputs = [h, up, bias, down]
    for a, b in zip(torch.autograd.grad(ours, inputs, direction), torch.autograd.grad(theirs, inputs, direction)):
        assert close(a, b, 1e-5)


def test_suits():
    def of(dim: int, dtype: torch.dtype) -> bool:
        return products.suits(torch.empty(1, dim, dtype=dtype), torch.empty(4 * dim, dim, dtype=dtype))

    assert of(256, torch.bfloat16) and of(24, torch.float16)
    assert not of(256, torch.float32)  # cuBLAS reads what torch was told of TF32
    assert not of(1024, torch.bfloat16) and not of(30, torch.bfloat16)


def test_same_inputs_same_bits():
    h, weight, bias = draw(70, 32), draw(128, 32), draw(128)

    def run() -> list[Tensor]:
        u, y = up_gelu(h, weight, bias)
        return [u, y, *down_gelu_backward(h, weight.t(), u, bias)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run()))


def test_operators_are_well_formed():
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(up_gelu, (draw(7, 24), draw(96, 24), draw(96)), test_utils=checks)
    values = draw(7, 24), draw(24, 96), draw(7, 96), draw(96)
    torch.library.opcheck(down_gelu_backward, values, test_utils=checks)
