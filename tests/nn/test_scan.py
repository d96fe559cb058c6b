"""The fast scan is the slow one, in value and gradient; its backward is linear in the length."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qhyer.nn.mlp import MLP
from qhyer.nn.quasimetric import IQE
from qhyer.nn.scan import kernels, selective_scan, selective_scan_ref, selective_scan_step, without_kernels
from qhyer.nn.values import Value

NAMES = ("u", "delta", "A", "B", "C", "D", "state")


def inputs(length: int, batch: int = 2, width: int = 3, size: int = 4, dtype=torch.float64, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    values = (
        draw(batch, length, width),
        0.5 * draw(batch, length, width).exp(),  # Delta > 0
        -draw(width, size).exp(),  # A < 0
        draw(batch, length, size),
        draw(batch, length, size),
        draw(width),
        draw(batch, width, size),
    )
    return tuple(v.to(dtype).requires_grad_() for v in values)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 60, 120, 257])
def test_fast_equals_reference(length, carried):
    values = inputs(length, seed=length)
    used = values if carried else values[:-1]
    g = torch.Generator().manual_seed(1)
    results = []
    for scan in (selective_scan, selective_scan_ref):
        y, last = scan(*used)
        weights = torch.randn(y.shape, generator=g.manual_seed(1), dtype=y.dtype)
        loss = (weights * y).sum() + 0.3 * last.square().sum()  # gradients through outputs and last state
        results.append((y, last, torch.autograd.grad(loss, used)))
    (y, last, grads), (y_ref, last_ref, grads_ref) = results
    torch.testing.assert_close(y, y_ref, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(last, last_ref, rtol=1e-10, atol=1e-10)
    for name, ours, reference in zip(NAMES, grads, grads_ref):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"d{name}: {m}")


@pytest.mark.parametrize("batch, width, size", [(1, 1, 1), (3, 5, 1), (1, 7, 16), (4, 2, 3)])
def test_other_widths_and_gradcheck(batch, width, size):
    values = inputs(5, batch, width, size)
    for ours, reference in zip(selective_scan(*values), selective_scan_ref(*values)):
        torch.testing.assert_close(ours, reference, rtol=1e-11, atol=1e-11)
    if batch * width * size <= 24:
        assert torch.autograd.gradcheck(selective_scan, values)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("batch, width, size", [(2, 3, 4), (1, 1, 1), (3, 5, 1), (1, 7, 16)])
@pytest.mark.parametrize("length", [1, 2, 60])
def test_without_gradients_it_is_the_same_and_changes_no_input(length, batch, width, size, carried):
    """When acting the scan takes another path: one state, changed in place, but never the caller's."""
    values = [v.detach() for v in inputs(length, batch, width, size)]
    used = values if carried else values[:-1]
    before = [v.clone() for v in used]
    with torch.no_grad():
        found, expected = selective_scan(*used), selective_scan_ref(*used)
    for ours, reference in zip(found, expected):
        torch.testing.assert_close(ours, reference, rtol=1e-11, atol=1e-11)
    assert all(torch.equal(a, b) for a, b in zip(used, before))


def test_reference_is_the_expanded_sum():
    """Eq. (12): y_t = sum_i C_t (prod_{j=i+1..t} A_bar_j) B_bar_i x_i, here plus Mamba's skip D x_t."""
    u, delta, A, B, C, D, _ = inputs(6, batch=1, width=2, size=3)
    y, _ = selective_scan_ref(u, delta, A, B, C, D)
    for t in range(6):
        total = D * u[0, t]
        for i in range(t + 1):
            decay = torch.ones(2, 3, dtype=torch.float64)
            for j in range(i + 1, t + 1):
                decay = decay * torch.exp(delta[0, j][:, None] * A)
            total = total + (C[0, t] * decay * (delta[0, i] * u[0, i])[:, None] * B[0, i]).sum(-1)
        torch.testing.assert_close(y[0, t], total)


def test_window_in_two_parts_and_step_by_step():
    u, delta, A, B, C, D, state = inputs(9)
    y, last = selective_scan(u, delta, A, B, C, D, state)
    first, middle = selective_scan(u[:, :4], delta[:, :4], A, B[:, :4], C[:, :4], D, state)
    second, end = selective_scan(u[:, 4:], delta[:, 4:], A, B[:, 4:], C[:, 4:], D, middle)
    torch.testing.assert_close(torch.cat([first, second], 1), y)
    torch.testing.assert_close(end, last)
    for t in range(9):
        y_t, state = selective_scan_step(u[:, t], delta[:, t], A, B[:, t], C[:, t], D, state)
        torch.testing.assert_close(y_t, y[:, t])
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_and_out_full_precision_inside(dtype):
    """The outputs have the inputs' type, the state is float32, and the sum is not rounded on the way."""
    u, delta, A, B, C, D, _ = (v.detach().to(dtype) for v in inputs(120))
    for scan in (selective_scan, torch.no_grad()(selective_scan), selective_scan_ref):
        y, last = scan(u, delta, A, B, C, D)
        assert y.dtype == dtype and last.dtype == torch.float32
        exact, exact_last = selective_scan_ref(*(v.double() for v in (u, delta, A, B, C, D)))
        torch.testing.assert_close(last.double(), exact_last, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(y, exact.to(dtype), rtol=0.01, atol=0.01)
    step, state = selective_scan_step(u[:, 0], delta[:, 0], A, B[:, 0], C[:, 0], D, torch.zeros(2, 3, 4))
    assert step.dtype == dtype and state.dtype == torch.float32


def test_float64_stays_float64():
    y, last = selective_scan(*inputs(3))
    assert y.dtype == last.dtype == torch.float64


class Elements(TorchDispatchMode):
    """Counts the elements that operations produce: work, without a clock."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor) and not func.is_view:
                self.total += item.numel()
        return out


def backward_work(scan, length: int) -> int:
    values = inputs(length)
    y, last = scan(*values)
    loss = y.sum() + last.sum()
    with Elements() as counted:
        loss.backward()
    return counted.total


def indexing_scan(u, delta, A, B, C, D, state):
    """The recurrence as it is often written: products batched, then indexed step by step. Quadratic backward."""
    A_bar = torch.exp(delta[..., None] * A)
    x = (delta * u)[..., None] * B[:, :, None]
    ys = []
    for t in range(u.shape[1]):
        state = A_bar[:, t] * state + x[:, t]
        ys.append((state * C[:, t, None]).sum(-1))
    return torch.stack(ys, 1) + D * u, state


def test_backward_is_linear_in_the_length():
    ratio = backward_work(selective_scan, 256) / backward_work(selective_scan, 64)
    assert 3.5 < ratio < 4.5
    assert backward_work(indexing_scan, 256) / backward_work(indexing_scan, 64) > 8  # the measure sees a square


def test_without_kernels(monkeypatch):
    """None inside, in this thread, whatever ends it; and gradients of gradients are those without any."""
    pytest.importorskip("triton")
    x = torch.zeros(2, 8, device="cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setenv("QHYER_TRITON", "1" if x.is_cuda else "interpret")
    assert kernels(x) is not None
    with without_kernels():
        with without_kernels():
            assert kernels(x) is None
        assert kernels(x) is None
        with ThreadPoolExecutor(1) as other:
            assert other.submit(kernels, x).result() is not None
    with pytest.raises(ValueError), without_kernels():
        raise ValueError
    assert kernels(x) is not None


@pytest.mark.parametrize(
    "make", [lambda: MLP(8, (16,), 4, True), lambda: Value(2, 8, (16,)), lambda: IQE(4, (16,), 16)]
)
def test_plain_networks_can_be_differentiated_twice(make, monkeypatch):
    """With kernels at hand, inside `without_kernels`: to the bit what there is without any."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    network, device = make(), "cuda" if torch.cuda.is_available() else "cpu"
    network, x = network.to(device), torch.randn(5, 8, device=device).requires_grad_()
    found = []
    for use in ("0", "1" if device == "cuda" else "interpret"):
        monkeypatch.setenv("QHYER_TRITON", use)
        with without_kernels():
            output = network(*x.split(4, dim=-1)) if isinstance(network, IQE) else network(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), list(network.parameters()), allow_unused=True))
    assert any(g is not None and g.any() for g in found[0])
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*found))
