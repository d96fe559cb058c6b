"""Runs generation: episodes dealt to workers, finished ones kept, files that are whole or absent.

Every episode is a function of (dataset, seed, split, index) alone, so neither the number of workers nor an
interruption changes a byte of the result. Finished episodes wait in `.NAME.partial/` for the last one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import signal
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import qhyer
from qhyer.data.generate.recipe import (
    Arrays,
    Collector,
    EpisodeSeeds,
    Recipe,
    Split,
    collector_for,
    recipe_for,
    settings,
)
from qhyer.errors import CorruptFile, UserError
from qhyer.launch import Launcher, Outcome, cores, follow_parent, launch
from qhyer.storage import (
    atomic_file,
    locked,
    read_sealed_json,
    sha256_file,
    sweep_partial,
    write_json,
    write_sealed_json,
)

if TYPE_CHECKING:
    from qhyer.data.registry import Dataset

PLAIN_EVERY_S = 15.0  # between progress lines when there is no terminal


def versions(kind: str = "") -> dict[str, str]:
    """What can change the bytes of an episode of this kind."""
    mazes = "gymnasium-robotics" if kind == "waypoint" else "ogbench"
    installed = {name: importlib.metadata.version(name) for name in (mazes, "mujoco", "gymnasium", "numpy")}
    return {"qhyer": qhyer.__version__, **installed, "python": platform.python_version()}


def generate(
    dataset: Dataset,
    *,
    out: Path | None = None,
    episodes: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    validation: bool = True,
    progress: bool = True,
    overwrite: bool = False,
    rows: int | None = None,
    ant: Path | None = None,
    launcher: Launcher = "local",
    address: str | None = None,
) -> Path:
    """Makes NAME.npz and NAME-val.npz (a tenth as many episodes) with their sidecars in the folder `out`.

    Returns the path of the training file. Run it again after an interruption and it goes on where it stopped.
    `episodes` defaults to the official number, `workers` to one for each core; `rows` shortens the episodes.
    `ant` is the folder of the policy that walks in ant mazes; the one that comes with the package if not given.
    With the launcher "ray", episodes are made on the cluster at `address` (see `launch`) and written here: the same
    bytes, and nothing needs to be shared but the versions of the packages.
    In a script of yours, call it under `if __name__ == "__main__":`, as the workers import the script.
    """
    from qhyer.data import registry  # not above: workers import this module and need no torch

    episodes = dataset.episodes if episodes is None else episodes
    if episodes < 1:
        raise UserError(f"episodes must be at least 1, not {episodes}")
    if workers is not None and workers < 1:
        raise UserError(f"workers must be at least 1, not {workers}")
    if seed < 0:
        raise UserError(f"seed must not be negative, and is {seed}")
    if rows is not None and rows < 2:
        raise UserError(f"an episode has at least 2 rows, not {rows}")
    folder = registry.data_dir() if out is None else Path(out)
    if folder.suffix == ".npz" or folder.is_file():
        raise UserError(f"out is the folder to write to, not a file: {folder}")
    if ant is not None and dataset.family != "antmaze":
        raise UserError(f"an ant is for ant mazes, and {dataset.name} is not one's")
    if address is not None and launcher != "ray":
        raise UserError("--address is for --launcher ray")
    console = Console(stderr=True, quiet=not progress)

    job = Job(recipe_for(dataset, rows, ant), seed, folder)
    counts: dict[Split, int] = {"train": episodes}
    if validation:
        counts["validation"] = max(1, episodes // 10)
    missing = {split: count for split, count in counts.items() if not job.is_finished(split, count, overwrite, console)}
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with job.working_folder(console):
            job.collect(missing, workers, console, launcher, address)
            for split, count in missing.items():
                job.finish(split, count)
                console.print(f"wrote {job.path(split)}", markup=False, highlight=False, soft_wrap=True)
    return job.path("train")


# ------------------------------------------------------------------------------------------------ one job


@dataclass(frozen=True)
class Job:
    """One dataset being made: where its files go and which are there."""

    recipe: Recipe
    seed: int
    folder: Path

    def path(self, split: Split) -> Path:
        return self.folder / f"{self.recipe.name}{'' if split == 'train' else '-val'}.npz"

    @property
    def work(self) -> Path:
        return self.folder / f".{self.recipe.name}.partial"

    def chunk(self, split: Split, index: int) -> Path:
        return self.work / f"{split}-{index:06d}.npz"

    @property
    def key(self) -> dict[str, Any]:
        """What finished episodes in the working folder depend : not the number of episodes."""
        return {"seed": self.seed, "settings": settings(self.recipe), "versions": versions(self.recipe.kind)}

    def is_finished(self, split: Split, episodes: int, overwrite: bool, console: Console) -> bool:
        path, sidecar = self.path(split), self.path(split).with_suffix(".json")
        if not path.is_file():
            return False
        again = "pass overwrite=True (--overwrite) to make it again"
        if not sidecar.is_file():
            # Killed after the data took its name and before the sidecar did: the episodes are still there.
            if overwrite or self._working_key() == self.key:
                return False
            raise UserError(f"{path} exists without a sidecar, so its settings are unknown: {again}, or move it away")
        try:
            recorded = read_sealed_json(sidecar)
        except CorruptFile:
            if overwrite:
                return False
            raise UserError(f"{sidecar} is damaged: {again}") from None
        wanted = {"seed": self.seed, "settings": settings(self.recipe), "episodes": episodes}
        other = _differences(recorded, wanted)
        if overwrite and (other or recorded.get("versions") != versions(self.recipe.kind)):
            return False
        if other:
            raise UserError(
                f"{path} was made with other settings ({'; '.join(other)}): {again}, or give another folder (--out)"
            )
        if recorded.get("sha256") != sha256_file(path):
            if overwrite:
                return False
            raise CorruptFile(f"{path} is damaged: its SHA-256 is not the one in {sidecar.name}; {again}")
        console.print(
            f"{path} is there already, with these settings; nothing to do",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return True

    def _working_key(self) -> Any:
        try:
            return json.loads((self.work / "settings.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    @contextlib.contextmanager
    def working_folder(self, console: Console) -> Iterator[None]:
        """The folder of finished episodes: emptied if of other settings, removed when all is done."""
        what = f"{self.recipe.name} is being generated in {self.folder}"
        with locked(self.work / "lock", what, "let it end, or stop it and run the same again"):
            key = self._working_key()
            if key != self.key:
                left = [item for item in self.work.iterdir() if item.name != "lock"]
                if left:
                    console.print(
                        f"{self.work} holds episodes of other settings or versions; they are removed", markup=False
                    )
                for item in left:
                    item.unlink()
                write_json(self.work / "settings.json", self.key)
            sweep_partial(self.work)
            yield
            shutil.rmtree(self.work)

    def collect(
        self,
        counts: dict[Split, int],
        workers: int | None,
        console: Console,
        launcher: Launcher = "local",
        address: str | None = None,
    ) -> None:
        """Makes the episodes that are not in the working folder yet."""
        wanted = [(split, index) for split, count in counts.items() for index in range(count)]
        todo = [item for item in wanted if not _is_whole(self.chunk(*item))]
        done = len(wanted) - len(todo)
        if done:
            console.print(f"{self.recipe.name}: going on after {done} of {len(wanted)} episodes", highlight=False)
        if not todo:
            return
        tasks = [
            (EpisodeSeeds(self.seed, self.recipe.name, split, index), self.chunk(split, index)) for split, index in todo
        ]
        with _progress(console, self.recipe.name, done, len(wanted)) as advance:
            if launcher == "ray":
                _collect_ray(self.recipe, tasks, workers, address, advance, console)
                return
            workers = cores() if workers is None else workers
            if min(workers, len(tasks)) == 1:
                collector = collector_for(self.recipe)
                for seeds, path in tasks:
                    _make(collector, seeds, path)
                    advance()
            else:
                _collect_parallel(self.recipe, tasks, workers, advance)

    def finish(self, split: Split, episodes: int) -> None:
        """Joins the episodes into the final file. The sidecar comes last: it never describes another."""
        path, sidecar = self.path(split), self.path(split).with_suffix(".json")
        chunks = [self.chunk(split, index) for index in range(episodes)]
        sidecar.unlink(missing_ok=True)
        with atomic_file(path) as temporary:
            join_npz(chunks, temporary)
            digest = sha256_file(temporary)
        write_sealed_json(
            sidecar,
            {
                "dataset": self.recipe.name,
                "environment": self.recipe.environment,
                "split": split,
                "episodes": episodes,
                "rows": episodes * self.recipe.rows,
                "sha256": digest,
                **self.key,
            },
        )


def _differences(recorded: Any, wanted: dict[str, Any]) -> list[str]:
    """ "seed 0 there, 1 asked for", for each value that is not as recorded."""
    found = []
    for name, value in wanted.items():
        there = recorded.get(name) if isinstance(recorded, dict) else None
        if isinstance(value, dict):
            found += _differences(there, value)
        elif there != value:
            found.append(f"{name} {there} there, {value} asked for")
    return found


# ------------------------------------------------------------------------------------------------ workers


def _episode(collector: Collector, seeds: EpisodeSeeds) -> Arrays:
    arrays = collector.episode(seeds)
    for key in ("observations", "actions"):
        if not np.isfinite(arrays[key]).all():
            raise RuntimeError(f"the simulator gave values that are not finite in {seeds}: {key}")
    return arrays


def _make(collector: Collector, seeds: EpisodeSeeds, path: Path) -> None:
    write_chunk(path, _episode(collector, seeds))


def write_chunk(path: Path, arrays: Arrays) -> None:
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


_worker_collector: Collector | None = None
_worker_stop: Any = None


def _start_worker(recipe: Recipe, stop: Any) -> None:
    """Ctrl-C is for the parent, which lets running episodes end; a worker whose parent is gone goes too."""
    global _worker_collector, _worker_stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()
    _worker_collector, _worker_stop = collector_for(recipe), stop


def _work(seeds: EpisodeSeeds, path: Path) -> None:
    assert _worker_collector is not None
    if not _worker_stop.is_set():  # episodes that were dealt out before an interruption are not begun after it
        _make(_worker_collector, seeds, path)


def _collect_parallel(recipe: Recipe, tasks: Sequence[tuple[EpisodeSeeds, Path]], workers: int, advance: Any) -> None:
    context = multiprocessing.get_context("spawn")  # forking a process with threads (torch, BLAS) may hang
    stop = context.Event()
    executor = ProcessPoolExecutor(min(workers, len(tasks)), context, _start_worker, (recipe, stop))
    try:
        with _single_threaded():
            futures = [executor.submit(_work, seeds, path) for seeds, path in tasks]
        for future in as_completed(futures):
            future.result()
            advance()
    except BrokenProcessPool:
        raise UserError(
            "a worker process ended unexpectedly (out of memory?); finished episodes are kept: run the same "
            "again, perhaps with fewer workers. In a script, call generate under `if __name__ == '__main__':`"
        ) from None
    finally:
        stop.set()
        executor.shutdown(wait=True, cancel_futures=True)


_kept_collector = functools.lru_cache(maxsize=1)(collector_for)  # a node's worker makes many episodes of one recipe


def _remote_episode(job: tuple[Recipe, EpisodeSeeds, dict[str, str]]) -> Arrays:
    """An episode made on another machine, which must have the versions that the sidecar will name."""
    recipe, seeds, wanted = job
    different = _differences(versions(recipe.kind), wanted)
    if different:
        raise UserError(f"{platform.node()} has other versions ({'; '.join(different)}): install the same everywhere")
    return _episode(_kept_collector(recipe), seeds)


def _collect_ray(
    recipe: Recipe,
    tasks: Sequence[tuple[EpisodeSeeds, Path]],
    workers: int | None,
    address: str | None,
    advance: Any,
    console: Console,
) -> None:
    jobs = [(recipe, seeds, versions(recipe.kind)) for seeds, _ in tasks]
    names = [f"{seeds.split} episode {seeds.index}" for seeds, _ in tasks]

    def note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    failed: list[Outcome[Arrays]] = []
    outcomes = launch(_remote_episode, jobs, launcher="ray", workers=workers, address=address, names=names, note=note)
    with contextlib.closing(outcomes):
        for outcome in outcomes:
            if outcome.error:
                failed.append(outcome)
            else:
                write_chunk(tasks[outcome.index][1], outcome.result())
                advance()
    if failed:
        raise UserError(
            f"{len(failed)} of {len(tasks)} episodes failed, {names[failed[0].index]} with: {failed[0].error}. "
            "The others are kept: run the same again once the cause is gone."
        )


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Processes started here keep to one BLAS thread: there is a worker for each core already."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _progress(console: Console, name: str, done: int, total: int) -> Iterator[Any]:
    """A bar on a terminal, a line now and then elsewhere."""
    if console.is_terminal and not console.quiet:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(name, total=total, completed=done)
            yield lambda: bar.advance(task)
        return
    begun = told = time.monotonic()
    count = done

    def advance() -> None:
        nonlocal count, told
        count += 1
        now = time.monotonic()
        if now - told >= PLAIN_EVERY_S or count == total:
            told = now
            rate = (count - done) / max(now - begun, 1e-9)
            console.print(f"{name}: {count}/{total} episodes, {rate:.2f} a second", highlight=False, soft_wrap=True)

    yield advance


# -------------------------------------------------------------------------------------------------- files


def _is_whole(path: Path) -> bool:
    """Whether a finished episode is there and readable; the zip's own checksums are read through."""
    if not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip() is None:
                return True
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, NotImplementedError):
        pass
    path.unlink()
    return False


def join_npz(chunks: Sequence[Path], path: Path) -> None:
    """Joins npz files along the first axis into one, array by array, holding one chunk's array at a time.

    Uncompressed, with the zip's zero date (1980): the bytes depend on the arrays alone.
    """
    with np.load(chunks[0], allow_pickle=False) as first:
        shapes = {key: (first[key].shape, first[key].dtype) for key in first.files}
    rows = 0
    for chunk in chunks:
        with np.load(chunk, allow_pickle=False) as file:
            rows += len(file["terminals"])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for key, (shape, dtype) in shapes.items():
            header = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": (rows, *shape[1:]),
            }
            with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                for chunk in chunks:
                    with np.load(chunk, allow_pickle=False) as file:
                        member.write(np.ascontiguousarray(file[key], dtype=dtype).tobytes())
