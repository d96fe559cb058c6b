"""Segments towards subgoals: where they end, when they are done, and the laws of their goals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_value_samplers import LENGTHS, ROWS, assert_follows, mixture_law, sample

from qhyer.data import goals
from qhyer.data.episodes import Episodes
from qhyer.data.samplers import GoalLaw
from qhyer.data.segments import SubgoalSamplerConfig, segment
from qhyer.errors import UserError

STEPS = 4
VALUE = GoalLaw(0.2, 0.5, 0.3)  # uniform
ACTOR = GoalLaw(0.0, 0.5, 0.5, discount=0.9)
LOW = GoalLaw(0.2, 0.5, 0.3, discount=0.75)


@pytest.fixture(scope="module")
def walks() -> Episodes:
    """Rows 0 to 11, 12 to 14, 15 to 34 and 35 to 36, each of its own place."""
    rng = np.random.default_rng(0)
    observations, actions = rng.normal(size=(ROWS, 3)), rng.uniform(-1, 1, (ROWS, 2))
    return Episodes.from_arrays(observations, actions, np.cumsum(LENGTHS) - 1, goal=[0])


def drawn(walks: Episodes, count: int = 200_000, **options) -> dict[str, torch.Tensor]:
    config = SubgoalSamplerConfig(**{"steps": STEPS, "value": VALUE, "actor": ACTOR, **options})
    return sample(config, walks, count)


@pytest.mark.parametrize(
    "row, goal, end, taken",
    [
        (0, 9, 4, 4),  # beyond the segment
        (0, 4, 4, 4),  # its very end: all steps are taken
        (0, 3, 3, 3),  # on the way
        (2, 2, 2, 0),  # here
        (5, 4, 9, 4),  # behind
        (9, 30, 11, 2),  # elsewhere, and the episode ends first
        (9, 12, 11, 2),  # the next episode's first row is not on the way
        (9, 11, 11, 2),  # the end is the goal
        (9, 10, 10, 1),
        (13, 0, 14, 1),  # one step before the end
        (35, 36, 36, 1),
        (36, 20, 36, 0),  # a final state, which no transition starts at, goes nowhere
    ],
)
def test_where_a_segment_ends(walks, row, goal, end, taken):
    found = segment(walks, torch.tensor([row]), torch.tensor([goal]), STEPS)
    assert [int(x) for x in found] == [end, taken]


def slow(walks: Episodes, row: int, goal: int, steps: int) -> tuple[int, int, bool]:
    """Step by step: where one stands after at most so many, at the goal or at the episode's end; and whether it was
    fewer."""
    at = row
    while at - row < steps and at != goal and at != int(walks.end_of[row]):
        at += 1
    return at, at - row, at - row < steps


def test_a_batch_is_what_walking_gives(walks):
    batch = drawn(walks, 5000, low_value=LOW)
    columns = ("rows", "value_goal_rows", "value_end_rows", "value_steps", "value_done")
    for row, goal, *found in zip(*(batch[name].tolist() for name in columns)):
        assert found == list(slow(walks, row, goal, STEPS))
    columns = ("rows", "low_value_goal_rows", "low_value_end_rows", "low_value_steps", "low_value_done")
    for row, goal, *found in zip(*(batch[name].tolist() for name in columns)):
        assert found == ([row, 0, 1] if goal == row else [row + 1, 1, 0])  # done at the goal itself, and only there
    columns = ("rows", "high_actor_goal_rows", "high_actor_target_rows", "low_actor_goal_rows")
    for row, goal, target, low in zip(*(batch[name].tolist() for name in columns)):
        assert target == slow(walks, row, goal, STEPS)[0]
        assert low == min(row + STEPS, int(walks.end_of[row]))  # whatever the goal


def test_everything_gathered_is_of_the_row_named_for_it(walks):
    batch = drawn(walks, 3000, low_value=LOW)
    assert torch.equal(batch["observations"], walks.observations[batch["rows"]])
    assert torch.equal(batch["actions"], walks.actions[batch["rows"]])
    entries = [name for name in batch if f"{name[:-1]}_rows" in batch]
    assert set(entries) == {
        "value_goals", "value_ends", "low_actor_goals", "high_actor_goals", "high_actor_targets", "low_value_goals",
        "low_value_ends",
    }  # fmt: skip
    for entry in entries:
        assert torch.equal(batch[entry], walks.observations[batch[f"{entry[:-1]}_rows"]]), entry
    assert all(batch[name].dtype == torch.float32 for name in ("value_steps", "value_done", "low_value_done"))


@pytest.mark.parametrize("row", [0, 10, 12, 18, 35])
def test_goals_follow_their_laws(walks, row):
    batch = drawn(walks, low_value=LOW)
    mine = batch["rows"] == row
    for name, law in (("value", VALUE), ("high_actor", ACTOR), ("low_value", LOW)):
        assert_follows(batch[f"{name}_goal_rows"][mine], mixture_law(walks, row, law))


def test_rows_are_the_transitions_alike(walks):
    law = np.zeros(ROWS)
    law[walks.transitions.numpy()] = 1 / walks.num_transitions
    assert_follows(drawn(walks)["rows"], law)


def test_steps_follow_their_law(walks):
    """Row 15, 19 rows ahead of it. None: the goal is the row (0.2, and 0.3 of 1/37). One to three: 0.5/19 + 0.3/37
    each. Otherwise four."""
    batch = drawn(walks)
    steps = batch["value_steps"][batch["rows"] == 15].long()
    law = np.array([0.2 + 0.3 / ROWS, *[0.5 / 19 + 0.3 / ROWS] * 3, 0.0])
    law[4] = 1 - law.sum()
    assert_follows(steps, law)


def test_an_end_without_the_goal_is_done_only_where_ends_are_goals(walks):
    """Row 9 ends at 11 of its own, two steps on. The authors' code calls that an arrival, wherever the goal is."""
    for end_is_goal in (True, False):
        batch = drawn(walks, end_is_goal=end_is_goal)
        cut = (batch["rows"] == 9) & (batch["value_goal_rows"] > 11)
        assert cut.any() and (batch["value_end_rows"][cut] == 11).all() and (batch["value_steps"][cut] == 2).all()
        assert (batch["value_done"][cut] == float(end_is_goal)).all()
        arrived = batch["value_end_rows"] == batch["value_goal_rows"]
        early = batch["value_steps"] < STEPS
        assert (batch["value_done"][arrived & early] == 1).all()
        # A goal as far as a segment is long: nobody needs to be told, V(g, g) is one; the other rule tells it.
        assert (batch["value_done"][arrived & ~early] == float(not end_is_goal)).all() and (arrived & ~early).any()
        assert (batch["value_done"][~arrived & ~early] == 0).all()


def test_without_a_low_value_nothing_is_drawn_for_it(walks):
    plain, more = drawn(walks, 100), drawn(walks, 100, low_value=LOW)
    assert {name for name in more if name.startswith("low_value")} == set(more) - set(plain)
    assert all(torch.equal(plain[name], more[name]) for name in plain)


def test_several_seeds_draw_what_each_would(walks):
    config = SubgoalSamplerConfig(STEPS, VALUE, ACTOR, LOW)
    own = lambda seed: torch.Generator().manual_seed(seed)
    both = config.build(walks, goals.of_seeds([own(3), own(4)])).sample(50)
    for i, seed in enumerate((3, 4)):
        alone = config.build(walks, own(seed)).sample(50)
        assert all(torch.equal(both[name][i], value) for name, value in alone.items())


def test_a_segment_has_a_step():
    with pytest.raises(UserError, match="at least 1 step"):
        SubgoalSamplerConfig(0, VALUE, ACTOR)


def test_segments_longer_than_every_episode_are_worth_a_word(walks, caplog):
    longest = int((walks.ends - walks.starts).max())
    law = GoalLaw()
    for steps, end_is_goal, said in (
        (longest, True, ""),
        (longest + 1, True, "arrived"),
        (longest + 1, False, "short"),
    ):
        caplog.clear()
        SubgoalSamplerConfig(steps, law, law, end_is_goal=end_is_goal).build(walks, torch.Generator())
        assert (f"more than {longest}" in caplog.text and said in caplog.text) if said else not caplog.text
