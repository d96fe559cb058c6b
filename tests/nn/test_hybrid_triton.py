"""The fused training pass is the decoder, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from qhyer.nn import hybrid_triton
from qhyer.nn.attention_triton import short_attention
from qhyer.nn.hybrid import HybridDecoder, first_of_steps
from qhyer.nn.mamba2 import Mamba2
from qhyer.nn.mamba_triton import conv_silu, gated_scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [("hybrid", "mamba"), ("attention", "mamba"), ("mamba", "mamba"), ("hybrid", "mamba2"), ("mamba", "mamba2")]


def make(backbone: str, dropout: float = 0.0, ssm: str = "mamba") -> HybridDecoder:
    torch.manual_seed(0)
    decoder = HybridDecoder(32, 2, 2, dropout, backbone, 4, ssm)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return decoder.to(DEVICE)


def outcome(
    decoder: HybridDecoder, x: torch.Tensor, read: tuple[int, int] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    decoder.zero_grad()
    x = x.clone().requires_grad_()
    h, _ = decoder(x, read=read)
    weights = torch.randn(h.shape, generator=torch.Generator().manual_seed(1)).to(h)
    (weights * h).sum().backward()
    return h.detach(), {"x": x.grad, **{name: p.grad for name, p in decoder.named_parameters()}}


@pytest.mark.parametrize(("backbone", "ssm"), KINDS)
@pytest.mark.parametrize("length", [1, 7])
def test_fused_pass_is_the_plain_one(backbone, ssm, length, monkeypatch):
    decoder, x = make(backbone, ssm=ssm), torch.randn(2, length, 32, device=DEVICE)
    monkeypatch.setenv("QHYER_TRITON", "0")
    h_ref, grads_ref = outcome(decoder, x)
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    h, grads = outcome(decoder, x)
    torch.testing.assert_close(h, h_ref, rtol=1e-5, atol=1e-5)
    assert grads.keys() == grads_ref.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, grads_ref[name], rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("backbone", ["hybrid", "attention", "mamba"])
@pytest.mark.parametrize(("length", "read"), [(2, (3, 2)), (8, (3, 2)), (6, (3, 2)), (5, (2, 1)), (7, (4, 3))])
def test_fused_pass_where_only_some_outputs_are_read(backbone, length, read, monkeypatch):
    decoder, x = make(backbone), torch.randn(2, length, 32, device=DEVICE)
    monkeypatch.setenv("QHYER_TRITON", "0")
    h_ref, grads_ref = outcome(decoder, x, read)
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    h, grads = outcome(decoder, x, read)
    torch.testing.assert_close(h, h_ref, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h, first_of_steps(decoder(x)[0], *read), rtol=1e-5, atol=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, grads_ref[name], rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_nothing_is_computed_where_nobody_reads(monkeypatch):
    """The last block's MLP, and it alone, has the rows that are read."""
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    rows, gelu = [], hybrid_triton.bias_gelu
    monkeypatch.setattr(hybrid_triton, "bias_gelu", lambda u, bias: rows.append(len(u)) or gelu(u, bias))
    make("hybrid")(torch.randn(2, 8, 32, device=DEVICE), read=(3, 2))
    assert rows == [2 * 8, 2 * 6]


def test_windows_that_do_not_fit_take_the_plain_way(monkeypatch):
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    decoder = make("attention")
    assert hybrid_triton.fits(decoder, 128, torch.float32) and not hybrid_triton.fits(decoder, 129, torch.float32)
    assert hybrid_triton.fits(make("mamba"), 1000, torch.float32)
    wide = HybridDecoder(160, 1, 2)  # heads of 80
    assert hybrid_triton.fits(wide, 120, torch.bfloat16) and not hybrid_triton.fits(wide, 120, torch.float32)
    x = torch.randn(1, 130, 32, device=DEVICE)
    _, cache = decoder(x)
    assert cache  # only the plain way makes one


@pytest.mark.parametrize("ssm", ["mamba", "mamba2"])
def test_half_precision_products_stay_close(ssm, monkeypatch):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16
    decoder, x = make("hybrid", ssm=ssm), torch.randn(2, 7, 32, device=DEVICE)
    monkeypatch.setenv("QHYER_TRITON", "0")
    h_ref, grads_ref = outcome(decoder, x)
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    with torch.autocast(DEVICE, dtype=dtype, cache_enabled=False):
        h, grads = outcome(decoder, x)
    assert h.dtype == dtype
    assert (h.float() - h_ref).norm() / h_ref.norm() < 0.03
    for name, parameter in decoder.named_parameters():
        assert grads[name].dtype == parameter.dtype == torch.float32
    every, every_ref = (torch.cat([g.flatten().float() for g in gs.values()]) for gs in (grads, grads_ref))
    assert (every - every_ref).norm() / every_ref.norm() < 0.05


@pytest.mark.parametrize("backbone", ["hybrid", "attention", "mamba"])
def test_no_gradient_of_the_residual_stream_is_added_in_a_pass_of_its_own(backbone, monkeypatch):
    """Each seam has both: that of its norm, and that of what goes on."""
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    decoder, x = make(backbone), torch.randn(2, 7, 32, device=DEVICE, requires_grad=True)
    added: list[torch.Size] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
                added.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    y = decoder(x)[0]
    with Noted():
        y.backward(torch.randn_like(y))
    assert x.grad is not None and not [shape for shape in added if shape.numel() >= x.numel()]


def test_dropout_draws_from_torch_s_generator(monkeypatch):
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    decoder, x = make("hybrid", dropout=0.3).train(), torch.randn(2, 7, 32, device=DEVICE)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(decoder(x)[0].detach())
    assert torch.equal(results[0], results[1]) and not torch.allclose(results[0], results[2])
    still = decoder.eval()(x)[0]
    monkeypatch.setenv("QHYER_TRITON", "0")
    torch.testing.assert_close(still, decoder(x)[0], rtol=1e-5, atol=1e-5)


def composed(block, h, batch, seed, drop):
    """The branches from operations that know their own gradients, glued by autograd."""
    outputs = []
    if block.attention is not None:
        qkv = (h @ block.attention.qkv.weight.to(h.dtype).t()).view(batch, -1, 3 * h.shape[1])
        o = short_attention(qkv, block.attention.qkv.bias, block.attention.heads, drop, seed)
        outputs.append(o.flatten(0, 1) @ block.attention.out.weight.to(h.dtype).t())
    mamba = block.mamba
    if isinstance(
        mamba, Mamba2
    ):  # itself, in float32: the sizes of heads and states are what the kernels must get right
        outputs.append(mamba(h.float().view(batch, -1, h.shape[1]))[0].flatten(0, 1).to(h.dtype))
    elif mamba is not None:
        x, z = (h @ mamba.in_proj.weight.to(h.dtype).t()).view(batch, -1, 2 * mamba.inner).chunk(2, dim=-1)
        x = conv_silu(x, mamba.conv_weight, mamba.conv_bias, 0)
        sizes = [mamba.rank, mamba.state_size, mamba.state_size]
        dt, B, C = (x @ mamba.x_proj.weight.to(h.dtype).t()).split(sizes, dim=-1)
        dt = dt @ mamba.dt_proj.weight.to(h.dtype).t()
        y, _ = gated_scan(x, dt, mamba.dt_proj.bias, mamba.A, B, C, mamba.D, z, None)
        outputs.append(y.flatten(0, 1) @ mamba.out_proj.weight.to(h.dtype).t())
    return outputs


def odd_block(backbone, ssm="mamba"):
    torch.manual_seed(0)
    decoder = HybridDecoder(24, 1, 3, 0.0, backbone, 5, ssm).to(DEVICE)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return decoder, decoder.blocks[0]


@pytest.mark.parametrize(("backbone", "ssm"), KINDS)
@pytest.mark.parametrize(("drop", "dtype"), [(0.0, torch.float32), (0.3, torch.float32), (0.3, torch.float16)])
def test_branches_are_their_parts(backbone, ssm, drop, dtype):
    """Sizes that are no powers of two; dropout, too, since both draw by the same seed."""
    decoder, block = odd_block(backbone, ssm)
    h = torch.randn(3 * 5, 24, device=DEVICE).to(dtype).requires_grad_()
    seed = torch.tensor([7], device=DEVICE)
    weights = hybrid_triton._Weights([block], decoder, dtype)
    parameters = {
        n: p for n, p in block.named_parameters() if n.startswith(("attention", "mamba")) and n != "attention.out.bias"
    }
    got = [y for y in hybrid_triton._branches(block, h, weights, 0, 3, seed, drop) if y is not None]
    want = composed(block, h, 3, seed, drop)
    grads = [torch.randn_like(y) for y in want]
    rounding = 1e-5 if dtype == torch.float32 else 4e-3
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.dtype == dtype and (a - b).norm() <= rounding * b.norm()
    found, wanted = (torch.autograd.grad(ys, [h, *parameters.values()], grads) for ys in (got, want))
    for name, a, b in zip(["h", *parameters], found, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert (a - b).norm() <= rounding * b.norm().clamp_min(1e-3), name


def test_one_output_alone_has_a_gradient():
    decoder, block = odd_block("hybrid")
    h, seed = torch.randn(3 * 5, 24, device=DEVICE).requires_grad_(), torch.tensor([7], device=DEVICE)
    weights = hybrid_triton._Weights([block], decoder, torch.float32)
    for i in range(2):
        got = hybrid_triton._branches(block, h, weights, 0, 3, seed, 0.0)[i]
        want = composed(block, h, 3, seed, 0.0)[i]
        grad = torch.randn_like(want)
        torch.testing.assert_close(*(torch.autograd.grad(y, h, grad)[0] for y in (got, want)), rtol=1e-4, atol=1e-5)


def test_the_same_inputs_give_the_same_bits(monkeypatch):
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    decoder, x = make("hybrid"), torch.randn(2, 7, 32, device=DEVICE)
    (_, one), (_, two) = outcome(decoder, x), outcome(decoder, x)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("backbone", "ssm"), [pytest.param("hybrid", "mamba", marks=pytest.mark.slow), *KINDS[1:3], KINDS[4]]
)
def test_operator_contract(backbone, ssm):
    decoder, block = odd_block(backbone, ssm)
    called = {}

    def keep(*arguments):
        called["with"] = arguments
        return branches(*arguments)

    branches = hybrid_triton.branches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_triton, "branches", keep)
        h = torch.randn(3 * 5, 24, device=DEVICE).requires_grad_()
        weights = hybrid_triton._Weights([block], decoder, torch.float32)
        hybrid_triton._branches(block, h, weights, 0, 3, torch.tensor([7], device=DEVICE), 0.1)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(branches, called["with"], test_utils=tests)


@pytest.mark.slow
@pytest.mark.parametrize(("read", "ssm"), [(None, "mamba"), ((2, 1), "mamba"), ((2, 1), "mamba2")])
def test_the_compiler_can_follow(read, ssm, monkeypatch):
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    decoder, x = make("hybrid", dropout=0.1, ssm=ssm).train(), torch.randn(2, 7, 32, device=DEVICE)

    def loss(x):
        return decoder(x, read=read)[0].square().sum()

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, dynamic=False, backend="aot_eager")):
        decoder.zero_grad()
        torch.manual_seed(0)
        value = function(x)
        value.backward()
        found.append([value.detach(), *(p.grad for p in decoder.parameters())])
    for value, followed in zip(*found, strict=True):
        torch.testing.assert_close(followed, value)
