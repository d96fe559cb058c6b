"""One row per evaluation episode: the only source of every score, table and figure."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qhyer.errors import CorruptFile
from qhyer.storage import write_text


@dataclass(frozen=True)
class EpisodeRow:
    run: str
    agent: str
    preset: str
    dataset: str
    seed: int
    step: int
    """updates the policy had when it was evaluated"""
    task: int
    episode: int
    env_seed: int
    success: int
    length: int
    seconds: float


COLUMNS = tuple(f.name for f in dataclasses.fields(EpisodeRow))


def read_rows(path: Path) -> list[EpisodeRow]:
    if not path.is_file():
        return []
    kinds = {
        "seed": int,
        "step": int,
        "task": int,
        "episode": int,
        "env_seed": int,
        "success": int,
        "length": int,
    }
    with open(path, newline="", encoding="utf-8") as file:
        if tuple(next(csv.reader(file), ())) != COLUMNS:
            raise CorruptFile(f"{path} is not a file of episode rows: its columns are not {','.join(COLUMNS)}")
        file.seek(0)
        return [
            EpisodeRow(**{k: float(v) if k == "seconds" else kinds.get(k, str)(v) for k, v in row.items()})  # type: ignore[arg-type]
            for row in csv.DictReader(file)
        ]


def write_rows(path: Path, rows: Iterable[EpisodeRow]) -> None:
    """All rows of a run, written whole."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    write_text(path, text.getvalue())


def add_rows(path: Path, rows: list[EpisodeRow]) -> None:
    """Add an evaluation to a run's rows; one of the same step is replaced, not counted twice."""
    steps = {row.step for row in rows}
    kept = [row for row in read_rows(path) if row.step not in steps]
    write_rows(path, sorted([*kept, *rows], key=lambda r: (r.step, r.task, r.episode)))
