"""The kernels of the union's length against plain torch; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qhyer.nn import quasimetric_triton
from qhyer.nn.quasimetric import IQE, union_length

device = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "1" if device == "cuda" else "interpret"


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (700, 8), (5, 7, 3), (2, 16)])
@pytest.mark.parametrize("ties", [False, True])
def test_values_and_gradients(shape, ties, monkeypatch):
    """Ties (numbers of a coarse grid) decide which of two intervals has a common end; the kernel decides alike."""
    generator = torch.Generator().manual_seed(len(shape))
    x, y = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    if ties:
        x, y = (x * 2).round(), (y * 2).round()
    weights = torch.randn(shape[:-1], generator=generator).to(device)
    results = {}
    for use in ("0", KERNELS):
        monkeypatch.setenv("QHYER_TRITON", use)
        ends = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        length = union_length(*ends)
        results[use] = (length, *torch.autograd.grad((weights * length).sum(), ends))
    assert torch.allclose(results[KERNELS][0], results["0"][0], atol=1e-5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[KERNELS][1:], results["0"][1:]))


def test_what_is_not_a_number_shows(monkeypatch):
    monkeypatch.setenv("QHYER_TRITON", KERNELS)
    x, y = torch.zeros(3, 8, device=device), torch.ones(3, 8, device=device)
    x[0, 3], y[2, 7] = torch.nan, torch.nan
    assert union_length(x, y).isnan().tolist() == [True, False, True]


def test_operator_is_well_formed():
    x, y = torch.randn(2, 4, 8, device=device).unbind(0)
    inputs = (x.requires_grad_(), y.requires_grad_())
    torch.library.opcheck(quasimetric_triton.union_length, inputs, test_utils=("test_schema", "test_faketensor"))


def test_the_distance_uses_it(monkeypatch):
    torch.manual_seed(0)
    metric = IQE(5, (16,), 24, intervals=8).to(device)
    s, g = torch.randn(2, 9, 5, device=device).unbind(0)
    monkeypatch.setenv("QHYER_TRITON", "0")
    plain = metric(s, g)
    calls = []
    monkeypatch.setenv("QHYER_TRITON", KERNELS)
    kernel = quasimetric_triton.union_length
    monkeypatch.setattr(quasimetric_triton, "union_length", lambda *ends: calls.append(1) or kernel(*ends))
    assert torch.allclose(metric(s, g), plain, atol=1e-5) and calls
