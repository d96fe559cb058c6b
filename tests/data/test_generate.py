"""Generation: official settings, episodes that depend on their seed alone, and files that survive a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from qhyer.data import registry
from qhyer.data.episodes import Episodes, read_npz
from qhyer.data.generate import generate, measure_rate, runner
from qhyer.data.generate.maze import MazeCollector, distances, is_hallway
from qhyer.data.generate.recipe import EpisodeSeeds, collector_for, recipe_for
from qhyer.errors import CorruptFile, UserError
from qhyer.storage import read_sealed_json, sha256_file

MAZE = registry.get("pointmaze-medium-stitch")
ROWS = 30


def make(folder: Path, **options: object) -> Path:
    settings = {"episodes": 4, "seed": 3, "workers": 1, "rows": ROWS, "progress": False, **options}
    return generate(settings.pop("dataset", MAZE), out=folder, **settings)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- episodes


def test_recipes_are_the_official_ones():
    for dataset in registry.DATASETS.values():
        if dataset.family == "antmaze":
            continue  # needs an ant: test_ant.py
        recipe = recipe_for(dataset)
        assert recipe.rows == dataset.rows
        if dataset.is_maze:
            assert recipe.noise == 0.5
        else:
            assert recipe.noise == 0.1
            assert recipe.noise_smoothing == (0.5 if dataset.kind == "play" else 0.0)
            assert recipe.min_norm == (0.4 if dataset.kind == "noisy" else 0.0)
            random_share = {"cube": 0.1, "scene": 0.1, "puzzle": 0.2}[dataset.family]
            assert recipe.p_random_action == (random_share if dataset.kind == "noisy" else 0.0)
    stacking = {name: recipe_for(registry.get(f"cube-{name}-play")).stacking for name in ("single", "quadruple")}
    assert stacking == {"single": (0.0, 0.0), "quadruple": (0.1, 0.5)}


@pytest.mark.parametrize(
    "name",
    ["pointmaze-medium-navigate", "cube-double-noisy", "scene-play", "puzzle-3x3-noisy", "cube-single-play"],
)
def test_episodes_depend_on_their_seed_alone(name):
    dataset = registry.get(name)
    recipe = recipe_for(dataset, 300 if dataset.is_maze else 110)  # long enough to draw a second target
    collector = collector_for(recipe)
    state = np.random.get_state()[1].copy()
    first = collector.episode(EpisodeSeeds(0, dataset.name, "train", 7))
    assert np.array_equal(np.random.get_state()[1], state)  # the caller's random numbers are left alone
    others = [collector.episode(EpisodeSeeds(0, dataset.name, "train", index)) for index in (1, 2)]
    np.random.seed(99)
    again = collector.episode(EpisodeSeeds(0, dataset.name, "train", 7))
    for key, array in first.items():
        assert array.tobytes() == again[key].tobytes(), key
    elsewhere = collector.episode(EpisodeSeeds(0, dataset.name, "validation", 7))
    for other in (*others, elsewhere):
        assert not np.array_equal(other["observations"], first["observations"])

    assert first["observations"].dtype == first["actions"].dtype == np.float32
    assert np.isfinite(first["actions"]).all() and np.abs(first["actions"]).max() <= 1.0
    assert first["terminals"].tolist() == [False] * (recipe.rows - 1) + [True]
    assert all(len(array) == recipe.rows for array in first.values())
    assert max(dataset.goal_indices) < first["observations"].shape[1]
    assert ("button_states" in first) == (dataset.family in ("scene", "puzzle"))
    if dataset.family == "puzzle":  # the file's states are those of the observations
        on = first["observations"][:, list(dataset.goal_indices)]
        assert np.array_equal(on, first["button_states"])


def test_recorded_actions_replay_to_the_recorded_states():
    """Row t + 1 is where action t led from row t: the row convention, and float32 actions lose nothing."""
    dataset = registry.get("cube-single-play")
    collector = collector_for(recipe_for(dataset, 120))
    seeds = EpisodeSeeds(0, dataset.name, "train", 0)
    episode = collector.episode(seeds)
    environment = collector.environment  # type: ignore[attr-defined]
    observation, _ = environment.reset(seed=seeds.stream("environment"))
    for row, action in enumerate(episode["actions"]):
        assert np.array_equal(observation.astype(np.float32), episode["observations"][row])
        observation = environment.step(action)[0]


def test_scene_episodes_are_redone_until_the_cube_stays_in_view(monkeypatch):
    from qhyer.data.generate import manipulation

    qpos = np.zeros(25)
    assert manipulation.cube_is_visible(qpos)
    qpos[15] = 0.3
    assert not manipulation.cube_is_visible(qpos)
    qpos[15:17] = -0.31, 0.07  # in the drawer
    assert manipulation.cube_is_visible(qpos)
    qpos[16] = 0.02
    assert not manipulation.cube_is_visible(qpos)

    dataset = registry.get("scene-play")
    collector = collector_for(recipe_for(dataset, 3))
    seeds = EpisodeSeeds(0, dataset.name, "train", 0)
    first = collector.episode(seeds)
    verdicts = iter([False, True, False, True, True, True])  # gone in row 0, gone in row 1, stays
    monkeypatch.setattr(manipulation, "cube_is_visible", lambda _: next(verdicts))
    redone = collector.episode(seeds)
    assert not np.array_equal(first["observations"], redone["observations"])
    assert next(verdicts, None) is None


def test_mazes_walk_as_they_should():
    collector = MazeCollector(recipe_for(registry.get("pointmaze-medium-stitch"), 201))
    environment = collector.environment
    for cell in collector.cells:  # our search agrees with the oracle's
        oracle = environment.get_oracle_subgoal(environment.ij_to_xy(cell), environment.ij_to_xy(cell))[1]
        ours = distances(collector.free, cell)
        assert {c: int(oracle[c]) for c in ours} == ours
        assert sum(value >= 0 for value in oracle[collector.free]) == len(ours)
    corridor = np.array([[0, 0, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    assert is_hallway(corridor, (1, 2)) is False  # a junction
    assert is_hallway(np.array([[0, 0, 0], [1, 1, 1], [0, 0, 0]], bool), (1, 1))

    starts, ends = [], []
    for index in range(20):
        episode = collector.episode(EpisodeSeeds(0, "stitch", "train", index))
        starts.append(environment.xy_to_ij(episode["observations"][0]))
        ends.append(environment.xy_to_ij(episode["observations"][-1]))
    reached = [distances(collector.free, a).get(b) for a, b in zip(starts, ends)]
    assert np.mean([d == 4 for d in reached]) > 0.9  # arrives, and stays
    assert len(set(starts)) > 5


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("name", ["pointmaze-medium-stitch", "cube-single-noisy"])
def test_same_bytes_whatever_the_number_of_workers(tmp_path, name):
    dataset = registry.get(name)
    one = make(tmp_path / "one", dataset=dataset, workers=1)
    three = make(tmp_path / "three", dataset=dataset, workers=3)
    other = make(tmp_path / "other", dataset=dataset, workers=1, seed=4)
    assert sha256_file(one) == sha256_file(three)
    assert one.with_suffix(".json").read_bytes() == three.with_suffix(".json").read_bytes()
    assert sha256_file(one) != sha256_file(other)


def test_files_and_sidecar(tmp_path):
    path = make(tmp_path, episodes=12)
    assert path == tmp_path / "pointmaze-medium-stitch-v0.npz"
    names = {item.name for item in tmp_path.iterdir()}
    stem = "pointmaze-medium-stitch-v0"
    assert names == {f"{stem}.npz", f"{stem}.json", f"{stem}-val.npz", f"{stem}-val.json"}
    recorded = read_sealed_json(path.with_suffix(".json"))
    assert recorded["sha256"] == sha256_file(path)
    assert (recorded["seed"], recorded["episodes"], recorded["rows"]) == (3, 12, 12 * ROWS)
    assert (recorded["split"], recorded["environment"]) == ("train", "pointmaze-medium-v0")
    assert recorded["settings"]["noise"] == 0.5
    assert set(recorded["versions"]) == {"qhyer", "ogbench", "mujoco", "gymnasium", "numpy", "python"}
    episodes = Episodes.load(path)
    assert episodes.num_episodes == 12 and episodes.num_transitions == 12 * (ROWS - 1)
    assert Episodes.load(tmp_path / f"{stem}-val.npz").num_episodes == 1
    with zipfile.ZipFile(path) as file:
        assert {item.date_time for item in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {item.compress_type for item in file.infolist()} == {zipfile.ZIP_STORED}


def test_without_validation(tmp_path):
    make(tmp_path, validation=False)
    assert len(list(tmp_path.iterdir())) == 2


def test_joined_file_is_the_concatenation(tmp_path):
    chunks = []
    for index in range(3):
        arrays = {"terminals": np.arange(4) == 3, "x": np.random.default_rng(index).normal(size=(4, 2))}
        chunks.append(tmp_path / f"{index}.npz")
        runner.write_chunk(chunks[-1], arrays)
    runner.join_npz(chunks, tmp_path / "all.npz")
    with np.load(tmp_path / "all.npz") as joined:
        for key in ("terminals", "x"):
            assert np.array_equal(joined[key], np.concatenate([np.load(chunk)[key] for chunk in chunks]))
            assert joined[key].dtype == np.load(chunks[0])[key].dtype


def test_finished_file_is_left_alone_and_other_settings_are_refused(tmp_path, monkeypatch):
    path = make(tmp_path)
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(runner, "collector_for", lambda recipe: pytest.fail("nothing is to be done"))
    assert make(tmp_path) == path and path.stat().st_mtime_ns == before
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"seed 3 there, 4 asked for.*--overwrite"):
        make(tmp_path, seed=4)
    with pytest.raises(UserError, match="episodes 4 there, 5 asked for"):
        make(tmp_path, episodes=5)
    digest = sha256_file(path)
    assert sha256_file(make(tmp_path, seed=4, overwrite=True)) != digest
    Episodes.load(path)

    path.with_suffix(".json").unlink()
    with pytest.raises(UserError, match="without a sidecar"):
        make(tmp_path, seed=4)
    make(tmp_path, seed=4, overwrite=True)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match="damaged"):
        make(tmp_path, seed=4)
    make(tmp_path, seed=4, overwrite=True)
    Episodes.load(path)


def test_nonsense_is_refused(tmp_path):
    for options in ({"episodes": 0}, {"workers": 0}, {"seed": -1}, {"rows": 1}, {"address": "here:1"}):
        with pytest.raises(UserError):
            make(tmp_path, **options)
    with pytest.raises(UserError, match="folder"):
        make(tmp_path / "file.npz")
    assert not list(tmp_path.iterdir())


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    make_episode, done = runner._make, []

    def limited(*arguments):
        if len(done) == count:
            raise KeyboardInterrupt
        done.append(1)
        make_episode(*arguments)

    monkeypatch.setattr(runner, "_make", limited)


def test_goes_on_after_an_interruption(tmp_path, monkeypatch, capfd):
    whole = sha256_file(make(tmp_path / "whole"))
    folder = tmp_path / "cut"
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        make(folder)
    monkeypatch.undo()
    work = folder / ".pointmaze-medium-stitch-v0.partial"
    chunks = sorted(work.glob("*.npz"))
    assert len(chunks) == 3 and not list(folder.glob("*.npz"))
    damaged = bytearray(chunks[1].read_bytes())
    damaged[bytes(damaged).index(np.load(chunks[1])["observations"].tobytes()) + 9] ^= 1
    chunks[1].write_bytes(damaged)  # is made again, not used
    (work / ".partial-train-000003.npz-1-ab").write_bytes(b"half a file")
    assert sha256_file(make(folder, progress=True)) == whole
    assert "going on after 2 of 5 episodes" in capfd.readouterr().err
    assert not work.exists()


def test_episodes_of_other_settings_are_not_mixed_in(tmp_path, monkeypatch, capfd):
    whole = sha256_file(make(tmp_path / "whole"))
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "cut", seed=8)
    monkeypatch.undo()
    assert sha256_file(make(tmp_path / "cut", progress=True)) == whole
    assert "other settings" in capfd.readouterr().err


def test_killed_between_data_and_sidecar(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "write_sealed_json", killed)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path)
    monkeypatch.undo()
    path = make(tmp_path)
    assert read_sealed_json(path.with_suffix(".json"))["sha256"] == sha256_file(path)


def test_two_at_once_are_told(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    work = tmp_path / ".pointmaze-medium-stitch-v0.partial"
    work.mkdir()
    with open(work / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process"):
            make(tmp_path)
    make(tmp_path)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_killed_with_workers_goes_on_and_leaves_no_process(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from pathlib import Path
            from qhyer.data import registry
            from qhyer.data.generate import generate

            if __name__ == "__main__":
                dataset = registry.get("pointmaze-giant-navigate")
                generate(dataset, out=Path(sys.argv[1]), episodes=20, workers=2, rows=600)
            """
        )
    )
    folder = tmp_path / "cut"
    process = subprocess.Popen([sys.executable, str(script), str(folder)], start_new_session=True)
    work = folder / ".pointmaze-giant-navigate-v0.partial"
    deadline = time.monotonic() + 60
    while len(list(work.glob("train-*.npz"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # the workers notice and go
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("workers outlived the process that started them")
    kept = {chunk.name: chunk.stat().st_mtime_ns for chunk in work.glob("train-*.npz")}
    assert 3 <= len(kept) < 20 and not list(folder.glob("*.npz"))

    dataset = registry.get("pointmaze-giant-navigate")
    resumed = generate(dataset, out=folder, episodes=20, workers=1, rows=600, progress=False)
    whole = generate(dataset, out=tmp_path / "whole", episodes=20, workers=1, rows=600, progress=False)
    assert sha256_file(resumed) == sha256_file(whole)
    assert len(read_npz(resumed)["observations"]) == 20 * 600


def test_measure_rate():
    rate = measure_rate(registry.get("cube-single-play"), 1, rows=40)
    assert rate["steps"] == 40 and rate["generation_steps_per_s"] > 0
    assert rate["ratio"] == pytest.approx(rate["generation_steps_per_s"] / rate["replay_steps_per_s"])
    with pytest.raises(UserError):
        measure_rate(MAZE)
