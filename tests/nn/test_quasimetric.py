"""Quasimetrics: the union of intervals against sweeping them one by one, and the axioms."""

from __future__ import annotations

import pytest
import torch

from qhyer.nn.quasimetric import IQE, MRN, union_length


def swept(x: list[float], y: list[float]) -> float:
    """Length of the union of [x_i, y_i], x_i < y_i: from left to right, what lies beyond all before."""
    total, reach = 0.0, float("-inf")
    for a, b in sorted((a, b) for a, b in zip(x, y) if a < b):
        total += max(0.0, b - max(a, reach))
        reach = max(reach, b)
    return total


@pytest.mark.parametrize(
    "x, y, length",
    [
        ([0.0, 2.0], [1.0, 5.0], 4.0),  # apart
        ([0.0, 0.5], [1.0, 2.0], 2.0),  # overlapping
        ([0.0, 0.2], [3.0, 0.4], 3.0),  # one inside the other
        ([0.0, 1.0], [1.0, 2.0], 2.0),  # touching
        ([0.0, 0.0], [1.0, 2.0], 2.0),  # a common left end
        ([0.0, 1.0], [2.0, 2.0], 2.0),  # a common right end
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], 1.0),  # the same thrice
        ([3.0, 1.0], [1.0, 1.0], 0.0),  # backwards and empty: nothing
        ([0.0, 5.0], [1.0, 2.0], 1.0),
    ],
)
def test_union_by_hand(x, y, length):
    assert swept(x, y) == length
    assert float(union_length(torch.tensor(x), torch.tensor(y))) == pytest.approx(length)


def test_union_is_the_sweep_s():
    """On random and on coarse intervals, where ends coincide; and so is its gradient."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 400, 8, generator=generator, dtype=torch.float64)
    coarse = (x * 2).round(), (y * 2).round()
    for a, b in ((x, y), coarse):
        expected = torch.tensor([swept(p, q) for p, q in zip(a.tolist(), b.tolist())], dtype=torch.float64)
        torch.testing.assert_close(union_length(a, b), expected)
    assert torch.autograd.gradcheck(union_length, (x[:5].requires_grad_(), y[:5].requires_grad_()))


def build(kind: type, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    return kind(3, (16,), 16).to(dtype)


@pytest.mark.parametrize("kind", [IQE, MRN])
def test_axioms(kind):
    net = build(kind)
    a, b, c = torch.randn(3, 200, 3, dtype=torch.float64)
    ab, bc, ac = net(a, b), net(b, c), net(a, c)
    assert (ab >= 0).all() and (net(a, a) <= 1e-6).all()
    assert (ac <= ab + bc + 1e-9).all()
    assert (net(b, a) - ab).abs().max() > 1e-2  # not symmetric
    torch.testing.assert_close(net.distance(net.encode(a), net.encode(b)), ab)


def test_iqe_by_hand():
    """Two groups of two: unions of length 4 and 1; half their mean and half their maximum at the start."""
    net = IQE(3, (4,), 4, intervals=2)
    x, y = torch.tensor([[0.0, 2.0, 0.0, 3.0]]), torch.tensor([[1.0, 5.0, 1.0, -1.0]])
    torch.testing.assert_close(net.distance(x, y), torch.tensor([0.5 * 2.5 + 0.5 * 4.0]))
    with torch.no_grad():
        net.mix.fill_(1.0)
    rho = 0.7310585786300049  # sigmoid(1)
    torch.testing.assert_close(net.distance(x, y), torch.tensor([rho * 2.5 + (1 - rho) * 4.0]))


def test_mrn_by_hand():
    """Euclidean on the first half, 3-4-5; the greatest excess of x over y, at least zero, on the second."""
    net = MRN(3, (4,), 4)
    x, y = torch.tensor([[3.0, 4.0, 1.0, 2.5]]), torch.tensor([[0.0, 0.0, 5.0, 2.0]])
    torch.testing.assert_close(net.distance(x, y), torch.tensor([5.5]))
    torch.testing.assert_close(net.distance(y, x), torch.tensor([9.0]))
    x.requires_grad_()
    net.distance(x, x.detach()).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", [IQE, MRN])
def test_distances_keep_full_precision_under_autocast(kind):
    net = build(kind, torch.float32)
    a, b = torch.randn(2, 20, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = net(a, b)
    assert inside.dtype == torch.float32 and torch.equal(inside, net(a, b))
