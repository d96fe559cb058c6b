"""`qhyer bench data`: generation in one process against replaying the recorded actions in the bare environment."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from qhyer.bench.common import BenchRow, check_out, machine, peak_gb, show, write
from qhyer.data import registry


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

    check_out(out, "data")
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
    show(
        f"generating {registered.name}, time of a step, one process; floor: replay; {platform.machine()} CPU",
        [row],
        {"steps": "env steps", "generation_steps_per_s": "generated steps/s", "replay_steps_per_s": "replayed steps/s"},
        time="mean ms",
    )
    write(out, "data", {"dataset": registered.name, **machine("cpu")}, [row])
    return 0
