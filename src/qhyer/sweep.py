"""A sweep: the runs of a manifest, trained and evaluated, here or on a Ray cluster. What is finished is not done again.

On a cluster a run is made in a temporary folder of its node, and its files travel: to the node what there is of an
unfinished run, back all that it came to. Where all nodes see the same folder (`shared`), it is written there directly,
and a lost run goes on from its last checkpoint instead of from its beginning. Datasets do not travel: each node reads
them from the folder they have here, if it sees it, and otherwise from its own ($QHYER_DATA).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qhyer import rollout
from qhyer.errors import CorruptFile, Taken, UserError, require
from qhyer.launch import Launcher, Lost, cores, failure, launch, tell
from qhyer.progress import listened
from qhyer.storage import refusal, write_json
from qhyer.watch import EVALUATING, TRAINING, Task, Watch

if TYPE_CHECKING:
    from qhyer.data.episodes import Episodes
    from qhyer.manifest import Cell

PIPED = 160  # columns where nobody says how wide: a file, or another program
Files = dict[str, bytes]
"""a run's folder: path in it -> content"""


def sweep(
    manifest: tyro.conf.Positional[Path],
    *,
    dry_run: bool = False,
    only: tuple[str, ...] = (),
    workers: int | None = None,
    launcher: Launcher = "local",
    address: str | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    shared: bool = False,
    retries: int = 3,
) -> int:
    """Train and evaluate the runs of a manifest: agents × datasets × seeds. Run it again to go on after a stop.

    Args:
        manifest: a TOML file; docs/examples/sweep.toml is one, docs/scale.md says what it may hold
        dry_run: show the runs and stop: how many updates each makes (of an agent with stages: first + second), and how
            far it is
        only: only runs whose name has one of these in it, such as gcbc, s0- or 'cube-*-s0-'
        workers: runs at a time; 1 if not given (ray: as many as the cluster has room for)
        launcher: local, or ray: on a Ray cluster, with the same results
        address: the Ray cluster's; $RAY_ADDRESS, or the one running here, if not given
        cpus: ray: cores that a run asks for
        gpus: ray: GPUs that a run asks for; 0.5 lets two share one
        shared: ray: every node sees the output folder under the same path; runs are written there directly
        retries: how often a run is tried again after its worker was lost
    """
    from qhyer.manifest import read

    return run_cells(
        read(manifest),
        dry_run=dry_run,
        only=only,
        workers=workers,
        launcher=launcher,
        address=address,
        cpus=cpus,
        gpus=gpus,
        shared=shared,
        retries=retries,
    )


def run_cells(
    cells: list[Cell],
    *,
    dry_run: bool = False,
    only: Sequence[str] = (),
    workers: int | None = None,
    launcher: Launcher = "local",
    address: str | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    shared: bool = False,
    retries: int = 3,
) -> int:
    """Does what of these runs is not done, and says so; 0 if all went well. The options are those of `sweep`."""
    require(workers is None or workers >= 1, f"workers must be at least 1, not {workers}")
    _of_a_cluster_alone(launcher, shared, address, cpus, gpus)
    console = Console(width=None if sys.stdout.isatty() else PIPED, highlight=False)
    cells = _matching(cells, only)
    before = [status(cell) for cell in cells]
    console.print(_table(cells, before))
    todo = [cell for cell, at in zip(cells, before) if not at.finished]
    gone = [cell.name for cell, at in zip(cells, before) if not at.kept]
    alike = len({_updates(cell) for cell in cells}) == 1
    console.print(
        f"{len(cells)} run{'s' if len(cells) > 1 else ''}, {len(cells) - len(todo)} finished, {len(todo)} to do"
        + (f"; {_updates(cells[0])} updates each" if alike else "")
    )
    for text in [*_untouched_stages(todo), *_changed_data([cell for cell, at in zip(cells, before) if at.finished])]:
        console.print(f"[yellow]note:[/yellow] {escape(text)}", soft_wrap=True)
    tasks: dict[str, int] = {}
    if launcher == "local":  # nodes of a cluster may have what is not here
        for environment in dict.fromkeys(cell.environment for cell in todo if cell.eval is not None):
            if environment is not None:
                tasks[environment] = rollout.check(environment).tasks
    _check_tasks(todo, tasks)
    absent = _absent_data(todo) if launcher == "local" else ""
    _check_goals(todo)
    if dry_run and absent:
        console.print(absent, markup=False, soft_wrap=True)
    if dry_run or not todo:
        return 0
    if gone:
        raise UserError(
            f"{', '.join(gone)}: evaluated on other episodes than asked for, and the weights are not kept; "
            "remove the folder to train it again, or give another out"
        )
    if absent:
        raise UserError(absent)
    options = dict(launcher=launcher, address=address, cpus=cpus, gpus=gpus, retries=retries)
    failed, taken = _run(todo, console, shared=shared, workers=workers, **options)  # type: ignore[arg-type]
    after = [status(cell) for cell in cells]
    console.print(_table(cells, after, failed))
    for name, text in failed.items():
        console.print(f"[red]failed:[/red] {escape(name)}: {escape(text)}", soft_wrap=True)
    for name, text in taken.items():
        console.print(f"[yellow]left to another process:[/yellow] {escape(name)}: {escape(text)}", soft_wrap=True)
    if failed or taken:
        console.print("the same command tries them again")
    mixed = _mixed_data(cells)
    for text in mixed:
        console.print(f"[red]not comparable:[/red] {escape(text)}", soft_wrap=True)
    if not failed and not taken:
        console.print(f"`qhyer report {cells[0].out}` makes a page of them", markup=False, soft_wrap=True)
    return 1 if failed or taken or mixed else 0


def _of_a_cluster_alone(launcher: Launcher, shared: bool, address: str | None, cpus: float, gpus: float) -> None:
    """An option that would do nothing is a mistake: who gives it thinks of a cluster."""
    if launcher == "ray":
        return
    if shared:
        raise UserError("--shared is for --launcher ray; local runs are written where they belong anyway")
    given = {"--address": address is not None, "--cpus": cpus != 1.0, "--gpus": gpus != 0.0}
    if wrong := [name for name, there in given.items() if there]:
        raise UserError(f"{wrong[0]} is for --launcher ray; local runs share what this machine has (--workers)")


def _absent_data(cells: Sequence[Cell]) -> str:
    """Which datasets are not on this disk, and what to do about it; nothing if all are there. A file of one's own that
    is not there is an error: nobody can make it."""
    from qhyer.data import registry

    own = sorted({cell.dataset for cell in cells if cell.dataset.endswith(".npz")})
    if absent := [path for path in own if not Path(path).is_file()]:
        raise UserError(f"no such file: {', '.join(absent)}")
    names = sorted({cell.dataset for cell in cells} - set(own))
    if absent := [name for name in names if registry.find(name) is None]:
        looked = f"looked in {registry.data_dir()} and ~/.ogbench/data"
        made = f"`qhyer data generate {' '.join(absent)}` makes {'them' if len(absent) > 1 else 'it'}"
        return f"not on this disk: {', '.join(absent)} ({looked}); {made}"
    return ""


def _check_tasks(cells: Sequence[Cell], known: Mapping[str, int]) -> None:
    """An error where a task is to be evaluated that an environment has not: before the training, not after it.

    `known`: how many tasks those have that were looked at. Of the others those of the registered datasets are made for
    it, if they can be here; each has a first task without a look.
    """
    from qhyer.data import registry
    from qhyer.evaluate import task_numbers

    registered = {dataset.environment for dataset in registry.DATASETS.values()}
    for cell in cells:
        if cell.eval is None or max(cell.eval.tasks or (1,)) == 1:
            continue
        environment = cell.environment or registry.DATASETS[cell.dataset_name].environment
        count = known.get(environment)
        if count is None and environment in registered:
            with contextlib.suppress(Exception):  # no simulator here, but perhaps where the runs are made
                count = _num_tasks(environment)
        if count is not None:
            try:
                task_numbers(cell.eval, environment, count)
            except UserError as error:
                raise UserError(f"{cell.place}: eval: {error}") from None


def _check_goals(cells: Sequence[Cell]) -> None:
    """An error where a file that is here has not the coordinates that are to make the goal. Its arrays are not read."""
    from qhyer.data.episodes import goal_columns, header

    checked = set()
    for cell in cells:
        path = Path(cell.dataset)
        if cell.goal is None or (path, cell.goal) in checked or not path.is_file():
            continue
        checked.add((path, cell.goal))
        try:
            names, width = header(path)
        except Exception:  # no dataset; zipfile and numpy raise many kinds, and reading it says what is wrong
            continue
        try:
            goal_columns(cell.goal, names, width)  # type: ignore[arg-type]
        except UserError as error:
            raise UserError(f"{cell.place}: goal: {path.name}: {error}") from None


def _matching(cells: list[Cell], only: Sequence[str]) -> list[Cell]:
    if not only:
        return cells
    found = [cell for cell in cells if any(fnmatch.fnmatchcase(cell.name, f"*{glob}*") for glob in only)]
    if not found:
        raise UserError(f"no run matches --only {' '.join(only)}; the names are like {cells[0].name}")
    return found


# ------------------------------------------------------------------------------------------------- what there is


@dataclass(frozen=True)
class Status:
    """How far a run is, as its folder tells."""

    text: str
    finished: bool = False
    """trained, and evaluated as the manifest asks"""
    success: float | None = None
    score: float | None = None
    """between a random policy (0) and the data's controller (100), where the task pays a return"""
    kept: bool = True
    """False: rows of another evaluation, and no weights to evaluate again; training anew would write over a record"""


def status(cell: Cell) -> Status:
    from qhyer import checkpoint

    folder = cell.folder / "checkpoints"
    for _ in range(10):
        before = checkpoint.steps(folder)
        try:
            return _status(cell)
        except (UserError, OSError) as error:
            if checkpoint.steps(folder) == before:
                if isinstance(error, CorruptFile):
                    return Status(f"damaged: {error}")
                raise
    return Status("being trained")  # by another process, whose checkpoints are gone before they are read


def _status(cell: Cell) -> Status:
    from qhyer import checkpoint, runs
    from qhyer.config import to_dict
    from qhyer.records import mean_return, normalised, read_rows
    from qhyer.train import as_today, is_finished

    steps = checkpoint.steps(cell.folder / "checkpoints")
    if not (cell.folder / "run.json").is_file():
        return Status("new")
    rows = read_rows(cell.folder / "episodes.csv")
    # Without weights, which may have been cleared away, rows of the last update tell the score.
    last = steps[-1] if steps else max((row.step for row in rows), default=0)
    if not steps and (cell.eval is None or last < sum(cell.config.updates)):
        return Status("new")
    then, now = as_today(cell.agent, runs.read(cell.folder)["config"]), to_dict(cell.config)
    if changed := [name for name, value in now.items() if then.get(name) != value]:
        return Status(f"made with another {', '.join(changed)}")  # a default that has changed since
    if steps and not is_finished(cell.folder, cell.config):
        whole = checkpoint.resumable(checkpoint.latest(cell.folder / "checkpoints"))
        lacking = "" if whole else f"; {checkpoint.TRAINING} is missing"
        return Status(f"unfinished, at update {steps[-1]}{lacking}")
    if cell.eval is None:
        return Status("finished", True)
    rows = [row for row in rows if row.step == last]
    environment = cell.environment or runs.read(cell.folder)["environment"]
    if not rows:
        return Status("trained, not evaluated")
    if not asked_for(cell, environment) <= {row.which for row in rows}:
        if not steps:
            return Status("rows of other episodes; weights not kept", kept=False)
        return Status("trained, not evaluated")
    by_task: dict[int, list[int]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row.success)
    success = sum(sum(v) / len(v) for v in by_task.values()) / len(by_task)
    mean = mean_return(rows)
    text = "finished" if steps else "finished; weights not kept"
    return Status(text, True, success, None if mean is None else normalised(environment, mean))


def asked_for(cell: Cell, environment: str) -> set[tuple[int, int, int]]:
    """The episodes of a cell's evaluation, as `EpisodeRow.which` has them."""
    from qhyer.evaluate import episodes_of

    assert cell.eval is not None
    tasks = _num_tasks(environment) if cell.eval.tasks is None else max(cell.eval.tasks)
    return episodes_of(cell.eval, environment, tasks)


@functools.cache
def _num_tasks(environment: str) -> int:
    from qhyer import envs

    env = envs.make(environment)
    try:
        return envs.num_tasks(env)
    finally:
        env.close()


def _table(cells: Sequence[Cell], found: Sequence[Status], failed: dict[str, str] | None = None) -> Table:
    """The runs in the manifest's order; before they are made, with the updates of each where these differ."""
    table = Table()
    table.add_column("run", overflow="fold")
    updates = [_updates(cell) for cell in cells]
    varied = failed is None and len(set(updates)) > 1
    if varied:
        table.add_column("updates", justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    table.add_column("success %", justify="right", no_wrap=True)
    scored = any(at.score is not None for at in found)
    if scored:
        table.add_column("score", justify="right", no_wrap=True)
    for cell, count, at in zip(cells, updates, found):
        text = f"[red]failed[/red]; {escape(at.text)}" if cell.name in (failed or {}) else escape(at.text)
        numbers = ["" if at.success is None else f"{100 * at.success:.1f}"]
        if scored:
            numbers.append("" if at.score is None else f"{at.score:.1f}")
        table.add_row(escape(cell.name), *[count] * varied, text, *numbers)
    return table


def _updates(cell: Cell) -> str:
    """Of each stage."""
    return " + ".join(f"{count:,}" for count in cell.config.updates)


def _untouched_stages(cells: Sequence[Cell]) -> list[str]:
    from qhyer import presets

    told = (presets.untouched_stages(cell.agent, cell.preset, cell.dataset_name, cell.config) for cell in cells)
    return list(dict.fromkeys(filter(None, told)))


def _changed_data(cells: Sequence[Cell]) -> list[str]:
    """A sentence for each dataset that is another than a finished run was trained on. Only files that do not look as
    they did then are read; what is in them decides."""
    from qhyer import runs
    from qhyer.data import registry

    older: dict[str, list[str]] = {}
    now: dict[tuple[str, Any], str] = {}
    for cell in cells:
        own = cell.dataset.endswith(".npz")
        file, about = Path(cell.dataset) if own else registry.find(cell.dataset), cell.folder / "run.json"
        if file is None or not file.is_file() or _looks_the_same(file, about):
            continue
        key = cell.dataset, cell.goal
        if key not in now:
            try:
                now[key] = _load(cell, file).fingerprint
            except UserError:  # it cannot be trained on as it is now; for runs that are done this is a note, too
                now[key] = ""
        if now[key] != runs.read(cell.folder).get("data", {}).get("fingerprint"):
            older.setdefault(file.name, []).append(cell.name)
    return [
        f"{file} has changed since the training of {', '.join(names)}: remove the folders to train on it as it is now"
        for file, names in older.items()
    ]


def _looks_the_same(file: Path, about: Path) -> bool:
    """Whether a dataset's file is as it was when a run began, without reading it: size, time and sidecar. Runs of
    earlier versions tell their own time alone, which a file that was copied with its date is older than."""
    from qhyer.data.origin import sidecar
    from qhyer.runs import read

    data, now = read(about.parent).get("data", {}), file.stat()
    if "file" not in data:
        return now.st_mtime <= about.stat().st_mtime
    made = data.get("generated") or {}
    then = {"bytes": now.st_size, "modified": now.st_mtime_ns}
    return data["file"] == then and made.get("sha256") == (sidecar(file).get("sha256") if made else None)


def data_seen(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The beginning of a fingerprint -> the runs that were trained on such data, of those that have begun."""
    from qhyer import runs

    seen: dict[str, list[Cell]] = {}
    for cell in cells:
        if (cell.folder / "run.json").is_file():
            print_ = str(runs.read(cell.folder).get("data", {}).get("fingerprint", ""))[:12]
            seen.setdefault(print_, []).append(cell)
    return seen


def _mixed_data(cells: Sequence[Cell]) -> list[str]:
    """A sentence for each dataset whose runs saw different data: other files on some nodes, or since an earlier run."""
    found = []
    for dataset in dict.fromkeys(cell.dataset for cell in cells):
        seen = data_seen([cell for cell in cells if cell.dataset == dataset])
        named = ", ".join(f"{first.name} on {print_}" for print_, (first, *_) in seen.items())
        found += [f"runs on {dataset} were trained on different data: {named}"] if len(seen) > 1 else []
    return found


# -------------------------------------------------------------------------------------------------- running them


@dataclass(frozen=True)
class CellJob:
    """A cell as it is sent to a worker."""

    cell: Cell
    """its folder, and that of an own npz, as absolute paths"""
    data: Path
    """where datasets are on the machine that asks"""
    command: tuple[str, ...]
    """what the user typed; for run.json"""
    ship: bool = False
    """write into a temporary folder and send the files back"""
    files: Files = field(default_factory=dict)
    """what there is of the run, for a worker that does not see its folder"""
    eval_workers: int | None = None
    quiet: bool = True
    asked_on: str = field(default_factory=platform.node)


@dataclass(frozen=True)
class CellResult:
    seconds: float
    files: Files = field(default_factory=dict)
    error: str = ""
    trace: str = ""
    taken: str = ""
    """where another process trains or evaluates it, what to say of that: nothing is wrong with the run"""


def _run(
    cells: Sequence[Cell],
    console: Console,
    *,
    shared: bool,
    workers: int | None,
    launcher: Launcher,
    cpus: float,
    **options: Any,
) -> tuple[dict[str, str], dict[str, str]]:
    """Runs the cells; returns what went wrong, and what another process is at work on, by name."""
    from qhyer.data import registry

    ship = launcher == "ray" and not shared
    taken: dict[str, str] = {}
    there = _packed(cells, taken) if ship else {}
    cells = [cell for cell in cells if cell.name not in taken]
    share = int(cpus) if launcher == "ray" else cores() // (workers or 1)
    alone = launcher == "local" and (workers or 1) == 1
    jobs = [
        CellJob(
            dataclasses.replace(cell, out=cell.out.resolve()),
            registry.data_dir().resolve(),
            tuple(sys.argv),
            ship,
            there.get(cell.name, {}),
            None if alone else share if share > 1 else 0,
            quiet=not alone,
        )
        for cell in cells
    ]
    failed: dict[str, str] = {}
    names = [cell.name for cell in cells]
    watch = Watch([_task(cell) for cell in cells], console, alone=alone)
    try:
        with _sigterm_interrupts(), watch:
            outcomes = launch(
                run_cell,
                jobs,
                launcher=launcher,
                workers=workers,
                cpus=cpus,
                names=names,
                note=lambda text: watch.say(escape(text)),
                hear=watch.hear,
                **options,
            )
            if cells and (why := refusal(cells[0].out)):  # one reason, and not one for each run
                raise UserError(f"runs cannot be written to {cells[0].out}: {why}")
            with contextlib.closing(outcomes):
                for number, outcome in enumerate(outcomes, 1):
                    cell = cells[outcome.index]
                    result = outcome.value or CellResult(0.0, error=outcome.error, trace=outcome.trace)
                    if result.files:
                        result = _brought(result, cell.folder)
                    watch.over(outcome.index, failed=bool(result.error))
                    what = f"{number} of {len(cells)}: {cell.name}"
                    if result.taken:
                        taken[cell.name] = result.taken
                        watch.say(f"{escape(what)}: [yellow]left to another process[/yellow]\n{escape(result.taken)}")
                    elif result.error:
                        failed[cell.name] = result.error
                        watch.say(f"{escape(what)}: [red]failed[/red]\n{escape(result.trace or result.error)}")
                    else:
                        at = status(cell)
                        said = "trained" if at.success is None else f"success {100 * at.success:.1f} %"
                        said += "" if at.score is None else f", score {at.score:.1f}"
                        watch.say(f"{escape(what)}: {said}, {result.seconds:.0f} seconds")
    except KeyboardInterrupt:
        watch.say("Stopped. What was done is kept: the same command goes on from here.")
        raise KeyboardInterrupt("told") from None
    return failed, taken


def _packed(cells: Sequence[Cell], taken: dict[str, str]) -> dict[str, Files]:
    """What there is of the runs, to be sent along; those that are being trained or evaluated here are `taken`."""
    from qhyer.runs import hold_rows
    from qhyer.train import hold

    files: dict[str, Files] = {}
    for cell in cells:
        if cell.folder.is_dir():
            try:
                with contextlib.ExitStack() as held:
                    hold(held, [cell.folder], quiet=True)
                    held.enter_context(hold_rows(cell.folder))
                    files[cell.name] = pack(cell.folder)
            except Taken as error:
                taken[cell.name] = str(error)
    return files


def _brought(result: CellResult, folder: Path) -> CellResult:
    """Puts a run where it belongs, unless one is being trained or evaluated there by now: that one stays."""
    from qhyer.runs import hold_rows
    from qhyer.train import hold

    with contextlib.ExitStack() as held:
        try:
            hold(held, [folder], quiet=True)
            held.enter_context(hold_rows(folder))
        except Taken as taken:
            return CellResult(result.seconds, taken=str(taken))
        unpack(result.files, folder)
    return result


def _task(cell: Cell) -> Task:
    """What there is to do."""
    from qhyer import checkpoint

    done = checkpoint.steps(cell.folder / "checkpoints")[-1:] or [0]
    kind = cell.dataset, cell.agent, cell.preset, cell.variant
    return Task(cell.name, kind, max(0, sum(cell.config.updates) - done[0]), cell.eval is not None)


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """A batch system's SIGTERM stops the sweep as Ctrl-C does: running trainings save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_cell(job: CellJob) -> CellResult:
    """Trains a cell, or goes on with it, and evaluates its last checkpoint."""
    begun = time.perf_counter()
    if not job.ship:
        try:
            _train_and_evaluate(job, job.cell.folder)
        except Taken as taken:
            return CellResult(time.perf_counter() - begun, taken=str(taken))
        return CellResult(time.perf_counter() - begun)
    with tempfile.TemporaryDirectory(prefix="qhyer-") as scratch:
        run = Path(scratch).resolve() / job.cell.folder.name
        if job.files:
            unpack(job.files, run)
        error = trace = ""
        try:
            _train_and_evaluate(job, run)
        except Lost:
            raise
        except Exception as caught:  # what it left (rows that were not finite, metrics) travels all the same
            error, trace = (text.replace(str(run), str(job.cell.folder)) for text in failure(caught))
        return CellResult(time.perf_counter() - begun, pack(run), error, trace)


def _train_and_evaluate(job: CellJob, run: Path) -> None:
    from qhyer.runs import evaluate_run
    from qhyer.train import Stopped, train

    cell = job.cell
    episodes = _episodes(job)
    ours, sys.argv = sys.argv, list(job.command)  # run.json says what the user typed, not what a worker was started as
    try:
        with listened(lambda done, total: tell((TRAINING, done, total))):
            train(
                cell.agent,
                cell.dataset,
                cell.config,
                cell.train,
                preset=cell.preset,
                run=run,
                resume=None,  # whether there is something to go on with is seen when nobody else trains it
                episodes=episodes,
                environment=cell.environment,
                quiet=job.quiet,
            )
    except Stopped as stopped:
        raise Lost(str(stopped)) from None
    finally:
        sys.argv = ours
    if cell.eval is not None:
        with listened(lambda done, total: tell((EVALUATING, done, total))):
            evaluate_run(
                run,
                cell.eval,
                environment=cell.environment,
                device=cell.eval_device,
                workers=job.eval_workers,
                quiet=job.quiet,
            )
        _keep_protocol(cell, run)


def _keep_protocol(cell: Cell, run: Path) -> None:
    """run.json says which evaluation the manifest asked for: a later one of other episodes is told from it."""
    from qhyer import runs
    from qhyer.records import read_rows

    assert cell.eval is not None
    info, rows = runs.read(run), read_rows(run / "episodes.csv")
    last = max((row.step for row in rows), default=0)
    tasks = cell.eval.tasks or {row.task for row in rows if row.step == last}
    asked = {"episodes": cell.eval.episodes, "seed": cell.eval.seed, "tasks": sorted(tasks)}
    asked |= {"environment": cell.environment or info["environment"]}
    if info.get("evaluation") != asked:
        write_json(run / "run.json", {**info, "evaluation": asked})


def _episodes(job: CellJob) -> Episodes:
    """The data, as this machine has it."""
    there = job.data / f"{job.cell.dataset}.npz"
    try:
        return _load(job.cell, there if there.is_file() else job.cell.dataset)
    except UserError as error:
        if platform.node() == job.asked_on:
            raise
        raise UserError(f"on {platform.node()}: {error}") from None


def _load(cell: Cell, source: str | Path) -> Episodes:
    from qhyer.data import registry
    from qhyer.data.episodes import Episodes

    if cell.goal is not None:
        return Episodes.load(cell.dataset, goal=list(cell.goal))  # type: ignore[arg-type]
    return registry.load(source)[0]


# ------------------------------------------------------------------------------------------------- folders that travel


def pack(folder: Path) -> Files:
    """All files below a folder, without those that are half-written."""
    from qhyer.storage import TEMPORARY

    found = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path: path.relative_to(folder) for path in found}
    return {
        name.as_posix(): path.read_bytes()
        for path, name in names.items()
        if not any(part.startswith(TEMPORARY) for part in name.parts)
    }


def unpack(files: Files, folder: Path) -> None:
    """The folder these files make, whole or not at all; one that is there is replaced."""
    from qhyer.storage import atomic_directory

    with atomic_directory(folder) as temporary:
        for name, content in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
