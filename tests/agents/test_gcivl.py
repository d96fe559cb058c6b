"""GCIVL's losses worked sample by sample, its goals, and values on a chain where they are known."""

from __future__ import annotations

import math

import pytest
import torch

from qhyer.agents.gcivl import GCIVLConfig
from qhyer.data.samplers import GoalLaw
from qhyer.errors import UserError


def values(net, s: torch.Tensor, g: torch.Tensor) -> list[float]:
    """Both values at one state and goal."""
    with torch.no_grad():
        return net(s[None], g[None])[:, 0].tolist()


@pytest.fixture
def agent(tiny_agent, shake):
    agent = tiny_agent("gcivl", discount=0.9, expectile=0.8)
    shake(agent)  # the targets too, so that they are not their networks
    return agent


def test_value_loss_by_hand(agent, batch_of):
    batch = batch_of(agent)
    batch["masks"][:3], batch["rewards"][:3] = 0.0, 0.0  # some goals are reached
    total, positive = 0.0, 0
    for i in range(12):
        s, next_s, g = (batch[k][i] for k in ("observations", "next_observations", "value_goals"))
        r, m = float(batch["rewards"][i]), float(batch["masks"][i])
        next_target, target = values(agent.target_value, next_s, g), values(agent.target_value, s, g)
        advantage = r + 0.9 * m * min(next_target) - sum(target) / 2
        positive += advantage >= 0
        for bar, v in zip(next_target, values(agent.value, s, g)):
            total += (0.8 if advantage >= 0 else 0.2) * (r + 0.9 * m * bar - v) ** 2
    assert 0 < positive < 12
    loss, metrics = agent.value_loss(batch)
    assert float(loss.detach()) == pytest.approx(total / 12, rel=1e-5)
    assert float(metrics["value/loss"]) == pytest.approx(total / 12, rel=1e-5)


def test_actor_loss_by_hand(agent, batch_of):
    batch, total = batch_of(agent), 0.0
    for i in range(12):
        s, next_s, g, a = (batch[k][i] for k in ("observations", "next_observations", "actor_goals", "actions"))
        advantage = sum(values(agent.value, next_s, g)) / 2 - sum(values(agent.value, s, g)) / 2
        with torch.no_grad():
            mean = agent.actor(torch.cat([s, g]))
        log_p = sum(-0.5 * float(x) ** 2 - 0.5 * math.log(2 * math.pi) for x in a - mean)
        total -= min(math.exp(10.0 * advantage), 100.0) * log_p
    assert float(agent.actor_loss(batch)[0].detach()) == pytest.approx(total / 12, rel=1e-4)


def test_each_loss_moves_its_own_networks(agent, batch_of):
    batch = batch_of(agent)
    agent.value_loss(batch)[0].backward()
    assert all(p.grad is not None for p in agent.value.parameters())
    assert all(p.grad is None for net in (agent.actor, agent.target_value) for p in net.parameters())
    agent.zero_grad()
    agent.actor_loss(batch)[0].backward()
    assert all(p.grad is not None for p in agent.actor.parameters())
    assert all(p.grad is None for net in (agent.value, agent.target_value) for p in net.parameters())
    total, value, actor = (f(batch)[0] for f in (agent.loss, agent.value_loss, agent.actor_loss))
    torch.testing.assert_close(total, value + actor)


def test_the_target_takes_the_weights_before_the_step(agent, batch_of):
    before = [p.detach().clone() for p in agent.value.parameters()]
    target = [p.clone() for p in agent.target_value.parameters()]
    agent.loss(batch_of(agent))[0].backward()
    agent.optimizer.step()
    for online, lag, now, new in zip(before, target, agent.target_value.parameters(), agent.value.parameters()):
        torch.testing.assert_close(now, 0.005 * online + 0.995 * lag)
        assert not torch.equal(new, online)


def test_goals_are_ogbench_s(tiny_agent):
    """value_p_curgoal 0.2, trajgoal 0.5 (geometric), randomgoal 0.3; the actor's lie ahead, uniformly."""
    sampler = tiny_agent("gcivl").stages()[0].sampler
    assert sampler.value == GoalLaw(0.2, pytest.approx(0.5), 0.3, 0.99) and sampler.negative
    assert sampler.actor == GoalLaw(0.0, 1.0, 0.0, None)
    assert tiny_agent("gcivl", actor_p_random=0.5).stages()[0].sampler.actor == GoalLaw(0.0, 0.5, 0.5, None)


def test_the_actor_is_all_that_acting_reads(tiny_agent, point_world, shake):
    agent, other = tiny_agent("gcivl"), tiny_agent("gcivl", seed=1)
    shake(agent)
    state = agent.acting_state()
    assert {name.split(".")[0] for name in state} == {"actor", "observation_mean", "observation_std"}
    other.load_state_dict(state, strict=False)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    assert torch.equal(agent.act(s, g, None)[0], other.act(s, g, None)[0])


@pytest.mark.parametrize("wrong", [dict(expectile=1.0), dict(discount=1.0), dict(value_p_current=0.8)])
def test_nonsense_is_refused(wrong):
    with pytest.raises(UserError):
        GCIVLConfig(**wrong)


def test_values_count_steps_across_walks(learn, chain):
    """V(s, g) = -(1 - gamma^d) / (1 - gamma), also for pairs that no walk of the data connects; and the policy, which
    imitates a random walk, goes the right way."""
    goals = dict(value_p_current=0.5, value_p_random=0.5, actor_p_random=1.0)
    agent = learn("gcivl", 400, discount=0.7, target_rate=0.1, alpha=3.0, **goals)
    with torch.no_grad():
        v = chain.square(agent.value(chain.states, chain.goals).mean(0))
    expected = -(1 - 0.7**chain.steps) / 0.3
    assert (v - expected).abs().max() < 0.6 and (v - expected).abs().mean() < 0.2
    assert (chain.actions(agent) * chain.direction)[chain.apart].min() > 0.0
