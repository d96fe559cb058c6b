"""Independent work side by side on a GPU.

The kernels of one update are small and many of them leave most of the chip idle. Where two parts of a loss do not
depend on each other, `concurrently` puts them on two CUDA streams; autograd runs each part's backward on the stream of
its forward, and a captured graph keeps the two as parallel branches. Elsewhere it is two calls, one after the other.
`side_by_side` is the same of any number, `all_at_once` the sum of losses that are computed so, `fork` and `forked` the
same where autograd does not look.

What is not wanted soon need not be waited for: `begin` starts work whose result is asked for later, and `aside` puts
work that only the end of a backward pass waits for (sums and products that make gradients of parameters) on streams
of its own, where whoever runs that pass says that it will wait (`asides`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # inside vmap, where seeds are stacked and kernels large enough

from qhyer import driver

First = TypeVar("First")
Second = TypeVar("Second")
SOON, LATER = -1, 0  # priorities: who comes first where kernels of several streams are ready; in a graph, too
AT_LEISURE = ("asides", "steps")  # which nobody waits for before the end
ASIDES = 3  # streams of what is put aside: many small kernels in a row, few of which fill the device
HELD = 2**28  # bytes that work put aside may keep from being used again; a block of 256 windows reads 210 MB so
POOLED = 32  # streams of a priority that torch gives out in turn, and then the same ones again

_in_use: set[int] = set()  # streams that are somebody's own, by their address
_made: set[int] = set()  # those of them that are not torch's
_spare: dict[tuple[torch.device, int], list[torch.cuda.Stream]] = {}  # made before, and given back
_partners: dict[tuple[torch.device, int], dict[str, torch.cuda.Stream]] = {}  # of a stream


def take(device: torch.device, priority: int) -> torch.cuda.Stream:
    """A stream that nobody else here has until it is given back: one of torch's, or a new one when all of these are
    taken, as four seeds do.

    Two parts of one run on the same stream would wait for each other, and use memory again that is still read. Two
    runs that had one in common would share what cuBLAS keeps for every stream, in graphs that run at the same time.
    """
    for _ in range(POOLED):
        stream = torch.cuda.Stream(device, priority=priority)
        if stream.cuda_stream not in _in_use:
            break
    else:
        spare = _spare.setdefault((stream.device, priority), [])
        stream = spare.pop() if spare else _new(stream.device, priority)
    _in_use.add(stream.cuda_stream)
    return stream


def reserve(device: torch.device, count: int = 8) -> None:
    """Before a graph is recorded: so many streams can be taken of each priority with none being made meanwhile."""
    for priority in (SOON, LATER):
        pooled = [torch.cuda.Stream(device, priority=priority) for _ in range(POOLED)]
        spare = _spare.setdefault((pooled[0].device, priority), [])
        missing = count - len(spare) - sum(stream.cuda_stream not in _in_use for stream in pooled)
        spare += [_new(pooled[0].device, priority) for _ in range(missing)]


def _new(device: torch.device, priority: int) -> torch.cuda.Stream:
    """One more than torch has; where the driver cannot be asked, one of these for the second time."""
    place = driver.new_stream(device, priority)
    if place is None:
        return torch.cuda.Stream(device, priority=priority)
    _made.add(place)
    return torch.cuda.ExternalStream(place, device=device)


def give_back(stream: torch.cuda.Stream, priority: int) -> None:
    """With all partners it has had. Whoever gives it back uses it no more."""
    for name, partner in _partners.pop((stream.device, stream.cuda_stream), {}).items():
        give_back(partner, _priority(name))
    _in_use.discard(stream.cuda_stream)
    if stream.cuda_stream in _made:
        _spare[stream.device, priority].append(stream)


class Own:
    """A stream of its own, with its partners, for as long as somebody has this."""

    def __init__(self, device: torch.device) -> None:
        self.stream = take(device, SOON)
        weakref.finalize(self, give_back, self.stream, SOON).atexit = False


def _priority(name: str) -> int:
    return LATER if name.partition(" ")[0] in AT_LEISURE else SOON


def _beside(stream: torch.cuda.Stream, name: str) -> torch.cuda.Stream:
    """The partner of a stream for this kind of work. One each, so that neither runs that share a GPU nor two parts of
    one run that are beside the same stream wait for one another."""
    partners = _partners.setdefault((stream.device, stream.cuda_stream), {})
    if name not in partners:
        # A parameter that two parts use has its gradient summed on one of their streams, on purpose: torch need not
        # warn.
        hush = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)  # since torch 2.10
        if hush is not None:
            hush(False)
        partners[name] = take(stream.device, _priority(name))
    return partners[name]


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, (str, Iterator)):
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
    beside = _beside(here, name)
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


def _report(value: Any, reader: torch.cuda.Stream) -> None:
    """To the allocator: who reads this, too. Not while a graph is captured: see `fork`."""
    if not torch.cuda.is_current_stream_capturing():
        for tensor in _tensors(value):
            tensor.record_stream(reader)


def fork(
    name: str, first: Callable[[], First], second: Callable[[], Second], device: torch.device
) -> tuple[First, Second]:
    """`concurrently` where autograd does not look: inside one operation, forward or backward, without gradient, or
    where each of the two has a pass of its own from beginning to end.

    What `first` reads need not be reported to the allocator: whoever calls holds it until the two have met again. Nor
    what it makes while a graph is captured, which has its memory to itself (and would not use reported memory again):
    its stream begins by waiting for this one. Elsewhere torch may have given that stream to somebody else, too.
    """
    if device.type != "cuda":
        return first(), second()
    here = torch.cuda.current_stream(device)
    beside = _beside(here, name)
    beside.wait_stream(here)
    try:
        with torch.cuda.stream(beside):
            one = first()
        two = second()
    finally:
        here.wait_stream(beside)  # after an error, too: a capture does not end in order before they have met
    _report(one, here)
    return one, two


def forked(name: str, calls: Sequence[Callable[[], First]], device: torch.device) -> list[First]:
    """`fork` of any number."""
    if len(calls) < 2:
        return [call() for call in calls]
    one, others = fork(f"{name} {len(calls)}", calls[0], lambda: forked(name, calls[1:], device), device)
    return [one, *others]


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


# ------------------------------------------------------------------------------------------------ not wanted at once


class Begun(Generic[First]):
    """What `begin` has started. The first who asks for it, and all after it on that stream, wait."""

    def __init__(self, value: First, stream: torch.cuda.Stream | None) -> None:
        self.value, self.stream = value, stream

    def __call__(self) -> First:
        if self.stream is not None:
            here = torch.cuda.current_stream(self.stream.device)
            here.wait_stream(self.stream)
            _report(self.value, here)
        return self.value


def begin(name: str, call: Callable[[], First], device: torch.device) -> Begun[First]:
    """Starts work that reads parameters and buffers alone. Somebody must ask for its result before this update ends."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return Begun(call(), None)
    here = torch.cuda.current_stream(device)
    beside = _beside(here, name)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        return Begun(call(), beside)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Asides:
    """The streams of what is put aside, in turn, and what it still reads. Memory that is given back is used again by
    whoever comes next on the stream it came from, who does not know of these: it is given back once that one has
    waited."""

    def __init__(self, device: torch.device) -> None:
        self.home = torch.cuda.current_stream(device)
        self.streams = [_beside(self.home, f"asides {i}") for i in range(ASIDES)]
        self.turn = 0
        self.reads: deque[tuple[torch.cuda.Event, list[Tensor], set[torch.cuda.Stream]]] = deque()
        self.held = 0
        self.seen: set[int] = set()  # parameters, by their place
        self.made: dict[int, tuple[torch.cuda.Event, torch.cuda.Stream]] = {}  # results, by their place

    def run(self, call: Callable[[], First], reads: Iterable[Tensor], of: Tensor) -> First:
        here = torch.cuda.current_stream(self.home.device)
        if of.data_ptr() in self.seen:
            self.wait(here)
            return call()
        self.seen.add(of.data_ptr())
        kept, makers = list(reads), set()
        stream = self.streams[self.turn % ASIDES]
        self.turn += 1
        stream.wait_stream(here)
        for tensor in kept:
            if (made := self.made.get(_place(tensor))) is not None:  # by another of these streams, and perhaps not yet
                stream.wait_event(made[0])
                makers.add(made[1])
        with torch.cuda.stream(stream):
            value = call()
            event = stream.record_event()
        self.made |= {_place(tensor): (event, stream) for tensor in _tensors(value)}
        self.reads.append((event, kept, makers))
        self.held += sum(tensor.nbytes for tensor in kept)
        while self.held > HELD:
            event, kept, makers = self.reads.popleft()
            self.held -= sum(tensor.nbytes for tensor in kept)
            for waiting in {here, self.home, *makers}:
                waiting.wait_event(event)
        return value

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Not for those without work: a capture knows nothing of them, and may not wait for them."""
        for each in self.streams[: self.turn]:
            stream.wait_stream(each)


_running: _Asides | None = None


@contextlib.contextmanager
def asides(device: torch.device, allowed: bool = True) -> Iterator[None]:
    """For a backward pass of which nobody reads a gradient of a parameter before this has ended. Not where they are
    read on their way: by a compiled pass, or where they are added to those of an earlier one. One pass at a time in a
    process, as trainings take turns (`Lane`): autograd's own threads must see it."""
    global _running
    if device.type != "cuda" or not allowed or _running is not None:
        yield
        return
    running = _running = _Asides(device)
    try:
        yield
    finally:
        _running = None
        running.wait(running.home)


Put = Callable[[Callable[[], Any], Sequence[Tensor], Tensor], Any]
"""`aside` or `at_once`: what a function does with its sums, of which it cannot tell whether they are gradients of
parameters themselves, or (as that of A = -exp(A_log)) go on through autograd"""


def at_once(call: Callable[[], First], reads: Iterable[Tensor], of: Tensor) -> First:
    return call()


def aside(call: Callable[[], First], reads: Iterable[Tensor], of: Tensor) -> First:
    """What `call` makes of `reads`, which nobody changes, at once, or within `asides` at some time before it ends: the
    gradient `of` a parameter, in its dtype and order, and perhaps of others that are used with it. If that is used
    twice in a pass, autograd adds its gradients before the end: the second waits for the first."""
    return call() if _running is None else _running.run(call, reads, of)
