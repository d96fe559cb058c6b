"""Batches: windows within episodes, uniform starts, goal laws, and randomness from the given generator alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from qhyer.data import goals
from qhyer.data.episodes import Episodes
from qhyer.data.samplers import TransitionSamplerConfig, WindowSamplerConfig

LENGTHS = (12, 3, 20, 2)  # rows per episode: with context 5, the second and the last are shorter than a window
CONTEXT, DISCOUNT = 5, 0.8


def build(lengths=LENGTHS, dim: int = 3) -> Episodes:
    """Observations carry their own row number, so that what was gathered can be told."""
    rows = sum(lengths)
    observations = np.random.default_rng(0).normal(size=(rows, dim))
    observations[:, -1] = np.arange(rows)
    actions = np.random.default_rng(1).uniform(-1, 1, (rows, 2))
    return Episodes.from_arrays(observations, actions, np.cumsum(lengths) - 1, goal=[0])


@pytest.fixture(scope="module")
def episodes() -> Episodes:
    return build()


def sample(episodes: Episodes, count: int = 20_000, seed: int = 0, **options):
    config = WindowSamplerConfig(**{"context": CONTEXT, "discount": DISCOUNT, **options})
    return config.build(episodes, torch.Generator().manual_seed(seed)).sample(count)


def follows(values: torch.Tensor, law: np.ndarray) -> float:
    """p-value of a chi-square test against exact probabilities per row; what is impossible must not occur."""
    counts = np.bincount(values.numpy(), minlength=len(law)).astype(float)
    assert counts[law == 0].sum() == 0, "an impossible outcome"
    expected = law * len(values)
    common = expected >= 10
    seen, wanted = counts[common], expected[common]
    if expected[~common].sum() >= 5:
        seen, wanted = np.append(seen, counts[~common].sum()), np.append(wanted, expected[~common].sum())
    return float(stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue) if len(seen) > 1 else 1.0


def geometric_law(episodes: Episodes, row: int, discount: float = DISCOUNT) -> np.ndarray:
    law, end = np.zeros(len(episodes.observations)), int(episodes.end_of[row])
    for k in range(1, end - row):
        law[row + k] = (1 - discount) * discount ** (k - 1)
    law[end] = discount ** (end - row - 1)
    return law


# ------------------------------------------------------------------------------------------------------- windows


def test_shapes(episodes):
    batch = sample(episodes, 8)
    assert batch["observations"].shape == (8, CONTEXT, 3) and batch["actions"].shape == (8, CONTEXT, 2)
    assert batch["goals"].shape == (8, 3) and batch["valid"].shape == (8, CONTEXT)
    assert batch["flow_observations"].shape == batch["flow_goals"].shape == (10, 3)  # 8 * 5 / 4
    assert batch["flow_actions"].shape == (10, 2)


def test_windows_are_consecutive_rows_of_one_episode(episodes):
    batch = sample(episodes)
    rows, valid = batch["observations"][..., -1].long(), batch["valid"]
    expected = batch["rows"][:, None] + torch.arange(CONTEXT)
    assert torch.equal(rows[valid], expected[valid])
    assert (episodes.end_of[rows] == episodes.end_of[batch["rows"]][:, None]).all()  # padding included
    assert (rows < episodes.end_of[rows]).all()  # a final state has no action and is no step of a window
    assert torch.equal(batch["actions"], episodes.actions[rows])


def test_a_chunk_is_an_action_and_those_after_it_and_an_episode_s_last_repeats(episodes):
    batch = sample(episodes, 500, context=1, chunk=4)
    assert batch["actions"].shape == (500, 1, 8) and batch["flow_actions"].shape == (125, 8)
    for rows, actions in ((batch["rows"], batch["actions"][:, 0]), (batch["flow_rows"], batch["flow_actions"])):
        for row, several in zip(rows.tolist(), actions.view(-1, 4, 2)):
            last = int(episodes.end_of[row]) - 1  # the final state's own action is nobody's
            assert torch.equal(several, torch.stack([episodes.actions[min(row + i, last)] for i in range(4)]))


def test_starts_are_uniform_over_what_is_possible(episodes):
    batch = sample(episodes)
    first = np.cumsum((0, *LENGTHS[:-1]))
    possible = [*range(first[0], first[0] + 12 - CONTEXT), first[1], *range(first[2], first[2] + 20 - CONTEXT)]
    possible.append(first[3])  # the two short episodes have one (padded) window each
    law = np.zeros(sum(LENGTHS))
    law[possible] = 1 / len(possible)
    assert follows(batch["rows"], law) > 1e-3


def test_a_context_longer_than_every_episode_is_told(episodes, caplog):
    WindowSamplerConfig(19, DISCOUNT).build(episodes, torch.Generator())
    assert not caplog.records
    WindowSamplerConfig(20, DISCOUNT).build(episodes, torch.Generator())
    assert "a context of 20, where no episode has more than 19 steps" in caplog.text


def test_short_episodes_are_padded_and_masked(episodes):
    batch = sample(episodes)
    for start, transitions in ((12, 2), (35, 1)):
        mine = batch["rows"] == start
        assert mine.any()
        expected = torch.arange(CONTEXT) < transitions
        assert (batch["valid"][mine] == expected).all()
    long = (batch["rows"] < 7) | ((batch["rows"] >= 15) & (batch["rows"] < 30))
    assert batch["valid"][long].all()


def test_an_episode_of_exactly_the_context_has_one_whole_window():
    batch = sample(build((CONTEXT + 1, CONTEXT)), 500)
    whole, padded = batch["rows"] == 0, batch["rows"] == CONTEXT + 1
    assert (whole | padded).all() and batch["valid"][whole].all()
    assert (batch["valid"][padded].sum(1) == CONTEXT - 1).all()


@pytest.mark.parametrize("start", [0, 6, 12, 15, 29, 35])
def test_window_goals_lie_geometrically_beyond_the_last_state(episodes, start):
    batch = sample(episodes, 60_000, seed=start)
    mine = batch["rows"] == start
    last = min(start + CONTEXT - 1, int(episodes.end_of[start]) - 1)
    assert mine.sum() > 1000
    assert follows(batch["goal_rows"][mine], geometric_law(episodes, last)) > 1e-3
    assert (batch["goal_rows"][mine] > last).all() and (batch["reached"] == 1).all()
    assert torch.equal(batch["goals"][:, -1].long(), batch["goal_rows"])


def test_law_test_can_fail(episodes):
    batch = sample(episodes, 60_000)
    mine = batch["rows"] == 15
    assert follows(batch["goal_rows"][mine], geometric_law(episodes, 19, DISCOUNT - 0.1)) < 1e-6
    with pytest.raises(AssertionError, match="impossible"):
        follows(batch["goal_rows"][mine], geometric_law(episodes, 20))


def test_random_goals(episodes):
    batch = sample(episodes, 40_000, p_random=0.3)
    swapped = batch["reached"] == 0
    assert float(swapped.float().mean()) == pytest.approx(0.3, abs=0.01)
    rows = len(episodes.observations)
    assert follows(batch["goal_rows"][swapped], np.full(rows, 1 / rows)) > 1e-3
    kept = (batch["rows"] == 15) & ~swapped
    assert follows(batch["goal_rows"][kept], geometric_law(episodes, 19)) > 1e-3
    assert (batch["flow_goal_rows"] > batch["flow_rows"]).all()  # the flow's goals are never random


# ---------------------------------------------------------------------------------------------------- flow batch


def test_flow_transitions_are_uniform_and_their_goals_geometric(episodes):
    batch = sample(episodes, 20_000, flow_batch=1.0)
    rows = batch["flow_rows"]
    law = np.zeros(sum(LENGTHS))
    law[episodes.transitions.numpy()] = 1 / episodes.num_transitions
    assert len(rows) == 100_000 and follows(rows, law) > 1e-3
    for row in (0, 10, 13, 18, 35):
        assert follows(batch["flow_goal_rows"][rows == row], geometric_law(episodes, row)) > 1e-3
    assert torch.equal(batch["flow_observations"], episodes.observations[rows])
    assert torch.equal(batch["flow_actions"], episodes.actions[rows])
    assert torch.equal(batch["flow_goals"], episodes.observations[batch["flow_goal_rows"]])


def test_no_flow_batch_when_there_is_no_flow(episodes):
    assert not any(key.startswith("flow") for key in sample(episodes, 8, flow_batch=0.0))


def test_transitions_sampler(episodes):
    config = TransitionSamplerConfig(p_current=0.2, p_trajectory=0.5, p_random=0.3, discount=DISCOUNT)
    batch = config.build(episodes, torch.Generator().manual_seed(0)).sample(100_000)
    law = np.zeros(sum(LENGTHS))
    law[episodes.transitions.numpy()] = 1 / episodes.num_transitions
    assert follows(batch["rows"], law) > 1e-3
    mixture = 0.5 * geometric_law(episodes, 18) + 0.3 / sum(LENGTHS)
    mixture[18] += 0.2
    assert follows(batch["goal_rows"][batch["rows"] == 18], mixture) > 1e-3
    assert torch.equal(batch["observations"], episodes.observations[batch["rows"]])
    assert torch.equal(batch["goals"], episodes.observations[batch["goal_rows"]])
    assert torch.equal(batch["actions"], episodes.actions[batch["rows"]])


# ------------------------------------------------------------------------------------------------ stitched goals


def chain(paths: list[list[int]]) -> Episodes:
    """Episodes on a line of numbered places, far apart compared with a cell: each place is a cell of its own."""
    places = np.concatenate(paths).astype(float)
    observations = np.stack([places, np.arange(len(places))], 1)
    return Episodes.from_arrays(
        observations, np.zeros((len(places), 1)), np.cumsum(list(map(len, paths))) - 1, goal=[0]
    )


def places_of(episodes: Episodes, rows: torch.Tensor) -> torch.Tensor:
    return episodes.observations[rows, 0].long()


def by_place(episodes: Episodes, law: np.ndarray) -> np.ndarray:
    """Probabilities of rows -> probabilities of places."""
    assert law.sum() == pytest.approx(1.0)
    return np.bincount(episodes.observations[:, 0].long().numpy(), weights=law)


PATHS = [[0, 1, 2, 3], [5, 1, 6], [3, 4, 0], [6, 7, 2]]


def along_and_across(episodes: Episodes, neighbours: goals.Neighbours) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Over rows: one step along the episode; a change to a uniform row of the same cell, and, for the ends of
    episodes, the same repeated until the row goes on (a change spends no step; a cell of ends only absorbs)."""
    count, end, cell = len(episodes.observations), episodes.end_of.numpy(), neighbours.cell_of.numpy()
    onward = np.arange(count) < end
    step = np.where(onward[:, None], np.eye(count, k=1), np.eye(count))
    swap = (cell[:, None] == cell) / (cell[:, None] == cell).sum(1, keepdims=True)
    at_ends = np.eye(count)
    for row in np.flatnonzero(~onward):
        weights = swap[row] * onward
        if weights.any():
            at_ends[row] = weights / weights.sum()
    return step, swap, at_ends


def test_neighbours_are_the_rows_of_one_cell():
    episodes = chain(PATHS)
    neighbours = goals.Neighbours(episodes, 0.1)
    places = episodes.observations[:, 0]
    rows = torch.arange(len(places)).repeat_interleave(3000)
    drawn = neighbours.swap(torch.Generator().manual_seed(0), rows)
    assert torch.equal(places[drawn], places[rows])
    for row in range(len(places)):
        same = np.flatnonzero(places.numpy() == float(places[row]))
        law = np.zeros(len(places))
        law[same] = 1 / len(same)
        assert follows(drawn[rows == row], law) > 1e-4


def test_cells_are_in_deviations_of_each_coordinate():
    """Positions in metres and angles in thousandths share cells alike; other coordinates play no part."""
    rng = np.random.default_rng(0)
    observations = np.concatenate([rng.normal(size=(200, 2)), rng.normal(size=(200, 1))], 1)
    scaled = observations * np.array([1.0, 1000.0, 1.0])
    cells = []
    for values in (observations, scaled):
        episodes = Episodes.from_arrays(values, np.zeros((200, 1)), [99, 199], goal=[0, 1])
        cells.append(goals.Neighbours(episodes, 0.5).cell_of)
    place = np.floor(observations[:, :2] / (0.5 * observations[:, :2].std(0)))
    same = (place[:, None] == place).all(-1)
    assert 400 < same.sum() < 20_000
    for cell in cells:
        assert ((cell[:, None] == cell).numpy() == same).all()


def test_without_shared_cells_stitching_changes_nothing():
    """Every row a cell of its own: the walk can change nowhere, whatever the rate, and the law is the plain one."""
    episodes = build()
    episodes.observations[:, 0] = torch.arange(len(episodes.observations)).float()
    neighbours = goals.Neighbours(episodes, 1e-3)
    assert len(neighbours.counts) == len(episodes.observations)
    for rate in (0.01, 0.9):
        for row in (0, 5, 18):
            rows = torch.full((20_000,), row)
            g = torch.Generator().manual_seed(row)
            drawn = goals.stitched_future(g, episodes, neighbours, rows, DISCOUNT, rate, hops=64)
            assert follows(drawn, geometric_law(episodes, row)) > 1e-3


@pytest.mark.parametrize("row", range(13))
def test_walks_that_change_only_at_ends_follow_the_exact_occupancy(row):
    """rate -> 0: an episode's end goes on from a row of its cell; against (1 - g) P (I - g P)^-1."""
    episodes, discount = chain(PATHS), 0.6
    neighbours = goals.Neighbours(episodes, 0.1)
    step, _, at_ends = along_and_across(episodes, neighbours)
    P = at_ends @ step
    law = ((1 - discount) * P @ np.linalg.inv(np.eye(len(P)) - discount * P))[row]
    drawn = goals.stitched_future(
        torch.Generator().manual_seed(row), episodes, neighbours, torch.full((40_000,), row), discount, 1e-12, hops=64
    )
    assert follows(places_of(episodes, drawn), by_place(episodes, law)) > 1e-3


@pytest.mark.parametrize("rate", [0.3, 0.999999])
@pytest.mark.parametrize("row", [0, 4, 5, 7, 10])
def test_walks_that_change_on_the_way_follow_the_exact_occupancy(row, rate):
    """After each step, with a chance of `rate` (always at an end), on from a uniform row of the cell; then a step.

    s_1 has no change before it, so the law is (1 - g) S (I - g P)^-1 with P = change and step.
    """
    episodes, discount = chain(PATHS), 0.7
    neighbours = goals.Neighbours(episodes, 0.1)
    step, swap, at_ends = along_and_across(episodes, neighbours)
    ends = (np.arange(len(step)) == episodes.end_of.numpy())[:, None]
    change = np.where(ends, at_ends, ((1 - rate) * np.eye(len(step)) + rate * swap) @ at_ends)
    P = change @ step
    law = (1 - discount) * step[row] @ np.linalg.inv(np.eye(len(P)) - discount * P)
    drawn = goals.stitched_future(
        torch.Generator().manual_seed(row), episodes, neighbours, torch.full((40_000,), row), discount, rate, hops=200
    )
    assert follows(places_of(episodes, drawn), by_place(episodes, law)) > 1e-3
    if rate > 0.9 and row == 0:  # the measure can tell: the law without changes is another
        plain = geometric_law(episodes, row, discount)
        with pytest.raises(AssertionError, match="impossible"):
            follows(places_of(episodes, drawn), by_place(episodes, plain))


def test_stitched_goals_lie_beyond_the_episode_and_only_through_shared_places():
    """From 5 the first path's 2 and 3 are reachable through 1, and then 4 and 0; 8, 9, 10 on an island are not."""
    episodes = chain([[0, 1, 2, 3], [5, 1, 6], [3, 4, 0], [8, 9, 10]])
    neighbours = goals.Neighbours(episodes, 0.05)
    start = torch.full((20_000,), 4)  # the row of 5
    drawn = goals.stitched_future(torch.Generator().manual_seed(0), episodes, neighbours, start, 0.9, 0.5)
    places = set(episodes.observations[drawn, 0].long().tolist())
    assert places == {1, 6, 2, 3, 4, 0}
    island = torch.full((2000,), 10)
    drawn = goals.stitched_future(torch.Generator().manual_seed(0), episodes, neighbours, island, 0.9, 0.5)
    assert set(episodes.observations[drawn, 0].long().tolist()) == {9, 10}


def test_sampler_uses_stitched_goals_for_windows_and_flow():
    episodes = chain(PATHS)
    options = dict(context=2, discount=0.9, flow_batch=1.0)
    plain = sample(episodes, 4000, **options)
    stitched = sample(episodes, 4000, **options, stitch_rate=0.3, stitch_cell=0.1)
    for goal, row in (("goal_rows", "rows"), ("flow_goal_rows", "flow_rows")):
        assert (episodes.end_of[plain[goal]] == episodes.end_of[plain[row]]).all()
        beyond = episodes.end_of[stitched[goal]] != episodes.end_of[stitched[row]]
        assert 0.1 < float(beyond.float().mean()) < 0.95


# ---------------------------------------------------------------------------------------------------- randomness

CONFIGS = [
    WindowSamplerConfig(CONTEXT, DISCOUNT, p_random=0.2),
    WindowSamplerConfig(CONTEXT, DISCOUNT, stitch_rate=0.1, stitch_cell=0.5),
    TransitionSamplerConfig(0.2, 0.5, 0.3, DISCOUNT),
    TransitionSamplerConfig(),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_all_randomness_is_the_generator_s(episodes, config):
    """Same seed, same batches; another seed, others; torch's and numpy's own generators stay where they were."""
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()

    def batches(seed: int):
        sampler = config.build(episodes, torch.Generator().manual_seed(seed))
        return [sampler.sample(16) for _ in range(3)]

    first, again, other = batches(0), batches(0), batches(1)
    for a, b in zip(first, again):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(first[0]["rows"], other[0]["rows"])
    assert not torch.equal(first[0]["rows"], first[1]["rows"])
    assert torch.equal(torch.get_rng_state(), torch_state) and (np.random.get_state()[1] == numpy_state).all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_the_generator_s_state_is_all_there_is_to_resume(episodes, config):
    """A sampler built anew on the saved state goes on where the first one was."""
    generator = torch.Generator().manual_seed(0)
    sampler = config.build(episodes, generator)
    sampler.sample(16)
    state = generator.get_state()
    expected = sampler.sample(16)
    fresh = torch.Generator()
    fresh.set_state(state)
    found = config.build(episodes, fresh).sample(16)
    assert all(torch.equal(found[k], expected[k]) for k in expected)
