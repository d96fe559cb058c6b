"""NF-GCBC: its loss and its step along the score by hand, and two ways to act that are not averaged into one."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from qhyer import presets, runs
from qhyer.agents.nf_gcbc import TABLE
from qhyer.data.episodes import Episodes
from qhyer.nn.chance import first_row
from qhyer.train import Update


@pytest.fixture
def batch(point_world):
    rows, goals = point_world.transitions[::7], point_world.transitions[::7] + 1
    return {
        "observations": point_world.observations[rows],
        "actions": point_world.actions[rows],
        "goals": point_world.observations[goals],
    }


def test_loss_is_the_normal_density_at_first(tiny_agent, batch):
    """The flow starts as a rotation, so -log pi(a) = |a + sigma eps|^2 / 2 + (d / 2) log 2 pi."""
    agent = tiny_agent("nf_gcbc", noise=0.3)
    torch.manual_seed(5)
    loss, metrics = agent.loss(batch)
    torch.manual_seed(5)
    noisy = batch["actions"] + 0.3 * torch.randn_like(batch["actions"])
    expected = 0.5 * noisy.square().sum(-1).mean() + math.log(2 * math.pi)
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(metrics["actor/latent_square"], noisy.square().mean())


def test_loss_is_the_flow_s_log_likelihood(tiny_agent, batch, shake):
    agent = tiny_agent("nf_gcbc", noise=0.0)
    shake(agent)
    log_p = agent.flow.log_prob(batch["actions"], agent.context(batch["observations"], batch["goals"]))
    torch.testing.assert_close(agent.loss(batch)[0], -log_p.mean())


def test_denoising_is_a_step_along_the_score(tiny_agent, batch, shake):
    """At first log pi is normal, its score is -a, and the step leaves (1 - sigma^2) a. Later: finite differences."""
    agent = tiny_agent("nf_gcbc", noise=0.5)
    context = agent.context(batch["observations"], batch["goals"]).detach()
    torch.testing.assert_close(agent.denoise(batch["actions"], context), 0.75 * batch["actions"], rtol=1e-4, atol=1e-5)
    shake(agent)
    agent.double()
    context = agent.context(batch["observations"].double(), batch["goals"].double()).detach().double()
    a, h = batch["actions"].double(), 1e-6
    score = torch.stack(
        [
            (agent.flow.log_prob(a + h * e, context) - agent.flow.log_prob(a - h * e, context)) / (2 * h)
            for e in torch.eye(2, dtype=torch.float64)
        ],
        dim=-1,
    )
    torch.testing.assert_close(agent.denoise(a, context), (a + 0.25 * score).detach(), rtol=1e-6, atol=1e-6)


def test_draws_are_the_flow_s_inverse_of_the_table_a_row_a_step(tiny_agent, batch, shake):
    agent = tiny_agent("nf_gcbc", acting="raw").eval()
    shake(agent, 0.02)
    observation, goal = batch["observations"][:5], batch["goals"][:5]
    row = first_row(observation, goal, TABLE)
    assert len(set(row.tolist())) == 5 and row.min() >= 0 and row.max() < TABLE
    memory = None
    for step in range(3):
        action, memory = agent.act(observation, goal, memory)
        z, _ = agent.flow(action, agent.context(observation, goal))
        inside = (action.abs() < 1.0).all(-1)  # clipping cannot be undone
        torch.testing.assert_close(z[inside], agent.latents[(row + step) % TABLE][inside], rtol=1e-3, atol=1e-4)
    assert (memory["row"] == (row + 3) % TABLE).all()


def test_the_table_is_standard_normal_and_episodes_begin_everywhere(tiny_agent):
    agent = tiny_agent("nf_gcbc")
    error = 5 / math.sqrt(TABLE)
    assert agent.latents.mean(0).abs().max() < error
    torch.testing.assert_close(torch.cov(agent.latents.T), torch.eye(2), rtol=0, atol=2 * error)
    assert "latents" not in agent.state_dict()
    x = torch.rand(4000, 4, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(first_row(x, x.flip(0), TABLE) // 512, minlength=TABLE // 512)  # eight parts of 500
    assert (counts - 500).abs().max() < 5 * math.sqrt(500)


def test_schedule():
    """Up over 500 updates, then a cosine from 3e-4 to 1e-6."""
    agent = runs.build_agent("nf_gcbc", presets.resolve("nf_gcbc", "paper", "scene-play-v0")[0], spec(), 0)
    schedule = agent.stages()[0].schedule
    rate = lambda step: 3e-4 * schedule(step)
    assert rate(0) == pytest.approx(3e-4 / 500) and rate(249) == pytest.approx(1.5e-4)
    assert rate(499) == pytest.approx(3e-4) and rate(500) == pytest.approx(3e-4)
    assert rate(500_250) == pytest.approx((3e-4 + 1e-6) / 2) and rate(1_000_000) == pytest.approx(1e-6)


def spec():
    return two_ways().spec()


def test_presets():
    of = lambda dataset: presets.resolve("nf_gcbc", "paper", dataset)[0]
    assert of("cube-double-play-v0").discount == 0.99
    for dataset in ("cube-single-play-v0", "cube-double-noisy-v0", "pointmaze-giant-stitch-v0", "puzzle-4x6-noisy-v0"):
        config = of(dataset)
        assert (config.discount, config.noise, config.batch_size, config.acting) == (0.97, 0.1, 256, "denoised")


# ---------------------------------------------------------------------------------------------------- learning


def two_ways(count: int = 40, rows: int = 12) -> Episodes:
    """Walks along y, up or down; at each step the action's x is 0.7 or -0.7, as a coin says: nobody takes 0."""
    rng = np.random.default_rng(0)
    observations, actions = [], []
    for episode in range(count):
        direction = 1.0 if episode % 2 else -1.0
        y = 0.0
        for _ in range(rows):
            observations.append([rng.uniform(-1, 1), y])
            actions.append([rng.choice([-0.7, 0.7]), 0.5 * direction])
            y += 0.1 * direction
    ends = rows * np.arange(1, count + 1) - 1
    return Episodes.from_arrays(np.array(observations), np.array(actions), ends, goal=[1])


def learn():
    """A small flow after 400 updates."""
    data = two_ways()
    config = dataclasses.replace(
        presets.resolve("nf_gcbc", "paper", "custom")[0],
        steps=400,
        batch_size=128,
        learning_rate=3e-3,
        warmup=20,
        flow_blocks=4,
        flow_channels=32,
        encoder_width=32,
        encoder_layers=1,
        representation=8,
    )
    agent = runs.build_agent("nf_gcbc", config, data.spec(), 0).train()
    torch.manual_seed(0)
    (stage,) = agent.stages()
    sampler = stage.sampler.build(data, torch.Generator().manual_seed(0))
    update = Update(agent, stage, sampler, "fp32", torch.device("cpu"))
    for step in range(stage.steps):
        update(step)
    return agent.eval()


def test_two_ways_of_acting_stay_two():
    """Each action is one of the two the data have, never their mean; both are taken; and y follows the goal."""
    agent = learn()
    generator = torch.Generator().manual_seed(1)
    observation = torch.stack([2 * torch.rand(300, generator=generator) - 1, torch.zeros(300)], dim=-1)
    sign = torch.ones(300)
    sign[::2] = -1.0
    goal = torch.stack([observation[:, 0].roll(1), 0.5 * sign], dim=-1)
    far = {}
    for acting in ("denoised", "raw", "likeliest"):
        agent.config = dataclasses.replace(agent.config, acting=acting)
        action, _ = agent.act(observation, goal, None)
        left = action[:, 0] < 0
        far[acting] = (action - torch.stack([torch.where(left, -0.7, 0.7), 0.5 * sign], -1)).norm(dim=-1)
        if acting != "likeliest":
            assert 0.3 < left.float().mean() < 0.7
    assert (far["likeliest"] < 0.2).all()
    assert (far["denoised"] < 0.2).float().mean() > 0.9
    # the noise of training, sigma 0.1 in two dimensions, is in a raw draw and not in a denoised one
    assert far["denoised"].median() < 0.6 * far["raw"].median()
