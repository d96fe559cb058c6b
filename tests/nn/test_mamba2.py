"""Mamba-2: products of matrices are the recurrence, token by token is the window, and it begins as it should."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from qhyer.nn import mamba2
from qhyer.nn.mamba2 import Mamba2, head_scan, head_scan_ref
from qhyer.nn.optim import adamw


def inputs(length: int, heads: int = 3, width: int = 4, size: int = 5, carried: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(length)
    double = dict(dtype=torch.float64)
    values = [
        torch.randn(2, length, heads, width, **double),
        F.softplus(torch.randn(2, length, heads, **double)),
        -torch.rand(heads, **double) * 4 - 0.1,
        torch.randn(2, length, size, **double),
        torch.randn(2, length, size, **double),
        torch.randn(heads, **double),
    ]
    values += [torch.randn(2, heads, width, size, **double)] if carried else []
    return [value.requires_grad_() for value in values]


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 60, 130])
def test_products_of_matrices_are_the_recurrence(length, carried, monkeypatch):
    """Values and gradients, of the last state, too; in chunks of 32, so that most windows are several."""
    monkeypatch.setattr(mamba2, "CHUNK", 32)
    values = inputs(length, carried=carried)
    found, expected = [], []
    for scan, into in ((head_scan, found), (head_scan_ref, expected)):
        y, last = scan(*values)
        weights = torch.Generator().manual_seed(1)
        loss = sum((torch.randn(out.shape, generator=weights, dtype=out.dtype) * out).sum() for out in (y, last))
        into += [y, last, *torch.autograd.grad(loss, values)]
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_state_that_is_forgotten_leaves_nothing_behind():
    """Decay of exp(-1000) and beyond: no infinity times zero, forward or backward. Sums of decays are then near -1e5,
    and their differences have lost digits."""
    x, delta, A, B, C, D = (value.detach().float() for value in inputs(40))
    delta = (1e3 * delta).requires_grad_()
    y, last = head_scan(x, delta, A, B, C, D, torch.ones(2, 3, 4, 5))
    expected, _ = head_scan_ref(x, delta, A, B, C, D, torch.ones(2, 3, 4, 5))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    (y.sum() + last.sum()).backward()
    assert delta.grad.isfinite().all()


def test_half_precision_is_computed_in_full():
    values = [value.detach().bfloat16() for value in inputs(7)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, last = head_scan(*values)
    expected, state = head_scan_ref(*(value.float() for value in values))
    assert y.dtype == torch.bfloat16 and last.dtype == torch.float32
    torch.testing.assert_close(y, expected.bfloat16())
    torch.testing.assert_close(last, state)


@pytest.fixture
def mixer() -> Mamba2:
    torch.manual_seed(0)
    return Mamba2(24, state_size=5)  # 3 heads of 16


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_window_then_window_then_steps(mixer, cut):
    """Cuts shorter than the convolution's width are the hard case: its past is part padding, part tokens."""
    v = torch.randn(2, 12, 24)
    full, last = mixer(v)
    first, state = mixer(v[:, :cut])
    second, state = mixer(v[:, cut : cut + 3], state)
    outputs = [first, second]
    for t in range(cut + 3, 12):
        out, state = mixer.step(v[:, t], state)
        outputs.append(out[:, None])
    torch.testing.assert_close(torch.cat(outputs, 1), full, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.conv, last.conv, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.ssm, last.ssm, rtol=1e-5, atol=1e-6)


def test_steps_from_nothing_equal_the_window(mixer):
    v = torch.randn(3, 6, 24)
    full, _ = mixer(v)
    state = mixer.initial_state(3, v)
    for t in range(6):
        out, state = mixer.step(v[:, t], state)
        torch.testing.assert_close(out, full[:, t], rtol=1e-5, atol=1e-6)


def test_whole_mixer_against_its_definition(mixer):
    """Written out once more, per token and head, with torch's own convolution."""
    v = torch.randn(2, 6, 24)
    x, B, C, z, dt = mixer.in_proj(v).split([48, 5, 5, 48, 3], dim=-1)
    mixed = torch.cat([x, B, C], -1).transpose(1, 2)
    mixed = F.conv1d(F.pad(mixed, (3, 0)), mixer.conv_weight[:, None], mixer.conv_bias, groups=58)
    x, B, C = F.silu(mixed).transpose(1, 2).split([48, 5, 5], dim=-1)
    delta, A = F.softplus(dt + mixer.dt_bias), -mixer.A_log.exp()
    y = torch.zeros(2, 6, 48)
    for head in range(3):
        mine, h = slice(16 * head, 16 * head + 16), torch.zeros(2, 16, 5)
        for t in range(6):
            step = delta[:, t, head, None, None]
            h = torch.exp(step * A[head]) * h + step * x[:, t, mine, None] * B[:, t, None]
            y[:, t, mine] = (h * C[:, t, None]).sum(-1) + mixer.D[head] * x[:, t, mine]
    torch.testing.assert_close(mixer(v)[0], mixer.out_proj(y * F.silu(z)), rtol=1e-5, atol=1e-6)


def test_how_it_begins_and_what_is_decayed():
    torch.manual_seed(0)
    mixer = Mamba2(512)
    assert mixer.heads == 16 and Mamba2(12).heads * 8 == 24  # heads of 64, or of what divides the width
    step = F.softplus(mixer.dt_bias)
    assert step.min() >= 1e-3 * 0.999 and step.max() <= 1e-1 * 1.001
    assert ((mixer.A <= -1) & (mixer.A >= -16)).all() and torch.equal(mixer.D, torch.ones(16))
    optimizer = adamw(mixer.parameters(), lr=0.1, weight_decay=0.5)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] > 0 for p in g["params"]}
    assert decayed == {id(p) for p in (mixer.in_proj.weight, mixer.out_proj.weight, mixer.conv_weight)}


def test_readout_is_what_the_scan_used(mixer, monkeypatch):
    v, seen = torch.randn(2, 6, 24), {}
    plain = mamba2.head_scan

    def look(x, delta, A, *rest):
        seen.update(delta=delta, A=A)
        return plain(x, delta, A, *rest)

    monkeypatch.setattr(mamba2, "head_scan", look)
    mixer(v)
    told = mixer.readout(v)
    torch.testing.assert_close(told["delta"], seen["delta"])
    torch.testing.assert_close(told["A_bar"], torch.exp(seen["delta"] * seen["A"])[..., None])
