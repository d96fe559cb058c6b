"""Probabilities of binary coordinates: normalised, one coordinate after the other, and able to learn any pattern."""

from __future__ import annotations

import itertools

import pytest
import torch

from qhyer.nn.bits import Bits


def patterns(dim: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=dim)), dtype=torch.float64)


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_probabilities_of_all_patterns_sum_to_one(dim, shake):
    torch.manual_seed(0)
    model = Bits(dim, 3, 16).double()
    shake(model, 1.0)
    context = torch.randn(7, 1, 3, dtype=torch.float64).expand(-1, 2**dim, -1)
    log_p = model.log_prob(patterns(dim).expand(7, -1, -1), context)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(7, dtype=torch.float64))
    assert (log_p < 0).all()


def test_a_bit_is_predicted_from_the_context_and_the_bits_before_it_alone(shake):
    torch.manual_seed(0)
    model = Bits(4, 2, 32).double()
    shake(model, 1.0)
    bits = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    context = torch.randn(2, dtype=torch.float64, requires_grad=True)
    for i in range(4):
        by_bits, by_context = torch.autograd.grad(model.logits(bits, context)[i], [bits, context], allow_unused=True)
        assert (by_bits[i:] == 0).all()
        assert (by_bits[:i] != 0).all()
        assert (by_context != 0).all()


def test_it_learns_a_parity():
    """Even patterns with context 1, odd ones with context -1: no bit alone tells anything."""
    torch.manual_seed(0)
    model = Bits(3, 1, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        bits = torch.randint(2, (128, 3)).float()
        context = 1.0 - 2.0 * (bits.sum(-1, keepdim=True) % 2)
        loss = -model.log_prob(bits, context).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    every = patterns(3).float()
    p = model.log_prob(every, torch.ones(8, 1)).exp()
    torch.testing.assert_close(p, torch.where(every.sum(-1) % 2 == 0, 0.25, 0.0), rtol=0, atol=0.03)
