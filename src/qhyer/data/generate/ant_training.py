"""Trains the ant of ant mazes: stable-baselines3's SAC in OGBench's own ant, rewarded for going where it is told.

The reward of a step is OGBench's: how far the ant got in the direction, in metres. Every so often the ant walks the
maze's stitch episodes, with their noise; the best so far is written, so that a stop loses little.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ogbench.online_locomotion  # noqa: F401  (registers the environment)
from gymnasium.spaces import Box
from safetensors.numpy import save_file

import qhyer
from qhyer.data.generate import ant
from qhyer.data.generate.ant_config import AntConfig
from qhyer.data.generate.recipe import AntRecipe, EpisodeSeeds
from qhyer.errors import UserError
from qhyer.progress import Progress
from qhyer.rng import numpy_stream, stream_seed
from qhyer.storage import atomic_directory, sha256_file, write_sealed_json

Layers = list[tuple[np.ndarray, np.ndarray]]
CELLS = 4  # from start to goal of a stitch episode
NEAR = 1.0  # metres: at the centre of a cell


class Walk(gymnasium.Wrapper[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """OGBench's ant on a plain, told a direction that changes now and then; it sees both from its body."""

    def __init__(self, config: AntConfig, index: int) -> None:
        super().__init__(gymnasium.make("online-ant-v0", disable_env_checker=True))
        self.observation_space = Box(-np.inf, np.inf, (ant.OBSERVATION,), np.float32)
        self.draws = numpy_stream(config.seed, "ant", "directions", index)
        self.start = stream_seed(config.seed, "ant", "starts", index) % 2**31
        self.turn_every = config.turn_every
        self.direction = np.zeros(2)
        self.left = 0

    def _turn(self) -> None:
        angle = self.draws.uniform(-np.pi, np.pi)
        self.direction = np.array([np.cos(angle), np.sin(angle)])
        # Cells are crossed in some twenty steps, and a corridor goes on for many: spans of all lengths.
        self.left = 1 + int(self.draws.exponential(self.turn_every))

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        observation, info = self.env.reset(seed=self.start)
        self.start = int(self.draws.integers(2**31))
        self._turn()
        return ant.seen_from_the_body(observation, self.direction), info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        data = self.unwrapped.data  # type: ignore[attr-defined]
        before = data.qpos[:2].copy()
        observation, _, terminated, truncated, _ = self.env.step(action)
        reward = float((data.qpos[:2] - before) @ self.direction)
        self.left -= 1
        if self.left == 0:
            self._turn()
        return ant.seen_from_the_body(observation, self.direction), reward, terminated, truncated, {}


@dataclass(frozen=True)
class Walked:
    """How well an ant walks to goals four cells away, with the noise of the data, in an episode's 200 steps.

    The oracle leads to the centre of the goal's cell and knows no better; the goal is up to 1.4 m off it, and counts as
    reached within 0.5 m. An ant that has arrived may never meet it, so arriving is what it is judged by.
    """

    episodes: int
    arrived: float
    """share of the episodes that came within 1 m of the centre of the goal's cell"""
    fallen: float
    """share of the episodes that ended on the ant's back, from where it does not get up"""
    reached: float
    """share of the episodes that reached the goal"""
    steps_per_cell: float
    """until it arrived, a quarter of the way; mean over those that did, 0 if none"""

    def __str__(self) -> str:
        return (
            f"{100 * self.arrived:.0f} % of {self.episodes} arrived, {100 * self.fallen:.0f} % fell, "
            f"{100 * self.reached:.0f} % reached the goal, {self.steps_per_cell:.1f} steps a cell"
        )

    @property
    def score(self) -> float:
        """Arriving, and staying on its feet, count first, then speed."""
        return self.arrived - self.fallen - self.steps_per_cell / 1000


class Course:
    """Stitch episodes of a maze, always the same ones: made by the code that generates the data."""

    def __init__(self, seed: int, maze: str = "medium", noise: float = 0.2) -> None:
        name = f"antmaze-{maze}"
        recipe = AntRecipe(f"{name}-stitch-v0", f"{name}-v0", "antmaze", "stitch", 201, noise)
        self.collector = ant.AntCollector(recipe, ant.AntPolicy([]))
        self.seed = seed

    def walk(self, policy: ant.AntPolicy, episodes: int) -> Walked:
        self.collector.policy = policy
        maze, steps, fallen, reached = self.collector.environment, [], 0, 0
        for index in range(episodes):
            states = self.collector.episode(EpisodeSeeds(self.seed, "ant-course", "validation", index))["observations"]
            centre = maze.ij_to_xy(maze.xy_to_ij(maze.cur_goal_xy))
            near = np.flatnonzero(np.linalg.norm(states[:, :2] - centre, axis=1) <= NEAR)
            steps += [near[0] / CELLS] if len(near) else []
            fallen += bool(upright(states[-1]) < 0)
            reached += bool(self.collector.arrivals)
        speed = round(float(np.mean(steps)), 2) if steps else 0.0
        return Walked(episodes, len(steps) / episodes, fallen / episodes, reached / episodes, speed)


def upright(states: np.ndarray) -> np.ndarray:
    """How far the torso's own "up" points upwards, from -1 to 1, in a maze's observations (..., 29)."""
    quaternion = states[..., 3:7]
    return 1 - 2 * np.sum(quaternion[..., 1:3] ** 2, -1) / np.sum(quaternion**2, -1)


def untrained(config: AntConfig) -> Any:
    """SAC with the ants it will learn from."""
    try:
        from stable_baselines3 import SAC
        from stable_baselines3.common.vec_env import DummyVecEnv
    except ImportError:
        raise UserError("training the ant needs stable-baselines3: install qhyer[ant]") from None
    return SAC(
        "MlpPolicy",
        DummyVecEnv([lambda index=index: Walk(config, index) for index in range(config.environments)]),
        learning_rate=config.learning_rate,
        buffer_size=min(config.steps, 1_000_000),
        learning_starts=config.warmup,
        batch_size=config.batch_size,
        gamma=0.99,
        tau=0.005,
        train_freq=1,
        gradient_steps=config.updates,
        target_entropy=-0.5 * ant.ACTIONS,
        policy_kwargs={"net_arch": [config.width, config.width]},
        seed=stream_seed(config.seed, "ant", "sac") % 2**31,
        device="cpu",
    )


def train(config: AntConfig, out: Path, *, overwrite: bool = False, quiet: bool = False) -> Path:
    """Trains an ant and writes the best one met to the folder `out`, which it returns."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not (out / ant.ABOUT).is_file():
            raise UserError(f"{out} is there and holds no ant; give another folder with --out")
        if not overwrite:
            raise UserError(f"{out} holds an ant already; --overwrite replaces it, --out names another folder")
    model = untrained(config)
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    course = Course(config.seed)
    begun = time.monotonic()

    class Follow(BaseCallback):
        """Shows how it goes, and keeps the best."""

        def __init__(self, progress: Progress) -> None:
            super().__init__()
            self.progress = progress
            self.best: tuple[Walked, int, Layers] | None = None
            self.history: list[dict[str, Any]] = []

        def _on_step(self) -> bool:
            done = self.num_timesteps
            self.progress.advance(done)
            if done // config.evaluate_every > (done - config.environments) // config.evaluate_every:
                self.evaluate()
            return True

        def evaluate(self) -> None:
            done = self.num_timesteps
            layers = actor_layers(model)
            walked = course.walk(ant.AntPolicy(layers), config.episodes)
            self.history.append({"steps": done, **asdict(walked)})
            spent = time.monotonic() - begun
            left = spent * (config.steps / done - 1)
            note = f"ant: {done} steps, {spent / 60:.0f} min, {max(left, 0) / 60:.0f} min to go: "
            self.progress.note(note + str(walked))
            if self.best is None or walked.score >= self.best[0].score:
                self.best = (walked, done, layers)
            best, steps, kept = self.best
            write(out, kept, config, {"steps_taken": steps, "walked": asdict(best), "history": self.history})

    threads = torch.get_num_threads()
    with Progress("training the ant", config.steps, quiet=quiet) as progress:
        follow = Follow(progress)
        torch.set_num_threads(1)  # the networks are small, and sums must not depend on the machine's cores
        try:
            model.learn(config.steps, callback=follow)
        except KeyboardInterrupt:
            progress.note(f"stopped; the best so far is in {out}" if follow.best else "stopped before an evaluation")
            raise
        finally:
            torch.set_num_threads(threads)
        if not follow.history or follow.history[-1]["steps"] != model.num_timesteps:
            follow.evaluate()
    return out


def actor_layers(model: Any) -> Layers:
    """The layers of SAC's actor up to the mean of its Gaussian, as arrays."""
    import torch

    actor = model.actor
    linear = [module for module in actor.latent_pi if isinstance(module, torch.nn.Linear)] + [actor.mu]
    return [(layer.weight.detach().numpy().copy(), layer.bias.detach().numpy().copy()) for layer in linear]


def write(folder: Path, layers: Layers, config: AntConfig, measured: dict[str, Any]) -> None:
    """The policy's files, whole or absent."""
    names = ("stable-baselines3", "torch", "ogbench", "mujoco", "gymnasium", "numpy")
    with atomic_directory(folder) as temporary:
        weights = temporary / ant.WEIGHTS
        named: dict[str, np.ndarray] = {}
        for index, (weight, bias) in enumerate(layers):
            named |= {f"{index}.weight": weight, f"{index}.bias": bias}
        save_file(named, weights)
        values = {
            "layout": ant.LAYOUT,
            "widths": [layers[0][0].shape[1], *(len(bias) for _, bias in layers)],
            "sha256": sha256_file(weights),
            "config": asdict(config),
            **measured,
            "command": shlex.join(["qhyer", *sys.argv[1:]]) if Path(sys.argv[0]).name == "qhyer" else None,
            "versions": {
                "qhyer": qhyer.__version__,
                **{name: importlib.metadata.version(name) for name in names},
                "python": platform.python_version(),
            },
            "hardware": f"one core, {platform.machine()}",
        }
        write_sealed_json(temporary / ant.ABOUT, values)
