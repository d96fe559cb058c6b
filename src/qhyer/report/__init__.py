"""From runs to a page: tables, figures and the comparison with published numbers. Runs without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qhyer.errors import UserError
from qhyer.report.alike import unlike
from qhyer.report.collect import Table, collect
from qhyer.report.compare import Comparison, compare, comparison_csv
from qhyer.report.mazes import MAZES
from qhyer.report.ogbench import OGBENCH
from qhyer.report.pointmaze import POINTMAZE
from qhyer.report.suite import put_into, suite_of
from qhyer.report.tables import (
    PresetOf,
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

__all__ = ["SUITES", "Report", "write_report"]

SIGNED = "Written by qhyer"  # in the page's last lines
SUITES = (OGBENCH, POINTMAZE, MAZES)


@dataclass(frozen=True)
class Report:
    """What was written, and what a reader must be told."""

    page: Path
    table: Table
    success: tuple[SuccessRow, ...]
    comparison: tuple[Comparison, ...]
    problems: tuple[str, ...]


def _require_place(out: Path) -> None:
    """`UserError` unless this folder is new, empty or has an earlier report, whole or begun, which is replaced."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder with --out")
    names = {item.name for item in out.iterdir() if not item.name.startswith(".")} if out.is_dir() else set()
    page = out / "index.html"
    if page.is_file() and SIGNED.encode() in page.read_bytes():
        return
    tables = {"success.csv", "success.md", "episodes.csv", "published.csv", *(f"{suite.name}.md" for suite in SUITES)}
    if others := sorted(names - tables):
        raise UserError(f"{out} is no report, and holds other things ({others[0]}); name another folder with --out")


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    summary: Path | None = None,
    table_in: Path | None = None,
    preset_of: PresetOf | None = None,
) -> Report:
    """Write `out`/index.html, success.csv, success.md and episodes.csv for every run found under `runs`.

    Where the runs are on several datasets of a suite, also its tables, such as ogbench.md: published against ours.
    An earlier report in `out` is replaced; a folder that holds something else is refused.
    `summary` is a file for one line per run, `table_in` a Markdown file that holds a suite's tables between two marks.
    `preset_of` knows presets: with it, a run that is not its preset as it stands is said to be.
    A run that cannot be read is named in the page and in `problems`; raises `UserError` when none can.
    """
    from qhyer.report import html  # matplotlib takes a second to import; the tables do not need it

    out = Path(out)
    _require_place(out)
    sources = [Path(run) for run in runs]
    table = collect(sources, skip=out)
    found = groups(table)
    rows = success_rows(found)
    comparison = compare(rows)
    apart = unlike(found)
    notes = [*apart, *warnings(found, preset_of)]
    shown = [(suite, suite.account(found, rows)) for suite in SUITES if suite.wanted(rows)]
    text, undrawn = html.page(table, found, rows, comparison, shown, notes, sources, out)
    write_text(out / "success.csv", success_csv(rows))
    write_text(out / "success.md", success_markdown(rows, apart))
    write_text(out / "episodes.csv", episodes_csv(table.episodes))
    if comparison:
        write_text(out / "published.csv", comparison_csv(comparison))
    for suite, account in shown:
        write_text(out / f"{suite.name}.md", account.markdown())
    if summary is not None:
        write_text(summary, summary_csv(table))
    if table_in is not None:
        suite = suite_of(table_in, SUITES)
        put_into(table_in, suite, suite.account(found, rows).markdown())
    write_text(out / "index.html", text)
    problems = (*table.problems, *notes, *undrawn)
    return Report(out / "index.html", table, tuple(rows), tuple(comparison), problems)
