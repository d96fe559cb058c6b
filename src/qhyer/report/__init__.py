"""From runs to a page: tables, figures and the comparison with published numbers. Runs without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qhyer.report.collect import Table, collect
from qhyer.report.compare import Comparison, compare, comparison_csv
from qhyer.report.suite import put_into, suite, suite_markdown, wanted
from qhyer.report.tables import (
    SuccessRow,
    episodes_csv,
    groups,
    success_csv,
    success_markdown,
    success_rows,
    summary_csv,
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


def write_report(
    runs: Sequence[Path], out: Path, *, summary: Path | None = None, table_in: Path | None = None
) -> Report:
    """Write `out`/index.html, success.csv, success.md and episodes.csv for every run found under `runs`.

    Where the runs are on several of OGBench's manipulation datasets, also ogbench.md: published against ours.
    `summary` is a file for one line per run, `table_in` a Markdown file that holds OGBench's table between two marks.
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
    against = suite(rows)
    text, undrawn = html.page(table, found, rows, comparison, notes, sources, out)
    write_text(out / "success.csv", success_csv(rows))
    write_text(out / "success.md", success_markdown(rows))
    write_text(out / "episodes.csv", episodes_csv(table.episodes))
    if comparison:
        write_text(out / "published.csv", comparison_csv(comparison))
    if wanted(rows):
        write_text(out / "ogbench.md", suite_markdown(against))
    if summary is not None:
        write_text(summary, summary_csv(table))
    if table_in is not None:
        put_into(table_in, suite_markdown(against))
    write_text(out / "index.html", text)
    problems = (*table.problems, *notes, *undrawn)
    return Report(out / "index.html", table, tuple(rows), tuple(comparison), problems)
