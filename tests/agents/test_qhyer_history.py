"""A window that hops sees what one that slides would see from the same steps on, and keeps what it has decoded."""

from __future__ import annotations

import pytest
import torch

from qhyer.policy import GraphedPolicy, Policy

KINDS = [
    {},
    {"ssm": "mamba2"},
    {"backbone": "attention"},
    {"backbone": "mamba", "tokenization": "separate"},
    {"conditioning": "none"},
    {"past_q": "critic"},
    {"goal_input": "difference"},
]


def acted(agent, observations, goal):
    """Actions of an episode, and how many steps the window has after each."""
    memory, actions, lengths = None, [], []
    for observation in observations:
        action, memory = agent.act(observation, goal, memory)
        actions.append(action)
        lengths.append(memory["observations"].shape[1])
    return actions, lengths


@pytest.fixture
def pair(tiny_agent, shake):
    """Agents of the same weights whose windows hop and slide."""

    def make(**options):
        hopping = tiny_agent("qhyer", history="hopping", **options).eval()
        shake(hopping)
        sliding = tiny_agent("qhyer", history="sliding", **options).eval()
        sliding.load_state_dict(hopping.state_dict())
        return hopping, sliding

    return make


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_until_it_is_full_nothing_differs(options, pair):
    """Six steps of context, six steps: the same actions, though each step decodes its own tokens alone."""
    hopping, sliding = pair(context=6, **options)
    tokens = []
    decoder = hopping.decoder.forward
    hopping.decoder.forward = lambda x, *rest, **more: tokens.append(x.shape[1]) or decoder(x, *rest, **more)
    torch.manual_seed(0)
    observations, goal = torch.randn(6, 3, 4), torch.randn(3, 4)
    found, _ = acted(hopping, observations, goal)
    expected, _ = acted(sliding, observations, goal)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert max(tokens[2:]) <= hopping.tokens.per_step


@pytest.mark.parametrize("context", [2, 5, 6])
def test_when_it_is_full_half_of_it_stays(context, pair):
    """From there on it acts as a sliding window that was given these steps, with their Q and actions."""
    hopping, sliding = pair(context=context)
    torch.manual_seed(0)
    observations, goal = torch.randn(3 * context, 3, 4), torch.randn(3, 4)
    memory = None
    for t, observation in enumerate(observations):
        window = {} if memory is None else {key: memory[key] for key in ("observations", "q", "actions")}
        expected, _ = sliding.act(observation, goal, window)
        action, memory = hopping.act(observation, goal, memory)
        torch.testing.assert_close(action, expected, rtol=1e-4, atol=1e-5)
        kept = memory["observations"].shape[1]
        full = t + 1 >= context and (t + 1 - context) % (context - context // 2) == 0
        assert full == ("goal" not in memory) and kept < context
        if full:
            assert kept == context // 2
        assert torch.equal(memory["observations"], observations[t + 1 - kept : t + 1].transpose(0, 1))


def test_a_goal_that_changes_is_told_to_the_whole_window(pair):
    hopping, sliding = pair(context=6)
    torch.manual_seed(0)
    observations, first, second = torch.randn(5, 3, 4), torch.randn(3, 4), torch.randn(3, 4)
    actions = {}
    for name, agent in (("hopping", hopping), ("sliding", sliding)):
        memory = None
        for t, observation in enumerate(observations):
            actions[name], memory = agent.act(observation, first if t < 3 else second, memory)
    torch.testing.assert_close(actions["hopping"], actions["sliding"], rtol=1e-4, atol=1e-5)


def test_a_goal_tensor_that_is_changed_in_place_is_another_goal(pair):
    hopping, sliding = pair(context=6)
    torch.manual_seed(0)
    observations, goal, other = torch.randn(5, 3, 4), torch.randn(3, 4), torch.randn(3, 4)
    memories = [None, None]
    for t, observation in enumerate(observations):
        if t == 3:
            goal.copy_(other)
        a, memories[0] = hopping.act(observation, goal, memories[0])
        b, memories[1] = sliding.act(observation, goal, memories[1])
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_graphs_are_for_the_goal_there_is(pair):
    """A graph cannot look whether the goal is the one its memory is of: who replays it does."""
    hopping, sliding = pair(context=6)

    def blind(act):
        """As in a capture."""
        looks = hopping.for_goal
        hopping.for_goal = lambda memory, goal: memory
        try:
            return act()
        finally:
            hopping.for_goal = looks

    def capture(act):
        outputs = blind(act)

        def replay():
            action, memory = blind(act)
            outputs[0].copy_(action)
            for name, value in (memory or {}).items():
                outputs[1][name].copy_(value)

        return outputs, replay

    policy = GraphedPolicy(hopping, capture)
    torch.manual_seed(0)
    observations, goals = torch.randn(2, 5, 3, 4), torch.randn(3, 3, 4)
    for episode in observations:
        graphed = plain = None
        for t, observation in enumerate(episode):
            goal = goals[t // 2]
            a, graphed = policy(observation, goal, graphed)
            b, plain = sliding.act(observation, goal, plain)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_one_step_of_context_has_no_history(pair):
    hopping, sliding = pair(context=1)
    observation, goal = torch.randn(3, 4), torch.randn(3, 4)
    action, memory = hopping.act(observation, goal, None)
    assert memory is None and torch.equal(action, sliding.act(observation, goal, None)[0])


def test_graphs_repeat(pair):
    """Shapes come back after a hop, so that all of an episode's graphs can be made beforehand."""
    hopping, _ = pair(context=5)
    captured = []

    def capture(act):
        captured.append(1)
        return act(), lambda: None

    policy = GraphedPolicy(hopping, capture)
    policy.prepare(3)
    before = len(captured)
    assert before <= 2 * 5
    policy.prepare(3)
    assert len(captured) == before


def test_a_policy_for_one_s_own_loop(pair):
    hopping, sliding = pair(context=5)
    policies = Policy(hopping), Policy(sliding)
    torch.manual_seed(0)
    for observation in torch.randn(5, 4).numpy():
        a, b = (policy(observation, observation * 0) for policy in policies)
        assert a == pytest.approx(b, abs=1e-5)
