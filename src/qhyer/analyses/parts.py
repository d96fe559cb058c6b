"""Which parts of its goals does a policy bring about, and which does it disturb?

Success is all or nothing; a policy that opens the drawer and never finds the cube has none. Of the rollouts that an
evaluation recorded (`qhyer eval RUN --record 10`), each goal coordinate at the start and at the end of an episode, seen
from the goal in standard deviations of the data:

asked      the coordinate is not where the goal has it when the episode starts: it differs by more than 0.5
done       shares of episodes in which an asked coordinate is there at the end (within 0.5)
passed     shares in which it has been there at some step
kept       of the coordinates that were right from the start, the share that still is at the end

0.5 is a rule for all data, not an environment's own: success may want more or less.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qhyer import runs
from qhyer.analyses import _output
from qhyer.config import from_dict
from qhyer.data.episodes import DataSpec
from qhyer.errors import UserError
from qhyer.report.collect import load_arrays, read_run
from qhyer.storage import write_json

NEAR = 0.5  # standard deviations


def gaps(observations: np.ndarray, goal: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Rows (T, d_s) of one episode -> how far each goal coordinate is from the goal (T, d_g), in standard units."""
    at = list(spec.goal_indices)
    return np.abs(observations[:, at] - goal[at]) / np.asarray(spec.observation_std)[at]


def of_task(episodes: list[np.ndarray]) -> dict[str, Any]:
    """The gaps of a task's episodes, (T, d_g) each -> asked (d_g,), done and passed of the asked, kept of the rest."""
    start, end = (np.stack([gap[row] for gap in episodes]) for row in (0, -1))  # (n, d_g)
    lowest = np.stack([gap.min(axis=0) for gap in episodes])
    asked = start > NEAR

    def share(true: np.ndarray, among: np.ndarray) -> list[float | None]:
        return [float(t[a].mean()) if a.any() else None for t, a in zip(true.T, among.T)]

    kept = (end <= NEAR)[~asked]
    return {
        "episodes": len(episodes),
        "asked": asked.mean(axis=0).tolist(),
        "done": share(end <= NEAR, asked),
        "passed": share(lowest <= NEAR, asked),
        "kept": float(kept.mean()) if kept.size else None,
    }


def table(tasks: Mapping[str, Mapping[str, Any]], columns: list[int]) -> tuple[list[str], list[list[str]]]:
    """A line for each task and coordinate that it mostly asks for; observation columns as names."""
    lines = []
    for task, found in tasks.items():
        head = [task, f"{100 * found['success']:.0f}", "–" if found["kept"] is None else f"{100 * found['kept']:.0f}"]
        for place, column in enumerate(columns):
            if found["asked"][place] > 0.5:
                done, passed = found["done"][place], found["passed"][place]
                lines.append([*head, str(column), f"{100 * done:.0f}", f"{100 * passed:.0f}"])
                head = ["", "", ""]
        if head[0]:
            lines.append([*head, "none", "", ""])
    return ["task", "success %", "kept %", "asked: observation", "done %", "passed %"], lines


def run(run: Path, *, device: str = "cpu", data: Path | None = None) -> Path:
    recording = read_run(run).rollouts
    if recording is None:
        raise UserError(f"{run} has no recorded rollouts; `qhyer eval {run} --record 10 --overwrite` makes some")
    if data is not None:
        raise UserError("parts looks at a run's own rollouts, and at no data: leave out --data")
    spec = from_dict(DataSpec, runs.read(run)["spec"])
    needed = ("task", "success", "length", "observations", "goals")
    arrays = load_arrays(recording, needed)
    by_task: dict[int, list[np.ndarray]] = {}
    won: dict[int, list[float]] = {}
    for task, success, length, rows, goal in zip(*(arrays[name] for name in needed)):
        by_task.setdefault(int(task), []).append(gaps(rows[: int(length) + 1], goal, spec))
        won.setdefault(int(task), []).append(float(success))
    tasks = {str(task): {"success": float(np.mean(won[task])), **of_task(by_task[task])} for task in sorted(by_task)}
    columns = list(spec.goal_indices)
    path = Path(run) / "analyses" / "parts.json"
    write_json(
        path, {"analysis": "parts", "step": int(recording.stem), "near": NEAR, "columns": columns, "tasks": tasks}
    )
    _output.show(*table(tasks, columns))
    return path
