"""What lies between networks and losses by kernels against plain torch; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from qhyer import losses
from qhyer.nn import losses_triton
from qhyer.nn.losses_triton import actor_losses, fits, normal, normalized

device = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 1, 1), (3, 7, 5), (5, 20, 2), (2, 3, 33)]  # windows, steps, numbers of an action
RATE, FLOOR, TAU = 0.01, 1e-3, 0.9


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def mask(kind: str, *shape: int) -> Tensor:
    if kind == "none":
        return torch.zeros(shape, device=device)
    some = random(*shape, seed=9) > -0.5
    return some if kind == "bool" else some.float()


@pytest.fixture(autouse=True)
def several_rounds(monkeypatch):
    monkeypatch.setattr(losses_triton, "TILE", 32)
    monkeypatch.setattr(losses_triton, "FINISH", 4)
    monkeypatch.setattr(losses_triton, "SCALE_TILE", 16)


# ------------------------------------------------------------------------------------------------------ the actor


def plain_actor(mean: Tensor, actions: Tensor, q_hat: Tensor, q: Tensor, valid: Tensor, tau: float):
    """As in `QHyer.actor_loss`."""
    share, u = losses.shares(valid), q - q_hat
    bc = losses.masked_mean(losses.gaussian_nll(mean, actions), share)
    error = losses.masked_mean((mean - actions).square().mean(-1), share)
    regression = losses.masked_mean(losses.expectile(u, tau), share)
    return bc, regression, (error, losses.masked_mean(q, share), losses.masked_mean(-u, share))


def window(batch: int, steps: int, numbers: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, actions = random(batch, steps, numbers), random(batch, steps, numbers, seed=1)
    q_hat, q = random(batch, steps, seed=2), random(batch, steps, seed=3)
    q[:, -1] = q_hat[:, -1]  # u = 0
    return mean.requires_grad_(), actions, q_hat.requires_grad_(), q


def check(values: tuple[Tensor, ...], valid: Tensor) -> None:
    (*ours, beside), (*theirs, expected) = (f(*values, valid, TAU) for f in (actor_losses, plain_actor))
    for a, b in zip([*ours, *beside], [*theirs, *expected]):
        assert a.dtype == torch.float32 and a.shape == ()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not any(number.requires_grad for number in beside)
    by = values[0], values[2]
    for weights in [(1.0, 1.0), (0.3, 2.5)]:
        found, wanted = (torch.autograd.grad(weights[0] * bc + weights[1] * q, by, retain_graph=True)
                         for bc, q in (ours, theirs))  # fmt: skip
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["bool", "float", "none"])
@pytest.mark.parametrize("batch, steps, numbers", SIZES)
def test_the_actors_losses_equal_plain_torch(batch, steps, numbers, kind):
    check(window(batch, steps, numbers), mask(kind, batch, steps))


def test_tensors_that_are_not_contiguous():
    mean, q_hat = random(7, 3, 5).transpose(0, 1).requires_grad_(), random(3, 7, 2)[..., 0].requires_grad_()
    q, actions = random(3, 1, seed=4).expand(3, 7), random(3, 7, 9, seed=5)[..., :5]
    check((mean, actions, q_hat, q), mask("bool", 7, 3).t())


@pytest.mark.parametrize("used", [0, 1])
def test_either_loss_may_be_left_unused(used):
    values = window(3, 4, 2)
    for name, value, gradient in zip("bq", values[::2], torch.autograd.grad(
        actor_losses(*values, mask("float", 3, 4), TAU)[used], values[::2]
    )):  # fmt: skip
        assert gradient.shape == value.shape and bool(gradient.any()) == (name == "bq"[used])


def test_same_inputs_same_bits():
    values, valid = window(9, 20, 5), mask("float", 9, 20)

    def run() -> list[Tensor]:
        bc, regression, beside = actor_losses(*values, valid, TAU)
        return [bc, regression, *beside, *torch.autograd.grad(bc + regression, values[::2])]

    assert all(torch.equal(a, b) for a, b in zip(run(), run()))


# ------------------------------------------------------------------------------------------------- the scale of Q


@pytest.mark.parametrize("seen", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["bool", "float", "none"])
def test_the_scale_of_q(kind, seen):
    """As in `QHyer.q_values`, the first batch and later ones."""
    q, valid = 5.0 * random(3, 13) - 7.0, mask(kind, 3, 13)
    shift, scale, seen = (torch.tensor(x, device=device) for x in (0.7, 2.0, seen))
    rate = torch.where(seen > 0, RATE, 1.0)
    expected = scale.clone().lerp_(losses.masked_mean((q - shift).abs(), losses.shares(valid)), rate)
    ours = normalized(q, valid, shift, scale, seen, RATE, FLOOR)
    torch.testing.assert_close(scale, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, (q - shift) / (expected + FLOOR), rtol=1e-5, atol=1e-6)
    assert float(seen) == 1.0 and float(shift) == pytest.approx(0.7)


# ------------------------------------------------------------------------------------------- the density of a flow


@pytest.mark.parametrize("shape", [(1, 1), (5, 7, 3), (37, 2), (2, 3, 20)])
def test_the_density_of_a_flow(shape):
    z, log_det = random(*shape).requires_grad_(), random(*shape[:-1], seed=1).requires_grad_()
    plain = -0.5 * z.square().sum(-1) - 0.5 * shape[-1] * math.log(2 * math.pi) + log_det
    ours = normal(z, log_det)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    direction = random(*shape[:-1], seed=2)
    for f in (torch.mean, lambda x: (x * direction).sum()):  # the gradient of a mean has no memory of its own
        found, expected = (torch.autograd.grad(f(x), (z, log_det), retain_graph=True) for x in (ours, plain))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_what_does_not_fit():
    x = random(3, 4)
    assert fits(x, x) and not fits(x, x.double()) and not fits(x.bfloat16()) and not fits(x[:0])
    found = []
    torch.vmap(lambda row: found.append(fits(row)) or row)(x)
    assert found == [False]


def test_operators_are_well_formed():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    values, valid = window(3, 4, 2), mask("float", 3, 4)
    torch.library.opcheck(losses_triton.actor, (*values, valid, TAU), test_utils=checks)
    saved, one = [value.detach() for value in values], torch.ones((), device=device)
    backward = (*saved, valid, random(4), one, one, TAU)
    torch.library.opcheck(losses_triton.actor_backward, backward, test_utils=checks)
    running = (one, one.clone(), one.clone(), RATE, FLOOR)
    torch.library.opcheck(normalized, (saved[3], valid, *running), test_utils=checks)
    z, log_det = random(3, 4, 2).requires_grad_(), random(3, 4).requires_grad_()
    torch.library.opcheck(normal, (z, log_det), test_utils=checks)
    torch.library.opcheck(losses_triton.normal_backward, (z.detach(), log_det.detach()), test_utils=checks)
