"""QC-FQL: its losses by hand, whom each of them moves, chunks carried out to their end, and values that are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_hiql import column, line
from torch import nn

from qhyer import presets, runs
from qhyer.agents._chunks import TABLE
from qhyer.agents.qc_fql import QCFQLConfig
from qhyer.data.episodes import Episodes
from qhyer.data.samplers import GoalLaw
from qhyer.errors import UserError
from qhyer.nn.chance import first_row
from qhyer.update import Update


class Short(nn.Module):
    """Q_j(s, g, a) = -c_j |s + a_1 + a_2 - g|: what a chunk of steps leaves of the way."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.tensor(factors))

    def forward(self, s, g, a):
        return -self.factors[:, None] * (s + a.sum(-1, keepdim=True) - g).abs().squeeze(-1)


class Quarter(nn.Module):
    """mu: a quarter of the way in each of two steps, whatever the noise."""

    def forward(self, x):
        return ((x[:, 1:2] - x[:, :1]) / 4).expand(-1, 2)


class Constant(nn.Module):
    """A velocity of two."""

    def forward(self, x):
        return torch.full_like(x[:, :2], 2.0)


@pytest.fixture
def by_hand():
    """An agent on the line with chunks of two: Q = -0.75 |s + a_1 + a_2 - g| (heads 0.5 and 1, targets 1 and 2)."""

    def make(**options):
        config = QCFQLConfig(**{"chunk": 2, "value_hidden": (8,), "hidden": (8,), "discount": 0.5, **options})
        agent = runs.build_agent("qc_fql", config, line().spec(), 0)
        agent.critic, agent.target_critic = Short(0.5, 1.0), Short(1.0, 2.0)
        agent.actor, agent.flow.net = Quarter(), Constant()
        return agent

    return make


BATCH = {
    "observations": column(0.0, 0.0, 0.0),
    "next_observations": column(1.0, 1.0, 5.0),
    "value_goals": column(9.0, 0.5, 7.0),
    "actor_goals": column(2.0, 8.0, -4.0),
    "actions": torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.1, -0.2]]),
    "rewards": torch.tensor([[-1.0, -1.0], [-1.0, 0.0], [-1.0, -1.0]]),
    "masks": torch.tensor([1.0, 0.0, 1.0]),
    "valid": torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]),
}


def test_critic_loss(by_hand):
    """gamma 1/2. To g = 9: mu(1, 9) = (2, 2), cut to (1, 1), so Q' = -6 and -12, y = -1 - 0.5 + 0.25 * -9 = -3.75;
    Q is -4, -8. To g = 0.5, reached within the chunk: y = -1, Q = -0.25 and -0.5. The third is cut by the end."""
    loss, metrics = by_hand().critic_loss(BATCH)
    assert float(loss.detach()) == pytest.approx((0.25**2 + 4.25**2 + 0.75**2 + 0.5**2) / 6)
    assert float(metrics["critic/min"]) == pytest.approx(-8.0)


def test_chunks_that_are_cut_count_as_none(by_hand):
    agent = by_hand()
    before = agent.critic_loss(BATCH)[0]
    changed = {name: value.clone() for name, value in BATCH.items()}
    changed["observations"][2], changed["actions"][2], changed["rewards"][2] = 50.0, 1.0, -9.0
    assert torch.equal(agent.critic_loss(changed)[0], before)


def test_flow_loss(by_hand):
    """v = 2, so that the error is 2 - (a - x0), of five of six coordinates; the sixth is no step."""
    torch.manual_seed(0)
    loss, _ = by_hand().flow_loss(BATCH)
    torch.manual_seed(0)
    errors = (2 - (BATCH["actions"] - torch.randn(3, 2))).square()
    torch.testing.assert_close(loss, errors.flatten()[:5].sum() / 6)


def test_actor_loss(by_hand):
    """mu is (0.5, 0.5), (2, 2), (-1, -1); the flow takes z to z + 2, cut to 1. Q of (0.5, 0.5), (1, 1), (-1, -1) on the
    way to 2, 8 and -4: -0.75 times 1, 6 and 2."""
    torch.manual_seed(0)
    loss, metrics = by_hand(alpha=3.0, flow_steps=4).actor_loss(BATCH)
    torch.manual_seed(0)
    taught = (torch.randn(3, 2) + 2).clamp(-1, 1)
    distillation = (torch.tensor([[0.5], [2.0], [-1.0]]) - taught).square().mean()
    torch.testing.assert_close(metrics["actor/distillation"], distillation)
    assert float(metrics["actor/q"]) == pytest.approx(-0.75 * 9 / 3)
    torch.testing.assert_close(loss.detach(), 3 * distillation + 2.25)


def test_each_loss_moves_its_own_networks(tiny_agent, batch_of, shake):
    agent = tiny_agent("qc_fql")
    shake(agent)
    batch = batch_of(agent)
    for name, network in {"critic_loss": "critic", "flow_loss": "flow", "actor_loss": "actor"}.items():
        agent.zero_grad()
        getattr(agent, name)(batch)[0].backward()
        moved = {n for n, p in agent.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        assert moved == {n for n, _ in agent.named_parameters() if n.startswith(f"{network}.")}, name
    torch.manual_seed(0)
    total, metrics = agent.loss(batch)
    torch.testing.assert_close(total.detach(), sum(metrics[k] for k in metrics if k.endswith("/loss")))


def test_the_actor_climbs_the_critic_and_stays_near_the_flow(tiny_agent, batch_of, shake):
    """By the gradient: alpha times that of the distillation, less that of Q, each alone."""
    agent = tiny_agent("qc_fql", alpha=2.5)
    shake(agent)
    batch = batch_of(agent)
    s, g = batch["observations"], batch["actor_goals"]
    torch.manual_seed(0)
    agent.actor_loss(batch)[0].backward()
    found = [p.grad.clone() for p in agent.actor.parameters()]
    torch.manual_seed(0)
    noise = torch.randn_like(batch["actions"])
    chunk = agent.actor(torch.cat([s, g, noise], -1))
    with torch.no_grad():
        x = noise
        for i in range(10):
            x = x + agent.flow(x, torch.full((12, 1), i / 10), s, g) / 10
    near = (chunk - x.clamp(-1, 1)).square().mean()
    q = agent.critic(s, g, chunk.clamp(-1, 1)).mean()
    expected = torch.autograd.grad(2.5 * near - q, list(agent.actor.parameters()))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)


def test_the_target_takes_the_weights_before_the_step(tiny_agent, shake, point_world):
    agent = tiny_agent("qc_fql", target_rate=0.25)
    shake(agent.critic)
    before, lag = ([p.detach().clone() for p in net.parameters()] for net in (agent.critic, agent.target_critic))
    (stage,) = agent.stages()
    sampler = stage.sampler.build(point_world, torch.Generator().manual_seed(0))
    Update(agent, stage, sampler, "fp32", torch.device("cpu"))(0)
    for online, old, now in zip(before, lag, agent.target_critic.parameters()):
        torch.testing.assert_close(now, 0.25 * online + 0.75 * old)
    assert not any(p.requires_grad for p in agent.target_critic.parameters())
    held = {id(p) for group in agent.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in agent.parameters() if p.requires_grad}


def test_goals_and_chunks_that_are_drawn(tiny_agent):
    sampler = tiny_agent("qc_fql", chunk=3, discount=0.9, actor_p_random=0.25).stages()[0].sampler
    assert sampler.chunk == 3
    assert sampler.value == GoalLaw(0.2, 0.5, 0.3, 0.9) and sampler.actor == GoalLaw(0.0, 0.75, 0.25)


@pytest.mark.parametrize("name", ["qc_fql", "deas"])
def test_values_stay_in_full_precision(name, tiny_agent, batch_of, shake):
    """In bf16 the flow and the actor are coarser; the critic's loss, whose chunks after are the actor's, is near."""
    agent = tiny_agent(name, discount=0.0)  # nothing of the actor's in the target
    shake(agent)
    batch = batch_of(agent)
    plain = agent.critic_loss(batch)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coarse = agent.critic_loss(batch)[0]
        losses = [agent.flow_loss(batch)[0], agent.actor_loss(batch)[0]]
    assert torch.equal(plain, coarse) and all(loss.dtype == torch.float32 for loss in losses)


# ---------------------------------------------------------------------------------------------------------- acting


@pytest.mark.parametrize("name", ["qc_fql", "deas"])
def test_a_chunk_is_carried_out_to_its_end(name, tiny_agent, point_world, shake):
    """Three actions chosen at what is seen first, from one row of the table; then three more, from the next row."""
    agent = tiny_agent(name, chunk=3).eval()
    shake(agent, 0.3)
    goal, memory = point_world.observations[[30, 100]], None
    row = first_row(point_world.observations[[0, 60]], goal, TABLE)
    actions = []
    with torch.no_grad():
        for t in range(7):
            seen = point_world.observations[[t, 60 + t]]
            if t % 3 == 0:
                noise = agent.noise[(row + t // 3) % TABLE]
                plan = agent.actor(torch.cat([seen, goal, noise], -1)).clamp(-1, 1)  # (2, 6)
            action, memory = agent.act(seen, goal, memory)
            assert torch.equal(action, plan[:, 2 * (t % 3) : 2 * (t % 3) + 2])
            assert memory["plan"].shape == (2, 2 - t % 3, 2)
            actions.append(action)
    assert not torch.equal(actions[0], actions[3])
    assert "noise" not in agent.state_dict()


def test_chunks_of_one_are_chosen_at_every_step(tiny_agent, point_world, shake):
    agent = tiny_agent("qc_fql", chunk=1).eval()
    shake(agent)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    action, memory = agent.act(s, g, None)
    assert action.shape == (5, 2) and memory["plan"].shape == (5, 0, 2)
    row = memory["row"].clone()
    again, memory = agent.act(s, g, memory)
    assert not torch.equal(again, action) and torch.equal(memory["row"], (row + 1) % TABLE)


@pytest.mark.parametrize("name", ["qc_fql", "deas"])
def test_the_actor_is_all_that_acting_reads(name, tiny_agent, point_world, shake):
    agent, other = tiny_agent(name), tiny_agent(name, seed=1)
    shake(agent)
    state = agent.acting_state()
    assert {n.split(".")[0] for n in state if "." in n} == {"actor"}
    other.load_state_dict(state, strict=False)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    assert torch.equal(agent.act(s, g, None)[0], other.act(s, g, None)[0])


def test_presets():
    expected = {
        "scene-play-v0": (300.0, 0.99, 0.0),
        "puzzle-3x3-play-v0": (300.0, 0.99, 0.0),
        "puzzle-4x6-noisy-v0": (300.0, 0.99, 0.0),
        "cube-single-noisy-v0": (300.0, 0.99, 0.0),
        "cube-double-play-v0": (300.0, 0.99, 0.0),
        "cube-triple-play-v0": (100.0, 0.99, 0.0),
        "cube-quadruple-noisy-v0": (100.0, 0.99, 0.0),
        "antmaze-giant-stitch-v0": (10.0, 0.995, 0.5),
        "pointmaze-medium-navigate-v0": (10.0, 0.99, 0.0),
        "humanoidmaze-medium-navigate-v0": (30.0, 0.995, 0.0),
    }
    for dataset, values in expected.items():
        config = presets.resolve("qc_fql", "paper", dataset)[0]
        assert (config.alpha, config.discount, config.actor_p_random) == values, dataset
        assert (config.chunk, config.batch_size, config.hidden, config.flow_steps) == (5, 256, (512,) * 4, 10)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(chunk=0),
        dict(flow_steps=0),
        dict(discount=1.0),
        dict(alpha=-1.0),
        dict(target_rate=0.0),
        dict(value_p_random=-0.1),
        dict(value_p_current=0.8),
        dict(actor_p_random=1.5),
    ],
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(UserError):
        QCFQLConfig(**wrong)


# -------------------------------------------------------------------------------------------------------- learning


def march(rows: int = 9) -> Episodes:
    """One walk, many times: a place further at each step, so that all there is to value is the distance ahead. Goals
    must not be drawn at random, as the same place in another walk is not the goal's own row."""
    observations = np.tile(np.eye(rows), (20, 1))
    return Episodes.from_arrays(observations, np.ones((20 * rows, 1)), rows * np.arange(1, 21) - 1, name="march")


def test_values_are_discounted_distances(train_all):
    """On the march with chunks of two: Q(s, g) = -(1 - gamma^d) / (1 - gamma), d steps ahead, odd or even."""
    torch.manual_seed(0)
    sizes = dict(batch_size=128, learning_rate=1e-2, hidden=(32,), value_hidden=(64,), target_rate=0.1)
    config = QCFQLConfig(steps=400, chunk=2, discount=0.8, alpha=300.0, value_p_random=0.0, **sizes)
    agent = train_all("qc_fql", config, march())
    for s, g in [(0, 0), (0, 1), (1, 3), (2, 5), (0, 6), (6, 6)]:
        state, goal = torch.eye(9)[[s]], torch.eye(9)[[g]]
        with torch.no_grad():
            q = float(agent.q(state, goal, torch.ones(1, 2)))
        assert q == pytest.approx(-(1 - 0.8 ** (g - s)) / 0.2, abs=0.3), (s, g)


def test_it_finds_the_way_on_the_chain(chain, learn):
    """No walk goes from one half to the other: the way there is put together of two."""
    torch.manual_seed(0)
    agent = learn("qc_fql", 300, chunk=2, discount=0.8, alpha=0.3, target_rate=0.05)
    assert chain.alignment(agent) > 0.6
