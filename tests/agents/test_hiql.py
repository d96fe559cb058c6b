"""HIQL: its three losses by hand, whom each of them moves, and a line of states where the answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from qhyer import presets, runs
from qhyer.agents.hiql import HIQLConfig
from qhyer.data.episodes import Episodes
from qhyer.nn.representations import GoalRepresentation, to_sphere
from qhyer.train import Update

LOG = 0.5 * math.log(2 * math.pi)


class Distance(nn.Module):
    """V_j(s, g) = -c_j |s - g| on a line: a value simple enough for sums in the head."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.factors = torch.tensor(factors)

    def forward(self, s, z):
        return -self.factors[:, None] * (s - z).abs().squeeze(-1)


class Goal(nn.Module):
    """phi([s; g]) = g."""

    def forward(self, s, g):
        return g


class Nothing(nn.Module):
    """An actor whose mean is zero."""

    def forward(self, x):
        return torch.zeros(len(x), 1)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def loss_of(agent, name: str, batch: dict[str, torch.Tensor]):
    """One of the three; what the other two would read may be missing from the batch."""
    states = batch["observations"]
    others = ("next_observations", "value_goals", "low_actor_goals", "high_actor_goals", "high_actor_targets")
    whole = dict.fromkeys(others, states) | batch
    return getattr(agent, name)(whole, agent.look(whole))


@pytest.fixture
def by_hand():
    """by_hand(alpha_low=1.0): an agent on the line whose networks are the ones above."""

    def make(**options):
        config = HIQLConfig(**{"representation": 1, "value_hidden": (8,), "hidden": (8,), **options})
        agent = runs.build_agent("hiql", config, line().spec(), 0)
        agent.phi, agent.value, agent.target_value = Goal(), Distance(0.5, 1.0), Distance(1.0, 2.0)
        agent.low_actor = agent.high_actor = Nothing()
        return agent

    return make


def test_value_loss(by_hand):
    """Three transitions with discount 1/2, tau 0.7; targets -d and -2d, values -d/2 and -d, d the distance to g = 3.

    0 -> 1: q = (-1 - 1, -1 - 2) = (-2, -3); A = -3 - (-3 - 6)/2 = 1.5, so weight 0.7 on (-2 + 1.5)^2 + (-3 + 3)^2.
    0 -> -1: q = (-1 - 2, -1 - 4) = (-3, -5); A = -5 + 4.5 = -0.5, so weight 0.3 on 1.5^2 + 2^2.
    3, reached: q = 0 whatever comes next; A = 0, and both values are 0: nothing.
    """
    batch = {
        "observations": column(0.0, 0.0, 3.0),
        "next_observations": column(1.0, -1.0, 7.0),
        "value_goals": column(3.0, 3.0, 3.0),
        "rewards": torch.tensor([-1.0, -1.0, 0.0]),
        "masks": torch.tensor([1.0, 1.0, 0.0]),
    }
    loss, metrics = loss_of(by_hand(discount=0.5), "value_loss", batch)
    assert float(loss) == pytest.approx((0.7 * 0.25 + 0.3 * 6.25 + 0.0) / 3)
    assert float(metrics["value/mean"]) == pytest.approx(-0.75 * (3 + 3 + 0) / 3)
    assert float(metrics["value/min"]) == pytest.approx(-3.0) and float(metrics["value/max"]) == 0.0


def test_low_actor_loss(by_hand):
    """Values' mean is -0.75 d. Towards w = 2: A = 0.75; away from it: -0.75. Actions 0.4 and 1, means 0."""
    batch = {
        "observations": column(0.0, 0.0),
        "next_observations": column(1.0, -1.0),
        "low_actor_goals": column(2.0, 2.0),
        "actions": column(0.4, 1.0),
    }
    nll = (0.08 + LOG, 0.5 + LOG)
    loss, metrics = loss_of(by_hand(alpha_low=2.0), "low_actor_loss", batch)
    assert float(loss) == pytest.approx((math.exp(1.5) * nll[0] + math.exp(-1.5) * nll[1]) / 2, rel=1e-5)
    assert float(metrics["low_actor/advantage"]) == pytest.approx(0.0)
    assert float(metrics["low_actor/weight"]) == pytest.approx(math.cosh(1.5))
    assert float(metrics["low_actor/mse"]) == pytest.approx((0.16 + 1.0) / 2)
    loss, _ = loss_of(by_hand(alpha_low=0.0), "low_actor_loss", batch)  # imitation
    assert float(loss) == pytest.approx(sum(nll) / 2, rel=1e-5)
    loss, _ = loss_of(by_hand(alpha_low=100.0), "low_actor_loss", batch)  # no sample counts more than a hundred times
    assert float(loss) == pytest.approx(100 * nll[0] / 2, rel=1e-5)


def test_high_actor_loss(by_hand):
    """From 0 to w = 2 on the way to g = 4: A = 0.75 * 2; the target is phi([s; w]) = 2, the mean 0."""
    batch = {
        "observations": column(0.0),
        "high_actor_targets": column(2.0),
        "high_actor_goals": column(4.0),
    }
    loss, metrics = loss_of(by_hand(alpha_high=0.5), "high_actor_loss", batch)
    assert float(loss) == pytest.approx(math.exp(0.75) * (2.0 + LOG), rel=1e-5)
    assert float(metrics["high_actor/advantage"]) == pytest.approx(1.5)
    assert float(metrics["high_actor/mse"]) == pytest.approx(4.0)


def test_acting_puts_the_subgoal_back_on_the_sphere(tiny_agent, point_world, shake):
    agent = tiny_agent("hiql")
    shake(agent)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    with torch.no_grad():
        raw = agent.high_actor(torch.cat([s, g], -1))
        z = raw / raw.norm(dim=-1, keepdim=True) * math.sqrt(agent.config.representation)
        expected = agent.low_actor(torch.cat([s, z], -1)).clamp(-1, 1)
    torch.testing.assert_close(agent.act(s, g, None)[0], expected)


def test_the_actors_are_all_that_acting_reads(tiny_agent, point_world, shake):
    agent, other = tiny_agent("hiql"), tiny_agent("hiql", seed=1)
    shake(agent)
    state = agent.acting_state()
    assert {name.split(".")[0] for name in state if "." in name} == {"low_actor", "high_actor"}
    other.load_state_dict(state, strict=False)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    assert torch.equal(agent.act(s, g, None)[0], other.act(s, g, None)[0])


def test_representation_is_normalised_and_a_function_of_both():
    torch.manual_seed(0)
    phi = GoalRepresentation(6, (16,), 10)
    s, g = torch.randn(7, 3), torch.randn(7, 3)
    z = phi(s, g)
    torch.testing.assert_close(z.square().mean(-1), torch.ones(7))
    assert (z - phi(s.roll(1, 0), g)).abs().max() > 0.01 and (z - phi(s, g.roll(1, 0))).abs().max() > 0.01
    torch.testing.assert_close(to_sphere(torch.tensor([[3.0, 4.0]])), math.sqrt(2) * torch.tensor([[0.6, 0.8]]))
    nothing = torch.zeros(2, 3, requires_grad=True)
    out = phi(nothing, nothing.detach())  # biases are zero at first, so this is a vector without direction
    out.sum().backward()
    assert not out.any() and not nothing.grad.any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert phi(s, g).dtype == torch.float32


# ------------------------------------------------------------------------------------------- who is moved by what


def draw(agent, episodes, count: int = 32):
    (stage,) = agent.stages()
    return stage.sampler.build(episodes, torch.Generator().manual_seed(0)).sample(count)


@pytest.mark.parametrize("rep_grad", [False, True])
def test_each_loss_moves_its_own_networks(rep_grad, tiny_agent, point_world, shake):
    """The value moves phi and V; the actors move themselves, and with low_actor_rep_grad the low one phi, too."""
    agent = tiny_agent("hiql", low_actor_rep_grad=rep_grad)
    shake(agent)
    batch = draw(agent, point_world)
    moved = {}
    for name in ("value_loss", "low_actor_loss", "high_actor_loss"):
        agent.zero_grad()
        loss_of(agent, name, batch)[0].backward()
        moved[name] = {n.split(".")[0] for n, p in agent.named_parameters() if p.grad is not None}
    assert moved["value_loss"] == {"phi", "value"}
    assert moved["low_actor_loss"] == ({"low_actor", "phi"} if rep_grad else {"low_actor"})
    assert moved["high_actor_loss"] == {"high_actor"}
    total, metrics = agent.loss(batch)
    torch.testing.assert_close(total.detach(), sum(metrics[k] for k in metrics if k.endswith("/loss")))


def test_the_target_shares_phi_and_lags_by_a_step(tiny_agent, point_world):
    """V's head alone has a target; it moves towards the weights before the step, at target_rate."""
    agent = tiny_agent("hiql", target_rate=0.25)
    (stage,) = agent.stages()
    update = Update(
        agent, stage, stage.sampler.build(point_world, torch.Generator().manual_seed(0)), "fp32", torch.device("cpu")
    )
    assert not any(p.requires_grad for p in agent.target_value.parameters())
    update(0)  # target and value were equal: the target stays
    first = [p.detach().clone() for p in agent.value.parameters()]
    target = [p.clone() for p in agent.target_value.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(first, target))
    update(1)
    for new, old, leading in zip(agent.target_value.parameters(), target, first):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * leading)


def test_presets():
    of = lambda dataset: presets.resolve("hiql", "paper", dataset)[0]
    fields = ("subgoal_steps", "discount", "actor_p_random")
    expected = {
        "cube-quadruple-noisy-v0": (10, 0.99, 0.0),
        "scene-play-v0": (10, 0.99, 0.0),
        "puzzle-4x6-play-v0": (10, 0.99, 0.0),
        "pointmaze-large-navigate-v0": (25, 0.99, 0.0),
        "pointmaze-giant-navigate-v0": (25, 0.995, 0.0),
        "pointmaze-medium-stitch-v0": (25, 0.99, 0.5),
        "pointmaze-giant-stitch-v0": (25, 0.995, 0.5),
    }
    for dataset, values in expected.items():
        config = of(dataset)
        assert tuple(getattr(config, f) for f in fields) == values, dataset
        assert (config.alpha_low, config.alpha_high, config.expectile, config.representation) == (3.0, 3.0, 0.7, 10)
        assert not config.low_actor_rep_grad


def test_goal_laws_reach_the_sampler(tiny_agent, point_world):
    agent = tiny_agent("hiql", value_p_current=0.0, value_p_random=0.0, subgoal_steps=5, actor_p_random=1.0)
    batch = draw(agent, point_world, 512)
    rows, ends = batch["rows"], point_world.end_of[batch["rows"]]
    assert ((batch["value_goal_rows"] > rows) & (batch["value_goal_rows"] <= ends)).all()
    assert torch.equal(batch["low_actor_goal_rows"], torch.minimum(rows + 5, ends))
    assert (batch["high_actor_goal_rows"] < rows).any()  # any row
    assert torch.equal(batch["high_actor_target_rows"], torch.minimum(rows + 5, ends))


# ------------------------------------------------------------------------------------------------------ learning

PLACES = 11


def line(count: int = 60, rows: int = 25) -> Episodes:
    """Drunkards on a line of eleven places: a step left or right as a coin says, staying at the walls."""
    rng = np.random.default_rng(0)
    observations, actions = [], []
    for _ in range(count):
        x = rng.integers(PLACES)
        for _ in range(rows):
            a = rng.choice([-1, 1])
            observations.append([x / 5 - 0.9])
            actions.append([a])
            x = np.clip(x + a, 0, PLACES - 1)
    return Episodes.from_arrays(np.array(observations), np.array(actions), rows * np.arange(1, count + 1) - 1)


@pytest.fixture(scope="module")
def walker(train_all):
    """HIQL on the line after 300 updates."""
    config = HIQLConfig(
        steps=300,
        batch_size=192,
        learning_rate=3e-3,
        hidden=(32, 32),
        value_hidden=(32, 32),
        representation=4,
        subgoal_steps=4,
        discount=0.9,
        expectile=0.9,
        target_rate=0.05,
    )
    return train_all("hiql", config, line())


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(PLACES)
    s, g = torch.cartesian_prod(places, places).unbind(-1)
    return s, g


def place(x: torch.Tensor) -> torch.Tensor:
    return (x / 5 - 0.9)[:, None]


def test_values_are_the_discounted_distance(walker):
    """The best there is: V = -(1 - 0.9^d) / (1 - 0.9), zero at the goal and less at every step away from it."""
    s, g = pairs()
    with torch.no_grad():
        v = walker.value(place(s), walker.phi(place(s), place(g))).mean(0)
    best = -10 * (1 - 0.9 ** (s - g).abs().float())
    assert (v - best).abs().mean() < 0.4 and (v - best).abs().max() < 1.0
    table = v.view(PLACES, PLACES)
    steps = table.diff(dim=1)  # from one goal to the next
    assert (steps.triu(0)[torch.ones_like(steps).triu(0) > 0] < 0).all()  # farther, beyond the state
    assert (steps.tril(-1)[torch.ones_like(steps).tril(-1) > 0] > 0).all()  # nearer, before it


def test_subgoals_and_actions_lead_to_the_goal(walker):
    """The high actor's vector is that of the place four steps towards the goal, not of the one four steps away from
    it; and the low actor goes there outright, though the data go either way alike."""
    s, g = pairs()
    s, g = s[s != g], g[s != g]
    side = (g - s).sign()
    with torch.no_grad():
        z = to_sphere(walker.high_actor(torch.cat([place(s), place(g)], dim=-1)))
        ahead, behind = (
            walker.phi(place(s), place((s + way * walker.config.subgoal_steps * side).clamp(0, PLACES - 1)))
            for way in (1, -1)
        )
    nearer = (z - ahead).norm(dim=-1) < (z - behind).norm(dim=-1)
    assert nearer.float().mean() > 0.9
    action, _ = walker.act(place(s), place(g), None)
    assert (action.squeeze(-1) * side > 0.0).all() and (action.squeeze(-1) * side).mean() > 0.7
