"""A run: one training on disk, and the agent in it.

RUN/run.json         what was trained, on what, with which versions and command
    metrics.jsonl    deterministic: the same for the same seed
    timings.jsonl    wall-clock seconds at the same steps, whether updates were captured (or why not), seeds at once
    checkpoints/     see checkpoint.py
    episodes.csv     one row per evaluation episode
    rollouts/        observations of a few evaluation episodes
    analyses/        what `qhyer analyze` wrote
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qhyer import agents, checkpoint, envs
from qhyer.agent import Agent
from qhyer.config import from_dict
from qhyer.data import registry
from qhyer.data.episodes import DataSpec
from qhyer.errors import Kept, UserError
from qhyer.evaluate import EpisodeResult, EvalConfig, episodes_of, evaluate, success_rate
from qhyer.progress import Progress
from qhyer.records import EpisodeRow, add_rows, mean_return, normalised, read_rows
from qhyer.rng import stream_seed
from qhyer.rollout import About, EpisodeSpec, Workers
from qhyer.storage import TEMPORARY, atomic_file, locked

VERSIONED = ("qhyer", "torch", "numpy", "ogbench", "gymnasium", "gymnasium-robotics", "mujoco", "safetensors")
EVALUATION = (
    f"{TEMPORARY}evaluation"  # in the folder with the rows while they are measured: neither shipped nor reported
)

DEEP, LOOKED_AT = 4, 10_000  # folders down, and entries, in which an example of a run is looked for


def versions() -> dict[str, str]:
    """Versions of everything a number may depend on."""
    found = {"python": platform.python_version()}
    for package in VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            from qhyer import __version__

            found[package] = __version__ if package == "qhyer" else "unknown"
    return found


def check_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UserError(f"no device is called {device!r}: use cpu, cuda, cuda:1 ... or auto")
    return device


def resolve_device(device: str) -> str:
    """ "auto" to a device there is; an error for one there is not."""
    if check_device(device) == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            'no CUDA device is usable here; use --device cpu (device = "cpu" in a manifest), or ask `qhyer doctor`'
        )
    number = device.partition(":")[2]
    if number and int(number) >= torch.cuda.device_count():
        raise UserError(f"there is no {device} here: there are {torch.cuda.device_count()} GPUs, numbered from 0")
    return device


def hardware(device: str, threads: int) -> str:
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name()} ({platform.machine()})"
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


def read(run: Path) -> dict[str, Any]:
    """run.json of a run's folder."""
    path = Path(run) / "run.json"
    if not path.is_file():
        told = is_model(run) or folder_of_runs(run)
        raise UserError(told or f"{run} is not a run: it has no run.json (`qhyer train` makes runs)")
    try:
        info = json.loads(path.read_text())
        missing = {"agent", "preset", "dataset", "seed", "config", "spec"} - set(info)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if missing:
        raise UserError(f"{path} is not a run's: it lacks {', '.join(sorted(missing))}")
    return info


def folder_of_runs(path: Path) -> str:
    """A sentence where one run is wanted and a folder that holds some was given."""
    first = _first_run(Path(path))
    return "" if first is None else f"{path} is a folder of runs: give one of them, such as {first}"


def _first_run(folder: Path) -> Path | None:
    """The first of the uppermost runs in a folder. Only for advice, so it does not search a whole disk."""
    level, looked = [folder], 0
    for _ in range(DEEP + 1):
        if found := [inside for inside in level if (inside / "run.json").is_file()]:
            return min(found)
        next_level = []
        for inside in level:
            with contextlib.suppress(OSError), os.scandir(inside) as entries:
                for entry in entries:
                    if (looked := looked + 1) > LOOKED_AT:
                        return None
                    if entry.is_dir():
                        next_level.append(Path(entry.path))
        level = next_level
    return None


def is_model(path: Path) -> str:
    """A sentence where a run is wanted and an exported model was given."""
    if not (Path(path) / "model.json").is_file():
        return ""
    return (
        f"{path} is an exported model, not a run: `qhyer eval --model {path}` evaluates it; an analysis, or an export, "
        "needs the run it was made from"
    )


def is_run(path: Path) -> bool:
    """Whether this folder holds a run and a checkpoint of it."""
    return (Path(path) / "run.json").is_file() and bool(checkpoint.steps(Path(path) / "checkpoints"))


def below(*paths: Path) -> list[Path]:
    """The runs that are meant: a run itself, or all there are in a folder that is none, at any depth: it is told how
    many, they may be more than one thinks, and broken ones are named."""
    found: list[Path] = []
    skipped: dict[Path, str] = {}
    for path in map(Path, paths):
        if (path / "run.json").is_file():
            found.append(path)
            continue
        parts = {file.parent for name in ("run.json", "checkpoints") for file in path.rglob(name)} - {path}
        told = {folder: _broken(folder) for folder in sorted(parts) if not _in_passing(folder.relative_to(path))}
        inside = [folder for folder, why in told.items() if why is None]
        for folder, why in told.items():
            if why and folder not in skipped:
                print(f"skipped: {folder}: {why}", file=sys.stderr)
                skipped[folder] = why
        if not inside and checkpoint.steps(path / "checkpoints"):
            raise UserError(f"{path} is not a whole run: run.json is missing; copy it from where the run was trained")
        if not inside and (model := is_model(path)):
            raise UserError(model)
        if not inside:
            raise UserError(f"{path} is not a run, and none with a checkpoint is in it (`qhyer train` makes runs)")
        print(f"{len(inside)} {'runs' if len(inside) > 1 else 'run'} below {path}", file=sys.stderr)
        found += inside
    return list(dict.fromkeys(found))


def _in_passing(path: Path) -> bool:
    """Whether it lies in a folder that is just being written, or was when a process was killed."""
    return any(part.startswith(TEMPORARY) for part in path.parts)


def _broken(folder: Path) -> str | None:
    """Why this folder with a run.json, or with checkpoints, is no whole run; None where it is one, and nothing to say
    where it is not meant to be one."""
    if is_run(folder):
        return None
    checkpoints = folder / "checkpoints"
    written = checkpoints.is_dir() and any(item.name.isdigit() for item in checkpoints.iterdir())
    if not (folder / "run.json").is_file():
        return "run.json is missing; copy it from where the run was trained" if written else ""
    try:
        if read(folder).get("model"):  # rows of an exported model
            return ""
        if not written:
            return "it has no checkpoint: not trained so far yet, or the weights were cleared away"
        checkpoint.latest(checkpoints)
    except UserError as error:
        return str(error)
    return ""


def cut_short(run: Path, step: int | None = None) -> str:
    """A sentence where the training did not come to its end before this checkpoint (the last if no step is named)."""
    folder = Path(run) / "checkpoints"
    state = checkpoint.read_state(checkpoint.latest(folder) if step is None else folder / f"{step:08d}")
    done, total = int(state["step"]), int(state.get("total", state["step"]))
    return f"{run} is not trained to its end: {done} of {total} updates" if done < total else ""


def build_agent(name: str, config: Any, spec: DataSpec, seed: int) -> Agent:
    """A fresh agent; its initial weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_seed(seed, "init"))  # torch.manual_seed would seed every GPU, too
        return agents.load(name)(config, spec)


def load_agent(run: Path, step: int | None = None, device: str = "cpu") -> tuple[Agent, int]:
    """The trained agent of a run, ready to act, and the updates it has had."""
    info = read(run)
    folder = Path(run) / "checkpoints"
    if info.get("model") and not folder.is_dir():
        name = info["model"]["name"]
        raise UserError(f"{run} has the rows of a model, and no weights: `qhyer eval --model {name}` evaluates it")
    path = checkpoint.latest(folder) if step is None else folder / f"{step:08d}"
    if not path.is_dir():
        raise UserError(f"{run} has no checkpoint of step {step}; it has {checkpoint.steps(folder)}")
    saved = checkpoint.load(path, device, training=False)
    config = from_dict(agents.load(info["agent"]).Config, info["config"])
    agent = build_agent(info["agent"], config, from_dict(DataSpec, info["spec"]), info["seed"])
    load_weights(agent.to(device), saved.agent, run)
    return agent.eval(), int(saved.state["step"])


def load_weights(agent: Agent, weights: Mapping[str, torch.Tensor], run: Path) -> None:
    """A checkpoint's, into the agent that run.json describes."""
    try:
        agent.load_state_dict(weights)
    except RuntimeError as error:
        own = agent.state_dict()
        shapes = [[tuple(t[name].shape) if name in t else "nothing" for t in (weights, own)] for name in own]
        odd = [f"{name} is {a}, by run.json {b}" for name, (a, b) in zip(own, shapes) if a != b]
        raise UserError(
            f"the weights of {run} do not fit its run.json ({odd[0] if odd else 'they are more'}): if it was edited, "
            "put back what it said"
        ) from error


def own_environment(info: Mapping[str, Any]) -> str | None:
    """The environment that belongs to a run: the one it was trained for, or its dataset's."""
    return info.get("environment") or envs.of_dataset(info["dataset"])


def notes_on(
    info: Mapping[str, Any],
    agent: Agent,
    environment: str,
    about: About,
    reset: Callable[[list[EpisodeSpec]], tuple[np.ndarray, np.ndarray]],
) -> list[str]:
    """What of an environment does not look like the data of a run, or of a model, by what that says of itself.

    Starts and goals are looked at, with `reset`, unless it is the dataset's own environment; what was written before
    the ranges of the data were has nothing to compare them with.
    """
    data, spec = info.get("data") or {}, agent.spec
    registered = registry.DATASETS.get(info["dataset"])
    if "low" not in data or (registered is not None and registered.environment == environment):
        return [note for note in [about.remark(environment, spec.action_bounds)] if note]
    low, high = (np.asarray(data[name], np.float32) for name in ("low", "high"))
    whole = agent.config.reads_whole_goals
    return about.looked_at(reset).doubts(environment, low, high, spec.goal_indices, whole, spec.action_bounds)


def tell(notes: Sequence[str], told: set[str] | None = None) -> None:
    """Prints notes, each once where it is remembered what was `told`."""
    told = set() if told is None else told
    for note in notes:
        if note not in told:
            print(f"note: {note}", file=sys.stderr)
            told.add(note)


def save_evaluation(
    run: Path, step: int, results: Sequence[EpisodeResult], environment: str, about: About | None = None
) -> None:
    """Adds the evaluation's rows to the run, and its recorded rollouts.

    `about` the environment, where it is known: a simulator need not be imported for it.
    """
    info = read(run)
    elsewhere = "" if environment == own_environment(info) else environment
    rows = [
        EpisodeRow(
            run=Path(run).resolve().name,
            agent=info["agent"],
            preset=info["preset"],
            dataset=info["dataset"],
            seed=info["seed"],
            step=step,
            task=r.spec.task,
            episode=r.spec.episode,
            env_seed=r.spec.seed,
            success=int(r.success),
            length=r.length,
            seconds=round(r.seconds, 3),
            return_=r.returned,
            environment=elsewhere,
        )
        for r in results
    ]
    add_rows(Path(run) / "episodes.csv", rows)
    recorded = [(r, r.observations) for r in results if r.observations is not None]
    if not recorded:
        return
    longest = max(len(o) for _, o in recorded)
    padded = np.full((len(recorded), longest, recorded[0][1].shape[1]), np.nan, dtype=np.float32)
    for i, (_, observations) in enumerate(recorded):
        padded[i, : len(observations)] = observations
    if about is None:
        env = envs.make(environment)
        geometry = envs.maze_geometry(env)
        env.close()
    else:
        geometry = about.geometry
    arrays: dict[str, Any] = {
        "task": np.array([r.spec.task for r, _ in recorded]),
        "episode": np.array([r.spec.episode for r, _ in recorded]),
        "success": np.array([r.success for r, _ in recorded]),
        "length": np.array([r.length for r, _ in recorded]),
        "observations": padded,
        "goals": np.stack([r.goal for r, _ in recorded]),
        **(geometry or {}),
    }
    with atomic_file(Path(run) / "rollouts" / f"{step:08d}.npz") as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)


def evaluate_run(
    run: Path,
    config: EvalConfig | None = None,
    *,
    step: int | None = None,
    environment: str | None = None,
    device: str = "cpu",
    workers: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    told: set[str] | None = None,
) -> float:
    """Evaluates a run's checkpoint, keeps the rows with the run, and returns the success rate.

    An earlier evaluation of the same checkpoint is replaced; a longer one only with `overwrite`. `told`: notes that
    need not be printed again; those that are, are added.
    """
    info = read(run)
    environment = environment or own_environment(info)
    if environment is None:
        raise UserError(f"{run} was trained on own data; name the environment to evaluate in with --env")
    device = resolve_device(device)
    with hold_rows(run):
        results, at, about = evaluate_agent(
            lambda: load_agent(run, step, device),
            f"evaluating {info['agent']} on {environment}",
            environment,
            config or EvalConfig(),
            info,
            rows=Path(run) / "episodes.csv",
            workers=workers,
            overwrite=overwrite,
            quiet=quiet,
            told=told,
        )
        save_evaluation(run, at, results, environment, about)
    return success_rate(results)


def hold_rows(run: Path) -> contextlib.AbstractContextManager[bool]:
    """Meanwhile no other process evaluates for this folder, or `Taken` where one does: of two evaluations side by side
    the later to end would replace the other's rows. A training does not wait for it, nor is it waited for."""
    return locked(Path(run) / EVALUATION, f"{run} is being evaluated", "wait until it is done, and then ask again")


def score_text(run: Path, step: int | None = None, environment: str | None = None) -> str:
    """What follows the success in a sentence: return and score of an evaluation, the last if no step is named."""
    rows = read_rows(Path(run) / "episodes.csv")
    at = max((row.step for row in rows), default=0) if step is None else step
    mean = mean_return(row for row in rows if row.step == at)
    if mean is None:
        return ""
    score = normalised(environment or read(run).get("environment"), mean)
    return f", return {mean:.1f}" + ("" if score is None else f", score {score:.1f}")


def task_text(run: Path, step: int | None = None) -> str:
    """Each task's success in an evaluation, the last if no step is named; nothing where there is one task."""
    rows = read_rows(Path(run) / "episodes.csv")
    at = max((row.step for row in rows), default=0) if step is None else step
    tasks: dict[int, list[int]] = {}
    for row in rows:
        if row.step == at:
            tasks.setdefault(row.task, []).append(row.success)
    rates = [f"{task}: {100 * sum(each) / len(each):.1f} %" for task, each in sorted(tasks.items())]
    return f"tasks {', '.join(rates)}" if len(rates) > 1 else ""


def evaluate_agent(
    load: Callable[[], tuple[Agent, int]],
    title: str,
    environment: str,
    config: EvalConfig,
    info: Mapping[str, Any],
    *,
    rows: Path,
    workers: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    told: set[str] | None = None,
) -> tuple[list[EpisodeResult], int, About]:
    """The protocol for whatever `load` brings (an agent and its updates) -> results, updates, the environment.

    Nothing is written; `rows` is where the caller keeps them, so that a longer evaluation there is not lost, nor one
    that came there meanwhile. `info` is what the run, or the model, says of itself.
    """
    with Workers(environment, workers) as pool:  # they start while the agent is loaded
        agent, at = load()
        about = pool.about()
        about.require(environment, agent.spec.observation_dim, agent.spec.action_dim)
        asked = episodes_of(config, environment, about.tasks)
        total = len(asked)

        def look() -> bool:
            """Whether some of these episodes are there, and no others."""
            earlier = {row.which for row in read_rows(rows) if row.step == at}
            if not earlier <= asked and not overwrite:
                why = "" if len(earlier) > total else ", in another environment, of other tasks or with another seed"
                raise Kept(
                    f"{rows.parent} has an evaluation of {len(earlier)} episodes of this checkpoint{why}; `qhyer eval` "
                    "replaces it if it is given --overwrite"
                )
            return bool(earlier) and earlier < asked

        if look() and not quiet:
            print(f"note: {rows.parent} has a part of these {total} episodes, whose place they take", file=sys.stderr)
        if not quiet:
            tell(notes_on(info, agent, environment, about, lambda specs: pool.ask(("reset", 0, specs))), told)
        with Progress(title, total, quiet) as progress:

            def show(done: int, total: int) -> None:
                progress.advance(done)
                progress.show(done)

            results = evaluate(agent, environment, config, workers=pool, progress=show)
        look()  # again: where no lock holds, another process may have written some
    return results, at, about
