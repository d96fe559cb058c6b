"""How far back does each block remember, and which branch does its gate trust?

The paper's statistics of Delta_t and of the gate: distribution of Delta_t and its mean at each token of a window, mean
of A_bar_t = exp(Delta_t A), the effective memory, and the mean gate weight of either branch, over windows drawn as in
training. The command shows runs side by side.

Effective memory is the paper's "largest k with prod_{j=1..k} A_bar_{t-j+1} > 0.5", at the last token t of a window.
A_bar has one value per channel and state; the paper does not say how it averages them. `memory_tokens` is the mean over
channels and states of each one's own k; `memory_tokens_slowest` is the mean over channels of the k of the state that
forgets least, the one with the smallest |A|; `memory_tokens_of_mean` is k of the product of A_bar averaged over
channels and states first. k is at most the number of tokens in a window, and a step has several tokens: `memory_steps`
divides.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qhyer import runs
from qhyer.agent import Batch
from qhyer.analyses import _output
from qhyer.analyses._common import generator, load_episodes
from qhyer.errors import UserError, require
from qhyer.report.tables import to_csv
from qhyer.storage import write_json, write_text

NAME = "memory"
BATCHES = 10
WINDOWS = 64
CHUNK = 8  # windows read out at once: A_bar of one window of the paper's cube-single takes 8 MB
HALF = 0.5
BINS = 60
EDGES = np.geomspace(1e-4, 1e1, BINS + 1)  # of Delta: the same for all runs, to lay histograms over each other

TABLE = {
    "dataset": "{dataset}",
    "update": "{step}",
    "window, steps": "{window_steps}",
    "Δ, mean ± std": "{delta_mean:.3f} ± {delta_std:.3f}",
    "Ā, mean over states": "{a_bar_mean:.3f}",
    "Ā, slowest state": "{a_bar_slowest_mean:.3f}",
    "effective memory in steps, mean over states": "{memory_steps:.2f}",
    "effective memory in steps, slowest state": "{memory_steps_slowest:.2f}",
    "effective memory in steps, of the mean Ā": "{memory_steps_of_mean:.2f}",
    "gate, attention / Mamba": "{gate_attention:.2f} / {gate_mamba:.2f}",
}


# -------------------------------------------------------------------------------------------------------- measuring


def effective_memory(a_bar: Tensor) -> Tensor:
    """A_bar (B, L, ...) -> at the last token, the largest k with prod_{j=1..k} A_bar_{t-j+1} > 1/2, (B, ...)."""
    kept = a_bar.double().flip(1).cumprod(dim=1) > HALF  # A_bar < 1, so the product only falls
    return kept.sum(dim=1)


class Moments:
    """Mean and standard deviation of values that come in pieces, in float64."""

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        values = values.double()
        self.count += values.numel()
        self.total += float(values.sum())
        self.squares += float(values.square().sum())

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def std(self) -> float:
        return max(0.0, self.squares / self.count - self.mean**2) ** 0.5


class Distribution(Moments):
    """Of values (B, L, E) the histogram and the mean at each of the L tokens, too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.totals = np.zeros(BINS, dtype=np.int64), np.zeros(1)

    def add(self, values: Tensor) -> None:
        super().add(values)
        values = values.double()
        inner = torch.as_tensor(EDGES[1:-1], device=values.device)  # without the outer ones, end bins have no end
        bins = torch.bucketize(values.flatten(), inner, right=True)
        self.counts += torch.bincount(bins, minlength=BINS).cpu().numpy()
        self.totals = self.totals + values.sum(dim=(0, 2)).cpu().numpy()  # (L,)

    @property
    def shares(self) -> list[float]:
        return (self.counts / self.count).tolist()

    @property
    def positions(self) -> list[float]:
        return (self.totals * len(self.totals) / self.count).tolist()


def mean(values: Sequence[Any]) -> Any:
    """Of numbers, or of lists number by number."""
    return [mean(each) for each in zip(*values)] if isinstance(values[0], list) else sum(values) / len(values)


def summarize(readouts: list[dict[str, Moments]], tokens_per_step: int) -> dict[str, Any]:
    """Moments per block -> the table's lines, per block and over blocks."""
    blocks = []
    for block in readouts:
        line: dict[str, Any] = {}
        delta = block.get("delta")
        if isinstance(delta, Distribution):
            line |= {
                "delta_mean": delta.mean,
                "delta_std": delta.std,
                "a_bar_mean": block["a_bar"].mean,
                "a_bar_slowest_mean": block["a_bar_slowest"].mean,
                "memory_tokens": block["memory"].mean,
                "memory_tokens_slowest": block["memory_slowest"].mean,
                "memory_tokens_of_mean": block["memory_of_mean"].mean,
                "memory_steps": block["memory"].mean / tokens_per_step,
                "memory_steps_slowest": block["memory_slowest"].mean / tokens_per_step,
                "memory_steps_of_mean": block["memory_of_mean"].mean / tokens_per_step,
                "delta_histogram": delta.shares,
                "delta_positions": delta.positions,
            }
        if "alpha" in block:
            line |= {
                "gate_attention": block["alpha"].mean,
                "gate_mamba": 1.0 - block["alpha"].mean,
                "gate_std": block["alpha"].std,
            }
        blocks.append(line)
    return {"all": {key: mean([line[key] for line in blocks]) for key in blocks[0]}, "blocks": blocks}


def observe(readouts: list[dict[str, Moments]], values: list[dict[str, Tensor]]) -> None:
    """Adds what `readout` gave for some windows to the running moments of each block."""
    for moments, block in zip(readouts, values):
        pieces = {}
        if "delta" in block:
            a_bar = block["A_bar"]  # (B, L, E, N)
            slowest = a_bar.amax(dim=3)  # Delta > 0: the same state at every token
            pieces = {
                "delta": block["delta"],
                "a_bar": a_bar,
                "a_bar_slowest": slowest,
                "memory": effective_memory(a_bar),
                "memory_slowest": effective_memory(slowest),
                "memory_of_mean": effective_memory(a_bar.double().mean(dim=(2, 3))),
            }
        if "alpha" in block:
            pieces["alpha"] = block["alpha"]
        for name, piece in pieces.items():
            moments.setdefault(name, Distribution() if name == "delta" else Moments()).add(piece)


def measure(agent: Any, windows: Batch, readouts: list[dict[str, Moments]]) -> None:
    size = len(windows["observations"])
    for first in range(0, size, CHUNK):
        part = {key: value[first : first + CHUNK] for key, value in windows.items() if len(value) == size}
        values = agent.readout(part)
        readouts += [{} for _ in range(len(values) - len(readouts))]
        observe(readouts, values)


def own_file(run: Path) -> Path:
    return Path(run) / "analyses" / f"{NAME}.json"


def token_kinds(tokens: Any) -> list[str]:
    """What the tokens of one step are, in their order; nothing where the agent does not say."""
    leading = {"concat": ["state-goal"], "separate": ["goal", "state"], "no_goal": ["state"]}
    kinds = leading.get(getattr(tokens, "tokenization", ""))
    return [] if kinds is None else [*kinds, *(["Q"] if tokens.with_q else []), "action"]


def run(run: Path, *, device: str = "cpu", data: Path | None = None) -> Path:
    agent: Any
    agent, step = runs.load_agent(run, device=device)
    if not hasattr(agent, "readout"):
        raise UserError(
            f"{run} holds {runs.read(run)['agent']}, whose blocks cannot be read out; "
            "this analysis needs a decoder with Mamba branches, such as qhyer's"
        )
    episodes, about = load_episodes(run, agent, data, device)
    sampler = agent.stages()[0].sampler.build(episodes, generator(NAME, device))
    readouts: list[dict[str, Moments]] = []
    for _ in range(BATCHES):
        windows = sampler.sample(WINDOWS)
        # Windows padded at an episode's end would count their padding.
        whole = windows["valid"].all(dim=1)
        if whole.any():
            windows = {k: v[whole] for k, v in windows.items() if len(v) == WINDOWS}
            measure(agent, windows, readouts)
    if not readouts or not readouts[0]:
        raise UserError(f"{run}: no block of the agent has a Mamba branch, or no episode is as long as its window")
    per_step = int(agent.tokens.per_step)
    found = summarize(readouts, per_step)
    context = int(getattr(agent.config, "context", 0))
    result = {
        "analysis": NAME,
        "step": step,
        "data": about,
        "batches": BATCHES,
        "windows_per_batch": WINDOWS,
        "tokens_per_step": per_step,
        "window_tokens": context * per_step,
        "token_kinds": token_kinds(agent.tokens) * context,
        "delta_edges": EDGES.tolist(),
        **found,
    }
    path = own_file(run)
    write_json(path, result)
    over = found["all"]
    if "delta_mean" in over:
        print(
            f"Delta {over['delta_mean']:.3f} ± {over['delta_std']:.3f}, A_bar {over['a_bar_mean']:.3f}; "
            f"effective memory {over['memory_tokens']:.1f} of {context * per_step} tokens, "
            f"{over['memory_steps']:.1f} of {context} steps"
        )
    if "gate_attention" in over:
        print(f"gate: attention {over['gate_attention']:.2f}, Mamba {over['gate_mamba']:.2f}")
    return path


# -------------------------------------------------------------------------------------------------------- comparing


def load(run: Path) -> dict[str, Any]:
    """What `run` wrote, and whose it is."""
    info = runs.read(run)
    path = own_file(run)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    if "delta_edges" not in found:
        raise UserError(f"{path} is missing or of an earlier version: qhyer analyze {NAME} {run}")
    return {key: info[key] for key in ("agent", "dataset", "preset", "seed")} | found


def labels(folders: Sequence[Path]) -> list[str]:
    """Names of the folders, with as much of their paths as differs."""
    paths = [Path(run).resolve() for run in folders]
    shared = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(shared).as_posix() for path in paths]


def table(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    def cell(form: str, result: dict[str, Any]) -> str:
        steps = result["window_tokens"] // result["tokens_per_step"]
        try:
            return form.format(**result, **result["all"], window_steps=steps)
        except KeyError:  # of a branch that this run's blocks do not have
            return "–"

    lines = [[title, *(cell(form, result) for result in results)] for title, form in TABLE.items()]
    return ["", *(result["run"] for result in results)], lines


def numbers(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The CSV: a line for each number over all blocks and in each, a column for each run."""
    lines: list[list[Any]] = []
    places = itertools.zip_longest(*([result["all"], *result["blocks"]] for result in results), fillvalue={})
    for place, found in enumerate(places):
        keys = dict.fromkeys(key for block in found for key, value in block.items() if not isinstance(value, list))
        lines += [[place or "all", key, *(block.get(key, math.nan) for block in found)] for key in keys]
    return ["block", "quantity", *(result["run"] for result in results)], lines


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    from qhyer.report import figures  # chooses matplotlib's backend

    plt = figures.plt
    styles, colours = ("-", "--", ":", "-."), [_output.COLOURS[i % len(_output.COLOURS)] for i in range(len(results))]
    with plt.rc_context(_output.style()):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
        kinds: dict[str, str] = {}
        for number, (result, colour) in enumerate(zip(results, colours)):
            over, per_step = result["all"], result["tokens_per_step"]
            left.plot([], [], color=colour, label=result["run"])
            if "delta_histogram" in over:
                left.stairs(over["delta_histogram"], result["delta_edges"], color=colour, fill=True, alpha=0.2)
                left.stairs(over["delta_histogram"], result["delta_edges"], color=colour, linewidth=1.4)
                left.axvline(over["delta_mean"], color=colour, linewidth=1.0, linestyle="--")
                positions = over["delta_positions"]
                for token in range(per_step):  # tokens of a kind differ less from step to step than kinds do
                    kind = result["token_kinds"][token] if result["token_kinds"] else f"token {token + 1}"
                    style = kinds.setdefault(kind, styles[len(kinds) % len(styles)])
                    values = positions[token::per_step]
                    middle.plot(range(1, 1 + len(values)), values, style, color=colour, linewidth=1.4)
            if "gate_attention" in over:
                attention = np.array([block["gate_attention"] for block in (over, *result["blocks"])])
                width = 0.8 / len(results)
                x = np.arange(len(attention)) + (number + 0.5) * width - 0.4
                right.bar(x, attention, 0.92 * width, color=colour)
                right.bar(x, 1.0 - attention, 0.92 * width, bottom=attention, color=colour, alpha=0.25)
        left.set_xscale("log")
        left.set_xlabel(r"$\Delta_t$ (dashed: its mean)")
        left.set_title(r"$\Delta_t$ by share", loc="left")
        left.set_ylim(bottom=0)
        middle.set_xlabel("step of the window")
        middle.set_title(r"mean $\Delta_t$ by position", loc="left")
        middle.set_ylim(0, 1.15 * middle.get_ylim()[1])  # room for the legend
        for kind, style in kinds.items():
            middle.plot([], [], style, color="#1b1d21", linewidth=1.2, label=kind)
        if kinds:
            middle.legend(frameon=False, fontsize=8, loc="upper center", ncols=len(kinds))
        blocks = max(len(result["blocks"]) for result in results)
        right.set_xticks(range(1 + blocks), ["all", *map(str, range(1, 1 + blocks))])
        right.axhline(0.5, color="#1b1d21", linewidth=0.8)
        right.set_ylim(0, 1)
        right.set_xlabel("block")
        right.set_title("gate: attention (full), Mamba (pale)", loc="left")
        for panel in (left, middle, right):
            panel.grid(axis="y", color="#e4e6ea", linewidth=0.6)
            panel.set_axisbelow(True)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
        _output.save_figure(figure, path)
        plt.close(figure)


def _of_others(path: Path, results: Sequence[Mapping[str, Any]]) -> bool:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return [(run["run"], run["dataset"]) for run in before] != [(run["run"], run["dataset"]) for run in results]
    except (ValueError, KeyError, TypeError):
        return True


def compare(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Table and figure of what is written for these runs: beside one run's own file, or in the folder `out`."""
    require(len(folders) > 0, "give at least one run")
    alone = len(folders) == 1 and out is None
    path = own_file(folders[0]) if alone else _output.folder(NAME, out) / f"{NAME}.json"
    if not alone and path.resolve() in [own_file(run).resolve() for run in folders]:
        raise UserError(f"{path} is what one of the runs has for itself; give another --out")
    results = [{"run": label, **load(run)} for label, run in zip(labels(folders), folders)]
    if not alone and path.exists() and _of_others(path, results):
        raise UserError(f"{path} is of other runs; give another --out, or remove it")
    header, lines = numbers(results)
    if alone:
        write_text(path.with_suffix(".csv"), to_csv(header, lines))
    else:
        _output.write_result(path, {"analysis": NAME, "runs": results}, header, lines)
    _output.show(*table(results))
    draw(results, path)
    return path
