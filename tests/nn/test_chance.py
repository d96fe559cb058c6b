"""Chance when acting: a table that is always the same, and which of its rows an episode takes."""

from __future__ import annotations

import torch

from qhyer.nn.chance import first_row, next_rows, table
from qhyer.nn.values import best_of


def test_an_episode_walks_through_the_table():
    """From its own first row, so many at a time, and on from the beginning where the table ends."""
    torch.manual_seed(0)
    s, g = torch.randn(3, 4), torch.randn(3, 4)
    first, memory = first_row(s, g, 10), None
    for step in range(5):
        rows, row = next_rows(torch.randn(3, 4) if memory else s, g, memory, 4, 10)
        assert torch.equal(rows, (first[:, None] + 4 * step + torch.arange(4)) % 10)
        memory = {"row": row}
    assert torch.equal(next_rows(s, g, {"other": s}, 4, 10)[0][:, 0], first)  # nothing remembered yet


def test_a_table_is_always_the_same():
    found = table(2000, 3)
    torch.manual_seed(5)
    assert torch.equal(table(2000, 3), found)
    assert found.mean().abs() < 0.05 and abs(float(found.std()) - 1.0) < 0.05


def test_the_best_of_each_row():
    candidates = torch.arange(12.0).view(2, 3, 2)
    values = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 2.0]])
    assert torch.equal(best_of(candidates, values), torch.tensor([[2.0, 3.0], [6.0, 7.0]]))
