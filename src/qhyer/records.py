"""One row per evaluation episode: the only source of every score, table and figure."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qhyer.errors import CorruptFile
from qhyer.storage import TEMPORARY, in_turn, write_text


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
    return_: float | None = None
    """undiscounted, where the task has rewards of its own; its column is called return, older files lack it"""
    environment: str = ""
    """where that is another than run.json names; files without such rows lack the column"""

    @property
    def which(self) -> tuple[int, int, int]:
        """The episode it is of: the seed is a hash of the evaluation's seed, the environment, task and episode."""
        return self.task, self.episode, self.env_seed


COLUMNS = tuple(f.name.rstrip("_") for f in dataclasses.fields(EpisodeRow))
OPTIONAL = ("return", "environment")  # the last columns, which a file may lack, from the right
REFERENCES = Path(__file__).with_name("references.json")


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
        header = tuple(next(csv.reader(file), ()))
        if header not in [COLUMNS[: len(COLUMNS) - lacking] for lacking in range(len(OPTIONAL) + 1)]:
            raise CorruptFile(f"{path} is not a file of episode rows: its columns are not {','.join(COLUMNS)}")
        file.seek(0)
        rows = []
        for row in csv.DictReader(file):
            returned = row.pop("return", "") or None
            values: dict[str, Any] = {k: float(v) if k == "seconds" else kinds.get(k, str)(v) for k, v in row.items()}
            rows.append(EpisodeRow(**values, return_=None if returned is None else float(returned)))
        return rows


def write_rows(path: Path, rows: Iterable[EpisodeRow]) -> None:
    """All rows of a run, written whole."""
    rows = list(rows)
    columns = COLUMNS if any(row.environment for row in rows) else COLUMNS[:-1]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows({k.rstrip("_"): v for k, v in dataclasses.asdict(row).items()} for row in rows)
    write_text(path, text.getvalue())


def add_rows(path: Path, rows: list[EpisodeRow]) -> None:
    """Add an evaluation to a run's rows; one of the same step is replaced, not counted twice."""
    steps = {row.step for row in rows}
    with in_turn(path.with_name(f"{TEMPORARY}rows")):  # a training adds rows while an earlier update is evaluated
        kept = [row for row in read_rows(path) if row.step not in steps]
        write_rows(path, sorted([*kept, *rows], key=lambda r: (r.step, r.task, r.episode)))


# ------------------------------------------------------------------------------------------------- normalised scores


@functools.cache
def references() -> dict[str, dict[str, Any]]:
    """Environment -> the mean returns of a random policy and of the waypoint controller, measured here."""
    return json.loads(REFERENCES.read_text(encoding="utf-8"))["environments"]


def mean_return(rows: Iterable[EpisodeRow]) -> float | None:
    """None where the tasks pay no return."""
    returns = [row.return_ for row in rows if row.return_ is not None]
    return sum(returns) / len(returns) if returns else None


def normalised(environment: str | None, returned: float) -> float | None:
    """D4RL's score of a return: 0 is the random policy's, 100 the controller's; None where there are no references."""
    known = references().get(environment or "")
    if known is None:
        return None
    low, high = known["random"]["mean"], known["controller"]["mean"]
    return 100.0 * (returned - low) / (high - low)
