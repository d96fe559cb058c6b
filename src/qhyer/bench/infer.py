"""`qhyer bench infer`: one step of acting with a full window, against what its operations and bytes would take.

The floor: the operations of the call at the measured rate of a large matrix product, or the bytes it must read
(parameters once, inputs) at the measured rate of a large copy, whichever takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer import presets, runs
from qhyer.agent import Agent, Memory
from qhyer.bench import common
from qhyer.bench.common import BenchRow, Ceilings
from qhyer.data import registry
from qhyer.policy import GraphedPolicy
from qhyer.runs import resolve_device


def linear_floor(module: nn.Module, call: Callable[[], object]) -> Callable[[], None]:
    """The matrix products of a call and nothing else: each linear layer on inputs of the shapes it saw."""
    seen: list[tuple[nn.Linear, torch.Size]] = []
    handles = [
        layer.register_forward_pre_hook(lambda layer, inputs: seen.append((layer, inputs[0].shape)))
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    work = [(layer, torch.zeros(shape, device=layer.weight.device, dtype=layer.weight.dtype)) for layer, shape in seen]

    @torch.no_grad()
    def floor() -> None:
        for layer, inputs in work:
            F.linear(inputs, layer.weight, layer.bias)

    return floor


class Recompute(nn.Module):
    """A decoder without a memory: tokens that follow a cache are decoded together with all tokens before them.

    The slow, obvious reference for acting in two stages: the second stage passes over the whole window again.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self.again = 0  # passes that the cache saves

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        if cache is not None:
            self.again += 1
            x = torch.cat([cache, x], dim=1)
        return self.decoder(x)[0], x  # the tokens themselves are the cache

    @staticmethod
    def pack(cache: Tensor) -> dict[str, Tensor]:
        return {"tokens": cache}

    @staticmethod
    def unpack(tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Not what another decoder kept of its own: of that the reference starts anew."""
        return tensors.get("tokens")


def full_memory(agent: Agent, observation: Tensor, goal: Tensor) -> Memory | None:
    """What the agent remembers once its window is full, and, where it plans several actions, when a plan is over."""
    memory: Memory | None = None
    for _ in range(int(getattr(agent.config, "context", 1)) - 1 + int(getattr(agent.config, "chunk", 1))):
        _, memory = agent.act(observation, goal, memory)
    return memory


@torch.no_grad()
def measure_acting(agent: Agent, batch: int, seconds: float, ceilings: Ceilings) -> BenchRow:
    """One step of acting with a full window, against the reference without stage 1's cache where there is one.

    On CUDA in graphs, with the eager time beside it; the reference is eager, and so is what it is compared with.
    """
    device = next(agent.parameters()).device
    agent.eval()
    generator = torch.Generator().manual_seed(0)
    shape = (batch, agent.spec.observation_dim)
    observation = torch.randn(shape, generator=generator).to(device)
    goal = torch.randn(shape, generator=generator).to(device)
    common.reset_peak(device)
    memory = full_memory(agent, observation, goal)

    def act() -> Tensor:
        return agent.act(observation, goal, memory)[0]

    read = sum(x.nbytes for x in (observation, goal, *(memory or {}).values()))
    flops, read = common.count_flops(act), read + common.parameter_bytes(agent, act)
    calls: dict[str, Callable[[], object]] = {"act": act, "linear": linear_floor(agent, act)}
    if device.type == "cuda":  # as evaluation acts
        policy = GraphedPolicy(agent)
        calls |= {"act": lambda: policy(observation, goal, memory), "eager": act}
    extra: dict[str, Any] = {"flops": flops, "bytes": read}
    decoder = getattr(agent, "decoder", None)
    if isinstance(decoder, nn.Module):
        slow = Recompute(decoder)

        def act_twice() -> Tensor:
            agent.decoder = slow
            try:
                return act()
            finally:
                agent.decoder = decoder

        difference = float((act() - act_twice()).abs().max())
        if slow.again:
            calls["recompute"] = act_twice
            extra["recompute_difference"] = difference
    times = dict(zip(calls, common.interleave(list(calls.values()), seconds, device)))
    medians = {name: float(np.median(values)) for name, values in times.items()}
    extra |= {f"{name}_ms": value for name, value in medians.items() if name != "act"}
    extra |= {"p95_ms": float(np.quantile(times["act"], 0.95)), "calls": len(times["act"])}
    if "recompute" in medians:
        extra["speedup"] = medians["recompute"] / medians.get("eager", medians["act"])
    return BenchRow("infer", batch, medians["act"], ceilings.floor_ms(flops, read), common.peak_gb(device), extra)


def infer(
    *,
    agent: str = "qhyer",
    dataset: str = "cube-single-play",
    preset: str = "paper",
    batch: tuple[int, ...] = (1, 250),
    device: str = "cpu",
    threads: int = 1,
    seconds: float = 10.0,
    out: Path | None = None,
) -> int:
    """Measure acting: one step with a full window, with random weights; no dataset is needed.

    Args:
        agent: the agent's name
        dataset: the dataset whose sizes and preset are used
        preset: the agent's preset
        batch: numbers of episodes that act at once
        device: cpu, cuda, or auto
        threads: threads of torch
        seconds: how long to measure each batch size; five steps of each are taken all the same
        out: a JSON file to write
    """
    common.check_out(out, "infer")
    device = resolve_device(device)
    common.check_amounts(seconds, batch=batch)
    registered = registry.get(dataset)
    config, _ = presets.resolve(agent, preset, registered.name)
    policy = runs.build_agent(agent, config, common.made_up_spec(registered), seed=0).to(device)
    with common.using_threads(threads):
        ceilings = Ceilings.measure(torch.device(device), seconds=min(1.0, seconds))
        rows = []
        for size in batch:
            with common.measuring(f"acting, {size} at once"):
                rows.append(measure_acting(policy, size, seconds, ceilings))
        facts = {
            "agent": agent,
            "dataset": registered.name,
            "preset": preset,
            "parameters": sum(p.numel() for p in policy.parameters()),
            **common.machine(device),
            **ceilings.facts(),
        }
    columns = {
        "p95_ms": "p95",
        "linear_ms": "linear",
        "eager_ms": "eager",
        "recompute_ms": "recomp.",
        "speedup": "saving",
    }
    common.show(
        f"one step of acting, {agent} {preset}, {registered.name}, full window; {facts['hardware']}",
        rows,
        {key: heading for key, heading in columns.items() if any(key in row.extra for row in rows)},
    )
    common.note(
        f"floor: operations at {facts['matrix_tflops']:.3g} TFLOP/s or bytes at {facts['copy_gb_per_s']:.3g} GB/s, "
        "both measured here; linear: the linear layers alone"
    )
    if any("speedup" in row.extra for row in rows):
        common.note("recomp.: the second stage passes over the whole window again instead of using the cache")
    common.write(out, "infer", facts, rows)
    return 0
