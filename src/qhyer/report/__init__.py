"""From runs to a page: tables, figures and the comparison with published numbers. Runs without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qhyer.report.collect import Table, collect
from qhyer.report.compare import Comparison, compare, comparison_csv
from qhyer.report.tables import (
    SuccessRow,
    episodes_csv,
    groups,
    success_csv,
    success_markdown,
    success_rows,
    warnings,
)
from qhyer.storage import write_text

__all__ = ["Report", "write_report"]


@dataclass(frozen=True)
class Report:
    """What was written, and what a reader must be told."""

    page: Path
    table: Table
    success: tuple[SuccessRow, ...]
    comparison: tuple[Comparison, ...]
    problems: tuple[str, ...]


def write_report(runs: Sequence[Path], out: Path) -> Report:
    """Write `out`/index.html, success.csv, success.md and episodes.csv for every run found under `runs`.

    A run that cannot be read is named in the page and in `problems`; raises `UserError` when none can.
    """
    from qhyer.report import html  # matplotlib takes a second to import; the tables do not need it

    out = Path(out)
    sources = [Path(run) for run in runs]
    table = collect(sources, skip=out)
    found = groups(table)
    rows = success_rows(found)
    comparison = compare(rows)
    notes = warnings(found)
    text, undrawn = html.page(table, found, rows, comparison, notes, sources, out)
    write_text(out / "success.csv", success_csv(rows))
    write_text(out / "success.md", success_markdown(rows))
    write_text(out / "episodes.csv", episodes_csv(table.episodes))
    if comparison:
        write_text(out / "published.csv", comparison_csv(comparison))
    write_text(out / "index.html", text)
    problems = (*table.problems, *notes, *undrawn)
    return Report(out / "index.html", table, tuple(rows), tuple(comparison), problems)
