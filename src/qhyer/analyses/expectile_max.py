"""Does expectile regression find the greatest Q among the actions in the data, and within the bound of Theorem 3.1?

The paper's check on its GridWorld (`_gridworld.py`), on the scale of probabilities: Q(s, a, g) = P[s, a, g], the true
value is the greatest over the actions that the data take in s, for every state and goal cell. Predicted four ways:

    exact     the tau-expectile of the true values over the data's actions, solved: term (A) of the proof, no learning
    cells     Q-hat(s, g) trained with Eq. (10) on the true values, told the cells: adds the network and its training
    network   the same, of observations: adds what a network cannot tell apart, states on two sides of an edge
    flow      the same on a RealNVP's estimates at the observed states and goals: adds the density's error, term (B)

epsilon_tau takes c-tilde, the fraction of the data's actions in s that attain the maximum, and Q_min from the data, for
each (s, g) by itself.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer import losses, theory
from qhyer.analyses import _gridworld as grid
from qhyer.analyses import _output
from qhyer.errors import require
from qhyer.nn.densities import DensityEstimator
from qhyer.nn.mlp import MLP
from qhyer.rng import stream_seed

NAME = "expectile-max"
TAUS = (0.5, 0.7, 0.9, 0.95, 0.99, 0.999)
PAPER = {0.5: (0.781, None), 0.99: (0.995, 0.0017)}  # R^2 and MAE, as far as the text gives them
WAYS = {
    "exact": "exact expectile",
    "cells": "network on true Q, told the cells",
    "network": "network on true Q",
    "flow": "network on the flow's Q",
}
HIDDEN = (128, 128)
FLOW_STEPS = 3000  # as in gridworld-density
TIE = 1e-9  # values nearer than this to the greatest attain it


def r_squared(true: np.ndarray, predicted: np.ndarray) -> float:
    return float(1 - np.square(true - predicted).sum() / np.square(true - true.mean()).sum())


def maxima(future: np.ndarray, visits: np.ndarray) -> dict[str, np.ndarray]:
    """Over the data's actions: the greatest P, its distance to the least, and the fraction that attains it, (S, G)."""
    seen = (visits > 0)[..., None]  # (S, A, 1)
    with np.errstate(invalid="ignore"):
        best = np.where(seen, future, -np.inf).max(1)
        worst = np.where(seen, future, np.inf).min(1)
        attain = seen & (future >= best[:, None] - TIE)
        coverage = (visits[..., None] * attain).sum(1) / visits.sum(1)[:, None]
    return {"best": best, "range": best - worst, "coverage": coverage}


class Heads(torch.nn.Module):
    """Q-hat(s, g), a network for each tau: they share batches and nothing else."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.cells = way == "cells"
        self.bins = grid.grid_bins()
        self.nets = torch.nn.ModuleList(MLP(2 * grid.CELLS if self.cells else 4, HIDDEN, 1) for _ in TAUS)

    def forward(self, state: Tensor, goal: Tensor) -> Tensor:
        if self.cells:
            state, goal = (F.one_hot(self.bins(x)[0], grid.CELLS).float() for x in (state, goal))
        x = torch.cat([state, goal], dim=-1)
        return torch.cat([net(x) for net in self.nets], dim=-1)  # (..., taus)


def regress(
    way: str, data: grid.Trajectories, future: np.ndarray, seed: int, steps: int, flow: DensityEstimator | None = None
) -> Heads:
    """Eq. (10) on transitions of the data and goals anywhere: on P itself, or on what the flow says of observations.

    Networks work in units of 1/25, the mean probability of a cell.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, NAME, "weights"))
        heads = Heads(way)
    generator = torch.Generator().manual_seed(stream_seed(seed, NAME, "batches", way))
    optimizer = torch.optim.Adam(heads.parameters(), lr=grid.LEARNING_RATE, fused=True)
    cells, actions = torch.from_numpy(data.cells), torch.from_numpy(data.actions)
    exact = torch.from_numpy(future).float()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = grid.LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
        which = torch.randint(len(cells), (grid.BATCH,), generator=generator)
        t = torch.randint(data.length, (grid.BATCH,), generator=generator)
        state, action = data.observations[which, t], data.one_hot[which, t]
        goal_cell = torch.randint(grid.CELLS, (grid.BATCH,), generator=generator)
        place = torch.stack([goal_cell // grid.SIZE, goal_cell % grid.SIZE], dim=-1)
        noise = torch.rand(grid.BATCH, 2, generator=generator) - 0.5
        goal = (place + noise - (grid.SIZE - 1) / 2) / grid.SCALE
        if flow is None:
            target = exact[cells[which, t], actions[which, t], goal_cell]
        else:  # a density per standardised area, times the area of a cell: the cell's probability, were it even
            target = flow.log_prob(goal, state, action).exp() / grid.SCALE**2
        u = grid.CELLS * target[:, None] - heads(state, goal)  # (batch, taus)
        loss = torch.stack([losses.expectile(u[:, i], tau).mean() for i, tau in enumerate(TAUS)]).sum()  # Eq. (10)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return heads


@torch.no_grad()
def predictions(heads: Heads) -> np.ndarray:
    """At the cells' centres (taus, S, G)."""
    middle = torch.from_numpy(grid.centres())
    state = middle[:, None].expand(-1, grid.CELLS, -1)
    values = heads(state, middle.expand(grid.CELLS, -1, -1)) / grid.CELLS  # (S, G, taus)
    return values.permute(2, 0, 1).double().numpy()


def measure(job: tuple[int, int, int, float]) -> dict[str, Any]:
    """One seed: its world, the flow, and the predictions of all four ways."""
    seed, steps, flow_steps, discount = job
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        world = grid.make_world(seed, discount)
        data = grid.Trajectories(world, seed)
        flow = grid.fit("flow", data, seed, flow_steps, discount)
        log_q = grid.log_masses(flow, grid.centres())  # (S, A, G)
        learned = {
            "cells": predictions(regress("cells", data, world.future, seed, steps)),
            "network": predictions(regress("network", data, world.future, seed, steps)),
            "flow": predictions(regress("flow", data, world.future, seed, steps, flow)),
        }
    finally:
        torch.set_num_threads(threads)
    truth = maxima(world.future, data.visits)
    seen = data.visits.sum(1) > 0
    values, weights = world.future.transpose(0, 2, 1), data.visits[:, None].repeat(grid.CELLS, axis=1)  # (S, G, A)
    exact = np.stack([theory.expectile(values[seen], tau, weights[seen]) for tau in TAUS])  # (taus, seen, G)
    found = {"exact": exact, **{key: value[:, seen] for key, value in learned.items()}}
    best, spread, coverage = (truth[key][seen] for key in ("best", "range", "coverage"))
    rows = []
    for place, tau in enumerate(TAUS):
        bound = theory.expectile_bias(tau, coverage, spread)
        for way, predicted in found.items():
            error = best - predicted[place]
            rows.append(
                {
                    "seed": seed,
                    "tau": tau,
                    "way": way,
                    "r2": r_squared(best, predicted[place]),
                    "mae": float(np.abs(error).mean()),
                    "max_error": float(np.abs(error).max()),
                    "above": float((error < 0).mean()),
                    "bound_mean": float(bound.mean()),
                    "bound_max": float(bound.max()),
                    "bound_sample_mean": float(theory.expectile_bias_of_sample(tau, coverage, spread).mean()),
                    "within_bound": float((np.abs(error) <= bound + 1e-12).mean()),
                }
            )
    visited = (data.visits / data.visits.sum()).ravel()
    density_error = (np.square(np.exp(log_q) - world.future).mean(-1).ravel() * visited).sum()
    least = data.visits[data.visits > 0].min() / data.visits.sum()
    return {
        "rows": rows,
        "true": np.round(best, 6).tolist(),
        "predicted": {way: np.round(value, 6).tolist() for way, value in found.items()} if seed == 0 else None,
        "coverage": [float(coverage.min()), float(np.median(coverage))],
        "density_error": float(density_error),
        "samples_needed": theory.samples_needed(
            float(coverage.min()), float(least), grid.CELLS, grid.ACTIONS, grid.CELLS, data.length
        ),
    }


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["tau", *(f"{kind}, {way}" for way in WAYS for kind in ("R²", "MAE")), "epsilon", "flow too high", "paper"]
    lines = []
    for tau in TAUS:
        rows = {way: [r for r in result["rows"] if r["tau"] == tau and r["way"] == way] for way in WAYS}
        line = [f"{tau:g}"]
        for way in WAYS:
            line += [_output.plus_minus([r["r2"] for r in rows[way]])]
            line += [_output.plus_minus([r["mae"] for r in rows[way]], 4)]
        r2, mae = PAPER.get(tau, (None, None))
        line += [_output.plus_minus([r["bound_mean"] for r in rows["exact"]], 4)]
        line += [f"{100 * np.mean([r['above'] for r in rows['flow']]):.0f} %"]
        line += [" ".join(filter(None, [f"R² {r2}" if r2 else "", f"MAE {mae}" if mae else ""]))]
        lines.append(line)
    return header, lines


def draw(result: dict[str, Any], path: Path) -> None:
    from qhyer.report import figures  # chooses matplotlib's backend

    plt = figures.plt
    colours = dict(zip(WAYS, ("#6b6f77", "#009e73", "#0072b2", "#d55e00")))
    true = np.array(result["scatter"]["true"]).ravel()
    with plt.rc_context(_output.style()):
        figure = plt.figure(figsize=(11, 5.6), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=[1.0, 1.25])
        panels = top.subplots(1, len(TAUS), sharex=True, sharey=True)
        limit = 1.05 * float(true.max())
        for place, (panel, tau) in enumerate(zip(panels, TAUS)):
            panel.plot([0, 1.3 * limit], [0, 1.3 * limit], color="#1b1d21", linewidth=0.8)
            for way in ("exact", "flow"):
                predicted = np.array(result["scatter"]["predicted"][way])[place].ravel()
                panel.plot(
                    true,
                    predicted,
                    ".",
                    color=colours[way],
                    markersize=2.6,
                    alpha=0.55,
                    markeredgewidth=0,
                    rasterized=True,
                )
            panel.set_title(rf"$\tau$ = {tau:g}", fontsize=10)
            panel.set_xlim(0, limit)
            panel.set_ylim(0, 1.3 * limit)
            panel.set_aspect("equal")
        panels[0].set_ylabel("predicted")
        top.supxlabel(
            "true maximum of Q over the data's actions (grey: exact expectile, orange: on the flow's Q; seed 0)",
            fontsize=9.5,
        )
        axes = bottom.subplots(1, 3)
        x = np.arange(len(TAUS))
        for panel, key, label in zip(axes, ("r2", "mae"), ("R²", "mean absolute error")):
            for way, title in WAYS.items():
                values = [[r[key] for r in result["rows"] if r["tau"] == tau and r["way"] == way] for tau in TAUS]
                mean, half = np.array([_output.interval(v) for v in values]).T
                panel.plot(x, mean, "o-", color=colours[way], markersize=4, label=title)
                panel.fill_between(x, mean - half, mean + half, color=colours[way], alpha=0.18, linewidth=0)
            paper = [(place, PAPER[tau][key == "mae"]) for place, tau in enumerate(TAUS) if tau in PAPER]
            shown = [(place, value) for place, value in paper if value is not None]
            panel.plot(*zip(*shown), "*", color="#1b1d21", markersize=10, label="paper", linestyle="none")
            panel.set_title(label, loc="left")
        axes[0].set_ylim(-0.5, 1.04)  # what fails at 0.999 leaves the picture; the table has it
        axes[1].set_ylim(bottom=0)
        axes[0].legend(frameon=False, fontsize=8.5, loc="lower left")
        panel = axes[2]
        for way, title in WAYS.items():
            mean = [np.mean([r["mae"] for r in result["rows"] if r["tau"] == t and r["way"] == way]) for t in TAUS]
            panel.semilogy(x, mean, "o-", color=colours[way], markersize=4, label=title)
        for key, line, title in (
            ("bound_mean", "-", r"$\epsilon_\tau$, Theorem 3.1"),
            ("bound_sample_mean", "--", "the same, c counted"),
        ):
            mean = [np.mean([r[key] for r in result["rows"] if r["tau"] == t and r["way"] == "exact"]) for t in TAUS]
            panel.semilogy(x, mean, line, color="#1b1d21", linewidth=1.3, label=title)
        panel.set_title("mean absolute error and the bound", loc="left")
        panel.legend(frameon=False, fontsize=8, loc="lower left")
        for panel in axes:
            panel.set_xticks(x, [f"{tau:g}" for tau in TAUS])
            panel.set_xlabel(r"$\tau$")
            panel.grid(axis="y", color="#dcdfe4", linewidth=0.7)
        _output.save_figure(figure, path)
        plt.close(figure)


def run(
    *,
    seeds: int = 5,
    steps: int = 3000,
    flow_steps: int = FLOW_STEPS,
    discount: float = grid.DISCOUNT,
    out: Path | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    quiet: bool = False,
) -> Path:
    """Does expectile regression find the greatest Q among the actions in the data, within the bound of Theorem 3.1?

    Args:
        seeds: how many; each draws a policy, trajectories, weights and batches
        steps: updates of each regression
        flow_steps: updates of the flow
        discount: of the future-state density
        out: folder to write to; results/analyses/expectile-max when not given
        overwrite: replace a result made with other settings
        workers: processes; one per core when not given
        quiet: no progress
    """
    require(min(seeds, steps, flow_steps) >= 1, "seeds and steps must be at least 1")
    require(0 < discount < 1, "discount must lie between 0 and 1")
    path = _output.folder(NAME, out) / f"{NAME}.json"
    settings = {
        "seeds": seeds,
        "steps": steps,
        "flow_steps": flow_steps,
        "discount": discount,
        "taus": list(TAUS),
        "batch": grid.BATCH,
        "learning_rate": grid.LEARNING_RATE,
        "hidden": list(HIDDEN),
        "trajectories": grid.TRAJECTORIES,
        "length": grid.LENGTH,
    }
    result = _output.existing(path, settings, overwrite)
    if result is None:
        jobs = [(seed, steps, flow_steps, discount) for seed in range(seeds)]
        found = _output.in_processes(NAME, measure, jobs, [f"seed {j[0]}" for j in jobs], workers, quiet)
        result = {
            "analysis": NAME,
            "settings": settings,
            "rows": [row for seed in found for row in seed["rows"]],
            "scatter": {"seed": 0, "true": found[0]["true"], "predicted": found[0]["predicted"]},
            "theory": [{key: seed[key] for key in ("coverage", "density_error", "samples_needed")} for seed in found],
        }
    columns = list(result["rows"][0])
    _output.write_result(path, result, columns, ([row[key] for key in columns] for row in result["rows"]))
    _output.show(*table(result))
    exact = [row for row in result["rows"] if row["way"] == "exact"]
    print(f"exact expectiles within epsilon_tau: {100 * np.mean([row['within_bound'] for row in exact]):.1f} % of all")
    needed = max(item["samples_needed"] for item in result["theory"])
    print(f"trajectories Theorem 3.1 asks for: up to {needed:.1e}; there are {grid.TRAJECTORIES}")
    draw(result, path)
    return path
