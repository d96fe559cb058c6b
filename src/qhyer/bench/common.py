"""What benchmarks share: timing, the ceilings of the machine, counting, and reporting.

Rivals take turns within one run, so that a machine whose speed drifts treats them alike; times are medians over
single calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from qhyer import envs, runs
from qhyer.data import registry
from qhyer.data.episodes import DataSpec, Episodes
from qhyer.errors import UserError, require
from qhyer.storage import refusal, write_json

WARMUP = 3
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class BenchRow:
    """One measurement."""

    name: str
    batch: int
    ms: float
    """median of one call, in milliseconds"""
    floor_ms: float | None = None
    """what the unavoidable part of the work takes, from the same run"""
    gb: float | None = None
    """CUDA: peak of allocated memory; CPU: peak resident memory of the whole process"""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Times the floor."""
        return self.ms / self.floor_ms if self.floor_ms else None


# ---------------------------------------------------------------------------------------------------------- timing


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once_ms(function: Callable[[], object], device: torch.device) -> float:
    """Time of one call; on CUDA by the device's own clock, which leaves the host's waiting out."""
    if device.type != "cuda":
        begun = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - begun)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def _take_turns(
    calls: Sequence[Callable[[], object]],
    seconds: float,
    device: torch.device,
    least: int,
    warmup: int,
    clock: Callable[[Callable[[], object], torch.device], float],
) -> list[np.ndarray]:
    """Calls them in turn for about this long -> per call, its times in milliseconds by this clock."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(warmup):
        for call in calls:
            call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < least:
        for call, record in zip(calls, times):
            synchronize(device)
            record.append(clock(call, device))
    return [np.asarray(record) for record in times]


def interleave(
    calls: Sequence[Callable[[], object]], seconds: float, device: torch.device, least: int = LEAST_ROUNDS
) -> list[np.ndarray]:
    """In turn for about this long -> per call, its times in milliseconds, from call to finished work."""

    def wall_ms(call: Callable[[], object], device: torch.device) -> float:
        begun = time.perf_counter()
        call()
        synchronize(device)
        return 1e3 * (time.perf_counter() - begun)

    return _take_turns(calls, seconds, device, least, WARMUP, wall_ms)


def in_turn_ms(
    calls: Sequence[Callable[[], object]],
    seconds: float,
    device: torch.device,
    least: int = LEAST_ROUNDS,
    warmup: int = WARMUP,
) -> list[np.ndarray]:
    """`interleave` by the device's own clock."""
    return _take_turns(calls, seconds, device, least, warmup, once_ms)


def time_ms(function: Callable[[], object], device: torch.device, seconds: float, least: int = LEAST_ROUNDS) -> float:
    """Median time of a call alone, by the device's own clock."""
    return float(np.median(in_turn_ms([function], seconds, device, least)[0]))


def peak_gb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def release(device: torch.device) -> None:
    """Gives back what nobody holds any more, graphs and their memory included, so that a peak is the next one's own.
    cuBLAS's workspaces, too: 32 MB for every stream that has multiplied, those of runs that are gone among them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    reset_peak(device)


@contextlib.contextmanager
def kernels(use: str) -> Iterator[None]:
    """What QHYER_TRITON says, within it."""
    before = os.environ.get("QHYER_TRITON")
    os.environ["QHYER_TRITON"] = use
    try:
        yield
    finally:
        if before is None:
            del os.environ["QHYER_TRITON"]
        else:
            os.environ["QHYER_TRITON"] = before


def plain_operations() -> contextlib.AbstractContextManager[None]:
    """Torch's own operations, no kernels of ours: what can be counted, and what the kernels are compared with."""
    return kernels("0")


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    if count < 1:
        raise UserError(f"--threads must be at least 1, not {count}")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recorded(function: Callable[[], object], device: torch.device, times: int = 1) -> Callable[[], object]:
    """The same work as a CUDA graph, so that its kernels are timed and not their launching; itself where there is none.
    Even a graph takes some microseconds to launch: what is short is recorded several times, one after the other.

    What the function returns is kept by nobody: it computes into the graph's own memory.
    """
    if device.type != "cuda":
        return function
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):  # libraries set themselves up, kernels are compiled
        for _ in range(WARMUP):
            function()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            function()
    return graph.replay


# -------------------------------------------------------------------------------------------------------- ceilings


def matrix_rate(device: torch.device, dtype: torch.dtype = torch.float32, seconds: float = 1.0) -> float:
    """Floating-point operations a second of a large matrix product, under torch's present settings (TF32).

    On random data: products of zeros draw less power, and a GPU that is not held back by its power runs faster.
    """
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    return 2.0 * size**3 / (1e-3 * time_ms(lambda: torch.mm(a, b, out=out), device, seconds))


def copy_rate(device: torch.device, seconds: float = 1.0) -> float:
    """Bytes a second, read and written, of a copy far larger than any cache."""
    source = torch.ones((1024 if device.type == "cuda" else 128) * 2**18, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / (1e-3 * time_ms(lambda: target.copy_(source), device, seconds))


def exp2_rate(device: torch.device, seconds: float = 1.0) -> float:
    """Exponentials a second: on CUDA in registers where Triton runs, elsewhere of a tensor that stays in the cache."""
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from qhyer.bench import exp_triton

            return exp_triton.COUNT / (1e-3 * time_ms(exp_triton.powers(device), device, seconds))
    source = torch.rand(2**20 if device.type == "cuda" else 2**14, device=device)
    target = torch.empty_like(source)

    def work() -> None:  # many at once: a single one is over before it is timed
        for _ in range(16):
            torch.exp2(source, out=target)

    return 16 * source.numel() / (1e-3 * time_ms(work, device, seconds))


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do, measured."""

    flops: float
    """floating-point operations a second"""
    bytes: float
    """bytes a second"""

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype = torch.float32, seconds: float = 1.0) -> Ceilings:
        return cls(matrix_rate(device, dtype, seconds), copy_rate(device, seconds))

    def floor_ms(self, flops: float, bytes: float) -> float:
        """The least time of work with this many operations on this many bytes: the two may overlap."""
        return 1e3 * max(flops / self.flops, bytes / self.bytes)

    def facts(self) -> dict[str, float]:
        return {"matrix_tflops": self.flops / 1e12, "copy_gb_per_s": self.bytes / 1e9}


# The attention that torch takes on a CPU has no entry in torch's own table.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


class _NoModules:
    """Instead of torch's record of which module is running: only the total is asked for, and its hooks refuse inputs
    that are parts of a parameter taken without a gradient."""

    parents = ("Global",)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def count_flops(function: Callable[[], object]) -> int:
    """Floating-point operations of a call: matrix products, convolutions and attention, backward passes included.

    What is not a product (norms, scans, activations) counts nothing, and neither does a kernel that torch cannot see
    into; causal attention counts in full.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter:
        function()
    return counter.get_total_flops()


def parameter_bytes(module: nn.Module, function: Callable[[], object]) -> int:
    """Bytes of the module's parameters that a call reads, each once."""
    sizes = {p.data_ptr(): p.nbytes for p in module.parameters()}
    read: set[int] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs or {})):
                if isinstance(leaf, Tensor) and leaf.data_ptr() in sizes:
                    read.add(leaf.data_ptr())
            return func(*args, **(kwargs or {}))

    with Watch():
        function()
    return sum(sizes[pointer] for pointer in read)


def made_up_spec(dataset: registry.Dataset) -> DataSpec:
    """The sizes of a dataset, from its environment, with no data at hand."""
    env = envs.make(dataset.environment)
    dim, actions = env.observation_space.shape[0], env.action_space.shape[0]
    env.close()
    return DataSpec(dim, actions, dataset.goal_indices, (0.0,) * dim, (1.0,) * dim)


def made_up_episodes(dataset: registry.Dataset, count: int, device: torch.device) -> Episodes:
    """Noise in the sizes of a dataset, in episodes of its length: an update takes as long as on the data."""
    spec, rows = made_up_spec(dataset), count * dataset.rows
    generator = torch.Generator().manual_seed(0)
    observations = torch.randn(rows, spec.observation_dim, generator=generator)
    actions = 2.0 * torch.rand(rows, spec.action_dim, generator=generator) - 1.0
    ends = torch.arange(1, count + 1) * dataset.rows - 1
    return Episodes(observations, actions, ends, dataset.goal_indices, dataset.name).to(device)


# ------------------------------------------------------------------------------------------------------- reporting


def machine(device: str) -> dict[str, Any]:
    return {
        "device": device,
        "hardware": runs.hardware(device, torch.get_num_threads()),
        "threads": torch.get_num_threads(),
        "versions": runs.versions(),
    }


def figures(value: float | None) -> str:
    """Three significant digits; nothing for nothing."""
    if value is None:
        return ""
    if 0 < value < 5e-4:
        return f"{value:.1e}"
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{max(0, min(digits, 3))}f}"


def show(title: str, rows: Sequence[BenchRow], extra: dict[str, str] | None = None, time: str = "median ms") -> None:
    """A table: name, batch, time, floor, ratio and memory, and the named entries of `extra` with their headings."""
    extra = extra or {}
    table = Table(box=None, pad_edge=False)
    table.add_column("bench")
    for heading in ("batch", time, "floor ms", "x floor", *extra.values(), "peak GB"):
        table.add_column(heading, justify="right")
    for row in rows:
        values = [row.extra.get(key) for key in extra]
        table.add_row(
            row.name,
            str(row.batch),
            *(figures(value) for value in (row.ms, row.floor_ms, row.ratio)),
            *(value if isinstance(value, str) else figures(value) for value in values),
            figures(row.gb),
        )
    note(title)  # a table's own title is broken where the table ends
    wide_console().print(table)


def wide_console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width
        console.width = max(console.width, 160)
    return console


@contextlib.contextmanager
def measuring(what: str) -> Iterator[None]:
    """Says so on a terminal meanwhile: what is slow is called as often as what is quick, and may take minutes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"measuring {what}"):
        yield


def note(text: str) -> None:
    Console(highlight=False).print(text, markup=False, soft_wrap=True)


_into: ContextVar[Path | None] = ContextVar("_into", default=None)


@contextlib.contextmanager
def writing_into(path: Path) -> Iterator[None]:
    """Within it, the rows of every benchmark go to this one file, as `add_row` puts them there."""
    token = _into.set(path)
    try:
        yield
    finally:
        _into.reset(token)


def check_out(out: Path | None, name: str) -> None:
    """An `--out` that cannot be written, or holds what another benchmark measured, is found before any work."""
    if out is None:
        return
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name the JSON file to write")
    if why := refusal(out.parent):
        raise UserError(f"--out {out} cannot be written: {why}")
    if not out.exists():
        return
    try:
        held = json.loads(out.read_text())
    except ValueError:
        held = None
    if name == "all":
        read_rows(out)
    elif not isinstance(held, dict) or held.get("bench") != name:
        raise UserError(
            f"{out} holds something else than `qhyer bench {name}` wrote; name another file, "
            "or let `qhyer bench all --out FILE` put everything into one"
        )


def check_amounts(seconds: float, **amounts: Sequence[int]) -> None:
    """How long, and how many of what (by the option's name): found before any work, too."""
    require(math.isfinite(seconds) and seconds >= 0, f"--seconds must be a number of seconds, not {seconds}")
    for name, values in amounts.items():
        require(len(values) >= 1, f"--{name} needs at least one number")
        require(min(values) >= 1, f"--{name} must be at least 1, not {min(values)}")


def write(out: Path | None, name: str, facts: dict[str, Any], rows: Sequence[BenchRow]) -> None:
    """JSON: the facts of the machine and one object per row (name, batch, ms, floor_ms, gb, extra)."""
    if (path := _into.get()) is not None:
        for row in rows:
            add_row(path, row, {"bench": name, **facts})
    if out is None:
        return
    write_json(out, {"bench": name, **facts, "rows": [dataclasses.asdict(row) for row in rows]})
    note(f"written: {out}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `add_row` made; none if there is no file yet."""
    if not Path(path).exists():
        return []
    try:
        rows = json.loads(Path(path).read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and {"name", "batch"} <= set(row) for row in rows):
        raise UserError(f"{path} is not a list of benchmark rows; give another file, or remove this one")
    return rows


def add_row(path: Path, row: BenchRow, facts: dict[str, Any] | None = None) -> None:
    """Puts a row, with the facts of its machine and settings, into a plain list of rows.

    Names are unique for each batch: a row takes the place of one measured before. Also for what is measured elsewhere,
    a training followed by an evaluation for example.
    """
    rows = read_rows(path)
    new = {**dataclasses.asdict(row), "facts": facts or {}}
    at = [i for i, old in enumerate(rows) if (old["name"], old["batch"]) == (row.name, row.batch)]
    if at:
        rows[at[0]] = new
    else:
        rows.append(new)
    write_json(path, rows)
