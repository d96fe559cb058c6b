"""Batches by index arithmetic on the training device; no loader, no worker processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qhyer.data import goals
from qhyer.data.episodes import Episodes


@dataclass(frozen=True)
class TransitionSamplerConfig:
    """I.i.d. transitions with a goal each, from OGBench's mixture."""

    p_current: float = 0.0
    p_trajectory: float = 1.0
    p_random: float = 0.0
    discount: float | None = None
    """geometric future goals with this discount; uniform future goals when None"""

    def build(self, episodes: Episodes, generator: torch.Generator) -> TransitionSampler:
        return TransitionSampler(self, episodes, generator)


class TransitionSampler:
    def __init__(self, config: TransitionSamplerConfig, episodes: Episodes, generator: torch.Generator) -> None:
        self.config, self.episodes, self.generator = config, episodes, generator

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        data, config = self.episodes, self.config
        pick = goals.random_index(self.generator, (batch_size,), data.num_transitions)
        rows = data.transitions[pick]
        goal_rows = goals.mixture(
            self.generator,
            data,
            rows,
            p_current=config.p_current,
            p_trajectory=config.p_trajectory,
            p_random=config.p_random,
            discount=config.discount,
        )
        return {
            "rows": rows,
            "goal_rows": goal_rows,
            "observations": data.observations[rows],
            "actions": data.actions[rows],
            "goals": data.observations[goal_rows],
        }
