"""`qhyer report`: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from qhyer.report import Report, write_report
from qhyer.report.tables import (
    OVERALL,
    PresetOf,
    best,
    has_scores,
    identity,
    label,
    number,
    overall_cells,
    overall_heads,
    ranked,
)

PIPED = 160  # columns where nobody says how wide: a file, or another program


def report(
    runs: tuple[Path, ...],
    /,
    *,
    out: Path = Path("report"),
    summary: Path | None = None,
    table: Path | None = None,
    preset_of: Annotated[PresetOf | None, tyro.conf.Suppress] = None,
) -> None:
    """Write one self-contained page about runs, with its tables beside it, and print the headline.

    Args:
        runs: Run folders, folders with runs at any depth (but not below one called exploration), episodes.csv files.
        out: The folder to write: index.html, success.csv, success.md, episodes.csv; tables of suites (ogbench.md). An
            earlier report there is replaced; a folder that holds something else is refused.
        summary: A CSV to write as well: one line for each run, with its final success in percent and its score.
        table: A Markdown file with a suite's two comment marks, such as docs/ogbench.md or docs/mazes.md: the
            suite's table is put between them.
    """
    console = Console(width=None if sys.stdout.isatty() else PIPED)
    made = write_report(runs, out, summary=summary, table_in=table, preset_of=preset_of)
    for grid, short in zip(headline(made), headline(made, tasks=False)):
        room = console.options.update(max_width=1000)  # measured as if there were room for everything
        fits = console.measure(grid, options=room).maximum <= console.width
        console.print(grid if fits else short)
    for problem in made.problems:
        console.print(f"note: {problem}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for name, path in (("summary", summary), ("table", table), ("page", made.page)):
        if path is not None:
            console.print(f"{name}: {path}", markup=False, highlight=False, soft_wrap=True)


def headline(made: Report, tasks: bool = True) -> list[Grid]:
    """One table for each dataset, the best line first; with a column for each task, or without."""
    marked = best(made.success)
    grids = []
    for dataset in dict.fromkeys(row.dataset for row in made.success):
        names, lines = ranked(made.success, dataset)
        shown = names if tasks else []
        grid = Grid(title=escape(dataset), title_justify="left", title_style="bold", box=None, pad_edge=False)
        for name in ("agent", "preset"):
            grid.add_column(name, no_wrap=True)
        scored = has_scores(row for row in made.success if row.dataset == dataset)
        for name in ("seeds", *overall_heads(scored), *(f"t{task}" for task in shown)):
            grid.add_column(name, justify="right", no_wrap=True)
        for cells in lines:
            row = cells[0]
            assert row is not None and row.task == OVERALL
            texts = overall_cells(row, scored, identity(row) in marked)
            for cell in cells[1 : 1 + len(shown)]:
                texts.append((number(cell.mean, 0), identity(cell) in marked) if cell else ("", False))
            bold = [f"[bold]{text}[/bold]" if strong else text for text, strong in texts]
            grid.add_row(label(row).replace("[", "\\["), escape(row.preset), str(row.seeds), *bold)
        grids.append(grid)
    return grids
