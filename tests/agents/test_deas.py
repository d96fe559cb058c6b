"""DEAS: its losses by hand, whom each of them moves, the range of its histograms, and values that are known."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from test_hiql import column, line
from test_qc_fql import march
from torch import nn

from qhyer import presets, runs
from qhyer.agents.deas import DEASConfig
from qhyer.errors import UserError

V = (0.2, 0.3, 0.5)  # of the bins around -2.5, -1.5 and -0.5: a mean of -1.2
POOR, FAIR, GOOD = (0.6, 0.3, 0.1), (0.1, 0.1, 0.8), (0.05, 0.05, 0.9)  # means of -2, -0.8 and -0.65


class Table(nn.Module):
    """Logits (members, B, 3) of given masses, whatever is seen."""

    def __init__(self, *masses: tuple[tuple[float, ...], ...]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(masses).log() + 5.0)

    def forward(self, *inputs):
        return self.logits


@pytest.fixture
def by_hand():
    """An agent on the line with chunks of two and three bins from -3 to 0, for a batch of three."""

    def make(**options):
        sizes = dict(chunk=2, bins=3, lowest=-3.0, value_hidden=(8,), hidden=(8,), discount=0.8, reward_discount=0.5)
        agent = runs.build_agent("deas", DEASConfig(**(sizes | options)), line().spec(), 0)
        agent.value.net = Table((V, V, V))
        agent.critic.net = Table((FAIR, POOR, V), (V, V, V))
        agent.target_critic.net = Table((FAIR, GOOD, V), (POOR, FAIR, V))
        return agent

    return make


BATCH = {
    "observations": column(0.0, 0.0, 0.0),
    "next_observations": column(1.0, 1.0, 1.0),
    "value_goals": column(9.0, 0.5, 7.0),
    "actor_goals": column(9.0, 0.5, 7.0),
    "actions": torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.1, -0.2]]),
    "rewards": torch.tensor([[-1.0, -1.0], [-1.0, 0.0], [-1.0, -1.0]]),
    "masks": torch.tensor([1.0, 0.0, 1.0]),
    "valid": torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]),
}


def entropy(masses, predicted) -> float:
    return -sum(p * math.log(q) for p, q in zip(masses, predicted))


def test_value_loss(by_hand):
    """The lesser of the heads: POOR, worse than V, with weight 0.1; FAIR, better, with 0.9; the third is cut."""
    loss, metrics = by_hand().value_loss(BATCH)
    assert float(loss.detach()) == pytest.approx((0.1 * entropy(POOR, V) + 0.9 * entropy(FAIR, V)) / 3)
    assert float(metrics["value/mean"]) == pytest.approx(-1.2)
    assert float(metrics["value/advantage"]) == pytest.approx((-0.8 + 0.4 + 0.0) / 3, abs=1e-6)


def histogram(y: float) -> list[float]:
    law = stats.truncnorm((-3 - y) / 0.75, (0 - y) / 0.75, loc=y, scale=0.75)
    return [law.cdf(high) - law.cdf(high - 1) for high in (-2, -1, 0)]


def test_critic_loss(by_hand):
    """gamma_1 = 0.5, gamma_2^2 = 0.64: y = -1.5 - 0.64 * 1.2 = -2.268; y = -1 where the goal is reached on the way."""
    loss, metrics = by_hand().critic_loss(BATCH)
    first, second = histogram(-2.268), histogram(-1.0)
    expected = entropy(first, FAIR) + entropy(first, V) + entropy(second, POOR) + entropy(second, V)
    assert float(loss.detach()) == pytest.approx(expected / 6, rel=1e-5)
    assert float(metrics["critic/target"]) == pytest.approx((-2.268 - 1.0 - 2.268) / 3)


def test_the_actor_reads_the_mean_of_both_heads(by_hand):
    q = by_hand().q(*(BATCH[k] for k in ("observations", "actor_goals", "actions")))
    torch.testing.assert_close(q.detach(), torch.tensor([-1.0, -1.6, -1.2]))


def test_values_beyond_the_support_count_as_its_end(by_hand):
    agent = by_hand()
    far = BATCH | {"rewards": torch.full((3, 2), -50.0)}
    loss, _ = agent.critic_loss(far | {"masks": torch.zeros(3)})
    expected = entropy(histogram(-3.0), FAIR) + entropy(histogram(-3.0), POOR) + 2 * entropy(histogram(-3.0), V)
    assert float(loss.detach()) == pytest.approx(expected / 6, rel=1e-5)


def test_each_loss_moves_its_own_networks(tiny_agent, batch_of, shake):
    agent = tiny_agent("deas")
    shake(agent)
    batch = batch_of(agent)
    expected = {"value_loss": "value", "critic_loss": "critic", "flow_loss": "flow", "actor_loss": "actor"}
    for name, network in expected.items():
        agent.zero_grad()
        getattr(agent, name)(batch)[0].backward()
        moved = {n for n, p in agent.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        assert moved == {n for n, _ in agent.named_parameters() if n.startswith(f"{network}.")}, name
    total, metrics = agent.loss(batch)
    torch.testing.assert_close(total.detach(), sum(metrics[k] for k in metrics if k.endswith("/loss")))


def test_the_target_follows_the_critic(tiny_agent, shake, batch_of):
    agent = tiny_agent("deas", target_rate=0.25)
    shake(agent.critic)
    before, lag = ([p.detach().clone() for p in net.parameters()] for net in (agent.critic, agent.target_critic))
    agent.loss(batch_of(agent))[0].backward()
    agent.optimizer.step()
    for online, old, now in zip(before, lag, agent.target_critic.parameters()):
        torch.testing.assert_close(now, 0.25 * online + 0.75 * old)


def test_the_support_begins_where_no_goal_is_ever_reached(tiny_agent):
    """The fixed point of V = -(1 + g1 + ... + g1^(h-1)) + g2^h V; -1 / (1 - gamma) with one discount."""
    v = 0.0
    for _ in range(20_000):
        v = -sum(0.9**u for u in range(8)) + 0.999**8 * v
    expected = {
        v: dict(chunk=8, reward_discount=0.9, discount=0.999),
        -100.0: dict(chunk=4, reward_discount=0.99, discount=0.99),
        -7.0: dict(lowest=-7.0),
    }
    for low, options in expected.items():
        agent = tiny_agent("deas", bins=11, **options)
        for net in (agent.value, agent.critic, agent.target_critic):
            torch.testing.assert_close(net.edges, torch.linspace(low, 0.0, 12))
            assert net.std == pytest.approx(-0.75 * low / 11)


def test_presets():
    expected = {
        "scene-play-v0": (8, 300.0, 0.99, 0.0),
        "puzzle-4x4-noisy-v0": (8, 300.0, 0.99, 0.0),
        "cube-double-play-v0": (4, 300.0, 0.99, 0.0),
        "cube-single-noisy-v0": (4, 300.0, 0.99, 0.0),
        "cube-triple-play-v0": (4, 100.0, 0.99, 0.0),
        "pointmaze-giant-stitch-v0": (4, 10.0, 0.995, 0.5),
    }
    for dataset, values in expected.items():
        config = presets.resolve("deas", "paper", dataset)[0]
        assert (config.chunk, config.alpha, config.discount, config.actor_p_random) == values, dataset
        assert (config.reward_discount, config.expectile, config.bins, config.sigma) == (0.9, 0.9, 101, 0.75)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(reward_discount=1.1),
        dict(expectile=1.0),
        dict(bins=1),
        dict(sigma=0.0),
        dict(lowest=0.0),
        dict(chunk=0),
    ],
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(UserError):
        DEASConfig(**wrong)


# -------------------------------------------------------------------------------------------------------- learning


def test_values_are_discounted_distances(train_all):
    """On the march with chunks of two: V(d) = -(1 + g1) + g2^2 V(d - 2), V(1) = -1, V(0) = 0, but for what the bins'
    width takes off at 0."""
    torch.manual_seed(0)
    sizes = dict(batch_size=128, learning_rate=1e-2, hidden=(32,), value_hidden=(64,), target_rate=0.1)
    config = DEASConfig(steps=400, chunk=2, discount=0.8, reward_discount=0.5, value_p_random=0.0, **sizes)
    agent = train_all("deas", config, march())
    known = [0.0, -1.0]
    for _ in range(5):
        known.append(-1.5 + 0.64 * known[-2])
    for s, g in [(0, 0), (0, 1), (1, 3), (2, 5), (0, 6), (6, 6)]:
        state, goal = torch.eye(9)[[s]], torch.eye(9)[[g]]
        with torch.no_grad():
            v = float(agent.value.mean(agent.value(state, goal)))
            q = float(agent.q(state, goal, torch.ones(1, 2)))
        assert v == pytest.approx(known[g - s], abs=0.15) and q == pytest.approx(known[g - s], abs=0.15), (s, g)


def test_it_finds_the_way_on_the_chain(chain, learn):
    """No walk goes from one half to the other: the way there is put together of two."""
    torch.manual_seed(0)
    agent = learn("deas", 400, chunk=2, discount=0.8, alpha=0.3, target_rate=0.05)
    assert chain.alignment(agent) > 0.5
