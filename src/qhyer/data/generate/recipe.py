"""What decides an episode, as plain values: the same recipe, seed and index give the same bytes.

Workers import this and not the registry, so that a worker process does not load torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from qhyer.config import to_dict
from qhyer.rng import stream_seed

if TYPE_CHECKING:
    from qhyer.data.registry import Dataset

Split = Literal["train", "validation"]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Recipe:
    """The official settings for one dataset, OGBench's or D4RL's; written to the sidecar as they are."""

    name: str
    environment: str
    family: str
    kind: str
    rows: int
    """rows per episode, the final state included"""
    noise: float
    """play: std on the plan, in units of the largest action; noisy: upper bound of the std; mazes: std"""
    noise_smoothing: float = 0.0
    """play only: width in steps of the filter that correlates the noise in time"""
    min_norm: float = 0.0
    """noisy only: displacements shorter than this are lengthened to it"""
    p_random_action: float = 0.0
    """noisy only: how often a uniform action replaces the oracle's"""
    stacking: tuple[float, float] = (0.5, 0.5)
    """each episode draws its probability of stacking a cube uniformly from this range"""


@dataclass(frozen=True)
class AntRecipe(Recipe):
    """The same, and the ant that walks."""

    ant: str = ""
    """SHA-256 of its weights"""
    folder: str = ""
    """where they are: no setting, since the same ant elsewhere makes the same data"""


class Collector(Protocol):
    """Makes episodes one by one in an environment that it keeps."""

    def episode(self, seeds: EpisodeSeeds) -> Arrays: ...


@dataclass(frozen=True)
class EpisodeSeeds:
    """Seeds of one episode. Each random source has a stream of its own: two that shared one would agree."""

    seed: int
    dataset: str
    split: Split
    index: int

    def stream(self, source: str, attempt: int = 0) -> int:
        return stream_seed(self.seed, self.dataset, self.split, self.index, attempt, source)


_STACKING = {"single": (0.0, 0.0), "double": (0.0, 0.25), "triple": (0.05, 0.35), "quadruple": (0.1, 0.5)}


def settings(recipe: Recipe) -> dict[str, Any]:
    """What the sidecar says of a recipe."""
    return {name: value for name, value in to_dict(recipe).items() if name != "folder"}


def recipe_for(dataset: Dataset, rows: int | None = None, ant: Path | None = None) -> Recipe:
    """The official settings; `rows` shortens episodes (for tests and trials).

    `ant` is the folder of the policy that walks in ant mazes; the one that comes with the package if not given.
    """
    common = (dataset.name, dataset.environment, dataset.family, dataset.kind, rows or dataset.rows)
    if dataset.family == "antmaze":
        from qhyer.data.generate import ant as ants

        folder = ants.find(ant)
        return AntRecipe(*common, noise=0.2, ant=ants.about(folder)["sha256"], folder=str(folder.resolve()))
    if dataset.is_maze:
        return Recipe(*common, noise=0.5)
    cubes = dataset.environment.removeprefix("cube-").removesuffix("-v0")
    stacking = _STACKING[cubes] if dataset.family == "cube" else (0.5, 0.5)
    if dataset.kind == "play":
        return Recipe(*common, noise=0.1, noise_smoothing=0.5, stacking=stacking)
    p_random_action = 0.2 if dataset.family == "puzzle" else 0.1
    return Recipe(*common, noise=0.1, min_norm=0.4, p_random_action=p_random_action, stacking=stacking)


def collector_for(recipe: Recipe) -> Collector:
    """The simulators are imported here: commands that only read data need not load them."""
    if recipe.kind == "waypoint":
        from qhyer.data.generate.maze2d import Maze2DCollector

        return Maze2DCollector(recipe)
    if isinstance(recipe, AntRecipe):
        from qhyer.data.generate.ant import AntCollector

        return AntCollector(recipe)
    if recipe.family == "pointmaze":
        from qhyer.data.generate.maze import MazeCollector

        return MazeCollector(recipe)
    from qhyer.data.generate.manipulation import ManipulationCollector

    return ManipulationCollector(recipe)
