"""Where an episode is far enough on, one row after the other; and the law of what directions point at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from qhyer.data import segments
from qhyer.data.episodes import Episodes
from qhyer.data.segments import DirectionSamplerConfig, first_beyond

LENGTHS = (12, 3, 20, 2)  # rows per episode
ROWS, DISCOUNT = sum(LENGTHS), 0.8


@pytest.fixture(scope="module")
def episodes() -> Episodes:
    """Observations carry their own row number, so that what was gathered can be told."""
    observations = np.random.default_rng(0).normal(size=(ROWS, 3))
    observations[:, -1] = np.arange(ROWS)
    actions = np.random.default_rng(1).uniform(-1, 1, (ROWS, 2))
    return Episodes.from_arrays(observations, actions, np.cumsum(LENGTHS) - 1, goal=[0])


def slow_beyond(episodes: Episodes, places: torch.Tensor, distance: float) -> list[int]:
    found = []
    for row in range(len(places)):
        end = int(episodes.end_of[row])
        later = [j for j in range(row + 1, end + 1) if float((places[j] - places[row]).double().norm()) >= distance]
        found.append(later[0] if later else end)
    return found


@pytest.mark.parametrize("rows, window", [(256, 512), (1, 1), (3, 2), (4, 7)])
@pytest.mark.parametrize("distance", [0.0, 0.5, 2.0, 4.0, 100.0])
def test_first_beyond_as_one_by_one(monkeypatch, episodes, rows, window, distance):
    monkeypatch.setattr(segments, "ROWS", rows)
    monkeypatch.setattr(segments, "WINDOW", window)
    walk = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0)).cumsum(0)
    assert first_beyond(episodes, walk, distance).tolist() == slow_beyond(episodes, walk, distance)


def test_first_beyond_counts_what_is_exactly_there(episodes):
    """Places on a line, a step apart: three rows on, but no farther than the end, whose own is itself."""
    line = torch.arange(float(ROWS))[:, None]
    expected = torch.minimum(torch.arange(ROWS) + 3, episodes.end_of)
    assert torch.equal(first_beyond(episodes, line, 3.0), expected)


def test_way_back_does_not_count(episodes):
    """The first that far, not the last; places before the row do not count."""
    x = torch.zeros(ROWS, 1)
    x[[0, 4, 9], 0] = 5.0
    found = first_beyond(episodes, x, 5.0)[:12].tolist()
    assert found == [1, 4, 4, 4, 5, 9, 9, 9, 9, 10, 11, 11]


def draw(episodes: Episodes, distance: float, count: int = 200_000) -> dict[str, torch.Tensor]:
    config = DirectionSamplerConfig(lambda s: s[:, -1:] / 2, distance, DISCOUNT)
    return config.build(episodes, torch.Generator().manual_seed(0)).sample(count)


@pytest.mark.parametrize("row", [0, 9, 10, 12, 13, 20, 35])
def test_directions_point_geometrically_far_and_no_farther_than_the_distance(episodes, row):
    """Places are half a row apart: at a distance of 2 the fourth row on, or the end."""
    batch = draw(episodes, 2.0)
    last = min(row + 4, int(episodes.end_of[row]))
    law = np.array([(1 - DISCOUNT) * DISCOUNT**k for k in range(last - row)])
    law[-1] = DISCOUNT ** (last - row - 1)
    found = batch["goal_rows"][batch["rows"] == row].numpy() - row - 1
    counts = np.bincount(found, minlength=len(law))
    assert len(counts) == len(law)
    if len(law) > 1:
        assert stats.chisquare(counts, law * len(found)).pvalue > 1e-3


def test_transitions_are_uniform_and_all_is_gathered(episodes):
    batch = draw(episodes, 2.0)
    counts = np.bincount(batch["rows"].numpy(), minlength=ROWS)
    assert counts[episodes.ends.numpy()].sum() == 0
    assert stats.chisquare(counts[episodes.transitions.numpy()]).pvalue > 1e-3
    rows, goals = batch["rows"], batch["goal_rows"]
    assert torch.equal(batch["observations"], episodes.observations[rows])
    assert torch.equal(batch["next_observations"], episodes.observations[rows + 1])
    assert torch.equal(batch["actions"], episodes.actions[rows])
    for name, at in (("places", rows), ("next_places", rows + 1), ("goal_places", goals)):
        assert torch.equal(batch[name], at[:, None] / 2)


def test_without_a_discount_the_next_row(episodes):
    config = DirectionSamplerConfig(lambda s: s, 1e9, 0.0)
    batch = config.build(episodes, torch.Generator().manual_seed(0)).sample(1000)
    assert torch.equal(batch["goal_rows"], batch["rows"] + 1)
