"""Mamba: token by token equals the window, the convolution is causal, and its special initialisation survives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qhyer.nn.hybrid import HybridDecoder
from qhyer.nn.mamba import Mamba, causal_conv
from qhyer.nn.optim import adamw


@pytest.fixture
def mamba() -> Mamba:
    torch.manual_seed(0)
    return Mamba(12, state_size=5)


def test_steps_equal_the_window(mamba):
    v = torch.randn(3, 11, 12)
    full, last = mamba(v)
    state = mamba.initial_state(3, v)
    for t in range(11):
        out, state = mamba.step(v[:, t], state)
        torch.testing.assert_close(out, full[:, t], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.conv, last.conv, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.ssm, last.ssm, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_window_then_window_then_steps(mamba, cut):
    """Cuts shorter than the convolution's width are the hard case: its past is part padding, part tokens."""
    v = torch.randn(2, 12, 12)
    full, _ = mamba(v)
    first, state = mamba(v[:, :cut])
    second, state = mamba(v[:, cut : cut + 3], state)
    outputs = [first, second]
    for t in range(cut + 3, 12):
        out, state = mamba.step(v[:, t], state)
        outputs.append(out[:, None])
    torch.testing.assert_close(torch.cat(outputs, 1), full, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution_is_torch_s(width):
    """Value and gradient."""
    x = torch.randn(2, 8 + width, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ours = causal_conv(x, weight, bias)
    reference = F.conv1d(x.transpose(1, 2), weight[:, None], bias, groups=5).transpose(1, 2)
    torch.testing.assert_close(ours, reference)
    weights = torch.randn_like(ours)
    found = torch.autograd.grad((ours * weights).sum(), (x, weight, bias))
    expected = torch.autograd.grad((reference * weights).sum(), (x, weight, bias))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
    assert causal_conv(x.bfloat16(), weight.float(), bias.float()).dtype == torch.float32


def test_whole_mixer_against_its_definition(mamba):
    """Eqs. (6) to (8) written out once more, per token, with torch's own convolution."""
    v = torch.randn(2, 6, 12)
    x, z = mamba.in_proj(v).chunk(2, -1)
    x = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), mamba.conv_weight[:, None], mamba.conv_bias, groups=mamba.inner)
    x = F.silu(x).transpose(1, 2)
    R, N = mamba.rank, mamba.state_size
    projected = mamba.x_proj(x)
    delta = F.softplus(F.linear(projected[..., :R], mamba.dt_proj.weight, mamba.dt_proj.bias))
    B, C = projected[..., R : R + N], projected[..., R + N :]
    A = -mamba.A_log.exp()
    h = torch.zeros(2, mamba.inner, N)
    for t in range(6):
        h = torch.exp(delta[:, t, :, None] * A) * h + delta[:, t, :, None] * B[:, t, None] * x[:, t, :, None]
        y = (h * C[:, t, None]).sum(-1) + mamba.D * x[:, t]
        out = mamba.out_proj(y * F.silu(z[:, t]))
        torch.testing.assert_close(mamba(v)[0][:, t], out, rtol=1e-5, atol=1e-6)


def test_step_size_and_decay_start_where_mamba_wants_them():
    torch.manual_seed(0)
    mamba = Mamba(256)
    step = F.softplus(mamba.dt_proj.bias)
    assert step.min() >= 1e-3 * 0.999 and step.max() <= 1e-1 * 1.001
    # log-uniform, not uniform: the median is the geometric mean of the bounds
    assert 0.7e-2 < step.median() < 1.4e-2
    assert torch.allclose(mamba.A, -torch.arange(1.0, 17.0).expand(512, 16))
    assert torch.equal(mamba.D, torch.ones(512))
    assert mamba.rank == math.ceil(256 / 16)


def test_decoder_does_not_reinitialise_its_mamba():
    torch.manual_seed(0)
    for module in HybridDecoder(32, 2, 4).modules():
        if isinstance(module, Mamba):
            step = F.softplus(module.dt_proj.bias)
            assert step.min() >= 0.99e-3 and step.max() <= 1.01e-1
            assert torch.allclose(module.A, -torch.arange(1.0, 17.0).expand_as(module.A))


def test_adamw_decays_matrices_and_obeys_the_marks(mamba):
    net = nn.ModuleDict({"mamba": mamba, "norm": nn.LayerNorm(4), "linear": nn.Linear(3, 2)})
    optimizer = adamw(net.parameters(), lr=0.1, weight_decay=0.5)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] > 0 for p in g["params"]}
    plain = {id(p) for g in optimizer.param_groups if g["weight_decay"] == 0 for p in g["params"]}
    assert decayed | plain == {id(p) for p in net.parameters()} and not decayed & plain
    assert id(mamba.A_log) in plain  # two-dimensional, and still not decayed
    assert {id(mamba.D), id(mamba.dt_proj.bias), id(mamba.conv_bias), id(net["norm"].weight)} <= plain
    assert {id(mamba.in_proj.weight), id(mamba.dt_proj.weight), id(net["linear"].weight)} <= decayed
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # no gradient: only the decay acts
    for name, parameter in net.named_parameters():
        factor = 1 - 0.1 * 0.5 if id(parameter) in decayed else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name])


def test_adamw_without_matrices_and_without_vectors():
    assert len(adamw([nn.Parameter(torch.ones(3))], 0.1).param_groups) == 1
    assert len(adamw([nn.Parameter(torch.ones(3, 3))], 0.1).param_groups) == 1


def test_readout_is_what_the_scan_used(mamba):
    v = torch.randn(2, 6, 12)
    read = mamba.readout(v)
    assert read["delta"].shape == (2, 6, 24) and read["A_bar"].shape == (2, 6, 24, 5)
    assert (read["delta"] > 0).all() and ((read["A_bar"] > 0) & (read["A_bar"] < 1)).all()
    torch.testing.assert_close(read["A_bar"].log() / mamba.A, read["delta"][..., None].expand(2, 6, 24, 5))
    # Content-adaptive: another token, another step size, there and where the convolution carries it.
    other = v.clone()
    other[:, 3] += 1.0
    changed = (mamba.readout(other)["delta"] - read["delta"]).abs().amax((0, 2)) > 0
    assert changed.tolist() == [False, False, False, True, True, True]
