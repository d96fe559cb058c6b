"""Independent work side by side on a GPU.

The kernels of one update are small and many of them leave most of the chip idle. Where two parts of a loss do not
depend on each other, `concurrently` puts them on two CUDA streams; autograd runs each part's backward on the stream of
its forward, and a captured graph keeps the two as parallel branches. Elsewhere it is two calls, one after the other.
`side_by_side` is the same of any number, `all_at_once` the sum of losses that are computed so, `fork` the same within
an operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # inside vmap, where seeds are stacked and kernels large enough

First = TypeVar("First")
Second = TypeVar("Second")


@functools.cache
def _beside(device: torch.device, stream: int, name: str) -> torch.cuda.Stream:
    """The partner of a stream for this kind of work. One each, so that neither runs that share a GPU nor two parts of
    one run that are beside the same stream wait for one another."""
    # A parameter that two parts use has its gradient summed on one of their streams, on purpose: torch need not warn.
    hush = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)  # since torch 2.10
    if hush is not None:
        hush(False)
    return torch.cuda.Stream(device)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def concurrently(
    name: str, first: Callable[[], First], second: Callable[[], Second], inputs: Iterable[Tensor]
) -> tuple[First, Second]:
    """Both results, that of `first` from the stream of this name.

    `inputs`: all that `first` reads, now or in its backward, and that was made for this pass outside of it; parameters
    stay where they are. One that is forgotten may be overwritten while it is still read.
    """
    inputs = list(inputs)
    if not inputs or not inputs[0].is_cuda or torch.compiler.is_compiling() or is_batchedtensor(inputs[0]):
        return first(), second()
    here = torch.cuda.current_stream(inputs[0].device)
    beside = _beside(inputs[0].device, here.cuda_stream, name)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        one = first()
    two = second()
    here.wait_stream(beside)
    # The allocator gives memory back to the stream it came from; it must know who else still reads it.
    for tensor in inputs:
        tensor.record_stream(beside)
    for tensor in _tensors(one):
        tensor.record_stream(here)
    return one, two


def fork(
    name: str, first: Callable[[], First], second: Callable[[], Second], device: torch.device
) -> tuple[First, Second]:
    """`concurrently` inside one operation, forward or backward, where autograd does not look.

    What `first` reads need not be reported to the allocator: the two meet again before it is given back. Nor what it
    makes while a graph is captured, which has its memory to itself (and would not use reported memory again): its
    stream begins by waiting for this one. Elsewhere torch may have given that stream to somebody else, too.
    """
    if device.type != "cuda":
        return first(), second()
    here = torch.cuda.current_stream(device)
    beside = _beside(device, here.cuda_stream, name)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        one = first()
    two = second()
    here.wait_stream(beside)
    if not torch.cuda.is_current_stream_capturing():
        for tensor in _tensors(one):
            tensor.record_stream(here)
    return one, two


def side_by_side(name: str, calls: Sequence[Callable[[], First]], inputs: Iterable[Tensor]) -> list[First]:
    """The results of all, each from a stream of its own but the last, which stays on this one; `inputs` as above."""
    inputs = list(inputs)
    if len(calls) < 2:
        return [call() for call in calls]
    one, others = concurrently(f"{name} {len(calls)}", calls[0], lambda: side_by_side(name, calls[1:], inputs), inputs)
    return [one, *others]


def all_at_once(
    losses: Sequence[Callable[[], tuple[Tensor, dict[str, Tensor]]]], inputs: Iterable[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of losses (scalar, metrics) of which none waits for another, and the metrics of all."""
    found = side_by_side("losses", losses, inputs)
    return sum((loss for loss, _ in found[1:]), found[0][0]), {k: v for _, metrics in found for k, v in metrics.items()}
