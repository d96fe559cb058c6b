"""An agent as a policy: for a loop of one's own (`Policy`), and for many episodes on a GPU (`GraphedPolicy`).

Acting is hundreds of small kernels, and launching them takes longer than they do, hence CUDA graphs. One graph for each
set of shapes: a sequence model's memory grows until its window is full, so there are as many as the window has steps,
provided that the batch keeps its size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from qhyer.agent import Agent, Memory
from qhyer.errors import UserError
from qhyer.lane import abandon, default_cuda_generator, keep

Outputs = tuple[Tensor, Memory | None]
Act = Callable[[], Outputs]
Capture = Callable[[Act], tuple[Outputs, Callable[[], None]]]
"""Runs the function once and returns its outputs, and what computes them again, into the same tensors."""

LIMIT = 64  # shapes; an agent whose memory grows without end acts eagerly beyond it
WARMUP = 2


class Policy:
    """A trained agent for a loop of one's own: arrays in, an array out, and what it remembers is its own business.

        policy = models.policy("cube-single-play")    # a model by name, or the folder of a model or of a run
        policy.reset()                                # an episode begins
        action = policy(observation, goal)            # (d_s,), (d_s,) -> (d_a,) in [-1, 1]

    Where the data say what -1 and 1 stand for (`action_low`, `action_high`), actions come in those units instead.
    Several episodes in lock-step have their number as the first axis: (n, d_s), (n, d_s) -> (n, d_a). The goal may
    change on the way; what has been planned is carried out first (chunks of actions), and GAS, which looks for its ways
    when an episode begins, wants a `reset()`. Observations and goals are raw, as in the data.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent.eval()
        self.device = next(agent.parameters()).device
        self.reset()

    def reset(self) -> None:
        """What comes next is the first step of an episode."""
        self._memory: Memory | None = None
        self._shape: tuple[int, ...] | None = None

    def __call__(self, observation: ArrayLike, goal: ArrayLike) -> np.ndarray:
        here, there = self._checked("observation", observation), self._checked("goal", goal)
        if here.shape != there.shape:
            raise UserError(f"observations of shape {here.shape}, goals of shape {there.shape}: give one goal for each")
        if self._shape not in (None, here.shape):
            raise UserError(f"observations of shape {here.shape} after those of {self._shape}: call reset() between")
        state, aim = (torch.from_numpy(np.atleast_2d(x)).to(self.device) for x in (here, there))
        with torch.no_grad():
            action, self._memory = self.agent.act(state, aim, self._memory)
        self._shape = here.shape
        taken = self.agent.spec.own_units(action.clamp(-1.0, 1.0).float().cpu().numpy())
        return taken.reshape(*here.shape[:-1], -1)

    def _checked(self, name: str, value: ArrayLike) -> np.ndarray:
        array = np.array(value.detach().cpu().numpy() if isinstance(value, Tensor) else value, dtype=np.float32)
        wanted = self.agent.spec.observation_dim
        if array.ndim not in (1, 2) or array.shape[-1] != wanted or not array.size:
            what = "a goal is a whole state: " if name == "goal" else ""
            raise UserError(f"{what}{name} of shape {array.shape}, not ({wanted},) or (n, {wanted})")
        if not np.isfinite(array).all():
            raise UserError(f"the {name} has values that are not finite")
        return array


class CudaCapture:
    """Captures into graphs that share one pool of memory: they never run at once, and outputs are copied out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def __call__(self, act: Act) -> tuple[Outputs, Callable[[], None]]:
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):  # libraries set themselves up before the capture
                for _ in range(WARMUP):
                    act()
            current.wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            put_back = keep(default_cuda_generator(self.device))
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    outputs = act()
            except BaseException:
                abandon(graph, self.pool, self.device)
                put_back()
                raise
            graph.replay()  # a capture computes nothing
        return outputs, graph.replay


@dataclass(frozen=True)
class _Recorded:
    inputs: dict[str, Tensor]
    outputs: Outputs
    replay: Callable[[], None]


class GraphedPolicy:
    """`agent.act` with the same arguments and results. Any number of episodes may take turns: it keeps no memory."""

    def __init__(self, agent: Agent, capture: Capture | None = None) -> None:
        self.agent = agent
        self.device = next(agent.parameters()).device
        self.capture: Capture | None = capture or CudaCapture(self.device)
        self.graphs: dict[tuple[object, ...], _Recorded] = {}

    def __call__(self, observation: Tensor, goal: Tensor, memory: Memory | None) -> Outputs:
        memory = self.agent.for_goal(memory, goal)
        inputs = {"observation": observation, "goal": goal} | {f"memory/{k}": v for k, v in (memory or {}).items()}
        key = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        recorded = self.graphs.get(key)
        if recorded is None:
            recorded = self._record(inputs, memory is None) if len(self.graphs) < LIMIT else None
            if recorded is None:
                return self.agent.act(observation, goal, memory)
            self.graphs[key] = recorded
        else:
            for name, value in inputs.items():
                recorded.inputs[name].copy_(value)
            recorded.replay()
        action, after = recorded.outputs
        return action.clone(), None if after is None else {name: value.clone() for name, value in after.items()}

    def _record(self, inputs: dict[str, Tensor], first: bool) -> _Recorded | None:
        if self.capture is None:
            return None
        static = {name: value.to(self.device, copy=True) for name, value in inputs.items()}
        memory = None if first else {k.removeprefix("memory/"): v for k, v in static.items() if k.startswith("memory/")}
        try:
            outputs, replay = self.capture(lambda: self.agent.act(static["observation"], static["goal"], memory))
        except RuntimeError as error:
            self.capture = None
            logging.getLogger(__name__).warning("acting without CUDA graphs: the capture failed: %s", error)
            return None
        return _Recorded(static, outputs, replay)

    def prepare(self, batch: int) -> None:
        """Records the graphs of a whole episode beforehand, until the shapes repeat."""
        nowhere = torch.zeros(batch, self.agent.spec.observation_dim, device=self.device)
        memory: Memory | None = None
        for _ in range(LIMIT):
            before = len(self.graphs)
            _, memory = self(nowhere, nowhere, memory)
            if len(self.graphs) == before:
                return
