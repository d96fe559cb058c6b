"""QRL's losses worked sample by sample, the dual variable's direction, and distances on a chain."""

from __future__ import annotations

import math

import pytest
import torch

from qhyer.agents.qrl import QRLConfig
from qhyer.data.samplers import GoalLaw
from qhyer.errors import UserError


def make(tiny_agent, shake, **options):
    agent = tiny_agent("qrl", **options)
    shake(agent, 0.3)
    return agent


def latent(agent, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return agent.metric.phi(x)


def distance(agent, x: torch.Tensor, y: torch.Tensor) -> float:
    """Between latents, by the definition: IQE's groups of eight swept from left to right, or MRN's two halves."""
    x, y = x.tolist(), y.tolist()
    if agent.config.quasimetric == "mrn":
        half = len(x) // 2
        root = math.sqrt(sum((a - b) ** 2 for a, b in zip(x[:half], y[:half])))
        return root + max(0.0, max(a - b for a, b in zip(x[half:], y[half:])))
    groups = []
    for i in range(0, len(x), 8):
        length, reach = 0.0, -math.inf
        for a, b in sorted((a, b) for a, b in zip(x[i : i + 8], y[i : i + 8]) if a < b):
            length += max(0.0, b - max(a, reach))
            reach = max(reach, b)
        groups.append(length)
    rho = 1 / (1 + math.exp(-float(agent.metric.mix.detach())))
    return rho * sum(groups) / len(groups) + (1 - rho) * max(groups)


@pytest.mark.parametrize("quasimetric", ["iqe", "mrn"])
def test_losses_by_hand(tiny_agent, shake, batch_of, quasimetric):
    """The value's Lagrangian, the dynamics and the actor, summed."""
    agent = make(tiny_agent, shake, quasimetric=quasimetric, alpha=0.7, margin=0.05)
    batch = batch_of(agent)
    dual = math.exp(float(agent.log_dual.detach()))
    push = excess = dynamics = bc = 0.0
    q = []
    for i in range(12):
        s, next_s, g, goal, a = (
            batch[k][i] for k in ("observations", "next_observations", "value_goals", "actor_goals", "actions")
        )
        z, next_z = latent(agent, s), latent(agent, next_s)
        push += 100 * math.log1p(math.exp(5 - distance(agent, z, latent(agent, g)) / 100)) / 12
        excess += max(0.0, distance(agent, z, next_z) - 1) ** 2 / 12
        with torch.no_grad():
            guess = z + agent.dynamics(torch.cat([z, a]))
            mean = agent.actor(torch.cat([s, goal]))
            led = z + agent.dynamics(torch.cat([z, mean.clamp(-1, 1)]))
        dynamics += (distance(agent, next_z, guess) + distance(agent, guess, next_z)) / 24
        q.append(-distance(agent, led, latent(agent, goal)))
        bc += sum(0.5 * float(x) ** 2 + 0.5 * math.log(2 * math.pi) for x in a - mean) / 12
    value = push + dual * excess + dual * (0.05 - excess)
    actor = -sum(q) / (sum(map(abs, q)) + 12e-6) + 0.7 * bc
    loss, metrics = agent.loss(batch)
    assert float(metrics["value/push"]) == pytest.approx(push, rel=1e-4)
    assert float(metrics["value/excess"]) == pytest.approx(excess, rel=1e-3, abs=1e-6)
    assert float(metrics["value/loss"]) == pytest.approx(value, rel=1e-4)
    assert float(metrics["dynamics/loss"]) == pytest.approx(dynamics, rel=1e-4)
    assert float(metrics["actor/loss"]) == pytest.approx(actor, rel=1e-4)
    assert float(loss.detach()) == pytest.approx(value + dynamics + actor, rel=1e-4)


def test_awr_by_hand(tiny_agent, shake, batch_of):
    agent = make(tiny_agent, shake, alpha=2.0, actor_loss="awr")
    batch, total = batch_of(agent), 0.0
    for i in range(12):
        s, next_s, g, a = (batch[k][i] for k in ("observations", "next_observations", "actor_goals", "actions"))
        z, next_z, goal = (latent(agent, x) for x in (s, next_s, g))
        with torch.no_grad():
            mean = agent.actor(torch.cat([s, g]))
        nll = sum(0.5 * float(x) ** 2 + 0.5 * math.log(2 * math.pi) for x in a - mean)
        advantage = distance(agent, z, goal) - distance(agent, next_z, goal)
        total += min(math.exp(2.0 * advantage), 100.0) * nll / 12
    found = agent.actor_loss(batch, agent.metric.encode(batch["observations"]))[0]
    assert float(found.detach()) == pytest.approx(total, rel=1e-4)
    assert agent.dynamics is None


def value_gradients(agent, batch) -> dict[str, torch.Tensor]:
    agent.zero_grad()
    seen = torch.cat([batch["observations"], batch["next_observations"], batch["value_goals"]])
    agent.value_loss(*agent.metric.encode(seen).chunk(3))[0].backward()
    return {name: p.grad for name, p in agent.named_parameters() if p.grad is not None}


def test_lambda_rises_where_transitions_are_too_long(tiny_agent, shake, batch_of):
    """Its gradient is lambda (margin - C): descent raises it while C exceeds the margin, and lowers it otherwise; and
    it weighs C's gradient on phi."""
    agent = make(tiny_agent, shake)
    batch = batch_of(agent)
    for scale, sign in ((20.0, -1), (1e-3, 1)):
        with torch.no_grad():
            agent.metric.phi.head.weight.mul_(scale)
        assert math.copysign(1, float(value_gradients(agent, batch)["log_dual"])) == sign
        with torch.no_grad():
            agent.metric.phi.head.weight.div_(scale)
    with torch.no_grad():
        agent.metric.phi.head.weight.mul_(20.0)
    slopes = []
    for log_dual in (-20.0, 0.0, math.log(2.0)):
        agent.log_dual.data.fill_(log_dual)
        slopes.append(value_gradients(agent, batch)["metric.phi.head.weight"].clone())
    torch.testing.assert_close(slopes[2] - slopes[0], 2 * (slopes[1] - slopes[0]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("actor_loss", ["ddpgbc", "awr"])
def test_the_actor_leaves_distance_and_dynamics_be(tiny_agent, shake, batch_of, actor_loss):
    agent = make(tiny_agent, shake, actor_loss=actor_loss)
    batch = batch_of(agent)
    agent.actor_loss(batch, agent.metric.encode(batch["observations"]))[0].backward()
    for name, parameter in agent.named_parameters():
        assert (parameter.grad is not None) == name.startswith("actor."), name


def test_the_latent_learns_from_the_dynamics(tiny_agent, shake, batch_of):
    agent = make(tiny_agent, shake)
    batch = batch_of(agent)
    z, next_z = agent.metric.encode(torch.cat([batch["observations"], batch["next_observations"]])).chunk(2)
    agent.dynamics_loss(z, next_z, batch["actions"])[0].backward()
    assert all(p.grad is not None for net in (agent.metric, agent.dynamics) for p in net.parameters())


def test_goals_are_ogbench_s(tiny_agent):
    """The value's are any rows; the actor's lie ahead, uniformly."""
    sampler = tiny_agent("qrl").stages()[0].sampler
    assert sampler.value == GoalLaw(0.0, 0.0, 1.0, None) and sampler.actor == GoalLaw(0.0, 1.0, 0.0, None)


def test_the_actor_is_all_that_acting_reads(tiny_agent, point_world, shake):
    agent, other = tiny_agent("qrl"), tiny_agent("qrl", seed=1)
    shake(agent)
    state = agent.acting_state()
    assert {name.split(".")[0] for name in state} == {"actor", "observation_mean", "observation_std"}
    other.load_state_dict(state, strict=False)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    assert torch.equal(agent.act(s, g, None)[0], other.act(s, g, None)[0])


@pytest.mark.parametrize("wrong", [dict(latent_dim=12), dict(margin=-1.0), dict(actor_p_random=-0.5)])
def test_nonsense_is_refused(wrong):
    with pytest.raises(UserError):
        QRLConfig(**wrong)


@pytest.mark.parametrize("quasimetric", ["iqe", "mrn"])
def test_distances_count_steps_across_walks(learn, chain, quasimetric):
    """Along the line distances add up, also between the halves, which no walk joins; a step is a little over one while
    the dual variable is small; and the actor, whose data walk at random, goes the right way."""
    options = dict(latent_dim=16, quasimetric=quasimetric, alpha=0.3, actor_p_random=1.0)
    agent = learn("qrl", 250, lambda agent: agent.log_dual.data.fill_(math.log(4.0)), **options)
    with torch.no_grad():
        d = chain.square(agent.metric(chain.states, chain.goals))
    per_step = (d / chain.steps)[chain.apart]
    assert per_step.min() > 1.0 and per_step.max() < 1.8
    assert float(d[0, 6]) == pytest.approx(float(d[0, 3] + d[3, 6]), rel=0.05)
    assert (d.diagonal(1) - d.diagonal(-1)).abs().max() < 0.5  # both ways are as long
    assert chain.alignment(agent) > 0.8
