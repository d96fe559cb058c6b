"""Mazes: walk along shortest paths with Gaussian noise.

navigate  a new goal each time one is reached
stitch    one goal four cells from the start; long routes must be stitched from such pieces
"""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
import ogbench.locomaze  # noqa: F401  (registers the environments)

from qhyer.data.generate.recipe import Arrays, EpisodeSeeds, Recipe
from qhyer.rng import global_numpy

Cell = tuple[int, int]
STITCH_DISTANCE = 4  # cells from start to goal


def make_environment(recipe: Recipe) -> Any:
    return gymnasium.make(recipe.environment, terminate_at_goal=False, disable_env_checker=True).unwrapped


def neighbours(free: np.ndarray, cell: Cell) -> list[Cell]:
    i, j = cell
    around = [(i - 1, j), (i, j - 1), (i + 1, j), (i, j + 1)]
    return [(a, b) for a, b in around if 0 <= a < free.shape[0] and 0 <= b < free.shape[1] and free[a, b]]


def distances(free: np.ndarray, start: Cell) -> dict[Cell, int]:
    """Steps from `start` to every cell that can be reached, breadth first."""
    steps = {start: 0}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for after in neighbours(free, cell):
            if after not in steps:
                steps[after] = steps[cell] + 1
                queue.append(after)
    return steps


def is_hallway(free: np.ndarray, cell: Cell) -> bool:
    """Open exactly north and south, or exactly east and west; such cells are no goals of navigate data."""
    i, j = cell
    vertical = bool(free[i - 1, j]), bool(free[i + 1, j])
    horizontal = bool(free[i, j - 1]), bool(free[i, j + 1])
    return (all(vertical) and not any(horizontal)) or (all(horizontal) and not any(vertical))


class MazeCollector:
    """Episodes of one maze dataset; here of a point, whose action is the direction itself."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.environment = make_environment(recipe)
        self.free = np.asarray(self.environment.maze_map) == 0
        self.cells: list[Cell] = [(int(i), int(j)) for i, j in np.argwhere(self.free)]
        self.goals = [cell for cell in self.cells if not is_hallway(self.free, cell)]
        self.actions = int(self.environment.action_space.shape[0])
        self.arrivals: list[int] = []
        """of the last episode: the rows whose step ended at the goal"""
        self._subgoals: dict[tuple[Cell, Cell], np.ndarray] = {}

    def episode(self, seeds: EpisodeSeeds) -> Arrays:
        recipe, environment = self.recipe, self.environment
        rows = recipe.rows
        draws = np.random.default_rng(seeds.stream("actions"))
        start = self._pick(draws, self.cells)
        if recipe.kind == "stitch":
            near = [c for c, steps in distances(self.free, start).items() if steps == STITCH_DISTANCE]
            goal = self._pick(draws, near) if near else start
        else:
            goal = self._pick(draws, self.goals)
        noise = draws.normal(0.0, recipe.noise, (rows, self.actions))
        self.arrivals = []

        # The maze draws start and goal noise from the global generator and settles with action_space samples.
        environment.action_space.seed(seeds.stream("settling") % 2**32)
        with global_numpy(seeds.stream("maze")):
            observation, _ = environment.reset(
                seed=seeds.stream("environment"), options={"task_info": {"init_ij": start, "goal_ij": goal}}
            )
            arrays: Arrays = {
                "observations": np.empty((rows, len(observation)), np.float32),
                "actions": np.empty((rows, self.actions), np.float32),
                "terminals": np.zeros(rows, bool),
                "qpos": np.empty((rows, environment.model.nq), np.float32),
                "qvel": np.empty((rows, environment.model.nv), np.float32),
            }
            arrays["terminals"][-1] = True
            for row in range(rows):
                xy = environment.get_xy()
                direction = self._subgoal(xy) - xy
                direction = direction / (np.linalg.norm(direction) + 1e-6)
                arrays["observations"][row] = observation
                action = arrays["actions"][row]
                np.clip(self.move(observation, direction) + noise[row], -1.0, 1.0, out=action, casting="same_kind")
                observation, _, _, _, info = environment.step(action)
                arrays["qpos"][row] = info["prev_qpos"]
                arrays["qvel"][row] = info["prev_qvel"]
                if info["success"]:
                    self.arrivals.append(row)
                if info["success"] and recipe.kind == "navigate":
                    # set_goal(cell) would write NaN into the drawn target's position; given xy it does not.
                    goal = self._pick(draws, self.goals)
                    environment.set_goal(goal_xy=environment.add_noise(environment.ij_to_xy(goal)))
        return arrays

    def move(self, observation: np.ndarray, direction: np.ndarray) -> np.ndarray:
        """The action, before its noise, that goes where the oracle says: a unit vector in the plane."""
        return direction

    def _subgoal(self, xy: np.ndarray) -> np.ndarray:
        """The oracle's next cell: a function of two cells, so the search is done once a pair."""
        environment = self.environment
        key = (environment.xy_to_ij(xy), environment.xy_to_ij(environment.cur_goal_xy))
        if key not in self._subgoals:
            self._subgoals[key] = environment.get_oracle_subgoal(xy, environment.cur_goal_xy)[0]
        return self._subgoals[key]

    @staticmethod
    def _pick(draws: np.random.Generator, cells: list[Cell]) -> Cell:
        return cells[int(draws.integers(len(cells)))]
