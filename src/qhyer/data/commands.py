"""The commands `qhyer data generate | check | info | convert | list | ant`. Each returns the process's exit code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qhyer.data import bounds, hdf5, pieces, registry
from qhyer.data import check as checks
from qhyer.data.episodes import (
    FILES,
    HDF5,
    columns_told,
    end_flags,
    goal_columns,
    goal_rewards,
    own_sidecar,
    read_arrays,
    read_npz,
    stored_goal,
)
from qhyer.data.generate.ant_config import AntConfig
from qhyer.data.generate.runner import generate as run_generation
from qhyer.errors import DataError, UserError
from qhyer.launch import Launcher
from qhyer.storage import atomic_file, read_sealed_json, sha256_file, write_sealed_json


def generate(
    *names: tyro.conf.Positional[str],
    episodes: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    ant: Path | None = None,
    launcher: Launcher = "local",
    address: str | None = None,
) -> int:
    """Make datasets with OGBench's own environments and oracles, or D4RL's Maze2D. Again goes on after a stop.

    Args:
        names: datasets of `qhyer data list`, such as cube-single-play or maze2d-umaze
        episodes: training episodes; the official number if not given. Validation has a tenth as many
        seed: the same seed gives the same file, whatever the number of workers
        workers: processes; one for each core if not given (ray: as many as the cluster has room for)
        out: folder to write to; $QHYER_DATA or ./data if not given
        overwrite: replace a file that was made with other settings
        ant: antmaze only: the folder of the ant that walks (`qhyer data ant`); the package's own if not given
        launcher: local, or ray: episodes are made on a Ray cluster and written here, the same bytes (docs/scale.md)
        address: the Ray cluster's; $RAY_ADDRESS, or the one running here, if not given
    """
    if not names:
        raise UserError("name at least one dataset: qhyer data generate NAME... (`qhyer data list` has them)")
    datasets = [registry.get(name) for name in names]
    try:
        for dataset in datasets:
            run_generation(
                dataset,
                out=out,
                episodes=episodes,
                seed=seed,
                workers=workers,
                overwrite=overwrite,
                ant=ant,
                launcher=launcher,
                address=address,
            )
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped. Finished episodes are kept: the same command goes on from here.")
        return 130
    return 0


def check(*paths: tyro.conf.Positional[Path]) -> int:
    """Look for what is wrong with datasets, each on its own. The exit code is 1 if one cannot be trained on.

    Args:
        paths: npz files, yours or OGBench's, HDF5 of D4RL, Minari or robomimic, or names of datasets
    """
    if not paths:
        raise UserError("name at least one dataset: qhyer data check FILE...")
    console = Console(highlight=False, soft_wrap=True)
    bad = 0
    for path in paths:
        try:
            bad += _check(path, console)
        except UserError as error:
            if len(paths) == 1:
                raise
            console.print(f"{path}: {error}", markup=False)  # the others need not wait for it
            bad += 1
    return 1 if bad else 0


def _check(path: Path, console: Console) -> int:
    path = _locate(str(path))
    try:
        arrays, notes = _read(path)
    except DataError as error:
        console.print(f"error [shape] {error}", markup=False)
        return 1
    for note in notes:
        console.print(f"when read: {note}", markup=False)
    arrays = _with_flags(arrays)
    problems = _problems(arrays)
    if not any(problem.code == "shape" for problem in problems):
        try:
            _stored_columns(arrays)
        except UserError as error:
            problems.append(checks.Problem("error", "goal", str(error)))
    if not problems:
        rows, episodes = len(arrays["observations"]), int(np.sum(arrays["terminals"] != 0))
        _, goal = _goal(path, arrays)
        console.print(f"{path}: nothing wrong in {rows} rows, {episodes} episodes; goal: {goal}", markup=False)
        return 0
    console.print(checks.describe(str(path), problems), markup=False)
    errors = sum(problem.severity == "error" for problem in problems)
    if errors:
        console.print("It cannot be trained on until the errors are mended.")
    return 1 if errors else 0


def _goal(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[tuple[int, ...], str]:
    """The goal's columns, those of a known dataset or what the file says, and in words."""
    dataset = registry.DATASETS.get(path.stem.removesuffix("-val"))
    goal = _stored_columns(arrays) if dataset is None else dataset.goal_indices
    some = len(goal) < arrays["observations"].shape[1]
    told = columns_told(goal, _names(arrays) if dataset is None else None)
    return goal, f"columns {told}" if some else "all columns (--goal of train names fewer)"


def _names(arrays: Mapping[str, np.ndarray]) -> list[str] | None:
    names = arrays.get("observation_names")
    return None if names is None else [str(name) for name in np.ravel(names)]


def _with_flags(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Ends as flags, where they are row numbers, which training takes, too; what is neither stays for the check."""
    with contextlib.suppress(DataError, TypeError):
        return {**arrays, "terminals": end_flags(np.asarray(arrays["terminals"]), len(arrays["observations"]))}
    return arrays


def _problems(arrays: Mapping[str, np.ndarray]) -> list[checks.Problem]:
    needed = (arrays["observations"], arrays["actions"], arrays["terminals"])
    low, high = map(arrays.get, bounds.NAMES)
    problems = checks.find_problems(*needed, arrays.get("rewards"), low=low, high=high) + checks.misspelt(arrays)
    if any(problem.code == "shape" for problem in problems):
        return problems
    wrong = bounds.wrong_bounds(arrays["actions"].shape[1], low, high)
    return [*([checks.Problem("error", "bounds", wrong)] if wrong else []), *problems]


def info(name_or_path: str, /) -> int:
    """Show what is in a dataset: sizes, ranges, the goal's coordinates, and where it came from.

    Args:
        name_or_path: a dataset's name, or an npz or HDF5 file
    """
    path = _locate(name_or_path)
    arrays = _with_flags(read_arrays(path))
    observations, actions = np.asarray(arrays["observations"]), np.asarray(arrays["actions"])
    problems = _problems(arrays)
    if any(problem.code == "shape" for problem in problems):
        raise UserError(f"{path} is not a usable dataset; `qhyer data check {path}` says what is wrong")
    console = Console(highlight=False, soft_wrap=True)
    names = arrays.get("observation_names")
    goal, told = _goal(path, arrays)
    ends = np.flatnonzero(arrays["terminals"])
    lengths = np.diff(ends, prepend=-1)
    facts = Table(show_header=False, box=None, pad_edge=False)

    def tell(label: str, text: str) -> None:
        facts.add_row(label, escape(text))  # names of columns, with their units in brackets, are no markup

    tell("file", str(path))
    tell("rows", f"{len(observations):,}")
    tell("episodes", f"{len(ends):,}" + (f" of {_span(lengths)} rows" if len(ends) else ""))
    tell("observation", f"{observations.shape[1]} columns, {observations.dtype}")
    tell("action", f"{actions.shape[1]} columns, {actions.dtype}")
    units = [arrays[name] for name in bounds.NAMES if name in arrays]
    if len(units) == 2 and bounds.wrong_bounds(actions.shape[1], *units) is None:
        tell("own units", f"-1 and 1 of actions stand for {bounds.told(*units)}")
    for problem in problems:
        if problem.code in ("small", "units", "name"):
            tell("warning", problem.brief)
    tell("goal", told)
    others = sorted(set(arrays) - {"observations", "actions", "terminals"})
    if others:
        tell("also", ", ".join(f"{key} {arrays[key].shape}" for key in others))
    for label, value in _provenance(path):
        tell(label, value)
    console.print(facts)

    ranges = Table(title="ranges", title_justify="left")
    for heading in ("column", "least", "mean", "std", "greatest", "goal"):
        ranges.add_column(heading, justify="right")
    for kind, array in (("observation", observations), ("action", actions)):
        columns = zip(array.min(0), array.mean(0, dtype=np.float64), array.std(0, dtype=np.float64), array.max(0))
        for index, values in enumerate(columns):
            label = f"{kind} {index}"
            if kind == "observation" and names is not None and index < len(names):
                label += f" {names[index]}"
            mark = "*" if kind == "observation" and index in goal else ""
            ranges.add_row(escape(label), *(f"{float(value):.4g}" for value in values), mark)
    console.print(ranges)
    return 0


def convert(
    source: str,
    out: Path,
    /,
    *,
    cut: Literal["as-is", "arrivals"] = "as-is",
    maze: Literal["umaze", "medium", "large"] | None = None,
    keys: tuple[str, ...] = (),
    split: str | None = None,
    scale_actions: bool = False,
    action_low: tuple[float, ...] = (),
    action_high: tuple[float, ...] = (),
    overwrite: bool = False,
) -> int:
    """Write a dataset as an npz: HDF5 with its defects mended, or some of it; actions scaled; maze data cut at goals.

    Args:
        source: an HDF5 or npz file, or a dataset's name
        out: the npz to write; a sidecar beside it says where it came from
        cut: arrivals: maze2d only, an episode ends where its controller reached a goal, as D4RL's loaders cut
        maze: of D4RL's maze2d files: turn them into the coordinates of maze2d-MAZE-v1, with the rewards of its goal
        keys: of robomimic's files, and Minari's with dicts: the observations to read, in this order; all if not given
        split: of robomimic's files: the demonstrations that mask lists under this name, such as train; all if not given
        scale_actions: map each column of actions to [-1, 1] by its least and greatest, or by the bounds in the file
            that they have not been scaled by yet; policies act in your units
        action_low: what becomes -1 instead, with action-high: a number for each column, or one for all
        action_high: what becomes 1 instead
        overwrite: replace `out` if it is there
    """
    path = _locate(source)
    if out.suffix != ".npz":
        raise UserError(f"{out}: the file to write is an npz: qhyer data convert SOURCE OUT.npz")
    if out.stem in registry.DATASETS:
        raise UserError(f"{out.stem} is a generated dataset's name, whose goals and rewards are known: choose another")
    if out.exists() and not overwrite:
        raise UserError(f"{out} is there already; --overwrite replaces it")
    if out.exists() and out.resolve() == path.resolve():
        raise UserError("the file to write is the one to read; choose another name")
    sidecar = own_sidecar(out)
    scaling = scale_actions or bool(action_low or action_high)
    arrays, notes = _read(path, keys, split, clip=not scaling)  # 1.0008 of actions in other units is what was recorded
    if np.shape(arrays["terminals"]) != np.shape(arrays["observations"])[:1]:
        arrays = _with_flags(arrays)
    dataset = registry.DATASETS.get(path.stem)
    if dataset is not None and "goal_indices" not in arrays:
        arrays["goal_indices"] = np.array(dataset.goal_indices)
    if maze is not None:
        dataset = registry.get(f"maze2d-{maze}")
        arrays = _turned(path, arrays, dataset.environment)
        notes.append(f"turned into the coordinates of {dataset.environment}")
    if dataset is not None and dataset.task_goal is not None:
        arrays["rewards"] = goal_rewards(
            arrays["observations"], dataset.goal_indices, dataset.task_goal, registry.RADIUS
        )
        notes.append(f"rewards are those of the task's goal, {dataset.task_goal}")
    if cut == "arrivals":
        arrays = pieces.recut(arrays)
        notes.append("cut where a goal was reached")
    problems = _refuse(path, arrays, *(["range"] if scaling else []))
    if scaling:
        arrays, said = bounds.scaled(arrays, action_low, action_high)
        notes += said
        problems = [problem for problem in _refuse(path, arrays) if problem.code != "units"]  # one knows them now
    of_their_own = scale_actions and split is not None and not (action_low or action_high)
    about: dict[str, Any] = {"source": path.name, "source_sha256": sha256_file(path), "cut": cut, "notes": notes}
    place = hdf5.recorded_in(path) if path.suffix in HDF5 else None
    asked = {"recorded_in": place, "split": split, "keys": list(keys)}
    about |= {key: value for key, value in asked.items() if value}
    with atomic_file(out) as temporary:
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        digest = sha256_file(temporary)
        sidecar.unlink(missing_ok=True)  # at the last moment: an older file keeps it if the new one cannot be written
    rows, episodes = len(arrays["terminals"]), int(arrays["terminals"].sum())
    write_sealed_json(sidecar, {**about, "episodes": episodes, "rows": rows, "sha256": digest})
    console = Console(highlight=False, soft_wrap=True)
    for note in notes:
        console.print(f"{path.name}: {note}", markup=False)
    if of_their_own:
        console.print(
            f"{path.name}: these bounds are those of split {split} alone. For another split give both conversions the "
            f"same, these or wider ones: {bounds.options(arrays['action_low'], arrays['action_high'])}",
            markup=False,
        )
    if dataset is None and (found := checks.in_brief(problems, str(out))):
        console.print(f"{path.name}: warning: {found}", markup=False)
    console.print(f"wrote {out}: {rows:,} rows, {episodes:,} episodes", markup=False)
    return 0


def list_() -> int:
    """List the datasets there are, their official sizes, and which are on this disk."""
    table = Table()
    table.add_column("dataset", no_wrap=True)
    for heading in ("episodes", "rows", "goal columns"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("on disk", overflow="fold")
    for dataset in registry.DATASETS.values():
        found = registry.find(dataset.name)
        place = "" if found is None else f"{found} ({found.stat().st_size / 1e6:,.0f} MB)"
        rows = dataset.episodes * dataset.rows
        table.add_row(dataset.name, f"{dataset.episodes:,}", f"{rows:,}", str(len(dataset.goal_indices)), escape(place))
    Console(highlight=False).print(table)
    return 0


_ANT = AntConfig()


def ant(
    *,
    config: Annotated[AntConfig, tyro.conf.arg(name="")] = _ANT,
    out: Path = Path("ant"),
    overwrite: bool = False,
) -> int:
    """Train the ant that walks in ant mazes, with stable-baselines3's SAC (needs qhyer[ant]); half an hour on a core.

    Args:
        config: how it is trained
        out: folder to write the best ant so far to, after each evaluation
        overwrite: replace an ant that is there
    """
    from qhyer.data.generate import ant as ants
    from qhyer.data.generate.ant_training import Walked, train

    train(config, out, overwrite=overwrite)
    walked = Walked(**ants.about(out)["walked"])
    Console(highlight=False, soft_wrap=True).print(
        f"wrote {out}: to goals four cells away, {walked}; `qhyer data generate NAME --ant {out}` uses it",
        markup=False,
    )
    return 0


def _turned(path: Path, arrays: dict[str, np.ndarray], environment: str) -> dict[str, np.ndarray]:
    """D4RL's maze2d in our coordinates; an error if it does not lie in this maze then."""
    if path.suffix not in HDF5 or arrays["observations"].shape[1] != 4 or "arrivals" not in arrays:
        raise UserError(f"--maze is for D4RL's maze2d files in HDF5, and {path.name} is not one")
    from qhyer import envs

    env = envs.make(environment)
    turned = hdf5.from_legacy(arrays, *env.maze_map.shape)
    cells = np.rint(turned["observations"][:, :2] + [env._offset_x, env._offset_y]).astype(int)[:, ::-1]
    inside = ((cells >= 0) & (cells < env.maze_map.shape)).all(1)
    free = inside & (env.maze_map[tuple(np.where(inside[:, None], cells, 0).T)] == 0)
    if free.mean() < 0.99:
        raise UserError(
            f"{100 * (1 - free.mean()):.0f} % of the positions in {path.name} would lie in walls of {environment}: "
            "name its own maze with --maze, and leave it out if the coordinates are not D4RL's"
        )
    return turned


def _refuse(path: Path, arrays: Mapping[str, np.ndarray], *but: str) -> list[checks.Problem]:
    """An error if the check finds one, but for those of some codes; else what it found."""
    problems = _problems(arrays)
    if any(problem.severity == "error" and problem.code not in but for problem in problems):
        raise DataError(checks.describe(str(path), problems))
    return problems


def _read(
    path: Path, keys: Sequence[str] = (), split: str | None = None, *, clip: bool = True
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays, and what was repaired when they were read."""
    if path.suffix in HDF5:
        return hdf5.read(path, keys, split, clip=clip)
    if keys or split is not None:
        raise UserError(f"--keys and --split choose from an HDF5 file, and {path.name} is none")
    return read_npz(path), []


def _stored_columns(arrays: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    """The goal's columns as the file itself names them; all of them when it does not."""
    return goal_columns(stored_goal(arrays), _names(arrays), arrays["observations"].shape[1])


def _locate(name_or_path: str) -> Path:
    """A file if there is one; otherwise the name of a dataset that must be on the disk."""
    path = Path(name_or_path)
    if path.is_file() or path.suffix in FILES:
        return path  # reading it says so if it does not exist
    dataset = registry.get(name_or_path)
    found = registry.find(dataset.name)
    if found is None:
        raise UserError(f"{dataset.name} is not on this disk; `qhyer data generate {dataset.name}` makes it")
    return found


def _span(values: np.ndarray) -> str:
    return f"{values.min()}" if values.min() == values.max() else f"{values.min()} to {values.max()}"


def _provenance(path: Path) -> list[tuple[str, str]]:
    """The sidecar in a few lines. `read_npz` has checked it against the file by now."""
    sidecar = path.with_suffix(".json")
    if path.suffix in HDF5:
        place = hdf5.recorded_in(path)
        lines = [] if place is None else [("recorded in", place)]
        return [*lines, ("provenance", "an HDF5 file; `qhyer data check` says what is repaired when it is read")]
    if not sidecar.is_file():
        return [("provenance", f"none: there is no {sidecar.name}")]
    recorded: dict[str, Any] = read_sealed_json(sidecar)
    told = ("environment", "source", "recorded_in", "cut", "split", "keys", "seed", "sha256")
    found = {key: recorded[key] for key in told if key in recorded}
    lines = [(k.replace("_", " "), ", ".join(v) if isinstance(v, list) else str(v)) for k, v in found.items()]
    for key in ("settings", "versions"):
        if isinstance(recorded.get(key), dict):
            lines.append((key, ", ".join(f"{name} {value}" for name, value in recorded[key].items())))
    return lines
