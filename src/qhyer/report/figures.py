"""Pictures for the page: inline SVG whose colours are CSS variables, so that one drawing serves light
and dark.

Matplotlib knows no CSS variables. It draws with placeholder colours, one for each variable, and the SVG is
rewritten afterwards. A drawing whose SVG would be heavy becomes two PNGs instead, one for each theme.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from qhyer.report.collect import Run, curve, load_arrays, metric_names, natural
from qhyer.report.tables import OVERALL, Group, SuccessRow, all_scored, number, run_score, success

SVG_LIMIT = 450_000  # bytes of one SVG beyond which PNG is the smaller and faster picture
POINTS = 400  # of one drawn rollout; more cannot be seen at this size
ROLLOUTS = 4  # drawn for each task
GOALS = 6  # density maps for each run
CURVES = 12  # logged quantities for each group
LINES = 5  # more lines than this are not told apart in one panel

Palette = Mapping[str, str]

# Names are CSS variables; the pairs are (light, dark). Colours of agents follow Okabe and Ito's colour-blind
# safe set, each shifted so that it keeps a contrast of 3:1 with its own background.
THEME: dict[str, tuple[str, str]] = {
    "ink": ("#1b1d21", "#e8e6e1"),
    "soft": ("#5d626b", "#a4a8b0"),
    "rule": ("#dcdfe4", "#33373f"),
    "paper": ("#ffffff", "#15171b"),
    "panel": ("#f6f7f9", "#1c1f24"),
    "wall": ("#c3c8d0", "#434954"),
    "good": ("#0072b2", "#56b4e9"),
    "bad": ("#d55e00", "#f0874a"),
    "agent-0": ("#d55e00", "#f0874a"),
    "agent-1": ("#0072b2", "#56b4e9"),
    "agent-2": ("#009e73", "#2bc496"),
    "agent-3": ("#b8589a", "#dd92c2"),
    "agent-4": ("#a87500", "#e6b53c"),
    "agent-5": ("#2a8bc7", "#8fd0f5"),
    "agent-6": ("#6b6f77", "#a9adb5"),
    "agent-7": ("#7a4fb5", "#b497e0"),
}
# An agent keeps its colour in every report, whichever others stand beside it.
AGENT_COLOUR = {
    "qhyer": 0,
    "gciql": 1,
    "hiql": 2,
    "crl": 3,
    "qrl": 4,
    "gcivl": 5,
    "gcbc": 6,
    "saw": 7,
}


@dataclass(frozen=True)
class Figure:
    """A picture ready to stand in the page, and what it shows in words."""

    markup: str
    alt: str
    caption: str
    width: int  # CSS pixels at which its text has the size meant

    @property
    def size(self) -> int:
        return len(self.markup)


def agent_variable(agent: str) -> str:
    known = AGENT_COLOUR.get(agent)
    if known is None:
        known = int(hashlib.sha256(agent.encode()).hexdigest(), 16) % 8
    return f"agent-{known}"


def _placeholders() -> dict[str, str]:
    """An improbable colour for each variable; matplotlib writes colours in lower case."""
    return {name: f"#0{i // 10}fe{i % 10}d" for i, name in enumerate(THEME, start=10)}


def theme_css(dark: bool) -> str:
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in THEME.items())


STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # real text: themed, searchable, small
    "svg.hashsalt": "qhyer",  # the same drawing has the same bytes
    "path.simplify_threshold": 0.4,
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "normal",
    "axes.linewidth": 0.8,
    "figure.dpi": 100,
}


def _style(colours: Palette) -> dict[str, Any]:
    names = ("text.color", "axes.labelcolor", "axes.titlecolor")
    soft = ("xtick.color", "ytick.color")
    return {
        **STYLE,
        **dict.fromkeys(names, colours["ink"]),
        **dict.fromkeys(soft, colours["soft"]),
        "axes.edgecolor": colours["rule"],
        "grid.color": colours["rule"],
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
    }


def steady(svg: str) -> str:
    """Clip paths named p1, p2, … as they appear: matplotlib names them after where objects lie in memory, so that
    the same drawing would come out in other bytes."""
    names: dict[str, str] = {}
    pattern = r'(?:(?<= id=")|(?<=url\(#))p[0-9a-f]{10}\b'
    return re.sub(pattern, lambda found: names.setdefault(found[0], f"p{len(names) + 1}"), svg)


def render(draw: Callable[[Palette], Canvas], alt: str, caption: str, key: str) -> Figure:
    """The drawing as themed inline SVG, or, when that is heavy, as a PNG for each theme."""
    marks = _placeholders()
    with matplotlib.rc_context(_style(marks)):
        canvas = draw(marks)
        width = round(float(canvas.get_size_inches()[0]) * 100)
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(canvas)
    svg = _themed(steady(buffer.getvalue().decode()), marks, alt, key)
    if len(svg) <= SVG_LIMIT:
        return Figure(svg, alt, caption, width)
    images = []
    for dark in (False, True):
        colours = {name: pair[dark] for name, pair in THEME.items()}
        with matplotlib.rc_context(_style(colours)):
            canvas = draw(colours)
            buffer = io.BytesIO()
            canvas.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
            plt.close(canvas)
        images.append("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())
    markup = (
        f'<picture><source media="screen and (prefers-color-scheme: dark)" srcset="{images[1]}">'
        f'<img src="{images[0]}" alt="{html.escape(alt)}" width="{width}" loading="lazy"></picture>'
    )
    return Figure(markup, alt, caption, width)


def _themed(svg: str, marks: Palette, alt: str, key: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    for name, colour in marks.items():
        svg = svg.replace(colour, f"var(--{name})")
    # Ids are unique within one drawing only; the page holds many.
    prefix = "f" + hashlib.sha256(key.encode()).hexdigest()[:8]
    svg = re.sub(r'(<image [^>]*?)\bid="[^"]*"', r"\1", svg)  # two equal colour bars have one id
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg).replace("xlink:href", "href")
    # The page's own font, whatever matplotlib measured with.
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", svg)
    svg = re.sub(r"(font: [^;\"']*)'[^;\"]*", r"\1var(--sans)", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    box = re.search(r'viewBox="([^"]+)"', svg)
    assert box is not None
    head = f'<svg viewBox="{box.group(1)}" role="img" aria-label="{html.escape(alt)}">'
    return head + svg[svg.index(">") + 1 :]


# --- success ---


def success_bars(found: Sequence[Group]) -> Figure | None:
    """One panel for all tasks together and one for each task; a bar and its interval for each agent. Scores, with
    one panel alone, where the dataset has them."""
    rows = {group.label: {row.task: row for row in success(group)} for group in found}
    rows = {label: cells for label, cells in rows.items() if cells}
    if not rows:
        return None
    agents = {group.label: group.agent for group in found}
    scored = all_scored(cells[OVERALL] for cells in rows.values())
    order = sorted(rows, key=lambda label: _extent(rows[label][OVERALL], scored)[0])  # the best on top
    tasks = sorted({task for cells in rows.values() for task in cells if task != OVERALL}, key=natural)
    columns = [OVERALL, *tasks] if len(tasks) > 1 and not scored else [OVERALL]
    ends = [end for cells in rows.values() for end in _extent(cells[OVERALL], scored)[1:]]
    limits = min(0.0, *ends), max(100.0, *ends)
    across = min(len(columns), 6)
    down = -(-len(columns) // across)

    def draw(colours: Palette) -> Canvas:
        longest = max(len(label) for label in order)
        left = min(0.25 + 0.075 * longest, 3.2)
        height = 0.62 + 0.34 * len(order)
        width = left + (3.6 if scored else 1.48 * across) + 0.15
        canvas, axes = plt.subplots(
            down, across, figsize=(width, height * down), squeeze=False, sharey=True, layout=None
        )
        canvas.subplots_adjust(
            left=left / width,
            right=1 - 0.15 / width,
            top=1 - 0.32 / (height * down),
            bottom=0.32 / (height * down),
            wspace=0.2,
            hspace=0.62 / (height - 0.62),
        )
        for ax in axes.flat[len(columns) :]:
            ax.set_visible(False)
        for ax, column in zip(axes.flat, columns):
            title = "score" if scored else "all tasks" if column == OVERALL else f"task {column}"
            ax.set_title(title, loc="left", pad=5)
            ax.set_xlim(*limits)
            ax.set_xticks([0, 50, 100])
            ax.set_ylim(-0.6, len(order) - 0.4)
            ax.tick_params(length=0, pad=4)
            ax.spines["bottom"].set_visible(False)
            ax.spines["left"].set_color(colours["soft"])
            ax.grid(axis="x", linewidth=0.6)
            ax.set_axisbelow(True)
            for place, name in enumerate(order):
                row = rows[name].get(column)
                if row is not None:
                    _bar(ax, place, row, scored, colours[agent_variable(agents[name])], colours)
            for text, side in zip(ax.get_xticklabels(), ("left", "center", "right")):
                text.set_horizontalalignment(side)  # so that 100 keeps off the next panel's 0
            ax.set_yticks(range(len(order)), [_shorten(name) for name in order])
            for text in ax.get_yticklabels():
                text.set_color(colours["ink"])
        return canvas

    dataset = found[0].dataset
    unit = "" if scored else " %"
    words = "; ".join(f"{name} {number(_extent(rows[name][OVERALL], scored)[0])}{unit}" for name in reversed(order))
    what = "Score" if scored else "Success %"
    every = "" if scored else ", for all tasks together and for each one"
    return render(
        draw,
        alt=f"Scores on {dataset}: {words}."
        if scored
        else f"Success on {dataset} for each task. Over all tasks: {words}.",
        caption=f"{what} at the last evaluation{every}. The line is the 95 % interval.",
        key=f"bars {dataset}",
    )


def _extent(row: SuccessRow, scored: bool) -> tuple[float, float, float]:
    """Where a bar ends, and its interval."""
    return (row.score, row.score_low, row.score_high) if scored else (row.mean, row.low, row.high)


def _bar(ax: Any, place: int, row: SuccessRow, scored: bool, colour: str, colours: Palette) -> None:
    # A variant shares its agent's colour, fainter.
    mean, low, high = _extent(row, scored)
    ax.barh(place, mean, height=0.62, color=colour, alpha=0.5 if row.variant else 0.82, linewidth=0)
    ax.plot([low, high], [place, place], color=colours["ink"], linewidth=1.3, solid_capstyle="butt")
    for end in (low, high):
        ax.plot([end, end], [place - 0.13, place + 0.13], color=colours["ink"], linewidth=1.3)


def _shorten(text: str, limit: int = 38) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


SeedCurves = list[tuple[list[int], list[float]]]
MeanCurve = tuple[Group, SeedCurves, list[int], list[float]]


def _mean_curve(seeds: SeedCurves) -> tuple[list[int], list[float]]:
    """Mean over seeds at the steps at which every seed was evaluated."""
    common = sorted(set.intersection(*(set(steps) for steps, _ in seeds)))
    table = [dict(zip(steps, values)) for steps, values in seeds]
    return common, [float(np.mean([each[step] for each in table])) for step in common]


def _steps_axes(ax: Any) -> None:
    ax.set_ylim(-2, 102)
    ax.grid(axis="y", linewidth=0.6)
    ax.tick_params(length=0)
    ax.xaxis.set_major_formatter(_thousands)


def _steps_in_one(curves: Sequence[MeanCurve], colours: Palette) -> Canvas:
    """Few lines: one panel, each line named at its end."""
    canvas, ax = plt.subplots(figsize=(7.2, 3.5), layout="constrained")
    ends = []
    drawn: dict[str, int] = {}
    for group, seeds, steps, mean in curves:
        colour = colours[agent_variable(group.agent)]
        style = ("-", "--", ":", "-.")[drawn.get(group.agent, 0) % 4]  # variants of one agent share its colour
        drawn[group.agent] = drawn.get(group.agent, 0) + 1
        if len(seeds) > 1:
            for at, values in seeds:
                ax.plot(at, values, color=colour, linewidth=0.8, alpha=0.35)
        if steps:
            ax.plot(steps, mean, color=colour, linewidth=2, linestyle=style, marker="o", markersize=3.5)
            ends.append((mean[-1], steps[-1], group.label, colour))
    _steps_axes(ax)
    ax.set_xlabel("training step")
    ax.set_ylabel("success %")
    last = max((step for _, step, _, _ in ends), default=1)
    height = -10.0
    for value, _, name, colour in sorted(ends):
        height = max(value, height + 7)  # pushed apart, so that no label covers another
        ax.annotate(
            _shorten(name, 30),
            (last, height),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )
    return canvas


def _steps_in_panels(curves: Sequence[MeanCurve], colours: Palette) -> Canvas:
    """Many lines: a panel for each, the others faint behind it."""
    across = 4
    down = -(-len(curves) // across)
    canvas, axes = plt.subplots(
        down,
        across,
        figsize=(9.8, 1.75 * down),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    canvas.get_layout_engine().set(w_pad=0.05, h_pad=0.05)
    for ax in axes.flat[len(curves) :]:
        ax.set_visible(False)
    for ax, (group, seeds, steps, mean) in zip(axes.flat, curves):
        colour = colours[agent_variable(group.agent)]
        for _, _, at, values in curves:
            ax.plot(at, values, color=colours["rule"], linewidth=1)
        if len(seeds) > 1:
            for at, values in seeds:
                ax.plot(at, values, color=colour, linewidth=0.8, alpha=0.45)
        ax.plot(steps, mean, color=colour, linewidth=2, marker="o", markersize=3)
        _steps_axes(ax)
        ax.set_yticks([0, 50, 100])
        ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3))
        ax.set_title(_shorten(group.label, 28), loc="left", fontsize=9)
    for ax in list(axes.flat[: len(curves)])[-across:]:
        ax.tick_params(labelbottom=True)  # the last row may be short
    return canvas


def success_over_steps(found: Sequence[Group]) -> Figure | None:
    """Mean success at each evaluation, and each seed behind it, if a run was evaluated more than once."""
    if not any(len(run.steps) > 1 for group in found for run in group.scored):
        return None
    lines: list[tuple[Group, SeedCurves]] = []
    for group in found:
        seeds = [(list(run.steps), [100 * run_score(run.at(step)) for step in run.steps]) for run in group.scored]
        if seeds:
            lines.append((group, seeds))

    means = [(group, seeds, *_mean_curve(seeds)) for group, seeds in lines]
    draw = _steps_in_panels if len(lines) > LINES else _steps_in_one

    dataset = found[0].dataset
    return render(
        lambda colours: draw(means, colours),
        alt=f"Success over training steps on {dataset} for {', '.join(group.label for group, _ in lines)}.",
        caption="Success at each evaluation during training: the mean over seeds, and the seeds behind it.",
        key=f"steps {dataset}",
    )


def _thousands(value: float, _: object = None) -> str:
    if abs(value) >= 1e6:
        return f"{number(value / 1e6, 2)}M"
    return f"{number(value / 1e3, 2)}k" if abs(value) >= 1e3 else number(value, 2)


def learning_curves(group: Group) -> Figure | None:
    """Small multiples: one panel for each logged quantity, one line for each seed."""
    logged = [run for run in group.runs if run.metrics]
    names: list[str] = []
    for run in logged:
        names += [name for name in metric_names(run) if name not in names]
    names = [name for name in names if any(curve(run, name)[0].size > 1 for run in logged)]
    if not names:
        return None
    shown = names[:CURVES]

    def draw(colours: Palette) -> Canvas:
        across = min(4, len(shown))
        down = -(-len(shown) // across)
        canvas, axes = plt.subplots(
            down, across, figsize=(2.45 * across, 1.75 * down), squeeze=False, layout="constrained"
        )
        canvas.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
        for ax in axes.flat[len(shown) :]:
            ax.set_visible(False)
        colour = colours[agent_variable(group.agent)]
        for ax, name in zip(axes.flat, shown):
            for run in logged:
                steps, values = curve(run, name)
                if steps.size > POINTS:
                    kept = np.linspace(0, steps.size - 1, POINTS).round().astype(int)
                    steps, values = steps[kept], values[kept]
                ax.plot(steps, values, color=colour, linewidth=1.1, alpha=0.9 if len(logged) == 1 else 0.65)
            ax.set_title(_shorten(name, 28), loc="left", fontsize=9)
            ax.tick_params(length=0, labelsize=8)
            ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3))
            ax.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
            ax.xaxis.set_major_formatter(_thousands)
            ax.grid(axis="y", linewidth=0.5)
        return canvas

    more = f" {len(names) - CURVES} more are in metrics.jsonl." if len(names) > CURVES else ""
    seeds = f"{len(logged)} seeds" if len(logged) > 1 else "one seed"
    return render(
        draw,
        alt=f"Training curves of {group.label} on {group.dataset}: {', '.join(shown)}.",
        caption=f"What {group.label} logged while training, over steps; {seeds}.{more}",
        key=f"curves {group.dataset} {group.preset} {group.label}",
    )


# --- mazes ---


def _maze(ax: Any, arrays: Mapping[str, np.ndarray], colours: Palette) -> None:
    """Walls as filled cells. Cell (i, j) has its centre at (j·unit − offset_x, i·unit − offset_y)."""
    walls, unit = np.asarray(arrays["maze_map"]), float(arrays["maze_unit"])
    offset_x, offset_y = (float(value) for value in arrays["maze_offset"])
    for i, line in enumerate(walls):
        j = 0
        while j < len(line):
            end = j
            while end < len(line) and line[end] == 1:
                end += 1
            if end > j:  # a run of wall cells is one rectangle
                corner = ((j - 0.5) * unit - offset_x, (i - 0.5) * unit - offset_y)
                size = ((end - j) * unit, unit)
                # The edge closes the hairlines that renderers leave between neighbours.
                face = colours["wall"]
                ax.add_patch(Rectangle(corner, *size, facecolor=face, edgecolor=face, linewidth=0.7))
            j = max(end, j + 1)
    _frame(ax, arrays)


def _frame(ax: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Show the whole map and nothing else; drawing a picture into the axes moves their limits."""
    height, width = arrays["maze_map"].shape
    unit = float(arrays["maze_unit"])
    offset_x, offset_y = (float(value) for value in arrays["maze_offset"])
    ax.set_xlim(-0.5 * unit - offset_x, (width - 0.5) * unit - offset_x)
    ax.set_ylim(-0.5 * unit - offset_y, (height - 0.5) * unit - offset_y)
    ax.set_aspect("equal")
    ax.set_axis_off()


def _panels(count: int, across: int, size: tuple[float, float], right: float = 0.0) -> tuple[Canvas, list[Any]]:
    """Axes of exactly this size in inches, a title's height above each and `right` free beside each."""
    width, height = size
    gap, title = 0.1, 0.27
    across = min(across, count)
    down = -(-count // across)
    full = (across * (width + right) + (across - 1) * gap, down * (height + title) + (down - 1) * gap)
    canvas = plt.figure(figsize=full)
    axes = []
    for index in range(count):
        row, column = divmod(index, across)
        x = column * (width + right + gap)
        y = full[1] - (row + 1) * (height + title) - row * gap
        axes.append(canvas.add_axes((x / full[0], y / full[1], width / full[0], height / full[1])))
    return canvas, axes


def _goal(ax: Any, x: float, y: float, colours: Palette) -> None:
    ax.plot(
        [x],
        [y],
        marker="*",
        markersize=12,
        markerfacecolor=colours["ink"],
        markeredgecolor=colours["paper"],
        markeredgewidth=1,
        zorder=5,
    )


def rollout_maps(group: Group) -> Figure | None:
    """The maze with the paths the policy took, one panel for each task. None for runs that recorded no maze.

    Shows the run of the lowest seed: the maps say how a policy fails, the tables how often.
    """
    run = next((run for run in group.runs if run.rollouts is not None), None)
    if run is None or run.rollouts is None:
        return None
    needed = ("task", "success", "observations", "goals")
    arrays = load_arrays(run.rollouts, needed)
    if not {"maze_map", "maze_unit", "maze_offset"} <= set(arrays):
        return None
    tasks = sorted({str(task) for task in arrays["task"]}, key=natural)
    names = np.array([str(task) for task in arrays["task"]])
    rates = {row.task: row for row in success(group)}

    def draw(colours: Palette) -> Canvas:
        height, width = arrays["maze_map"].shape
        across = 5 if width <= 1.3 * height else 3
        panel = (9.9 - 0.1 * (across - 1)) / across
        canvas, axes = _panels(len(tasks), across, (panel, panel * height / width))
        for ax, task in zip(axes, tasks):
            _maze(ax, arrays, colours)
            row = rates.get(task)
            rate = f": {number(row.mean)} %" if row else ""
            ax.set_title(f"task {task}{rate}", loc="left", pad=4)
            for index in np.flatnonzero(names == task)[:ROLLOUTS]:
                _path(ax, arrays["observations"][index], bool(arrays["success"][index]), colours)
            first = np.flatnonzero(names == task)[0]
            goal = arrays["goals"][first]
            _goal(ax, float(goal[0]), float(goal[1]), colours)
        return canvas

    reached = sum(bool(value) for value in arrays["success"])
    return render(
        draw,
        alt=f"Maze maps with the recorded rollouts of {group.label} on {group.dataset}, one for each of "
        f"{len(tasks)} tasks; {reached} of {len(names)} recorded rollouts reached the goal.",
        caption=f"{group.label}, seed {run.seed}, step {int(run.rollouts.stem):,}",
        key=f"maps {group.dataset} {group.preset} {group.label}",
    )


def _path(ax: Any, observations: np.ndarray, reached: bool, colours: Palette) -> None:
    xy = observations[:, :2].astype(float)
    xy = xy[np.isfinite(xy).all(axis=1)]
    if not len(xy):
        return
    if len(xy) > POINTS:
        xy = xy[np.linspace(0, len(xy) - 1, POINTS).round().astype(int)]
    colour = colours["good" if reached else "bad"]
    style = "-" if reached else (0, (3.5, 1.2))  # not by colour alone
    ax.plot(xy[:, 0], xy[:, 1], color=colour, linewidth=1.4, alpha=0.85, linestyle=style, zorder=3)
    ax.plot(
        xy[0, 0],
        xy[0, 1],
        marker="o",
        markersize=5,
        markerfacecolor=colours["paper"],
        markeredgecolor=colours["ink"],
        zorder=4,
    )
    if not reached:
        ax.plot(xy[-1, 0], xy[-1, 1], marker="x", markersize=4.5, color=colour, markeredgewidth=1.6, zorder=4)


def density_maps(group: Group) -> Figure | None:
    """The critic's log-density of reaching a goal, over the states of the maze, one panel for each goal."""
    run = next((run for run in group.runs if run.density is not None), None)
    if run is None or run.density is None:
        return None
    arrays = load_arrays(run.density, ("x", "y", "log_density", "goals", "titles"))
    values = np.asarray(arrays["log_density"], dtype=float)[:GOALS]
    x, y = np.asarray(arrays["x"], dtype=float), np.asarray(arrays["y"], dtype=float)
    if values.ndim != 3 or values.shape[1:] != (y.size, x.size) or not np.isfinite(values).any():
        return None
    walls = _walls(run)
    dx, dy = (np.diff(axis).mean() if axis.size > 1 else 1.0 for axis in (x, y))
    extent = (x[0] - dx / 2, x[-1] + dx / 2, y[0] - dy / 2, y[-1] + dy / 2)
    shape = walls["maze_map"].shape if walls is not None else (extent[3] - extent[2], extent[1] - extent[0])

    def draw(colours: Palette) -> Canvas:
        panel = 2.7
        tall = panel * shape[0] / shape[1]
        canvas, axes = _panels(len(values), 3, (panel, tall), right=0.5)
        for ax, field, goal, title in zip(axes, values, arrays["goals"], arrays["titles"]):
            if walls is not None:
                _maze(ax, walls, colours)
            finite = field[np.isfinite(field)]
            # The far tail of a log-density is unbounded and would take all the colours.
            low, high = np.quantile(finite, [0.02, 1.0]) if finite.size else (0.0, 1.0)
            image = ax.imshow(
                np.ma.masked_invalid(field),
                origin="lower",
                extent=extent,
                cmap="viridis",
                vmin=low,
                vmax=high,
                interpolation="nearest",
                zorder=2,
            )
            if walls is not None:
                _frame(ax, walls)
            _goal(ax, float(goal[0]), float(goal[1]), colours)
            ax.set_title(_shorten(str(title), 34), loc="left", pad=4)
            if walls is None:
                ax.set_axis_off()
                ax.set_aspect("equal")
            bar = canvas.colorbar(image, cax=ax.inset_axes((1.025, 0.12, 0.035, 0.76)))
            bar.outline.set_visible(False)
            bar.ax.tick_params(length=0, labelsize=8)
            bar.ax.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
        return canvas

    return render(
        draw,
        alt=f"Heat maps of the log-density of {len(values)} goals over the maze, learned by {group.label} on "
        f"{group.dataset}.",
        caption=f"{group.label}: log-density of the goal (star) in the maze, seed {run.seed}. "
        "Brighter is more likely to be reached; each panel has its own scale, cut at the lowest 2 %.",
        key=f"density {group.dataset} {group.preset} {group.label}",
    )


def _walls(run: Run) -> dict[str, np.ndarray] | None:
    if run.rollouts is None:
        return None
    arrays = load_arrays(run.rollouts, ())
    return arrays if {"maze_map", "maze_unit", "maze_offset"} <= set(arrays) else None
