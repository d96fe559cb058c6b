"""OTA: its losses by hand, whom each of them moves, what acting reads, and a chain where the answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from test_hiql import LOG, Distance, Goal, Nothing, column, draw, line

from qhyer import presets, runs
from qhyer.agents.ota import OTAConfig
from qhyer.train import Update


@pytest.fixture
def by_hand():
    """An agent on the line: V as in HIQL's tests, -0.75 d on average; V_high is -d in the mean of its heads."""

    def make(**options):
        config = OTAConfig(**{"representation": 1, "value_hidden": (8,), "hidden": (8,), **options})
        agent = runs.build_agent("ota", config, line().spec(), 0)
        agent.phi, agent.value, agent.target_value = Goal(), Distance(0.5, 1.0), Distance(1.0, 2.0)
        agent.high_value, agent.target_high_value = Distance(0.5, 1.5), Distance(1.0, 2.0)
        agent.low_actor = agent.high_actor = Nothing()
        return agent

    return make


BATCH = {
    "observations": column(0.0, 0.0),
    "next_observations": column(1.0, -1.0),
    "value_goals": column(3.0, 3.0),
    "option_ends": column(2.0, 3.0),
    "option_goals": column(3.0, 3.0),
    "option_rewards": torch.tensor([-1.0, 0.0]),
    "option_masks": torch.tensor([1.0, 0.0]),
    "low_actor_goals": column(2.0, 2.0),
    "high_actor_goals": column(4.0, 4.0),
    "high_actor_targets": column(2.0, 1.0),
    "actions": column(0.4, 1.0),
    "rewards": torch.tensor([-1.0, -1.0]),
    "masks": torch.tensor([1.0, 1.0]),
}


def test_value_loss(by_hand):
    """As HIQL's test works it: weight 0.7 on (-2 + 1.5)^2 + (-3 + 3)^2, and 0.3 on 1.5^2 + 2^2."""
    agent = by_hand(discount=0.5)
    loss, _ = agent.value_loss(BATCH, agent.look(BATCH))
    assert float(loss) == pytest.approx((0.7 * 0.25 + 0.3 * 6.25) / 2)


def test_high_value_loss(by_hand):
    """Options from 0, discount 1/2 however long they are; targets -d and -2d, values -d/2 and -1.5d, d = 3.

    To 2: q = (-1 - 0.5, -1 - 1) = (-1.5, -2); A = -2 + 4.5 > 0, so 0.7 on (-1.5 + 1.5)^2 + (-2 + 4.5)^2.
    To 3, the goal: q = 0; A = 4.5 > 0, so 0.7 on 1.5^2 + 4.5^2.
    """
    agent = by_hand(discount=0.5)
    loss, metrics = agent.high_value_loss(BATCH, agent.look(BATCH))
    assert float(loss) == pytest.approx(0.7 * (6.25 + 2.25 + 20.25) / 2)
    assert float(metrics["high_value/min"]) == pytest.approx(-4.5)


def test_actor_losses(by_hand):
    """The low actor weighs by V: 0.75 and -0.75 towards w = 2. The high one by V_high, from 0 to 2 and to 1 on the way
    to 4: 2 and 1; its targets are those places, its mean 0."""
    agent = by_hand(alpha_low=2.0, alpha_high=0.5)
    seen = agent.look(BATCH)
    low = (math.exp(1.5) * (0.08 + LOG) + math.exp(-1.5) * (0.5 + LOG)) / 2
    assert float(agent.low_actor_loss(BATCH, seen)[0]) == pytest.approx(low, rel=1e-5)
    high = (math.exp(1.0) * (2.0 + LOG) + math.exp(0.5) * (0.5 + LOG)) / 2
    loss, metrics = agent.high_actor_loss(BATCH, seen)
    assert float(loss) == pytest.approx(high, rel=1e-5)
    assert float(metrics["high_actor/advantage"]) == pytest.approx(1.5)


def test_each_loss_moves_its_own_networks(tiny_agent, point_world, shake):
    agent = tiny_agent("ota")
    shake(agent)
    batch = draw(agent, point_world)
    expected = {
        "value_loss": {"phi", "value"},
        "high_value_loss": {"phi", "high_value"},
        "low_actor_loss": {"low_actor"},
        "high_actor_loss": {"high_actor"},
    }
    for name, networks in expected.items():
        agent.zero_grad()
        getattr(agent, name)(batch, agent.look(batch))[0].backward()
        assert {n.split(".")[0] for n, p in agent.named_parameters() if p.grad is not None} == networks
    total, metrics = agent.loss(batch)
    torch.testing.assert_close(total.detach(), sum(metrics[k] for k in metrics if k.endswith("/loss")))


def test_both_targets_lag_by_a_step(tiny_agent, point_world):
    agent = tiny_agent("ota", target_rate=0.25)
    (stage,) = agent.stages()
    sampler = stage.sampler.build(point_world, torch.Generator().manual_seed(0))
    update = Update(agent, stage, sampler, "fp32", torch.device("cpu"))
    update(0)  # targets and values were equal: the targets stay
    pairs = ((agent.target_value, agent.value), (agent.target_high_value, agent.high_value))
    before = [[[p.detach().clone() for p in net.parameters()] for net in pair] for pair in pairs]
    update(1)
    for (target, _), (old, leading) in zip(pairs, before):
        for new, lagging, lead in zip(target.parameters(), old, leading):
            torch.testing.assert_close(new, 0.75 * lagging + 0.25 * lead)


def test_the_actors_are_all_that_acting_reads(tiny_agent, point_world, shake):
    agent, other = tiny_agent("ota"), tiny_agent("ota", seed=1)
    shake(agent)
    state = agent.acting_state()
    assert {name.split(".")[0] for name in state if "." in name} == {"low_actor", "high_actor"}
    other.load_state_dict(state, strict=False)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    assert torch.equal(agent.act(s, g, None)[0], other.act(s, g, None)[0])


def test_options_reach_the_sampler(tiny_agent, point_world):
    agent = tiny_agent("ota", option_steps=3, value_p_random=0.8, value_p_current=0.2)
    batch = draw(agent, point_world, 512)
    ends = torch.minimum(batch["rows"] + 3, point_world.end_of[batch["rows"]])
    assert torch.equal(batch["option_end_rows"], ends)  # no goal lies ahead, so no option stops early


def test_presets():
    fields = ("subgoal_steps", "option_steps", "discount", "actor_p_random")
    expected = {
        "cube-quadruple-noisy-v0": (10, 5, 0.99, 0.0),
        "puzzle-4x4-play-v0": (10, 1, 0.99, 0.0),
        "scene-play-v0": (10, 1, 0.99, 0.0),
        "pointmaze-large-navigate-v0": (25, 5, 0.99, 0.0),
        "pointmaze-giant-stitch-v0": (25, 5, 0.995, 0.5),
    }
    for dataset, values in expected.items():
        config = presets.resolve("ota", "paper", dataset)[0]
        assert tuple(getattr(config, f) for f in fields) == values, dataset
        assert (config.alpha_low, config.alpha_high, config.expectile, config.representation) == (3.0, 3.0, 0.7, 10)


def test_it_finds_the_way_on_the_chain(chain, learn):
    """No walk goes from one half to the other: the way there is put together of two."""
    options = dict(discount=0.8, expectile=0.9, representation=4, subgoal_steps=2, option_steps=2, target_rate=0.05)
    assert chain.alignment(learn("ota", 300, **options)) > 0.5
