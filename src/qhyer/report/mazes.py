"""Maze2D as one table: published scores beside ours, the backbones alone, and whether the paper's order holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from qhyer.report.compare import (
    NOT_RUN,
    Comparison,
    budget_text,
    compare,
    mean_text,
    of_agent,
    published_text,
    setting_text,
)
from qhyer.report.published import canonical
from qhyer.report.suite import Account, Part, Suite
from qhyer.report.tables import Group, SuccessRow, normalised_score, number

DATASETS = ("maze2d-umaze-v1", "maze2d-medium-v1", "maze2d-large-v1")
PRINTED = ("QHyer", "LSDT", "QT", "DMixer", "DMamba", "DC", "VDT", "GDT", "QDT", "DT", "IQL", "CQL")
AGENTS = (*PRINTED, "EDT", "CGDT", "Reinformer", "RvS")  # the paper has the last four on other tasks only
ORDER = ("DT", "LSDT", "QHyer")  # from worst to best, as the paper has it on both mazes
BACKBONE = "backbone"  # the variant of docs/examples/maze2d.toml in which models differ by their backbone alone
BACKBONES = ("DT", "LSDT", "DMixer", "HDT")

NOTE = (
    "Score: the return, normalised as in D4RL, ± the standard deviation over seeds; in brackets, seeds. Ours: the last "
    "evaluation of each run; 0 is the return of a random policy and 100 that of the waypoint controller, both measured "
    "here, so that 100 is more here than in D4RL (docs/protocol.md). Published: D4RL's scores as printed in the QHyer "
    "paper (5 seeds), by other references, in another environment and on other data: their order can be held against "
    "ours, their numbers cannot. Parameters as run.json has them. Not run: no run is among these records."
)


def maze(dataset: str) -> str:
    return dataset.removeprefix("maze2d-").removesuffix("-v1")


def _of_backbone(row: SuccessRow) -> bool:
    return row.variant.split(", ")[0] == BACKBONE


def _name(agent: str) -> str:
    """As papers write it."""
    return next((name for name in (*AGENTS, *BACKBONES) if canonical(name) == canonical(agent)), agent)


class Scores:
    """The suite's comparisons, and what only the runs behind them know."""

    def __init__(self, found: Sequence[Group], rows: Sequence[SuccessRow]) -> None:
        self.lines = [line for line in compare(rows, DATASETS) if line.dataset in DATASETS]
        self.datasets = [dataset for dataset in DATASETS if any(line.dataset == dataset for line in self.lines)]
        self._groups = {(group.dataset, group.agent, group.preset, group.variant): group for group in found}

    def run(self, dataset: str, agent: str) -> list[Comparison]:
        return [line for line in of_agent(self.lines, dataset, agent) if line.verdict != NOT_RUN]

    def settings(self, agent: str) -> list[str]:
        """An agent's settings that were run anywhere; one without a name where none was."""
        run = (line for dataset in self.datasets for line in self.run(dataset, agent))
        return list(dict.fromkeys(setting_text(line) for line in run)) or [""]

    def of_setting(self, dataset: str, agent: str, setting: str) -> Comparison | None:
        return next((line for line in self.run(dataset, agent) if setting_text(line) == setting), None)

    def group(self, line: Comparison) -> Group:
        return self._groups[line.dataset, line.agent, line.preset, line.variant]

    def best(self, dataset: str, agent: str) -> Comparison | None:
        """An agent's best setting; mostly it has one. A variant stands for it only where nothing else was run."""
        run = self.run(dataset, agent)
        return max([line for line in run if not line.variant] or run, key=lambda line: line.ours, default=None)

    def table(self, caption: str, agents: Sequence[str], published: bool) -> Part:
        """A line for each setting of an agent: the first agent's, then the others' by our score on the first maze."""
        header = ["agent"]
        for dataset in self.datasets:
            header += [f"{maze(dataset)}, published"] if published else []
            header += [f"{maze(dataset)}, ours"]
        body: list[tuple[float, list[str]]] = []
        for agent in agents:
            for setting in self.settings(agent):
                first = self.of_setting(self.datasets[0], agent, setting)
                rank = math.inf if agent == agents[0] else first.ours if first else -math.inf
                body.append((rank, self._cells(agent, setting, published)))
        body.sort(key=lambda line: -line[0])
        return Part(caption, [*header, "updates × batch", "parameters"], [cells for _, cells in body])

    def _cells(self, agent: str, setting: str, published: bool) -> list[str]:
        cells = [f"{_name(agent)}, {setting}" if len(self.settings(agent)) > 1 else _name(agent)]
        run: list[Comparison] = []
        found = [self.of_setting(dataset, agent, setting) for dataset in self.datasets]
        varied = len(self.settings(agent)) > 1 and any(line.variant for line in found if line)  # nobody published it
        for dataset, ours in zip(self.datasets, found):
            if published:
                theirs = [published_text(line) for line in of_agent(self.lines, dataset, agent)[:1]]
                cells += [""] if varied or not theirs else theirs
            cells.append(f"{mean_text(ours)} ({ours.seeds})" if ours else NOT_RUN)
            run += [ours] if ours else []
        for texts in (map(budget_text, run), (self.group(line).parameters for line in run)):
            cells.append("; ".join(filter(None, dict.fromkeys(texts))))
        return cells

    def order(self, dataset: str) -> str:
        """Whether the paper's order holds on a maze, and whose seeds leave it open."""
        lines = {agent: self.best(dataset, agent) for agent in ORDER}
        run = {agent: line for agent, line in lines.items() if line is not None}
        if len(run) < len(ORDER):
            lacking = ", ".join(agent for agent in ORDER if agent not in run)
            return f"is open on {maze(dataset)} ({NOT_RUN}: {lacking})"
        means = [run[agent].ours for agent in ORDER]
        holds = all(low < high for low, high in itertools.pairwise(means))
        ranked = sorted(ORDER, key=lambda agent: run[agent].ours)  # stable: equals stay as the paper has them
        text = f"{'holds' if holds else 'does not hold'} on {maze(dataset)} ("
        text += ", ".join(f"{agent} {number(run[agent].ours)}" for agent in ranked) + "; "
        seeds = {agent: [normalised_score(each) for each in self.group(run[agent]).scored] for agent in ORDER}
        overlaps = [
            f"{low} and {high}"
            for low, high in itertools.combinations(ranked, 2)
            if max(seeds[low]) >= min(seeds[high])
        ]
        text += f"seeds overlap: {', '.join(overlaps)}" if overlaps else "no seeds overlap"
        single = [agent for agent in ranked if len(seeds[agent]) == 1]
        return text + (f"; one seed of {', '.join(single)}" if single else "") + ")"


def account(found: Sequence[Group], rows: Sequence[SuccessRow]) -> Account:
    scores = Scores(found, [row for row in rows if not _of_backbone(row)])
    others = {line.agent for line in scores.lines if _name(line.agent) not in AGENTS}
    parts = [scores.table("Scores, published and ours", (*AGENTS, *sorted(others)), published=True)]
    backbones = Scores(found, [row for row in rows if _of_backbone(row)])
    if any(backbones.run(dataset, agent) for dataset in DATASETS for agent in BACKBONES):
        parts.append(backbones.table("The same head on each backbone, ours", BACKBONES, published=False))
    verdicts = "; ".join(scores.order(dataset) for dataset in scores.datasets)
    order = f"By our means the paper's order, {' < '.join(ORDER)}, {verdicts}."
    return Account(tuple(parts), (order, NOTE))


MAZES = Suite("mazes", "Maze2D", DATASETS, account)
