"""`python -m qhyer.data.generate.references`: the returns between which Maze2D scores are normalised, measured.

A random policy (uniform actions) and the waypoint controller without noise, over the task's own starts and episodes.
For comparison also a controller that heads straight for the goal, walls or not: D4RL's reference is near it
(docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qhyer import envs
from qhyer.data.generate.maze2d import Waypoints
from qhyer.data.generate.runner import versions
from qhyer.envs import Maze2D
from qhyer.rng import stream_seed
from qhyer.storage import write_json

FILE = Path(__file__).parents[2] / "references.json"
Act = Callable[[np.ndarray], np.ndarray]


def random_policy(environment: Maze2D, start: np.ndarray, draws: np.random.Generator) -> Act:
    return lambda observation: draws.uniform(-1.0, 1.0, 2)


def controller(environment: Maze2D, start: np.ndarray, draws: np.random.Generator) -> Act:
    waypoints = Waypoints(environment, draws)
    waypoints.aim(start[:2], environment.goal)
    return lambda observation: waypoints.act(observation)[0]


def straight(environment: Maze2D, start: np.ndarray, draws: np.random.Generator) -> Act:
    waypoints = Waypoints(environment, draws)  # without a plan
    return lambda observation: waypoints.act(observation)[0]


def returns(name: str, policy: Callable[..., Act], episodes: int, seed: int) -> np.ndarray:
    """The return of each episode; its start and the policy's draws are functions of the seed and its number."""
    environment: Maze2D = envs.make(name)
    found = []
    for episode in range(episodes):
        observation, _ = environment.reset(seed=stream_seed(seed, "references", name, episode) % 2**31)
        draws = np.random.default_rng(stream_seed(seed, "references", name, policy.__name__, episode))
        act, ended, info = policy(environment, observation, draws), False, {"return": 0.0}
        while not ended:
            observation, _, _, ended, info = environment.step(act(observation).astype(np.float32))
        found.append(info["return"])
    return np.array(found)


def measure(out: Path = FILE, *, episodes: int = 1000, seed: int = 0) -> int:
    """Measure the references of every Maze2D environment and write them as JSON.

    Args:
        out: the file to write
        episodes: episodes of each policy in each environment
        seed: of starts and policies
    """
    made: dict[str, Any] = {}
    for name, (_, _, limit) in envs.MAZE2D.items():
        made[name] = {"steps": limit}
        for label, policy in (("random", random_policy), ("controller", controller), ("straight", straight)):
            values = returns(name, policy, episodes, seed)
            error = values.std(ddof=1) / np.sqrt(episodes) if episodes > 1 else 0.0
            made[name][label] = {"mean": round(float(values.mean()), 3), "standard_error": round(float(error), 3)}
        print(name, made[name], flush=True)
    about = {
        "what": "mean undiscounted returns; score = 100 (return - random) / (controller - random)",
        "command": f"python -m qhyer.data.generate.references --episodes {episodes} --seed {seed}",
        "episodes": episodes,
        "seed": seed,
        "versions": versions("waypoint"),
    }
    write_json(out, {**about, "environments": made})
    return 0


if __name__ == "__main__":
    import tyro

    tyro.cli(measure)
