"""SAW: its losses by hand, whom each of them moves, what acting reads, and a chain where the answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from test_hiql import LOG, Distance, Goal, Nothing, column, draw, line

from qhyer import presets, runs
from qhyer.agents.saw import SAWConfig


class Half(torch.nn.Module):
    """A policy towards subgoals: half the way from s to w."""

    def forward(self, x):
        s, w = x.chunk(2, dim=-1)
        return (w - s) / 2


@pytest.fixture
def by_hand():
    """An agent on the line: V = -0.75 |s - g| (heads -0.5 and -1, targets -1 and -2), mu = 0, mu_sub = (w - s) / 2."""

    def make(**options):
        config = SAWConfig(**{"representation": 1, "value_hidden": (8,), "hidden": (8,), **options})
        agent = runs.build_agent("saw", config, line().spec(), 0)
        agent.phi, agent.value, agent.target_value = Goal(), Distance(0.5, 1.0), Distance(1.0, 2.0)
        agent.actor_phi, agent.actor, agent.sub_actor = Goal(), Nothing(), Half()
        return agent

    return make


BATCH = {
    "observations": column(0.0, 0.0),
    "next_observations": column(1.0, -1.0),
    "value_goals": column(3.0, 3.0),
    "low_actor_goals": column(2.0, 2.0),
    "high_actor_goals": column(4.0, 4.0),
    "high_actor_targets": column(2.0, -2.0),
    "actions": column(0.4, 1.0),
    "rewards": torch.tensor([-1.0, -1.0]),
    "masks": torch.tensor([1.0, 1.0]),
}


def test_value_loss(by_hand):
    """As HIQL's test works it: weight 0.7 on (-2 + 1.5)^2 + (-3 + 3)^2, and 0.3 on 1.5^2 + 2^2."""
    agent = by_hand(discount=0.5)
    loss, metrics = agent.value_loss(BATCH, agent.look(BATCH))
    assert float(loss) == pytest.approx((0.7 * 0.25 + 0.3 * 6.25) / 2)
    assert float(metrics["value/mean"]) == pytest.approx(-0.75 * 3)


def test_sub_actor_loss(by_hand):
    """Towards w = 2: A = 0.75; away from it: -0.75. Means (2 - 0) / 2 = 1, actions 0.4 and 1."""
    agent = by_hand(alpha_low=2.0)
    loss, metrics = agent.sub_actor_loss(BATCH, agent.look(BATCH))
    expected = (math.exp(1.5) * (0.18 + LOG) + math.exp(-1.5) * LOG) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["sub_actor/advantage"]) == pytest.approx(0.0)


def test_actor_loss(by_hand):
    """Towards g = 4: A = 0.75 and -0.75, nll 0.08 and 0.5. Subgoals 2 and -2: B = 1.5 and -1.5, mu_sub = 1 and -1, mu =
    0, so squared distances of 1."""
    agent = by_hand(alpha=2.0, beta=1.0)
    loss, metrics = agent.actor_loss(BATCH, agent.look(BATCH))
    imitation = (math.exp(1.5) * (0.08 + LOG) + math.exp(-1.5) * (0.5 + LOG)) / 2
    bootstrap = (math.exp(1.5) + math.exp(-1.5)) / 2
    assert float(metrics["actor/loss"]) == pytest.approx(imitation, rel=1e-5)
    assert float(metrics["bootstrap/loss"]) == pytest.approx(bootstrap, rel=1e-5)
    assert float(loss) == pytest.approx(imitation + bootstrap, rel=1e-5)
    assert float(metrics["bootstrap/distance"]) == pytest.approx(1.0)
    agent = by_hand(beta=100.0)  # no sample counts more than a hundred times
    assert float(agent.actor_loss(BATCH, agent.look(BATCH))[1]["bootstrap/loss"]) == pytest.approx(50.0)


def test_each_loss_moves_its_own_networks(tiny_agent, point_world, shake):
    """Neither policy shapes the value's phi, and the flat one does not move its teacher."""
    agent = tiny_agent("saw")
    shake(agent)
    batch = draw(agent, point_world)
    expected = {
        "value_loss": {"phi", "value"},
        "sub_actor_loss": {"sub_actor"},
        "actor_loss": {"actor", "actor_phi"},
    }
    for name, networks in expected.items():
        agent.zero_grad()
        getattr(agent, name)(batch, agent.look(batch))[0].backward()
        assert {n.split(".")[0] for n, p in agent.named_parameters() if p.grad is not None} == networks
    total, metrics = agent.loss(batch)
    torch.testing.assert_close(total.detach(), sum(metrics[k] for k in metrics if k.endswith("/loss")))


def test_the_flat_policy_is_all_that_acting_reads(tiny_agent, point_world, shake):
    agent, other = tiny_agent("saw"), tiny_agent("saw", seed=1)
    shake(agent)
    state = agent.acting_state()
    assert {name.split(".")[0] for name in state if "." in name} == {"actor", "actor_phi"}
    other.load_state_dict(state, strict=False)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    assert torch.equal(agent.act(s, g, None)[0], other.act(s, g, None)[0])


def test_presets():
    fields = ("expectile", "beta", "subgoal_steps", "discount", "actor_p_random")
    expected = {
        "cube-single-play-v0": (0.9, 0.3, 10, 0.99, 0.0),
        "cube-double-play-v0": (0.7, 1.0, 10, 0.99, 0.0),
        "scene-play-v0": (0.7, 1.0, 10, 0.99, 0.0),
        "scene-noisy-v0": (0.7, 1.0, 10, 0.99, 0.0),
        "puzzle-4x6-noisy-v0": (0.7, 1.0, 10, 0.99, 0.0),
        "pointmaze-large-navigate-v0": (0.7, 3.0, 25, 0.99, 0.0),
        "pointmaze-giant-stitch-v0": (0.7, 3.0, 25, 0.995, 0.5),
    }
    for dataset, values in expected.items():
        config = presets.resolve("saw", "paper", dataset)[0]
        assert tuple(getattr(config, f) for f in fields) == values, dataset
        assert (config.alpha, config.alpha_low, config.representation) == (3.0, 3.0, 10)


def test_it_finds_the_way_on_the_chain(chain, learn):
    """No walk goes from one half to the other: the way there is put together of two."""
    agent = learn("saw", 300, discount=0.8, expectile=0.9, representation=4, subgoal_steps=2, target_rate=0.05)
    assert chain.alignment(agent) > 0.5
