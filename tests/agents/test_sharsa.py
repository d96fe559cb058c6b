"""SHARSA: its losses by hand, whom each of them moves, how it acts, and a chain where the way is known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from qhyer import presets, runs
from qhyer.agents.sharsa import TABLE, SHARSAConfig
from qhyer.data import registry
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError
from qhyer.nn.chance import first_row
from qhyer.update import Update


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def bce(logit: float, target: float) -> float:
    return -target * math.log(sigma(logit)) - (1 - target) * math.log(sigma(-logit))


class Logits(nn.Module):
    """c_j times the sum of some columns of the input, by their place: a value simple enough for sums in the head."""

    def __init__(self, places: tuple[int, ...], *factors: float) -> None:
        super().__init__()
        self.places, self.factors = list(places), torch.tensor(factors)

    def forward(self, *inputs):
        return self.factors[:, None] * torch.cat(inputs, dim=-1)[:, self.places].sum(-1)


class Still(nn.Module):
    """A network without velocity, which keeps what it was asked."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x):
        self.asked = x
        return torch.zeros(*x.shape[:-1], self.size)


def plane() -> Episodes:
    """States (x, y) with goal y; actions of one number."""
    rng = np.random.default_rng(0)
    return Episodes.from_arrays(rng.normal(size=(30, 2)), rng.uniform(-1, 1, (30, 1)), [9, 19, 29], goal=[1])


@pytest.fixture
def by_hand():
    """V = g - x, Q = 1 and 2 times (g + w), targets 2 and -1 times that; of single steps: V = g, Q = 1 and 3 times
    (x + a), targets 1 and 2 times that; flows that stand still. x is a state's other coordinate."""

    def make(**options):
        config = SHARSAConfig(**{"hidden": (8,), "value_hidden": (8,), "subgoal_steps": 4, "discount": 0.5, **options})
        agent = runs.build_agent("sharsa", config, plane().spec(), 0)
        agent.high.value = Difference()
        agent.high.critic, agent.high.target_critic = Logits((2, 3), 1.0, 2.0), Logits((2, 3), 2.0, -1.0)
        if agent.low is not None:
            agent.low.value = Logits((2,), 1.0)
            agent.low.critic, agent.low.target_critic = Logits((0, 3), 1.0, 3.0), Logits((0, 3), 1.0, 2.0)
        agent.high_actor.net, agent.low_actor.net = Still(1), Still(1)
        return agent

    return make


class Difference(nn.Module):
    def forward(self, s, g):
        return (g - s[:, :1]).T


BATCH = {
    "observations": torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 7.0]]),
    "actions": torch.tensor([[0.5], [-1.0], [0.0]]),
    "value_goals": torch.tensor([[9.0, 1.0], [9.0, -1.0], [9.0, 0.5]]),
    "value_ends": torch.tensor([[3.0, 0.5], [4.0, 0.25], [0.0, 0.5]]),
    "value_steps": torch.tensor([4.0, 2.0, 0.0]),
    "value_done": torch.tensor([0.0, 1.0, 1.0]),
    "high_actor_goals": torch.tensor([[9.0, 3.0], [9.0, 4.0], [9.0, 5.0]]),
    "high_actor_targets": torch.tensor([[9.0, -3.0], [9.0, -4.0], [9.0, -5.0]]),
    "low_actor_goals": torch.tensor([[9.0, 6.0], [9.0, 7.0], [9.0, 8.0]]),
    "low_value_goals": torch.tensor([[9.0, 0.5], [9.0, 0.0], [9.0, -0.5]]),
    "low_value_ends": torch.tensor([[5.0, 0.0], [5.0, 0.0], [5.0, 0.0]]),
    "low_value_steps": torch.tensor([1.0, 0.0, 1.0]),
    "low_value_done": torch.tensor([0.0, 1.0, 0.0]),
}


def test_critic_loss(by_hand):
    """y: four steps and no arrival, 0.5^4 sigma(V = 1 - 3); two steps and arrival, 0.25; there from the start, 1.
    Logits g + w: 1.5, -0.75, 1, and twice that."""
    loss, metrics = by_hand().critic_loss(BATCH)
    targets = (sigma(-2.0) / 16, 0.25, 1.0)
    heads = [(x, 2 * x) for x in (1.5, -0.75, 1.0)]
    expected = sum(bce(one, y) + bce(two, y) for (one, two), y in zip(heads, targets)) / 3
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["critic/loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["critic/target"]) == pytest.approx(sum(targets) / 3)
    assert float(metrics["critic/done"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("aggregate", ["min", "mean"])
def test_value_loss(by_hand, aggregate):
    """Target logits 2 (g + w) and -(g + w), of 1.5, -0.75, 1; V = g - x: 0, -3, 0.5."""
    loss, metrics = by_hand(aggregate=aggregate).value_loss(BATCH)
    take = min if aggregate == "min" else lambda a, b: (a + b) / 2
    learnt = [take(sigma(2 * x), sigma(-x)) for x in (1.5, -0.75, 1.0)]
    expected = sum(bce(v, q) for v, q in zip((0.0, -3.0, 0.5), learnt)) / 3
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["value/max"]) == pytest.approx(sigma(0.5)) and float(metrics["value/min"]) == pytest.approx(
        sigma(-3.0)
    )


def test_low_losses(by_hand):
    """gamma_low = 1 - 1/4. y: 0.75 sigma(V = g = 0.5), 1, 0.75 sigma(-0.5). x + a: 1.5, 1, 0."""
    agent = by_hand(double=True)
    loss, metrics = agent.low_critic_loss(BATCH)
    targets = (0.75 * sigma(0.5), 1.0, 0.75 * sigma(-0.5))
    expected = sum(bce(x, y) + bce(3 * x, y) for x, y in zip((1.5, 1.0, 0.0), targets)) / 3
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["low_critic/target"]) == pytest.approx(sum(targets) / 3)
    loss, _ = agent.low_value_loss(BATCH)
    expected = sum(bce(v, sigma(x)) for v, x in zip((0.5, 0.0, -0.5), (1.5, 1.0, 0.0))) / 3  # sigma(x) <= sigma(2 x)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_flow_losses(by_hand):
    """Without velocity the error is that of x1 - x0; the network is asked about [s, g, x_t, t], goals by their
    coordinate alone."""
    agent = by_hand()
    for name, sample, goal in (
        ("high_actor", BATCH["high_actor_targets"][:, 1:], BATCH["high_actor_goals"][:, 1:]),
        ("low_actor", BATCH["actions"], BATCH["low_actor_goals"][:, 1:]),
    ):
        torch.manual_seed(3)
        loss, metrics = getattr(agent, f"{name}_loss")(BATCH)
        torch.manual_seed(3)
        noise, t = torch.randn(3, 1), torch.rand(3, 1)
        torch.testing.assert_close(loss, (sample - noise).square().mean())
        torch.testing.assert_close(metrics[f"{name}/loss"], loss)
        between = (1 - t) * noise + t * sample
        asked = torch.cat([BATCH["observations"], goal, between, t], dim=-1)
        torch.testing.assert_close(getattr(agent, name).net.asked, asked)


def test_each_loss_moves_its_own_networks(tiny_agent, batch_of, shake):
    agent = tiny_agent("sharsa", double=True)
    shake(agent)
    batch = batch_of(agent)
    expected = {
        "value_loss": "high.value",
        "critic_loss": "high.critic",
        "high_actor_loss": "high_actor.net",
        "low_actor_loss": "low_actor.net",
        "low_value_loss": "low.value",
        "low_critic_loss": "low.critic",
    }
    for name, network in expected.items():
        agent.zero_grad()
        getattr(agent, name)(batch)[0].backward()
        assert {".".join(n.split(".")[:2]) for n, p in agent.named_parameters() if p.grad is not None} == {network}
    total, metrics = agent.loss(batch)
    torch.testing.assert_close(total.detach(), sum(metrics[k] for k in metrics if k.endswith("/loss")))
    assert all(not value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("double", [False, True])
def test_targets_lag(tiny_agent, point_world, double):
    """They start equal, and move towards the weights at which the gradient was taken."""
    agent = tiny_agent("sharsa", double=double, target_rate=0.25)
    (stage,) = agent.stages()
    sampler = stage.sampler.build(point_world, torch.Generator().manual_seed(0))
    update = Update(agent, stage, sampler, "fp32", torch.device("cpu"))
    levels = [agent.high, agent.low] if double else [agent.high]
    pairs = [pair for x in levels for pair in zip(x.target_critic.parameters(), x.critic.parameters())]
    assert all(torch.equal(target, online) for target, online in pairs)
    update(0)
    before = [(target.clone(), online.clone()) for target, online in pairs]
    update(1)
    for (target, online), (target_was, online_was) in zip(pairs, before):
        torch.testing.assert_close(target, 0.75 * target_was + 0.25 * online_was)
        assert not torch.equal(online, online_was)


# ------------------------------------------------------------------------------------------------------- acting


def slow_best(critic, s, g, draws):
    """One candidate after the other; the first of the best, by the lesser of its two logits."""
    best, score = None, -math.inf
    for w in draws:
        q = min(critic(s[None], g[None], w[None]).flatten().tolist())
        if q > score:
            best, score = w, q
    return best


def slow_draw(flow, noise, s, g, steps):
    """Euler's steps, one noise at a time."""
    x = noise.clone()
    for i in range(steps):
        x = x + flow.net(torch.cat([s, g, x, torch.tensor([i / steps])])) / steps
    return x


@pytest.mark.parametrize("double", [False, True])
def test_acting_step_by_step(tiny_agent, point_world, shake, double):
    agent = tiny_agent("sharsa", double=double, candidates=5, flow_steps=3).eval()
    shake(agent)
    observation, goal = point_world.observations[:4], point_world.observations[40:44]
    first = first_row(observation, goal, TABLE)
    memory = None
    with torch.no_grad():
        for step in range(3):
            found, memory = agent.act(observation + 0.1 * step, goal, memory)
            assert torch.equal(memory["row"], (first + 5 * (step + 1)) % TABLE)
            for i in range(4):
                s, g = observation[i] + 0.1 * step, goal[i, :2]
                noise = [agent.noise[(int(first[i]) + 5 * step + k) % TABLE] for k in range(5)]
                subgoals = [slow_draw(agent.high_actor, z[:2], s, g, 3) for z in noise]
                w = slow_best(agent.high.critic, s, g, subgoals)
                actions = [slow_draw(agent.low_actor, z[2:], s, w, 3) for z in noise]
                action = slow_best(agent.low.critic, s, w, actions) if double else actions[0]
                torch.testing.assert_close(found[i], action.clamp(-1, 1), rtol=1e-4, atol=1e-5)


def test_the_best_subgoal_is_followed(by_hand):
    """Flows that stand still give the noise itself; Q grows with w, so the greatest of 32 is chosen; with one, the
    first. The low flow is asked about it."""
    observation, goal = torch.tensor([[0.3, 0.1]]), torch.tensor([[9.0, 2.0]])
    row = int(first_row(observation, goal, TABLE))
    for candidates in (32, 1):
        agent = by_hand(candidates=candidates).eval()
        agent.high.critic = Logits((3,), 1.0, 1.0)
        noise = agent.noise[(row + torch.arange(candidates)) % TABLE]  # (N, 1 + 1)
        action, _ = agent.act(observation, goal, None)
        torch.testing.assert_close(action, noise[:1, 1:].clamp(-1, 1))
        asked = agent.low_actor.net.asked[0, 0]  # s, w, x, t
        torch.testing.assert_close(asked[:3], torch.cat([observation[0], noise[:, 0].max()[None]]))
    agent.high.critic = Logits((3,), 1.0, -1.0)  # the lesser of w and -w counts: the smallest |w|
    agent.config = dataclasses.replace(agent.config, candidates=32)
    agent.act(observation, goal, None)
    noise = agent.noise[(row + torch.arange(32)) % TABLE][:, 0]
    assert float(agent.low_actor.net.asked[0, 0, 2]) == float(noise[noise.abs().argmin()])


def test_the_table_is_standard_normal_and_not_saved(tiny_agent):
    agent, other = tiny_agent("sharsa"), tiny_agent("sharsa", seed=1)
    assert agent.noise.shape == (TABLE, 2 + 2) and torch.equal(agent.noise, other.noise)
    error = 5 / math.sqrt(TABLE)
    assert agent.noise.mean(0).abs().max() < error
    torch.testing.assert_close(torch.cov(agent.noise.T), torch.eye(4), rtol=0, atol=2 * error)
    assert "noise" not in agent.state_dict()


@pytest.mark.parametrize("double", [False, True])
def test_what_acting_reads(tiny_agent, point_world, shake, double):
    agent, other = tiny_agent("sharsa", double=double), tiny_agent("sharsa", seed=1, double=double)
    shake(agent)
    state = agent.acting_state()
    networks = {".".join(name.split(".")[:2]) for name in state if "." in name}
    assert networks == {"high.critic", "high_actor.net", "low_actor.net"} | ({"low.critic"} if double else set())
    other.load_state_dict(state, strict=False)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    assert torch.equal(agent.act(s, g, None)[0], other.act(s, g, None)[0])


def test_only_goal_coordinates_are_seen_of_goals(tiny_agent, batch_of, point_world, shake):
    agent = tiny_agent("sharsa", goal_part=(1,), double=True)
    shake(agent)
    batch = batch_of(agent)
    changed = dict(batch)
    for name in batch:
        if name.endswith(("goals", "targets")):
            changed[name] = batch[name].clone()
            changed[name][:, [0, 2, 3]] += 1.0
    torch.manual_seed(0)
    loss = agent.loss(batch)[0]
    torch.manual_seed(0)
    torch.testing.assert_close(agent.loss(changed)[0], loss)
    s, memory = point_world.observations[:3], {"row": torch.tensor([5, 6, 7])}
    goal = point_world.observations[30:33]
    other = goal + torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert torch.equal(agent.act(s, goal, memory)[0], agent.act(s, other, memory)[0])
    assert not torch.equal(agent.act(s, goal, memory)[0], agent.act(s, goal + 1.0, memory)[0])
    with pytest.raises(UserError, match="coordinates 0 to 1"):
        tiny_agent("sharsa", goal_part=(2,))


# ------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "options, complaint",
    [
        (dict(subgoal_steps=0), "subgoal_steps must be at least 1"),
        (dict(flow_steps=0), "flow_steps must be at least 1"),
        (dict(candidates=0), "candidates must be at least 1"),
        (dict(candidates=TABLE + 1), "candidates can be at most"),
        (dict(discount=1.0), "discount"),
        (dict(target_rate=0.0), "target_rate"),
        (dict(value_p_current=0.8), "exceed one"),
        (dict(value_p_random=-0.1), "value_p_random must lie between"),
        (dict(actor_p_random=1.1), "actor_p_random"),
        (dict(goal_part=(0, 0)), "each once"),
        (dict(goal_part=(-1,)), "by position"),
    ],
)
def test_impossible_settings(options, complaint):
    with pytest.raises(UserError, match=complaint):
        SHARSAConfig(**options)


def test_the_sampler_has_the_configured_laws(tiny_agent):
    config = tiny_agent("sharsa", subgoal_steps=20, discount=0.9, end_is_goal=False, double=True).stages()[0].sampler
    assert (config.steps, config.end_is_goal) == (20, False)
    law = lambda x: pytest.approx((x.p_current, x.p_trajectory, x.p_random))
    assert law(config.value) == (0.2, 0.5, 0.3) and config.value.discount is None
    assert law(config.actor) == (0.0, 0.5, 0.5) and config.actor.discount == 0.9
    assert law(config.low_value) == (0.2, 0.5, 0.3) and config.low_value.discount == pytest.approx(0.95)
    config = tiny_agent("sharsa", actor_geometric=False, actor_p_random=0.0).stages()[0].sampler
    assert config.low_value is None and config.actor.discount is None and law(config.actor) == (0.0, 1.0, 0.0)


def test_presets():
    fields = ("subgoal_steps", "actor_p_random", "actor_geometric", "aggregate")
    expected = {
        "puzzle-4x5-play-v0": (25, 0.5, True, "min"),
        "puzzle-3x3-noisy-v0": (25, 0.5, True, "min"),
        "cube-octuple-play-v0": (50, 0.0, True, "min"),
        "cube-single-play-v0": (50, 0.0, True, "min"),
        "cube-quadruple-noisy-v0": (50, 0.0, True, "min"),
        "scene-play-v0": (50, 0.0, True, "min"),
        "humanoidmaze-giant-navigate-v0": (50, 0.0, False, "mean"),
        "humanoidmaze-medium-navigate-v0": (50, 0.0, False, "mean"),
        "pointmaze-large-navigate-v0": (50, 0.0, False, "mean"),
        "antmaze-giant-stitch-v0": (50, 0.5, False, "mean"),
    }
    for dataset, values in expected.items():
        config, rules = presets.resolve("sharsa", "paper", dataset)
        assert tuple(getattr(config, f) for f in fields) == values, dataset
        assert (config.discount, config.steps, config.batch_size, config.candidates) == (0.999, 1_000_000, 1024, 32)
        assert config.hidden == config.value_hidden == (1024,) * 4 and not config.double and config.end_is_goal
    for name, dataset in registry.DATASETS.items():  # no official settings exist for any of these sizes, and it says so
        config, rules = presets.resolve("sharsa", "paper", name)
        if name.endswith("-v0"):
            assert any("inferred" in rule.source or "not published" in rule.source for rule in rules), name
        assert max(config.goal_part, default=0) < len(dataset.goal_indices)
    scene = presets.resolve("sharsa", "paper", "scene-noisy-v0")[0]
    # cube xyz, both buttons' "on", drawer and window
    seen = [registry.get("scene-noisy").goal_indices[i] for i in scene.goal_part]
    assert seen == [19, 20, 21, 29, 33, 36, 38]


# ------------------------------------------------------------------------------------------------------ learning


def line(count: int = 60, rows: int = 13) -> Episodes:
    """Walks to the right along a line, from anywhere in 0..8, one place a step: how far a goal is, is known."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 9, count)
    places = (starts[:, None] + np.arange(rows)).reshape(-1, 1) / 20
    return Episodes.from_arrays(places, np.ones_like(places), rows * np.arange(1, count + 1) - 1)


@pytest.mark.parametrize("double", [False, True])
def test_the_value_is_the_discount_of_the_way(train_all, double):
    """gamma^distance, over several segments; of single steps, gamma_low^distance."""
    sizes = dict(steps=500, batch_size=256, learning_rate=5e-3, hidden=(16,), value_hidden=(64, 64), target_rate=0.05)
    config = SHARSAConfig(**sizes, subgoal_steps=4, discount=0.9, value_p_random=0.0, double=double)
    agent = train_all("sharsa", config, line())
    place = lambda *x: torch.tensor(x)[:, None] / 20
    far = torch.tensor([0.0, 2.0, 4.0, 6.0, 8.0])
    s = place(5.0).expand(5, 1)
    with torch.no_grad():
        v = torch.sigmoid(agent.high.value(s, s + far[:, None] / 20)).squeeze(0)
        assert (v - 0.9**far).abs().max() < 0.08
        if double:
            v = torch.sigmoid(agent.low.value(s, s + far[:, None] / 20)).squeeze(0)
            assert (v - 0.75**far).abs().max() < 0.1


@pytest.mark.parametrize("double", [False, True])
def test_it_finds_the_way_on_the_chain(chain, learn, double):
    """No walk goes from one half to the other, and walks go anywhere: what the flows imitate leads nowhere, and the
    choice among 32 does. (Subgoals two steps ahead miss a goal next door, unless the action is chosen, too.) Of walks
    of eight steps one segment in eight is cut short: to call all of these arrivals would drown what is far."""
    options = dict(discount=0.8, subgoal_steps=2, target_rate=0.05, hidden=(64, 64), end_is_goal=False)
    agent = learn("sharsa", 800, double=double, **options)
    chosen = chain.alignment(agent)
    agent.config = dataclasses.replace(agent.config, candidates=1)
    assert chosen > (0.8 if double else 0.5) and chosen > chain.alignment(agent) + 0.3
