"""`qhyer bench traffic`: what the kernels between matrix products read and write in one update, counted and not timed.

Every Triton kernel of a loss and its gradient is replaced by a tally of its arguments: each tensor that a launch is
given is read or written at least once. Two small batches tell what grows with the batch; parameters and the partial
sums of programs, which do not, are left out. So this is a least, which no layout of a kernel changes; only other
kernels would, that do more of the work between two passes over memory. It needs Triton, whose interpreter takes the
kernels apart, and no GPU: what products, scan and exponentials take, `bench train` and `bench scan` measure.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from qhyer import presets
from qhyer.bench import common
from qhyer.bench.common import BenchRow
from qhyer.bench.train import Training
from qhyer.config import replace
from qhyer.data import registry
from qhyer.errors import UserError, require
from qhyer.train import torch_settings

WINDOWS = (8, 16)  # of the two batches that are counted
SUMS = ("partial_ptr", "dparameter_ptr", "dbias_ptr")  # of programs, as many as the device has use for
OF_ONE_BLOCK = ("ctx_ptr", "dctx_ptr")  # a coupling's launch is given these of all blocks, and uses its own
GROUPS = {
    "seam": "seams and GELU", "gelu": "seams and GELU", "attention": "attention", "conv": "convolution", "scan": "scan",
    "flow": "flow and encoder", "normal": "flow and encoder", "silu": "flow and encoder", "sum": "flow and encoder",
    "tokens": "tokens, heads, losses", "heads": "tokens, heads, losses", "actor": "tokens, heads, losses",
    "scale": "tokens, heads, losses",
}  # fmt: skip
"""By how the name of a kernel begins; others are listed by their own"""
LEFT_OUT = ("_total_kernel", "_sums_kernel")  # they read partial sums


@contextlib.contextmanager
def _tallied() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """-> bytes and launches by the name of the kernel; no kernel computes anything meanwhile."""
    if os.environ.setdefault("TRITON_INTERPRET", "1") != "1":
        raise UserError("TRITON_INTERPRET=0 is set: unset it, kernels are counted by Triton's interpreter")
    try:
        from triton.runtime import interpreter
    except ImportError as error:
        raise UserError("kernels are counted by Triton's interpreter: pip install triton") from error
    moved: Counter[str] = Counter()
    launches: Counter[str] = Counter()

    def tally(self: Any, *arguments: Any, **others: Any) -> None:
        given = dict(zip(self.arg_names, arguments)) | others
        found: dict[tuple[int, int], float] = {}  # a tensor that stands for one that is not there counts once
        for name, value in given.items():
            if isinstance(value, Tensor) and name not in SUMS:
                share = given["BLOCKS"] if name in OF_ONE_BLOCK else 1
                found[value.data_ptr(), value.numel()] = value.nbytes / share
        moved[self.fn.__name__] += int(sum(found.values()))
        launches[self.fn.__name__] += 1

    execute = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = tally
    try:
        with common.kernels("interpret"):
            yield moved, launches
    finally:
        interpreter.GridExecutor.__call__ = execute


def count(training: Training) -> tuple[Counter[str], Counter[str]]:
    """Bytes and launches of one loss and its gradient, by the name of the kernel."""
    update = training.update
    batch = update.sampler.sample(update.stage.batch_size)
    with _tallied() as (moved, launches):
        with torch.autocast(update.device.type, dtype=torch.bfloat16, enabled=update.autocast, cache_enabled=False):
            loss, _ = update.stage.loss(batch)
        loss.backward(torch.ones_like(loss))
    update.drop_gradients()
    return moved, launches


def traffic(
    *,
    agent: str = "qhyer",
    dataset: str = "cube-single-play",
    preset: str = "paper",
    batch: tuple[int, ...] = (256, 1024),
    copy_rate: float | None = None,
    out: Path | None = None,
) -> int:
    """Count what the kernels between matrix products read and write in one update, and what that takes at least.

    Args:
        agent: the agent's name
        dataset: the dataset whose sizes and preset are used
        preset: the agent's preset
        batch: batch sizes to count for
        copy_rate: GB/s of the machine the update runs on (`bench train` prints it); measured here when not given
        out: a JSON file to write
    """
    common.check_out(out, "traffic")
    require(all(size >= 1 for size in batch), "--batch must be at least 1")
    require(copy_rate is None or copy_rate > 0, "--copy-rate must be positive, in GB/s")
    place = torch.device("cpu")
    registered = registry.get(dataset)
    episodes = common.made_up_episodes(registered, 20, place)
    config, _ = presets.resolve(agent, preset, registered.name)
    counted = []
    with torch_settings(1, "bf16", "cpu"):
        for windows in WINDOWS:
            counted.append(count(Training(agent, replace(config, {"batch_size": windows}), episodes, "bf16")))
        rate = common.copy_rate(place) if copy_rate is None else 1e9 * copy_rate
    (small, _), (large, launches) = counted
    require(bool(large), f"no kernel of ours runs in an update of {agent}: there is nothing to count")
    each = {name: (large[name] - small[name]) / (WINDOWS[1] - WINDOWS[0]) for name in large}  # bytes of a window
    by_group: dict[str, list[str]] = {}
    for name in each:
        if name not in LEFT_OUT:
            by_group.setdefault(GROUPS.get(name.split("_")[1], name), []).append(name)

    table = Table(
        title=f"bytes of one update, {agent} {preset}, {registered.name}, bf16", title_justify="left", box=None
    )
    table.add_column("kernels")
    for heading in ("launches", "MB a window", *(f"ms at batch {size}" for size in batch)):
        table.add_column(heading, justify="right")
    rows: list[BenchRow] = []
    lines = sorted(((sum(each[n] for n in names), group, names) for group, names in by_group.items()), reverse=True)
    total = sum(moved for moved, _, _ in lines)
    everything = [name for _, _, names in lines for name in names]
    for moved, group, kernels in (*lines, (total, "all", everything)):
        times = [1e3 * size * moved / rate for size in batch]
        table.add_row(group, str(sum(launches[name] for name in kernels)), *map(common.figures, (moved / 1e6, *times)))
        found = {"window_bytes": moved, "kernels": {name: each[name] for name in kernels}} if group != "all" else {}
        rows += [BenchRow(group, size, time, extra=found) for size, time in zip(batch, times)]
    common.wide_console().print(table)
    whose = "measured here; --copy-rate names another machine's" if copy_rate is None else "as asked"
    common.note(
        f"each argument of a launch once, at {rate / 1e9:.4g} GB/s ({whose}); without parameters, partial sums and "
        "what matrix products move"
    )
    facts = {"agent": agent, "preset": preset, "dataset": registered.name, "counted_at": WINDOWS}
    common.write(out, "traffic", facts | {"copy_gb_per_s": rate / 1e9} | common.machine("cpu"), rows)
    return 0
