"""OGBench's manipulation datasets as one table: published against ours, and what has not been run says so."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from qhyer.errors import UserError
from qhyer.report.compare import NOT_RUN, Comparison, compare, difference_text, mean_text, published_text
from qhyer.report.published import NF, QHYER, canonical
from qhyer.report.tables import SuccessRow, markdown, number
from qhyer.storage import write_text

SUITE = tuple(
    f"{scene}-{kind}-v0"
    for scene in ("cube-single", "cube-double", "scene", "puzzle-3x3", "puzzle-4x4")
    for kind in ("play", "noisy")
)
AGENTS = ("QHyer", "GCBC", "GCIVL", "GCIQL", "QRL", "CRL", "HIQL", "NF-GCBC")
SOURCES = (QHYER, NF, "")  # one number for an agent and a dataset; the report's own sections have the others too

BEGIN, END = "<!-- ogbench table", "<!-- end of ogbench table"

MAIN_CAPTION = "QHyer, published against ours"
AGENTS_CAPTION = "All agents, published and ours"
NOTE = (
    "Success in percent, ± the standard deviation over seeds. Published: as printed in the QHyer paper (8 seeds, a "
    "million updates of 1024); NF-GCBC as its own paper has it (means only). Ours: the last evaluation of each run, "
    "with the interval of docs/protocol.md; difference is our mean less the published one. In brackets: seeds; "
    "updates × batch. Not run: no run is among these records."
)

Cells = tuple[list[str], list[list[str]]]
"""A header, and the lines below it."""


def suite(rows: Sequence[SuccessRow]) -> list[Comparison]:
    """The suite's comparisons in its order, from all rows of a report."""
    known = {canonical(agent) for agent in AGENTS}
    return [
        line
        for line in compare(rows, SUITE)
        if line.dataset in SUITE and line.source in SOURCES and canonical(line.agent) in known
    ]


def wanted(rows: Sequence[SuccessRow]) -> bool:
    """Whether a report is about the suite: more than one of its datasets. One has a section of its own anyway."""
    return len({row.dataset for row in rows} & set(SUITE)) > 1


def _of(lines: Sequence[Comparison], dataset: str, agent: str) -> list[Comparison]:
    return [line for line in lines if line.dataset == dataset and canonical(line.agent) == canonical(agent)]


def _label(line: Comparison) -> str:
    return f"{line.preset} ({line.variant})" if line.variant else line.preset


def _budget(line: Comparison) -> str:
    steps = "–".join(f"{int(step):,}" for step in line.step.split("–")) if line.step else ""
    return f"{steps} × {line.batch}" if line.batch else steps


def main_table(lines: Sequence[Comparison]) -> Cells:
    """QHyer: a line for each dataset and setting that was run, and one for each dataset that was not."""
    header = ["dataset", "preset", "published", "ours", "95 % interval", "seeds", "updates × batch", "difference"]
    body = []
    for dataset in SUITE:
        for line in _of(lines, dataset, "QHyer"):
            name, theirs = dataset.removesuffix("-v0"), published_text(line)
            if line.verdict == NOT_RUN:
                body.append([name, "", theirs, NOT_RUN, "", "", "", ""])
                continue
            interval = f"{number(line.low)}–{number(line.high)}"
            numbers = [theirs, mean_text(line), interval, str(line.seeds), _budget(line), difference_text(line)]
            body.append([name, _label(line), *numbers])
    return header, body


def agents_table(lines: Sequence[Comparison]) -> Cells:
    """Every agent's published number, and below it ours where we have one."""
    body = []
    for dataset in SUITE:
        by_agent = {agent: _of(lines, dataset, agent) for agent in AGENTS}
        published = [published_text(found[0]) if found else "" for found in by_agent.values()]
        body.append([dataset.removesuffix("-v0"), "published", *published])
        ours = []
        for found in by_agent.values():
            run = [line for line in found if line.verdict != NOT_RUN]
            texts = [
                (f"{_label(line)}: " if len(run) > 1 else "") + f"{mean_text(line)} ({line.seeds}; {_budget(line)})"
                for line in run
            ]
            ours.append("; ".join(texts))
        if any(ours):
            body.append(["", "ours", *ours])
    return ["dataset", "", *AGENTS], body


def suite_markdown(lines: Sequence[Comparison]) -> str:
    """Both tables and how to read them."""
    return (
        f"**{MAIN_CAPTION}**\n\n{markdown(*main_table(lines), left=2)}\n"
        f"**{AGENTS_CAPTION}**\n\n{markdown(*agents_table(lines), left=2)}\n{textwrap.fill(NOTE, 120)}\n"
    )


def put_into(path: Path, text: str) -> None:
    """Replace what stands between the two marks of a Markdown file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith(BEGIN)]
    ends = [number for number, line in enumerate(lines) if line.startswith(END)]
    if len(begins) != 1 or len(ends) != 1 or begins[0] > ends[0]:
        raise UserError(
            f"{path} has no place for the table: write a line that begins with `{BEGIN}` and below it one that "
            f"begins with `{END}`, each once; both end with `-->`"
        )
    kept = [*lines[: begins[0] + 1], "", *text.strip().splitlines(), "", *lines[ends[0] :]]
    write_text(path, "\n".join(kept) + "\n")
