"""A policy for a loop of one's own. And its graphs: the same actions as without, whoever takes turns. The capture
itself needs a GPU; here a stand-in computes again into the same tensors, which is all that a graph does."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from qhyer.errors import UserError
from qhyer.policy import LIMIT, GraphedPolicy, Policy

DIM = 4  # of the point world


def again(act):
    """What a capture does, without CUDA: outputs live in tensors of their own, written anew by each replay."""
    action, memory = act()
    kept = (action.clone(), None if memory is None else {k: v.clone() for k, v in memory.items()})

    def replay():
        action, memory = act()
        kept[0].copy_(action)
        for name, value in (memory or {}).items():
            kept[1][name].copy_(value)

    return kept, replay


def walk(policy, seed, steps, batch=3):
    """Observations, goal -> the actions of an episode, as a generator: episodes can take turns."""
    generator = torch.Generator().manual_seed(seed)
    goal, memory = torch.randn(batch, DIM, generator=generator), None
    for _ in range(steps):
        action, memory = policy(torch.randn(batch, DIM, generator=generator), goal, memory)
        yield action


@pytest.mark.parametrize("name", ["qhyer", "gcbc"])
@torch.no_grad()
def test_episodes_that_take_turns_act_as_each_alone(name, tiny_agent, shake):
    agent = tiny_agent(name).eval()
    shake(agent)
    policy = GraphedPolicy(agent, again)
    together = list(zip(walk(policy, 1, 9), walk(policy, 2, 9)))
    apart = list(zip(walk(agent.act, 1, 9), walk(agent.act, 2, 9)))
    for ours, theirs in zip(together, apart):
        for a, b in zip(ours, theirs):
            assert torch.equal(a, b)
    shapes = agent.config.context if name == "qhyer" else 1
    assert len(policy.graphs) == shapes  # one for each length of the memory


@pytest.mark.parametrize("head", ["gaussian", "best_of_mixture"])
@torch.no_grad()
def test_plans_take_turns_and_every_length_of_one_has_a_graph(head, tiny_agent, shake):
    agent = tiny_agent("qhyer", context=1, chunk=3, action_head=head, conditioning="flow").eval()
    shake(agent)
    policy = GraphedPolicy(agent, again)
    policy.prepare(3)
    assert len(policy.graphs) == 4  # at first, with two, one and none of a plan's actions left
    for ours, theirs in zip(walk(policy, 1, 8), walk(agent.act, 1, 8)):
        assert torch.equal(ours, theirs)
    assert len(policy.graphs) == 4


@torch.no_grad()
def test_what_is_returned_is_the_callers(tiny_agent):
    policy = GraphedPolicy(tiny_agent("qhyer").eval(), again)
    one = torch.ones(2, DIM)
    action, memory = policy(one, one, None)
    kept = action.clone(), {k: v.clone() for k, v in memory.items()}
    policy(5 * one, -one, None)
    assert torch.equal(action, kept[0]) and all(torch.equal(memory[k], kept[1][k]) for k in memory)


@torch.no_grad()
def test_prepared_for_a_whole_episode(tiny_agent):
    agent = tiny_agent("qhyer").eval()
    policy = GraphedPolicy(agent, again)
    policy.prepare(3)
    prepared = set(policy.graphs)
    assert len(prepared) == agent.config.context
    list(walk(policy, 1, 10))
    assert set(policy.graphs) == prepared


@torch.no_grad()
def test_a_failed_capture_is_said_once_and_acts_all_the_same(tiny_agent, caplog):
    agent = tiny_agent("qhyer").eval()
    asked = []

    def refuse(act):
        asked.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    policy = GraphedPolicy(agent, refuse)
    with caplog.at_level(logging.WARNING):
        ours = list(walk(policy, 1, 6))
    assert all(torch.equal(a, b) for a, b in zip(ours, walk(agent.act, 1, 6)))
    assert len(asked) == 1 and "not permitted" in caplog.text and len(caplog.records) == 1


@torch.no_grad()
def test_a_memory_without_end_is_not_captured_without_end(tiny_agent):
    agent = tiny_agent("qhyer", context=LIMIT + 5).eval()
    policy = GraphedPolicy(agent, again)
    policy.prepare(1)
    assert len(policy.graphs) == LIMIT
    steps = LIMIT + 3
    last = list(walk(policy, 1, steps, 1))[-1]
    assert torch.equal(last, list(walk(agent.act, 1, steps, 1))[-1])


PLANS = dict(context=1, chunk=3, action_head="best_of_mixture", conditioning="flow")


@pytest.mark.gpu
@pytest.mark.parametrize("options, graphs", [({}, None), (PLANS, 4)], ids=["windows", "plans"])
@torch.no_grad()
def test_graphs_act_as_without(options, graphs, tiny_agent, shake):
    agent = tiny_agent("qhyer", **options).eval()
    shake(agent)
    agent.cuda()
    policy = GraphedPolicy(agent)
    policy.prepare(3)
    assert len(policy.graphs) == (graphs or agent.config.context)  # plans: at first, with two, one and none left
    cuda = lambda act: lambda observation, goal, memory: act(observation.cuda(), goal.cuda(), memory)
    together = list(zip(walk(cuda(policy), 1, 9), walk(cuda(policy), 2, 9)))
    apart = list(zip(walk(cuda(agent.act), 1, 9), walk(cuda(agent.act), 2, 9)))
    for ours, theirs in zip(together, apart):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@torch.no_grad()
def test_an_agent_that_cannot_be_captured_acts_and_leaves_the_generator_alone(tiny_agent, monkeypatch, caplog):
    """A value is read back while acting, which no capture allows."""
    agent = tiny_agent("gcbc").cuda().eval()
    act = type(agent).act

    def reading(self, observation, goal, memory):
        assert float(observation.sum()) > -1e9
        return act(self, observation, goal, memory)

    monkeypatch.setattr(type(agent), "act", reading)
    torch.cuda.manual_seed(0)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(0)
    policy = GraphedPolicy(agent)
    shape = (3, agent.spec.observation_dim)
    observation, goal = torch.ones(shape, device="cuda"), torch.zeros(shape, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(policy(observation, goal, None)[0], act(agent, observation, goal, None)[0])
    assert not policy.graphs and len(caplog.records) == 1
    assert torch.equal(torch.rand(3, device="cuda"), expected)  # and memory can still be had
    del policy
    assert torch.ones(1 << 20, device="cuda").sum() == 1 << 20


# --------------------------------------------------------------------------------------------- a loop of one's own


@pytest.mark.parametrize("name", ["qhyer", "gcbc", "nf_gcbc"])
def test_arrays_in_and_an_array_out_are_what_the_agent_does(name, tiny_agent, shake):
    agent = tiny_agent(name)
    shake(agent)
    policy = Policy(agent)
    assert not agent.training
    rng = np.random.default_rng(0)
    goal, states = rng.normal(size=DIM), rng.normal(size=(3, 6, DIM))  # float64, as environments have them
    for episode in states:
        policy.reset()
        memory = None
        for state in episode:
            with torch.no_grad():
                expected, memory = agent.act(
                    *(torch.tensor(x[None], dtype=torch.float32) for x in (state, goal)), memory
                )
            action = policy(state, goal)
            assert action.dtype == np.float32 and action.shape == (agent.spec.action_dim,)
            assert np.array_equal(action, expected[0].clamp(-1, 1).numpy())
    policy.reset()
    several = policy(torch.tensor(states[:, 0]), np.tile(goal, (3, 1)).tolist())  # tensors and lists, too
    assert several.shape == (3, agent.spec.action_dim) and np.abs(several).max() <= 1


def test_what_does_not_fit_is_told(tiny_agent):
    policy, state = Policy(tiny_agent("gcbc")), np.zeros(DIM)
    for observation, goal, words in (
        (np.zeros(DIM + 1), state, r"observation of shape \(5,\), not \(4,\) or \(n, 4\)"),
        (state, np.zeros(2), r"a goal is a whole state: goal of shape \(2,\)"),
        (np.zeros((3, DIM)), state, "give one goal for each"),
        (np.full(DIM, np.nan), state, "the observation has values that are not finite"),
    ):
        with pytest.raises(UserError, match=words):
            policy(observation, goal)
    policy(state, state)
    with pytest.raises(UserError, match=r"call reset\(\) between"):
        policy(np.zeros((3, DIM)), np.zeros((3, DIM)))
    policy.reset()
    assert policy(np.zeros((3, DIM)), np.zeros((3, DIM))).shape[0] == 3
