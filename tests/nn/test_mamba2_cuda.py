"""Mamba-2's scan by hand is that of `mamba2.py`, in value and gradient; and Triton's kernels serve where it cannot."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from nn.test_mamba2_triton import DEVICE, plain
from nn.test_mamba_cuda import launches

from qhyer.nn import mamba2_cuda, mamba2_triton

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
on_gpu = lambda test: gpu[0](gpu[1](test))
NAMES = ("u", "dt", "bias", "A_log", "D", "z")
LENGTHS = [(1, 1), (2, 2), (16, 1), (17, 3), (59, 2), (64, 1), (89, 1), (128, 2)]


def example(length, heads, batch=2, dtype=torch.bfloat16, lead=8, width=64, size=16):
    """z and dt as columns of one matrix, as a block has them, after so many others."""
    torch.manual_seed(length + heads)
    inner = heads * width
    rows = torch.randn(batch, length, lead + inner + heads + (-heads - lead) % 8, device=DEVICE).to(dtype)
    u = (0.5 * torch.randn(batch, length, inner + 2 * size, device=DEVICE)).to(dtype)
    bias, D = torch.randn(heads, device=DEVICE), torch.randn(heads, device=DEVICE)
    z, dt = rows[..., lead : lead + inner], rows[..., lead + inner : lead + inner + heads]
    return [u, dt, bias, torch.rand(heads, device=DEVICE), D, z]


def both(values):
    """y, and the gradients of a weighted sum of it, in the order of NAMES; what lies beside them is not a number."""
    u, dt, bias, A_log, D, z = values
    A, inner, heads = -torch.exp(A_log), z.shape[2], len(D)
    y = mamba2_triton.forward(u, dt, bias, A, D, z)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    into = torch.full((*y.shape[:2], inner + heads + 8 - heads % 8), torch.nan, dtype=u.dtype, device=DEVICE)
    dz, ddt = into[..., :inner], into[..., inner : inner + heads]
    du, sums = mamba2_triton.backward(u, dt, bias, A, D, z, weights, dz, ddt)
    assert into[..., inner + heads :].isnan().all()  # nothing else was written
    return y, [du, ddt, *sums, dz]


def reference(values):
    wanted = [value.detach().clone().float().requires_grad_() for value in values]
    y = plain(*wanted, (values[0].shape[2] - values[5].shape[2]) // 2)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(values[5]).float())
    return y.detach(), [value.grad for value in wanted]


def assert_close(values):
    (y, grads), (truth, truths) = both(values), reference(values)
    # Those of bias and A_log are sums over steps that nearly cancel, of numbers like those of dt.
    least = dict.fromkeys(("bias", "A_log"), float(truths[1].norm()))
    error = lambda a, b, name="": float((a.float() - b).norm() / b.norm().clamp_min(least.get(name, 1e-2)))
    assert error(y, truth) < 4e-3
    found = {name: error(a, b, name) for name, a, b in zip(NAMES, grads, truths, strict=True)}
    assert {name: value for name, value in found.items() if value > 8e-3} == {}


@pytest.fixture
def counted(monkeypatch):
    return launches(monkeypatch, mamba2_cuda)


@on_gpu
@pytest.mark.parametrize("length, heads", [*LENGTHS, (60, 8)])
def test_it_is_the_reference(length, heads, counted):
    assert_close(example(length, heads, batch=5))
    assert counted == ["forward", "backward"]


@on_gpu
def test_the_same_inputs_give_the_same_bits():
    values = example(59, 8, batch=64)
    (y, grads), (again, others) = both(values), both(values)
    assert torch.equal(y, again) and all(torch.equal(a, b) for a, b in zip(grads, others))


@on_gpu
def test_large_steps_stay_finite():
    u, dt, bias, A_log, D, z = example(20, 2)
    y, grads = both([u, 50 * dt, bias, A_log + 5, D, z])
    assert y.isfinite().all() and all(grad.isfinite().all() for grad in grads)


@on_gpu
def test_triton_s_kernels_agree(counted, monkeypatch):
    values = example(59, 4)
    y, grads = both(values)
    monkeypatch.setenv("QHYER_SCAN", "triton")
    other, others = both(values)
    assert counted == ["forward", "backward"]
    close = lambda a, b: (a.float() - b.float()).norm() <= 0.03 * b.float().norm()
    assert close(y, other) and all(close(*each) for each in zip(grads, others, strict=True))


@on_gpu
@pytest.mark.parametrize("change", [dict(dtype=torch.float16), dict(width=32), dict(size=8), dict(lead=4)], ids=str)
def test_elsewhere_tritons_kernels_serve(change, counted):
    both(example(7, 2, **change))
    assert counted == []


def given(u, dt, bias, A_log, D, z):
    return (dt,), (bias, -torch.exp(A_log), D), (u, z)


def test_a_cpu_is_not_asked():
    assert not mamba2_cuda.suits(*given(*(value.cpu() for value in example(7, 2))))


@pytest.mark.parametrize(
    "change, fit",
    [
        ({}, True), (dict(lead=4), False), (dict(width=32), False), (dict(size=8), False),
        (dict(dtype=torch.float32), False), (dict(length=129), False), (dict(batch=0), False),
    ],
    ids=str,
)  # fmt: skip
def test_what_fits(change, fit):
    assert mamba2_cuda.fits(*given(*example(**{"length": 7, "heads": 2} | change))) == fit


def test_what_is_read_number_by_number_fits_as_it_lies():
    (dt,), vectors, rows = given(*example(7, 2))
    spread = torch.zeros(2, 7, 4, dtype=dt.dtype, device=DEVICE)[..., ::2]
    assert not mamba2_cuda.fits((spread,), vectors, rows) and not mamba2_cuda.fits((dt, dt.float()), vectors, rows)
    for i in range(3):
        for other in (vectors[i].bfloat16(), torch.zeros(4, device=DEVICE)[::2]):
            assert not mamba2_cuda.fits((dt,), (*vectors[:i], other, *vectors[i + 1 :]), rows)
    assert mamba2_cuda.fits((dt[..., :1],), tuple(v[:1] for v in vectors), (rows[0][..., 64:], rows[1][..., 64:]))
    many = torch.zeros(1, 7, 2, dtype=dt.dtype, device=DEVICE).expand(70_000, 7, 2)
    wide = [torch.zeros(1, 7, tensor.shape[2], dtype=dt.dtype, device=DEVICE).expand(70_000, 7, -1) for tensor in rows]
    assert not mamba2_cuda.fits((many,), vectors, tuple(wide))
