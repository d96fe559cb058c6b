"""TRL: its losses by hand, whom each of them moves, acting sample by sample, and ways whose lengths are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from qhyer import presets, runs
from qhyer.agents.trl import TABLE, TRLConfig
from qhyer.data.episodes import Episodes
from qhyer.data.samplers import GoalLaw
from qhyer.errors import UserError
from qhyer.nn.chance import first_row
from qhyer.nn.values import follow, target_of

LOG = 0.5 * math.log(2 * math.pi)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def bce(q: float, y: float) -> float:
    return -y * math.log(q) - (1 - y) * math.log(1 - q)


class Powers(nn.Module):
    """Logits of Q_h(s, g, a) = c_h^|s - g|, and those raised by a: ways on a line, simple enough for the head."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.factors = torch.tensor(factors)

    def forward(self, s, g, a):
        return torch.logit(self.factors[:, None] ** (s - g).abs().squeeze(-1)) + a.squeeze(-1)


class Constant(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x):
        return torch.full((len(x), 1), self.value)


class Hopeless(nn.Module):
    """A critic that thinks little of every way."""

    def forward(self, *inputs):
        return torch.full((2, len(inputs[0])), -90.0)


def line() -> Episodes:
    """One walk to the right: observations (s,), actions (a,)."""
    return Episodes.from_arrays(np.arange(10.0)[:, None], np.full((10, 1), 0.5), [9], goal=[0])


@pytest.fixture
def by_hand():
    """An agent on the line: Q = 0.6^d and 0.2^d, targets 0.5^d and 0.25^d, Q_o = 0.3^d and 0.4^d, mu = 0.25."""

    def make(**options):
        config = TRLConfig(**{"value_hidden": (8,), "hidden": (8,), "discount": 0.5, **options})
        agent = runs.build_agent("trl", config, line().spec(), 0)
        agent.critic, agent.target_critic, agent.oracle_critic = Powers(0.6, 0.2), Powers(0.5, 0.25), Powers(0.3, 0.4)
        agent.actor = Constant(0.25)
        return agent

    return make


# 0 to 5 through 2; 0 to 5 from where one is; a known step to 1 and on to 4; one step, all of it known; two such steps.
BATCH = {
    "observations": column(0.0, 0.0, 0.0, 0.0, 0.0),
    "midpoints": column(2.0, 0.0, 1.0, 0.0, 1.0),
    "value_goals": column(5.0, 5.0, 4.0, 1.0, 2.0),
    "actor_goals": column(5.0, 5.0, 4.0, 1.0, 2.0),
    "first_steps": torch.tensor([2.0, 0.0, 1.0, 0.0, 1.0]),
    "second_steps": torch.tensor([3.0, 5.0, 3.0, 1.0, 1.0]),
    "actions": torch.zeros(5, 1),
    "midpoint_actions": torch.zeros(5, 1),
}
DISTANCES = (5, 5, 4, 1, 2)
# Of both target heads. 0.5^2 0.5^3; 1 0.5^5; 0.5 0.5^3; 0.5; 0.5^2. And 0.25^2 0.25^3; 1 0.25^5; 0.5 0.25^3; ...
PRODUCTS = ((2**-5, 2**-5, 2**-4, 0.5, 0.25), (4**-5, 4**-5, 0.5 * 4**-3, 0.5, 0.25))


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_critic_loss(by_hand, power):
    """gamma = 1/2, so that log_gamma of a product is minus its binary logarithm: 5, 5, 4, 1, 2 and 10, 10, 7, 1, 2."""
    agent = by_hand(distance_power=power, expectile=0.7)
    loss, metrics = agent.critic_loss(BATCH, agent.logits(BATCH))
    total, signs = 0.0, set()
    for factor, products in zip((0.6, 0.2), PRODUCTS):
        for steps, y in zip(DISTANCES, products):
            q = factor**steps
            signs.add(y >= q)
            total += (0.7 if y >= q else 0.3) * (1 - math.log2(y)) ** -power * bce(q, y)
    assert len(signs) == 2
    assert float(loss) == pytest.approx(total / 10, rel=1e-5)
    assert float(metrics["critic/target"]) == pytest.approx(sum(map(sum, PRODUCTS)) / 10)
    assert float(metrics["critic/max"]) == pytest.approx(0.6) and float(metrics["critic/min"]) == pytest.approx(0.2**5)


def test_each_factor_has_its_own_action(by_hand):
    """Actions raise these logits: a_i those of the first factor, a_k those of the second."""
    agent = by_hand(distance_power=0.0, expectile=0.5)
    batch = {name: value[:1] for name, value in BATCH.items()} | {"actions": column(1.0), "midpoint_actions": column(2)}
    logits = torch.zeros(2, 1)
    sigmoid = lambda q, a: 1 / (1 + (1 - q) / q * math.exp(-a))
    products = [sigmoid(c**2, 1.0) * sigmoid(c**3, 2.0) for c in (0.5, 0.25)]
    loss, metrics = agent.critic_loss(batch, logits)
    assert float(metrics["critic/target"]) == pytest.approx(sum(products) / 2, rel=1e-5)
    assert float(loss) == pytest.approx(0.5 * math.log(2), rel=1e-5)  # at Q = 1/2 the entropy is log 2 whatever y


def test_products_of_hardly_anything_are_finite(by_hand):
    """Factors of e^-90 each, whose product no float32 can hold, have a length all the same."""
    agent = by_hand(distance_power=1.0, expectile=0.7, discount=math.exp(-1))
    agent.target_critic = Hopeless()
    batch = {name: value[:1] for name, value in BATCH.items()}
    loss, metrics = agent.critic_loss(batch, torch.zeros(2, 1))
    assert float(metrics["critic/weight"]) == pytest.approx(0.3 / 181)
    assert float(loss) == pytest.approx(0.3 / 181 * math.log(2), rel=1e-5)


def test_oracle_critic_loss(by_hand):
    agent = by_hand()
    loss, metrics = agent.oracle_critic_loss(BATCH, agent.logits(BATCH))
    pairs = [(o**d, q**d) for o, q in ((0.3, 0.6), (0.4, 0.2)) for d in DISTANCES]
    assert float(loss) == pytest.approx(sum(bce(o, q) for o, q in pairs) / 10, rel=1e-5)
    assert float(metrics["oracle_critic/error"]) == pytest.approx(sum(abs(o - q) for o, q in pairs) / 10, rel=1e-5)


def test_rpg_by_hand(by_hand):
    """f = min_h logit(c_h^d) + 0.25, the lesser being that of 0.3; mu = 0.25, actions 0."""
    agent = by_hand(alpha=0.7)
    loss, metrics = agent.actor_loss(BATCH)
    f = [math.log(0.3**d / (1 - 0.3**d)) + 0.25 for d in DISTANCES]
    expected = -sum(f) / (sum(map(abs, f)) + 5e-6) + 0.7 * (0.5 * 0.25**2 + LOG)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["actor/q"]) == pytest.approx(sum(f) / 5, rel=1e-5)
    assert float(metrics["actor/mse"]) == pytest.approx(0.0625)
    agent.actor = Constant(3.0)  # judged where it acts, at 1; imitation sees 3
    assert float(agent.actor_loss(BATCH)[1]["actor/q"]) == pytest.approx(sum(f) / 5 + 0.75, rel=1e-5)


def test_frs_is_flow_matching(tiny_agent, shake, batch_of):
    """The velocity at x_t of a way from noise to the action is their difference, with s and the goal's coordinates."""
    agent = tiny_agent("trl", actor="frs")
    shake(agent, 0.3)
    batch = batch_of(agent)
    torch.manual_seed(7)
    loss, _ = agent.actor_loss(batch)
    torch.manual_seed(7)
    noise, t = torch.randn_like(batch["actions"]), torch.rand(12, 1)
    total = 0.0
    for i in range(12):
        x0, x1, g = noise[i], batch["actions"][i], batch["actor_goals"][i, :2]
        x = torch.cat([batch["observations"][i], g, (1 - t[i]) * x0 + t[i] * x1, t[i]])
        total += float((agent.actor.net(x) - (x1 - x0)).square().sum().detach())
    assert float(loss.detach()) == pytest.approx(total / 24, rel=1e-4)


# ---------------------------------------------------------------------------------------------- who learns of whom


@pytest.mark.parametrize("actor", ["rpg", "frs"])
def test_each_loss_moves_its_own_networks(tiny_agent, shake, batch_of, actor):
    agent = tiny_agent("trl", actor=actor)
    shake(agent)
    batch = batch_of(agent)
    calls = {
        "critic": lambda: agent.critic_loss(batch, agent.logits(batch)),
        "oracle_critic": lambda: agent.oracle_critic_loss(batch, agent.logits(batch)),
        "actor": lambda: agent.actor_loss(batch),
    }
    for mine, call in calls.items():
        agent.zero_grad()
        call()[0].backward()
        assert {n.split(".")[0] for n, p in agent.named_parameters() if p.grad is not None} == {mine}
        assert all(p.grad is not None for p in getattr(agent, mine).parameters())
    torch.manual_seed(0)
    total, metrics = agent.loss(batch)
    torch.testing.assert_close(total.detach(), sum(metrics[k] for k in metrics if k.endswith("/loss")))


def test_the_actor_climbs_the_oracle_critic(tiny_agent, shake, batch_of):
    """With next to no imitation, a step of gradient descent raises its logit at the actor's own actions."""
    agent = tiny_agent("trl", alpha=1e-6)
    shake(agent, 0.3)
    batch = batch_of(agent, 64)
    loss, before = agent.actor_loss(batch)
    parameters = list(agent.actor.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        p.data -= 1e-2 * gradient
    assert agent.actor_loss(batch)[1]["actor/q"] > before["actor/q"]


def test_the_target_takes_the_weights_before_the_step(tiny_agent, shake, batch_of):
    agent = tiny_agent("trl")
    shake(agent)
    before = [p.detach().clone() for p in agent.critic.parameters()]
    target = [p.clone() for p in agent.target_critic.parameters()]
    agent.loss(batch_of(agent))[0].backward()
    agent.optimizer.step()
    for online, lag, now in zip(before, target, agent.target_critic.parameters()):
        torch.testing.assert_close(now, 0.005 * online + 0.995 * lag)
    assert any(not torch.equal(a, b) for a, b in zip(before, agent.critic.parameters()))


def test_only_the_goal_s_coordinates_reach_actor_and_second_critic(tiny_agent, shake, batch_of):
    """The first critic sees whole goal states, velocities too; goal_part leaves one coordinate of two."""
    for part, hidden in (((), [2, 3]), ((1,), [0, 2, 3])):
        agent = tiny_agent("trl", goal_part=part)
        shake(agent)
        batch = batch_of(agent)
        logits = agent.logits(batch)
        others = {k: v.clone() for k, v in batch.items()}
        for name in ("value_goals", "actor_goals"):
            others[name][:, hidden] += 1.0
        assert not torch.allclose(agent.logits(others), logits)
        assert torch.equal(agent.oracle_critic_loss(others, logits)[0], agent.oracle_critic_loss(batch, logits)[0])
        assert torch.equal(agent.actor_loss(others)[0], agent.actor_loss(batch)[0])
        s, g = batch["observations"], (batch["actor_goals"], others["actor_goals"])
        assert torch.equal(agent.act(s, g[0], None)[0], agent.act(s, g[1], None)[0])
        others["actor_goals"][:, 1] += 1.0
        assert not torch.equal(agent.actor_loss(others)[0], agent.actor_loss(batch)[0])


# --------------------------------------------------------------------------------------------------------- acting


def test_rpg_acts_by_its_mean(tiny_agent, point_world, shake):
    agent = tiny_agent("trl").eval()
    shake(agent, 0.5)
    s, g = point_world.observations[:20], point_world.observations[20:40]
    action, memory = agent.act(s, g, None)
    with torch.no_grad():
        mean = agent.actor(torch.cat([s, g[:, :2]], dim=-1))
    assert (mean.abs() > 1).any() and memory is None
    assert torch.equal(action, mean.clamp(-1, 1))


def test_frs_takes_the_best_of_its_candidates(tiny_agent, point_world, shake):
    """One candidate after the other: Euler's steps, cut to [-1, 1], and the lesser of both Q decides."""
    agent = tiny_agent("trl", actor="frs", candidates=5, flow_steps=3).eval()
    shake(agent, 0.3)
    s, g = point_world.observations[:6], point_world.observations[20:26]
    row, memory = first_row(s, g, TABLE), None
    chosen, apart = set(), False
    with torch.no_grad():
        for step in range(3):
            action, memory = agent.act(s, g, memory)
            for i in range(6):
                candidates, scores, greatest = [], [], []
                for n in range(5):
                    x = agent.noise[(int(row[i]) + 5 * step + n) % TABLE]
                    for t in range(3):
                        x = x + agent.actor.net(torch.cat([s[i], g[i, :2], x, torch.tensor([t / 3])])) / 3
                    candidates.append(x.clamp(-1, 1))
                    q = agent.oracle_critic(s[i][None], g[i, :2][None], candidates[-1][None])[:, 0]
                    scores.append(float(q.min()))
                    greatest.append(float(q.max()))
                best = int(np.argmax(scores))
                torch.testing.assert_close(action[i], candidates[best], rtol=0, atol=1e-5)
                chosen.add(best)
                apart |= best != int(np.argmax(greatest))
            assert torch.equal(memory["row"], (row + 5 * (step + 1)) % TABLE)
    assert len(chosen) > 1 and apart


@pytest.mark.parametrize("actor, read", [("rpg", {"actor"}), ("frs", {"actor", "oracle_critic"})])
def test_what_acting_reads(tiny_agent, point_world, shake, actor, read):
    agent, other = tiny_agent("trl", actor=actor), tiny_agent("trl", seed=1, actor=actor)
    shake(agent)
    state = agent.acting_state()
    assert {name.split(".")[0] for name in state} == read | {"observation_mean", "observation_std"}
    other.load_state_dict(state, strict=False)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    assert torch.equal(agent.act(s, g, None)[0], other.act(s, g, None)[0])


# -------------------------------------------------------------------------------------------------- configuration


def test_goals_and_networks_are_the_authors(tiny_agent):
    """Geometric goals of the value, uniform ones of the actor; LayerNorm in the actor, too; its mean starts near 0."""
    sampler = tiny_agent("trl").stages()[0].sampler
    assert (sampler.discount, sampler.actor) == (0.99, GoalLaw(0.0, 1.0, 0.0, None))
    assert tiny_agent("trl", actor_p_random=0.5).stages()[0].sampler.actor == GoalLaw(0.0, 0.5, 0.5, None)
    for actor, limit in (("rpg", 0.1), ("frs", 1.0)):
        agent = tiny_agent("trl", actor=actor)
        net = agent.actor if actor == "rpg" else agent.actor.net
        assert net.layer_norm
        assert float(net.head.weight.detach().abs().max()) == pytest.approx(limit * math.sqrt(6 / (16 + 2)), rel=0.1)


def test_a_loss_that_draws_is_not_stacked(tiny_agent):
    assert tiny_agent("trl").stackable and not tiny_agent("trl", actor="frs").stackable


@pytest.mark.parametrize(
    "wrong",
    [
        dict(discount=1.0),
        dict(discount=0.0),
        dict(expectile=1.0),
        dict(distance_power=-1.0),
        dict(target_rate=0.0),
        dict(alpha=-1.0),
        dict(actor_p_random=1.5),
        dict(goal_part=(0, 0)),
        dict(goal_part=(-1,)),
        dict(candidates=0),
        dict(candidates=TABLE + 1),
        dict(flow_steps=0),
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(UserError):
        TRLConfig(**wrong)


def test_a_goal_part_that_is_not_there_is_refused(tiny_agent):
    with pytest.raises(UserError, match="coordinates 0 to 1"):
        tiny_agent("trl", goal_part=(2,))


# The authors' lam, rpg.alpha and discount, for each command on standard data; then ours for what they leave open.
PUBLISHED = {
    "scene-play-v0": (1.0, 1.0, 0.99),
    "cube-single-play-v0": (0.7, 1.0, 0.99),
    "cube-double-play-v0": (1.0, 10.0, 0.99),
    "puzzle-3x3-play-v0": (0.5, 2.0, 0.99),
    "puzzle-4x4-play-v0": (2.0, 2.0, 0.99),
    "antmaze-large-navigate-v0": (0.0, 0.7, 0.99),
    "antsoccer-arena-navigate-v0": (0.5, 0.3, 0.99),
    "humanoidmaze-medium-navigate-v0": (0.0, 0.1, 0.995),
    "humanoidmaze-large-navigate-v0": (0.1, 0.1, 0.995),
    "pointmaze-medium-navigate-v0": (0.7, 10.0, 0.99),
}
INFERRED = {
    "cube-quadruple-play-v0": (1.0, 10.0, 0.99),
    "cube-single-noisy-v0": (0.7, 0.03, 0.99),
    "cube-double-noisy-v0": (1.0, 0.3, 0.99),
    "scene-noisy-v0": (1.0, 0.03, 0.99),
    "puzzle-3x3-noisy-v0": (0.5, 0.06, 0.99),
    "puzzle-4x6-play-v0": (2.0, 2.0, 0.99),
    "puzzle-4x6-noisy-v0": (2.0, 0.06, 0.99),
    "pointmaze-giant-stitch-v0": (0.7, 10.0, 0.995),
    "antmaze-medium-stitch-v0": (0.0, 0.7, 0.99),
    "maze2d-large-v1": (0.7, 10.0, 0.99),
}


@pytest.mark.parametrize("dataset", [*PUBLISHED, *INFERRED])
def test_presets(dataset):
    config, rules = presets.resolve("trl", "paper", dataset)
    found = (config.distance_power, config.alpha, config.discount)
    assert found == (PUBLISHED | INFERRED)[dataset]
    assert (config.steps, config.batch_size, config.hidden, config.value_hidden) == (
        10**6,
        1024,
        (512,) * 3,
        (512,) * 3,
    )
    assert (config.expectile, config.actor, config.learning_rate) == (0.7, "rpg", 3e-4)
    assert config.actor_p_random == (0.5 if "stitch" in dataset else 0.0)
    assert config.goal_part == ((0, 1, 2, 7, 8, 9, 11) if "scene" in dataset else ())
    # The last word on alpha is the authors' command, or says that it is not theirs.
    source = next(rule.source for rule in reversed(rules) if "alpha" in rule.overrides)
    assert ("hyperparameters.sh" in source) == (dataset in PUBLISHED)
    assert ("not published" in source) == (dataset in INFERRED)


# ------------------------------------------------------------------------------------------------------- learning

STEPS = 24


class Table(nn.Module):
    """A logit for every pair of places, which come one-hot; two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(0.1 * torch.randn(2, STEPS + 1, STEPS + 1))

    def forward(self, s, g, a):
        return (s @ self.logits * g).sum(-1)


def test_a_way_s_value_is_gamma_to_its_length(train_all):
    """One walk, a table for Q: only single steps are told, and all ways are put together of them."""
    places = np.eye(STEPS + 1)
    world = Episodes.from_arrays(places, np.ones((STEPS + 1, 1)), [STEPS])

    def prepare(agent) -> None:
        torch.manual_seed(0)
        agent.critic = Table()
        agent.target_critic = target_of(agent.critic)
        agent.optimizer = torch.optim.Adam([p for p in agent.parameters() if p.requires_grad], lr=0.1)
        follow(agent.optimizer, agent.target_critic, agent.critic, agent.config.target_rate)

    sizes = dict(steps=250, batch_size=512, hidden=(8,), value_hidden=(8,), target_rate=0.3)
    agent = train_all("trl", TRLConfig(discount=0.9, expectile=0.6, **sizes), world, prepare)
    start, end = torch.triu_indices(STEPS + 1, STEPS + 1, 1)
    lengths = nn.functional.logsigmoid(agent.critic.logits.detach())[:, start, end] / math.log(0.9)
    assert (lengths / (end - start) - 1).abs().mean() < 0.05
    assert (lengths / (end - start) - 1).abs().max() < 0.25


@pytest.mark.parametrize("actor", ["rpg", "frs"])
def test_it_finds_the_way_on_the_chain(chain, learn, actor):
    """Of walks to and fro, each within a half, it learns which way a goal of the same half lies: Q prefers the action
    that goes there, and the actor takes it."""
    agent = learn("trl", 400, actor=actor, alpha=0.3, candidates=8, discount=0.8, target_rate=0.05)
    with torch.no_grad():
        back, forth = (
            chain.square(agent.oracle_critic(chain.states, chain.goals, torch.full((len(chain.states), 1), a)).amin(0))
            for a in (-1.0, 1.0)
        )
    place, middle = torch.arange(7), 3
    low, high = place <= middle, place >= middle
    joined = chain.apart & ((low[:, None] & low) | (high[:, None] & high))  # the pairs that walks connect
    assert ((forth - back) * chain.direction)[joined].gt(0).float().mean() > 0.9
    assert (chain.actions(agent) * chain.direction)[joined].mean() > 0.5
