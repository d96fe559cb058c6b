"""OGBench's manipulation datasets as one table: published against ours, and what has not been run says so."""

from __future__ import annotations

from collections.abc import Sequence

from qhyer.report.compare import (
    NOT_RUN,
    Comparison,
    budget_text,
    compare,
    difference_text,
    mean_text,
    of_agent,
    published_text,
    setting_text,
)
from qhyer.report.published import NF, QHYER, QHYER_RECENT, canonical
from qhyer.report.suite import Account, Part, Suite
from qhyer.report.tables import Group, SuccessRow, number

DATASETS = tuple(
    f"{scene}-{kind}-v0"
    for scene in ("cube-single", "cube-double", "scene", "puzzle-3x3", "puzzle-4x4")
    for kind in ("play", "noisy")
)
AGENTS = (
    *("QHyer", "GCBC", "GCIVL", "GCIQL", "QRL", "CRL", "HIQL", "SAW", "OTA", "Eik-HiQRL", "NF-GCBC"),
    *("TRL", "SHARSA", "QC-FQL", "DEAS"),  # made for rewards or larger data, adapted
)
SOURCES = (
    QHYER,
    QHYER_RECENT,
    NF,
    "",
)  # one number for an agent and a dataset; the report's own sections have the others too

NOTE = (
    "Success in percent, ± the standard deviation over seeds. Published: as printed in the QHyer paper (8 seeds, a "
    "million updates of 1024; TRL, SHARSA, QC-FQL and DEAS as adapted there, of a batch that is not said); NF-GCBC as "
    "its own paper has it (means only). Ours: the last evaluation of each run, with the interval of docs/protocol.md; "
    "difference is our mean less the published one. In brackets: seeds; updates × batch. Not run: no run is among "
    "these records."
)


def against(
    rows: Sequence[SuccessRow], datasets: Sequence[str] = DATASETS, sources: Sequence[str] = SOURCES
) -> list[Comparison]:
    """A suite's comparisons in its order, from all rows of a report."""
    known = {canonical(agent) for agent in AGENTS}
    return [
        line
        for line in compare(rows, datasets)
        if line.dataset in datasets and line.source in sources and canonical(line.agent) in known
    ]


def main_table(lines: Sequence[Comparison]) -> Part:
    """QHyer: a line for each dataset and setting that was run, and one for each dataset that was not."""
    header = ["dataset", "preset", "published", "ours", "95 % interval", "seeds", "updates × batch", "difference"]
    body = []
    for dataset in DATASETS:
        for line in of_agent(lines, dataset, "QHyer"):
            name, theirs = dataset.removesuffix("-v0"), published_text(line)
            if line.verdict == NOT_RUN:
                body.append([name, "", theirs, NOT_RUN, "", "", "", ""])
                continue
            interval = f"{number(line.low)}–{number(line.high)}"
            numbers = [theirs, mean_text(line), interval, str(line.seeds), budget_text(line), difference_text(line)]
            body.append([name, setting_text(line), *numbers])
    return Part("QHyer, published against ours", header, body, left=2)


def agents_table(lines: Sequence[Comparison], datasets: Sequence[str] = DATASETS) -> Part:
    """Every agent's published number, and below it ours where we have one; who has neither is left out."""
    body: list[list[str]] = []
    for dataset in datasets:
        by_agent = {agent: of_agent(lines, dataset, agent) for agent in AGENTS}
        published = [published_text(found[0]) if found else "" for found in by_agent.values()]
        body.append([dataset.removesuffix("-v0"), "published", *published])
        ours = []
        for found in by_agent.values():
            run = [line for line in found if line.verdict != NOT_RUN]
            texts = [
                (f"{setting_text(line)}: " if len(run) > 1 else "")
                + f"{mean_text(line)} ({line.seeds}; {budget_text(line)})"
                for line in run
            ]
            ours.append("; ".join(texts))
        if any(ours):
            body.append(["", "ours", *ours])
    header = ["dataset", "", *AGENTS]
    told = [at for at in range(len(header)) if at < 2 or any(line[at] for line in body)]
    body = [[line[at] for at in told] for line in body]
    return Part("All agents, published and ours", [header[at] for at in told], body, left=2)


def account(found: Sequence[Group], rows: Sequence[SuccessRow]) -> Account:
    lines = against(rows)
    return Account((main_table(lines), agents_table(lines)), (NOTE,))


OGBENCH = Suite("ogbench", "OGBench manipulation", DATASETS, account)
