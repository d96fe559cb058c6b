"""Every backbone is causal and takes any length; formulas against loops that spell them out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from qhyer.nn import backbones
from qhyer.nn.backbones import BACKBONES, Attention, Block, GraphAttention, KindConvolution, LongShort, Routed
from qhyer.nn.windows import WindowTokens


def build(name: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    net = BACKBONES[name](16, 3, 2, dropout).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return net.eval()


@pytest.mark.parametrize("name", BACKBONES)
def test_causal_at_any_length(name):
    """Perturbing a token moves no earlier output and its own; a shorter window is the beginning of a longer one."""
    net = build(name)
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    before = net(x)
    assert before.shape == x.shape
    for t in range(11):
        other = x.clone()
        other[:, t] += torch.randn(2, 16)
        after = net(other)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-12)
        assert (after[:, t] - before[:, t]).abs().max() > 1e-3
        torch.testing.assert_close(net(x[:, : t + 1]), before[:, : t + 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", BACKBONES)
def test_batches_are_apart_and_gradients_reach_everything(name):
    net = build(name)
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    torch.testing.assert_close(net(x)[1:2], net(x[1:2]), rtol=0, atol=1e-12)
    net.train()
    with_loss = getattr(net, "with_loss", None)
    h, asked = with_loss(x) if with_loss is not None else (net(x), 0.0)
    ((h * torch.randn(16)).sum() + asked).backward()
    assert not [n for n, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


def test_the_graph_is_the_one_written_down():
    """R_0 s_0 a_0 R_1 s_1 a_1, by hand."""
    names = [f"{kind}{t}" for t in range(2) for kind in "Rsa"]
    edges = {("R0", "a0"), ("s0", "a0"), ("R1", "a1"), ("s1", "a1"), ("R0", "R1"), ("s0", "R1"), ("a0", "R1")}
    edges |= {("s0", "s1"), ("a0", "s1")}
    found = backbones.causes(6, torch.device("cpu"))
    assert {(names[j], names[i]) for i in range(6) for j in range(6) if found[i, j]} == edges


def test_graph_attention_against_a_loop():
    torch.manual_seed(0)
    net = GraphAttention(8, 2).double().eval()
    with torch.no_grad():
        net.relation.normal_()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    cause = backbones.causes(7, x.device)
    q, k, v = net.qkv(x).split(8, dim=-1)
    expected = torch.zeros_like(x)
    for b in range(2):
        for head in (slice(0, 4), slice(4, 8)):
            for i in range(7):
                scores = []
                for j in range(i + 1):
                    r, p = net.relation[int(cause[i, j])]
                    scores.append((q[b, i, head] + r[head]) @ (k[b, j, head] + p[head]) / math.sqrt(4))
                weights = torch.stack(scores).softmax(0)
                expected[b, i, head] = sum(w * v[b, j, head] for j, w in enumerate(weights))
    torch.testing.assert_close(net(x), net.out(expected))


@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_dynamic_convolution_against_a_loop(length):
    torch.manual_seed(0)
    u = torch.randn(2, length, 8, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(2, length, 2, 4, dtype=torch.float64, requires_grad=True)
    fast, slow = backbones.dynamic_conv(u, logits), backbones.dynamic_conv_ref(u, logits)
    torch.testing.assert_close(fast, slow)
    weights = torch.randn_like(fast)
    for a, b in zip(*(torch.autograd.grad((y * weights).sum(), (u, logits)) for y in (fast, slow))):
        torch.testing.assert_close(a, b)


def test_dynamic_convolution_by_hand():
    """Two channels, one kernel; logits (0, log 3) weigh the token itself 1/4 and the one before 3/4."""
    u = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]])
    logits = torch.tensor([0.0, math.log(3.0)]).expand(1, 3, 1, 2)
    expected = torch.tensor([[[1.0, 10.0], [1.25, 12.5], [2.5, 25.0]]])
    torch.testing.assert_close(backbones.dynamic_conv(u, logits), expected)


def test_filters_by_kind_against_three_convolutions():
    torch.manual_seed(0)
    net = KindConvolution(5, period=3, taps=6).double()
    x = torch.randn(2, 10, 5, dtype=torch.float64, requires_grad=True)
    fast, slow = net(x), net.reference(x)
    torch.testing.assert_close(fast, slow)
    weights = torch.randn_like(fast)
    for a, b in zip(*(torch.autograd.grad((y * weights).sum(), [x, *net.parameters()]) for y in (fast, slow))):
        torch.testing.assert_close(a, b)


def test_long_short_reads_each_half_of_the_channels_apart():
    """Before the gate attention does not see the last channels, nor convolution the first; the gate's sum is one"""
    torch.manual_seed(0)
    net = LongShort(16, 2, 0.0, short=8, taps=3).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    seen = []
    net.gate.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output.softmax(-1))))
    net(x)
    other = x.clone()
    other[..., 8:] += 1.0
    net(other)
    (c, gate), (moved, _) = seen
    torch.testing.assert_close(moved[..., :8], c[..., :8])
    assert not torch.allclose(moved[..., 8:], c[..., 8:])
    torch.testing.assert_close(gate.sum(-1), torch.ones_like(gate[..., 0]))


def test_only_the_first_return_is_seen():
    """Tokens s, R, a: other returns move their own output alone."""
    torch.manual_seed(0)
    net = Block(16, backbones.FirstReturnAttention(16, 2, 0.0, kind=1)).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    for t, moves in ((1, range(1, 9)), (4, [4]), (7, [7])):
        other = x.clone()
        other[:, t] += torch.randn(16)
        moved = (net(other) - net(x)).abs().amax((0, 2)) > 1e-9
        assert moved.nonzero().flatten().tolist() == list(moves)


def test_routing_is_running_the_chosen_tokens_alone():
    """Against the shorter sequence it stands for; in training the greatest weights are chosen, a guess is told."""
    torch.manual_seed(0)
    net = Routed(16, Block(16, Attention(16, 2)), capacity=0.5).double()
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    w = net.router(x)[0, :, 0]
    for mode in (True, False):
        net.train(mode)
        if mode:
            chosen = (w >= w.sort(descending=True).values[3]).nonzero().flatten()
            assert len(chosen) == 4
        else:
            chosen = (net.predictor(x)[0, :, 0] > 0).nonzero().flatten()
        expected = x.clone()
        if len(chosen):
            alone = net.block(x[:, chosen])
            expected[:, chosen] = x[:, chosen] + w[chosen, None] * (alone - x[:, chosen])
        y, loss = net(x)
        torch.testing.assert_close(y, expected)
        if mode:
            odds = net.predictor(x)[0, :, 0].sigmoid()
            mask = torch.zeros(7).index_fill(0, chosen, 1.0)
            by_hand = -torch.where(mask > 0, odds.log(), (1 - odds).log()).mean()
            assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_mamba_keeps_its_memory_through_the_initialisation():
    """GPT-2's initialisation of Linear layers stops before Mamba: steps of 1e-3 to 1e-1, not softplus(0) = 0.69."""
    trunk = backbones.mamba(16, 1, 0.0)
    step = nn.functional.softplus(trunk.blocks[0].mixer.mamba.dt_proj.bias)
    assert step.min() > 9e-4 and step.max() < 0.11
    assert backbones.gpt(64, 1, 1, 0.0).blocks[0].mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_tokens_take_turns_and_late_times_share_a_vector():
    torch.manual_seed(0)
    tokens = WindowTokens({"return": 1, "state": 3, "action": 2}, 8, horizon=5)
    values = {"return": torch.randn(2, 4), "state": torch.randn(2, 4, 3), "action": torch.randn(2, 4, 2)}
    times = torch.tensor([[0, 1, 2, 3], [3, 4, 5, 600]])
    x = tokens(values, times)
    assert x.shape == (2, 12, 8)
    for kind, inputs in values.items():
        for b, t, row in ((0, 2, 2), (1, 1, 4), (1, 3, 4)):
            value = inputs[b, t] if inputs.dim() == 3 else inputs[b, t][None]
            expected = tokens.norm(tokens.embed[kind](value) + tokens.time[row])
            torch.testing.assert_close(tokens.read(x, kind)[b, t], expected)
    assert tokens.read(x[:, :-1], "state").shape == (2, 4, 8) and tokens.read(x[:, :-2], "return").shape == (2, 4, 8)
