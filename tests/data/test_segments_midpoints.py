"""Batches of segments: which midpoints and goals are drawn, how often, and at the edges of episodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_value_samplers import DISCOUNT, LENGTHS, ROWS, assert_follows, mixture_law, sample

from qhyer.data.episodes import Episodes
from qhyer.data.goals import Several
from qhyer.data.samplers import GoalLaw
from qhyer.data.segments import MidpointSamplerConfig

STITCH = GoalLaw(p_trajectory=0.5, p_random=0.5)


@pytest.fixture(scope="module")
def episodes() -> Episodes:
    """Of 12, 3, 20 and 2 rows; what was gathered can be told by its numbers."""
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(ROWS, 3)), rng.uniform(-1, 1, (ROWS, 2)))
    return Episodes.from_arrays(*rows, np.cumsum(LENGTHS) - 1, goal=[0])


def drawn(episodes: Episodes, count: int = 200_000, discount: float | None = DISCOUNT, actor: GoalLaw = STITCH):
    return sample(MidpointSamplerConfig(discount, actor), episodes, count)


def test_what_is_gathered(episodes):
    batch = drawn(episodes, 20_000)
    names = {
        "observations": "rows",
        "midpoints": "midpoint_rows",
        "value_goals": "value_goal_rows",
        "actor_goals": "actor_goal_rows",
    }
    for entry, rows in names.items():
        assert torch.equal(batch[entry], episodes.observations[batch[rows]]), entry
    assert torch.equal(batch["actions"], episodes.actions[batch["rows"]])
    assert torch.equal(batch["midpoint_actions"], episodes.actions[batch["midpoint_rows"]])
    i, k, j = (batch[name] for name in ("rows", "midpoint_rows", "value_goal_rows"))
    assert torch.equal(batch["first_steps"], (k - i).float()) and torch.equal(batch["second_steps"], (j - k).float())
    assert batch["first_steps"].dtype == torch.float32


@pytest.mark.parametrize("discount", [DISCOUNT, None])
def test_midpoints_lie_on_the_way(episodes, discount):
    """i <= k < j within one episode; k has an action, and j may be the final state."""
    batch = drawn(episodes, 50_000, discount)
    i, k, j = (batch[name] for name in ("rows", "midpoint_rows", "value_goal_rows"))
    assert (i <= k).all() and (k < j).all() and (j <= episodes.end_of[i]).all()
    assert set(k.tolist()) == set(episodes.transitions.tolist()) == set(i.tolist())
    assert set(episodes.ends.tolist()) <= set(j.tolist())


@pytest.mark.parametrize("row", [0, 10, 12, 18, 35])
@pytest.mark.parametrize("discount", [DISCOUNT, None])
def test_goals_follow_their_laws(episodes, row, discount):
    batch = drawn(episodes, discount=discount)
    mine = batch["rows"] == row
    assert_follows(batch["value_goal_rows"][mine], mixture_law(episodes, row, GoalLaw(discount=discount)))
    assert_follows(batch["actor_goal_rows"][mine], mixture_law(episodes, row, STITCH))


def test_transitions_are_uniform(episodes):
    law = np.zeros(ROWS)
    law[episodes.transitions.numpy()] = 1 / episodes.num_transitions
    assert_follows(drawn(episodes)["rows"], law)


@pytest.mark.parametrize("discount", [DISCOUNT, None])
def test_midpoints_are_uniform_given_the_ends(episodes, discount):
    """Given i and j, each of i..j-1 has the chance 1 / (j - i); so, given i, P(k) is their mixture over j."""
    batch = drawn(episodes, 400_000, discount)
    i, k, j = (batch[name] for name in ("rows", "midpoint_rows", "value_goal_rows"))
    for row, goal in ((0, 1), (0, 4), (15, 22), (20, 34), (12, 14)):
        mine = (i == row) & (j == goal)
        assert mine.sum() > 50
        law = np.zeros(ROWS)
        law[row:goal] = 1 / (goal - row)
        assert_follows(k[mine], law)
    ahead = mixture_law(episodes, 18, GoalLaw(discount=discount))
    law = np.zeros(ROWS)
    for goal in range(19, 35):
        law[18:goal] += ahead[goal] / (goal - 18)
    assert_follows(k[i == 18], law)


def test_an_episode_of_one_step_has_itself_for_a_midpoint(episodes):
    """Row 35 and the last transition of any episode: j is the final state, k the row, no step and one."""
    batch = drawn(episodes, 20_000)
    last = batch["rows"] + 1 == episodes.end_of[batch["rows"]]
    assert (batch["rows"] == 35).any() and last.any()
    assert torch.equal(batch["midpoint_rows"][last], batch["rows"][last])
    assert (batch["first_steps"][last] == 0).all() and (batch["second_steps"][last] == 1).all()


def test_the_greatest_draw_stays_before_the_goal(episodes, monkeypatch):
    """The last of all numbers below one: k is the last of i..j-1, whatever their count."""
    greatest = torch.tensor(1.0 - 2.0**-53, dtype=torch.float64)
    monkeypatch.setattr("qhyer.data.goals.uniform", lambda _, shape: greatest.expand(shape))
    batch = drawn(episodes, 5_000, discount=None, actor=GoalLaw())
    assert torch.equal(batch["value_goal_rows"], episodes.end_of[batch["rows"]])
    assert torch.equal(batch["midpoint_rows"], batch["value_goal_rows"] - 1)


def test_several_seeds_draw_what_each_draws_alone(episodes):
    config = MidpointSamplerConfig(DISCOUNT, STITCH)
    together = config.build(episodes, Several([torch.Generator().manual_seed(seed) for seed in (3, 4)]))
    alone = [config.build(episodes, torch.Generator().manual_seed(seed)) for seed in (3, 4)]
    for _ in range(2):
        batch, others = together.sample(50), [one.sample(50) for one in alone]
        for name, value in batch.items():
            assert torch.equal(value, torch.stack([other[name] for other in others])), name
