"""How far many runs are: which are under way, what is left of them, and how long that may take.

A few lines that are redrawn where there is a terminal; elsewhere a plain line when a run begins, and one now and then,
on stderr: what is written to stdout may be read by another program.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console

from qhyer.launch import BEGUN, LOST, TOLD

STARTING, TRAINING, EVALUATING = "starting", "training", "evaluating"
EVERY_S, AT_MOST_S = 30.0, 300.0  # between two plain lines: longer and longer, up to this
SHOWN = 10  # runs under way that are named; of more, how many


@dataclass
class Task:
    """A run as it is known here."""

    name: str
    kind: Hashable
    """runs of one kind take about as long"""
    updates: int
    """those that are left"""
    evaluated: bool = True
    under_way: bool = False
    over: bool = False
    failed: bool = False
    doing: str = STARTING
    done: int = 0
    of: int = 0
    since: float = 0.0
    """when it began to do this, and with how much done"""
    first: int = 0
    heard: float = 0.0
    spent: dict[str, tuple[float, int]] = field(default_factory=dict)
    """what it did -> seconds, and how many updates or episodes in them"""

    def begin(self, doing: str, done: int, of: int, now: float) -> None:
        if self.doing == STARTING and doing != STARTING:
            self.spent[STARTING] = now - self.since, 1
        self.doing, self.done, self.of, self.since, self.first, self.heard = doing, done, of, now, done, now

    def hear(self, doing: str, done: int, of: int, now: float) -> None:
        if doing != self.doing:
            self.begin(doing, done, of, now)
        self.done, self.of, self.heard = done, of, now
        self.spent[doing] = now - self.since, done - self.first

    def text(self) -> str:
        return f"{self.doing} {self.done:,} of {self.of:,}" if self.of else self.doing


class Paces:
    """Seconds for an update, for an episode and for a start, by the runs that were seen at it."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        sums: dict[tuple[Hashable, str], tuple[float, int]] = {}
        self.episodes: dict[Hashable, int] = {}
        for task in tasks:
            for doing, (seconds, count) in task.spent.items():
                for key in ((task.kind, doing), (None, doing)):
                    before = sums.get(key, (0.0, 0))
                    sums[key] = before[0] + seconds, before[1] + count
            if task.doing == EVALUATING and task.of:
                self.episodes[task.kind] = self.episodes[None] = task.of
        self.each = {key: seconds / count for key, (seconds, count) in sums.items() if count}

    def of(self, kind: Hashable, doing: str) -> float | None:
        """Of this kind of runs, or else of all."""
        return self.each.get((kind, doing), self.each.get((None, doing)))

    def left(self, task: Task, now: float) -> float | None:
        """Seconds until a run is over, as far as that can be told."""
        updates = task.updates if task.doing == STARTING else task.of - task.done if task.doing == TRAINING else 0
        train, evaluate = self.of(task.kind, TRAINING), self.of(task.kind, EVALUATING)
        if train is None and updates:
            return None
        seconds = updates * (train or 0.0)
        if task.evaluated and evaluate is not None:
            episodes = self.episodes.get(task.kind, self.episodes.get(None, 0))
            seconds += evaluate * (task.of - task.done if task.doing == EVALUATING else episodes)
        if task.doing == STARTING:
            seconds += self.of(task.kind, STARTING) or 0.0
        return max(0.0, seconds - (now - task.heard if task.under_way else 0.0))


def roughly(seconds: float) -> str:
    """Two minutes, not 118.3 seconds."""
    sizes = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"), (1.0, "second"))
    size, name = next((each for each in sizes if seconds >= 1.5 * each[0]), sizes[-1])
    count = max(1.0, seconds / size)
    text = f"{count:.1f}" if size >= 3600.0 and count < 10 else f"{count:.0f}"
    return f"{text} {name}{'' if text == '1' else 's'}"


class Watch:
    """with Watch(tasks, console) as watch: launch(..., hear=watch.hear); watch.over(index); watch.say("..."). `alone`:
    runs are made one after the other in this process, and show their own progress."""

    def __init__(
        self,
        tasks: Sequence[Task],
        console: Console,
        *,
        alone: bool = False,
        every: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tasks, self.console, self.alone, self.every, self.clock = tasks, console, alone, every, clock
        self.lock = threading.Lock()
        self.closed = threading.Event()
        self.thread: threading.Thread | None = None
        self.live: Any = None

    def __enter__(self) -> Watch:
        if self.alone:
            return self
        screen = self._screen()
        if screen is not None:
            from rich.live import Live

            drawn = functools.partial(self._drawn, screen)
            self.live = Live(console=screen, get_renderable=drawn, refresh_per_second=2, transient=True)
            self.live.start()
        else:
            self.thread = threading.Thread(target=self._now_and_then, daemon=True)
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed.set()
        if self.thread is not None:
            self.thread.join()
        if self.live is not None:
            self.live.stop()

    def _screen(self) -> Console | None:
        """Where lines can be redrawn: the terminal that the results go to, so that both share it, or that of stderr."""
        if sys.stdout.isatty():
            screen = self.console
        elif sys.stderr.isatty():
            screen = Console(stderr=True, highlight=False)
        else:
            return None
        return None if screen.is_dumb_terminal else screen

    # --------------------------------------------------------------------------------------------- what is heard

    def hear(self, index: int, event: str, told: Any) -> None:
        """From `launch`."""
        now, task = self.clock(), self.tasks[index]
        with self.lock:
            if task.over:
                return
            if event in (BEGUN, LOST):
                task.under_way = event == BEGUN
                task.begin(STARTING, 0, 0, now)
            elif event == TOLD:
                doing, done, of = told
                task.hear(doing, done, of, now)
        if event == BEGUN and self.live is None and not (self.alone and len(self.tasks) == 1):
            self._line(f"begun: {task.name}; {self.summary()}")

    def over(self, index: int, failed: bool = False) -> None:
        task = self.tasks[index]
        with self.lock:
            task.over, task.under_way, task.failed = True, False, failed

    def say(self, text: str) -> None:
        """A line that stays, above those that are redrawn."""
        self.console.print(text, soft_wrap=True)

    # --------------------------------------------------------------------------------------------- what is shown

    def left(self) -> tuple[float | None, bool]:
        """Seconds until all are over, if those that wait are begun in their order as others end; and whether
        evaluations are in it."""
        now = self.clock()
        running = [task for task in self.tasks if task.under_way]
        waiting = [task for task in self.tasks if not task.under_way and not task.over]
        paces = Paces(self.tasks)
        seconds = [paces.left(task, now) for task in (*running, *waiting)]
        known = [value for value in seconds if value is not None]
        counted = not any(task.evaluated for task in (*running, *waiting)) or paces.of(None, EVALUATING) is not None
        if not running or len(known) < len(seconds):
            return None, counted
        ends = known[: len(running)]
        heapq.heapify(ends)
        for value in known[len(running) :]:
            heapq.heapreplace(ends, ends[0] + value)
        return max(ends), counted

    def summary(self) -> str:
        """What is left, in a line."""
        with self.lock:
            over, failed = sum(task.over for task in self.tasks), sum(task.failed for task in self.tasks)
            running = sum(task.under_way for task in self.tasks)
            seconds, counted = self.left()
        texts = [f"{over} of {len(self.tasks)} over" + (f" ({failed} failed)" if failed else "")]
        texts += [f"{running} under way", f"{len(self.tasks) - over - running} to begin"]
        if seconds is not None and (counted or seconds > 0):
            texts.append(f"about {roughly(seconds)} left" + ("" if counted else ", evaluations not counted"))
        return ", ".join(texts)

    def under_way(self) -> list[tuple[str, str]]:
        """The runs that are, each with what it does."""
        with self.lock:
            found = [(task.name, task.text()) for task in self.tasks if task.under_way]
        more = len(found) - SHOWN
        return found[:SHOWN] + ([(f"and {more} more", "")] if more > 0 else [])

    def _drawn(self, screen: Console) -> Any:
        from rich.text import Text

        found, lines = self.under_way(), []
        pad = max((len(text) for _, text in found), default=0)
        room = screen.width - pad - 3
        for name, text in found:  # of a long name the end, which tells runs apart
            lines.append(f"{text:<{pad}}  {name if len(name) <= room else '…' + name[len(name) - room :]}")
        return Text("\n".join([*lines, self.summary()]), no_wrap=True, overflow="ellipsis")

    def _now_and_then(self) -> None:
        pause = self.every
        while not self.closed.wait(pause):
            pause = min(2 * pause, AT_MOST_S)
            self._line("; ".join([self.summary(), *(" ".join(each).strip() for each in self.under_way())]))

    def _line(self, text: str) -> None:
        with contextlib.suppress(OSError):  # whoever read it has seen enough
            print(text, file=sys.stderr, flush=True)
