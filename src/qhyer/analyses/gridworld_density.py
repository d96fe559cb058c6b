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
GROUPS = (  # that take about as long as each other: one process each
    ("flow",),
    ("cvae", "cvae-fixed"),
    ("clearning-mc", "clearning-td", "contrastive", "histogram", "marginal"),
)
CLOUDS = ("flow", "cvae")  # drawn point by point
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
    weights = sum(p.numel() for key, p in estimator.named_parameters() if not key.startswith("target."))
    return {
        "seed": seed,
        "estimator": name,
        "weights": weights,
        **errors(log_q, world.future, data.visits),
        "unvisited": int((data.visits == 0).sum()),
        "drawn": drawn(name, np.exp(log_q[0]), world.future, data.visits) if seed == 0 else None,
    }


def drawn(name: str, q: np.ndarray, future: np.ndarray, visits: np.ndarray) -> dict[str, Any]:
    """What the figure shows of Q and P (S, A, G): maps of the (state, action) that the data visit most and, of
    those they visit, least; all of Q where it is drawn."""
    often, seldom = visits.argmax(), np.where(visits > 0, visits, np.inf).argmin()
    pairs = [divmod(int(index), visits.shape[1]) for index in (often, seldom)]
    found: dict[str, Any] = {"maps": [np.round(q[pair], 5).tolist() for pair in pairs]}
    if name in CLOUDS:
        found["cloud"] = np.round(q, 5).ravel().tolist()
    if name == "flow":  # the truth is kept once
        found |= {
            "pairs": pairs,
            "visits": [int(visits[pair]) for pair in pairs],
            "true_maps": [np.round(future[pair], 5).tolist() for pair in pairs],
            "true_cloud": np.round(future, 5).ravel().tolist(),
        }
    return found


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

    plt, palette = figures.plt, [pair[0] for key, pair in figures.THEME.items() if key.startswith("agent-")]
    colours = dict(zip(grid.ESTIMATORS, palette))
    rows, order = result["rows"], list(grid.ESTIMATORS)
    order.sort(key=lambda n: np.mean([row["kl"] for row in rows if row["estimator"] == n]))
    first = {row["estimator"]: row["drawn"] for row in rows if row["seed"] == 0}
    true = np.array(first["flow"]["true_cloud"])
    with plt.rc_context(_output.style()):
        figure = plt.figure(figsize=(11, 6.6), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=[1.0, 1.0])
        axes, *clouds = top.subplots(1, 3, width_ratios=[1.7, 1, 1])
        for place, name in enumerate(order):
            values = np.array([row["kl"] for row in rows if row["estimator"] == name])
            mean, half = _output.interval(values)
            axes.barh(place, mean, color=colours[name], alpha=0.35, height=0.62, linewidth=0)
            axes.plot(values, np.full(len(values), place), "o", color=colours[name], markersize=3.5, alpha=0.9)
            if np.isfinite(half):
                axes.plot([mean - half, mean + half], [place, place], color="#1b1d21", linewidth=1.4)
        axes.set_yticks(range(len(order)), [grid.ESTIMATORS[name] for name in order])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("forward KL, nats (bar: mean, dots: seeds, line: 95 % interval)")
        axes.set_title("Error, less is better", loc="left")
        limit = 1.05 * float(true.max())
        for panel, name in zip(clouds, CLOUDS):
            panel.plot([0, limit], [0, limit], color="#1b1d21", linewidth=0.8)
            guess = np.array(first[name]["cloud"])
            panel.plot(
                true,
                guess,
                ".",
                color=colours[name],
                markersize=3,
                alpha=0.5,
                markeredgewidth=0,
                rasterized=True,
            )
            panel.set(xlim=(0, limit), ylim=(0, limit), xlabel="true probability", aspect="equal")
            panel.set_title(f"{grid.ESTIMATORS[name]}, seed 0", loc="left")
        clouds[0].set_ylabel("estimated")
        shown = [name for name in order if name != "marginal"]
        panels = bottom.subplots(2, len(shown) + 1)
        for number, (line, (state, action)) in enumerate(zip(panels, first["flow"]["pairs"])):
            maps = {"true": first["flow"]["true_maps"][number]} | {n: first[n]["maps"][number] for n in shown}
            high = max(max(values) for values in maps.values())
            for panel, (name, values) in zip(line, maps.items()):
                picture = panel.imshow(np.reshape(values, (grid.SIZE, grid.SIZE)), cmap="viridis", vmin=0, vmax=high)
                row, column = divmod(state, grid.SIZE)
                step = 0.9 * np.array(grid.MOVES[action])
                panel.annotate(
                    "", (column + step[1], row + step[0]), (column, row), annotation_clip=False,
                    arrowprops={"arrowstyle": "->", "color": "white", "lw": 1.3, "shrinkA": 0, "shrinkB": 0},
                )  # fmt: skip
                panel.plot(column, row, "o", color="white", markersize=3.5)
                panel.set(xticks=[], yticks=[])
                panel.spines[:].set_visible(False)
                if number == 0:
                    title = grid.ESTIMATORS.get(name, name).replace(", ", ",\n")
                    panel.set_title(title, fontsize=8.5, fontweight="bold" if name == "true" else "normal")
            bar = bottom.colorbar(picture, ax=list(line), shrink=0.8, pad=0.01, aspect=12)
            bar.outline.set_visible(False)
        for line, visits, word in zip(panels, first["flow"]["visits"], ("most", "least")):
            line[0].set_ylabel(f"{word} often\nseen: {visits} ×", fontsize=8.5)
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
