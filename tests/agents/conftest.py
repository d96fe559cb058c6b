"""A world so small that values are known: a line of places, walked at random, each walk within one of two halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qhyer import agents, runs
from qhyer.agent import Agent, AgentConfig
from qhyer.data.episodes import Episodes
from qhyer.update import Update

PLACES, MIDDLE = 7, 3


@pytest.fixture(scope="session")
def chain_world() -> Episodes:
    """Steps of +1 and -1, each as likely; the halves share the middle place, so that no walk goes from end to end."""
    rng = np.random.default_rng(0)
    observations, actions = [], []
    for walk in range(200):
        low, high = (0, MIDDLE) if walk % 2 else (MIDDLE, PLACES - 1)
        place = int(rng.integers(low, high + 1))
        for _ in range(9):
            action = float(rng.choice([-1.0, 1.0]))
            observations.append(np.eye(PLACES)[place])
            actions.append([action])
            place = int(np.clip(place + action, low, high))
    return Episodes.from_arrays(np.array(observations), np.array(actions), 9 * np.arange(1, 201) - 1, name="chain")


class Chain:
    """All pairs of places: state s down, goal g across; their distance and the direction from one to the other."""

    states = torch.eye(PLACES).repeat_interleave(PLACES, 0)  # (49, 7)
    goals = torch.eye(PLACES).repeat(PLACES, 1)
    ahead = torch.arange(PLACES)[None] - torch.arange(PLACES)[:, None]  # (7, 7): g - s
    steps, direction = ahead.abs(), ahead.sign()
    apart = steps > 0

    @staticmethod
    def square(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(PLACES, PLACES)

    def actions(self, agent: Agent) -> torch.Tensor:
        return self.square(agent.act(self.states, self.goals, None)[0])

    def alignment(self, agent: Agent) -> float:
        """Mean of action times direction over pairs apart: 1 for the shortest way, 0 for none."""
        return float((self.actions(agent) * self.direction)[self.apart].mean())


@pytest.fixture(scope="session")
def chain() -> Chain:
    return Chain()


def trained(
    name: str, config: AgentConfig, data: Episodes, prepare: Callable[[Any], None] = lambda agent: None
) -> Agent:
    """An agent of one stage after all of its updates."""
    agent = runs.build_agent(name, config, data.spec(), 0)
    prepare(agent)
    (stage,) = agent.stages()
    sampler = stage.sampler.build(data, torch.Generator().manual_seed(0))
    update = Update(agent, stage, sampler, "fp32", torch.device("cpu"))
    for step in range(stage.steps):
        update(step)
    return agent.eval()


@pytest.fixture(scope="session")
def train_all() -> Callable[..., Agent]:
    return trained


@pytest.fixture(scope="session")
def learn(chain_world) -> Callable[..., Agent]:
    """learn("gcivl", 300, alpha=3.0): a small agent after that many updates on the chain."""

    def train(name: str, steps: int, prepare: Callable[[Any], None] = lambda agent: None, **options: Any) -> Agent:
        sizes = dict(steps=steps, batch_size=256, learning_rate=5e-3, hidden=(32,), value_hidden=(64,))
        return trained(name, agents.load(name).Config(**(sizes | options)), chain_world, prepare)

    return train


@pytest.fixture
def batch_of(point_world) -> Callable[..., dict[str, torch.Tensor]]:
    """batch_of(agent): a small batch from the agent's own sampler, on the point world."""

    def draw(agent: Agent, count: int = 12) -> dict[str, torch.Tensor]:
        (stage,) = agent.stages()
        return stage.sampler.build(point_world, torch.Generator().manual_seed(1)).sample(count)

    return draw
