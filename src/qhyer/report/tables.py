"""Success per task and overall, as rows that the CSV, the Markdown, the page and the terminal all print."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from qhyer.config import fingerprint
from qhyer.records import normalised
from qhyer.report.collect import COLUMNS, OPTIONAL, Episode, Run, Table, natural
from qhyer.report.statistics import iqm, mean_and_std, seed_bootstrap, wilson
from qhyer.rng import numpy_stream

OVERALL = "overall"
MISSING = "(absent)"
TRAINING = (
    "steps",
    "updates",
    "batch",
    "batch_size",
    "precision",
)  # settings of the trainer that make another experiment


@dataclass(frozen=True)
class Group:
    """Runs that differ by seed alone: one line of a table."""

    dataset: str
    agent: str
    preset: str
    variant: str  # what sets it apart from other runs of the same preset: `backbone`, `tau=0.9`; mostly empty
    label: str  # the agent, and as much more as it takes to tell two lines of a dataset apart
    runs: tuple[Run, ...]

    @cached_property
    def scored(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.last)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        return tuple(sorted({row.task for run in self.scored for row in run.last}, key=natural))

    @property
    def step(self) -> str:
        """The step of the score; a range when the runs stopped at different steps."""
        steps = sorted({run.steps[-1] for run in self.scored})
        return "" if not steps else str(steps[0]) if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"

    @property
    def batch(self) -> str:
        """The batch of an update, where the runs say it and agree."""
        sizes = {batch_size(run) for run in self.scored}
        return sizes.pop() if len(sizes) == 1 else ""

    @property
    def parameters(self) -> str:
        """As the runs count them, where they do and agree."""
        counts = {run.info.get("parameters") for run in self.scored}
        count = counts.pop() if len(counts) == 1 else None
        return f"{count:,}" if isinstance(count, int) else ""


@dataclass(frozen=True)
class SuccessRow:
    """Success in percent of one group, on one task or over all of them."""

    dataset: str
    agent: str
    preset: str
    variant: str
    task: str
    step: str
    batch: str
    seeds: int
    episodes: int
    mean: float
    std: float  # over seeds; NaN with one seed
    low: float
    high: float
    interval: str  # wilson | bootstrap
    iqm: float  # over seeds × tasks
    returned: float = math.nan  # undiscounted, where the task has rewards of its own
    score: float = math.nan  # the return, normalised: 0 a random policy's, 100 the controller's (docs/protocol.md)
    score_std: float = math.nan
    score_low: float = math.nan
    score_high: float = math.nan


SCORES = ("returned", "score", "score_std", "score_low", "score_high")


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, Mapping):
        return {prefix: values}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(_flat(value, f"{prefix}.{name}" if prefix else str(name)))
    return flat


def _settings(run: Run) -> dict[str, Any]:
    """What makes a run this experiment and not another, seed aside."""
    settings = _flat(run.info.get("config") or {})
    train = run.info.get("train") or {}
    settings.update({name: train[name] for name in TRAINING if isinstance(train, Mapping) and name in train})
    data = run.info.get("data") or {}
    if isinstance(data, Mapping) and data.get("fingerprint"):
        settings["data"] = str(data["fingerprint"])[:8]
    settings["environment"] = environment(run)
    settings.pop("seed", None)
    return settings


def batch_size(run: Run) -> str:
    """As run.json has it; nothing where it does not."""
    config = run.info.get("config")
    size = config.get("batch_size") if isinstance(config, Mapping) else None
    return str(size) if isinstance(size, int) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def groups(table: Table) -> list[Group]:
    """Runs by dataset, agent and preset. Where such runs are variants of a sweep or have different settings, they
    are told apart by those, so that an ablation is never averaged with the real thing."""
    by_name: dict[tuple[str, str, str], list[Run]] = {}
    beside: dict[tuple[str, str], set[str]] = {}  # presets of one agent on one dataset
    for run in table.runs:
        by_name.setdefault((run.dataset, run.agent, run.preset), []).append(run)
        beside.setdefault((run.dataset, run.agent), set()).add(run.preset)
    found: list[Group] = []
    for (dataset, agent, preset), runs in by_name.items():
        variants: dict[str, list[Run]] = {}
        named: dict[str, list[Run]] = {}
        for run in runs:
            named.setdefault(run.variant, []).append(run)
        for name, alike in named.items():
            for run, settings in zip(alike, _variants(alike)):
                variants.setdefault(", ".join(filter(None, (name, settings))), []).append(run)
        for variant, members in variants.items():
            label = agent if len(beside[dataset, agent]) == 1 else f"{agent} {preset}"
            label += f" ({variant})" if variant else ""
            found.append(Group(dataset, agent, preset, variant, label, tuple(members)))
    return sorted(found, key=lambda g: (natural(g.dataset), g.agent, g.preset, natural(g.variant)))


def _variants(runs: Sequence[Run]) -> list[str]:
    """For each run, the settings in which these runs differ; empty when they agree."""
    settings = [_settings(run) if run.info or run.elsewhere else None for run in runs]
    known = [each for each in settings if each is not None]
    names = sorted({name for each in known for name in each})
    differing = [name for name in names if len({_text(each.get(name, MISSING)) for each in known}) > 1]
    of_seed: dict[int, set[str]] = {}
    for run, own in zip(runs, settings):
        of_seed.setdefault(run.seed, set()).add(_text((own or {}).get("data", MISSING)))
    if all(len(data) == 1 for data in of_seed.values()):  # each seed has data of its own: part of what a seed varies
        differing = [name for name in differing if name != "data"]
    labels = []
    for own in settings:
        if own is None:  # rows from a bare CSV do not say their settings
            labels.append("settings unknown" if differing else "")
            continue
        parts = [f"{name}={_text(own[name])}" for name in differing if name in own]
        if len(parts) > 3:  # too long to read: the first two, and a hash that keeps it unique
            parts = [*parts[:2], f"… {fingerprint(own, 4)}"]
        labels.append(", ".join(parts))
    return labels


PresetOf = Callable[[str, str, str], Mapping[str, Any] | None]
"""(agent, preset, dataset) -> its configuration, None if nobody knows it. Agents need torch, and a report does not."""


def departures(run: Run, preset_of: PresetOf) -> list[str]:
    """`steps=20 (preset: 1000000)`, ...: where a run's configuration is not its preset's, as far as both say it."""
    config, preset = run.info.get("config"), preset_of(run.agent, run.preset, run.dataset)
    if not isinstance(config, Mapping) or preset is None:
        return []
    own, named = _flat(config), _flat(preset)
    return [
        f"{name}={_text(own[name])} (preset: {_text(value)})"
        for name, value in named.items()
        if name in own and own[name] != value
    ]


def warnings(found: Sequence[Group], preset_of: PresetOf | None = None) -> list[str]:
    """What a reader must know before comparing the lines."""
    notes = []
    for group in found:
        name = f"{group.label} on {group.dataset} (preset {group.preset})"
        changed = departures(group.runs[0], preset_of) if preset_of else []
        if changed:
            shown = changed if len(changed) <= 6 else [*changed[:5], f"and {len(changed) - 5} more"]
            notes.append(f"{name}: not the preset as it stands: {', '.join(shown)}")
        for run in group.scored:
            if run.elsewhere and run.info.get("environment"):
                notes.append(f"{name}: {run.name} was evaluated in {run.elsewhere}, not in {run.info['environment']}")
        seeds = [run.seed for run in group.scored]
        for seed in sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            notes.append(f"{name}: {seeds.count(seed)} different runs have seed {seed}; each counts as a seed")
        for run in group.scored:
            total = run.info.get("updates", (run.info.get("config") or {}).get("steps"))
            if isinstance(total, int) and run.steps[-1] < total:
                notes.append(f"{name}: {run.name} was last evaluated at update {run.steps[-1]:,} of {total:,}")
        if "–" in group.step:
            notes.append(f"{name}: the runs were last evaluated at different steps ({group.step})")
        for run in group.scored:
            lacking = sorted(set(group.tasks) - {row.task for row in run.last}, key=natural)
            if lacking:
                notes.append(
                    f"{name}: {run.name} was not evaluated on task {', '.join(lacking)}; overall, each run counts by "
                    "the mean of the tasks it has"
                )
    return notes


def rate(rows: Iterable[Episode]) -> float:
    return float(np.mean([row.success for row in rows]))


def run_score(rows: Sequence[Episode]) -> float:
    """Overall success of one evaluation: the mean of the task means, however many episodes each has."""
    tasks: dict[str, list[Episode]] = {}
    for row in rows:
        tasks.setdefault(row.task, []).append(row)
    return float(np.mean([rate(members) for members in tasks.values()]))


def run_return(rows: Iterable[Episode]) -> float:
    """Mean return of one evaluation; NaN where its tasks pay none."""
    returns = [row.returned for row in rows if not math.isnan(row.returned)]
    return float(np.mean(returns)) if returns else math.nan


def environment(run: Run) -> str:
    return run.elsewhere or run.info.get("environment") or run.dataset


def normalised_score(run: Run) -> float:
    """A run's return at its last evaluation, normalised; NaN without a return, or references for it."""
    returned = run_return(run.last)
    score = None if math.isnan(returned) else normalised(environment(run), returned)
    return math.nan if score is None else score


def _row(group: Group, task: str, members: Sequence[Sequence[Episode]], strata: list[list[float]]) -> SuccessRow:
    scores = [run_score(rows) for rows in members]
    mean, std = mean_and_std(scores)
    episodes = sum(len(rows) for rows in members)
    if max(scores) - min(scores) < 1e-9:
        # One seed, or seeds that scored alike: a bootstrap over seeds would have no width, but the episodes
        # still say something. The rate that weighs tasks equally stands for that of the pooled episodes.
        low, high = wilson(mean * episodes, episodes)
        kind = "wilson"
    else:
        stream = numpy_stream(0, "report", group.dataset, group.agent, group.preset, group.variant, task)
        # A seed that lacks tasks counts by those it has, in the interval as in the mean.
        whole = all(len({row.task for row in rows}) == len(strata) for rows in members)
        low, high = seed_bootstrap(strata if whole else [scores], stream)
        kind = "bootstrap"
    middle = float(iqm([np.asarray(values) for values in strata]))
    scores_of_returns = _scores(group, task, members)
    return SuccessRow(
        dataset=group.dataset,
        agent=group.agent,
        preset=group.preset,
        variant=group.variant,
        task=task,
        step=group.step,
        batch=group.batch,
        seeds=len(members),
        episodes=episodes,
        mean=100 * mean,
        std=100 * std,
        low=100 * low,
        high=100 * high,
        interval=kind,
        iqm=100 * middle,
        **scores_of_returns,
    )


def _scores(group: Group, task: str, members: Sequence[Sequence[Episode]]) -> dict[str, float]:
    """Returns and normalised scores; the interval is a bootstrap over seeds, of one seed over its episodes."""
    of_runs = [run_return(rows) for rows in members]
    if any(math.isnan(value) for value in of_runs):
        return {}
    found = {"returned": float(np.mean(of_runs))}
    scale = [normalised(environment(group.runs[0]), value) for value in (0.0, 1.0)]
    if scale[0] is None or scale[1] is None:
        return found
    zero, unit = scale[0], scale[1] - scale[0]
    mean, std = mean_and_std(of_runs)
    stream = numpy_stream(0, "report", "score", group.dataset, group.agent, group.preset, group.variant, task)
    episodes = (row.returned for rows in members for row in rows if not math.isnan(row.returned))
    drawn = of_runs if len(set(of_runs)) > 1 else list(episodes)
    low, high = seed_bootstrap([drawn], stream)
    return found | {
        "score": zero + unit * mean,
        "score_std": unit * std,
        "score_low": zero + unit * low,
        "score_high": zero + unit * high,
    }


def success(group: Group) -> list[SuccessRow]:
    """The overall row, then one row for each task. A group without an evaluation has none."""
    if not group.scored:
        return []
    by_task = {
        task: [rows for run in group.scored if (rows := [row for row in run.last if row.task == task])]
        for task in group.tasks
    }
    strata = {task: [rate(rows) for rows in members] for task, members in by_task.items()}
    overall = _row(group, OVERALL, [run.last for run in group.scored], list(strata.values()))
    return [overall] + [_row(group, task, by_task[task], [strata[task]]) for task in group.tasks]


def success_rows(found: Sequence[Group]) -> list[SuccessRow]:
    return [row for group in found for row in success(group)]


def merit(row: SuccessRow) -> float:
    """What lines are ranked by: the score where there is one, since all but the worst reach such a goal some time."""
    return row.mean if row.task != OVERALL or math.isnan(row.score) else row.score


def partial(rows: Sequence[SuccessRow], whole: Iterable[str] = ()) -> dict[tuple[str, str], str]:
    """`task 2 only`, ...: what to say of overall rows, by identity, that lack a task of `whole`, or one that another
    line of the dataset has."""
    every: dict[str, set[str]] = {}
    lines: dict[tuple[str, str], list[SuccessRow]] = {}
    for row in rows:
        if row.task != OVERALL:
            every.setdefault(row.dataset, set(whole)).add(row.task)
            lines.setdefault((row.dataset, identity(row)[1]), []).append(row)
    found = {}
    for row in rows:
        own = lines.get((row.dataset, identity(row)[1]), [])
        if row.task != OVERALL or not own:
            continue
        tasks = sorted((each.task for each in own), key=natural)
        if any(each.seeds < row.seeds for each in own):
            found[identity(row)] = "seeds differ in tasks"
        elif set(tasks) != every[row.dataset]:
            found[identity(row)] = f"task{'' if len(tasks) == 1 else 's'} {', '.join(tasks)} only"
    return found


def best(rows: Sequence[SuccessRow]) -> set[tuple[str, str]]:
    """The identities of the rows that hold the highest merit of their dataset and task. A tie marks every
    holder; a column of one line, or of zeros, marks none. An overall row of fewer tasks than others have is not
    compared with them."""
    columns: dict[tuple[str, str], list[SuccessRow]] = {}
    lacking = partial(rows)
    for row in rows:
        if identity(row) not in lacking:
            columns.setdefault((row.dataset, row.task), []).append(row)
    marked = set()
    for members in columns.values():
        top = max(merit(row) for row in members)
        if len(members) > 1 and top > 0:
            marked |= {identity(row) for row in members if math.isclose(merit(row), top)}
    return marked


def identity(row: SuccessRow) -> tuple[str, str]:
    return f"{row.dataset}\n{row.task}", f"{row.agent}\n{row.preset}\n{row.variant}"


# --- writing ---


def number(value: float, digits: int = 1) -> str:
    """A percentage as people write it: 7.0 → 7, NaN → nothing."""
    if math.isnan(value):
        return ""
    text = f"{value:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def mean_std(row: SuccessRow) -> str:
    return number(row.mean) + (f" ± {number(row.std)}" if not math.isnan(row.std) else "")


def between(row: SuccessRow) -> str:
    return f"{number(row.low)}–{number(row.high)}"


def has_scores(rows: Iterable[SuccessRow]) -> bool:
    return any(not math.isnan(row.returned) for row in rows)


def all_scored(rows: Iterable[SuccessRow]) -> bool:
    """Whether lines can be drawn by their scores: every one has it."""
    scores = [row.score for row in rows]
    return bool(scores) and not any(math.isnan(score) for score in scores)


def overall_heads(scored: bool) -> tuple[str, ...]:
    """Above the cells of an overall row; `scored` where one of the dataset's lines has returns."""
    return (*(SCORE_HEADS if scored else ()), *SUCCESS_HEADS)


def overall_cells(row: SuccessRow, scored: bool, top: bool) -> list[tuple[str, bool]]:
    """The cells below those heads, each with whether it is marked: of the row on top, what it is ranked by."""
    spread = "" if math.isnan(row.score_std) else f" ± {number(row.score_std)}"
    interval = "" if math.isnan(row.score) else f"{number(row.score_low)}–{number(row.score_high)}"
    texts = [number(row.returned), number(row.score) + spread, interval] if scored else []
    ranked = "success %" if math.isnan(row.score) else "score"
    texts += [mean_std(row), between(row)]
    return [(text, top and head == ranked) for head, text in zip(overall_heads(scored), texts)]


SCORE_HEADS = ("return", "score", "score 95 %")
SUCCESS_HEADS = ("success %", "95 % interval")
SCORE_NOTE = (
    "Return: the undiscounted sum of rewards of an episode. Score: D4RL's normalisation with this project's own "
    "references (docs/protocol.md), 0 for a random policy and 100 for the waypoint controller; scores normalised by "
    "D4RL's references are other numbers."
)


def to_csv(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    for line in lines:
        writer.writerow([("" if math.isnan(v) else f"{v:.10g}") if isinstance(v, float) else v for v in line])
    return buffer.getvalue()


def success_csv(rows: Sequence[SuccessRow]) -> str:
    names = [item.name for item in fields(SuccessRow) if item.name not in SCORES or has_scores(rows)]
    heads = ["return" if name == "returned" else name for name in names]
    return to_csv(heads, ([getattr(row, name) for name in names] for row in rows))


def episodes_csv(rows: Iterable[Episode]) -> str:
    rows = list(rows)
    there = (any(not math.isnan(row.returned) for row in rows), any(row.environment for row in rows))
    names = COLUMNS + tuple(name for name, needed in zip(OPTIONAL, there) if needed)
    own = {"success": lambda row: int(row.success), "return": lambda row: row.returned}
    return to_csv(names, ([own[n](row) if n in own else getattr(row, n) for n in names] for row in rows))


def summary_csv(table: Table) -> str:
    """One line for each evaluated run: its final success in percent, the mean over tasks. With variants among the
    runs, or returns, a line has those too."""
    runs = [run for run in table.runs if run.last]
    runs.sort(key=lambda r: (natural(r.dataset), r.agent, r.preset, natural(r.variant), r.seed, natural(r.name)))
    lines = [
        {
            "dataset": run.dataset,
            "agent": run.agent,
            "preset": run.preset,
            "variant": run.variant,
            "seed": run.seed,
            "updates": run.steps[-1],
            "batch": batch_size(run),
            "success": 100 * run_score(run.last),
            "return": run_return(run.last),
            "score": normalised_score(run),
        }
        for run in runs
    ]
    more = any(run.variant or not math.isnan(run_return(run.last)) for run in runs)
    names = [name for name in lines[0] if more or name not in ("variant", "return", "score")]
    return to_csv(names, ([line[name] for name in names] for line in lines))


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are text, the rest numbers."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join("---" if i < left else "---:" for i in range(len(header))) + "|"
    return "\n".join([line(header), rule, *(line(cells) for cells in lines)]) + "\n"


def wide(rows: Sequence[SuccessRow], dataset: str) -> tuple[list[str], list[list[SuccessRow | None]]]:
    """One dataset as a matrix: its tasks, and for each group the overall cell and a cell for each task."""
    mine = [row for row in rows if row.dataset == dataset]
    tasks = sorted({row.task for row in mine if row.task != OVERALL}, key=natural)
    lines: dict[str, dict[str, SuccessRow]] = {}
    for row in mine:
        lines.setdefault(identity(row)[1], {})[row.task] = row
    return tasks, [[cells.get(task) for task in (OVERALL, *tasks)] for cells in lines.values()]


def ranked(rows: Sequence[SuccessRow], dataset: str) -> tuple[list[str], list[list[SuccessRow | None]]]:
    """The same, the best line first, and last those of fewer tasks than others have."""
    lacking = partial(rows)

    def place(cells: list[SuccessRow | None]) -> tuple[bool, float]:
        return (identity(cells[0]) in lacking, -merit(cells[0])) if cells[0] else (True, 0.0)

    tasks, lines = wide(rows, dataset)
    return tasks, sorted(lines, key=place)


def label(row: SuccessRow) -> str:
    return f"{row.agent} ({row.variant})" if row.variant else row.agent


def success_markdown(rows: Sequence[SuccessRow], unlike: Sequence[str] = ()) -> str:
    """One table for each dataset, the best mean of each column in bold; below, what was not evaluated alike."""
    marked = best(rows)
    parts = []
    for dataset in dict.fromkeys(row.dataset for row in rows):
        tasks, lines = wide(rows, dataset)
        scored = has_scores(row for row in rows if row.dataset == dataset)
        header = ["agent", "preset", "seeds", *overall_heads(scored), *(f"task {task}" for task in tasks)]
        body = []
        for cells in lines:
            overall = cells[0]
            assert overall is not None
            texts = overall_cells(overall, scored, identity(overall) in marked)
            texts += [(number(cell.mean), identity(cell) in marked) if cell else ("", False) for cell in cells[1:]]
            shown = [f"**{text}**" if strong else text for text, strong in texts]
            body.append([label(overall), overall.preset, str(overall.seeds), *shown])
        parts.append(f"### {dataset}\n\n" + markdown(header, body, left=2))
    notes = (
        "Success in percent at the last evaluation. ± is the standard deviation over seeds. The interval is "
        "Wilson's over episodes for one seed (or seeds that scored alike), and a bootstrap over seeds, each with all "
        "its tasks, for several; with two or three seeds that is no more than their range."
    )
    notes += f" {SCORE_NOTE}" if has_scores(rows) else ""
    notes += "\n\nBefore you compare:\n\n" + "\n".join(f"- {note}" for note in unlike) if unlike else ""
    return "\n".join(parts) + f"\n{notes}\n"
