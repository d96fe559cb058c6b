"""Eik-HiQRL: its four losses by hand, slopes against differences, whom each loss moves, and a line of known answers."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from test_hiql import LOG, PLACES, Goal, Nothing, pairs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from qhyer import agents, presets, runs
from qhyer.agents.eik_hiqrl import EikHiQRLConfig, slopes
from qhyer.data import registry
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError
from qhyer.nn.representations import to_sphere
from qhyer.train import Update


class Line(nn.Module):
    """d(x, y) = c |x - y| on a line, the latent the place itself; c learns."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def encode(self, x):
        return x

    def distance(self, x, y):
        return self.factor * (x - y).abs().squeeze(-1)


class Away(nn.Module):
    """V_j(s, g) = -c_j |s - g|; the c learn."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.tensor(factors))

    def forward(self, s, z):
        return -self.factors[:, None] * (s - z).abs().squeeze(-1)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def loss_of(agent, name: str, batch: dict[str, torch.Tensor], seen=None):
    """One of the four; what the others would read may be missing from the batch."""
    states = batch["observations"]
    others = ("next_observations", "value_goals", "low_actor_goals", "high_actor_goals", "high_actor_targets")
    whole = dict.fromkeys(others, states) | batch
    return getattr(agent, name)(whole, *([] if name == "distance_loss" else [seen or agent.look(whole)]))


@pytest.fixture
def by_hand():
    """by_hand(1.5, alpha_low=1.0): an agent on the line whose networks are the ones above."""

    def make(factor: float = 1.0, **options):
        sizes = dict(representation=1, value_hidden=(8,), hidden=(8,), latent_dim=8)
        agent = runs.build_agent("eik_hiqrl", EikHiQRLConfig(**{**sizes, **options}), line().spec(), 0)
        agent.metric, agent.phi = Line(factor), Goal()
        agent.value, agent.target_value = Away(0.5, 1.0), Away(1.0, 2.0)
        agent.low_actor = agent.high_actor = Nothing()
        return agent

    return make


def test_distance_loss(by_hand):
    """c = 1.5: distances 4.5, 1.5 and 0; slopes 1.5, 1.5 and, where the goal is the state, 0."""
    batch = {"observations": column(0.0, 0.0, 3.0), "value_goals": column(3.0, -1.0, 3.0)}
    agent = by_hand(1.5)
    loss, metrics = loss_of(agent, "distance_loss", batch)
    push = sum(100 * math.log1p(math.exp(5 - d / 100)) for d in (4.5, 1.5, 0.0)) / 3
    assert float(metrics["distance/push"]) == pytest.approx(push)
    assert float(metrics["distance/excess"]) == pytest.approx((0.25 + 0.25) / 3)
    assert float(loss.detach()) == pytest.approx(push + 0.5 / 3)
    assert float(metrics["distance/mean"]) == pytest.approx(2.0)
    assert float(metrics["distance/slope"]) == pytest.approx(1.0)
    # By c: the slope's own gradient 2 (c - 1) counts at two of three, against the push, d softplus(x) = sigmoid(x).
    loss.backward()
    pushed = sum(-way / (1 + math.exp(-(5 - 1.5 * way / 100))) for way in (3.0, 1.0, 0.0)) / 3
    assert float(agent.metric.factor.grad) == pytest.approx(2 * 0.5 * 2 / 3 + pushed, rel=1e-4)
    gentle, _ = loss_of(by_hand(0.5), "distance_loss", batch)  # one side only: too flat is no excess
    assert float(gentle.detach()) == pytest.approx(
        sum(100 * math.log1p(math.exp(5 - d / 100)) for d in (1.5, 0.5, 0.0)) / 3
    )


def test_value_loss(by_hand):
    """HIQL's transitions (its test has the sums), and slopes 1/2 and 1 but where the goal is the state: 0 and 0."""
    batch = {
        "observations": column(0.0, 0.0, 3.0),
        "next_observations": column(1.0, -1.0, 7.0),
        "value_goals": column(3.0, 3.0, 3.0),
        "rewards": torch.tensor([-1.0, -1.0, 0.0]),
        "masks": torch.tensor([1.0, 1.0, 0.0]),
    }
    agent = by_hand(discount=0.5)
    loss, metrics = loss_of(agent, "value_loss", batch)
    fit, eikonal = (0.7 * 0.25 + 0.3 * 6.25 + 0.0) / 3, (0.25 + 0.25 + (1.0 + 1.0)) / 3
    assert float(metrics["value/eikonal"]) == pytest.approx(eikonal)
    assert float(loss.detach()) == pytest.approx(fit + eikonal)
    assert float(metrics["value/slope"]) == pytest.approx((0.75 + 0.75 + 0.0) / 3)
    assert float(metrics["value/min"]) == pytest.approx(-3.0) and float(metrics["value/max"]) == 0.0
    # By c_1: 2 (0.5 - 1) twice from the slopes; from the fit 2 w (c d + q) d with q = -2, -3 and w = 0.7, 0.3.
    loss.backward()
    fitted = (0.7 * 2 * (-2 + 1.5) * 3 + 0.3 * 2 * (-3 + 1.5) * 3) / 3
    assert float(agent.value.factors.grad[0]) == pytest.approx(2 * 2 * -0.5 / 3 + fitted, rel=1e-4)


def test_low_actor_loss(by_hand):
    """Each value has its weight, and the weights are averaged: A = 1/2 and 1 towards w = 2, and the opposite away."""
    batch = {
        "observations": column(0.0, 0.0),
        "next_observations": column(1.0, -1.0),
        "low_actor_goals": column(2.0, 2.0),
        "actions": column(0.4, 1.0),
    }
    nll = (0.08 + LOG, 0.5 + LOG)
    weights = ((math.exp(1) + math.exp(2)) / 2, (math.exp(-1) + math.exp(-2)) / 2)
    loss, metrics = loss_of(by_hand(alpha_low=2.0), "low_actor_loss", batch)
    assert float(loss) == pytest.approx((weights[0] * nll[0] + weights[1] * nll[1]) / 2, rel=1e-5)
    assert float(metrics["low_actor/advantage"]) == pytest.approx(0.0)
    assert float(metrics["low_actor/weight"]) == pytest.approx(sum(weights) / 2)
    assert float(metrics["low_actor/mse"]) == pytest.approx((0.16 + 1.0) / 2)
    loss, _ = loss_of(by_hand(alpha_low=6.0), "low_actor_loss", batch)  # the cap is each weight's own: e^3 and 100
    assert float(loss) == pytest.approx(
        ((math.exp(3) + 100) / 2 * nll[0] + (math.exp(-3) + math.exp(-6)) / 2 * nll[1]) / 2, rel=1e-5
    )


def test_high_actor_loss(by_hand):
    """From 0 to w = 2 on the way to g = 4 with d = 0.75 |s - g|: A = 1.5; the target is phi([s; w]) = 2, the mean 0."""
    batch = {"observations": column(0.0), "high_actor_targets": column(2.0), "high_actor_goals": column(4.0)}
    loss, metrics = loss_of(by_hand(0.75, alpha_high=0.5), "high_actor_loss", batch)
    assert float(loss) == pytest.approx(math.exp(0.75) * (2.0 + LOG), rel=1e-5)
    assert float(metrics["high_actor/advantage"]) == pytest.approx(1.5)
    assert float(metrics["high_actor/mse"]) == pytest.approx(4.0)


# -------------------------------------------------------------------------------------------------------- slopes


def test_slopes_of_known_functions():
    """Of |A s|^2 / 2 and b s: |A'A s| and |b|; and their squares' gradients, by A and b."""
    torch.manual_seed(0)
    a, b, s = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 3), (3,), (5, 3)))
    a.requires_grad_(), b.requires_grad_()
    values, slope = slopes(lambda x: torch.stack([(x @ a.T).square().sum(-1) / 2, x @ b]), s)
    torch.testing.assert_close(values, torch.stack([(s @ a.T).square().sum(-1) / 2, s @ b]))
    torch.testing.assert_close(slope, torch.stack([(s @ a.T @ a).norm(dim=-1), b.norm().expand(5)]))
    found = torch.autograd.grad(slope.square().sum(), (a, b))
    expected = torch.autograd.grad((s @ a.T @ a).square().sum() + 5 * b.square().sum(), (a, b))
    torch.testing.assert_close(found, expected)


class Sphere(nn.Module):
    """A goal representation that stays in float64."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, s, g):
        return to_sphere(self.net(torch.cat([s, g], dim=-1)))


@pytest.fixture
def exact(tiny_agent, batch_of, shake):
    """An agent with a small nu and a batch, all in float64."""
    agent = tiny_agent("eik_hiqrl", coordinates=3, encoding=2)
    shake(agent, 0.3)
    agent.phi = Sphere(agent.phi.net)
    agent.double()
    batch = batch_of(agent)
    return agent, {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def numeric(function, s: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    """|grad_s f_j| (m, B) by differences, one coordinate after the other."""
    sides = [(function(s + step * e) - function(s - step * e)) / (2 * step) for e in torch.eye(s.shape[1]).double()]
    return torch.stack(sides).norm(dim=0)


def test_slopes_are_the_networks(exact):
    """Through nu for the distance, by what the high level sees; and through phi for the value, by all of s."""
    agent, batch = exact
    s, g = batch["observations"], batch["value_goals"]
    apart = (s != g).any(-1)
    assert 0 < int(apart.sum()) < len(s)
    with torch.no_grad():
        d = numeric(lambda x: agent.metric(agent.nu(x), agent.nu(g[:, :3]))[None], s[:, :3])
        v = numeric(lambda x: agent.value(x, agent.phi(x, g)), s)
    d = d * apart  # where the goal is the state there is an edge, and its slope counts as none
    found = [loss_of(agent, name, batch)[1] for name in ("distance_loss", "value_loss")]
    assert float(found[0]["distance/slope"]) == pytest.approx(float(d.mean()), rel=1e-5)
    assert float(found[0]["distance/excess"]) == pytest.approx(float((d - 1).relu().square().mean()), rel=1e-5)
    assert float(found[1]["value/slope"]) == pytest.approx(float(v.mean()), rel=1e-5)
    assert float(found[1]["value/eikonal"]) == pytest.approx(float((v - 1).square().sum(0).mean()), rel=1e-5)
    assert float(found[0]["distance/excess"]) > 0.0


@pytest.mark.parametrize("name", ["distance_loss", "value_loss"])
def test_gradients_are_those_of_the_whole_loss(name, exact):
    """Along random directions of all parameters, against differences: the slopes' own gradient reaches the networks."""
    agent, batch = exact
    batch["value_goals"] = batch["value_goals"].roll(1, 0)  # no state is its own goal: there d has an edge
    moved = [p for n, p in agent.named_parameters() if n.startswith(("metric.", "nu.", "value.", "phi."))]
    seen = agent.look(batch)  # it has no gradient, and so it stays
    grads = torch.autograd.grad(loss_of(agent, name, batch, seen)[0], moved, allow_unused=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        way = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in moved]
        sides = []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                torch._foreach_add_(moved, way, alpha=step)
            sides.append(float(loss_of(agent, name, batch, seen)[0].detach()))
        with torch.no_grad():
            torch._foreach_add_(moved, way, alpha=1e-6)
        along = sum(float((g * w).sum()) for g, w in zip(grads, way) if g is not None)
        assert along == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("kernels", ["0", "kernels"])
def test_a_state_is_no_way_from_itself(kernels, tiny_agent, batch_of, shake, monkeypatch):
    """Though the distance has an edge there, and rounding a side of it; with kernels at hand losses are the same."""
    if kernels != "0":
        pytest.importorskip("triton")
    agent = tiny_agent("eik_hiqrl", encoding=2)
    shake(agent, 0.3)
    batch = batch_of(agent)
    monkeypatch.setenv("QHYER_TRITON", "0")
    plain, _ = agent.loss(batch)
    monkeypatch.setenv("QHYER_TRITON", kernels if kernels == "0" else "interpret")
    loss, _ = agent.loss(batch)
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    loss.backward()
    agent.zero_grad()
    same, metrics = agent.distance_loss(batch | {"value_goals": batch["observations"]})
    assert not metrics["distance/slope"].any() and not metrics["distance/mean"].any()
    same.backward()
    assert not any(p.grad.any() for p in agent.parameters() if p.grad is not None)


def test_values_stay_in_full_precision(tiny_agent, batch_of, shake):
    """Slopes, too, whose way back is part of the loss."""
    agent = tiny_agent("eik_hiqrl", encoding=2)
    shake(agent, 0.3)
    batch = batch_of(agent)
    full = agent.loss(batch)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = agent.loss(batch)[1]
    assert all(torch.equal(half[name], full[name]) for name in full if name.startswith(("distance/", "value/")))
    assert not torch.equal(half["low_actor/loss"], full["low_actor/loss"])


def test_zeros_leave_numbers(tiny_agent, batch_of):
    """A state of zeros that is its own goal, before any bias has moved: phi has no direction, and no nan follows."""
    agent = tiny_agent("eik_hiqrl")
    batch = batch_of(agent)
    for name in ("observations", "value_goals"):
        batch[name][0] = 0.0
    agent.loss(batch)[0].backward()
    assert all(p.grad.isfinite().all() for p in agent.parameters() if p.grad is not None)
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    (once,) = torch.autograd.grad(to_sphere(x)[:, 0].sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), x)
    assert twice.isfinite().all() and not once[0].any() and not twice[0].any() and twice[1].all()


def test_nothing_is_read_back(tiny_agent, batch_of):
    """No number of the batch decides in Python, and no shape depends on one: a CUDA graph can hold the update."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked.add(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    agent, asked = tiny_agent("eik_hiqrl", coordinates=2, encoding=2), set()
    batch = batch_of(agent)
    with Watch():
        agent.loss(batch)[0].backward()
    assert "aten.native_layer_norm_backward" in asked  # of the slopes: they are differentiated by what it is made of
    readers = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "index", "is_nonzero", "equal"}
    assert not asked & {f"aten.{name}" for name in readers}


# ------------------------------------------------------------------------------------------- who is moved by what


@pytest.mark.parametrize(
    "options", [{}, dict(coordinates=2, encoding=2, low_actor_rep_grad=True)], ids=["plain", "all"]
)
def test_each_loss_moves_its_own_networks(options, tiny_agent, batch_of, shake):
    agent = tiny_agent("eik_hiqrl", **options)
    shake(agent)
    batch = batch_of(agent, 32)
    moved = {}
    for name in ("distance_loss", "value_loss", "low_actor_loss", "high_actor_loss"):
        agent.zero_grad()
        loss_of(agent, name, batch)[0].backward()
        moved[name] = {n.split(".")[0] for n, p in agent.named_parameters() if p.grad is not None}
    assert moved["distance_loss"] == ({"metric", "nu"} if options else {"metric"})
    assert moved["value_loss"] == {"phi", "value"}
    assert moved["low_actor_loss"] == ({"low_actor", "phi"} if options else {"low_actor"})
    assert moved["high_actor_loss"] == {"high_actor"}
    total, metrics = agent.loss(batch)
    torch.testing.assert_close(total.detach(), sum(metrics[k] for k in metrics if k.endswith("/loss")))


def test_the_high_level_sees_the_first_coordinates(tiny_agent, batch_of, shake):
    """The distance and the high actor; phi, which makes the high actor's target, sees all, as the low level does."""
    agent = tiny_agent("eik_hiqrl", coordinates=2)
    shake(agent)
    batch = batch_of(agent)
    assert agent.metric.phi.layers[0].in_features == 2 and agent.high_actor.layers[0].in_features == 4
    hidden = {name: x.clone() for name, x in batch.items()}
    for name in ("observations", "value_goals", "high_actor_goals"):
        hidden[name][:, 2:] += 1.0
    seen, other = agent.look(batch), agent.look(hidden)
    assert torch.equal(agent.distance_loss(batch)[0], agent.distance_loss(hidden)[0])
    assert torch.equal(seen.high_advantage, other.high_advantage)
    assert not torch.equal(seen.z_high, other.z_high) and not torch.equal(seen.low_advantage, other.low_advantage)
    goals = batch["high_actor_goals"]
    action, _ = agent.act(batch["observations"], goals, None)
    assert torch.equal(action, agent.act(batch["observations"], hidden["high_actor_goals"], None)[0])
    assert not torch.equal(action, agent.act(hidden["observations"], goals, None)[0])  # the low actor sees it


def test_the_target_shares_phi_and_lags_by_a_step(tiny_agent, point_world):
    """V's head alone has a target; it moves towards the weights before the step, at target_rate."""
    agent = tiny_agent("eik_hiqrl", target_rate=0.25)
    (stage,) = agent.stages()
    sampler = stage.sampler.build(point_world, torch.Generator().manual_seed(0))
    update = Update(agent, stage, sampler, "fp32", torch.device("cpu"))
    assert not any(p.requires_grad for p in agent.target_value.parameters())
    update(0)  # target and value were equal: the target stays
    first = [p.detach().clone() for p in agent.value.parameters()]
    target = [p.clone() for p in agent.target_value.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(first, target))
    update(1)
    for new, old, leading in zip(agent.target_value.parameters(), target, first):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * leading)


def test_acting_puts_the_subgoal_back_on_the_sphere(tiny_agent, point_world, shake):
    agent = tiny_agent("eik_hiqrl", coordinates=2)
    shake(agent)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    with torch.no_grad():
        raw = agent.high_actor(torch.cat([s[:, :2], g[:, :2]], -1))
        z = raw / raw.norm(dim=-1, keepdim=True) * math.sqrt(agent.config.representation)
        expected = agent.low_actor(torch.cat([s, z], -1)).clamp(-1, 1)
    torch.testing.assert_close(agent.act(s, g, None)[0], expected)


def test_the_actors_are_all_that_acting_reads(tiny_agent, point_world, shake):
    agent, other = (tiny_agent("eik_hiqrl", seed=seed, encoding=2) for seed in (0, 1))
    shake(agent)
    state = agent.acting_state()
    assert {name.split(".")[0] for name in state if "." in name} == {"low_actor", "high_actor"}
    other.load_state_dict(state, strict=False)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    assert torch.equal(agent.act(s, g, None)[0], other.act(s, g, None)[0])


@pytest.mark.parametrize("wrong", [dict(latent_dim=12), dict(coordinates=-1), dict(coordinates=9), dict(expectile=1.0)])
def test_nonsense_is_refused(wrong, tiny_agent):
    with pytest.raises(UserError):
        tiny_agent("eik_hiqrl", **wrong)


def test_presets():
    fields = ("coordinates", "encoding", "subgoal_steps", "discount", "actor_p_random")
    expected = {
        "cube-quadruple-noisy-v0": (0, 2, 10, 0.99, 0.0),
        "scene-play-v0": (0, 2, 10, 0.99, 0.0),
        "puzzle-4x6-play-v0": (0, 2, 10, 0.99, 0.0),
        "pointmaze-large-navigate-v0": (2, 0, 25, 0.99, 0.0),
        "pointmaze-giant-stitch-v0": (2, 0, 25, 0.995, 0.5),
        "antmaze-medium-stitch-v0": (2, 0, 25, 0.99, 0.5),
        "antmaze-giant-navigate-v0": (2, 0, 25, 0.995, 0.0),
        "antmaze-umaze-v2": (2, 0, 25, 0.99, 0.0),
        "maze2d-umaze-v1": (2, 0, 25, 0.99, 0.0),
    }
    for dataset, values in expected.items():
        config, rules = presets.resolve("eik_hiqrl", "paper", dataset)
        assert tuple(getattr(config, f) for f in fields) == values, dataset
        assert (config.alpha_low, config.alpha_high, config.expectile, config.representation) == (3.0, 3.0, 0.7, 10)
        assert (config.latent_dim, config.steps, config.batch_size) == (512, 1_000_000, 1024)
        guessed = any("inferred" in rule.source for rule in rules)
        assert guessed == (config.encoding > 0 or dataset.endswith(("-v1", "-v2")))
    for name, dataset in registry.DATASETS.items():  # the place comes first in every maze
        if dataset.is_maze:
            config = presets.resolve("eik_hiqrl", "paper", name)[0]
            assert dataset.goal_indices == tuple(range(config.coordinates))


def test_defaults_are_those_of_the_code():
    config = agents.load("eik_hiqrl").Config()
    hiql = dataclasses.asdict(agents.load("hiql").Config())
    assert {name: getattr(config, name) for name in hiql} == hiql
    assert (config.latent_dim, config.coordinates, config.encoding) == (512, 0, 0)


# ------------------------------------------------------------------------------------------------------ learning


def line(count: int = 60, rows: int = 25) -> Episodes:
    """Drunkards on a line eleven steps long: left or right as a coin says, each from a place of its own between two
    numbers, since slopes are asked for where there are data; who would pass the end stays."""
    rng = np.random.default_rng(0)
    observations, actions = [], []
    for _ in range(count):
        x = rng.uniform(-0.5, PLACES - 0.5)
        for _ in range(rows):
            a = rng.choice([-1, 1])
            observations.append([x - 5.0])
            actions.append([a])
            x = x + a if -0.5 <= x + a <= PLACES - 0.5 else x
    return Episodes.from_arrays(np.array(observations), np.array(actions), rows * np.arange(1, count + 1) - 1)


@pytest.fixture(scope="module")
def walker(train_all):
    """Eik-HiQRL on the line after 300 updates. A step's length is one, and so is the slope of d and, nearly, of V."""
    config = EikHiQRLConfig(
        steps=300,
        batch_size=192,
        learning_rate=3e-3,
        hidden=(32, 32),
        value_hidden=(32, 32),
        latent_dim=32,
        representation=4,
        subgoal_steps=4,
        expectile=0.9,
        target_rate=0.05,
        alpha_high=1.0,
    )
    return train_all("eik_hiqrl", config, line())


def place(x: torch.Tensor) -> torch.Tensor:
    return (x - 5.0)[:, None]


def test_distances_grow_with_the_way(walker):
    """Though no transition was asked. With d = c |s - g|, -E[d] + E[(c - 1)^2; s not g] is least at
    c = 1 + E|s - g| / 2 P(s not g): a weight of one leaves slopes above one, more so where the world is wide."""
    (stage,) = walker.stages()
    batch = stage.sampler.build(line(), torch.Generator().manual_seed(1)).sample(10_000)
    way = (batch["observations"] - batch["value_goals"]).abs()
    best = float(1 + way.mean() / 2 / (way > 0).float().mean())
    s, g = pairs()
    with torch.no_grad():
        d = walker.metric(place(s), place(g))
        v = walker.value(place(s), walker.phi(place(s), place(g))).mean(0)
    steps = (s - g).abs().float()
    assert (d / steps)[s != g].mean() == pytest.approx(best, rel=0.2)
    assert torch.stack([steps, d]).corrcoef()[0, 1] > 0.9 and torch.stack([steps, v]).corrcoef()[0, 1] < -0.75


def test_subgoals_and_actions_lead_to_the_goal(walker):
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
    action, _ = walker.act(place(s), place(g), None)
    assert nearer.float().mean() > 0.9
    assert (action.squeeze(-1) * side > 0.0).float().mean() > 0.95 and (action.squeeze(-1) * side).mean() > 0.7
