"""The fused training pass is the decoder, in value and gradient."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qhyer.nn import hybrid_triton
from qhyer.nn.hybrid import HybridDecoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(backbone: str, dropout: float = 0.0) -> HybridDecoder:
    torch.manual_seed(0)
    decoder = HybridDecoder(32, 2, 2, dropout, backbone, 4)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return decoder.to(DEVICE)


def outcome(decoder: HybridDecoder, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    decoder.zero_grad()
    x = x.clone().requires_grad_()
    h, _ = decoder(x)
    weights = torch.randn(h.shape, generator=torch.Generator().manual_seed(1)).to(h)
    (weights * h).sum().backward()
    return h.detach(), {"x": x.grad, **{name: p.grad for name, p in decoder.named_parameters()}}


@pytest.mark.parametrize("backbone", ["hybrid", "attention", "mamba"])
@pytest.mark.parametrize("length", [1, 7])
def test_fused_pass_is_the_plain_one(backbone, length, monkeypatch):
    decoder, x = make(backbone), torch.randn(2, length, 32, device=DEVICE)
    monkeypatch.setenv("QHYER_TRITON", "0")
    h_ref, grads_ref = outcome(decoder, x)
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    h, grads = outcome(decoder, x)
    torch.testing.assert_close(h, h_ref, rtol=1e-5, atol=1e-5)
    assert grads.keys() == grads_ref.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, grads_ref[name], rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


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


def test_half_precision_products_stay_close(monkeypatch):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16
    decoder, x = make("hybrid"), torch.randn(2, 7, 32, device=DEVICE)
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
