"""How well do flows, VAEs and classifiers estimate a future-state density that is known exactly?

The paper's comparison on its continuous GridWorld (`_gridworld.py`): the true P = (1 - discount) T0 (I - discount T)^-1
against what each estimator of `qhyer.nn` says after the same batches, by forward KL over the 25 goal cells.

    KL          mean over all (state, action) of D_KL(P || Q), Q made to sum to one over the cells
    KL, data    the same, each (state, action) counting as often as the data visit it
    mass        what Q sums to before that: one where an estimator is normalised and stays on the grid
    KL, as is   generalised KL of the unscaled Q, sum P log(P/Q) - P + Q = KL + mass - 1 - log mass

Q of a cell is the density integrated over the cell. States are seen through noise, as in the data, anew for each seed.
A seed draws policy, trajectories, weights and batches; estimators share all but the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from qhyer.analyses import _gridworld as grid
from qhyer.analyses import _output
from qhyer.errors import require
from qhyer.rng import numpy_stream

NAME = "gridworld-density"
OBSERVATIONS = 2  # of each cell, to evaluate at
EXAMPLE = (12, 3)  # the middle cell, to the right: drawn of the first seed
GROUPS = (  # that take about as long as each other: one process each
    ("flow",),
    ("cvae", "cvae-fixed"),
    ("clearning-mc", "clearning-td", "contrastive", "histogram", "marginal"),
)
COLUMNS = ("kl", "kl_data", "mass", "kl_as_is")


def errors(log_q: np.ndarray, future: np.ndarray, visits: np.ndarray) -> dict[str, float]:
    """log Q (observations, S, A, G) against P (S, A, G), each row of P weighing as often as visited in kl_data."""
    log_mass = np.logaddexp.reduce(log_q, axis=-1, keepdims=True)
    log_p = np.log(np.maximum(future, 1e-300))
    kl = (future * (log_p - (log_q - log_mass))).sum(-1).mean(0)  # (S, A)
    mass = np.exp(log_mass[..., 0])
    return {
        "kl": float(kl.mean()),
        "kl_data": float((kl * visits).sum() / visits.sum()),
        "mass": float(mass.mean()),
        "kl_as_is": float(kl.mean() + (mass - 1 - log_mass[..., 0]).mean()),
    }


def measure(job: tuple[int, tuple[str, ...], int, float]) -> list[dict[str, Any]]:
    """Some estimators, one seed."""
    seed, names, steps, discount = job
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the networks are small, and sums come out the same on every machine
    try:
        return [measure_one(seed, name, steps, discount) for name in names]
    finally:
        torch.set_num_threads(threads)


def measure_one(seed: int, name: str, steps: int, discount: float) -> dict[str, Any]:
    world = grid.make_world(seed, discount)
    data = grid.Trajectories(world, seed)
    estimator = grid.fit(name, data, seed, steps, discount)
    cells = np.tile(np.arange(grid.CELLS), OBSERVATIONS)
    states = grid.observe(cells, numpy_stream(seed, "gridworld", "evaluation"))
    log_q = grid.log_masses(estimator, states).reshape(OBSERVATIONS, grid.CELLS, grid.ACTIONS, grid.CELLS)
    state, action = EXAMPLE
    weights = sum(p.numel() for key, p in estimator.named_parameters() if not key.startswith("target."))
    return {
        "seed": seed,
        "estimator": name,
        "weights": weights,
        **errors(log_q, world.future, data.visits),
        "example": np.exp(log_q[:, state, action]).mean(0).tolist(),
        "true": world.future[state, action].tolist(),
        "unvisited": int((data.visits == 0).sum()),
    }


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Best first; the last column pairs each estimator with the flow, seed by seed."""
    rows = result["rows"]
    by = {name: [row for row in rows if row["estimator"] == name] for name in grid.ESTIMATORS}
    flow = np.array([row["kl"] for row in by["flow"]])
    header = ["estimator", "weights", "KL", "KL, data", "mass", "KL, as is", "KL less the flow's", "seeds worse"]
    lines = []
    for name in sorted(by, key=lambda n: np.mean([row["kl"] for row in by[n]])):
        values = {key: np.array([row[key] for row in by[name]]) for key in COLUMNS}
        difference = values["kl"] - flow
        lines.append(
            [
                grid.ESTIMATORS[name],
                f"{by[name][0]['weights']:,}",
                _output.plus_minus(values["kl"]),
                _output.plus_minus(values["kl_data"]),
                _output.plus_minus(values["mass"], 2),
                _output.plus_minus(values["kl_as_is"]),
                "" if name == "flow" else _output.plus_minus(difference),
                "" if name == "flow" else f"{int((difference > 0).sum())} of {len(difference)}",
            ]
        )
    return header, lines


def draw(result: dict[str, Any], path: Path) -> None:
    from qhyer.report import figures  # chooses matplotlib's backend

    plt, colours = figures.plt, [pair[0] for key, pair in figures.THEME.items() if key.startswith("agent-")]
    rows, order = result["rows"], list(grid.ESTIMATORS)
    order.sort(key=lambda n: np.mean([row["kl"] for row in rows if row["estimator"] == n]))
    with plt.rc_context(_output.style()):
        figure = plt.figure(figsize=(11, 4.3), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=[1.0, 1.45])
        axes = left.subplots()
        for place, name in enumerate(order):
            values = np.array([row["kl"] for row in rows if row["estimator"] == name])
            mean, half = _output.interval(values)
            colour = colours[list(grid.ESTIMATORS).index(name)]
            axes.barh(place, mean, color=colour, alpha=0.35, height=0.62, linewidth=0)
            axes.plot(values, np.full(len(values), place), "o", color=colour, markersize=3.5, alpha=0.9)
            if np.isfinite(half):
                axes.plot([mean - half, mean + half], [place, place], color="#1b1d21", linewidth=1.4)
        axes.set_yticks(range(len(order)), [grid.ESTIMATORS[name] for name in order])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("forward KL to the true density, nats\n(bar: mean, dots: seeds, line: 95 % interval)")
        axes.set_title("Error, less is better", loc="left")
        panels = right.subplots(2, 4).ravel()
        first = {row["estimator"]: row for row in rows if row["seed"] == 0}
        state, action = EXAMPLE
        maps = [("true", np.array(first[order[0]]["true"]))]
        maps += [(grid.ESTIMATORS[name], np.array(first[name]["example"])) for name in order if name != "marginal"]
        top = max(float(values.max()) for _, values in maps)
        for panel, (title, values) in zip(panels, maps):
            shown = panel.imshow(values.reshape(grid.SIZE, grid.SIZE), cmap="viridis", vmin=0, vmax=top)
            row, column = divmod(state, grid.SIZE)
            move = grid.MOVES[action]
            panel.annotate(
                "", (column + 0.9 * move[1], row + 0.9 * move[0]), (column, row),
                arrowprops={"arrowstyle": "->", "color": "white", "lw": 1.3, "shrinkA": 0, "shrinkB": 0},
            )  # fmt: skip
            panel.plot(column, row, "o", color="white", markersize=3.5)
            panel.set_xticks([])
            panel.set_yticks([])
            for spine in panel.spines.values():
                spine.set_visible(False)
            panel.set_title(title, fontsize=9, fontweight="bold" if title == "true" else "normal")
        bar = right.colorbar(shown, ax=list(panels), shrink=0.75, pad=0.02)
        bar.set_label("probability of the cell")
        bar.outline.set_visible(False)
        right.suptitle(
            f"p(g | middle cell, {grid.ARROWS[action]}), seed 0, not rescaled", x=0.02, ha="left", fontsize=10
        )
        _output.save_figure(figure, path)
        plt.close(figure)


def run(
    *,
    seeds: int = 5,
    steps: int = 3000,
    discount: float = grid.DISCOUNT,
    out: Path | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    quiet: bool = False,
) -> Path:
    """How well do flows, VAEs and classifiers estimate a future-state density that is known exactly?

    Args:
        seeds: how many; each draws a policy, trajectories, weights and batches
        steps: updates of each estimator
        discount: of the future-state density
        out: folder to write to; results/analyses/gridworld-density when not given
        overwrite: replace a result made with other settings
        workers: processes; one per core when not given
        quiet: no progress
    """
    require(seeds >= 1 and steps >= 1, "seeds and steps must be at least 1")
    require(0 < discount < 1, "discount must lie between 0 and 1")
    path = _output.folder(NAME, out) / f"{NAME}.json"
    settings = {
        "seeds": seeds,
        "steps": steps,
        "discount": discount,
        "batch": grid.BATCH,
        "learning_rate": grid.LEARNING_RATE,
        "trajectories": grid.TRAJECTORIES,
        "length": grid.LENGTH,
        "observations": OBSERVATIONS,
        "quadrature": grid.QUADRATURE,
        "estimators": list(grid.ESTIMATORS),
    }
    result = _output.existing(path, settings, overwrite)
    if result is None:
        jobs = [(seed, group, steps, discount) for seed in range(seeds) for group in GROUPS]
        names = [f"{' and '.join(group)}, seed {seed}" for seed, group, *_ in jobs]
        rows = [row for rows in _output.in_processes(NAME, measure, jobs, names, workers, quiet) for row in rows]
        result = {"analysis": NAME, "settings": settings, "rows": rows}
    columns = ("seed", "estimator", "weights", *COLUMNS, "unvisited")
    _output.write_result(path, result, columns, ([row[key] for key in columns] for row in result["rows"]))
    _output.show(*table(result))
    draw(result, path)
    return path
