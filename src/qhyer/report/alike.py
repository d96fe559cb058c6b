"""Whether the lines of a dataset's table are of the same evaluation: its tasks, its number of episodes, its seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from qhyer.report.collect import Run, natural
from qhyer.report.reproduce import evaluation_seed
from qhyer.report.tables import Group

SHOWN = 6  # names of lines in a note


def unlike(found: Sequence[Group]) -> list[str]:
    """What a reader must know of lines that were not evaluated alike; nothing where all were."""
    notes = []
    for dataset in dict.fromkeys(group.dataset for group in found):
        mine = [group for group in found if group.dataset == dataset and group.scored]
        runs = [run for group in mine for run in group.scored]
        if len(mine) > 1 and len({_tasks(run) for run in runs}) > 1:  # of one line's seeds, its own note says so
            notes.append(
                f"on {dataset} not all were evaluated on the same tasks, so overall numbers cannot be compared: "
                f"{_who(mine, _tasks)}"
            )
        if _differ((task, count) for run in runs for task, count in _counts(run).items()):
            notes.append(f"on {dataset} not all were evaluated on as many episodes a task: {_who(mine, _episodes)}")
        homes = {str(run.info.get("environment")) for run in runs if run.info.get("environment")}
        home = homes.pop() if len(homes) == 1 else ""  # of rows that do not say theirs
        if _differ(
            ((run.elsewhere or run.info.get("environment") or home, row.task, row.episode), row.env_seed)
            for run in runs
            for row in run.last
        ):
            notes.append(
                f"on {dataset} not all were evaluated with the same seed, so not on the same episodes: "
                f"{_who(mine, _seed)}"
            )
    return notes


def _differ(pairs: Iterable[tuple[object, object]]) -> bool:
    """Whether a key has two values."""
    known: dict[object, object] = {}
    return any(known.setdefault(key, value) != value for key, value in pairs)


def _counts(run: Run) -> Counter[str]:
    return Counter(row.task for row in run.last)


def _tasks(run: Run) -> str:
    tasks = sorted(_counts(run), key=natural)
    return f"task{'' if len(tasks) == 1 else 's'} {', '.join(tasks)}"


def _episodes(run: Run) -> str:
    return "–".join(map(str, sorted(set(_counts(run).values()))))


def _seed(run: Run) -> str:
    seed = evaluation_seed(run)
    if seed is not None:
        return f"seed {seed}"
    first = min(run.last, key=lambda row: (natural(row.task), row.episode))
    return f"a seed that is not known, env_seed {first.env_seed} and so on"


def _who(mine: Sequence[Group], value: Callable[[Run], str]) -> str:
    """`4 (gcbc); 50 (crl, qhyer)`; where the seeds of a line differ, each by itself."""
    names: dict[str, dict[str, None]] = {}
    for group in mine:
        values = [value(run) for run in group.scored]
        for run, text in zip(group.scored, values):
            name = group.label if len(set(values)) == 1 else f"{group.label}, run {run.name}"
            names.setdefault(text, {})[name] = None
    told = []
    for text in sorted(names, key=natural):
        few = [*names[text]] if len(names[text]) <= SHOWN else [*list(names[text])[: SHOWN - 1], "…"]
        told.append(f"{text} ({'; '.join(few) if any(',' in name for name in few) else ', '.join(few)})")
    return "; ".join(told)
