"""Runs on disk as the trainer and evaluator write them, small enough to check by hand."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HEADER = ["run", "agent", "preset", "dataset", "seed", "step", "task", "episode"]
HEADER += ["env_seed", "success", "length", "seconds"]
MazeRun = Callable[..., Path]


def write_run(
    root: Path,
    agent: str,
    seed: int,
    outcomes: Mapping[int, Sequence[int]],
    *,
    name: str | None = None,
    dataset: str = "pointmaze-medium-navigate-v0",
    preset: str = "demo",
    step: int = 200,
    earlier: Mapping[int, Mapping[int, Sequence[int]]] | None = None,
    config: Mapping[str, Any] | None = None,
    maze: bool = False,
    returns: Sequence[float] = (),
) -> Path:
    """A run whose last evaluation has these outcomes: task → success of each episode. With `returns`, one for each
    row, it is one of Maze2D: the environment is the dataset's own."""
    name = name or f"{agent}-{seed}"
    folder = root / name
    folder.mkdir(parents=True)
    info = {
        "agent": agent,
        "preset": preset,
        "dataset": dataset,
        "environment": dataset if returns else "pointmaze-medium-v0",
        "seed": seed,
        "config": {"tau": 0.95, **(config or {})},
        "train": {"log_every": 100},
        "data": {"fingerprint": "abcdef0123456789", "episodes": 200, "transitions": 200_000},
        "versions": {"qhyer": "0.1.0", "torch": "2.13.0"},
        "command": f"qhyer train {agent} {dataset} --seed {seed}",
        "hardware": "x86_64 CPU, 2 threads",
        "parameters": 123456,
    }
    (folder / "run.json").write_text(json.dumps(info))
    with open(folder / "metrics.jsonl", "w") as file:
        for at in (100, 200):
            row = {"step": at, "stage": "joint", "loss": 100 / at, "actor/bc": 50 / at}
            file.write(json.dumps(row) + "\n")
    (folder / "timings.jsonl").write_text('{"step": 100, "seconds": 60.0}\n{"step": 200, "seconds": 150.0}\n')
    evaluations = {**(earlier or {}), step: outcomes}
    with open(folder / "episodes.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*HEADER, "return"] if returns else HEADER)
        remaining = iter(returns)
        for at, tasks in evaluations.items():
            for task, results in tasks.items():
                for episode, success in enumerate(results):
                    about = [name, agent, preset, dataset, seed, at, task, episode]
                    measured = [1000 + episode, success, 10, 0.5, *itertools.islice(remaining, 1)]
                    writer.writerow([*about, *measured])
    if maze:
        write_maze(folder, step, outcomes)
    return folder


def write_maze(folder: Path, step: int, outcomes: Mapping[int, Sequence[int]]) -> None:
    """A 4 × 4 box with one path for each task, and a density map."""
    walls = np.ones((4, 4), dtype=int)
    walls[1:3, 1:3] = 0
    observations = np.full((len(outcomes), 6, 4), np.nan, dtype=np.float32)
    observations[:, :3] = np.array([[0, 0, 0, 0], [2, 1, 0, 0], [4, 4, 0, 0]])
    (folder / "rollouts").mkdir()
    np.savez_compressed(
        folder / "rollouts" / f"{step:08d}.npz",
        task=np.array(list(outcomes)),
        episode=np.zeros(len(outcomes), dtype=int),
        success=np.array([bool(results[0]) for results in outcomes.values()]),
        length=np.full(len(outcomes), 2),
        observations=observations,
        goals=np.tile(np.array([4, 4, 0, 0], dtype=np.float32), (len(outcomes), 1)),
        maze_map=walls,
        maze_unit=np.asarray(4.0),
        maze_offset=np.array([4.0, 4.0]),
    )
    (folder / "analyses").mkdir()
    x = np.linspace(-2, 6, 9)
    field = -np.add.outer(x**2, x**2)
    field[0, :] = np.nan
    np.savez(
        folder / "analyses" / "goal_density.npz",
        x=x,
        y=x,
        log_density=field[None],
        goals=np.array([[4.0, 4.0]]),
        titles=np.array(["goal of task 1"]),
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two agents: qhyer with two seeds, gcbc with one. Two tasks of four episodes."""
    root = tmp_path / "runs"
    write_run(
        root,
        "qhyer",
        0,
        {1: [1, 1, 1, 1], 2: [1, 1, 0, 0]},
        maze=True,
        earlier={100: {1: [0] * 4, 2: [0] * 4}},
    )
    write_run(root, "qhyer", 1, {1: [1, 1, 1, 0], 2: [1, 0, 0, 0]}, earlier={100: {1: [0] * 4, 2: [1] * 4}})
    write_run(root, "gcbc", 0, {1: [1, 0, 0, 0], 2: [0, 0, 0, 0]})
    return root


@pytest.fixture
def make_run() -> MazeRun:
    return write_run
