"""What a GPU would do side by side, on a CPU: streams with clocks, and memory that is given back as torch gives it.

Everything is computed in its turn, and each operation and each launch of a Triton kernel (interpreted) is noted on the
stream it would be on. `Timeline.overtaken` then says which memory could have been used again while it was still read.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from qhyer import driver, streams

# Whoever is imported only now would keep the functions that stand in for those of `streams`.
for name in ("agents.qhyer", "nn.flow_triton", "nn.hybrid_triton"):
    importlib.import_module(f"qhyer.{name}")
GPU = torch.device("cuda", 0)


class Line:
    """A stream. Its clock: how far each stream has been when what comes next begins."""

    device = GPU

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.clock: collections.Counter[Line] = collections.Counter()

    def wait_stream(self, other: Line) -> None:
        self.clock |= other.clock

    def record_event(self) -> collections.Counter[Line]:
        return self.clock.copy()

    def wait_event(self, event: collections.Counter[Line]) -> None:
        self.clock |= event

    def tick(self) -> None:
        self.clock[self] += 1

    def __repr__(self) -> str:
        return f"stream {self.cuda_stream}"


def tensors(value: Any) -> Iterator[Tensor]:
    yield from (leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor))


class Timeline(TorchDispatchMode):
    """Between `with timeline`, what is done is noted. Streams are lines from the moment this is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.pools = {priority: [Line(100 * (1 - priority) + i) for i in range(streams.POOLED)] for priority in (-1, 0)}
        self.drawn = dict.fromkeys(self.pools, 0)
        self.others: dict[int, Line] = {}  # beyond torch's
        self.current = [Line(1)]
        self.partners: list[tuple[Line, str, Line]] = []
        self.begun: dict[str, tuple[Line, Line, collections.Counter, collections.Counter]] = {}
        self.live: dict[int, dict[str, Any]] = {}
        self.free: dict[Line, list[dict[str, Any]]] = collections.defaultdict(list)
        self.overtaken: set[str] = set()
        self.on = False
        for name in ("_in_use", "_made", "_spare", "_partners"):
            monkeypatch.setattr(streams, name, type(getattr(streams, name))())
        monkeypatch.setattr(torch.cuda, "Stream", self._draw)
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda place, device: self.others[place])
        monkeypatch.setattr(driver, "new_stream", self._another)
        instead = {"fork": self.fork, "concurrently": self.concurrently, "begin": self.begin, "asides": self.asides}
        for module in [module for name, module in sys.modules.items() if name.startswith("qhyer.")]:
            for name, call in instead.items():
                if getattr(module, name, None) is getattr(streams, name) and module is not streams:
                    monkeypatch.setattr(module, name, call)
        for name, call in instead.items():
            monkeypatch.setattr(streams, name, call)
        from triton.runtime import interpreter

        execute = interpreter.GridExecutor.__call__

        def launch(executor: Any, *arguments: Any, **others: Any) -> None:
            self.use([*arguments, *others.values()], executor.fn.__name__)
            with torch.utils._python_dispatch._disable_current_modes():
                execute(executor, *arguments, **others)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)

    # ------------------------------------------------------------------------------------------------------ streams

    def _draw(self, device: torch.device, priority: int) -> Line:
        self.drawn[priority] += 1
        return self.pools[priority][(self.drawn[priority] - 1) % streams.POOLED]

    def _another(self, device: torch.device, priority: int) -> int:
        assert not self.on, "a stream was made while a graph was recorded"
        number = 1000 + len(self.others)
        self.others[number] = Line(number)
        return number

    @property
    def here(self) -> Line:
        return self.current[-1]

    @contextlib.contextmanager
    def upon(self, line: Line) -> Iterator[None]:
        self.current.append(line)
        try:
            yield
        finally:
            self.current.pop()

    def _partner(self, name: str) -> Line:
        partner: Any = streams._beside(self.here, name)  # type: ignore[arg-type]
        partner.wait_stream(self.here)
        self.partners.append((self.here, name, partner))
        return partner

    def fork(self, name: str, first: Callable, second: Callable, device: torch.device) -> tuple:
        here, beside = self.here, self._partner(name)
        with self.upon(beside):
            one = first()
        self.begun[name] = here, beside, here.clock.copy(), beside.clock.copy()
        two = second()
        here.wait_stream(beside)
        return one, two

    def concurrently(self, name: str, first: Callable, second: Callable, inputs: Any) -> tuple:
        """A captured graph has its memory to itself: what is reported to the allocator changes nothing there."""
        return self.fork(name, first, second, GPU)

    def begin(self, name: str, call: Callable, device: torch.device) -> Callable:
        here, beside = self.here, self._partner(name)
        when = here.clock.copy()
        with self.upon(beside):
            value = call()
        self.begun[name] = here, beside, when, beside.clock.copy()

        def ask() -> Any:
            self.here.wait_stream(beside)
            return value

        return ask

    @contextlib.contextmanager
    def asides(self, device: torch.device, allowed: bool = True) -> Iterator[None]:
        self._partner("asides")
        yield

    # ------------------------------------------------------------------------------------------------------- memory

    def use(self, what: Any, by: str) -> None:
        if not self.on:
            return
        self.here.tick()
        for tensor in tensors(what):
            if (entry := self.live.get(tensor.untyped_storage()._cdata)) is not None:
                entry["uses"][self.here], entry["last"] = self.here.clock[self.here], by

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        self.use(given, str(func))
        for key in [key for key, entry in self.live.items() if entry["ref"].expired()]:
            entry = self.live.pop(key)
            self.free[entry["own"]].append(entry)
        for tensor in tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                self._allocate(storage, str(func))
        return out

    def _allocate(self, storage: torch.UntypedStorage, by: str) -> None:
        """Any block that this stream has had, and that is large enough, may be the one."""
        here, size = self.here, -(-max(1, storage.nbytes()) // 512)
        entry = {"ref": StorageWeakRef(storage), "own": here, "uses": {here: here.clock[here]}, "by": by, "last": by}
        self.live[storage._cdata] = entry | {"size": size}
        for old in self.free[here]:
            late = [line for line, at in old["uses"].items() if line is not here and here.clock[line] < at]
            if old["size"] >= size and late:
                self.overtaken.add(
                    f"made by {old['by']}, read by {old['last']} on {late}, used again by {by} on {here}"
                )
