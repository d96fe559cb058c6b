"""What analyses without a run share: where they write, what is there already, intervals over seeds, drawing."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from qhyer import launch
from qhyer.errors import UserError
from qhyer.progress import Progress
from qhyer.report.tables import to_csv
from qhyer.storage import atomic_file, sweep_partial, write_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Job = TypeVar("Job")
Result = TypeVar("Result")

RESULTS = Path("results/analyses")
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#b8589a",
    "#e6a700",
    "#56b4e9",
    "#7a4fb5",
    "#8c6d46",
)  # of runs, datasets, pieces side by side
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def folder(name: str, out: Path | None) -> Path:
    return RESULTS / name if out is None else Path(out)


def existing(path: Path, settings: Mapping[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The result already there, if it was made with these settings; one made with others is not replaced unasked."""
    if overwrite or not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        before = found["settings"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not a result of this analysis; give --overwrite or another --out") from None
    ours = json.loads(json.dumps(settings))
    if before != ours:
        differ = sorted(key for key in {*before, *ours} if before.get(key) != ours.get(key))
        changes = ", ".join(f"{key} {before.get(key)} there, {ours.get(key)} asked" for key in differ)
        raise UserError(f"{path} was made with other settings ({changes}); give --overwrite or another --out")
    print(f"{path} is there already, made with these settings: only its table and figure are made again")
    return found


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean over seeds and half the width of its 95 % interval (Student's t); NaN of one seed."""
    values = np.asarray(values, dtype=float)
    n = len(values)
    if n < 2:
        return float(values.mean()), math.nan
    quantile = STUDENT[n - 2] if n - 2 < len(STUDENT) else 1.96 + 2.4 / (n - 1)  # the next term of its series
    return float(values.mean()), float(quantile * values.std(ddof=1) / math.sqrt(n))


def plus_minus(values: Sequence[float] | np.ndarray, digits: int = 3) -> str:
    mean, half = interval(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def in_processes(
    title: str,
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    names: Sequence[str],
    workers: int | None,
    quiet: bool,
) -> list[Result]:
    """The results in the order of the jobs, whatever order they end in."""
    count = min(launch.cores() if workers is None else workers, len(jobs))
    done: dict[int, Result] = {}
    with Progress(title, len(jobs), quiet=quiet) as progress:
        for outcome in launch.launch(function, jobs, workers=count, names=names, note=progress.note):
            if outcome.error:
                raise UserError(f"{names[outcome.index]}: {outcome.error}\n{outcome.trace}")
            done[outcome.index] = outcome.result()
            progress.show(len(done))
    return [done[index] for index in range(len(jobs))]


def write_result(path: Path, result: Mapping[str, Any], header: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """The CSV first: where the JSON is, all of it is."""
    sweep_partial(path.parent)
    write_text(path.with_suffix(".csv"), to_csv(header, lines))
    write_json(path, result)


def save_figure(figure: Figure, path: Path) -> None:
    """PATH.png and PATH.svg, the same bytes for the same drawing."""
    from qhyer.report.figures import steady

    with atomic_file(path.with_suffix(".png")) as temporary:
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    write_text(path.with_suffix(".svg"), steady(drawing.getvalue()))


def style() -> dict[str, Any]:
    """matplotlib's settings for a picture on white paper."""
    from qhyer.report.figures import STYLE

    return {**STYLE, "figure.facecolor": "white", "savefig.facecolor": "white", "figure.dpi": 150}


def show(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A table on the terminal, first column text."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for place, name in enumerate(header):
        table.add_column(escape(name), justify="left" if place == 0 else "right", no_wrap=True)
    for line in lines:
        table.add_row(*map(escape, line))
    console = Console()
    # A pipe has no width: a table cut to 80 columns there would lose its numbers.
    (console if console.is_terminal else Console(width=260)).print(table)
