"""GELU and LayerNorm as one kernel against plain torch, alone and in the networks; without a GPU, interpreted."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from qhyer.losses import gelu
from qhyer.nn import mlp_triton
from qhyer.nn.mlp import MLP, norm_kernel
from qhyer.nn.mlp_triton import gelu_norm
from qhyer.nn.values import Ensemble, frozen

device = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "1" if device == "cuda" else "interpret"


def plain(u: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    x = gelu(u + bias)
    return F.layer_norm(x, x.shape[-1:], eps=eps) * scale + shift


def inputs(members: int, rows: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(members * rows * width)
    shapes = dict(u=(members, rows, width), **dict.fromkeys(("bias", "scale", "shift"), (members, 1, width)))
    return {name: (2 * torch.randn(s, generator=generator)).to(device).requires_grad_() for name, s in shapes.items()}


def gradients(output: Tensor, by: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output)
    return torch.autograd.grad((weights * output).sum(), by)


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    assert ours.shape == theirs.shape
    return bool((ours.double() - theirs.double()).abs().max() <= tolerance * theirs.abs().max().clamp_min(1.0))


@pytest.mark.parametrize("members, rows, width", [(1, 1, 16), (2, 7, 100), (1, 33, 48), (2, 9, 300), (3, 33, 64)])
def test_values_and_gradients(members, rows, width, monkeypatch):
    monkeypatch.setattr(mlp_triton, "PROGRAMS", 2)  # programs of several steps, the last not full
    by = inputs(members, rows, width)
    double = {name: t.detach().double().requires_grad_() for name, t in by.items()}
    ours = gelu_norm(**by, eps=1e-6)
    found = gradients(ours, list(by.values()))
    for reference in (by, double):
        theirs = plain(**reference, eps=1e-6)
        assert close(ours, theirs, 1e-5)
        for name, mine, gradient in zip(by, found, gradients(theirs, list(reference.values()))):
            assert close(mine, gradient, 1e-4), name


def test_operator_is_well_formed():
    by = inputs(2, 7, 24)
    torch.library.opcheck(gelu_norm, (*by.values(), 1e-6), test_utils=("test_schema", "test_faketensor"))


def test_gradients_of_parameters_alone_or_not_at_all():
    by = inputs(2, 9, 32)
    ours, theirs = (f(**by, eps=1e-6) for f in (gelu_norm, plain))
    (only,) = gradients(ours, [by["u"]])
    assert close(only, gradients(theirs, [by["u"]])[0], 1e-4)
    fixed = {name: t.detach() if name != "u" else t for name, t in by.items()}
    (through,) = gradients(gelu_norm(**fixed, eps=1e-6), [by["u"]])
    assert torch.equal(through, only)  # a frozen network passes the same gradient


def networks() -> list[tuple[nn.Module, int]]:
    torch.manual_seed(0)
    made: list[tuple[nn.Module, int]] = [
        (Ensemble(2, 5, (24, 40), 3), 5),
        (Ensemble(1, 5, (24,), 1), 5),
        (MLP(5, (24, 40), 3, layer_norm=True), 5),
    ]
    with torch.no_grad():
        for network, _ in made:
            for parameter in network.parameters():
                parameter += 0.2 * torch.randn(parameter.shape)
    return [(network.to(device), width) for network, width in made]


@pytest.mark.parametrize("which", range(3))
def test_networks_compute_the_same(which, monkeypatch):
    network, width = networks()[which]
    x = torch.randn(11, width).to(device).requires_grad_()
    by = [x, *network.parameters()]
    results = {}
    for use in ("0", KERNELS):
        monkeypatch.setenv("QHYER_TRITON", use)
        assert (norm_kernel(x) is not None) == (use != "0")
        output = network(x)
        results[use] = (output, gradients(output, by))
    assert close(results[KERNELS][0], results["0"][0], 1e-5)
    for ours, theirs in zip(results[KERNELS][1], results["0"][1]):
        assert close(ours, theirs, 1e-4)
    with frozen(network):
        (through,) = gradients(network(x), [x])
    assert close(through, results["0"][1][0], 1e-4)


def test_what_the_kernel_cannot_do_runs_without(monkeypatch):
    monkeypatch.setenv("QHYER_TRITON", KERNELS)
    network = MLP(5, (24,), 3, layer_norm=True).to(device)
    x = torch.randn(2, 3, 5).to(device)
    assert torch.allclose(network(x), network(x.flatten(0, 1)).view(2, 3, 3), atol=1e-5)  # more axes than one
    assert network(x[:0].flatten(0, 1)).shape == (0, 3)
    double = copy.deepcopy(network).double()
    assert double(x.double()).dtype == torch.float64
    with torch.autocast(device, dtype=torch.bfloat16):
        assert norm_kernel(x) is None and network(x[0]).dtype == torch.bfloat16
