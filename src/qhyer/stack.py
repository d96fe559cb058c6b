"""Several seeds of one agent in one update: parameters with the seeds as their first axis, one loss through vmap.

Small networks (1024 x 512) leave a GPU waiting for the starts of kernels, however many seeds take turns on it; here a
kernel serves all of them. The sum of the seeds' losses gives each its own gradient, and optimisers and target networks
work element by element, so that a stack is trained as one agent with larger parameters is.

Each seed's agent and optimisers hold views of their part of it: they are saved, evaluated and exported as ever. What a
stack needs of an agent is `Agent.stackable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qhyer.agent import Agent, Batch, Metrics, Stage


class _Loss(nn.Module):
    """An agent's loss as a module's forward, which is what torch can call with other parameters."""

    def __init__(self, agent: Agent, stage: Stage) -> None:
        super().__init__()
        self.agent, self.loss = agent, stage.loss

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        return self.loss(batch)


class _Products(TorchFunctionMode):
    """Affine maps as a product and a sum: of one fused operation vmap would make those and two products by one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.baddbmm:
            bias, x, weight = args
        elif func is F.linear and len(args) == 3 and args[2] is not None:
            x, weight, bias = args[0], args[1].mT, args[2]
        else:
            return func(*args, **(kwargs or {}))
        product = x @ weight
        return product + bias.to(product.dtype)


def stacked_stage(whole: Agent, agents: Sequence[Agent]) -> Stage:
    """The stage that trains all these agents as `whole`, another one of their kind: its parameters become theirs side
    by side, (S, ...), and theirs views of it. Loss and metrics are (S,)."""
    (stage,) = whole.stages()
    for parameter, *own in zip(whole.parameters(), *(agent.parameters() for agent in agents)):
        parameter.data = torch.stack([p.data for p in own])
        for p, part in zip(own, parameter.data):
            p.data = part
    _gather(stage, [agent.stages()[0] for agent in agents])
    module = _Loss(whole, stage)
    parameters = dict(module.named_parameters())

    def one(parameters: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Metrics]:
        with _Products():
            return torch.func.functional_call(module, parameters, (batch,))

    return replace(stage, loss=lambda batch: torch.vmap(one)(parameters, batch))


def _gather(stage: Stage, stages: Sequence[Stage]) -> None:
    """The seeds' moments, if they have any, side by side."""
    for optimizer, *own in zip(stage.optimizers, *(s.optimizers for s in stages)):
        for (p, *ps) in zip(_parameters(optimizer), *map(_parameters, own)):
            states = [o.state[q] for o, q in zip(own, ps) if q in o.state]
            if states:
                optimizer.state[p] = {
                    name: torch.stack([s[name] for s in states]) if _is_moment(name) else value
                    for name, value in states[0].items()
                }


def hand_out(stage: Stage, stages: Sequence[Stage]) -> None:
    """Each seed's optimisers get views of the moments, once there are any, and what else is in the groups."""
    for optimizer, *own in zip(stage.optimizers, *(s.optimizers for s in stages)):
        for i, mine in enumerate(own):
            for p, q in zip(_parameters(optimizer), _parameters(mine)):
                state = optimizer.state[p].items()
                mine.state[q] = {name: value[i] if _is_moment(name) else value for name, value in state}
            for group, its in zip(optimizer.param_groups, mine.param_groups):
                its.update({name: value for name, value in group.items() if name != "params"})


def _is_moment(name: str) -> bool:
    return name != "step"


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
