"""`qhyer bench agents`: one update of each agent, with its preset's own sizes and batch, on made-up data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qhyer import agents, presets, runs
from qhyer.agent import AgentConfig
from qhyer.bench import common
from qhyer.bench.common import BenchRow, Ceilings
from qhyer.bench.train import Training, measure_updates
from qhyer.config import Precision
from qhyer.data import registry
from qhyer.errors import require
from qhyer.train import torch_settings


def compare(
    bench: str,
    configs: Mapping[str, tuple[str, AgentConfig]],
    dataset: str,
    precision: Precision | None,
    device: str,
    threads: int,
    seconds: float,
    out: Path | None,
    compile: bool = False,
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
                return Training(agent, config, episodes, precision, **{"compile": compile, **options})

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


def every_agent(
    *,
    names: tuple[str, ...] = (),
    dataset: str = "cube-single-play",
    preset: str = "paper",
    precision: Precision | None = None,
    device: str = "auto",
    threads: int = 1,
    seconds: float = 3.0,
    compile: bool = False,
    out: Path | None = None,
) -> int:
    """Measure one update of each agent, at its preset's sizes and batch; no dataset is needed.

    Args:
        names: agents; all when not given
        dataset: the dataset whose sizes and presets are used
        preset: the agents' preset
        precision: fp32, tf32 or bf16; when not given, bf16 on CUDA and fp32 on a CPU
        device: cpu, cuda, or auto
        threads: threads of torch
        seconds: how long to measure each row
        compile: with losses fused by torch's compiler, as `qhyer train --compile` has them; eager and plain are without
        out: a JSON file to write
    """
    name = registry.get(dataset).name
    wanted: Sequence[str] = names or agents.names()
    configs = {agent: (agent, presets.resolve(agent, preset, name)[0]) for agent in wanted}
    return compare("agents", configs, dataset, precision, device, threads, seconds, out, compile)
