"""The scan's kernels are the reference, in value and gradient, and never need the states in between."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from qhyer.nn import mamba_triton, scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "dt", "bias", "A", "BC", "D", "z", "state")


def inputs(length: int, width: int, size: int, fused: bool, carried: bool, dtype=torch.float32, batch: int = 2):
    """Views as the model has them: B and C are columns of a projection, x and z halves of another."""
    g = torch.Generator().manual_seed(length + width)

    def draw(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE)

    values = {
        "x": draw(batch, length, width).to(dtype),
        "dt": (draw(batch, length, width) if fused else 0.5 * draw(batch, length, width).exp()).to(dtype),
        "bias": draw(width) if fused else None,
        "A": -draw(width, size).exp(),
        "BC": draw(batch, length, 2 * size + 3).to(dtype),
        "D": draw(width),
        "z": draw(batch, length, width).to(dtype) if fused else None,
        "state": draw(batch, width, size) if carried else None,
    }
    return {name: value if value is None else value.requires_grad_() for name, value in values.items()}


def reference(x, dt, bias, A, B, C, D, z, state):
    """In float64: softplus, the loop, the skip, the gate."""
    x, dt, A, B, C, D = (v.double() for v in (x, dt, A, B, C, D))
    delta = dt if bias is None else F.softplus(dt + bias.double())
    y, last = scan.selective_scan_ref(x, delta, A, B, C, D, None if state is None else state.double())
    return (y if z is None else y * F.silu(z.double())), last


def outcome(function, values):
    B, C = values["BC"][..., 3:].chunk(2, dim=-1)
    y, last = function(*(values[n] for n in NAMES[:4]), B, C, *(values[n] for n in NAMES[5:]))
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(v.shape, generator=g).to(DEVICE) for v in (y, last)]
    loss = (weights[0] * y.float()).sum() + (weights[1] * last.float()).sum()
    wanted = {name: value for name, value in values.items() if value is not None}
    return y, last, dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()))))


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative; absolute where the truth is nought (A has no gradient after one step from nought)."""
    return float(
        (ours.detach().double() - truth.detach().double()).norm() / truth.detach().double().norm().clamp(min=0.1)
    )


@pytest.mark.parametrize("fused, carried", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("length, width, size", [(1, 5, 3), (2, 64, 16), (7, 70, 16)])
def test_scan_is_the_reference(length, width, size, fused, carried):
    compare(length, width, size, fused, carried)


@pytest.mark.parametrize("length", [60, 120, 257])
def test_long_sequences(length):
    """Of one sequence: several are programs of their own, whatever their length."""
    compare(length, 3, 4, fused=length != 120, carried=length != 60, batch=1)


def compare(length, width, size, fused, carried, batch=2):
    values = inputs(length, width, size, fused, carried, batch=batch)
    y, last, grads = outcome(mamba_triton.gated_scan, values)
    y_ref, last_ref, grads_ref = outcome(reference, values)
    assert error(y, y_ref) < 1e-5 and error(last, last_ref) < 1e-5
    for name, grad in grads.items():
        assert error(grad, grads_ref[name]) < 1e-4, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_at_the_ends_only(dtype):
    values = inputs(33, 40, 16, True, True, dtype)
    y, last, grads = outcome(mamba_triton.gated_scan, values)
    y_ref, last_ref, grads_ref = outcome(reference, values)
    rounding = torch.finfo(dtype).eps
    assert y.dtype == dtype and last.dtype == torch.float32
    assert error(y, y_ref) < rounding and error(last, last_ref) < 1e-5
    for name, grad in grads.items():
        assert grad.dtype == values[name].dtype
        assert error(grad, grads_ref[name]) < 2 * rounding, name


def test_strong_decays_lose_no_gradient():
    """The backward takes a small number as a difference of sums; with decays of e^-30 a step it is still right."""
    values = inputs(30, 8, 16, False, False)
    with torch.no_grad():
        values["dt"].mul_(3.0)
        values["A"].mul_(10.0)
    _, _, grads = outcome(mamba_triton.gated_scan, values)
    _, _, truth = outcome(reference, values)
    for name, grad in grads.items():
        assert error(grad, truth[name]) < 1e-3, name


def test_two_pieces_are_the_whole():
    values = inputs(20, 6, 4, False, False)
    B, C = values["BC"][..., 3:].chunk(2, dim=-1)
    x, dt, A, D = (values[n].detach() for n in ("x", "dt", "A", "D"))
    whole, last = mamba_triton.gated_scan(x, dt, None, A, B, C, D, None, None)
    first, middle = mamba_triton.gated_scan(x[:, :9], dt[:, :9], None, A, B[:, :9], C[:, :9], D, None, None)
    second, end = mamba_triton.gated_scan(x[:, 9:], dt[:, 9:], None, A, B[:, 9:], C[:, 9:], D, None, middle)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end, last)


def test_the_same_inputs_give_the_same_bits():
    values = inputs(9, 70, 16, True, True)
    _, _, one = outcome(mamba_triton.gated_scan, values)
    _, _, two = outcome(mamba_triton.gated_scan, values)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_plain_scan_uses_the_kernels_where_they_run(monkeypatch):
    values = inputs(7, 6, 4, False, True)
    B, C = values["BC"][..., 3:].chunk(2, dim=-1)
    arguments = [values[n] for n in ("x", "dt", "A")] + [B, C, values["D"], values["state"]]
    monkeypatch.setenv("QHYER_TRITON", "0")
    assert scan.kernels(values["x"]) is None
    plain = scan.selective_scan(*arguments)
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    assert scan.kernels(values["x"]) is mamba_triton
    assert scan.kernels(values["x"].double()) is None  # float64 stays with the plain code
    for ours, theirs in zip(scan.selective_scan(*arguments), plain):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_kernels_that_cannot_run_are_done_without_and_said(monkeypatch, caplog):
    """No C compiler, an old GPU: found when the first is launched."""

    def broken(x):
        raise RuntimeError("Failed to find C compiler.\nSecond line")

    monkeypatch.setenv("QHYER_TRITON", "interpret")
    monkeypatch.setattr(mamba_triton, "total", broken)
    scan._load_kernels.cache_clear()
    try:
        assert scan.kernels(torch.ones(1, device=DEVICE)) is None
        assert scan.kernels(torch.ones(1, device=DEVICE)) is None
    finally:
        scan._load_kernels.cache_clear()
    (record,) = caplog.records  # once
    assert record.getMessage().endswith("plain PyTorch in their place: RuntimeError: Failed to find C compiler.")
