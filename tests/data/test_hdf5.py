"""HDF5 of D4RL and Minari: small files in their layouts, with the defects that such files are known to have."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from qhyer import envs
from qhyer.cli import main
from qhyer.data import registry
from qhyer.data.episodes import Episodes, goal_rewards, read_npz
from qhyer.data.generate import generate
from qhyer.data.hdf5 import read
from qhyer.errors import CorruptFile, DataError, UserError
from qhyer.storage import read_sealed_json


def write(path: Path, arrays: dict) -> Path:
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            file[key] = array
    return path


def maze2d(rows: int = 2500, every: int = 100) -> dict[str, np.ndarray]:
    """A walk on a circle in D4RL's maze2d layout; a new goal every 100 steps."""
    angle = 0.01 * np.arange(rows)
    xy = np.stack([2 + np.cos(angle), 2 + np.sin(angle)], 1)
    observations = np.concatenate([xy, np.gradient(xy, 0.01, axis=0)], 1).astype(np.float32)
    goals = np.repeat(np.random.default_rng(0).uniform(1, 3, (rows // every + 1, 2)), every, axis=0)[:rows]
    near = np.linalg.norm(xy - [3, 2], axis=1) <= 0.5
    return {
        "observations": observations,
        "actions": np.tile(np.sin(angle)[:, None], 2).astype(np.float32),
        "rewards": near.astype(np.float32),
        "terminals": np.zeros(rows, bool),
        "timeouts": np.arange(rows) % every == every - 1,
        "infos/goal": goals.astype(np.float32),
        "infos/qpos": xy,
        "infos/qvel": xy,
    }


def antmaze(episodes: int = 3, rows: int = 50) -> dict[str, np.ndarray]:
    """Episodes that walk from the origin along x; the last ten steps of each are at the goal."""
    rng = np.random.default_rng(1)
    observations = rng.normal(size=(episodes * rows, 29)).astype(np.float32)
    observations[:, 0] = np.tile(0.2 * np.arange(rows), episodes)
    observations[:, 1] = 0
    at_goal = np.tile(np.arange(rows) >= rows - 10, episodes)
    return {
        "observations": observations,
        "actions": rng.uniform(-1, 1, (episodes * rows, 8)).astype(np.float32),
        "rewards": at_goal.astype(np.float32),
        "terminals": at_goal,
        "timeouts": np.tile(np.arange(rows) == rows - 1, episodes),
        "infos/goal": np.tile(np.float32([9, 0]), (episodes * rows, 1)),
    }


# ------------------------------------------------------------------------------------------------------------ maze2d


def test_maze2d_is_one_walk_cut_every_thousand_steps(tmp_path):
    stored = maze2d()
    arrays, notes = read(write(tmp_path / "maze2d-umaze-sparse-v1.hdf5", stored))
    ends = np.flatnonzero(arrays["terminals"])
    assert ends.tolist() == [1000, 2001, 2501]  # 2499 transitions; a piece begins where the one before ends
    rows = np.concatenate([np.arange(0, 1001), np.arange(1000, 2001), np.arange(2000, 2500)])
    assert np.array_equal(arrays["observations"], stored["observations"][rows])
    assert np.array_equal(arrays["rewards"], stored["rewards"][rows])  # of the state: not moved
    assert np.array_equal(arrays["goals"], stored["infos/goal"][rows])
    assert np.array_equal(arrays["arrivals"], stored["timeouts"][rows])  # and not ends (D4RL#85)
    inside = ~arrays["terminals"]
    assert np.array_equal(arrays["actions"][inside], stored["actions"][rows][inside])
    assert not arrays["actions"][ends].any()
    assert notes == ["one walk without resets, cut every 1000 steps; arrivals at goals are kept as `arrivals`"]


def test_maze2d_without_timeouts_with_repeats_and_with_jumps(tmp_path):
    stored = maze2d(600)
    del stored["timeouts"]
    again = np.sort(np.append(np.arange(600), [99, 199]))  # the state before a new goal, twice
    stored = {key: array[again] for key, array in stored.items()}
    stored["observations"][400:, :2] += 5
    arrays, notes = read(write(tmp_path / "x.h5", stored))
    assert notes[0] == "there are no timeouts (D4RL#176): the changes of infos/goal say where goals were reached"
    assert "2 rows that repeat" in notes[1] and "cut at 1 places" in notes[2]
    assert len(arrays["observations"]) == 600 and np.flatnonzero(arrays["terminals"]).tolist() == [397, 599]
    assert np.flatnonzero(arrays["arrivals"]).tolist() == [99, 199, 299, 399, 499]


def test_cut_from_goal_to_goal(tmp_path, capsys):
    source = write(tmp_path / "maze2d-umaze-sparse-v1.hdf5", maze2d(350))
    with pytest.raises(SystemExit) as stopped:
        main(["data", "convert", str(source), str(tmp_path / "cut.npz"), "--cut", "arrivals"])
    assert stopped.value.code == 0
    arrays = read_npz(tmp_path / "cut.npz")
    assert np.diff(np.flatnonzero(arrays["terminals"]), prepend=-1).tolist() == [100, 101, 101, 51]
    begin = 0
    for piece, end in enumerate(np.flatnonzero(arrays["terminals"]), start=0):
        goals = arrays["goals"][begin : end + 1]
        assert (goals == goals[0]).all(), piece
        begin = end + 1
    assert "cut where a goal was reached" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------- antmaze


def test_antmaze_ends_at_timeouts_and_not_at_the_goal(tmp_path):
    stored = antmaze()
    arrays, notes = read(write(tmp_path / "antmaze-umaze-v2.hdf5", stored))
    assert np.flatnonzero(arrays["terminals"]).tolist() == [49, 99, 149]
    assert len(notes) == 1 and "terminals marks 30 steps at the goal" in notes[0]
    assert np.array_equal(arrays["observations"], stored["observations"])
    rewards = arrays["rewards"].reshape(3, 50)  # of the step that led there: one row later
    assert np.array_equal(rewards[:, 1:], stored["rewards"].reshape(3, 50)[:, :-1]) and not rewards[:, 0].any()
    episodes = Episodes.load(tmp_path / "antmaze-umaze-v2.hdf5")
    assert (episodes.goal_indices, episodes.name, episodes.num_transitions) == ((0, 1), "antmaze-umaze-v2-hdf5", 147)
    assert episodes.rewards.sum() == 27


def test_antmaze_v0_whose_timeouts_are_late(tmp_path):
    """D4RL#77: the flag is a step after the end, so that a transition teleports; the row between is alone."""
    stored = antmaze()
    stored["timeouts"] = np.append(False, stored["timeouts"][:-1])
    arrays, notes = read(write(tmp_path / "antmaze-umaze-v0.hdf5", stored))
    step = np.abs(np.diff(arrays["observations"][:, 0]))
    assert (step[~arrays["terminals"][:-1]] < 1).all()
    assert "3 ends are not marked" in notes[0] or "2 ends are not marked" in notes[0]
    assert any("single row" in note for note in notes)
    assert len(np.flatnonzero(arrays["terminals"])) == 3

    del stored["timeouts"]
    arrays, notes = read(write(tmp_path / "none.hdf5", stored))
    assert np.flatnonzero(arrays["terminals"]).tolist() == [49, 99, 149]
    assert "no timeouts (D4RL#176): ends are where positions jump" in " ".join(notes)


def test_other_flat_files_end_at_terminals_too(tmp_path):
    rng = np.random.default_rng(0)
    stored = {
        "observations": rng.normal(size=(30, 3)),
        "actions": np.full((30, 1), 1.0001),
        "rewards": np.arange(30.0)[:, None],
        "terminals": np.arange(30) % 10 == 9,
    }
    arrays, notes = read(write(tmp_path / "hop.hdf5", stored))
    assert np.flatnonzero(arrays["terminals"]).tolist() == [9, 19, 29] and "goal_indices" not in arrays
    assert arrays["actions"].max() == 1.0 and "clipped" in notes[-1]
    assert arrays["rewards"][:12].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 10]


# ------------------------------------------------------------------------------------------------------------ Minari


def test_a_file_as_wide_as_maze2d_keeps_its_episodes(tmp_path):
    """Four states and two actions are not D4RL's alone: without its name or its goals, ends are what terminals say."""
    rng = np.random.default_rng(0)
    steps = rng.normal(0.0, 0.1, (5 * 61, 4))
    steps[::61] *= 30.0
    ends = np.zeros(5 * 61, bool)
    ends[60::61] = True
    arrays = dict(observations=steps.cumsum(0), actions=rng.uniform(-1, 1, (5 * 61, 2)), rewards=np.zeros(5 * 61))
    path = write(tmp_path / "mine.hdf5", {**arrays, "terminals": ends, "timeouts": np.zeros_like(ends)})
    found, notes = read(path)
    assert found["terminals"].sum() == 5 and len(found["observations"]) == 5 * 61 and "goal_indices" not in found
    assert any("as wide as D4RL's maze2d" in note for note in notes)


def minari(path: Path, lengths=(3, 0, 5), inside: bool = True, **changes) -> Path:
    rng = np.random.default_rng(2)
    with h5py.File(path, "w") as file:
        for number, steps in enumerate(lengths):
            group = file.create_group(f"episode_{number}")
            achieved = rng.normal(size=(steps + 1, 2))
            rest = rng.normal(size=(steps + 1, 2))
            group["observations/observation"] = np.concatenate([achieved, rest], 1) if inside else rest
            group["observations/achieved_goal"] = achieved
            group["observations/desired_goal"] = np.full((steps + 1, 2), number)
            group["actions"] = rng.uniform(-1, 1, (steps, 2))
            group["rewards"] = np.arange(steps) + 1.0
            group["terminations"] = np.zeros(steps, bool)
            group["truncations"] = np.arange(steps) == steps - 1
            for key, value in changes.items():
                del group[key]
                if value is not None:
                    group[key] = value
    return path


def test_minari(tmp_path):
    (tmp_path / "umaze-v2" / "data").mkdir(parents=True)
    path = minari(
        tmp_path / "umaze-v2" / "data" / "main_data.hdf5", lengths=(3, 0, *[2] * 9, 5)
    )  # episode_10 follows episode_9
    arrays, notes = read(path)
    lengths = np.diff(np.flatnonzero(arrays["terminals"]), prepend=-1).tolist()
    assert lengths == [4, *[3] * 9, 6] and notes == ["1 episodes without a step are left out"]
    assert arrays["goal_indices"].tolist() == [0, 1] and arrays["observations"].shape == (37, 4)
    assert arrays["rewards"][:5].tolist() == [0, 1, 2, 3, 0]
    assert arrays["goals"][[0, 4, -1], 0].tolist() == [0, 2, 11]
    assert not arrays["actions"][3].any()
    assert Episodes.load(path).num_episodes == 11 and Episodes.load(path).name == "umaze-v2-hdf5"

    outside, notes = read(minari(tmp_path / "ant.hdf5", inside=False))
    assert outside["observations"].shape[1] == 4 and outside["goal_indices"].tolist() == [0, 1]
    assert "2 numbers are put before it" in notes[0]


def test_minari_without_goals(tmp_path):
    with h5py.File(tmp_path / "plain.hdf5", "w") as file:
        file["episode_0/observations"] = np.zeros((4, 3))
        file["episode_0/actions"] = np.zeros((3, 1))
    arrays, _ = read(tmp_path / "plain.hdf5")
    assert set(arrays) == {"observations", "actions", "terminals"}


# ------------------------------------------------------------------------------------------------------ wrong layouts


def test_wrong_layouts_are_told(tmp_path):
    (tmp_path / "text.hdf5").write_text("not this")
    with pytest.raises(CorruptFile, match="cannot be read as HDF5"):
        read(tmp_path / "text.hdf5")
    with pytest.raises(UserError, match="no dataset at"):
        read(tmp_path / "none.hdf5")
    with pytest.raises(DataError, match=r"unknown layout \(it holds data, mask\): D4RL's is flat"):
        read(write(tmp_path / "robomimic.hdf5", {"data": [1], "mask": [1]}))
    flat = maze2d(200)
    with pytest.raises(DataError, match="lacks terminals"):
        read(write(tmp_path / "a.hdf5", {key: flat[key] for key in ("observations", "actions")}))
    with pytest.raises(DataError, match="unequal numbers of steps: 200 of observations, 199 of actions"):
        read(write(tmp_path / "b.hdf5", {**flat, "actions": flat["actions"][:-1]}))
    with pytest.raises(DataError, match=r"must be \(steps, columns\)"):
        read(write(tmp_path / "c.hdf5", {**flat, "observations": flat["observations"][:, 0]}))
    with pytest.raises(DataError, match="single row"):
        every = antmaze()
        read(write(tmp_path / "d.hdf5", {**every, "timeouts": np.ones(150, bool)}))
    with pytest.raises(DataError, match="episode_0 lacks actions"):
        read(minari(tmp_path / "e.hdf5", actions=None))
    with pytest.raises(DataError, match="4 observations and 4 actions; Minari keeps one observation more"):
        read(minari(tmp_path / "f.hdf5", actions=np.zeros((4, 2))))
    with pytest.raises(DataError, match="no episode with a step"):
        read(minari(tmp_path / "g.hdf5", lengths=(0,)))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"actions": np.array([["a", "b"]] * 200, "S")}, "actions holds text, not numbers"),
        ({"rewards": np.array(["a"] * 200, "S")}, "rewards holds text, not numbers"),
        ({"timeouts": np.array(["a"] * 200, "S")}, "timeouts holds text, not numbers"),
        ({"observations": 1.0}, r"observations has the shape \(\); it must be \(steps, columns\)"),
        ({"observations": np.zeros((200, 4), complex)}, "observations holds complex128, not numbers"),
        ({"infos/goal": np.zeros(200)}, r"infos/goal has the shape \(200,\)"),
        ({"actions/inside": np.zeros((200, 2))}, "actions is a group, not an array"),
        ({key: np.zeros((0, 2)) for key in maze2d(2)}, "has no steps"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_flat_files_of_an_odd_kind_are_told(changes, words, tmp_path):
    kept = {key: value for key, value in maze2d(200).items() if not any(name.startswith(key) for name in changes)}
    path = write(tmp_path / "odd.hdf5", {**kept, **changes})
    with pytest.raises(DataError, match=words) as refused:
        read(path)
    assert str(path) in str(refused.value) and run("data", "check", str(path)) == 1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"observations/achieved_goal": np.zeros(4)}, r"episode_0/achieved_goal has the shape \(4,\); it must be"),
        ({"observations/observation": np.zeros(4)}, r"episode_0/observation has the shape \(4,\)"),
        ({"observations/desired_goal": np.zeros(2)}, r"episode_0/desired_goal has the shape \(2,\)"),
        ({"observations/desired_goal": np.zeros((1, 2))}, "4 observations and 1 of desired_goal"),
        ({"observations/achieved_goal": np.zeros((3, 2))}, "4 observations and 3 of achieved_goal"),
        ({"observations": np.zeros(4)}, r"observations of episode_0 has the shape \(4,\)"),
        ({"actions": np.zeros(3)}, r"actions of episode_0 has the shape \(3,\)"),
        ({"actions": 1.0}, r"actions of episode_0 has the shape \(\)"),
        ({"actions": np.array([["a"]] * 3, "S")}, "actions of episode_0 holds text"),
        ({"rewards": np.array(["a"] * 3, "S")}, "rewards of episode_0 holds text"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_episodes_of_an_odd_kind_are_told(changes, words, tmp_path):
    path = minari(tmp_path / "odd.hdf5", lengths=(3,), **changes)
    with pytest.raises(DataError, match=words) as refused:
        read(path)
    assert str(path) in str(refused.value) and run("data", "check", str(path)) == 1


def test_an_episode_that_is_an_array(tmp_path):
    for value in (np.zeros(3), 1.0):
        with pytest.raises(DataError, match="episode_0 is an array"):
            read(write(tmp_path / "odd.hdf5", {"episode_0": value}))


# ---------------------------------------------------------------------------------------------------------- commands


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def test_check_info_and_convert(tmp_path, capsys):
    path = write(tmp_path / "antmaze-umaze-v2.hdf5", antmaze())
    assert run("data", "check", str(path)) == 0
    said = capsys.readouterr().out
    assert "when read: terminals marks 30 steps" in said
    assert run("data", "info", str(path)) == 0
    assert "columns 0, 1" in capsys.readouterr().out

    out = tmp_path / "ant.npz"
    assert run("data", "convert", str(path), str(out)) == 0
    assert "3 episodes" in capsys.readouterr().out
    recorded = read_sealed_json(out.with_suffix(".json"))
    assert recorded["source"] == path.name and recorded["episodes"] == 3 and len(recorded["notes"]) == 1
    direct, converted = Episodes.load(path), Episodes.load(out)
    assert direct.fingerprint == converted.fingerprint and converted.goal_indices == (0, 1)
    for wrong in (["ant.h5"], ["maze2d-umaze-v1.npz"], ["ant.npz"], ["b.npz", "--cut", "arrivals"]):
        assert run("data", "convert", str(path), str(tmp_path / wrong[0]), *wrong[1:]) == 2
    errors = capsys.readouterr().err
    for words in ("is an npz", "generated dataset's name", "--overwrite", "only maze2d data do"):
        assert words in errors
    assert run("data", "convert", str(path), str(out), "--overwrite") == 0
    assert run("data", "check", str(write(tmp_path / "bad.hdf5", {"observations": [[1.0]]}))) == 1


def test_generated_data_can_be_cut_too(tmp_path):
    dataset = registry.get("maze2d-umaze")
    path = generate(dataset, out=tmp_path, episodes=2, workers=1, validation=False, progress=False)
    assert run("data", "convert", str(path), str(tmp_path / "pieces.npz"), "--cut", "arrivals") == 0
    whole, pieces = registry.load(path)[0], Episodes.load(tmp_path / "pieces.npz")
    assert pieces.goal_indices == (0, 1) and pieces.num_transitions == whole.num_transitions == 2000
    assert pieces.num_episodes == 2 + read_npz(path)["arrivals"][1:-1].sum()
    arrays = read_npz(tmp_path / "pieces.npz")
    last = arrays["observations"][pieces.ends[0], :2]
    assert np.linalg.norm(last - arrays["goals"][pieces.ends[0]]) <= 0.1 + 1e-6


@pytest.mark.parametrize("maze", ["umaze", "medium", "large"])
def test_legacy_coordinates_become_ours(maze, tmp_path, capsys):
    """A generated walk, written as D4RL would have it, comes back; and its steps obey our simulator."""
    dataset = registry.get(f"maze2d-{maze}")
    ours = read_npz(generate(dataset, out=tmp_path, episodes=1, workers=1, validation=False, progress=False))
    env = envs.make(dataset.environment)
    height, width = env.maze_map.shape

    def theirs(xy):  # D4RL: x is the row from above, y the column, centres at whole numbers less 0.2
        return np.stack([(height - 1) / 2 - xy[:, 1] - 0.2, xy[:, 0] + (width - 1) / 2 - 0.2], 1)

    row, column = envs.MAZE2D[dataset.environment][1]
    np.testing.assert_allclose(theirs(env.goal[None])[0], [row - 0.2, column - 0.2])
    turned = lambda vectors: np.stack([-vectors[:, 1], vectors[:, 0]], 1)
    states = ours["observations"]
    stored = {
        "observations": np.concatenate([theirs(states[:, :2]), turned(states[:, 2:])], 1).astype(np.float32),
        "actions": turned(ours["actions"]),
        "rewards": np.zeros(1001),
        "terminals": np.zeros(1001, bool),
        "timeouts": ours["arrivals"],
        "infos/goal": theirs(ours["goals"]),
    }
    source = write(tmp_path / f"maze2d-{maze}-sparse-v1.hdf5", stored)
    assert run("data", "convert", str(source), str(tmp_path / "back.npz"), "--maze", maze) == 0
    back = read_npz(tmp_path / "back.npz")
    for key in ("observations", "actions", "goals"):
        np.testing.assert_allclose(back[key], ours[key], atol=2e-6)
    assert np.array_equal(back["arrivals"], ours["arrivals"])
    mine = goal_rewards(states, dataset.goal_indices, dataset.task_goal, registry.RADIUS)
    assert (back["rewards"] == mine).mean() > 0.999
    other = {"umaze": "large", "medium": "umaze", "large": "medium"}[maze]
    assert run("data", "convert", str(source), str(tmp_path / "wrong.npz"), "--maze", other) == 2
    assert "would lie in walls" in capsys.readouterr().err


def test_training_reads_hdf5(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "maze2d-umaze-v1.hdf5", maze2d(300))
    options = ["--steps", "2", "--agent.batch-size", "4", "--agent.hidden", "8", "--device", "cpu", "--out", "run"]
    assert run("train", "gcbc", str(path), *options) == 0
    from qhyer import runs

    info = runs.read(Path("run"))
    assert info["dataset"] == "maze2d-umaze-v1-hdf5" and info["environment"] is None  # other coordinates than ours
    assert info["spec"]["goal_indices"] == [0, 1]


def own_file(path: Path, **others) -> Path:
    rng = np.random.default_rng(0)
    ends = np.arange(30) % 10 == 9
    arrays = {"observations": rng.normal(size=(30, 3)), "actions": rng.uniform(-1, 1, (30, 2)), "terminals": ends}
    return write(path, {**arrays, **others})


def test_a_file_of_ones_own_needs_no_rewards_and_may_name_its_goal(tmp_path):
    plain, notes = read(own_file(tmp_path / "mine.hdf5"))
    assert "rewards" not in plain and notes == [] and np.flatnonzero(plain["terminals"]).tolist() == [9, 19, 29]
    named = {"goal_indices": np.array([2]), "observation_names": np.array([b"x", b"y", b"z"])}
    told = Episodes.load(own_file(tmp_path / "named.hdf5", **named))
    assert told.goal_indices == (2,)


def test_ends_of_a_file_of_ones_own(tmp_path):
    with pytest.raises(DataError, match="neither terminals nor timeouts marks an end"):
        read(own_file(tmp_path / "none.hdf5", terminals=np.zeros(30, bool)))
    arrays, (note,) = read(own_file(tmp_path / "cut.hdf5", terminals=np.arange(30) == 9))
    assert "the last row is not marked" in note and np.flatnonzero(arrays["terminals"]).tolist() == [9, 29]


def test_rewards_of_last_steps_have_no_state(tmp_path):
    ends = np.arange(30) % 10 == 9
    arrays, (note,) = read(own_file(tmp_path / "end.hdf5", terminals=ends, rewards=ends.astype(np.float32)))
    assert "those of 3 last steps are left out" in note and not arrays["rewards"].any()
    arrays, notes = read(own_file(tmp_path / "way.hdf5", terminals=ends, rewards=np.float32(np.arange(30) % 10 == 4)))
    assert not notes and np.flatnonzero(arrays["rewards"]).tolist() == [5, 15, 25]
