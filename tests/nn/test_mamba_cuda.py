"""The scan by hand is the reference, in value and gradient; and Triton's kernels serve where it cannot."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from nn.test_mamba_triton import NAMES, error, inputs, reference

from qhyer.nn import mamba_cuda, mamba_triton, nvrtc

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
on_gpu = lambda test: gpu[0](gpu[1](test))


def gradients(function, values, lead=4):
    """Of y alone: the last state is not used in training. B and C begin after so many other numbers."""
    B, C = F.pad(values["BC"], (lead - 3, 0))[..., lead:].chunk(2, dim=-1)
    y, _ = function(*(values[n] for n in NAMES[:4]), B, C, *(values[n] for n in NAMES[5:]))
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.device)
    wanted = {name: value for name, value in values.items() if value is not None}
    return y, dict(zip(wanted, torch.autograd.grad((weights * y).sum(), list(wanted.values()))))


def launches(monkeypatch, module):
    """How often the kernels by hand are launched from now on."""
    calls = []
    for name in ("forward", "backward"):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=original, n=name: (calls.append(n), f(*a))[1])
    return calls


@pytest.fixture
def counted(monkeypatch):
    return launches(monkeypatch, mamba_cuda)


@on_gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "length, width, size",
    [(1, 64, 16), (2, 64, 4), (7, 128, 8), (11, 192, 16), (12, 448, 16), (13, 192, 8), (24, 128, 4), (25, 64, 16),
     (60, 512, 16), (120, 1024, 16), (257, 64, 16)],
)  # fmt: skip
def test_scan_is_the_reference(length, width, size, dtype, fused, counted):
    values = inputs(length, width, size, fused, carried=False, dtype=dtype, batch=3)
    y, grads = gradients(mamba_triton.gated_scan, values)
    assert counted == ["forward", "backward"]
    truth, truths = gradients(reference, values)
    close = 1e-4 if dtype == torch.float32 else 6e-3  # as of Triton's kernels
    assert error(y, truth) < close
    assert {name: e for name, e in ((n, error(g, truths[n])) for n, g in grads.items()) if e > close} == {}


@on_gpu
def test_the_last_state_is_tritons(counted, monkeypatch):
    values = inputs(33, 128, 16, fused=True, carried=False)
    B, C = (part.contiguous() for part in values["BC"][..., 3:].chunk(2, dim=-1))
    arguments = [values[n] for n in NAMES[:4]] + [B, C] + [values[n] for n in NAMES[5:]]
    y, last = mamba_triton.gated_scan(*arguments)
    monkeypatch.setenv("QHYER_SCAN", "triton")
    y_, last_ = mamba_triton.gated_scan(*arguments)
    assert counted == ["forward"]
    assert error(y, y_) < 1e-5 and error(last, last_) < 1e-5


@on_gpu
def test_the_same_inputs_give_the_same_bits():
    values = inputs(60, 512, 16, fused=True, carried=False, dtype=torch.bfloat16, batch=8)
    first, second = (gradients(mamba_triton.gated_scan, values)[1] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@on_gpu
@pytest.mark.parametrize(
    "change", [dict(width=70), dict(size=3), dict(carried=True), dict(dtype=torch.float16)], ids=lambda c: next(iter(c))
)
def test_elsewhere_tritons_kernels_serve(change, counted):
    values = inputs(**{"length": 5, "width": 64, "size": 16, "fused": True, "carried": False} | change)
    gradients(mamba_triton.gated_scan, values)
    assert counted == []


@on_gpu
def test_what_cannot_be_compiled_says_why():
    with pytest.raises(nvrtc.CompileError, match="undefined"):
        nvrtc.load('extern "C" __global__ void f() { nonsense(); }', (), torch.device("cuda", 0))


def test_a_cpu_is_not_asked():
    x = torch.zeros(2, 5, 64)
    assert not mamba_cuda.suits(x, torch.zeros(64, 16), (torch.zeros(64),), (x,))


@on_gpu
def test_what_it_cannot_read_is_tritons(counted):
    values = {k: v if v is None else v.detach() for k, v in inputs(5, 64, 16, fused=True, carried=False).items()}
    values["D"] = torch.cat([values["D"][:1], values["D"]])[1:]  # its pairs are not aligned
    gradients(mamba_triton.gated_scan, {k: v if v is None else v.requires_grad_() for k, v in values.items()})
    assert counted == []


@on_gpu
def test_pairs_that_are_not_aligned_are_tritons(counted):
    gradients(mamba_triton.gated_scan, inputs(5, 64, 16, fused=True, carried=False, dtype=torch.bfloat16), lead=3)
    assert counted == []
    gradients(mamba_triton.gated_scan, inputs(5, 64, 16, fused=True, carried=False), lead=3)  # of four bytes each
    assert counted == ["forward", "backward"]


@on_gpu
@pytest.mark.parametrize("expanded", [False, True])
def test_the_compiler_is_told_the_truth(expanded):
    """Shapes and strides that torch.compile is promised, of the kernels that serve then."""
    values = inputs(5, 64, 16, fused=True, carried=False)
    B, C = values["BC"][..., 3:].chunk(2, dim=-1)
    given = [
        v if v is None else v.detach() for v in (*(values[n] for n in NAMES[:4]), B, C, *(values[n] for n in NAMES[5:]))
    ]
    torch.library.opcheck(mamba_triton.gated_scan, given, test_utils=("test_schema", "test_faketensor"))
    dy = given[0][:1, :1, :1].expand(given[0].shape) if expanded else torch.ones_like(given[0])
    torch.library.opcheck(
        mamba_triton.gated_scan_backward, (*given, dy, None), test_utils=("test_schema", "test_faketensor")
    )
