"""Rewards and returns to go, worked by hand and against loops; the return asked for, and what acting takes off it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qhyer.agents._sequence import ReturnToGo, warm_up, warm_up_cosine
from qhyer.data.episodes import Episodes
from qhyer.data.samplers import GoalLaw, ReturnWindowSamplerConfig, Rewards, RewardSamplerConfig
from qhyer.errors import UserError


def line(*walks: list[float]) -> Episodes:
    """Episodes on a line, from their places."""
    places = np.concatenate(walks)[:, None]
    return Episodes.from_arrays(places, np.zeros_like(places), np.cumsum([len(w) for w in walks]) - 1, name="line")


WALKS = ([0.0, 1.0, 2.0, 1.0, 1.2, 3.0], [1.0, 5.0, 1.0])


def test_returns_by_hand():
    """Goal: row 3, place 1. Near it in the first walk: 1, 1, 1.2; in the second the first and the last state."""
    episodes = line(*WALKS)
    near = Rewards(tolerance=0.5).of(episodes)
    rows, goals = torch.arange(9), torch.full((9,), 3)
    assert near.at(rows, goals).tolist() == [0, 1, 0, 1, 1, 0, 1, 0, 1]
    assert near.to_go(rows, goals).tolist() == [3, 3, 2, 2, 1, 0, 2, 1, 1]
    same = Rewards().of(episodes)
    assert same.at(rows, goals).tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert same.to_go(rows, goals).tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0]
    worth = Rewards(tolerance=0.5, scale=100.0, shift=-1.0).of(episodes)
    assert worth.at(rows, goals)[:3].tolist() == [-1, 99, -1]
    assert worth.to_go(rows, goals)[:3].tolist() == [300 - 6, 300 - 5, 200 - 4]


def test_the_dataset_s_own_rewards():
    episodes = line(*WALKS)
    with pytest.raises(UserError, match="no rewards of its own"):
        Rewards(dataset=True).of(episodes)
    episodes.rewards = torch.tensor([0.0, 1, 0, 2, 0, 4, 1, 0, 1])
    stored = Rewards(dataset=True).of(episodes)
    rows = torch.arange(9)
    assert stored.at(rows, rows).tolist() == [0, 1, 0, 2, 0, 4, 1, 0, 1]
    assert stored.to_go(rows, rows).tolist() == [7, 7, 6, 6, 4, 4, 2, 1, 1]
    assert Rewards(dataset=True, shift=1.0).of(episodes).to_go(rows, rows).tolist() == [13, 12, 10, 9, 6, 5, 5, 3, 2]


@pytest.mark.parametrize("tolerance", [0.0, 0.6])
@pytest.mark.parametrize("p_random", [0.0, 0.5])
def test_windows_against_a_loop(point_world, tolerance, p_random):
    rewards = Rewards(tolerance, shift=0.1)
    config = ReturnWindowSamplerConfig(5, rewards, p_random, ahead=4)
    batch = config.build(point_world, torch.Generator().manual_seed(0)).sample(40)
    places = point_world.observations[:, :2]

    def worth(row: int, goal: int) -> float:
        near = row == goal if tolerance == 0.0 else float((places[row] - places[goal]).norm()) <= tolerance
        return float(near) + 0.1

    for i in range(40):
        first, goal = int(batch["rows"][i]), int(batch["goal_rows"][i])
        end = int(point_world.end_of[first])
        assert p_random or first + 4 < goal <= end
        for k in range(5):
            assert float(batch["rewards"][i, k]) == pytest.approx(worth(first + k, goal))
            expected = sum(worth(row, goal) for row in range(first + k, end + 1))
            assert float(batch["returns"][i, k]) == pytest.approx(expected, abs=1e-4)
            assert int(batch["times"][i, k]) == (first + k) % 60
        for m in range(4):
            row = first + 5 + m
            assert bool(batch["ahead_valid"][i, m]) == (row <= end)
            if row <= end:
                expected = sum(worth(r, goal) for r in range(row, end + 1))
                assert float(batch["ahead_returns"][i, m]) == pytest.approx(expected, abs=1e-4)
                assert torch.equal(batch["ahead_observations"][i, m], point_world.observations[row])
    assert batch["returns"].std() > 0


def test_short_episodes_are_padded_and_their_padding_is_worth_nothing():
    episodes = line(*WALKS)
    batch = ReturnWindowSamplerConfig(5, Rewards(0.5)).build(episodes, torch.Generator().manual_seed(0)).sample(50)
    second = batch["rows"] == 6
    assert second.any() and (batch["valid"][second].sum(1) == 2).all()
    assert (batch["goal_rows"][second] == 8).all()
    assert batch["rewards"][second][0].tolist() == [1, 0, 0, 0, 0]
    assert batch["returns"][second][0, :2].tolist() == [2, 1]


def test_transitions_with_rewards(point_world):
    rewards = Rewards(0.3, scale=10.0, shift=-5.0)
    config = RewardSamplerConfig(GoalLaw(0.2, 0.5, 0.3), rewards, average=True)
    batch = config.build(point_world, torch.Generator().manual_seed(0)).sample(200)
    far = (batch["observations"] - batch["goals"])[:, :2].norm(dim=-1)
    near = (far <= 0.3).float()
    torch.testing.assert_close(batch["rewards"], 10 * near - 5)
    torch.testing.assert_close(batch["masks"], 1 - near)
    assert 0.2 <= near.mean() < 1.0
    i = 7
    row, goal = int(batch["rows"][i]), int(batch["goal_rows"][i])
    expected = sum(float(rewards.of(point_world).at(torch.tensor([r]), torch.tensor([goal]))) for r in range(row, 60))
    if row < 60:
        assert float(batch["averages"][i]) == pytest.approx(expected / (60 - row), rel=1e-4)
    going_on = RewardSamplerConfig(GoalLaw(), rewards, terminal=False)
    assert (going_on.build(point_world, torch.Generator().manual_seed(0)).sample(50)["masks"] == 1).all()


def test_the_return_asked_for():
    """A running mean of the greatest return of a batch, padding left out; moved by steps, not by losses."""
    ask = ReturnToGo(scale=10.0, target=None, tolerance=0.5)
    valid = torch.tensor([[True, True], [True, False]])
    scaled = ask({"returns": torch.tensor([[30.0, 20.0], [10.0, 500.0]]), "valid": valid})
    torch.testing.assert_close(scaled, torch.tensor([[3.0, 2.0], [1.0, 50.0]]))
    assert float(ask.target()) == 0.0
    ask.after_step()
    assert float(ask.target()) == 3.0
    ask({"returns": torch.tensor([[50.0, 20.0], [10.0, 500.0]]), "valid": valid})
    ask.after_step()
    assert float(ask.target()) == pytest.approx(3.0 + 0.01 * 2.0)
    assert float(ReturnToGo(10.0, 300.0, 0.5).target()) == 30.0
    here, there = torch.tensor([[0.0, 0.0], [0.3, 0.4], [1.0, 0.0]]), torch.zeros(3, 2)
    torch.testing.assert_close(ask.spent(here, there), torch.tensor([0.1, 0.1, 0.0]))
    assert ReturnToGo(10.0, None, 0.0).spent(here, there).tolist() == [0, 0, 0]
    torch.testing.assert_close(
        ReturnToGo(10.0, None, 0.5, 4.0, -2.0).spent(here, there), torch.tensor([0.2, 0.2, -0.2])
    )


def test_acting_takes_rewards_off_the_return(tiny_agent, point_world):
    """Asked for 6 with scale 2: near the goal at the second and third step, so 3, 3, 2.5, 2 and then 2."""
    agent = tiny_agent("dt", tolerance=0.5, return_scale=2.0, target_return=6.0, context=3).eval()
    goal, away = torch.zeros(1, 4), torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    memory, seen, times = None, [], []
    for observation in (away, goal, goal, away, away):
        _, memory = agent.act(observation, goal, memory)
        seen.append(float(memory["returns"][0, -1]))
        times.append(int(memory["time"]))
    assert seen == [3.0, 3.0, 2.5, 2.0, 2.0] and times == [1, 2, 3, 4, 5]
    assert memory["observations"].shape == (1, 2, 4)


def test_schedules():
    rise, fall = warm_up(4), warm_up_cosine(2, 6)
    assert [rise(i) for i in (0, 1, 3, 9)] == [0.25, 0.5, 1.0, 1.0] and warm_up(0) is None
    assert [fall(i) for i in (0, 1, 2, 4)] == pytest.approx([0.5, 1.0, 1.0, 0.5])
