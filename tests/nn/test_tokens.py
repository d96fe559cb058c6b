"""Which token stands where, and where Q-hat and the action are read."""

from __future__ import annotations

import typing

import pytest
import torch

from qhyer.nn.tokens import Tokenization, Tokens

TOKENIZATIONS = typing.get_args(Tokenization)
CASES = [(tokenization, with_q) for tokenization in TOKENIZATIONS for with_q in (True, False)]
ORDER = {  # the order of one step's tokens, by name
    ("concat", True): ["state", "q", "action"],
    ("concat", False): ["state", "action"],
    ("separate", True): ["goal", "state", "q", "action"],
    ("separate", False): ["goal", "state", "action"],
    ("no_goal", True): ["state", "q", "action"],
    ("no_goal", False): ["state", "action"],
}


def make(tokenization: str, with_q: bool) -> Tokens:
    torch.manual_seed(0)
    return Tokens(3, 2, 3, dim=8, context=4, tokenization=tokenization, with_q=with_q)


def window(steps: int = 4):
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    return draw(2, steps, 3), draw(2, steps, 3), draw(2, steps), draw(2, steps, 2)


@pytest.mark.parametrize("tokenization, with_q", CASES)
def test_order_kind_and_position(tokenization, with_q):
    """Every token is its own linear map plus its position in the window plus its place in the step."""
    tokens = make(tokenization, with_q)
    s, g, q, a = window()
    order = ORDER[tokenization, with_q]
    assert tokens.per_step == len(order)
    x = tokens(s, g, q if with_q else None, a).unflatten(1, (4, len(order)))
    content = {
        "state": tokens.state(torch.cat([s, g], -1) if tokenization == "concat" else s),
        "goal": tokens.goal(g) if tokens.goal is not None else None,
        "q": tokens.q(q[..., None]) if tokens.q is not None else None,
        "action": tokens.action(a),
    }
    for i, name in enumerate(order):
        torch.testing.assert_close(x[:, :, i], content[name] + tokens.position + tokens.kind[i])


@pytest.mark.parametrize("tokenization, with_q", CASES)
def test_readout_positions(tokenization, with_q):
    """Q-hat is read at the state, before Q stands in the sequence; the action after both, before itself."""
    tokens, order = make(tokenization, with_q), ORDER[tokenization, with_q]
    assert order[tokens.state_at] == "state"
    assert order[tokens.action_from] == ("q" if with_q else "state")
    per_step, first = tokens.read
    assert order[first:] == ["action"] and len(order) == per_step
    assert tokens.state_at < first and tokens.action_from < first
    if with_q:
        assert tokens.state_at < order.index("q")


@pytest.mark.parametrize("tokenization, with_q", CASES)
def test_token_by_token_is_the_window(tokenization, with_q):
    """Acting builds the same tokens one step at a time, at positions `first`, `first + 1`, ..."""
    tokens = make(tokenization, with_q)
    s, g, q, a = window()
    parts = []
    for t in range(4):
        now = slice(t, t + 1)
        parts.append(tokens.state_tokens(s[:, now], g[:, now], first=t).flatten(1, 2))
        if with_q:
            parts.append(tokens.q_token(q[:, now], first=t))
        parts.append(tokens.action_token(a[:, now], first=t))
    torch.testing.assert_close(torch.cat(parts, 1), tokens(s, g, q if with_q else None, a))


@pytest.mark.parametrize("tokenization", TOKENIZATIONS)
def test_goal_reaches_the_tokens_unless_left_out(tokenization):
    tokens = make(tokenization, True)
    s, g, q, a = window()
    moved = (tokens(s, g + 1, q, a) - tokens(s, g, q, a)).abs().amax((0, 2)).unflatten(0, (4, -1)).amax(0) > 0
    names = [name for name, m in zip(ORDER[tokenization, True], moved.tolist()) if m]
    assert names == {"concat": ["state"], "separate": ["goal"], "no_goal": []}[tokenization]


def test_q_and_action_stay_in_their_tokens():
    tokens = make("concat", True)
    s, g, q, a = window()
    base = tokens(s, g, q, a)
    for other, place in ((tokens(s, g, q + 1, a), 1), (tokens(s, g, q, a + 1), 2)):
        moved = ((other - base).abs().amax((0, 2)).unflatten(0, (4, 3)) > 0).tolist()
        assert moved == [[i == place for i in range(3)]] * 4


@pytest.mark.parametrize("tokenization, with_q", CASES)
def test_the_last_action_can_be_left_out(tokenization, with_q):
    tokens = make(tokenization, with_q)
    s, g, q, a = window()
    values = s, g, q if with_q else None, a
    torch.testing.assert_close(tokens(*values, last=False), tokens(*values)[:, :-1])


def test_shorter_window_uses_the_first_positions():
    tokens = make("concat", True)
    s, g, q, a = window()
    torch.testing.assert_close(tokens(s[:, :2], g[:, :2], q[:, :2], a[:, :2]), tokens(s, g, q, a)[:, :6])
