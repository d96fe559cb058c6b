"""How many state-action pairs of the data does a return-to-go tell apart, how many the flow's Q?

The paper's "fraction of state-action pairs with discriminative signals (variance > 0.01 across trajectory segments)",
for the goal of each task of a maze. It leaves open what a segment is and on which scale a variance of 0.01 is meant.
Here, for signals x(s_t, a_t) of recorded trajectories:

    segment   the pieces of `segment` steps into which a trajectory is cut (100, the horizon of the critic's discount
              0.99); 0: whole trajectories. A pair has a signal if x varies within its segment by more than 0.01
    range     x is scaled so that it goes from 0 to 1 over the data, for each task: 0.01 is a standard deviation of a
              tenth of the range. Other scales: `spread` (unit variance over the data), `raw` (returns; nats)
    pass      the other reading: the variance over the trajectories that pass through the same place (squares of side
              `side`) with the same heading (eight directions of the action), each with its mean there

Signals: `rtg` one if the goal is yet to be reached on the trajectory, else zero (the paper's "successful trajectory
(RTG=1) and a failed one (RTG=0)"); `rtg-count` the sum of rewards to come, one for each step within the goal's radius;
`rtg-discounted` the same, discounted; `q` the flow's log p(g | s, a), Eq. (4); `density` its exponential; `noise` a
random number for each pair, which a measure of signals should not find discriminative.

`progress` is not the paper's: the rank correlation of a signal with minus the cells on the shortest way to the goal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qhyer import presets, runs
from qhyer.agent import Stage
from qhyer.analyses import _common, _output
from qhyer.analyses._maze import INK, SOFT, Maze, draw_maze, mark_ends, maze_dataset, small_data
from qhyer.config import replace
from qhyer.data import registry
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError, require
from qhyer.progress import Progress
from qhyer.rng import numpy_stream, stream_seed
from qhyer.update import Update

NAME = "coverage"
THRESHOLD = 0.01  # the paper's
SEGMENTS = (10, 20, 50, 100, 200, 0)  # steps; 0: the whole trajectory
SCALES = ("range", "spread", "raw")
SIGNALS = {
    "rtg": "return-to-go, 1 or 0",
    "rtg-count": "return-to-go, steps there",
    "rtg-discounted": "return-to-go, discounted",
    "q": "flow Q (log density)",
    "density": "flow density exp Q",
    "noise": "random numbers",
}
PAPER = {"rtg": 0.25, "q": 0.92}
SIDE = 1.0  # of the squares of `pass`: a quarter of a maze cell
BATCH = 256
CHUNK = 8192
HIGH = 0.75  # quantile of Q beyond which a piece of a trajectory is drawn as high
DRAWN = 30  # trajectories of the figure, the first of the data
EVERY = 8  # of their steps

Array = np.ndarray


# ---------------------------------------------------------------------------------------------------------- measures


def segment_ids(lengths: Array, size: int) -> Array:
    """Transitions of trajectories of these lengths, one after the other -> the number of each one's segment."""
    steps = np.concatenate([np.arange(length) for length in lengths])
    pieces = np.ones_like(lengths) if size == 0 else -(-lengths // size)
    first = np.cumsum(pieces) - pieces
    return np.repeat(first, lengths) + (0 if size == 0 else steps // size)


def share_above(values: Array, ids: Array, threshold: float = THRESHOLD) -> float:
    """The share of pairs in whose segment the values' variance is above the threshold."""
    count = np.bincount(ids)
    mean = np.bincount(ids, values) / np.maximum(count, 1)
    variance = np.bincount(ids, (values - mean[ids]) ** 2) / np.maximum(count, 1)
    return float((variance > threshold)[ids].mean())


def share_passing(values: Array, places: Array, trajectory: Array, threshold: float = THRESHOLD) -> float:
    """Of pairs at places (numbered bins) that several trajectories pass: the share where these differ.

    The variance is over trajectories, of each one's mean in the bin.
    """
    visits, index = np.unique(np.stack([places, trajectory], axis=1), axis=0, return_inverse=True)
    index = index.reshape(-1)
    size = np.bincount(index)
    mean = np.bincount(index, values) / size  # of each visit: a bin and a trajectory
    _, bins, passing = np.unique(visits[:, 0], return_inverse=True, return_counts=True)
    centre = np.bincount(bins, mean) / passing
    variance = np.bincount(bins, (mean - centre[bins]) ** 2) / passing
    several = passing >= 2
    pairs = np.bincount(bins, size)
    return float(pairs[several & (variance > threshold)].sum() / max(1.0, pairs[several].sum()))


def scaled(values: Array, scale: str) -> Array:
    """Values on one of SCALES; a constant stays without variance."""
    if scale == "raw":
        return values
    width = values.max() - values.min() if scale == "range" else values.std()
    return (values - values.min()) / width if width > 0 else np.zeros_like(values)


def returns_to_go(reached: Array, lengths: Array, discount: float = 1.0) -> Array:
    """Rows where the goal is reached, lengths[e] + 1 for each trajectory -> sum of the rewards to come at each (s, a).

    R_t = r_{t+1} + discount R_{t+1}: the reward is that of the state an action leads to.
    """
    longest = int(lengths.max())
    padded = np.zeros((len(lengths), longest + 1))
    row = np.concatenate([np.arange(length + 1) for length in lengths])
    padded[np.repeat(np.arange(len(lengths)), lengths + 1), row] = reached
    total = np.zeros_like(padded)
    for t in range(longest - 1, -1, -1):
        total[:, t] = padded[:, t + 1] + discount * total[:, t + 1]
    step = np.concatenate([np.arange(length) for length in lengths])
    return total[np.repeat(np.arange(len(lengths)), lengths), step]


def pass_bins(xy: Array, actions: Array, side: float = SIDE) -> Array:
    """Places (n, 2) and actions (n, 2) -> numbers of squares of the plane and eight headings."""
    square = np.floor(xy / side).astype(int)
    heading = np.floor((np.arctan2(actions[:, 1], actions[:, 0]) / (2 * math.pi) + 1.0) * 8).astype(int) % 8
    _, number = np.unique(np.column_stack([square, heading]), axis=0, return_inverse=True)
    return number.reshape(-1)


# ------------------------------------------------------------------------------------------------------- the critic


def train_critic(episodes: Episodes, seed: int, steps: int, quiet: bool = True) -> Any:
    """QHyer of the demo's preset, its critic trained alone: Eq. (5) on transitions with geometric goals, Eq. (1)."""
    config, _ = presets.resolve("qhyer", "demo", episodes.name)
    agent: Any = runs.build_agent("qhyer", replace(config, {"steps": steps}), episodes.spec(), seed).train()
    stage = Stage(
        "critic",
        steps,
        BATCH,
        _common.FlowSamplerConfig(agent.config.discount, agent.config.chunk),
        agent.critic_loss,
        agent.optimizers[-1:],  # the critic's
        grad_clip=agent.config.grad_clip,
        schedule=agent.stages()[0].schedule,
    )
    generator = torch.Generator().manual_seed(stream_seed(seed, "analysis", NAME))
    update = Update(agent, stage, stage.sampler.build(episodes, generator), "fp32", torch.device("cpu"))
    with torch.random.fork_rng(devices=[]), Progress(f"critic, seed {seed}", steps, quiet) as progress:
        torch.manual_seed(stream_seed(seed, "analysis", NAME, "noise"))
        for step in range(steps):
            update(step)
            progress.advance(step + 1)
            if (step + 1) % 100 == 0:
                progress.show(step + 1, update.take_metrics())
    return agent.eval()


@torch.no_grad()
def flow_q(agent: Any, observations: torch.Tensor, actions: torch.Tensor, goal: Array) -> Array:
    """Eq. (4) at all pairs for one goal (d_s,): (n,)."""
    device = next(agent.parameters()).device
    target = agent.goal_coordinates(torch.from_numpy(goal).to(device))
    pieces = zip(observations.to(device).split(CHUNK), actions.to(device).split(CHUNK))
    return torch.cat([agent.log_density(s, a, target.expand(len(s), -1)) for s, a in pieces]).double().cpu().numpy()


# ------------------------------------------------------------------------------------------------------- measuring


def signals(agent: Any, episodes: Episodes, maze: Maze, task: int, seed: int) -> dict[str, Array]:
    """Every signal at every transition of the data, for the goal of one task (from 0)."""
    goal = maze.goals[task]
    lengths = (episodes.ends - episodes.starts).cpu().numpy()
    xy = episodes.observations[:, :2].double().cpu().numpy()
    reached = (np.linalg.norm(xy - goal[:2], axis=1) <= maze.radius).astype(float)
    rows = episodes.transitions
    count = returns_to_go(reached, lengths)
    q = flow_q(agent, episodes.observations[rows], episodes.actions[rows], goal)
    return {
        "rtg": (count > 0).astype(float),
        "rtg-count": count,
        "rtg-discounted": returns_to_go(reached, lengths, float(agent.config.discount)),
        "q": q,
        "density": np.exp(q),
        "noise": numpy_stream(seed, "analysis", NAME, task).uniform(size=len(q)),
    }


def measure(agent: Any, episodes: Episodes, maze: Maze, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Shares of every signal, scale and segment for each task; and what the figure shows of the first one."""
    lengths = (episodes.ends - episodes.starts).cpu().numpy()
    rows = episodes.transitions
    xy = episodes.observations[rows, :2].double().cpu().numpy()
    trajectory = segment_ids(lengths, 0)
    bins = pass_bins(xy, episodes.actions[rows, :2].double().cpu().numpy())
    cuts = {size: segment_ids(lengths, size) for size in SEGMENTS if size < int(lengths.max())}
    found: list[dict[str, Any]] = []
    drawn: dict[str, Any] = {}
    for task, goal in enumerate(maze.goals):
        steps = maze.steps_to(goal[:2], xy)
        known = np.isfinite(steps)
        values = signals(agent, episodes, maze, task, seed)
        success = np.bincount(trajectory, values["rtg"])[trajectory] > 0  # of the pair's trajectory
        high = values["q"] > np.quantile(values["q"], HIGH)
        for name, value in values.items():
            row = {"seed": seed, "task": task + 1, "signal": name}
            progress = _common.spearman(value[known], -steps[known])
            row["progress"] = float(progress) if np.isfinite(progress) else None
            for scale in SCALES:
                on_scale = scaled(value, scale)
                row[f"pass-{scale}"] = share_passing(on_scale, bins, trajectory)
                for size, ids in cuts.items():
                    row[f"{size}-{scale}"] = share_above(on_scale, ids)
            row["successful"] = float(success.mean())
            row["high_failed"] = float((~success[high]).mean())
            found.append(row)
        if task == 0:
            drawn = picture_of(values, xy, lengths, success, goal)
    return found, drawn


def picture_of(values: dict[str, Array], xy: Array, lengths: Array, success: Array, goal: Array) -> dict[str, Any]:
    """The first trajectories of the data with what the panels colour them by."""
    rtg, q = scaled(values["rtg"], "range"), scaled(values["q"], "range")
    level = float(np.quantile(q, HIGH))
    paths, begin = [], 0
    for length in lengths[: max(1, int(DRAWN * max(1.0, 1000 / lengths.max())))]:
        at = slice(begin, begin + int(length), EVERY)
        paths.append(
            {
                "xy": np.round(xy[at], 2).tolist(),
                "rtg": np.round(rtg[at], 3).tolist(),
                "q": np.round(q[at], 3).tolist(),
                "success": bool(success[begin]),
            }
        )
        begin += int(length)
    return {"task": 1, "goal": [float(x) for x in goal[:2]], "level": level, "paths": paths}


def measure_seed(job: tuple[str, int, int]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A dataset's file, a seed, updates: one critic trained and looked at."""
    path, seed, steps = job
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small networks, and sums come out the same on every machine
    try:
        episodes = load(path)
        maze = Maze(registry.get(episodes.name).environment)
        return measure(train_critic(episodes, seed, steps), episodes, maze, seed)
    finally:
        torch.set_num_threads(threads)


def load(path: str) -> Episodes:
    registered = registry.get(Path(path).stem)
    return Episodes.load(Path(path), goal=registered.goal_indices, name=registered.name)


# ---------------------------------------------------------------------------------------------------------- showing


def over_tasks(rows: Sequence[dict[str, Any]], signal: str, key: str) -> Array:
    """One value for each seed: the mean over tasks (of those where it is defined)."""
    mine = [row for row in rows if row["signal"] == signal]
    by_seed = [
        [row[key] for row in mine if row["seed"] == seed and row[key] is not None]
        for seed in sorted({row["seed"] for row in mine})
    ]
    return np.array([np.mean(values) if values else math.nan for values in by_seed])


def percent(values: Array) -> str:
    return _output.plus_minus(100.0 * values, 1)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows, main = result["rows"], result["settings"]["segment"]
    sizes = [size for size in SEGMENTS if f"{size}-range" in rows[0]]
    words = {size: "whole" if size == 0 else str(size) for size in sizes}
    header = ["signal", "paper", f"% of pairs, {words[main]}-step segments" if main else "% of pairs, trajectories"]
    header += [f"{words[size]}" for size in sizes if size != main]
    header += ["spread", "raw", "pass", "progress"]
    lines = []
    for name, title in SIGNALS.items():
        line = [title, f"{100 * PAPER[name]:.0f}" if name in PAPER else ""]
        line += [percent(over_tasks(rows, name, f"{main}-range"))]
        line += [f"{100 * over_tasks(rows, name, f'{size}-range').mean():.1f}" for size in sizes if size != main]
        line += [f"{100 * over_tasks(rows, name, f'{main}-{scale}').mean():.1f}" for scale in ("spread", "raw")]
        line += [f"{100 * over_tasks(rows, name, 'pass-range').mean():.1f}"]
        progress = over_tasks(rows, name, "progress")
        line += ["" if np.isnan(progress).all() else f"{np.nanmean(progress):.2f}"]
        lines.append(line)
    return header, lines


def draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.collections import LineCollection

    from qhyer.report import figures  # chooses matplotlib's backend

    plt, drawn, rows = figures.plt, result["drawn"], result["rows"]
    geometry = {key: np.asarray(value) for key, value in result["geometry"].items()}
    goal, paths = np.asarray(drawn["goal"]), sorted(drawn["paths"], key=lambda trail: trail["success"])
    sizes = [size for size in SEGMENTS if f"{size}-range" in rows[0]]
    main = result["settings"]["segment"]

    def lines(axes: Any, key: str | None, keep: Any, colours: Any) -> None:
        """Steps of every trajectory as short lines, each with its colour; `keep` chooses which."""
        parts, shades = [], []
        for trail in paths:
            xy = np.asarray(trail["xy"])
            value = np.asarray(trail[key]) if key else np.zeros(len(xy))
            chosen = keep(trail, value)[:-1]
            parts.append(np.stack([xy[:-1], xy[1:]], axis=1)[chosen])
            shades.append(colours(trail, value)[:-1][chosen])
        collection = LineCollection(
            list(np.concatenate(parts)), colors=np.concatenate(shades), linewidths=0.9, rasterized=True, zorder=2
        )
        axes.add_collection(collection)

    def everything(trail: Any, value: Array) -> Array:
        return np.ones(len(trail["xy"]), dtype=bool)

    def flat(colour: str) -> Array:
        return np.asarray(figures.matplotlib.colors.to_rgba(colour, 0.75))

    blue, purple, grey = flat("#0072b2"), flat("#a35fb0"), flat("#b9bdc4")
    plasma = plt.get_cmap("viridis")

    def shares(name: str) -> str:
        """Of segments and of whole trajectories, all tasks."""
        cut, whole = (100 * over_tasks(rows, name, f"{size}-range").mean() for size in (main, 0))
        return f"{whole:.0f} % by trajectory" + (f", {cut:.0f} % by {main} steps" if main else "")

    with plt.rc_context(_output.style()):
        figure = plt.figure(figsize=(11, 5.6), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=[1.15, 1.0])
        panels = top.subplots(1, 4)
        titles = (
            ("a  trajectories", "goal reached (blue) or not"),
            ("b  return-to-go", shares("rtg")),
            ("c  flow Q", shares("q")),
            ("d  the highest quarter of Q", "colours as in a"),
        )
        for panel, (title, below) in zip(panels, titles):
            draw_maze(panel, geometry)
            mark_ends(panel, None, goal)
            panel.set_title(title, loc="left")
            panel.set_xlabel(below, fontsize=8.5)
        lines(panels[0], None, everything, lambda t, v: np.tile(blue if t["success"] else purple, (len(v), 1)))
        lines(
            panels[1], "rtg", everything,
            lambda t, v: plasma(v) if t["success"] else np.tile(grey, (len(v), 1)),
        )  # fmt: skip
        lines(panels[2], "q", everything, lambda t, v: plasma(v))
        lines(
            panels[3], "q", lambda t, v: v > drawn["level"],
            lambda t, v: np.tile(blue if t["success"] else purple, (len(v), 1)),
        )  # fmt: skip
        mappable = plt.cm.ScalarMappable(cmap=plasma)
        bar = top.colorbar(mappable, ax=list(panels), shrink=0.75, aspect=16, pad=0.01)
        bar.set_label("signal, 0 to 1 over the data")
        bar.outline.set_visible(False)
        left, right = bottom.subplots(1, 2, width_ratios=[1.35, 1])
        colours = dict(zip(SIGNALS, ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#a87500", "#6b6f77")))
        places = np.arange(len(sizes))
        for name in SIGNALS:  # the names stand beside the bars, in the same colours
            means = [100 * over_tasks(rows, name, f"{size}-range").mean() for size in sizes]
            style = "--" if name == "noise" else "-"
            left.plot(places, means, style, marker="o", markersize=3.5, color=colours[name])
        for name, value in PAPER.items():
            left.axhline(100 * value, color=colours[name], linewidth=0.8, linestyle=":")
            left.annotate(
                f"paper: {'RTG' if name == 'rtg' else 'Q'} {100 * value:.0f} %", (places[-1], 100 * value),
                (-2, 2), textcoords="offset points", color=colours[name], fontsize=8, ha="right",
            )  # fmt: skip
        left.set_xticks(places, ["trajectory" if size == 0 else str(size) for size in sizes])
        left.set(xlabel="steps of a segment", ylabel="pairs with a signal, %", ylim=(-3, 105))
        left.set_title("e  the length of a segment decides", loc="left")
        bars = np.arange(len(SIGNALS))
        for name, place in zip(SIGNALS, bars):
            progress = over_tasks(rows, name, "progress")
            mean, half = _output.interval(progress)
            right.barh(place, mean, color=colours[name], alpha=0.8, height=0.62)
            if np.isfinite(half):
                right.plot([mean - half, mean + half], [place, place], color=INK, linewidth=1.4)
        right.set_yticks(bars, list(SIGNALS.values()))
        for label, name in zip(right.get_yticklabels(), SIGNALS):
            label.set_color(colours[name])
        right.invert_yaxis()
        right.axvline(0, color=SOFT, linewidth=0.8)
        right.set_xlabel("rank correlation with nearness in cells")
        right.set_title("f  what it says of nearness", loc="left")
        _output.save_figure(figure, path)
        plt.close(figure)


# --------------------------------------------------------------------------------------------------------------- run


def run(
    trained: tuple[Path, ...] = (),
    /,
    *,
    dataset: str = "pointmaze-medium-navigate",
    rows: int = 100_000,
    seeds: int = 3,
    steps: int = 3000,
    segment: int = 100,
    device: str = "cpu",
    data: Path | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    quiet: bool = False,
) -> Path:
    """How many state-action pairs of the data does a return-to-go tell apart, how many the flow's Q?

    Args:
        trained: a run whose critic and data to look at (one); without, small data are made and a critic trained alone
        dataset: a point maze's dataset to make data of
        rows: about this many transitions of data, for each seed
        seeds: how many; each makes its own data and trains its own critic
        steps: updates of each critic
        segment: steps of a segment in the table's first column: 10, 20, 50, 100, 200, or 0 for whole trajectories
        device: of a run's critic: cpu, cuda or auto
        data: with a run: an npz to look at instead of the dataset it was trained on
        out: folder to write to; results/analyses/coverage when not given, RUN/analyses with a run
        overwrite: replace a result made with other settings
        workers: processes; one per core when not given
        quiet: no progress
    """
    require(segment in SEGMENTS, f"segment must be one of {', '.join(map(str, SEGMENTS))}")
    require(seeds >= 1 and steps >= 1 and rows >= 1, "seeds, steps and rows must be at least 1")
    require(len(trained) <= 1, "give one run, or none")
    settings: dict[str, Any] = {"threshold": THRESHOLD, "segment": segment, "segments": list(SEGMENTS), "side": SIDE}
    if trained:
        folder = Path(trained[0])
        info = runs.read(folder)
        if not info.get("environment"):
            raise UserError(f"{folder} was trained on own data, whose maze is not known; this analysis needs a maze")
        maze = Maze(info["environment"])
        path = (folder / "analyses" if out is None else Path(out)) / f"{NAME}.json"
        device = runs.resolve_device(device)
        agent, at = _common.load_critic(folder, device)
        episodes, about = _common.load_episodes(folder, agent, data, device)
        settings |= {"run": folder.resolve().name, "step": at, "data": about}
    else:
        require(data is None, "--data goes with a run")
        registered = maze_dataset(dataset)
        count = max(1, rows // (registered.rows - 1))
        maze = Maze(registered.environment)
        path = _output.folder(NAME, out) / f"{NAME}.json"
        settings |= {"dataset": registered.name, "episodes": count, "seeds": seeds, "steps": steps, "batch": BATCH}
    result = _output.existing(path, settings, overwrite)
    if result is None:
        if trained:
            measured = [measure(agent, episodes, maze, int(info["seed"]))]
        else:
            files = [small_data(registered, count, seed, workers, quiet) for seed in range(seeds)]
            jobs = [(str(file), seed, steps) for seed, file in enumerate(files)]
            names = [f"critic of seed {seed}" for seed in range(seeds)]
            measured = _output.in_processes(NAME, measure_seed, jobs, names, workers, quiet)
        found = [row for each, _ in measured for row in each]
        geometry = {key: value.tolist() for key, value in maze.geometry.items()}
        result = {
            "analysis": NAME, "settings": settings, "geometry": geometry, "rows": found, "drawn": measured[0][1],
        }  # fmt: skip
    if f"{segment}-range" not in result["rows"][0]:
        raise UserError(f"no trajectory is longer than {segment} steps; give a smaller --segment, or 0")
    columns = list(result["rows"][0])
    _output.write_result(path, result, columns, ([row[key] for key in columns] for row in result["rows"]))
    _output.show(*table(result))
    first = [row for row in result["rows"] if row["signal"] == "q"]
    print(
        f"on trajectories that reach the goal: {100 * np.mean([row['successful'] for row in first]):.0f} % of pairs; "
        f"of the highest quarter of Q, {100 * np.mean([row['high_failed'] for row in first]):.0f} % are on others"
    )
    draw(result, path)
    return path
