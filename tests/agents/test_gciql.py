"""GCIQL's losses worked sample by sample, who learns from which, and values on a chain where they are known."""

from __future__ import annotations

import math

import pytest
import torch

from qhyer.agents.gciql import GCIQLConfig
from qhyer.data.samplers import GoalLaw
from qhyer.errors import UserError


def at(net, *inputs: torch.Tensor) -> list[float]:
    """Every member at one sample."""
    with torch.no_grad():
        return net(*(x[None] for x in inputs))[:, 0].tolist()


def log_density(actor, s: torch.Tensor, g: torch.Tensor, a: torch.Tensor) -> float:
    with torch.no_grad():
        mean = actor(torch.cat([s, g]))
    return sum(-0.5 * float(x) ** 2 - 0.5 * math.log(2 * math.pi) for x in a - mean)


def make(tiny_agent, shake, **options):
    agent = tiny_agent("gciql", discount=0.9, expectile=0.8, **options)
    shake(agent, 0.3)
    return agent


def test_value_and_critic_losses_by_hand(tiny_agent, shake, batch_of):
    agent = make(tiny_agent, shake)
    batch = batch_of(agent)
    batch["masks"][:3], batch["rewards"][:3] = 0.0, 0.0
    value = critic = 0.0
    signs = set()
    for i in range(12):
        s, next_s, g, a = (batch[k][i] for k in ("observations", "next_observations", "value_goals", "actions"))
        u = min(at(agent.target_critic, s, g, a)) - at(agent.value, s, g)[0]
        value += (0.8 if u >= 0 else 0.2) * u**2
        signs.add(u >= 0)
        target = float(batch["rewards"][i]) + 0.9 * float(batch["masks"][i]) * at(agent.value, next_s, g)[0]
        critic += sum((q - target) ** 2 for q in at(agent.critic, s, g, a))
    assert len(signs) == 2
    assert float(agent.value_loss(batch)[0].detach()) == pytest.approx(value / 12, rel=1e-4)
    assert float(agent.critic_loss(batch)[0].detach()) == pytest.approx(critic / 12, rel=1e-4)


def test_ddpgbc_by_hand(tiny_agent, shake, batch_of):
    agent = make(tiny_agent, shake, alpha=0.7)
    batch, q, log_p = batch_of(agent), [], []
    for i in range(12):
        s, g, a = (batch[k][i] for k in ("observations", "actor_goals", "actions"))
        with torch.no_grad():
            best = agent.actor(torch.cat([s, g])).clamp(-1, 1)
        q.append(min(at(agent.critic, s, g, best)))
        log_p.append(log_density(agent.actor, s, g, a))
    expected = -sum(q) / (sum(map(abs, q)) + 12e-6) - 0.7 * sum(log_p) / 12
    assert float(agent.actor_loss(batch)[0].detach()) == pytest.approx(expected, rel=1e-4)


def test_awr_by_hand(tiny_agent, shake, batch_of):
    agent = make(tiny_agent, shake, alpha=2.0, actor_loss="awr")
    batch, total = batch_of(agent), 0.0
    for i in range(12):
        s, g, a = (batch[k][i] for k in ("observations", "actor_goals", "actions"))
        advantage = min(at(agent.critic, s, g, a)) - at(agent.value, s, g)[0]
        total -= min(math.exp(2.0 * advantage), 100.0) * log_density(agent.actor, s, g, a)
    assert float(agent.actor_loss(batch)[0].detach()) == pytest.approx(total / 12, rel=1e-4)


@pytest.mark.parametrize("actor_loss", ["ddpgbc", "awr"])
def test_each_loss_moves_its_own_networks(tiny_agent, shake, batch_of, actor_loss):
    agent = make(tiny_agent, shake, actor_loss=actor_loss)
    batch = batch_of(agent)
    nets = dict(value=agent.value, critic=agent.critic, actor=agent.actor, target=agent.target_critic)
    for mine in ("value", "critic", "actor"):
        agent.zero_grad()
        getattr(agent, f"{mine}_loss")(batch)[0].backward()
        for name, net in nets.items():
            assert all((p.grad is not None) == (name == mine) for p in net.parameters()), (mine, name)


def test_the_actor_climbs_the_critic(tiny_agent, shake, batch_of):
    """With next to no imitation, a step of gradient descent raises Q at the actor's own actions."""
    agent = make(tiny_agent, shake, alpha=1e-6)
    batch = batch_of(agent, 64)
    loss, before = agent.actor_loss(batch)
    parameters = list(agent.actor.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        p.data -= 1e-2 * gradient
    assert agent.actor_loss(batch)[1]["actor/q"] > before["actor/q"]


def test_the_target_takes_the_weights_before_the_step(tiny_agent, shake, batch_of):
    agent = make(tiny_agent, shake)
    before = [p.detach().clone() for p in agent.critic.parameters()]
    target = [p.clone() for p in agent.target_critic.parameters()]
    agent.loss(batch_of(agent))[0].backward()
    agent.optimizer.step()
    for online, lag, now in zip(before, target, agent.target_critic.parameters()):
        torch.testing.assert_close(now, 0.005 * online + 0.995 * lag)


def test_goals_are_ogbench_s(tiny_agent):
    sampler = tiny_agent("gciql").stages()[0].sampler
    assert sampler.value == GoalLaw(0.2, pytest.approx(0.5), 0.3, 0.99) and sampler.negative
    assert sampler.actor == GoalLaw(0.0, 1.0, 0.0, None)


def test_the_actor_is_all_that_acting_reads(tiny_agent, point_world, shake):
    agent, other = tiny_agent("gciql"), tiny_agent("gciql", seed=1)
    shake(agent)
    state = agent.acting_state()
    assert {name.split(".")[0] for name in state} == {"actor", "observation_mean", "observation_std"}
    other.load_state_dict(state, strict=False)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    assert torch.equal(agent.act(s, g, None)[0], other.act(s, g, None)[0])


@pytest.mark.parametrize("wrong", [dict(expectile=0.0), dict(target_rate=0.0), dict(value_p_random=-0.1)])
def test_nonsense_is_refused(wrong):
    with pytest.raises(UserError):
        GCIQLConfig(**wrong)


def test_values_count_steps_across_walks(learn, chain):
    """V(s, g) is about -(1 - gamma^d) / (1 - gamma), also for pairs that no walk of the data connects; Q prefers the
    action that goes there, and the actor follows it."""
    goals = dict(value_p_current=0.5, value_p_random=0.5, actor_p_random=1.0)
    rates = dict(learning_rate=1e-2, target_rate=0.2)
    agent = learn("gciql", 400, discount=0.7, expectile=0.97, alpha=0.5, **goals, **rates)
    with torch.no_grad():
        v = chain.square(agent.value(chain.states, chain.goals))
        back, forth = (
            chain.square(agent.critic(chain.states, chain.goals, torch.full((len(chain.states), 1), a)).mean(0))
            for a in (-1.0, 1.0)
        )
    expected = -(1 - 0.7**chain.steps) / 0.3
    assert (v - expected).abs().mean() < 0.5
    for distance in range(5):  # on average farther is worse
        assert v[chain.steps == distance].mean() > v[chain.steps == distance + 1].mean()
    right = (forth - back) * chain.direction
    assert (right[chain.apart] > 0).float().mean() > 0.85
    assert chain.alignment(agent) > 0.2
