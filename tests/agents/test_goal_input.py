"""Goals known in part (`goal_input` "coordinates"): whoever allows it reads the coordinates that make a goal alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from qhyer import agents, models
from qhyer.agent import GoalConfig
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError
from qhyer.policy import GraphedPolicy, Policy
from qhyer.train import TrainConfig, train

CONFIGS = {name: agents.load(name).Config for name in agents.names()}
ASKED = {name: config for name, config in CONFIGS.items() if issubclass(config, GoalConfig)}
ALLOW = [name for name, config in ASKED.items() if not config.whole_goals]
REFUSE = [name for name in ASKED if name not in ALLOW]
STATES = ("observations", "next_observations", "option_ends", "high_actor_targets")  # of batches; the last is both
OTHERS = torch.tensor([False, False, True, True])  # of the point world's coordinates: its velocity
ON = {"goal_input": "coordinates"}

allowed = pytest.mark.parametrize("name", ALLOW)


def garbage(states: torch.Tensor, others: torch.Tensor = OTHERS, seed: int = 7, size: float = 1e6) -> torch.Tensor:
    """The same states but for what is not named: anything, and large."""
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(others, size * noise, states)


def test_who_may_be_asked():
    assert ALLOW == ["crl", "deas", "gcbc", "gciql", "gcivl", "hiql", "nf_gcbc", "ota", "qc_fql", "saw"]
    assert REFUSE == ["eik_hiqrl", "gas", "qrl", "trl"]
    for name in ALLOW:
        off, on = CONFIGS[name](), CONFIGS[name](**ON)
        assert off.goal_input == "observation" and off.reads_whole_goals and not on.reads_whole_goals


@pytest.mark.parametrize("name", REFUSE)
def test_who_needs_states_refuses(name):
    with pytest.raises(UserError, match=r"goal_input can only be observation here: .* state"):
        CONFIGS[name](**ON)


@pytest.mark.parametrize("name", agents.names())
def test_what_is_said_of_goals_is_so(name, tiny_agent, point_world, shake):
    """Acting depends on a goal's other coordinates where `reads_whole_goals` says so, and nowhere else."""
    agent = tiny_agent(name).eval()
    shake(agent)
    observation, goal = point_world.observations[:5], point_world.observations[100:105]
    # With chance out of the way: which draw it is, every agent but those with the option tells by the whole goal.
    memory = {"row": torch.zeros(5, dtype=torch.long)} if name == "sharsa" else None
    with torch.no_grad():
        actions = [agent.act(observation, g, memory)[0] for g in (goal, garbage(goal, size=1.0))]
    same = torch.equal(*actions)
    assert same != agent.config.reads_whole_goals


@allowed
@torch.no_grad()
def test_acting_does_not_depend_on_the_others(name, tiny_agent, point_world, shake):
    """To the bit: the draws of those that draw, a policy's own loop and graphs included."""
    agent = tiny_agent(name, **ON).eval()
    shake(agent)
    goal = point_world.observations[100:105]
    policies = [agent.act, agent.act, GraphedPolicy(agent, lambda act: (act(), lambda: None))]
    memories: list = [None, None, None]
    own = [Policy(agent), Policy(agent)]
    for t in range(7):
        observation = point_world.observations[t : t + 5]
        found = []
        for i, (policy, g) in enumerate(zip(policies, (goal, garbage(goal), garbage(goal, seed=t)))):
            if i == 2:
                policy.graphs.clear()  # computed anew: what stands for a capture here replays nothing
            action, memories[i] = policy(observation, g, memories[i])
            found.append(action)
        found += [torch.from_numpy(p(observation, g)) for p, g in zip(own, (goal, garbage(goal)))]
        assert all(torch.equal(found[0], other) for other in found[1:])
    elsewhere = agent.act(observation, goal + 0.5 * ~OTHERS, None)[0]
    assert not torch.equal(elsewhere, agent.act(observation, goal, None)[0])


def losses(agent, batch):
    torch.manual_seed(0)  # of the noise that some draw
    (stage,) = agent.stages()
    return stage.loss(batch)


@allowed
def test_learning_does_not_depend_on_the_others(name, tiny_agent, batch_of, shake):
    """Whatever stands in a batch's goals there: the same loss, metrics and gradients, to the bit. Off, it counts."""
    for options, counts in ((ON, False), ({}, True)):
        size = {"chunk": 3} if hasattr(CONFIGS[name], "chunk") else {}  # no numbers but states come in fours
        agent = tiny_agent(name, **options, **size)
        shake(agent)
        batch = batch_of(agent)
        goals = [n for n, value in batch.items() if value.shape[-1:] == (4,) and n not in STATES]
        assert goals and all(value.is_floating_point() for value in map(batch.get, goals))
        spoilt = batch | {n: garbage(batch[n], size=1.0 if counts else 1e6) for n in goals}
        found = []
        for given in (batch, spoilt):
            agent.zero_grad()
            loss, metrics = losses(agent, given)
            loss.backward()
            gradients = [p.grad for p in agent.parameters() if p.grad is not None]
            found.append([loss.detach(), *metrics.values(), *gradients])
        assert all(torch.equal(a, b) for a, b in zip(*found)) != counts


@pytest.mark.parametrize("name", ["hiql", "ota", "saw"])
def test_subgoals_are_coordinates_and_their_values_are_of_states(name, tiny_agent, batch_of, shake, point_world):
    """The state k steps ahead is read as a goal in phi and by policies, and as a state where its own value is asked."""
    agent = tiny_agent(name, **ON)
    shake(agent)
    seen, states = [], []
    for part, module in agent.named_children():
        if part in ("phi", "actor_phi"):  # given (states, goals)
            module.register_forward_pre_hook(lambda _, given: (seen.append(given[1]), states.append(given[0]))[0])
        if part in ("sub_actor", "high_actor"):  # given both side by side
            module.register_forward_pre_hook(lambda _, given: seen.append(given[0][:, 4:]))
    batch = batch_of(agent)
    losses(agent, batch)
    read = torch.cat(seen)
    assert (read[:, OTHERS] == agent.observation_mean[OTHERS]).all()
    assert read[:, ~OTHERS].std(0).min() > 0.0
    targets, whole = batch["high_actor_targets"], torch.cat(states)
    assert all((whole == target).all(-1).any() for target in targets)
    before = losses(agent, batch)[1]
    after = losses(agent, batch | {"high_actor_targets": garbage(targets, size=1.0)})[1]
    advantage = "bootstrap/advantage" if name == "saw" else "high_actor/advantage"
    changed = {metric for metric in before if not torch.equal(before[metric], after[metric])}
    assert advantage in changed and not {n for n in changed if n.startswith(("value", "low", "sub"))}


def test_as_goal(tiny_agent, point_world):
    states = point_world.observations[:6].unflatten(0, (2, 3))  # of seeds, say
    off, on = tiny_agent("gcbc"), tiny_agent("gcbc", **ON)
    assert off.as_goal(states) is states
    goals = on.as_goal(states)
    assert torch.equal(goals[..., :2], states[..., :2])
    assert torch.equal(goals[..., 2:], torch.tensor(point_world.spec().observation_mean)[2:].expand(2, 3, 2))
    assert torch.equal(on.as_goal(goals), goals)
    assert not on.normalize(goals)[..., 2:].any()  # nothing, in standard units
    assert off.state_dict().keys() == on.state_dict().keys()


def test_a_run_and_its_model_read_what_they_were_trained_for(tiny_config, point_world, tmp_path):
    how = TrainConfig(device="cpu", save_every=5)
    made = dict(episodes=point_world, quiet=True)
    run = train("hiql", "point-world", tiny_config("hiql", **ON), how, run=tmp_path / "run", **made)
    model = models.export(run, tmp_path / "model", dtype="fp32")
    observation, goal = point_world.observations[0].numpy(), point_world.observations[50]
    spoilt = garbage(goal).numpy()
    actions = [models.policy(place)(observation, g) for place in (run, model) for g in (goal.numpy(), spoilt)]
    assert all(np.array_equal(actions[0], action) for action in actions)
    with pytest.raises(UserError, match=r"config.goal_input: coordinates there, observation asked for"):
        train("hiql", "point-world", tiny_config("hiql"), how, run=run, resume=True, **made)


# ------------------------------------------------------------------------------------------------------ learning


@pytest.fixture(scope="module")
def windy(chain_world) -> Episodes:
    """The chain, where a state also tells how it was come to: (0, 1) or (1, 0) by the last step, in four copies, and a
    goal is a place. In hindsight the way one came to a goal says much of the way there."""
    places, actions = chain_world.observations.numpy(), chain_world.actions.numpy()
    came = np.roll(actions, 1, axis=0)
    came[chain_world.starts.numpy()] = 0.0
    rows = np.concatenate([places, np.repeat(came, 4, axis=1)], axis=1)
    return Episodes.from_arrays(rows, actions, chain_world.ends.numpy(), goal=list(range(7)), name="windy")


SMALL = dict(batch_size=256, learning_rate=5e-3, **ON)
NETS = dict(hidden=(32,), value_hidden=(64,))
LEARN = {
    "gcbc": dict(steps=200, hidden=(32,)),
    "gcivl": dict(steps=300, discount=0.8, alpha=3.0, target_rate=0.05, **NETS),
    "crl": dict(steps=300, discount=0.7, latent_dim=16, alpha=0.5, **NETS),
    "hiql": dict(steps=300, discount=0.8, expectile=0.9, representation=4, subgoal_steps=2, target_rate=0.05, **NETS),
    "qc_fql": dict(steps=300, chunk=2, discount=0.8, alpha=0.3, target_rate=0.05, **NETS),
}


@pytest.mark.parametrize("name", LEARN)
def test_it_learns_to_reach_goals_known_in_part(name, windy, chain, train_all):
    agent = train_all(name, dataclasses.replace(CONFIGS[name](), **SMALL | LEARN[name]), windy)
    states = torch.cat([chain.states, torch.zeros(49, 4)], dim=1)
    goals = garbage(torch.cat([chain.goals, torch.zeros(49, 4)], dim=1), torch.arange(11) >= 7)
    actions = chain.square(agent.act(states, goals, None)[0])
    assert float((actions * chain.direction)[chain.apart].mean()) > 0.6
