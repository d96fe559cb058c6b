"""The hybrid decoder: causal, equal through its cache, and one branch alone where the gate says so."""

from __future__ import annotations

import typing

import pytest
import torch

from qhyer.nn.hybrid import Backbone, HybridBlock, HybridDecoder, first_of_steps

BACKBONES = typing.get_args(Backbone)
KINDS = [*BACKBONES, "mamba2", "hybrid mamba2"]


def decoder(backbone: str = "hybrid", dropout: float = 0.0, layers: int = 2) -> HybridDecoder:
    """Of a backbone, or of one with Mamba-2."""
    torch.manual_seed(0)
    backbone, ssm = {"mamba2": ("mamba", "mamba2"), "hybrid mamba2": ("hybrid", "mamba2")}.get(
        backbone, (backbone, "mamba")
    )
    net = HybridDecoder(12, layers, 3, dropout, backbone, state_size=4, ssm=ssm)
    with torch.no_grad():
        for block in net.blocks:
            if block.gate is not None:  # away from its start, alpha = 1/2 everywhere
                block.gate.weight.normal_()
                block.gate.bias.normal_()
    return net.eval()


@pytest.mark.parametrize("backbone", KINDS)
def test_causality(backbone):
    """Perturbing a token never moves an earlier output, to the last bit, and moves its own."""
    net = decoder(backbone)
    x = torch.randn(2, 9, 12)
    before, _ = net(x)
    for t in range(9):
        other = x.clone()
        other[:, t] += torch.randn(2, 12)
        after, _ = net(other)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-6)
        assert (after[:, t] - before[:, t]).abs().max() > 1e-2
    weights = torch.randn(12)  # a plain sum of LayerNorm outputs is constant
    jacobian = torch.autograd.functional.jacobian(lambda v: (net(v)[0] * weights).sum((0, 2)), x)  # (9, 2, 9, 12)
    jacobian = jacobian.abs().sum((1, 3))  # (out, in)
    assert (jacobian.triu(1) == 0).all() and (jacobian.tril() > 0).sum() == 45  # all of the past is used, no future


@pytest.mark.parametrize("backbone", KINDS)
@pytest.mark.parametrize("parts", [(1,) * 8, (5, 1, 1, 1), (3, 4, 1), (8,)])
def test_cache_equals_one_pass(backbone, parts):
    net = decoder(backbone)
    x = torch.randn(2, 8, 12)
    full, _ = net(x)
    cache, outputs, start = None, [], 0
    for size in parts:
        out, cache = net(x[:, start : start + size], cache)
        outputs.append(out)
        start += size
    torch.testing.assert_close(torch.cat(outputs, 1), full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length, read", [(8, (3, 2)), (9, (3, 2)), (2, (3, 2)), (1, (2, 1)), (7, (4, 3)), (9, (4, 1))])
def test_outputs_that_are_read_are_the_first_of_every_step(length, read):
    net, x = decoder(), torch.randn(2, length, 12)
    per_step, first = read
    wanted = [i for i in range(length) if i % per_step < first]
    assert torch.equal(net(x, read=read)[0], net(x)[0][:, wanted])


def test_a_step_that_lacks_what_is_read():
    for length, read in ((7, (3, 2)), (9, (4, 3)), (4, (2, 3)), (4, (2, 0))):
        with pytest.raises(ValueError, match="cannot be read"):
            first_of_steps(torch.zeros(1, length, 4), *read)


@pytest.mark.parametrize("bias, backbone", [(1e4, "attention"), (-1e4, "mamba")])
def test_gate_at_its_ends_is_one_branch_alone(bias, backbone):
    both, alone = decoder("hybrid"), decoder(backbone)
    with torch.no_grad():
        for block in both.blocks:
            block.gate.weight.zero_()
            block.gate.bias.fill_(bias)
    missing = alone.load_state_dict(both.state_dict(), strict=False)
    assert not missing.missing_keys
    x = torch.randn(2, 7, 12)
    torch.testing.assert_close(both(x)[0], alone(x)[0], rtol=0, atol=1e-6)


def test_gate_mixes_the_branches():
    block = decoder(layers=1).blocks[0]
    assert isinstance(block, HybridBlock)
    x = torch.randn(2, 5, 12)
    h = block.norm(x)
    alpha = torch.sigmoid(h @ block.gate.weight[0] + block.gate.bias)[..., None]
    y = alpha * block.attention(h)[0] + (1 - alpha) * block.mamba(h)[0]
    torch.testing.assert_close(block(x)[0], x + y + block.mlp(x + y))


def test_gate_starts_open_to_both():
    torch.manual_seed(0)
    net = HybridDecoder(12, 2, 3, state_size=4).eval()
    for read in net.readout(torch.randn(2, 5, 12)):
        assert torch.equal(read["alpha"], torch.full((2, 5), 0.5))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_readouts(backbone):
    net = decoder(backbone)
    x = torch.randn(2, 5, 12)
    reads = net.readout(x)
    assert len(reads) == 2
    shapes = {"alpha": (2, 5), "delta": (2, 5, 24), "A_bar": (2, 5, 24, 4)}
    expected = {"hybrid": {"alpha", "delta", "A_bar"}, "attention": set(), "mamba": {"delta", "A_bar"}}[backbone]
    for read in reads:
        assert set(read) == expected
        for name, value in read.items():
            assert value.shape == shapes[name] and not value.requires_grad
    # The second block is read on what the first one passes on, not on the input.
    if backbone == "hybrid":
        h = net.blocks[1].norm(net.blocks[0](x)[0])
        torch.testing.assert_close(reads[1]["alpha"], torch.sigmoid(net.blocks[1].gate(h)).squeeze(-1))
        torch.testing.assert_close(reads[1]["delta"], net.blocks[1].mamba.readout(h)["delta"])


def test_right_padding_moves_nothing():
    net = decoder()
    x = torch.randn(2, 6, 12)
    longer = torch.cat([x, torch.full((2, 3, 12), 7.0)], dim=1)
    torch.testing.assert_close(net(longer)[0][:, :6], net(x)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("backbone", KINDS)
def test_what_a_window_keeps(backbone, dropout):
    """`kept` against what autograd holds on to: bytes of all storages but the weights."""
    kind, ssm = {"mamba2": ("mamba", "mamba2"), "hybrid mamba2": ("hybrid", "mamba2")}.get(
        backbone, (backbone, "mamba")
    )

    def counted(layers: int) -> float:
        net = HybridDecoder(128, layers, 4, dropout, kind, 16, ssm)
        weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
        held: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            _, _ = net(torch.randn(4, 59, 128, requires_grad=True))
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        return sum(size for at, size in storages.items() if at not in weights) / 4

    told = 4 * HybridDecoder(128, 2, 4, dropout, kind, 16, ssm).kept(59)
    assert counted(3) - counted(1) == pytest.approx(told, rel=0.1)
