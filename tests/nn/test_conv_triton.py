"""The convolution kernels against the formula: under Triton's interpreter without a CUDA device, compiled with one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")
kernels = pytest.importorskip("qhyer.nn.mamba_triton")
conv_silu = kernels.conv_silu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(batch: int, length: int, width: int, taps: int, lead: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, lead + length, width), (width, taps), (width,), (batch, length, width)
    x, weight, bias, dy = (torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes)
    return x.to(dtype).requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), dy.to(dtype)


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, lead: int) -> torch.Tensor:
    taps = weight.shape[1]
    padded = F.pad(x.mT, (taps - 1, 0))[..., lead:]
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(bias))).mT


def close(got: torch.Tensor, want: torch.Tensor, relative: float) -> None:
    assert got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error <= relative, f"relative error {error:.1e}"


@pytest.mark.parametrize(
    ("length", "width", "taps", "lead"),
    [
        (1, 33, 4, 0),
        (1, 40, 4, 3),
        (2, 64, 4, 0),
        (2, 33, 4, 3),
        (7, 33, 4, 0),
        (7, 40, 4, 3),
        (7, 8, 4, 1),
        (7, 8, 4, 6),
        (9, 8, 1, 0),
        (9, 8, 3, 2),
        (17, 8, 12, 0),  # more taps than steps at a time
        (9, 8, 10, 3),
        (15, 40, 4, 2),
        (33, 33, 4, 3),
        (60, 70, 4, 0),
        (120, 40, 4, 3),
    ],
)
def test_values_and_gradients(length, width, taps, lead):
    x, weight, bias, dy = make(2, length, width, taps, lead)
    got, want = conv_silu(x, weight, bias, lead), reference(x, weight, bias, lead)
    close(got, want, 1e-5)
    grads, wants = (torch.autograd.grad(y, (x, weight, bias), dy) for y in (got, want))
    for grad, want in zip(grads, wants):
        close(grad, want, 1e-5)
    if 0 < lead < taps:  # the past has a gradient of its own
        close(grads[0][:, :lead], wants[0][:, :lead], 1e-5)


def test_programs_of_several_sequences(monkeypatch):
    """The last of them not full."""
    monkeypatch.setattr(kernels, "CONV_WARPS", 4)
    x, weight, bias, dy = make(5, 19, 72, 4, 3)
    grads, wants = (torch.autograd.grad(f(x, weight, bias, 3), (x, weight, bias), dy) for f in (conv_silu, reference))
    for grad, want in zip(grads, wants):
        close(grad, want, 1e-5)


def test_views():
    """x is half of a projection, the gradient may be a part of something as well."""
    x, weight, bias, dy = make(2, 19, 24, 4, 3)
    view = torch.full((2, 25, 50), torch.nan, device=DEVICE)[:, 2:24, 3:27].copy_(x.detach()).requires_grad_()
    spread = torch.full((2, 19, 48), torch.nan, device=DEVICE)[..., 24:].copy_(dy)
    got, want = conv_silu(view, weight, bias, 3), conv_silu(x, weight, bias, 3)
    assert torch.equal(got, want)
    for a, b in zip(
        torch.autograd.grad(got, (view, weight, bias), spread), torch.autograd.grad(want, (x, weight, bias), dy)
    ):
        assert torch.equal(a, b)
    columns = x.detach().mT.contiguous().mT  # not even side by side
    assert torch.equal(conv_silu(columns, weight, bias, 3), want)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_low_precision_within_rounding(dtype, rounding):
    x, weight, bias, dy = make(2, 21, 40, 4, 3, dtype)
    exact = x.detach().float().requires_grad_()
    got, want = conv_silu(x, weight, bias, 3), reference(exact, weight, bias, 3)
    assert got.dtype == dtype
    close(got, want, rounding)
    dx, dweight, dbias = torch.autograd.grad(got, (x, weight, bias), dy)
    want_dx, want_dweight, want_dbias = torch.autograd.grad(want, (exact, weight, bias), dy.float())
    assert dx.dtype == dtype and dweight.dtype == dbias.dtype == torch.float32
    close(dx, want_dx, rounding)
    close(dweight, want_dweight, 1e-5)  # float32 inside, whatever comes in
    close(dbias, want_dbias, 1e-5)


def test_no_later_step_is_seen():
    x, weight, bias, dy = make(1, 20, 8, 4, 0)
    before = conv_silu(x, weight, bias, 0)
    changed = x.detach().clone()
    changed[:, 12:] += 1.0
    after = conv_silu(changed, weight, bias, 0)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.equal(before[:, 12], after[:, 12])
    dy[:, 12:] = 0.0
    assert torch.autograd.grad(before, x, dy)[0][:, 12:].abs().max() == 0.0


def test_in_two_parts():
    """The second half, given the last rows of the first as its past, is what it is in one piece."""
    x, weight, bias, _ = make(2, 24, 16, 4, 0)
    whole = conv_silu(x, weight, bias, 0)
    assert torch.equal(whole[:, 11:], conv_silu(x[:, 8:], weight, bias, 3))


def test_same_inputs_same_bits():
    x, weight, bias, dy = make(3, 17, 33, 4, 0)
    runs = []
    for _ in range(2):
        y = conv_silu(x, weight, bias, 0)
        runs.append((y, *torch.autograd.grad(y, (x, weight, bias), dy)))
    for a, b in zip(*runs):
        assert torch.equal(a, b)


def test_operator_contract():
    x, weight, bias, _ = make(2, 5, 8, 4, 3)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(conv_silu, (x, weight, bias, 3), test_utils=tests)
