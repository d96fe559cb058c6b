"""Which commands make a report again: its data, trainings, evaluations and page, in this order.

What they need is in run.json, in the sidecars of generated data and in the episode rows. What cannot be made by a
command, or is not known, is said in a sentence.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qhyer.errors import UserError
from qhyer.report.collect import Run, Table
from qhyer.rng import episode_seed
from qhyer.storage import read_sealed_json

EVALUATES = ("sweep", "ablate")  # commands that evaluate what they train
SEEDS = 1000  # evaluation seeds that are tried: rows have a hash of theirs


def commands(table: Table, sources: Sequence[Path], out: Path) -> tuple[list[str], list[str]]:
    """-> what to type, line by line, and what to know."""
    trained = [words for run in table.runs if (words := _typed(run))]
    data = [words for run in table.runs if (words := _generated(run))]
    report = ["qhyer", "report", *map(_here, sources), "--out", _here(out)]
    lines = [shlex.join(words) for words in (*data, *trained, *_evaluations(table.runs), report)]
    return list(dict.fromkeys(lines)), _notes(table.runs)


def _words(run: Run) -> list[str]:
    try:
        return shlex.split(str(run.info.get("command") or ""))
    except ValueError:
        return []


def _typed(run: Run) -> list[str]:
    """The command that trained it, where it was one of this project's: others are of a script, or a notebook."""
    words = _words(run)
    return words if words[:1] == ["qhyer"] else []


def _here(path: Path) -> str:
    """As one would type it in this folder."""
    given = Path(path)
    return str(given.relative_to(Path.cwd()) if given.is_absolute() and given.is_relative_to(Path.cwd()) else given)


def _generated(run: Run) -> list[str]:
    """The command that makes its data, where they were generated and their sidecar is still there."""
    words = _typed(run)
    if words[1:2] != ["train"] or len(words) < 4:
        return []
    own = words[3].endswith(".npz")
    file = Path(words[3]) if own else Path(os.environ.get("QHYER_DATA", "data")) / f"{run.dataset}.npz"
    try:
        made: dict[str, Any] = read_sealed_json(file.with_suffix(".json"))
        size = ["--episodes", str(made["episodes"]), "--seed", str(made["seed"])]
        name = str(made["dataset"])
    except (UserError, OSError, KeyError):
        return []
    place = ["--out", str(file.parent)] if own else []
    return ["qhyer", "data", "generate", name, *place, *size]


def _evaluations(runs: Sequence[Run]) -> list[list[str]]:
    """The evaluation that the score is of, once for all runs that had the same one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    found: list[list[str]] = []
    for run in runs:
        if not run.last or not run.info or _by_its_command(run) or _while_training(run):
            continue
        options = _options(run)
        model = run.info.get("model")
        if model:
            found.append(["qhyer", "eval", "--model", str(model.get("name")), "--out", _here(run.path), *options])
        else:
            alike.setdefault(tuple(options), []).append(_here(run.path))
    return [*(["qhyer", "eval", *folders, *options] for options, folders in alike.items()), *found]


def _by_its_command(run: Run) -> bool:
    words = _typed(run)
    return len(words) > 1 and words[1] in EVALUATES


def _options(run: Run) -> list[str]:
    step = run.steps[-1]
    updates = run.info.get("updates")
    options = ["--step", str(step)] if isinstance(updates, int) and step < updates and "model" not in run.info else []
    options += ["--episodes", str(_episodes(run)), "--tasks", *sorted({row.task for row in run.last}, key=_number)]
    seed = _seed(run)
    options += [] if seed is None else ["--seed", str(seed)]
    named = run.elsewhere or str(run.info.get("environment") or "")
    return options if not named or (not run.elsewhere and _is_named(run, named)) else [*options, "--env", named]


def _number(task: str) -> tuple[int, str]:
    return (int(task) if task.isdigit() else 0, task)


def _is_named(run: Run, environment: str) -> bool:
    """Whether the training names this environment, or the dataset's name does."""
    kind = environment.rpartition("-")[0]
    return environment in _words(run) or environment == run.dataset or run.dataset.startswith(f"{kind}-")


def _episodes(run: Run) -> int:
    return 1 + max(row.episode for row in run.last)


def _seed(run: Run) -> int | None:
    """The evaluation's seed, found by trying; None where it is another protocol's."""
    row = run.last[0]
    environment = row.environment or str(run.info.get("environment") or run.dataset)
    if not (row.env_seed.isdigit() and row.task.isdigit()):
        return None
    where = environment, int(row.task), row.episode
    return next((seed for seed in range(SEEDS) if episode_seed(seed, *where) == int(row.env_seed)), None)


def _while_training(run: Run) -> bool:
    """Whether the training made these rows itself: no later evaluation is the score."""
    train, updates = run.info.get("train") or {}, run.info.get("updates")
    every = train.get("eval_every") or 0
    unfinished = isinstance(updates, int) and run.steps[-1] < updates
    return unfinished and every > 0 and run.steps[-1] % every == 0 and _episodes(run) == train.get("eval_episodes")


def _moved(run: Run) -> bool:
    """Whether its folder is not where its command would put it."""
    words = _typed(run)
    if words[1:2] != ["train"] or "model" in run.info:
        return False
    options = [word for given in words for word in (given.split("=", 1) if given.startswith("--") else [given])]
    given = options[options.index("--out") + 1 :][:1] if "--out" in options else []
    if not given:
        return Path(_here(run.path)) != Path("runs") / run.dataset / run.path.name
    return Path(_here(run.path)) != Path(given[0]) / (f"s{run.seed}" if "--seeds" in options else "")


def _notes(runs: Sequence[Run]) -> list[str]:
    def few(named: Sequence[Run]) -> str:
        return ", ".join(_here(run.path) for run in named[:3]) + (", …" if len(named) > 3 else "")

    notes = []
    if lacking := [run for run in runs if not _words(run)]:
        notes.append(f"No command is recorded for: {few(lacking)}.")
    scripts: dict[str, list[Run]] = {}
    for run in runs:
        if _words(run) and not _typed(run):
            scripts.setdefault(_words(run)[0], []).append(run)
    for script, made in scripts.items():
        by = f" ({script})" if script else ""
        notes.append(f"Made from Python{by}, so train there first: {few(made)}.")
    if models := [str(run.info["model"].get("name")) for run in runs if run.info.get("model")]:
        notes.append(f"These models must be there (`qhyer export`): {', '.join(dict.fromkeys(models))}.")
    if moved := [run for run in runs if run.info and _moved(run)]:
        notes.append(f"Not in the folder where its command puts it, named as it is now: {few(moved)}.")
    evaluated = [run for run in runs if run.last and run.info and not _by_its_command(run)]
    if unknown := [run for run in evaluated if _seed(run) is None]:
        notes.append(f"The seed of the evaluation is not known for: {few(unknown)}.")
    return notes
