"""`qhyer report`: parse, call, print."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid

from qhyer.report import Report, write_report
from qhyer.report.tables import (
    OVERALL,
    SCORE_HEADS,
    best,
    between,
    has_scores,
    identity,
    label,
    mean_std,
    number,
    score_cells,
    wide,
)


def report(
    runs: tuple[Path, ...],
    /,
    *,
    out: Path = Path("report"),
    summary: Path | None = None,
    table: Path | None = None,
) -> None:
    """Write one self-contained page about runs, with its tables beside it, and print the headline.

    Args:
        runs: Run folders, folders with runs at any depth (but not below one called exploration), episodes.csv files.
        out: The folder to write: index.html, success.csv, success.md, episodes.csv; ogbench.md for OGBench's table.
        summary: A CSV to write as well: one line for each run, with its final success in percent.
        table: A Markdown file with two comment marks, such as docs/ogbench.md: OGBench's table is put between them.
    """
    console = Console()
    made = write_report(runs, out, summary=summary, table_in=table)
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
        names, lines = wide(made.success, dataset)
        shown = names if tasks else []
        grid = Grid(title=dataset, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for name in ("agent", "preset"):
            grid.add_column(name, no_wrap=True)
        scored = has_scores(row for row in made.success if row.dataset == dataset)
        heads = SCORE_HEADS if scored else ()
        for name in ("seeds", *heads, "success %", "95 % interval", *(f"t{task}" for task in shown)):
            grid.add_column(name, justify="right", no_wrap=True)
        for cells in sorted(lines, key=lambda cells: -cells[0].mean if cells[0] else 0.0):
            row = cells[0]
            assert row is not None and row.task == OVERALL
            cells = cells[: 1 + len(shown)]
            texts = [mean_std(row), *(number(cell.mean, 0) if cell else "" for cell in cells[1:])]
            bold = [cell is not None and identity(cell) in marked for cell in cells]
            texts = [f"[bold]{text}[/bold]" if strong else text for text, strong in zip(texts, bold)]
            about = [label(row).replace("[", "\\["), row.preset, str(row.seeds), *(score_cells(row) if scored else ())]
            grid.add_row(*about, texts[0], between(row), *texts[1:])
        grids.append(grid)
    return grids
