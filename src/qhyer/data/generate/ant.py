"""The ant that walks where it is told: a small trained policy, run without torch, and the mazes it walks through.

The policy is a function of the ant's state and a direction, as OGBench's expert is. It sees both from its own body, so
that walking north and walking east are one skill. `qhyer data ant` trains one (ant_training.py).

ANT/ant.safetensors   the layers of the actor
    ant.json          sealed: what it sees, how it was trained, how well it walks, SHA-256 of the layers
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from qhyer.data.generate.maze import MazeCollector
from qhyer.data.generate.recipe import AntRecipe
from qhyer.errors import CorruptFile, UserError
from qhyer.storage import read_sealed_json, sha256_file

WEIGHTS, ABOUT = "ant.safetensors", "ant.json"
RELEASED = Path(__file__).parents[1] / "ant"  # the one that comes with the package
ACTIONS = 8
LAYOUT = (
    "height 1, down 3, joint angles 8, velocity 3, turning 3, joint velocities 8, direction 3; "
    "down, velocity, turning and direction as seen from the torso"
)
OBSERVATION = 29
FASTEST = 10.0  # joint velocities are clipped here; contacts make short peaks that mean nothing


def seen_from_the_body(state: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """What the policy sees: qpos without xy (13) and qvel (14) of the ant, and a unit vector in the plane.

    All but joints and height is turned into the torso's frame; MuJoCo gives the turning of a free body there already.
    """
    w, x, y, z = state[1:5] / np.sqrt(np.sum(state[1:5] ** 2))
    turn = np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )
    view = np.empty(OBSERVATION, np.float32)
    view[0] = state[0]
    view[1:4] = -turn[2]
    view[4:12] = state[5:13]
    view[12:15] = state[13] * turn[0] + state[14] * turn[1] + state[15] * turn[2]
    view[15:18] = state[16:19]
    np.clip(state[19:27], -FASTEST, FASTEST, out=view[18:26], casting="same_kind")
    view[26:29] = direction[0] * turn[0] + direction[1] * turn[1]
    return view


class AntPolicy:
    """The actor's mean: two hidden layers and a tanh."""

    def __init__(self, layers: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self.layers = layers

    def __call__(self, view: np.ndarray) -> np.ndarray:
        # einsum and not BLAS, whose sums depend on the number of threads: workers have one, the main process many.
        *hidden, (weight, bias) = self.layers
        for matrix, offset in hidden:
            view = np.maximum(np.einsum("ij,j->i", matrix, view) + offset, np.float32(0.0))
        return np.tanh(np.einsum("ij,j->i", weight, view) + bias)

    def act(self, observation: np.ndarray, direction: np.ndarray) -> np.ndarray:
        """The action in a maze, whose observation is qpos and qvel."""
        return self(seen_from_the_body(observation[2:], direction))


def find(given: Path | None) -> Path:
    """The folder of the policy to use: the one given, else the one that comes with the package."""
    folder = RELEASED if given is None else Path(given)
    if (folder / WEIGHTS).is_file() and (folder / ABOUT).is_file():
        return folder
    make = "`qhyer data ant --out FOLDER` trains one (needs qhyer[ant]), and --ant FOLDER generates with it"
    if given is None:
        raise UserError(f"this data needs an ant that can walk, and none comes with the package: {make}")
    raise UserError(f"{folder} holds no ant ({WEIGHTS} and {ABOUT}): {make}")


def about(folder: Path) -> dict[str, Any]:
    """What is recorded of a policy; an error if its weights are not the ones recorded."""
    recorded = read_sealed_json(folder / ABOUT)
    if recorded.get("layout") != LAYOUT:
        raise UserError(f"the ant of {folder} sees other things than this version shows it: train it again")
    if recorded["sha256"] != sha256_file(folder / WEIGHTS):
        raise CorruptFile(f"{folder / WEIGHTS} is damaged: its SHA-256 is not the one in {ABOUT}")
    return recorded


def load(folder: Path) -> AntPolicy:
    recorded = about(folder)
    try:
        arrays = load_file(folder / WEIGHTS)
        count = len(recorded["widths"]) - 1
        layers = [(arrays[f"{index}.weight"], arrays[f"{index}.bias"]) for index in range(count)]
    except (SafetensorError, KeyError) as error:
        raise CorruptFile(f"{folder / WEIGHTS} is not an ant's: {error}") from None
    return AntPolicy(layers)


class AntCollector(MazeCollector):
    """Episodes of one ant maze dataset: the way of the point maze's oracle, walked by the ant."""

    def __init__(self, recipe: AntRecipe, policy: AntPolicy | None = None) -> None:
        super().__init__(recipe)
        if policy is None:
            folder = Path(recipe.folder)
            if about(find(folder))["sha256"] != recipe.ant:
                raise UserError(f"{folder} holds another ant than the one this data is made with ({recipe.ant[:8]}...)")
            policy = load(folder)
        self.policy = policy

    def move(self, observation: np.ndarray, direction: np.ndarray) -> np.ndarray:
        return self.policy.act(observation, direction)
