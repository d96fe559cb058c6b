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
