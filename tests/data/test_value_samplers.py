"""OGBench's batches for values and actors: both goal laws, rewards and masks, and the subgoals of a hierarchy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from qhyer.data.episodes import Episodes
from qhyer.data.samplers import GoalLaw, HierarchicalSamplerConfig, ValueActorSamplerConfig

LENGTHS = (12, 3, 20, 2)  # rows per episode
ROWS, DISCOUNT = sum(LENGTHS), 0.8
MIXED = GoalLaw(p_current=0.2, p_trajectory=0.5, p_random=0.3, discount=DISCOUNT)


@pytest.fixture(scope="module")
def episodes() -> Episodes:
    """Observations carry their own row number, so that what was gathered can be told."""
    observations = np.random.default_rng(0).normal(size=(ROWS, 3))
    observations[:, -1] = np.arange(ROWS)
    actions = np.random.default_rng(1).uniform(-1, 1, (ROWS, 2))
    return Episodes.from_arrays(observations, actions, np.cumsum(LENGTHS) - 1, goal=[0])


def sample(config, episodes: Episodes, count: int = 200_000, seed: int = 0) -> dict[str, torch.Tensor]:
    return config.build(episodes, torch.Generator().manual_seed(seed)).sample(count)


def assert_follows(values: torch.Tensor, law: np.ndarray) -> None:
    """Chi-square against exact probabilities per row; what is impossible must not occur."""
    assert law.sum() == pytest.approx(1.0)
    counts = np.bincount(values.numpy(), minlength=len(law)).astype(float)
    assert counts[law == 0].sum() == 0, "an impossible outcome"
    expected = law * len(values)
    common = expected >= 10
    seen, wanted = (
        np.append(counts[common], counts[~common].sum()),
        np.append(expected[common], expected[~common].sum()),
    )
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    if len(seen) > 1:
        assert stats.chisquare(seen, wanted).pvalue > 1e-3


def mixture_law(episodes: Episodes, row: int, law: GoalLaw) -> np.ndarray:
    end = int(episodes.end_of[row])
    found = np.full(ROWS, law.p_random / ROWS)
    found[row] += law.p_current
    for goal in range(row + 1, end + 1):
        if law.discount is None:
            share = 1 / (end - row)
        elif goal < end:
            share = (1 - law.discount) * law.discount ** (goal - row - 1)
        else:
            share = law.discount ** (end - row - 1)
        found[goal] += law.p_trajectory * share
    return found


def gathered(episodes: Episodes, batch: dict[str, torch.Tensor], names: dict[str, str]) -> None:
    """Each entry is the observation of the row that is named for it."""
    for entry, rows in names.items():
        assert torch.equal(batch[entry], episodes.observations[batch[rows]]), entry
    assert torch.equal(batch["actions"], episodes.actions[batch["rows"]])
    assert torch.equal(batch["next_observations"][:, -1], batch["observations"][:, -1] + 1)
    assert torch.equal(episodes.end_of[batch["rows"]], episodes.end_of[batch["rows"] + 1])  # the same episode's


STITCH = GoalLaw(p_trajectory=0.5, p_random=0.5)


@pytest.mark.parametrize("row", [0, 10, 12, 18, 35])
@pytest.mark.parametrize("actor", [GoalLaw(), STITCH, GoalLaw(p_trajectory=0.0, p_random=1.0)])
def test_value_and_actor_goals_follow_their_laws(episodes, row, actor):
    batch = sample(ValueActorSamplerConfig(MIXED, actor), episodes, seed=row)
    mine = batch["rows"] == row
    assert_follows(batch["value_goal_rows"][mine], mixture_law(episodes, row, MIXED))
    assert_follows(batch["actor_goal_rows"][mine], mixture_law(episodes, row, actor))


def test_value_actor_batch(episodes):
    batch = sample(ValueActorSamplerConfig(MIXED, STITCH), episodes)
    transitions = np.zeros(ROWS)
    transitions[episodes.transitions.numpy()] = 1 / episodes.num_transitions
    assert_follows(batch["rows"], transitions)
    names = {"observations": "rows", "value_goals": "value_goal_rows", "actor_goals": "actor_goal_rows"}
    gathered(episodes, batch, names)


def test_the_two_goals_are_drawn_apart(episodes):
    """Given the row, one goal says nothing about the other."""
    law = GoalLaw(p_trajectory=0.0, p_random=1.0)
    batch = sample(ValueActorSamplerConfig(law, law), episodes)
    table = np.zeros((ROWS, ROWS))
    np.add.at(table, (batch["value_goal_rows"].numpy(), batch["actor_goal_rows"].numpy()), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("negative", [True, False])
def test_rewards_and_masks(episodes, negative):
    """Where the goal is the very row: reward 0 instead of -1 (or 1 instead of 0), and no value beyond."""
    batch = sample(ValueActorSamplerConfig(MIXED, STITCH, negative), episodes, 20_000)
    reached = batch["rows"] == batch["value_goal_rows"]
    inside, outside = (0.0, -1.0) if negative else (1.0, 0.0)
    assert (batch["rewards"][reached] == inside).all() and (batch["rewards"][~reached] == outside).all()
    assert (batch["masks"][reached] == 0).all() and (batch["masks"][~reached] == 1).all()
    # 0.2 on purpose, and a random row is the row itself once in a while; a future one never.
    assert float(reached.float().mean()) == pytest.approx(0.2 + 0.3 / ROWS, abs=0.01)


# ----------------------------------------------------------------------------------------------------- hierarchy

STEPS = 4


def hierarchical(episodes, count: int = 200_000, **options) -> dict[str, torch.Tensor]:
    return sample(HierarchicalSamplerConfig(**{"value": MIXED, "subgoal_steps": STEPS, **options}), episodes, count)


def test_hierarchical_batch(episodes):
    batch = hierarchical(episodes, p_random=0.5)
    names = {
        "observations": "rows",
        "value_goals": "value_goal_rows",
        "low_actor_goals": "low_actor_goal_rows",
        "high_actor_goals": "high_actor_goal_rows",
        "high_actor_targets": "high_actor_target_rows",
    }
    gathered(episodes, batch, names)
    mine = batch["rows"] == 18
    assert_follows(batch["value_goal_rows"][mine], mixture_law(episodes, 18, MIXED))
    reached = batch["rows"] == batch["value_goal_rows"]
    assert torch.equal(batch["rewards"], reached.float() - 1) and torch.equal(batch["masks"], 1 - reached.float())
    for row, low in zip(batch["rows"].tolist()[:2000], batch["low_actor_goal_rows"].tolist()):
        assert low == min(row + STEPS, int(episodes.end_of[row]))


@pytest.mark.parametrize("discount", [None, DISCOUNT])
@pytest.mark.parametrize("p_random", [0.0, 0.5, 1.0])
def test_high_goals_follow_their_law(episodes, p_random, discount):
    batch = hierarchical(episodes, p_random=p_random, discount=discount)
    law = GoalLaw(0.0, 1.0 - p_random, p_random, discount)
    for row in (0, 10, 13, 18, 35):
        mine = batch["rows"] == row
        assert_follows(batch["high_actor_goal_rows"][mine], mixture_law(episodes, row, law))


def test_targets_lie_on_the_way(episodes):
    """Never past a goal of the same draw; towards a random goal, always `subgoal_steps` ahead."""
    batch = hierarchical(episodes, 20_000)
    for row, goal, target in zip(
        *(batch[k].tolist() for k in ("rows", "high_actor_goal_rows", "high_actor_target_rows"))
    ):
        assert target == min(row + STEPS, goal)
    batch = hierarchical(episodes, 20_000, p_random=1.0)
    assert torch.equal(batch["high_actor_target_rows"], batch["low_actor_goal_rows"])


def test_mixed_targets_have_the_law_of_both(episodes):
    """Row 15, end 34, goals uniform in 16..34: a target before 19 needs a trajectory goal, of chance 0.5 / 19 each."""
    batch = hierarchical(episodes, p_random=0.5)
    law = np.zeros(ROWS)
    law[[16, 17, 18]] = 0.5 / 19
    law[19] = 1 - 1.5 / 19
    assert_follows(batch["high_actor_target_rows"][batch["rows"] == 15], law)


# ------------------------------------------------------------------------------------------------------- options

OPTION = 3


def test_an_option_ends_at_its_goal_or_in_time(episodes):
    batch = hierarchical(episodes, 20_000, option_steps=OPTION)
    gathered(episodes, batch, {"option_ends": "option_end_rows", "option_goals": "option_goal_rows"})
    done = batch["option_end_rows"] == batch["option_goal_rows"]
    assert torch.equal(batch["option_rewards"], done.float() - 1) and torch.equal(
        batch["option_masks"], 1 - done.float()
    )
    latest = torch.minimum(batch["rows"] + OPTION, episodes.end_of[batch["rows"]])
    assert (batch["option_end_rows"] > batch["rows"]).all() and (batch["option_end_rows"] <= latest).all()
    early = batch["option_end_rows"] < latest  # then it met its goal
    assert early.any() and done[early].all()


def test_options_follow_their_law(episodes):
    """Row 18, end 34: with 5/8 the goal is geometric and ends the option if it lies before 21, otherwise anywhere; with
    1/5 the goal is then the end."""
    batch = hierarchical(episodes, option_steps=OPTION)
    mine = batch["rows"] == 18
    ends, goal_rows = batch["option_end_rows"][mine], batch["option_goal_rows"][mine]
    geometric = mixture_law(episodes, 18, GoalLaw(discount=DISCOUNT))
    ahead = MIXED.p_trajectory / (1 - MIXED.p_current)
    law = np.zeros(ROWS)
    law[[19, 20]] = ahead * geometric[[19, 20]]
    law[21] = 1 - law.sum()
    assert_follows(ends, law)
    goals_law = 0.8 * (ahead * geometric + (1 - ahead) / ROWS) + 0.2 * law
    assert_follows(goal_rows, goals_law)


def test_without_options_nothing_is_drawn_for_them(episodes):
    plain, more = hierarchical(episodes, 100), hierarchical(episodes, 100, option_steps=OPTION)
    assert set(more) - set(plain) == {
        "option_ends", "option_goals", "option_end_rows", "option_goal_rows", "option_rewards", "option_masks"
    }  # fmt: skip
    assert all(torch.equal(plain[name], more[name]) for name in plain)
