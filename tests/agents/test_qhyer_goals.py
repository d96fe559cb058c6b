"""What QHyer may do beyond its paper about goals and actions: densities stay densities, a mixture takes a side."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from qhyer import losses, runs
from qhyer.agents.qhyer import LUCK_ROWS, QHyerConfig
from qhyer.config import from_dict
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError
from qhyer.nn.chance import first_row


@pytest.fixture(scope="module")
def lamps() -> Episodes:
    """Walks in one dimension past two lamps that change now and then; the goal is the place and both lamps."""
    rng = np.random.default_rng(0)
    place, lamp = rng.normal(size=(4, 40)).cumsum(1) * 0.3, rng.integers(0, 2, size=(4, 40, 2))
    observations = np.concatenate([place[..., None], lamp], -1).reshape(160, 3)
    actions = rng.uniform(-1, 1, size=(160, 1))
    return Episodes.from_arrays(observations, actions, 40 * np.arange(1, 5) - 1, goal=[0, 1, 2], name="lamps")


def agent_of(episodes: Episodes, tiny_config, shake, **options):
    agent = runs.build_agent("qhyer", tiny_config("qhyer", **options), episodes.spec(), 0)
    shake(agent)
    return agent


def test_coordinates_of_two_values_are_found(lamps, point_world):
    assert lamps.spec().goal_binary == (False, True, True)
    assert point_world.spec().goal_binary == ()


@pytest.mark.parametrize("frame", ["absolute", "relative"])
@pytest.mark.parametrize("defence", [0.0, 0.2])
def test_bits_and_flow_together_are_a_density(frame, defence, lamps, tiny_config, shake):
    """The sum over both lamps of the integral over places is one, for any state and action."""
    agent = agent_of(lamps, tiny_config, shake, binary_goals="bits", goal_frame=frame, flow_defence=defence)
    state, action = lamps.observations[[7]], lamps.actions[[7]]
    spec = lamps.spec()
    grid = torch.linspace(-12.0, 12.0, 4001)
    total = 0.0
    for pattern in itertools.product([0.0, 1.0], repeat=2):
        lamp = [(b - spec.observation_mean[i]) / spec.observation_std[i] for b, i in zip(pattern, (1, 2))]
        goals = torch.stack([grid, torch.full_like(grid, lamp[0]), torch.full_like(grid, lamp[1])], -1)
        with torch.no_grad():
            p = agent.log_density(state.expand(len(grid), -1), action.expand(len(grid), -1), goals).double().exp()
        total += float(torch.trapezoid(p, grid))
    assert total == pytest.approx(1.0, abs=1e-3)


def test_seen_from_the_state_a_goal_is_a_difference_and_a_change(lamps, tiny_config, shake):
    """Move state and goal together, change a lamp in both: with an encoder that sees nothing, Q stays."""
    agent = agent_of(lamps, tiny_config, shake, binary_goals="bits", goal_frame="relative")
    with torch.no_grad():
        for parameter in agent.critic["encoder"].parameters():
            parameter.zero_()
    action = torch.zeros(1, 1)
    state, goal = torch.tensor([[0.3, 0.0, 1.0]]), torch.tensor([[0.8, 1.0, 1.0]])
    q = agent.log_density(state, action, agent.goal_coordinates(goal))
    moved, aim = torch.tensor([[-0.4, 1.0, 0.0]]), torch.tensor([[0.1, 0.0, 0.0]])
    torch.testing.assert_close(agent.log_density(moved, action, agent.goal_coordinates(aim)), q)
    other = torch.tensor([[0.1, 1.0, 0.0]])
    assert not torch.allclose(agent.log_density(moved, action, agent.goal_coordinates(other)), q)


def test_noise_moves_places_and_never_lamps(lamps, tiny_config, shake):
    """Noise of five deviations would turn half of the lamps over; with lamps alone as goals it does nothing."""
    only = Episodes(lamps.observations, lamps.actions, lamps.ends, (1, 2))
    agents = [agent_of(only, tiny_config, shake, binary_goals="bits", flow_noise=noise) for noise in (0.0, 5.0)]
    assert all("flow" not in agent.critic for agent in agents)
    batch = agents[0].stages()[0].sampler.build(only, torch.Generator().manual_seed(0)).sample(16)
    quiet, noisy = (float(agent.critic_loss(batch)[0].detach()) for agent in agents)
    assert quiet == noisy


def test_only_the_named_part_of_a_goal_counts(lamps, tiny_config, shake):
    agent = agent_of(lamps, tiny_config, shake, goal_part=(0, 2), goal_input="coordinates", binary_goals="bits").eval()
    state, goal, other = lamps.observations[[7]], lamps.observations[[20]], lamps.observations[[20]].clone()
    other[:, 1] = 1.0 - other[:, 1]
    assert torch.equal(agent.act(state, goal, None)[0], agent.act(state, other, None)[0])
    other[:, 2] = 1.0 - other[:, 2]
    assert not torch.equal(agent.act(state, goal, None)[0], agent.act(state, other, None)[0])
    with pytest.raises(UserError, match="coordinates 0 to 2"):
        agent_of(lamps, tiny_config, shake, goal_part=(3,))


def test_mixture_nll_is_the_mixtures():
    torch.manual_seed(0)
    logits, means, log_stds = torch.randn(6, 3), torch.randn(6, 3, 2), 0.3 * torch.randn(6, 3, 2)
    target = torch.randn(6, 2)
    D = torch.distributions
    mixture = D.MixtureSameFamily(D.Categorical(logits=logits), D.Independent(D.Normal(means, log_stds.exp()), 1))
    torch.testing.assert_close(losses.mixture_nll(logits, means, log_stds, target), -mixture.log_prob(target))


@pytest.mark.parametrize("head", ["gaussian", "mixture", "best_of_mixture"])
def test_where_two_ways_lead_to_the_goal_a_mixture_takes_one(head, tiny_config):
    """Every goal is reached by pushing left or right equally often: one Gaussian stands still, a mixture goes."""
    rng = np.random.default_rng(0)
    actions = rng.choice([-0.8, 0.8], size=(400, 1)) + 0.02 * rng.normal(size=(400, 1))
    episodes = Episodes.from_arrays(rng.normal(size=(400, 2)), actions, 20 * np.arange(1, 21) - 1, goal=[0], name="two")
    options = dict(context=1, action_head=head, mixtures=4, batch_size=64, conditioning="flow", learning_rate=3e-3)
    agent = runs.build_agent("qhyer", tiny_config("qhyer", **options), episodes.spec(), 0).train()
    stage = agent.stages()[0]
    sampler = stage.sampler.build(episodes, torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    for _ in range(150):
        loss, _ = stage.loss(sampler.sample(64))
        for optimizer in stage.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in stage.optimizers:
            optimizer.step()
    agent.eval()
    action, _ = agent.act(episodes.observations[:50], episodes.observations[50:100], None)
    if head == "gaussian":
        assert action.abs().mean() < 0.5
    else:
        assert ((action.abs() - 0.8).abs() < 0.25).float().mean() > 0.9


@pytest.mark.parametrize("head", ["gaussian", "mixture", "best_of_mixture"])
def test_a_chunk_is_carried_out_before_the_next_is_chosen(head, lamps, tiny_config, shake):
    """Three actions from the first state, whatever is seen on the way; then three from the state of that moment."""
    options = dict(context=1, chunk=3, action_head=head, conditioning="flow")
    agent = agent_of(lamps, tiny_config, shake, **options).eval()
    seen, goal = lamps.observations[:12].view(6, 2, 3), lamps.observations[[50, 90]]
    taken, memory, begun = [], None, first_row(seen[0], goal, LUCK_ROWS)
    assert begun[0] != begun[1] and int(begun.max()) < LUCK_ROWS - 2 * agent.config.candidates
    for observation in seen:
        action, memory = agent.act(observation, goal, memory)
        assert action.shape == (2, 1)
        taken.append(action)
    assert memory is not None and memory["plan"].shape == (2, 0, 1)  # the second plan has been carried out, too
    for first in (0, 3):
        memory = None if first == 0 or head != "best_of_mixture" else {"row": begun + agent.config.candidates}
        for step in range(3):  # again, blind after the first look
            action, memory = agent.act(seen[first] if step == 0 else torch.full_like(seen[0], 9.0), goal, memory)
            assert torch.equal(action, taken[first + step])
    assert not torch.equal(taken[0], taken[3])


def test_a_chunk_needs_a_context_of_one(tiny_config):
    with pytest.raises(UserError, match="write context 1"):
        tiny_config("qhyer", context=2, chunk=3)


def test_a_choice_is_in_proportion_to_what_the_critic_says_of_it(lamps, tiny_config, shake):
    """Four candidates, a thousand times: as often as exp(Q / T) says, and at T = 0 always the best."""
    options = dict(context=1, action_head="best_of_mixture", conditioning="flow", candidates=4, mixtures=2)
    state, goal, q = lamps.observations[[7]], lamps.observations[[30]], torch.tensor([[0.0, 0.5, 1.0, 0.3]])
    rows, zeros = torch.arange(4000).view(1000, 4), torch.zeros(1000, 2, 1)
    for temperature in (0.0, 0.5):
        agent = agent_of(lamps, tiny_config, shake, choice_temperature=temperature, **options).eval()
        agent.log_density = lambda *_: q.expand(1000, -1)
        agent.draws = torch.tensor([-0.9, -0.3, 0.3, 0.9]).repeat(1000)[:, None]
        action = agent._chosen_action(state.expand(1000, -1), goal.expand(1000, -1), rows, zeros[..., 0], zeros, zeros)
        counts = torch.stack([(action[:, 0] == a).sum() for a in (-0.9, -0.3, 0.3, 0.9)])
        assert int(counts.sum()) == 1000
        if temperature == 0.0:
            assert counts.tolist() == [0, 0, 1000, 0]
        else:
            expected = 1000 * (q[0] / temperature).softmax(-1)
            assert float(((counts - expected).square() / expected).sum()) < 11.3  # chi-square, 3 degrees: 1 %


@pytest.mark.parametrize("defence", [0.0, 0.1])
def test_the_flow_learns_the_density_of_noised_goals(defence, lamps, tiny_config, shake):
    """Also where a broad normal is mixed in: one density of one goal, noise and all."""
    agent = agent_of(lamps, tiny_config, shake, flow_defence=defence, flow_noise=0.3)
    batch = agent.stages()[0].sampler.build(lamps, torch.Generator().manual_seed(0)).sample(16)
    torch.manual_seed(1)
    loss, _ = agent.critic_loss(batch)
    torch.manual_seed(1)
    goals = agent.goal_coordinates(batch["flow_goals"])
    goals = goals + 0.3 * torch.randn_like(goals)
    expected = -agent.log_density(batch["flow_observations"], batch["flow_actions"], goals).mean()
    torch.testing.assert_close(loss, expected)


def test_a_part_of_the_goal_may_be_named_in_any_order(lamps, tiny_config, shake):
    """Lamp before place: the bit is the lamp's, and the flow's number the place's, given it."""
    options = dict(goal_part=(2, 0), binary_goals="bits", goal_frame="relative")
    agent = agent_of(lamps, tiny_config, shake, **options)
    state, action, goal = lamps.observations[[7]], lamps.actions[[7]], lamps.observations[[20]]
    context = agent.critic["encoder"](agent.normalize(state), action)
    changed = (goal[:, [2]] != state[:, [2]]).float()
    moved = (goal[:, [0]] - state[:, [0]]) / lamps.spec().observation_std[0]
    flow = agent.critic["flow"].log_prob(moved, context + agent.critic["given"](changed))
    expected = agent.critic["bits"].log_prob(changed, context) + flow
    torch.testing.assert_close(agent.log_density(state, action, agent.goal_coordinates(goal)), expected)


def test_a_run_that_chose_by_an_older_rule_says_so():
    config = {"prior_weight": 0.3, "width": 32}
    assert from_dict(QHyerConfig, config).width == 32  # it did not use it
    with pytest.raises(UserError, match="train it again"):
        from_dict(QHyerConfig, {**config, "action_head": "best_of_mixture"})
