"""Attention equals its definition, with and without a cache of the past."""

from __future__ import annotations

import math

import pytest
import torch

from qhyer.nn.attention import CausalAttention, causal_attention_ref


def test_reference_by_loops():
    q, k, v = (torch.randn(1, 1, n, 3, dtype=torch.float64) for n in (2, 5, 5))
    out = causal_attention_ref(q, k, v)
    for i in range(2):
        seen = 3 + i + 1  # the two queries are the last two of five tokens
        weights = [math.exp(float(q[0, 0, i] @ k[0, 0, j]) / math.sqrt(3)) for j in range(seen)]
        expected = sum(w * v[0, 0, j] for j, w in enumerate(weights)) / sum(weights)
        torch.testing.assert_close(out[0, 0, i], expected)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_module_equals_reference_in_value_and_gradient(length):
    torch.manual_seed(0)
    module = CausalAttention(8, 2).double()
    x = torch.randn(3, length, 8, dtype=torch.float64)

    def slow(x):
        q, k, v = (t.view(3, length, 2, 4).transpose(1, 2) for t in module.qkv(x).split(8, dim=-1))
        return module.out(causal_attention_ref(q, k, v).transpose(1, 2).reshape(3, length, 8))

    torch.testing.assert_close(module(x)[0], slow(x))
    ours = torch.autograd.grad(module(x)[0].square().sum(), list(module.parameters()))
    theirs = torch.autograd.grad(slow(x).square().sum(), list(module.parameters()))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("parts", [(1,) * 7, (3, 1, 1, 2), (2, 5), (6, 1)])
def test_cache_equals_one_pass(parts):
    torch.manual_seed(0)
    module = CausalAttention(8, 4).eval()
    x = torch.randn(2, 7, 8)
    full, _ = module(x)
    past, outputs, start = None, [], 0
    for size in parts:
        out, past = module(x[:, start : start + size], past)
        outputs.append(out)
        start += size
    torch.testing.assert_close(torch.cat(outputs, 1), full, rtol=1e-5, atol=1e-6)
    assert past is not None and past.keys.shape == (2, 4, 7, 2)


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    module = CausalAttention(8, 2, dropout=0.5)
    x = torch.randn(2, 6, 8)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


def test_heads_must_divide_the_width():
    with pytest.raises(AssertionError, match="not a multiple of 3 heads"):
        CausalAttention(8, 3)
