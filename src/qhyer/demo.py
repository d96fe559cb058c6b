"""The demo: from nothing to a trained policy, a baseline beside it and a report, in minutes on two cores.

Everything it does are ordinary commands of this project; what is finished is not done again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from qhyer.errors import UserError

DATASET = "pointmaze-medium-navigate-v0"
ROWS = 300_000
"""rows of data to generate when the number of episodes is not given"""


def demo(
    *,
    out: Path = Path("demo"),
    dataset: str = DATASET,
    episodes: int | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> int:
    """Generate a small maze dataset, train QHyer and GCBC on it, evaluate both, and write a report.

    Args:
        out: folder for data, runs and the report
        dataset: pointmaze-medium-navigate or pointmaze-medium-stitch (or another point maze, untuned)
        episodes: training episodes to generate; enough for about 300,000 rows when not given
        seed: seed of the data and of both trainings
        workers: processes for data and evaluation; one per core when not given
    """
    from qhyer import runs
    from qhyer.analyses import goal_density
    from qhyer.checkpoint import steps
    from qhyer.data import registry
    from qhyer.data.generate.runner import generate
    from qhyer.presets import resolve
    from qhyer.records import read_rows
    from qhyer.report.commands import report

    begun = time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each training has a core to itself
    console = Console(highlight=False)
    registered = registry.get(dataset)
    if registered.family != "pointmaze":
        raise UserError(f"the demo is made for point mazes, not for {registered.name}")
    episodes = episodes or ROWS // (registered.rows - 1)
    folder = Path(out) / registered.name.removesuffix("-v0")

    console.print(f"[bold]1. data[/bold]  {registered.name}, {episodes} episodes")
    data = generate(registered, out=folder / f"data-s{seed}", episodes=episodes, seed=seed, workers=workers)

    console.print("[bold]2. training[/bold]  QHyer here, GCBC beside it on another core")
    agents = ("qhyer", "gcbc")
    run_of = {agent: folder / "runs" / f"{agent}-s{seed}" for agent in agents}

    def command(agent: str) -> list[str]:
        base = [sys.executable, "-m", "qhyer", "train", agent, str(data), "--preset", "demo"]
        base += ["--seed", str(seed), "--out", str(run_of[agent]), "--device", "cpu"]
        return [*base, "--save-every", "500", "--resume"]

    (folder / "runs").mkdir(parents=True, exist_ok=True)
    with open(folder / "runs" / "gcbc.log", "w", encoding="utf-8") as log:
        beside = subprocess.Popen(command("gcbc"), stdout=log, stderr=subprocess.STDOUT)
        try:
            subprocess.run(command("qhyer"), check=False)
            beside.wait()
        finally:
            if beside.poll() is None:
                beside.terminate()
    for agent in agents:
        wanted = resolve(agent, "demo", registered.name)[0].steps
        if not steps(run_of[agent] / "checkpoints") or steps(run_of[agent] / "checkpoints")[-1] < wanted:
            raise UserError(
                f"training {agent} stopped early; run the demo again to go on (GCBC's log is in {folder}/runs)"
            )

    console.print("[bold]3. evaluation[/bold]  5 tasks, 50 episodes each")
    for agent in agents:
        last = steps(run_of[agent] / "checkpoints")[-1]
        if sum(row.step == last for row in read_rows(run_of[agent] / "episodes.csv")) == 250:
            console.print(f"{agent}: evaluated already")
        else:
            runs.evaluate_run(run_of[agent], workers=workers)
    goal_density.run(run_of["qhyer"])

    console.print("[bold]4. report[/bold]")
    report(tuple(run_of.values()), out=folder / "report")
    console.print(f"{time.perf_counter() - begun:.0f} seconds in all")
    return 0
