"""`qhyer report`: parse, call, print."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid

from qhyer.report import Report, write_report
from qhyer.report.tables import OVERALL, best, between, identity, label, mean_std, number, wide


def report(runs: tuple[Path, ...], /, *, out: Path = Path("report")) -> None:
    """Write one self-contained page about runs, with its tables beside it, and print the headline.

    Args:
        runs: Run folders, folders that contain runs at any depth, or episodes.csv files.
        out: The folder to write: index.html, success.csv, success.md, episodes.csv.
    """
    console = Console()
    made = write_report(runs, out)
    for grid in headline(made):
        console.print(grid)
    for problem in made.problems:
        console.print(f"note: {problem}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(f"page: {made.page}", markup=False, highlight=False, soft_wrap=True)


def headline(made: Report) -> list[Grid]:
    """One table for each dataset, the best line first."""
    marked = best(made.success)
    grids = []
    for dataset in dict.fromkeys(row.dataset for row in made.success):
        tasks, lines = wide(made.success, dataset)
        grid = Grid(title=dataset, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for name in ("agent", "preset"):
            grid.add_column(name, no_wrap=True, min_width=len(name))
        for name in ("seeds", "success %", "95 % interval", *(f"t{task}" for task in tasks)):
            grid.add_column(name, justify="right", no_wrap=True)
        for cells in sorted(lines, key=lambda cells: -cells[0].mean if cells[0] else 0.0):
            row = cells[0]
            assert row is not None and row.task == OVERALL
            texts = [mean_std(row), *(number(cell.mean) if cell else "" for cell in cells[1:])]
            bold = [cell is not None and identity(cell) in marked for cell in cells]
            texts = [f"[bold]{text}[/bold]" if strong else text for text, strong in zip(texts, bold)]
            grid.add_row(
                label(row).replace("[", "\\["), row.preset, str(row.seeds), texts[0], between(row), *texts[1:]
            )
        grids.append(grid)
    return grids
