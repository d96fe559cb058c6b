"""Heads read at their own tokens, against a product at all of them; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from qhyer.nn import heads_triton
from qhyer.nn.heads_triton import fits, read_heads

device = "cuda" if torch.cuda.is_available() else "cpu"
CUT = 2**-7 if device == "cpu" else 2**-8  # of bfloat16: the interpreter cuts off where a GPU rounds
PLACES = [(3, 0, 1), (4, 1, 2), (2, 0, 0)]  # per step, where the state is, where the action is read
PRUNED = [(per_step - 1, *where) for per_step, *where in PLACES]  # the outputs at actions left out
LAYOUTS = [(places, whole) for whole in (True, False) for places in PLACES] + [(places, True) for places in PRUNED]
SIZES = [(1, 1, 16, 1), (3, 4, 48, 5), (7, 3, 260, 2), (1, 2, 20, 32)]  # windows, steps, width, numbers


def inputs(batch: int, steps: int, width: int, outputs: int, places: tuple[int, int, int], whole: bool):
    torch.manual_seed(batch * width)
    h = torch.randn(batch, steps * places[0] - (not whole), width).to(device).requires_grad_()
    return h, nn.Linear(width, outputs).to(device), nn.Linear(width, 1).to(device)


def plain(h: Tensor, action: nn.Linear, q: nn.Linear | None, per_step: int, state_at: int, action_from: int):
    """In h's dtype, as under autocast, but for the results."""

    def at(head: nn.Linear, first: int) -> Tensor:
        weight = head.weight.to(h.dtype).float()
        return F.linear(h[:, first::per_step].float(), weight, head.bias)

    return None if q is None else at(q, state_at).squeeze(-1), at(action, action_from)


def gradients(outputs, h: Tensor, *heads: nn.Linear | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    loss = sum((torch.randn(o.shape, generator=generator).to(device) * o).sum() for o in outputs if o is not None)
    by = [h, *(p for head in heads if head is not None for p in head.parameters())]
    return list(torch.autograd.grad(loss, by))


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1.0))


def check(h: Tensor, action: nn.Linear, q: nn.Linear | None, places, tolerance: float = 1e-5) -> None:
    assert fits(h, action, *places)
    ours, theirs = read_heads(h, action, q, *places), plain(h, action, q, *places)
    for a, b in zip(ours, theirs):
        assert (a is None) == (b is None)
        assert a is None or close(a, b, tolerance)
    for a, b in zip(gradients(ours, h, action, q), gradients(theirs, h, action, q)):
        assert close(a, b, tolerance)


@pytest.mark.parametrize("places, whole", LAYOUTS)
@pytest.mark.parametrize("batch, steps, width, outputs", SIZES)
def test_heads_equal_plain_torch(batch, steps, width, outputs, places, whole, monkeypatch):
    monkeypatch.setattr(heads_triton, "PROGRAMS", 2)  # programs of several steps, the last not full
    h, action, q = inputs(batch, steps, width, outputs, places, whole)
    check(h, action, q, places)
    check(h, action, None, places)


def test_heads_in_bfloat16():
    h, action, q = inputs(3, 4, 48, 5, PLACES[0], False)
    check(h.detach().bfloat16().requires_grad_(), action, q, PLACES[0], 2 * CUT)


def test_what_does_not_fit():
    h, action, _ = inputs(2, 3, 16, 4, PLACES[0], False)
    assert fits(h, action, *PLACES[0]) and fits(h[:, :-2], action, *PLACES[0])
    assert not fits(h[:, :-1], action, *PLACES[0])  # a state without its Q
    assert not fits(h[:0], action, *PLACES[0])
    assert not fits(h, nn.Linear(16, 33), *PLACES[0])


@pytest.mark.parametrize("used", [0, 1])
def test_either_output_may_be_left_unused(used):
    h, action, q = inputs(2, 3, 16, 4, PLACES[0], False)
    ours, theirs = (f(h, action, q, *PLACES[0])[used] for f in (read_heads, plain))
    found = torch.autograd.grad(ours.sum(), [h, action.weight, q.weight])
    expected = torch.autograd.grad(theirs.sum(), [h, action.weight, q.weight], allow_unused=True)
    for a, b in zip(found, expected):
        assert not a.any() if b is None else close(a, b, 1e-5)


def test_same_inputs_same_bits():
    h, action, q = inputs(7, 5, 48, 5, PLACES[0], False)

    def run() -> list[Tensor]:
        outputs = read_heads(h, action, q, *PLACES[0])
        return [*outputs, *gradients(outputs, h, action, q)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run()))


def test_operators_are_well_formed():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    h, action, q = inputs(2, 3, 16, 4, PLACES[0], False)
    values = (h, action.weight, action.bias, q.weight, q.bias, *PLACES[0])
    torch.library.opcheck(heads_triton.heads, values, test_utils=checks)
    torch.library.opcheck(heads_triton.heads, (*values[:3], None, None, *PLACES[0]), test_utils=checks)
    saved = [t.detach() for t in (h, action.weight, q.weight)]
    grads = torch.randn(2, 3, 4, device=device), torch.randn(2, 3, device=device)
    torch.library.opcheck(heads_triton.heads_backward, (*saved, *grads, *PLACES[0]), test_utils=checks)
