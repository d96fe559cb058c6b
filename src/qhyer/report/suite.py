"""A suite: datasets that belong in one table, published against ours, and the place of that table in a document."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qhyer.errors import UserError
from qhyer.report.tables import Group, SuccessRow, markdown
from qhyer.storage import write_text


@dataclass(frozen=True)
class Part:
    """One table of plain cells."""

    caption: str
    header: list[str]
    body: list[list[str]]
    left: int = 1  # columns of text; the rest are numbers


@dataclass(frozen=True)
class Account:
    """What a suite has to say about runs: tables, and paragraphs below them."""

    parts: tuple[Part, ...]
    notes: tuple[str, ...]

    def markdown(self) -> str:
        tables = [f"**{part.caption}**\n\n{markdown(part.header, part.body, left=part.left)}" for part in self.parts]
        return "\n".join([*tables, *(f"{textwrap.fill(note, 120)}\n" for note in self.notes)])


@dataclass(frozen=True)
class Suite:
    """`name` is that of its file, of its section in the page and of its marks in a document."""

    name: str
    title: str
    datasets: tuple[str, ...]
    account: Callable[[Sequence[Group], Sequence[SuccessRow]], Account]

    @property
    def marks(self) -> tuple[str, str]:
        """How the line above the tables begins, and the one below them."""
        return f"<!-- {self.name} table", f"<!-- end of {self.name} table"

    def place(self, lines: Sequence[str]) -> tuple[int, int] | None:
        """Where those two lines are, if both are there, each once."""
        begins, ends = ([n for n, line in enumerate(lines) if line.startswith(mark)] for mark in self.marks)
        return (begins[0], ends[0]) if len(begins) == len(ends) == 1 and begins[0] < ends[0] else None

    def wanted(self, rows: Sequence[SuccessRow]) -> bool:
        """Whether a report is about the suite: more than one of its datasets. One has a section of its own anyway."""
        return len({row.dataset for row in rows} & set(self.datasets)) > 1


def suite_of(path: Path, suites: Sequence[Suite]) -> Suite:
    """The suite whose tables a Markdown file has a place for."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [suite for suite in suites if suite.place(lines)]
    if len(found) == 1:
        return found[0]
    pairs = ", or ".join(f"`{begin}` and `{end}`" for begin, end in (suite.marks for suite in suites))
    raise UserError(
        f"{path} has no place for the table: write a line that begins with the first, and below it one that begins "
        f"with the second, of {pairs}; each once, one pair alone; both end with `-->`"
    )


def put_into(path: Path, suite: Suite, text: str) -> None:
    """Replace what stands between the suite's two marks in a Markdown file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    place = suite.place(lines)
    assert place is not None, path
    kept = [*lines[: place[0] + 1], "", *text.strip().splitlines(), "", *lines[place[1] :]]
    write_text(path, "\n".join(kept) + "\n")
