"""Maze2D: D4RL's waypoint controller walks from goal to goal, without end.

A goal is drawn, the shortest way there becomes a list of waypoints, and a PD controller with noise heads for one after
the other; arrived (or late), it draws the next goal. Nothing is reset between goals. What it does depends on the
waypoints it has in mind, which no observation shows: the data are not Markovian.
"""

from __future__ import annotations

import numpy as np

from qhyer import envs
from qhyer.data.generate.maze import distances, neighbours
from qhyer.data.generate.recipe import Arrays, EpisodeSeeds, Recipe
from qhyer.envs import RADIUS, SPREAD, Cell, Maze2D

GAIN, DAMPING = 10.0, 1.0  # the action is GAIN (waypoint - position) - DAMPING velocity, clipped
NEAR = 0.1  # a waypoint, and the goal, is reached within this distance


class Waypoints:
    """The controller: where it is heading, and when it has arrived. Draws from the walk's own generator."""

    def __init__(self, environment: Maze2D, draws: np.random.Generator) -> None:
        self.environment, self.draws = environment, draws
        self.free = environment.maze_map == 0
        self.goal, self.ahead, self.next = environment.goal, [environment.goal], 0

    def new_goal(self, xy: np.ndarray) -> None:
        """A goal in any other cell than this one."""
        here = self.environment.cell_of(xy)
        others = [cell for cell in self.environment.cells if cell != here]
        self.aim(xy, self._near(others[int(self.draws.integers(len(others)))]))

    def aim(self, xy: np.ndarray, goal: np.ndarray) -> None:
        """Plans the way to this goal: a waypoint near the centre of each cell, the last is the goal itself."""
        self.goal = goal
        way = path(self.free, self.environment.cell_of(xy), self.environment.cell_of(goal))
        self.ahead = [self._near(cell) for cell in way[1:-1]] + [goal]
        self.next = 0

    def _near(self, cell: Cell) -> np.ndarray:
        return self.environment.centre(cell) + self.draws.uniform(-SPREAD, SPREAD, 2)

    def act(self, observation: np.ndarray) -> tuple[np.ndarray, bool]:
        """The action without noise, and whether the goal is reached."""
        xy, velocity = observation[:2], observation[2:]
        waypoint = self.ahead[self.next]
        action = GAIN * (waypoint - xy) - DAMPING * velocity
        if _within(xy, waypoint, NEAR) and self.next < len(self.ahead) - 1:
            self.next += 1
        return action.clip(-1.0, 1.0), _within(xy, self.goal, NEAR)


class Maze2DCollector:
    """Walks of one Maze2D dataset."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.environment: Maze2D = envs.make(recipe.environment)

    def episode(self, seeds: EpisodeSeeds) -> Arrays:
        recipe, environment = self.recipe, self.environment
        rows = recipe.rows
        draws = np.random.default_rng(seeds.stream("actions"))
        noise = draws.normal(0.0, recipe.noise, (rows, 2))
        observation = environment.place(draws)
        controller = Waypoints(environment, draws)
        controller.new_goal(observation[:2])
        arrays: Arrays = {
            "observations": np.empty((rows, 4), np.float32),
            "actions": np.zeros((rows, 2), np.float32),
            "terminals": np.zeros(rows, bool),
            "rewards": np.zeros(rows, np.float32),
            "goals": np.empty((rows, 2), np.float32),
            "arrivals": np.zeros(rows, bool),
        }
        arrays["terminals"][-1] = True
        since = 0
        for row in range(rows):
            action, arrived = controller.act(observation)
            if arrived or since >= environment.limit:  # D4RL gives up a goal after an episode's steps
                arrays["arrivals"][row] = arrived
                controller.new_goal(observation[:2])
                action, _ = controller.act(observation)
                since = 0
            arrays["observations"][row] = observation
            arrays["goals"][row] = controller.goal
            arrays["rewards"][row] = _within(observation[:2], controller.goal, RADIUS)
            if row == rows - 1:
                break
            np.clip(action + noise[row], -1.0, 1.0, out=arrays["actions"][row], casting="same_kind")
            observation = environment.move(arrays["actions"][row])
            since += 1
        return arrays


def path(free: np.ndarray, start: Cell, goal: Cell) -> list[Cell]:
    """The cells of a shortest way, both ends included; of equal ones, always the same."""
    steps = distances(free, goal)
    way = [start]
    while way[-1] != goal:
        way.append(min(neighbours(free, way[-1]), key=lambda cell: steps[cell]))
    return way


def _within(a: np.ndarray, b: np.ndarray, distance: float) -> bool:
    return float(a[0] - b[0]) ** 2 + float(a[1] - b[1]) ** 2 <= distance**2
