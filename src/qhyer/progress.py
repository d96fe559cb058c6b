"""Progress of long work: a bar on a terminal, plain lines anywhere else (logs, pipes, batch systems)."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

Listener = Callable[[int, int], None]
"""gets how much is done, and of how much"""
EVERY_S = 1.0  # between two words to a listener

_listener: Listener | None = None


@contextlib.contextmanager
def listened(listener: Listener) -> Iterator[None]:
    """Whatever shows its progress within, quiet or not, tells the listener too: at first, about once a second, and at
    the end."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


class Progress:
    """with Progress("training", total) as p: p.advance(done); p.show(done, {"loss": 1.2})"""

    def __init__(self, description: str, total: int, quiet: bool = False, start: int = 0, every: float = 10.0) -> None:
        self.description, self.total, self.quiet, self.start, self.every = (
            description,
            total,
            quiet,
            start,
            every,
        )
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> Progress:
        self.begun = self.last_line = self.last_draw = self.last_word = time.monotonic()
        self.listener = _listener
        if self.listener is not None:
            self.listener(self.start, self.total)
        if not self.quiet and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self.bar = RichProgress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
            )
            self.bar.start()
            self.task = self.bar.add_task(self.description, total=self.total, completed=self.start, note="")
        elif not self.quiet:
            print(f"{self.description}: {self.start} of {self.total}", flush=True)
        return self

    def advance(self, done: int) -> None:
        """Cheap enough for every step: drawn at most ten times a second."""
        if self.listener is not None:
            now = time.monotonic()
            if now - self.last_word >= EVERY_S or done == self.total:
                self.last_word = now
                self.listener(done, self.total)
        if self.bar is not None:
            now = time.monotonic()
            if now - self.last_draw > 0.1 or done == self.total:
                self.last_draw = now
                self.bar.update(self.task, completed=done)

    def show(self, done: int, values: dict[str, float] | None = None) -> None:
        """The latest values: beside the bar, or as a line at most every few seconds."""
        values = values or {}
        text = "  ".join(f"{name} {value:.3g}" for name, value in list(values.items())[:4])
        if self.bar is not None:
            self.bar.update(self.task, completed=done, note=text)
        elif not self.quiet:
            now = time.monotonic()
            if now - self.last_line >= self.every or done == self.total:
                self.last_line = now
                rate = (done - self.start) / max(now - self.begun, 1e-9)
                print(f"{self.description}: {done} of {self.total}  {rate:.3g}/s  {text}", flush=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False)
        elif not self.quiet:
            print(text, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
