"""Environments for evaluation: OGBench's, with the seeding they need to be reproducible, and D4RL's Maze2D."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from qhyer.errors import UserError
from qhyer.rng import global_numpy


def make(environment: str) -> Any:
    """A gymnasium environment by its id. No renderer is started."""
    os.environ.setdefault("MUJOCO_GL", "disable")
    warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
    if environment in MAZE2D:
        return Maze2D(environment)
    module, colon, name = environment.partition(":")
    if colon and (module.endswith(".py") or "/" in module or module.startswith(".")):
        where = "" if Path(module).parent == Path() else f", from {Path(module).parent} or with that in PYTHONPATH"
        stem = Path(module).stem
        raise UserError(f"{environment}: give the module's name, not its file: --env {stem}:{name or 'Id-v0'}{where}")
    import gymnasium
    import ogbench  # noqa: F401  (registers its environments)

    try:
        env = gymnasium.make(environment, disable_env_checker=True)
    except gymnasium.error.Error as error:
        raise UserError(
            f"no environment is called {environment!r}: {_registered(module) if colon else error}"
        ) from error
    except ImportError as error:
        looked = f"; it is looked for in {Path.cwd()} and along PYTHONPATH" if ":" in environment else ""
        raise UserError(f"{environment}: its module cannot be imported: {error}{looked}") from error
    except Exception as error:
        raise UserError(f"{environment} cannot be made: {told(error)}") from error
    if env.spec is not None and env.spec.max_episode_steps is None:
        raise UserError(f"{environment} is registered without max_episode_steps: an episode might never end")
    return env


def _registered(name: str) -> str:
    """What a module that was imported has registered, and which file it is where that is not the one expected."""
    from gymnasium.envs.registration import registry

    own, file = Path.cwd() / f"{name.replace('.', os.sep)}.py", getattr(sys.modules.get(name), "__file__", None)
    if own.is_file() and (file is None or not own.samefile(file)):
        return f"{name} is {file or 'a module built into Python'}, not {own}: give that another name"
    makers = {key: spec.entry_point for key, spec in registry.items()}
    texts = {
        key: maker if isinstance(maker, str) else getattr(maker, "__module__", "") for key, maker in makers.items()
    }
    ids = [key for key, text in texts.items() if f"{text.partition(':')[0]}.".startswith(f"{name}.")]
    return f"{name} ({file}) registers {', '.join(ids) if ids else 'no environment'}"


def told(error: Exception) -> str:
    """An error in somebody's environment in one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def of_dataset(dataset: str) -> str | None:
    """The environment of a dataset that has an OGBench name, such as antmaze-large-stitch-v0: antmaze-large-v0."""
    found = re.fullmatch(r"([a-z0-9-]+)-(navigate|stitch|explore|play|noisy)-(v0)", dataset)
    return f"{found[1]}-{found[3]}" if found else None


def copy_of(env: Any) -> Any:
    """Another environment like this one, to be reset before use; nothing that is simulated is shared.

    A manipulation environment takes most of a second to make (its XML is built and compiled twice); a copy takes
    milliseconds, and spares 90 MB of meshes.
    """
    if isinstance(env.unwrapped, Maze2D):
        return Maze2D(env.spec.id)  # the compiled model is kept
    if not hasattr(env.unwrapped, "_mjcf_model"):
        return make(env.spec.id)
    import mujoco
    from dm_control import mjcf  # type: ignore[import-untyped]

    original = env.unwrapped
    if original._never_compiled:
        seeded_reset(env, 0, 1)
    # A scene moves marks in its model; the others only paint it, and stepping knows no colours.
    paints_only = not hasattr(original, "_drawer_target_site_id")
    model = original._model if paints_only else copy.copy(original._model)
    replaced = {
        id(original._model): model,
        id(original._data): mujoco.MjData(model),
        id(original._ik._model): original._ik._model,
        id(original._ik._data): mujoco.MjData(original._ik._model),
    }

    def share(value: Any) -> None:
        if isinstance(value, mjcf.Element):  # the source of the model, not read again after compilation
            replaced[id(value)] = value
        elif isinstance(value, list | tuple):
            for item in value:
                share(item)

    share(list(vars(original).values()))
    return copy.deepcopy(env, replaced)


def num_tasks(env: Any) -> int:
    tasks = getattr(env.unwrapped, "num_tasks", None)
    if tasks is None:
        raise UserError(
            f"{env.spec.id} has no goal-reaching tasks: it needs num_tasks, goals and successes as docs/protocol.md "
            "says under 'Your own environment'"
        )
    if int(tasks) < 1:
        raise UserError(f"{env.spec.id} has num_tasks {tasks}: it needs one task or more, which are numbered from 1")
    return int(tasks)


@contextlib.contextmanager
def _seeded_action_space(env: Any, seed: int) -> Iterator[None]:
    """Seeds what `action_space.sample()` draws inside the environment.

    The manipulation environments make their action space anew, unseeded, at every access; for the time of the
    block they hold on to one. Without it the arm's pose in the goal differs from reset to reset.
    """
    kind = type(env.unwrapped)
    space = getattr(env.unwrapped, "action_space", None)
    if space is None:
        raise UserError(f"{env.spec.id} has no action_space, such as gymnasium.spaces.Box(-1, 1, (2,))")
    space.seed(seed)
    if env.unwrapped.action_space is space:
        yield
        return
    own = vars(kind).get("action_space")  # None: inherited
    kind.action_space = property(lambda _: space)
    try:
        yield
    finally:
        if own is None:
            del kind.action_space
        else:
            kind.action_space = own


def seeded_reset(env: Any, seed: int, task: int) -> tuple[np.ndarray, np.ndarray]:
    """Reset that depends on the seed alone -> (observation, goal).

    `reset(seed=...)` is not enough: OGBench's mazes draw from numpy's global generator, and mazes and manipulation
    tasks settle with `action_space.sample()`; both are seeded here.
    """
    with global_numpy(seed), _seeded_action_space(env, seed % 2**31):
        observation, info = env.reset(seed=seed % 2**31, options={"task_id": task})
    return _vector(env, "observations", observation), _vector(env, "goals", info["goal"])


def _vector(env: Any, what: str, values: Any) -> np.ndarray:
    if isinstance(values, Mapping | tuple):
        parts = f" with {', '.join(map(str, values))}" if isinstance(values, Mapping) else ""
        raise UserError(
            f"{env.spec.id}: {what} must be vectors of numbers, those of the data, and these are of kind "
            f"{type(values).__name__}{parts}: wrap it (gymnasium.wrappers.FlattenObservation, or an ObservationWrapper "
            "that puts the data's columns side by side; goals likewise)"
        )
    return np.asarray(values, dtype=np.float32)


def maze_geometry(env: Any) -> dict[str, np.ndarray] | None:
    """Walls and scale of a maze: cell (i, j) is centred at (j * unit - offset_x, i * unit - offset_y)."""
    maze = env.unwrapped
    if not hasattr(maze, "maze_map"):
        return None
    return {
        "maze_map": np.asarray(maze.maze_map),
        "maze_unit": np.asarray(float(maze._maze_unit)),
        "maze_offset": np.asarray([float(maze._offset_x), float(maze._offset_y)]),
    }


# ------------------------------------------------------------------------------------------------------------ Maze2D

Cell = tuple[int, int]

# D4RL's: the map (gymnasium-robotics has the same ones), the cell of the goal in it, and the steps of an episode.
MAZE2D: dict[str, tuple[str, Cell, int]] = {
    "maze2d-umaze-v1": ("U_MAZE", (1, 1), 300),
    "maze2d-medium-v1": ("MEDIUM_MAZE", (6, 6), 600),
    "maze2d-large-v1": ("LARGE_MAZE", (7, 9), 800),
}
RADIUS = 0.5  # within this distance of the goal the reward is 1
SPREAD = 0.1  # starts, and the goals of data, lie this far from a cell's centre at most, in x and in y
MAX_SPEED = 5.0


@functools.cache
def _point_maze(map_name: str) -> tuple[Any, np.ndarray]:
    """The compiled model of a maze of gymnasium-robotics (PointMaze v3), and its map."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # news of its hands
        from gymnasium_robotics.envs.maze import maps
        from gymnasium_robotics.envs.maze.point_maze import PointMazeEnv
    cells = getattr(maps, map_name)
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:  # it leaves its XML behind, under a name that two may share
        tempfile.tempdir = folder
        try:
            environment = PointMazeEnv(maze_map=cells)
        finally:
            tempfile.tempdir = before
        return environment.model, np.asarray(cells)


class Maze2D:
    """D4RL's Maze2D: its task (goal, starts, reward, length) with the mazes and the point of gymnasium-robotics.

    The goal is always the same, the start is anywhere; being there does not end the episode, and the reward is 1 at
    each step that ends within 0.5 of the goal. `info` says `success`, whether the goal has been reached so far, and
    `return`, the rewards so far. Cell (i, j) of `maze_map` is centred at (j - offset_x, i - offset_y): rows count
    upwards, those of gymnasium-robotics downwards.
    """

    num_tasks = 1

    def __init__(self, name: str) -> None:
        import mujoco
        from gymnasium.spaces import Box

        map_name, (row, column), self.limit = MAZE2D[name]
        self.spec = SimpleNamespace(id=name, max_episode_steps=self.limit)
        self.model, cells = _point_maze(map_name)
        self.maze_map = cells[::-1]
        self._maze_unit = 1.0
        self._offset_y, self._offset_x = (np.array(cells.shape) - 1) / 2
        self.cells: list[Cell] = [(int(i), int(j)) for i, j in np.argwhere(self.maze_map == 0)]
        self.goal = self.centre((len(cells) - 1 - row, column))
        self.action_space = Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = Box(-np.inf, np.inf, (4,), np.float64)
        self.data = mujoco.MjData(self.model)
        self._reset_data, self._forward, self._step = mujoco.mj_resetData, mujoco.mj_forward, mujoco.mj_step
        self.steps, self.total = 0, 0.0

    @property
    def unwrapped(self) -> Maze2D:
        return self

    def centre(self, cell: Cell) -> np.ndarray:
        return np.array([cell[1] - self._offset_x, cell[0] - self._offset_y])

    def cell_of(self, xy: np.ndarray) -> Cell:
        return round(float(xy[1]) + float(self._offset_y)), round(float(xy[0]) + float(self._offset_x))

    def place(self, generator: np.random.Generator) -> np.ndarray:
        """Puts the point near the centre of some free cell, almost at rest: D4RL's starts."""
        cell = self.cells[int(generator.integers(len(self.cells)))]
        self._reset_data(self.model, self.data)
        self.data.qpos[:] = self.centre(cell) + generator.uniform(-SPREAD, SPREAD, 2)
        self.data.qvel[:] = 0.1 * generator.normal(size=2)
        self._forward(self.model, self.data)
        return self.observation()

    def observation(self) -> np.ndarray:
        return np.concatenate([self.data.qpos, self.data.qvel])

    def move(self, action: np.ndarray) -> np.ndarray:
        """A step of PointEnv, bit for bit (a test compares them), without what it does for pictures."""
        data = self.data
        np.clip(data.qvel, -MAX_SPEED, MAX_SPEED, out=data.qvel)
        self._forward(self.model, data)
        np.clip(action, -1.0, 1.0, out=data.ctrl)
        self._step(self.model, data)
        return self.observation()

    def reset(self, *, seed: int, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.steps, self.total = 0, 0.0
        observation = self.place(np.random.default_rng(seed))
        return observation, {"goal": np.append(self.goal, [0.0, 0.0]), "success": False, "return": 0.0}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation = self.move(action)
        reward = float(np.linalg.norm(observation[:2] - self.goal) <= RADIUS)
        self.steps += 1
        self.total += reward
        info = {"success": self.total > 0, "return": self.total}
        return observation, reward, False, self.steps >= self.limit, info

    def close(self) -> None:
        pass
