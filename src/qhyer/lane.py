"""A run's own place on a device, so that several runs can take turns without touching one another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from qhyer.streams import Own


class Lane:
    """torch's global generators as this run left them and, on CUDA, a stream of its own.

    Losses draw dropout and noise from torch's global generators. Whatever a run does, it does inside `turn()`: there
    the global generators are the run's, afterwards they are again what the caller had.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.cpu_state = torch.Generator().manual_seed(seed).get_state()
        if device.type == "cuda":
            # A state object of its own rather than a copy of its numbers: a captured graph reads its offset from a
            # tensor of that object, and two graphs in flight must not read the same one.
            self.cuda_state = torch.Generator(device).manual_seed(seed)
            self.own = Own(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))  # data and weights are on their way there

    @property
    def stream(self) -> torch.cuda.Stream:
        return self.own.stream

    def join(self, other: Lane) -> None:
        """On the other's stream from now on, which waits for what is on its way on this one's."""
        if self.device.type == "cuda" and self is not other:
            other.stream.wait_stream(self.stream)
            self.own = other.own

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.cpu_state)
        try:
            with self._cuda_turn() if self.device.type == "cuda" else contextlib.nullcontext():
                yield
        finally:
            self.cpu_state = torch.get_rng_state()
            torch.set_rng_state(before)

    @contextlib.contextmanager
    def _cuda_turn(self) -> Iterator[None]:
        default = default_cuda_generator(self.device)
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(self.cuda_state)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            self.cuda_state = default.graphsafe_get_state()
            default.graphsafe_set_state(before)


def keep(generator: torch.Generator) -> Callable[[], object]:
    """How to put this generator back to where it is now."""
    if generator.device.type == "cuda":
        copy = generator.clone_state()  # another state object: the one in a broken capture stays marked as capturing
        return lambda: generator.graphsafe_set_state(copy)
    state = generator.get_state()
    return lambda: generator.set_state(state)


_abandoned: list[torch.cuda.CUDAGraph] = []


def abandon(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], device: torch.device) -> None:
    """After a failed capture. One that CUDA broke off leaves the allocator waiting for its end, through a pointer to
    the graph."""
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    except RuntimeError:
        return  # only Python raised: the capture has ended in order
    _abandoned.append(graph)


def default_cuda_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
