"""Mamba-2's kernels against the scan of `mamba2.py` and autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from qhyer.nn import mamba2_triton
from qhyer.nn.mamba2 import Mamba2, head_scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("QHYER_TRITON", "interpret")


def plain(u, dt, bias, A_log, D, z, size):
    x, B, C = u.float().split([z.shape[2], size, size], dim=-1)
    x = x.unflatten(-1, (len(D), -1))
    y, _ = head_scan(x, F.softplus(dt.float() + bias), -torch.exp(A_log), B, C, D)
    return y.flatten(2) * F.silu(z.float())


def example(length, heads, width, size, dtype=torch.float32, batch=2):
    """Columns of one matrix, as a block has them, and parameters."""
    torch.manual_seed(length + width)
    inner = heads * width
    rows = torch.randn(batch, length, 2 * inner + 2 * size + heads + 3, device=DEVICE).to(dtype)
    u, z, dt, _ = rows.split([inner + 2 * size, inner, heads, 3], dim=-1)
    u = (0.5 * u).contiguous()
    bias, D = torch.randn(heads, device=DEVICE), torch.randn(heads, device=DEVICE)
    return [u, dt, bias, torch.rand(heads, device=DEVICE), D, z]


@pytest.mark.parametrize(
    ("length", "heads", "width", "size"),
    [(1, 1, 16, 16), (2, 2, 8, 4), (7, 3, 16, 5), (60, 1, 64, 16), (61, 2, 32, 20), (120, 1, 16, 16)],
)
def test_values_and_gradients(length, heads, width, size):
    values = example(length, heads, width, size)
    u, dt, bias, A_log, D, z = values
    A = -torch.exp(A_log)
    y = mamba2_triton.forward(u, dt, bias, A, D, z)
    wanted = [value.detach().clone().requires_grad_() for value in values]
    expected = plain(*wanted, size)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(y)
    expected.backward(dy)
    into = torch.full((*z.shape[:2], z.shape[2] + heads + 1), torch.nan, device=DEVICE)  # of a wider matrix
    dz, ddt = into[..., : z.shape[2]], into[..., z.shape[2] : -1]
    du, sums = mamba2_triton.backward(u, dt, bias, A, D, z, dy, dz, ddt)
    found = [du, ddt, sums[0], sums[1], sums[2], dz]
    # Those of bias and A_log are sums over steps that nearly cancel, of numbers like those of dt.
    least = dict.fromkeys(("bias", "A_log"), 3.0 * float(wanted[1].grad.norm()))
    for name, a, b in zip(("u", "dt", "bias", "A_log", "D", "z"), found, wanted, strict=True):
        assert (a - b.grad).norm() <= 1e-4 * b.grad.norm().clamp_min(least.get(name, 1e-2)), name
    assert into[..., -1].isnan().all()  # nothing else was written


def test_large_steps_stay_finite():
    """A state of which nothing is left: decays of exp(-1e4)."""
    u, dt, bias, A_log, D, z = example(7, 2, 16, 5)
    A = -torch.exp(A_log + 5)
    dt = 50 * dt.abs()
    y = mamba2_triton.forward(u, dt, bias, A, D, z)
    torch.testing.assert_close(y, plain(u, dt, bias, A_log + 5, D, z, 5), rtol=1e-3, atol=1e-3)
    dz, ddt = torch.empty_like(z), torch.empty_like(dt)
    du, sums = mamba2_triton.backward(u, dt, bias, A, D, z, torch.ones_like(y), dz, ddt)
    assert all(found.isfinite().all() for found in (du, sums, dz, ddt))


def test_half_precision_is_close():
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16
    u, dt, bias, A_log, D, z = example(20, 2, 16, 8, dtype)
    y = mamba2_triton.forward(u, dt, bias, -torch.exp(A_log), D, z)
    expected = plain(u, dt, bias, A_log, D, z, 8)
    assert y.dtype == dtype and (y.float() - expected).norm() <= 0.01 * expected.norm()


def test_the_same_inputs_give_the_same_bits():
    u, dt, bias, A_log, D, z = example(7, 3, 16, 5)
    found = []
    for _ in range(2):
        dz, ddt = torch.empty_like(z), torch.empty_like(dt)
        out = mamba2_triton.backward(u, dt, bias, -torch.exp(A_log), D, z, torch.ones_like(z), dz, ddt)
        found.append([*out, dz, ddt])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_what_fits():
    mamba, hopper = Mamba2(256), 227 * 1024
    assert mamba2_triton.fits(mamba, 120, torch.bfloat16, hopper)
    assert mamba2_triton.fits(mamba, 60, torch.float32, hopper)
    assert not mamba2_triton.fits(mamba, 129, torch.bfloat16, hopper)
    assert not mamba2_triton.fits(mamba, 60, torch.bfloat16, 1024)
    assert not mamba2_triton.fits(Mamba2(256, state_size=256), 60, torch.bfloat16, hopper)
