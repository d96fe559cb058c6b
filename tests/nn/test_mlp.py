"""The MLP has flax's details: tanh GELU, LayerNorm (eps 1e-6) after the activation, variance-scaled head."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from qhyer.losses import gelu
from qhyer.nn.mlp import MLP


def test_gelu_is_the_tanh_form():
    """0.5 x (1 + tanh(sqrt(2/pi)(x + 0.044715 x^3))): at 1 it is 0.841192, where the exact form gives 0.841345."""
    x = torch.tensor([1.0, -0.5, 3.0], dtype=torch.float64)
    worked = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(gelu(x), worked)
    assert float(gelu(x)[0]) == pytest.approx(0.841192, abs=1e-6)
    assert abs(float(nn.functional.gelu(x)[0]) - float(gelu(x)[0])) > 1e-4


def test_forward_by_hand():
    torch.manual_seed(0)
    net = MLP(3, (4, 5), 2, layer_norm=True)
    x = torch.randn(6, 3)
    h = x
    for layer, norm in zip(net.layers, net.norms):
        h = gelu(h @ layer.weight.T + layer.bias)
        mean, variance = h.mean(-1, keepdim=True), h.var(-1, keepdim=True, correction=0)
        h = (h - mean) / torch.sqrt(variance + 1e-6) * norm.weight + norm.bias  # after the activation
        assert norm.eps == 1e-6
    torch.testing.assert_close(net(x), h @ net.head.weight.T + net.head.bias)


def test_without_norm_there_is_none():
    net = MLP(3, (4,), 2)
    assert not any(isinstance(module, nn.LayerNorm) for module in net.modules())
    assert sum(p.numel() for p in net.parameters()) == 3 * 4 + 4 + 4 * 2 + 2


@pytest.mark.parametrize("scale", [1.0, 1e-2])
def test_initial_scales(scale):
    """Uniform of variance scale / fan_avg, i.e. bounded by sqrt(3 scale / fan_avg); biases zero."""
    torch.manual_seed(0)
    net = MLP(100, (200,), 50, final_scale=scale)
    for layer, s in ((net.layers[0], 1.0), (net.head, scale)):
        fan = (layer.in_features + layer.out_features) / 2
        assert layer.weight.abs().max() <= math.sqrt(3 * s / fan)
        assert float(layer.weight.detach().var()) == pytest.approx(s / fan, rel=0.05)
        assert not layer.bias.any()
