"""Environments for evaluation: OGBench's, with the seeding they need to be reproducible."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from qhyer.errors import UserError
from qhyer.rng import global_numpy


def make(environment: str) -> Any:
    """A gymnasium environment by its id. No renderer is started."""
    os.environ.setdefault("MUJOCO_GL", "disable")
    warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
    import gymnasium
    import ogbench  # noqa: F401  (registers its environments)

    try:
        return gymnasium.make(environment, disable_env_checker=True)
    except gymnasium.error.Error as error:
        raise UserError(f"no environment is called {environment!r}: {error}") from error


def copy_of(env: Any) -> Any:
    """Another environment like this one, to be reset before use; nothing that is simulated is shared.

    A manipulation environment takes most of a second to make (its XML is built and compiled twice); a copy takes
    milliseconds, and spares 90 MB of meshes.
    """
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
        raise UserError(f"{env.spec.id} has no goal-reaching tasks: it is not one of OGBench's goal-conditioned ones")
    return int(tasks)


@contextlib.contextmanager
def _seeded_action_space(env: Any, seed: int) -> Iterator[None]:
    """Seeds what `action_space.sample()` draws inside the environment.

    The manipulation environments make their action space anew, unseeded, at every access; for the time of the
    block they hold on to one. Without it the arm's pose in the goal differs from reset to reset.
    """
    kind = type(env.unwrapped)
    space = env.unwrapped.action_space
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
    return np.asarray(observation, dtype=np.float32), np.asarray(info["goal"], dtype=np.float32)


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
