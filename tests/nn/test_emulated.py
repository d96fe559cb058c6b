"""Kernels by hand, in CUDA C++, without a GPU: what they compute, and that no barrier, wait or alignment is missing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from nn import emulated
from nn import test_mamba2_cuda as heads
from nn.test_adamw_cuda import SHAPES, draw, made
from nn.test_mamba_cuda import counted, gradients  # noqa: F401
from nn.test_mamba_triton import NAMES, error, inputs, reference

from qhyer.nn import adamw_cuda, mamba2_cuda, mamba_cuda, mamba_triton, nvrtc

pytestmark = [
    pytest.mark.skipif(emulated.COMPILER is None, reason="no g++ to compile them with"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are on the GPU, where the kernels themselves run"),
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(nvrtc, "load", emulated.load)
    monkeypatch.setattr(mamba_cuda, "suits", mamba_cuda.fits)
    monkeypatch.setattr(emulated, "order", 0)


# ------------------------------------------------------------------------------------------------------------ the scan


@pytest.mark.parametrize(
    "length, width, size, dtype, fused",
    [
        (1, 64, 16, torch.float32, True),
        (2, 64, 4, torch.bfloat16, True),
        (9, 128, 8, torch.float32, False),
        (17, 192, 16, torch.bfloat16, True),  # two meetings, and the last stage of one step
        (5, 1024, 4, torch.bfloat16, False),  # two blocks for the channels, whose sums are added up
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (7, 128, 16, torch.bfloat16, False),
                (12, 448, 16, torch.float32, True),
                (60, 512, 16, torch.bfloat16, True),
                (60, 64, 8, torch.float32, True),
                (120, 64, 16, torch.bfloat16, True),
                (257, 64, 16, torch.float32, True),
            ]
        ),
    ],
)
def test_scan_is_the_reference(length, width, size, dtype, fused, counted, monkeypatch):  # noqa: F811
    values = inputs(length, width, size, fused, carried=False, dtype=dtype)
    y, grads = gradients(mamba_triton.gated_scan, values)
    assert counted == ["forward", "backward"]
    truth, truths = gradients(reference, values)
    close = 1e-4 if dtype == torch.float32 else 6e-3  # as on a GPU
    assert error(y, truth) < close
    assert {name: e for name, e in ((n, error(g, truths[n])) for n, g in grads.items()) if e > close} == {}
    for order in (1, 2):
        monkeypatch.setattr(emulated, "order", order)
        again, others = gradients(mamba_triton.gated_scan, values)
        assert torch.equal(y, again) and all(torch.equal(grad, others[name]) for name, grad in grads.items())


def test_the_last_state_is_the_references():
    values = inputs(11, 64, 16, fused=True, carried=False)
    B, C = (part.contiguous() for part in values["BC"][..., 3:].chunk(2, dim=-1))
    arguments = [*(values[n] for n in NAMES[:4]), B, C, *(values[n] for n in NAMES[5:])]
    _, last = mamba_triton.gated_scan(*arguments)
    assert error(last, reference(*arguments)[1]) < 1e-5


@pytest.mark.parametrize("which", ["x", "dt", "B", "C", "z"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [1, 2, 4, 8])
def test_what_fits_can_be_read(which, dtype, lead):
    """Tensors that begin anywhere in a row: those that are let in can be read in pairs, fours and 16 bytes."""
    batch, length, width, size = 2, 3, 64, 4
    given = {
        name: torch.randn(batch, length, columns + 8).to(dtype)[..., :columns]
        for name, columns in (("x", width), ("dt", width), ("B", size), ("C", size), ("z", width))
    }
    given[which] = torch.randn(batch, length, given[which].shape[-1] + 8).to(dtype)[..., lead:][
        ..., : given[which].shape[-1]
    ]
    vectors = torch.randn(width), -torch.rand(width, size), torch.randn(width)
    fits = mamba_cuda.fits(
        given["x"], vectors[1], (vectors[0], vectors[2]), tuple(given[n] for n in ("dt", "B", "C", "z"))
    )
    bytes_on = lead * given[which].element_size()
    assert fits == (bytes_on % (4 if which in "BC" else 16) == 0)
    x, dt, B, C, z = given.values()
    call = lambda: mamba_cuda.forward(x, dt, vectors[0], vectors[1], B, C, vectors[2], z, False)
    if fits:
        call()
    else:
        with pytest.raises(emulated.Failed, match="not aligned"):
            call()


def broken(monkeypatch, old: str, new: str, file: str = mamba_cuda.FILE) -> None:
    """The same kernels with something missing."""
    text = nvrtc.source(file)
    assert old in text
    monkeypatch.setattr(nvrtc, "source", lambda name: text.replace(old, new))


@pytest.mark.parametrize(
    "old, new",
    [
        ("    __syncthreads();  // B and C are there", "    // B and C are there"),  # a block that does not meet
        ('asm volatile("cp.async.wait_all;" ::: "memory");\n  __syncwarp();', "__syncwarp();"),  # nor wait for copies
    ],
    ids=["meeting", "wait"],
)
def test_what_is_missing_is_noticed(old, new, monkeypatch):
    """So that the tests above say something."""
    values = inputs(33, 192, 16, fused=True, carried=False)
    truth, truths = gradients(mamba_triton.gated_scan, values)
    broken(monkeypatch, old, new)
    differs = False
    for order in range(4):
        monkeypatch.setattr(emulated, "order", order)
        try:
            y, grads = gradients(mamba_triton.gated_scan, values)
        except emulated.Failed:
            differs = True
            continue
        differs |= not torch.equal(y, truth) or any(not torch.equal(g, truths[name]) for name, g in grads.items())
    assert differs


# ------------------------------------------------------------------------------------------------------ Mamba-2's scan


@pytest.fixture
def heads_by_hand(monkeypatch):
    monkeypatch.setattr(mamba2_cuda, "suits", mamba2_cuda.fits)


@pytest.mark.parametrize("length, number", heads.LENGTHS)
def test_heads_are_the_reference(length, number, heads_by_hand, monkeypatch):
    values = heads.example(length, number)
    heads.assert_close(values)
    found = []
    for order in range(3):
        monkeypatch.setattr(emulated, "order", order)
        found.append(heads.both(values))
    for y, grads in found[1:]:
        assert torch.equal(y, found[0][0]) and all(torch.equal(a, b) for a, b in zip(grads, found[0][1]))


def test_heads_of_large_steps_stay_finite(heads_by_hand):
    u, dt, bias, A_log, D, z = heads.example(20, 2)
    y, grads = heads.both([u, 50 * dt, bias, A_log + 5, D, z])
    assert y.isfinite().all() and all(grad.isfinite().all() for grad in grads)
    truth, _ = heads.reference([u, 50 * dt, bias, A_log + 5, D, z])
    assert (y.float() - truth).norm() < 4e-3 * truth.norm()


@pytest.mark.parametrize(
    "old, new",
    [
        ("  __syncthreads();\n  const bool some", "  const bool some"),  # what a block reads is there
        ("seen.skip[warp] = dskip;\n  __syncthreads();", "seen.skip[warp] = dskip;"),  # as is what passed the gate
        ("  __syncthreads();\n  if (warp) return;", "  if (warp) return;"),  # and the sums
    ],
    ids=["begin", "middle", "end"],
)
def test_what_is_missing_among_heads_is_noticed(old, new, heads_by_hand, monkeypatch):
    values = heads.example(59, 1)
    y, grads = heads.both(values)
    broken(monkeypatch, old, new, mamba2_cuda.FILE)
    differs = False
    for order in range(4):
        monkeypatch.setattr(emulated, "order", order)
        try:
            other, others = heads.both(values)
        except emulated.Failed:
            differs = True
            continue
        differs |= not torch.equal(y, other) or any(not torch.equal(a, b) for a, b in zip(grads, others))
    assert differs


# --------------------------------------------------------------------------------------------------------------- AdamW


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("copies", [1, 9])  # of the shapes: 63 tensors are more than one of these tables holds
def test_steps_are_torchs(clip, copies):
    shapes = [(1,), (3,), (2049,), (2, 2052), (5, 3), (4096,), (7,)] if copies > 1 else SHAPES
    (ours, optimizer), (theirs, reference_) = (made("cpu", shapes * copies) for _ in range(2))
    step = adamw_cuda.Step(optimizer, clip)
    for number in range(4):
        for parameters in (ours, theirs):
            draw(parameters, number)
        if number == 2:
            ours[1].grad = theirs[1].grad = None
        norm = torch.nn.utils.get_total_norm([p.grad for p in ours if p.grad is not None])
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        reference_.step()
        if number == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(ours, clip)
            optimizer.step()
            continue
        emulated.order = number
        found = step.norm()
        torch.testing.assert_close(found, norm, rtol=1e-5, atol=0)
        assert torch.equal(step.norm(), found)
        step.step(found)
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
        assert not step.done.any()
    for mine, other in zip(ours, theirs):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(optimizer.state[mine][name], reference_.state[other][name], rtol=1e-5, atol=1e-7)
