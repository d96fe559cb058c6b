"""What do the flow and the actor cost, per batch of 256, in training and in use?

The paper's table of times, for its 18 state-based datasets (NF Train, Actor, Infer-Q, Infer-A), with QHyer of the
preset `paper` and made-up data of the datasets' sizes:

    flow train    one update of the critic on 256 transitions, Eq. (5): draw, loss, backward, clip, step
    actor train   one update of the decoder on 256 windows of K steps, Eqs. (10) and (15), the Q of its tokens included
    infer Q       log p(g | s, a) of 256 pairs, Eq. (4)
    infer A       one step of acting in 256 episodes with full windows, Algorithm 1
    NF %          flow train of flow train and actor train

Medians of single calls after a warm-up, by the device's own clock on CUDA (blocks of ten updates, in graphs unless
--no-graph), in the precision of training (bf16 on CUDA, fp32 on a CPU). `GFLOP` counts the matrix products of a call;
`3090 ms` is the time that those of an actor update take on the paper's GPU at its greatest rate.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qhyer import presets, runs
from qhyer.agent import Batch, Metrics, Stage
from qhyer.analyses import _common, _output
from qhyer.analyses._maze import INK, SOFT
from qhyer.bench import common
from qhyer.bench.infer import full_memory
from qhyer.bench.train import BLOCK, WARMUP, Training, launch, time_updates
from qhyer.config import replace
from qhyer.data import registry
from qhyer.data.episodes import Episodes
from qhyer.data.samplers import chunks
from qhyer.errors import UserError, require
from qhyer.progress import Progress
from qhyer.rng import stream_seed
from qhyer.storage import write_json
from qhyer.train import SMALL, torch_settings

NAME = "timing"
BATCH = 256
COUNTED = 4  # samples of which products are counted: they grow with the batch and with nothing else
RATE_3090 = 71e12  # a second: an RTX 3090's greatest rate of bf16 products that are added up in float32
COLUMNS = {"flow_train": "flow train", "actor_train": "actor train", "infer_q": "infer Q", "infer_a": "infer A"}

# The paper's: NF Train, Actor, Infer-Q, Infer-A in ms per batch of 256 on an RTX 3090, and its NF ratio in percent.
PAPER: dict[str, tuple[float, float, float, float, float]] = {
    "cube-single-play-v0": (2.42, 3.07, 0.007, 0.015, 28.3),
    "cube-double-play-v0": (2.43, 2.99, 0.008, 0.019, 26.7),
    "cube-triple-play-v0": (2.47, 3.14, 0.008, 0.015, 28.8),
    "cube-quadruple-play-v0": (2.54, 3.12, 0.011, 0.019, 27.0),
    "cube-single-noisy-v0": (2.44, 3.06, 0.009, 0.015, 29.3),
    "cube-double-noisy-v0": (2.49, 3.07, 0.011, 0.019, 26.9),
    "cube-triple-noisy-v0": (2.42, 3.01, 0.008, 0.014, 29.2),
    "cube-quadruple-noisy-v0": (2.55, 3.14, 0.012, 0.018, 27.1),
    "scene-play-v0": (2.43, 3.04, 0.009, 0.015, 28.8),
    "scene-noisy-v0": (2.43, 3.02, 0.008, 0.020, 26.9),
    "puzzle-3x3-play-v0": (2.39, 3.01, 0.008, 0.015, 28.7),
    "puzzle-4x4-play-v0": (2.52, 3.08, 0.010, 0.019, 27.1),
    "puzzle-4x5-play-v0": (2.48, 3.12, 0.008, 0.015, 28.7),
    "puzzle-4x6-play-v0": (2.54, 3.10, 0.009, 0.020, 26.8),
    "puzzle-3x3-noisy-v0": (2.45, 3.10, 0.009, 0.015, 29.0),
    "puzzle-4x4-noisy-v0": (2.49, 3.09, 0.009, 0.019, 26.9),
    "puzzle-4x5-noisy-v0": (2.51, 2.95, 0.009, 0.015, 30.1),
    "puzzle-4x6-noisy-v0": (2.44, 2.98, 0.008, 0.021, 27.2),
}
AVERAGE = (2.47, 3.06, 0.009, 0.017, 28.0)  # as printed there

Precision = Literal["fp32", "bf16"]


# -------------------------------------------------------------------------------------------------------- measuring


class Part(Training):
    """Updates of one of the agent's two halves alone, as the trainer runs them."""

    def __init__(self, agent: Any, stage: Stage, episodes: Episodes, precision: str, graph: bool) -> None:
        self.plain, self.step, self.agent = False, 0, agent
        stream = ("analysis", NAME, stage.name)
        self.begin(stage, episodes, precision, graph, stream_seed(0, *stream), [stream_seed(0, *stream, "data")])


def stages(agent: Any, batch: int) -> dict[str, Stage]:
    """Training of the flow alone and of the actor alone."""
    config = agent.config
    actor, critic = agent.optimizers
    windows = dataclasses.replace(agent.stages()[0].sampler, flow_batch=0.0)

    def actor_loss(drawn: Batch) -> tuple[Tensor, Metrics]:
        bc, regression, metrics = agent.actor_loss(drawn)
        return config.weight_bc * bc + config.weight_q * regression, metrics

    flow = _common.FlowSamplerConfig(config.discount, config.chunk)
    return {
        "flow_train": Stage("flow", 1, batch, flow, agent.critic_loss, (critic,), grad_clip=config.grad_clip),
        "actor_train": Stage("actor", 1, batch, windows, actor_loss, (actor,), grad_clip=config.grad_clip),
    }


def captured(call: Callable[[], object], device: torch.device, graph: bool) -> tuple[Callable[[], object], str]:
    """The call in a CUDA graph where that can be, and how it runs."""
    if device.type != "cuda" or not graph:
        return call, "eager"
    try:
        return common.recorded(call, device), "captured"
    except Exception as error:  # of any kind: what cannot be captured is timed as it is
        return call, f"eager ({type(error).__name__})"


def count(work: Callable[[], object], batch: int) -> float:
    """Operations of matrix products for a whole batch, counted on a small one."""
    with common.plain_operations():
        return common.count_flops(work) * batch / COUNTED


def measure(
    agent: Any, episodes: Episodes, batch: int, precision: Precision, seconds: float, graph: bool
) -> dict[str, Any]:
    """Times of one agent, in milliseconds per batch, and the products they consist of."""
    device = episodes.device
    cuda = device.type == "cuda"
    mixed = functools.partial(
        torch.autocast, device.type, dtype=torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )
    found: dict[str, Any] = {}
    paths, flops = {}, {}
    agent.train()
    for name, stage in stages(agent, batch).items():
        common.release(device)
        part = Part(agent, stage, episodes, precision, graph)
        launch([part], WARMUP if cuda else 1)
        common.synchronize(device)
        times = time_updates([([part], BLOCK if cuda else 1)], seconds, device)[0]
        found[name] = float(np.median(times))
        found[f"{name}_p95"] = float(np.quantile(times, 0.95))
        paths[name] = part.update.path
        part.update.drop_gradients()

        def work(stage: Stage = stage, sampler: Any = part.update.sampler) -> None:
            with mixed():
                loss, _ = stage.loss(sampler.sample(COUNTED))
            loss.backward()

        with part.lane.turn():
            flops[name] = count(work, batch)
        part.update.drop_gradients()
        del part, work  # graphs and their memory with them
    agent.eval()
    common.release(device)
    generator = torch.Generator().manual_seed(0)
    rows = episodes.transitions[torch.randint(episodes.num_transitions, (batch,), generator=generator).to(device)]
    states, actions = episodes.observations[rows], chunks(episodes, rows, agent.config.chunk)
    goals = states.roll(1, 0)
    target = agent.goal_coordinates(goals)
    with torch.no_grad(), mixed():
        memory = full_memory(agent, states, goals)

        def infer_q(size: int = batch) -> Tensor:
            return agent.log_density(states[:size], actions[:size], target[:size])

        def infer_a(size: int = batch) -> Tensor:
            past = None if memory is None else {key: value[:size] for key, value in memory.items()}
            return agent.act(states[:size], goals[:size], past)[0]

        for name, call in (("infer_q", infer_q), ("infer_a", infer_a)):
            flops[name] = count(functools.partial(call, COUNTED), batch)
            ready, paths[name] = captured(call, device, graph)
            times = common.in_turn_ms([ready], seconds, device)[0]
            found[name] = float(np.median(times))
            found[f"{name}_p95"] = float(np.quantile(times, 0.95))
    found["nf_percent"] = 100.0 * found["flow_train"] / (found["flow_train"] + found["actor_train"])
    found |= {f"{name}_gflop": value / 1e9 for name, value in flops.items()}
    found["actor_train_3090_ms"] = 1e3 * flops["actor_train"] / RATE_3090
    found["paths"] = paths
    return found


# ---------------------------------------------------------------------------------------------------------- showing


def chosen(datasets: Sequence[str], device: str) -> list[registry.Dataset]:
    """What was asked for; when nothing was, all on CUDA and cube-single on a CPU."""
    if not datasets:
        datasets = tuple(PAPER) if device.startswith("cuda") else ("cube-single-play",)
    elif tuple(datasets) == ("all",):
        datasets = tuple(PAPER)
    found = [registry.get(name) for name in datasets]
    for dataset in found:
        if dataset.name not in PAPER:
            raise UserError(f"{dataset.name} is not in the paper's table; it has {', '.join(PAPER)}")
    return list(dict.fromkeys(found))


def number(value: float) -> str:
    return common.figures(value)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["dataset", *(f"{title}, ms" for title in COLUMNS.values()), "NF %"]
    header += [*(f"paper: {title}" for title in COLUMNS.values()), "NF %", "actor GFLOP", "3090 ms"]
    lines = []
    for row in result["rows"]:
        lines.append(
            [
                row["dataset"].removesuffix("-v0"),
                *(number(row[name]) for name in COLUMNS),
                f"{row['nf_percent']:.1f}",
                *(f"{value:g}" for value in PAPER[row["dataset"]]),
                number(row["actor_train_gflop"]),
                number(row["actor_train_3090_ms"]),
            ]
        )
    if len(lines) > 1:
        means = [float(np.mean([row[name] for row in result["rows"]])) for name in COLUMNS]
        ratio = float(np.mean([row["nf_percent"] for row in result["rows"]]))
        theirs = np.mean([PAPER[row["dataset"]] for row in result["rows"]], axis=0)  # over the same datasets
        lines.append(["mean", *map(number, means), f"{ratio:.1f}", *(f"{value:.3g}" for value in theirs), "", ""])
    return header, lines


def draw(result: dict[str, Any], path: Path) -> None:
    from qhyer.report import figures  # chooses matplotlib's backend

    plt, rows = figures.plt, result["rows"]
    places = np.arange(len(rows))
    batch = result["settings"]["batch"]
    with plt.rc_context(_output.style()):
        figure, panels = plt.subplots(
            1, 4, figsize=(11, 1.5 + 0.24 * len(rows)), sharey=True, layout="constrained", squeeze=False
        )
        for column, (panel, (name, title)) in enumerate(zip(panels[0], COLUMNS.items())):
            ours = [row[name] for row in rows]
            theirs = [PAPER[row["dataset"]][column] for row in rows]
            panel.plot(ours, places, "o", color="#d55e00", markersize=5, label="here")
            panel.plot(theirs, places, "D", color="#0072b2", markersize=4.5, label="paper, RTX 3090")
            if name == "actor_train":
                least = [row["actor_train_3090_ms"] for row in rows]
                panel.plot(least, places, "|", color=INK, markersize=9, label="products alone on a 3090")
            if name.startswith("infer"):
                each = [value * batch for value in theirs]
                panel.plot(each, places, "D", color="#0072b2", markerfacecolor="white", markersize=4.5,
                           label=f"paper × {batch}, if it is per sample")  # fmt: skip
            panel.set_xscale("log")
            panel.set_title(title, loc="left")
            panel.set_xlabel("ms per batch")
            panel.grid(axis="x", color="#e4e6ea", linewidth=0.6)
        panels[0][0].set_yticks(places, [row["dataset"].removesuffix("-v0") for row in rows])
        panels[0][0].set_ylim(len(rows) - 0.4, -0.6)
        handles = {h.get_label(): h for panel in panels[0] for h in panel.get_lines()}
        figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
        figure.suptitle(
            f"{result['machine']['hardware']}, {result['settings']['precision']}", fontsize=8, color=SOFT, x=0.99,
            ha="right",
        )  # fmt: skip
        _output.save_figure(figure, path)
        plt.close(figure)


# --------------------------------------------------------------------------------------------------------------- run


def unfinished(path: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What a command that was stopped had measured already, asked for the same on the same machine: compiling the
    kernels of all sizes takes minutes."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = found.pop("rows")
    except (OSError, ValueError, KeyError, AttributeError):  # nothing, or nothing of ours
        return []
    return rows if found == json.loads(json.dumps(asked)) else []


def run(
    *,
    datasets: tuple[str, ...] = (),
    device: str = "auto",
    batch: int = BATCH,
    preset: str = "paper",
    precision: Precision | None = None,
    seconds: float = 3.0,
    threads: int = 0,
    graph: bool = True,
    out: Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """What do the flow and the actor cost, per batch of 256, in training and in use?

    Args:
        datasets: whose sizes and presets to time, or all; when not given, all 18 on CUDA, cube-single-play on a CPU
        device: cpu, cuda, or auto
        batch: transitions, windows, pairs and episodes at once
        preset: QHyer's
        precision: fp32 or bf16; when not given, bf16 on CUDA and fp32 on a CPU
        seconds: how long to measure each of the four times
        threads: threads of torch; 0 chooses as the trainer does
        graph: on CUDA, capture updates and calls in graphs, as the trainer does
        out: folder to write to; results/analyses/timing-DEVICE when not given
        overwrite: replace a result made with other settings; times are always taken again
        quiet: no progress
    """
    require(batch >= 1 and seconds > 0.0 and threads >= 0, "batch and seconds must be positive, threads not negative")
    device = runs.resolve_device(device)
    place = torch.device(device)
    selected = chosen(datasets, device)
    chosen_precision: Precision = precision or ("bf16" if place.type == "cuda" else "fp32")
    path = _output.folder(f"{NAME}-{place.type}", out) / f"{NAME}.json"
    settings: dict[str, Any] = {
        "datasets": [dataset.name for dataset in selected],
        "device": place.type,
        "batch": batch,
        "preset": preset,
        "precision": chosen_precision,
        "seconds": seconds,
        "graph": graph,
    }
    result = _output.existing(path, settings, overwrite)
    if result is None:
        machine: dict[str, Any] = {}
        so_far = path.with_name("unfinished.json")
        asked = {"settings": settings, "hardware": runs.hardware(device, threads), "versions": runs.versions()}
        rows = unfinished(so_far, asked)
        with Progress(NAME, len(selected), quiet) as progress:
            for done, dataset in enumerate(selected, 1):
                if done <= len(rows) and done < len(selected):
                    continue
                rows = rows[: done - 1]  # the last is measured again, if all were there
                progress.note(dataset.name)
                config, _ = presets.resolve("qhyer", preset, dataset.name)
                episodes = common.made_up_episodes(dataset, 10, place)
                agent = runs.build_agent("qhyer", replace(config, {"batch_size": batch}), episodes.spec(), 0)
                parameters = sum(p.numel() for p in agent.parameters())
                used = threads or (1 if parameters < SMALL else torch.get_num_threads())
                row: dict[str, Any] = {"dataset": dataset.name, "parameters": parameters, "threads": used}
                with torch_settings(used, chosen_precision, device):
                    machine = common.machine(device)
                    row |= measure(agent.to(place), episodes, batch, chosen_precision, seconds, graph)
                rows.append(row)
                write_json(so_far, {**asked, "rows": rows})
                del agent, episodes
                common.release(place)
                progress.show(done, {name: row[name] for name in COLUMNS})
        result = {"analysis": NAME, "settings": settings, "machine": machine, "rows": rows}
    columns = [key for key in result["rows"][0] if key != "paths"]
    _output.write_result(path, result, columns, ([row[key] for key in columns] for row in result["rows"]))
    path.with_name("unfinished.json").unlink(missing_ok=True)
    _output.show(*table(result))
    print(f"{result['machine']['hardware']}, {result['settings']['precision']}; paper: RTX 3090, per batch of 256")
    for way in sorted({way for row in result["rows"] for way in row["paths"].values()}):
        print(f"run: {way}")
    draw(result, path)
    return path
