"""What analyses of maze data share: small datasets made on the spot, walls, distances, rows that lie nearby."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qhyer import envs
from qhyer.data import registry
from qhyer.data.generate.maze import distances
from qhyer.errors import UserError
from qhyer.evaluate import EvalConfig, plan

WALL, INK, SOFT = "#d3d7dd", "#1b1d21", "#5d626b"

Geometry = Mapping[str, np.ndarray]


def maze_dataset(name: str) -> registry.Dataset:
    dataset = registry.get(name)
    if not dataset.is_maze:
        raise UserError(f"{dataset.name} is not a maze's; give pointmaze-medium-navigate, for example")
    return dataset


def small_data(dataset: registry.Dataset, episodes: int, seed: int, workers: int | None, quiet: bool) -> Path:
    """This many episodes of a maze's dataset, made here unless they are there already."""
    from qhyer.data.generate.runner import generate

    folder = registry.data_dir() / f"{dataset.name.removesuffix('-v0')}-{episodes}-s{seed}"
    return generate(
        dataset, out=folder, episodes=episodes, seed=seed, workers=workers, validation=False, progress=not quiet
    )


class Maze:
    """Walls, tasks and the radius within which a goal counts as reached."""

    def __init__(self, environment: str) -> None:
        env = envs.make(environment)
        geometry = envs.maze_geometry(env)
        if geometry is None:
            raise UserError(f"{environment} is not a maze; this analysis needs one")
        self.environment, self.geometry = environment, geometry
        self.radius = float(getattr(env.unwrapped, "_goal_tol", envs.RADIUS))
        self.specs = [part[0] for part in plan(EvalConfig(episodes=1, shard=1), environment, envs.num_tasks(env))]
        ends = [envs.seeded_reset(env, spec.seed, spec.task) for spec in self.specs]
        self.starts = np.stack([start for start, _ in ends])  # (tasks, d_s): those of the first evaluation episodes
        self.goals = np.stack([goal for _, goal in ends])
        env.close()

    def cells(self, xy: np.ndarray) -> np.ndarray:
        """Places (..., 2) -> row and column of their cells (..., 2)."""
        unit, offset = float(self.geometry["maze_unit"]), np.asarray(self.geometry["maze_offset"])
        return np.rint((np.asarray(xy) + offset) / unit).astype(int)[..., ::-1]

    def steps_to(self, goal: np.ndarray, xy: np.ndarray) -> np.ndarray:
        """Cells on the shortest way from places (n, 2) to a goal (2,); NaN from where there is none."""
        free = np.asarray(self.geometry["maze_map"]) != 1
        table = np.full(free.shape, np.nan)
        i, j = self.cells(goal)
        for cell, steps in distances(free, (int(i), int(j))).items():
            table[cell] = steps
        row, column = self.cells(xy).clip(0, np.array(free.shape) - 1).T
        return table[row, column]


class Places:
    """Rows by where they are: those that may lie within `side` of a place, without looking at all of them."""

    def __init__(self, xy: np.ndarray, side: float) -> None:
        self.xy, self.side = xy, side
        self.cell_of = self._cells(xy)  # (n, 2)
        self.least = self.cell_of.min(0) - 1
        self.shape = self.cell_of.max(0) - self.least + 2
        number = self._number(self.cell_of)
        self.order = np.argsort(number, kind="stable")
        self.first = np.searchsorted(number[self.order], np.arange(int(np.prod(self.shape)) + 1))

    def _cells(self, xy: np.ndarray) -> np.ndarray:
        return np.floor(np.asarray(xy, dtype=float) / self.side).astype(int)

    def _number(self, cells: np.ndarray) -> np.ndarray:
        shifted = cells - self.least
        return shifted[..., 0] * self.shape[1] + shifted[..., 1]

    def near(self, place: np.ndarray) -> np.ndarray:
        """Rows of the cell of a place (2,) and of the eight around it: all within `side`, and some more."""
        row, column = self._cells(place) - self.least
        rows, columns = (range(max(0, at - 1), min(int(size), at + 2)) for at, size in zip((row, column), self.shape))
        if not len(rows) or not len(columns):
            return np.zeros(0, dtype=int)
        pieces = []
        for i in rows:  # cells side by side in a row of cells are side by side in the order, too
            begin, end = i * self.shape[1] + columns[0], i * self.shape[1] + columns[-1]
            pieces.append(self.order[self.first[begin] : self.first[end + 1]])
        return np.concatenate(pieces)


def draw_maze(axes: Any, geometry: Geometry) -> None:
    """Walls as filled cells, nothing else."""
    from matplotlib.patches import Rectangle

    walls, unit = np.asarray(geometry["maze_map"]) == 1, float(geometry["maze_unit"])
    x, y = (float(value) for value in geometry["maze_offset"])
    for i, j in np.argwhere(walls):
        corner = ((j - 0.5) * unit - x, (i - 0.5) * unit - y)
        axes.add_patch(Rectangle(corner, unit, unit, facecolor=WALL, edgecolor=WALL, linewidth=0.5, zorder=0))
    height, width = walls.shape
    axes.set(
        xlim=(0.5 * unit - x - 0.3 * unit, (width - 1.5) * unit - x + 0.3 * unit),  # a rim of the outer walls
        ylim=(0.5 * unit - y - 0.3 * unit, (height - 1.5) * unit - y + 0.3 * unit),
        aspect="equal",
        xticks=[],
        yticks=[],
    )
    axes.spines[:].set_visible(False)


def mark_ends(axes: Any, start: np.ndarray | None, goal: np.ndarray, size: float = 11.0) -> None:
    """A circle at the start, a star at the goal."""
    if start is not None:
        axes.plot(*start[:2], "o", markersize=0.5 * size, markerfacecolor="white", markeredgecolor=INK, zorder=6)
    axes.plot(*goal[:2], "*", markersize=size, markerfacecolor="#e6a700", markeredgecolor=INK, zorder=7)
