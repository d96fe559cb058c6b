"""Which commands make a report again: its data, trainings, evaluations and page, in this order.

What they need is in run.json and in the episode rows. What cannot be made by a command, or is not known, is said in a
sentence.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qhyer.data import origin
from qhyer.report.collect import Run, Table
from qhyer.rng import episode_seed

EVALUATES = ("sweep", "ablate")  # commands that evaluate what they train
USUAL = {"episodes": 50, "seed": 0}  # of an evaluation, where run.json does not say what the manifest asked for
SEEDS = 1000  # evaluation seeds that are tried: rows have a hash of theirs


def commands(table: Table, sources: Sequence[Path], out: Path) -> tuple[list[str], list[str]]:
    """-> what to type, line by line, and what to know."""
    trained = [words for run in table.runs if (words := _typed(run))]
    data, told = _data(table.runs)
    report = ["qhyer", "report", *map(_here, sources), "--out", _here(out)]
    lines = [shlex.join(words) for words in (*data, *trained, *_evaluations(table.runs), report)]
    return list(dict.fromkeys(lines)), [*_notes(table.runs), *told]


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


def _few(named: Sequence[Run]) -> str:
    return ", ".join(_here(run.path) for run in named[:3]) + (", …" if len(named) > 3 else "")


def _file(run: Run) -> Path | None:
    """The file that `qhyer train` was given, or has found under the name it was given."""
    words = _typed(run)
    if words[1:2] != ["train"] or len(words) < 4:
        return None
    own = words[3].endswith(".npz")
    return Path(words[3]) if own else Path(os.environ.get("QHYER_DATA", "data")) / f"{run.dataset}.npz"


def _data(runs: Sequence[Run]) -> tuple[list[list[str]], list[str]]:
    """The commands that make the data, where they were generated, and what to know of data that none makes.

    Runs say themselves how their data were generated. For those of earlier versions the file's sidecar does, if the
    file is still the one they were trained on.
    """
    # By what is made, however the file was named: of each the command, and the runs.
    made: dict[Path, dict[tuple[str, ...], tuple[list[str], list[Run]]]] = {}
    unlike: dict[str, list[Run]] = {}
    for run in runs:
        file, about = _file(run), run.info.get("data")
        about = about if isinstance(about, Mapping) else {}
        if file is None:
            continue
        how = about.get("generated") or ({} if "file" in about else origin.generated(file))
        if not how:
            continue
        words = _generate(how, file if _typed(run)[3].endswith(".npz") else None)
        why = "" if "generated" in about else _not_the_same(about, file)
        if why := why or _own(how.get("own") or {}, shlex.join(words)):
            unlike.setdefault(why, []).append(run)
        else:
            made.setdefault(file, {}).setdefault(tuple(_generate(how, None)), (words, []))[1].append(run)
    notes = [f"{why}: {_few(named)}." for why, named in unlike.items()]
    for first, *others in (list(each.values()) for each in made.values()):
        for typed, named in others:
            again = f"once those of {_few(first[1])} are trained, and `{shlex.join([*typed, '--overwrite'])}`"
            notes.append(f"Trained on other data of the same name, so last, {again}: {_few(named)}.")
    return [next(iter(each.values()))[0] for each in made.values()], notes


def _generate(how: Mapping[str, Any], own: Path | None) -> list[str]:
    """A validation file has a tenth of the episodes that were asked for; `own`: where it is not looked for by name."""
    episodes = int(how["episodes"]) * (10 if how.get("split") == "validation" else 1)
    place = [] if own is None else ["--out", str(own.parent)]
    size = ["--episodes", str(episodes), "--seed", str(how["seed"])]
    return ["qhyer", "data", "generate", str(how["dataset"]), *place, *size]


def _own(own: Mapping[str, Any], command: str) -> str:
    """What to say of settings that this command has not; nothing where there are none."""
    if "rows" in own:
        return f"Data generated from Python, with episodes of {own['rows']} rows, which `{command}` does not make"
    if "ant" in own:
        return (
            "Data made by an ant other than the package's, which must be there "
            f"(`{command} --ant FOLDER`; the SHA-256 of its weights is {str(own['ant'])[:12]}…)"
        )
    return ""


def _not_the_same(about: Mapping[str, Any], file: Path) -> str:
    """What to say where a file is not known to be the one that a run was trained on."""
    now = _fingerprint(file, file.stat().st_mtime_ns if file.is_file() else 0)
    if now and now == about.get("fingerprint"):
        return ""
    unknown = "which command made the data is not recorded"
    return f"{_here(file)} {'is not what it was in' if now else 'cannot be compared with'} the training, and {unknown}"


@functools.lru_cache(maxsize=64)
def _fingerprint(file: Path, seen: int) -> str:
    """Of a generated file as training reads it; empty where that does more than read, as for Maze2D."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            if {"rewards", "arrivals"} & set(arrays.files):
                return ""
            observations, actions = (arrays[name].astype(np.float32) for name in ("observations", "actions"))
            return origin.fingerprint(observations, actions, np.flatnonzero(origin.ends_of(arrays)), ())
    except Exception:  # zipfile and numpy raise many kinds
        return ""


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
    """Whether its command made these rows, and no later evaluation."""
    return _of_many(run) and {(row.task, row.episode, row.env_seed) for row in run.last} == _asked(run)


def _of_many(run: Run) -> bool:
    words = _typed(run)
    return len(words) > 1 and words[1] in EVALUATES


def _asked(run: Run) -> set[tuple[str, int, str]]:
    """The episodes that its manifest asked for."""
    asked = run.info.get("evaluation")
    asked = {**USUAL, **(asked if isinstance(asked, Mapping) else {})}
    environment = asked.get("environment") or str(run.info.get("environment") or run.dataset)
    tasks = asked.get("tasks") or {int(row.task) for row in run.last if row.task.isdigit()}
    each = [(task, episode) for task in tasks for episode in range(asked["episodes"])]
    return {(str(task), n, str(episode_seed(asked["seed"], environment, task, n))) for task, n in each}


def _options(run: Run) -> list[str]:
    step = run.steps[-1]
    updates = run.info.get("updates")
    options = ["--step", str(step)] if isinstance(updates, int) and step < updates and "model" not in run.info else []
    options += ["--episodes", str(_episodes(run)), "--tasks", *sorted({row.task for row in run.last}, key=_number)]
    seed = evaluation_seed(run)
    options += [] if seed is None else ["--seed", str(seed)]
    options += ["--overwrite"] if _of_many(run) else []  # the rows that its command makes
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


def evaluation_seed(run: Run) -> int | None:
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
    notes = []
    if lacking := [run for run in runs if not _words(run)]:
        notes.append(f"No command is recorded for: {_few(lacking)}.")
    scripts: dict[str, list[Run]] = {}
    for run in runs:
        if _words(run) and not _typed(run):
            scripts.setdefault(_words(run)[0], []).append(run)
    for script, made in scripts.items():
        by = f" ({script})" if script else ""
        notes.append(f"Made from Python{by}, so train there first: {_few(made)}.")
    if models := [str(run.info["model"].get("name")) for run in runs if run.info.get("model")]:
        notes.append(f"These models must be there (`qhyer export`): {', '.join(dict.fromkeys(models))}.")
    if moved := [run for run in runs if run.info and _moved(run)]:
        notes.append(f"Not in the folder where its command puts it, named as it is now: {_few(moved)}.")
    evaluated = [run for run in runs if run.last and run.info and not _by_its_command(run)]
    if unknown := [run for run in evaluated if evaluation_seed(run) is None]:
        notes.append(f"The seed of the evaluation is not known for: {_few(unknown)}.")
    return notes
