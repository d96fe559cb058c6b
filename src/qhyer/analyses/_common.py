"""What the analyses share: the data of a run, a random stream of their own, and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qhyer import runs
from qhyer.agent import Agent, Batch
from qhyer.data import goals, registry
from qhyer.data.episodes import Episodes
from qhyer.data.samplers import chunks
from qhyer.errors import UserError
from qhyer.rng import stream_seed


def load_critic(run: Path, device: str) -> tuple[Any, int]:
    """The run's agent, which must have a flow critic, and its step. (Any: these methods are not of every agent.)"""
    agent, step = runs.load_agent(run, device=device)
    if not hasattr(agent, "log_density") or getattr(agent, "critic", None) is None:
        raise UserError(
            f"{run} holds {runs.read(run)['agent']} without a flow critic; this analysis needs log p(g | s, a), "
            "which qhyer has with conditioning=flow (the default)"
        )
    return agent, step


def load_episodes(run: Path, agent: Agent, data: Path | None, device: str) -> tuple[Episodes, dict[str, Any]]:
    """The run's dataset, or another file of the same layout; and what to write down about it."""
    info = runs.read(run)
    if data is not None:
        path = Path(data)
    else:
        dataset = registry.DATASETS.get(info["dataset"])
        recorded = Path(info["data"].get("path") or "")
        found = recorded if recorded.is_file() else None
        if found is None and dataset is not None:
            found = registry.find(dataset.name)
        if found is None:
            raise UserError(
                f"{run} was trained on {info['dataset']}, which is not in {registry.data_dir()} or ~/.ogbench/data; "
                "say where it is with --data FILE.npz"
            )
        path = found
    episodes = Episodes.load(path, goal=agent.spec.goal_indices, name=info["dataset"], device=device)
    sizes = (episodes.observations.shape[1], episodes.actions.shape[1])
    if sizes != (agent.spec.observation_dim, agent.spec.action_dim):
        raise UserError(
            f"{path} has {sizes[0]} observation and {sizes[1]} action columns, but {run} was trained on "
            f"{agent.spec.observation_dim} and {agent.spec.action_dim}"
        )
    about = {
        "file": path.name,
        "fingerprint": episodes.fingerprint,
        "training_data": episodes.fingerprint == info["data"]["fingerprint"],
        "episodes": episodes.num_episodes,
        "transitions": episodes.num_transitions,
    }
    return episodes, about


def generator(name: str, device: str) -> torch.Generator:
    """Each analysis draws from a stream of its own: the same run and data, the same answer."""
    return torch.Generator(device=device).manual_seed(stream_seed(0, "analysis", name))


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0 along the last axis; ties share their mean rank."""
    values = np.asarray(values, dtype=float)
    if values.ndim > 1:
        return np.stack([ranks(row) for row in values])
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts + 1) / 2)[inverse]


def spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rank correlation along the last axis; NaN where one side is constant."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    scale = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(scale > 0, (x * y).sum(-1) / scale, np.nan)


@dataclass(frozen=True)
class FlowSamplerConfig:
    """What the flow alone learns from: transitions, uniform over the data, with goals geometrically far, Eq. (1)."""

    discount: float
    chunk: int = 1

    def build(self, episodes: Episodes, generator: torch.Generator) -> FlowSampler:
        return FlowSampler(self, episodes, generator)


class FlowSampler:
    def __init__(self, config: FlowSamplerConfig, episodes: Episodes, generator: torch.Generator) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator

    def sample(self, batch_size: int) -> Batch:
        data = self.episodes
        rows = data.transitions[goals.random_index(self.generator, (batch_size,), data.num_transitions)]  # (B,)
        ahead = goals.geometric_future(self.generator, data, rows, self.config.discount)
        return {
            "flow_observations": data.observations[rows],  # (B, d_s)
            "flow_actions": chunks(data, rows, self.config.chunk),  # (B, chunk * d_a)
            "flow_goals": data.observations[ahead],  # (B, d_s)
        }
