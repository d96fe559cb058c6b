"""Two worlds each sequence model must solve: go where the goal is, and do what paid."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qhyer import agents, runs
from qhyer.agent import Agent
from qhyer.agents._sequence import ReturnConditioned
from qhyer.data.episodes import Episodes
from qhyer.update import Update

SMALL = dict(
    batch_size=64, learning_rate=3e-3, context=3, width=32, layers=2, heads=2, dropout=0.0, warmup=0, horizon=32,
    policy_learning_rate=3e-3, hidden=(32, 32), value_hidden=(32, 32), state_size=4,
)  # fmt: skip
"""Sizes by field name; an agent takes those it has."""

UPDATES = dict(
    dt=100, rvs=100, edt=100, gdt=100, qdt=100, cgdt=100, reinformer=100, dc=100, dmamba=100, qt=100, lsdt=200,
    dmixer=100, vdt=100, hdt=100, iql=200, cql=250,
)  # fmt: skip
"""agents, and the updates each gets"""

QUICK = dict(discount=0.8, target_rate=0.1, terminal=False, eta=0.2)
OPTIONS = dict(
    qdt=QUICK,
    qt=QUICK,
    vdt=QUICK,
    iql=QUICK | dict(expectile=0.9, p_random=0.0),
    cql=QUICK | dict(weight=0.2, gap=1.0, samples=3, policy_learning_rate=1e-3, p_current=0.0, p_random=0.0),
)
"""what makes values quick to learn"""

MODELS = [name for name in UPDATES if issubclass(agents.load(name), ReturnConditioned)]


@pytest.fixture(scope="module")
def two_ways() -> Episodes:
    """Walks along a line, to one side or the other all the way: the goal alone tells which."""
    rng = np.random.default_rng(0)
    observations, actions = [], []
    for _ in range(150):
        side = rng.choice([-1.0, 1.0])
        observations.append(rng.uniform(-1, 1) + 0.2 * side * np.arange(8))
        actions.append(0.5 * side + 0.1 * rng.normal(size=8))
    ends = 8 * np.arange(1, 151) - 1
    return Episodes.from_arrays(
        np.concatenate(observations)[:, None], np.concatenate(actions)[:, None], ends, name="two-ways"
    )


@pytest.fixture(scope="module")
def what_pays() -> Episodes:
    """All start at 0 and go up or down, down more often; up pays 1 a step once there."""
    rng = np.random.default_rng(0)
    observations, actions, rewards = [], [], []
    for _ in range(150):
        side = rng.choice([-1.0, 1.0], p=[0.7, 0.3])
        x = side * np.minimum(np.arange(6), 3) / 3 + 0.02 * rng.normal(size=6)
        observations.append(x)
        actions.append(0.5 * side + 0.1 * rng.normal(size=6))
        rewards.append((x > 0.9).astype(np.float32))
    ends = 6 * np.arange(1, 151) - 1
    episodes = Episodes.from_arrays(
        np.concatenate(observations)[:, None], np.concatenate(actions)[:, None], ends, name="what-pays"
    )
    episodes.rewards = torch.from_numpy(np.concatenate(rewards))
    return episodes


def small(name: str, episodes: Episodes, **options) -> Agent:
    cls = agents.load(name)
    fields = cls.Config.__dataclass_fields__
    config = cls.Config(**{k: v for k, v in (SMALL | options).items() if k in fields})
    return runs.build_agent(name, config, episodes.spec(), 0)


def trained(name: str, episodes: Episodes, **options) -> Agent:
    agent = small(name, episodes, **(OPTIONS.get(name, {}) | options))
    torch.manual_seed(0)
    for stage in agent.stages():
        sampler = stage.sampler.build(episodes, torch.Generator().manual_seed(0))
        update = Update(agent.train(), stage, sampler, "fp32", torch.device("cpu"))
        for step in range(UPDATES[name]):
            update(step)
    return agent.eval()


@pytest.mark.parametrize("name", UPDATES)
def test_goes_where_the_goal_is(name, two_ways):
    agent = trained(name, two_ways, goal="concat")
    start = torch.linspace(-1, 1, 9)[:, None].repeat_interleave(2, 0)
    side = torch.tensor([1.0, -1.0]).repeat(9)[:, None]
    goal, memory = start + 0.8 * side, None
    with torch.no_grad():
        for step in range(3):
            action, memory = agent.act(start + 0.2 * step * side, goal, memory)
            assert float((action * side).min()) > 0.1, step


@pytest.mark.parametrize("name", UPDATES)
def test_does_what_paid(name, what_pays):
    """Without a goal, from the dataset's rewards: up, though the data mostly go down."""
    agent = trained(name, what_pays, goal="none", dataset_rewards=True)
    with torch.no_grad():
        action, _ = agent.act(torch.zeros(1, 1), torch.zeros(1, 1), None)
    assert float(action) > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_acts_as_it_was_trained(name, two_ways, shake):
    """The training pass over a window gives, at each of its steps, the action taken there."""
    agent = small(name, two_ways, goal="concat", target_return=1.0, candidates=1).eval()
    shake(agent)
    seen, goal, memory, taken = torch.randn(2, 3, 1), torch.randn(2, 1), None, []
    with torch.no_grad():
        for t in range(3):
            action, memory = agent.act(seen[:, t], goal, memory)
            taken.append(action)
        actions = torch.stack(taken, 1)
        again = agent.predict(agent.states(seen, goal), torch.ones(2, 3), actions, torch.arange(3).expand(2, 3))
    torch.testing.assert_close(again.clamp(-1, 1), actions, rtol=0, atol=1e-5)
    assert actions.std() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_imitation_by_hand_and_without_padding(name, two_ways, shake):
    """The mean over valid steps and action dimensions; what is padding moves nothing."""
    agent = small(name, two_ways, goal="concat", context=4)
    shake(agent)
    agent.eval()
    batch = agent.stages()[0].sampler.build(two_ways, torch.Generator().manual_seed(0)).sample(6)
    batch["valid"][:3, 2:] = False
    with torch.no_grad():
        actions = agent.predict(*agent.window(batch))
        errors = [
            float((actions[i, k, 0] - batch["actions"][i, k, 0]) ** 2)
            for i in range(6)
            for k in range(4)
            if batch["valid"][i, k]
        ]
        assert float(agent.imitation(batch, actions)[0]) == pytest.approx(sum(errors) / 18, rel=1e-4)
        spoilt = {k: v.clone() for k, v in batch.items()}
        spoilt["observations"][:3, 2:] += 3.0
        spoilt["actions"][:3, 2:] -= 0.5
        spoilt["returns"][:3, 2:] += 9.0
        again = agent.imitation(spoilt, agent.predict(*agent.window(spoilt)))[0]
        torch.testing.assert_close(again, agent.imitation(batch, actions)[0])
