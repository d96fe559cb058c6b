"""From folders to rows: every number in a report is a query over the episode rows gathered here.

A run that cannot be read is set aside with a sentence that names the file and the cure. The other runs'
results are not lost with it.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from qhyer.errors import UserError
from qhyer.storage import TEMPORARY, read_sealed_json

COLUMNS = (
    "run",
    "agent",
    "preset",
    "dataset",
    "seed",
    "step",
    "task",
    "episode",
    "env_seed",
    "success",
    "length",
    "seconds",
)
OPTIONAL = ("return", "environment")  # empty, or absent, where success is all there is, and where a run is at home
ASIDE = "exploration"  # runs kept to show how a setting was found: counted only where this folder itself is named
NEEDED = (
    "agent",
    "preset",
    "dataset",
    "seed",
)  # what run.json must say for its score to have a place in a table


@dataclass(frozen=True)
class Episode:
    """One evaluation episode: the atom of every result."""

    run: str
    agent: str
    preset: str
    dataset: str
    seed: int
    step: int
    task: str
    episode: int
    env_seed: str  # kept as written: a number for us, never computed with
    success: float
    length: int
    seconds: float
    returned: float = math.nan  # the column `return`: undiscounted, where the task has rewards of its own
    environment: str = ""  # where that is another than the run's own


@dataclass(frozen=True)
class Run:
    """One training run: what it says of itself, and what was measured."""

    path: Path
    name: str
    agent: str
    preset: str
    dataset: str
    seed: int
    info: Mapping[str, Any] = field(default_factory=dict)  # run.json; empty for rows that came from a bare CSV
    episodes: tuple[Episode, ...] = ()
    metrics: tuple[Mapping[str, Any], ...] = ()
    timings: tuple[Mapping[str, Any], ...] = ()
    rollouts: Path | None = None  # the last step's recording
    density: Path | None = None

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps at which this run was evaluated."""
        return tuple(sorted({row.step for row in self.episodes}))

    def at(self, step: int) -> tuple[Episode, ...]:
        return tuple(row for row in self.episodes if row.step == step)

    @cached_property
    def last(self) -> tuple[Episode, ...]:
        """The score: the rows of the last evaluation."""
        return self.at(self.steps[-1]) if self.steps else ()

    @property
    def elsewhere(self) -> str:
        """The environment of the last evaluation, where it is not the run's own."""
        there = self.last[0].environment if self.last else ""
        return "" if there == self.info.get("environment") else there

    @property
    def variant(self) -> str:
        """What a sweep called it beside agent and preset: its folder is AGENT-PRESET[-VARIANT]-sSEED-HASH.

        The rows of an exported model are no seed of the runs it came from.
        """
        model = self.info.get("model")
        if isinstance(model, Mapping):
            return f"model {model.get('name')}, {model.get('dtype')}"
        about = re.escape(f"{self.agent}-{self.preset}")
        found = re.fullmatch(rf"{about}-(.+)-s{self.seed}-[0-9a-f]{{8}}(?: \(\d+\))?", self.name)
        return found[1] if found else ""

    @property
    def seconds(self) -> float | None:
        """Wall-clock of training, where it was recorded."""
        values = [row["seconds"] for row in self.timings if isinstance(row.get("seconds"), int | float)]
        return float(max(values)) if values else None


@dataclass(frozen=True)
class Table:
    """The runs that could be read, and a sentence for each thing that could not."""

    runs: tuple[Run, ...]
    problems: tuple[str, ...] = ()

    @property
    def episodes(self) -> list[Episode]:
        return [row for run in self.runs for row in run.episodes]


def natural(text: str) -> tuple[Any, ...]:
    """A sort key under which task 10 follows task 9."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part)


def read_episodes(path: Path) -> list[Episode]:
    """All rows of one `episodes.csv`. One bad row condemns the file: a rate over a part would be a lie."""
    advice = "evaluate the run again with `qhyer eval`, or leave this file out of the report"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); {advice}") from error
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise UserError(f"{path} is no table of episodes: it lacks the column {', '.join(missing)}; {advice}")
    rows: list[Episode] = []
    seen: set[tuple[Any, ...]] = set()
    for line in reader:
        try:
            row = Episode(
                run=line["run"],
                agent=line["agent"],
                preset=line["preset"],
                dataset=line["dataset"],
                seed=int(line["seed"]),
                step=int(line["step"]),
                task=line["task"],
                episode=int(line["episode"]),
                env_seed=line["env_seed"],
                success=_success(line["success"]),
                length=int(line["length"]),
                seconds=float(line["seconds"]),
                returned=float(line.get("return") or math.nan),
                environment=line.get("environment") or "",
            )
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}, line {reader.line_num}: {error}; {advice}") from error
        key = (row.run, row.agent, row.preset, row.dataset, row.seed, row.step, row.task, row.episode)
        if key in seen:
            raise UserError(
                f"{path}, line {reader.line_num}: task {row.task}, episode {row.episode} at step {row.step} "
                f"is there twice, so its success would count double; {advice}"
            )
        seen.add(key)
        rows.append(row)
    return rows


def _success(text: str) -> float:
    value = {"true": 1.0, "false": 0.0}.get(text.strip().lower())
    value = float(text) if value is None else value
    if value not in (0.0, 1.0):
        raise ValueError(f"success must be 0 or 1, not {text!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    advice = "restore the file from the run that wrote it, or leave this folder out of the report"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON ({error}); {advice}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} should hold one JSON object; {advice}")
    return read_sealed_json(path) if "seal" in values else values


def _read_lines(path: Path, problems: list[str]) -> tuple[dict[str, Any], ...]:
    """A JSONL file up to its first bad line: a run still going, or killed, may end in half a line."""
    if not path.is_file():
        return ()
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path} cannot be read ({error}); its curve is left out")
        return ()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            problems.append(f"{path}, line {number} is not a logged step; the curve stops there")
            break
        rows.append(row)
    return tuple(rows)


def _last_recording(folder: Path) -> Path | None:
    numbered = [path for path in folder.glob("*.npz") if path.stem.isdigit()] if folder.is_dir() else []
    return max(numbered, key=lambda path: int(path.stem), default=None)


def read_run(folder: Path, problems: list[str] | None = None) -> Run:
    """One run folder. Raises `UserError` when run.json or episodes.csv cannot be trusted; what is optional
    and damaged is only noted in `problems`."""
    problems = [] if problems is None else problems
    path = folder / "run.json"
    if not path.is_file():
        raise UserError(f"{folder} has no run.json: it is not a run; give the folder that `qhyer train` wrote")
    info = _read_json(path)
    lacking = [name for name in NEEDED if name not in info]
    if lacking:
        raise UserError(f"{path} does not say {', '.join(lacking)}; it was not written by `qhyer train`, leave it out")
    try:
        seed = int(info["seed"])
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: the seed {info['seed']!r} is no number; restore the file or leave it out") from error
    rows: list[Episode] = []
    table = folder / "episodes.csv"
    if table.is_file():
        rows = read_episodes(table)
        about = (str(info["agent"]), str(info["dataset"]), seed)
        for row in rows:
            if (row.agent, row.dataset, row.seed) != about:
                raise UserError(
                    f"{table} has rows of {row.agent} on {row.dataset}, seed {row.seed}, but {path.name} "
                    f"beside it is {about[0]} on {about[1]}, seed {about[2]}; move the rows where they belong"
                )
    if not rows:
        problems.append(f"{folder} has no evaluation yet: run `qhyer eval {folder}`")
    density = folder / "analyses" / "goal_density.npz"
    return Run(
        path=folder,
        name=rows[0].run if rows else folder.name,
        agent=str(info["agent"]),
        preset=str(info["preset"]),
        dataset=str(info["dataset"]),
        seed=seed,
        info=info,
        episodes=tuple(rows),
        metrics=_read_lines(folder / "metrics.jsonl", problems),
        timings=_read_lines(folder / "timings.jsonl", problems),
        rollouts=_last_recording(folder / "rollouts"),
        density=density if density.is_file() else None,
    )


def _bare_runs(path: Path) -> list[Run]:
    """The runs inside a CSV that stands alone, for example one kept under results/."""
    groups: dict[tuple[str, str, str, str, int], list[Episode]] = {}
    for row in read_episodes(path):
        groups.setdefault((row.run, row.agent, row.preset, row.dataset, row.seed), []).append(row)
    return [
        Run(path, name, agent, preset, dataset, seed, episodes=tuple(rows))
        for (name, agent, preset, dataset, seed), rows in groups.items()
    ]


def find(paths: Iterable[Path], skip: Path | None = None) -> tuple[list[Path], list[Path], list[str]]:
    """Run folders, bare CSV files and problems under `paths`; folders called `exploration` below them are left out.

    `skip` is a report's own folder, met when the report is written inside the folder it is about.
    """
    runs: dict[Path, Path] = {}
    tables: dict[Path, Path] = {}
    problems: list[str] = []
    for path in paths:
        if path.is_file():
            if path.name == "run.json":
                runs.setdefault(path.parent.resolve(), path.parent)
            else:
                tables.setdefault(path.resolve(), path)
            continue
        if not path.is_dir():
            problems.append(f"{path} does not exist; give run folders, or a folder that contains runs")
            continue
        before = len(runs) + len(tables)
        for root, folders, files in os.walk(path, followlinks=False):
            here = Path(root)
            if skip is not None and here != path and here.resolve() == skip.resolve():
                folders.clear()
                continue
            folders[:] = sorted(name for name in folders if not name.startswith((TEMPORARY, ".")) and name != ASIDE)
            if "run.json" in files:
                runs.setdefault(here.resolve(), here)
            elif "episodes.csv" in files:
                tables.setdefault((here / "episodes.csv").resolve(), here / "episodes.csv")
        if len(runs) + len(tables) == before:
            problems.append(f"{path} contains no run (no run.json and no episodes.csv below it)")
    return list(runs.values()), list(tables.values()), problems


def collect(paths: Sequence[Path], skip: Path | None = None) -> Table:
    """Everything readable under `paths`. Raises `UserError` only when not one evaluated run is left."""
    if not paths:
        raise UserError("no runs given; name run folders, or a folder that contains runs")
    folders, tables, problems = find([Path(path) for path in paths], skip)
    runs: list[Run] = []
    for folder in folders:
        try:
            runs.append(read_run(folder, problems))
        except UserError as error:
            problems.append(str(error))
    for table in tables:
        try:
            runs.extend(_bare_runs(table))
        except UserError as error:
            problems.append(str(error))
    runs = _without_copies(runs)
    runs.sort(key=lambda run: (natural(run.dataset), run.agent, run.preset, run.seed, run.name, str(run.path)))
    if not any(run.episodes for run in runs):
        reasons = "\n".join(f"- {problem}" for problem in problems)
        raise UserError(f"nothing to report: no evaluated run was found\n{reasons}".rstrip())
    return Table(tuple(_named_apart(runs)), tuple(problems))


def _without_copies(runs: Sequence[Run]) -> list[Run]:
    """Each run once: the rows of a run folder also stand in any table made from it, and count once."""
    kept: list[Run] = []
    known: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    for run in runs:
        key = (run.name, run.agent, run.preset, run.dataset, run.seed)
        rows = {(row.step, row.task, row.episode, row.env_seed, row.success, row.length) for row in run.episodes}
        if key in known and rows and rows <= known[key]:
            continue
        known.setdefault(key, set()).update(rows)
        kept.append(run)
    return kept


def _named_apart(runs: Sequence[Run]) -> list[Run]:
    """Two runs of one name (the same folder name in two places) get a number, so that they can be cited."""
    count: dict[str, int] = {}
    named = []
    for run in runs:
        count[run.name] = count.get(run.name, 0) + 1
        named.append(run if count[run.name] == 1 else replace(run, name=f"{run.name} ({count[run.name]})"))
    return named


def load_arrays(path: Path, needed: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of an .npz, or a `UserError` that says what is wrong with it. Never unpickles."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # zipfile, zlib, numpy and the OS each raise their own
        raise UserError(f"{path} is damaged ({error}); record it again or remove it") from error
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; record it again or remove it")
    return arrays


def metric_names(run: Run) -> list[str]:
    """The curves a run logged: numbers only, the total loss first."""
    names: dict[str, None] = {}
    for row in run.metrics:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                names.setdefault(name)
    return sorted(names, key=lambda name: (name != "loss", list(names).index(name)))


def curve(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """One logged quantity over steps; steps that did not log it (another stage) are absent, not zero."""
    points = [(row["step"], row[name]) for row in run.metrics if isinstance(row.get(name), int | float)]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    return np.array([p[0] for p in points], dtype=float), np.array([p[1] for p in points], dtype=float)
