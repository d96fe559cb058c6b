"""Maze2D: the point is gymnasium-robotics', the walks are those of D4RL's controller, the rewards are the goal's."""

from __future__ import annotations

import contextlib
import io
import tempfile

import numpy as np
import pytest

from qhyer import envs
from qhyer.data import check, registry
from qhyer.data.episodes import Episodes, read_npz
from qhyer.data.generate import generate
from qhyer.data.generate.maze2d import Waypoints, path
from qhyer.data.generate.recipe import EpisodeSeeds, collector_for, recipe_for
from qhyer.errors import DataError
from qhyer.storage import read_sealed_json, sha256_file

NAMES = ("maze2d-umaze-v1", "maze2d-medium-v1", "maze2d-large-v1")


@pytest.fixture(scope="module")
def walks() -> dict[str, list[dict[str, np.ndarray]]]:
    """Walks enough for every cell to be met: of 1000 steps, as in the datasets."""
    made = {}
    for name, count in zip(NAMES, (4, 25, 50)):
        collector = collector_for(recipe_for(registry.get(name)))
        made[name] = [collector.episode(EpisodeSeeds(0, name, "train", index)) for index in range(count)]
    return made


# ----------------------------------------------------------------------------------------------------- environment


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_gymnasium_robotics_bit_for_bit(name, tmp_path, monkeypatch):
    import mujoco

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where theirs leaves its XML

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from gymnasium_robotics.envs.maze import maps
        from gymnasium_robotics.envs.maze.point_maze import PointMazeEnv
    ours, theirs = envs.make(name), PointMazeEnv(maze_map=getattr(maps, envs.MAZE2D[name][0]))
    theirs.reset(seed=0)
    rng = np.random.default_rng(0)
    start = ours.place(rng)
    mujoco.mj_resetData(theirs.model, theirs.data)
    theirs.point_env.set_state(start[:2], start[2:])
    push = np.repeat(rng.uniform(-2, 2, (20, 2)), 40, axis=0)  # long enough to run into walls, and beyond the limits
    for action in (push + rng.normal(size=push.shape)).astype(np.float32):
        assert np.array_equal(ours.move(action), theirs.step(action)[0]["observation"])
    for row, column in np.argwhere(np.asarray(theirs.maze.maze_map) == 0):  # the same cells, counted from below
        flipped = (len(theirs.maze.maze_map) - 1 - int(row), int(column))
        assert flipped in ours.cells and ours.cell_of(ours.centre(flipped)) == flipped
        assert np.array_equal(ours.centre(flipped), theirs.maze.cell_rowcol_to_xy((row, column)))
    assert len(ours.cells) == int((np.asarray(theirs.maze.maze_map) == 0).sum())


@pytest.mark.parametrize("name, limit", list(zip(NAMES, (300, 600, 800))))
def test_the_task_is_d4rls(name, limit):
    env = envs.make(name)
    assert envs.num_tasks(env) == 1
    starts = []
    for seed in range(500):
        observation, goal = envs.seeded_reset(env, seed, 1)
        cell = env.cell_of(observation)
        starts.append(cell)
        assert np.abs(observation[:2] - env.centre(cell)).max() <= 0.1 + 1e-6
        assert np.array_equal(goal, np.append(env.goal, [0, 0]).astype(np.float32))
    assert set(starts) == set(env.cells)  # the goal's own cell is one of them
    assert tuple(env.goal) == registry.get(name).task_goal

    total, reached, length, ended = 0.0, False, 0, False
    controller = Waypoints(env, np.random.default_rng(1))
    observation, _ = env.reset(seed=3)
    controller.aim(observation[:2], env.goal)
    while not ended:
        observation, reward, terminated, ended, info = env.step(controller.act(observation)[0])
        assert reward == float(np.linalg.norm(observation[:2] - env.goal) <= 0.5) and not terminated
        total, length, reached = total + reward, length + 1, reached or reward > 0
        assert info == {"success": reached, "return": total}
    assert length == limit and reached and total > limit / 3  # it arrives, and stays


def test_geometry_is_the_one_that_is_drawn():
    env = envs.make("maze2d-large-v1")
    geometry = envs.maze_geometry(env)
    offset = geometry["maze_offset"]
    for i, j in env.cells:
        assert np.array_equal(env.centre((i, j)), np.array([j, i]) * float(geometry["maze_unit"]) - offset)


# ------------------------------------------------------------------------------------------------------------ walks


def test_paths_are_shortest():
    free = np.array([[1, 1, 1], [1, 0, 1], [1, 0, 1]], bool)
    way = path(free, (2, 0), (2, 2))
    assert way == [(2, 0), (1, 0), (0, 0), (0, 1), (0, 2), (1, 2), (2, 2)]
    assert path(free, (1, 2), (1, 2)) == [(1, 2)]


@pytest.mark.parametrize("name", NAMES)
def test_walks_look_like_d4rls(name, walks):
    env = envs.make(name)
    rows = {key: np.concatenate([walk[key] for walk in walks[name]]) for key in walks[name][0]}
    visited = [env.cell_of(xy) for xy in rows["observations"][:, :2]]
    assert set(visited) == set(env.cells)  # every free cell, and no wall
    # a goal takes about the way to it: D4RL's segments are some 80 steps long in umaze, twice as long in medium
    steps_to_a_goal = len(visited) / rows["arrivals"].sum()
    assert steps_to_a_goal == pytest.approx({"umaze": 95, "medium": 185, "large": 260}[name.split("-")[1]], rel=0.25)
    assert 0.02 < rows["rewards"].mean() < 0.2
    assert 1.0 < np.abs(rows["observations"][:, 2:]).mean() < 3.0  # brisk: it overshoots
    assert np.abs(rows["actions"]).max() <= 1.0 and 0.1 < (np.abs(rows["actions"]) == 1.0).mean() < 0.6
    goals = rows["goals"]
    centres = np.stack([env.centre(env.cell_of(goal)) for goal in goals])
    assert np.abs(goals - centres).max() <= 0.1 + 1e-6 and len({env.cell_of(g) for g in goals}) > len(env.cells) / 2
    assert not check.find_problems(rows["observations"], rows["actions"], rows["terminals"])


@pytest.mark.parametrize("name", NAMES)
def test_rows_fit_together(name, walks):
    """Recorded actions replay to the recorded states; rewards and arrivals are those of the goal beside them."""
    collector = collector_for(recipe_for(registry.get(name)))
    env = collector.environment
    seeds = EpisodeSeeds(0, name, "train", 1)
    walk = walks[name][1]
    draws = np.random.default_rng(seeds.stream("actions"))
    draws.normal(0.0, 0.5, (1001, 2))
    observation = env.place(draws)
    for row in range(1000):
        assert np.array_equal(observation.astype(np.float32), walk["observations"][row])
        observation = env.move(walk["actions"][row])
    assert np.array_equal(observation.astype(np.float32), walk["observations"][-1]) and not walk["actions"][-1].any()
    distance = np.linalg.norm(walk["observations"][:, :2] - walk["goals"], axis=1)
    assert ((walk["rewards"] == (distance <= 0.5)) | (abs(distance - 0.5) < 1e-6)).all()
    changes = np.flatnonzero((np.diff(walk["goals"], axis=0) != 0).any(1)) + 1
    arrivals = np.flatnonzero(walk["arrivals"])
    assert len(arrivals) and set(arrivals) <= set(changes)
    distance = np.linalg.norm(walk["observations"][arrivals, :2] - walk["goals"][arrivals - 1], axis=1)
    assert (distance <= 0.1 + 1e-6).all()


def test_a_goal_that_is_not_reached_is_given_up(monkeypatch):
    collector = collector_for(recipe_for(registry.get("maze2d-umaze"), 200))
    monkeypatch.setattr(collector.environment, "limit", 5)
    walk = collector.episode(EpisodeSeeds(0, "x", "train", 0))
    kept = np.diff(np.flatnonzero((np.diff(walk["goals"], axis=0) != 0).any(1)))
    assert kept.max() <= 5 and not walk["arrivals"].all()


def test_same_bytes_whatever_the_number_of_workers(tmp_path):
    dataset = registry.get("maze2d-medium")
    made = {
        (workers, seed): generate(
            dataset, out=tmp_path / f"{workers}-{seed}", episodes=6, seed=seed, workers=workers, rows=80, progress=False
        )
        for workers, seed in ((1, 0), (2, 0), (1, 1))
    }
    assert made[1, 0].name == "maze2d-medium-v1.npz"
    assert sha256_file(made[1, 0]) == sha256_file(made[2, 0]) != sha256_file(made[1, 1])
    recorded = read_sealed_json(made[1, 0].with_suffix(".json"))
    assert set(recorded["versions"]) == {"qhyer", "gymnasium-robotics", "mujoco", "gymnasium", "numpy", "python"}
    assert recorded["environment"] == dataset.environment and recorded["settings"]["noise"] == 0.5


# ---------------------------------------------------------------------------------------------------------- rewards


def test_registered_data_has_the_rewards_of_the_task(tmp_path):
    dataset = registry.get("maze2d-umaze")
    file = generate(dataset, out=tmp_path, episodes=3, workers=1, rows=1001, validation=False, progress=False)
    arrays = read_npz(file)
    own = Episodes.load(file)
    assert np.array_equal(own.rewards.numpy(), arrays["rewards"])
    loaded, found = registry.load(file)
    assert found is dataset and loaded.goal_indices == (0, 1)
    near = np.linalg.norm(loaded.observations[:, :2].numpy() - np.float32([-1, 1]), axis=1) <= 0.5
    assert np.array_equal(loaded.rewards.numpy(), near.astype(np.float32)) and 0.02 < near.mean() < 0.4
    assert loaded.fingerprint != own.fingerprint
    # Pieces from goal to goal: the state of an arrival ends one and begins the next, and no step is lost.
    inside = arrays["arrivals"] & ~arrays["terminals"]
    inside[np.append(0, np.flatnonzero(arrays["terminals"])[:-1] + 1)] = False
    assert own.num_episodes == 3 and loaded.num_episodes == 3 + inside.sum() > 20
    assert loaded.num_transitions == own.num_transitions
    ends = loaded.ends[:-1]
    joined = (loaded.observations[ends] == loaded.observations[ends + 1]).all(-1)
    assert joined.sum() == inside.sum()


def test_rewards_are_optional_and_checked():
    observations, actions = np.zeros((6, 2)), np.zeros((6, 1))
    plain = Episodes.from_arrays(observations, actions, [2, 5])
    assert plain.rewards is None
    given = Episodes.from_arrays(observations, actions, [2, 5], rewards=[1, 2, 3, 4, 5, 6])
    assert given.rewards.tolist() == [1, 2, 3, 4, 5, 6]
    assert given.fingerprint != plain.fingerprint
    with pytest.raises(DataError, match="6 numbers, one a row"):
        Episodes.from_arrays(observations, actions, [2, 5], rewards=[1.0])
    with pytest.raises(DataError, match="not finite, the first in row 1"):
        Episodes.from_arrays(observations, actions, [2, 5], rewards=[0, np.inf, 0, 0, 0, 0])
