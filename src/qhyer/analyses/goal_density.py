"""Where in the maze does the critic say a goal can be reached from?

log p(g | s, a) of QHyer's flow for the goal of each task, over states on a grid of the maze: the greatest over a small
set of actions of length one (eight directions where actions are two-dimensional, else plus and minus along each axis),
so that a bright place is one from which some step leads towards the goal. Densities are per standard deviation
of the goal coordinates, as the flow has them. Cells inside walls are NaN. The report draws the result.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qhyer import envs, runs
from qhyer.analyses._common import load_critic
from qhyer.errors import UserError
from qhyer.evaluate import EvalConfig, plan
from qhyer.storage import atomic_file

POINTS = 6  # grid points per maze cell and axis
CHUNK = 4096  # states times actions at once


def unit_actions(dim: int) -> Tensor:
    """(A, dim): eight directions of the plane, or plus and minus each axis."""
    if dim == 2:
        angles = torch.arange(8) * (math.pi / 4)
        return torch.stack([angles.cos(), angles.sin()], dim=1)
    return torch.cat([torch.eye(dim), -torch.eye(dim)])


def grid(geometry: dict[str, np.ndarray], points: int = POINTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (W,), y (H,) and which points are free (H, W); cell (i, j) is centred at (j, i) times the unit less offset."""
    free = np.asarray(geometry["maze_map"]) != 1
    unit, (offset_x, offset_y) = float(geometry["maze_unit"]), geometry["maze_offset"]
    height, width = free.shape
    x = ((np.arange(width * points) + 0.5) / points - 0.5) * unit - offset_x
    y = ((np.arange(height * points) + 0.5) / points - 0.5) * unit - offset_y
    return x, y, free.repeat(points, axis=0).repeat(points, axis=1)


@torch.no_grad()
def run(run: Path, *, device: str = "cpu", data: Path | None = None) -> Path:
    info = runs.read(run)
    environment = info.get("environment") or ""
    env = envs.make(environment) if environment else None
    geometry = envs.maze_geometry(env) if env is not None else None
    if env is None or geometry is None:
        raise UserError(f"{run} was not trained on a maze but on {info['dataset']}; this analysis needs a maze")
    agent, step = load_critic(run, device)
    x, y, free = grid(geometry)
    places = torch.tensor(np.stack([g[free] for g in np.meshgrid(x, y)], axis=1), dtype=torch.float32, device=device)
    actions = unit_actions(agent.spec.action_dim).to(device).repeat(1, agent.config.chunk)  # (A, chunk * d_a)

    # Starts and goals of the first evaluation episode of each task.
    first = [specs[0] for specs in plan(EvalConfig(episodes=1, shard=1), environment, envs.num_tasks(env))]
    fields = np.full((len(first), *free.shape), np.nan, dtype=np.float32)
    goals = []
    for number, spec in enumerate(first):
        observation, goal = envs.seeded_reset(env, spec.seed, spec.task)
        goals.append(goal[:2])
        states = torch.from_numpy(observation).to(device).repeat(len(places), 1)
        states[:, :2] = places  # what else is observed stays as at the start of the task
        target = agent.goal_coordinates(torch.from_numpy(goal).to(device))  # (d_g,)
        best = []
        for chunk in states.split(max(1, CHUNK // len(actions))):
            shape = (len(chunk), len(actions))
            log_p = agent.log_density(
                chunk[:, None].expand(*shape, -1), actions.expand(*shape, -1), target.expand(*shape, -1)
            )  # (states, A)
            best.append(log_p.max(dim=1).values)
        fields[number][free] = torch.cat(best).cpu().numpy()
    env.close()

    path = Path(run) / "analyses" / "goal_density.npz"
    titles = [f"task {spec.task}" for spec in first]
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(
            file, x=x, y=y, log_density=fields, goals=np.stack(goals), titles=np.array(titles), step=np.array(step)
        )
    for title, field, goal in zip(titles, fields, goals):
        near = math.hypot(*(_brightest(x, y, field) - goal)) / float(geometry["maze_unit"])
        low, high = np.nanquantile(field, [0.02, 1.0])
        print(f"{title}: log p from {low:.1f} to {high:.1f}; greatest {near:.1f} maze cells from the goal")
    return path


def _brightest(x: np.ndarray, y: np.ndarray, field: np.ndarray) -> np.ndarray:
    i, j = np.unravel_index(int(np.nanargmax(field)), field.shape)
    return np.array([x[j], y[i]])
