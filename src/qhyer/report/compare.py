"""Published against ours: every published line of a dataset we ran, won or lost, and our unpublished ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from qhyer.report.published import SCORE, SUCCESS, Published, canonical, for_dataset, tasks_of
from qhyer.report.tables import OVERALL, SuccessRow, identity, number, partial, to_csv

ABOVE, BELOW, AGREES, NOT_RUN, NO_NUMBER = "above", "below", "agrees", "not run", "unpublished"
OTHER_SCALE = "other scale"


@dataclass(frozen=True)
class Comparison:
    """One published number beside one of our lines; either side may be missing."""

    dataset: str
    agent: str
    published: float
    published_std: float
    source: str
    measure: str  # what both numbers are: success in percent, or a score
    preset: str
    variant: str
    seeds: int
    step: str
    batch: str
    ours: float
    std: float  # over seeds; NaN with one
    low: float
    high: float
    difference: float
    verdict: str  # above, below: the published mean lies outside our interval; agrees: inside it. Scores: other scale
    partial: str  # `task 2 only`, ...: ours are not of all tasks, which is the verdict then; mostly empty


def _pair(entry: Published | None, row: SuccessRow | None, measure: str, few: str = "") -> Comparison:
    assert entry is not None or row is not None
    published = entry.mean if entry else math.nan
    spread = entry.std if entry and entry.std is not None else math.nan
    mean, std, low, high = _measured(row, measure)
    if row is None:
        verdict = NOT_RUN
    elif entry is None:
        verdict = NO_NUMBER
    elif measure == SCORE:  # 0 and 100 are other returns there, in another maze: beside each other, not compared
        verdict = OTHER_SCALE
    elif few:  # another mean than the one that was printed
        verdict = few
    elif low <= published <= high:
        verdict = AGREES
    else:
        verdict = ABOVE if mean > published else BELOW
    return Comparison(
        dataset=entry.dataset if entry else row.dataset if row else "",
        agent=row.agent if row else entry.agent if entry else "",
        published=published,
        published_std=spread,
        source=entry.source if entry else "",
        measure=measure,
        preset=row.preset if row else "",
        variant=row.variant if row else "",
        seeds=row.seeds if row else 0,
        step=row.step if row else "",
        batch=row.batch if row else "",
        ours=mean,
        std=std,
        low=low,
        high=high,
        difference=math.nan if measure == SCORE or few else mean - published,
        verdict=verdict,
        partial=few,
    )


def _measured(row: SuccessRow | None, measure: str) -> tuple[float, float, float, float]:
    """Mean, standard deviation and interval."""
    if row is None:
        return math.nan, math.nan, math.nan, math.nan
    if measure == SCORE:
        return row.score, row.score_std, row.score_low, row.score_high
    return row.mean, row.std, row.low, row.high


def compare(rows: Sequence[SuccessRow], datasets: Sequence[str] = ()) -> list[Comparison]:
    """For each dataset with published numbers: our lines first, then what we have not run, highest first.

    `datasets` come first and are there even where nothing was run on them, or nothing published.
    """
    found: list[Comparison] = []
    overall = [row for row in rows if row.task == OVERALL]
    for dataset in dict.fromkeys([*datasets, *(row.dataset for row in overall)]):
        entries, run = for_dataset(dataset), [row for row in overall if row.dataset == dataset]
        if not entries and dataset not in datasets:
            continue
        scored = entries[0].measure == SCORE if entries else any(not math.isnan(row.score) for row in run)
        measure = SCORE if scored else SUCCESS
        lacking = partial([row for row in rows if row.dataset == dataset], tasks_of(dataset))
        used: set[Published] = set()
        for row in run:
            mine = [entry for entry in entries if canonical(entry.agent) == canonical(row.agent)]
            used.update(mine)
            few = lacking.get(identity(row), "")
            found += [_pair(entry, row, measure, few) for entry in mine] or [_pair(None, row, measure, few)]
        rest = sorted((e for e in entries if e not in used), key=lambda entry: (-entry.mean, entry.agent))
        found += [_pair(entry, None, measure) for entry in rest]
    return found


def published_text(line: Comparison) -> str:
    spread = "" if math.isnan(line.published_std) else f" ± {number(line.published_std)}"
    return number(line.published) + spread


def mean_text(line: Comparison) -> str:
    spread = "" if math.isnan(line.std) else f" ± {number(line.std)}"
    return number(line.ours) + spread + (f", {line.partial}" if line.partial else "")


def budget_text(line: Comparison) -> str:
    """Updates × batch."""
    steps = "–".join(f"{int(step):,}" for step in line.step.split("–")) if line.step else ""
    return f"{steps} × {line.batch}" if line.batch else steps


def setting_text(line: Comparison) -> str:
    """Which of an agent's settings."""
    return f"{line.preset} ({line.variant})" if line.variant else line.preset


def of_agent(lines: Sequence[Comparison], dataset: str, agent: str) -> list[Comparison]:
    return [line for line in lines if line.dataset == dataset and canonical(line.agent) == canonical(agent)]


def ours_text(line: Comparison) -> str:
    return "" if math.isnan(line.ours) else f"{number(line.ours)} ({number(line.low)}–{number(line.high)})"


def difference_text(line: Comparison) -> str:
    if math.isnan(line.difference):
        return ""
    text = number(abs(line.difference))
    return text if text == "0" else ("+" if line.difference > 0 else "−") + text


def comparison_csv(lines: Sequence[Comparison]) -> str:
    names = [item.name for item in fields(Comparison) if item.name != "partial"]
    return to_csv(names, ([getattr(line, name) for name in names] for line in lines))


def tally(lines: Sequence[Comparison]) -> dict[str, int]:
    """How many of our lines lie above, within and below: losses are counted, not hidden."""
    return {verdict: sum(line.verdict == verdict for line in lines) for verdict in (ABOVE, AGREES, BELOW)}
