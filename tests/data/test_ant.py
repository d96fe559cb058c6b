"""The ant: a policy that is the trained one without its trainer, and mazes that are walked with it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from qhyer import cli
from qhyer.data import registry
from qhyer.data.episodes import read_npz
from qhyer.data.generate import ant as ants
from qhyer.data.generate import ant_training, generate
from qhyer.data.generate.ant_config import AntConfig
from qhyer.data.generate.recipe import AntRecipe, EpisodeSeeds, collector_for, recipe_for
from qhyer.errors import CorruptFile, UserError
from qhyer.storage import read_sealed_json, sha256_file

TINY = AntConfig(
    steps=300, width=16, batch_size=16, environments=2, updates=1, warmup=100, turn_every=20, evaluate_every=200,
    episodes=1,
)  # fmt: skip
STITCH = registry.get("antmaze-medium-stitch")


@pytest.fixture(scope="module")
def limp(tmp_path_factory) -> Path:
    """An ant that moves and gets nowhere: random layers."""
    rng = np.random.default_rng(0)
    sizes = [ants.OBSERVATION, 24, 24, ants.ACTIONS]
    layers = [
        (rng.normal(size=(after, before)).astype(np.float32) / np.float32(np.sqrt(before)), np.zeros(after, np.float32))
        for before, after in itertools.pairwise(sizes)
    ]
    folder = tmp_path_factory.mktemp("ants") / "limp"
    ant_training.write(folder, layers, TINY, {"steps_taken": 0})
    return folder


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, arguments)))
    return int(ended.value.code or 0)


# ---------------------------------------------------------------------------------------------------------- the policy


def test_the_world_may_be_turned_under_the_ant():
    """Two ants, one turned by an angle with its direction: they see the same, step after step."""
    import gymnasium

    rng = np.random.default_rng(1)
    for angle in (0.7, -2.1):
        first, second = (gymnasium.make("online-ant-v0", disable_env_checker=True).unwrapped for _ in range(2))
        first.reset(seed=3)
        second.reset(seed=3)
        qpos, qvel = first.data.qpos.copy(), first.data.qvel.copy()
        qpos[3:7] = rng.normal(size=4)  # any attitude, also upside down
        qpos[3:7] /= np.linalg.norm(qpos[3:7])
        qpos[2] = 1.5
        first.set_state(qpos, qvel)
        c, s = np.cos(angle), np.sin(angle)
        plane = np.array([[c, -s], [s, c]])
        a, b = np.cos(angle / 2), np.sin(angle / 2)
        w, x, y, z = qpos[3:7]
        turned, moving = qpos.copy(), qvel.copy()
        turned[:2] = plane @ qpos[:2]
        turned[3:7] = a * w - b * z, a * x - b * y, a * y + b * x, a * z + b * w
        moving[:2] = plane @ qvel[:2]
        second.set_state(turned, moving)
        direction = np.array([0.6, -0.8])
        for _ in range(8):
            here = ants.seen_from_the_body(first._get_obs(), direction)
            there = ants.seen_from_the_body(second._get_obs(), plane @ direction)
            np.testing.assert_allclose(here, there, atol=2e-4)
            other = ants.seen_from_the_body(second._get_obs(), direction)
            assert np.abs(here - other).max() > 0.1  # the direction is seen
            action = rng.uniform(-1, 1, 8)
            first.do_simulation(action, 5)
            second.do_simulation(action, 5)


def test_the_written_ant_acts_as_the_trained_one(tmp_path):
    """Random layers would agree as well: these have been trained, so that biases and all have moved."""
    model = ant_training.untrained(TINY)
    fresh = ant_training.actor_layers(model)
    model.learn(TINY.steps)
    layers = ant_training.actor_layers(model)
    assert all(np.abs(a - b).max() > 1e-4 for old, new in zip(fresh, layers) for a, b in zip(old, new))
    ant_training.write(tmp_path / "ant", layers, TINY, {"steps_taken": TINY.steps})
    policy = ants.load(tmp_path / "ant")
    views = np.random.default_rng(0).normal(scale=2.0, size=(50, ants.OBSERVATION)).astype(np.float32)
    theirs, _ = model.predict(views, deterministic=True)
    np.testing.assert_allclose([policy(view) for view in views], theirs, atol=1e-5)
    assert policy(views[0]).dtype == np.float32 and np.abs(theirs).max() > 0.01


def test_training_from_the_command_line(tmp_path, monkeypatch, capsys):
    """A few hundred steps: the file is whole, says how it was made, and the same seed makes it again."""
    monkeypatch.chdir(tmp_path)
    options = [f"--{f.name.replace('_', '-')}={getattr(TINY, f.name)}" for f in dataclasses.fields(TINY)]
    assert call("data", "ant", *options, "--out", "one") == 0
    assert "wrote one" in capsys.readouterr().out
    about = ants.about(tmp_path / "one")
    assert about["config"] == dataclasses.asdict(TINY) and about["widths"] == [29, 16, 16, 8]
    assert [entry["steps"] for entry in about["history"]] == [200, 300]
    assert 0.0 <= about["walked"]["arrived"] <= 1.0 and about["walked"]["episodes"] == 1
    assert {"stable-baselines3", "torch", "mujoco", "ogbench"} <= set(about["versions"])
    ant_training.train(TINY, tmp_path / "two", quiet=True)
    assert ants.about(tmp_path / "two")["sha256"] == about["sha256"]
    assert call("data", "ant", *options, "--out", "one") == 2
    assert "--overwrite replaces it" in " ".join(capsys.readouterr().err.split())


def test_an_ant_is_judged_by_arriving_on_its_feet_and_then_by_speed():
    values = [
        (0.0, 0.0, 0.0, 0.0),
        (0.5, 0.1, 0.5, 20.0),
        (0.5, 0.0, 0.5, 30.0),
        (0.5, 0.0, 0.4, 20.0),
        (0.9, 0.0, 0.1, 40.0),
    ]
    walks = [ant_training.Walked(40, *four) for four in values]
    assert sorted(walks, key=lambda walked: walked.score) == walks


def test_how_an_ant_walked(monkeypatch):
    """One walk ends at the centre of the goal's cell, one at the goal, one on its back and nowhere."""
    course = ant_training.Course(0)
    maze = course.collector.environment
    centre, away = np.array(maze.ij_to_xy((1, 1))), np.array(maze.ij_to_xy((1, 2)))
    maze.cur_goal_xy = centre + np.array([0.9, -0.9])  # 1.27 m off the centre
    feet, back = (1.0, 0.0, 0.0, 0.0), (0.1, 0.8, 0.6, 0.0)
    ends = iter([(centre, feet, []), (maze.cur_goal_xy, feet, [99, 100]), (away, back, [])])

    def episode(seeds: EpisodeSeeds) -> dict[str, np.ndarray]:
        place, attitude, course.collector.arrivals = next(ends)
        states = np.zeros((201, 29))
        states[:80, :2], states[80:, :2] = away, place
        states[:, 3:7] = attitude
        return {"observations": states}

    monkeypatch.setattr(course.collector, "episode", episode)
    walked = course.walk(ants.AntPolicy([]), 3)
    assert walked == ant_training.Walked(3, 1 / 3, 1 / 3, 1 / 3, 20.0)


def test_the_extra_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(UserError, match=r"install qhyer\[ant\]"):
        ant_training.train(TINY, tmp_path / "ant", quiet=True)
    with pytest.raises(UserError, match="steps must be at least 1"):
        AntConfig(steps=0)


# ------------------------------------------------------------------------------------------------------------ the mazes


def test_an_episode_is_the_ants_walk_with_noise(limp):
    recipe = recipe_for(STITCH, rows=60, ant=limp)
    assert isinstance(recipe, AntRecipe) and recipe.noise == 0.2
    seeds = EpisodeSeeds(0, STITCH.name, "train", 2)
    policy = ants.load(limp)
    still = collector_for(dataclasses.replace(recipe, noise=0.0))
    episode = still.episode(seeds)
    maze = still.environment  # type: ignore[attr-defined]
    assert {key: array.shape for key, array in episode.items()} == {
        "observations": (60, 29), "actions": (60, 8), "terminals": (60,), "qpos": (60, 15), "qvel": (60, 14),
    }  # fmt: skip
    assert np.array_equal(episode["observations"], np.hstack([episode["qpos"], episode["qvel"]]))
    assert episode["terminals"].tolist() == [False] * 59 + [True]
    for observation, action in zip(episode["observations"].astype(float), episode["actions"]):
        there, _ = maze.get_oracle_subgoal(observation[:2], maze.cur_goal_xy)
        direction = (there - observation[:2]) / np.linalg.norm(there - observation[:2])
        np.testing.assert_allclose(action, policy.act(observation, direction), atol=1e-4)

    noisy = collector_for(recipe).episode(seeds)
    first = noisy["actions"][0] - episode["actions"][0]  # the same start, so the noise alone
    assert np.array_equal(noisy["observations"][0], episode["observations"][0]) and np.abs(first).max() > 0.05


def test_same_bytes_whatever_the_number_of_workers(tmp_path, limp):
    made = {}
    for name, workers in (("one", 1), ("three", 3)):
        options = {"episodes": 4, "rows": 25, "workers": workers, "seed": 5, "progress": False, "ant": limp}
        made[name] = generate(STITCH, out=tmp_path / name, **options)  # type: ignore[arg-type]
    assert sha256_file(made["one"]) == sha256_file(made["three"])
    recorded = read_sealed_json(made["one"].with_suffix(".json"))
    assert recorded["settings"]["ant"] == sha256_file(limp / ants.WEIGHTS)
    assert "folder" not in recorded["settings"] and str(limp) not in json.dumps(recorded)
    assert (recorded["environment"], recorded["rows"], recorded["settings"]["noise"]) == ("antmaze-medium-v0", 100, 0.2)
    arrays = read_npz(made["one"])
    assert np.flatnonzero(arrays["terminals"]).tolist() == [24, 49, 74, 99]

    other = tmp_path / "other"
    layers = [(weight + np.float32(0.1), bias) for weight, bias in ants.load(limp).layers]
    ant_training.write(other, layers, TINY, {"steps_taken": 0})
    with pytest.raises(UserError, match=r"ant [0-9a-f]{64} there, [0-9a-f]{64} asked for"):
        generate(STITCH, out=tmp_path / "one", episodes=4, rows=25, workers=1, seed=5, progress=False, ant=other)


def test_from_generation_to_evaluation(tmp_path, monkeypatch, limp, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "DATASETS", dict(registry.DATASETS))
    name = "antmaze-medium-navigate-v0"
    registry.DATASETS[name] = dataclasses.replace(registry.DATASETS[name], rows=40)  # the official 1001 take long
    make = ("data", "generate", "antmaze-medium-navigate", "--episodes", 3, "--workers", 1, "--ant", limp)
    assert call(*make) == 0
    assert call("data", "check", "antmaze-medium-navigate") == 0
    assert "nothing wrong in 120 rows, 3 episodes" in " ".join(capsys.readouterr().out.split())
    small = ("--agent.hidden", 16, 16, "--agent.batch-size", 8, "--device", "cpu")
    assert call("train", "gcbc", "antmaze-medium-navigate", "--steps", 4, "--out", "run", *small) == 0
    assert call("eval", "run", "--episodes", 1, "--tasks", 1, "--workers", 0) == 0
    assert "success" in capsys.readouterr().out
    assert json.loads(Path("run/run.json").read_text())["environment"] == "antmaze-medium-v0"


@pytest.mark.parametrize("size", ["medium", "large", "giant"])
@pytest.mark.parametrize("kind", ["navigate", "stitch"])
def test_the_official_sizes(size, kind, limp):
    dataset = registry.get(f"antmaze-{size}-{kind}")
    assert dataset.is_maze and dataset.goal_indices == (0, 1)
    long = (500, 2001) if size == "giant" else (1000, 1001)
    assert (dataset.episodes, dataset.rows) == ((5000, 201) if kind == "stitch" else long)
    recipe = recipe_for(dataset, ant=limp)
    assert (recipe.environment, recipe.kind, recipe.noise) == (f"antmaze-{size}-v0", kind, 0.2)


def test_errors_say_what_to_do(tmp_path, limp, monkeypatch):
    with pytest.raises(UserError, match=r"holds no ant .*qhyer data ant --out FOLDER"):
        generate(STITCH, out=tmp_path, ant=tmp_path / "nothing")
    monkeypatch.setattr(ants, "RELEASED", tmp_path / "nothing")
    with pytest.raises(UserError, match="none comes with the package: `qhyer data ant --out FOLDER` trains one"):
        generate(STITCH, out=tmp_path)
    with pytest.raises(UserError, match="pointmaze-medium-stitch-v0 is not one"):
        generate(registry.get("pointmaze-medium-stitch"), out=tmp_path, ant=limp)

    damaged = tmp_path / "damaged"
    ant_training.write(damaged, ants.load(limp).layers, TINY, {})
    recipe = recipe_for(STITCH, rows=2, ant=damaged)
    raw = bytearray((damaged / ants.WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (damaged / ants.WEIGHTS).write_bytes(raw)
    with pytest.raises(CorruptFile, match="damaged"):
        collector_for(recipe)
    layers = [(weight * np.float32(2.0), bias) for weight, bias in ants.load(limp).layers]
    ant_training.write(damaged, layers, TINY, {})  # another ant has taken its place
    with pytest.raises(UserError, match="holds another ant"):
        collector_for(recipe)


def test_a_worker_needs_no_torch(limp):
    import subprocess

    code = (
        "import sys; from pathlib import Path; from qhyer.data.generate import ant; "
        "ant.load(Path(sys.argv[1])); assert not {'torch', 'stable_baselines3'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code, str(limp)], check=True, timeout=120)


# ----------------------------------------------------------------------------------------------------- the released ant


def test_the_released_ant_is_whole_and_small():
    about = ants.about(ants.find(None))
    assert (ants.RELEASED / ants.WEIGHTS).stat().st_size < 200_000
    assert about["widths"] == [ants.OBSERVATION, 128, 128, ants.ACTIONS]
    policy = ants.load(ants.RELEASED)
    view = np.linspace(-1, 1, ants.OBSERVATION, dtype=np.float32)
    assert policy(view).shape == (ants.ACTIONS,) and np.isfinite(policy(view)).all()


@pytest.mark.slow
@pytest.mark.parametrize("maze", ["medium", "large", "giant"])
def test_the_released_ant_walks(maze):
    """On walks that it was not chosen by. docs/antmaze.md has the numbers; these bounds leave room for luck."""
    walked = ant_training.Course(100, maze).walk(ants.load(ants.RELEASED), 60)
    assert walked.arrived >= 0.9 and walked.fallen <= 0.1 and walked.steps_per_cell <= 30.0, walked


@pytest.mark.slow
def test_the_released_ant_gets_about():
    collector = collector_for(recipe_for(registry.get("antmaze-medium-navigate")))
    goals, cells = [], set()
    for index in range(10):
        states = collector.episode(EpisodeSeeds(100, "about", "train", index))["observations"]
        goals.append(len(collector.arrivals))  # type: ignore[attr-defined]
        cells |= {collector.environment.xy_to_ij(place) for place in states[:, :2]}  # type: ignore[attr-defined]
    assert np.mean(goals) >= 2.0 and len(cells) >= 20
