"""GAS: its losses by hand, whom they move, the map and the way over it step by step, and a chain to be stitched."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from test_hiql import Distance, column
from torch import Tensor, nn

from qhyer import agents, checkpoint, presets, runs
from qhyer.agents.gas import GAS, GASConfig
from qhyer.data.episodes import Episodes
from qhyer.data.samplers import GoalLaw
from qhyer.data.segments import first_beyond
from qhyer.errors import UserError
from qhyer.nn.graph import direction, efficient
from qhyer.nn.values import Metric
from qhyer.policy import GraphedPolicy
from qhyer.train import TrainConfig, Update, train, train_seeds


def line(count: int = 3, rows: int = 20) -> Episodes:
    """Walks along a line, a step to the right each: from 0, from 10, from 20."""
    x = np.concatenate([10.0 * i + np.arange(rows) for i in range(count)])[:, None]
    return Episodes.from_arrays(x, np.full_like(x, 0.5), rows * np.arange(1, count + 1) - 1)


class Itself(nn.Module):
    """Places are the observations."""

    def place(self, observations: Tensor) -> Tensor:
        return observations


class Straight(nn.Module):
    """An actor that does what it was told: its mean is the direction (the last `width` of what it sees)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -self.width :]


def on_map(data: Episodes, **options):
    """An agent whose places are the observations and whose actions are directions."""
    width = data.observations.shape[1]
    config = GASConfig(**{"representation": width, "hidden": (8,), "value_hidden": (8,), **options})
    agent = runs.build_agent("gas", config, data.spec(), 0).eval()
    agent.distance, agent.actor = Itself(), Straight(width)
    return agent


def batches(agent, data: Episodes, count: int = 12) -> list[dict[str, Tensor]]:
    """One of each stage."""
    return [s.sampler.build(data, torch.Generator().manual_seed(1)).sample(count) for s in agent.stages()]


def make(tiny_agent, shake, **options):
    agent = tiny_agent("gas", discount=0.9, expectile=0.8, **options)
    shake(agent, 0.3)
    return agent


def at(net, *inputs: Tensor) -> list[float]:
    """Every member at one sample."""
    with torch.no_grad():
        return net(*(x[None] for x in inputs))[:, 0].tolist()


# ------------------------------------------------------------------------------------------------ the representation


def test_the_metric_is_a_distance_of_places():
    torch.manual_seed(0)
    metric = Metric(2, 3, (8,), 5)
    s, g = torch.randn(2, 7, 3)
    v = metric(s, g)
    for j, row in enumerate(v):
        expected = -(metric.net(s)[j] - metric.net(g)[j]).norm(dim=-1)
        torch.testing.assert_close(row, expected)
    torch.testing.assert_close(metric(g, s), v)
    assert torch.equal(metric.place(s), metric.net(s)[0])


def test_no_distance_has_no_gradient():
    """At the goal itself V is -1e-3, and nothing is divided by zero."""
    metric = Metric(2, 3, (8,), 5)
    s = torch.randn(4, 3)
    v = metric(s, s)
    torch.testing.assert_close(v, torch.full((2, 4), -1e-3))
    v.sum().backward()
    assert all((p.grad == 0).all() for p in metric.parameters())


def test_distance_loss_by_hand():
    """As HIQL's test works it: weight 0.7 on (-2 + 1.5)^2 + (-3 + 3)^2, and 0.3 on 1.5^2 + 2^2; reached, nothing."""
    agent = on_map(line(), discount=0.5, distance_expectile=0.7, expectile=0.6)
    agent.distance, agent.target_distance = Distance(0.5, 1.0), Distance(1.0, 2.0)
    batch = {
        "observations": column(0.0, 0.0, 3.0),
        "next_observations": column(1.0, -1.0, 7.0),
        "goals": column(3.0, 3.0, 3.0),
        "rewards": torch.tensor([-1.0, -1.0, 0.0]),
        "masks": torch.tensor([1.0, 1.0, 0.0]),
    }
    loss, metrics = agent.distance_loss(batch)
    assert float(loss) == pytest.approx((0.7 * 0.25 + 0.3 * 6.25) / 3)
    assert float(metrics["distance/mean"]) == pytest.approx(-0.75 * 2)


def test_goals_of_the_representation(tiny_agent, point_world):
    """Three eighths are any row, the rest geometrically ahead, none the state itself on purpose; -1 until there."""
    agent = tiny_agent("gas")
    first, second = agent.stages()
    assert first.sampler.goal == GoalLaw(0.0, 0.625, 0.375, 0.99)
    assert (second.sampler.distance, second.sampler.discount) == (8, 0.99)
    assert (first.name, first.steps, second.name, second.steps) == ("distance", 10, "policy", 10)
    batch = first.sampler.build(point_world, torch.Generator().manual_seed(0)).sample(5000)
    there = batch["rows"] == batch["goal_rows"]
    assert there.any()
    assert torch.equal(batch["rewards"], there.float() - 1) and torch.equal(batch["masks"], 1 - there.float())


def test_places_do_not_depend_on_how_many(tiny_agent, point_world, monkeypatch):
    from qhyer.agents import gas

    agent = tiny_agent("gas")
    whole = agent.places(point_world.observations)
    monkeypatch.setattr(gas, "BLOCK", 7)
    torch.testing.assert_close(agent.places(point_world.observations), whole)
    assert not whole.requires_grad and whole.shape == (360, 4)


# ----------------------------------------------------------------------------------------------------- the low policy


def test_value_and_critic_losses_by_hand(tiny_agent, shake, point_world):
    agent = make(tiny_agent, shake)
    batch = batches(agent, point_world)[1]
    z = direction(torch.zeros(4), torch.randn(12, 4, generator=torch.Generator().manual_seed(2)))
    value = critic = 0.0
    for i in range(12):
        s, s_next, a = (batch[k][i] for k in ("observations", "next_observations", "actions"))
        u = min(at(agent.target_critic, s, z[i], a)) - at(agent.value, s, z[i])[0]
        value += (0.8 if u >= 0 else 0.2) * u**2
        reward = float((batch["next_places"][i] - batch["places"][i]) @ z[i])
        target = reward + 0.9 * at(agent.value, s_next, z[i])[0]
        critic += sum((target - q) ** 2 for q in at(agent.critic, s, z[i], a))
    assert float(agent.value_loss(batch, z)[0].detach()) == pytest.approx(value / 12, rel=1e-4)
    assert float(agent.critic_loss(batch, z)[0].detach()) == pytest.approx(critic / 12, rel=1e-4)


def test_actor_loss_by_hand(tiny_agent, shake, point_world):
    agent = make(tiny_agent, shake, alpha=0.7)
    batch, q, log_p = batches(agent, point_world)[1], [], []
    for i in range(12):
        s, a, way = batch["observations"][i], batch["actions"][i], batch["goal_places"][i] - batch["places"][i]
        z = way / math.sqrt(float(way @ way))
        with torch.no_grad():
            mean = agent.actor(torch.cat([s, z]))
        log_p.append(sum(-0.5 * float(x) ** 2 - 0.5 * math.log(2 * math.pi) for x in a - mean))
        q.append(min(at(agent.critic, s, z, mean.clamp(-1, 1))))
    expected = -sum(q) / (sum(map(abs, q)) + 12e-6) - 0.7 * sum(log_p) / 12
    assert float(agent.actor_loss(batch)[0].detach()) == pytest.approx(expected, rel=1e-4)


def test_directions_of_the_values_are_any(tiny_agent, shake, point_world):
    """Noise scaled to length one, the same for V and Q; the whole loss is the sum of the three."""
    agent = make(tiny_agent, shake)
    batch = batches(agent, point_world)[1]
    torch.manual_seed(4)
    total, metrics = agent.loss(batch)
    torch.manual_seed(4)
    z = torch.randn(12, 4)
    z = z / z.norm(dim=1, keepdim=True)
    torch.testing.assert_close(metrics["value/loss"], agent.value_loss(batch, z)[0].detach())
    torch.testing.assert_close(metrics["critic/loss"], agent.critic_loss(batch, z)[0].detach())
    torch.testing.assert_close(total.detach(), sum(metrics[f"{name}/loss"] for name in ("value", "critic", "actor")))


def test_each_loss_moves_its_own_networks(tiny_agent, shake, point_world):
    agent = make(tiny_agent, shake)
    first, second = batches(agent, point_world)
    z = direction(torch.zeros(4), torch.randn(12, 4))
    losses = {
        "distance": lambda: agent.distance_loss(first),
        "value": lambda: agent.value_loss(second, z),
        "critic": lambda: agent.critic_loss(second, z),
        "actor": lambda: agent.actor_loss(second),
    }
    for name, loss in losses.items():
        agent.zero_grad()
        loss()[0].backward()
        assert {n.split(".")[0] for n, p in agent.named_parameters() if p.grad is not None} == {name}
    mine = [{n.split(".")[0] for n, p in agent.named_parameters() if any(p is q for q in params)} for params in (
        [p for o in s.optimizers for g in o.param_groups for p in g["params"]] for s in agent.stages()
    )]  # fmt: skip
    assert mine == [{"distance"}, {"value", "critic", "actor"}]


def test_targets_take_the_weights_before_the_step(tiny_agent, shake, point_world):
    agent = make(tiny_agent, shake)
    pairs = ((agent.distance, agent.target_distance), (agent.critic, agent.target_critic))
    for (net, target), stage, batch in zip(pairs, agent.stages(), batches(agent, point_world)):
        before = [p.detach().clone() for p in net.parameters()]
        lagging = [p.clone() for p in target.parameters()]
        stage.loss(batch)[0].backward()
        stage.optimizers[0].step()
        for online, lag, now in zip(before, lagging, target.parameters()):
            torch.testing.assert_close(now, 0.005 * online + 0.995 * lag)


# ------------------------------------------------------------------------------------------------------------ the map


def test_the_map_of_a_line():
    """H = 4: seeds at 0, 3, 6, ... (the first farther than 2), each with the two after it. Three walks, one map: the
    overlapping parts of later walks are the nearest seed's."""
    agent = on_map(line(), reach=4)
    agent.build_graph(line())
    nodes = agent.graph.nodes.squeeze(1)
    assert len(nodes) == 14 and torch.equal(nodes, nodes.sort().values)
    steps = nodes.diff()
    assert (steps >= 1.5).all() and (steps <= 4.0).all()
    walk = torch.arange(20.0)[:, None]
    agent = on_map(line(1), reach=4)
    agent.build_graph(line(1))  # 0: 0, 1 (1.5 is half-way); 3: 2, 3, 4; ...
    owner = [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12, 12, 12, 15, 15, 15, 18, 18]
    expected = [float(walk[[i for i, o in enumerate(owner) if o == seed]].mean()) for seed in range(0, 20, 3)]
    assert agent.graph.nodes.squeeze(1).tolist() == expected


def test_states_that_turn_back_make_no_nodes():
    """Up to 10 and back again, H = 4: from 7, 8 and 9 on the way up, four steps later it is on its way down, but at a
    distance of four it is below; only the way down knows of 10 itself."""
    x = np.concatenate([np.arange(11.0), np.arange(9.0, -10.0, -1.0)])[:, None]
    data = Episodes.from_arrays(x, np.zeros_like(x), [len(x) - 1])
    places = data.observations
    kept = efficient(places, data.end_of, first_beyond(data, places, 4.0), 4, 0.99)
    # Four steps after 7 it is at 9: forward. At a distance of four, at 3: backward. After 8 it is back at 8.
    assert places[~kept].squeeze(1).tolist() == [7.0, 8.0]
    whole, some = (on_map(data, reach=4, efficiency=cosine) for cosine in (-1.0, 0.99))
    for agent in (whole, some):
        agent.build_graph(data)
    assert not torch.equal(whole.graph.nodes, some.graph.nodes)


def test_no_map_of_places_that_are_none(tiny_agent, point_world):
    agent = tiny_agent("gas")
    with torch.no_grad():
        agent.distance.net.biases[-1][:] = torch.nan
    with pytest.raises(FloatingPointError, match="diverged"):
        agent.build_graph(point_world)


def test_a_graph_that_fails_loses_nothing(tiny_config, point_world, tmp_path, monkeypatch):
    """Finishing the first stage fails: what was learnt is kept, and goes on to the same bits."""
    config = tiny_config("gas")
    options = TrainConfig(device="cpu", save_every=0)
    whole = train("gas", "x", config, options, run=tmp_path / "whole", episodes=point_world, quiet=True)
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(GAS, "build_graph", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            train("gas", "x", config, options, run=run, episodes=point_world, quiet=True)
    assert checkpoint.steps(run / "checkpoints") == [config.distance_steps - 1]
    train("gas", "x", config, options, run=run, episodes=point_world, quiet=True, resume=True)
    first, second = (checkpoint.load(checkpoint.latest(path / "checkpoints")).agent for path in (whole, run))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_seed_that_diverges_does_not_end_the_others(tiny_config, point_world, tmp_path, monkeypatch):
    build, calls = GAS.build_graph, []

    def first_fails(agent, episodes):
        calls.append(agent)
        if len(calls) == 1:
            raise FloatingPointError("the representation has diverged: lower the learning rate")
        build(agent, episodes)

    monkeypatch.setattr(GAS, "build_graph", first_fails)
    config = tiny_config("gas")
    with pytest.raises(UserError, match=r"after stage distance.*diverged"):
        train_seeds(
            "gas", "x", config, TrainConfig(device="cpu"), (0, 1), out=tmp_path, episodes=point_world, quiet=True
        )
    steps = [checkpoint.steps(tmp_path / seed / "checkpoints")[-1] for seed in ("s0", "s1")]
    assert steps == [config.distance_steps - 1, config.distance_steps + config.steps]


# ------------------------------------------------------------------------------------------------------------- acting


class SlowPlan:
    """The rule in its own words, for one episode: lists and loops, a whole path each time."""

    def __init__(self, agent, goal: Tensor) -> None:
        self.nodes, self.H, self.goal = agent.graph.nodes, agent.config.reach, goal
        count = len(self.nodes)
        far = [float((node - goal).norm()) for node in self.nodes]
        reach = max(self.H, 1.2 * min(far))
        edges = {
            i: [(int(j), float(w)) for j, w in zip(agent.graph.neighbours[i], agent.graph.lengths[i]) if w < math.inf]
            for i in range(count)
        }
        self.length = [d if d < reach else math.inf for d in far]
        self.after: list[int | None] = [None] * count
        for _ in range(count):
            for i in range(count):
                for j, w in edges[i]:
                    if self.length[j] + w < self.length[i]:
                        self.length[i], self.after[i] = self.length[j] + w, j
        self.path: list[Tensor] | None = None
        self.final = False

    def path_from(self, node: int) -> list[Tensor]:
        path, at = [], node
        while at is not None:
            path.append(self.nodes[at])
            at = self.after[at]
        return [*path, self.goal]

    def __call__(self, here: Tensor) -> Tensor:
        if self.final:
            return self.goal
        away = [float((node - here).norm()) for node in self.nodes]
        near = [i for i, d in enumerate(away) if d <= self.H]
        if near:
            self.path = self.path_from(min(near, key=lambda i: away[i] + self.length[i]))
        elif self.path is None:
            self.path = self.path_from(away.index(min(away)))
        if len(self.path) <= 2:
            self.final = True
            return self.goal
        within = [place for place in self.path if float((place - here).norm()) <= self.H]
        return within[-1] if within else self.path[0]


def crosses(seed: int) -> Episodes:
    """Walks in the plane in all directions, from all over; a little shaky, so that no two ways are as long."""
    rng = np.random.default_rng(seed)
    starts, angles = rng.uniform(0, 30, (12, 1, 2)), rng.uniform(0, 2 * np.pi, 12)
    way = np.stack([np.cos(angles), np.sin(angles)], -1)[:, None] * np.arange(25)[None, :, None]
    x = (starts + way + rng.normal(0, 0.2, way.shape)).reshape(-1, 2)
    return Episodes.from_arrays(x, np.zeros((300, 2)), 25 * np.arange(1, 13) - 1)


@pytest.mark.parametrize("seed", range(4))
def test_subgoals_as_the_slow_rule(seed):
    """Episodes that follow their subgoals, with jumps off the map now and then; some reach the end and stay with it."""
    data = crosses(seed)
    agent = on_map(data, reach=4, efficiency=0.9)
    agent.build_graph(data)
    generator = torch.Generator().manual_seed(seed)
    here, goal = (60 * torch.rand(8, 2, generator=generator) - 15 for _ in range(2))
    plans = [SlowPlan(agent, g) for g in goal]
    memory, lost, locked = None, 0, 0
    for step in range(60):
        target, memory = agent.subgoal(here, goal, memory)
        expected = torch.stack([plan(x) for plan, x in zip(plans, here)])
        torch.testing.assert_close(target, expected, rtol=1e-5, atol=1e-5)
        action, _ = agent.act(here, goal, None)
        assert action.abs().max() <= 1
        lost += int((agent.graph.away(here).amin(1) > 4).sum())
        locked = int(memory["final"].sum())
        here = here + direction(here, target)
        if step % 20 == 13:
            here = here + 12 * torch.randn(8, 2, generator=generator)
    assert lost > 0 and locked > 0  # both rules were needed
    assert all(len(value) == 8 for value in memory.values())


def test_the_way_on_a_line_by_hand():
    """Nodes at 0, 3, ..., 30, H = 4, the goal at 31, next to 30 alone (27 is not nearer than 4).

    From 1: 0 and 3 are within reach, the way from 3 is shorter, and 6 is too far. From 12: the ways from 12 and from 15
    are as long, the first begins here, and 15 is its last within reach. From 25.5: by 27, and 30 is still to come.
    From 27.5: by 30, which is a single hop from the goal: from now on the goal, even after a fall back to 3.
    """
    agent = on_map(line(1), reach=4)
    agent.graph.build(3 * torch.arange(11.0)[:, None], 4)
    goal, memory, found = torch.tensor([[31.0]]), None, []
    for x in (1.0, 12.0, 25.5, 27.5, 3.0):
        target, memory = agent.subgoal(torch.tensor([[x]]), goal, memory)
        found.append(float(target))
    assert found == [3.0, 15.0, 27.0, 31.0, 31.0]


def test_beyond_the_map():
    """Nodes at 0, 3, ..., 30. From -30 none is near: the way of the nearest, and its first node. Lost later, the way
    stays the one before, and its first node."""
    agent = on_map(line(1), reach=4)
    agent.graph.build(3 * torch.arange(11.0)[:, None], 4)
    memory, found = None, []
    for x in (-30.0, 4.4, 50.0):
        target, memory = agent.subgoal(torch.tensor([[x]]), torch.tensor([[30.0]]), memory)
        found.append(float(target))
    assert found == [0.0, 6.0, 6.0]


def test_without_a_map_straight_on():
    agent = on_map(line(), reach=4)
    action, memory = agent.act(column(0.0, 5.0), column(3.0, 1.0), None)
    assert memory is None and action.squeeze(1).tolist() == pytest.approx([1.0, -1.0])


def test_at_the_goal_there_is_no_direction():
    """Nothing is divided by zero."""
    agent = on_map(line(), reach=4)
    agent.build_graph(line())
    here = agent.graph.nodes[:1]
    action, _ = agent.act(here, here, None)
    assert action.tolist() == [[0.0]]


def test_acting_reads_places_map_and_actor(tiny_agent, point_world, shake):
    """And no value; a model loaded from what acting reads, whose map was of another size, acts the same."""
    agent, other = tiny_agent("gas", reach=1, efficiency=-1.0), tiny_agent("gas", seed=1)
    for each in (agent, other):
        shake(each, 0.5)
    agent.build_graph(point_world)
    other.graph.build(torch.zeros(1, 4), 1.0)
    assert len(agent.graph) > 3
    state = agent.acting_state()
    assert {name.split(".")[0] for name in state if "." in name} == {"distance", "graph", "actor"}
    other.load_state_dict(state, strict=False)
    other.config = agent.config
    s, g = point_world.observations[:5], point_world.observations[200:205]
    memories = None, None
    for _ in range(3):
        (a, first), (b, second) = agent.act(s, g, memories[0]), other.act(s, g, memories[1])
        assert torch.equal(a, b)
        memories, s = (first, second), point_world.observations[1:6]


def test_alone_as_in_a_batch(tiny_agent, point_world, shake):
    agent = tiny_agent("gas", reach=1, efficiency=-1.0).eval()
    shake(agent, 0.5)
    agent.build_graph(point_world)
    s, g = point_world.observations[::40], point_world.observations[::40].flip(0)
    together, memory = agent.act(s, g, None)
    again, _ = agent.act(s + 0.01, g, memory)
    for i in range(len(s)):
        alone, mine = agent.act(s[i : i + 1], g[i : i + 1], None)
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-4)
        torch.testing.assert_close(
            agent.act(s[i : i + 1] + 0.01, g[i : i + 1], mine)[0][0], again[i], rtol=0, atol=1e-5
        )


@torch.no_grad()
def test_two_graphs_of_an_episode_are_enough(tiny_agent, point_world):
    """The shapes of the memory stay: one capture for the first step, one for all others."""
    agent = tiny_agent("gas").eval()
    agent.build_graph(point_world)
    policy = GraphedPolicy(agent, lambda act: (act(), lambda: None))
    policy.prepare(3)
    assert len(policy.graphs) == 2


# ----------------------------------------------------------------------------------------------------------- settings


def test_presets():
    fields = ("reach", "discount", "distance_expectile", "efficiency", "alpha")
    expected = {
        "scene-play-v0": (48, 0.99, 0.999, 0.99, 1.0),
        "scene-noisy-v0": (48, 0.99, 0.999, 0.99, 0.03),
        "cube-double-play-v0": (48, 0.99, 0.999, 0.99, 1.0),
        "puzzle-4x6-noisy-v0": (48, 0.99, 0.999, 0.99, 0.03),
        "pointmaze-large-navigate-v0": (8, 0.99, 0.999, 0.99, 1.0),
        "pointmaze-giant-stitch-v0": (8, 0.995, 0.999, 0.99, 1.0),
        "antmaze-large-stitch-v0": (8, 0.99, 0.999, 0.99, 1.0),
        "antmaze-giant-stitch-v0": (8, 0.995, 0.999, 0.99, 1.0),
        "antmaze-large-explore-v0": (8, 0.99, 0.999, 0.99, 0.01),
        "humanoidmaze-large-navigate-v0": (32, 0.99, 0.95, 0.99, 0.1),
        "humanoidmaze-giant-stitch-v0": (32, 0.995, 0.95, 0.99, 0.1),
    }
    for dataset, values in expected.items():
        config, rules = presets.resolve("gas", "paper", dataset)
        assert tuple(getattr(config, f) for f in fields) == values, dataset
        assert (config.steps, config.distance_steps, config.batch_size) == (1_000_000, 1_000_000, 1024)
        assert (config.representation, config.expectile, config.p_random) == (32, 0.7, 0.375)
        published = dataset.startswith(("scene-play", "antmaze", "humanoidmaze"))
        assert published != any("inferred" in rule.source for rule in rules)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(expectile=1.0),
        dict(distance_expectile=0.0),
        dict(reach=0),
        dict(p_random=1.5),
        dict(efficiency=2.0),
        dict(target_rate=0.0),
        dict(distance_steps=0),
        dict(alpha=-1.0),
        dict(discount=1.0),
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(UserError):
        GASConfig(**wrong)


# ----------------------------------------------------------------------------------------------------------- learning


def learn(data: Episodes, **options):
    """A small agent after all updates of both stages."""
    agent = runs.build_agent("gas", dataclasses.replace(agents.load("gas").Config(), **options), data.spec(), 0)
    torch.manual_seed(0)
    for stage in agent.stages():
        sampler = stage.sampler.build(data, torch.Generator().manual_seed(0))
        update = Update(agent, stage, sampler, "fp32", torch.device("cpu"))
        for step in range(stage.steps):
            update(step)
        if stage.finish is not None:
            stage.finish(data)
    return agent.eval()


def test_it_finds_the_way_on_the_chain(chain, chain_world):
    """No walk goes from one half to the other: distances count steps, the map has both halves, and steps lead there."""
    sizes = dict(steps=400, distance_steps=400, batch_size=256, learning_rate=5e-3, hidden=(32,), value_hidden=(64,))
    agent = learn(
        chain_world,
        **sizes,
        representation=4,
        reach=2,
        efficiency=-1.0,
        discount=0.9,
        distance_expectile=0.95,
        target_rate=0.05,
        alpha=0.3,
    )
    with torch.no_grad():
        steps = -chain.square(agent.distance(chain.states, chain.goals).mean(0))
    assert (steps - (1 - 0.9**chain.steps) / 0.1)[chain.apart].abs().mean() < 0.3  # also where no walk goes
    assert len(agent.graph) == 7
    assert chain.alignment(agent) > 0.8
