"""`qhyer bench agents`: one update of each agent, with its preset's own sizes and batch, on made-up data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

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
    stack: Sequence[int] = (1,),
) -> int:
    """One row for each name -> (agent, its configuration), on made-up data in the sizes of a dataset; and one for each
    number of seeds in `stack`, where the agent can be stacked."""
    common.check_out(out, bench)
    device = runs.resolve_device(device)
    place = torch.device(device)
    require(threads >= 1, f"--threads must be at least 1, not {threads}")
    common.check_amounts(seconds, stack=stack)
    precision = precision or ("bf16" if place.type == "cuda" else "fp32")
    registered = registry.get(dataset)
    episodes = common.made_up_episodes(registered, 100, place)
    rows: list[BenchRow] = []
    with torch_settings(threads, precision, device):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        ceilings = Ceilings.measure(place, dtype, min(1.0, seconds))
        for (name, (agent, config)), size in itertools.product(configs.items(), stack):
            if size > 1 and not agents.load(agent).stackable:
                common.note(f"{name}: seeds of this agent cannot be stacked")
                continue
            make = partial(Training, agent, config, episodes, precision, compile=compile, stack=size)
            with common.measuring(name if size == 1 else f"{name}, {size} seeds stacked"):
                row = measure_updates(make, 1, seconds, ceilings, place, rivals=size == 1)
            parameters = sum(p.numel() for p in runs.build_agent(agent, config, episodes.spec(), 0).parameters())
            row.extra.update(agent=agent, parameters=parameters, million=parameters / 1e6)
            row.extra.update(stacked=size, seed_ms=row.ms / size)
            rows.append(dataclasses.replace(row, name=name if size == 1 else f"{name}, {size} seeds"))
        common.release(place)
        facts = {"dataset": registered.name, "precision": precision, **common.machine(device), **ceilings.facts()}
    able = ", ".join(name for name in agents.names() if agents.load(name).stackable)
    require(bool(rows), f"nothing was measured: seeds can be stacked of {able}")
    first = rows[0].ms
    for row in rows:
        row.extra["times_first"] = row.ms / first
    columns = {"seed_ms": "per seed"} if any(size > 1 for size in stack) else {}
    columns |= {"million": "M weights", "times_first": f"x {rows[0].name}", "eager_ms": "eager", "plain_ms": "plain"}
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
    stack: tuple[int, ...] = (1,),
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
        stack: numbers of seeds in one update, as `qhyer train --seeds ... --together stacked` has them; a row for each
        out: a JSON file to write
    """
    name = registry.get(dataset).name
    wanted: Sequence[str] = names or agents.names()
    configs = {agent: (agent, presets.resolve(agent, preset, name)[0]) for agent in wanted}
    return compare("agents", configs, dataset, precision, device, threads, seconds, out, compile, stack)
