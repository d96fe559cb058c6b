"""Several seeds of one agent in one update: parameters with the seeds as their first axis, one loss through vmap.

Small networks (1024 x 512) leave a GPU waiting for kernels to start, however many seeds take turns on it; here each
kernel serves all seeds. The sum of their losses gives each its own gradient, optimisers and target networks work
element by element: a stack is trained as one agent with larger parameters.

Each seed's agent and optimisers hold views of their part, and so are saved, evaluated and resumed as if alone. What a
stack asks of an agent: `Agent.stackable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qhyer.agent import Agent, Batch, Metrics, Stage
from qhyer.update import Update


class _Loss(nn.Module):
    """An agent's loss as the forward of a module, which torch can call with other parameters than its own."""

    def __init__(self, agent: Agent, stage: Stage) -> None:
        super().__init__()
        self.agent, self.loss = agent, stage.loss

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        with _Products():
            return self.loss(batch)


class _Products(TorchFunctionMode):
    """Affine maps as a product and a sum: of one fused operation vmap would make those and two products by one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.baddbmm and not kwargs:
            bias, x, weight = args
        elif func is F.linear and len(args) == 3 and args[2] is not None:
            x, weight, bias = args[0], args[1].mT, args[2]
        else:
            return func(*args, **(kwargs or {}))
        product = x @ weight
        return product + bias.to(product.dtype)


def stacked(agents: Sequence[Agent]) -> tuple[Agent, Stage]:
    """An agent whose parameters are those of all these side by side, (S, ...), and the stage that trains it: batches,
    losses and metrics have the seeds as their first axis, too. The agents keep views of their part."""
    with torch.random.fork_rng(devices=[]):
        whole = type(agents[0])(agents[0].config, agents[0].spec).to(agents[0].observation_mean.device).train()
    (stage,) = whole.stages()
    assert whole.stackable and stage.schedule is None and stage.grad_clip is None and stage.after_step is None
    assert stage.ahead is None
    for parameter, *own in zip(whole.parameters(), *(agent.parameters() for agent in agents)):
        parameter.data = torch.stack([p.data for p in own])
        if len(own[0].shape) == 2:  # a Linear's: its gradient is the transpose of a product, and kept where this one is
            parameter.data = parameter.data.mT.contiguous().mT
        for p, part in zip(own, parameter.data):
            p.data = part
    for optimizer, parameter, own in _moments(stage, agents):
        states = [other.state[p] for other, p in own if p in other.state]  # all of them have one, or none
        if states:
            optimizer.state[parameter] = {
                name: value if name == "step" else _like(parameter, [state[name] for state in states])
                for name, value in states[0].items()
            }
    module = _Loss(whole, stage)
    parameters: dict[str, Tensor] = dict(module.named_parameters())

    def one(parameters: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Metrics]:
        return torch.func.functional_call(module, parameters, (batch,))

    return whole, replace(stage, loss=lambda batch: torch.vmap(one)(parameters, batch))


def _like(parameter: Tensor, moments: Sequence[Tensor]) -> Tensor:
    """Side by side, laid out in memory as the parameter is: fused optimisers count on it."""
    return torch.empty_like(parameter).copy_(torch.stack(list(moments)))


Owned = tuple[torch.optim.Optimizer, Tensor]


def _moments(stage: Stage, agents: Sequence[Agent]) -> Iterator[tuple[torch.optim.Optimizer, Tensor, list[Owned]]]:
    """Each parameter of the stack with its optimiser, and the same of each seed."""
    for optimizer, *own in zip(stage.optimizers, *(agent.stages()[0].optimizers for agent in agents)):
        lists = [[p for group in o.param_groups for p in group["params"]] for o in (optimizer, *own)]
        for parameter, *theirs in zip(*lists):
            yield optimizer, parameter, list(zip(own, theirs))


class Seat(Update):
    """A seed's place in a stack, instead of an update of its own. What it reads are its rows of the stack's."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.names, self.sums, self.count = [], None, 0
        self.healthy, self.rows, self.kinds = None, {}, {}

    @property
    def path(self) -> str:
        return self.stack.update.path

    def __call__(self, step: int) -> None:
        self.stack.asked = step
        self.count += 1


class Stack:
    """One update for all seeds, when those that go on have asked for it. One that has left is computed all the same."""

    def __init__(self, agents: Sequence[Agent], update: Update) -> None:
        self.agents, self.update = agents, update
        self.seats = [Seat(self) for _ in agents]
        self.asked: int | None = None
        self.handed_out = False

    def advance(self) -> None:
        if self.asked is None:
            return
        self.update(self.asked)
        self.asked = None
        if not self.handed_out:
            self._hand_out()

    def _hand_out(self) -> None:
        """After the first update there are moments and sums, and they stay where they are: seeds get views of them."""
        assert self.update.sums is not None and self.update.healthy is not None
        for i, seat in enumerate(self.seats):
            saved, seat.sums = seat.sums, self.update.sums[i]
            if saved is not None:  # since the last line, from a checkpoint
                seat.sums += saved
            seat.names, seat.healthy = self.update.names, self.update.healthy[i]
            seat.rows = {name: value[i] for name, value in self.update.rows.items()}
            seat.kinds = self.update.kinds
        for optimizer, parameter, own in _moments(self.update.stage, self.agents):
            state = optimizer.state[parameter].items()
            for i, (other, p) in enumerate(own):
                other.state[p] = {name: value if name == "step" else value[i] for name, value in state}
                for group, its in zip(optimizer.param_groups, other.param_groups):
                    its.update({name: value for name, value in group.items() if name != "params"})
        self.handed_out = True
