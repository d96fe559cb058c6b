"""What every test shares: one thread, a point world small enough for seconds, and small versions of every agent."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from qhyer import agents, rollout, runs
from qhyer.agent import Agent, AgentConfig
from qhyer.data.episodes import Episodes

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run without a GPU, slowly; before anything imports triton
os.environ.setdefault("MUJOCO_GL", "disable")  # no screen, no warnings about it

SMALL: dict[str, Any] = dict(
    batch_size=8,
    learning_rate=1e-3,
    context=4,
    width=16,
    layers=2,
    heads=2,
    state_size=4,
    flow_blocks=2,
    flow_channels=8,
    encoder_width=16,
    encoder_layers=1,
    representation=4,
    warmup=0,
)
"""Sizes for tests, by field name; an agent takes those it has. Fields not named here: see `tiny_config`."""


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Files are whole after a kill without it, and no test pulls the plug: `fsync` took much of the suite's time.

    `test_checkpoint.py` has its own, which leaves it on; processes that tests start have it too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # a handle that is not open is refused as before
        yield


@pytest.fixture(scope="session")
def looks() -> Callable[..., rollout.About]:
    return functools.cache(rollout.check)


@pytest.fixture
def looked_at_once(looks, monkeypatch) -> None:
    """The process that looks at an environment before a training is started for its first training alone.

    For tests about something else: `test_own_environment.py` has it start for each.
    """
    monkeypatch.setattr(rollout, "check", looks)


def make_tiny_config(agent: str, **overrides: Any) -> AgentConfig:
    """The agent's defaults, made small: ten updates, sixteen units, whatever the agent calls them."""
    config = agents.load(agent).Config()
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in SMALL:
            changes[field.name] = SMALL[field.name]
        elif field.name.endswith("steps") and isinstance(value, int):
            changes[field.name] = 10
        elif isinstance(value, tuple) and value and all(isinstance(item, int) and item >= 32 for item in value):
            changes[field.name] = (16, 16)  # widths of hidden layers
        elif isinstance(value, int) and not isinstance(value, bool) and field.name.endswith(("width", "hidden", "dim")):
            changes[field.name] = 16
    return dataclasses.replace(config, **{**changes, **overrides})


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., AgentConfig]:
    """tiny_config("qhyer", context=3): a small configuration of any agent."""
    return make_tiny_config


@pytest.fixture(scope="session")
def point_world() -> Episodes:
    """Six walks of 60 rows in the plane: position and velocity, pushed towards way-points; the position is the goal."""
    rng = np.random.default_rng(0)
    observations, actions = [], []
    for _ in range(6):
        position, velocity, target = rng.uniform(-1, 1, 2), np.zeros(2), rng.uniform(-1, 1, 2)
        for _ in range(60):
            if np.linalg.norm(target - position) < 0.1:
                target = rng.uniform(-1, 1, 2)
            action = np.clip(2.0 * (target - position) - velocity + 0.1 * rng.normal(size=2), -1, 1)
            observations.append(np.concatenate([position, velocity]))
            actions.append(action)
            velocity = 0.8 * velocity + 0.2 * action
            position = position + 0.1 * velocity
    ends = 60 * np.arange(1, 7) - 1
    return Episodes.from_arrays(np.stack(observations), np.stack(actions), ends, goal=[0, 1], name="point-world")


@pytest.fixture(scope="session")
def tiny_agent(point_world) -> Callable[..., Agent]:
    """tiny_agent("qhyer", seed=1, context=3): a small agent on the point world, fresh, in training mode."""

    def make(name: str, seed: int = 0, **overrides: Any) -> Agent:
        return runs.build_agent(name, make_tiny_config(name, **overrides), point_world.spec(), seed)

    return make


@pytest.fixture(scope="session")
def shake() -> Callable[[torch.nn.Module], None]:
    """Move every parameter a little, at a fixed seed: near an initialisation of zeros, too much looks equal."""

    def move(module: torch.nn.Module, size: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)

    return move
