"""The attention kernels against the formula: under Triton's interpreter without a CUDA device, compiled with one."""

from __future__ import annotations

import pytest
import torch

from qhyer.nn.attention import causal_attention_ref

pytest.importorskip("triton")
from qhyer.nn.rows_triton import dropping

kernels = pytest.importorskip("qhyer.nn.attention_triton")
short_attention = kernels.short_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(batch: int, length: int, heads: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, length, 3 * heads * width), (3 * heads * width,), (batch, length, heads * width)
    qkv, bias, do = (torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes)
    return qkv.to(dtype).requires_grad_(), bias.requires_grad_(), do.to(dtype)


def reference(qkv: torch.Tensor, bias: torch.Tensor | None, heads: int) -> torch.Tensor:
    batch, length, packed = qkv.shape
    x = qkv if bias is None else qkv + bias
    q, k, v = x.view(batch, length, 3, heads, packed // (3 * heads)).permute(2, 0, 3, 1, 4)
    return causal_attention_ref(q, k, v).transpose(1, 2).reshape(batch, length, -1)


def close(got: torch.Tensor, want: torch.Tensor, relative: float) -> None:
    assert got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-6 / relative)
    assert error <= relative, f"relative error {error:.1e}"


def number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize(
    ("length", "heads", "width"),
    [(1, 2, 16), (2, 1, 8), (7, 3, 8), (33, 2, 20), (60, 2, 64), (120, 1, 16), (128, 1, 8)],
)
def test_values_and_gradients(length, heads, width):
    qkv, bias, do = make(2, length, heads, width)
    got, want = short_attention(qkv, bias, heads, 0.0, None), reference(qkv, bias, heads)
    close(got, want, 1e-5)
    dqkv, dbias = torch.autograd.grad(got, (qkv, bias), do)
    want_dqkv, want_dbias = torch.autograd.grad(want, (qkv, bias), do)
    for part in range(3):  # if one of them were wrong, the others' size might hide it
        close(dqkv.unflatten(-1, (3, -1))[..., part, :], want_dqkv.unflatten(-1, (3, -1))[..., part, :], 1e-5)
    (query, key, value), (want_query, want_key, want_value) = dbias.view(3, -1), want_dbias.view(3, -1)
    close(query, want_query, 1e-5)
    close(value, want_value, 1e-5)
    assert (key == 0.0).all() and want_key.abs().max() < 1e-5  # the softmax does not see it


def test_without_a_bias():
    qkv, _, do = make(2, 9, 2, 16)
    got, want = short_attention(qkv, None, 2, 0.0, None), reference(qkv, None, 2)
    close(got, want, 1e-5)
    close(torch.autograd.grad(got, qkv, do)[0], torch.autograd.grad(want, qkv, do)[0], 1e-5)


@pytest.mark.parametrize("size", [1e3, 1e5])
def test_large_scores(size):
    """Of up to 1e12, as a run has that diverges: a row's greatest weight is one, however its product was rounded."""
    qkv, _, do = make(2, 9, 2, 16)
    with torch.no_grad():
        qkv[..., :64] *= size
    got, want = short_attention(qkv, None, 2, 0.0, None), reference(qkv, None, 2)
    close(got, want, 1e-5)
    assert torch.autograd.grad(got, qkv, do)[0].isfinite().all()


def test_views():
    """Rows may lie apart, and so may those of the gradient that comes in."""
    qkv, bias, do = make(3, 7, 2, 16)
    wide = torch.zeros(3, 9, 128, device=DEVICE)
    view = wide[:, 1:8, 16:112]
    view.copy_(qkv.detach())
    view.requires_grad_()
    spread = torch.zeros(3, 7, 40, device=DEVICE)[..., 4:36].copy_(do)
    got, want = short_attention(view, bias, 2, 0.0, None), short_attention(qkv, bias, 2, 0.0, None)
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got, (view, bias), spread), torch.autograd.grad(want, (qkv, bias), do)):
        assert torch.equal(a, b)
    columns = qkv.detach().mT.contiguous().mT.requires_grad_()  # not even side by side
    assert torch.equal(short_attention(columns, bias, 2, 0.0, None), want)


# Products of bfloat16 are wrong in Triton's interpreter: it multiplies the bits as integers.
@pytest.mark.parametrize("dtype", [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16])
def test_low_precision_within_rounding(dtype):
    qkv, bias, do = make(2, 33, 2, 16, dtype)
    exact = qkv.detach().float().requires_grad_()
    got, want = short_attention(qkv, bias, 2, 0.0, None), reference(exact, bias, 2)
    assert got.dtype == dtype
    close(got, want, 1e-2)
    (dqkv, dbias), exacts = (
        torch.autograd.grad(got, (qkv, bias), do),
        torch.autograd.grad(want, (exact, bias), do.float()),
    )
    assert dqkv.dtype == dtype and dbias.dtype == torch.float32
    close(dqkv, exacts[0], 1e-2)
    close(dbias, exacts[1], 1e-2)


def test_no_later_step_is_seen():
    qkv, bias, do = make(1, 20, 2, 16)
    before = short_attention(qkv, bias, 2, 0.5, number(3))
    changed = qkv.detach().clone()
    changed[:, 12:] += 1.0
    after = short_attention(changed, bias, 2, 0.5, number(3))
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.equal(before[:, 12:], after[:, 12:])
    do[:, 12:] = 0.0
    assert torch.autograd.grad(before, qkv, do)[0][:, 12:].abs().max() == 0.0


def probabilities(qkv: torch.Tensor, heads: int, drop: float, seed: torch.Tensor) -> torch.Tensor:
    """What the kernel weighs values by, (B, H, L, L): its outputs where step j's value is the j-th unit vector."""
    batch, length, packed = qkv.shape
    width = packed // (3 * heads)
    assert length <= width
    parts = qkv.detach().view(batch, length, 3, heads, width).clone()
    parts[:, :, 2] = torch.eye(length, width, device=DEVICE)[:, None]
    o = short_attention(parts.view(batch, length, packed), None, heads, drop, seed)
    return o.view(batch, length, heads, width).transpose(1, 2)[..., :length]


@pytest.mark.parametrize("drop", [0.0, 0.1, 0.3, 0.999999])
def test_what_is_kept_makes_up_for_what_is_not(drop):
    threshold, scale = dropping(drop)
    kept = sum(bits * 2**16 >= threshold for bits in range(-(2**15), 2**15)) / 2**16  # of all that 16 bits can be
    assert kept * scale == 1.0 and kept == pytest.approx(1.0 - drop, abs=2**-15)


def test_dropout():
    heads, drop = 3, 0.25
    qkv, bias, do = make(4, 30, heads, 32)
    whole = probabilities(qkv, heads, 0.0, number(0))
    thinned = probabilities(qkv, heads, drop, number(5))
    visible = torch.ones(30, 30, device=DEVICE).tril().bool().expand_as(whole)
    kept = thinned[visible] != 0.0
    assert abs(kept.float().mean().item() - (1.0 - drop)) < 0.025  # 5580 draws: 0.006 is one standard deviation
    torch.testing.assert_close(thinned[visible][kept], whole[visible][kept] / (1.0 - drop), rtol=1e-5, atol=1e-7)
    assert (thinned[~visible] == 0.0).all()

    masks = (thinned != 0.0).flatten(0, 1)  # another one for every sequence and head, and no two rows alike
    assert len(torch.unique(masks.flatten(1), dim=0)) == len(masks)
    rows = masks[:, 20:, :20].flatten(0, 1)
    assert abs((rows.float() - (1 - drop)).T.cov().fill_diagonal_(0.0)).max() < 0.01 * rows.shape[0]
    assert len(torch.unique(rows, dim=0)) > 0.95 * len(rows)

    assert torch.equal(thinned, probabilities(qkv, heads, drop, number(5)))
    assert not torch.equal(thinned, probabilities(qkv, heads, drop, number(6)))
    assert not torch.equal(thinned, probabilities(qkv, heads, drop, number(5 + 2**32)))

    # Backward drops what forward dropped: the gradients are those of attention with that mask.
    batch, length, packed = qkv.shape
    q, k, v = (qkv + bias).view(batch, length, 3, heads, packed // (3 * heads)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    want = (scores.softmax(-1) * (thinned != 0.0) / (1.0 - drop)) @ v
    want = want.transpose(1, 2).reshape(batch, length, -1)
    got = short_attention(qkv, bias, heads, drop, number(5))
    close(got, want, 1e-5)
    for a, b in zip(torch.autograd.grad(got, (qkv, bias), do), torch.autograd.grad(want, (qkv, bias), do)):
        close(a, b, 1e-5)


def test_same_inputs_same_bits():
    qkv, bias, do = make(3, 17, 2, 16)
    runs = []
    for _ in range(2):
        o = short_attention(qkv, bias, 2, 0.1, number(1))
        runs.append((o, *torch.autograd.grad(o, (qkv, bias), do)))
    for a, b in zip(*runs):
        assert torch.equal(a, b)


def test_too_long():
    qkv, bias, _ = make(1, 129, 1, 8)
    with pytest.raises(AssertionError, match="129 steps"):
        short_attention(qkv, bias, 1, 0.0, None)


def test_operator_contract():
    qkv, bias, _ = make(2, 5, 2, 8)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(short_attention, (qkv, bias, 2, 0.1, number(1)), test_utils=tests)
    torch.library.opcheck(short_attention, (qkv, None, 2, 0.0, None), test_utils=tests)
