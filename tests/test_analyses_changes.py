"""Changes in the data: swings and trembling counted by hand, a slow count beside the fast one, the command."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qhyer import analyses
from qhyer.analyses import _output, changes
from qhyer.cli import main
from qhyer.data import registry
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError

# --------------------------------------------------------------------------------------------------------- by hand


def swings(*episodes: list[float], low: float = 0.0, high: float = 1.0) -> int:
    values = np.concatenate([np.asarray(each, dtype=np.float32) for each in episodes])
    numbers = np.repeat(np.arange(len(episodes)), [len(each) for each in episodes])
    return changes.count_swings(values, numbers, low, high)


def test_a_swing_goes_from_one_outer_quarter_to_the_other() -> None:
    assert swings([0.0, 1.0]) == swings([1.0, 0.0]) == 1
    assert swings([0.1, 0.4, 0.6, 0.9, 0.5, 0.2]) == 2  # up, and back
    assert swings([0.25, 0.75]) == 1  # the quarters' own edges
    assert swings([0.0, 0.7]) == swings([0.3, 1.0]) == 0  # not all the way
    assert swings([-9.0, 9.0, 9.0]) == 1  # outliers lie in the outer quarters


def test_wobbling_in_the_middle_is_no_swing() -> None:
    assert swings([0.4, 0.6] * 20) == 0
    assert swings([0.1, *[0.4, 0.6] * 20, 0.1]) == 0  # back where it came from
    assert swings([0.1, *[0.4, 0.6] * 20, 0.9]) == 1
    assert swings([0.1, 0.3, 0.1, 0.3, 0.9, 0.7, 0.9]) == 1  # nor is wobbling at a quarter's edge


def test_no_swing_across_episodes() -> None:
    assert swings([0.0, 0.0], [1.0, 1.0]) == 0
    assert swings([0.0, 0.5], [0.5, 1.0]) == 0  # the second does not know where the first was
    assert swings([0.0, 1.0], [0.0, 1.0]) == 2


def test_scale_is_the_range() -> None:
    assert swings([-3.0, 5.0, -3.0], low=-3.0, high=5.0) == 2
    assert swings([0.0, 1.0, 0.0], low=-3.0, high=5.0) == 0


def test_binary_and_constant_coordinates() -> None:
    flips = np.array([0, 1, 1, 0, 1, 1], dtype=np.float32)
    assert changes.value_range(flips)[0] < changes.value_range(flips)[1]
    assert changes.count_swings(flips, np.zeros(6, int), *changes.value_range(flips)) == 3
    constant = np.full(6, 0.7, dtype=np.float32)
    assert changes.count_swings(constant, np.zeros(6, int), *changes.value_range(constant)) == 0


def test_range_has_no_outliers_but_is_never_empty_by_that() -> None:
    values = np.linspace(0.0, 1.0, 10_001, dtype=np.float32)
    values[5000] = 1e6
    low, high = changes.value_range(values)
    assert low == pytest.approx(0.001, abs=2e-4) and high == pytest.approx(0.999, abs=2e-4)
    rare = np.zeros(10_000, dtype=np.float32)
    rare[4000] = 1.0  # a lamp lit in one row: both quantiles are 0
    assert changes.value_range(rare) == (0.0, 1.0)
    assert changes.count_swings(rare, np.zeros(10_000, int), 0.0, 1.0) == 2


def test_tremble_by_hand() -> None:
    """Changes of the first dimension 1, -1 and 0, of the second 0: the 9s stand beside final states."""
    actions = np.array([[0, 0.5], [1, 0.5], [0, 0.5], [9, 9], [-1, 0.2], [-1, 0.2], [9, 9]], dtype=np.float32)
    episode = np.array([0, 0, 0, 0, 1, 1, 1])
    final = np.array([0, 0, 0, 1, 0, 0, 1], dtype=bool)
    assert changes.tremble(actions, episode, final) == pytest.approx([math.sqrt(2 / 3), 0.0])
    steady = actions + np.arange(7, dtype=np.float32)[:, None]  # a drift is no trembling
    assert changes.tremble(steady, episode, final) == pytest.approx([math.sqrt(2 / 3), 0.0], abs=1e-6)
    with pytest.raises(UserError, match="no episode has two actions"):
        changes.tremble(actions[:2], np.array([0, 0]), np.array([False, True]))


def walks(seed: int, lengths: tuple[int, ...]) -> Episodes:
    """Smooth walks, a button and a constant; four observations, of which the last three make the goal."""
    rng = np.random.default_rng(seed)
    rows = sum(lengths)
    walk = np.cumsum(rng.normal(size=rows))
    button = np.cumsum(rng.uniform(size=rows) < 0.1) % 2
    observations = np.stack([rng.normal(size=rows), walk, button, np.ones(rows)], axis=1)
    return Episodes.from_arrays(
        observations, rng.uniform(-1, 1, (rows, 2)), np.cumsum(lengths) - 1, goal=(1, 2, 3), name="walks"
    )


def slowly(episodes: Episodes) -> tuple[list[float], list[float]]:
    """The definitions, row by row."""
    counts, differences = [], []
    bounds = list(zip(episodes.starts.tolist(), episodes.ends.tolist()))
    for index in episodes.goal_indices:
        values = episodes.observations[:, index].double().numpy()
        low, high = np.quantile(values, [0.001, 0.999])
        count = 0
        for start, end in bounds:
            before = ""
            for value in values[start : end + 1]:
                quarter = (
                    "low" if value <= low + (high - low) / 4 else "high" if value >= high - (high - low) / 4 else ""
                )
                count += low < high and bool(quarter and before and quarter != before)
                before = quarter or before
        counts.append(count / len(bounds))
    for start, end in bounds:
        differences += [
            (episodes.actions[row + 1] - episodes.actions[row]).tolist() for row in range(start, end - 1)
        ]  # the row `end` has no action
    return counts, np.std(differences, axis=0).tolist()


def test_a_dataset_agrees_with_the_definitions_row_by_row() -> None:
    episodes = walks(3, (200, 350, 2, 120))
    found = changes.measure(episodes, None)
    counts, shakes = slowly(episodes)
    assert [item["swings"] for item in found["goal"]] == counts
    assert counts[0] > 0 and counts[1] > 5 and counts[2] == 0
    assert [item["tremble"] for item in found["action"]] == pytest.approx(shakes, rel=1e-6)
    assert [item["label"] for item in found["goal"]] == ["1", "2", "3"]
    assert found["episodes"] == 4 and found["steps"] == (200 + 350 + 2 + 120 - 4) / 4


def test_every_dataset_has_names_for_its_goal() -> None:
    for dataset in registry.DATASETS.values():
        goal, _ = changes.labels(dataset, dataset.goal_indices, 5)
        assert len(set(goal)) == len(dataset.goal_indices)
    goal, action = changes.labels(registry.get("scene-play"), registry.get("scene-play").goal_indices, 5)
    assert {"21 cube z", "29 button 1", "33 button 2", "36 drawer", "38 window"} <= set(goal)
    assert action[-1] == "4 gripper"


# --------------------------------------------------------------------------------------------------------- command


def save(path: Path, episodes: Episodes, **more: Any) -> None:
    ends = np.zeros(len(episodes.observations), dtype=bool)
    ends[episodes.ends.numpy()] = True
    np.savez(path, observations=episodes.observations.numpy(), actions=episodes.actions.numpy(), terminals=ends, **more)


def command(*args: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["analyze", "changes", *args])
    assert not ended.value.code


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QHYER_DATA", str(tmp_path))
    still, lively = walks(0, (60, 90)), walks(1, (80, 80, 50))
    save(tmp_path / "pointmaze-medium-stitch-v0.npz", still)  # a registered name: its goal is (0, 1)
    save(tmp_path / "mine.npz", lively, goal_indices=[1, 2, 3])
    out = tmp_path / "out"
    names = ["pointmaze-medium-stitch", str(tmp_path / "mine.npz")]
    command("--datasets", *names, "--out", str(out))
    said = capsys.readouterr().out
    result = json.loads((out / "changes.json").read_text())
    assert [data["dataset"] for data in result["datasets"]] == ["pointmaze-medium-stitch-v0", "mine"]
    assert result["settings"]["fingerprints"] == [still.fingerprint, lively.fingerprint]
    maze, mine = result["datasets"]
    assert [item["label"] for item in maze["goal"]] == ["0 x", "1 y"]
    counts, shakes = slowly(lively)
    assert [item["swings"] for item in mine["goal"]] == pytest.approx(counts)
    assert [item["tremble"] for item in mine["action"]] == pytest.approx(shakes, rel=1e-6)
    assert f"{counts[1]:.2f}" in said and f"{shakes[0]:.3f}" in said
    with (out / "changes.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == (2 + 2) + (3 + 2)
    values = [float(line["value"]) for line in lines if line["dataset"] == "mine"]
    assert values == pytest.approx(counts + shakes, rel=1e-6)
    assert all((out / f"changes.{kind}").stat().st_size > 1000 for kind in ("png", "svg"))

    command("--datasets", *names, "--out", str(out))
    assert "is there already" in capsys.readouterr().out
    with pytest.raises(UserError, match="other settings"):
        changes.run(datasets=("pointmaze-medium-stitch",), out=out)
    changes.run(datasets=("pointmaze-medium-stitch",), out=out, overwrite=True)
    assert len(json.loads((out / "changes.json").read_text())["datasets"]) == 1


def test_datasets_alike_share_a_table() -> None:
    one, two, other = (changes.measure(walks(seed, (40, 40)), None) for seed in range(3))
    other["goal"] = other["goal"][:2]
    grouped = changes.groups({"datasets": [one, other, two]})
    assert [[data["fingerprint"] for data in group] for group in grouped] == [
        [one["fingerprint"], two["fingerprint"]],
        [other["fingerprint"]],
    ]
    header, lines = changes.table(grouped[0])
    assert len(header) == 3 and all(len(line) == 3 for line in lines)


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QHYER_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))  # nor OGBench's own folder
    with pytest.raises(UserError, match=r"scene-play-v0 is not on this disk.*data generate"):
        changes.run(out=tmp_path / "out")
    with pytest.raises(UserError, match="no dataset at"):
        changes.run(datasets=(str(tmp_path / "none.npz"),), out=tmp_path / "out")
    with pytest.raises(UserError, match="did you mean scene-play"):
        changes.run(datasets=("scene-plai",), out=tmp_path / "out")
    with pytest.raises(UserError, match="at least one"):
        changes.run(datasets=(), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_it_is_found() -> None:
    assert not analyses.needs_run("changes")
    assert analyses.question("changes").startswith("How often do the data change")


def test_a_table_shows_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of columns and of datasets may have units in brackets, which are no markup."""
    _output.show(["", "walks[/s]"], [["swings, v[m/s]", "1"], ["tremble, [/rad]", "2"]])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("walks[/s]", "swings, v[m/s]", "tremble, [/rad]"))
