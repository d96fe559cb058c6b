"""Stacked values are the MLPs they stand for; targets lag by one step; frozen networks are climbed, not moved."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from qhyer.nn.mlp import MLP
from qhyer.nn.values import Bilinear, Ensemble, Value, follow, frozen, target_of


def member(ensemble: Ensemble, index: int, inputs: int, hidden: tuple[int, ...], outputs: int, norm: bool) -> MLP:
    """The slow, obvious version: one MLP with the weights of one member."""
    net = MLP(inputs, hidden, outputs, layer_norm=norm).to(ensemble.weights[0].dtype)
    with torch.no_grad():
        for layer, weight, bias in zip([*net.layers, net.head], ensemble.weights, ensemble.biases):
            layer.weight.copy_(weight[index].T)
            layer.bias.copy_(bias[index, 0])
        for layer, scale, shift in zip(net.norms, ensemble.scales, ensemble.shifts):
            layer.weight.copy_(scale[index, 0])
            layer.bias.copy_(shift[index, 0])
    return net


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_an_ensemble_is_its_members(members, norm, shake):
    """In value and in the gradient of every weight."""
    torch.manual_seed(0)
    stacked = Ensemble(members, 5, (6, 7), 3, norm)
    shake(stacked)
    x, y = torch.randn(4, 2), torch.randn(4, 3)
    out = stacked(x, y)
    assert out.shape == (members, 4, 3)
    direction = torch.randn_like(out)
    (out * direction).sum().backward()
    for i in range(members):
        net = member(stacked, i, 5, (6, 7), 3, norm)
        expected = net(torch.cat([x, y], -1))
        torch.testing.assert_close(out[i], expected)
        (expected * direction[i]).sum().backward()
        for layer, weight, bias in zip([*net.layers, net.head], stacked.weights, stacked.biases):
            torch.testing.assert_close(weight.grad[i], layer.weight.grad.T)
            torch.testing.assert_close(bias.grad[i, 0], layer.bias.grad)
        for layer, scale, shift in zip(net.norms, stacked.scales, stacked.shifts):
            torch.testing.assert_close(scale.grad[i, 0], layer.weight.grad)
            torch.testing.assert_close(shift.grad[i, 0], layer.bias.grad)


def test_members_start_apart_with_an_mlp_s_scale():
    """Uniform of variance 1 / fan_avg, the fans a member's own; biases zero."""
    torch.manual_seed(0)
    net = Ensemble(2, 100, (200,), 50)
    for weight in net.weights:
        fan = (weight.shape[1] + weight.shape[2]) / 2
        assert not torch.equal(weight[0], weight[1])
        for one in weight:
            assert one.abs().max() <= math.sqrt(3 / fan)
            assert float(one.detach().var()) == pytest.approx(1 / fan, rel=0.05)
    assert not any(bias.any() for bias in net.biases)


def test_value_reads_everything_side_by_side():
    torch.manual_seed(0)
    value = Value(2, 6, (8,))
    s, g, a = torch.randn(5, 2), torch.randn(5, 3), torch.randn(5, 1)
    assert value(s, g, a).shape == (2, 5)
    torch.testing.assert_close(value(s, g, a), value(torch.cat([s, g, a], -1)))


def test_values_keep_full_precision_under_autocast():
    torch.manual_seed(0)
    value, critic, x, g = Value(2, 4, (8,)), Bilinear(2, 4, 3, (8,), 16), torch.randn(5, 4), torch.randn(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = value(x), critic(g, x), critic.table(g, x)
    for found, expected in zip(inside, (value(x), critic(g, x), critic.table(g, x))):
        assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_bilinear_by_hand():
    """phi' psi / sqrt(d), and the table has these on its diagonal."""
    torch.manual_seed(0)
    critic = Bilinear(2, 5, 3, (8,), 16)
    s, a, g = torch.randn(6, 4), torch.randn(6, 1), torch.randn(6, 3)
    phi, psi, table = critic.phi(s, a), critic.psi(g), critic.table(g, s, a)
    assert table.shape == (2, 6, 6)
    for e in range(2):
        for i in range(6):
            for k in range(6):
                torch.testing.assert_close(table[e, i, k], (phi[e, i] * psi[e, k]).sum() / 4.0)
    torch.testing.assert_close(critic(g, s, a), table.diagonal(dim1=1, dim2=2))


# ------------------------------------------------------------------------------------------------ target networks


def test_the_target_lags_by_one_step():
    """theta 1, gradient 2 theta, step 0.25: theta is 1, 0.5, 0.25. The target starts at 1 and moves a tenth of the way
    to the weights *before* each step: 1, then 0.9 + 0.1 * 0.5, and not 0.95 at once."""
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
    target = target_of(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    follow(optimizer, target, net, 0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        net.weight.square().sum().backward()
        optimizer.step()
        seen.append((net.weight.item(), target.weight.item()))
    assert [w for w, _ in seen] == pytest.approx([0.5, 0.25, 0.125])
    assert [t for _, t in seen] == pytest.approx([1.0, 0.95, 0.9 * 0.95 + 0.1 * 0.25])


def test_a_target_is_a_copy_without_gradient():
    net = Value(2, 3, (4,))
    target = target_of(net)
    assert not any(p.requires_grad for p in target.parameters())
    assert all(torch.equal(a, b) and a is not b for a, b in zip(net.parameters(), target.parameters()))


def test_adam_is_optax_s():
    """Three steps by hand: m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + 1e-8), the epsilon outside the root."""
    w = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
    optimizer = torch.optim.Adam([w], lr=3e-4, fused=True)
    theta, m, v = 0.5, 0.0, 0.0
    for t in range(1, 4):
        optimizer.zero_grad()
        (w**4).sum().backward()
        gradient = 4 * theta**3
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        theta -= 3e-4 * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
        optimizer.step()
        assert w.item() == pytest.approx(theta, rel=1e-12)


def test_gradients_pass_through_frozen_networks_only():
    torch.manual_seed(0)
    critic, action = Value(2, 3, (8,)), torch.randn(4, 1, requires_grad=True)
    state = torch.randn(4, 2)
    with frozen(critic):
        q = critic(state, action).min(0).values
    q.sum().backward()
    assert action.grad.abs().min() > 0 and all(p.grad is None for p in critic.parameters())
    assert all(p.requires_grad for p in critic.parameters())
    free = torch.autograd.grad(critic(state, action).min(0).values.sum(), action)[0]
    torch.testing.assert_close(action.grad, free)


def test_frozen_leaves_targets_as_they_were():
    target = target_of(Value(2, 3, (4,)))
    with pytest.raises(RuntimeError, match="stop"), frozen(target):
        raise RuntimeError("stop")
    assert not any(p.requires_grad for p in target.parameters())
