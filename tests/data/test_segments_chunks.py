"""Batches of chunks: what lies ahead of a row, where a goal or an episode's end cuts it, and the laws of its goals."""

from __future__ import annotations

import pytest
import torch
from test_value_samplers import MIXED, ROWS, STITCH, assert_follows, episodes, mixture_law, sample

from qhyer.data import goals
from qhyer.data.samplers import GoalLaw
from qhyer.data.segments import ChunkSamplerConfig
from qhyer.errors import UserError

__all__ = ["episodes"]  # a fixture: four episodes of 12, 3, 20 and 2 rows
H = 4


@pytest.fixture(scope="module")
def batch(episodes):
    return sample(ChunkSamplerConfig(MIXED, STITCH, H), episodes, 20_000)


def test_what_is_gathered(episodes, batch):
    names = {"observations": "rows", "value_goals": "value_goal_rows", "actor_goals": "actor_goal_rows"}
    for entry, rows in names.items():
        assert torch.equal(batch[entry], episodes.observations[batch[rows]]), entry
    for row, after, actions, valid in zip(
        batch["rows"].tolist()[:3000], batch["next_observations"], batch["actions"], batch["valid"]
    ):
        end = int(episodes.end_of[row])
        assert int(after[-1]) == min(row + H, end)  # its own row number
        assert valid.tolist() == [float(row + u < end) for u in range(H)]
        for u, action in enumerate(actions.view(H, 2)):  # the last one repeats
            assert torch.equal(action, episodes.actions[min(row + u, end - 1)])


def test_rewards_and_masks_are_those_of_steps_one_by_one(episodes, batch):
    """-1 per step until the goal's own row; the goal ends it. Row by row, as one would walk."""
    seen = set()
    for row, goal, rewards, mask in zip(
        batch["rows"].tolist(), batch["value_goal_rows"].tolist(), batch["rewards"].tolist(), batch["masks"].tolist()
    ):
        expected, done, end = [], False, int(episodes.end_of[row])
        for u in range(H):
            done = done or (row + u == goal and row + u <= end)
            expected.append(0.0 if done else -1.0)
        assert rewards == expected and mask == (0.0 if done else 1.0), (row, goal)
        seen.add((tuple(expected), mask, goal > end))
    assert len({key[0] for key in seen}) == H + 1  # the goal at each of the chunk's rows, and none of them


def test_edges(episodes):
    """Row 8 of an episode that ends at 11: rows 8, 9, 10 are steps. Goals there, behind, at the end, and beyond it."""
    sampler = ChunkSamplerConfig(MIXED, STITCH, H).build(episodes, torch.Generator().manual_seed(0))
    found = {}
    for _ in range(200):
        batch = sampler.sample(2000)
        for i in (batch["rows"] == 8).nonzero().flatten().tolist():
            goal = int(batch["value_goal_rows"][i])
            found[goal] = (batch["rewards"][i].tolist(), float(batch["masks"][i]), batch["valid"][i].tolist())
    assert set(found) == set(range(ROWS))  # random goals are anywhere
    assert all(valid == [1.0, 1.0, 1.0, 0.0] for _, _, valid in found.values())
    assert found[8][:2] == ([0.0] * 4, 0.0)
    assert found[9][:2] == ([-1.0, 0.0, 0.0, 0.0], 0.0)
    assert found[11][:2] == ([-1.0, -1.0, -1.0, 0.0], 0.0)
    for goal in (0, 7, 12, 13, 36):  # behind, and in other episodes: row 12 is not what comes after 11
        assert found[goal][:2] == ([-1.0] * 4, 1.0)


def test_the_state_after_the_chunk_may_be_the_goal(episodes, batch):
    """Then it has not been reached yet: what it is worth to be there is the value's to say."""
    just = (batch["value_goal_rows"] == batch["rows"] + H) & (batch["valid"][:, -1] == 1)
    assert just.any() and (batch["masks"][just] == 1).all() and (batch["rewards"][just] == -1).all()
    assert torch.equal(batch["next_observations"][just], batch["value_goals"][just])


def test_chunks_of_one_are_transitions(episodes):
    batch = sample(ChunkSamplerConfig(MIXED, GoalLaw(), 1), episodes, 5000)
    reached = batch["rows"] == batch["value_goal_rows"]
    assert torch.equal(batch["rewards"][:, 0], reached.float() - 1) and torch.equal(batch["masks"], 1 - reached.float())
    assert torch.equal(batch["actions"], episodes.actions[batch["rows"]]) and (batch["valid"] == 1).all()
    assert torch.equal(batch["next_observations"], episodes.observations[batch["rows"] + 1])


@pytest.mark.parametrize("row", [0, 10, 18, 35])
@pytest.mark.parametrize("actor", [GoalLaw(), STITCH])
def test_goals_follow_their_laws(episodes, row, actor):
    batch = sample(ChunkSamplerConfig(MIXED, actor, H), episodes, seed=row)
    mine = batch["rows"] == row
    assert_follows(batch["value_goal_rows"][mine], mixture_law(episodes, row, MIXED))
    assert_follows(batch["actor_goal_rows"][mine], mixture_law(episodes, row, actor))
    if row == 0:
        transitions = torch.zeros(ROWS)
        transitions[episodes.transitions] = 1 / episodes.num_transitions
        assert_follows(batch["rows"], transitions.double().numpy() / float(transitions.double().sum()))


def test_several_seeds_at_once_draw_what_each_would_alone(episodes):
    config, seeds = ChunkSamplerConfig(MIXED, STITCH, H), (3, 5)
    several = goals.Several([torch.Generator().manual_seed(seed) for seed in seeds])
    together = config.build(episodes, several).sample(50)
    for i, seed in enumerate(seeds):
        alone = sample(config, episodes, 50, seed)
        assert all(torch.equal(together[name][i], alone[name]) for name in alone)


def test_chunks_longer_than_every_episode_are_refused(episodes):
    """The critic would learn from none of them."""
    with pytest.raises(UserError, match=r"no chunk of 20 actions fits .* has 19, .*--agent.chunk 19 or less"):
        ChunkSamplerConfig(MIXED, STITCH, 20).build(episodes, torch.Generator())
    batch = sample(ChunkSamplerConfig(MIXED, STITCH, 19), episodes, 1000)
    assert (batch["valid"][:, -1] == 1).any() and (batch["valid"][:, 0] == 1).all()
