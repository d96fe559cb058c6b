"""`qhyer bench backbones`: one update on each backbone, all else equal; and `qhyer bench agents`: one of each agent.

backbones: Decision Transformer's head, tokens, loss and optimiser on every backbone of `nn/backbones.py`, with the same
width, layers, heads, context and batch, through the trainer's own update. An agent stands for its backbone; what is
special to some of them (DMixer's routing loss, GDT's wider head) is part of the price.

agents: each with its preset's own sizes and batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from qhyer import agents, presets, runs
from qhyer.agent import AgentConfig
from qhyer.bench import common
from qhyer.bench.common import BenchRow, Ceilings
from qhyer.bench.train import Training, measure_updates
from qhyer.data import registry
from qhyer.errors import require
from qhyer.train import torch_settings

AGENT_OF = {
    "gpt": "dt",
    "graph": "gdt",
    "convformer": "dc",
    "mamba": "dmamba",
    "long_short": "lsdt",
    "routed": "dmixer",
    "hybrid": "hdt",
}
"""name in `nn.backbones.BACKBONES` -> the return-conditioned agent that has it"""


def compare(
    bench: str,
    configs: Mapping[str, tuple[str, AgentConfig]],
    dataset: str,
    precision: Literal["fp32", "bf16"] | None,
    device: str,
    threads: int,
    seconds: float,
    out: Path | None,
) -> int:
    """One row for each name -> (agent, its configuration), on made-up data in the sizes of a dataset."""
    common.check_out(out, bench)
    device = runs.resolve_device(device)
    place = torch.device(device)
    require(threads >= 1, f"--threads must be at least 1, not {threads}")
    precision = precision or ("bf16" if place.type == "cuda" else "fp32")
    registered = registry.get(dataset)
    episodes = common.made_up_episodes(registered, 100, place)
    rows: list[BenchRow] = []
    with torch_settings(threads, precision, device):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        ceilings = Ceilings.measure(place, dtype, min(1.0, seconds))
        for name, (agent, config) in configs.items():

            def make(agent: str = agent, config: AgentConfig = config, **options: Any) -> Training:
                return Training(agent, config, episodes, precision, **options)

            row = measure_updates(make, 1, seconds, ceilings, place)
            parameters = sum(p.numel() for p in runs.build_agent(agent, config, episodes.spec(), 0).parameters())
            row.extra.update(agent=agent, parameters=parameters, million=parameters / 1e6)
            rows.append(dataclasses.replace(row, name=name))
        common.release(place)
        facts = {"dataset": registered.name, "precision": precision, **common.machine(device), **ceilings.facts()}
    first = rows[0].ms
    for row in rows:
        row.extra["times_first"] = row.ms / first
    columns = {"million": "M weights", "times_first": f"x {rows[0].name}", "eager_ms": "eager", "plain_ms": "plain"}
    common.show(
        f"one update, sizes of {registered.name}, {precision}; {facts['hardware']}",
        rows,
        {key: heading for key, heading in columns.items() if any(key in row.extra for row in rows)},
    )
    for path in sorted({row.extra["path"] for row in rows}):
        common.note(f"updates run: {path}")
    common.write(out, bench, facts, rows)
    return 0


def backbones(
    *,
    names: tuple[str, ...] = tuple(AGENT_OF),
    dataset: str = "maze2d-umaze",
    width: int = 128,
    layers: int = 3,
    heads: int = 4,
    context: int = 20,
    batch: int = 64,
    precision: Literal["fp32", "bf16"] | None = None,
    device: str = "auto",
    threads: int = 1,
    seconds: float = 3.0,
    out: Path | None = None,
) -> int:
    """Measure one update on each backbone, all else equal; no dataset is needed.

    Args:
        names: gpt, graph, convformer, mamba, long_short, routed, hybrid
        dataset: the dataset whose sizes are used
        width: of a token
        layers: blocks
        heads: of attention
        context: steps of a window; a step is three tokens
        batch: windows
        precision: fp32 or bf16; when not given, bf16 on CUDA and fp32 on a CPU
        device: cpu, cuda, or auto
        threads: threads of torch
        seconds: how long to measure each row
        out: a JSON file to write
    """
    unknown = [name for name in names if name not in AGENT_OF]
    require(not unknown, f"no backbone is called {', '.join(unknown)} (there are: {', '.join(AGENT_OF)})")
    require(min(width, layers, heads, context, batch) >= 1, "sizes must be at least 1")
    name = registry.get(dataset).name
    sizes = dict(width=width, layers=layers, heads=heads, context=context, batch_size=batch, dropout=0.1)
    configs = {key: (AGENT_OF[key], _sized(AGENT_OF[key], name, sizes)) for key in names}
    return compare("backbones", configs, dataset, precision, device, threads, seconds, out)


def every_agent(
    *,
    names: tuple[str, ...] = (),
    dataset: str = "cube-single-play",
    preset: str = "paper",
    precision: Literal["fp32", "bf16"] | None = None,
    device: str = "auto",
    threads: int = 1,
    seconds: float = 3.0,
    out: Path | None = None,
) -> int:
    """Measure one update of each agent, at its preset's sizes and batch; no dataset is needed.

    Args:
        names: agents; all when not given
        dataset: the dataset whose sizes and presets are used
        preset: the agents' preset
        precision: fp32 or bf16; when not given, bf16 on CUDA and fp32 on a CPU
        device: cpu, cuda, or auto
        threads: threads of torch
        seconds: how long to measure each row
        out: a JSON file to write
    """
    name = registry.get(dataset).name
    wanted: Sequence[str] = names or agents.names()
    configs = {agent: (agent, presets.resolve(agent, preset, name)[0]) for agent in wanted}
    return compare("agents", configs, dataset, precision, device, threads, seconds, out)


def _sized(agent: str, dataset: str, sizes: Mapping[str, Any]) -> AgentConfig:
    """The agent's preset in these sizes, as far as it has them; rewards in hindsight, since made-up data have none."""
    config, _ = presets.resolve(agent, "paper", dataset)
    fields = {field.name for field in dataclasses.fields(config)}
    values = {**sizes, "goal": "concat", "dataset_rewards": False}
    return dataclasses.replace(config, **{key: value for key, value in values.items() if key in fields})
