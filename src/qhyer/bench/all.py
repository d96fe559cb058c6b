"""`qhyer bench all`: the whole table in one file.

A plain list of rows, each with its own facts. Rows that are measured again take the place of those in the file; others,
also those measured elsewhere (`common.add_row`), stay.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qhyer import presets, runs
from qhyer.bench import common
from qhyer.bench.eval import evaluation
from qhyer.bench.infer import infer
from qhyer.bench.scan import scan
from qhyer.bench.train import updates
from qhyer.data import registry
from qhyer.errors import UserError


def everything(
    *,
    out: Path = Path("bench.json"),
    agent: str = "qhyer",
    dataset: str = "cube-single-play",
    preset: str = "paper",
    batch: tuple[int, ...] = (256, 1024),
    seeds: int = 4,
    acting: tuple[int, ...] = (1, 250),
    episodes: int = 50,
    device: str = "auto",
    workers: int | None = None,
    seconds: float = 5.0,
) -> int:
    """Measure an update, several seeds together, the scan, acting and an evaluation; no dataset is needed.

    Args:
        out: the JSON file, a list of rows; those that are there and not measured now are kept
        agent: the agent's name
        dataset: the dataset whose environment, sizes and preset are used
        preset: the agent's preset
        batch: batch sizes of an update; several seeds are measured with the first
        seeds: seeds trained side by side
        acting: numbers of episodes that act at once
        episodes: evaluation episodes per task
        device: cpu, cuda, or auto
        workers: processes that step environments; one per core when not given
        seconds: how long to measure each row
    """
    common.check_out(out, "all")
    device = runs.resolve_device(device)
    processes = (1 if workers is None else workers,)
    common.check_amounts(seconds, batch=batch, seeds=(seeds,), acting=acting, episodes=(episodes,), workers=processes)
    presets.resolve(agent, preset, registry.get(dataset).name)  # a name that is wrong would be so in every part
    what: dict[str, Any] = {"agent": agent, "dataset": dataset, "preset": preset, "device": device}
    # Updates last: counting their kernels attaches a profiler, which what follows would feel.
    parts: dict[str, Callable[[], int]] = {
        "infer": lambda: infer(**what, batch=acting, seconds=seconds),
        "eval": lambda: evaluation(**what, episodes=episodes, workers=workers),
        "scan": lambda: scan(device=device, seconds=seconds),
        "seeds": lambda: updates(**what, batch=batch[:1], seeds=(seeds,), seconds=seconds, kernels=False),
        "update": lambda: updates(**what, batch=batch, seconds=seconds),
    }
    failed: dict[str, str] = {}
    with common.writing_into(out):
        for name, part in parts.items():
            try:
                part()
            except UserError as error:  # the others are worth having
                failed[name] = str(error)
                common.note(f"{name}: {error}")
    common.note(f"written: {out}, {len(common.read_rows(out))} rows")
    if failed:
        raise UserError(f"not measured: {', '.join(failed)} (see above)")
    return 0
