"""The paper's continuous GridWorld, whose future-state density is known: world, data, estimators and their training.

Five by five cells, four actions, moves off the grid stay. In cell (i, j) one observes (i + e, j + e'), e and e' uniform
in [-0.5, 0.5], drawn anew at every step. The policy is a table drawn from Dirichlet(1); 100 trajectories of length 100.

The paper does not give the discount, the start, the walls or any network. Here: discount 0.9 (trajectories are ten
times the mean distance of a goal), uniform start, no walls, and networks of about 40 thousand weights each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qhyer.data.goals import geometric_steps, random_index
from qhyer.nn.clearning import CLearning
from qhyer.nn.contrastive import Contrastive
from qhyer.nn.cvae import CVAE
from qhyer.nn.densities import Bins, DensityEstimator, FlowDensity, Following, Histogram, HistogramMarginal
from qhyer.rng import numpy_stream, stream_seed

SIZE = 5
CELLS = SIZE * SIZE
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
ARROWS = ("up", "down", "left", "right")
ACTIONS = len(MOVES)
SCALE = SIZE / math.sqrt(12)  # standard deviation of a uniform place: networks see (place - centre) / SCALE
TRAJECTORIES = LENGTH = 100
DISCOUNT = 0.9
BATCH = 256
LEARNING_RATE = 1e-3
QUADRATURE = 3  # Gauss-Legendre points per cell and axis
SAMPLES = 100  # of the CVAE's importance weighting


@dataclass(frozen=True)
class World:
    following: np.ndarray  # (CELLS, ACTIONS): f(s, a)
    policy: np.ndarray  # (CELLS, ACTIONS)
    future: np.ndarray  # (CELLS, ACTIONS, CELLS): the true p(g | s, a)


def transitions() -> np.ndarray:
    """f(s, a) (CELLS, ACTIONS), cells numbered row by row."""
    row, column = np.divmod(np.arange(CELLS), SIZE)
    moved = [np.clip(row + i, 0, SIZE - 1) * SIZE + np.clip(column + j, 0, SIZE - 1) for i, j in MOVES]
    return np.stack(moved, axis=1)


def future_density(following: np.ndarray, policy: np.ndarray, discount: float) -> np.ndarray:
    """P = (1 - discount) T0 (I - discount T)^-1, (S, A) and (S, A) -> (S, A, S).

    T0[s, a, k] = 1(f(s, a) = k), T[s, k] = sum_a pi(a | s) T0[s, a, k].
    """
    t0 = np.eye(len(following))[following]  # (S, A, S)
    t = np.einsum("sa,sak->sk", policy, t0)
    return (1 - discount) * t0 @ np.linalg.inv(np.eye(len(following)) - discount * t)


def make_world(seed: int, discount: float = DISCOUNT) -> World:
    following = transitions()
    policy = numpy_stream(seed, "gridworld", "policy").dirichlet(np.ones(ACTIONS), size=CELLS)
    return World(following, policy, future_density(following, policy, discount))


def observe(cells: np.ndarray, source: np.random.Generator) -> np.ndarray:
    """Cells (...) -> standardised observations (..., 2)."""
    place = np.stack(np.divmod(cells, SIZE), axis=-1) + source.uniform(-0.5, 0.5, size=(*cells.shape, 2))
    return ((place - (SIZE - 1) / 2) / SCALE).astype(np.float32)


def centres() -> np.ndarray:
    """The middle of each cell, standardised (CELLS, 2)."""
    place = np.stack(np.divmod(np.arange(CELLS), SIZE), axis=-1)
    return ((place - (SIZE - 1) / 2) / SCALE).astype(np.float32)


class Trajectories:
    """States and actions of one policy; draws transitions with goals geometrically far ahead."""

    def __init__(self, world: World, seed: int, trajectories: int = TRAJECTORIES, length: int = LENGTH) -> None:
        source = numpy_stream(seed, "gridworld", "trajectories")
        cells, actions = [source.integers(CELLS, size=trajectories)], []
        for step in range(length + 1):  # the last state has an action too: C-learning looks one step on
            u = source.uniform(size=(trajectories, 1))
            choice = (u > world.policy[cells[-1]].cumsum(1)).sum(1).clip(max=ACTIONS - 1)
            actions.append(choice)
            if step < length:
                cells.append(world.following[cells[-1], choice])
        self.cells, self.actions = np.stack(cells, axis=1), np.stack(actions, axis=1)  # (N, length + 1)
        self.length = length
        self.visits = np.zeros((CELLS, ACTIONS))
        np.add.at(self.visits, (self.cells[:, :-1], self.actions[:, :-1]), 1.0)
        self.observations = torch.from_numpy(observe(self.cells, source))  # (N, length + 1, 2)
        self.one_hot = torch.eye(ACTIONS)[torch.from_numpy(self.actions)]  # (N, length + 1, ACTIONS)

    def sample(
        self, generator: torch.Generator, batch: int, discount: float = DISCOUNT
    ) -> tuple[Tensor, Tensor, Tensor, Following]:
        """Goal, state, action (batch, ...) and the step after. Eq. (1): the goal is K ~ Geom(1 - discount) steps on."""
        which, t = random_index(generator, (batch,), len(self.cells)), random_index(generator, (batch,), self.length)
        # Beyond the end it is the last state: the chain has forgotten its start by then, so little is lost.
        ahead = (t + geometric_steps(generator, (batch,), discount)).clamp(max=self.length)
        after = self.observations[which, t + 1]
        following = (after, after, self.one_hot[which, t + 1])
        return self.observations[which, ahead], self.observations[which, t], self.one_hot[which, t], following


# ------------------------------------------------------------------------------------------------------- estimators

HALF = SIZE / 2 / SCALE
ESTIMATORS = {
    "flow": "RealNVP",
    "cvae": "CVAE",
    "cvae-fixed": "CVAE, SPOT's loss",
    "clearning-mc": "C-learning, MC",
    "clearning-td": "C-learning, TD",
    "contrastive": "contrastive RL",
    "histogram": "histogram",
    "marginal": "p(g) alone",
}


class Marginal(DensityEstimator):
    """p(g), whatever the state and action: what an estimator must beat to have learned anything."""

    def __init__(self) -> None:
        super().__init__()
        self.marginal = HistogramMarginal(grid_bins())

    def log_prob(self, goal: Tensor, state: Tensor, action: Tensor) -> Tensor:
        return self.marginal.log_prob(goal)

    def after_step(self, goal: Tensor, state: Tensor, action: Tensor) -> None:
        self.marginal.observe(goal)


def grid_bins() -> Bins:
    return Bins([-HALF] * 2, [HALF] * 2, [SIZE] * 2)


def make_estimator(name: str, draws_per_transition: float = 1.0, discount: float = DISCOUNT) -> DensityEstimator:
    """Sizes were chosen once, for about equal numbers of weights, and nothing was tuned after seeing results."""
    dims = (2, ACTIONS, 2)
    match name:
        case "flow":
            return FlowDensity(*dims, blocks=4, channels=32, encoder_width=128, encoder_layers=2, representation=32)
        case "cvae":  # the decoder's spread is learned
            return CVAE(*dims, hidden=(128, 128), samples=SAMPLES)
        case "cvae-fixed":  # mean squared error + 0.5 mean KL
            return CVAE(*dims, hidden=(128, 128), samples=SAMPLES, std=math.sqrt(1 / 8))
        case "clearning-mc" | "clearning-td":
            marginal = HistogramMarginal(grid_bins())
            kind: Literal["mc", "td"] = "mc" if name == "clearning-mc" else "td"
            return CLearning(*dims, hidden=(192, 192), kind=kind, discount=discount, marginal=marginal)
        case "contrastive":
            return Contrastive(*dims, hidden=(128, 128), representation=32, marginal=HistogramMarginal(grid_bins()))
        case "histogram":  # it alone is told the cells
            return Histogram(grid_bins(), ACTIONS, grid_bins(), prior=1.0, weight=1.0 / max(1.0, draws_per_transition))
        case "marginal":
            return Marginal()
    raise AssertionError(name)


def fit(name: str, data: Trajectories, seed: int, steps: int, discount: float = DISCOUNT) -> DensityEstimator:
    """Adam, learning rate falling to zero as a cosine; every estimator gets the same batches in the same order."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "gridworld", "weights", name))
        estimator = make_estimator(name, steps * BATCH / (len(data.cells) * data.length), discount)
        batches = torch.Generator().manual_seed(stream_seed(seed, "gridworld", "batches"))
        learned = [p for p in estimator.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(learned, lr=LEARNING_RATE, fused=True) if learned else None
        for step in range(steps):
            goal, state, action, following = data.sample(batches, BATCH, discount)
            if optimizer is not None:
                for group in optimizer.param_groups:
                    group["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
                optimizer.zero_grad(set_to_none=True)
                estimator.loss(goal, state, action, following).backward()
                optimizer.step()
            estimator.after_step(goal, state, action)
    return estimator.requires_grad_(False)


def quadrature(points: int = QUADRATURE) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre points of every cell (CELLS, points^2, 2) and log weights (points^2), all standardised."""
    x, w = np.polynomial.legendre.leggauss(points)  # on [-1, 1]
    offsets = np.stack(np.meshgrid(x / 2, x / 2, indexing="ij"), axis=-1).reshape(-1, 2)
    weights = np.outer(w, w).ravel() / 4 / SCALE**2  # sum: the area of a cell
    return (centres()[:, None] + offsets / SCALE).astype(np.float32), np.log(weights)


@torch.no_grad()
def log_masses(estimator: DensityEstimator, states: np.ndarray, chunk: int = 4096) -> np.ndarray:
    """Observed states (N, 2) -> log of the probability given to each goal cell, for all actions (N, ACTIONS, CELLS)."""
    places, log_weights = quadrature()
    goals = torch.from_numpy(places).view(-1, 2)
    rows = torch.cartesian_prod(torch.arange(len(states)), torch.arange(ACTIONS), torch.arange(len(goals)))
    state, action = torch.from_numpy(states), torch.eye(ACTIONS)
    parts = [estimator.log_prob(goals[r[:, 2]], state[r[:, 0]], action[r[:, 1]]).double() for r in rows.split(chunk)]
    log_density = torch.cat(parts).numpy().reshape(len(states), ACTIONS, CELLS, -1)
    return np.logaddexp.reduce(log_density + log_weights, axis=-1)
