"""`qhyer bench scan`: the selective scan forward and backward, against its exponentials and its bytes.

The floor: three exponentials for each step, channel and state (one forward; backward needs the states and their
adjoints, an exponential each, unless they are kept in memory, which takes longer) at the measured rate of exponentials,
or the bytes of inputs, outputs and gradients at the measured rate of a large copy, whichever takes longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer import runs
from qhyer.bench import common
from qhyer.bench.common import BenchRow
from qhyer.nn.scan import kernels, selective_scan, selective_scan_ref

PASSES = 3
TIMES = 10  # calls in one graph, as an update is one graph with several scans
Scan = Callable[..., Tensor]
"""the inputs of a `Problem`, in their order -> y"""


@dataclass(frozen=True)
class Problem:
    """Inputs in their order, all with a gradient, and the gradient of y. A, D and bias are always in full precision."""

    inputs: tuple[Tensor, ...]
    names: tuple[str, ...]
    dy: Tensor
    states: int

    @classmethod
    def make(
        cls, batch: int, length: int, channels: int, states: int, dtype: torch.dtype, device: torch.device, fused: bool
    ) -> Problem:
        """Step sizes and decays as Mamba starts with them; `fused` adds the bias of the steps and the gate."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        step = torch.exp(-7.0 + 4.5 * torch.rand(channels, generator=generator)).to(device)  # 0.001 to 0.1
        u = normal(batch, length, channels)
        spread = 0.5 * normal(batch, length, channels)
        delta = spread if fused else (step * spread.exp()).to(dtype)
        A = -torch.arange(1, states + 1, dtype=torch.float32, device=device).repeat(channels, 1)
        inputs = [u, delta, A, normal(batch, length, states), normal(batch, length, states)]
        inputs.append(torch.ones(channels, device=device))
        names = ["u", "delta", "A", "B", "C", "D"]
        if fused:
            inputs += [step + torch.log(-torch.expm1(-step)), normal(batch, length, channels)]
            names += ["bias", "z"]
        dy = normal(batch, length, channels)
        return cls(tuple(t.requires_grad_() for t in inputs), tuple(names), dy, states)

    def of(self, sequences: int, dtype: torch.dtype | None = None) -> Problem:
        """The first few sequences, in another precision if one is given (float64 then is that of all inputs)."""

        def cut(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()[:sequences] if tensor.dim() == 3 else tensor.detach()
            wide = dtype == torch.float64 or tensor.dim() == 3
            return tensor.to(dtype) if dtype is not None and wide else tensor

        return Problem(tuple(cut(t).requires_grad_() for t in self.inputs), self.names, cut(self.dy), self.states)

    def gradients(self, scan: Scan) -> tuple[Tensor, ...]:
        """y and the gradient of every input."""
        y = scan(*self.inputs)
        return y.detach(), *torch.autograd.grad(y, self.inputs, self.dy)

    @property
    def exponentials(self) -> int:
        return PASSES * self.inputs[0].numel() * self.states

    @property
    def bytes(self) -> int:
        """Inputs read by both passes, y and gradients written, the gradient of y read."""
        return 3 * sum(t.nbytes for t in self.inputs) + 2 * self.dy.nbytes


def fast(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """As the model has it on this device when it trains: nobody asks for the last state."""
    return selective_scan(u, delta, A, B, C, D, ends=False)[0]


def plain(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    with common.plain_operations():
        return selective_scan(u, delta, A, B, C, D)[0]


def loop(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    return selective_scan_ref(u, delta, A, B, C, D)[0]


def fused(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, z: Tensor
) -> Tensor:  # fmt: skip
    module = kernels(u)
    assert module is not None
    return module.gated_scan(u, delta, bias, A, B, C, D, z, None, False)[0]


def which(problem: Problem) -> str:
    """The kernels that serve these inputs: none, Triton's, or those written by hand."""
    module = kernels(problem.dy)
    if module is None:
        return "none"
    u, delta, A, B, C, D, *more = (tensor.detach() for tensor in problem.inputs)
    bias, z = more or (None, None)
    return "by hand" if module.by_hand(u, delta, bias, A, B, C, D, z, None) else "triton"


def around(scan: Scan) -> Scan:
    """What the fused kernel computes, around a scan: softplus of the steps before it, the gate after it."""

    def gated(
        u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, z: Tensor
    ) -> Tensor:  # fmt: skip
        wide = delta if delta.dtype == torch.float64 else delta.float()
        y = scan(u, F.softplus(wide + bias), A, B, C, D)
        return y.to(u.dtype) * F.silu(z)

    return gated


def difference(scan: Scan, reference: Scan, problem: Problem) -> dict[str, float]:
    """Of y and of each gradient: the largest difference from the reference in float64, over its largest value.

    On the inputs as they are in the problem's precision, so that their rounding does not count.
    """
    ours = problem.gradients(scan)
    exact = problem.of(problem.dy.shape[0], torch.float64).gradients(reference)
    return {
        name: float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30))
        for name, a, b in zip(("y", *(f"d{name}" for name in problem.names)), ours, exact)
    }


def _room(device: torch.device) -> float:
    """Bytes that a reference may take."""
    return torch.cuda.mem_get_info(device)[0] / 2 if device.type == "cuda" else 2e9


def measure_scan(
    name: str,
    problem: Problem,
    ours: Scan,
    rivals: dict[str, Scan],
    seconds: float,
    rate: float,
    copy: float,
    device: torch.device,
) -> BenchRow:
    """Rivals that fit take turns with it. One of them, `loop`, is also the reference."""
    batch, length, channels = problem.dy.shape
    cells = channels * length * problem.states  # of one sequence
    extra: dict[str, Any] = {"length": length, "channels": channels, "states": problem.states}
    extra |= {"dtype": str(problem.dy.dtype).removeprefix("torch."), "kernels": which(problem)}
    sequences = max(1, min(batch, int(_room(device) // (8 * 8 * cells))))  # the loop keeps about eight of these
    for key, dtype in (("difference", None), ("difference_fp32", torch.float32)):
        found = difference(ours, rivals["loop"], problem.of(sequences, dtype))
        extra |= {key: max(found.values()), f"{key}s": found}
    extra["compared"] = sequences
    common.release(device)
    calls = {"scan": common.recorded(partial(problem.gradients, ours), device, TIMES)}
    calls["scan"]()
    gb = common.peak_gb(device)
    for key, candidate in rivals.items():
        if 8 * 4 * cells * batch > _room(device):
            common.note(f"{key}: left out at length {length}, it does not fit")
        else:
            calls[key] = common.recorded(partial(problem.gradients, candidate), device)
    times = dict(zip(calls, map(np.median, common.in_turn_ms(list(calls.values()), seconds, device))))
    ms = float(times["scan"]) / (TIMES if device.type == "cuda" else 1)
    extra |= {f"{key}_ms": float(value) for key, value in times.items() if key != "scan"}
    exponentials_ms, bytes_ms = 1e3 * problem.exponentials / rate, 1e3 * problem.bytes / copy
    extra |= {"exponentials_ms": exponentials_ms, "bytes_ms": bytes_ms, "us_per_step": 1e3 * ms / length}
    return BenchRow(name, batch, ms, max(exponentials_ms, bytes_ms), gb, extra)


def scan(
    *,
    batch: int | None = None,
    length: int = 60,
    lengths: tuple[int, ...] = (),
    channels: int | None = None,
    states: int = 16,
    dtype: Literal["fp32", "bf16"] | None = None,
    device: str = "auto",
    threads: int = 1,
    seconds: float = 5.0,
    out: Path | None = None,
) -> int:
    """Measure the selective scan, forward and backward, against plain PyTorch and the reference loop.

    Args:
        batch: sequences; when not given, 256 on CUDA and 8 on a CPU
        length: steps of a sequence
        lengths: instead of one length: several, to see that the time is linear
        channels: when not given, 512 on CUDA and 64 on a CPU
        states: states of a channel
        dtype: of the inputs; when not given, bf16 on CUDA, as in training, and fp32 on a CPU
        device: cpu, cuda, or auto
        threads: threads of torch
        seconds: how long to measure each row
        out: a JSON file to write
    """
    common.check_out(out, "scan")
    device = runs.resolve_device(device)
    place = torch.device(device)
    cuda = place.type == "cuda"
    batch = (256 if cuda else 8) if batch is None else batch
    channels = (512 if cuda else 64) if channels is None else channels
    lengths = lengths or (length,)
    common.check_amounts(seconds, batch=(batch,), length=lengths, channels=(channels,), states=(states,))
    kind = torch.bfloat16 if (dtype or ("bf16" if cuda else "fp32")) == "bf16" else torch.float32
    rows: list[BenchRow] = []
    with common.using_threads(threads):
        rate, copy = common.exp2_rate(place, min(1.0, seconds)), common.copy_rate(place, min(1.0, seconds))
        triton = kernels(torch.empty(0, device=place)) is not None
        for steps in lengths:
            sizes = (batch, steps, channels, states, kind, place)
            how = (seconds, rate, copy, place)
            rivals = {"plain": plain, "loop": loop} if triton else {"loop": loop}  # without kernels, plain is the scan
            rows.append(measure_scan("scan", Problem.make(*sizes, False), fast, rivals, *how))
            if triton:
                rivals = {key: around(rival) for key, rival in rivals.items()}
                rows.append(measure_scan("scan_fused", Problem.make(*sizes, True), fused, rivals, *how))
        common.release(place)
        facts = {
            **common.machine(device),
            "exp2_per_s": rate,
            "copy_gb_per_s": copy / 1e9,
        }
    columns = {
        "kernels": "kernels",
        "length": "length",
        "us_per_step": "us/step",
        "plain_ms": "plain",
        "loop_ms": "loop",
        "difference_fp32": "fp32 diff.",
        "difference": "diff.",
    }
    common.show(
        f"selective scan, forward and backward, {channels} channels, {states} states, {rows[0].extra['dtype']}; "
        f"{facts['hardware']}",
        rows,
        {key: heading for key, heading in columns.items() if any(key in row.extra for row in rows)},
    )
    common.note(
        f"floor: {PASSES} exponentials a state at {rate / 1e9:.4g} a nanosecond, or bytes at {copy / 1e9:.3g} GB/s, "
        "both measured here"
    )
    common.note("diff.: largest difference of y and gradients from the loop in float64, over the largest value of each")
    if triton:
        common.note("scan_fused: with the steps' bias and softplus, skip and gate in the kernel, as the model runs it")
    common.write(out, "scan", facts, rows)
    return 0
