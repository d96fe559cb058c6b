"""`qhyer bench infer | data`: how fast, and how far from what the machine could do.

A benchmark fills `BenchRow`s. Rivals take turns within one run, so that a machine whose speed drifts treats them alike;
times are medians over single calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer import envs, presets, runs
from qhyer.agent import Agent, Memory
from qhyer.data import registry
from qhyer.data.episodes import DataSpec
from qhyer.errors import UserError
from qhyer.runs import resolve_device
from qhyer.storage import write_json

WARMUP = 3
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class BenchRow:
    """One measurement."""

    name: str
    batch: int
    ms: float
    """median of one call, in milliseconds"""
    floor_ms: float | None = None
    """what the unavoidable part of the work takes, measured in the same run"""
    gb: float | None = None
    """CUDA: peak of allocated memory; CPU: peak resident memory of the whole process"""
    extra: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------ measuring


def interleave(
    calls: Sequence[Callable[[], object]], seconds: float, device: torch.device, least: int = LEAST_ROUNDS
) -> list[np.ndarray]:
    """Calls them in turn for about this long -> per call, its times in milliseconds."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(WARMUP):
        for call in calls:
            call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < least:
        for call, record in zip(calls, times):
            _synchronize(device)
            begun = time.perf_counter()
            call()
            _synchronize(device)
            record.append(1e3 * (time.perf_counter() - begun))
    return [np.asarray(record) for record in times]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    if count < 1:
        raise UserError(f"--threads must be at least 1, not {count}")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


# ----------------------------------------------------------------------------------------------------- bench infer


def made_up_spec(dataset: registry.Dataset) -> DataSpec:
    """The sizes of a dataset, from its environment, with no data at hand."""
    env = envs.make(dataset.environment)
    dim, actions = env.observation_space.shape[0], env.action_space.shape[0]
    env.close()
    return DataSpec(dim, actions, dataset.goal_indices, (0.0,) * dim, (1.0,) * dim)


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


def full_memory(agent: Agent, observation: Tensor, goal: Tensor, steps: int) -> Memory | None:
    """What the agent remembers once its window is full."""
    memory: Memory | None = None
    for _ in range(steps):
        _, memory = agent.act(observation, goal, memory)
    return memory


@torch.no_grad()
def measure_acting(agent: Agent, batch: int, seconds: float) -> BenchRow:
    """One step of acting with a full window, against the reference without stage 1's cache where there is one."""
    device = next(agent.parameters()).device
    agent.eval()
    generator = torch.Generator().manual_seed(0)
    shape = (batch, agent.spec.observation_dim)
    observation = torch.randn(shape, generator=generator).to(device)
    goal = torch.randn(shape, generator=generator).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    memory = full_memory(agent, observation, goal, int(getattr(agent.config, "context", 1)))

    def act() -> Tensor:
        return agent.act(observation, goal, memory)[0]

    calls: list[Callable[[], object]] = [act, linear_floor(agent, act)]
    extra: dict[str, Any] = {}
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
            calls.append(act_twice)
            extra["recompute_difference"] = difference
    fast, floor, *reference = interleave(calls, seconds, device)
    extra |= {"p95_ms": float(np.quantile(fast, 0.95)), "calls": len(fast)}
    for times in reference:
        extra |= {"recompute_ms": float(np.median(times)), "speedup": float(np.median(times) / np.median(fast))}
    return BenchRow("infer", batch, float(np.median(fast)), float(np.median(floor)), peak_gb(device), extra)


def infer(
    *,
    agent: str = "qhyer",
    dataset: str = "cube-single-play",
    preset: str = "paper",
    batch: tuple[int, ...] = (1, 50),
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
        seconds: how long to measure each batch size
        out: a JSON file to write
    """
    device = resolve_device(device)
    for size in batch:
        if size < 1:
            raise UserError(f"--batch must be at least 1, not {size}")
    registered = registry.get(dataset)
    config, _ = presets.resolve(agent, preset, registered.name)
    policy = runs.build_agent(agent, config, made_up_spec(registered), seed=0).to(device)
    with using_threads(threads):
        rows = [measure_acting(policy, size, seconds) for size in batch]
        facts = {
            "agent": agent,
            "dataset": registered.name,
            "preset": preset,
            "parameters": sum(p.numel() for p in policy.parameters()),
            **_machine(device),
        }
    table = _table(f"one step of acting, {agent} {preset}, {registered.name}, full window; {facts['hardware']}")
    for heading in ("batch", "median ms", "p95 ms", "linear layers alone", "recomputed", "saving", "peak GB"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row.batch),
            _ms(row.ms),
            _ms(row.extra["p95_ms"]),
            _ms(row.floor_ms),
            _ms(row.extra.get("recompute_ms")),
            f"{row.extra['speedup']:.2f} x" if "speedup" in row.extra else "",
            f"{row.gb:.2f}" if row.gb is not None else "",
        )
    console = Console(highlight=False)
    console.print(table)
    if any("speedup" in row.extra for row in rows):
        console.print("recomputed: the second stage passes over the whole window again instead of using the cache")
    _write(out, "infer", facts, rows)
    return 0


# ------------------------------------------------------------------------------------------------------ bench data


def data(
    *,
    dataset: str = "cube-single-play",
    episodes: int = 3,
    rows: int | None = None,
    out: Path | None = None,
) -> int:
    """Measure data generation in one process, against replaying the recorded actions in the bare environment.

    Args:
        dataset: a manipulation dataset
        episodes: episodes to time, after one to warm up
        rows: rows per episode; the official number if not given
        out: a JSON file to write
    """
    from qhyer.data.generate import measure_rate

    registered = registry.get(dataset)
    rate = measure_rate(registered, episodes, rows)
    row = BenchRow(
        "data",
        batch=1,
        ms=1e3 / rate["generation_steps_per_s"],
        floor_ms=1e3 / rate["replay_steps_per_s"],
        gb=peak_gb(torch.device("cpu")),
        extra=rate,
    )
    facts = {"dataset": registered.name, **_machine("cpu")}
    table = _table(f"generating {registered.name}, one process; {platform.machine()} CPU")
    for heading in ("episodes", "env steps", "generated steps/s", "replayed steps/s", "of replay"):
        table.add_column(heading, justify="right")
    speeds = (f"{rate[key]:.0f}" for key in ("generation_steps_per_s", "replay_steps_per_s"))
    table.add_row(str(rate["episodes"]), f"{rate['steps']:,}", *speeds, f"{100 * rate['ratio']:.0f} %")
    Console(highlight=False).print(table)
    _write(out, "data", facts, [row])
    return 0


# ------------------------------------------------------------------------------------------------------- reporting


def _machine(device: str) -> dict[str, Any]:
    return {
        "device": device,
        "hardware": runs.hardware(device, torch.get_num_threads()),
        "threads": torch.get_num_threads(),
        "versions": runs.versions(),
    }


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def _ms(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return ""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{max(0, min(digits, 3))}f}"


def _write(out: Path | None, name: str, facts: dict[str, Any], rows: Sequence[BenchRow]) -> None:
    if out is None:
        return
    write_json(out, {"bench": name, **facts, "rows": [dataclasses.asdict(row) for row in rows]})
    Console(highlight=False).print(f"written: {out}", markup=False, soft_wrap=True)
