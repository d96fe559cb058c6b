"""Tokens of a window by kernels against plain torch; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from qhyer.nn import tokens_triton
from qhyer.nn.tokens import Tokens

device = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 1, 1, 16), (3, 4, 5, 48), (9, 2, 3, 100), (17, 3, 20, 130)]  # windows, steps, numbers, width


@pytest.fixture
def with_kernels(monkeypatch):
    """with_kernels(True) or (False): what runs from here on."""

    def choose(use: bool) -> None:
        monkeypatch.setenv("QHYER_TRITON", ("1" if device == "cuda" else "interpret") if use else "0")

    choose(True)
    return choose


def make(steps: int, numbers: int, width: int, tokenization: str = "concat") -> Tokens:
    torch.manual_seed(0)
    tokens = Tokens(7, numbers, 3, width, steps, tokenization)
    with torch.no_grad():
        for parameter in tokens.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return tokens.to(device)


def window(batch: int, steps: int, numbers: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    shapes = (batch, steps, 7), (batch, steps, 3), (batch, steps), (batch, steps, numbers)
    s, g, q, a = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return s.requires_grad_(), g.requires_grad_(), q, a


def outcome(tokens: Tokens, values: tuple[Tensor, ...], last: bool) -> tuple[Tensor, dict[str, Tensor]]:
    x = tokens(*values, last=last)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(x)
    by = {"s": values[0], "g": values[1], **dict(tokens.named_parameters())}
    return x.detach(), dict(zip(by, torch.autograd.grad((direction * x).sum(), list(by.values()), allow_unused=True)))


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1.0))


def check(tokens: Tokens, values: tuple[Tensor, ...], last: bool, with_kernels, tolerance: float = 1e-5) -> None:
    x, found = outcome(tokens, values, last)
    with_kernels(False)
    x_ref, expected = outcome(tokens, values, last)
    assert close(x, x_ref, tolerance)
    for name, gradient in found.items():
        theirs = expected[name]
        assert (gradient is None) == (theirs is None), name
        assert gradient is None or close(gradient, theirs, tolerance), name


@pytest.fixture
def called(monkeypatch):
    """How often the kernels' operator was called."""
    calls, original = [], tokens_triton.embed
    monkeypatch.setattr(tokens_triton, "embed", lambda *arguments: calls.append(1) or original(*arguments))
    return calls


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("batch, steps, numbers, width", SIZES)
def test_tokens_equal_plain_torch(batch, steps, numbers, width, last, with_kernels, called, monkeypatch):
    monkeypatch.setattr(tokens_triton, "FORWARD", 2 * steps)  # programs of several rounds, the last not full
    monkeypatch.setattr(tokens_triton, "BACKWARD", 4 * steps)
    check(make(steps, numbers, width), window(batch, steps, numbers), last, with_kernels)
    assert len(called) == 1


@pytest.mark.parametrize("last", [True, False])
def test_shorter_windows_and_states_alone(last, with_kernels, called):
    check(make(5, 2, 16), window(3, 2, 2), last, with_kernels)
    with_kernels(True)
    check(make(4, 2, 16, "no_goal"), window(3, 4, 2), last, with_kernels)
    assert len(called) == 2


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2**-9), (torch.bfloat16, 2**-6)])
def test_tokens_under_autocast(dtype, tolerance, with_kernels, called):
    with torch.autocast(device, dtype, cache_enabled=False):
        check(make(4, 5, 48), window(9, 4, 5), False, with_kernels, tolerance)
    assert len(called) == 1


def test_without_gradient(with_kernels, called):
    tokens, values = make(4, 2, 16), window(3, 4, 2)
    x = tokens(*values, last=False)
    with torch.no_grad():
        again = tokens(*values, last=False)
    assert torch.equal(x, again) and not again.requires_grad and len(called) == 2


def test_what_the_kernels_leave_to_the_plain_code(with_kernels, called):
    s, g, q, a = window(3, 4, 2)
    assert make(4, 2, 16, "separate")(s, g, q, a).shape == (3, 16, 16)
    x = make(4, 2, 16)(s, g, q.requires_grad_(), a)  # as data alone: no gradient passes to them
    assert torch.autograd.grad(x.sum(), q)[0].any()
    s, g, q, a = window(3, 4, 33)
    assert make(4, 33, 16)(s, g, q, a).shape == (3, 12, 16)
    assert make(4, 33, 16)(s[:0], g[:0], q[:0], a[:0]).shape == (0, 12, 16)
    assert not called


def test_same_inputs_same_bits(with_kernels):
    tokens, values = make(4, 5, 48), window(33, 4, 5)
    (x, found), (y, again) = (outcome(tokens, values, False) for _ in range(2))
    assert torch.equal(x, y) and all(torch.equal(found[name], again[name]) for name in found)


def test_gradients_share_no_memory(with_kernels):
    """Clipping scales them in place, each once."""
    tokens = make(4, 5, 48)
    tokens(*window(3, 4, 5), last=False).sum().backward()
    spans = sorted((p.grad.data_ptr(), p.grad.data_ptr() + 4 * p.grad.numel()) for p in tokens.parameters())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_operators_are_well_formed():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    t, (_, _, q, a) = make(4, 5, 16), window(3, 4, 5)
    state = torch.randn(3, 4, 16, device=device, requires_grad=True)
    parameters = (t.q.weight, t.action.weight, t.position, t.kind, t.state.bias, t.q.bias, t.action.bias)
    torch.library.opcheck(tokens_triton.embed, (state, q, a, *parameters, False), test_utils=checks)
    dx = torch.randn(3, 11, 16, device=device)
    torch.library.opcheck(tokens_triton.embed_backward, (dx, q, a, torch.bfloat16), test_utils=checks)
