"""Tokens of a window: per step ([s_t; g], Q_t, a_t), Section 3.3, and its ablations.

Order. The paper prints <Q, sg, a>; its Algorithm 1 needs Q-hat_t to see s_t but not Q_t, and a-hat_t to see
both, which a causal decoder can only do in the order sg, Q, a: Q-hat is read at sg_t, the action at Q_t.

    tokenization   concat    [s;g]  Q  a          3 tokens a step
                   separate  g  s   Q  a          4 tokens: the goal is a token of its own
                   no_goal   s      Q  a          3 tokens
    without a Q token (conditioning "none") the action is read where Q-hat would be.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.nn.scan import kernels

UNROLLED = 32  # numbers of an action: the kernels are unrolled over them

Tokenization = Literal["concat", "separate", "no_goal"]


class Tokens(nn.Module):
    def __init__(
        self,
        observation_dim: int,
        action_dim: int,
        goal_dim: int,
        dim: int,
        context: int,
        tokenization: Tokenization = "concat",
        with_q: bool = True,
    ) -> None:
        super().__init__()
        self.tokenization, self.with_q, self.context = tokenization, with_q, context
        state_inputs = observation_dim + (goal_dim if tokenization == "concat" else 0)
        self.state = nn.Linear(state_inputs, dim)
        self.goal = nn.Linear(goal_dim, dim) if tokenization == "separate" else None
        self.q = nn.Linear(1, dim) if with_q else None
        self.action = nn.Linear(action_dim, dim)
        # Position within the window, not time within the episode: play data have no meaningful clock, and a
        # window at the start of an episode is simply a shorter one.
        self.position = nn.Parameter(0.02 * torch.randn(context, dim))
        self.kind = nn.Parameter(0.02 * torch.randn(self.per_step, dim))

    @property
    def per_step(self) -> int:
        return 2 + (self.tokenization == "separate") + self.with_q

    @property
    def state_at(self) -> int:
        """Where the state token stands within a step; Q-hat is read there."""
        return 1 if self.tokenization == "separate" else 0

    @property
    def action_from(self) -> int:
        """Where the action is read: at the Q token, or at the state when there is none."""
        return self.state_at + (1 if self.with_q else 0)

    @property
    def read(self) -> tuple[int, int]:
        """Tokens of a step, and how many of them are read at most: all but the action, which comes last."""
        return self.per_step, self.per_step - 1

    def state_tokens(self, observations: Tensor, goals: Tensor, first: int = 0) -> Tensor:
        """(B, T, d_s), (B, T, d_g) -> the step's leading tokens (B, T, 1 or 2, d), at positions first..."""
        position = self.position[first : first + observations.shape[1]]  # (T, d)
        if self.tokenization == "concat":
            tokens = [self.state(torch.cat([observations, goals], dim=-1))]
        elif self.goal is not None:
            tokens = [self.goal(goals), self.state(observations)]
        else:
            tokens = [self.state(observations)]
        return torch.stack([t + position + self.kind[i] for i, t in enumerate(tokens)], dim=2)

    def q_token(self, q: Tensor, first: int = 0) -> Tensor:
        """(B, T) -> (B, T, d)."""
        assert self.q is not None
        return self.q(q[..., None]) + self.position[first : first + q.shape[1]] + self.kind[self.action_from]

    def action_token(self, actions: Tensor, first: int = 0) -> Tensor:
        """(B, T, d_a) -> (B, T, d)."""
        return self.action(actions) + self.position[first : first + actions.shape[1]] + self.kind[-1]

    def forward(
        self, observations: Tensor, goals: Tensor, q: Tensor | None, actions: Tensor, last: bool = True
    ) -> Tensor:
        """A whole window, T steps -> (B, T * per_step, d); without `last` one token less, the last action, which is the
        past of nothing. What is added to a token does not depend on its input, so it is added once, to all of them."""
        if q is not None and self._fused(q, actions):
            return self._forward_fused(observations, goals, q, actions, last)
        embedded: list[tuple[nn.Linear, Tensor]] = [(self.state, observations)]
        if self.tokenization == "concat":
            embedded = [(self.state, torch.cat([observations, goals], dim=-1))]
        elif self.goal is not None:
            embedded = [(self.goal, goals), (self.state, observations)]
        if self.q is not None:
            assert q is not None
            embedded.append((self.q, q[..., None]))
        embedded.append((self.action, actions))
        tokens = torch.stack([F.linear(inputs, layer.weight) for layer, inputs in embedded], dim=2)  # (B, T, P, d)
        kinds = self.kind + torch.stack([layer.bias for layer, _ in embedded])  # (P, d)
        x = (tokens + (self.position[: observations.shape[1], None] + kinds)).flatten(1, 2)
        return x if last else x[:, :-1]

    def _fused(self, q: Tensor, actions: Tensor) -> bool:
        """Whether kernels can write these tokens (`tokens_triton.py`): state, Q and action, of few numbers, as data."""
        if self.q is None or self.goal is not None or not q.numel() or kernels(actions) is None:
            return False
        data = not torch.is_grad_enabled() or not (q.requires_grad or actions.requires_grad)
        few = actions.shape[-1] <= UNROLLED and q.shape[1] <= self.context
        return data and few and self.position.dtype == torch.float32

    def _forward_fused(self, observations: Tensor, goals: Tensor, q: Tensor, actions: Tensor, last: bool) -> Tensor:
        from qhyer.nn.products_triton import product
        from qhyer.nn.tokens_triton import embed

        assert self.q is not None
        inputs = torch.cat([observations, goals], dim=-1) if self.tokenization == "concat" else observations
        # All of it as it is: a slice of the whole would be filled up and copied backward.
        position = self.position if q.shape[1] == self.context else self.position[: q.shape[1]]
        return embed(
            product(inputs, self.state.weight), q, actions, self.q.weight, self.action.weight, position, self.kind,
            self.state.bias, self.q.bias, self.action.bias, last,
        )  # fmt: skip
