"""Partial sums added up."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qhyer.nn.total_triton import total

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(1, 3), (7, 5, 9), (33, 130), (100, 2, 40)])
def test_total_is_the_sum_over_rows(shape):
    x = torch.randn(shape, device=DEVICE)
    torch.testing.assert_close(total(x), x.double().sum(0).float())
    assert torch.equal(total(x), total(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cuts bfloat16 off
def test_into_columns_of_a_matrix(dtype):
    """Rounded once, after the sum, and nothing beside them is touched."""
    x = torch.randn(9, 3, 5, 6, device=DEVICE)
    whole = torch.full((3, 5, 11), 7.0, device=DEVICE, dtype=dtype)
    assert total(x, whole[..., 3:9]).data_ptr() == whole[..., 3:9].data_ptr()
    assert torch.equal(whole[..., 3:9], total(x).to(dtype))
    assert (whole[..., :3] == 7.0).all() and (whole[..., 9:] == 7.0).all()
    flat = torch.empty(3, 5, 6, device=DEVICE, dtype=dtype)
    assert torch.equal(total(x, flat), total(x).to(dtype))
