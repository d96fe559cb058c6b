"""`qhyer bench train`: one gradient update as the trainer runs it, against what its operations and bytes would take.

The floor: the matrix products of loss and backward at the measured rate of a large product in this precision, plus the
bytes that the optimisers must read and write (parameters, gradients, moments) at the measured rate of a large copy. A
sum, since gradients are clipped by their norm: no optimiser can begin before the last of its gradients is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from qhyer import presets, runs
from qhyer.agent import AgentConfig, Stage
from qhyer.bench import common
from qhyer.bench.common import BenchRow, Ceilings
from qhyer.config import Precision, replace
from qhyer.data import registry
from qhyer.data.episodes import Episodes
from qhyer.data.goals import of_seeds
from qhyer.errors import UserError, require
from qhyer.lane import Lane
from qhyer.manifest import overridden
from qhyer.nn import scan
from qhyer.rng import stream_seed
from qhyer.stack import stacked
from qhyer.storage import atomic_file, refusal
from qhyer.train import SMALL, torch_settings
from qhyer.update import GraphedUpdate, make_update

WARMUP = GraphedUpdate.WARMUP + 2  # a graph is made on the way
BLOCK = 10  # updates on CUDA between two looks at the clock: the trainer does not wait for each one either
RIVAL_BLOCK = 3
PROFILED = 5  # updates
KEPT = 60  # names of a profile that are written


class Training:
    """One run from its seed, as the trainer sets it up: agent, lane, sampler and update, without a folder. Or several
    from this seed on, stacked into one update."""

    def __init__(
        self,
        agent: str,
        config: AgentConfig,
        episodes: Episodes,
        precision: str,
        *,
        seed: int = 0,
        stack: int = 1,
        graph: bool = True,
        compile: bool = False,
        plain: bool = False,
    ) -> None:
        device = episodes.device
        self.plain = plain
        self.step = 0
        seeds = range(seed, seed + stack)
        own = [runs.build_agent(agent, config, episodes.spec(), each).to(device).train() for each in seeds]
        longest = max(reversed(own[0].stages()), key=lambda stage: stage.steps)  # of equals the last: the policy's
        self.agent, stage = stacked(own) if stack > 1 else (own[0], longest)
        data = [stream_seed(each, "data") for each in seeds]
        self.begin(stage, episodes, precision, graph, stream_seed(seed, "train"), data, compile)

    def begin(
        self,
        stage: Stage,
        episodes: Episodes,
        precision: str,
        graph: bool,
        lane: int,
        data: Sequence[int],
        compile: bool = False,
    ) -> None:
        """Makes the update of this stage, captured where it can be; `lane` and `data` seed its streams of chance."""
        device = episodes.device
        self.lane = Lane(device, lane)
        drawing = [torch.Generator(device).manual_seed(each) for each in data]
        with self.lane.turn():
            sampler = stage.sampler.build(episodes, of_seeds(drawing))
            self.update = make_update(
                self.agent, stage, sampler, drawing, common.note,
                precision=precision, device=device, graph=graph, compile=compile,
            )  # fmt: skip

    def __call__(self) -> None:
        with common.plain_operations() if self.plain else contextlib.nullcontext(), self.lane.turn():
            self.update(self.step)
        self.step += 1

    def flops(self) -> int:
        """Of the products in loss and backward, counted in torch's own operations: it cannot see into kernels."""
        update = self.update
        update.drop_gradients()  # a graph's own, perhaps

        def work() -> None:
            batch = update.sampler.sample(update.stage.batch_size)
            kind = update.device.type
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=update.autocast, cache_enabled=False):
                loss, _ = update.stage.loss(batch)
            loss.backward(torch.ones_like(loss))

        with common.plain_operations(), self.lane.turn():
            counted = common.count_flops(work)
        update.drop_gradients()
        return counted

    def optimizer_bytes(self) -> int:
        """Parameters and moments read and written, gradients read; once there are moments."""
        total = 0
        for optimizer in self.update.stage.optimizers:
            for parameter, state in optimizer.state.items():
                moments = sum(
                    value.nbytes
                    for name, value in state.items()
                    if isinstance(value, Tensor) and name != "step" and value.shape == parameter.shape
                )
                total += 3 * parameter.nbytes + 2 * moments
        return total


# ---------------------------------------------------------------------------------------------------------- timing


def launch(trainings: Sequence[Training], times: int) -> None:
    """This many updates of each, all launched before any is waited for; the current stream goes on after them."""
    streams = [training.lane.stream for training in trainings if training.lane.device.type == "cuda"]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    for _ in range(times):
        for training in trainings:
            training()
    for stream in streams:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


def time_updates(
    rivals: Sequence[tuple[Sequence[Training], int]], seconds: float, device: torch.device
) -> list[np.ndarray]:
    """Rivals take turns, each a block of this many updates -> per rival, milliseconds of a (joint) update."""
    calls = [partial(launch, trainings, block) for trainings, block in rivals]
    times = common.in_turn_ms(calls, seconds, device, warmup=0)  # they have been trained a little already
    return [values / block for values, (_, block) in zip(times, rivals)]


Make = Callable[..., Training]
"""Training with everything given but seed, graph, compile and plain"""


def measure_updates(
    make: Make, seeds: int, seconds: float, ceilings: Ceilings, device: torch.device, rivals: bool = True
) -> BenchRow:
    """One update of one seed, or one of each of several side by side.

    One seed: on CUDA against the same without a graph (eager), and that without Triton kernels (plain). Several:
    against the first of them alone. The peak is taken before any rival is there; without `rivals` there is none.
    """
    common.release(device)
    together = [make(seed=seed) for seed in range(seeds)]
    launch(together, WARMUP)
    common.synchronize(device)
    update = together[0].update
    extra: dict[str, Any] = {"seeds": seeds, "stage": update.stage.name, "path": update.path}
    gb = common.peak_gb(device)
    cuda = device.type == "cuda"
    if cuda:
        extra["reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
    block = BLOCK if cuda else 1
    timed: dict[str, tuple[Sequence[Training], int]] = {"update": (together, block)}
    if seeds > 1:
        timed["one"] = (together[:1], block)
    elif cuda and rivals:
        options = {name: {"graph": False, "compile": False, "plain": name == "plain"} for name in ("eager", "plain")}
        if scan.kernels(torch.empty(0, device=device)) is None:
            del options["plain"]
        for name, option in options.items():
            rival = make(seed=0, **option)
            try:
                launch([rival], WARMUP)
                common.synchronize(device)
                timed[name] = ([rival], RIVAL_BLOCK)
            except torch.OutOfMemoryError:
                common.note(f"{name}: left out, it does not fit into the memory beside the others")
    times = dict(zip(timed, time_updates(list(timed.values()), seconds, device)))
    medians = {name: float(np.median(values)) for name, values in times.items()}
    timed.clear()
    flops, moved = seeds * together[0].flops(), seeds * together[0].optimizer_bytes()
    floor_ms = 1e3 * (flops / ceilings.flops + moved / ceilings.bytes)
    extra |= {"flops": flops, "optimizer_bytes": moved, "updates": block * len(times["update"])}
    extra |= {f"{name}_ms": value for name, value in medians.items() if name != "update"}
    if seeds > 1:
        extra |= {"times_one": medians["update"] / medians["one"]}
    extra["p95_ms"] = float(np.quantile(times["update"], 0.95))
    name = "update" if seeds == 1 else f"seeds{seeds}"
    return BenchRow(name, update.stage.batch_size, medians["update"], floor_ms, gb, extra)


# --------------------------------------------------------------------------------------------------------- profile

# In this order: the first that is found in a kernel's name. Names without "::" or "<" are Triton's.
CATEGORIES = {
    "optimiser": r"adam|multi_tensor|_foreach_",
    "convolution": r"conv(?!ert)|cudnn",
    "attention": r"attention|attend|flash|fmha|sdpa",
    "scan": r"^\w*scan\w*$",
    "flow": r"^_(flow|silu)_\w*$",
    "matrix products": r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|splitK|^aten::((add|b|baddb)?mm|matmul|linear)$",
    "norm/elementwise": r"layer_?norm|GammaBeta|group_norm|^\w*(seam|gelu)\w*$",
    "copies/casts": r"memcpy|memset|copy|CatArray|index|gather|scatter|Fill|^aten::(cat|clone|to|zero_|empty)",
    "reductions": r"reduce|reduction|^_(sum|total)_k|^aten::(sum|mean|norm|linalg_vector_norm|std|amax|max|all|any)$",
    "elementwise": r"elementwise|softmax|dropout|distribution|tril|triu|^aten::|Backward",
}  # fmt: skip
_NO_KERNEL = re.compile(r"(Context|Stream|Event) (Sync|Wait)|ProfilerStep|Optimizer\.")
_FOUND = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in CATEGORIES.items()]


def category(name: str) -> str:
    """What a kernel, or an operation on a CPU, does, as far as its name tells."""
    for found, pattern in _FOUND:
        if pattern.search(name):
            return "norm/elementwise" if found == "elementwise" else found
    return "other"


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, -np.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def profile_updates(
    training: Training, updates: int, device: torch.device, trace: Path | None = None
) -> dict[str, Any]:
    """Kernels (on a CPU: operations, without those inside them) of a few updates, by name and by category; `trace`:
    where to write when each of them ran, and on which stream."""
    cuda = device.type == "cuda"
    # CUDA graphs and a second profile do not go together once the first has been torn down.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        launch([training], updates)
        common.synchronize(device)
    if trace is not None:
        with atomic_file(trace) as file:
            profiler.export_chrome_trace(str(file))
        common.note(f"trace: {trace}")
    spent: dict[str, list[float]] = {}
    intervals: list[tuple[float, float]] = []
    if cuda:
        for event in profiler.events() or ():
            if event.device_type == DeviceType.CUDA and not _NO_KERNEL.match(event.name):
                spent.setdefault(event.name, []).append(event.time_range.elapsed_us())
                intervals.append((event.time_range.start, event.time_range.end))
        counts = {name: len(values) for name, values in spent.items()}
    else:
        averages = profiler.key_averages()
        spent = {average.key: [average.self_cpu_time_total] for average in averages}
        counts = {average.key: average.count for average in averages}
    total = sum(map(sum, spent.values()))
    lines = [
        {
            "name": name,
            "category": category(name),
            "count": counts[name] / updates,
            "us": sum(values) / updates,
            "share": sum(values) / total if total else 0.0,
        }
        for name, values in spent.items()
    ]
    lines.sort(key=lambda line: -line["us"])  # type: ignore[operator]
    groups: dict[str, dict[str, float]] = {}
    for line in lines:
        group = groups.setdefault(str(line["category"]), {"count": 0.0, "us": 0.0, "share": 0.0})
        for key in group:
            group[key] += float(line[key])  # type: ignore[arg-type]
    found: dict[str, Any] = {"updates": updates, "us": total / updates, "count": sum(counts.values()) / updates}
    if cuda:
        found["busy_us"] = covered(intervals) / updates
    return found | {"categories": dict(sorted(groups.items(), key=lambda g: -g[1]["us"])), "top": lines[:KEPT]}


def show_profile(found: dict[str, Any], batch: int, top: int) -> None:
    console = common.wide_console()
    for title, key in (("by category", "category"), (f"the {top} that take longest", "name")):
        table = Table(title=f"batch {batch}, {title}", title_justify="left", box=None, pad_edge=False)
        table.add_column(key, no_wrap=True, overflow="ellipsis", max_width=90)
        for heading in ("count", "us/update", "share %"):
            table.add_column(heading, justify="right")
        if key == "category":
            lines = [{"category": name, **group} for name, group in found["categories"].items()]
        else:
            lines = found["top"][:top]
        for line in lines:
            numbers = (line["count"], line["us"], 100.0 * line["share"])
            table.add_row(str(line[key]).replace("[", "\\["), *(common.figures(number) for number in numbers))
        console.print(table)


# --------------------------------------------------------------------------------------------------------- command


def updates(
    *,
    agent: str = "qhyer",
    dataset: str = "cube-single-play",
    preset: str = "paper",
    override: tuple[str, ...] = (),
    data: str | None = None,
    episodes: int = 100,
    batch: tuple[int, ...] = (256, 1024),
    seeds: tuple[int, ...] = (1,),
    precision: Precision | None = None,
    device: str = "auto",
    threads: int = 0,
    seconds: float = 5.0,
    kernels: bool = True,
    profile: bool = False,
    top: int = 25,
    trace: Path | None = None,
    out: Path | None = None,
) -> int:
    """Measure one gradient update as the trainer runs it, on made-up data; no dataset is needed.

    Args:
        agent: the agent's name
        dataset: the dataset whose sizes and preset are used
        preset: the agent's preset
        override: fields of the agent that are other than the preset's, as FIELD=VALUE; the rows' names have them, too
        data: a dataset's name, or an npz, to read instead of making data up
        episodes: made-up episodes, of the dataset's length
        batch: batch sizes
        seeds: how many seeds are trained side by side, e.g. 1 4
        precision: fp32, tf32 or bf16; when not given, bf16 on CUDA and fp32 on a CPU
        device: cpu, cuda, or auto
        threads: threads of torch; 0 chooses as the trainer does
        seconds: how long to measure each row
        kernels: on CUDA, count them, by a profiler once all times are taken
        profile: also list the kernels (on a CPU the operations) that take longest
        top: how many of them to print
        trace: a file to write, which chrome://tracing and ui.perfetto.dev show: when each kernel of a few updates
            ran, and on which stream; of several batch sizes a file each, named with it
        out: a JSON file to write
    """
    common.check_out(out, "train")
    if trace is not None and (why := "it is a folder" if trace.is_dir() else refusal(trace.parent)):
        raise UserError(f"--trace {trace} cannot be written: {why}")
    device = runs.resolve_device(device)
    place = torch.device(device)
    common.check_amounts(seconds, batch=batch, seeds=seeds, episodes=(episodes,), top=(top,))
    require(threads >= 0, "--threads cannot be negative")
    precision = precision or ("bf16" if place.type == "cuda" else "fp32")
    if data is None:
        registered = registry.get(dataset)
        name, loaded = registered.name, common.made_up_episodes(registered, episodes, place)
    else:
        loaded, _ = registry.load(data, device)
        name = loaded.name
    config, _ = presets.resolve(agent, preset, name)
    config = overridden(config, override, agent)
    parameters = sum(p.numel() for p in runs.build_agent(agent, config, loaded.spec(), 0).parameters())
    threads = threads or (1 if parameters < SMALL else torch.get_num_threads())

    def maker(size: int) -> Make:
        sized = replace(config, {"batch_size": size})
        return lambda **options: Training(agent, sized, loaded, precision, **options)

    rows: list[BenchRow] = []
    profiles: dict[str, Any] = {}
    with torch_settings(threads, precision, device):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        ceilings = Ceilings.measure(place, dtype, min(1.0, seconds))
        for size in batch:
            for count in seeds:
                with common.measuring(f"an update of {size}" + (f", {count} seeds" if count > 1 else "")):
                    row = measure_updates(maker(size), count, seconds, ceilings, place)
                rows.append(dataclasses.replace(row, name=" ".join([row.name, *override])))
        # Last: what watches kernels slows those that follow.
        if profile or trace is not None or (kernels and place.type == "cuda"):
            for size in batch:
                common.release(place)
                training = maker(size)(seed=0)
                launch([training], WARMUP)
                own = trace if trace is None or len(batch) == 1 else trace.with_stem(f"{trace.stem}-{size}")
                profiles[str(size)] = profile_updates(training, PROFILED, place, own)
                del training
        common.release(place)
        facts = {
            "agent": agent,
            "dataset": name,
            "preset": preset,
            "override": list(override),
            "precision": precision,
            "data": "made up" if data is None else str(data),
            "parameters": parameters,
            **common.machine(device),
            **ceilings.facts(),
        }
    for row in rows:
        found = profiles.get(str(row.batch))
        if found is not None and found["count"] and place.type == "cuda":
            row.extra["kernels"] = row.extra["seeds"] * found["count"]
            if row.extra["seeds"] == 1:
                row.extra["busy_ms"] = 1e-3 * found["busy_us"]
    columns = {
        "p95_ms": "p95",
        "eager_ms": "eager",
        "plain_ms": "plain",
        "one_ms": "one seed",
        "times_one": "x one",
        "kernels": "kernels",
        "reserved_gb": "held GB",
    }
    common.show(
        f"one update, {agent} {preset}, {name}, {precision}; {facts['hardware']}",
        rows,
        {key: heading for key, heading in columns.items() if any(key in row.extra for row in rows)},
    )
    common.note(
        f"floor: products at {facts['matrix_tflops']:.3g} TFLOP/s, then the optimisers' bytes at "
        f"{facts['copy_gb_per_s']:.3g} GB/s, both measured here"
    )
    for path in sorted({row.extra["path"] for row in rows}):
        common.note(f"updates run: {path}")
    if any("eager_ms" in row.extra for row in rows):
        common.note("eager: without a graph; plain: and without Triton kernels")
    if any("times_one" in row.extra for row in rows):
        common.note("seedsN: one update of each of N seeds side by side; one seed: the first of them alone")
    if place.type == "cuda" and profiles and not any("kernels" in row.extra for row in rows):
        common.note("the profiler saw no kernels, so they are not counted")
    if profile:
        for key, found in profiles.items():
            show_profile(found, int(key), top)
            if "busy_us" in found:
                common.note(
                    f"kernels take {1e-3 * found['us']:.3g} ms an update, {1e-3 * found['busy_us']:.3g} ms where those "
                    "that run side by side count once"
                )
    common.write(out, "train", facts | ({"profiles": profiles} if profile else {}), rows)
    return 0
