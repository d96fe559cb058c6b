"""Which pieces of the data does a rollout put together, and where does it leave them?

Policies act in a maze whose data are pieces too short for any task (pointmaze-medium-stitch), and each rollout is
read as a chain of data pieces:

    piece     explains a step if one of its states lies within `radius` of it and moves on the same way (headings over
              the next ten steps within 60 degrees; where the rollout hardly moves, the place alone counts)
    chain     greedily, the piece that explains the most steps from here on, and so on: the fewest pieces that do
    out       the step's (state, action), each coordinate in standard deviations of the data, is farther from every pair
              of the data than 99 % of the data's own pairs are from those of other episodes. Drawn in black.
              `state out`: the state alone, in the same way

A task is covered by a piece that comes within `radius` of the start of the task and later of its goal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qhyer import models, runs
from qhyer.agent import Agent
from qhyer.analyses import _output
from qhyer.analyses._maze import INK, SOFT, Maze, Places, draw_maze, mark_ends, maze_dataset, small_data
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError, require
from qhyer.evaluate import EpisodeResult, EvalConfig, Timings, evaluate
from qhyer.progress import Progress
from qhyer.rng import numpy_stream

NAME = "stitching"
MODELS = ("qhyer", "qhyer-rtg", "dt", "lsdt", "iql", "gcbc")  # in this order, where they are there
TITLES = {
    "qhyer": "QHyer",
    "qhyer-rtg": "QHyer's decoder, return-to-go",
    "dt": "DT",
    "lsdt": "LSDT",
    "iql": "IQL",
    "gcbc": "GCBC",
}
AHEAD = 10  # steps over which a heading is taken
STILL = 0.2  # shorter ways in AHEAD steps have no heading; free, the point goes about ten times as far
COSINE = 0.5
QUANTILE = 0.99
CALIBRATION = 5000  # pairs of the data whose own distances are taken
EVERY = 2  # steps of a drawn rollout

Array = np.ndarray


# ---------------------------------------------------------------------------------------------------------- the data


def headings(xy: Array, ends: Array, ahead: int = AHEAD) -> Array:
    """Rows (n, 2) with the last row of each one's path (n,) -> the way gone in the next steps (n, 2)."""
    return xy[np.minimum(np.arange(len(xy)) + ahead, ends)] - xy


class Pieces:
    """The data, to look up what lies near a step of a rollout."""

    def __init__(self, episodes: Episodes, radius: float) -> None:
        rows = episodes.transitions.cpu().numpy()
        observations = episodes.observations.double().cpu().numpy()
        self.radius, self.count = radius, episodes.num_episodes
        self.observation_dim = observations.shape[1]
        lengths = (episodes.ends - episodes.starts).cpu().numpy()
        self.piece = np.repeat(np.arange(self.count), lengths)  # of each transition
        self.first = np.cumsum(lengths) - lengths
        self.xy = observations[rows, :2]
        self.heading = headings(observations[:, :2], episodes.end_of.cpu().numpy())[rows]
        self.long = np.linalg.norm(self.heading, axis=1)
        pairs = np.concatenate([observations[rows], episodes.actions.double().cpu().numpy()[rows]], axis=1)
        self.scale = pairs.std(axis=0).clip(min=1e-6)
        self.pairs = pairs / self.scale  # (n, d_s + d_a)
        self.places = Places(self.xy, radius)

    def explaining(self, xy: Array, heading: Array) -> Array:
        """Steps of a rollout (T, 2) -> which pieces explain each (T, pieces)."""
        found = np.zeros((len(xy), self.count), dtype=bool)
        for t, (place, way) in enumerate(zip(xy, heading)):
            rows = self.places.near(place)
            rows = rows[((self.xy[rows] - place) ** 2).sum(1) <= self.radius**2]
            length = np.linalg.norm(way)
            if length >= STILL:
                rows = rows[self.heading[rows] @ way >= COSINE * length * self.long[rows]]
                rows = rows[self.long[rows] > 0]
            found[t, self.piece[rows]] = True
        return found

    def distance(self, observations: Array, actions: Array, but: Array | None = None) -> Array:
        """To the nearest pair of the data, and to the nearest state alone (T, 2), in standard deviations.

        `but`: a piece for each step that does not count. Infinite where no state of the data is near at all.
        """
        pairs = np.concatenate([observations, actions], axis=1) / self.scale
        nearest = np.full((len(pairs), 2), np.inf)
        for t, pair in enumerate(pairs):
            rows = self.places.near(observations[t, :2])
            if but is not None:
                rows = rows[self.piece[rows] != but[t]]
            if len(rows):
                apart = (self.pairs[rows] - pair) ** 2
                nearest[t] = np.sqrt([apart.sum(1).min(), apart[:, : self.observation_dim].sum(1).min()])
        return nearest

    def limits(self, quantile: float = QUANTILE, sample: int = CALIBRATION) -> Array:
        """The distances (2,) that this share of the data's own pairs keep to those of other episodes."""
        size = min(sample, len(self.pairs))
        rows = numpy_stream(0, "analysis", NAME).choice(len(self.pairs), size=size, replace=False)
        states = self.pairs[rows] * self.scale
        split = self.observation_dim
        found = self.distance(states[:, :split], states[:, split:], self.piece[rows])
        return np.quantile(found, quantile, axis=0, method="higher")  # may be infinite

    def covering(self, start: Array, goal: Array) -> int:
        """Pieces that pass the start and later the goal, both within the radius."""
        at_start = np.linalg.norm(self.xy - start[:2], axis=1) <= self.radius
        at_goal = np.linalg.norm(self.xy - goal[:2], axis=1) <= self.radius
        order = np.arange(len(self.xy))
        first = np.full(self.count, len(order))
        np.minimum.at(first, self.piece[at_start], order[at_start])
        last = np.full(self.count, -1)
        np.maximum.at(last, self.piece[at_goal], order[at_goal])
        return int((first < last).sum())

    def path(self, piece: int, every: int = 5) -> Array:
        end = self.first[piece + 1] if piece + 1 < self.count else len(self.xy)
        return self.xy[self.first[piece] : end : every]


def chain(explains: Array) -> Array:
    """Which pieces explain each step (T, pieces) -> the piece each step is given to (T,), -1 where there is none.

    From each step on, the piece that lasts longest: no other chain has fewer pieces.
    """
    steps = len(explains)
    lasting = np.zeros((steps + 1, explains.shape[1]), dtype=np.int32)
    for t in range(steps - 1, -1, -1):
        lasting[t] = (lasting[t + 1] + 1) * explains[t]
    given = np.full(steps, -1)
    t = 0
    while t < steps:
        best = int(lasting[t].argmax())
        length = int(lasting[t, best])
        if length:
            given[t : t + length] = best
        t += max(1, length)
    return given


def runs_of(given: Array) -> list[tuple[int, int, int]]:
    """Pieces in the order of the rollout: (piece, first step, last step + 1), steps without one left out."""
    cuts = np.flatnonzero(np.diff(given)) + 1
    bounds = [0, *cuts.tolist(), len(given)]
    return [(int(given[a]), a, b) for a, b in itertools.pairwise(bounds) if b > a and given[a] >= 0]


# -------------------------------------------------------------------------------------------------------- policies


@dataclass(frozen=True)
class Walker:
    """A policy whose walks are looked at, and where it comes from."""

    name: str
    agent: Agent
    about: dict[str, Any]
    identity: str
    """which weights: a model's SHA-256, a run's step"""


def load_policy(folder: Path, device: str) -> Walker:
    """A run's folder, or a model's."""
    folder = Path(folder)
    if runs.is_run(folder):
        agent, step = runs.load_agent(folder, device=device)
        return Walker(folder.resolve().name, agent, runs.read(folder), f"step {step}")
    if not (folder / models.ABOUT).is_file():
        raise UserError(f"{folder} is neither a run (`qhyer train` makes them) nor a model (`qhyer export`)")
    agent, about = models.load(folder, device)
    return Walker(folder.resolve().name, agent, about, about["weights"]["sha256"])


def own_models() -> tuple[Path, ...]:
    """The small models that come with the results."""
    folder = _output.RESULTS / NAME / "models"
    found = [folder / name for name in MODELS if (folder / name / models.ABOUT).is_file()]
    if not found:
        raise UserError(
            f"give the runs or models to look at: qhyer analyze {NAME} RUN ... (there are none in {folder}; "
            "the repository has them)"
        )
    return tuple(found)


def find_data(about: dict[str, Any], data: Path | None, workers: int | None, quiet: bool) -> Episodes:
    """What the policies were trained on: the file given, the one recorded, or made again."""
    dataset = maze_dataset(about["dataset"])
    recorded = about["data"].get("path")
    if data is not None:
        path = Path(data)
    elif recorded and Path(recorded).is_file():
        path = Path(recorded)
    else:
        path = small_data(dataset, int(about["data"]["episodes"]), int(about["seed"]), workers, quiet)
    return Episodes.load(path, goal=dataset.goal_indices, name=dataset.name)


# ------------------------------------------------------------------------------------------------------- measuring


def read_rollout(result: EpisodeResult, actions: Array, pieces: Pieces, limits: Array) -> dict[str, Any]:
    """A rollout as a chain of pieces, and which of its steps are out."""
    assert result.observations is not None
    states = result.observations.astype(float)
    ways = headings(states[:, :2], np.full(len(states), len(states) - 1))[:-1]
    states = states[:-1]
    given = chain(pieces.explaining(states[:, :2], ways))
    out, state_out = (pieces.distance(states, actions.astype(float)) > limits).T
    return {
        "task": result.spec.task,
        "episode": result.spec.episode,
        "success": int(result.success),
        "steps": result.length,
        "pieces": len({piece for piece, _, _ in runs_of(given)}),
        "out": float(out.mean()),
        "state_out": float(state_out.mean()),
        "unexplained": float((given < 0).mean()),
        "still": float((np.linalg.norm(ways, axis=1) < STILL).mean()),
        "_given": given,
        "_out": out,
    }


def drawn(result: EpisodeResult, row: dict[str, Any], pieces: Pieces) -> dict[str, Any]:
    """What the figure shows of a rollout."""
    assert result.observations is not None
    parts = runs_of(row["_given"])
    return {
        "xy": np.round(result.observations[::EVERY, :2].astype(float), 2).tolist(),
        "parts": parts,
        "paths": [np.round(pieces.path(piece), 2).tolist() for piece, _, _ in parts[:40]],
        "out": np.flatnonzero(row["_out"]).tolist(),
        "start": [float(x) for x in result.observations[0, :2]],
        "goal": [float(x) for x in result.goal[:2]],
    }


def measure(
    policies: Sequence[Walker], maze: Maze, pieces: Pieces, tasks: Sequence[int], episodes: int, quiet: bool
) -> dict[str, Any]:
    limits = pieces.limits()
    rows: list[dict[str, Any]] = []
    pictures: list[dict[str, Any]] = []
    total = len(policies) * len(tasks) * episodes
    with Progress(NAME, total, quiet) as progress:
        for policy in policies:
            timings = Timings(actions={})
            config = EvalConfig(episodes=episodes, record=episodes, tasks=tuple(tasks))
            results = evaluate(policy.agent, maze.environment, config, workers=0, timings=timings)
            for result in results:
                assert timings.actions is not None
                row = read_rollout(result, np.stack(timings.actions[result.spec]), pieces, limits)
                if result.spec.episode == 0:
                    about = {"policy": policy.name, "task": row["task"], "success": row["success"]}
                    pictures.append(about | {"steps": row["steps"], **drawn(result, row, pieces)})
                rows.append({"policy": policy.name} | {k: v for k, v in row.items() if not k.startswith("_")})
                progress.advance(len(rows))
                progress.show(len(rows))
    ways = [
        {
            "task": task,
            "cells": float(maze.steps_to(maze.goals[task - 1, :2], maze.starts[task - 1][None, :2])[0]),
            "covering": pieces.covering(maze.starts[task - 1], maze.goals[task - 1]),
        }
        for task in tasks
    ]
    return {"limits": limits.tolist(), "tasks": ways, "rows": rows, "drawn": pictures}


# ---------------------------------------------------------------------------------------------------------- showing


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["policy", "task", "success %", "steps", "pieces", "pieces, reached", "out %"]
    header += ["state out %", "unexplained %", "still %"]
    lines = []
    rows = result["rows"]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        for task in [*dict.fromkeys(row["task"] for row in rows), 0]:
            mine = [row for row in rows if row["policy"] == policy and task in (0, row["task"])]
            reached = [row["pieces"] for row in mine if row["success"]]
            lines.append(
                [
                    TITLES.get(policy, policy),
                    str(task) if task else "all",
                    f"{100 * np.mean([row['success'] for row in mine]):.0f}",
                    f"{np.mean([row['steps'] for row in mine]):.0f}",
                    f"{np.mean([row['pieces'] for row in mine]):.1f}",
                    f"{np.mean(reached):.1f}" if reached else "",
                    *(
                        f"{100 * np.mean([row[key] for row in mine]):.1f}"
                        for key in ("out", "state_out", "unexplained", "still")
                    ),
                ]
            )
    return header, lines


def moving(xy: Array) -> Array:
    """A path without the points that lie where the one before does: a rollout may press against a wall for long."""
    away = np.linalg.norm(np.diff(xy, axis=0), axis=1) > 0.02
    return xy[np.concatenate([[True], away])]


def draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.lines import Line2D

    from qhyer.report import figures  # chooses matplotlib's backend

    plt = figures.plt
    geometry = {key: np.asarray(value) for key, value in result["geometry"].items()}
    names = list(dict.fromkeys(part["policy"] for part in result["drawn"]))
    tasks = sorted({part["task"] for part in result["drawn"]})
    reached = {name: [row["success"] for row in result["rows"] if row["policy"] == name] for name in names}
    with plt.rc_context(_output.style()):
        figure, axes = plt.subplots(
            len(names), len(tasks), figsize=(2.2 * len(tasks), 2.42 * len(names) + 0.3), layout="constrained",
            squeeze=False,
        )  # fmt: skip
        for part in result["drawn"]:
            line, column = names.index(part["policy"]), tasks.index(part["task"])
            panel = axes[line][column]
            draw_maze(panel, geometry)
            xy = np.asarray(part["xy"])
            whole = moving(xy)
            panel.plot(whole[:, 0], whole[:, 1], color="#9aa0a8", linewidth=1.0, zorder=2)  # what nothing explains
            for number, ((_, first, last), trail) in enumerate(zip(part["parts"], part["paths"])):
                colour, way = _output.COLOURS[number % len(_output.COLOURS)], np.asarray(trail)
                panel.plot(way[:, 0], way[:, 1], color=colour, linewidth=3.0, alpha=0.22, zorder=1)
                own = moving(xy[first // EVERY : last // EVERY + 2])
                panel.plot(own[:, 0], own[:, 1], color=colour, linewidth=1.5, zorder=3)
            out = np.unique(np.round(xy[np.asarray(part["out"], dtype=int) // EVERY], 1), axis=0)  # often one place
            panel.plot(out[:, 0], out[:, 1], ".", color="black", markersize=2.6, zorder=4)
            mark_ends(panel, np.asarray(part["start"]), np.asarray(part["goal"]), 9.0)
            if not part["success"]:
                panel.plot(*xy[-1], "x", color="black", markersize=6, markeredgewidth=1.6, zorder=8)
            count = len({piece for piece, _, _ in part["parts"]})
            outcome = f"reached, {part['steps']} steps" if part["success"] else "not reached"
            panel.set_title(f"{outcome}, {count} piece{'s' if count != 1 else ''}", fontsize=7.5, pad=2)
            if column == 0:
                title = TITLES.get(part["policy"], part["policy"]).replace(", ", ",\n")
                wins = reached[part["policy"]]
                panel.set_ylabel(f"{title}\n{sum(wins)} of {len(wins)} reached", fontsize=8.5)
            if line == len(names) - 1:
                about = next(task for task in result["tasks"] if task["task"] == part["task"])
                panel.set_xlabel(
                    f"task {part['task']}: {about['cells']:.0f} cells,\ncovered by {about['covering']} pieces",
                    fontsize=8, color=SOFT,
                )  # fmt: skip
        handles = [
            Line2D([], [], color=_output.COLOURS[0], linewidth=1.5, label="rollout; its colour changes with the piece"),
            Line2D([], [], color=_output.COLOURS[0], linewidth=3, alpha=0.3, label="the data piece"),
            Line2D([], [], color="#9aa0a8", linewidth=1, label="no piece goes this way"),
            Line2D([], [], color="black", marker=".", linestyle="", label="out of the data"),
            Line2D([], [], color=INK, marker="x", linestyle="", label="where it ended, not reached"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=5, fontsize=7.5, frameon=False)
        _output.save_figure(figure, path)
        plt.close(figure)


# --------------------------------------------------------------------------------------------------------------- run


def run(
    policies: tuple[Path, ...] = (),
    /,
    *,
    tasks: tuple[int, ...] = (),
    episodes: int = 2,
    data: Path | None = None,
    device: str = "cpu",
    out: Path | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    quiet: bool = False,
) -> Path:
    """Which pieces of the data does a rollout put together, and where does it leave them?

    Args:
        policies: folders of runs or models, all of one maze dataset; without, the small models of results/analyses
        tasks: their numbers, from 1; all when not given
        episodes: of each task; the first is drawn
        data: the npz they were trained on; when not given, the file of a run, or the data made again
        device: where policies act: cpu, cuda or auto
        out: folder to write to; results/analyses/stitching when not given
        overwrite: replace a result made with other settings
        workers: processes to make data with; one per core when not given
        quiet: no progress
    """
    require(episodes >= 1, "episodes must be at least 1")
    path = _output.folder(NAME, out) / f"{NAME}.json"
    device = runs.resolve_device(device)
    loaded = [load_policy(folder, device) for folder in policies or own_models()]
    names = [policy.name for policy in loaded]
    require(len(set(names)) == len(names), "two of the folders have the same name, by which they are told apart")
    about = loaded[0].about
    for policy in loaded[1:]:
        same = all(policy.about[key] == about[key] for key in ("dataset", "environment"))
        if not same or policy.about["data"]["fingerprint"] != about["data"]["fingerprint"]:
            raise UserError(
                f"{policy.name} was trained on other data ({policy.about['dataset']}, "
                f"{policy.about['data']['fingerprint'][:8]}) than {names[0]} ({about['dataset']}, "
                f"{about['data']['fingerprint'][:8]}): rollouts are compared with the data they were all trained on"
            )
    if not about.get("environment"):
        raise UserError(f"{names[0]} was trained on own data, whose maze is not known; this analysis needs a maze")
    settings = {
        "policies": {policy.name: policy.identity for policy in loaded},
        "dataset": about["dataset"],
        "tasks": list(tasks),
        "episodes": episodes,
        "ahead": AHEAD,
        "still": STILL,
        "cosine": COSINE,
        "quantile": QUANTILE,
        "calibration": CALIBRATION,
    } | ({"data": Path(data).name} if data is not None else {})
    result = _output.existing(path, settings, overwrite)
    if result is None:
        maze = Maze(about["environment"])
        numbers = tasks or tuple(spec.task for spec in maze.specs)
        if not set(numbers) <= {spec.task for spec in maze.specs}:
            raise UserError(f"{maze.environment} has tasks 1 to {len(maze.specs)}")
        found = find_data(about, data, workers, quiet)
        measured = measure(loaded, maze, Pieces(found, maze.radius), numbers, episodes, quiet)
        result = {
            "analysis": NAME,
            "settings": settings,
            "data": {
                "fingerprint": found.fingerprint,
                "training_data": found.fingerprint == about["data"]["fingerprint"],
                "episodes": found.num_episodes,
            },
            "geometry": {key: value.tolist() for key, value in maze.geometry.items()},
            "radius": maze.radius,
            **measured,
        }
    columns = list(result["rows"][0])
    _output.write_result(path, result, columns, ([row[key] for key in columns] for row in result["rows"]))
    _output.show(*table(result))
    covering = ", ".join(f"task {task['task']}: {task['covering']}" for task in result["tasks"])
    print(f"data pieces that cover a task alone: {covering}; out: farther than {result['limits'][0]:.3f}")
    if not result["data"]["training_data"]:
        print("the data differ from those the policies were trained on")
    draw(result, path)
    return path
