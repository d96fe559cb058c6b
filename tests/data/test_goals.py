"""Goal rows follow their closed-form laws: 100,000 draws each, chi-square at fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from qhyer.data import goals
from qhyer.data.episodes import Episodes

DRAWS = 100_000
LENGTHS = (12, 2, 30)  # rows per episode


@pytest.fixture(scope="module")
def episodes() -> Episodes:
    rows = sum(LENGTHS)
    rng = np.random.default_rng(0)
    return Episodes.from_arrays(
        rng.normal(size=(rows, 3)), rng.uniform(-1, 1, (rows, 2)), np.cumsum(LENGTHS) - 1, goal=[0]
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_follows(draws: torch.Tensor, law: dict[int, float]) -> None:
    """Chi-square against exact probabilities; rare outcomes are pooled, impossible ones must not occur."""
    assert abs(sum(law.values()) - 1.0) < 1e-12
    values, counts = np.unique(draws.numpy(), return_counts=True)
    observed = dict(zip(values.tolist(), counts.tolist()))
    assert set(observed) <= set(law), "an impossible outcome"
    seen = np.array([observed.get(value, 0) for value in law], float)
    expected = np.array(list(law.values())) * len(draws)
    rare = expected < 10
    if rare.any():
        seen = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(seen) > 1:
        assert stats.chisquare(seen, expected).pvalue > 1e-3


def geometric_law(row: int, end: int, discount: float) -> dict[int, float]:
    """P(row + k) = (1 - discount) discount^(k-1) before the end, which absorbs the rest."""
    law = {row + k: (1 - discount) * discount ** (k - 1) for k in range(1, end - row)}
    return {**law, end: discount ** (end - row - 1)}


@pytest.mark.parametrize("discount", [0.5, 0.9, 0.99])
def test_geometric_steps(discount):
    steps = goals.geometric_steps(generator(1), (DRAWS,), discount)
    law = {k: (1 - discount) * discount ** (k - 1) for k in range(1, 5000)}
    law[5000] = 1.0 - sum(law.values())
    assert_follows(steps.clamp(max=5000), law)
    assert goals.geometric_steps(generator(), (5,), 0.0).tolist() == [1] * 5


@pytest.mark.parametrize("row", [0, 5, 10, 12, 14, 42])
@pytest.mark.parametrize("discount", [0.5, 0.95])
def test_geometric_future_is_absorbed_by_the_end(episodes, row, discount):
    drawn = goals.geometric_future(generator(row), episodes, torch.full((DRAWS,), row), discount)
    assert_follows(drawn, geometric_law(row, int(episodes.end_of[row]), discount))


@pytest.mark.parametrize("row", [0, 5, 10, 12, 14, 42])
def test_uniform_future(episodes, row):
    end = int(episodes.end_of[row])
    drawn = goals.uniform_future(generator(row), episodes, torch.full((DRAWS,), row))
    assert_follows(drawn, dict.fromkeys(range(row + 1, end + 1), 1 / (end - row)))


def test_random_rows_include_final_states(episodes):
    rows = len(episodes.observations)
    assert_follows(goals.random_rows(generator(2), episodes, (DRAWS,)), dict.fromkeys(range(rows), 1 / rows))


@pytest.mark.parametrize("discount", [None, 0.8])
@pytest.mark.parametrize("shares", [(0.2, 0.5, 0.3), (0.0, 0.5, 0.5), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_mixture(episodes, shares, discount):
    row, rows = 16, len(episodes.observations)
    end = int(episodes.end_of[row])
    current, trajectory, anywhere = shares
    if discount is None:
        future = dict.fromkeys(range(row + 1, end + 1), 1 / (end - row))
    else:
        future = geometric_law(row, end, discount)
    law = {r: anywhere / rows + trajectory * future.get(r, 0.0) + current * (r == row) for r in range(rows)}
    drawn = goals.mixture(
        generator(3),
        episodes,
        torch.full((DRAWS,), row),
        p_current=current,
        p_trajectory=trajectory,
        p_random=anywhere,
        discount=discount,
    )
    assert_follows(drawn, {r: p for r, p in law.items() if p > 0})


def test_the_test_can_fail(episodes):
    drawn = goals.geometric_future(generator(4), episodes, torch.full((DRAWS,), 14), 0.9)
    with pytest.raises(AssertionError):
        assert_follows(drawn, geometric_law(14, int(episodes.end_of[14]), 0.89))


def test_many_rows_at_once_stay_in_their_episodes(episodes):
    rows = episodes.transitions.repeat(200)
    for drawn in (
        goals.geometric_future(generator(5), episodes, rows, 0.97),
        goals.uniform_future(generator(6), episodes, rows),
    ):
        assert (drawn > rows).all() and (episodes.end_of[drawn] == episodes.end_of[rows]).all()


def test_draws_repeat_with_the_seed(episodes):
    rows = torch.full((100,), 14)
    same = [goals.geometric_future(generator(7), episodes, rows, 0.9) for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], goals.geometric_future(generator(8), episodes, rows, 0.9))
