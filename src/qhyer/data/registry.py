"""The datasets there are: their environment, official size, and which coordinates make the goal.

Sizes are OGBench's (its generation commands) and D4RL's; goal coordinates are the paper's goal-dimension table, with
the choices it leaves open named in docs/deviations.md. Names are accepted with and without the "-v0" or "-v1".
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qhyer.data.episodes import FILES, Episodes
from qhyer.errors import UserError, did_you_mean

Kind = Literal["play", "noisy", "navigate", "stitch", "waypoint"]
RADIUS = 0.5  # of the task's goal, where there is one: D4RL's


@dataclass(frozen=True)
class Dataset:
    """One dataset we can generate, load and evaluate on."""

    name: str
    environment: str
    """gymnasium id registered by ogbench, or one of ours (envs.py)"""
    family: Literal["cube", "scene", "puzzle", "pointmaze", "antmaze"]
    kind: Kind
    episodes: int
    """official number of training episodes; validation has a tenth"""
    rows: int
    """rows per episode, the final state included"""
    goal_indices: tuple[int, ...]
    task_goal: tuple[float, ...] | None = None
    """D4RL's: the goal of the one task, by which rewards are relabelled when the data is loaded"""

    @property
    def is_maze(self) -> bool:
        return self.family in ("pointmaze", "antmaze")


def _cubes(count: int) -> tuple[int, ...]:
    """xyz of each cube; nine observation entries a cube, after the arm's nineteen."""
    return tuple(19 + 9 * cube + axis for cube in range(count) for axis in range(3))


# Cube xyz and quaternion, the two button states ("on" of each one-hot), drawer and window position and velocity.
_SCENE = (*range(19, 26), 29, 33, 36, 37, 38, 39)


def _buttons(count: int) -> tuple[int, ...]:
    """The "on" entry of each button's one-hot state; four observation entries a button."""
    return tuple(19 + 4 * button + 1 for button in range(count))


def _registry() -> dict[str, Dataset]:
    manipulation: list[tuple[str, Literal["cube", "scene", "puzzle"], int, tuple[int, ...]]] = [
        ("cube-single", "cube", 1000, _cubes(1)),
        ("cube-double", "cube", 1000, _cubes(2)),
        ("cube-triple", "cube", 3000, _cubes(3)),
        ("cube-quadruple", "cube", 5000, _cubes(4)),
        ("scene", "scene", 1000, _SCENE),
        ("puzzle-3x3", "puzzle", 1000, _buttons(9)),
        ("puzzle-4x4", "puzzle", 1000, _buttons(16)),
        ("puzzle-4x5", "puzzle", 3000, _buttons(20)),
        ("puzzle-4x6", "puzzle", 5000, _buttons(24)),
    ]
    mazes: list[tuple[str, Kind, int, int]] = [
        ("medium", "navigate", 1000, 1001),
        ("large", "navigate", 1000, 1001),
        ("giant", "navigate", 500, 2001),
        ("medium", "stitch", 5000, 201),
        ("large", "stitch", 5000, 201),
        ("giant", "stitch", 5000, 201),
    ]
    kinds: tuple[Kind, Kind] = ("play", "noisy")
    bodies: tuple[Literal["pointmaze"], Literal["antmaze"]] = ("pointmaze", "antmaze")
    datasets = [
        Dataset(f"{base}-{kind}-v0", f"{base}-v0", family, kind, episodes, 1001, goal)
        for base, family, episodes, goal in manipulation
        for kind in kinds
    ] + [
        Dataset(f"{body}-{size}-{kind}-v0", f"{body}-{size}-v0", body, kind, episodes, rows, (0, 1))
        for body in bodies
        for size, kind, episodes, rows in mazes
    ]
    # D4RL: a million steps in umaze, two in medium, four in large; one walk there, walks of 1000 steps here.
    datasets += [
        Dataset(f"maze2d-{size}-v1", f"maze2d-{size}-v1", "pointmaze", "waypoint", episodes, 1001, (0, 1), goal)
        for size, episodes, goal in (
            ("umaze", 1000, (-1.0, 1.0)),
            ("medium", 2000, (2.5, -2.5)),
            ("large", 4000, (3.5, -3.0)),
        )
    ]
    return {dataset.name: dataset for dataset in datasets}


DATASETS: dict[str, Dataset] = _registry()


def get(name: str) -> Dataset:
    """The dataset with this name, or an error that suggests the nearest ones."""
    for full in (name, f"{name}-v0", f"{name}-v1"):
        if full in DATASETS:
            return DATASETS[full]
    path = Path(name)
    if path.exists() or len(path.parts) > 1:
        what = "a folder" if path.is_dir() else "another file" if path.exists() else "not there"
        raise UserError(
            f"{name} is {what}: own data are read from npz or HDF5 (a file that ends in {', '.join(FILES)}; "
            "docs/data.md, 'Your own data', says how to make an npz)"
        )
    hint = did_you_mean(name, DATASETS, most=3)
    if own := [f"{name}{end}" for end in FILES if Path(f"{name}{end}").is_file()]:
        hint = f"; did you mean the file {own[0]}?"
    raise UserError(f"no dataset is called {name!r}{hint} (`qhyer list datasets` names them all)")


def data_dir() -> Path:
    """Where datasets are kept: $QHYER_DATA, else ./data."""
    return Path(os.environ.get("QHYER_DATA", "data"))


def find(name: str) -> Path | None:
    """The npz of a registered dataset, in our folder or in OGBench's own; None when it is not on this disk."""
    dataset = get(name)
    for folder in (data_dir(), Path.home() / ".ogbench" / "data"):
        path = folder / f"{dataset.name}.npz"
        if path.is_file():
            return path
    return None


def load(source: str | Path, device: str = "cpu") -> tuple[Episodes, Dataset | None]:
    """Episodes from a registered name, or from a file (an npz is registered if its name is a dataset's).

    Where a dataset has a task's goal, the rewards are that goal's, whatever goals the data was collected with, and its
    walks are cut where they reached one: D4RL's loaders do so, and its published scores come from such pieces.
    """
    path = Path(source)
    if path.suffix in FILES:
        dataset = DATASETS.get(path.stem) if path.suffix == ".npz" else None
        if dataset is None:
            return Episodes.load(path, device=device), None
        return _load(path, dataset, device), dataset
    dataset = get(str(source))
    found = find(dataset.name)
    if found is None:
        raise UserError(
            f"{dataset.name} is not on this disk (looked in {data_dir()} and ~/.ogbench/data); "
            f"`qhyer data generate {dataset.name}` makes it"
        )
    return _load(found, dataset, device), dataset


def origin_of(episodes: Episodes) -> dict[str, Any]:
    """What run.json keeps of the file they came from. An official dataset has episodes of one length: another is an
    own setting, too."""
    found = dict(episodes.origin)
    made = found.get("generated")
    if made and made["dataset"] in DATASETS:
        rows, usual = (made.get("settings") or {}).get("rows"), DATASETS[made["dataset"]].rows
        own = {} if rows in (None, usual) else {"rows": rows}
        found["generated"] = {**made, "own": {**made["own"], **own}}
    return found


def _load(path: Path, dataset: Dataset, device: str) -> Episodes:
    return Episodes.load(
        path,
        goal=dataset.goal_indices,
        name=dataset.name,
        device=device,
        task_goal=dataset.task_goal,
        radius=RADIUS,
        pieces=dataset.task_goal is not None,
    )
