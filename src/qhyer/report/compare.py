"""Published against ours: every published line of a dataset we ran, won or lost, and our unpublished ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from qhyer.report.published import Published, canonical, for_dataset
from qhyer.report.tables import OVERALL, SuccessRow, number, to_csv

ABOVE, BELOW, AGREES, NOT_RUN, NO_NUMBER = "above", "below", "agrees", "not run", "unpublished"


@dataclass(frozen=True)
class Comparison:
    """One published number beside one of our lines; either side may be missing."""

    dataset: str
    agent: str
    published: float
    published_std: float
    source: str
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
    verdict: str  # above, below: the published mean lies outside our interval; agrees: inside it


def _pair(entry: Published | None, row: SuccessRow | None) -> Comparison:
    assert entry is not None or row is not None
    published = entry.mean if entry else math.nan
    spread = entry.std if entry and entry.std is not None else math.nan
    if row is None:
        verdict = NOT_RUN
    elif entry is None:
        verdict = NO_NUMBER
    elif row.low <= published <= row.high:
        verdict = AGREES
    else:
        verdict = ABOVE if row.mean > published else BELOW
    return Comparison(
        dataset=entry.dataset if entry else row.dataset if row else "",
        agent=row.agent if row else entry.agent if entry else "",
        published=published,
        published_std=spread,
        source=entry.source if entry else "",
        preset=row.preset if row else "",
        variant=row.variant if row else "",
        seeds=row.seeds if row else 0,
        step=row.step if row else "",
        batch=row.batch if row else "",
        ours=row.mean if row else math.nan,
        std=row.std if row else math.nan,
        low=row.low if row else math.nan,
        high=row.high if row else math.nan,
        difference=row.mean - published if row and entry else math.nan,
        verdict=verdict,
    )


def compare(rows: Sequence[SuccessRow], datasets: Sequence[str] = ()) -> list[Comparison]:
    """For each dataset with published numbers: our lines first, then what we have not run, highest first.

    `datasets` come first and are there even where nothing was run on them.
    """
    found: list[Comparison] = []
    overall = [row for row in rows if row.task == OVERALL]
    for dataset in dict.fromkeys([*datasets, *(row.dataset for row in overall)]):
        entries = for_dataset(dataset)
        if not entries:
            continue
        used: set[Published] = set()
        for row in (row for row in overall if row.dataset == dataset):
            mine = [entry for entry in entries if canonical(entry.agent) == canonical(row.agent)]
            used.update(mine)
            found += [_pair(entry, row) for entry in mine] or [_pair(None, row)]
        rest = sorted((e for e in entries if e not in used), key=lambda entry: (-entry.mean, entry.agent))
        found += [_pair(entry, None) for entry in rest]
    return found


def published_text(line: Comparison) -> str:
    spread = "" if math.isnan(line.published_std) else f" ± {number(line.published_std)}"
    return number(line.published) + spread


def mean_text(line: Comparison) -> str:
    spread = "" if math.isnan(line.std) else f" ± {number(line.std)}"
    return number(line.ours) + spread


def ours_text(line: Comparison) -> str:
    return "" if math.isnan(line.ours) else f"{number(line.ours)} ({number(line.low)}–{number(line.high)})"


def difference_text(line: Comparison) -> str:
    if math.isnan(line.difference):
        return ""
    text = number(abs(line.difference))
    return text if text == "0" else ("+" if line.difference > 0 else "−") + text


def comparison_csv(lines: Sequence[Comparison]) -> str:
    names = [item.name for item in fields(Comparison)]
    return to_csv(names, ([getattr(line, name) for name in names] for line in lines))


def tally(lines: Sequence[Comparison]) -> dict[str, int]:
    """How many of our lines lie above, within and below: losses are counted, not hidden."""
    return {verdict: sum(line.verdict == verdict for line in lines) for verdict in (ABOVE, AGREES, BELOW)}
