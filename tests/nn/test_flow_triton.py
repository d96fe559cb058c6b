"""The kernels of the flow and its encoder against plain torch; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from qhyer.nn import flow_triton
from qhyer.nn.flow import ConditionalRealNVP, SAEncoder
from qhyer.nn.flow_triton import flow_forward, norm_silu

device = "cuda" if torch.cuda.is_available() else "cpu"
CONTEXT = 6
SIZES = [(2, 1, 16, 1), (2, 33, 48, 3), (3, 7, 48, 2), (5, 33, 16, 3), (13, 7, 48, 2), (13, 33, 16, 1), (2, 7, 128, 2)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def with_kernels(monkeypatch):
    """with_kernels(True) or (False): what runs from here on."""

    def choose(use: bool) -> None:
        monkeypatch.setenv("QHYER_TRITON", ("1" if device == "cuda" else "interpret") if use else "0")

    choose(True)
    return choose


def make(dim: int, channels: int, blocks: int) -> ConditionalRealNVP:
    """A flow whose every parameter matters: at its initialisation s and t are zero."""
    generator = torch.Generator().manual_seed(dim * channels + blocks)
    flow = ConditionalRealNVP(dim, CONTEXT, blocks, channels)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return flow.to(device)


def inputs(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + dim)
    return tuple(torch.randn(rows, size, generator=generator).to(device).requires_grad_() for size in (dim, CONTEXT))


def gradients(outputs: tuple[Tensor, ...], by: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a random projection of the outputs."""
    generator = torch.Generator().manual_seed(5)
    loss = sum((torch.randn(o.shape, generator=generator).to(o) * o).sum() for o in outputs)
    return dict(zip(by, torch.autograd.grad(loss, list(by.values()))))


def run(flow: ConditionalRealNVP, x: Tensor, context: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    outputs = flow(x, context)
    return outputs, gradients(outputs, {"x": x, "context": context, **dict(flow.named_parameters())})


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    assert ours.shape == theirs.shape
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1.0))


@pytest.mark.parametrize("dim, rows, channels, blocks", SIZES)
def test_flow_equals_plain_torch(dim, rows, channels, blocks, with_kernels, monkeypatch):
    monkeypatch.setattr(flow_triton, "PROGRAMS", 2)  # programs of several steps, the last not full
    flow = make(dim, channels, blocks)
    x, context = inputs(rows, dim)
    outputs, ours = run(flow, x, context)
    assert outputs[0].grad_fn is not None and all(output.dtype == torch.float32 for output in outputs)
    with_kernels(False)
    plain = run(flow, x, context)
    exact = run(copy.deepcopy(flow).double(), *(t.detach().double().requires_grad_() for t in (x, context)))
    for theirs, expected in (plain, exact):
        assert all(close(a, b, 1e-5) for a, b in zip(outputs, theirs))
        assert expected.keys() == ours.keys()
        for name, gradient in ours.items():
            assert close(gradient, expected[name], 1e-4), name


def test_flows_of_many_dimensions_take_the_plain_way(with_kernels, monkeypatch):
    monkeypatch.setattr(flow_triton, "flow_forward", lambda *_: pytest.fail("unrolled over too many dimensions"))
    flow = make(33, 16, 1)
    assert flow(*inputs(7, 33))[0].shape == (7, 33)


@pytest.mark.parametrize("used", [0, 1])
def test_either_output_may_be_left_unused(used, with_kernels):
    flow = make(3, 16, 2)
    x, context = inputs(7, 3)
    by = {"x": x, "context": context, "first": flow.couplings.first, "head": flow.couplings.head}
    ours = gradients((flow(x, context)[used],), by)
    with_kernels(False)
    for name, gradient in gradients((flow(x, context)[used],), by).items():
        assert close(ours[name], gradient, 1e-4), name


def test_without_gradient_nothing_is_stored(with_kernels, monkeypatch):
    flow = make(5, 16, 3)
    x, context = inputs(7, 5)
    stored = []
    original = flow_triton.flow_blocks

    def spy(*arguments):
        outputs = original(*arguments)
        stored.append([output.numel() for output in outputs[2:]])
        return outputs

    monkeypatch.setattr(flow_triton, "flow_blocks", spy)
    expected = flow(x, context)
    with torch.no_grad():
        outputs = flow(x, context)
    flow.requires_grad_(False)
    detached = flow(x.detach(), context.detach())
    assert all(stored[0]) and not any(stored[1]) and not any(stored[2])
    for result in (outputs, detached):
        assert all(o.grad_fn is None and not o.requires_grad for o in result)
        assert all(torch.equal(a, b) for a, b in zip(result, expected))


def test_gradients_only_where_they_are_needed(with_kernels):
    """Training: goals are data, contexts are not."""
    flow = make(3, 16, 2)
    x, context = inputs(7, 3)
    expected = run(flow, x, context)[1]
    outputs = flow(x.detach(), context)
    by = {"context": context, **dict(flow.named_parameters())}
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(outputs, by).items())


def test_leading_dimensions_and_log_prob(with_kernels):
    flow = make(3, 16, 2)
    x, context = inputs(6, 3)
    flat = flow(x, context)
    goals = x.view(2, 3, 3)
    shaped = flow(goals, context.view(2, 3, CONTEXT))
    assert shaped[0].shape == (2, 3, 3) and shaped[1].shape == (2, 3)
    assert torch.equal(shaped[0].flatten(0, 1), flat[0]) and torch.equal(shaped[1].flatten(), flat[1])
    one = goals[:, :1].expand(-1, 3, -1)  # one goal for all steps of a window
    ours = flow.log_prob(one, context.view(2, 3, CONTEXT))
    with_kernels(False)
    assert close(ours, flow.log_prob(one, context.view(2, 3, CONTEXT)), 1e-5)


def test_what_the_kernels_leave_to_the_plain_code(with_kernels):
    flow = make(1, 16, 2)
    x, context = inputs(7, 1)
    ours = flow(x, context)
    with_kernels(False)
    assert all(torch.equal(a, b) for a, b in zip(ours, flow(x, context)))
    with pytest.raises(ValueError, match="one dimension"):
        flow_forward(flow, x, context)
    with_kernels(True)
    flow = make(3, 16, 2)
    assert flow(torch.empty(0, 3, device=device), torch.empty(0, CONTEXT, device=device))[0].shape == (0, 3)
    z, _ = flow.double()(torch.zeros(2, 3, device=device).double(), torch.zeros(2, CONTEXT, device=device).double())
    assert z.dtype == torch.float64


def plain_norm_silu(u, bias, weight, norm_bias, eps, out_dtype):
    kind = torch.promote_types(u.dtype, bias.dtype)
    return F.silu(F.layer_norm(u.to(kind) + bias, u.shape[-1:], weight, norm_bias, eps)).to(out_dtype)


def norm_inputs(rows: int, width: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * width)
    shapes = dict(u=(rows, width), bias=(width,), weight=(width,), norm_bias=(width,))
    drawn = {name: torch.randn(shape, generator=generator).to(device) for name, shape in shapes.items()}
    return {name: t.to(dtype if name == "u" else torch.float32).requires_grad_() for name, t in drawn.items()}


@pytest.mark.parametrize("rows, width", [(1, 16), (7, 100), (33, 48), (9, 300), (33, 64)])
def test_norm_silu_equals_plain_torch(rows, width, monkeypatch):
    monkeypatch.setattr(flow_triton, "SILU_PROGRAMS", 1)
    by = norm_inputs(rows, width)
    double = {name: t.detach().double().requires_grad_() for name, t in by.items()}
    ours = norm_silu(**by, eps=1e-6, out_dtype=torch.float32)
    found = gradients((ours,), by)
    for reference, dtype in ((by, torch.float32), (double, torch.float64)):
        theirs = plain_norm_silu(**reference, eps=1e-6, out_dtype=dtype)
        assert close(ours, theirs, 1e-5)
        for name, gradient in gradients((theirs,), reference).items():
            assert close(found[name], gradient, 1e-4), name


@pytest.mark.parametrize("u_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_norm_silu_in_bfloat16(u_dtype, out_dtype):
    by = norm_inputs(7, 48, u_dtype)
    ours, theirs = (f(**by, eps=1e-6, out_dtype=out_dtype) for f in (norm_silu, plain_norm_silu))
    assert ours.dtype == out_dtype and close(ours, theirs, 2**-8)
    expected = gradients((theirs,), by)
    for name, gradient in gradients((ours,), by).items():
        assert gradient.dtype == by[name].dtype and close(gradient, expected[name], 2**-7), name


def test_encoder_equals_its_layers(with_kernels):
    encoder = SAEncoder(5, hidden=48, layers=2, outputs=4).to(device)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    s = torch.randn(3, 7, 2, device=device).requires_grad_()
    a = torch.randn(3, 7, 3, device=device).requires_grad_()
    by = {"s": s, "a": a, **dict(encoder.named_parameters())}
    ours = encoder(s, a)
    found = gradients((ours,), by)
    with torch.no_grad():
        assert torch.equal(encoder(s, a), ours)
    with_kernels(False)
    theirs = encoder(s, a)
    assert close(ours, theirs, 1e-5)
    for name, gradient in gradients((theirs,), by).items():
        assert close(found[name], gradient, 1e-4), name


def test_encoder_in_bfloat16(with_kernels):
    encoder = SAEncoder(5, hidden=48, layers=2, outputs=4).to(device)
    s, a = torch.randn(7, 2, device=device), torch.randn(7, 3, device=device)
    with torch.autocast(device, torch.bfloat16):
        ours = encoder(s, a)
        with_kernels(False)
        theirs = encoder(s, a)
    assert ours.dtype == theirs.dtype == torch.bfloat16 and close(ours, theirs, 2**-5)
    by = dict(encoder.named_parameters())
    expected = gradients((theirs,), by)
    for name, gradient in gradients((ours,), by).items():
        assert gradient.dtype == torch.float32 and close(gradient, expected[name], 2**-4), name


def test_same_inputs_same_bits(with_kernels):
    flow = make(5, 48, 2)
    x, context = inputs(33, 5)
    by = norm_inputs(33, 48)

    def everything() -> list[Tensor]:
        outputs, found = run(flow, x, context)
        y = norm_silu(**by, eps=1e-6, out_dtype=torch.float32)
        return [*outputs, *found.values(), y, *gradients((y,), by).values()]

    assert all(torch.equal(a, b) for a, b in zip(everything(), everything()))


def test_operators_are_well_formed(with_kernels):
    """Schemas, fake tensors and autograd registration, as torch itself checks them."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    flow = make(3, 16, 2)
    x, context = inputs(3, 3)
    c = flow.couplings
    matrices, log_det = (t.detach() for t in flow.linears())
    ctx = c.context(context).detach()
    parameters = (c.first, c.second, c.second_bias, c.norm_scale, c.norm_bias, c.head, c.head_bias)
    torch.library.opcheck(flow_triton.flow_blocks, (x, ctx, matrices, log_det, *parameters, True), test_utils=checks)
    detached = [p.detach() for p in (x, ctx, matrices, log_det, *parameters)]
    torch.library.opcheck(flow_triton.flow_blocks, (*detached, False), test_utils=checks)
    stored = flow_triton.flow_blocks(*detached, True)
    saved = (*detached[:3], *detached[4:10], stored[0], *stored[2:])
    grads = (torch.randn_like(stored[0]), torch.randn_like(stored[1]))
    torch.library.opcheck(flow_triton.flow_blocks_backward, (*saved, *grads), test_utils=checks)
    by = norm_inputs(3, 16)
    torch.library.opcheck(norm_silu, (*by.values(), 1e-6, torch.float32), test_utils=checks)
