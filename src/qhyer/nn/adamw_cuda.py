"""Clipping and AdamW in one pass each over gradients and parameters, however many tensors they are (`adamw.cu`).

torch's fused AdamW is a launch for every few dozen tensors and moves half the bytes a second that a copy does; a
clipped norm takes two more passes over the gradients. The optimiser stays torch's: groups, state, checkpoints.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qhyer.nn import nvrtc

FILE = "adamw.cu"
CHUNK, THREADS = 2048, 256  # as in adamw.cu
# Tensors of a table, for arguments of 4 KB, which all GPUs take, of 8 and of 32. The smallest is taken that holds all
# tensors of an optimiser: a launch begins when the one before has ended, however little either has to do.
SIZES = (56, 120, 448)


@functools.cache
def table(tensors: int) -> type[ctypes.Structure]:
    class Table(ctypes.Structure):
        pointers = ("parameter", "gradient", "mean", "square", "rate", "step")
        _fields_ = (
            *((name, ctypes.c_void_p * tensors) for name in pointers),
            ("size", ctypes.c_longlong * tensors),
            ("decay", ctypes.c_float * tensors),
            ("first", ctypes.c_int * tensors),
        )

    return Table


def size_for(tensors: int, room: int) -> int:
    """Of a table, where kernels may have so many bytes of arguments: 64 are other than a table."""
    sizes = [size for size in SIZES if ctypes.sizeof(table(size)) + 64 <= room]
    return next((size for size in sizes if size >= tensors), sizes[-1])


def options(tensors: int) -> tuple[str, ...]:
    return (f"-DTENSORS={tensors}",)


def dense(tensor: Tensor) -> bool:
    """Whether its numbers fill their stretch of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def alike(one: Tensor, two: Tensor) -> bool:
    """Whether their numbers lie in the same order. What the step along a dimension of one number is does not matter:
    torch leaves there whatever came about."""
    steps = [[stride for stride, size in zip(t.stride(), t.shape) if size != 1] for t in (one, two)]
    return one.shape == two.shape and steps[0] == steps[1]


def works(device: torch.device, tensors: int = SIZES[0]) -> bool:
    return nvrtc.works(nvrtc.source(FILE), options(tensors), device, "torch's own AdamW steps")


class Step:
    """The step of one optimiser, AdamW or Adam without decay, on CUDA and with its state in place."""

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
        self.optimizer, self.clip = optimizer, clip
        self.made: list[tuple[Any, int, int]] | None = None  # by `norm`, for the step after it
        learned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # The kernels' counters: of the norm, then of each tensor. Zero now and after every kernel; made here, since
        # what is made while a graph is recorded is zero only once that graph has run.
        self.done = torch.zeros(1 + len(learned), dtype=torch.int32, device=learned[0].device)

    def suits(self) -> bool:
        """Not at the first step, when torch makes the moments; nor where QHYER_ADAMW=torch says no, or
        QHYER_TRITON=0 to all kernels."""
        optimizer = self.optimizer
        device = optimizer.param_groups[0]["params"][0].device
        known = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
        off = os.environ.get("QHYER_ADAMW") == "torch" or os.environ.get("QHYER_TRITON") == "0"
        if device.type != "cuda" or not known or off:
            return False
        settings = [
            tuple(group[name] for name in ("betas", "eps", "amsgrad", "maximize")) for group in optimizer.param_groups
        ]
        (betas, _eps, *others) = settings[0]
        if any(each != settings[0] for each in settings) or any(others):
            return False
        if not all(isinstance(beta, float) and beta > 0.0 for beta in betas):
            return False
        for group, parameter in self._learned():
            state = optimizer.state.get(parameter)
            if not state or not isinstance(group["lr"], Tensor):
                return False
            decoupled = isinstance(optimizer, torch.optim.AdamW) or group["weight_decay"] == 0.0
            assert parameter.grad is not None
            tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            read = (*tensors, group["lr"], state["step"])
            if not decoupled or not all(t.is_cuda and t.dtype == torch.float32 for t in read):
                return False
            # Number by number, in the order of memory: any, as long as it is the same in all four.
            if not dense(parameter) or not all(alike(parameter, tensor) for tensor in tensors):
                return False
        here = torch.cuda.current_device() == device.index
        if not here or torch.version.hip is not None:
            return False
        return works(device, self._size())

    def _learned(self) -> Iterator[tuple[dict, Tensor]]:
        for group in self.optimizer.param_groups:
            yield from ((group, parameter) for parameter in group["params"] if parameter.grad is not None)

    def _size(self) -> int:
        """Of its tables, whether or not all of its parameters have a gradient."""
        device = self.done.device
        return size_for(len(self.done) - 1, nvrtc.room(device) if device.type == "cuda" else 4096)

    def tables(self) -> list[tuple[Any, int, int]]:
        """Of all that has a gradient, with how many tensors and blocks each has."""
        made: list[tuple[Any, int, int]] = []
        size = self._size()
        for group, parameter in self._learned():
            if not made or made[-1][1] == size:
                made.append((table(size)(), 0, 0))
            these, count, blocks = made[-1]
            state = self.optimizer.state[parameter]
            pointers = dict(
                parameter=parameter, gradient=parameter.grad, mean=state["exp_avg"], square=state["exp_avg_sq"],
                rate=group["lr"], step=state["step"],
            )  # fmt: skip
            for name, tensor in pointers.items():
                getattr(these, name)[count] = tensor.data_ptr()
            these.size[count], these.decay[count] = parameter.numel(), group["weight_decay"]
            these.first[count] = blocks
            made[-1] = (these, count + 1, blocks + max(1, math.ceil(parameter.numel() / CHUNK)))
        return made

    def norm(self) -> Tensor:
        """Of all gradients together. They stay as they are: `step` scales them."""
        made = self.made = self.tables()
        total = sum(blocks for _, _, blocks in made)
        if not made:
            return torch.zeros((), device=self.done.device)
        sums, norm = (torch.empty(size, device=self.done.device) for size in (total, ()))
        at = 0
        for these, count, blocks in made:
            self._kernel("squares", these)((blocks, 1, 1), THREADS, these, count, sums, at, total, self.done, norm)
            at += blocks
        return norm

    @torch.no_grad()
    def step(self, norm: Tensor | None) -> None:
        """With a norm, as if gradients had been scaled to the greatest one allowed."""
        made, self.made = self.made or self.tables(), None
        (beta1, beta2), eps = (self.optimizer.param_groups[0][name] for name in ("betas", "eps"))
        most = self.clip if self.clip is not None and norm is not None else -1.0
        at = 1
        for these, count, blocks in made:
            self._kernel("adamw", these)(
                (blocks, 1, 1), THREADS, these, count, self.done[at:],
                self.optimizer.param_groups[0]["lr"] if norm is None else norm,
                float(most), beta1, beta2, math.log(beta1), math.log(beta2), eps,
            )  # fmt: skip
            at += count

    def _kernel(self, name: str, these: Any) -> nvrtc.Kernel:
        device = self.optimizer.param_groups[0]["params"][0].device
        return nvrtc.load(nvrtc.source(FILE), options(len(these.first)), device)[name]
