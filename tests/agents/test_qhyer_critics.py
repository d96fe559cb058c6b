"""QHyer with another estimator of Q: the same batches, encoder and normalisation, and what each one's Q is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from qhyer import agents, runs
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError
from qhyer.update import Update

RIVALS = ["cvae", "contrastive"]
every_rival = pytest.mark.parametrize("critic", RIVALS)


def batch_for(agent, episodes, count: int = 12):
    return agent.stages()[0].sampler.build(episodes, torch.Generator().manual_seed(1)).sample(count)


@every_rival
def test_same_encoder_and_about_the_same_size(critic, point_world):
    """At the paper's sizes, cube-single's and scene's: within a quarter of the flow's networks, a tenth in all."""
    for sizes in (dict(flow_blocks=6, flow_channels=256), dict(flow_blocks=8, flow_channels=384)):
        counts = {}
        for kind in ("flow", critic):
            config = agents.load("qhyer").Config(critic=kind, **sizes)
            made = runs.build_agent("qhyer", config, point_world.spec(), 0).critic
            assert set(made) == {"encoder", kind}
            counts[kind] = [sum(p.numel() for p in part.parameters()) for part in (made["encoder"], made[kind], made)]
        ours, flow = counts[critic], counts["flow"]
        assert ours[0] == flow[0] and ours[1] == pytest.approx(flow[1], rel=0.25)
        assert ours[2] == pytest.approx(flow[2], rel=0.1)


@pytest.mark.parametrize("critic, frame", [("cvae", "absolute"), ("cvae", "relative"), ("contrastive", "absolute")])
def test_learns_from_its_own_loss_at_the_flows_goals(critic, frame, tiny_agent, point_world, shake):
    """The estimator's loss on the flow's batch, the goals moved by flow_noise, seen from the state where asked for."""
    agent = tiny_agent("qhyer", critic=critic, goal_frame=frame, flow_noise=0.5)
    shake(agent)
    batch = batch_for(agent, point_world)
    torch.manual_seed(3)
    loss, metrics = agent.critic_loss(batch)
    torch.manual_seed(3)
    state = agent.normalize(batch["flow_observations"])
    goals = agent.normalize(batch["flow_goals"])[:, [0, 1]]
    goals = goals + 0.5 * torch.randn_like(goals) - (state[:, [0, 1]] if frame == "relative" else 0.0)
    context = agent.critic["encoder"](state, batch["flow_actions"])
    expected = agent.critic[critic].estimator.loss(goals, context, torch.zeros(len(goals), 0))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["critic/loss"], loss.detach())
    total, metrics = agent.loss(batch)
    parts = [metrics[name] for name in ("critic/loss", "actor/bc", "actor/q_loss")]
    torch.testing.assert_close(total.detach(), sum(parts))


@every_rival
def test_no_gradient_passes_between_actor_and_critic(critic, tiny_agent, point_world, shake):
    agent = tiny_agent("qhyer", critic=critic)
    shake(agent)
    batch = batch_for(agent, point_world)
    bc, regression, _ = agent.actor_loss(batch)
    (bc + regression).backward()
    assert all(p.grad is None for p in agent.critic.parameters())
    agent.zero_grad()
    agent.critic_loss(batch)[0].backward()
    assert all(p.grad is not None for p in agent.critic.parameters())
    assert all(p.grad is None for n, p in agent.named_parameters() if not n.startswith("critic"))


@every_rival
def test_q_is_normalised_as_the_flows(critic, tiny_agent, point_world, shake):
    agent = tiny_agent("qhyer", critic=critic).train()
    shake(agent)
    batch = batch_for(agent, point_world)
    goals = agent.goal_coordinates(batch["goals"])[:, None].expand(-1, agent.config.context, -1)
    with torch.no_grad():
        raw = agent.log_density(batch["observations"], batch["actions"], goals)
    torch.testing.assert_close(agent.q_values(batch), raw / (raw.abs().mean() + 1e-3))
    torch.testing.assert_close(agent.q_scale, raw.abs().mean())


@every_rival
def test_acting_needs_no_critic_but_to_choose_of_a_mixture(critic, tiny_agent):
    def held(**options) -> bool:
        return any(name.startswith("critic.") for name in tiny_agent("qhyer", **options).acting_state())

    plain, own = tiny_agent("qhyer").acting_state(), tiny_agent("qhyer", critic=critic).acting_state()
    assert list(plain) == list(own) and not held(critic=critic)
    assert held(critic=critic, action_head="best_of_mixture")
    assert held(critic=critic, past_q="critic") and not held(critic=critic, past_q="critic", context=1)


def test_a_cvae_seen_from_the_state_is_moved_with_it(tiny_agent, point_world, shake):
    """With an encoder that sees nothing, Q depends on goal less state alone; the map keeps volume."""
    agent = tiny_agent("qhyer", critic="cvae", goal_frame="relative")
    shake(agent)
    with torch.no_grad():
        for parameter in agent.critic["encoder"].parameters():
            parameter.zero_()
        s, a = point_world.observations[[3, 9]], point_world.actions[[3, 9]]
        goals = agent.goal_coordinates(point_world.observations[[20, 31]])
        moved = s.clone()
        moved[:, :2] += agent.observation_std[:2] * torch.tensor([0.3, -0.2])
        q = agent.log_density(s, a, goals)
        torch.testing.assert_close(agent.log_density(moved, a, goals + torch.tensor([0.3, -0.2])), q)
        assert not torch.allclose(agent.log_density(moved, a, goals), q)


@every_rival
def test_defended(critic, tiny_agent, point_world, shake):
    """The CVAE is mixed with a standard normal as the flow is; a ratio with the data's goals, whose ratio is one."""
    plain, defended = (tiny_agent("qhyer", critic=critic, flow_defence=w) for w in (0.0, 0.2))
    for agent in (plain, defended):
        shake(agent, 0.2)
    s, a = point_world.observations[:50], point_world.actions[:50]
    goals = 4.0 * plain.goal_coordinates(point_world.observations[100:150])
    with torch.no_grad():
        bare, mixed = (agent.log_density(s, a, goals) for agent in (plain, defended))
    broad = torch.ones(50)
    if critic == "cvae":
        broad = torch.distributions.Normal(0.0, 1.0).log_prob(goals).sum(-1).exp()
    torch.testing.assert_close(mixed.exp(), 0.8 * bare.exp() + 0.2 * broad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(critic="cvae", binary_goals="bits"), "binary_goals bits goes with critic flow alone"),
        (dict(critic="contrastive", binary_goals="bits"), "binary_goals bits goes with critic flow alone"),
        (dict(critic="contrastive", goal_frame="relative"), "needs goal_frame absolute"),
        (dict(critic="contrastive", batch_size=1, context=4, flow_batch=0.25), "two transitions or more"),
    ],
)
def test_what_does_not_go_together(options, words):
    with pytest.raises(UserError, match=words):
        agents.load("qhyer").Config(**options)


@pytest.mark.parametrize("critic", ["flow", *RIVALS])
def test_learns_where_one_gets_to(critic, tiny_config):
    """A walker jumps to where its action says, and stays there: Q of (s, a, g) must fall with the distance of g from a,
    at each goal. (Of one goal: the classifier's Q is off by a number of the goal's own.)"""
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, size=(1200, 1))
    places = np.concatenate([rng.uniform(-1, 1, size=(1200, 1)), np.zeros((1200, 1))], -1)
    places[1::2, 0] = actions[::2, 0] + 0.05 * rng.normal(size=600)
    episodes = Episodes.from_arrays(places, actions, 2 * np.arange(1, 601) - 1, goal=[0], name="jumps")
    sizes = dict(context=1, batch_size=128, flow_batch=1.0, learning_rate=5e-3, encoder_width=32, flow_channels=32)
    config = tiny_config("qhyer", critic=critic, discount=0.0, representation=8, **sizes)
    agent = runs.build_agent("qhyer", config, episodes.spec(), 0).train()
    (stage,) = agent.stages()
    torch.manual_seed(0)
    sampler = stage.sampler.build(episodes, torch.Generator().manual_seed(0))
    update = Update(agent, stage, sampler, "fp32", torch.device("cpu"))
    for step in range(250):
        update(step)
    agent.eval()
    tried = torch.linspace(-0.9, 0.9, 19)[:, None]
    for aim in (-0.5, 0.0, 0.5):
        goal = agent.goal_coordinates(torch.tensor([[aim, 0.0]])).expand(19, -1)
        with torch.no_grad():
            q = agent.log_density(torch.zeros(19, 2), tried, goal)
        assert math.isfinite(float(q.sum())) and abs(float(tried[q.argmax()]) - aim) <= 0.2, (critic, aim, q)


@pytest.mark.parametrize("critic, options", [("cvae", dict(goal_frame="relative")), ("contrastive", {})])
def test_densities_stay_in_full_precision(critic, options, tiny_agent, point_world):
    """With products in bf16 the encoder is rounded; what follows is not, in the loss or in Q."""
    agent = tiny_agent("qhyer", critic=critic, flow_defence=0.1, **options)
    (stage,) = agent.stages()
    sampler = stage.sampler.build(point_world, torch.Generator().manual_seed(0))
    update = Update(agent, stage, sampler, "bf16", torch.device("cpu"))
    for step in range(3):
        update(step)
    assert math.isfinite(update.take_metrics()["critic/loss"])
    batch = batch_for(agent, point_world)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        goals = agent.goal_coordinates(batch["flow_goals"])
        q = agent.log_density(batch["flow_observations"], batch["flow_actions"], goals)
        loss, _ = agent.critic_loss(batch)
    assert q.dtype == loss.dtype == torch.float32
