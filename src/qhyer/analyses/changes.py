"""How often do the data change each part of a goal, and how much do their actions tremble?

Tells data that lack events (objects hardly ever moved) from data that are merely noisy. For each dataset:

    swings    of a goal coordinate: how often in an episode it passes from the lowest quarter of its range to the
              highest, or back; in between it counts as in the quarter it was last in. The range goes from the 0.1 % to
              the 99.9 % quantile over the dataset, so that single outliers do not stretch it (from the least to the
              greatest value where these quantiles are the same). A swing of a binary coordinate is a flip
    tremble   of an action dimension: the standard deviation of its change from one step of an episode to the next

Nothing is counted across episodes, nor the action beside a final state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qhyer.analyses import _output
from qhyer.data import registry
from qhyer.data.episodes import Episodes
from qhyer.errors import require

NAME = "changes"
TAIL = 0.001  # of the values, on either side, beyond the range
QUARTER = 0.25  # of the range, on either side: between them lies no change
SCENE = (
    *("cube x", "cube y", "cube z", "cube qw", "cube qx", "cube qy", "cube qz", "button 1", "button 2"),
    *("drawer", "drawer speed", "window", "window speed"),
)
ARM = ("x", "y", "z", "yaw", "gripper")

Array = np.ndarray


# -------------------------------------------------------------------------------------------------------- measuring


def value_range(values: Array) -> tuple[float, float]:
    """Between the quantiles; the whole range where they are the same (a lamp that is hardly ever lit)."""
    low, high = np.quantile(values, (TAIL, 1.0 - TAIL))
    return (float(low), float(high)) if low < high else (float(values.min()), float(values.max()))


def count_swings(values: Array, episode: Array, low: float, high: float) -> int:
    """Passages between the lowest and the highest quarter of a range; values and the number of their episode, (N,)."""
    margin = QUARTER * (high - low)
    up = values >= high - margin
    rows = np.flatnonzero(up | (values <= low + margin))  # what lies between says nothing new
    up, episode = up[rows], episode[rows]
    return int(((up[1:] != up[:-1]) & (episode[1:] == episode[:-1])).sum())


def tremble(actions: Array, episode: Array, final: Array) -> Array:
    """Standard deviation of the change from one step to the next, (d_a,), of actions (N, d_a); `final` marks states."""
    steps = (episode[1:] == episode[:-1]) & ~final[1:]  # a change ends at a row with an action of the same episode
    require(bool(steps.any()), "no episode has two actions, so none changes")
    return np.diff(actions.astype(np.float64), axis=0)[steps].std(0)


def labels(dataset: registry.Dataset | None, goal: Sequence[int], actions: int) -> tuple[list[str], list[str]]:
    """What goal coordinates and action dimensions are, where that is known; their numbers else."""
    family = None if dataset is None else dataset.family
    names: Sequence[str] = [""] * len(goal)
    if family == "scene":
        names = SCENE
    elif family == "cube":
        names = [f"cube {place // 3 + 1} {'xyz'[place % 3]}" for place in range(len(goal))]
    elif family == "puzzle":
        names = [f"button {place + 1}" for place in range(len(goal))]
    elif family is not None:
        names = "xy"
    moves = ARM if family in ("cube", "scene", "puzzle") and actions == len(ARM) else [""] * actions
    return (
        [f"{index} {name}".strip() for index, name in zip(goal, names, strict=True)],
        [f"{index} {name}".strip() for index, name in enumerate(moves)],
    )


def measure(episodes: Episodes, dataset: registry.Dataset | None) -> dict[str, Any]:
    """Of one dataset: the swings of each goal coordinate, the tremble of each action dimension."""
    ends = episodes.ends.numpy()
    final = np.zeros(len(episodes.observations), dtype=bool)
    final[ends] = True
    episode = np.repeat(np.arange(len(ends)), ends - episodes.starts.numpy() + 1)
    goal_labels, action_labels = labels(dataset, episodes.goal_indices, episodes.actions.shape[1])
    goal = []
    for index, label in zip(episodes.goal_indices, goal_labels):
        values = episodes.observations[:, index].contiguous().numpy()
        low, high = value_range(values)
        swings = count_swings(values, episode, low, high) / len(ends)
        goal.append({"index": index, "label": label, "swings": swings, "low": low, "high": high})
    shakes = tremble(episodes.actions.numpy(), episode, final).tolist()
    return {
        "dataset": episodes.name,
        "fingerprint": episodes.fingerprint,
        "episodes": len(ends),
        "steps": episodes.num_transitions / len(ends),
        "goal": goal,
        "action": [
            {"index": index, "label": label, "tremble": value}
            for index, (label, value) in enumerate(zip(action_labels, shakes))
        ],
    }


# ---------------------------------------------------------------------------------------------------------- showing


def groups(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Datasets that have the same goal coordinates and actions stand side by side."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for data in result["datasets"]:
        same = tuple(tuple(item["label"] for item in data[part]) for part in ("goal", "action"))
        found.setdefault(same, []).append(data)
    return list(found.values())


def title(data: dict[str, Any]) -> str:
    return data["dataset"].removesuffix("-v0")


def table(group: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["", *map(title, group)]
    lines = [["episodes", *(str(data["episodes"]) for data in group)]]
    lines += [["steps an episode", *(f"{data['steps']:.0f}" for data in group)]]
    for part, quantity, digits in (("goal", "swings", 2), ("action", "tremble", 3)):
        for place, item in enumerate(group[0][part]):
            values = (f"{data[part][place][quantity]:.{digits}f}" for data in group)
            lines.append([f"{quantity}, {item['label']}", *values])
    return header, lines


def draw(result: dict[str, Any], path: Path) -> None:
    from qhyer.report import figures  # chooses matplotlib's backend

    plt, rows = figures.plt, groups(result)
    with plt.rc_context(_output.style()):
        figure = plt.figure(figsize=(11, 0.3 + 2.9 * len(rows)), layout="constrained")
        panels = figure.subplots(len(rows), 2, squeeze=False, gridspec_kw={"width_ratios": [3, 1]})
        for group, (left, right) in zip(rows, panels):
            for panel, part, quantity in ((left, "goal", "swings"), (right, "action", "tremble")):
                places, width = np.arange(len(group[0][part])), 0.8 / len(group)
                for number, data in enumerate(group):
                    heights = [item[quantity] for item in data[part]]
                    shift = (number - (len(group) - 1) / 2) * width
                    colour = _output.COLOURS[number % len(_output.COLOURS)]
                    panel.bar(places + shift, heights, width, color=colour, label=title(data))
                names = [item["label"] for item in group[0][part]]
                panel.set_xticks(places, names, rotation=40, ha="right", rotation_mode="anchor", fontsize=8.5)
                panel.set_xlim(-0.6, len(places) - 0.4)
                panel.set_axisbelow(True)
                panel.grid(axis="y", color="#e4e6ea", linewidth=0.6)
            left.set_title("swings of each goal coordinate in an episode", loc="left")
            right.set_title("tremble of each action", loc="left")
            left.legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.97))
            right.sharey(panels[0][1])
            right.set_ylim(bottom=0.0)
        _output.save_figure(figure, path)
        plt.close(figure)


# --------------------------------------------------------------------------------------------------------------- run


def run(
    *,
    datasets: tuple[str, ...] = ("scene-play", "scene-noisy"),
    out: Path | None = None,
    overwrite: bool = False,
) -> Path:
    """How often do the data change each part of a goal, and how much do their actions tremble?

    Args:
        datasets: names of datasets, or files; the goal of a file is the one it names itself (docs/data.md)
        out: folder to write to; results/analyses/changes when not given
        overwrite: replace a result made with other settings
    """
    require(len(datasets) > 0, "give at least one dataset")
    path = _output.folder(NAME, out) / f"{NAME}.json"
    found = [measure(*registry.load(name)) for name in dict.fromkeys(datasets)]  # one in memory at a time
    settings = {
        "datasets": [data["dataset"] for data in found],
        "fingerprints": [data["fingerprint"] for data in found],
        "tail": TAIL,
        "quarter": QUARTER,
    }
    result = _output.existing(path, settings, overwrite)
    if result is None:
        result = {"analysis": NAME, "settings": settings, "datasets": found}
    header = ["dataset", "quantity", "index", "label", "value", "low", "high"]
    lines = [
        [data["dataset"], quantity, item["index"], item["label"], item[quantity], item.get("low"), item.get("high")]
        for data in result["datasets"]
        for part, quantity in (("goal", "swings"), ("action", "tremble"))
        for item in data[part]
    ]
    _output.write_result(path, result, header, lines)
    for group in groups(result):
        _output.show(*table(group))
    print("swings: passages between the outer quarters of a coordinate's range in an episode, mean over episodes")
    print("tremble: standard deviation of an action's change from step to step")
    draw(result, path)
    return path
